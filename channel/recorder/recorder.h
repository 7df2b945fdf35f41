/*
 * recorder: the flight recorder of a process: what became of each of its last requests.
 *
 * A rank records in an area that only it writes: in a sealed group the end of its rank memory, in a
 * named one its part of the end of the control region. The coordinator's own area is private
 * memory. With --crash-dir each record is also written to a file, which outlives every process. The
 * file is written, not mapped: another process of the user may truncate it, and a mapping would
 * then end this one with SIGBUS. recorder_layout.h has the layout and the order of stores.
 *
 * Threads: attach, ref and unref on any thread. What is recorded about a request is recorded by the
 *   thread that has the request at that moment; a word of a record has one writer at a time.
 *   Operations of the rank group on any thread. Copies on any thread, in any process.
 * Ownership: see each function. A handle is counted.
 * Blocks: nothing but what a write to the page cache waits for.
 * If the process dies: the area stays as it is, with the memory, or file, that it is part of. Who
 *   reads it finds what was recorded up to the death.
 */
#ifndef COX_CHANNEL_RECORDER_H
#define COX_CHANNEL_RECORDER_H

#include "recorder_layout.h"

struct cox_recorder {
    _Atomic uint32_t references;
    /* a mapping of its own, of `size` bytes */
    uint8_t *area;
    uint64_t size;
    /* has what the area has, one record later at most; -1: there is none */
    int file_fd;
    /* Operations of the rank group so far, and the time waited in them; relaxed: sums. */
    _Atomic uint64_t operations, waited_ns;
};

/* The records of one ring of a recorder; records NULL: nothing is recorded. */
struct cox_recorder_requests {
    struct cox_recorder_layout_request *records;
    uint64_t mask;
    const struct cox_recorder *recorder;
    /* times are ticks, and there is no file: a step is recorded inline */
    bool plain;
};
struct cox_recorder_submits {
    struct cox_recorder_layout_submit *records;
    uint64_t mask;
    const struct cox_recorder *recorder;
    bool plain;
};

/* ---- the clock of requests ---- */

/* The processor's counter, without waiting for instructions before it; 0 where there is none. */
static inline uint64_t cox_recorder_ticks(void)
{
#ifdef __x86_64__
    return __builtin_ia32_rdtsc();
#else
    return 0;
#endif
}

/* The clock for an area without a file: TICKS where the kernel itself keeps its time by the
 * counter, which it does only while the counters of all processors agree and never stop. Reads a
 * file of sysfs; NS where that cannot be read. */
enum cox_recorder_clock cox_recorder_clock_find(void);

/* ---- areas ---- */

/* Coordinator: makes an area in which no process records, without records: in zeroed memory, or in
 * place of one that no process uses any more.
 * path: the file to write the records to; NULL or "": none; it is shorter than
 * COX_RECORDER_PATH_SIZE. With a file the clock is NS, whatever was asked: it is read when nobody
 * is left who could tell what ticks are. */
void cox_recorder_area_init(void *area, uint32_t rank, uint32_t group_incarnation, const char *path,
                            enum cox_recorder_clock clock);
/* Coordinator: creates the file of an area in place of any other of that path, mode 0600, with its
 * bytes reserved. *ret_fd is the caller's. Returns 0; COX_NO_SPACE; -errno; err says which file. On
 * failure there is no such file. */
int cox_recorder_file_create(const char *path, uint32_t rank, uint32_t group_incarnation,
                             int *ret_fd, struct cox_error *err);

/* ---- handles ---- */

/* Begins to record in the area at this offset of fd, and in the file that its head names, if that
 * can be opened. offset is a multiple of the page size. Returns 0; COX_NOT_FOUND: there is no area
 * of this version; -ENOMEM; -errno. */
int cox_recorder_attach(int fd, uint64_t offset, uint32_t rank, uint32_t incarnation,
                        uint64_t start, struct cox_recorder **ret_recorder);
