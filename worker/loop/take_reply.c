/* take_reply: copies of lent requests, and the replies to them. */
#include "channel/memory/lazy_copy.h"
#include "channel/shm/parts.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/wire.h"
#include "serve_internal.h"

#include <coxswain/worker.h>

#include <inttypes.h>
#include <stdio.h>

static struct cox_channel_thread *reply_thread(struct cox_worker *worker)
{
    return &worker->threads[COX_CHANNEL_EXECUTE];
}

static const char *kind_text(enum cox_lent_kind kind)
{
    static const char *const texts[] = {
        [COX_LENT_OPAQUE] = "an opaque request: cox_worker_reply",
        [COX_LENT_STEP] = "a step: cox_worker_reply_step",
        [COX_LENT_INIT] = "an init: cox_worker_reply_init",
    };
    return texts[kind];
}

/* Claims a lent request of this kind. NULL: *ret_r has the reason. */
static struct cox_lent *reply_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                    enum cox_lent_kind kind, int *ret_r, struct cox_error *err)
{
    if (err)
        cox_error_clear(err);
    struct cox_lent *entry = cox_lending_claim(thread, sequence, err);
    *ret_r = COX_STATE;
    if (!entry || entry->kind == kind)
        return entry;
    *ret_r = cox_fail(err, COX_INVALID, "request %" PRIu64 " is %s replies to it, or _error",
                      sequence, kind_text(entry->kind));
    cox_lending_unclaim(thread, entry);
    return NULL;
}

/* ---- copies ---- */

int cox_worker_copy_request(struct cox_worker *worker, const struct cox_worker_request *request,
                            void **ret_bytes, struct cox_error *err)
{
    struct cox_channel_thread *thread = reply_thread(worker);
    int r;
    struct cox_lent *entry = reply_claim(thread, request->sequence, COX_LENT_OPAQUE, &r, err);
    if (!entry)
        return r;
    r = entry->out_of_line ? cox_channel_thread_copy_payload(thread, request->sequence,
                                                             request->size, ret_bytes, err)
                           : COX_EMPTY;
    cox_lending_unclaim(thread, entry);
    return r == COX_EMPTY
               ? cox_fail(err, r, "request %" PRIu64 " lies in its frame", request->sequence)
               : r;
}

int cox_worker_complete_copy(void *bytes)
{
    return cox_lazy_copy_complete(bytes);
}

void cox_worker_free_copy(void *bytes)
{
    cox_lazy_copy_free(bytes);
}

/* ---- opaque ---- */

/* The request's bytes are no longer lent, and the frame is returned with the reply. */
static void opaque_end(struct cox_channel_thread *thread, const struct cox_lent *entry)
{
    if (entry->out_of_line)
        cox_channel_thread_close_payload(thread, entry->sequence);
}

static int reply_large(struct cox_channel_thread *thread, const struct cox_lent *entry,
                       const struct iovec *parts, size_t size, size_t capacity,
                       struct cox_error *err)
{
    const uint64_t sequence = entry->sequence;
    if (!cox_channel_thread_has_payloads(thread))
        return cox_fail(err, COX_TOO_LARGE,
                        "the reply has %zu bytes, a slot holds %zu: use a larger response region",
                        size, capacity);
    int r = cox_channel_thread_write_payload(thread, sequence, parts, size, err);
    if (r)
        return r;
    opaque_end(thread, entry);
    cox_channel_thread_send_payload(thread, sequence, COX_TYPE_OPAQUE, size);
    return 0;
}

int cox_worker_reply_parts(struct cox_worker *worker, uint64_t sequence, const struct iovec *parts,
                           size_t part_count, struct cox_error *err)
{
    struct cox_channel_thread *thread = reply_thread(worker);
    size_t size = 0;
    int r;
    for (size_t i = 0; i < part_count; i++)
        size += parts[i].iov_len;
    struct cox_lent *entry = reply_claim(thread, sequence, COX_LENT_OPAQUE, &r, err);
    if (!entry)
        return r;
    size_t capacity;
    uint8_t *slot =
        cox_reply_slot(&thread->channel, worker->options.rank, sequence, false, &capacity);
    if (size > capacity) {
        r = reply_large(thread, entry, parts, size, capacity, err);
        if (r) {
            cox_lending_unclaim(thread, entry);
            return r;
        }
    } else {
        cox_parts_join(slot, parts, size);
        opaque_end(thread, entry);
        cox_channel_thread_send(thread, sequence, size, false);
    }
    return 0;
}

