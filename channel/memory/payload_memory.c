#include "payload_memory.h"

#include "channel/base/idioms.h"
#include "channel/shm/region.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Of the memory, in /proc. */
#define LABEL "cox_large_payload"

struct cox_payload_memory {
    /* of those that are kept */
    struct cox_payload_memory *next;
    /* borrowed */
    struct cox_payload_memory_pool *pool;
    _Atomic uint32_t references;
    struct cox_region region;
    /* for writing until it is sealed; -1 then */
    int fd;
    /* -1 until then */
    int reader_fd;
};

static void list_free(struct cox_payload_memory *list)
{
    while (list) {
        struct cox_payload_memory *memory = list;
        list = memory->next;
        cox_region_detach(&memory->region);
        cox_close_fd(&memory->fd);
        cox_close_fd(&memory->reader_fd);
        free(memory);
    }
}

/* ---- pool ---- */

void cox_payload_memory_pool_init(struct cox_payload_memory_pool *pool)
{
    *pool = (struct cox_payload_memory_pool){0};
    pthread_mutex_init(&pool->lock, NULL);
}

void cox_payload_memory_pool_deinit(struct cox_payload_memory_pool *pool)
{
    list_free(pool->kept);
    pthread_mutex_destroy(&pool->lock);
}

void cox_payload_memory_pool_expire(struct cox_payload_memory_pool *pool, uint64_t now_ns)
{
    struct cox_payload_memory *kept = NULL;
    pthread_mutex_lock(&pool->lock);
    if (now_ns > pool->used_ns && now_ns - pool->used_ns >= COX_PAYLOAD_MEMORY_KEEP_NS)
        kept = cox_steal_ptr(&pool->kept);
    pthread_mutex_unlock(&pool->lock);
    list_free(kept); /* which takes time */
}

/* The smallest that is kept, large enough, and at most twice as large: a small payload that waits
 * for its ranks does not hold what a large one needs. NULL: there is none. */
static struct cox_payload_memory *pool_find(struct cox_payload_memory_pool *pool, uint64_t size)
{
    pthread_mutex_lock(&pool->lock);
    struct cox_payload_memory **best = NULL;
    for (struct cox_payload_memory **at = &pool->kept; *at; at = &(*at)->next) {
        const uint64_t kept = (*at)->region.size;
        if (kept >= size && kept / 2 <= size && (!best || kept < (*best)->region.size))
            best = at;
    }
    struct cox_payload_memory *found = best ? *best : NULL;
    if (found)
        *best = found->next;
    pool->used_ns = cox_now_ns();
    pthread_mutex_unlock(&pool->lock);
    return found;
}

static void pool_keep(struct cox_payload_memory_pool *pool, struct cox_payload_memory *memory)
{
    uint64_t size = 0;
    if (memory->region.size > COX_PAYLOAD_MEMORY_KEEP_SIZE) {
        list_free(memory); /* in place of all that is kept */
        return;
    }
    pthread_mutex_lock(&pool->lock);
    memory->next = pool->kept;
    pool->kept = memory;
    pool->used_ns = cox_now_ns();
    struct cox_payload_memory **at = &pool->kept;
    while (*at && (size += (*at)->region.size) <= COX_PAYLOAD_MEMORY_KEEP_SIZE)
        at = &(*at)->next;
    struct cox_payload_memory *oldest = cox_steal_ptr(at);
    pthread_mutex_unlock(&pool->lock);
    list_free(oldest);
}

/* ---- memory ---- */

static int memory_new(uint64_t size, struct cox_payload_memory **ret_memory, struct cox_error *err)
{
    struct cox_payload_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return cox_fail(err, COX_NO_SPACE, "no memory for a payload");
    struct cox_error why = {0};
    memory->fd = memory->reader_fd = -1;
    int r = cox_region_create_unnamed_sparse(LABEL, size, 0, &memory->fd, &why);
    /* Now, since a sealed fd cannot be mapped for writing. */
    if (r == 0)
        r = cox_region_map(&memory->region, memory->fd, size, COX_REGION_WRITE, LABEL, &why);
    if (r) {
        list_free(memory);
        return cox_fail(err, r == -ENOMEM ? COX_NO_SPACE : r, "%s", why.text);
    }
    *ret_memory = memory;
    return 0;
}

int cox_payload_memory_take(struct cox_payload_memory_pool *pool, uint64_t size,
                            struct cox_payload_memory **ret_memory, struct cox_error *err)
{
    struct cox_payload_memory *memory = pool_find(pool, size);
    int r = memory ? 0 : memory_new(size, &memory, err);
    if (r)
        return r;
    memory->pool = pool;
    memory->next = NULL;
    /* relaxed: nobody else knows it. */
    atomic_store_explicit(&memory->references, 1, memory_order_relaxed);
    *ret_memory = memory;
    return 0;
}

uint8_t *cox_payload_memory_bytes(struct cox_payload_memory *memory)
{
    return memory->reader_fd < 0 ? NULL : memory->region.base;
}

int cox_payload_memory_fill(struct cox_payload_memory *memory, uint64_t offset, const void *bytes,
                            uint64_t size, struct cox_error *err)
{
    return cox_region_fill(memory->fd, offset, bytes, size, LABEL, err);
}

int cox_payload_memory_finish(struct cox_payload_memory *memory, struct cox_error *err)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
    if (memory->reader_fd >= 0)
        return 0;
    if (fcntl(memory->fd, F_ADD_SEALS, (int)seals) < 0) {
        const int r = -errno;
        return cox_fail(err, r, "memory '%s': %s", LABEL, cox_status_text(r));
    }
    int r = cox_region_open_reader(memory->fd, LABEL, &memory->reader_fd, err);
    if (r == 0)
        cox_close_fd(&memory->fd);
    return r;
}

int cox_payload_memory_fd(const struct cox_payload_memory *memory)
{
    return memory->reader_fd;
}

struct cox_payload_memory *cox_payload_memory_ref(struct cox_payload_memory *memory)
{
    /* relaxed: the caller has a reference. */
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
    return memory;
}

struct cox_payload_memory *cox_payload_memory_unref(struct cox_payload_memory *memory)
{
    /* acq_rel: the next payload is written after all have read. */
    if (!memory || atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) > 1)
        return NULL;
    if (memory->reader_fd < 0)
        list_free(memory);
    else
        pool_keep(memory->pool, memory);
    return NULL;
}
