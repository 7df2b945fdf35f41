/*
 * group: ranks that work together: a barrier, all-gather of values, all-gather and broadcast of
 * fds.
 *
 * Every rank calls the same operations in the same order. An operation completes on a rank when
 * every member has arrived at it; bytes that a member wrote to shared memory before an operation
 * are visible to every member after it.
 *
 * Two forms. The named form is one region that all ranks write: for processes that trust each
 * other. In the sealed form, which the ranks of a sealed group have of their init, a rank has a
 * writable mapping only of memory that nobody else writes: its words and its values; of the others'
 * it can only read, and what it reads is hostile input. What is shared there are hints for waking,
 * because several processes must sleep on one futex: the worst is a wait that takes 50 ms more, or
 * wake-ups for nothing, which cost processor time. Errors name the rank whose memory makes no
 * sense. A rank that says that another one has died, where this one sees it live, is named itself;
 * one that has given up is named with the rank that it says was why, for which of the two that was
 * nobody else can tell.
 *
 * Memory of the named form: one region, all zero at the start, of lines per rank that this rank
 * alone writes, two value slots per rank (and two of 1 KiB for each of its subgroups), and a few
 * words that are hints for waking. Nothing has to be initialized by anybody, so nobody can die
 * half-way through it. Under a name (`/dev/shm/<name>_group`, mode 0600) the first to come makes it
 * whole (O_TMPFILE, linkat) and the last to come removes the name; or it is an fd that came another
 * way (the control socket, for the ranks of an executor). Rounds: a rank's word is {epoch, index},
 * only growing. cox_group_align starts a new epoch, without waiting for anybody: what is still
 * under way in an older epoch ends with COX_ABORTED everywhere.
 *
 * What is still under way includes what is complete and not seen to be so yet: where it matters,
 * align only once nobody needs the last operation any more.
 *
 * Threads: one at a time per group object, so that the group and its subgroups may each have one;
 * align and leave are of all its subgroups, too; abort from any. Ownership: the caller owns the
 * group object; fds as said at each function. Blocks: join and the operations until their deadline.
 * Failures: COX_TIMEOUT, COX_PEER_DEAD, COX_ABORTED and COX_CORRUPT leave a rank outside of step,
 * in the
 *   group or in the subgroup: until the next align every operation returns COX_ABORTED at once, on
 *   this rank and, within a slice of 50 ms, on the others. After a death every operation returns
 *   COX_PEER_DEAD: a group is formed again as a new one. Who fails or leaves because of it says of
 *   whom, so that the others name that rank as well.
 * If the process dies: others get COX_PEER_DEAD within 50 ms; a name that only dead processes have
 *   is removed by the next join under it.
 */
#ifndef COX_WORKER_GROUP_H
#define COX_WORKER_GROUP_H

#include "../../channel/base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_group;

#define COX_GROUP_NAME_MAX 100
#define COX_GROUP_VALUE_SIZE_MIN 4096
#define COX_GROUP_VALUE_SIZE_MAX (UINT32_C(1) << 30)
#define COX_SUBGROUP_COUNT_MAX 8
#define COX_SUBGROUP_NAME_MAX 31

struct cox_group_sealed;

struct cox_group_options {
    /* set by COX_GROUP_OPTIONS_INIT (base.h) */
    size_t size;
    /* as in cox_name_check; NULL: fd is the memory, or `sealed` says it */
    const char *name;
    /* lent; from fd_offset on cox_group_memory_size bytes, all zero at first */
    int fd;
    /* The sealed form, as cox_init_request_group gives it: then neither a name nor fd counts. NULL:
     * the named form. Lent until join returns. A group in it is left before the next one is joined.
     */
    const struct cox_group_sealed *sealed;
    /* a multiple of the page size; not with a name */
    uint64_t fd_offset;
    /* 0 to rank_count - 1 */
    uint32_t rank;
    /* 1 to 128 */
    uint32_t rank_count;
    /* bytes of one rank's value, at most; 0: 4096. The same on every rank */
    uint32_t value_size;
    /* the same on every rank: tells groups of one name and time apart; 0 is fine */
    uint64_t life;
    uint64_t deadline_ns;
    /* Who waits in an operation looks for so long before it sleeps (channel/base/spin.h). 0: not at
     * all. Each rank's own affair. */
    uint32_t spin_ns;
    /* Asked at least every 50 ms while a join or an operation waits, by the thread that waits
     * (where a subgroup has one of its own, by several at once): true ends it with COX_ABORTED.
     * NULL: never. */
    bool (*aborted)(void *context);
    void *context;
};
#define COX_GROUP_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_group_options)

/* Bytes of the region. */
COX_PUBLIC uint64_t cox_group_memory_size(uint32_t rank_count, uint32_t value_size);

/* Joins, and waits until every rank has. Nothing is left unless 0, except that the name stays for
 * those who wait for the others. A name that a former group or another life of it has not given up
 * yet is waited for, whatever it was told. A deadline that has passed: the last to come joins all
 * the same.
 * Returns
 *   0
 *   COX_INVALID: rank, world size or value size outside what is allowed, or another one than the
 *     others say (err names who)
 *   COX_TAKEN: another process is this rank
 *   COX_DENIED: the region has another owner, mode or type
 *   COX_CORRUPT: the region makes no sense
 *   COX_TIMEOUT: err names who is missing
 *   COX_PEER_DEAD: a rank died; err names it
 *   COX_ABORTED: options->aborted said so
 *   COX_NO_SPACE: no memory for the region
 *   -errno
 */
