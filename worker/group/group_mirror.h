/*
 * group_mirror: a rank group (group.h) whose ranks are on several machines.
 *
 * Each machine has the memory of the whole group, and its ranks use it as if all were there. A
 * mirror on each machine stands in for the ranks of the others: it copies what the ranks of its
 * machine have written (collect), and writes what other mirrors have copied (apply) where those
 * ranks would write it. So every word has one writer on each machine, and rounds, epochs, aborts
 * and subgroups are what they are on one machine; values arrive as they were given.
 *
 * What is copied is state, not events: of each rank the last arrival of each part with its value,
 * what it aborted, and its identity. When two arrivals are copied as one, the value of the first is
 * copied, too: ranks elsewhere may be in that round still. There are never three, because a rank
 * cannot arrive at the next round but one before all ranks elsewhere have seen it at this one.
 *
 * A rank is told of a mirror by options.mirrored: then it wakes the mirror after each change. Fds
 * are not exchanged between machines: a handle of another machine is refused when it is opened.
 *
 * The caller carries messages to the other machines, in order, of each sender; and drops those of
 * other incarnations.
 *
 * Threads: collect and wait on one thread; apply on any, one at a time; both at once.
 * Ownership: the mirror maps the memory; the fd stays the caller's.
 * Blocks: wait, until its deadline.
 * If the process dies: ranks of this machine that wait for others see the death of their process.
 */
#ifndef COX_WORKER_GROUP_MIRROR_H
#define COX_WORKER_GROUP_MIRROR_H

#include <coxswain/base.h>

struct cox_group_mirror;

struct cox_group_mirror_options {
    /* Memory of the group, as for cox_group_join; -1: each rank has its own: */
    int fd;
    uint64_t fd_offset;
    /* its words and values, those of ranks here read-only; and the wakeups. Borrowed until close.
     * */
    void *const *words, *const *values;
    void *wakeups;
    uint32_t rank_count;
    uint32_t value_size;
    uint64_t incarnation;
    /* the ranks of this machine */
    uint32_t rank_first, rank_here;
};

/* Returns 0; COX_INVALID; -errno. */
int cox_group_mirror_open(const struct cox_group_mirror_options *options,
                          struct cox_group_mirror **ret_mirror, struct cox_error *err);
/* NULL-safe, returns NULL. No other thread uses it. */
struct cox_group_mirror *cox_group_mirror_close(struct cox_group_mirror *mirror);

/* The largest message. */
size_t cox_group_mirror_size_max(const struct cox_group_mirror *mirror);
/* Copies what the ranks of this machine have changed since the last call. Returns the bytes written
 * to buffer, which has room for size_max; 0: nothing has changed. */
size_t cox_group_mirror_collect(struct cox_group_mirror *mirror, uint8_t *buffer);
/* Waits until a rank of this machine has changed something, or deadline_ns. May return early. */
void cox_group_mirror_wait(struct cox_group_mirror *mirror, uint64_t deadline_ns);
/* The next collect copies everything, changed or not. On collect's thread. */
void cox_group_mirror_forget(struct cox_group_mirror *mirror);
/* Ends a wait. From any thread. */
void cox_group_mirror_wake(struct cox_group_mirror *mirror);
/* Writes what a mirror of another machine has collected, whose ranks are rank_first to rank_first +
 * rank_count - 1. Returns 0; COX_CORRUPT: nothing of it was written from the bad place on. */
int cox_group_mirror_apply(struct cox_group_mirror *mirror, uint32_t rank_first,
                           uint32_t rank_count, const uint8_t *bytes, size_t size,
                           struct cox_error *err);

#endif
