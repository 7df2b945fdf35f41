#include "executor.h"

#include <endian.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../channel/channel.h"
#include "../channel/fault.h"
#include "../channel/request.h"
#include "../channel/truth.h"
#include "../proto/operation.h"
#include "collect.h"
#include "executor_internal.h"
#include "proto/executor.pb-c.h"

#define START_TIMEOUT_MS 60000
#define FINALIZE_MS 3000
#define TERM_MS 2000

/* ---- the error channel ---- */

static void executor_fault(struct cox_executor *executor, uint32_t rank, const char *text)
{
    const void *before = cox_collector_enter(executor);
    if (executor->options.fault)
        executor->options.fault(executor->options.hook_context, rank, text);
    else
        cox_log_write(&executor->options.log, 3, "rank %" PRIu32 " reports: %s", rank, text);
    cox_collector_enter(before);
}

/* One report. Bytes come from another process: copied once, then checked. */
static void executor_read_fault(struct cox_executor *executor, uint8_t *copy, size_t copy_size)
{
    const struct cox_channel *channel = &executor->channels[COX_CHANNEL_ERROR];
    uint32_t prefix;
    memcpy(&prefix, channel->response.base, sizeof prefix);
    size_t length = le32toh(prefix);
    bool fits = length <= copy_size && length <= channel->response.size - COX_PREFIX_SIZE;
    if (fits)
        memcpy(copy, (const uint8_t *)channel->response.base + COX_PREFIX_SIZE, length);
    cox_gate_post(&executor->channels[COX_CHANNEL_ERROR].gate, 0, COX_BELL_RESPONSE_PRODUCE);
    ModelExecuteData__ExecuteResponse *report = NULL;
    cox_arena_reset(&executor->error_arena);
    if (!fits || cox_wire_response_unpack(&executor->error_arena, copy, length, &report)) {
        cox_log_write(&executor->options.log, 3,
                      "the error channel holds %zu bytes that are no report: dropped", length);
        return;
    }
    const char *text = report->error_text;
    if (!text &&
        report->result_case ==
            MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE &&
        report->execute_model_response)
        text = report->execute_model_response->err_msg;
    if (report->has_error_sequence && report->has_error_channel &&
        report->error_channel < COX_TWO_WAY_COUNT) {
        /* About a request whose answer is already in its slot: whatever rank the collector sleeps
         * on, let it look. */
        cox_collector_wake(&executor->collectors[report->error_channel]);
        return;
    }
    uint32_t rank = report->rank >= 0 && (uint32_t)report->rank < executor->geometry.rank_count
                        ? (uint32_t)report->rank
                        : 0;
    executor_fault(executor, rank, text ? text : "a fault without words");
}

static void *executor_error_main(void *argument)
{
    struct cox_executor *executor = argument;
    struct cox_gate *gate = &executor->channels[COX_CHANNEL_ERROR].gate;
    size_t copy_size = executor->channels[COX_CHANNEL_ERROR].response.size;
    for (;;) {
        int r = cox_gate_wait(gate, 0, COX_BELL_RESPONSE_CONSUME, COX_DEADLINE_NEVER);
        if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
            return NULL;
        if (r == 0)
            executor_read_fault(executor, executor->error_copy, copy_size);
    }
}

/* ---- hooks of the supervisor ---- */

static void executor_on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct cox_executor *executor = context;
    const void *before = cox_collector_enter(executor);
    if (executor->options.line)
        executor->options.line(executor->options.hook_context, rank, is_stderr, text);
    cox_collector_enter(before);
}

static void executor_on_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how)
{
    struct cox_executor *executor = context;
    (void)pid;
    (void)how;
    /* The death is in the truth already; everybody who waits for this rank looks now. */
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_wake(&executor->collectors[c]);
    if (atomic_load_explicit(&executor->stopping, memory_order_acquire) ||
        !atomic_load_explicit(&executor->started, memory_order_acquire))
        return; /* expected, or start itself tells */
    char text[COX_RANK_TEXT_SIZE];
    struct cox_supervisor *supervisor = executor->supervisor;
    cox_supervisor_describe(supervisor, rank, text, sizeof text);
    const void *before = cox_collector_enter(executor);
    if (executor->options.death)
        executor->options.death(executor->options.hook_context, rank, text);
    else
        cox_log_write(&executor->options.log, 3, "%s", text);
    cox_collector_enter(before);
}

