#include "worker.h"

#include <endian.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include "channel/base/options.h"
#include "channel/shm/reply.h"
#include "channel/base/thread.h"
#include "channel/shm/state.h"
#include "channel/base/tsan.h"
#include "proto/utf8.h"
#include "proto/executor.pb-c.h"
#include "worker/group/group_memory.h"
#include "legacy_shim.h"
#include "worker_internal.h"

#define REQUEST_SIZE_MAX (UINT64_C(256) << 20)
#define SEQUENCE_COUNT_MAX 4096
#define TOKEN_COUNT_MAX 131072
/* What an orphan leaves to whoever looks at exit statuses: EX_SOFTWARE. */
#define ORPHAN_EXIT_STATUS 70
#define RING_AGAIN_MS 1

/* ---- one channel thread ---- */

/* A rank that is not asked passes the frame without touching a wakeup. */
static void thread_pass(struct cox_channel_thread *thread, uint64_t sequence)
{
    cox_channel_thread_set_taken(thread, sequence);
    cox_channel_thread_set_returned(thread, sequence);
    cox_channel_thread_set_done(thread, sequence);
}

/* Somebody rang and there is no news: the coordinator does not see what this rank has said. Who is
 * asleep owes nothing, so all of it can be said again, as it was. */
static void thread_repeat(struct cox_channel_thread *thread)
{
    cox_channel_thread_set_taken(thread, thread->taken);
    cox_channel_thread_set_returned(thread, thread->returned);
    cox_channel_thread_set_done(thread, thread->done);
}

COX_HOT static bool thread_leaving(const struct cox_channel_thread *thread)
{
    return atomic_load_explicit(&thread->worker->stopping, memory_order_acquire) ||
           cox_state_aborted(&thread->worker->control);
}

struct thread_look {
    const struct cox_channel_thread *thread;
    const struct cox_layout_channel_state *shared;
    uint64_t published;
};

COX_HOT static bool thread_has_news(const void *context)
{
    const struct thread_look *look = context;
    return cox_state_published(look->shared) != look->published || thread_leaving(look->thread);
}

/* Sleeps until request `next` or a later one is published, and moves *next to what is still in the
 * ring. A number below what was published is said again by the coordinator, which rings for it.
 * False: the worker leaves. */
COX_HOT static bool thread_await(struct cox_channel_thread *thread, uint64_t *next)
{
    struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t depth = worker->control.geometry.depth;
    bool woken = false;
    for (;;) {
        /* Before the looks: what comes after them is not slept through. */
        uint32_t wake_sequence =
            cox_gate_wake_sequence(&thread->channel.gate, COX_WAKEUP_REQUEST_CONSUME);
        if (thread_leaving(thread))
            return false;
        cox_channel_thread_release_blocks(thread);
        const uint64_t said = cox_state_published(shared);
        uint64_t published = said;
        /* A frame that names this rank is not reused before it is returned: what is older than the
         * ring was for others. */
        if (published >= *next && published - *next >= depth) {
            /* Unless somebody wrote over the number: whoever followed it would never come back.
             * What was meant for this rank is still in its frame. */
            if (cox_state_frame_holds(shared, depth, published))
                *next = published - depth + 1;
            else if (cox_state_published(shared) != published)
                continue; /* a frame was taken again meanwhile, and the number has moved on */
            else
                published = cox_state_frame_holds(shared, depth, *next) ? *next : *next - 1;
        }
        if (published >= *next)
            return true;
        if (woken)
            thread_repeat(thread);
        /* What is said there, not what is believed of it: who looks for another number sleeps. */
        const struct thread_look look = {thread, shared, said};
        if (!woken && cox_spin_until(&thread->spinner, thread_has_news, &look, COX_DEADLINE_NEVER))
            continue;
        /* Nothing is owed: sleep without a timeout. The coordinator rings again if this wake-up got
         * lost. */
        int r = cox_gate_wait(&thread->channel.gate, worker->options.rank,
                              COX_WAKEUP_REQUEST_CONSUME, wake_sequence, COX_DEADLINE_NEVER);
        if (r < 0) {
            thread->failed = r;
            return false;
        }
        woken = true;
        /* Without a control region the token is the news, unless it is the one that stop rings
         * with. */
        if (r == 0 && worker->is_legacy_shim && !thread_leaving(thread))
            cox_legacy_shim_publish(&thread->channel, *next);
    }
}

/* Somebody wrote over `published`: the request is still to come, and with it a token. True: so it
 * was, and a token has come. */
