#include "channel/base/fault.h"
#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "channel/recorder/recorder.h"
#include "channel/shm/geometry.h"
#include "group_memory.h"
#include "group_private.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The group, with what its subgroups share. */
struct group_whole {
    /* first: the caller's pointer is this group */
    struct cox_group group;
    struct cox_group_base base;
};

/* ---- joining and leaving ---- */

static int options_check(const struct cox_group_options *options, struct cox_error *err)
{
    if (options->rank_count < 1 || options->rank_count > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " ranks: expected 1 to %d",
                        options->rank_count, COX_RANK_COUNT_MAX);
    if (options->rank >= options->rank_count)
        return cox_fail(err, COX_INVALID, "rank %" PRIu32 " of %" PRIu32 ": expected 0 to %" PRIu32,
                        options->rank, options->rank_count, options->rank_count - 1);
    if (options->value_size && (options->value_size < COX_GROUP_VALUE_SIZE_MIN ||
                                options->value_size > COX_GROUP_VALUE_SIZE_MAX))
        return cox_fail(err, COX_INVALID, "values of %" PRIu32 " bytes: expected %d to %" PRIu32,
                        options->value_size, COX_GROUP_VALUE_SIZE_MIN, COX_GROUP_VALUE_SIZE_MAX);
    if (options->sealed && options->name)
        return cox_fail(err, COX_INVALID, "a name, and the memory of a sealed group: choose one");
    if (options->fd_offset &&
        (options->name || options->fd_offset % (uint64_t)sysconf(_SC_PAGESIZE)))
        return cox_fail(err, COX_INVALID, "memory from byte %" PRIu64 " on: %s", options->fd_offset,
                        options->name ? "what has a name is the group's as a whole"
                                      : "expected the beginning of a page");
    if (!options->name)
        return options->fd >= 0 || options->sealed
                   ? 0
                   : cox_fail(err, COX_INVALID, "neither a name nor an fd of memory");
    if (strlen(options->name) > COX_GROUP_NAME_MAX)
        return cox_fail(err, COX_INVALID, "the name has %zu characters: at most %d are allowed",
                        strlen(options->name), COX_GROUP_NAME_MAX);
    return cox_name_check(options->name, err);
}

static void whole_free(struct group_whole *whole)
{
    struct cox_group_base *base = &whole->base;
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
        cox_peer_close(&base->peers[rank]);
    /* relaxed: no other thread uses it any more. */
    uint32_t count = atomic_load_explicit(&base->subgroup_count, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++)
        free(base->subgroups[i]);
    cox_group_memory_give(base);
    cox_region_detach(&base->region);
    cox_recorder_unref(base->recorder);
    free(whole);
}

static struct group_whole *whole_new(const struct cox_group_options *options)
{
    struct group_whole *whole = calloc(1, sizeof *whole);
    if (!whole)
        return NULL;
    whole->base.rank = options->rank;
    whole->base.rank_count = options->rank_count;
    whole->base.value_size = options->value_size ? options->value_size : COX_GROUP_VALUE_SIZE_MIN;
    whole->base.incarnation = options->incarnation;
    whole->base.pid = getpid();
    whole->group.spinner.budget_ns = options->spin_ns;
    whole->base.cancelled = options->cancelled;
    whole->base.context = options->context;
    whole->base.recorder = cox_recorder_ref(options->recorder);
    whole->base.mirrored = options->mirrored;
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++) {
        whole->base.peers[rank] = (struct cox_peer)COX_PEER_NONE;
        whole->group.ranks[rank] = (uint8_t)rank;
    }
    whole->group.base = &whole->base;
    whole->group.count = options->rank_count;
    whole->group.self = options->rank;
    whole->group.slot_size = whole->base.value_size;
    return whole;
}

/* /proc may be restricted (systemd: ProcSubset=pid), and only fd exchanges need this. */
static int find_system(struct cox_group_base *base, struct cox_error *err)
{
    struct cox_error why = {0};
    int r = cox_handle_system(&base->system, &why);
    if (r == -ENOENT || r == -EACCES || r == -EPERM) {
        base->no_system = r;
        return 0;
    }
    return r ? cox_fail(err, r, "%s", why.text) : 0;
}

int cox_group_join(const struct cox_group_options *options, struct cox_group **ret_group,
                   struct cox_error *err)
{
    struct cox_group_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_group_options", err);
    if (r)
        return r;
    options = &known;
    r = options_check(options, err);
    if (r == 0)
        r = cox_deadline_check(options->deadline_ns, err);
    if (r)
        return r;
    struct group_whole *whole = whole_new(options);
    if (!whole)
        return cox_fail(err, -ENOMEM, "no memory for a group");
    struct cox_group_name name = COX_GROUP_NAME_NONE;
    r = cox_peer_start_time(whole->base.pid, &whole->base.start);
    if (r) {
        cox_fail(err, r, "own start time: %s", cox_status_text(r));
        whole_free(whole);
        return r;
    }
    r = find_system(&whole->base, err);
    if (r) {
        whole_free(whole);
        return r;
    }
    r = cox_group_take_memory(&whole->base, options, &name, err);
    if (r) {
        whole_free(whole);
        return r;
    }
    r = cox_group_meet(&whole->base, options, err);
    cox_group_say(&whole->base, r ? COX_GROUP_FAILED : COX_GROUP_WHOLE);
    cox_group_name_end(&name, r != 0, options->deadline_ns);
    if (r)
        whole_free(whole);
    else
        *ret_group = &whole->group;
    return r;
}