/* ---- start ---- */

static int executor_describe_start_failure(struct cox_executor *executor, uint32_t rank, int code,
                                           const char *what, struct cox_error *err)
{
    char how[COX_RANK_TEXT_SIZE], lines[400];
    cox_supervisor_describe(executor->supervisor, rank, how, sizeof how);
    size_t length = cox_supervisor_last_lines(executor->supervisor, rank, lines, sizeof lines);
    return cox_fail(err, code, "%s %s%s%s", how, what, length ? "; its last lines: " : "",
                    length ? lines : "");
}

static int executor_await_attach(struct cox_executor *executor, uint64_t deadline_ns,
                                 struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    const struct cox_layout_control *layout = executor->control.layout;
    int r = 0;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count;) {
        const struct cox_layout_identity *identity = &layout->ranks[rank].identity;
        uint32_t causes = atomic_load(&collector->causes);
        /* acquire: partner is the worker's release after it filled its identity. */
        if (atomic_load_explicit(&identity->state, memory_order_acquire) == COX_IDENTITY_ATTACHED) {
            if (identity->generation != 1 || identity->epoch != executor->control.epoch)
                r = cox_fail(err, COX_CORRUPT,
                             "rank %" PRIu32 " attached as generation %" PRIu32 ", expected 1",
                             rank, identity->generation);
            cox_gate_settle(&executor->channels[COX_CHANNEL_EXECUTE].gate, rank,
                            COX_BELL_RESPONSE_CONSUME);
            rank++;
            continue;
        }
        /* Any death during start is the end of it, not only of the rank waited for. */
        for (uint32_t other = 0; r == 0 && other < executor->geometry.rank_count; other++)
            if (cox_supervisor_dead(executor->supervisor, other, NULL))
                r = executor_describe_start_failure(executor, other, COX_PEER_DEAD,
                                                    "before the group was complete", err);
        if (r == 0 && executor->options.cancelled &&
            executor->options.cancelled(executor->options.hook_context))
            r = cox_fail(err, COX_CLOSED, "cancelled while the workers were starting");
        if (r == 0 && cox_now_ns() >= deadline_ns)
            r = executor_describe_start_failure(executor, rank, COX_TIMEOUT,
                                                "but did not attach in time: is it a Coxswain "
                                                "worker? (--legacy-workers for others)",
                                                err);
        if (r == 0)
            cox_collector_sleep(collector, rank, causes,
                                cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    }
    pthread_mutex_unlock(&collector->lock);
    return r;
}

static int executor_create_memory(struct cox_executor *executor, struct cox_error *err)
{
    uint64_t needed = cox_geometry_region_bytes(&executor->geometry), available;
    if (cox_region_space_free(&available) == 0 && available < needed)
        return cox_fail(
            err, COX_NO_SPACE,
            "the group needs %" PRIu64 " bytes of /dev/shm, %" PRIu64
            " are free: enlarge it (mount -o remount,size=...), use fewer ranks, a smaller depth "
            "or smaller regions (see coxswain layout)",
            needed, available);
    int r = cox_control_create(&executor->control, executor->name, &executor->geometry, err);
    if (r)
        return r;
    executor->named = true;
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        r = cox_channel_create(&executor->channels[c], executor->name, &executor->control,
                               (enum cox_channel_id)c, err);
        executor->channels_made +=
            r == 0; /* what a stranger has under such a name is not ours to remove */
    }
    return r;
}

static int executor_create_collectors(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        r = cox_collector_init(&executor->collectors[c], &executor->channels[c], executor,
                               &executor->options.log);
    if (r == 0)
        r = cox_arena_init(&executor->error_arena, 0, 1 << 20);
    executor->error_copy = malloc(executor->channels[COX_CHANNEL_ERROR].response.size);
    if (r == 0 && !executor->error_copy)
        r = -ENOMEM;
    return r ? cox_fail(err, r, "memory for replies: %s", cox_status_text(r)) : 0;
}