static bool thread_is_misled(struct cox_channel_thread *thread, uint64_t next)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t wake_sequence =
        cox_gate_wake_sequence(&thread->channel.gate, COX_WAKEUP_REQUEST_CONSUME);
    if (!cox_state_frame_behind(shared, worker->control.geometry.depth, next))
        return false;
    cox_gate_wait(&thread->channel.gate, worker->options.rank, COX_WAKEUP_REQUEST_CONSUME,
                  wake_sequence, COX_DEADLINE_NEVER);
    return true;
}

COX_HOT static void *thread_main(void *argument)
{
    struct cox_channel_thread *thread = argument;
    struct cox_worker *worker = thread->worker;
    struct cox_gate *gate = &thread->channel.gate;
    uint32_t rank = worker->options.rank;
    uint64_t next = thread->taken + 1;
    bool goodbye = false;
    thread->self = pthread_self();
    thread->spinner.budget_ns = worker->control.geometry.spin_ns;
    cox_channel_thread_begin(thread);
    while (!goodbye && thread_await(thread, &next)) {
        struct cox_request request;
        int r = cox_request_read(&thread->channel, next, rank, &request);
        if (r == COX_EMPTY && !thread_is_misled(thread, next))
            thread_pass(thread, next++);
        if (r == COX_EMPTY)
            continue;
        cox_gate_absorb(gate, rank, COX_WAKEUP_REQUEST_CONSUME);
        /* Again for every request: an answer from another life is refused. */
        cox_state_set_life(thread->line, worker->control.epoch, worker->options.generation);
        cox_channel_thread_set_taken(thread, next);
        thread->stamp_ns = cox_state_stamp(cox_state_channel(&worker->control, thread->channel.id));
        if (thread->stamp_ns == 0)
            thread->stamp_ns = cox_now_coarse_ns();
        cox_state_set_rank(thread->line, COX_RANK_TAKEN, next, thread->stamp_ns);
        if (r)
            cox_channel_thread_refuse(thread, &request, r, "the frame has an impossible length");
        else
            goodbye = cox_channel_thread_serve(thread, &request);
        cox_state_set_rank(thread->line, COX_RANK_IDLE, next, thread->stamp_ns);
        next++;
    }
    cox_channel_thread_end(thread);
    if (goodbye) {
        atomic_store_explicit(&worker->finalized, true, memory_order_release);
        atomic_store_explicit(&worker->stopping, true, memory_order_release);
    }
    atomic_fetch_sub_explicit(&worker->running, 1, memory_order_release);
    cox_worker_stop(worker); /* the goodbye of one channel is the goodbye of all; and wakes run */
    return NULL;
}

/* ---- faults ---- */

static int worker_write_fault(struct cox_worker *worker, int channel, uint64_t sequence,
                              const char *text)
{
    size_t capacity, length;
    uint8_t *base = cox_reply_report(&worker->error_channel, worker->options.rank, &capacity);
    char cut[768];
    snprintf(cut, sizeof cut, "%s", text);
    cox_text_trim(cut);
    cox_utf8_mend(cut);
    /* The text stands where legacy coordinators look for it. */
    Coxswain__ExecuteModelResponse body = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    body.err_msg = cut;
    Coxswain__ExecuteResponse report = COXSWAIN__EXECUTE_RESPONSE__INIT;
    report.has_msg_type = 1;
    report.msg_type = COXSWAIN__EXECUTE_TYPE__EXECUTE_ERROR;
    report.has_rank = 1;
    report.rank = (int32_t)worker->options.rank;
    report.has_status = 1;
    report.status = worker->is_legacy_shim ? 0 : 1; /* a legacy coordinator drops any other */
    report.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    report.execute_model_response = &body;
    if (channel >= 0) {
        report.has_error_channel = 1;
        report.error_channel = (uint32_t)channel;
        report.has_error_sequence = 1;
        report.error_sequence = sequence;
    }
    int r;
    /* Halve the text until it fits: a region may be as small as 256 bytes. */
    while ((r = cox_wire_response_pack(&report, base + COX_PREFIX_SIZE, capacity, &length)) ==
               COX_TOO_LARGE &&
           cut[0]) {
        cut[strlen(cut) / 2] = '\0';
        cox_text_trim(cut);
    }
    if (r)
        return r;
    uint32_t prefix = htole32((uint32_t)length);
    memcpy(base, &prefix, sizeof prefix);
    return 0;
}

