/*
 * pool_local_refs: the references of this process by block and epoch, in private memory. unref
 * checks them: the shared row has only a count per block, not the epoch.
 *
 * One word per block, {epoch:48, count:16}, and a list for what does not fit: references to an
 * older epoch of a block whose epoch was bumped. In the child of a fork all words read as
 * zeros (MADV_WIPEONFORK).
 */
#include "pool_internal.h"

#include <stdlib.h>
#include <sys/mman.h>

struct older {
    struct older *next;
    uint64_t epoch;
    uint32_t block;
    uint32_t count;
};

struct cox_pool_local_refs {
    /* guards olders */
    pthread_mutex_t lock;
    struct older *olders;
    /* avoids the lock while the list is empty */
    _Atomic uint32_t older_count;
    /* words[0]: 1, or 0 in the child of a fork; then one per block */
    _Atomic uint64_t *words;
};

static size_t local_refs_size(uint32_t block_count)
{
    return (block_count + (size_t)1) * sizeof(uint64_t);
}

int cox_pool_local_refs_new(uint32_t block_count, struct cox_pool_local_refs **ret_refs,
                            struct cox_error *err)
{
    struct cox_pool_local_refs *refs = calloc(1, sizeof *refs);
    if (!refs)
        return cox_fail(err, -ENOMEM, "no memory for the pool's local references");
    void *map = mmap(NULL, local_refs_size(block_count), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int r = map == MAP_FAILED ? -errno : 0;
    if (r) {
        free(refs);
        return cox_fail(err, r, "the pool's local references of %zu bytes: %s",
                        local_refs_size(block_count), cox_status_text(r));
    }
    /* Cannot fail on kernels with pidfds; on older ones a child must not use the pool. */
    madvise(map, local_refs_size(block_count), MADV_WIPEONFORK);
    refs->words = map;
    atomic_store_explicit(&refs->words[0], 1, memory_order_relaxed); /* not shared yet */
    pthread_mutex_init(&refs->lock, NULL);
    *ret_refs = refs;
    return 0;
}

struct cox_pool_local_refs *cox_pool_local_refs_free(struct cox_pool_local_refs *refs,
                                                     uint32_t block_count)
{
    if (!refs)
        return NULL;
    while (refs->olders) {
        struct older *older = refs->olders;
        refs->olders = older->next;
        free(older);
    }
    munmap(refs->words, local_refs_size(block_count));
    pthread_mutex_destroy(&refs->lock);
    free(refs);
    return NULL;
}

bool cox_pool_local_refs_is_here(const struct cox_pool_local_refs *refs)
{
    return atomic_load_explicit(&refs->words[0], memory_order_relaxed) == 1;
}

/* ---- older epochs ---- */

static struct older **older_find(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    struct older **link = &refs->olders;
    while (*link && ((*link)->block != block || (*link)->epoch != epoch))
        link = &(*link)->next;
    return link;
}

static int older_add(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    int r = 0;
    pthread_mutex_lock(&refs->lock);
    struct older *older = *older_find(refs, block, epoch);
    if (!older && (older = calloc(1, sizeof *older))) {
        *older = (struct older){refs->olders, epoch, block, 0};
        refs->olders = older;
        atomic_fetch_add(&refs->older_count, 1);
    }
    if (!older)
        r = -ENOMEM;
    else
        older->count++;
    pthread_mutex_unlock(&refs->lock);
    return r;
}

static bool older_drop(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    if (atomic_load(&refs->older_count) == 0)
        return false;
    pthread_mutex_lock(&refs->lock);
    struct older **link = older_find(refs, block, epoch), *older = *link;
    if (older && --older->count == 0) {
        *link = older->next;
        free(older);
        atomic_fetch_sub(&refs->older_count, 1);
    }
    pthread_mutex_unlock(&refs->lock);
    return older != NULL;
}

/* ---- references ---- */

/* relaxed: threads that pass a reference to each other synchronize themselves. */
int cox_pool_local_refs_add(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    _Atomic uint64_t *record = &refs->words[block + 1];
    uint64_t seen = atomic_load_explicit(record, memory_order_relaxed), next;
    do {
        const uint64_t count = seen & 0xffff;
        if (count && seen >> 16 != epoch)
            return older_add(refs, block, epoch);
        if (count == 0xffff)
            return COX_FULL;
        next = epoch << 16 | (count + 1);
    } while (!atomic_compare_exchange_weak_explicit(record, &seen, next, memory_order_relaxed,
                                                    memory_order_relaxed));
    return 0;
}

bool cox_pool_local_refs_drop(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    _Atomic uint64_t *record = &refs->words[block + 1];
    uint64_t seen = atomic_load_explicit(record, memory_order_relaxed);
    do
        if ((seen & 0xffff) == 0 || seen >> 16 != epoch)
            return older_drop(refs, block, epoch);
    while (!atomic_compare_exchange_weak_explicit(record, &seen, seen - 1, memory_order_relaxed,
                                                  memory_order_relaxed));
    return true;
}

bool cox_pool_local_refs_has(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch)
{
    const uint64_t seen = atomic_load_explicit(&refs->words[block + 1], memory_order_relaxed);
    if ((seen & 0xffff) && seen >> 16 == epoch)
        return true;
    if (atomic_load(&refs->older_count) == 0)
        return false;
    pthread_mutex_lock(&refs->lock);
    const bool found = *older_find(refs, block, epoch) != NULL;
    pthread_mutex_unlock(&refs->lock);
    return found;
}

bool cox_pool_local_refs_is_empty(const struct cox_pool_local_refs *refs, uint32_t block_count)
{
    bool empty = atomic_load(&refs->older_count) == 0;
    for (uint32_t block = 0; empty && block < block_count; block++)
        empty = (atomic_load_explicit(&refs->words[block + 1], memory_order_relaxed) & 0xffff) == 0;
    return empty;
}
