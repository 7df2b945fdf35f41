/*
 * links: the groups whose KV blocks this rank may read: by cluster id, a view
 * (channel/memory/pool/kv_blocks.h) of those of the rank there that has the same number.
 *
 *     set -> WAITING -(the thread takes it)-> RUNNING -> SUCCESS -(its process dies)-> FAILED
 *               |                                |
 *               '----(own blocks lie otherwise)--'-> FAILED
 *
 * A link is attached by a thread of the links' own, one after the other, each within five seconds:
 * set returns at once. When the process there dies, the thread lets go of its memory, unless
 * somebody reads it. A cluster that is set again under another life, or with other blocks, is a new
 * link in place of the old; under the same it stays as it is, unless it has failed, which is tried
 * again.
 *
 * At most COX_LINK_COUNT_MAX links are not failed; one more is failed from the start (COX_FULL). Of
 * failed ones as many are remembered again, the oldest are forgotten first.
 *
 * Threads: any; but new, free and use_layout from one at a time.
 * Ownership: a link is counted: by the list, and by each who has taken it until release. The last
 *   one lets go of the view: so what is being read stays mapped, whatever becomes of the link.
 * Blocks: set, remove, list and take nothing; free as long as an attach takes.
 * Bytes: what a set names is the coordinator's word; what the blocks there say of themselves is
 * input, which the view checks. If the process dies: nothing is left.
 */
#ifndef COX_WORKER_LINKS_H
#define COX_WORKER_LINKS_H

#include "channel/base/peer.h"
#include "worker/loop/worker.h"

#define COX_LINK_COUNT_MAX 64
#define COX_CLUSTER_ID_SIZE_MAX 255

struct cox_kv_view;

enum cox_link_state {
    COX_LINK_WAITING = 0,
    COX_LINK_RUNNING,
    COX_LINK_SUCCESS,
    COX_LINK_FAILED,
};

struct cox_link {
    char cluster[COX_CLUSTER_ID_SIZE_MAX + 1];
    uint64_t life;
    struct cox_kv_pool kv;
    /* where its handles can be had; empty: nowhere */
    char control_socket[4096];
    /* From here on, of the links until taken. */
    /* SUCCESS */
    struct cox_kv_view *view;
    /* SUCCESS */
    struct cox_peer owner;
    enum cox_link_state state;
    /* FAILED */
    struct cox_error error;
    uint32_t references;
    /* Why nothing is to be read any more, enum cox_status: COX_CLOSED: unlinked; COX_STALE: linked
     * anew. 0: it is. release; partner: who copies, which looks before each block. */
    _Atomic int over;
};

struct cox_links;

/* Returns 0 or -ENOMEM. */
int cox_links_new(const struct cox_log *log, struct cox_links **ret_links);
/* Nobody has taken one any more (asserted). NULL-safe, returns NULL. */
struct cox_links *cox_links_free(struct cox_links *links);

/* How this rank's own blocks lie from now on; NULL: there are none, and what is linked fails. Links
 * that exist fail where theirs is another one. */
void cox_links_use_layout(struct cox_links *links, const struct cox_kv_layout *layout);

struct cox_link_target {
    const char *cluster;
    uint64_t life;
    /* NULL: what was told makes no sense: failed, with code and text */
    const struct cox_kv_pool *kv;
    /* may be NULL */
    const char *control_socket;
    const struct cox_error *error;
};
/* Returns 0, also where the link has failed at once, which the list tells; COX_INVALID: no such
 * cluster id; -ENOMEM. */
int cox_links_set(struct cox_links *links, const struct cox_link_target *target,
                  struct cox_error *err);
/* What is being read of it ends. Returns 0; COX_NOT_FOUND. */
int cox_links_remove(struct cox_links *links, const char *cluster);

/* The link is the caller's until release. life 0: whatever it is. Returns 0; COX_NOT_FOUND: no such
 * link; COX_STATE: not attached yet; COX_STALE: of another life; COX_PEER_DEAD: the process there
 * is; what it has failed with, of which COX_NOT_FOUND is told as COX_STALE. */
int cox_links_take(struct cox_links *links, const char *cluster, uint64_t life,
                   struct cox_link **ret_link, struct cox_error *err);
void cox_links_release(struct cox_links *links, struct cox_link *link);

/* Calls for each link, in the order they were set, under the lock: fn must not call back. Those
 * whose process has died are FAILED by then. */
void cox_links_each(struct cox_links *links, void (*fn)(void *context, const struct cox_link *link),
                    void *context);
const char *cox_link_state_name(enum cox_link_state state);

#endif
