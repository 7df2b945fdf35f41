/*
 * kv_layout: struct cox_kv_pool (worker.h) as a message. The way back, and the comparison of two
 * layouts, are public: worker.h.
 *
 * Threads: any; values. Ownership: the caller's memory. Nothing blocks. If the process dies nothing
 * is left.
 */
#ifndef COX_WORKER_KV_LAYOUT_H
#define COX_WORKER_KV_LAYOUT_H

#include "proto/executor.pb-c.h"
#include <coxswain/worker.h>

struct cox_kv_pool_message {
    Coxswain__KvPool pool;
    Coxswain__KvLayout layout;
};

/* Returns the message, which points into message and pool. */
Coxswain__KvPool *cox_kv_pool_fill(struct cox_kv_pool_message *message,
                                   const struct cox_kv_pool *pool);
#endif
