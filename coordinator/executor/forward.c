#include "forward.h"

#include "channel/attach/sealed/sealed.h"
#include "channel/base/idioms.h"
#include "channel/shm/region.h"
#include "coordinator/stacks/sentence.h"
#include "coordinator/transport/transport.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "executor_internal.h"
#include "group_handles.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static uint64_t part_size(int part)
{
    return part == 0 ? cox_geometry_group_words_size() : cox_geometry_group_payload_size();
}

/* With memory_lock. */
static int rank_take(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    const bool here = cox_executor_has_rank(executor, rank);
    int r = 0;
    for (int part = 0; r == 0 && part < COX_ATTACH_MEMBER_FD_COUNT; part++) {
        struct cox_region *region = &executor->mirror_memory->parts[rank][part];
        const int fd = cox_attach_member_fds(executor->memory, rank)[part];
        if (fd < 0)
            continue; /* not renewed */
        cox_region_detach(region);
        r = cox_region_map(region, fd, part_size(part), here ? COX_REGION_READ : COX_REGION_WRITE,
                           "memory of the rank group", err);
        if (r == 0 && !here && fcntl(fd, F_ADD_SEALS, (int)COX_SEALED_OWNED) < 0)
            r = cox_fail(err, -errno, "memory of the rank group cannot be sealed: %s",
                         cox_status_text(-errno));
    }
    return r;
}

int cox_mirror_memory_take(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    if (!executor->geometry.mirrored ||
        executor->geometry.mode->limits.rank_group != COX_ATTACH_MEMBER_OWNED)
        return 0;
    if (!executor->mirror_memory)
        executor->mirror_memory = calloc(1, sizeof *executor->mirror_memory);
    if (!executor->mirror_memory)
        return cox_fail(err, -ENOMEM, "no memory for a mirror of the rank group");
    pthread_mutex_lock(&executor->memory_lock);
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++)
        r = rank_take(executor, rank, err);
    pthread_mutex_unlock(&executor->memory_lock);
    return r;
}

struct cox_mirror_memory *cox_mirror_memory_free(struct cox_mirror_memory *memory)
{
    for (uint32_t rank = 0; memory && rank < COX_RANK_COUNT_MAX; rank++)
        for (int part = 0; part < COX_ATTACH_MEMBER_FD_COUNT; part++)
            cox_region_detach(&memory->parts[rank][part]);
    free(memory);
    return NULL;
}

int cox_executor_group_window(const struct cox_executor *executor,
                              struct cox_group_window *ret_window)
{
    const struct cox_geometry *geometry = &executor->geometry;
    *ret_window = (struct cox_group_window){
        .incarnation =
            atomic_load_explicit(&executor->rank_group_incarnation, memory_order_relaxed),
        .value_size = cox_geometry_group_value_size(geometry),
        .fd = executor->memory->rank_group_fd,
        .wakeups = executor->memory->rank_group_hints,
    };
    ret_window->offset = cox_geometry_group_offset(geometry, ret_window->incarnation);
    if (!geometry->mirrored || ret_window->incarnation == 0)
        return COX_UNSUPPORTED;
    for (uint32_t rank = 0; executor->mirror_memory && rank < geometry->rank_count; rank++) {
        ret_window->words[rank] = executor->mirror_memory->parts[rank][0].base;
        ret_window->values[rank] = executor->mirror_memory->parts[rank][1].base;
    }
    return 0;
}

/* ---- requests of another machine ---- */

/* An init names the memory of the rank group, and the weights: both are of the machine that sent
 * it. Here it gets its own. *ret_message is freed by the caller; NULL: the bytes are passed on. */
static int forward_init(struct cox_executor *executor, const struct cox_transport_request *request,
                        struct cox_arena *arena, Coxswain__ExecuteRequest **ret_message,
                        struct cox_error *err)
{
    int r = cox_wire_request_unpack(arena, request->bytes, request->size, ret_message);
    if (r)
        return cox_fail(err, r, "an init of %zu bytes cannot be read", request->size);
    Coxswain__ExecuteRequest *message = *ret_message;
    message->n_group_memory = 0;
    for (size_t i = 0; executor->remote.forwarded_model && i < message->n_config; i++)
        if (message->config[i]->key && !strcmp(message->config[i]->key, "model"))
            message->config[i]->value = (char *)(uintptr_t)executor->remote.forwarded_model;
    r = cox_executor_renew_group(executor, message->rank_group_incarnation, err);
    if (r == 0)
        r = cox_mirror_memory_take(executor, err);
    if (r == 0)
        r = cox_group_handles_fill(executor, message, err);
    return r;
}

