#include <coxswain/worker.h>

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/shm/state.h"
#include "channel/socket/socket.h"
#include "worker/group/group_memory.h"
#include "worker_internal.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#define REQUEST_SIZE_MAX (UINT64_C(256) << 20)
#define SEQUENCE_COUNT_MAX 4096
#define TOKEN_COUNT_MAX 131072
/* The exit status of an orphan: EX_SOFTWARE. */
#define ORPHAN_EXIT_STATUS 70
#define RING_AGAIN_MS 1

/* ---- the guard: the end of an orphan, from new to free, whatever the host's own threads do ----
 */

static void *guard_main(void *argument)
{
    struct cox_worker *worker = argument;
    for (;;) {
        struct pollfd fds[3] = {
            {.fd = worker->guard_fd, .events = POLLIN},
            {.fd = worker->coordinator.pidfd, .events = POLLIN},
            {.fd = worker->socket_fd, .events = POLLRDHUP},
        };
        int count = poll(fds, 3, -1);
        if (count > 0 && fds[0].revents)
            return NULL;
        if (count > 0)
            _exit(ORPHAN_EXIT_STATUS);
        if (errno != EINTR) /* the kernel has no memory; try again */
            nanosleep(&(struct timespec){.tv_nsec = 50 * (long)COX_NSEC_PER_MSEC}, NULL);
    }
}

static int guard_start(struct cox_worker *worker, struct cox_error *err)
{
    if (worker->options.on_orphan != COX_ORPHAN_EXIT)
        return 0; /* run watches by itself */
    int r = cox_thread_start(&worker->guard, guard_main, worker);
    worker->guarded = r == 0;
    return r ? cox_fail(err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

static void guard_stop(struct cox_worker *worker)
{
    if (!worker->guarded)
        return;
    const uint64_t one = 1;
    ssize_t written = write(worker->guard_fd, &one, sizeof one);
    (void)written; /* a full counter is as readable as one */
    pthread_join(worker->guard, NULL);
    worker->guarded = false;
}

/* ---- new and free ---- */

/* With a control socket the group need not be named. */
static int worker_check_options(const struct cox_worker_options *options, struct cox_error *err)
{
    if (options->control_socket[0] && !options->prefix[0])
        return 0;
    if (options->prefix[0] != '/')
        return cox_fail(err, COX_INVALID, "the prefix '%s' does not start with a slash",
                        options->prefix);
    return cox_name_check(options->prefix + 1, err);
}

/* The coordinator's pid as no other process of the user can falsify it, unlike the header of a
 * named group: from who started this process, or from the kernel. 0: unknown. */
static pid_t trusted_coordinator(const struct cox_worker *worker)
{
    struct cox_socket_peer peer;
    if (worker->options.parent_pid > 0)
        return worker->options.parent_pid;
    return worker->socket_fd >= 0 && cox_socket_read_peer(worker->socket_fd, &peer) == 0 ? peer.pid
                                                                                         : 0;
}

int cox_worker_new_as(const struct cox_worker_identity *self,
                      const struct cox_worker_options *options,
                      const struct cox_worker_callbacks *callbacks, void *context,
                      struct cox_worker **ret_worker, struct cox_error *err)
{
    struct cox_worker_options known;
    struct cox_worker_callbacks known_callbacks;
    int r = cox_options_copy(&known, sizeof known, options, "cox_worker_options", err);
    if (r == 0)
        r = cox_options_copy(&known_callbacks, sizeof known_callbacks, callbacks,
                             "cox_worker_callbacks", err);
    if (r == 0)
        r = worker_check_options(&known, err);
    if (r)
        return r;
    struct cox_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return cox_fail(err, -ENOMEM, "no memory for the worker");
    cox_fault_rank((int)known.rank);
    worker->options = known;
    worker->request_size_default = !worker->options.request_size_max;
    cox_large_payload_sender_init(&worker->large_payloads);
    if (!worker->options.request_size_max)
        worker->options.request_size_max = REQUEST_SIZE_MAX;
    if (!worker->options.sequence_count_max)
        worker->options.sequence_count_max = SEQUENCE_COUNT_MAX;
    if (!worker->options.token_count_max)
        worker->options.token_count_max = TOKEN_COUNT_MAX;
    if (!worker->options.incarnation && !worker->options.control_socket[0])
        worker->options.incarnation = 1;
    worker->callbacks_copy = known_callbacks;
    worker->callbacks = &worker->callbacks_copy;
    worker->context = context;
    worker->own_pid = getpid();
    worker->control.lock_fd = -1;
    worker->coordinator.pidfd = -1;
    worker->socket_fd = worker->group_fd = worker->notify_fd = -1;
    cox_fd_bundle_init(&worker->bundle);
    pthread_mutex_init(&worker->error_lock, NULL);
    cox_condition_init(&worker->error_cond);
    cox_pause_init(&worker->pause);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        pthread_mutex_init(&worker->threads[c].lending.lock, NULL);
        pthread_mutex_init(&worker->threads[c].payloads_lock, NULL);
    }
    worker->guard_fd = -1;
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake_fd >= 0)
        worker->guard_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->guard_fd < 0)
        r = cox_fail(err, -errno, "eventfd: %s", cox_status_text(-errno));
    if (r == 0) {
        r = cox_fd_raise(&worker->wake_fd);
        if (r == 0)
            r = cox_fd_raise(&worker->guard_fd);
        if (r)
            cox_fail(err, r, "eventfd: %s", cox_status_text(r));
    }
    if (r == 0)
        r = cox_worker_enter(worker, self, err);
    if (r == 0)
        r = guard_start(worker, err);
    if (r == 0)
        r = cox_stack_writer_start(&worker->stacks, trusted_coordinator(worker), known.write_frames,
                                   known.frames_context, err);
    if (r == 0)
        r = cox_worker_claim(worker, self, err);
    if (r == 0)
        r = cox_worker_attach_channels(worker, self, err);
    cox_fd_bundle_close(&worker->bundle);
    if (r == 0) {
        r = cox_table_new(worker->options.sequence_count_max, worker->options.token_count_max,
                          &worker->table);
        if (r == COX_INVALID)
            cox_fail(err, r,
                     "room for %" PRIu32 " sequences of %" PRIu32
                     " tokens was asked for: allowed are up to %" PRIu32 " of up to %" PRIu32,
                     worker->options.sequence_count_max, worker->options.token_count_max,
                     COX_TABLE_SEQUENCE_COUNT_LIMIT, COX_TABLE_TOKEN_COUNT_LIMIT);
        else if (r)
            cox_fail(err, r, "no memory for the sequence table: %s", cox_status_text(r));
    }
    if (r == 0) {
        cox_table_watch(worker->table,
                        &cox_state_channel(&worker->control, COX_CHANNEL_EXECUTE)->void_through,
                        &worker->threads[COX_CHANNEL_EXECUTE].running.cancel_sequence);
    }
    if (r) {
        if (worker->claimed)
            cox_state_unclaim_identity(cox_worker_identity(worker));
        worker->claimed = false;
        cox_worker_free(worker);
        return r;
    }
    cox_worker_announce(worker);
    *ret_worker = worker;
    return 0;
}

