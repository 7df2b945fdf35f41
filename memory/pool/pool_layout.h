/*
 * pool_layout: the words of a pool in shared memory. Private to the library.
 *
 * All zero is the initial state of everything but block words (FREE, epoch 1) and the header.
 * Areas follow one another, each aligned to a line of 128 bytes (struct cox_pool_geometry has the
 * offsets):
 *
 *   offset 0     header     constants, written before magic; queues.
 *                           4096 bytes
 *          4096  owners[]   one line per process: its identity and counters
 *          ...   blocks[]   a word per block: {epoch, phase, owner}. Slab: per unit of
 *                           block_size
 *                pins[]     four per block: the messages that pin it
 *                hints[]    a bit per block: may be free. Only a hint; the block's word is
 *                           authoritative
 *                slabs[]    slab: how each slab is divided
 *                pages[]    on_demand: a byte per block (slab): whether its pages are allocated
 *                rows[]     reference rows, one per owner: u16 counts per block, written by that
 *                           process alone, and by the process that sweeps it after its death
 *
 * Unless stated otherwise every word is seq_cst: the protocol (pool.h) is that two processes each
 * write one word and then read the other's.
 */
#ifndef COX_MEMORY_POOL_LAYOUT_H
#define COX_MEMORY_POOL_LAYOUT_H

#include <coxswain/memory/pool.h>

#include <stdatomic.h>

#define COX_POOL_LINE_SIZE 128
#define COX_POOL_PAGE_SIZE 4096
#define COX_POOL_MAGIC UINT64_C(0x314C4F4F50584F43) /* "COXPOOL1" */
#define COX_POOL_VERSION 1
#define COX_POOL_ON_DEMAND 1u /* in flags */

/* A queue exists while some owner's `joined` has its bit. Changed under `queues_lock`. */
struct cox_pool_layout_queue {
    /* 0: none */
    _Atomic uint64_t queue_id;
    /* incremented each time the place is taken */
    _Atomic uint64_t queue_epoch;
};

struct cox_pool_layout_header {
    /* stored last, with release */
    _Atomic uint64_t pool_magic;
    uint32_t version;
    uint32_t strategy;
    uint64_t id;
    /* identifies the boot and the namespaces in which pids and start times are valid */
    uint64_t system;
    uint32_t domain_kind;
    uint32_t domain_device;
    uint64_t block_size;
    /* slab: units of block_size */
    uint32_t block_count;
    uint32_t owner_count;
    /* fixed: 0 */
    uint64_t slab_size;
    uint32_t slab_count;
    uint32_t flags;
    uint64_t retain_size;
    /* bytes of all blocks */
    uint64_t memory_size;
    /* bytes of the words */
    uint64_t words_size;
    /* of the blocks' file; 0: the domain's memory is no file */
    uint64_t blocks_ino;
    uint64_t blocks_dev;
    /* cox_handle_crc of the bytes from version to here */
    uint32_t constants_crc;
    uint8_t padding[COX_POOL_LINE_SIZE - 116];
    /* Written by many processes: a line each. */
    /* rows from here on were never used; only grows */
    _Atomic uint32_t owner_high;
    uint8_t padding_0[COX_POOL_LINE_SIZE - 4];
    /* 0, or cox_pool_identity of the process that has it */
    _Atomic uint64_t queues_lock;
    uint8_t padding_1[COX_POOL_LINE_SIZE - 8];
    /* bytes of free blocks whose pages are allocated; approximate */
    _Atomic int64_t retained;
    uint8_t padding_2[COX_POOL_LINE_SIZE - 8];
    struct cox_pool_layout_queue queues[COX_POOL_QUEUE_COUNT_MAX];
    uint8_t padding_3[COX_POOL_PAGE_SIZE - 4 * COX_POOL_LINE_SIZE - 16 * COX_POOL_QUEUE_COUNT_MAX];
};

/* EMPTY -> LIVE                  compare-and-swap by the new owner
 * LIVE, SWEEPING -> SWEEPING     compare-and-swap by a process that found the one in the word dead,
 *                                or by the owner as it leaves; the winner finishes or dies
 * SWEEPING -> EMPTY, LIVE        by the sweeping process, when the row is all zero
 */
enum cox_pool_owner_state {
    COX_POOL_OWNER_EMPTY = 0,
    COX_POOL_OWNER_LIVE = 5,
    COX_POOL_OWNER_SWEEPING = 10, /* pid and start are those of the sweeping process */
};

