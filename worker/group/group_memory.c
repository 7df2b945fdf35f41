#include "group_memory.h"

#include "channel/attach/sealed/sealed.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "channel/shm/region.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A connection to the control socket. */
#define SOCKET_MS 1000

enum part { WORDS, VALUES };

/* Another rank's memory, as of the last init. */
struct other {
    struct cox_handle handles[COX_ATTACH_MEMBER_FD_COUNT];
    /* base NULL: not mapped */
    struct cox_region regions[COX_ATTACH_MEMBER_FD_COUNT];
};

struct cox_group_memory {
    _Atomic uint32_t users;
    uint32_t rank, rank_count;
    struct cox_region own[COX_ATTACH_MEMBER_FD_COUNT], hints;
    /* the group that writes; NULL: none */
    const struct cox_group_base *holder;
    /* of the last group that wrote; 0: none */
    uint64_t incarnation;
    struct other others[COX_RANK_COUNT_MAX];
};

static uint64_t part_size(int part)
{
    return part == WORDS ? cox_geometry_group_words_size() : cox_geometry_group_payload_size();
}

struct cox_group_memory *cox_group_memory_new(
    const struct cox_region own[COX_ATTACH_MEMBER_FD_COUNT], const struct cox_region *hints,
    uint32_t rank, uint32_t rank_count)
{
    struct cox_group_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return NULL;
    COX_ASSERT(own[WORDS].size >= sizeof(struct cox_group_layout_rank) &&
               hints->size >=
                   sizeof(struct cox_group_layout_wakeup) + cox_group_wakeups_size(rank_count));
    /* relaxed: no other thread has it yet. */
    atomic_store_explicit(&memory->users, 1, memory_order_relaxed);
    memory->rank = rank;
    memory->rank_count = rank_count;
    memcpy(memory->own, own, sizeof memory->own);
    memory->hints = *hints;
    return memory;
}

struct cox_group_memory *cox_group_memory_unref(struct cox_group_memory *memory)
{
    /* acq_rel: the others' accesses are done before it is freed; partner is this exchange. */
    if (!memory || atomic_fetch_sub_explicit(&memory->users, 1, memory_order_acq_rel) > 1)
        return NULL;
    for (int part = 0; part < COX_ATTACH_MEMBER_FD_COUNT; part++) {
        cox_region_detach(&memory->own[part]);
        for (uint32_t rank = 0; rank < memory->rank_count; rank++)
            cox_region_detach(&memory->others[rank].regions[part]);
    }
    cox_region_detach(&memory->hints);
    free(memory);
    return NULL;
}

/* ---- the other ranks' ---- */

static int part_open(struct cox_importer *importer, const struct cox_handle *handle, int part,
                     struct cox_region *ret_region, struct cox_error *err)
{
    static const char *const labels[] = {"its words", "its values"};
    const struct cox_import *import = NULL;
    int r = cox_importer_open(importer, handle, COX_IMPORT_FD, &import, err);
    if (r)
        return r;
    r = cox_sealed_check_group(import->fd, part_size(part), labels[part], err);
    if (r == 0)
        r = cox_region_map(ret_region, import->fd, part_size(part), COX_REGION_READ, labels[part],
                           err);
    cox_importer_close(importer, import);
    return r;
}

static int other_open(struct other *other, const struct cox_group_member *member, uint32_t rank,
                      struct cox_importer *importer, struct cox_error *err)
{
    struct cox_error why = {0};
    int r = 0;
    if (!member->given)
        return cox_fail(
            err, COX_DENIED,
            "rank %" PRIu32
            " has not sealed its memory of the rank group: its worker has to attach as cox_worker_new does",
            rank);
    for (int part = 0; r == 0 && part < COX_ATTACH_MEMBER_FD_COUNT; part++) {
        const struct cox_handle *handle = &member->handles[part];
        if (other->regions[part].base && memcmp(&other->handles[part], handle, sizeof *handle) == 0)
            continue;
        cox_region_detach(&other->regions[part]);
        r = part_open(importer, handle, part, &other->regions[part], &why);
        other->handles[part] = *handle;
    }
    return r ? cox_fail(err, r, "the memory of rank %" PRIu32 ": %s", rank, why.text) : 0;
}

static int others_open(struct cox_group_memory *memory, const struct cox_group_sealed *sealed,
                       struct cox_error *err)
{
    const struct cox_importer_options options = {.size = sizeof(struct cox_importer_options),
                                                 .socket_path = sealed->control_socket,
                                                 .deadline_ms = SOCKET_MS};
    struct cox_importer *importer = NULL;
    if (memory->rank_count == 1)
        return 0;
    int r = cox_importer_new(&options, &importer, err);
    for (uint32_t rank = 0; r == 0 && rank < memory->rank_count; rank++)
        if (rank != memory->rank)
            r = other_open(&memory->others[rank], &sealed->ranks[rank], rank, importer, err);
    cox_importer_free(importer);
    return r;
}

