#include "group_mirror.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/peer.h"
#include "channel/shm/region.h"
#include "group_memory.h"
#include "group_private.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What of a rank follows in a message. */
#define ENTRY_IDENTITY 1u
#define ENTRY_PART 2u
#define ENTRY_VALUE 3u

/* A message is a sequence of entries of 64-bit words, little-endian:
 *   {kind:8, rank:8, slot:8, value bytes:32}
 *   identity: holder state, incarnation, {said_count:32, said_size:32}, said_dead
 *   part: arrived, aborted, what[0], what[1], name_hash, members_hash, because, and the value,
 *   padded value: index, and the value, padded: of the round before the part that follows, which
 *   was not copied
 *     then, because the rank was at the next one already
 * The process of a rank means nothing on another machine: there the mirror's own stands for it. */
#define HEAD_WORDS 1
#define IDENTITY_WORDS 4
#define PART_WORDS 7
#define VALUE_WORDS 1

struct part_seen {
    uint64_t arrived, aborted, name_hash;
};

struct rank_seen {
    uint64_t holder;
    uint32_t said_dead;
    struct part_seen parts[COX_GROUP_PART_COUNT];
};

struct cox_group_mirror {
    struct cox_group_mirror_options options;
    /* named form only */
    struct cox_region region;
    struct cox_group_layout_rank *ranks[COX_RANK_COUNT_MAX];
    struct cox_group_layout_wakeup *wakeup, *wakeups;
    uint8_t *values[COX_RANK_COUNT_MAX];
    pid_t pid;
    uint64_t start;
    /* what was collected last, of ranks here; of collect's thread */
    struct rank_seen seen[COX_RANK_COUNT_MAX];
};

static void put(uint8_t **at, uint64_t word)
{
    cox_le64_put(*at, word);
    *at += sizeof word;
}

static uint64_t get(const uint8_t *bytes, size_t index)
{
    return cox_le64_get(bytes + index * sizeof(uint64_t));
}

static size_t padded(size_t size)
{
    return (size + 7) & ~(size_t)7;
}

/* One object. */
static int mirror_map(struct cox_group_mirror *mirror, struct cox_error *err)
{
    const struct cox_group_mirror_options *options = &mirror->options;
    int r = cox_region_map_part(&mirror->region, options->fd, options->fd_offset,
                                cox_group_memory_size(options->rank_count, options->value_size),
                                COX_REGION_WRITE, "the group's memory", err);
    if (r)
        return r;
    uint8_t *bytes = mirror->region.base;
    struct cox_group_layout *layout = mirror->region.base;
    mirror->wakeup = &layout->wakeup;
    mirror->wakeups = (struct cox_group_layout_wakeup *)(void *)(bytes + cox_group_wakeups_offset(
                                                                             options->rank_count));
    for (uint32_t rank = 0; rank < options->rank_count; rank++) {
        mirror->ranks[rank] = &layout->ranks[rank];
        mirror->values[rank] = bytes + cox_group_values_offset(options->rank_count) +
                               rank * cox_group_values_stride(options->value_size);
    }
    return 0;
}

/* As a rank does before it joins an incarnation (words_reset of group_memory.c), for a rank of
 * another machine. */
static void rank_reset(struct cox_group_layout_rank *rank)
{
    atomic_store_explicit(&rank->identity.holder, 0, memory_order_seq_cst);
    (void)atomic_load_explicit(&rank->identity.holder, memory_order_seq_cst);
    cox_group_parts_reset(rank);
}

static bool is_here(const struct cox_group_mirror *mirror, uint32_t rank)
{
    return rank >= mirror->options.rank_first &&
           rank - mirror->options.rank_first < mirror->options.rank_here;
}

/* An object for each rank, which stays over incarnations. */
static void mirror_place(struct cox_group_mirror *mirror)
{
    const struct cox_group_mirror_options *options = &mirror->options;
    mirror->wakeup = options->wakeups;
    mirror->wakeups = mirror->wakeup + 1;
    for (uint32_t rank = 0; rank < options->rank_count; rank++) {
        mirror->ranks[rank] = options->words[rank];
        mirror->values[rank] = options->values[rank];
        if (!is_here(mirror, rank))
            rank_reset(mirror->ranks[rank]);
    }
}