static bool worker_stopping(const struct cox_worker *worker)
{
    return atomic_load_explicit(&worker->stopping, memory_order_acquire);
}

/* One report at a time from this process, each until its own deadline. */
static int worker_enter_fault(struct cox_worker *worker, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&worker->error_lock);
    while (worker->reporting && !worker_stopping(worker) && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&worker->error_cond, &worker->error_lock, &until);
    int r = worker_stopping(worker) ? COX_CLOSED : worker->reporting ? COX_TIMEOUT : 0;
    if (r == 0)
        worker->reporting = true;
    pthread_mutex_unlock(&worker->error_lock);
    return r;
}

static void worker_leave_fault(struct cox_worker *worker)
{
    pthread_mutex_lock(&worker->error_lock);
    worker->reporting = false;
    pthread_cond_broadcast(
        &worker->error_cond); /* who finds that the worker leaves passes nothing on */
    pthread_mutex_unlock(&worker->error_lock);
}

/* Named groups have one slot for all ranks, and one token that is the right to it; in a sealed one
 * every rank has its own, and waits until its last report was taken out. */
static int worker_await_report(struct cox_worker *worker, uint64_t deadline_ns)
{
    if (worker->control.geometry.sealed)
        return cox_sealed_await_heard(&worker->control, worker->options.rank,
                                      worker->report_count + 1, deadline_ns);
    int r =
        cox_gate_wait(&worker->error_channel.gate, 0, COX_WAKEUP_RESPONSE_PRODUCE, 0, deadline_ns);
    return r == COX_EMPTY ? COX_TIMEOUT : r; /* another one has the token */
}

/* written: there is a report in the slot. */
static void worker_post_report(struct cox_worker *worker, bool written)
{
    struct cox_gate *gate = &worker->error_channel.gate;
    if (!worker->control.geometry.sealed) {
        cox_gate_post(gate, 0, written ? COX_WAKEUP_RESPONSE_CONSUME : COX_WAKEUP_RESPONSE_PRODUCE);
    } else if (written) {
        cox_state_set_done(
            cox_state_line(&worker->control, worker->options.rank, COX_CHANNEL_ERROR),
            ++worker->report_count);
        cox_gate_post(gate, worker->options.rank, COX_WAKEUP_RESPONSE_CONSUME);
    }
}

static int worker_tell(struct cox_worker *worker, int channel, uint64_t sequence, const char *text,
                       uint64_t deadline_ns)
{
    struct cox_layout_rank_line *line =
        cox_state_line(&worker->control, worker->options.rank, COX_CHANNEL_ERROR);
    int r = worker_enter_fault(worker, deadline_ns);
    if (r)
        return r; /* another report of this process waits for the slot */
    /* TAKEN: waits for the slot, REPLYING: has it. Said before the wait, so that the coordinator
     * looks for the token of whoever dies with it in its hand, see error_channel.h of the
     * coordinator. */
    cox_state_set_rank(line, COX_RANK_TAKEN, sequence, cox_now_ns());
    do { /* once also when the deadline has passed */
        r = worker_stopping(worker)
                ? COX_CLOSED
                : worker_await_report(worker,
                                      cox_deadline_min(deadline_ns, cox_deadline_after_ms(50)));
        /* Another rank can have made the coordinator sleep through the last one. */
        if (r == COX_TIMEOUT && worker->control.geometry.sealed)
            cox_gate_post(&worker->error_channel.gate, worker->options.rank,
                          COX_WAKEUP_RESPONSE_CONSUME);
    } while (r == COX_TIMEOUT && cox_now_ns() < deadline_ns);
    if (r == 0) {
        cox_state_set_rank(line, COX_RANK_REPLYING, sequence, cox_now_ns());
        cox_fault_point(COX_FAULT_REPORT_CLAIMED);
        cox_tsan_acquire(worker->error_channel.response.base); /* see faults_fetch */
        r = worker_write_fault(worker, channel, sequence, text);
        cox_tsan_release(worker->error_channel.response.base);
        cox_fault_point(COX_FAULT_REPORT_WRITTEN);
        worker_post_report(worker, r == 0);
    }
    cox_state_set_rank(line, COX_RANK_IDLE, sequence, cox_now_ns());
    worker_leave_fault(worker);
    return r;
}

