#include "adapter_references.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/thread.h"

/* How soon a wait notices that it was given up. */
#define SLICE_MS 50

struct cox_adapter_references {
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; a count has become 0 */
    pthread_cond_t given;
    struct cox_lora_use *first;
};

int cox_adapter_references_new(struct cox_adapter_references **ret_uses)
{
    struct cox_adapter_references *uses = calloc(1, sizeof *uses);
    if (!uses)
        return -ENOMEM;
    pthread_mutex_init(&uses->lock, NULL);
    cox_condition_init(&uses->given);
    *ret_uses = uses;
    return 0;
}

struct cox_adapter_references *cox_adapter_references_free(struct cox_adapter_references *uses)
{
    if (uses) {
        while (uses->first) {
            struct cox_lora_use *use = uses->first;
            uses->first = use->next;
            free(use);
        }
        pthread_cond_destroy(&uses->given);
        pthread_mutex_destroy(&uses->lock);
        free(uses);
    }
    return NULL;
}

/* ---- with the lock held ---- */

static struct cox_lora_use *find(const struct cox_adapter_references *uses, const char *name)
{
    struct cox_lora_use *use = uses->first;
    while (use && strcmp(use->name, name) != 0)
        use = use->next;
    return use;
}

/* NULL: no memory. */
static struct cox_lora_use *find_or_add(struct cox_adapter_references *uses, const char *name)
{
    struct cox_lora_use *use = find(uses, name);
    if (use)
        return use;
    const size_t size = strlen(name) + 1;
    use = calloc(1, sizeof *use + size);
    if (!use)
        return NULL;
    memcpy(use->name, name, size);
    use->next = uses->first;
    uses->first = use;
    return use;
}

/* A name that nobody has and that is open says nothing. */
static void drop_if_idle(struct cox_adapter_references *uses, struct cox_lora_use *use)
{
    struct cox_lora_use **link = &uses->first;
    if (use->count || use->closed)
        return;
    while (*link != use)
        link = &(*link)->next;
    *link = use->next;
    free(use);
}

/* ---- sequences ---- */

int cox_adapter_references_take(struct cox_adapter_references *uses, const char *name,
                                struct cox_lora_use **ret_use)
{
    if (strlen(name) > COX_LORA_NAME_LENGTH_MAX)
        return COX_TOO_LARGE;
    pthread_mutex_lock(&uses->lock);
    struct cox_lora_use *use = find_or_add(uses, name);
    int r = !use ? -ENOMEM : use->closed ? COX_BUSY : 0;
    if (r == 0) {
        use->count++;
        *ret_use = use;
    }
    pthread_mutex_unlock(&uses->lock);
    return r;
}

struct cox_lora_use *cox_adapter_references_again(struct cox_adapter_references *uses,
                                                  struct cox_lora_use *use)
{
    if (use) {
        pthread_mutex_lock(&uses->lock);
        use->count++;
        pthread_mutex_unlock(&uses->lock);
    }
    return use;
}

void cox_adapter_references_give(struct cox_adapter_references *uses, struct cox_lora_use *use)
{
    if (!use)
        return;
    pthread_mutex_lock(&uses->lock);
    COX_ASSERT(use->count > 0);
    if (--use->count == 0)
        pthread_cond_broadcast(&uses->given);
    drop_if_idle(uses, use);
    pthread_mutex_unlock(&uses->lock);
}

/* ---- who wants it to be unused ---- */

int cox_adapter_references_close(struct cox_adapter_references *uses, const char *name,
                                 uint64_t deadline_ns, bool (*given_up)(void *context),
                                 void *context, uint32_t *ret_count)
{
    int r = 0;
    pthread_mutex_lock(&uses->lock);
    struct cox_lora_use *use = find_or_add(uses, name);
    if (!use) {
        pthread_mutex_unlock(&uses->lock);
        return -ENOMEM;
    }
    use->closed = true;
    while (use->count && r == 0) {
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_min(deadline_ns, cox_deadline_after_ms(SLICE_MS)));
        pthread_cond_timedwait(&uses->given, &uses->lock, &until);
        if (use->count && (cox_now_ns() >= deadline_ns || (given_up && given_up(context))))
            r = COX_BUSY;
    }
    if (r) {
        *ret_count = use->count;
        use->closed = false;
    }
    pthread_mutex_unlock(&uses->lock);
    return r;
}

void cox_adapter_references_open(struct cox_adapter_references *uses, const char *name)
{
    pthread_mutex_lock(&uses->lock);
    struct cox_lora_use *use = find(uses, name);
    if (use) {
        use->closed = false;
        drop_if_idle(uses, use);
    }
    pthread_mutex_unlock(&uses->lock);
}

uint32_t cox_adapter_references_count(struct cox_adapter_references *uses, const char *name)
{
    pthread_mutex_lock(&uses->lock);
    const struct cox_lora_use *use = find(uses, name);
    const uint32_t count = use ? use->count : 0;
    pthread_mutex_unlock(&uses->lock);
    return count;
}
