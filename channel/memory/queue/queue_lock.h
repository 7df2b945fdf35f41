/*
 * queue_lock: mutual exclusion by one word of shared memory that names its owner, and outlives it.
 *
 *     free -take (CAS)-> owned by P -give back-> free
 *                           '-- P is dead: CAS to the one who found that out, who repairs first
 *
 * The word is the owner's identity, so that there is no moment at which the lock is taken and
 * nobody is known to have it. Whoever waits sleeps in slices, and looks in each whether the owner
 * lives.
 *
 * Threads, processes: any; threads of one process have one identity, and wait for each other like
 * others. Ownership: the words belong to whoever has the memory. Blocks: take, until the lock is
 * free or its owner dead; while one live owner keeps it, at most
 *   COX_QUEUE_LOCK_PATIENCE_MS: it is stopped, or somebody wrote into the word. While somebody
 *   keeps writing into the word, about a second.
 * Bytes: the words are input. A word that names no live process is taken over.
 * If the process dies: the next one who wants the lock gets it, and is told.
 */
#ifndef COX_CHANNEL_MEMORY_QUEUE_LOCK_H
#define COX_CHANNEL_MEMORY_QUEUE_LOCK_H

#include "queue_layout.h"

/* An operation under the lock takes microseconds. */
#define COX_QUEUE_LOCK_PATIENCE_MS 5000

/* The identity of this process. Returns 0; COX_CORRUPT: pid or start time do not fit; -errno. */
int cox_queue_identity(uint64_t *ret_identity, struct cox_error *err);
/* False once that process is dead, reaped or not, and for what is no process. */
bool cox_queue_identity_alive(uint64_t identity);
static inline uint32_t cox_queue_identity_pid(uint64_t identity)
{
    return (uint32_t)(identity >> 42);
}

/* *ret_repair: it was a dead one's. Returns 0; COX_TIMEOUT: not in all that time; -errno. */
int cox_queue_lock(struct cox_queue_layout_lock *lock, uint64_t identity, bool *ret_repair,
                   struct cox_error *err);
/* The same, until the deadline at most; one that is free is taken also after it. */
int cox_queue_lock_until(struct cox_queue_layout_lock *lock, uint64_t identity,
                         uint64_t deadline_ns, bool *ret_repair, struct cox_error *err);
void cox_queue_unlock(struct cox_queue_layout_lock *lock, uint64_t identity);

#endif
