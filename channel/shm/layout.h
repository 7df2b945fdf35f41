/*
 * layout: every struct that lives in shared memory. Private to the library.
 *
 * The control region `/<name>_control` holds the shared state of a group; semaphores only wake. All
 * of it is fixed-width, little-endian, offsets instead of pointers, and every line of 128 bytes
 * (two cache lines, the unit the prefetcher pulls) has exactly one writer. The coordinator resets
 * the lines of a dead rank, and writes those of legacy ranks, which do not know them.
 *
 *   offset 0     header            coordinator, before anyone attaches; magic last
 *          512   abort word        coordinator
 *          640   channels[4]       coordinator: a line of sequence numbers, then 32 frame records
 *          5248  ranks[0]          rank 0: identity line, then three lines per channel (5)
 *          5248 + 2048 * r         rank r
 *
 * The four request and response regions per channel have the layout of the executor protocol: a u32
 * length and the bytes, from the start of each frame or slot. Nothing else is in them.
 *
 * A sealed group has the same in three kinds of memory, none of which has a name (sealed.h; what
 * the rank group has besides is in worker/group/group_layout.h):
 *
 *   request memory, written by the coordinator alone:
 *     0, 512, 640  header, abort word, channels as above
 *          5248    a word per rank: its reports that were taken out
 *          8192    request region of each two-way channel, each from a page's start on
 *   memory of rank r, written by that rank (and by the coordinator before it has it):
 *          0       its identity and lines as above
 *          4096    its slots: `depth` of each two-way channel, then the one of the error channel
 *   wake memory, written by all processes, only hints:
 *          0       per channel: the word that the coordinator blocks on, then a count per frame
 *          (page)  wakeups of the rank group and of its subgroups
 *   These words are shared because several processes must block on, and wake, one futex. Whatever
 *   they contain, a waiter checks the words of the ranks that it waits for every 50 ms: at worst a
 *   wait takes 50 ms more, or a wake is a wasted call. No result depends on them.
 */
#ifndef COX_CHANNEL_LAYOUT_H
#define COX_CHANNEL_LAYOUT_H

#include <coxswain/base.h>

#include <stdatomic.h>

#define COX_LINE_SIZE 128
#define COX_LAYOUT_MAGIC UINT64_C(0x314E415753584F43) /* "COXSWAN1" */
#define COX_LAYOUT_VERSION 1u
#define COX_LAYOUT_ABI 0x01020304u /* read back swapped by a machine of the other byte order */

/* Frames of one channel, at most. */
#define COX_DEPTH_MAX 32
/* Frames whose tags are in the first line of a rank: up to this depth no other line is read. */
#define COX_DEPTH_NEAR 8
/* Bytes before the payload of a frame or slot: its length. */
#define COX_PREFIX_SIZE 4

/* Geometry of one channel, fixed at creation. */
struct cox_layout_channel {
    /* bytes of the request region; 0: none */
    uint64_t request_size;
    /* bytes of the response region */
    uint64_t response_size;
    /* bytes of one request frame, prefix included: request_size / depth */
    uint64_t frame_size;
    /* bytes from one rank's slot to the next */
    uint64_t slot_stride;
};

enum cox_layout_flags {
    COX_LAYOUT_LEGACY = 1,   /* legacy ranks may be in this group: depth 1, tokens count */
    COX_LAYOUT_SEALED = 2,   /* this is the request memory of a sealed group */
    COX_LAYOUT_MIRRORED = 8, /* ranks of the rank group are on other machines */
    COX_LAYOUT_RECORDER = 4, /* each rank has a flight recorder */
};

/* Everything up to coordinator_start, the serial, and the names of a group's objects stay
 * where they are when the version changes: so a program that cannot read the rest can identify and
 * remove what a dead group has left. */
