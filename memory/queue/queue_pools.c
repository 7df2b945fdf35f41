/* The queue's pools that this process has. */
#include "channel/base/idioms.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct cox_queue_pool *pools_find(struct cox_queue *queue, const struct cox_pool *pool)
{
    for (uint32_t i = 0; i < queue->pool_count; i++)
        if (queue->pools[i].pool == pool)
            return &queue->pools[i];
    return NULL;
}

/* Adds a use of a pool that was opened from a handle. NULL: none. */
struct cox_pool *cox_queue_pools_use_opened(struct cox_queue *queue, uint64_t id)
{
    struct cox_pool *pool = NULL;
    pthread_mutex_lock(&queue->mutex);
    for (uint32_t i = 0; !pool && i < queue->pool_count; i++)
        if (queue->pools[i].id == id && queue->pools[i].owned) {
            queue->pools[i].users++;
            pool = queue->pools[i].pool;
        }
    pthread_mutex_unlock(&queue->mutex);
    return pool;
}

/* Adds a use of a pool that this process has. */
static bool pools_use_known(struct cox_queue *queue, const struct cox_pool *pool)
{
    pthread_mutex_lock(&queue->mutex);
    struct cox_queue_pool *found = pools_find(queue, pool);
    if (found)
        found->users++;
    pthread_mutex_unlock(&queue->mutex);
    return found != NULL;
}

/* Adds a use. The first use joins the queue to the pool, so that its pins stay while this process
 * is alive. Not within the mutex, which the owner of the queue's lock takes: joining can wait for a
 * stopped process. */
int cox_queue_pools_use(struct cox_queue *queue, struct cox_pool *pool, bool owned,
                        struct cox_error *err)
{
    if (pools_use_known(queue, pool))
        return 0;
    int r = cox_pool_queue_join(pool, queue->id, err);
    bool known = false;
    pthread_mutex_lock(&queue->mutex);
    struct cox_queue_pool *found = r ? NULL : pools_find(queue, pool);
    if (found) {
        found->users++;
        known = true;
    } else if (r == 0) {
        r = cox_reserve((void **)&queue->pools, &queue->pool_capacity,
                        (size_t)queue->pool_count + 1, sizeof *queue->pools);
        if (r == 0) {
            queue->pools[queue->pool_count++] =
                (struct cox_queue_pool){pool, cox_pool_id(pool), 1, owned};
            queue->pool_turn++;
        } else {
            known = true; /* undoes the join */
        }
    }
    pthread_mutex_unlock(&queue->mutex);
    if (known)
        cox_pool_queue_leave(pool, queue->id);
    return r ? cox_fail(err, r, "pool %016" PRIx64 " for queue %016" PRIx64 ": %s",
                        cox_pool_id(pool), queue->id, cox_status_text(r))
             : 0;
}

void cox_queue_pools_unuse(struct cox_queue *queue, struct cox_pool *pool)
{
    bool over = false, owned = false;
    const bool here = queue->pid == getpid();
    /* In the child of a fork a parent's thread may have held the mutex, which then is never
     * unlocked. */
    if (here)
        pthread_mutex_lock(&queue->mutex);
    struct cox_queue_pool *found = pools_find(queue, pool);
    COX_ASSERT(found && found->users > 0);
    over = --found->users == 0;
    owned = found->owned;
    if (over) {
        *found = queue->pools[--queue->pool_count];
        queue->pool_turn++;
    }
    if (here)
        pthread_mutex_unlock(&queue->mutex);
    if (over && here)
        cox_pool_queue_leave(pool, queue->id);
    if (over && owned)
        cox_pool_free(pool);
}

bool cox_queue_pools_unpin(struct cox_queue *queue, const struct cox_block_ref *ref, uint64_t tag)
{
    bool found = false;
    pthread_mutex_lock(&queue->mutex);
    for (uint32_t i = 0; !found && i < queue->pool_count; i++)
        if (queue->pools[i].id == ref->pool) {
            cox_pool_unpin(queue->pools[i].pool, ref, queue->id, tag);
            found = true;
        }
    pthread_mutex_unlock(&queue->mutex);
    return found;
}

/* Within the mutex: the lender of a pool may free it once its endpoint is freed. sweep does not
 * block. */
void cox_queue_pools_sweep(struct cox_queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    for (uint32_t i = 0; i < queue->pool_count; i++)
        cox_pool_sweep(queue->pools[i].pool);
    pthread_mutex_unlock(&queue->mutex);
}

uint32_t cox_queue_pools_turn(struct cox_queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    uint32_t turn = queue->pool_turn;
    pthread_mutex_unlock(&queue->mutex);
    return turn;
}

bool cox_queue_pools_opened(struct cox_queue *queue, const struct cox_pool *pool)
{
    pthread_mutex_lock(&queue->mutex);
    const struct cox_queue_pool *found = pools_find(queue, pool);
    const bool opened = found && found->owned;
    pthread_mutex_unlock(&queue->mutex);
    return opened;
}