struct cox_group *cox_group_leave(struct cox_group *group)
{
    if (!group)
        return NULL;
    COX_ASSERT(group->slot == 0);
    struct cox_group_base *base = group->base;
    if (getpid() == base->pid && cox_group_memory_is_held(base)) {
        cox_group_say(base, COX_GROUP_LEFT);
        /* relaxed: this thread formed them. */
        uint32_t count = atomic_load_explicit(&base->subgroup_count, memory_order_relaxed);
        for (uint32_t i = 0; i < count; i++) {
            struct cox_group_layout_wakeup *wakeup = cox_group_wakeup(base->subgroups[i]);
            if (wakeup)
                cox_group_wake(wakeup);
        }
    }
    whole_free((struct group_whole *)group);
    return NULL;
}

struct cox_group_info cox_group_get_info(const struct cox_group *group)
{
    return (struct cox_group_info){.rank = group->self,
                                   .rank_count = group->count,
                                   .value_size = group->base->value_size,
                                   .mirrored = group->base->mirrored};
}

/* ---- epochs ---- */

static void part_align(struct cox_group *group, uint64_t epoch)
{
    struct cox_group_layout_part *part = cox_group_own_part(group);
    uint64_t word = cox_group_arrived(epoch, 0);
    group->index = 0;
    group->said_what = 0;
    /* relaxed: the thread that operates. */
    atomic_store_explicit(&group->blamed, 0, memory_order_relaxed);
    /* relaxed: until both words are stored the rank has not arrived. */
    atomic_store_explicit(&part->mirror, cox_group_mirror(group->base->incarnation, word),
                          memory_order_relaxed);
    /* Everything this rank writes in the new epoch comes after it: the load stays behind the store,
     * as both are seq_cst, and acquire keeps later accesses behind the load. Partner is the second
     * check in epoch_verify. */
    atomic_store_explicit(&part->arrived, word, memory_order_seq_cst);
    (void)atomic_load_explicit(&part->arrived, memory_order_seq_cst);
    cox_group_tell_mirror(group->base);
    cox_fault_point(COX_FAULT_GROUP_ALIGNED);
    struct cox_group_layout_wakeup *wakeup = cox_group_wakeup(group);
    if (wakeup)
        cox_group_wake(wakeup);
}

int cox_group_align(struct cox_group *group, uint64_t epoch)
{
    struct cox_group_base *base = group->base;
    uint64_t present = cox_group_present(base);
    /* relaxed: this thread forms them. */
    uint32_t count = atomic_load_explicit(&base->subgroup_count, memory_order_relaxed);
    if (group->slot || epoch < 1 || epoch > COX_GROUP_EPOCH_MAX || epoch < present)
        return COX_INVALID;
    if (epoch == present) {
        bool over = cox_group_is_over(group);
        for (uint32_t i = 0; i < count; i++)
            over = over || cox_group_is_over(base->subgroups[i]);
        return over ? COX_INVALID : 0;
    }
    /* relaxed: see cox_group_present. */
    atomic_store_explicit(&base->present, epoch, memory_order_relaxed);
    part_align(group, epoch);
    for (uint32_t i = 0; i < count; i++)
        part_align(base->subgroups[i], epoch);
    return 0;
}

void cox_group_abort(struct cox_group *group)
{
    struct cox_group_base *base = group->base;
    cox_group_give_up(group, false);
    if (group->slot)
        return;
    /* acquire: partner is the release in cox_group_subgroup. */
    uint32_t count = atomic_load_explicit(&base->subgroup_count, memory_order_acquire);
    for (uint32_t i = 0; i < count; i++)
        cox_group_give_up(base->subgroups[i], false);
}

/* ---- subgroups ---- */

/* Never 0. */
static uint64_t hash_bytes(const void *bytes, size_t size)
{
    uint64_t hash = cox_hash_bytes(COX_HASH_START, bytes, size);
    return hash ? hash : 1;
}

static int subgroup_check(const struct cox_group *group, const char *name,
                          const struct cox_rank_set *members, struct cox_error *err)
{
    const struct cox_group_base *base = group->base;
    if (group->slot)
        return cox_fail(err, COX_INVALID, "a subgroup has no subgroups");
    if (strlen(name) > COX_SUBGROUP_NAME_MAX)
        return cox_fail(err, COX_INVALID, "the name has %zu characters: at most %d are allowed",
                        strlen(name), COX_SUBGROUP_NAME_MAX);
    int r = cox_name_check(name, err);
    if (r)
        return r;
    for (uint32_t rank = base->rank_count; rank < COX_RANK_COUNT_MAX; rank++)
        if (cox_rank_set_has(members, rank))
            return cox_fail(err, COX_INVALID, "subgroup '%s': there is no rank %" PRIu32, name,
                            rank);
    if (!cox_rank_set_has(members, base->rank))
        return cox_fail(err, COX_INVALID, "subgroup '%s': this rank, %" PRIu32 ", is no member",
                        name, base->rank);
    return 0;
}