COX_PUBLIC int cox_group_join(const struct cox_group_options *options, struct cox_group **ret_group,
                              struct cox_error *err);
/* Leaves: for the others it is as if this rank had died, unless they have left as well. NULL-safe,
 * returns NULL. In the child of a fork it only lets go of memory. */
COX_PUBLIC struct cox_group *cox_group_leave(struct cox_group *group);

/* This rank, and the number of ranks: of the group, or of the subgroup. */
COX_PUBLIC uint32_t cox_group_rank(const struct cox_group *group);
COX_PUBLIC uint32_t cox_group_rank_count(const struct cox_group *group);
#ifdef COX_INTERNAL
uint32_t cox_group_value_size(const struct cox_group *group);
#endif

/* From now on operations are those of this epoch, counted from its beginning. The same one is
 * otherwise fine and does nothing. Does not wait. 1 to 2^40 - 2; a new group is in epoch 0. Also
 * aligns the subgroups of this rank.
 * Returns
 *   0
 *   COX_INVALID: smaller than the present one, or the same while the rank is out of step in the
 *     group or a subgroup: for others it is over, a larger one is needed. Or a subgroup
 */
COX_PUBLIC int cox_group_align(struct cox_group *group, uint64_t epoch);
/* Ends the operation that is under way on any rank of this epoch with COX_ABORTED, and those that
 * follow in it; of the group also those of the subgroups that this rank is in. */
COX_PUBLIC void cox_group_abort(struct cox_group *group);
/* Names the rank whose values made this rank fail, before cox_group_abort: the other ranks report
 * that rank instead of this one. On the thread that operates. */
COX_PUBLIC void cox_group_blame(struct cox_group *group, uint32_t rank);

/* A part of the group, with words of its own: its operations and those of the group or of other
 * parts do not touch each other. Every member calls it with the same name and members; nobody
 * waits. Disjoint subgroups may have one name. A value of more than 1 KiB goes through a subgroup
 * in as many rounds as it has pieces. The object is the group's.
 * Returns
 *   0
 *   COX_INVALID: this rank is no member, or the name
 *   COX_FULL: this rank is in COX_SUBGROUP_COUNT_MAX
 *   COX_TAKEN: a member has the name with other members
 *   -errno
 */
COX_PUBLIC int cox_group_subgroup(struct cox_group *group, const char *name,
                                  const struct cox_rank_set *members,
                                  struct cox_group **ret_subgroup, struct cox_error *err);

/* In a subgroup, members count by their place among the members. Each operation returns
 *   0
 *   COX_TIMEOUT: err names who has not arrived
 *   COX_PEER_DEAD: err names who is dead
 *   COX_ABORTED: by cox_group_abort, options->aborted, or an align of another rank
 *   COX_CORRUPT: words of another rank make no sense, or it is at another operation
 *   -errno
 */

COX_PUBLIC int cox_group_barrier(struct cox_group *group, uint64_t deadline_ns,
                                 struct cox_error *err);
/* Every member gives size bytes (1 to value_size, the same on all, otherwise COX_INVALID on all, in
 * step) and gets those of all in order of rank, size bytes each, without gaps. value may be its own
 * place in values. Unless 0, values may have been written in part.
 * Returns also
 *   COX_INVALID: value or values is NULL, before anybody is waited for
 */
COX_PUBLIC int cox_group_gather(struct cox_group *group, const void *value, size_t size,
                                void *values, uint64_t deadline_ns, struct cox_error *err);

enum cox_group_fd {
    COX_GROUP_FD_KEEP = 0, /* fd stays the caller's */
    COX_GROUP_FD_CONSUME =
        1, /* fd is closed by a call that succeeded; after a failure it is the caller's */
};
/* Every member gives one open fd and gets one of each other member, in order of rank,
 * close-on-exec; its own entry is -1. Where pidfd_getfd is denied or missing for one of them they
 * all go by sockets. Unless 0 nothing was received.
 * Returns also
 *   COX_INVALID: fd is none, or fds is NULL, before anybody is waited for
 *   -ENOENT: /proc has no more than processes (systemd: ProcSubset=pid), before anybody is waited
 *     for
 *   -errno: this rank has no room for fds, and the others, which may have theirs, are in step with
 *     it; or, by sockets, another one (err names it) had none for one, and all are in step
 */
COX_PUBLIC int cox_group_gather_fds(struct cox_group *group, int fd, enum cox_group_fd mode,
                                    int *fds, uint64_t deadline_ns, struct cox_error *err);
/* The source gives fd (the others -1) and gets nothing, -1; the others get a duplicate in *ret_fd,
 * which the source may leave NULL.
 * Returns
 *   as cox_group_gather_fds
 *   COX_INVALID: also, before anybody is waited for: no such source, or an fd of another rank
 */
COX_PUBLIC int cox_group_broadcast_fd(struct cox_group *group, uint32_t source, int fd,
                                      enum cox_group_fd mode, int *ret_fd, uint64_t deadline_ns,
                                      struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