/* The coordinator's: in private memory, and in a file, unless path is NULL; clock: as in
 * cox_recorder_area_init. Returns 0 or as cox_recorder_file_create. */
int cox_recorder_new_coordinator(const char *path, uint32_t group_incarnation,
                                 enum cox_recorder_clock clock, struct cox_recorder **ret_recorder,
                                 struct cox_error *err);
struct cox_recorder *cox_recorder_ref(struct cox_recorder *recorder);   /* NULL-safe */
struct cox_recorder *cox_recorder_unref(struct cox_recorder *recorder); /* NULL-safe, NULL */

/* recorder may be NULL: then nothing is recorded. */
struct cox_recorder_requests cox_recorder_requests(const struct cox_recorder *recorder,
                                                   enum cox_channel_id channel);
struct cox_recorder_submits cox_recorder_submits(const struct cox_recorder *recorder,
                                                 enum cox_channel_id channel);

/* ---- recording ---- */

static inline uint64_t cox_recorder_request_word(uint32_t type, uint64_t size)
{
    return (uint64_t)type << 32 | (size < UINT32_MAX ? size : UINT32_MAX);
}

static inline uint64_t cox_recorder_result_word(int status, uint64_t size)
{
    /* The bytes are in memory, so their number has less than 48 bits. */
    return (uint64_t)(uint16_t)(int16_t)status << 48 | size;
}

/* release, here and below: what a reader sees of this record it sees with the index that was stored
 * before; partner are the acquire loads in cox_recorder_copy. */
#define COX_RECORDER_STORE(word, value) atomic_store_explicit(word, value, memory_order_release)

#define COX_RECORDER_LIKELY(condition) __builtin_expect(condition, true)

/* Writes a record, as it is now, to the file. What cannot be written is missing there. */
void cox_recorder_write(const struct cox_recorder *recorder, const void *record, size_t size);

static inline void cox_recorder_save(const struct cox_recorder *recorder, const void *record,
                                     size_t size)
{
    if (recorder->file_fd >= 0)
        cox_recorder_write(recorder, record, size);
}

/* Each step of a request has two functions. `cox_recorder_X_at` stores a time that the caller has,
 * in the area's clock, and writes the file; records is not NULL. `cox_recorder_X` records that the
 * step is now: in the usual case inline, by the counter. now_ns: CLOCK_MONOTONIC where the caller
 * has read it; 0: it is read if the area wants it. */

/* A rank has read the frame of a request; request: cox_recorder_request_word. */
static inline void cox_recorder_take_store(const struct cox_recorder_requests *ring,
                                           uint64_t sequence, uint64_t request, uint64_t time)
{
    struct cox_recorder_layout_request *record = &ring->records[sequence & ring->mask];
    /* relaxed: the releases below order it before the fields. */
    atomic_store_explicit(&record->index, 0, memory_order_relaxed);
    COX_RECORDER_STORE(&record->taken_ns, time);
    COX_RECORDER_STORE(&record->request, request);
    COX_RECORDER_STORE(&record->index, sequence);
}

void cox_recorder_take_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                          uint64_t request, uint64_t time);

static inline void cox_recorder_take(const struct cox_recorder_requests *ring, uint64_t sequence,
                                     uint64_t request)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        cox_recorder_take_store(ring, sequence, request, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_take_at(ring, sequence, request, 0);
}

/* Its callback begins. */
void cox_recorder_begin_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                           uint64_t time);

static inline void cox_recorder_begin(const struct cox_recorder_requests *ring, uint64_t sequence,
                                      uint64_t now_ns)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        COX_RECORDER_STORE(&ring->records[sequence & ring->mask].begin_ns, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_begin_at(ring, sequence, now_ns);
}

/* Its callback has returned; cox_recorder_group comes before it. */
void cox_recorder_end_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                         uint64_t time);

static inline void cox_recorder_end(const struct cox_recorder_requests *ring, uint64_t sequence,
                                    uint64_t now_ns)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        COX_RECORDER_STORE(&ring->records[sequence & ring->mask].end_ns, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_end_at(ring, sequence, now_ns);
}