int cox_group_mirror_open(const struct cox_group_mirror_options *options,
                          struct cox_group_mirror **ret_mirror, struct cox_error *err)
{
    if (options->rank_count == 0 || options->rank_count > COX_RANK_COUNT_MAX ||
        options->rank_first >= options->rank_count || options->rank_here == 0 ||
        options->rank_here > options->rank_count - options->rank_first)
        return cox_fail(
            err, COX_INVALID, "a mirror of ranks %" PRIu32 " to %" PRIu32 " of %" PRIu32,
            options->rank_first, options->rank_first + options->rank_here - 1, options->rank_count);
    struct cox_group_mirror *mirror = calloc(1, sizeof *mirror);
    if (!mirror)
        return cox_fail(err, -ENOMEM, "no memory for a mirror of the rank group");
    mirror->options = *options;
    mirror->pid = getpid();
    int r = cox_peer_start_time(mirror->pid, &mirror->start);
    if (r == 0 && options->fd >= 0)
        r = mirror_map(mirror, err);
    else if (r == 0)
        mirror_place(mirror);
    if (r) {
        free(mirror);
        return r;
    }
    *ret_mirror = mirror;
    return 0;
}

struct cox_group_mirror *cox_group_mirror_close(struct cox_group_mirror *mirror)
{
    if (mirror)
        cox_region_detach(&mirror->region);
    free(mirror);
    return NULL;
}

static uint8_t *value_of(const struct cox_group_mirror *mirror, uint32_t rank, uint32_t slot,
                         uint32_t index)
{
    const uint64_t rounded = cox_group_round_up(mirror->options.value_size, COX_GROUP_LINE_SIZE);
    const uint32_t parity = index & 1;
    return mirror->values[rank] +
           (slot == 0 ? parity * rounded
                      : 2 * rounded + (2 * (slot - 1) + parity) * (uint64_t)COX_SUBGROUP_SLOT_SIZE);
}

static uint32_t value_size_max(const struct cox_group_mirror *mirror, uint32_t slot)
{
    return slot == 0 ? mirror->options.value_size : COX_SUBGROUP_SLOT_SIZE;
}

/* Bytes of the value that an operation gives. A value that goes in pieces is longer than its slot:
 * the last piece may be shorter, which does no harm. */
static uint32_t value_size(const struct cox_group_mirror *mirror, uint32_t slot, uint64_t what)
{
    const uint32_t max = value_size_max(mirror, slot), detail = (uint32_t)(what >> 8);
    switch ((uint8_t)what) {
    case COX_GROUP_GATHER:
        return detail < max ? detail : detail == UINT32_MAX ? 0 : max;
    case COX_GROUP_GATHER_FDS:
    case COX_GROUP_BROADCAST_FD:
        return max < COX_SUBGROUP_SLOT_SIZE ? max : COX_SUBGROUP_SLOT_SIZE;
    default:
        return 0;
    }
}

size_t cox_group_mirror_size_max(const struct cox_group_mirror *mirror)
{
    const size_t values =
        mirror->options.value_size + (size_t)COX_SUBGROUP_COUNT_MAX * COX_SUBGROUP_SLOT_SIZE;
    const size_t words = 2 * (HEAD_WORDS + IDENTITY_WORDS) +
                         COX_GROUP_PART_COUNT * (2 * (HEAD_WORDS + 1) + PART_WORDS + VALUE_WORDS);
    return mirror->options.rank_here * (words * sizeof(uint64_t) + 2 * padded(values));
}

/* ---- collect ---- */

/* False: what the rank's memory says is of the incarnation before (the sealed form). */
static bool rank_is_in(const struct cox_group_mirror *mirror, uint32_t rank)
{
    const struct cox_group_layout_identity *identity = &mirror->ranks[rank]->identity;
    return atomic_load_explicit(&identity->incarnation, memory_order_relaxed) ==
           mirror->options.incarnation;
}

static void collect_identity(struct cox_group_mirror *mirror, uint32_t rank, uint64_t holder,
                             uint32_t said_dead, uint8_t **at)
{
    const struct cox_group_layout_identity *identity = &mirror->ranks[rank]->identity;
    if ((holder == mirror->seen[rank].holder && said_dead == mirror->seen[rank].said_dead) ||
        holder == 0 || cox_group_holder_state(holder) == COX_GROUP_CLAIMED ||
        !rank_is_in(mirror, rank))
        return;
    mirror->seen[rank].holder = holder;
    mirror->seen[rank].said_dead = said_dead;
    put(at, (uint64_t)ENTRY_IDENTITY | (uint64_t)rank << 8);
    put(at, (uint64_t)cox_group_holder_state(holder));
    put(at, atomic_load_explicit(&identity->incarnation, memory_order_relaxed));
    put(at, (uint64_t)atomic_load_explicit(&identity->said_count, memory_order_relaxed) << 32 |
                atomic_load_explicit(&identity->said_size, memory_order_relaxed));
    put(at, said_dead);
}

