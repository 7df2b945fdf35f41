/*
 * recorder_layout: the structs of the flight recorder (recorder.h). Private to the library.
 *
 * A process has one area. An area is a head and rings of records; a record is all that happened to
 * one request, with the time of each step, so that a step costs one store. All words are 64 bits,
 * little-endian, and written by one process.
 *
 * The times of requests are in the clock that the head names: ns of CLOCK_MONOTONIC, or ticks of
 * the processor's counter, which is read in a few instructions. A copy of an area has ns: who
 * copies converts, by the pair of both clocks in the head and one that it takes itself. All areas
 * of a group are converted alike, so what came before what is exact. By CLOCK_MONOTONIC, whose rate
 * the kernel adjusts, an old record is some microseconds off, and more behind a suspend of the
 * machine.
 *
 *   area of a rank                              area of the coordinator
 *   0        head                                0        head
 *   2048     execute   2048 records of 64 B      2048     execute   2048 records of 128 B
 *   133120   link        64                      264192   link        64
 *   137216   transfer   256                      272384   transfer   256
 *   153600   recover     64                      305152   recover     64
 *   157696   group     1024 operations of 64 B   313344   end
 *   223232   end
 *
 * The record of request s of a channel is number s modulo the capacity of its ring; the record of
 * the n-th operation of the rank group, from 1 on, is number n modulo 1024.
 *
 * The first word of a record is its index: s, or n; 0: it is being written, or was never. A writer
 * stores 0, then what is known by now, each word with release, and the index last, with release.
 * Later it stores times in place, one word each. Of a request it does not clear the words that
 * follow: a time before the first one of the record (taken, submitted) is that of an earlier
 * request, and says "not yet"; so do group and result, which end_ns, reply_ns and gathered_ns
 * follow. A reader loads the index with acquire, then the words with acquire, the last one first,
 * then the index again: if that has changed, the record was overwritten meanwhile. Words are in the
 * order in which they are stored: a reader that sees one sees all before it. So a reader never
 * stops a writer, and no word is written by two processes. A process that is killed at any
 * instruction leaves a record whose last times are missing, or one whose index is 0.
 */
#ifndef COX_CHANNEL_RECORDER_LAYOUT_H
#define COX_CHANNEL_RECORDER_LAYOUT_H

#include <coxswain/base.h>

#include <stdatomic.h>

#define COX_RECORDER_MAGIC UINT64_C(0x315243455253584F) /* "OXSRECR1" */
#define COX_RECORDER_VERSION 1u
#define COX_RECORDER_PATH_SIZE 1024
#define COX_RECORDER_COORDINATOR UINT32_MAX

/* In which the times of requests are; those of the rank group's operations are always ns. Any other
 * number is taken for COX_RECORDER_NS. */
enum cox_recorder_clock {
    COX_RECORDER_NS = 0,
    COX_RECORDER_TICKS = 1,
};

struct cox_recorder_layout_head {
    /* Stored last with release by the coordinator, which makes every area. */
    _Atomic uint64_t magic;
    /* COX_RECORDER_VERSION; rank, or COX_RECORDER_COORDINATOR */
    uint32_t version, rank;
    /* of the whole area */
    uint64_t size;
    /* incarnation of the group (layout.h) */
    uint64_t group_incarnation;
    /* Written by the process that records: pid, then its incarnation and start time; pid is stored
     * last with release. 0: no process records here. */
    _Atomic uint64_t pid;
    _Atomic uint64_t incarnation, start;
    /* The file to record in instead of this area; empty: none. Written by the coordinator. */
    char path[COX_RECORDER_PATH_SIZE];
    /* enum cox_recorder_clock; if it is TICKS, both clocks as the area was made. Written by the
     * coordinator. */
    uint64_t clock, ticks, ns;
    uint8_t padding[2048 - 80 - COX_RECORDER_PATH_SIZE];
};

