/*
 * pull_message: pulls as one KV_TRANSFER request or as one order to leave them, and what ranks
 * reply.
 *
 * Threads: one at a time.
 * Ownership: messages live in the arena, and lend what they are made of.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_PULL_MESSAGE_H
#define COX_COORDINATOR_PULL_MESSAGE_H

#include "proto/wire.h"
#include "transfers.h"

struct Coxswain__ExecuteRequest;

/* A group's name, two numbers, and what is between. */
#define COX_PULL_ID_SIZE 192

struct cox_pull_item {
    /* on the wire */
    const char *id;
    const struct cox_kv_reference *source;
    const int32_t *blocks;
    int64_t sequence;
    uint64_t deadline_ns;
};

/* Returns 0 or -ENOMEM. */
int cox_pull_message(struct cox_arena *arena, const struct cox_pull_item *items, size_t count,
                     struct Coxswain__ExecuteRequest **ret_request);
int cox_pull_cancel_message(struct cox_arena *arena, const char *const *ids, size_t count,
                            struct Coxswain__ExecuteRequest **ret_request);

/* What one completion says of the pull called id: fills the ranks of the report, whose rank_count
 * is the completion's, and what its end is: SUCCESS, FAILED, TIMEOUT or PEER_DEAD, with error. */
void cox_pull_read(const struct cox_completion *completion, const char *id,
                   struct cox_pull_report *report);

#endif