static void collect_part(struct cox_group_mirror *mirror, uint32_t rank, uint32_t slot,
                         uint8_t **at)
{
    const struct cox_group_layout_part *part = &mirror->ranks[rank]->parts[slot];
    struct part_seen *seen = &mirror->seen[rank].parts[slot];
    /* acquire, all: partners are part_arrive, part_say_gone and subgroup_say. */
    const struct part_seen now = {
        .arrived = atomic_load_explicit(&part->arrived, memory_order_acquire),
        .aborted = atomic_load_explicit(&part->aborted, memory_order_acquire),
        .name_hash = atomic_load_explicit(&part->name_hash, memory_order_acquire),
    };
    if (!memcmp(&now, seen, sizeof now))
        return;
    /* Stored twice: a flipped bit is no arrival. The rank stores it again. */
    if (now.arrived && atomic_load_explicit(&part->mirror, memory_order_relaxed) !=
                           cox_group_mirror(mirror->options.incarnation, now.arrived))
        return;
    const uint32_t index = (uint32_t)now.arrived & COX_GROUP_INDEX_MASK;
    const uint64_t what = atomic_load_explicit(&part->what[index & 1], memory_order_relaxed);
    const uint32_t size =
        now.arrived != seen->arrived && what >> 40 == index ? value_size(mirror, slot, what) : 0;
    /* Ranks elsewhere may be in the round before still: they need its value. It was not copied if
     * the rank has arrived twice since. */
    const uint32_t before = (index - 1) & COX_GROUP_INDEX_MASK;
    const uint64_t what_before =
        atomic_load_explicit(&part->what[before & 1], memory_order_relaxed);
    const uint32_t size_before = seen->arrived != now.arrived && seen->arrived + 1 != now.arrived &&
                                         what_before >> 40 == before
                                     ? value_size(mirror, slot, what_before)
                                     : 0;
    uint8_t *const start = *at;
    if (size_before) {
        put(at, (uint64_t)ENTRY_VALUE | (uint64_t)rank << 8 | (uint64_t)slot << 16 |
                    (uint64_t)size_before << 32);
        put(at, cox_group_arrived(now.arrived >> COX_GROUP_INDEX_BITS, before));
        memcpy(*at, value_of(mirror, rank, slot, before), size_before);
        *at += padded(size_before);
    }
    put(at,
        (uint64_t)ENTRY_PART | (uint64_t)rank << 8 | (uint64_t)slot << 16 | (uint64_t)size << 32);
    put(at, now.arrived);
    put(at, now.aborted);
    put(at, atomic_load_explicit(&part->what[0], memory_order_relaxed));
    put(at, atomic_load_explicit(&part->what[1], memory_order_relaxed));
    put(at, now.name_hash);
    put(at, atomic_load_explicit(&part->members_hash, memory_order_relaxed));
    put(at, atomic_load_explicit(&part->because, memory_order_relaxed));
    if (size)
        memcpy(*at, value_of(mirror, rank, slot, index), size);
    *at += padded(size);
    /* The rank may have given up this epoch, and have begun to write a value of the next one: then
     * the next call copies that. seq_cst: partner is part_align, as in epoch_verify. */
    if ((size || size_before) &&
        atomic_load_explicit(&part->arrived, memory_order_seq_cst) >> COX_GROUP_INDEX_BITS !=
            now.arrived >> COX_GROUP_INDEX_BITS)
        *at = start;
    else
        *seen = now;
}

/* The others must see what a rank did in the order in which it did it. Its state is read first and
 * written last: before it left, it has arrived at all that it took part in. Whose death it reports
 * is written first, and read again at the end: before it aborted because of it, it said so. */
static void collect_rank(struct cox_group_mirror *mirror, uint32_t rank, uint8_t **at)
{
    const struct cox_group_layout_identity *identity = &mirror->ranks[rank]->identity;
    uint8_t *const start = *at;
    /* acquire, all: the fields beside it, and its arrivals; partner is identity_say. */
    const uint64_t holder = atomic_load_explicit(&identity->holder, memory_order_acquire);
    uint32_t said_dead = atomic_load_explicit(&identity->said_dead, memory_order_acquire);
    for (uint32_t again = 0; again < 2; again++) {
        const struct rank_seen before = mirror->seen[rank];
        collect_identity(mirror, rank, before.holder, said_dead, at);
        for (uint32_t slot = 0; slot < COX_GROUP_PART_COUNT; slot++)
            collect_part(mirror, rank, slot, at);
        const uint32_t now = atomic_load_explicit(&identity->said_dead, memory_order_acquire);
        if (now == said_dead || again)
            break; /* it says so once */
        said_dead = now;
        mirror->seen[rank] = before;
        *at = start;
    }
    collect_identity(mirror, rank, holder, said_dead, at);
}