/* A request in a rank. Times are those of the area's clock. */
struct cox_recorder_layout_request {
    _Atomic uint64_t index;
    /* the frame was read */
    _Atomic uint64_t taken_ns;
    /* type in bits 32 to 63, bytes of the request below, at most 2^32 - 1 */
    _Atomic uint64_t request;
    /* Unpacked, and its callback begins. Not for an opaque request: nothing is unpacked, and
     * taken_ns stands for it. */
    _Atomic uint64_t begin_ns;
    /* Operations of the rank group during the callback: their number in bits 48 to 63, and the time
     * that this rank waited for others in them. */
    _Atomic uint64_t group;
    /* The callback has returned. Not for an opaque request: reply_ns stands for it. */
    _Atomic uint64_t end_ns;
    /* status in bits 48 to 63 (signed), bytes of the reply below */
    _Atomic uint64_t result;
    /* the reply is published */
    _Atomic uint64_t reply_ns;
};

/* An operation of the rank group. Times are CLOCK_MONOTONIC in ns; 0: not yet. */
struct cox_recorder_layout_operation {
    _Atomic uint64_t index;
    _Atomic uint64_t begin_ns;
    /* enum cox_group_operation in bits 56 to 63, slot of the subgroup in 48 to 55, bytes below */
    _Atomic uint64_t operation;
    /* number of the round in its epoch, the epoch */
    _Atomic uint64_t round, epoch;
    /* all members have arrived, or the wait has failed */
    _Atomic uint64_t arrived_ns;
    /* as above */
    _Atomic uint64_t result;
    _Atomic uint64_t end_ns;
};

/* A request in the coordinator. Times are those of the area's clock. */
struct cox_recorder_layout_submit {
    _Atomic uint64_t index;
    _Atomic uint64_t request;
    /* the asked ranks */
    _Atomic uint64_t asked[COX_RANK_COUNT_MAX / 64];
    /* the caller has called submit */
    _Atomic uint64_t submitted_ns;
    /* its frame is claimed, and is being packed */
    _Atomic uint64_t packing_ns;
    _Atomic uint64_t published_ns;
    /* the ranks have been woken */
    _Atomic uint64_t woken_ns;
    _Atomic uint64_t result;
    /* The last reply was taken, and its handler begins: one time stands for both. */
    _Atomic uint64_t gathered_ns;
    /* The handler has returned. Where the host collects completions: it has collected this one. */
    _Atomic uint64_t handled_ns;
    uint64_t reserved[5];
};

_Static_assert(sizeof(struct cox_recorder_layout_head) == 2048, "head size");
_Static_assert(sizeof(struct cox_recorder_layout_request) == 64, "a line");
_Static_assert(sizeof(struct cox_recorder_layout_operation) == 64, "a line");
_Static_assert(sizeof(struct cox_recorder_layout_submit) == 128, "two lines");
_Static_assert(offsetof(struct cox_recorder_layout_head, path) == 56, "path moved");

/* Rings: one per two-way channel, by its id, and one of the rank group. */
#define COX_RECORDER_GROUP COX_TWO_WAY_COUNT
#define COX_RECORDER_RING_COUNT (COX_TWO_WAY_COUNT + 1)
/* Of the rank group; a power of two, as all. */
#define COX_RECORDER_OPERATION_COUNT 1024u

static inline uint32_t cox_recorder_capacity(int ring)
{
    static const uint32_t capacities[COX_RECORDER_RING_COUNT] = {2048, 64, 256, 64,
                                                                 COX_RECORDER_OPERATION_COUNT};
    return capacities[ring];
}

/* The coordinator has no ring of the rank group. */
static inline uint64_t cox_recorder_ring_offset(bool coordinator, int ring)
{
    uint64_t offset = sizeof(struct cox_recorder_layout_head);
    for (int i = 0; i < ring; i++)
        offset +=
            cox_recorder_capacity(i) * (coordinator ? sizeof(struct cox_recorder_layout_submit)
                                                    : sizeof(struct cox_recorder_layout_request));
    return offset;
}

/* Bytes of an area. */
static inline uint64_t cox_recorder_area_size(bool coordinator)
{
    return coordinator ? cox_recorder_ring_offset(true, COX_RECORDER_GROUP)
                       : cox_recorder_ring_offset(false, COX_RECORDER_RING_COUNT);
}

#endif
