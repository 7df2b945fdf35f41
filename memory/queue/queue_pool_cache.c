/* The pool cache of an endpoint: pools that it was given, and pools that it opened. */
#include "channel/base/idioms.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Interval before a pool that could not be opened is tried again. */
#define RETRY_MS 1000

int cox_queue_pool_cache_init(struct cox_queue_pool_cache *cache, struct cox_queue *queue,
                              const struct cox_domains *domains, const char *socket_path,
                              struct cox_error *err)
{
    *cache = (struct cox_queue_pool_cache){.queue = queue, .domains = domains};
    cache->failed = calloc(queue->geometry.pool_count_max, sizeof *cache->failed);
    cache->socket_path = socket_path ? strdup(socket_path) : NULL;
    if (cache->failed && (cache->socket_path || !socket_path))
        return 0;
    return cox_fail(err, -ENOMEM, "endpoint: %s", cox_status_text(-ENOMEM));
}

void cox_queue_pool_cache_deinit(struct cox_queue_pool_cache *cache)
{
    for (uint32_t i = 0; i < cache->count; i++)
        cox_queue_pools_unuse(cache->queue, cache->pools[i]);
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
    int r = cox_queue_pools_use(cache->queue, pool, false, err);
    if (r)
        return r;
    r = cache_keep(cache, pool);
    if (r == 0)
        return 0;
    cox_queue_pools_unuse(cache->queue, pool);
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
    struct cox_pool *pool = cox_queue_pools_use_opened(cache->queue, entry->id);
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
        r = cox_queue_pools_use(cache->queue, pool, true, err);
    if (r) {
        cox_pool_free(pool);
        return r;
    }
    *ret_pool = pool;
    return 0;
}

/* Frees, before another pool is opened, opened pools that no message can refer to any more and that
 * this process has no reference in. Otherwise pools of short-lived publishers would pile up. */
static void cache_trim(struct cox_queue_pool_cache *cache)
{
    uint32_t kept = 0, index;
    if (cox_queue_enter(cache->queue, NULL))
        return;
    for (uint32_t i = 0; i < cache->count; i++) {
        struct cox_pool *pool = cache->pools[i];
        if (cox_queue_entry_find(cache->queue, cox_pool_id(pool), &index) ||
            !cox_queue_pools_opened(cache->queue, pool) || !cox_pool_is_idle(pool)) {
            cache->pools[i] = cache->pools[kept];
            cache->pools[kept++] = pool;
        }
    }
    cox_queue_leave(cache->queue);
    /* Not under the lock: the pool may wait for a stopped process. */
    while (cache->count > kept)
        cox_queue_pools_unuse(cache->queue, cache->pools[--cache->count]);
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
            cox_queue_pools_unuse(cache->queue, pool);
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
