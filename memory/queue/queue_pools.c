/* The queue's pools that this process has, and the pool cache of an endpoint. */
#include "queue_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Interval before a pool that could not be opened is tried again. */
#define RETRY_MS 1000

/* ---- pools of the process ---- */

static struct cox_queue_pool *pools_find(struct cox_queue *queue, const struct cox_pool *pool)
{
    for (uint32_t i = 0; i < queue->pool_count; i++)
        if (queue->pools[i].pool == pool)
            return &queue->pools[i];
    return NULL;
}

/* Adds a use of a pool that was opened from a handle. NULL: none. */
static struct cox_pool *pools_use_opened(struct cox_queue *queue, uint64_t id)
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
static int pools_use(struct cox_queue *queue, struct cox_pool *pool, bool owned,
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

static void pools_unuse(struct cox_queue *queue, struct cox_pool *pool)
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

/* ---- pool cache of an endpoint ---- */

int cox_queue_pool_cache_init(struct cox_queue_pool_cache *cache, struct cox_queue *queue,
                              const struct cox_domains *domains, const char *socket_path,
                              struct cox_error *err)
{
    *cache = (struct cox_queue_pool_cache){.queue = queue, .domains = domains};
    cache->failed = calloc(queue->geometry.pool_count_max, sizeof *cache->failed);
    cache->socket_path = socket_path ? strdup(socket_path) : NULL;
    if (cache->failed && (cache->socket_path || !socket_path))
        return 0;
    cox_queue_pool_cache_deinit(cache);
    return cox_fail(err, -ENOMEM, "endpoint: %s", cox_status_text(-ENOMEM));
}

void cox_queue_pool_cache_deinit(struct cox_queue_pool_cache *cache)
{
    for (uint32_t i = 0; i < cache->count; i++)
        pools_unuse(cache->queue, cache->pools[i]);
    cache->count = 0;
    cache->capacity = 0;
    free(cache->pools);
    free(cache->failed);
    free(cache->socket_path);
    cache->pools = NULL;
    cache->failed = NULL;
    cache->socket_path = NULL;
}

static int cache_keep(struct cox_queue_pool_cache *cache, struct cox_pool *pool)
{
    int r = cox_reserve((void **)&cache->pools, &cache->capacity, (size_t)cache->count + 1,
                        sizeof *cache->pools);
    if (r == 0)
        cache->pools[cache->count++] = pool;
    return r;
}

int cox_queue_pool_cache_add(struct cox_queue_pool_cache *cache, struct cox_pool *pool,
                             struct cox_error *err)
{
    int r = pools_use(cache->queue, pool, false, err);
    if (r)
        return r;
    r = cache_keep(cache, pool);
    if (r == 0)
        return 0;
    pools_unuse(cache->queue, pool);
    return cox_fail(err, r, "endpoint: %s", cox_status_text(r));
}

struct cox_pool *cox_queue_pool_cache_find(const struct cox_queue_pool_cache *cache, uint64_t id)
{
    for (uint32_t i = 0; i < cache->count; i++)
        if (cox_pool_id(cache->pools[i]) == id)
            return cache->pools[i];
    return NULL;
}

int cox_queue_pool_cache_failed(const struct cox_queue_pool_cache *cache, uint32_t index,
                                const struct cox_queue_entry *entry)
{
    const struct cox_queue_failed *failed = &cache->failed[index];
    return failed->stamp == entry->stamp && cox_now_ns() < failed->until_ns ? failed->code : 0;
}

/* Checks the pool against the entry, which is input. */
static int cache_check(struct cox_queue_pool_cache *cache, const struct cox_pool *pool,
                       const struct cox_queue_entry *entry, struct cox_error *err)
{
    const struct cox_domain_id domain = cox_pool_domain(pool);
    const uint64_t word = COX_QUEUE_LOAD(cache->queue->layout->queue_domains[entry->domain]);
    if (cox_pool_id(pool) == entry->id && word == ((uint64_t)domain.kind << 32 | domain.device))
        return 0;
    return cox_fail(err, COX_CORRUPT,
                    "queue %016" PRIx64 ": the handle of pool %016" PRIx64 " opens pool %016" PRIx64
                    ", or one of another domain",
                    cache->queue->id, entry->id, cox_pool_id(pool));
}

/* Attaches to the pool of an entry; *ret_pool has a use. */
static int cache_attach(struct cox_queue_pool_cache *cache, const struct cox_queue_entry *entry,
                        struct cox_pool **ret_pool, struct cox_error *err)
{
    struct cox_pool *pool = pools_use_opened(cache->queue, entry->id);
    if (pool) { /* opened by another endpoint of this process */
        *ret_pool = pool;
        return 0;
    }
    if (!(entry->flags & COX_QUEUE_POOL_HANDLE))
        return cox_fail(err, COX_PEER_DEAD,
                        "pool %016" PRIx64
                        ": this process does not have it, and its entry has no handle (any more)",
                        entry->id);
    const struct cox_pool_attach_options options = {
        .size = sizeof(struct cox_pool_attach_options),
        .domains = cache->domains,
        .read_only = (entry->flags & COX_QUEUE_POOL_READ_ONLY) != 0,
    };
    int r = cox_pool_open(&entry->handle, cache->socket_path,
                          cox_deadline_after_ms(COX_QUEUE_SOCKET_MS), &options, &pool, err);
    if (r)
        return r;
    r = cache_check(cache, pool, entry, err);
    if (r == 0)
        r = pools_use(cache->queue, pool, true, err);
    if (r) {
        cox_pool_free(pool);
        return r;
    }
    *ret_pool = pool;
    return 0;
}

static bool pools_opened(struct cox_queue *queue, const struct cox_pool *pool)
{
    pthread_mutex_lock(&queue->mutex);
    const struct cox_queue_pool *found = pools_find(queue, pool);
    const bool opened = found && found->owned;
    pthread_mutex_unlock(&queue->mutex);
    return opened;
}

/* Under the queue's lock. */
static bool entries_have(struct cox_queue *queue, uint64_t id)
{
    for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++)
        if (COX_QUEUE_LOAD(queue->layout->pools[i].pool_id) == id)
            return true;
    return false;
}