struct cox_pool_layout_owner {
    /* cox_pool_identity */
    _Atomic uint64_t owner_identity;
    /* a bit per queue */
    _Atomic uint64_t owner_joined;
    /* for display */
    _Atomic uint32_t owner_incarnation;
    uint32_t reserved;
    /* For display; totals of the row over all its owners. */
    _Atomic uint64_t owner_allocated;
    _Atomic uint64_t owner_freed;
    _Atomic uint64_t owner_swept;
    uint8_t padding[COX_POOL_LINE_SIZE - 48];
};

struct cox_pool_layout_block {
    /* cox_pool_word */
    _Atomic uint64_t block_word;
};

struct cox_pool_layout_pins {
    /* cox_pool_pin_word; 0: none */
    _Atomic uint64_t pin_word[COX_POOL_PIN_COUNT_MAX];
};

struct cox_pool_layout_hints {
    _Atomic uint64_t hint_bits;
};

struct cox_pool_layout_slab {
    /* cox_pool_slab_word */
    _Atomic uint64_t slab_word;
    /* blocks; a hint */
    _Atomic uint32_t slab_used;
    uint32_t reserved;
};

/* Changed only by the owner that has the block (slab) in CLAIMED. */
enum cox_pool_pages {
    COX_POOL_PAGES_NONE = 0,
    COX_POOL_PAGES_SOME = 1, /* maybe: being allocated or released */
    COX_POOL_PAGES_ALL = 2,
};

struct cox_pool_layout_pages {
    _Atomic uint8_t page_state;
};

struct cox_pool_layout_count {
    _Atomic uint16_t ref_count;
};
#define COX_POOL_COUNT_MAX UINT16_MAX

#define COX_POOL_AT(type, member, offset)                                                          \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " moved")

COX_POOL_AT(cox_pool_layout_queue, queue_epoch, 8);
_Static_assert(sizeof(struct cox_pool_layout_queue) == 16, "queue size");
COX_POOL_AT(cox_pool_layout_header, pool_magic, 0);
COX_POOL_AT(cox_pool_layout_header, version, 8);
COX_POOL_AT(cox_pool_layout_header, strategy, 12);
COX_POOL_AT(cox_pool_layout_header, id, 16);
COX_POOL_AT(cox_pool_layout_header, system, 24);
COX_POOL_AT(cox_pool_layout_header, domain_kind, 32);
COX_POOL_AT(cox_pool_layout_header, domain_device, 36);
COX_POOL_AT(cox_pool_layout_header, block_size, 40);
COX_POOL_AT(cox_pool_layout_header, block_count, 48);
COX_POOL_AT(cox_pool_layout_header, owner_count, 52);
COX_POOL_AT(cox_pool_layout_header, slab_size, 56);
COX_POOL_AT(cox_pool_layout_header, slab_count, 64);
COX_POOL_AT(cox_pool_layout_header, flags, 68);
COX_POOL_AT(cox_pool_layout_header, retain_size, 72);
COX_POOL_AT(cox_pool_layout_header, memory_size, 80);
COX_POOL_AT(cox_pool_layout_header, words_size, 88);
COX_POOL_AT(cox_pool_layout_header, blocks_ino, 96);
COX_POOL_AT(cox_pool_layout_header, blocks_dev, 104);
COX_POOL_AT(cox_pool_layout_header, constants_crc, 112);
COX_POOL_AT(cox_pool_layout_header, owner_high, 128);
COX_POOL_AT(cox_pool_layout_header, queues_lock, 256);
COX_POOL_AT(cox_pool_layout_header, retained, 384);
COX_POOL_AT(cox_pool_layout_header, queues, 512);
_Static_assert(sizeof(struct cox_pool_layout_header) == COX_POOL_PAGE_SIZE, "header size");
COX_POOL_AT(cox_pool_layout_owner, owner_identity, 0);
COX_POOL_AT(cox_pool_layout_owner, owner_joined, 8);
COX_POOL_AT(cox_pool_layout_owner, owner_incarnation, 16);
COX_POOL_AT(cox_pool_layout_owner, owner_allocated, 24);
COX_POOL_AT(cox_pool_layout_owner, owner_freed, 32);
COX_POOL_AT(cox_pool_layout_owner, owner_swept, 40);
_Static_assert(sizeof(struct cox_pool_layout_owner) == COX_POOL_LINE_SIZE, "owner line size");
_Static_assert(sizeof(struct cox_pool_layout_block) == 8, "block size");
_Static_assert(sizeof(struct cox_pool_layout_pins) == 32, "pins size");
_Static_assert(sizeof(struct cox_pool_layout_hints) == 8, "hints size");
COX_POOL_AT(cox_pool_layout_slab, slab_used, 8);
_Static_assert(sizeof(struct cox_pool_layout_slab) == 16, "slab size");
_Static_assert(sizeof(struct cox_pool_layout_pages) == 1, "pages size");
_Static_assert(sizeof(struct cox_pool_layout_count) == 2, "count size");