struct cox_layout_header {
    /* stored last with release; partner: control_attach's acquire load */
    _Atomic uint64_t magic;
    uint32_t version;
    uint32_t abi;
    /* of the whole region */
    uint64_t size;
    uint32_t rank_count;
    uint32_t depth;
    uint32_t coordinator_pid;
    uint32_t flags;
    /* /proc/<pid>/stat field 22, clock ticks since boot */
    uint64_t coordinator_start;
    /* a different number for every group that had this name */
    uint32_t group_incarnation;
    /* how long waiters spin before they block; see spin.h */
    uint32_t spin_ns;
    /* part of its objects' names; see cox_name_objects */
    uint32_t serial;
    uint32_t reserved2;
    struct cox_layout_channel channels[COX_CHANNEL_COUNT];
    uint8_t padding[512 - 64 - 32 * COX_CHANNEL_COUNT];
};

struct cox_layout_abort {
    /* cox_state_abort_value: the group ends; threads that wake up leave */
    _Atomic uint32_t word;
    uint8_t padding[COX_LINE_SIZE - 4];
};

/* The record of one published frame. A rank that is not asked may read it while it is rewritten:
 * sequence becomes 0 first, then the fields are stored with release, then the new sequence with
 * release. A reader loads sequence, the fields with acquire, and sequence again. */
struct cox_layout_frame {
    _Atomic uint64_t sequence;
    /* ExecuteType, COX_TYPE_OPAQUE or COX_TYPE_OPAQUE_LARGE */
    _Atomic uint32_t type;
    /* payload bytes, the prefix not counted */
    _Atomic uint32_t length;
    _Atomic uint64_t asked[COX_RANK_COUNT_MAX / 64];
};

struct cox_layout_channel_state {
    /* last sequence in the ring; release, after its frame */
    _Atomic uint64_t published;
    /* steps up to here are cancelled: drop them */
    _Atomic uint64_t void_through;
    /* replies up to here were copied: their slots are free */
    _Atomic uint64_t ended;
    /* about when it was published, CLOCK_MONOTONIC; for display */
    _Atomic uint64_t stamp_ns;
    /* bit i: the request in frame i has ended without the replies of all ranks */
    _Atomic uint64_t cancelled_frames;
    /* 1: the coordinator's host polls an fd; ranks notify it of replies */
    _Atomic uint32_t notify;
    uint8_t padding[COX_LINE_SIZE - 44];
    struct cox_layout_frame frames[COX_DEPTH_MAX];
};

enum cox_rank_state {
    COX_RANK_IDLE = 0,
    COX_RANK_TAKEN = 1,
    COX_RANK_RUNNING = 2,
    COX_RANK_REPLYING = 3,
};

/* One rank on one channel, written by that rank only. Up to a depth of 4 everything that the
 * coordinator reads for a reply is in the first 64 bytes, the line that moves between the two
 * processors' caches in each round. What the rank stores meanwhile is behind it. */
struct cox_layout_rank_line {
    /* last sequence that was read */
    _Atomic uint64_t taken;
    /* frames up to here are returned: the rank does not read them again */
    _Atomic uint64_t returned;
    /* last sequence replied to; release, after slot and tag */
    _Atomic uint64_t done;
    _Atomic uint32_t group_incarnation;
    _Atomic uint32_t incarnation;
    /* The sequence whose reply a slot holds, for the first frames; bit 63: the reply is an
     * ExecuteResponse even for an opaque request. */
    _Atomic uint64_t tags[COX_DEPTH_NEAR];
    /* state in bits 56-63, sequence below */
    _Atomic uint64_t word;
    /* about when word last changed, CLOCK_MONOTONIC; for display */
    _Atomic uint64_t stamp_ns;
    uint64_t reserved[2];
    /* for the other frames */
    _Atomic uint64_t far_tags[COX_DEPTH_MAX - COX_DEPTH_NEAR];
    uint8_t padding[2 * COX_LINE_SIZE - 8 * (COX_DEPTH_MAX - COX_DEPTH_NEAR)];
};

enum cox_identity_state {
    COX_IDENTITY_EMPTY = 0,
    COX_IDENTITY_ATTACHED = 1,
    COX_IDENTITY_LEFT = 2,
    COX_IDENTITY_CLAIMED = 3, /* a process is attaching; there is one at a time */
};

/* EMPTY -> CLAIMED by compare-and-swap: the process that succeeds is the rank
 * CLAIMED -> ATTACHED -> LEFT   by the process that won; CLAIMED -> EMPTY when it cannot attach
 * any -> EMPTY                  by the coordinator, once that process is dead */
