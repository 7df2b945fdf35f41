/*
 * geometry: the size of every region of a group, the names of all its objects, and the checks that
 * these are possible.
 *
 * Everything is known before any object is created, so that a group can be printed, compared with
 * free memory, and refused with numbers.
 *
 * Threads: any; nothing here has state.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_GEOMETRY_H
#define COX_CHANNEL_GEOMETRY_H

#include "channel/attach/attach.h"
#include "layout.h"

/* Characters of a group's name, at most: the longest suffix must still fit NAME_MAX. */
#define COX_NAME_SIZE_MAX 128
/* A buffer for any object name of a group. */
#define COX_OBJECT_NAME_SIZE 256

#define COX_DEPTH_DEFAULT 4
#define COX_LEGACY_SLOT_STRIDE (UINT64_C(512) << 10)

/* The choices of a caller; 0 means the default. */
struct cox_geometry_choice {
    uint32_t depth;
    /* NULL: cox_attach_default */
    const struct cox_attach_mode *mode;
    /* bytes of the whole region */
    uint64_t request_size[COX_CHANNEL_COUNT];
    /* bytes of the whole region */
    uint64_t response_size[COX_CHANNEL_COUNT];
    /* spin budget (spin.h); 0 where ranks have no state words, since these never spin */
    uint32_t spin_ns;
    /* no flight recorders of ranks (recorder.h) */
    bool no_recorder;
    /* ranks of the group are on other machines */
    bool mirrored;
};

/* Where the slots of a channel are. */
struct cox_geometry_slots {
    /* of the first, in the response region or in the memory of its rank */
    uint64_t offset;
    /* from one frame's slots to the next, and from one rank's to the next */
    uint64_t frame_stride, rank_stride;
};

struct cox_geometry {
    uint32_t rank_count;
    uint32_t depth;
    /* static storage */
    const struct cox_attach_mode *mode;
    uint32_t spin_ns;
    /* differs for every start of a group whose mode has serials; 0 for others */
    uint32_t serial;
    /* the memory of ranks ends with their flight recorders */
    bool recorder;
    /* ranks of the group are on other machines (worker/group/group_mirror.h) */
    bool mirrored;
    struct cox_layout_channel channels[COX_CHANNEL_COUNT];
    /* they follow from all of the above */
    struct cox_geometry_slots slots[COX_CHANNEL_COUNT];
};

/* Resolves defaults and checks.
 * Returns
 *   0
 *   COX_INVALID: err has the numbers: ranks outside 1 to COX_RANK_COUNT_MAX, depth outside 1 to
 *     COX_DEPTH_MAX or over that of the mode, or a region too small for its frames or slots
 */
int cox_geometry_resolve(uint32_t rank_count, const struct cox_geometry_choice *choice,
                         struct cox_geometry *ret_geometry, struct cox_error *err);
/* The same checks on numbers that came from another process; sets the slots. Returns 0 or
 * COX_CORRUPT. */
int cox_geometry_verify(struct cox_geometry *geometry, struct cox_error *err);

/* What a group takes of the machine. */
struct cox_attach_account cox_geometry_account(const struct cox_geometry *geometry);
/* Sizes in bytes: of all semaphore files; and what they and all regions take of /dev/shm together,
 * where a file takes whole pages. */
uint64_t cox_geometry_semaphore_bytes(const struct cox_geometry *geometry);
uint64_t cox_geometry_memory_bytes(const struct cox_geometry *geometry);

/* Sealed groups: size of the request memory, the offset in it at which the requests of a channel
 * begin, and the size of one rank's memory. */
uint64_t cox_geometry_request_memory_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_request_offset(const struct cox_geometry *geometry,
                                     enum cox_channel_id channel);
uint64_t cox_geometry_rank_memory_size(const struct cox_geometry *geometry);
/* The rank group (coxswain/group.h) of a sealed group: size of the words that one rank writes,
 * and of its values, both multiples of the page size; size of the wake memory, and the offset in it
 * at which the hints of the rank group begin. */
uint64_t cox_geometry_group_words_size(void);
uint64_t cox_geometry_group_payload_size(void);
/* The largest value of a rank that the memory has room for. */
uint32_t cox_geometry_group_value_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_wake_memory_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_group_hints_offset(void);
/* In a named group the memory of the rank group is a ring of windows, one for each time that the
 * ranks form their group (windows.h): size of one window, of all of them, and the offset of the
 * window of an incarnation. A window is a multiple of the page size. The accounts above include
 * only the window in use. 0: the mode has no windows. */
#define COX_GROUP_WINDOW_COUNT 16
uint64_t cox_geometry_group_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_group_object_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_group_offset(const struct cox_geometry *geometry, uint64_t incarnation);

