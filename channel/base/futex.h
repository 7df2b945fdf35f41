/*
 * futex: block on a 32-bit word of shared memory, and wake the threads that do.
 *
 * A waiter passes the value that it has seen. The kernel compares the word again before it blocks
 * the thread, so a change after the check is never missed. The word may be mapped read-only by
 * waiters and wakers.
 *
 * A process that can write the memory can also release its page (a hole, which reads as zero) again
 * and again. A call that accesses the page at that moment fails with EFAULT, about once in a
 * million. That ends a wait early, and a wake is tried again.
 *
 * Threads, processes: any.
 * Blocks: wait until the word is woken or has another value, or the deadline.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_FUTEX_H
#define COX_CHANNEL_FUTEX_H

#include <coxswain/base.h>

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Returns
 *   0: woken, possibly spuriously, or the word is not `seen`
 *   COX_TIMEOUT
 *   -EINTR: this thread has handled a signal, with signals_end
 *   -errno
 */
static inline int cox_futex_wait_signals(_Atomic uint32_t *word, uint32_t seen,
                                         uint64_t deadline_ns, bool signals_end)
{
    /* Absolute on CLOCK_MONOTONIC: signals do not extend the wait. */
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

/* Wakes at most count waiters. */
static inline void cox_futex_wake_some(_Atomic uint32_t *word, int count)
{
    enum { TRIES = 16 };
    for (int i = 0; i < TRIES && syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0) < 0 &&
                    errno == EFAULT;
         i++)
        continue;
}

/* Wakes all waiters. */
static inline void cox_futex_wake(_Atomic uint32_t *word)
{
    cox_futex_wake_some(word, INT_MAX);
}

#endif
