#include "adapter_cache.h"

#include "channel/base/idioms.h"
#include "channel/base/fault.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct cached_adapter {
    /* link of the list of removed entries */
    struct cached_adapter *next;
    /* value of finds at the removal */
    uint64_t finds;
    struct cox_adapter *adapter;
    /* with its terminating 0 */
    char name[];
};

struct cox_adapter_cache {
    uint32_t slot_count;
    /* Written under the lock. find reads without it, and compares the names of all entries: loading
     * an entry must show its contents. seq_cst, paired with `finds`: a find that does not see a
     * removal is seen by the remover. */
    struct cached_adapter *_Atomic slots[COX_ADAPTER_SLOT_COUNT_MAX];
    /* Odd while a find is running; changes with every find. Only find writes it, and a pause may
     * leave it odd. */
    _Atomic uint64_t finds;

    /* protects everything below, and writing to slots */
    pthread_mutex_t lock;
    /* counts changes of the model */
    uint64_t model_count;
    bool has_model;
    struct cox_model_config config;
    struct cox_share share;
    /* removed, but a find may still read their names */
    struct cached_adapter *gone;
};

int cox_adapter_cache_new(uint32_t slot_count, struct cox_adapter_cache **ret_adapters)
{
    struct cox_adapter_cache *adapters = calloc(1, sizeof *adapters);
    COX_ASSERT(slot_count <= COX_ADAPTER_SLOT_COUNT_MAX);
    if (!adapters)
        return -ENOMEM;
    adapters->slot_count = slot_count ? slot_count : COX_ADAPTER_SLOT_COUNT_DEFAULT;
    pthread_mutex_init(&adapters->lock, NULL);
    *ret_adapters = adapters;
    return 0;
}

static struct cached_adapter *entry_free(struct cached_adapter *entry)
{
    if (entry) {
        cox_adapter_free(entry->adapter);
        free(entry);
    }
    return NULL;
}

struct cox_adapter_cache *cox_adapter_cache_free(struct cox_adapter_cache *adapters)
{
    if (adapters) {
        cox_adapter_cache_set_model(adapters, NULL, NULL);
        pthread_mutex_destroy(&adapters->lock);
        free(adapters);
    }
    return NULL;
}

static struct cached_adapter *slot_get(const struct cox_adapter_cache *adapters, uint32_t slot)
{
    return atomic_load_explicit(&adapters->slots[slot], memory_order_seq_cst);
}

static void slot_set(struct cox_adapter_cache *adapters, uint32_t slot,
                     struct cached_adapter *entry)
{
    atomic_store_explicit(&adapters->slots[slot], entry, memory_order_seq_cst);
}

/* With the lock held: frees the removed entries that no find can read any more. */
static void gone_free(struct cox_adapter_cache *adapters)
{
    const uint64_t finds = atomic_load_explicit(&adapters->finds, memory_order_seq_cst);
    for (struct cached_adapter **link = &adapters->gone; *link;) {
        struct cached_adapter *entry = *link;
        if (finds % 2 == 0 || entry->finds != finds) {
            *link = entry->next;
            entry_free(entry);
        } else {
            link = &entry->next;
        }
    }
}

/* With the lock held, after the entry left its slot. The adapter is freed at once, since no step
 * uses it. */
static void entry_bury(struct cox_adapter_cache *adapters, struct cached_adapter *entry)
{
    entry->adapter = cox_adapter_free(entry->adapter);
    entry->finds = atomic_load_explicit(&adapters->finds, memory_order_seq_cst);
    entry->next = adapters->gone;
    adapters->gone = entry;
    gone_free(adapters);
}

/* Returns slot_count if there is none. */
static uint32_t slot_find(const struct cox_adapter_cache *adapters, const char *name)
{
    uint32_t slot = 0;
    for (; slot < adapters->slot_count; slot++) {
        const struct cached_adapter *entry = slot_get(adapters, slot);
        if (entry && strcmp(entry->name, name) == 0)
            break;
    }
    return slot;
}

void cox_adapter_cache_set_model(struct cox_adapter_cache *adapters,
                                 const struct cox_model_config *config,
                                 const struct cox_share *share)
{
    pthread_mutex_lock(&adapters->lock);
    for (uint32_t slot = 0; slot < adapters->slot_count; slot++) {
        struct cached_adapter *entry = slot_get(adapters, slot);
        slot_set(adapters, slot, NULL);
        entry_free(entry);
    }
    /* Finds run on this thread, so none is running now. */
    while (adapters->gone) {
        struct cached_adapter *entry = adapters->gone;
        adapters->gone = entry->next;
        entry_free(entry);
    }
    adapters->model_count++;
    adapters->has_model = config != NULL;
    if (config) {
        adapters->config = *config;
        adapters->share = *share;
    }
    pthread_mutex_unlock(&adapters->lock);
}

