#include "adapters.h"

#include "channel/fault.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct cox_adapter *adapter;
    char name[]; /* with its 0 */
};

struct cox_adapters {
    uint32_t slot_count;
    /* Written under the lock, release; read by find, acquire: whoever sees an entry sees what is in it. */
    struct entry *_Atomic slots[COX_ADAPTER_SLOT_COUNT_MAX];

    pthread_mutex_t lock; /* everything below, and writing to slots */
    uint64_t model_count; /* how often there was another model */
    bool has_model;
    struct cox_model_config config;
    struct cox_share share;
};

int cox_adapters_new(uint32_t slot_count, struct cox_adapters **ret_adapters)
{
    struct cox_adapters *adapters = calloc(1, sizeof *adapters);
    COX_ASSERT(slot_count <= COX_ADAPTER_SLOT_COUNT_MAX);
    if (!adapters)
        return -ENOMEM;
    adapters->slot_count = slot_count ? slot_count : COX_ADAPTER_SLOT_COUNT_DEFAULT;
    pthread_mutex_init(&adapters->lock, NULL);
    *ret_adapters = adapters;
    return 0;
}

static struct entry *entry_free(struct entry *entry)
{
    if (entry) {
        cox_adapter_free(entry->adapter);
        free(entry);
    }
    return NULL;
}

struct cox_adapters *cox_adapters_free(struct cox_adapters *adapters)
{
    if (adapters) {
        cox_adapters_set_model(adapters, NULL, NULL);
        pthread_mutex_destroy(&adapters->lock);
        free(adapters);
    }
    return NULL;
}

static struct entry *slot_get(const struct cox_adapters *adapters, uint32_t slot)
{
    return atomic_load_explicit(&adapters->slots[slot], memory_order_acquire);
}

static void slot_set(struct cox_adapters *adapters, uint32_t slot, struct entry *entry)
{
    atomic_store_explicit(&adapters->slots[slot], entry, memory_order_release);
}

/* slot_count: none. */
static uint32_t slot_find(const struct cox_adapters *adapters, const char *name)
{
    uint32_t slot = 0;
    for (; slot < adapters->slot_count; slot++) {
        const struct entry *entry = slot_get(adapters, slot);
        if (entry && strcmp(entry->name, name) == 0)
            break;
    }
    return slot;
}

void cox_adapters_set_model(struct cox_adapters *adapters, const struct cox_model_config *config,
                            const struct cox_share *share)
{
    pthread_mutex_lock(&adapters->lock);
    for (uint32_t slot = 0; slot < adapters->slot_count; slot++) {
        struct entry *entry = slot_get(adapters, slot);
        slot_set(adapters, slot, NULL);
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

const struct cox_adapter *cox_adapters_find(void *context, const char *name)
{
    const struct cox_adapters *adapters = context;
    uint32_t slot = slot_find(adapters, name);
    return slot < adapters->slot_count ? slot_get(adapters, slot)->adapter : NULL;
}

/* With the lock held: the slot for another one. */
static int slot_choose(const struct cox_adapters *adapters, const char *name, uint32_t *ret_slot,
                       struct cox_error *err)
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

static int entry_publish(struct cox_adapters *adapters, struct entry *entry, uint64_t model_count,
                         struct cox_error *err)
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

int cox_adapters_load(struct cox_adapters *adapters, const char *name, const char *directory,
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
    struct entry *entry = calloc(1, sizeof *entry + size);
    if (!entry)
        return cox_fail(err, -ENOMEM, "no memory for an adapter");
    memcpy(entry->name, name, size);
    r = cox_adapter_load(directory, &config, &share, &entry->adapter, err);
    if (r == 0) {
        cox_fault_point(COX_FAULT_LORA_READ);
        r = entry_publish(adapters, entry, model_count, err);
    }
    if (r)
        entry_free(entry);
    else
        cox_fault_point(COX_FAULT_LORA_LOADED);
    return r;
}

bool cox_adapters_has(struct cox_adapters *adapters, const char *name)
{
    pthread_mutex_lock(&adapters->lock);
    const bool has = slot_find(adapters, name) < adapters->slot_count;
    pthread_mutex_unlock(&adapters->lock);
    return has;
}

int cox_adapters_remove(struct cox_adapters *adapters, const char *name, struct cox_error *err)
{
    struct entry *entry = NULL;
    pthread_mutex_lock(&adapters->lock);
    const uint32_t slot = slot_find(adapters, name);
    if (slot < adapters->slot_count) {
        entry = slot_get(adapters, slot);
        slot_set(adapters, slot, NULL);
    }
    pthread_mutex_unlock(&adapters->lock);
    if (!entry)
        return cox_fail(err, COX_NOT_FOUND, "no adapter of that name is loaded");
    entry_free(entry);
    cox_fault_point(COX_FAULT_LORA_REMOVED);
    return 0;
}
