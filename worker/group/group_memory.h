/*
 * group_memory: the memory of the rank group that a rank of a sealed group has: its own words and
 * values, which no other process can write, the hints, and the words and values of the other ranks,
 * read-only. Private to the library.
 *
 * It outlives the groups that a rank forms one after the other, each in another incarnation, and
 * the worker: each user has a reference. Another rank's memory is opened once, and again when that
 * rank is another process.
 *
 * Threads: join and leave of a group on one thread; ref and unref on any.
 * Ownership: new takes the regions; results are lent.
 * Blocks: take may, where fds are fetched by the control socket, for a second each.
 * If the process dies: the kernel frees it, except what others have mapped for reading.
 */
#ifndef COX_WORKER_GROUP_MEMORY_H
#define COX_WORKER_GROUP_MEMORY_H

#include <coxswain/handle.h>
#include "channel/attach/sealed/sealed.h"
#include "group_private.h"

struct cox_group_memory;

/* The memory of one rank, as an init describes it. */
struct cox_group_member {
    bool given;
    /* of its process, in the coordinator's pid namespace; 0: unknown */
    pid_t pid;
    struct cox_handle handles[COX_ATTACH_MEMBER_FD_COUNT];
};

/* What options.sealed points to; all of it is lent until the join returns. */
struct cox_group_sealed {
    struct cox_group_memory *memory;
    /* the control socket for fds that cannot be taken directly; NULL: none */
    const char *control_socket;
    uint32_t rank_count;
    struct cox_group_member ranks[COX_RANK_COUNT_MAX];
};

/* Takes the regions that cox_attach_join_rank_group gave. Returns NULL without memory; then nothing
 * is taken. */
struct cox_group_memory *cox_group_memory_new(
    const struct cox_region own[COX_ATTACH_MEMBER_FD_COUNT], const struct cox_region *hints,
    uint32_t rank, uint32_t rank_count);
struct cox_group_memory *cox_group_memory_unref(struct cox_group_memory *memory); /* NULL-safe */

/* Fills in memory, ranks, values, wakeup and wakeups of base, with a reference, and sets the words
 * of this rank to zero, for the incarnation of base. Returns 0; COX_STATE: the group of before is
 * to be left first; COX_TAKEN: this process was in that incarnation, or in a later one, already;
 * COX_INVALID: the options do not fit this memory; COX_DENIED, COX_CORRUPT: a rank's memory is not
 * as it should be, err says whose; what cox_handle_open returns. */
int cox_group_memory_take(const struct cox_group_sealed *sealed, struct cox_group_base *base,
                          struct cox_error *err);
/* The parts of a rank that is in no incarnation, before it joins one: none has arrived anywhere. */
void cox_group_parts_reset(struct cox_group_layout_rank *rank);
/* Ends the group's writing. Idempotent. */
void cox_group_memory_give(struct cox_group_base *base);
/* Returns true if this group may still write. */
bool cox_group_memory_is_held(const struct cox_group_base *base);

#endif
