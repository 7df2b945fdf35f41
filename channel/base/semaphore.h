/*
 * semaphore: one named POSIX semaphore.
 *
 * A semaphore here carries wake-ups, never state: its count survives a crash, has no owner, and
 * tells nothing of death. What was checked is what is used: attach opens the file that
 * sem_overview(7) documents, checks it through the fd, and maps that very fd.
 *
 * The words are glibc's (64 bits): the count in the lower half of the first eight bytes, the number
 * of sleepers in the upper half. Whoever uses glibc's own functions on the other side sleeps, and
 * wakes up, as ever. Here they are used without glibc, which ends the process where a word that it
 * trusts was written over: whatever any process writes there, post, take and wait return, and none
 * of them reads more than those eight bytes. What can be lost by it is a wake-up:
 * cox_semaphore_wake.
 *
 * Threads: post, wake, take and wait from any thread of any process; the rest from one.
 * Ownership: the caller owns struct cox_semaphore; detach unmaps. unlink removes the name for
 *   everybody, mappings stay.
 * Blocks: only cox_semaphore_wait, until its deadline. A signal ends it where the caller says so.
 * If the process dies: the name stays until somebody unlinks it; a token taken by the dead is lost.
 */
#ifndef COX_CHANNEL_SEMAPHORE_H
#define COX_CHANNEL_SEMAPHORE_H

#include "base.h"

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

/* More tokens than this are nobody's who keeps to the protocol: somebody wrote over the count, and
 * whoever takes one takes all of them. */
#define COX_SEMAPHORE_COUNT_MAX 65536u
#define COX_SEMAPHORE_SLEEPER (UINT64_C(1) << 32)

struct cox_semaphore {
    /* NULL: detached */
    sem_t *sem;
};

/* name starts with a slash and has no other. Creates exclusively with the starting value, mode 0600
 * whatever the umask, and attaches. Returns 0; COX_TAKEN: the name exists; -errno (ENOSPC: the
 * tmpfs is full). */
int cox_semaphore_create(struct cox_semaphore *semaphore, const char *name, unsigned value,
                         struct cox_error *err);
/* Returns 0; COX_NOT_FOUND; COX_DENIED: another owner, mode, size or type, a symlink, or a second
 * hard link, and err says which; -errno. */
int cox_semaphore_attach(struct cox_semaphore *semaphore, const char *name, struct cox_error *err);
/* The same for an fd that came another way and stays the caller's; name is for err, and the file
 * need not have one. */
int cox_semaphore_attach_fd(struct cox_semaphore *semaphore, int fd, const char *name,
                            struct cox_error *err);
/* Puts another semaphore without a name in the place of an attached one, at its very address: a
 * thread that posts at this moment meets one or the other. Nobody may sleep on the old one: he
 * would not wake up. *ret_fd, the caller's, is what others attach by; name is for err. Returns 0;
 * -errno, and the old one is still there. */
int cox_semaphore_renew(struct cox_semaphore *semaphore, const char *name, unsigned value,
                        int *ret_fd, struct cox_error *err);
void cox_semaphore_detach(struct cox_semaphore *semaphore); /* idempotent */
/* Returns 0 or -errno; a name that is already gone is 0. */
int cox_semaphore_unlink(const char *name);

/* These here: after a switch each return to a caller is a guess that the processor gets wrong. */

static inline _Atomic uint64_t *cox_semaphore_words(const struct cox_semaphore *semaphore)
{
    return (_Atomic uint64_t *)(void *)semaphore->sem;
}

/* The count, the half that is slept on. */
static inline _Atomic uint32_t *cox_semaphore_count(const struct cox_semaphore *semaphore)
{
    return (_Atomic uint32_t *)(void *)semaphore->sem;
}

/* One token more; a count at its maximum stays. True: the words tell of somebody who sleeps. */
static inline bool cox_semaphore_add(struct cox_semaphore *semaphore)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    /* relaxed: the exchange looks again. */
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed);
    /* release: partner is the acquire of whoever takes it. */
    while ((uint32_t)seen < SEM_VALUE_MAX &&
           !atomic_compare_exchange_weak_explicit(words, &seen, seen + 1, memory_order_release,
                                                  memory_order_relaxed))
        continue;
    return seen >= COX_SEMAPHORE_SLEEPER;
}

/* A token for this caller, who is no longer one of `sleepers` (0 or 1). False: there is none, and
 * nothing has changed. */
static inline bool cox_semaphore_remove(struct cox_semaphore *semaphore, uint32_t sleepers)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed), next;
    do {
        const uint32_t count = (uint32_t)seen;
        if (count == 0)
            return false;
        next = seen - (count > COX_SEMAPHORE_COUNT_MAX ? count : 1);
        /* Somebody wrote over the number: below zero it would be four thousand millions. */
        if (sleepers && next >= COX_SEMAPHORE_SLEEPER)
            next -= COX_SEMAPHORE_SLEEPER;
        /* acquire: partner is the release in cox_semaphore_add, and glibc's. */
    } while (!atomic_compare_exchange_weak_explicit(words, &seen, next, memory_order_acquire,
                                                    memory_order_relaxed));
    return true;
}

/* This caller does not sleep any more, and has no token. */
static inline void cox_semaphore_get_up(struct cox_semaphore *semaphore)
{
    _Atomic uint64_t *words = cox_semaphore_words(semaphore);
    uint64_t seen = atomic_load_explicit(words, memory_order_relaxed);
    /* relaxed: counted too long costs whoever posts a call. */
    while (seen >= COX_SEMAPHORE_SLEEPER &&
           !atomic_compare_exchange_weak_explicit(words, &seen, seen - COX_SEMAPHORE_SLEEPER,
                                                  memory_order_relaxed, memory_order_relaxed))
        continue;
}

/* Async-signal-safe, keeps errno. A count at its maximum is no error: the sleeper has plenty to
 * wake for. */
static inline void cox_semaphore_post(struct cox_semaphore *semaphore)
{
    if (!cox_semaphore_add(semaphore))
        return;
    const int saved = errno;
    cox_futex_wake_one(cox_semaphore_count(semaphore));
    errno = saved;
}

/* The same, and whatever the words say all that sleep there wake up: those that find no token
 * return COX_EMPTY. For wake-ups that must not be lost, also where somebody writes over the words.
 */
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

/* Returns 0: a token was taken; COX_EMPTY: it was woken, and somebody else has the token, or wrote
 * over it; COX_TIMEOUT; -EINTR, where signals are to end it; -errno: the kernel refuses the wait.
 */
static inline int cox_semaphore_wait_signals(struct cox_semaphore *semaphore, uint64_t deadline_ns,
                                             bool signals_end)
{
    if (cox_semaphore_take(semaphore))
        return 0;
    /* relaxed: whoever posts before it sees this has put the token where the kernel looks again. */
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
