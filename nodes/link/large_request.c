#include "large_request.h"

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Copied between two looks at who waits: what a connection hands over in one call. */
#define STEP_SIZE ((size_t)1 << 20)

struct cox_large_request {
    _Atomic uint32_t references;
    uint8_t *bytes;
    size_t size;
    pthread_mutex_t lock;
    pthread_cond_t grown;
    /* under the lock */
    size_t filled;
};

struct cox_large_request *cox_large_request_new(size_t size)
{
    struct cox_large_request *request = calloc(1, sizeof *request);
    if (!request)
        return NULL;
    request->bytes = cox_allocate_large(NULL, size);
    if (!request->bytes) {
        free(request);
        return NULL;
    }
    request->size = size;
    /* relaxed: nobody else knows it. */
    atomic_init(&request->references, 1);
    pthread_mutex_init(&request->lock, NULL);
    pthread_cond_init(&request->grown, NULL);
    return request;
}

struct cox_large_request *cox_large_request_ref(struct cox_large_request *request)
{
    /* relaxed: the caller has a reference, with which it got the bytes. */
    atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
    return request;
}

struct cox_large_request *cox_large_request_unref(struct cox_large_request *request)
{
    /* acq_rel: whoever frees it does so after all others have read. */
    if (!request || atomic_fetch_sub_explicit(&request->references, 1, memory_order_acq_rel) > 1)
        return NULL;
    pthread_cond_destroy(&request->grown);
    pthread_mutex_destroy(&request->lock);
    free(request->bytes);
    free(request);
    return NULL;
}

void cox_large_request_fill(struct cox_large_request *request, const void *bytes)
{
    for (size_t done = 0; done < request->size;) {
        const size_t rest = request->size - done, step = rest < STEP_SIZE ? rest : STEP_SIZE;
        memcpy(request->bytes + done, (const uint8_t *)bytes + done, step);
        done += step;
        pthread_mutex_lock(&request->lock);
        request->filled = done;
        pthread_cond_broadcast(&request->grown);
        pthread_mutex_unlock(&request->lock);
    }
}

uint32_t cox_large_request_references(const struct cox_large_request *request)
{
    /* relaxed: for tests. */
    return atomic_load_explicit(&request->references, memory_order_relaxed);
}

const uint8_t *cox_large_request_bytes(const struct cox_large_request *request)
{
    return request->bytes;
}

size_t cox_large_request_size(const struct cox_large_request *request)
{
    return request->size;
}

size_t cox_large_request_await(void *context, size_t done)
{
    struct cox_large_request *request = context;
    pthread_mutex_lock(&request->lock);
    while (request->filled <= done)
        pthread_cond_wait(&request->grown, &request->lock);
    const size_t filled = request->filled;
    pthread_mutex_unlock(&request->lock);
    return filled;
}