int cox_executor_forward(struct cox_executor *executor, const struct cox_transport_request *request,
                         struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    _cox_cleanup_(cox_arena_deinit) struct cox_arena arena = {0};
    const struct cox_operation *operation = cox_operation_find(request->type);
    if (!executor->remote.forwarded)
        return cox_fail(err, COX_STATE, "the executor was started without `forwarded`");
    const bool goodbye = request->type == COXSWAIN__EXECUTE_TYPE__MODEL_FINALIZE;
    if (!operation || request->channel >= COX_TWO_WAY_COUNT ||
        (operation->channel != request->channel && !goodbye))
        return cox_fail(err, COX_INVALID, "execute type %" PRIu32 " is no request of channel %d",
                        request->type, (int)request->channel);
    struct cox_collector *collector = &executor->collectors[request->channel];
    struct cox_entry entry = {
        .type = request->type,
        .operation = operation,
        .gather = operation->replies ? COX_GATHER_ALL : COX_GATHER_NONE,
        .replies = operation->replies,
        .reports_late = true,
        .deadline_ns = request->deadline_ns,
        .submitted_ns = cox_now_ns(),
        .asked_anywhere = *request->asked,
    };
    entry.recorded_submit = cox_recorder_submits_time(&collector->recorder, entry.submitted_ns);
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (cox_rank_set_has(request->asked, rank) && cox_executor_has_rank(executor, rank))
            cox_rank_set_add(&entry.asked, rank);
    if (cox_rank_set_count(&entry.asked) == 0)
        return cox_fail(err, COX_INVALID, "the request asks no rank of this machine");
    struct cox_payload payload = {.bytes = request->bytes,
                                  .memory = request->memory,
                                  .size = request->size,
                                  .packed = request->type != COX_TYPE_OPAQUE};
    COX_ASSERT(!payload.memory || (!payload.bytes && !payload.packed));
    Coxswain__ExecuteRequest *message = NULL;
    pthread_mutex_lock(&collector->submit_lock);
    int r = 0;
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
        r = cox_fail(err, COX_CLOSED, "%s: the group is being stopped",
                     cox_channel_name(collector->channel->id));
    if (r == 0)
        r = cox_collector_skip(collector, request->sequence, err);
    cox_collector_release_payloads(collector);
    if (r == 0)
        r = cox_collector_begin(collector, &entry, err);
    if (r == 0 && request->type == COXSWAIN__EXECUTE_TYPE__MODEL_INIT) {
        pthread_mutex_unlock(&collector->lock);
        cox_arena_init(&arena, 0, UINT64_C(64) << 20); /* without memory: cannot fail */
        r = forward_init(executor, request, &arena, &message, err);
        if (r == 0 && message)
            payload = (struct cox_payload){.request = message};
        pthread_mutex_lock(&collector->lock);
        if (r)
            pthread_mutex_unlock(&collector->lock);
    }
    if (r == 0)
        r = cox_executor_pack(collector, &payload, &entry, err);
    pthread_mutex_unlock(&collector->submit_lock);
    return r;
}

void cox_executor_end_forwarded(struct cox_executor *executor, enum cox_channel_id channel,
                                uint64_t through)
{
    cox_collector_end_through(&executor->collectors[channel], through);
}

void cox_executor_cancel_steps(struct cox_executor *executor, enum cox_channel_id channel,
                               uint64_t through)
{
    struct cox_collector *collector = &executor->collectors[channel];
    struct cox_layout_channel_state *words = cox_state_channel(&executor->control, channel);
    pthread_mutex_lock(&collector->lock);
    if (cox_state_void_through(words) < through)
        cox_state_set_void(words, through);
    pthread_mutex_unlock(&collector->lock);
}

uint64_t cox_executor_forwarded_through(struct cox_executor *executor, enum cox_channel_id channel)
{
    struct cox_collector *collector = &executor->collectors[channel];
    pthread_mutex_lock(&collector->lock);
    const uint64_t through = collector->published;
    pthread_mutex_unlock(&collector->lock);
    return through;
}