static int executor_start_threads(struct cox_executor *executor, struct cox_error *err)
{
    int r = -pthread_create(&executor->error_thread, NULL, executor_error_main, executor);
    executor->error_threaded = r == 0;
    if (r == 0)
        r = cox_collector_start(&executor->collectors[COX_CHANNEL_EXECUTE]);
    if (r == 0)
        r = cox_collector_start(&executor->collectors[COX_CHANNEL_TRANSFER]);
    return r ? cox_fail(err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

static int executor_start_workers(struct cox_executor *executor, struct cox_error *err)
{
    char prefix[COX_NAME_SIZE_MAX + 2];
    snprintf(prefix, sizeof prefix, "/%s", executor->name);
    const struct cox_supervise_options options = {
        .rank_count = executor->geometry.rank_count,
        .command = executor->options.command,
        .pass_flags = !executor->options.no_flags,
        .prefix = prefix,
        .devices = executor->options.devices,
        .hooks = {.context = executor, .line = executor_on_line, .death = executor_on_death},
        .log = executor->options.log,
    };
    uint64_t timeout_ms =
        executor->options.start_timeout_ms ? executor->options.start_timeout_ms : START_TIMEOUT_MS;
    uint64_t deadline_ns = cox_deadline_after_ms(timeout_ms);
    cox_fault_point("executor.start.workers");
    int r = cox_supervisor_start(&options, &executor->supervisor, err);
    if (r)
        return r;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        executor->collectors[c].supervisor = executor->supervisor;
    return executor->geometry.legacy ? 0 : executor_await_attach(executor, deadline_ns, err);
}

static int executor_check_options(const struct cox_executor_options *options, char *name,
                                  size_t name_size, struct cox_geometry *geometry,
                                  struct cox_error *err)
{
    static _Atomic uint32_t counter; /* tells the groups of one process apart */
    if (!options->command || !options->command[0])
        return cox_fail(err, COX_INVALID, "no worker command was given");
    if (options->name) {
        int r = cox_name_check(options->name, err);
        if (r)
            return r;
        snprintf(name, name_size, "%s", options->name);
    } else {
        snprintf(name, name_size, "%jd_%" PRIu32, (intmax_t)getpid(),
                 atomic_fetch_add(&counter, 1));
    }
    struct cox_geometry_choice choice = {.depth = options->depth,
                                         .legacy = options->legacy_workers};
    memcpy(choice.request_size, options->request_size, sizeof choice.request_size);
    memcpy(choice.response_size, options->response_size, sizeof choice.response_size);
    return cox_geometry_resolve(options->rank_count, &choice, geometry, err);
}

static void executor_unlink(struct cox_executor *executor)
{
    if (executor->named)
        cox_control_unlink_names(executor->name, &executor->geometry, executor->channels_made);
    executor->named = false;
}

int cox_executor_start(const struct cox_executor_options *options,
                       struct cox_executor **ret_executor, struct cox_error *err)
{
    char name[COX_NAME_SIZE_MAX + 1];
    struct cox_geometry geometry;
    int r = executor_check_options(options, name, sizeof name, &geometry, err);
    if (r)
        return r;
    struct cox_executor *executor = calloc(1, sizeof *executor);
    if (!executor)
        return cox_fail(err, -ENOMEM, "no memory for the executor");
    executor->options = *options;
    executor->geometry = geometry;
    executor->control.lock_fd = -1;
    executor->engine_state = COX_ENGINE_INIT;
    pthread_mutex_init(&executor->recover_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&executor->recover_cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
    memcpy(executor->name, name, sizeof name);
    r = executor_create_memory(executor, err);
    if (r == 0)
        r = executor_create_collectors(executor, err);
    if (r == 0)
        r = executor_start_threads(executor, err);
    if (r == 0)
        r = executor_start_workers(executor, err);
    if (r) {
        cox_executor_free(executor);
        return r;
    }
    if (!geometry.legacy && !options->keep_names)
        executor_unlink(executor);
    cox_fault_point("executor.started");
    /* release: partner is executor_on_death; from now on deaths are told. */
    atomic_store_explicit(&executor->started, true, memory_order_release);
    *ret_executor = executor;
    return 0;
}

/* ---- stop ---- */

/* The goodbye on one channel, to the living; no answer is awaited. False: there is no room for it
 * now. */
static bool executor_say_finalize(struct cox_executor *executor, struct cox_collector *collector)
{
    ModelExecuteData__ExecuteRequest request = MODEL_EXECUTE_DATA__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = MODEL_EXECUTE_DATA__EXECUTE_TYPE__MODEL_FINALIZE;
    struct cox_entry entry = {
        .type = request.execute_type,
        .operation = cox_operation_find(request.execute_type),
        .gather = COX_GATHER_NONE,
    };
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (!cox_supervisor_dead(executor->supervisor, rank, NULL)) {
            cox_rank_set_add(&entry.asked, rank);
            count++;
        }
    pthread_mutex_lock(&collector->submit_lock);
    bool said = count == 0;
    size_t capacity, length;
    if (!said && cox_collector_claim(collector, &entry.asked, &entry.sequence, NULL) == 0) {
        uint8_t *frame = cox_request_frame(collector->channel, entry.sequence, &capacity);
        if (cox_wire_request_pack(&request, frame, capacity, &length) == 0)
            cox_collector_publish(collector, &entry, length);
        said = true;
    }
    pthread_mutex_unlock(&collector->submit_lock);
    return said;
}

/* On every channel. At depth 1 the one frame may still be read, or an answer still be owed that
 * nobody waits for any more: such a channel is tried again until the deadline, and goes without
 * when its rank is stuck. */
static void executor_finalize(struct cox_executor *executor, uint64_t deadline_ns)
{
    bool said[COX_TWO_WAY_COUNT] = {false};
    for (;;) {
        struct cox_collector *without_room = NULL;
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
            said[c] = said[c] || executor_say_finalize(executor, &executor->collectors[c]);
            if (!said[c])
                without_room = &executor->collectors[c];
        }
        if (!without_room || cox_now_ns() >= deadline_ns)
            return;
        cox_collector_await_room(without_room, deadline_ns);
    }
}

uint32_t cox_executor_stop(struct cox_executor *executor)
{
    COX_ASSERT(!cox_collector_inside(executor)); /* it would wait for itself */
    if (atomic_exchange_explicit(&executor->stopping, true, memory_order_acq_rel))
        return 0;
    uint32_t signalled = 0;
    const struct cox_executor_options *options = &executor->options;
    bool started = atomic_load_explicit(&executor->started, memory_order_acquire);
    uint64_t finalize_ms = options->finalize_ms ? options->finalize_ms : FINALIZE_MS;
    uint64_t term_ms = options->term_ms ? options->term_ms : TERM_MS;
    /* Before the workers end: what is outstanding is closed, not failed. */
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_stop(&executor->collectors[c]);
    if (started) {
        uint64_t deadline_ns = cox_deadline_after_ms(finalize_ms);
        executor_finalize(executor, deadline_ns);
        uint64_t now = cox_now_ns();
        finalize_ms = now < deadline_ns ? (deadline_ns - now) / COX_NSEC_PER_MSEC : 0;
    }
    if (executor->supervisor)
        signalled = cox_supervisor_end(executor->supervisor, started ? finalize_ms : 0,
                                       started ? term_ms : 0);
    if (executor->error_threaded) {
        cox_gate_post(&executor->channels[COX_CHANNEL_ERROR].gate, 0, COX_BELL_RESPONSE_CONSUME);
        pthread_join(executor->error_thread, NULL);
        executor->error_threaded = false;
    }
    return signalled;
}

struct cox_executor *cox_executor_free(struct cox_executor *executor)
{
    if (!executor)
        return NULL;
    COX_ASSERT(!cox_collector_inside(executor));
    cox_executor_stop(executor);
    executor->supervisor = cox_supervisor_free(executor->supervisor);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_deinit(&executor->collectors[c]);
    executor_unlink(executor);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&executor->channels[c]);
    cox_control_close(&executor->control);
    cox_arena_deinit(&executor->error_arena);
    free(executor->error_copy);
    pthread_cond_destroy(&executor->recover_cond);
    pthread_mutex_destroy(&executor->recover_lock);
    free(executor);
    return NULL;
}

/* ---- getters and handlers ---- */

const char *cox_executor_name(const struct cox_executor *executor)
{
    return executor->name;
}

uint32_t cox_executor_rank_count(const struct cox_executor *executor)
{
    return executor->geometry.rank_count;
}

bool cox_executor_legacy(const struct cox_executor *executor)
{
    return executor->geometry.legacy;
}

pid_t cox_executor_pid(const struct cox_executor *executor, uint32_t rank)
{
    COX_ASSERT(rank < executor->geometry.rank_count);
    return cox_supervisor_pid(executor->supervisor, rank);
}

size_t cox_executor_request_size_max(const struct cox_executor *executor,
                                     enum cox_channel_id channel)
{
    COX_ASSERT(channel < COX_TWO_WAY_COUNT);
    return executor->geometry.channels[channel].frame_size - COX_PREFIX_SIZE;
}

void cox_executor_stats(struct cox_executor *executor, enum cox_channel_id channel,
                        struct cox_channel_stats *ret_stats)
{
    COX_ASSERT(channel < COX_TWO_WAY_COUNT);
    struct cox_collector *collector = &executor->collectors[channel];
    pthread_mutex_lock(&collector->lock);
    *ret_stats = collector->stats;
    pthread_mutex_unlock(&collector->lock);
}

static bool channel_is_async(enum cox_channel_id channel)
{
    return channel == COX_CHANNEL_EXECUTE || channel == COX_CHANNEL_TRANSFER;
}

int cox_executor_register(struct cox_executor *executor, enum cox_channel_id channel,
                          cox_completion_fn handler, void *context)
{
    if (!channel_is_async(channel))
        return COX_INVALID;
    struct cox_collector *collector = &executor->collectors[channel];
    pthread_mutex_lock(&collector->lock);
    int r = collector->handler ? COX_BUSY : 0;
    if (r == 0) {
        collector->handler = handler;
        collector->handler_context = context;
    }
    pthread_mutex_unlock(&collector->lock);
    return r;
}

int cox_executor_replace(struct cox_executor *executor, enum cox_channel_id channel,
                         cox_completion_fn handler, void *context)
{
    if (!channel_is_async(channel))
        return COX_INVALID;
    struct cox_collector *collector = &executor->collectors[channel];
    pthread_mutex_lock(&collector->lock);
    collector->handler = handler;
    collector->handler_context = context;
    while (collector->in_handler && !pthread_equal(collector->handler_thread, pthread_self()))
        pthread_cond_wait(&collector->ended_cond, &collector->lock);
    pthread_mutex_unlock(&collector->lock);
    return 0;
}

/* ---- requests ---- */

/* What goes into a frame: a message, or bytes. */
struct payload {
    const ModelExecuteData__ExecuteRequest *request; /* NULL: bytes */
    const void *bytes;
    size_t size;
};

static int payload_pack(const struct payload *payload, const char *channel_name, uint8_t *frame,
                        size_t capacity, size_t *ret_length, struct cox_error *err)
{
    if (payload->request) {
        int r = cox_wire_request_pack(payload->request, frame, capacity, ret_length);
        return r ? cox_fail(
                       err, r,
                       "%s: a request of %zu bytes, a frame holds %zu: use a larger request region",
                       channel_name, cox_wire_request_size(payload->request), capacity)
                 : 0;
    }
    if (payload->size > capacity)
        return cox_fail(
            err, COX_TOO_LARGE,
            "%s: a request of %zu bytes, a frame holds %zu: use a larger request region",
            channel_name, payload->size, capacity);
    memcpy(frame, payload->bytes, payload->size);
    *ret_length = payload->size;
    return 0;
}

static int executor_publish(struct cox_executor *executor, struct cox_collector *collector,
                            const struct payload *payload, struct cox_entry *entry,
                            struct cox_error *err)
{
    (void)executor;
    size_t capacity, length;
    entry->submitted_ns = cox_now_ns();
    pthread_mutex_lock(&collector->submit_lock);
    int r = 0;
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
        r = cox_fail(err, COX_CLOSED, "%s: the group is being stopped",
                     cox_channel_name(collector->channel->id));
    else
        r = cox_collector_claim(collector, &entry->asked, &entry->sequence, err);
    if (r == 0) {
        uint8_t *frame = cox_request_frame(collector->channel, entry->sequence, &capacity);
        r = payload_pack(payload, cox_channel_name(collector->channel->id), frame, capacity,
                         &length, err);
    }
    if (r == 0)
        cox_collector_publish(collector, entry, length);
    pthread_mutex_unlock(&collector->submit_lock);
    return r;
}

static int entry_prepare(struct cox_executor *executor, uint32_t type,
                         const struct cox_submit_options *options, struct cox_entry *ret_entry,
                         struct cox_error *err)
{
    const struct cox_operation *operation = cox_operation_find(type);
    if (!operation || operation->channel == COX_CHANNEL_ERROR)
        return cox_fail(err, COX_INVALID, "execute type %" PRIu32 " is no request", type);
    if (type == MODEL_EXECUTE_DATA__EXECUTE_TYPE__MODEL_FINALIZE)
        return cox_fail(err, COX_INVALID, "finalize is sent by cox_executor_stop");
    if (type == COX_TYPE_OPAQUE && executor->geometry.legacy)
        return cox_fail(err, COX_UNSUPPORTED, "legacy workers know no opaque requests");
    struct cox_entry entry = {
        .type = type,
        .operation = operation,
        .gather = operation->replies ? options->gather : COX_GATHER_NONE,
        .replies = operation->replies,
        .deadline_ns = options->deadline_ns,
        .request_context = options->request_context,
        .asked = cox_rank_set_first(executor->geometry.rank_count),
    };
    if (operation->replies && options->gather == COX_GATHER_NONE)
        return cox_fail(err, COX_INVALID,
                        "%s is answered: gather NONE is for requests without answer",
                        operation->name);
    if (options->asked) {
        struct cox_rank_set all = entry.asked;
        uint64_t outside = 0, any = 0;
        for (size_t i = 0; i < COX_RANK_COUNT_MAX / 64; i++) {
            outside |= options->asked->words[i] & ~all.words[i];
            any |= options->asked->words[i];
        }
        if (outside || !any)
            return cox_fail(err, COX_INVALID,
                            "the set of asked ranks is empty or names a rank over %" PRIu32,
                            executor->geometry.rank_count - 1);
        if (executor->geometry.legacy && memcmp(options->asked, &all, sizeof all) != 0)
            return cox_fail(err, COX_UNSUPPORTED, "legacy workers are always asked together");
        entry.asked = *options->asked;
    }
    *ret_entry = entry;
    return 0;
}

static int executor_submit(struct cox_executor *executor, uint32_t type,
                           const struct payload *payload, const struct cox_submit_options *options,
                           uint64_t *ret_sequence, struct cox_error *err)
{
    struct cox_entry entry;
    int r = entry_prepare(executor, type, options, &entry, err);
    if (r)
        return r;
    enum cox_channel_id channel = entry.operation->channel;
    struct cox_collector *collector = &executor->collectors[channel];
    if (entry.replies && !channel_is_async(channel))
        return cox_fail(err, COX_INVALID, "%s is answered synchronously: use call",
                        entry.operation->name);
    if (entry.replies) {
        pthread_mutex_lock(&collector->lock);
        bool registered = collector->handler != NULL;
        pthread_mutex_unlock(&collector->lock);
        if (!registered)
            return cox_fail(err, COX_STATE, "no handler is registered for the %s channel",
                            cox_channel_name(channel));
    }
    r = executor_publish(executor, collector, payload, &entry, err);
    if (r == 0 && ret_sequence)
        *ret_sequence = entry.sequence;
    /* Nobody answers, but somebody has to mark it ended. When a call gathers at this moment, its
     * next one will. */
    if (r == 0 && !channel_is_async(channel) && cox_collector_gather_enter(collector, 0) == 0) {
        cox_collector_gather(collector, entry.sequence);
        cox_collector_gather_leave(collector);
    }
    return r;
}

static int executor_call(struct cox_executor *executor, uint32_t type,
                         const struct payload *payload, const struct cox_submit_options *options,
                         cox_completion_fn visit, void *visit_context, struct cox_error *err)
{
    if (cox_collector_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "a call from inside a handler or hook would wait for itself: submit, or "
                        "call from another "
                        "thread");
    struct cox_entry entry;
    int r = entry_prepare(executor, type, options, &entry, err);
    if (r)
        return r;
    enum cox_channel_id channel = entry.operation->channel;
    struct cox_collector *collector = &executor->collectors[channel];
    struct cox_waiter waiter = {.visit = visit, .visit_context = visit_context, .err = err};
    entry.waiter = entry.replies ? &waiter : NULL;
    bool gathers = !channel_is_async(channel);
    if (gathers && cox_collector_gather_enter(collector, options->deadline_ns))
        return cox_fail(err, COX_TIMEOUT, "%s: other callers had the channel until the deadline",
                        cox_channel_name(channel));
    for (;;) {
        struct cox_error why = {0};
        r = executor_publish(executor, collector, payload, &entry, &why);
        bool room = r != COX_FULL && r != COX_LATE;
        if (!room && cox_now_ns() < options->deadline_ns) {
            cox_collector_await_room(collector, options->deadline_ns);
            continue;
        }
        if (r)
            r = cox_fail(err, room ? r : COX_TIMEOUT, "%s%s",
                         room ? "" : "no room in time: ", why.text);
        break;
    }
    if (r == 0 && gathers) {
        cox_collector_gather(collector, entry.sequence);
        r = waiter.status;
    } else if (r == 0 && entry.replies) {
        pthread_mutex_lock(&collector->lock);
        while (!waiter.done)
            pthread_cond_wait(&collector->ended_cond, &collector->lock);
        pthread_mutex_unlock(&collector->lock);
        r = waiter.status;
    }
    if (gathers)
        cox_collector_gather_leave(collector);
    return r;
}

int cox_executor_submit(struct cox_executor *executor,
                        const ModelExecuteData__ExecuteRequest *request,
                        const struct cox_submit_options *options, uint64_t *ret_sequence,
                        struct cox_error *err)
{
    const struct payload payload = {.request = request};
    return executor_submit(executor, (uint32_t)request->execute_type, &payload, options,
                           ret_sequence, err);
}

int cox_executor_submit_opaque(struct cox_executor *executor, const void *bytes, size_t size,
                               const struct cox_submit_options *options, uint64_t *ret_sequence,
                               struct cox_error *err)
{
    const struct payload payload = {.bytes = bytes, .size = size};
    return executor_submit(executor, COX_TYPE_OPAQUE, &payload, options, ret_sequence, err);
}

int cox_executor_call(struct cox_executor *executor,
                      const ModelExecuteData__ExecuteRequest *request,
                      const struct cox_submit_options *options, cox_completion_fn visit,
                      void *visit_context, struct cox_error *err)
{
    const struct payload payload = {.request = request};
    return executor_call(executor, (uint32_t)request->execute_type, &payload, options, visit,
                         visit_context, err);
}

int cox_executor_call_opaque(struct cox_executor *executor, const void *bytes, size_t size,
                             const struct cox_submit_options *options, cox_completion_fn visit,
                             void *visit_context, struct cox_error *err)
{
    const struct payload payload = {.bytes = bytes, .size = size};
    return executor_call(executor, COX_TYPE_OPAQUE, &payload, options, visit, visit_context, err);
}
