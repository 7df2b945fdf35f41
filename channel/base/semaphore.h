/*
 * semaphore: one named POSIX semaphore.
 *
 * A semaphore here carries wakeups, never state: its count survives a crash, has no owner, and does
 * not report a death. What was checked is what is used: attach opens the file that sem_overview(7)
 * documents, checks it through the fd, and maps that fd.
 *
 * The words are glibc's (64 bits): the count is in the lower half of the first eight bytes, the
 * number of waiters in the upper half. A process that uses glibc's own functions on the same
 * semaphore works as usual. This file does not call them, because glibc ends the process if a word
 * that it trusts was overwritten. Whatever a process writes to the words, post, take and wait
 * return, and none of them reads more than those eight bytes. Only a wakeup can be lost; see
 * cox_semaphore_wake.
 *
 * Threads: post, wake, take and wait from any thread of any process; the rest from one.
 * Ownership: the caller owns struct cox_semaphore; detach unmaps. unlink removes the name for all
 *   processes; mappings stay.
 * Blocks: only cox_semaphore_wait, until its deadline. A signal ends it if the caller asks for
 *   that.
 * If the process dies: the name stays until it is unlinked; a token that it had taken is lost.
 */
#ifndef COX_CHANNEL_SEMAPHORE_H
#define COX_CHANNEL_SEMAPHORE_H

#include <coxswain/base.h>

#include <errno.h>
#include <limits.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "futex.h"

#if !defined(__GLIBC__) || __WORDSIZE != 64 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error                                                                                             \
    "semaphore.h knows the words of a sem_t of glibc with 64 bits, lower half first, and no others"
#endif
_Static_assert(sizeof(sem_t) == 32, "another sem_t");

/* A process that follows the protocol never posts more tokens than this: the count was overwritten,
 * and a take removes all of them. */
#define COX_SEMAPHORE_COUNT_MAX 65536u
#define COX_SEMAPHORE_SLEEPER (UINT64_C(1) << 32)

struct cox_semaphore {
    /* NULL: detached */
    sem_t *sem;
};

/* name starts with a slash and has no other. Creates exclusively with the starting value, mode 0600
 * whatever the umask, and attaches.
 * Returns
 *   0
 *   COX_TAKEN: the name exists
 *   -errno: ENOSPC: the tmpfs is full
 */
int cox_semaphore_create(struct cox_semaphore *semaphore, const char *name, unsigned value,
                         struct cox_error *err);
/* Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_DENIED: another owner, mode, size or type, a symlink, or a second hard link; err says which
 *   -errno
 */
int cox_semaphore_attach(struct cox_semaphore *semaphore, const char *name, struct cox_error *err);
/* The same for an fd, which stays the caller's. The file need not have a name; name is for err. */
int cox_semaphore_attach_fd(struct cox_semaphore *semaphore, int fd, const char *name,
                            struct cox_error *err);
/* Replaces an attached semaphore by a new one without a name, at the same address: a thread that
 * posts meanwhile uses one or the other. No thread may wait on the old one, because it would not be
 * woken. *ret_fd is the caller's; others attach by it. name is for err. Returns 0, or -errno: the
 * old one is still there. */
int cox_semaphore_renew(struct cox_semaphore *semaphore, const char *name, unsigned value,
                        int *ret_fd, struct cox_error *err);
void cox_semaphore_detach(struct cox_semaphore *semaphore); /* idempotent */
/* Returns 0, also if the name does not exist, or -errno. */
int cox_semaphore_unlink(const char *name);

/* Inline: after a context switch the processor mispredicts each return to a caller. */

static inline _Atomic uint64_t *cox_semaphore_words(const struct cox_semaphore *semaphore)
{
    return (_Atomic uint64_t *)(void *)semaphore->sem;
}

/* The count: the half on which waiters block. */
static inline _Atomic uint32_t *cox_semaphore_count(const struct cox_semaphore *semaphore)
{
    return (_Atomic uint32_t *)(void *)semaphore->sem;
}

