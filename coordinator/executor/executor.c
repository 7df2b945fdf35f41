#include <coxswain/executor.h>

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/options.h"
#include "channel/base/thread.h"
#include "channel/shm/channel.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "coordinator/collector/collector.h"
#include "coordinator/collector/reentrancy.h"
#include "coordinator/collector/report.h"
#include "coordinator/process/output.h"
#include "coordinator/stacks/sentence.h"
#include "coordinator/transport/nodes_library.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "core.h"
#include "engine_gate.h"
#include "executor_internal.h"
#include "group_handles.h"

#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define START_TIMEOUT_MS 60000
#define FINALIZE_MS 3000
#define TERM_MS 2000
#define LARGE_PAYLOAD_SIZE_MAX (UINT64_C(2) << 30)
#define REPLY_SIZE_MAX ((UINT64_C(1) << 30) + (UINT64_C(64) << 20))

/* ---- hooks ---- */

static void executor_on_fault(void *context, int rank, const char *text)
{
    struct cox_executor *executor = context;
    struct cox_reentrancy inside;
    char name[16] = "unknown";
    if (rank >= 0)
        snprintf(name, sizeof name, "%d", rank);
    cox_last_errors_add(&executor->last_errors, rank >= 0 ? (uint32_t)rank : COX_LAST_ERROR_UNKNOWN,
                        "it reported: %s", text);
    cox_reentrancy_enter(&inside, executor);
    if (executor->options.hooks.fault)
        executor->options.hooks.fault(executor->options.hooks.context, rank, text);
    else
        cox_log_write(&executor->options.hooks.log, 3, "rank %s reports: %s", name, text);
    cox_reentrancy_exit(&inside);
}

/* The default of hooks.line. */
static void executor_print_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context;
    cox_output_print(rank, is_stderr, text);
}

static void executor_on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct cox_executor *executor = context;
    struct cox_reentrancy inside;
    cox_reentrancy_enter(&inside, executor);
    executor->options.hooks.line(executor->options.hooks.context, rank, is_stderr, text);
    cox_reentrancy_exit(&inside);
}

/* Once per incarnation: by the supervisor, or by start for a rank that died while start finished.
 */
static bool executor_record_death(struct cox_executor *executor, uint32_t rank, char *text,
                                  size_t text_size)
{
    struct cox_rank *record = &executor->ranks[rank];
    const uint32_t incarnation = cox_rank_incarnation(record);
    if (atomic_exchange_explicit(&record->announced, incarnation, memory_order_acq_rel) ==
        incarnation)
        return false;
    cox_report_death(executor->supervisor, rank, text, text_size);
    cox_recorders_crash(executor, COX_CRASH_DEATH, text);
    return true;
}

static void executor_tell_death(struct cox_executor *executor, uint32_t rank)
{
    char text[COX_RANK_TEXT_SIZE];
    /* Before any hook has it replaced. */
    if (!executor_record_death(executor, rank, text, sizeof text))
        return;
    struct cox_reentrancy inside;
    cox_reentrancy_enter(&inside, executor);
    if (executor->options.hooks.death)
        executor->options.hooks.death(executor->options.hooks.context, rank, text);
    else
        cox_log_write(&executor->options.hooks.log, 3, "%s", text);
    cox_reentrancy_exit(&inside);
}

/* The death is recorded already; all threads that wait for this rank check again. */
static void executor_on_wake(void *context, uint32_t rank)
{
    struct cox_executor *executor = context;
    cox_error_channel_note_death(&executor->error_channel, rank);
    cox_executor_note_death(executor);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_wake(&executor->collectors[c]);
}

static void executor_on_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how)
{
    struct cox_executor *executor = context;
    (void)pid;
    (void)how;
    if (!atomic_load_explicit(&executor->stopping, memory_order_acquire) &&
        atomic_load(&executor->started)) /* seq_cst: see cox_executor_start */
        executor_tell_death(executor,
                            rank); /* otherwise the death is expected, or start reports it */
}

/* ---- start ---- */

