/*
 * base: status codes, error texts, cleanup and time. All of Coxswain builds on this file; it
 * includes nothing of the project.
 *
 * Any process and any thread may call everything here. Nothing blocks, allocates or uses globals.
 * If the process dies, nothing is left.
 *
 * Results, in the whole library:
 *   0          success
 *   negative   an unexpected failure of the system: a negative errno, forwarded unchanged
 *   positive   an enum cox_status: a documented condition that the direct caller handles
 * Out-parameters are named ret_x, come last, and are untouched unless 0 is returned.
 */
#ifndef COX_BASE_H
#define COX_BASE_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Marks functions that the shared library exports; include/libcoxswain.map lists them. */
#define COX_PUBLIC __attribute__((visibility("default")))

/* Ranks in one group, at most. */
#define COX_RANK_COUNT_MAX 128

/* The logical channels of a group: first the two-way ones, last the one for fault reports. Each has
 * its own flow control, so that a pause or an error overtakes a blocked inference or pull. */
enum cox_channel_id {
    COX_CHANNEL_EXECUTE = 0,
    COX_CHANNEL_LINK = 1,
    COX_CHANNEL_TRANSFER = 2,
    COX_CHANNEL_RECOVER = 3,
    COX_CHANNEL_ERROR = 4,
};
#define COX_CHANNEL_COUNT 5
#define COX_TWO_WAY_COUNT 4

/* What the ranks of a step must agree on. A rank's reply has a digest of each
 * (cox_worker_set_digest, worker.h); ranks whose digests differ end the step with COX_DIVERGED. */
enum cox_digest {
    COX_DIGEST_SEQUENCES = 0, /* ids of the rows */
    COX_DIGEST_POSITIONS,     /* first position and number of tokens of each row */
    COX_DIGEST_BLOCKS,        /* block tables of the rows */
    COX_DIGEST_TOKENS,        /* sampled tokens, where the rank samples */
};
#define COX_DIGEST_COUNT 4

/* Type of a request whose bytes only its two ends interpret. Every other type is an ExecuteType of
 * executor.proto. */
#define COX_TYPE_OPAQUE 0xffffffffu
/* Only in the record of a frame: the opaque bytes are out of line, and the frame has an
 * ExecuteRequest with a handle to them. */
#define COX_TYPE_OPAQUE_LARGE 0xfffffffeu

/* How workers attach the memory of their group. */
enum cox_attach {
    COX_ATTACH_NAMED = 0,  /* by names in /dev/shm */
    COX_ATTACH_SEALED = 1, /* by fds, at the group's control socket; nothing has a name */
};

enum cox_status {
    COX_OK = 0,
    COX_TIMEOUT = 1, /* the deadline passed first */
    COX_PEER_DEAD,   /* a process that had to reply has died */
    COX_STALE,       /* based on a state that the other side does not have */
    COX_CLOSED,      /* stopped, or being stopped */
    COX_FULL,        /* every frame or block is in use: try again after the next completion */
    COX_LATE,        /* a rank has not yet replied to a request that has ended */
    COX_VERSION,     /* the other side has another version or geometry */
    COX_CORRUPT,     /* invalid bytes from another process */
    COX_DENIED,      /* an object with another owner, mode, size or type */
    COX_TOO_LARGE,   /* does not fit its destination */
    COX_NO_SPACE,    /* memory could not be reserved */
    COX_TAKEN,       /* the name belongs to a live group, the rank to a process */
    COX_ABORTED,     /* cancelled by the coordinator before it ran */
    COX_REJECTED,    /* a rank replied with an error of its own */
    COX_DEADLOCK,    /* a blocking call from inside a handler, refused */
    COX_BUSY,        /* already started, already registered */
    COX_INVALID,     /* an argument or input outside what is allowed */
    COX_NOT_FOUND,   /* a file, name or command that does not exist */
    COX_EXEC_FAILED, /* a worker's program could not be executed */
    COX_DIVERGED,    /* ranks that must agree do not */
    COX_STATE,       /* not legal in the present state */
    COX_EMPTY,       /* there is nothing to return */
    COX_UNSUPPORTED, /* the other side has no such operation */
    COX_STATUS_COUNT,
};

/* The release of the loaded library: "0.1.0". Static storage. version.h has that of the headers,
 * COX_VERSION_TEXT. */
COX_PUBLIC const char *cox_version(void);

/* The text of any result: an enum cox_status, or a negative errno. Never NULL; static storage or
 * the C library's. */
COX_PUBLIC const char *cox_status_text(int status);

/* A failure with its explanation: what was wrong, what was expected, what to do. Caller's memory.
 */
struct cox_error {
    /* as returned */
    int code;
    /* one sentence or a few, no newline at the end */
    char text[1024];
};

/* Resets err without writing all of its text. */
static inline void cox_error_clear(struct cox_error *err)
{
    err->code = 0;
    err->text[0] = '\0';
}

/* Writes code and text to err (NULL: nothing is written) and returns code, so that
 * `return cox_fail(err, COX_INVALID, "...")` is one line. If err->code is set already, keeps its
 * text: the first failure is the cause, and later ones come from clean-up. */