/* The reply is about to be visible to the coordinator; result: cox_recorder_result_word. */
static inline void cox_recorder_reply_store(const struct cox_recorder_requests *ring,
                                            uint64_t sequence, uint64_t result, uint64_t time)
{
    struct cox_recorder_layout_request *record = &ring->records[sequence & ring->mask];
    COX_RECORDER_STORE(&record->result, result);
    COX_RECORDER_STORE(&record->reply_ns, time);
    /* That of the next request, which no cache has any more: it comes while the rank sleeps. Behind
     * the last one it is for nothing. */
    __builtin_prefetch(record + 1, 1);
}

void cox_recorder_reply_at(const struct cox_recorder_requests *ring, uint64_t sequence,
                           uint64_t result, uint64_t time);

static inline void cox_recorder_reply(const struct cox_recorder_requests *ring, uint64_t sequence,
                                      uint64_t result)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        cox_recorder_reply_store(ring, sequence, result, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_reply_at(ring, sequence, result, 0);
}

/* Operations of the rank group since `count` and `waited_ns` were read from the recorder. */
void cox_recorder_group(const struct cox_recorder *recorder,
                        const struct cox_recorder_requests *ring, uint64_t sequence, uint64_t count,
                        uint64_t waited_ns);

/* An operation of the rank group begins; returns its number, for the others. */
struct cox_recorder_operation {
    uint32_t kind, slot, round;
    uint64_t size, epoch;
};
uint64_t cox_recorder_operation_begin(struct cox_recorder *recorder,
                                      const struct cox_recorder_operation *operation,
                                      uint64_t now_ns);
void cox_recorder_operation_arrived(struct cox_recorder *recorder, uint64_t number,
                                    uint64_t begin_ns, uint64_t now_ns);
void cox_recorder_operation_end(struct cox_recorder *recorder, uint64_t number, int status,
                                uint64_t now_ns);

/* The time now, in the clock of the ring; now_ns: on CLOCK_MONOTONIC. */
static inline uint64_t cox_recorder_submits_time(const struct cox_recorder_submits *ring,
                                                 uint64_t now_ns)
{
    return COX_RECORDER_LIKELY(ring->plain) ? cox_recorder_ticks() : now_ns;
}

/* Likewise; 0: nothing is recorded. */
static inline uint64_t cox_recorder_submits_now(const struct cox_recorder_submits *ring)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        return cox_recorder_ticks();
    return ring->records ? cox_now_ns() : 0;
}

/* What is known of a request as it is published. Times are in the ring's clock. */
struct cox_recorder_published {
    uint64_t submitted, packing, published;
    uint64_t request;
    const uint64_t *asked;
};

/* The coordinator publishes a request: before any rank can see it; records is not NULL. */
static inline void cox_recorder_publish(const struct cox_recorder_submits *ring, uint64_t sequence,
                                        const struct cox_recorder_published *now)
{
    struct cox_recorder_layout_submit *record = &ring->records[sequence & ring->mask];
    /* relaxed: as in cox_recorder_take_store. */
    atomic_store_explicit(&record->index, 0, memory_order_relaxed);
    COX_RECORDER_STORE(&record->request, now->request);
    COX_RECORDER_STORE(&record->asked[0], now->asked[0]);
    COX_RECORDER_STORE(&record->asked[1], now->asked[1]);
    COX_RECORDER_STORE(&record->submitted_ns, now->submitted);
    COX_RECORDER_STORE(&record->packing_ns, now->packing);
    COX_RECORDER_STORE(&record->published_ns, now->published);
    COX_RECORDER_STORE(&record->index, sequence);
    if (!COX_RECORDER_LIKELY(ring->plain))
        cox_recorder_save(ring->recorder, record, sizeof *record);
}

/* The ranks have been woken. */
void cox_recorder_woken_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                           uint64_t time);