/* Flight recorders (channel/recorder/recorder.h) are behind everything else, so that programs
 * without them need not know: of a sealed group each at the end of its rank's memory, of a named
 * one all at the end of the control region. The offset of a rank's recorder area there, a multiple
 * of the page size, and the sizes of these two objects with the areas, if the group has
 * recorders. */
uint64_t cox_geometry_recorder_offset(const struct cox_geometry *geometry, uint32_t rank);
uint64_t cox_geometry_control_object_size(const struct cox_geometry *geometry);
uint64_t cox_geometry_rank_object_size(const struct cox_geometry *geometry);

/* Frames and slots begin at multiples of this. */
#define COX_GEOMETRY_ALIGNMENT UINT64_C(64)

static inline uint64_t cox_geometry_align_down(uint64_t size)
{
    return size / COX_GEOMETRY_ALIGNMENT * COX_GEOMETRY_ALIGNMENT;
}

/* The frame of a sequence among `depth`. It runs several times per request and rank; with a power
 * of two, as usual, it needs no division. */
static inline uint64_t cox_geometry_frame(uint64_t sequence, uint32_t depth)
{
    return (depth & (depth - 1)) == 0 ? sequence & (depth - 1) : sequence % depth;
}

/* The offset of a slot in the response region, or in the memory of its rank, and the payload bytes
 * it holds. whole: rank 0 alone replies, and its payload may fill the region. */
static inline uint64_t cox_geometry_slot_offset(const struct cox_geometry *geometry,
                                                enum cox_channel_id channel, uint32_t rank,
                                                uint64_t sequence)
{
    const struct cox_geometry_slots *slots = &geometry->slots[channel];
    return slots->offset + slots->frame_stride * cox_geometry_frame(sequence, geometry->depth) +
           slots->rank_stride * rank;
}

static inline uint64_t cox_geometry_slot_capacity(const struct cox_geometry *geometry,
                                                  enum cox_channel_id channel, bool whole)
{
    const struct cox_layout_channel *c = &geometry->channels[channel];
    return (whole ? c->response_size : c->slot_stride) - COX_PREFIX_SIZE;
}

/* A group's name: 1 to COX_NAME_SIZE_MAX of letters, digits, '.', '_' and '-', not starting with a
 * dot. Returns 0 or COX_INVALID with the reason. */
int cox_name_check(const char *name, struct cox_error *err);

/* "execute", "shared_sync_link", "transfer", "recover_command", "execute_error" */
const char *cox_channel_name(enum cox_channel_id channel);

/* The four ends of a rank's two semaphore pairs. */
enum cox_wakeup {
    COX_WAKEUP_REQUEST_PRODUCE,  /* a frame of the rank is free;    worker posts, coordinator waits;
                                  starts at depth */
    COX_WAKEUP_REQUEST_CONSUME,  /* a request is there;             coordinator posts, worker waits;
                                  starts at 0 */
    COX_WAKEUP_RESPONSE_PRODUCE, /* a slot of the rank is free;     coordinator posts, worker waits;
                                  starts at depth */
    COX_WAKEUP_RESPONSE_CONSUME, /* a reply (or attach) is there; worker posts, coordinator waits;
                                  starts at 0 */
    COX_WAKEUP_COUNT,
};

/* The error channel has one pair for all ranks, with the wakeups of replies only. */
bool cox_wakeup_exists(enum cox_channel_id channel, enum cox_wakeup wakeup);

/* The prefix of the names of a group's channels, used as `name` below: the group's name, and the
 * serial if it has one. Python workers of MindIE-LLM have resource trackers that unlink, by name,
 * every region a worker had opened, some time after its death; the next group may have the name by
 * then. The control region has the group's name alone. Returns buffer. */
#define COX_NAME_SERIAL_SIZE 9 /* "_1a2b3c4d" */
const char *cox_name_objects(char buffer[COX_NAME_SIZE_MAX + 1], const char *name,
                             const struct cox_geometry *geometry);
/* The reverse, for an unknown serial. Returns the group's name, in buffer, and its serial; NULL:
 * these names have none. */
const char *cox_name_of_objects(char buffer[COX_NAME_SIZE_MAX + 1], const char *objects,
                                uint32_t *ret_serial);

/* Object names, each with its leading slash. buffer has COX_OBJECT_NAME_SIZE bytes and is returned.
 */
const char *cox_name_control(char *buffer, const char *name);
const char *cox_name_group(char *buffer, const char *name);
const char *cox_name_request(char *buffer, const char *name, enum cox_channel_id channel);
const char *cox_name_response(char *buffer, const char *name, enum cox_channel_id channel);
const char *cox_name_wakeup(char *buffer, const char *name, enum cox_channel_id channel,
                            enum cox_wakeup wakeup, uint32_t rank);

#endif