const struct cox_adapter *cox_adapter_cache_find(void *context, const char *name)
{
    struct cox_adapter_cache *adapters = context;
    const uint64_t finds = atomic_load_explicit(&adapters->finds, memory_order_relaxed);
    const uint64_t inside = finds + 1 + finds % 2; /* an abandoned find may have left it odd */
    atomic_store_explicit(&adapters->finds, inside, memory_order_seq_cst);
    const uint32_t slot = slot_find(adapters, name);
    const struct cox_adapter *adapter =
        slot < adapters->slot_count ? slot_get(adapters, slot)->adapter : NULL;
    atomic_store_explicit(&adapters->finds, inside + 1, memory_order_seq_cst);
    return adapter;
}

/* With the lock held: chooses a slot for another adapter. */
static int slot_choose(const struct cox_adapter_cache *adapters, const char *name,
                       uint32_t *ret_slot, struct cox_error *err)
{
    if (slot_find(adapters, name) < adapters->slot_count)
        return cox_fail(err, COX_TAKEN, "an adapter of that name is loaded already");
    for (uint32_t slot = 0; slot < adapters->slot_count; slot++)
        if (!slot_get(adapters, slot)) {
            *ret_slot = slot;
            return 0;
        }
    return cox_fail(err, COX_FULL, "all %" PRIu32 " slots for adapters are taken (--lora-slots)",
                    adapters->slot_count);
}

static int entry_publish(struct cox_adapter_cache *adapters, struct cached_adapter *entry,
                         uint64_t model_count, struct cox_error *err)
{
    uint32_t slot = 0;
    pthread_mutex_lock(&adapters->lock);
    int r = adapters->model_count == model_count
                ? slot_choose(adapters, entry->name, &slot, err)
                : cox_fail(err, COX_STATE, "the model was replaced while the adapter was loaded");
    if (r == 0)
        slot_set(adapters, slot, entry);
    pthread_mutex_unlock(&adapters->lock);
    return r;
}

int cox_adapter_cache_load(struct cox_adapter_cache *adapters, const char *name,
                           const char *directory, uint64_t expected, uint64_t *ret_digest,
                           struct cox_error *err)
{
    uint32_t slot;
    pthread_mutex_lock(&adapters->lock);
    const struct cox_model_config config = adapters->config;
    const struct cox_share share = adapters->share;
    const uint64_t model_count = adapters->model_count;
    int r = adapters->has_model ? slot_choose(adapters, name, &slot, err)
                                : cox_fail(err, COX_STATE, "no model is loaded yet");
    pthread_mutex_unlock(&adapters->lock);
    if (r)
        return r;
    const size_t size = strlen(name) + 1;
    struct cached_adapter *entry = calloc(1, sizeof *entry + size);
    if (!entry)
        return cox_fail(err, -ENOMEM, "no memory for an adapter");
    memcpy(entry->name, name, size);
    r = cox_adapter_load(directory, &config, &share, &entry->adapter, err);
    const uint64_t digest = r ? 0 : entry->adapter->digest;
    if (r == 0 && expected && digest != expected)
        r = cox_fail(
            err, COX_INVALID,
            "the files in %s differ from those that other ranks have loaded under that name",
            directory);
    if (r == 0) {
        cox_fault_point(COX_FAULT_LORA_READ);
        r = entry_publish(adapters, entry, model_count, err);
    }
    if (r)
        entry_free(entry);
    else
        cox_fault_point(COX_FAULT_LORA_LOADED);
    if (r == 0)
        *ret_digest = digest;
    return r;
}

bool cox_adapter_cache_has(struct cox_adapter_cache *adapters, const char *name)
{
    pthread_mutex_lock(&adapters->lock);
    const bool has = slot_find(adapters, name) < adapters->slot_count;
    pthread_mutex_unlock(&adapters->lock);
    return has;
}

int cox_adapter_cache_remove(struct cox_adapter_cache *adapters, const char *name,
                             struct cox_error *err)
{
    pthread_mutex_lock(&adapters->lock);
    const uint32_t slot = slot_find(adapters, name);
    const bool has = slot < adapters->slot_count;
    if (has) {
        struct cached_adapter *entry = slot_get(adapters, slot);
        slot_set(adapters, slot, NULL);
        entry_bury(adapters, entry);
    }
    pthread_mutex_unlock(&adapters->lock);
    if (!has)
        return cox_fail(err, COX_NOT_FOUND, "no adapter of that name is loaded");
    cox_fault_point(COX_FAULT_LORA_REMOVED);
    return 0;
}