struct cox_layout_identity {
    /* ATTACHED: release, after the fields below */
    _Atomic uint32_t state;
    _Atomic uint32_t pid;
    _Atomic uint64_t start;
    _Atomic uint32_t incarnation;
    _Atomic uint32_t group_incarnation;
    uint8_t padding[COX_LINE_SIZE - 24];
};

struct cox_layout_rank {
    struct cox_layout_identity identity;
    struct cox_layout_rank_line lines[COX_CHANNEL_COUNT];
};

struct cox_layout_control {
    struct cox_layout_header header;
    struct cox_layout_abort abort;
    struct cox_layout_channel_state channels[COX_TWO_WAY_COUNT];
    /* header.rank_count of them */
    struct cox_layout_rank ranks[];
};

/* ---- sealed groups ---- */

/* Parts that are mapped separately begin at multiples of this, whatever the machine's page size. */
#define COX_SEALED_PAGE UINT64_C(4096)
/* The offset of the requests in the request memory. */
#define COX_SEALED_HEAD (2 * COX_SEALED_PAGE)

/* In the request memory, behind the control region. Reports of each rank that were taken out of its
 * slot of the error channel, as their low 32 bits; the rank may block on it. release, after the
 * copy; partner: cox_state_fetched. */
struct cox_layout_reports {
    _Atomic uint32_t fetched[COX_RANK_COUNT_MAX];
};

/* The word on which the ranks of one channel block; it grows with every wakeup. It is in the wake
 * memory, which ranks can write: blocking on a word in a read-only mapping costs the kernel a
 * second page-table walk (345 ns against 255, per round and rank). A process that overwrites a word
 * here delays others by a slice at most, as with all hints. */
struct cox_layout_ranks_wakeup {
    /* seq_cst, after the event, before `asleep` is loaded; partners: word_sleep and the acquire in
     * cox_gate_wake_sequence (futex_gate.c) */
    _Atomic uint32_t word;
    /* waiting ranks; one that was killed there stays counted, which costs calls */
    _Atomic uint32_t asleep;
    uint8_t padding[COX_LINE_SIZE - 8];
};

/* How many replies the request of a frame lacks: sequence in the low 56 bits, count above. */
struct cox_layout_hint {
    _Atomic uint64_t word;
    uint8_t padding[COX_LINE_SIZE - 8];
};

/* Waiters spin first, so the waker checks a count of blocked waiters and skips FUTEX_WAKE if it is
 * zero. */
struct cox_layout_wake_channel {
    /* the coordinator blocks on it; grows with every wakeup */
    _Atomic uint32_t wakeup;
    _Atomic uint32_t coordinator_sleeps;
    uint8_t padding[COX_LINE_SIZE - 8];
    /* unused on the error channel */
    struct cox_layout_ranks_wakeup ranks_wakeup;
    struct cox_layout_hint hints[COX_DEPTH_MAX];
};

struct cox_layout_wake {
    struct cox_layout_wake_channel channels[COX_CHANNEL_COUNT];
};

#define COX_LAYOUT_AT(type, member, offset)                                                        \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " moved")