/* Compares with what the other members have stored so far. */
static int subgroup_compare(const struct cox_group *subgroup, struct cox_error *err)
{
    const struct cox_group_base *base = subgroup->base;
    for (uint32_t place = 0; place < subgroup->count; place++) {
        if (place == subgroup->self)
            continue;
        const struct cox_group_layout_rank *rank = base->ranks[subgroup->ranks[place]];
        for (uint32_t slot = 1; slot < COX_GROUP_PART_COUNT; slot++) {
            const struct cox_group_layout_part *part = &rank->parts[slot];
            /* acquire: members_hash before it; partner is subgroup_say. */
            if (atomic_load_explicit(&part->name_hash, memory_order_acquire) ==
                    subgroup->name_hash &&
                atomic_load_explicit(&part->members_hash, memory_order_relaxed) !=
                    subgroup->members_hash &&
                !cox_group_has_left(
                    base, subgroup->ranks[place])) /* also if it is in another incarnation */
                return cox_fail(err, COX_TAKEN,
                                "rank %d has formed subgroup '%s' with other members",
                                subgroup->ranks[place], subgroup->name);
        }
    }
    return 0;
}

static void subgroup_say(struct cox_group *subgroup)
{
    struct cox_group_layout_part *part = cox_group_own_part(subgroup);
    uint64_t word = cox_group_arrived(cox_group_present(subgroup->base), 0);
    /* relaxed, all: before the release below; partners are its acquire loads. */
    atomic_store_explicit(&part->mirror, cox_group_mirror(subgroup->base->incarnation, word),
                          memory_order_relaxed);
    atomic_store_explicit(&part->arrived, word, memory_order_relaxed);
    atomic_store_explicit(&part->members_hash, subgroup->members_hash, memory_order_relaxed);
    atomic_store_explicit(&part->name_hash, subgroup->name_hash, memory_order_release);
    cox_group_tell_mirror(subgroup->base);
    cox_fault_point(COX_FAULT_GROUP_FORMED);
    /* A member that waits for its wakeup blocks there. */
    cox_group_wake(subgroup->base->wakeup);
}

static struct cox_group *subgroup_new(const struct cox_group *group, const char *name,
                                      const struct cox_rank_set *members, uint32_t slot)
{
    struct cox_group_base *base = group->base;
    struct cox_group *subgroup = calloc(1, sizeof *subgroup);
    if (!subgroup)
        return NULL;
    subgroup->base = base;
    subgroup->slot = slot;
    subgroup->slot_size = COX_SUBGROUP_SLOT_SIZE;
    subgroup->spinner.budget_ns = group->spinner.budget_ns; /* which never changes */
    strcpy(subgroup->name, name);
    subgroup->name_hash = hash_bytes(name, strlen(name));
    subgroup->members_hash = hash_bytes(members, sizeof *members);
    for (uint32_t rank = 0; rank < base->rank_count; rank++) {
        if (!cox_rank_set_has(members, rank))
            continue;
        if (rank == base->rank)
            subgroup->self = subgroup->count;
        subgroup->ranks[subgroup->count++] = (uint8_t)rank;
    }
    /* relaxed: no other thread has it yet. */
    atomic_store_explicit(&subgroup->slots[subgroup->self], (uint8_t)slot, memory_order_relaxed);
    return subgroup;
}

int cox_group_subgroup(struct cox_group *group, const char *name,
                       const struct cox_rank_set *members, struct cox_group **ret_subgroup,
                       struct cox_error *err)
{
    struct cox_group_base *base = group->base;
    int r = subgroup_check(group, name, members, err);
    if (r)
        return r;
    uint64_t members_hash = hash_bytes(members, sizeof *members);
    /* relaxed: this thread forms them. */
    uint32_t count = atomic_load_explicit(&base->subgroup_count, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(base->subgroups[i]->name, name) != 0)
            continue;
        if (base->subgroups[i]->members_hash != members_hash)
            return cox_fail(err, COX_TAKEN, "subgroup '%s' has other members", name);
        *ret_subgroup = base->subgroups[i];
        return 0;
    }
    if (count == COX_SUBGROUP_COUNT_MAX)
        return cox_fail(err, COX_FULL, "a rank is in at most %d subgroups", COX_SUBGROUP_COUNT_MAX);
    struct cox_group *subgroup = subgroup_new(group, name, members, count + 1);
    if (!subgroup)
        return cox_fail(err, -ENOMEM, "no memory for a subgroup");
    r = subgroup_compare(subgroup, err);
    if (r) {
        free(subgroup);
        return r;
    }
    subgroup_say(subgroup);
    base->subgroups[count] = subgroup;
    /* release: partner is cox_group_abort. */
    atomic_store_explicit(&base->subgroup_count, count + 1, memory_order_release);
    *ret_subgroup = subgroup;
    return 0;
}
