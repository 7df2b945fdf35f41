/*
 * group: collective operations of ranks without the coordinator: barrier, all-gather of values,
 * all-gather and broadcast of fds.
 *
 * Every rank calls the same operations in the same order. An operation completes on a rank when
 * every member has arrived at it. What a member wrote to shared memory before an operation is
 * visible to every member after it.
 *
 * There are two forms. The named form is one region that all ranks write, for processes that trust
 * each other. In the sealed form, which the ranks of a sealed group get with their init, each rank
 * has a writable mapping only of its own words and values; the memory of other ranks is read-only,
 * and its content is untrusted input. Only wake hints are shared for writing, because several
 * processes have to block on one futex. At worst a wrong hint delays a wait by 50 ms, or causes a
 * wakeup in vain. Errors name the rank whose memory is invalid. If a rank reports a live rank as
 * dead, the error names the rank that reported. If a rank failed because of another one, the error
 * names both: a third rank cannot decide which of the two is at fault.
 *
 * Memory of the named form: one region, all zero at first. Each rank has lines that only it writes,
 * two value slots, and two slots of 1 KiB for each of its subgroups. There are a few words of wake
 * hints. No rank has to initialize the region, so none can die halfway through. A region with a
 * name (`/dev/shm/<name>_group`, mode 0600) is created complete by the first rank (O_TMPFILE,
 * linkat); the last rank removes the name. Otherwise the ranks receive an fd, from the control
 * socket if an executor started them.
 *
 * A rank's progress is a word {epoch, index}, which only grows. cox_group_align starts a new epoch
 * without waiting: operations in flight in an older epoch end with COX_ABORTED on every rank. That
 * includes operations that are complete but not yet seen as complete; where this matters, align
 * only when no rank needs the last operation any more.
 *
 * Threads: one at a time per group object; the group and each subgroup may have a thread of their
 *   own. align and leave also act on all subgroups of the group. abort: any thread.
 * Ownership: the caller owns the group object; fds as described at each function.
 * Blocks: join and the operations until their deadline.
 * Failures: after COX_TIMEOUT, COX_PEER_DEAD, COX_ABORTED or COX_CORRUPT the rank is out of step,
 *   in the group or in the subgroup. Until the next align every operation returns COX_ABORTED at
 *   once on this rank, and within 50 ms on the others. After a death every operation returns
 *   COX_PEER_DEAD, and a new group has to be formed. A rank that fails or leaves because of another
 *   rank publishes which one, so that the errors of the others name that rank as well.
 * If the process dies: operations of the others return COX_PEER_DEAD within 50 ms. The next join
 *   removes the name if only dead processes use it.
 */
#ifndef COX_GROUP_H
#define COX_GROUP_H

#include <coxswain/base.h>

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
struct cox_recorder;

struct cox_group_options {
    /* set by COX_GROUP_OPTIONS_INIT (base.h) */
    size_t size;
    /* a group's name; NULL: the memory is fd, or `sealed` */
    const char *name;
    /* lent; the group uses cox_group_memory_size bytes from fd_offset on, all zero at first */
    int fd;
    /* The sealed form, as cox_init_request.group has it; name and fd are ignored then. NULL: the
     * named form. Lent until join returns. A rank leaves a sealed group before it joins the next
     * one. */
    const struct cox_group_sealed *sealed;
    /* a multiple of the page size; not with a name */
    uint64_t fd_offset;
    /* 0 to rank_count - 1 */
    uint32_t rank;
    /* 1 to 128 */
    uint32_t rank_count;
    /* largest value of one rank in bytes; 0: 4096. The same on every rank. */
    uint32_t value_size;
    /* The same on every rank: distinguishes groups of one name; 0 is allowed. */
    uint64_t incarnation;
    uint64_t deadline_ns;
    /* Time that a wait in an operation spins before it blocks. 0: it does not
     * spin. May differ between ranks. */
    uint32_t spin_ns;
    /* Called at least every 50 ms while a join or an operation waits, on the thread that waits
     * (with threads for subgroups, on several at once). true ends the wait with COX_ABORTED. NULL:
     * never. */
    bool (*cancelled)(void *context);
    void *context;
    /* Records operations, as cox_init_request.group has it; NULL: nothing does. The group keeps a
     * reference. */
    struct cox_recorder *recorder;
    /* Ranks are on several machines, as cox_init_request.group says it. */
    bool mirrored;
    uint8_t reserved[7];
};
#define COX_GROUP_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_group_options)

/* Size of the region in bytes. */
COX_PUBLIC uint64_t cox_group_memory_size(uint32_t rank_count, uint32_t value_size);

/* Joins, and blocks until every rank has joined. On failure it leaves nothing behind, except the
 * name while other ranks still wait. If a previous group, or one of another incarnation, still has
 * the name, join waits for its end. The last rank to join succeeds even if its deadline has passed.
 * Returns
 *   0
 *   COX_INVALID: rank, rank count or value size out of range, or different on another rank (err
 *     names it)
 *   COX_TAKEN: another process has this rank
 *   COX_DENIED: the region has another owner, mode or type
 *   COX_CORRUPT: the region is invalid
 *   COX_TIMEOUT: err names the missing ranks
 *   COX_PEER_DEAD: a rank died; err names it
 *   COX_ABORTED: by options->cancelled
 *   COX_NO_SPACE: no memory for the region
 *   -errno
 */