/* ---- a group's ---- */

static int take_check(const struct cox_group_memory *memory, const struct cox_group_base *base,
                      struct cox_error *err)
{
    if (memory->holder)
        return cox_fail(err, COX_STATE, "the group of before is to be left first");
    if (base->incarnation <= memory->incarnation)
        return cox_fail(err, COX_TAKEN,
                        "rank %" PRIu32 " was in incarnation %" PRIu64
                        " of the group already: incarnation %" PRIu64 " cannot begin",
                        memory->rank, memory->incarnation, base->incarnation);
    if (base->rank != memory->rank || base->rank_count != memory->rank_count)
        return cox_fail(err, COX_INVALID,
                        "rank %" PRIu32 " of %" PRIu32 " in the memory of rank %" PRIu32
                        " of %" PRIu32,
                        base->rank, base->rank_count, memory->rank, memory->rank_count);
    if (cox_group_values_stride(base->value_size) > memory->own[VALUES].size)
        return cox_fail(
            err, COX_INVALID,
            "values of %" PRIu32 " bytes need %" PRIu64
            " bytes a rank, the group's memory has %" PRIu64 ": form a group of your own",
            base->value_size, cox_group_values_stride(base->value_size), memory->own[VALUES].size);
    return 0;
}

void cox_group_parts_reset(struct cox_group_layout_rank *rank)
{
    for (uint32_t slot = 0; slot < COX_GROUP_PART_COUNT; slot++) {
        struct cox_group_layout_part *part = &rank->parts[slot];
        /* First makes the word beside it no arrival. */
        uint64_t mirror = atomic_load_explicit(&part->mirror, memory_order_relaxed);
        atomic_store_explicit(&part->mirror, ~mirror, memory_order_seq_cst);
        (void)atomic_load_explicit(&part->mirror, memory_order_seq_cst);
        /* relaxed, all: before the release store of JOINED. */
        atomic_store_explicit(&part->name_hash, 0, memory_order_relaxed);
        atomic_store_explicit(&part->members_hash, 0, memory_order_relaxed);
        atomic_store_explicit(&part->aborted, 0, memory_order_relaxed);
        atomic_store_explicit(&part->because, 0, memory_order_relaxed);
        atomic_store_explicit(&part->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&part->what[0], 0, memory_order_relaxed);
        atomic_store_explicit(&part->what[1], 0, memory_order_relaxed);
    }
}

/* From here on this rank is in no incarnation for the others, before the first of its words
 * changes. */
static void words_reset(struct cox_group_base *base)
{
    struct cox_group_layout_rank *own = base->ranks[base->rank];
    /* Everything this rank writes in the new incarnation, values too, comes after it: as in
     * part_align of group.c. Partner is the second check in epoch_verify. */
    atomic_store_explicit(&own->identity.holder,
                          cox_group_holder(COX_GROUP_CLAIMED, base->pid, base->start),
                          memory_order_seq_cst);
    (void)atomic_load_explicit(&own->identity.holder, memory_order_seq_cst);
    cox_fault_point(COX_FAULT_GROUP_CLAIMED);
    cox_group_parts_reset(own);
    cox_fault_point(COX_FAULT_GROUP_CLAIMED);
}

int cox_group_memory_take(const struct cox_group_sealed *sealed, struct cox_group_base *base,
                          struct cox_error *err)
{
    struct cox_group_memory *memory = sealed->memory;
    int r = take_check(memory, base, err);
    if (r == 0)
        r = others_open(memory, sealed, err);
    if (r)
        return r;
    for (uint32_t rank = 0; rank < memory->rank_count; rank++) {
        const struct cox_region *regions =
            rank == memory->rank ? memory->own : memory->others[rank].regions;
        base->ranks[rank] = regions[WORDS].base;
        base->values[rank] = regions[VALUES].base;
        base->known_pids[rank] = sealed->ranks[rank].pid;
    }
    base->wakeup = memory->hints.base;
    base->wakeups = base->wakeup + 1;
    /* relaxed: the caller has a reference. */
    atomic_fetch_add_explicit(&memory->users, 1, memory_order_relaxed);
    base->memory = memory;
    memory->holder = base;
    memory->incarnation = base->incarnation;
    words_reset(base);
    return 0;
}

void cox_group_memory_give(struct cox_group_base *base)
{
    if (base->memory && base->memory->holder == base)
        base->memory->holder = NULL;
    base->memory = cox_group_memory_unref(base->memory);
}

bool cox_group_memory_is_held(const struct cox_group_base *base)
{
    return !base->memory || base->memory->holder == base;
}
