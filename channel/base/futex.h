/*
 * futex: sleep on a 32-bit word of shared memory, and wake who does.
 *
 * A sleeper gives the value it has seen; the kernel looks at the word again before it lets it
 * sleep, so a change after the look is never slept through. The word may be mapped read-only by who
 * sleeps or wakes.
 *
 * Whoever may write the memory may also give its page back to the kernel (a hole, which reads as
 * zero) again and again: a call that comes to the page just then fails with EFAULT, about once in a
 * million. That is no reason to sleep on, nor to leave.
 *
 * Threads, processes: any.
 * Blocks: wait until the word is woken or has another value, or the deadline.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_FUTEX_H
#define COX_CHANNEL_FUTEX_H

#include "base.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Returns 0: woken, or the word is not `seen` (any more), or for no reason; COX_TIMEOUT; -EINTR,
 * where signals are to end it: this thread has handled one; -errno. */
static inline int cox_futex_wait_signals(_Atomic uint32_t *word, uint32_t seen,
                                         uint64_t deadline_ns, bool signals_end)
{
    /* Absolute on CLOCK_MONOTONIC; a signal may come again and again without moving the end. */
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    for (;;) {
        if (syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen,
                    deadline_ns == COX_DEADLINE_NEVER ? NULL : &until, NULL,
                    FUTEX_BITSET_MATCH_ANY) == 0 ||
            errno == EAGAIN)
            return 0;
        if (errno == ETIMEDOUT)
            return COX_TIMEOUT;
        if (errno == EFAULT)
            return cox_now_ns() < deadline_ns ? 0 : COX_TIMEOUT;
        if (errno != EINTR || signals_end)
            return -errno;
    }
}

static inline int cox_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t deadline_ns)
{
    return cox_futex_wait_signals(word, seen, deadline_ns, false);
}

/* Wakes as many as that of those who sleep on the word. */
static inline void cox_futex_wake_some(_Atomic uint32_t *word, int count)
{
    enum { TRIES = 16 };
    for (int i = 0; i < TRIES && syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0) < 0 &&
                    errno == EFAULT;
         i++)
        continue;
}

static inline void cox_futex_wake_one(_Atomic uint32_t *word)
{
    cox_futex_wake_some(word, 1);
}

/* Wakes all. */
static inline void cox_futex_wake(_Atomic uint32_t *word)
{
    cox_futex_wake_some(word, INT_MAX);
}

#endif