/* Frees, before another pool is opened, opened pools that no message can refer to any more and that
 * this process has no reference in. Otherwise pools of short-lived publishers would pile up. */
static void cache_trim(struct cox_queue_pool_cache *cache)
{
    uint32_t kept = 0;
    if (cox_queue_enter(cache->queue, NULL))
        return;
    for (uint32_t i = 0; i < cache->count; i++) {
        struct cox_pool *pool = cache->pools[i];
        if (entries_have(cache->queue, cox_pool_id(pool)) || !pools_opened(cache->queue, pool) ||
            !cox_pool_is_idle(pool)) {
            cache->pools[i] = cache->pools[kept];
            cache->pools[kept++] = pool;
        }
    }
    cox_queue_leave(cache->queue);
    /* Not under the lock: the pool may wait for a stopped process. */
    while (cache->count > kept)
        pools_unuse(cache->queue, cache->pools[--cache->count]);
}

int cox_queue_pool_cache_open(struct cox_queue_pool_cache *cache, uint32_t index,
                              const struct cox_queue_entry *entry, struct cox_error *err)
{
    cache_trim(cache);
    struct cox_pool *pool = NULL;
    int r = cache_attach(cache, entry, &pool, err);
    if (r == 0) {
        r = cache_keep(cache, pool);
        if (r)
            pools_unuse(cache->queue, pool);
    }
    /* Not retried with every message. What the importer or the pool lacks may come later; an
     * exporter that is dead stays dead. */
    if (r)
        cache->failed[index] = (struct cox_queue_failed){
            entry->stamp, r,
            r == COX_PEER_DEAD ? COX_DEADLINE_NEVER : cox_deadline_after_ms(RETRY_MS)};
    return r ? cox_fail(err, r, "pool %016" PRIx64 ": %s", entry->id, cox_status_text(r)) : 0;
}

void cox_queue_pool_cache_open_all(struct cox_queue_pool_cache *cache)
{
    struct cox_queue *queue = cache->queue;
    for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++) {
        struct cox_queue_entry entry;
        if (cox_queue_enter(queue, NULL))
            return;
        bool there = cox_queue_entry_read(queue, i, &entry);
        cox_queue_leave(queue);
        if (there && !cox_queue_pool_cache_find(cache, entry.id) &&
            !cox_queue_pool_cache_failed(cache, i, &entry))
            cox_queue_pool_cache_open(cache, i, &entry, NULL);
    }
}
