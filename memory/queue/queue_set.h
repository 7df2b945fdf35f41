/*
 * queue_set: a switch for tests, beyond the contract (queue.h).
 *
 * Threads, blocking, death: as queue.h.
 */
#ifndef COX_MEMORY_QUEUE_SET_H
#define COX_MEMORY_QUEUE_SET_H

#include <coxswain/memory/queue.h>

#if COX_TESTING
/* Behaves as on a kernel before 5.16, without futex_waitv. */
void cox_queue_set_use_one_word(struct cox_queue_set *set);
#endif

#endif