int cox_worker_tell(struct cox_worker *worker, int channel, uint64_t sequence, const char *text,
                    uint64_t deadline_ns)
{
    cox_visit_hold(); /* left in between, it would leave its locks behind */
    /* acq_rel: partner is the acquire in free; who went has let go of everything. */
    atomic_fetch_add_explicit(&worker->reporters, 1, memory_order_acq_rel);
    int r = worker_tell(worker, channel, sequence, text, deadline_ns);
    atomic_fetch_sub_explicit(&worker->reporters, 1, memory_order_acq_rel);
    cox_visit_release();
    return r;
}

int cox_worker_report_fault(struct cox_worker *worker, const char *text, uint64_t deadline_ns)
{
    return cox_worker_tell(worker, -1, 0, text, deadline_ns);
}

/* ---- life ---- */

/* ---- the guard: the end of an orphan, from new to free, whatever the host's own threads do ----
 */

static void *guard_main(void *argument)
{
    struct cox_worker *worker = argument;
    for (;;) {
        struct pollfd fds[3] = {
            {.fd = worker->guard_fd, .events = POLLIN},
            {.fd = worker->coordinator.pidfd, .events = POLLIN},
            {.fd = worker->door_fd, .events = POLLRDHUP},
        };
        int count = poll(fds, 3, -1);
        if (count > 0 && fds[0].revents)
            return NULL;
        if (count > 0)
            _exit(ORPHAN_EXIT_STATUS);
        if (errno != EINTR) /* no memory in the kernel; it may pass */
            nanosleep(&(struct timespec){.tv_nsec = 50 * (long)COX_NSEC_PER_MSEC}, NULL);
    }
}

static int guard_start(struct cox_worker *worker, struct cox_error *err)
{
    if (worker->options.on_orphan != COX_ORPHAN_EXIT)
        return 0; /* run looks itself */
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

/* With a door the group need not be named. */
static int worker_check_options(const struct cox_worker_options *options, struct cox_error *err)
{
    if (options->door[0] && !options->prefix[0])
        return 0;
    if (options->prefix[0] != '/')
        return cox_fail(err, COX_INVALID, "the prefix '%s' does not start with a slash",
                        options->prefix);
    return cox_name_check(options->prefix + 1, err);
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
    if (!worker->options.generation && !worker->options.door[0])
        worker->options.generation = 1;
    worker->callbacks_copy = known_callbacks;
    worker->callbacks = &worker->callbacks_copy;
    worker->context = context;
    worker->own_pid = getpid();
    worker->control.lock_fd = -1;
    worker->coordinator.pidfd = -1;
    worker->door_fd = worker->group_fd = -1;
    cox_inherit_init(&worker->inherit);
    cox_sealed_init(&worker->sealed);
    pthread_mutex_init(&worker->error_lock, NULL);
    cox_condition_init(&worker->error_cond);
    cox_pause_init(&worker->pause);
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
        r = cox_worker_claim(worker, self, err);
    if (r == 0)
        r = cox_worker_attach_channels(worker, err);
    cox_inherit_close(&worker->inherit);
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
                        &cox_state_channel(&worker->control, COX_CHANNEL_EXECUTE)->void_through);
        cox_table_watch_pause(worker->table, &worker->threads[COX_CHANNEL_EXECUTE].visit.told);
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

/* Nobody needs to wait for this rank any more, though the process may live on. The coordinator
 * looks by itself, once a slice. */
static void worker_leave(struct cox_worker *worker)
{
    if (worker->claimed)
        cox_state_set_left(cox_worker_identity(worker));
    worker->claimed = false;
}

/* Whoever is inside a report comes out with COX_CLOSED, within a slice. */
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
    /* The child of a fork has none of the threads, and is not the rank: it only lets go of memory.
     */
    if (worker->own_pid == getpid()) {
        worker_await_reporters(worker);
        worker_leave(worker);
        guard_stop(worker);
        if (worker->follows_wrapper)
            prctl(PR_SET_PDEATHSIG, 0);
    }
    cox_table_free(worker->table);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        if (worker->threads[c].worker)
            cox_channel_thread_drop_blocks(&worker->threads[c]);
        cox_channel_close(&worker->threads[c].channel);
        cox_arena_deinit(&worker->threads[c].arena);
        free(worker->threads[c].copy);
    }
    cox_large_payload_sender_deinit(&worker->large_payloads);
    cox_channel_close(&worker->error_channel);
    cox_sealed_close(&worker->sealed);
    cox_close_fd(&worker->group_fd);
    cox_group_memory_unref(worker->group_memory);
    cox_close_fd(&worker->door_fd); /* it has left: see above */
    cox_peer_close(&worker->coordinator);
    cox_control_close(&worker->control);
    cox_close_fd(&worker->wake_fd);
    cox_close_fd(&worker->guard_fd);
    pthread_cond_destroy(&worker->error_cond);
    pthread_mutex_destroy(&worker->error_lock);
    cox_pause_deinit(&worker->pause);
    free(worker);
    return NULL;
}