static int executor_create_memory(struct cox_executor *executor, struct cox_error *err)
{
    const struct cox_attach_request request = {
        .name = executor->name,
        .geometry = &executor->geometry,
        .huge_pages = executor->options.memory.huge_pages,
        .control = &executor->control,
        .channels = executor->channels,
    };
    return cox_attach_create(executor->geometry.mode, &request, &executor->memory, err);
}

/* One eventfd per rank, so that no rank can drain another one's. */
static int executor_create_notify_fds(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++) {
        int *fd = &executor->notify_fds[rank];
        *fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        r = *fd < 0 ? -errno : cox_fd_raise(fd);
    }
    return r ? cox_fail(err, r, "eventfd: %s", cox_status_text(r)) : 0;
}

static int executor_create_collectors(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        r = cox_collector_init(&executor->collectors[c], &executor->channels[c], executor,
                               &executor->large_payloads, &executor->options.hooks.log);
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_transport *transport = executor->remote.transport;
        executor->collectors[c].transport = transport;
        if (transport && transport->first_sequence)
            cox_collector_begin_after(
                &executor->collectors[c],
                transport->first_sequence(transport->context, (enum cox_channel_id)c));
        if (executor->remote.forwarded)
            cox_collector_set_forwarded(&executor->collectors[c], executor->remote.forwarded,
                                        executor->options.hooks.context);
    }
    return r ? cox_fail(err, r, "memory for replies: %s", cox_status_text(r)) : 0;
}

static int executor_start_threads(struct cox_executor *executor, struct cox_error *err)
{
    executor->error_channel.channel = &executor->channels[COX_CHANNEL_ERROR];
    executor->error_channel.collectors = executor->collectors;
    executor->error_channel.ranks = executor->ranks;
    executor->error_channel.log = executor->options.hooks.log;
    executor->error_channel.report = executor_on_fault;
    executor->error_channel.context = executor;
    int r = cox_error_channel_start(&executor->error_channel);
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        if (cox_executor_is_async((enum cox_channel_id)c) && executor->options.collect)
            cox_collector_start_collected(&executor->collectors[c]);
        else if (cox_executor_is_async((enum cox_channel_id)c) || executor->remote.forwarded)
            r = cox_collector_start(&executor->collectors[c]);
    return r ? cox_fail(err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

/* They have no identity: a process that was executed is the rank. */
int cox_executor_adopt_ranks(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++)
        r = cox_supervisor_adopt(executor->supervisor, rank, cox_rank_pid(&executor->ranks[rank]),
                                 0);
    return r ? cox_fail(err, r, "a legacy rank: %s", cox_status_text(r)) : 0;
}

/* Starts the processes, which inherit memory that has no names. */
static int executor_launch(struct cox_executor *executor, struct cox_supervise_options *options,
                           struct cox_error *err)
{
    const bool inherits = !cox_executor_is_external(executor);
    int fds[(COX_RANK_COUNT_MAX + 1) * COX_FD_BUNDLE_COUNT];
    uint32_t count = 0;
    int r = 0;
    /* Every rank has as many. */
    for (uint32_t rank = 0; r == 0 && inherits && rank < options->rank_count; rank++)
        r = cox_executor_lend(executor, rank, &fds[rank * count], &count, err);
    if (count > 0) {
        options->memory_fds = fds;
        options->memory_fd_count = count;
    }
    cox_fault_point(COX_FAULT_LAUNCH);
    if (r == 0)
        r = cox_supervisor_start(options, &executor->supervisor, err);
    for (uint32_t rank = 0; inherits && rank < options->rank_count; rank++)
        cox_executor_put_away(executor, rank, true);
    return r;
}

static int executor_start_workers(struct cox_executor *executor, struct cox_error *err)
{
    char prefix[COX_NAME_SIZE_MAX + 2];
    snprintf(prefix, sizeof prefix, "/%s", executor->objects);
    uint64_t timeout_ms = executor->options.times.start_timeout_ms
                              ? executor->options.times.start_timeout_ms
                              : START_TIMEOUT_MS;
    /* Starting workers by hand takes any time. */
    bool waits = executor->options.workers.external && !executor->options.times.start_timeout_ms;
    uint64_t deadline_ns = waits ? COX_DEADLINE_NEVER : cox_deadline_after_ms(timeout_ms);
    struct cox_supervise_options options = {
        .rank_count = executor->geometry.rank_count,
        .ranks = executor->ranks,
        .notify_fds = executor->options.collect ? executor->notify_fds : NULL,
        .command = executor->options.workers.command,
        .environment = executor->options.workers.environment,
        .working_directory = executor->options.workers.working_directory,
        .pass_flags = !executor->options.workers.environment_only,
        .mark = executor->geometry.mode->limits.guards_commands,
        .prefix = prefix,
        .devices = executor->options.workers.devices,
        .fork_server_fds = executor->options.workers.fork_server_fds,
        .deadline_ns = deadline_ns,
        .control_socket = cox_executor_socket(executor),
        .external = cox_executor_is_external(executor),
        .local_first = executor->remote.rank_first,
        .local_count = executor->remote.rank_here,
        .hooks = {.context = executor,
                  .line = executor_on_line,
                  .wake = executor_on_wake,
                  .death = executor_on_death,
                  .kill = cox_executor_kill_remote},
        .log = executor->options.hooks.log,
    };
    int r = executor_launch(executor, &options, err);
    if (r)
        return r;
    /* release: the supervisor before it; partner: on_worker_gone. */
    atomic_store_explicit(&executor->supervised, true, memory_order_release);
    if (executor->options.workers.external)
        r = cox_executor_open_socket(executor, err);
    if (r)
        return r;
    if (executor->options.workers.external && executor->options.hooks.waiting)
        executor->options.hooks.waiting(executor->options.hooks.context, executor->name,
                                        cox_executor_socket(executor));
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        executor->collectors[c].supervisor = executor->supervisor;
        executor->collectors[c].records = executor->ranks;
        executor->collectors[c].last_errors = &executor->last_errors;
        executor->collectors[c].reports =
            executor->geometry.mode->limits.extensions ? NULL : &executor->error_channel.reports;
    }
    if (executor->remote.transport)
        r = cox_executor_open_transport(executor, err);
    if (r)
        return r;
    return executor->geometry.mode->limits.rank_words
               ? cox_executor_await_attached(executor, deadline_ns, err)
               : cox_executor_adopt_ranks(executor, err);
}

