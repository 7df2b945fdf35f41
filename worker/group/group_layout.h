/*
 * group_layout: the shared memory of a rank group. Private to the library.
 *
 * The memory starts as zeros. Lines of 128 bytes; each but the wakeups has one rank as its writer.
 * The named form is one region under a name or at an fd, which every rank may write: for processes
 * that trust each other.
 *
 *   offset 0     wakeup of the group   all ranks: hints
 *          128   ranks[0]              rank 0: identity line, a line for the group and for each of
 *                                      its subgroups
 *          128 + 1280 * r              rank r
 *          ...                         wakeups of subgroups, 8 for each rank that is the first
 *                                      member of some; all ranks: hints
 *          ...   (to a page)
 *          values[0]                   rank 0: two slots of value_size, rounded up to a line, then
 *                                      two of 1024 bytes for each subgroup
 *          ...                         rank r
 *
 * The sealed form: ranks[r] and values[r] are an object each, `cox_group` and `cox_payload_group`,
 * of which rank r has the only writable mapping, and all other ranks a read-only one. The wakeups,
 * that of the group first, are in the wake memory (channel/shm/layout.h), which all ranks can
 * write, because several processes must block on one futex. At worst such a write makes a wait 50
 * ms longer, or causes useless wakeups, which cost processor time. A rank has the same memory in
 * every incarnation of the group, and zeroes its words before it joins the next one (group_round.c
 * says why a word of one incarnation is never taken for one of another). Memory of another rank is
 * read once, and checked. Invalid content is that rank's fault; so is its report about a third rank
 * that this rank does not see itself.
 *
 * Each member chooses its slot of a subgroup by itself; the others find it by the name and members
 * that it writes there.
 */
#ifndef COX_WORKER_GROUP_LAYOUT_H
#define COX_WORKER_GROUP_LAYOUT_H

#include <coxswain/group.h>

#include <stdatomic.h>

#define COX_GROUP_LINE_SIZE 128
#define COX_GROUP_PAGE_SIZE 4096
#define COX_GROUP_MAGIC UINT64_C(0x3150554F52475843) /* "CXGROUP1" */
/* The group, and its subgroups. */
#define COX_GROUP_PART_COUNT (1 + COX_SUBGROUP_COUNT_MAX)
/* A larger value goes through a subgroup in pieces. */
#define COX_SUBGROUP_SLOT_SIZE 1024

/* The purpose of a file with a name. Written by its creator before it gets the name, and never
 * again. */
struct cox_group_layout_made {
    /* distinguishes a leftover from another program's file */
    uint64_t magic;
    uint64_t incarnation;
    uint32_t rank_count;
    uint32_t value_size;
    /* the rank that made it */
    uint32_t rank;
    uint32_t reserved;
};

/* Hints: whatever these contain, a waiter checks the ranks' own words every 50 ms. */
struct cox_group_layout_wakeup {
    /* the futex: {changes with every wake:31, a thread waits:1} */
    _Atomic uint32_t word;
    /* wakes for other reasons than that all have arrived */
    _Atomic uint32_t news;
    /* {incarnation:8, epoch:24, index:24, how many have arrived:8} */
    _Atomic uint64_t counted;
    /* of the group only, and only under a name */
    struct cox_group_layout_made made;
    /* of the group only: the futex of a mirror (group_mirror.h), and whether it blocks */
    _Atomic uint32_t mirror, mirror_sleeps;
    uint8_t padding[COX_GROUP_LINE_SIZE - 56];
};

/* Set by a thread that blocks, cleared by one that wakes: a wake without it skips the system call.
 */
#define COX_GROUP_WAKEUP_SLEEPS UINT32_C(1)
#define COX_GROUP_WAKEUP_STEP UINT32_C(2)

/* Values chosen so that no flipped bit turns one into another. */
enum cox_group_state {
    COX_GROUP_EMPTY = 0,
    COX_GROUP_CLAIMED = 0x33, /* the fields below are not valid yet */
    COX_GROUP_JOINED = 0x55,
    COX_GROUP_WHOLE = 0x66,  /* it has seen every rank JOINED */
    COX_GROUP_LEFT = 0x99,   /* after that */
    COX_GROUP_FAILED = 0xaa, /* before that */
};