int cox_worker_new(const struct cox_worker_options *options,
                   const struct cox_worker_callbacks *callbacks, void *context,
                   struct cox_worker **ret_worker, struct cox_error *err)
{
    struct cox_worker_identity self = {.pid = getpid()};
    int r = cox_peer_start_time(self.pid, &self.start);
    if (r)
        return cox_fail(err, r, "own start time: %s", cox_status_text(r));
    return cox_worker_new_as(&self, options, callbacks, context, ret_worker, err);
}

/* Stores that the rank has left, so that no thread waits for it, though the process may live on.
 * The coordinator checks once per slice. */
static void worker_leave(struct cox_worker *worker)
{
    if (worker->claimed)
        cox_state_set_left(cox_worker_identity(worker));
    worker->claimed = false;
}

/* Threads inside a report return with COX_CLOSED, within a slice. */
static void worker_await_reporters(struct cox_worker *worker)
{
    atomic_store_explicit(&worker->stopping, true, memory_order_release);
    pthread_mutex_lock(&worker->error_lock);
    pthread_cond_broadcast(&worker->error_cond);
    pthread_mutex_unlock(&worker->error_lock);
    while (atomic_load_explicit(&worker->reporters, memory_order_acquire) > 0)
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
}

struct cox_worker *cox_worker_free(struct cox_worker *worker)
{
    if (!worker)
        return NULL;
    /* A forked child has no threads and is not the rank: it only frees memory. */
    if (worker->own_pid == getpid()) {
        if (worker->started) {
            cox_worker_stop(worker);
            cox_worker_join(worker, NULL);
        }
        worker_await_reporters(worker);
        worker_leave(worker);
        guard_stop(worker);
        cox_stack_writer_stop(&worker->stacks);
        if (worker->follows_wrapper)
            prctl(PR_SET_PDEATHSIG, 0);
    }
    cox_table_free(worker->table);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        if (worker->threads[c].worker)
            cox_channel_thread_drop_payloads(&worker->threads[c]);
        cox_channel_close(&worker->threads[c].channel);
        cox_arena_deinit(&worker->threads[c].arena);
        free(worker->threads[c].copy);
    }
    cox_large_payload_sender_deinit(&worker->large_payloads);
    cox_channel_close(&worker->error_channel);
    worker->attached = cox_attach_leave(worker->attached);
    cox_close_fd(&worker->group_fd);
    cox_close_fd(&worker->notify_fd);
    cox_group_memory_unref(worker->group_memory);
    cox_recorder_unref(worker->recorder);
    cox_close_fd(&worker->socket_fd); /* it has left: see above */
    cox_peer_close(&worker->coordinator);
    cox_control_close(&worker->control);
    cox_close_fd(&worker->wake_fd);
    cox_close_fd(&worker->guard_fd);
    pthread_cond_destroy(&worker->error_cond);
    pthread_mutex_destroy(&worker->error_lock);
    cox_pause_deinit(&worker->pause);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        pthread_mutex_destroy(&worker->threads[c].payloads_lock);
        pthread_mutex_destroy(&worker->threads[c].lending.lock);
    }
    free(worker);
    return NULL;
}