/* Before anything of them is read: of a struct that is not initialized, nothing is. */
static int executor_copy_options(const struct cox_executor_options *given,
                                 struct cox_executor_options *ret_options,
                                 struct cox_executor_nodes *ret_nodes, struct cox_error *err)
{
    int r = cox_options_copy(ret_options, sizeof *ret_options, given, "cox_executor_options", err);
    if (r || !ret_options->nodes)
        return r;
    r = cox_options_copy(ret_nodes, sizeof *ret_nodes, ret_options->nodes, "cox_executor_nodes",
                         err);
    ret_options->nodes = ret_nodes;
    return r;
}

/* Sets options->rank_count, which nodes give. */
static int executor_check_options(struct cox_executor_options *options,
                                  const struct cox_executor_remote *remote, char *name,
                                  size_t name_size, struct cox_geometry *geometry,
                                  struct cox_error *err)
{
    static _Atomic uint32_t counter; /* distinguishes the groups of one process */
    if (options->nodes) {
        uint32_t node_count, rank_count;
        int r = cox_nodes_parse(options->nodes->nodes ? options->nodes->nodes : "", NULL,
                                &node_count, &rank_count, err);
        if (r)
            return r;
        if (options->rank_count && options->rank_count != rank_count)
            return cox_fail(err, COX_INVALID,
                            "the nodes have %" PRIu32 " ranks, the group is to have %" PRIu32,
                            rank_count, options->rank_count);
        if (remote->transport || !options->name)
            return cox_fail(err, COX_INVALID,
                            remote->transport
                                ? "a group with nodes has the transport of its nodes"
                                : "a group with nodes needs a name, by which they find it");
        options->rank_count = rank_count;
    }
    const bool elsewhere = options->nodes || remote->transport;
    if (!options->workers.external && !elsewhere &&
        (!options->workers.command || !options->workers.command[0]))
        return cox_fail(err, COX_INVALID, "no worker command was given");
    const struct cox_attach_choice choice = {.attach = options->memory.attach,
                                             .legacy_workers = options->workers.legacy,
                                             .external = options->workers.external,
                                             .elsewhere = elsewhere};
    struct cox_geometry_choice sizes = {
        .depth = options->depth,
        .no_recorder = options->recorder.use == COX_RECORDER_NONE,
        .mirrored = remote->rank_here && remote->rank_here < options->rank_count,
        .spin_ns = cox_spin_budget_ns(options->spin),
    };
    int r = cox_attach_choose(&choice, &sizes.mode, err);
    if (r)
        return r;
    const struct cox_attach_limits *limits = &sizes.mode->limits;
    if ((options->workers.environment || options->workers.working_directory) &&
        (options->workers.external || elsewhere))
        return cox_fail(err, COX_INVALID,
                        "environment and working_directory are for workers that this group starts; "
                        "%s: set them there",
                        elsewhere ? "those of nodes have what `coxswain node` was started with"
                                  : "external ones have what they were started with");
    if (options->workers.working_directory && options->workers.fork_server_fds)
        return cox_fail(err, COX_INVALID,
                        "workers of a fork server have its working directory: leave out "
                        "working_directory");
    if (remote->forwarded && (options->collect || !limits->extensions || elsewhere))
        return cox_fail(err, COX_INVALID,
                        "an executor that passes requests on has no other requests, and no "
                        "transport");
    if (remote->rank_here && (!remote->forwarded || remote->rank_first >= options->rank_count ||
                              remote->rank_here > options->rank_count - remote->rank_first))
        return cox_fail(
            err, COX_INVALID, "ranks %" PRIu32 " to %" PRIu32 " are no part of %" PRIu32 " ranks",
            remote->rank_first, remote->rank_first + remote->rank_here - 1, options->rank_count);
    if (options->collect && !limits->rank_words)
        return cox_fail(err, COX_INVALID,
                        "replies of legacy workers are collected by a response thread: leave out "
                        "collect, and register a handler");
    if (options->recorder.use == COX_RECORDER_NONE && options->recorder.crash_dir)
        return cox_fail(err, COX_INVALID,
                        "a crash directory without recorders would stay empty: leave out one");
    if (limits->guards_commands && !elsewhere && options->hooks.control && !cox_peer_can_mark())
        return cox_fail(
            err, COX_INVALID,
            "the hard limit RLIMIT_LOCKS (ulimit -Hx) of this process is 0, or cannot be "
            "set: ranks of a sealed group have a lower one, by which their commands "
            "are refused: raise it, or use named attach");
    if (options->socket.use == COX_SOCKET_NONE && options->workers.external)
        return cox_fail(err, COX_INVALID,
                        "workers that are started by hand need the control socket");
    if (options->name) {
        r = cox_name_check(options->name, err);
        if (r)
            return r;
        size_t length = strlen(options->name), max = COX_NAME_SIZE_MAX - COX_NAME_SERIAL_SIZE;
        if (limits->has_serial && length > max)
            return cox_fail(
                err, COX_INVALID,
                "the group name has %zu characters: with legacy workers, whose regions have other names at every start, at most %zu are allowed",
                length, max);
        snprintf(name, name_size, "%s", options->name);
    } else {
        snprintf(name, name_size, "%jd_%" PRIu32, (intmax_t)getpid(),
                 atomic_fetch_add(&counter, 1));
    }
    memcpy(sizes.request_size, options->memory.request_size, sizeof sizes.request_size);
    memcpy(sizes.response_size, options->memory.response_size, sizeof sizes.response_size);
    r = cox_geometry_resolve(options->rank_count, &sizes, geometry, err);
    if (r == 0 && limits->has_serial)
        geometry->serial = cox_control_fresh();
    return r;
}