/* EMPTY -> CLAIMED                       by compare-and-swap: the process that succeeds is the rank
 * CLAIMED -> JOINED -> WHOLE -> LEFT     by the process that won
 * CLAIMED, JOINED -> FAILED              when it cannot join
 * WHOLE and LEFT say that every rank has been JOINED, and stay true. */
struct cox_group_layout_identity {
    /* {state:8, pid:24, start:32}; JOINED: release, after the fields */
    _Atomic uint64_t holder;
    _Atomic uint64_t incarnation;
    /* rank_count as given to this rank */
    _Atomic uint32_t said_count;
    /* value_size */
    _Atomic uint32_t said_size;
    /* cox_group_said_dead of the rank whose end is why this one has aborted for good, FAILED or
     * LEFT; 0: none. Stored before that state, so that a reader of the state sees it. */
    _Atomic uint32_t said_dead;
    uint8_t padding[COX_GROUP_LINE_SIZE - 28];
};

/* One rank in the group or in one subgroup. */
struct cox_group_layout_part {
    /* {epoch:40, index:24}; release, after value, `what` and mirror */
    _Atomic uint64_t arrived;
    /* cox_group_mirror of it: neither a flipped bit nor another incarnation's value counts as an
     * arrival */
    _Atomic uint64_t mirror;
    /* cox_group_aborted of the epoch that is over for this rank */
    _Atomic uint64_t aborted;
    /* by parity of index: {index:24, size or source:32, operation:8} */
    _Atomic uint64_t what[2];
    /* of a subgroup: not 0, release, after members_hash */
    _Atomic uint64_t name_hash;
    _Atomic uint64_t members_hash;
    /* cox_group_said_dead of the rank that `aborted` is about, or that this rank followed; 0: none.
     * Stored before `aborted`. */
    _Atomic uint32_t because;
    uint8_t padding[COX_GROUP_LINE_SIZE - 60];
};

struct cox_group_layout_rank {
    struct cox_group_layout_identity identity;
    struct cox_group_layout_part parts[COX_GROUP_PART_COUNT];
};

struct cox_group_layout {
    struct cox_group_layout_wakeup wakeup;
    /* rank_count of them */
    struct cox_group_layout_rank ranks[];
};

#define COX_GROUP_AT(type, member, offset)                                                         \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " moved")

COX_GROUP_AT(cox_group_layout_wakeup, word, 0);
COX_GROUP_AT(cox_group_layout_wakeup, news, 4);
COX_GROUP_AT(cox_group_layout_wakeup, counted, 8);
COX_GROUP_AT(cox_group_layout_wakeup, made, 16);
COX_GROUP_AT(cox_group_layout_made, magic, 0);
COX_GROUP_AT(cox_group_layout_made, incarnation, 8);
COX_GROUP_AT(cox_group_layout_made, rank_count, 16);
COX_GROUP_AT(cox_group_layout_made, value_size, 20);
COX_GROUP_AT(cox_group_layout_made, rank, 24);
_Static_assert(sizeof(struct cox_group_layout_wakeup) == COX_GROUP_LINE_SIZE, "wakeup line size");
COX_GROUP_AT(cox_group_layout_identity, holder, 0);
COX_GROUP_AT(cox_group_layout_identity, incarnation, 8);
COX_GROUP_AT(cox_group_layout_identity, said_count, 16);
COX_GROUP_AT(cox_group_layout_identity, said_size, 20);
COX_GROUP_AT(cox_group_layout_identity, said_dead, 24);
_Static_assert(sizeof(struct cox_group_layout_identity) == COX_GROUP_LINE_SIZE, "identity size");
COX_GROUP_AT(cox_group_layout_part, arrived, 0);
COX_GROUP_AT(cox_group_layout_part, mirror, 8);
COX_GROUP_AT(cox_group_layout_part, aborted, 16);
COX_GROUP_AT(cox_group_layout_part, what, 24);
COX_GROUP_AT(cox_group_layout_part, name_hash, 40);
COX_GROUP_AT(cox_group_layout_part, members_hash, 48);
_Static_assert(sizeof(struct cox_group_layout_part) == COX_GROUP_LINE_SIZE, "part line size");
COX_GROUP_AT(cox_group_layout_rank, parts, 1 * COX_GROUP_LINE_SIZE);
COX_GROUP_AT(cox_group_layout_part, because, 56);
_Static_assert(sizeof(struct cox_group_layout_rank) == 10 * COX_GROUP_LINE_SIZE, "rank size");
COX_GROUP_AT(cox_group_layout, ranks, COX_GROUP_LINE_SIZE);
_Static_assert(COX_GROUP_VALUE_SIZE_MIN >= COX_SUBGROUP_SLOT_SIZE, "pieces of a subgroup's values");

