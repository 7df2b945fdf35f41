/*
 * semaphore: one named POSIX semaphore.
 *
 * A semaphore here carries wake-ups, never truth: its count survives a crash, has no owner, and
 * tells nothing of death. What was checked is what is used: attach opens the file that
 * sem_overview(7) documents, checks it through the fd, and maps that very fd.
 *
 * Threads: post, take and wait from any thread of any process; the rest from one.
 * Ownership: the caller owns struct cox_semaphore; detach unmaps. unlink removes the name for
 *   everybody, mappings stay.
 * Blocks: only cox_semaphore_wait, until its deadline. A signal never ends it.
 * If the process dies: the name stays until somebody unlinks it; a token taken by the dead is lost.
 */
#ifndef COX_CHANNEL_SEMAPHORE_H
#define COX_CHANNEL_SEMAPHORE_H

#include "base.h"

#include <errno.h>
#include <semaphore.h>
#include <time.h>

#include "tsan.h"

struct cox_semaphore {
    sem_t *sem; /* NULL: detached */
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

/* These three here: after a switch each return to a caller is a guess that the processor gets wrong. */

/* Async-signal-safe, keeps errno. A count at its maximum is no error: the sleeper has plenty to wake for. */
static inline void cox_semaphore_post(struct cox_semaphore *semaphore)
{
    const int saved = errno;
    cox_tsan_release(semaphore->sem);
    if (sem_post(semaphore->sem) < 0)
        errno = saved;
}

/* True: a token was there and is now taken. */
static inline bool cox_semaphore_take(struct cox_semaphore *semaphore)
{
    while (sem_trywait(semaphore->sem) < 0)
        if (errno != EINTR)
            return false;
    cox_tsan_acquire(semaphore->sem); /* the sanitizer does not know sem_clockwait */
    return true;
}

/* Returns 0: a token was taken; COX_TIMEOUT; -errno. */
static inline int cox_semaphore_wait(struct cox_semaphore *semaphore, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    for (;;) {
        int r = deadline_ns == COX_DEADLINE_NEVER
                    ? sem_wait(semaphore->sem)
                    : sem_clockwait(semaphore->sem, CLOCK_MONOTONIC, &until);
        if (r == 0)
            break;
        if (errno == ETIMEDOUT)
            return COX_TIMEOUT;
        if (errno != EINTR)
            return -errno;
    }
    cox_tsan_acquire(semaphore->sem); /* the sanitizer does not know sem_clockwait */
    return 0;
}

#endif
