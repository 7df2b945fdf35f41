/*
 * transfer: the prefill/decode messages of a worker: link, unlink and change of role; status; pull.
 * links.h and pulls.h do the work.
 *
 * Roles: a rank with the prefill role pulls nothing (COX_STATE). A rank with any other role, or
 * none, may pull. A change applies to pulls that begin later; links stay.
 *
 * Threads: link, status and cancel on the thread of the link channel; pull on that of the transfer
 *   channel; clear on any; open and close by one at a time.
 * Ownership: messages are lent; replies are filled with memory of the arena.
 * Blocks: pull, as pulls.h says; close and clear, until the pull has ended; nothing else.
 * If the process dies: as links.h and pulls.h.
 */
#ifndef COX_ENGINE_TRANSFER_H
#define COX_ENGINE_TRANSFER_H

#include "engine/compute/cache.h"
#include "proto/executor.pb-c.h"
#include <coxswain/worker.h>

struct cox_transfer;

struct cox_transfer_options {
    /* returns whether the running pull was cancelled; NULL: never */
    bool (*cancelled)(void *context);
    void *context;
    struct cox_log log;
};

/* Returns 0 or -ENOMEM. */
int cox_transfer_new(const struct cox_transfer_options *options,
                     struct cox_transfer **ret_transfer);
struct cox_transfer *cox_transfer_free(struct cox_transfer *transfer); /* NULL-safe, returns NULL */

/* Opens the cache for pulls, with the layout of its blocks. Links are kept, except those with
 * another layout. */
void cox_transfer_open(struct cox_transfer *transfer, struct cox_cache *cache,
                       const struct cox_kv_layout *layout);
/* Ends all pulls and releases the cache. Returns as cox_pulls_clear. */
int cox_transfer_close(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err);
/* Ends all pulls, including later ones of the running request. Returns as cox_pulls_clear. */
int cox_transfer_clear(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err);

void cox_transfer_link(struct cox_transfer *transfer, const Coxswain__PDLinkRequest *request);
/* Returns 0, or COX_TOO_LARGE: no memory. */
int cox_transfer_status(struct cox_transfer *transfer, struct cox_arena *arena,
                        Coxswain__PDLinkStatusResponse *response, struct cox_error *err);
/* Returns 0, whatever the outcome of the pulls, or COX_TOO_LARGE: no memory. */
int cox_transfer_pull(struct cox_transfer *transfer, const Coxswain__PullKVRequest *request,
                      struct cox_arena *arena, Coxswain__PullKVResponse *response,
                      struct cox_error *err);

#endif