size_t cox_group_mirror_collect(struct cox_group_mirror *mirror, uint8_t *buffer)
{
    uint8_t *at = buffer;
    const uint32_t end = mirror->options.rank_first + mirror->options.rank_here;
    for (uint32_t rank = mirror->options.rank_first; rank < end; rank++) {
        collect_rank(mirror, rank, &at);
    }
    return (size_t)(at - buffer);
}

void cox_group_mirror_wait(struct cox_group_mirror *mirror, uint64_t deadline_ns)
{
    struct cox_group_layout_wakeup *wakeup = mirror->wakeup;
    const uint32_t seen = atomic_load_explicit(&wakeup->mirror, memory_order_seq_cst);
    /* seq_cst, both sides: this thread stores that it sleeps and then looks at the ranks' words; a
     * rank changes its words and then looks whether the mirror sleeps. Partner:
     * cox_group_tell_mirror. */
    atomic_store_explicit(&wakeup->mirror_sleeps, 1, memory_order_seq_cst);
    bool news = false;
    const uint32_t end = mirror->options.rank_first + mirror->options.rank_here;
    for (uint32_t rank = mirror->options.rank_first; rank < end && !news; rank++) {
        const struct cox_group_layout_rank *own = mirror->ranks[rank];
        const uint64_t holder = atomic_load_explicit(&own->identity.holder, memory_order_seq_cst);
        news = holder != mirror->seen[rank].holder &&
               cox_group_holder_state(holder) != COX_GROUP_CLAIMED;
        for (uint32_t slot = 0; slot < COX_GROUP_PART_COUNT && !news; slot++)
            news = atomic_load_explicit(&own->parts[slot].arrived, memory_order_seq_cst) !=
                       mirror->seen[rank].parts[slot].arrived ||
                   atomic_load_explicit(&own->parts[slot].aborted, memory_order_seq_cst) !=
                       mirror->seen[rank].parts[slot].aborted;
    }
    if (!news)
        cox_futex_wait(&wakeup->mirror, seen, deadline_ns);
    atomic_store_explicit(&wakeup->mirror_sleeps, 0, memory_order_relaxed);
}

void cox_group_mirror_forget(struct cox_group_mirror *mirror)
{
    memset(mirror->seen, 0, sizeof mirror->seen);
}

void cox_group_mirror_wake(struct cox_group_mirror *mirror)
{
    atomic_fetch_add_explicit(&mirror->wakeup->mirror, 1, memory_order_seq_cst);
    cox_futex_wake(&mirror->wakeup->mirror);
}

/* ---- apply ---- */

static void apply_identity(struct cox_group_mirror *mirror, uint32_t rank, const uint8_t *words)
{
    struct cox_group_layout_identity *identity = &mirror->ranks[rank]->identity;
    const uint64_t said = get(words, 2);
    atomic_store_explicit(&identity->incarnation, get(words, 1), memory_order_relaxed);
    atomic_store_explicit(&identity->said_count, (uint32_t)(said >> 32), memory_order_relaxed);
    atomic_store_explicit(&identity->said_size, (uint32_t)said, memory_order_relaxed);
    atomic_store_explicit(&identity->said_dead, (uint32_t)get(words, 3), memory_order_relaxed);
    /* release: as identity_say. */
    atomic_store_explicit(
        &identity->holder,
        cox_group_holder((enum cox_group_state)get(words, 0), mirror->pid, mirror->start),
        memory_order_release);
    cox_group_wake(mirror->wakeup);
}

/* As part_align: the word of a new epoch is there before its first value. Returns true if it is
 * new. */
static bool apply_epoch(const struct cox_group_mirror *mirror, struct cox_group_layout_part *part,
                        uint64_t arrived)
{
    const uint64_t before = atomic_load_explicit(&part->arrived, memory_order_relaxed);
    if (arrived >> COX_GROUP_INDEX_BITS == before >> COX_GROUP_INDEX_BITS)
        return false;
    const uint64_t first = cox_group_arrived(arrived >> COX_GROUP_INDEX_BITS, 0);
    atomic_store_explicit(&part->mirror, cox_group_mirror(mirror->options.incarnation, first),
                          memory_order_relaxed);
    atomic_store_explicit(&part->arrived, first, memory_order_seq_cst);
    (void)atomic_load_explicit(&part->arrived, memory_order_seq_cst);
    return true;
}