static void executor_unlink(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->memory_lock);
    const int r = cox_attach_unlink(executor->memory);
    pthread_mutex_unlock(&executor->memory_lock);
    if (r == COX_NOT_FOUND)
        cox_log_write(
            &executor->options.hooks.log, 4,
            "the names of the group '%s' in /dev/shm were removed while it lived, and nothing is removed now: does systemd do it at logout (RemoveIPC=yes in logind.conf)?",
            executor->name);
}

/* Nothing is allocated before it is needed. */
static void executor_choose_large_payloads(struct cox_executor *executor)
{
    const struct cox_executor_options *options = &executor->options;
    cox_large_payload_sender_init(&executor->large_payloads.sender);
    if (options->memory.refuse_large_payloads || !executor->geometry.mode->limits.extensions)
        return;
    executor->large_payloads.request_size_max = options->memory.large_payload_size_max
                                                    ? options->memory.large_payload_size_max
                                                    : LARGE_PAYLOAD_SIZE_MAX;
    executor->large_payloads.reply_limits.size_max =
        options->memory.reply_size_max ? options->memory.reply_size_max : REPLY_SIZE_MAX;
}

/* Waits for the nodes, before anything but the control socket is made: status and stop reach a
 * group that waits. */
static int executor_open_nodes(struct cox_executor *executor, struct cox_error *err)
{
    struct cox_executor_options *options = &executor->options;
    if (!options->nodes)
        return 0;
    executor->attach = cox_attach_name(options->nodes->attach);
    struct cox_nodes_options made = {
        .nodes = options->nodes,
        .group = executor->name,
        .depth = options->depth,
        .no_recorder = options->recorder.use == COX_RECORDER_NONE,
        .start_timeout_ms = options->times.start_timeout_ms,
        .log = options->hooks.log,
        .context = options->hooks.context,
        .cancelled = options->hooks.cancelled,
        .missing = options->hooks.attaching,
    };
    memcpy(made.request_size, options->memory.request_size, sizeof made.request_size);
    memcpy(made.response_size, options->memory.response_size, sizeof made.response_size);
    int r = cox_nodes_library_open(&executor->nodes_library, err);
    if (r == 0)
        r = cox_executor_open_socket(executor, err);
    if (r == 0)
        r = executor->nodes_library->open(&made, &executor->nodes, err);
    if (r == 0)
        executor->remote.transport = executor->nodes_library->transport(executor->nodes);
    options->nodes = NULL; /* borrowed by start alone */
    return r;
}

