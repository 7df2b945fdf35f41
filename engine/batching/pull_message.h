/*
 * pull_message: encodes pulls as one KV_TRANSFER request, or as one request to cancel them, and
 * decodes the ranks' replies.
 *
 * Threads: one at a time.
 * Ownership: messages are allocated in the arena, and borrow the caller's items.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_PULL_MESSAGE_H
#define COX_ENGINE_PULL_MESSAGE_H

#include "transfers.h"

#include <coxswain/base.h>

struct Coxswain__ExecuteRequest;

/* a group's name, two numbers, and separators */
#define COX_PULL_ID_SIZE 192

struct cox_pull_item {
    /* name of the pull on the wire */
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

/* Decodes what one completion has of the pull named id. Fills the report's ranks, of which it has
 * the completion's rank_count. Sets its end to SUCCESS, FAILED, TIMEOUT or PEER_DEAD, with error.
 */
void cox_pull_read(const struct cox_completion *completion, const char *id,
                   struct cox_pull_report *report);

#endif