/* Adds a token; a count at its maximum stays. Returns true if the words show a waiter. */
static inline bool cox_semaphore_add(struct cox_semaphore *semaphore)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    /* relaxed: the exchange checks the value again. */
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed);
    /* release: partner is the acquire of the thread that takes the token. */
    while ((uint32_t)seen < SEM_VALUE_MAX &&
           !atomic_compare_exchange_weak_explicit(words, &seen, seen + 1, memory_order_release,
                                                  memory_order_relaxed))
        continue;
    return seen >= COX_SEMAPHORE_SLEEPER;
}

/* Takes a token for the caller, which is no longer one of `sleepers` (0 or 1). Returns false, and
 * changes nothing, if there is none. */
static inline bool cox_semaphore_remove(struct cox_semaphore *semaphore, uint32_t sleepers)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed), next;
    do {
        const uint32_t count = (uint32_t)seen;
        if (count == 0)
            return false;
        next = seen - (count > COX_SEMAPHORE_COUNT_MAX ? count : 1);
        /* The number was overwritten if it is smaller than this; below zero it would wrap. */
        if (sleepers && next >= COX_SEMAPHORE_SLEEPER)
            next -= COX_SEMAPHORE_SLEEPER;
        /* acquire: partner is the release in cox_semaphore_add, and glibc's. */
    } while (!atomic_compare_exchange_weak_explicit(words, &seen, next, memory_order_acquire,
                                                    memory_order_relaxed));
    return true;
}

/* The caller stops waiting without a token. */
static inline void cox_semaphore_get_up(struct cox_semaphore *semaphore)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed);
    /* relaxed: a stale count costs the next post one system call. */
    while (seen >= COX_SEMAPHORE_SLEEPER &&
           !atomic_compare_exchange_weak_explicit(words, &seen, seen - COX_SEMAPHORE_SLEEPER,
                                                  memory_order_relaxed, memory_order_relaxed))
        continue;
}

/* Async-signal-safe, keeps errno. A count at its maximum is not an error: its waiters have enough
 * tokens. */
static inline void cox_semaphore_post(struct cox_semaphore *semaphore)
{
    if (!cox_semaphore_add(semaphore))
        return;
    const int saved = errno;
    cox_futex_wake_some(cox_semaphore_count(semaphore), 1);
    errno = saved;
}

/* The same, and wakes all waiters whatever the words contain; those that find no token return
 * COX_EMPTY. For wakeups that must not be lost, even if a process overwrites the words. */
static inline void cox_semaphore_wake(struct cox_semaphore *semaphore)
{
    const int saved = errno;
    cox_semaphore_add(semaphore);
    cox_futex_wake(cox_semaphore_count(semaphore));
    errno = saved;
}

/* True: a token was there and is now taken. */
static inline bool cox_semaphore_take(struct cox_semaphore *semaphore)
{
    return cox_semaphore_remove(semaphore, 0);
}

/* Returns
 *   0: a token was taken
 *   COX_EMPTY: woken, but another thread took the token, or it was overwritten
 *   COX_TIMEOUT
 *   -EINTR: a signal, with signals_end
 *   -errno: the kernel refuses the wait
 */
static inline int cox_semaphore_wait_signals(struct cox_semaphore *semaphore, uint64_t deadline_ns,
                                             bool signals_end)
{
    if (cox_semaphore_take(semaphore))
        return 0;
    /* relaxed: a thread that posts before it sees this count has stored its token before the kernel
     * checks the word. */
    atomic_fetch_add_explicit(cox_semaphore_words(semaphore), COX_SEMAPHORE_SLEEPER,
                              memory_order_relaxed);
    const int r =
        cox_futex_wait_signals(cox_semaphore_count(semaphore), 0, deadline_ns, signals_end);
    if (cox_semaphore_remove(semaphore, 1))
        return 0;
    cox_semaphore_get_up(semaphore);
    return r ? r : cox_now_ns() < deadline_ns ? COX_EMPTY : COX_TIMEOUT;
}

static inline int cox_semaphore_wait(struct cox_semaphore *semaphore, uint64_t deadline_ns)
{
    return cox_semaphore_wait_signals(semaphore, deadline_ns, false);
}

#endif