/* ---- words ---- */

/* Of a block: {epoch:48, phase:4, owner:12}. */
enum cox_pool_phase {
    COX_POOL_FREE = 0,
    COX_POOL_CLAIMED = 1, /* by owner, before its reference is known to others */
    COX_POOL_USED = 2,
    COX_POOL_CLOSING = 3, /* by owner, which checks whether anything counts it */
};
#define COX_POOL_EPOCH_MAX ((UINT64_C(1) << 48) - 1)

struct cox_pool_word {
    uint64_t epoch;
    uint32_t phase;
    uint32_t owner;
};

static inline uint64_t cox_pool_word(uint64_t epoch, enum cox_pool_phase phase, uint32_t owner)
{
    return epoch << 16 | (uint64_t)phase << 12 | owner;
}

static inline struct cox_pool_word cox_pool_word_split(uint64_t word)
{
    return (struct cox_pool_word){word >> 16, word >> 12 & 0xf, word & 0xfff};
}

/* 0 is never an epoch. */
static inline uint64_t cox_pool_epoch_next(uint64_t epoch)
{
    return epoch >= COX_POOL_EPOCH_MAX ? 1 : epoch + 1;
}

/* Of an owner, and of queues_lock: {state:4, pid:22, start:38}. pids have 22 bits (PID_MAX_LIMIT);
 * 38 bits of clock ticks last 87 years. */
static inline uint64_t cox_pool_identity(enum cox_pool_owner_state state, int32_t pid,
                                         uint64_t start)
{
    return (uint64_t)state << 60 | ((uint64_t)pid & 0x3fffff) << 38 |
           (start & ((UINT64_C(1) << 38) - 1));
}

static inline uint32_t cox_pool_identity_state(uint64_t identity)
{
    return (uint32_t)(identity >> 60);
}

static inline int32_t cox_pool_identity_pid(uint64_t identity)
{
    return (int32_t)(identity >> 38 & 0x3fffff);
}

static inline uint64_t cox_pool_identity_start(uint64_t identity)
{
    return identity & ((UINT64_C(1) << 38) - 1);
}

/* {tag:48, epoch of the queue's place:10, place:6}: the epoch distinguishes pins of a queue that is
 * gone from those of the next one in its place. */
static inline uint64_t cox_pool_pin_word(uint64_t tag, uint64_t epoch, uint32_t place)
{
    return tag << 16 | (epoch & 0x3ff) << 6 | place;
}

/* Of a slab: {turn:24, value:24, phase:4, owner:12}. turn changes each time the slab stops being
 * EMPTY, so that a compare-and-swap with an old word fails.
 *
 *   EMPTY -> CLAIMED(owner)           -> CUT(class)     blocks of block_size << class
 *            CUT -> LEAVING(owner)    -> EMPTY          all of them are free, and stay so
 *                                     -> CUT            some are not
 *   EMPTY -> CLAIMED(owner)           -> RUN(length)    one block of so many slabs; the others are
 *                                     TAIL(first)
 *            RUN -> CLAIMED(owner)    -> EMPTY          the block is free
 *   EMPTY -> TAIL(first)              -> EMPTY          by the owner of the first one's CLAIMED
 */
enum cox_pool_slab_phase {
    COX_POOL_SLAB_EMPTY = 0,
    COX_POOL_SLAB_CLAIMED = 1,
    COX_POOL_SLAB_CUT = 2,
    COX_POOL_SLAB_LEAVING = 3,
    COX_POOL_SLAB_RUN = 4,
    COX_POOL_SLAB_TAIL = 5,
};

struct cox_pool_slab_word {
    uint32_t turn;
    uint32_t value;
    uint32_t phase;
    uint32_t owner;
};

static inline uint64_t cox_pool_slab_word(uint32_t turn, uint32_t value,
                                          enum cox_pool_slab_phase phase, uint32_t owner)
{
    return (uint64_t)(turn & 0xffffff) << 40 | (uint64_t)(value & 0xffffff) << 16 |
           (uint64_t)phase << 12 | owner;
}

static inline struct cox_pool_slab_word cox_pool_slab_word_split(uint64_t word)
{
    return (struct cox_pool_slab_word){(uint32_t)(word >> 40), (uint32_t)(word >> 16) & 0xffffff,
                                       (uint32_t)(word >> 12) & 0xf, (uint32_t)word & 0xfff};
}

#endif
