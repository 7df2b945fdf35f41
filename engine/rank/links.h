/*
 * links: the groups whose KV blocks this rank may read. Per cluster id there is a view
 * (coxswain/kv.h) of the blocks of the remote rank with the same number.
 *
 * A new link is WAITING; coxswain/requests.h has its states and their changes.
 *
 * set returns at once. A thread of this object attaches one link after the other, each within five
 * seconds. When the remote process dies, the thread unmaps its memory, unless a pull is reading it.
 * Setting a cluster again under another epoch, or with other blocks, replaces its link. Setting it
 * with the same values keeps the link; a failed link is attached again.
 *
 * At most COX_LINK_COUNT_MAX links are not failed; a further one fails at once (COX_FULL). As many
 * failed ones are remembered, and the oldest are forgotten first.
 *
 * Threads: any; new, free and use_layout from one at a time.
 * Ownership: a link is reference-counted: by the list, and by each take until its release. The last
 *   release unmaps the view, so memory being read stays mapped, whatever becomes of the link.
 * Blocks: free, while an attach is running; nothing else.
 * Bytes: the arguments of set are the coordinator's and trusted. What the remote blocks say of
 *   themselves is input, which the view checks.
 * If the process dies: nothing is left.
 */
#ifndef COX_ENGINE_LINKS_H
#define COX_ENGINE_LINKS_H

#include <coxswain/handle.h>
#include <coxswain/requests.h>
#include <coxswain/worker.h>

#define COX_LINK_COUNT_MAX 64
#define COX_CLUSTER_ID_SIZE_MAX 255

struct cox_kv_view;

struct cox_link {
    char cluster[COX_CLUSTER_ID_SIZE_MAX + 1];
    uint64_t epoch;
    struct cox_kv_pool kv;
    /* serves its handles; empty: none */
    char control_socket[4096];
    /* Set by the links, from here on. Read between take and release. */
    /* for SUCCESS */
    struct cox_kv_view *view;
    /* for SUCCESS */
    struct cox_peer owner;
    enum cox_link_state state;
    /* for FAILED */
    struct cox_error error;
    uint32_t references;
    /* Why nothing may be read any more, enum cox_status: COX_CLOSED: unlinked; COX_STALE: replaced;
     * 0: it may. release; partner: the pull, which checks it before each block. */
    _Atomic int over;
};

struct cox_links;

/* Returns 0 or -ENOMEM. */
int cox_links_new(const struct cox_log *log, struct cox_links **ret_links);
/* No link may be taken (asserted). NULL-safe, returns NULL. */
struct cox_links *cox_links_free(struct cox_links *links);

/* The layout of this rank's own blocks from now on; NULL: none, and every link fails. Existing
 * links fail if theirs differs. */
void cox_links_use_layout(struct cox_links *links, const struct cox_kv_layout *layout);

struct cox_link_target {
    const char *cluster;
    uint64_t epoch;
    /* NULL: the request was invalid: the link fails with error */
    const struct cox_kv_pool *kv;
    /* may be NULL */
    const char *control_socket;
    const struct cox_error *error;
};
/* Returns
 *   0: also when the link failed at once, which the list shows
 *   COX_INVALID: not a valid cluster id
 *   -ENOMEM
 */
int cox_links_set(struct cox_links *links, const struct cox_link_target *target,
                  struct cox_error *err);
/* Ends running pulls from it. Returns 0 or COX_NOT_FOUND. */
int cox_links_remove(struct cox_links *links, const char *cluster);

/* Takes a reference, until release. epoch 0: any epoch.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such link
 *   COX_STATE: not attached yet
 *   COX_STALE: of another epoch
 *   COX_PEER_DEAD: the remote process is dead
 *   the error it failed with, COX_NOT_FOUND mapped to COX_STALE
 */
int cox_links_take(struct cox_links *links, const char *cluster, uint64_t epoch,
                   struct cox_link **ret_link, struct cox_error *err);
void cox_links_release(struct cox_links *links, struct cox_link *link);

/* Calls fn for each link, in the order they were set, under the lock: fn must not call back. Links
 * whose process is dead are FAILED already. */
void cox_links_each(struct cox_links *links, void (*fn)(void *context, const struct cox_link *link),
                    void *context);

/* The table of allowed state changes. */
static inline bool cox_link_may_move(enum cox_link_state from, enum cox_link_state to)
{
    return to == COX_LINK_FAILED ? from != COX_LINK_FAILED
                                 : (uint32_t)to == (uint32_t)from + 1 && from < COX_LINK_SUCCESS;
}

#endif