int cox_executor_start(const struct cox_executor_options *options,
                       struct cox_executor **ret_executor, struct cox_error *err)
{
    const struct cox_executor_remote none = {0};
    return cox_executor_start_remote(options, &none, ret_executor, err);
}

int cox_executor_start_remote(const struct cox_executor_options *options,
                              const struct cox_executor_remote *remote,
                              struct cox_executor **ret_executor, struct cox_error *err)
{
    char name[COX_NAME_SIZE_MAX + 1];
    struct cox_geometry geometry;
    struct cox_executor_options known;
    struct cox_executor_nodes known_nodes;
    int r = cox_thread_check_stack(err);
    if (r == 0)
        r = executor_copy_options(options, &known, &known_nodes, err);
    if (r)
        return r;
    options = &known;
    r = executor_check_options(&known, remote, name, sizeof name, &geometry, err);
    if (r)
        return r;
    struct cox_executor *executor = calloc(1, sizeof *executor);
    if (!executor)
        return cox_fail(err, -ENOMEM, "no memory for the executor");
    executor->options = *options;
    executor->remote = *remote;
    executor->elsewhere = options->nodes || remote->transport;
    if (!options->hooks.line)
        executor->options.hooks.line = executor_print_line;
    executor->started_ns = cox_now_ns();
    executor->geometry = geometry;
    executor->attach = cox_attach_name(options->memory.attach);
    executor->control.lock_fd = -1;
    pthread_mutex_init(&executor->transport_lock, NULL);
    executor->engine_state = COX_ENGINE_INIT;
    pthread_mutex_init(&executor->memory_lock, NULL);
    cox_last_errors_init(&executor->last_errors);
    cox_ranks_init(executor->ranks, geometry.rank_count);
    for (uint32_t rank = 0; rank < geometry.rank_count; rank++) {
        executor->notify_fds[rank] = -1;
        executor->remote_ends[rank] = -1;
    }
    pthread_mutex_init(&executor->recover_lock, NULL);
    cox_condition_init(&executor->recover_cond);
    memcpy(executor->name, name, sizeof name);
    executor->mark = cox_peer_own_mark();
    cox_name_objects(executor->objects, name, &geometry);
    executor_choose_large_payloads(executor);
    r = executor_open_nodes(executor, err);
    if (r) {
        cox_executor_free(executor);
        return r;
    }
    options = &executor->options;
    /* Incarnations of the rank group that an earlier coordinator has begun do not come again. */
    const struct cox_transport *transport = executor->remote.transport;
    if (transport && transport->first_sequence)
        executor->rank_group_incarnation =
            transport->first_sequence(transport->context, COX_CHANNEL_EXECUTE);
    r = executor_create_memory(executor, err);
    if (r == 0 && options->collect)
        r = executor_create_notify_fds(executor, err);
    if (r == 0)
        r = executor_create_collectors(executor, err);
    if (r == 0)
        r = cox_executor_open_incidents(executor, err);
    if (r == 0)
        r = cox_recorders_open(executor, err);
    if (r == 0)
        r = executor_start_threads(executor, err);
    /* Workers that this program starts connect while they are started; others, once everything
     * exists. */
    if (r == 0 && !options->workers.external && !executor->nodes)
        r = cox_executor_open_socket(executor, err);
    if (r == 0)
        r = executor_start_workers(executor, err);
    if (r && r != COX_CLOSED) /* cancelled */
        cox_recorders_crash(executor, COX_CRASH_START, err ? err->text : cox_status_text(r));
    if (r) {
        cox_executor_free(executor);
        return r;
    }
    if (geometry.mode->limits.rank_words && !options->memory.keep_names)
        executor_unlink(executor);
    executor->large_payloads.reply_limits.socket_path =
        cox_executor_socket(executor); /* before any request */
    cox_fault_point(COX_FAULT_STARTED);
    *ret_executor = executor; /* before any hook */
    /* seq_cst, as `dead` is stored and this is loaded by the supervisor thread: at least one of the
     * two reports a death that happens meanwhile. Partner: executor_on_death. */
    atomic_store(&executor->started, true);
    for (uint32_t rank = 0; rank < geometry.rank_count; rank++)
        if (cox_rank_is_dead(&executor->ranks[rank]))
            executor_tell_death(executor, rank);
    atomic_store_explicit(&executor->complete, true, memory_order_release);
    return 0;
}

