#include "adapter_references.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* How soon a wait notices that it was cancelled. */
#define SLICE_MS 50

struct cox_adapter_references {
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; a count has become 0 */
    pthread_cond_t given;
    struct cox_adapter_reference *first;
};

int cox_adapter_references_new(struct cox_adapter_references **ret_references)
{
    struct cox_adapter_references *references = calloc(1, sizeof *references);
    if (!references)
        return -ENOMEM;
    pthread_mutex_init(&references->lock, NULL);
    cox_condition_init(&references->given);
    *ret_references = references;
    return 0;
}

struct cox_adapter_references *cox_adapter_references_free(
    struct cox_adapter_references *references)
{
    if (references) {
        while (references->first) {
            struct cox_adapter_reference *reference = references->first;
            references->first = reference->next;
            free(reference);
        }
        pthread_cond_destroy(&references->given);
        pthread_mutex_destroy(&references->lock);
        free(references);
    }
    return NULL;
}

/* ---- with the lock held ---- */

static struct cox_adapter_reference *find(const struct cox_adapter_references *references,
                                          const char *name)
{
    struct cox_adapter_reference *reference = references->first;
    while (reference && strcmp(reference->name, name) != 0)
        reference = reference->next;
    return reference;
}

/* NULL: no memory. */
static struct cox_adapter_reference *find_or_add(struct cox_adapter_references *references,
                                                 const char *name)
{
    struct cox_adapter_reference *reference = find(references, name);
    if (reference)
        return reference;
    const size_t size = strlen(name) + 1;
    reference = calloc(1, sizeof *reference + size);
    if (!reference)
        return NULL;
    memcpy(reference->name, name, size);
    reference->next = references->first;
    references->first = reference;
    return reference;
}

/* A name that is open and has no reference needs no entry. */
static void drop_if_idle(struct cox_adapter_references *references,
                         struct cox_adapter_reference *reference)
{
    struct cox_adapter_reference **link = &references->first;
    if (reference->count || reference->closed)
        return;
    while (*link != reference)
        link = &(*link)->next;
    *link = reference->next;
    free(reference);
}

/* ---- sequences ---- */

int cox_adapter_references_take(struct cox_adapter_references *references, const char *name,
                                struct cox_adapter_reference **ret_reference)
{
    if (strlen(name) > COX_LORA_NAME_LENGTH_MAX)
        return COX_TOO_LARGE;
    pthread_mutex_lock(&references->lock);
    struct cox_adapter_reference *reference = find_or_add(references, name);
    int r = !reference ? -ENOMEM : reference->closed ? COX_BUSY : 0;
    if (r == 0) {
        reference->count++;
        *ret_reference = reference;
    }
    pthread_mutex_unlock(&references->lock);
    return r;
}

struct cox_adapter_reference *cox_adapter_references_again(
    struct cox_adapter_references *references, struct cox_adapter_reference *reference)
{
    if (reference) {
        pthread_mutex_lock(&references->lock);
        reference->count++;
        pthread_mutex_unlock(&references->lock);
    }
    return reference;
}

void cox_adapter_references_give(struct cox_adapter_references *references,
                                 struct cox_adapter_reference *reference)
{
    if (!reference)
        return;
    pthread_mutex_lock(&references->lock);
    COX_ASSERT(reference->count > 0);
    if (--reference->count == 0)
        pthread_cond_broadcast(&references->given);
    drop_if_idle(references, reference);
    pthread_mutex_unlock(&references->lock);
}

/* ---- unloading ---- */

int cox_adapter_references_close(struct cox_adapter_references *references, const char *name,
                                 uint64_t deadline_ns, bool (*cancelled)(void *context),
                                 void *context, uint32_t *ret_count)
{
    int r = 0;
    pthread_mutex_lock(&references->lock);
    struct cox_adapter_reference *reference = find_or_add(references, name);
    if (!reference) {
        pthread_mutex_unlock(&references->lock);
        return -ENOMEM;
    }
    reference->closed = true;
    while (reference->count && r == 0) {
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_min(deadline_ns, cox_deadline_after_ms(SLICE_MS)));
        pthread_cond_timedwait(&references->given, &references->lock, &until);
        if (reference->count && (cox_now_ns() >= deadline_ns || (cancelled && cancelled(context))))
            r = COX_BUSY;
    }
    if (r) {
        *ret_count = reference->count;
        reference->closed = false;
    }
    pthread_mutex_unlock(&references->lock);
    return r;
}

void cox_adapter_references_open(struct cox_adapter_references *references)
{
    pthread_mutex_lock(&references->lock);
    struct cox_adapter_reference *next;
    for (struct cox_adapter_reference *reference = references->first; reference; reference = next) {
        next = reference->next;
        reference->closed = false;
        drop_if_idle(references, reference);
    }
    pthread_mutex_unlock(&references->lock);
}

uint32_t cox_adapter_references_count(struct cox_adapter_references *references, const char *name)
{
    pthread_mutex_lock(&references->lock);
    const struct cox_adapter_reference *reference = find(references, name);
    const uint32_t count = reference ? reference->count : 0;
    pthread_mutex_unlock(&references->lock);
    return count;
}