/* ---- steps and inits ---- */

/* The state of a step or init belongs to the replying thread: next refuses until the reply. */
static void typed_end(struct cox_channel_thread *thread)
{
    cox_channel_thread_close(thread);
    atomic_store_explicit(&thread->lending.typed, false, memory_order_release);
}

int cox_worker_reply_step(struct cox_worker *worker, uint64_t sequence, const int32_t *tokens,
                          const float *logprobs, uint32_t count, struct cox_error *err)
{
    struct cox_channel_thread *thread = reply_thread(worker);
    int r;
    struct cox_lent *entry = reply_claim(thread, sequence, COX_LENT_STEP, &r, err);
    if (!entry)
        return r;
    const struct cox_served_step *step = &thread->served.step;
    if (count != step->batch->row_count) {
        r = cox_fail(err, COX_INVALID, "%" PRIu32 " rows: step %" PRIu64 " has %" PRIu32, count,
                     sequence, step->batch->row_count);
        cox_lending_unclaim(thread, entry);
        return r;
    }
    for (uint32_t i = 0; tokens && i < count; i++)
        step->outputs[i] =
            (struct cox_batch_output){.token = tokens[i], .logprob = logprobs ? logprobs[i] : 0};
    cox_channel_thread_end_step(thread, 0);
    typed_end(thread);
    return 0;
}

int cox_worker_reply_init(struct cox_worker *worker, uint64_t sequence,
                          const struct cox_init_result *result, struct cox_error *err)
{
    struct cox_channel_thread *thread = reply_thread(worker);
    int r;
    struct cox_lent *entry = reply_claim(thread, sequence, COX_LENT_INIT, &r, err);
    if (!entry)
        return r;
    if (result->kv_cache_count > COX_KV_CACHE_DESC_COUNT_MAX) {
        r = cox_fail(err, COX_TOO_LARGE, "%" PRIu32 " KV caches: at most %d",
                     result->kv_cache_count, COX_KV_CACHE_DESC_COUNT_MAX);
        cox_lending_unclaim(thread, entry);
        return r;
    }
    thread->served.init->result = *result;
    cox_channel_thread_end_init(thread, 0);
    typed_end(thread);
    return 0;
}

/* ---- errors ---- */

static void typed_fail(struct cox_channel_thread *thread, int code, const char *text)
{
    cox_error_clear(&thread->error);
    cox_fail(&thread->error, code, "%s", text);
    cox_channel_thread_refuse(thread, code);
    typed_end(thread);
}

/* Uses nothing of the channel thread, which another thread may be using inside next. */
static void opaque_fail(struct cox_channel_thread *thread, const struct cox_lent *entry, int code,
                        const char *text, const void *detail, size_t detail_size)
{
    const uint64_t sequence = entry->sequence;
    struct cox_error error;
    cox_error_clear(&error);
    cox_fail(&error, code, "%s", text);
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    response.status = code;
    response.error_text = error.text;
    response.has_error_detail = detail_size > 0;
    response.error_detail =
        (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)detail, .len = detail_size};
    size_t capacity;
    opaque_end(thread, entry);
    uint8_t *slot = cox_channel_thread_slot(thread, sequence, false, &capacity);
    if (slot)
        cox_channel_thread_send_failure(thread, sequence, COX_TYPE_OPAQUE, &response, error.text,
                                        slot, capacity);
}

int cox_worker_reply_error(struct cox_worker *worker, uint64_t sequence, int code, const char *text,
                           const void *detail, size_t detail_size, struct cox_error *err)
{
    struct cox_channel_thread *thread = reply_thread(worker);
    if (err)
        cox_error_clear(err);
    if (code == 0)
        return cox_fail(err, COX_INVALID, "an error of code 0 would be a success");
    struct cox_lent *entry = cox_lending_claim(thread, sequence, err);
    if (!entry)
        return COX_STATE;
    if (!text || !text[0])
        text = cox_status_text(code);
    if (entry->kind == COX_LENT_OPAQUE)
        opaque_fail(thread, entry, code, text, detail, detail_size);
    else
        typed_fail(thread, code, text);
    return 0;
}
