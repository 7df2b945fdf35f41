/*
 * queue_lock: a lock in one word of shared memory that names its owner, and that survives the
 * owner's death.
 *
 *     free -take (CAS)-> owned by P -release-> free
 *                           '-- P is dead: CAS by the process that found out, which repairs first
 *
 * The word is the owner's process identity, so at no time is the lock taken by an unknown process.
 * A waiter blocks in slices, and after each checks that the owner is alive.
 *
 * Threads: any thread of any process. Threads of one process have one identity, and wait for each
 *   other as processes do.
 * Ownership: the words belong to the memory they are in.
 * Blocks: take, until the lock is free or its owner is dead, at most COX_QUEUE_LOCK_PATIENCE_MS
 *   while one live owner keeps it (it is stopped, or a process overwrote the word). While a process
 *   keeps overwriting the word, about a second.
 * Bytes: the words are input. A word that names no live process is taken over.
 * If the process dies: the next process that wants the lock gets it with *ret_repair set.
 */
#ifndef COX_MEMORY_QUEUE_LOCK_H
#define COX_MEMORY_QUEUE_LOCK_H

#include "queue_layout.h"

/* Generous: an operation under the lock takes microseconds. */
#define COX_QUEUE_LOCK_PATIENCE_MS 5000

/* This process's identity. Returns 0; COX_CORRUPT: pid or start time do not fit; -errno. */
int cox_queue_identity(uint64_t *ret_identity, struct cox_error *err);
/* False for a dead process, reaped or not, and for a word that is no identity. */
bool cox_queue_identity_alive(uint64_t identity);
static inline uint32_t cox_queue_identity_pid(uint64_t identity)
{
    return (uint32_t)(identity >> 42);
}

/* *ret_repair: the lock was taken over from a dead process. A free lock is taken also after the
 * deadline. Returns 0; COX_TIMEOUT; -errno. */
int cox_queue_lock_until(struct cox_queue_layout_lock *lock, uint64_t identity,
                         uint64_t deadline_ns, bool *ret_repair, struct cox_error *err);
void cox_queue_unlock(struct cox_queue_layout_lock *lock, uint64_t identity);

#endif
