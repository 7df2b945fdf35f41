/*
 * transfer: the messages of prefill/decode, as the callbacks of a worker get them: link, unlink and
 * switch of role; status; pull. What is behind them is links.h and pulls.h.
 *
 * Roles: a rank that was told to prefill pulls nothing (COX_STATE); one that decodes, does both, or
 * was told nothing, does. A switch holds for pulls that begin later; links stay.
 *
 * Threads: link, status and cancel on the thread of the link channel, pull on that of the transfer
 *   channel, clear on any; open and close by one at a time.
 * Ownership: messages are lent; replies are filled with memory of the arena.
 * Blocks: pull, as pulls.h says; close and clear until it has come out; the rest nothing.
 * If the process dies: as links.h and pulls.h.
 */
#ifndef COX_WORKER_TRANSFER_H
#define COX_WORKER_TRANSFER_H

#include "engine/compute/cache.h"
#include "proto/executor.pb-c.h"
#include "worker/loop/worker.h"

struct cox_transfer;

struct cox_transfer_options {
    /* the pull that is being called is given up; NULL: never */
    bool (*aborted)(void *context);
    void *context;
    struct cox_log log;
};

/* Returns 0 or -ENOMEM. */
int cox_transfer_new(const struct cox_transfer_options *options,
                     struct cox_transfer **ret_transfer);
struct cox_transfer *cox_transfer_free(struct cox_transfer *transfer); /* NULL-safe, returns NULL */

/* Pulls go into this cache, whose blocks lie so. Links are kept, except those to blocks that lie
 * otherwise. */
void cox_transfer_open(struct cox_transfer *transfer, struct cox_cache *cache,
                       const struct cox_kv_layout *layout);
/* Ends all pulls, and lets go of the cache. Returns as cox_pulls_close. */
int cox_transfer_close(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err);
/* Ends all pulls, those too that are still to come of the request that is being called. Returns as
 * cox_pulls_close. */
int cox_transfer_clear(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err);

void cox_transfer_link(struct cox_transfer *transfer, const Coxswain__PDLinkRequest *request);
/* Returns 0; COX_TOO_LARGE: no memory. */
int cox_transfer_status(struct cox_transfer *transfer, struct cox_arena *arena,
                        Coxswain__PDLinkStatusResponse *response, struct cox_error *err);
/* Returns 0, whatever became of the pulls; COX_TOO_LARGE: no memory. */
int cox_transfer_pull(struct cox_transfer *transfer, const Coxswain__PullKVRequest *request,
                      struct cox_arena *arena, Coxswain__PullKVResponse *response,
                      struct cox_error *err);

#endif