COX_LAYOUT_AT(cox_layout_header, magic, 0);
COX_LAYOUT_AT(cox_layout_header, version, 8);
COX_LAYOUT_AT(cox_layout_header, abi, 12);
COX_LAYOUT_AT(cox_layout_header, size, 16);
COX_LAYOUT_AT(cox_layout_header, rank_count, 24);
COX_LAYOUT_AT(cox_layout_header, depth, 28);
COX_LAYOUT_AT(cox_layout_header, coordinator_pid, 32);
COX_LAYOUT_AT(cox_layout_header, flags, 36);
COX_LAYOUT_AT(cox_layout_header, coordinator_start, 40);
COX_LAYOUT_AT(cox_layout_header, group_incarnation, 48);
COX_LAYOUT_AT(cox_layout_header, spin_ns, 52);
COX_LAYOUT_AT(cox_layout_header, serial, 56);
COX_LAYOUT_AT(cox_layout_header, channels, 64);
_Static_assert(sizeof(struct cox_layout_header) == 512, "header size");
COX_LAYOUT_AT(cox_layout_frame, sequence, 0);
COX_LAYOUT_AT(cox_layout_frame, type, 8);
COX_LAYOUT_AT(cox_layout_frame, length, 12);
COX_LAYOUT_AT(cox_layout_frame, asked, 16);
_Static_assert(sizeof(struct cox_layout_frame) == 32, "frame record size");
COX_LAYOUT_AT(cox_layout_channel_state, published, 0);
COX_LAYOUT_AT(cox_layout_channel_state, void_through, 8);
COX_LAYOUT_AT(cox_layout_channel_state, ended, 16);
COX_LAYOUT_AT(cox_layout_channel_state, stamp_ns, 24);
COX_LAYOUT_AT(cox_layout_channel_state, cancelled_frames, 32);
COX_LAYOUT_AT(cox_layout_channel_state, notify, 40);
_Static_assert(COX_DEPTH_MAX <= 64, "a bit for each frame");
COX_LAYOUT_AT(cox_layout_channel_state, frames, COX_LINE_SIZE);
_Static_assert(sizeof(struct cox_layout_channel_state) == 1152, "channel state size");
COX_LAYOUT_AT(cox_layout_rank_line, taken, 0);
COX_LAYOUT_AT(cox_layout_rank_line, returned, 8);
COX_LAYOUT_AT(cox_layout_rank_line, done, 16);
COX_LAYOUT_AT(cox_layout_rank_line, group_incarnation, 24);
COX_LAYOUT_AT(cox_layout_rank_line, incarnation, 28);
COX_LAYOUT_AT(cox_layout_rank_line, tags, 32);
COX_LAYOUT_AT(cox_layout_rank_line, word, 96);
COX_LAYOUT_AT(cox_layout_rank_line, stamp_ns, 104);
COX_LAYOUT_AT(cox_layout_rank_line, reserved, 112);
COX_LAYOUT_AT(cox_layout_rank_line, far_tags, COX_LINE_SIZE);
_Static_assert(sizeof(struct cox_layout_rank_line) == 3 * COX_LINE_SIZE, "rank line size");
COX_LAYOUT_AT(cox_layout_identity, pid, 4);
COX_LAYOUT_AT(cox_layout_identity, start, 8);
COX_LAYOUT_AT(cox_layout_identity, incarnation, 16);
_Static_assert(sizeof(struct cox_layout_identity) == COX_LINE_SIZE, "identity line size");
_Static_assert(sizeof(struct cox_layout_rank) == 16 * COX_LINE_SIZE, "rank size");
COX_LAYOUT_AT(cox_layout_control, abort, 512);
COX_LAYOUT_AT(cox_layout_control, channels, 640);
COX_LAYOUT_AT(cox_layout_control, ranks, 5248);
_Static_assert(sizeof(struct cox_layout_reports) == 512, "reports size");
COX_LAYOUT_AT(cox_layout_wake_channel, ranks_wakeup, COX_LINE_SIZE);
COX_LAYOUT_AT(cox_layout_wake_channel, hints, 2 * COX_LINE_SIZE);
_Static_assert(sizeof(struct cox_layout_wake_channel) == 34 * COX_LINE_SIZE, "wake channel size");
_Static_assert(sizeof(struct cox_layout_control) + sizeof(struct cox_layout_reports) <=
                   COX_SEALED_HEAD,
               "the first pages of the request memory");
_Static_assert(sizeof(struct cox_layout_rank) <= COX_SEALED_PAGE, "the first page of a rank's");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "a futex is a lock-free 32-bit word");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "shared words need lock-free 64-bit atomics");

static inline uint64_t cox_layout_control_size(uint32_t rank_count)
{
    return sizeof(struct cox_layout_control) +
           (uint64_t)rank_count * sizeof(struct cox_layout_rank);
}

#define COX_STATE_SHIFT 56
static inline uint64_t cox_state_word(enum cox_rank_state state, uint64_t sequence)
{
    return ((uint64_t)state << COX_STATE_SHIFT) |
           (sequence & ((UINT64_C(1) << COX_STATE_SHIFT) - 1));
}

#endif