/* ---- stop ---- */

/* Sends the goodbye on one channel to the live ranks; no reply is awaited. Returns false if there
 * is no room for it now. */
static bool executor_say_finalize(struct cox_executor *executor, struct cox_collector *collector)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    COX_SET(&request, execute_type, COXSWAIN__EXECUTE_TYPE__MODEL_FINALIZE);
    struct cox_entry entry = {
        .type = request.execute_type,
        .operation = cox_operation_find(request.execute_type),
        .gather = COX_GATHER_NONE,
    };
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (cox_executor_has_rank(executor, rank) && !cox_rank_is_dead(&executor->ranks[rank]) &&
            !cox_executor_sees_left(executor, rank) &&
            !cox_rank_is_detached(&executor->ranks[rank]))
            cox_rank_set_add(&entry.asked, rank);
    entry.asked_anywhere = entry.asked;
    pthread_mutex_lock(&collector->submit_lock);
    bool said = cox_rank_set_count(&entry.asked) == 0;
    size_t capacity, length;
    if (!said && cox_collector_begin(collector, &entry, NULL) == 0) {
        uint8_t *frame = cox_request_frame(collector->channel, entry.sequence, &capacity);
        if (cox_wire_request_pack(&request, frame, capacity, &length) == 0)
            cox_collector_commit(collector, &entry, length);
        else
            pthread_mutex_unlock(&collector->lock);
        said = true;
    }
    pthread_mutex_unlock(&collector->submit_lock);
    return said;
}

