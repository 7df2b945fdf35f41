/*
 * kv_layout: struct cox_kv_pool (worker.h) as a message, and back; and whether two layouts are the
 * same.
 *
 * Threads: any; values. Ownership: the caller's memory. Nothing blocks. A message is input: what it
 * lacks or cannot be is COX_CORRUPT. If the process dies nothing is left.
 */
#ifndef COX_WORKER_KV_LAYOUT_H
#define COX_WORKER_KV_LAYOUT_H

#include "proto/executor.pb-c.h"
#include "worker.h"

struct cox_kv_pool_message {
    Coxswain__KvPool pool;
    Coxswain__KvLayout layout;
};

/* Returns the message, which points into message and pool. */
Coxswain__KvPool *cox_kv_pool_fill(struct cox_kv_pool_message *message,
                                   const struct cox_kv_pool *pool);
/* Returns 0; COX_CORRUPT: err says what is wrong. */
int cox_kv_pool_read(const Coxswain__KvPool *message, struct cox_kv_pool *ret_pool,
                     struct cox_error *err);

/* Returns 0; COX_INVALID: err names every field that differs, with both values. */
int cox_kv_layout_check(const struct cox_kv_layout *theirs, const struct cox_kv_layout *ours,
                        struct cox_error *err);

#endif