static inline void cox_recorder_woken(const struct cox_recorder_submits *ring, uint64_t sequence)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        COX_RECORDER_STORE(&ring->records[sequence & ring->mask].woken_ns, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_woken_at(ring, sequence, 0);
}

void cox_recorder_gathered_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                              uint64_t result, uint64_t time);

static inline void cox_recorder_gathered(const struct cox_recorder_submits *ring, uint64_t sequence,
                                         uint64_t result, uint64_t now_ns)
{
    struct cox_recorder_layout_submit *record = &ring->records[sequence & ring->mask];
    if (COX_RECORDER_LIKELY(ring->plain)) {
        COX_RECORDER_STORE(&record->result, result);
        COX_RECORDER_STORE(&record->gathered_ns, cox_recorder_ticks());
    } else if (ring->records) {
        cox_recorder_gathered_at(ring, sequence, result, now_ns);
    }
}

void cox_recorder_handled_at(const struct cox_recorder_submits *ring, uint64_t sequence,
                             uint64_t time);

static inline void cox_recorder_handled(const struct cox_recorder_submits *ring, uint64_t sequence,
                                        uint64_t now_ns)
{
    if (COX_RECORDER_LIKELY(ring->plain))
        COX_RECORDER_STORE(&ring->records[sequence & ring->mask].handled_ns, cox_recorder_ticks());
    else if (ring->records)
        cox_recorder_handled_at(ring, sequence, now_ns);
}

/* ---- reading ---- */

/* Copies an area while its process may write it, into cox_recorder_area_size bytes of private
 * memory. Records that are being written, or were overwritten meanwhile, are all zero in the copy.
 * Its times are CLOCK_MONOTONIC in ns, 0: not yet, and its head says so.
 * again: the area itself; or, where `area` is a copy that was read from a file in ascending
 * order, another such copy, which was read later. Returns the number of records that were
 * overwritten meanwhile. */
uint32_t cox_recorder_copy(const void *area, const void *again, bool coordinator, void *copy);
/* Moves all times in a rank's copy by `by` ns, to the clock of another machine. 0, which is "not
 * yet", stays; a time that would leave the range is 1 or UINT64_MAX. */
void cox_recorder_shift(void *copy, int64_t by);
/* The process that records in the area; 0: none. */
uint64_t cox_recorder_area_pid(const void *area);

/* What a copy has of a request, as plain numbers. All of it may be anything: it is what a process
 * has written. */
struct cox_record {
    uint64_t sequence;
    uint32_t type;
    uint64_t size;
    int status;
    uint64_t reply_size;
    /* Coordinator: in the order of its layout. Rank: likewise. 0: not yet. */
    uint64_t submitted_ns, packing_ns, published_ns, woken_ns, gathered_ns, handled_ns;
    uint64_t taken_ns, begin_ns, end_ns, reply_ns;
    uint32_t group_count;
    uint64_t group_wait_ns;
    uint64_t asked[COX_RANK_COUNT_MAX / 64];
};
struct cox_record_operation {
    uint64_t number, begin_ns, arrived_ns, end_ns, size, round, epoch;
    uint32_t kind, slot;
    int status;
};
struct cox_record_head {
    uint32_t rank, incarnation;
    uint64_t pid, start, group_incarnation;
};

/* Checks that `size` bytes are a copy of an area: of the coordinator, or of a rank. Returns 0;
 * COX_CORRUPT; COX_VERSION: err says both. */
int cox_recorder_check(const void *copy, uint64_t size, bool *ret_coordinator,
                       struct cox_record_head *ret_head, struct cox_error *err);
/* Reads record number i of a ring (below its capacity) of a copy that was checked. Returns false if
 * there is none. */
bool cox_recorder_read(const void *copy, bool coordinator, int ring, uint32_t i,
                       struct cox_record *ret_record);
bool cox_recorder_read_operation(const void *copy, uint32_t i,
                                 struct cox_record_operation *ret_operation);

#endif