/* Sends the goodbye on every channel. At depth 1 the one frame may still be in use, or a reply
 * outstanding that no caller waits for: such a channel is tried again until the deadline, and
 * skipped if its rank is stuck. */
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

/* Makes every rank that still serves leave, also a process that our signals do not reach because it
 * is not the rank's own. Legacy ranks have no abort word, and their tokens count. */
static void executor_abort(struct cox_executor *executor)
{
    if (!executor->geometry.mode->limits.rank_words || !executor->supervisor)
        return;
    cox_state_abort(&executor->control);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
            cox_gate_wake(&executor->channels[c].gate, rank, COX_WAKEUP_REQUEST_CONSUME);
}

/* Whether the group is being stopped since something failed. */
static bool executor_has_failed(struct cox_executor *executor)
{
    bool failed = cox_executor_taken_over(executor, NULL) != 0;
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        failed = failed || cox_rank_is_dead(&executor->ranks[rank]);
    pthread_mutex_lock(&executor->recover_lock);
    const enum cox_engine_state state = cox_executor_look_state(executor);
    failed =
        failed || state == COX_ENGINE_ABNORMAL || (state == COX_ENGINE_INIT && executor->init_sent);
    pthread_mutex_unlock(&executor->recover_lock);
    return failed;
}

/* Before ranks that have not ended get a signal: the log has where they are. */
static void executor_tell_stuck(struct cox_executor *executor)
{
    struct cox_stacks *stacks = NULL;
    struct cox_rank_set asked = {{0}};
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (!cox_rank_is_dead(&executor->ranks[rank]) && cox_executor_has_rank(executor, rank))
            cox_rank_set_add(&asked, rank);
    if (!cox_rank_set_count(&asked) || executor->options.recorder.stacks == COX_STACKS_ON_REQUEST ||
        executor->remote.transport ||
        cox_incidents_gather(&executor->incidents, &asked, cox_deadline_after_ms(COX_STACKS_MS),
                             &stacks))
        return;
    cox_log_write(&executor->options.hooks.log, 4, "ranks that are stuck at stop: %s",
                  stacks->paragraph);
    cox_stacks_free(stacks);
}

uint32_t cox_executor_stop(struct cox_executor *executor)
{
    COX_ASSERT(!cox_reentrancy_inside(executor)); /* it would wait for itself */
    if (atomic_exchange_explicit(&executor->stopping, true, memory_order_acq_rel))
        return 0;
    cox_fault_point(COX_FAULT_STOP);
    /* Callers learn of a death before the hook is called, and may stop the group at once: the death
     * is recorded all the same. */
    for (uint32_t rank = 0; executor->supervisor && atomic_load(&executor->started) &&
                            rank < executor->geometry.rank_count;
         rank++) {
        char text[COX_RANK_TEXT_SIZE];
        if (cox_rank_is_dead(&executor->ranks[rank]))
            executor_record_death(executor, rank, text, sizeof text);
    }
    uint32_t signalled = 0;
    const struct cox_executor_options *options = &executor->options;
    bool started = atomic_load_explicit(&executor->started, memory_order_acquire);
    uint64_t finalize_ms = options->times.finalize_ms ? options->times.finalize_ms : FINALIZE_MS;
    uint64_t term_ms = options->times.term_ms ? options->times.term_ms : TERM_MS;
    executor->failed = !started || executor_has_failed(executor);
    /* Before the workers end: what is outstanding is closed, not failed. */
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_stop(&executor->collectors[c]);
    if (executor->supervisor)
        cox_supervisor_cancel(executor->supervisor);
    /* Threads inside a submit, a call or a restart return now, with COX_CLOSED. */
    while (atomic_load_explicit(&executor->callers, memory_order_acquire) > 0)
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    if (started) {
        cox_supervisor_expect_end(executor->supervisor);
        uint64_t deadline_ns = cox_deadline_after_ms(finalize_ms);
        executor_finalize(executor, deadline_ns);
        cox_fault_point(COX_FAULT_GOODBYE_SAID);
        if (cox_supervisor_wait(executor->supervisor, deadline_ns))
            executor_tell_stuck(executor);
    }
    executor_abort(executor);
    cox_executor_close_transport(executor);
    if (executor->supervisor)
        signalled = cox_supervisor_end(executor->supervisor, started ? term_ms : 0);
    cox_error_channel_stop(&executor->error_channel);
    cox_fault_point(COX_FAULT_STOPPED);
    return signalled;
}