static void apply_part(struct cox_group_mirror *mirror, uint32_t rank, uint32_t slot,
                       const uint8_t *words, const uint8_t *value, uint32_t size)
{
    struct cox_group_layout_part *part = &mirror->ranks[rank]->parts[slot];
    const uint64_t incarnation = mirror->options.incarnation;
    const uint64_t arrived = get(words, 0), aborted = get(words, 1), name_hash = get(words, 4);
    const bool gone = aborted != atomic_load_explicit(&part->aborted, memory_order_relaxed);
    const bool formed = name_hash != atomic_load_explicit(&part->name_hash, memory_order_relaxed);
    const bool aligned = apply_epoch(mirror, part, arrived);
    if (size)
        memcpy(value_of(mirror, rank, slot, (uint32_t)arrived & COX_GROUP_INDEX_MASK), value, size);
    atomic_store_explicit(&part->members_hash, get(words, 5), memory_order_relaxed);
    atomic_store_explicit(&part->name_hash, name_hash, memory_order_release);
    atomic_store_explicit(&part->what[0], get(words, 2), memory_order_relaxed);
    atomic_store_explicit(&part->what[1], get(words, 3), memory_order_relaxed);
    atomic_store_explicit(&part->mirror, cox_group_mirror(incarnation, arrived),
                          memory_order_relaxed);
    /* release: as part_arrive. */
    atomic_store_explicit(&part->arrived, arrived, memory_order_release);
    atomic_store_explicit(&part->because, (uint32_t)get(words, 6), memory_order_relaxed);
    atomic_store_explicit(&part->aborted, aborted, memory_order_release);
    cox_fault_point(COX_FAULT_GROUP_ARRIVED);
    if (gone || formed || aligned)
        cox_group_wake(mirror->wakeup);
}

int cox_group_mirror_apply(struct cox_group_mirror *mirror, uint32_t rank_first,
                           uint32_t rank_count, const uint8_t *bytes, size_t size,
                           struct cox_error *err)
{
    bool arrived = false;
    while (size >= sizeof(uint64_t)) {
        const uint64_t head = get(bytes, 0);
        const uint32_t kind = (uint8_t)head, rank = (uint8_t)(head >> 8);
        const uint32_t slot = (uint8_t)(head >> 16), value = (uint32_t)(head >> 32);
        const size_t fixed = (size_t)(HEAD_WORDS + (kind == ENTRY_IDENTITY ? IDENTITY_WORDS
                                                    : kind == ENTRY_PART   ? PART_WORDS
                                                                           : VALUE_WORDS)) *
                             sizeof head;
        if (kind < ENTRY_IDENTITY || kind > ENTRY_VALUE || rank < rank_first ||
            rank >= rank_first + rank_count || rank >= mirror->options.rank_count ||
            is_here(mirror, rank))
            return cox_fail(err, COX_CORRUPT,
                            "what another machine says of rank %" PRIu32 " is not its to say",
                            rank);
        if (slot >= COX_GROUP_PART_COUNT ||
            value > value_size_max(mirror, slot < COX_GROUP_PART_COUNT ? slot : 1) ||
            size < fixed + padded(value))
            return cox_fail(err, COX_CORRUPT,
                            "what another machine says of rank %" PRIu32 " is cut off", rank);
        if (kind == ENTRY_IDENTITY)
            apply_identity(mirror, rank, bytes + sizeof head);
        else if (kind == ENTRY_PART)
            apply_part(mirror, rank, slot, bytes + sizeof head, bytes + fixed, value);
        else {
            apply_epoch(mirror, &mirror->ranks[rank]->parts[slot], get(bytes, 1));
            memcpy(value_of(mirror, rank, slot, (uint32_t)get(bytes, 1) & COX_GROUP_INDEX_MASK),
                   bytes + fixed, value);
        }
        arrived = arrived || kind == ENTRY_PART;
        bytes += fixed + padded(value);
        size -= fixed + padded(value);
    }
    /* Ranks that were counted wait for the last one to wake them, which may be elsewhere. */
    if (arrived) {
        cox_group_wake(mirror->wakeup);
        for (uint32_t i = 0; i < mirror->options.rank_count * COX_SUBGROUP_COUNT_MAX; i++)
            if (atomic_load_explicit(&mirror->wakeups[i].word, memory_order_relaxed) &
                COX_GROUP_WAKEUP_SLEEPS)
                cox_group_wake(&mirror->wakeups[i]);
    }
    return size ? cox_fail(err, COX_CORRUPT, "what another machine says ends with %zu bytes", size)
                : 0;
}