uint32_t cox_worker_rank(const struct cox_worker *worker)
{
    return worker->options.rank;
}

void cox_worker_stop(struct cox_worker *worker)
{
    int saved = errno;
    uint64_t one = 1;
    atomic_store_explicit(&worker->stopping, true, memory_order_release);
    ssize_t written = write(worker->wake_fd, &one, sizeof one);
    (void)written; /* a full counter is as readable as one */
    errno = saved;
}

void cox_worker_finalized(struct cox_worker *worker)
{
    atomic_store_explicit(&worker->finalized, true, memory_order_release);
    atomic_store_explicit(&worker->stopping, true, memory_order_release);
}

void cox_worker_wake(struct cox_worker *worker, enum cox_channel_id channel)
{
    const int saved = errno;
    const uint64_t one = 1;
    if ((unsigned)channel >= COX_TWO_WAY_COUNT)
        return;
    /* seq_cst: a thread that enters next after the watcher has found none inside sees this. */
    atomic_store_explicit(&worker->threads[channel].lending.woken, true, memory_order_seq_cst);
    ssize_t written = write(worker->wake_fd, &one, sizeof one);
    (void)written; /* a full counter is as readable as one */
    errno = saved;
}

/* Returns true if a thread blocks in next that should return. */
static bool worker_wakes(const struct cox_worker *worker, int channel)
{
    return atomic_load_explicit(&worker->threads[channel].lending.woken, memory_order_seq_cst) &&
           atomic_load_explicit(&worker->threads[channel].lending.taking, memory_order_seq_cst);
}

/* Returns whether a thread was woken. In a legacy group tokens are events: one is posted, for the
 * end. */
static bool worker_wake_threads(struct cox_worker *worker, bool stopping, bool again)
{
    bool woken = false;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        if (!stopping && !(again && worker_wakes(worker, c)))
            continue;
        woken = true;
        cox_gate_wake(&worker->threads[c].channel.gate, worker->options.rank,
                      COX_WAKEUP_REQUEST_CONSUME);
    }
    return woken;
}

/* Waits until all channel threads have ended and no thread is inside next. Watches the coordinator
 * if the guard does not, and passes a stop on to channel threads that block, again and again: one
 * of them may be about to block on a word that this process cannot change, or that was overwritten.
 */
static int worker_watch(struct cox_worker *worker)
{
    /* Where tokens are counted no further ones may be posted. */
    const bool again = cox_worker_limits(worker)->rank_words;
    bool ringing = false, orphaned = false;
    int failed = 0;
    /* acquire: partner is the release of each channel thread's end. */
    while (atomic_load_explicit(&worker->running, memory_order_acquire) > 0 ||
           atomic_load_explicit(&worker->takers, memory_order_acquire) > 0 ||
           !cox_worker_stopping(worker)) {
        bool watches = !orphaned && !worker->guarded;
        struct pollfd fds[3] = {
            {.fd = worker->wake_fd, .events = POLLIN},
            {.fd = watches ? worker->coordinator.pidfd : -1, .events = POLLIN},
            {.fd = watches ? worker->socket_fd : -1, .events = POLLRDHUP},
        };
        int timeout_ms = ringing && again ? RING_AGAIN_MS : -1;
        /* the kernel has no memory: leave in order */
        if (poll(fds, 3, timeout_ms) < 0 && errno != EINTR) {
            failed = -errno;
            atomic_store_explicit(&worker->stopping, true, memory_order_release);
        }
        if (fds[1].revents || fds[2].revents) {
            orphaned = true;
            atomic_store_explicit(&worker->orphaned, true, memory_order_release);
            atomic_store_explicit(&worker->stopping, true, memory_order_release);
        }
        uint64_t count;
        ssize_t got = read(worker->wake_fd, &count, sizeof count);
        (void)got;
        bool stopping = atomic_load_explicit(&worker->stopping, memory_order_acquire);
        ringing = ringing && !again ? stopping : worker_wake_threads(worker, stopping, again);
    }
    return orphaned ? COX_PEER_DEAD : failed;
}