COX_PUBLIC int cox_fail(struct cox_error *err, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The one log hook. level as in syslog(3): 3 error, 4 warning, 6 information, 7 debug. text has no
 * newline and lives until the call returns. Called from any thread of the library; must not call
 * back into it. */
typedef void (*cox_log_fn)(void *context, int level, const char *text);

struct cox_log {
    /* NULL: no log */
    cox_log_fn fn;
    void *context;
};

/* Formats a text and passes it to the hook; a text longer than 1 KiB is cut off. Nothing happens
 * if log has no fn. */
COX_PUBLIC void cox_log_write(const struct cox_log *log, int level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Absolute deadlines on CLOCK_MONOTONIC, in nanoseconds. */
#define COX_NSEC_PER_SEC UINT64_C(1000000000)
#define COX_NSEC_PER_MSEC UINT64_C(1000000)
#define COX_DEADLINE_NEVER UINT64_MAX
COX_PUBLIC uint64_t cox_now_ns(void);
/* now + duration, saturating at COX_DEADLINE_NEVER. */
static inline uint64_t cox_deadline_after_ms(uint64_t duration_ms)
{
    const uint64_t now_ns = cox_now_ns();
    return duration_ms > (COX_DEADLINE_NEVER - now_ns) / COX_NSEC_PER_MSEC
               ? COX_DEADLINE_NEVER
               : now_ns + duration_ms * COX_NSEC_PER_MSEC;
}

/* For the timed waits of the C library; a deadline of NEVER is some 580 years away. */
static inline struct timespec cox_deadline_timespec(uint64_t deadline_ns)
{
    struct timespec until;
    until.tv_sec = (time_t)(deadline_ns / COX_NSEC_PER_SEC);
    until.tv_nsec = (long)(deadline_ns % COX_NSEC_PER_SEC);
    return until;
}

static inline uint64_t cox_deadline_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Structs of options and callbacks begin with their size, so that later releases can add fields:
 *
 *     struct cox_pool_options options = COX_POOL_OPTIONS_INIT;
 *     options.block_size = 4096;
 *
 * In C also as {.size = sizeof(struct cox_pool_options), .block_size = 4096}. All other fields are
 * zero, which selects their defaults. If the library is newer than the caller's headers, it treats
 * the fields that these lack as zero. If it is older, it returns COX_INVALID unless the fields that
 * it does not know are zero. Size 0 is COX_INVALID too. */
#ifndef __cplusplus
#define COX_OPTIONS_INIT(type)                                                                     \
    {                                                                                              \
        .size = sizeof(type)                                                                       \
    }
#else
#define COX_OPTIONS_INIT(type) cox_options_init<type>()
extern "C++" template <typename type> inline type cox_options_init()
{
    type options = type();
    options.size = sizeof options;
    return options;
}
#endif

/* A set of ranks. */
struct cox_rank_set {
    uint64_t words[COX_RANK_COUNT_MAX / 64];
};

static inline bool cox_rank_set_has(const struct cox_rank_set *set, uint32_t rank)
{
    return (set->words[rank / 64] >> (rank % 64)) & 1;
}

static inline void cox_rank_set_add(struct cox_rank_set *set, uint32_t rank)
{
    set->words[rank / 64] |= UINT64_C(1) << (rank % 64);
}

static inline struct cox_rank_set cox_rank_set_first(uint32_t rank_count)
{
    struct cox_rank_set set = {{0}};
    for (uint32_t rank = 0; rank < rank_count; rank++)
        cox_rank_set_add(&set, rank);
    return set;
}

/* How long a wait spins before it blocks: */
enum cox_spin {
    COX_SPIN_AUTO = 0, /* 100 us */
    COX_SPIN_OFF,      /* never spins */
    COX_SPIN_MAX,      /* 2 ms: for steps with longer gaps between them */
    COX_SPIN_COUNT,
};

/* ---- memory of messages ---- */

/* A bump allocator, which keeps its blocks across a reset. */
struct cox_arena {
    /* all blocks, in the order they are filled */
    struct cox_arena_block *first;
    /* the one being filled, NULL before the first allocation */
    struct cox_arena_block *current;
    /* bytes handed out since the last reset, rounding included */
    size_t used;
    /* cap on `used` */
    size_t size_max;
    /* an allocation since the last reset failed, by the cap or for lack of memory */
    bool exhausted;
};

/* Allocates first_size bytes at once (0: none). Each further block is twice as large. Returns 0 or
 * -ENOMEM. */
COX_PUBLIC int cox_arena_init(struct cox_arena *arena, size_t first_size, size_t size_max);
COX_PUBLIC void cox_arena_deinit(struct cox_arena *arena); /* idempotent; a zeroed arena is fine */
/* Memory aligned to 16 bytes, not zeroed; NULL if the cap or memory is exhausted. */
COX_PUBLIC void *cox_arena_alloc(struct cox_arena *arena, size_t size);
static inline char *cox_arena_strdup(struct cox_arena *arena, const char *text)
{
    size_t size = strlen(text) + 1;
    void *copy = cox_arena_alloc(arena, size);
    return copy ? (char *)memcpy(copy, text, size) : NULL;
}

/* The `bytes` fields of token ids, block tables and sequence ids: raw little-endian int64 arrays,
 * without an alignment of their own. */

/* Returns the number of elements, or -1 when size is no multiple of 8. */
static inline int64_t cox_wire_int64_count(size_t size)
{
    return size % sizeof(int64_t) == 0 ? (int64_t)(size / sizeof(int64_t)) : -1;
}

static inline int64_t cox_wire_int64_get(const uint8_t *bytes, size_t index)
{
    uint64_t word = 0;
    for (unsigned i = 0; i < sizeof word; i++)
        word |= (uint64_t)bytes[index * sizeof word + i] << (8 * i);
    return (int64_t)word;
}

static inline void cox_wire_int64_set(uint8_t *bytes, size_t index, int64_t value)
{
    for (unsigned i = 0; i < sizeof value; i++)
        bytes[index * sizeof value + i] = (uint8_t)((uint64_t)value >> (8 * i));
}

#ifdef __cplusplus
}
#endif

#endif