void cox_executor_abandon(struct cox_executor *executor)
{
    cox_supervisor_cancel(executor->supervisor); /* no process is started any more */
    cox_supervisor_signal_all(executor->supervisor, SIGKILL);
    executor_unlink(executor);
    if (executor->control_socket)
        cox_control_socket_unname(executor->control_socket);
}

struct cox_executor *cox_executor_free(struct cox_executor *executor)
{
    if (!executor)
        return NULL;
    COX_ASSERT(!cox_reentrancy_inside(executor));
    cox_executor_stop(executor);
    cox_incidents_close(&executor->incidents); /* its thread uses the supervisor */
    executor->group_handles = cox_group_handles_free(executor->group_handles);
    executor->mirror_memory = cox_mirror_memory_free(executor->mirror_memory);
    cox_executor_close_socket(executor); /* its hooks use the supervisor */
    executor->supervisor = cox_supervisor_free(executor->supervisor);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_deinit(&executor->collectors[c]);
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        cox_close_fd(&executor->notify_fds[rank]);
    executor_unlink(executor);
    cox_recorders_close(executor);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&executor->channels[c]);
    executor->memory = cox_attach_free(executor->memory);
    cox_control_close(&executor->control);
    cox_init_record_free(executor->init_record);
    cox_large_payload_sender_deinit(&executor->large_payloads.sender);
    cox_kv_caches_free(executor->kv_caches);
    if (executor->nodes)
        executor->nodes_library->close(executor->nodes);
    free(executor->remote_replies);
    pthread_mutex_destroy(&executor->transport_lock);
    pthread_mutex_destroy(&executor->memory_lock);
    cox_last_errors_deinit(&executor->last_errors);
    pthread_cond_destroy(&executor->recover_cond);
    pthread_mutex_destroy(&executor->recover_lock);
    free(executor);
    return NULL;
}

/* ---- recorders and handlers ---- */

int cox_executor_recorder(struct cox_executor *executor, uint32_t rank, void *copy,
                          uint64_t deadline_ns, struct cox_error *err)
{
    const struct cox_transport *transport = executor->remote.transport;
    return transport && transport->recorder && rank != COX_RECORDER_COORDINATOR
               ? transport->recorder(transport->context, rank, copy, deadline_ns, err)
               : cox_recorders_copy(executor, rank, copy);
}

int cox_executor_set_handler(struct cox_executor *executor, enum cox_channel_id channel,
                             cox_completion_fn handler, void *context)
{
    if (!cox_executor_is_async(channel) || !handler)
        return COX_INVALID;
    if (executor->options.collect)
        return COX_STATE;
    struct cox_collector *collector = &executor->collectors[channel];
    pthread_mutex_lock(&collector->lock);
    /* That handler may wait for this one. */
    if (cox_reentrancy_inside(executor) && cox_collector_runs_handler(collector, UINT64_MAX)) {
        pthread_mutex_unlock(&collector->lock);
        return COX_DEADLOCK;
    }
    if (collector->handler == handler && collector->handler_context == context) {
        pthread_mutex_unlock(&collector->lock);
        return COX_BUSY;
    }
    collector->handler = handler;
    collector->handler_context = context;
    atomic_store_explicit(&collector->handled, true, memory_order_relaxed);
    /* The present run may be of the old handler; later ones are not. */
    cox_collector_await_handler(collector);
    pthread_mutex_unlock(&collector->lock);
    return 0;
}
