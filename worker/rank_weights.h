/*
 * rank_weights: the rank's end of the queue in which its coordinator publishes the model's weights: the block that it computes
 * with, and the next one.
 *
 *     open, offer: next = what the init names
 *     take(v):     next = the message whose note is v; those before it are let go, unread
 *     keep:        present = next; the block that was present is let go
 *
 * Versions only grow. A step that is given up and repeated asks for the same version, or a later one: what was taken for it
 * is still next, or present.
 *
 * Threads: one, that of the execute channel. Inside a callback that a pause may leave, call cox_visit_hold first: the queue
 *   has a lock that others wait for.
 * Ownership: bytes are lent, for reading: those of present until keep, those of next until they are present or a later version is taken.
 * Blocks: open, for handles, until its deadline; the rest for the queue's lock, which ends by itself.
 * Bytes: versions, handles and references come from the coordinator, whom a rank trusts; what is in pool and queue is checked
 *   by those.
 * If the process dies: its references and its place in the queue are given back by who sweeps them. If the coordinator
 *   dies, what is mapped stays.
 */
#ifndef COX_WORKER_RANK_WEIGHTS_H
#define COX_WORKER_RANK_WEIGHTS_H

#include "../channel/memory/queue.h"

struct cox_init_request;
struct cox_rank_weights;

/* What an init says of the weights. */
struct cox_weights_offer {
    struct cox_handle queue;     /* of later versions */
    struct cox_pool_handle pool; /* of all of them */
    struct cox_block_ref ref;
    uint64_t version; /* of ref; from 1 */
    char door[4096];  /* where handles can be had that cannot be opened otherwise; empty: nowhere */
};

/* Returns 0; COX_EMPTY: this init tells of no weights, ranks load them; COX_CORRUPT. */
int cox_init_request_weights(const struct cox_init_request *request,
                             struct cox_weights_offer *ret_offer, struct cox_error *err);

/* Subscribes, and takes a reference of the version offered: next. Returns 0; what cox_queue_open, cox_pool_open,
 * cox_subscriber_new and cox_pool_ref return: err says of what; -ENOMEM. */
int cox_rank_weights_open(const struct cox_weights_offer *offer, uint64_t deadline_ns,
                          struct cox_rank_weights **ret_weights, struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_rank_weights *cox_rank_weights_free(struct cox_rank_weights *weights);

/* The same coordinator's offer, said again: next is that version, unless it is present. Returns 0; what cox_pool_ref
 * returns. */
int cox_rank_weights_offer(struct cox_rank_weights *weights, const struct cox_weights_offer *offer,
                           struct cox_error *err);

/* The version that is present; 0: none yet. */
uint64_t cox_rank_weights_version(const struct cox_rank_weights *weights);

/* The block of a version: present, next, or out of the queue, which makes it next. Returns 0; COX_STALE: older than what is present;
 * COX_NOT_FOUND: it was not published, or the queue has let it go; what cox_subscriber_take returns: err says which version. */
int cox_rank_weights_take(struct cox_rank_weights *weights, uint64_t version,
                          const void **ret_bytes, uint64_t *ret_length, struct cox_error *err);

/* Next is the block that is present, under a later number: the version between them was taken back, or it was told again. */
bool cox_rank_weights_same(const struct cox_rank_weights *weights);

/* Nothing computes with present any more: next takes its place. Nothing, where there is no next. */
void cox_rank_weights_keep(struct cox_rank_weights *weights);

#endif