/* ---- words ---- */

#define COX_GROUP_INDEX_BITS 24
#define COX_GROUP_INDEX_MASK ((UINT32_C(1) << COX_GROUP_INDEX_BITS) - 1)
/* No epoch. In `aborted`: every epoch, because a member is dead. */
#define COX_GROUP_EPOCH_NONE ((UINT64_C(1) << (64 - COX_GROUP_INDEX_BITS)) - 1)
#define COX_GROUP_EPOCH_MAX (COX_GROUP_EPOCH_NONE - 1)

/* The index wraps around: two ranks of an epoch are never more than one apart. */
static inline uint64_t cox_group_arrived(uint64_t epoch, uint32_t index)
{
    return epoch << COX_GROUP_INDEX_BITS | (index & COX_GROUP_INDEX_MASK);
}

/* Different in each incarnation. */
static inline uint64_t cox_group_mirror(uint64_t incarnation, uint64_t arrived)
{
    return ~arrived ^ incarnation * UINT64_C(0x9e3779b97f4a7c15);
}

/* The low bits are chosen so that no flipped bit of zero, or of another epoch's word, gives this
 * word. */
static inline uint64_t cox_group_aborted(uint64_t epoch)
{
    uint64_t check = (epoch * UINT64_C(0x9e3779b97f4a7c15)) >> 40;
    return epoch << COX_GROUP_INDEX_BITS | (check ^ UINT64_C(0xa5c3f1));
}

/* {complement of the lower half:16, 1 + rank:16}: no flipped bit of one, or of 0, makes another. */
static inline uint32_t cox_group_said_dead(uint32_t rank)
{
    return ~(rank + 1) << 16 | (rank + 1);
}

static inline uint64_t cox_group_what(uint32_t index, uint32_t detail, uint8_t operation)
{
    return (uint64_t)(index & COX_GROUP_INDEX_MASK) << 40 | (uint64_t)detail << 8 | operation;
}

static inline uint64_t cox_group_holder(enum cox_group_state state, int32_t pid, uint64_t start)
{
    return (uint64_t)state << 56 | ((uint64_t)pid & 0xffffff) << 32 | (uint32_t)start;
}

static inline enum cox_group_state cox_group_holder_state(uint64_t holder)
{
    return (enum cox_group_state)(holder >> 56);
}

static inline int32_t cox_group_holder_pid(uint64_t holder)
{
    return (int32_t)(holder >> 32 & 0xffffff);
}

/* ---- offsets ---- */

static inline uint64_t cox_group_round_up(uint64_t size, uint64_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* The wakeups of subgroups in the named form; in the sealed one they are behind that of the group.
 */
static inline uint64_t cox_group_wakeups_offset(uint32_t rank_count)
{
    return sizeof(struct cox_group_layout) +
           (uint64_t)rank_count * sizeof(struct cox_group_layout_rank);
}

static inline uint64_t cox_group_wakeups_size(uint32_t rank_count)
{
    return (uint64_t)rank_count * COX_SUBGROUP_COUNT_MAX * sizeof(struct cox_group_layout_wakeup);
}

static inline uint64_t cox_group_values_offset(uint32_t rank_count)
{
    return cox_group_round_up(cox_group_wakeups_offset(rank_count) +
                                  cox_group_wakeups_size(rank_count),
                              COX_GROUP_PAGE_SIZE);
}

static inline uint64_t cox_group_values_stride(uint32_t value_size)
{
    return 2 * cox_group_round_up(value_size, COX_GROUP_LINE_SIZE) +
           (uint64_t)2 * COX_SUBGROUP_COUNT_MAX * COX_SUBGROUP_SLOT_SIZE;
}

#endif
