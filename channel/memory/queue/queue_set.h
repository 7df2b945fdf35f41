/*
 * queue_set: what tests tell a set beyond its contract (queue.h).
 *
 * Threads, blocks, if the process dies: as queue.h.
 */
#ifndef COX_CHANNEL_MEMORY_QUEUE_SET_H
#define COX_CHANNEL_MEMORY_QUEUE_SET_H

#include "queue.h"

#if COX_TESTING
/* As on a kernel before 5.16, which can sleep on one word alone. */
void cox_queue_set_use_one_word(struct cox_queue_set *set);
#endif

#endif
