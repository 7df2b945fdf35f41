#include "reply_memory.h"

#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "large_payload.h"

#define HUGE_PAGE_SIZE ((size_t)2 << 20)
/* Of each buffer, so that its size is known from what malloc says is usable: glibc aligns inside a
 * mapping, and leaves up to a huge page behind the buffer, which must not look like a part of
 * it. */
#define SPARE_SIZE ((size_t)64)

struct kept {
    /* the last freed one last: its pages are most likely in a cache */
    uint32_t count;
    uint8_t *buffers[COX_REPLY_MEMORY_COUNT];
};

static struct {
    pthread_mutex_t lock;
    uint32_t user_count;
    /* apart, so that many small ones do not push out large ones, whose pages cost most */
    struct kept small, large;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Whole huge pages, or a power of two. */
static size_t buffer_size_for(size_t size)
{
    size_t rounded = COX_REPLY_MEMORY_SIZE_MIN;
    while (rounded < size && rounded < HUGE_PAGE_SIZE)
        rounded *= 2;
    return rounded >= size ? rounded
                           : (size + HUGE_PAGE_SIZE - 1) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
}

/* 0: malloc's own, too small or not aligned. What malloc gives beyond the size is not used. */
static size_t buffer_size(uint8_t *bytes)
{
    const size_t usable = bytes ? malloc_usable_size(bytes) : 0;
    size_t size = COX_REPLY_MEMORY_SIZE_MIN;
    if (usable < COX_REPLY_MEMORY_SIZE_MIN + SPARE_SIZE ||
        (uintptr_t)bytes % COX_REPLY_MEMORY_ALIGNMENT)
        return 0;
    if (usable >= HUGE_PAGE_SIZE + SPARE_SIZE)
        return (usable - SPARE_SIZE) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    while (2 * size <= usable - SPARE_SIZE)
        size *= 2;
    return size;
}

static struct kept *kept_of(size_t size)
{
    return size < HUGE_PAGE_SIZE ? &pool.small : &pool.large;
}

static uint8_t *kept_remove(struct kept *kept, uint32_t index)
{
    uint8_t *bytes = kept->buffers[index];
    kept->count--;
    memmove(&kept->buffers[index], &kept->buffers[index + 1],
            (kept->count - index) * sizeof kept->buffers[0]);
    return bytes;
}

static void kept_clear(struct kept *kept)
{
    while (kept->count > 0)
        free(kept_remove(kept, 0));
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
    if (--pool.user_count == 0) {
        kept_clear(&pool.small);
        kept_clear(&pool.large);
    }
    pthread_mutex_unlock(&pool.lock);
}

/* A kept buffer of this size; NULL: there is none. In the child of a fork the lock may be held by a
 * thread that does not exist there: then there is no pool. */
static uint8_t *pool_take(size_t size)
{
    uint8_t *bytes = NULL;
    if (pthread_mutex_trylock(&pool.lock))
        return NULL;
    struct kept *kept = kept_of(size);
    for (uint32_t i = kept->count; !bytes && i > 0; i--)
        if (buffer_size(kept->buffers[i - 1]) == size)
            bytes = kept_remove(kept, i - 1);
    pthread_mutex_unlock(&pool.lock);
    return bytes;
}

uint8_t *cox_reply_memory_alloc(size_t size)
{
    if (size < COX_REPLY_MEMORY_SIZE_MIN)
        return malloc(size ? size : 1);
    const size_t rounded = buffer_size_for(size);
    const bool is_huge = size >= HUGE_PAGE_SIZE; /* below, one would be more than is asked for */
    uint8_t *bytes = pool_take(rounded);
    if (bytes)
        return bytes;
    void *memory = NULL;
    if (posix_memalign(&memory, is_huge ? HUGE_PAGE_SIZE : COX_REPLY_MEMORY_ALIGNMENT,
                       rounded + SPARE_SIZE))
        return NULL;
    if (is_huge)
        (void)madvise(memory, rounded, MADV_HUGEPAGE);
    return memory;
}

void cox_reply_memory_free(uint8_t *bytes)
{
    const size_t size = buffer_size(bytes);
    if (size > 0 && size <= COX_LARGE_PAYLOAD_KEEP_SIZE && pthread_mutex_trylock(&pool.lock) == 0) {
        struct kept *kept = kept_of(size);
        if (pool.user_count > 0) {
            uint8_t *oldest = kept->count == COX_REPLY_MEMORY_COUNT ? kept_remove(kept, 0) : NULL;
            kept->buffers[kept->count++] = bytes;
            bytes = oldest;
        }
        pthread_mutex_unlock(&pool.lock);
    }
    free(bytes);
}