/* For channels that no caller takes from. On failure some may run; the end joins them. */
static int worker_start_threads(struct cox_worker *worker, uint32_t takes, struct cox_error *err)
{
    int r = 0;
    cox_pause_listen();
    worker->started = true;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_channel_thread *thread = &worker->threads[c];
        thread->spinner.budget_ns = worker->control.geometry.spin_ns;
        thread->lending.on = takes & COX_WORKER_TAKES(c);
        thread->channel.gate.signals_end = thread->lending.on;
    }
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        struct cox_channel_thread *thread = &worker->threads[c];
        if (thread->lending.on)
            continue;
        atomic_fetch_add_explicit(&worker->running, 1, memory_order_relaxed);
        r = cox_thread_start(&thread->id, cox_channel_thread_main, thread);
        thread->is_started = r == 0;
        if (r)
            atomic_fetch_sub_explicit(&worker->running, 1, memory_order_relaxed);
    }
    return r ? cox_fail(err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

/* The error that ended a channel thread; 0: the worker was stopped. */
static int worker_thread_failure(const struct cox_worker *worker, struct cox_error *err)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        if (worker->threads[c].failed)
            return cox_fail(err, worker->threads[c].failed,
                            "rank %" PRIu32
                            ", waiting for a request on the %s of the channel %s: %s",
                            worker->options.rank, worker->control.geometry.mode->wakeup_name,
                            cox_channel_name((enum cox_channel_id)c),
                            cox_status_text(worker->threads[c].failed));
    return 0;
}

/* After the watch: r is why the threads could not be started. */
static int worker_finish(struct cox_worker *worker, int r, int watched, struct cox_error *err)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        if (worker->threads[c].is_started)
            pthread_join(worker->threads[c].id, NULL);
    cox_pause_unlisten();
    worker_leave(worker);
    worker->started = false;
    if (r == 0 && watched)
        r = cox_fail(err, watched, "watching the coordinator (process %jd): %s",
                     (intmax_t)worker->coordinator.pid, cox_status_text(watched));
    if (r == 0)
        r = worker_thread_failure(worker, err);
    if (r == 0 && atomic_load_explicit(&worker->finalized, memory_order_acquire) &&
        worker->callbacks->finalize)
        worker->callbacks->finalize(worker->context);
    cox_fault_point(COX_FAULT_LEFT);
    return r;
}

int cox_worker_run(struct cox_worker *worker, struct cox_error *err)
{
    if (worker->started)
        return cox_fail(err, COX_BUSY, "this worker was started: cox_worker_join waits for it");
    const int r = worker_start_threads(worker, 0, err);
    if (r)
        cox_worker_stop(worker);
    return worker_finish(worker, r, worker_watch(worker), err);
}

static void *watcher_main(void *argument)
{
    struct cox_worker *worker = argument;
    worker->watched = worker_watch(worker);
    return NULL;
}

int cox_worker_start(struct cox_worker *worker, uint32_t takes, struct cox_error *err)
{
    if (err)
        cox_error_clear(err);
    if (worker->started)
        return cox_fail(err, COX_BUSY, "this worker was started before");
    if (takes >> COX_TWO_WAY_COUNT)
        return cox_fail(err, COX_INVALID, "channels 0x%" PRIx32 ": there are 0 to %d", takes,
                        COX_TWO_WAY_COUNT - 1);
    int r = worker_start_threads(worker, takes, err);
    if (r == 0) {
        r = cox_thread_start(&worker->watcher, watcher_main, worker);
        if (r)
            cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    }
    worker->has_watcher = r == 0;
    if (r) {
        cox_worker_stop(worker);
        worker_finish(worker, r, worker_watch(worker), NULL);
    }
    return r;
}

int cox_worker_join(struct cox_worker *worker, struct cox_error *err)
{
    if (err)
        cox_error_clear(err);
    if (!worker->has_watcher)
        return cox_fail(err, COX_STATE, "this worker was not started, or is joined already");
    pthread_join(worker->watcher, NULL);
    worker->has_watcher = false;
    return worker_finish(worker, 0, worker->watched, err);
}
