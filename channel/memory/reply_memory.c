#include "reply_memory.h"

#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "large_payload.h"

#define HUGE_PAGE_SIZE ((size_t)2 << 20)
/* Of each block, so that its size is known from what malloc says is usable: glibc aligns inside a
 * mapping, and leaves up to a huge page behind the block, which must not look like a part of it. */
#define SPARE_SIZE ((size_t)64)

static struct {
    pthread_mutex_t lock;
    uint32_t user_count;
    /* the last freed one last: its pages are most likely in a cache */
    uint32_t kept_count;
    uint8_t *kept[COX_REPLY_MEMORY_COUNT];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In units of huge pages; what malloc gives beyond it is not used. */
static size_t block_size(uint8_t *bytes)
{
    return (malloc_usable_size(bytes) - SPARE_SIZE) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
}

static uint8_t *pool_remove(uint32_t index)
{
    uint8_t *bytes = pool.kept[index];
    pool.kept_count--;
    memmove(&pool.kept[index], &pool.kept[index + 1],
            (pool.kept_count - index) * sizeof pool.kept[0]);
    return bytes;
}

void cox_reply_memory_begin(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.user_count++;
    pthread_mutex_unlock(&pool.lock);
}

void cox_reply_memory_end(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.user_count--;
    while (pool.user_count == 0 && pool.kept_count > 0)
        free(pool_remove(0));
    pthread_mutex_unlock(&pool.lock);
}

/* A kept block of this size; NULL: there is none. In the child of a fork the lock may be held by a
 * thread that does not exist there: then there is no pool. */
static uint8_t *pool_take(size_t size)
{
    uint8_t *bytes = NULL;
    if (pthread_mutex_trylock(&pool.lock))
        return NULL;
    for (uint32_t i = pool.kept_count; !bytes && i > 0; i--)
        if (block_size(pool.kept[i - 1]) == size)
            bytes = pool_remove(i - 1);
    pthread_mutex_unlock(&pool.lock);
    return bytes;
}

uint8_t *cox_reply_memory_alloc(size_t size)
{
    if (size < HUGE_PAGE_SIZE)
        return malloc(size ? size : 1);
    const size_t rounded = (size + HUGE_PAGE_SIZE - 1) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    uint8_t *bytes = pool_take(rounded);
    if (bytes)
        return bytes;
    void *memory = NULL;
    if (posix_memalign(&memory, HUGE_PAGE_SIZE, rounded + SPARE_SIZE))
        return NULL;
    (void)madvise(memory, rounded, MADV_HUGEPAGE);
    return memory;
}

void cox_reply_memory_free(uint8_t *bytes)
{
    const size_t size =
        bytes && malloc_usable_size(bytes) >= HUGE_PAGE_SIZE ? block_size(bytes) : 0;
    if (size >= HUGE_PAGE_SIZE && size <= COX_LARGE_PAYLOAD_KEEP_SIZE &&
        pthread_mutex_trylock(&pool.lock) == 0) {
        uint8_t *kept = bytes;
        if (pool.user_count > 0) {
            bytes = pool.kept_count == COX_REPLY_MEMORY_COUNT ? pool_remove(0) : NULL;
            pool.kept[pool.kept_count++] = kept;
        }
        pthread_mutex_unlock(&pool.lock);
    }
    free(bytes);
}