COX_PUBLIC int cox_group_join(const struct cox_group_options *options, struct cox_group **ret_group,
                              struct cox_error *err);
/* Leaves the group. The other ranks treat that as the death of this rank, unless they have left as
 * well. NULL-safe, returns NULL. In the child of a fork it only releases memory. */
COX_PUBLIC struct cox_group *cox_group_leave(struct cox_group *group);

struct cox_group_info {
    /* this rank, and the number of ranks: of the group, or of the subgroup */
    uint32_t rank, rank_count;
    /* the largest value of one rank in bytes */
    uint32_t value_size;
    /* Ranks of other machines take part: their fds are of no use here. */
    bool mirrored;
};
COX_PUBLIC struct cox_group_info cox_group_get_info(const struct cox_group *group);

/* Starts this epoch, from 1 to 2^40 - 2; a new group is in epoch 0. The same epoch again changes
 * nothing. Does not wait. Also aligns the subgroups of this rank.
 * Returns
 *   0
 *   COX_INVALID: the epoch is smaller than the present one, or group is a subgroup. Or it is the
 *     present epoch, and this rank is out of step in the group or a subgroup: use a larger one, as
 *     the epoch has ended for the others
 */
COX_PUBLIC int cox_group_align(struct cox_group *group, uint64_t epoch);
/* Ends operations of this epoch on all ranks with COX_ABORTED: the one in flight, and those that
 * follow. On the group it also ends those of the subgroups of this rank. */
COX_PUBLIC void cox_group_abort(struct cox_group *group);
/* Sets the rank whose values made this rank fail; call it before cox_group_abort. The errors of the
 * other ranks then name that rank instead of this one. On the thread that operates. */
COX_PUBLIC void cox_group_blame(struct cox_group *group, uint32_t rank);

/* Makes a subgroup. Its operations are independent of those of the group and of other subgroups.
 * Every member calls it with the same name and members; it does not wait. Disjoint subgroups may
 * have the same name. A value larger than 1 KiB passes through a subgroup in several rounds. The
 * group owns the object.
 * Returns
 *   0
 *   COX_INVALID: this rank is not a member, or the name is not valid
 *   COX_FULL: this rank is in COX_SUBGROUP_COUNT_MAX subgroups already
 *   COX_TAKEN: a member uses the name for a subgroup with other members
 *   -errno
 */
COX_PUBLIC int cox_group_subgroup(struct cox_group *group, const char *name,
                                  const struct cox_rank_set *members,
                                  struct cox_group **ret_subgroup, struct cox_error *err);

/* The operations. In a subgroup, a member's rank is its place among the members. Each one returns
 *   0
 *   COX_TIMEOUT: err names the ranks that have not arrived
 *   COX_PEER_DEAD: err names the dead ranks
 *   COX_ABORTED: by cox_group_abort, options->cancelled, or an align of another rank
 *   COX_CORRUPT: the words of another rank are invalid, or it has called another operation
 *   -errno
 */

COX_PUBLIC int cox_group_barrier(struct cox_group *group, uint64_t deadline_ns,
                                 struct cox_error *err);
/* All-gather: every member gives size bytes (1 to value_size) and gets those of all, in order of
 * rank and without gaps. If sizes differ, all ranks return COX_INVALID and stay in step. value may
 * be its own place in values. On failure values may be written in part.
 * Returns also
 *   COX_INVALID: value or values is NULL; before any wait
 */
COX_PUBLIC int cox_group_gather(struct cox_group *group, const void *value, size_t size,
                                void *values, uint64_t deadline_ns, struct cox_error *err);

enum cox_group_fd {
    COX_GROUP_FD_KEEP = 0, /* fd stays the caller's */
    COX_GROUP_FD_CONSUME =
        1, /* a call that succeeds closes fd; after a failure it stays the caller's */
};
/* All-gather of fds: every member gives one open fd and gets one of each other member, in order of
 * rank and close-on-exec; its own entry is -1. If the kernel denies or lacks pidfd_getfd for one
 * fd, all fds are sent over sockets. On failure the caller gets no fd.
 * Returns also
 *   COX_INVALID: not an fd, or fds is NULL; before any wait
 *   -ENOENT: /proc shows only processes (systemd: ProcSubset=pid); before any wait
 *   -errno: this rank has no free fds; it stays in step with the others, which may have received
 *     theirs. Over sockets also if another rank has none (err names it); all ranks stay in step
 */
COX_PUBLIC int cox_group_gather_fds(struct cox_group *group, int fd, enum cox_group_fd mode,
                                    int *fds, uint64_t deadline_ns, struct cox_error *err);
/* The source passes fd and gets -1 (its ret_fd may be NULL); the other ranks pass -1 and get a
 * duplicate in *ret_fd.
 * Returns
 *   as cox_group_gather_fds
 *   COX_INVALID: also, before it blocks: no such source, or an fd of a rank that is not the source
 */
COX_PUBLIC int cox_group_broadcast_fd(struct cox_group *group, uint32_t source, int fd,
                                      enum cox_group_fd mode, int *ret_fd, uint64_t deadline_ns,
                                      struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