uint32_t cox_worker_rank(const struct cox_worker *worker)
{
    return worker->options.rank;
}

uint32_t cox_worker_rank_count(const struct cox_worker *worker)
{
    return worker->options.rank_count;
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

static void worker_wake_threads(struct cox_worker *worker)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_gate_wake(&worker->threads[c].channel.gate, worker->options.rank,
                      COX_WAKEUP_REQUEST_CONSUME);
}

/* Waits until all channel threads have ended; watches the coordinator where the guard does not, and
 * passes a stop on to channel threads that sleep: again and again, since one of them may be about
 * to fall asleep, on a word that is not this process's to change, or that somebody has written
 * over. */
static int worker_watch(struct cox_worker *worker)
{
    /* Where somebody counts the tokens there may be no more of them. */
    const bool again = !worker->is_legacy_shim && !worker->control.geometry.legacy;
    bool ringing = false, orphaned = false;
    int failed = 0;
    /* acquire: partner is the release of each channel thread's end. */
    while (atomic_load_explicit(&worker->running, memory_order_acquire) > 0) {
        bool watches = !orphaned && !worker->guarded;
        struct pollfd fds[3] = {
            {.fd = worker->wake_fd, .events = POLLIN},
            {.fd = watches ? worker->coordinator.pidfd : -1, .events = POLLIN},
            {.fd = watches ? worker->door_fd : -1, .events = POLLRDHUP},
        };
        int timeout_ms = ringing && again ? RING_AGAIN_MS : -1;
        /* no memory in the kernel: leave in order */
        if (poll(fds, 3, timeout_ms) < 0 && errno != EINTR) {
            failed = -errno;
            atomic_store_explicit(&worker->stopping, true, memory_order_release);
        }
        if (fds[1].revents || fds[2].revents) {
            orphaned = true;
            atomic_store_explicit(&worker->stopping, true, memory_order_release);
        }
        uint64_t count;
        ssize_t got = read(worker->wake_fd, &count, sizeof count);
        (void)got;
        bool stopping = atomic_load_explicit(&worker->stopping, memory_order_acquire);
        if (stopping && (!ringing || again))
            worker_wake_threads(worker);
        ringing = stopping;
    }
    return orphaned ? COX_PEER_DEAD : failed;
}

int cox_worker_run(struct cox_worker *worker, struct cox_error *err)
{
    int started = 0, r = 0;
    cox_pause_listen();
    atomic_store_explicit(&worker->running, COX_TWO_WAY_COUNT, memory_order_relaxed);
    for (; started < COX_TWO_WAY_COUNT; started++) {
        r = cox_thread_start(&worker->threads[started].id, thread_main, &worker->threads[started]);
        if (r) {
            cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
            atomic_fetch_sub_explicit(&worker->running, (uint32_t)(COX_TWO_WAY_COUNT - started),
                                      memory_order_relaxed);
            cox_worker_stop(worker);
            break;
        }
    }
    int watched = worker_watch(worker);
    for (int c = 0; c < started; c++)
        pthread_join(worker->threads[c].id, NULL);
    cox_pause_unlisten();
    worker_leave(worker);
    if (r == 0 && watched)
        r = cox_fail(err, watched, "watching the coordinator (process %jd): %s",
                     (intmax_t)worker->coordinator.pid, cox_status_text(watched));
    for (int c = 0; r == 0 && c < started; c++)
        if (worker->threads[c].failed)
            r = cox_fail(err, worker->threads[c].failed,
                         "rank %" PRIu32 ", waiting for a request on the %s of the channel %s: %s",
                         worker->options.rank,
                         worker->control.geometry.sealed ? "futex" : "semaphore",
                         cox_channel_name((enum cox_channel_id)c),
                         cox_status_text(worker->threads[c].failed));
    if (r == 0 && atomic_load_explicit(&worker->finalized, memory_order_acquire) &&
        worker->callbacks->finalize)
        worker->callbacks->finalize(worker->context);
    cox_fault_point(COX_FAULT_LEFT);
    return r;
}
