/*
 * pause: a callback is cancelled: first asked to return, then interrupted by signals, then
 * abandoned.
 *
 * Why no callback begins after a pause. A channel thread stores `inside`, then reads `paused`; a
 * pause stores `paused`, then reads `inside`, all seq_cst: at least one of them sees the other. If
 * the channel thread does, the request is refused; if the pause does, it waits. If both do, the
 * pause waits for a callback that returns at once.
 *
 * Why the jump is safe. A running callback is abandoned by siglongjmp out of the handler of SIGURG,
 * to the sigsetjmp in call_leavable. The handler runs on the channel thread, between two
 * of its instructions. So the value of `inside` that it reads is the one the channel thread has
 * stored last, and cannot change before the jump. It jumps only if `inside` is not 0. `inside` is
 * stored after sigsetjmp and cleared before call_leavable returns, so the jump's target
 * is valid, and its frame is still on the stack below the handler. Three moments need attention:
 *   - The callback has just returned, and `inside` is not cleared yet. The jump is taken: a
 *     finished reply is lost, and the request is replied to with COX_ABORTED, as if the signal had
 *     come a moment earlier. Nothing was committed: the channel thread does that after
 *     cox_channel_thread_call. What follows the jump stores the end of the callback, and does not
 *     count it: the count may have been stored already.
 *   - `inside` is cleared. A signal that was meant for the callback, however late, finds 0 and
 *     returns.
 *   - The next callback is running when the signal arrives. The signal is for `leave`, the number
 *     of the previous one. Numbers are not reused, so the handler returns.
 * A pause never stores the number of a callback that must not be abandoned in `leave`: it reads
 * `leavable` after `inside`, which is stored after `leavable`. If the callback has ended meanwhile,
 * it is one of the three cases above.
 *
 * Why signals reach no other thread. They are sent with pthread_kill, under the lock, and only
 * while the thread is `reachable`; the channel thread clears that under the same lock before it
 * ends. Only channel threads with callbacks have SIGURG unblocked. A signal that finds the channel
 * thread outside a callback interrupts at most a wait of the library, which continues.
 *
 * What is consistent after a jump. A callback uses these parts of the library: the arena that it
 * was lent, the outputs, the error, and possibly a fault report. A report has locks, so signals are
 * held off in it (`held`: a signal that comes then does nothing, the next one will). The arena may
 * be in the middle of an allocation, so it is abandoned as it is and a new one is begun; its
 * memory, with the request in it, leaks. Outputs are not read. The error is set again. The signal
 * mask of the thread is restored, as the end of the handler would have done. The rest is what the
 * channel thread does after a callback that returned COX_ABORTED.
 *
 * Why the end of a callback is not missed. A pause stores `awaiting` before it reads `inside`; the
 * channel thread clears `inside` before it reads `awaiting`, all seq_cst, and wakes under the lock,
 * which the pause releases only by waiting.
 */
#include "pause.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "worker_internal.h"

#include <inttypes.h>
#include <string.h>

#define GRACE_MS_DEFAULT 500
#define GRACE_MS_MAX (UINT64_C(24) * 3600 * 1000)
/* Repeated, because a signal may arrive just before the call that it should interrupt. */
#define URGE_AGAIN_NS (50 * COX_NSEC_PER_MSEC)

static const enum cox_channel_id channels[] = {COX_CHANNEL_EXECUTE, COX_CHANNEL_TRANSFER};
#define PAUSABLE_COUNT (sizeof channels / sizeof channels[0])

/* The channel thread that is running; NULL on other threads. For the handler, which has no argument
 * for it. */
static _Thread_local struct cox_channel_thread *own_thread;

static struct {
    pthread_mutex_t lock;
    uint32_t users;
    struct sigaction before;
} urge = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool has_pausable(const struct cox_channel_thread *thread)
{
    return thread->channel.id == COX_CHANNEL_EXECUTE || thread->channel.id == COX_CHANNEL_TRANSFER;
}

/* ---- signals ---- */

/* A handler that was installed before, such as a language runtime's, still gets the signal on all
 * other threads. */
static void urge_forward(int number, siginfo_t *info, void *context)
{
    if (urge.before.sa_flags & SA_SIGINFO)
        urge.before.sa_sigaction(number, info, context);
    else if (urge.before.sa_handler != SIG_DFL && urge.before.sa_handler != SIG_IGN)
        urge.before.sa_handler(number);
}

static void on_urge(int number, siginfo_t *info, void *context)
{
    struct cox_channel_thread *thread = own_thread;
    if (!thread) {
        urge_forward(number, info, context);
        return;
    }
    if (thread->running.held)
        return;
    /* relaxed: this thread's own. */
    uint64_t inside = atomic_load_explicit(&thread->running.inside, memory_order_relaxed);
    /* acquire; partner: callback_urge. */
    if (inside && atomic_load_explicit(&thread->running.leave, memory_order_acquire) == inside)
        siglongjmp(thread->running.frame, 1);
}

void cox_pause_listen(void)
{
    /* No SA_RESTART: blocking calls should return. SA_ONSTACK for threads of runtimes with small
     * stacks. */
    struct sigaction action = {.sa_sigaction = on_urge, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    pthread_mutex_lock(&urge.lock);
    if (urge.users++ == 0) {
        /* Before the handler can use it. */
        sigaction(SIGURG, NULL, &urge.before);
        sigaction(SIGURG, &action, NULL);
    }
    pthread_mutex_unlock(&urge.lock);
}

void cox_pause_unlisten(void)
{
    struct sigaction present;
    pthread_mutex_lock(&urge.lock);
    /* A handler that was installed since stays. */
    if (--urge.users == 0 && sigaction(SIGURG, NULL, &present) == 0 &&
        (present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_urge)
        sigaction(SIGURG, &urge.before, NULL);
    pthread_mutex_unlock(&urge.lock);
}

/* ---- a channel thread ---- */

void cox_pause_init(struct cox_pause *pause)
{
    pthread_mutex_init(&pause->lock, NULL);
    cox_condition_init(&pause->out);
}

void cox_pause_deinit(struct cox_pause *pause)
{
    pthread_cond_destroy(&pause->out);
    pthread_mutex_destroy(&pause->lock);
}

void cox_channel_thread_begin(struct cox_channel_thread *thread)
{
    if (!has_pausable(thread))
        return;
    struct cox_pause *pause = &thread->worker->pause;
    sigset_t urged;
    own_thread = thread;
    sigemptyset(&urged);
    sigaddset(&urged, SIGURG);
    pthread_sigmask(SIG_UNBLOCK, &urged, NULL);
    pthread_sigmask(SIG_SETMASK, NULL, &thread->running.mask);
    pthread_mutex_lock(&pause->lock);
    thread->running.thread = pthread_self();
    thread->running.reachable = true;
    pthread_mutex_unlock(&pause->lock);
}

void cox_channel_thread_end(struct cox_channel_thread *thread)
{
    if (!has_pausable(thread))
        return;
    pthread_mutex_lock(&thread->worker->pause.lock);
    thread->running.reachable = false;
    pthread_mutex_unlock(&thread->worker->pause.lock);
    own_thread = NULL;
}

void cox_worker_allow_leave(bool allow)
{
    if (own_thread)
        own_thread->running.held = !allow;
}

COX_HOT static inline bool running_begin(struct cox_channel_thread *thread, bool leavable)
{
    struct cox_running_callback *running = &thread->running;
    const struct cox_request *request = &thread->served.request;
    running->count++;
    /* relaxed: before `inside`, which is stored seq_cst. */
    atomic_store_explicit(&running->leavable, leavable, memory_order_relaxed);
    atomic_store_explicit(&running->kind, request->type, memory_order_relaxed);
    atomic_store_explicit(&running->since_ns, thread->stamp_ns, memory_order_relaxed);
    atomic_store_explicit(&running->inside, request->sequence, memory_order_seq_cst);
    return !cox_worker_paused(thread->worker);
}

/* May be begun again by a jump: see the head of this file. */
COX_HOT static inline void running_none(struct cox_channel_thread *thread)
{
    struct cox_pause *pause = &thread->worker->pause;
    thread->running.count = 0;
    atomic_store_explicit(&thread->running.inside, 0, memory_order_seq_cst);
    if (atomic_load_explicit(&pause->awaiting, memory_order_seq_cst) == 0)
        return;
    pthread_mutex_lock(&pause->lock);
    pthread_cond_broadcast(&pause->out);
    pthread_mutex_unlock(&pause->lock);
}

COX_HOT static inline void running_end(struct cox_channel_thread *thread)
{
    if (thread->running.count > 1)
        thread->running.count--;
    else
        running_none(thread);
}

bool cox_running_callback_begin(struct cox_channel_thread *thread)
{
    return running_begin(thread, false);
}

void cox_running_callback_end(struct cox_channel_thread *thread)
{
    running_end(thread);
}

static const char *kind_name(uint32_t kind)
{
    return kind == COX_TYPE_OPAQUE ? "an opaque request" : cox_wire_type_name(kind);
}

/* After the jump. */
static int callback_left(struct cox_channel_thread *thread)
{
    const struct cox_request *request = &thread->served.request;
    const uint64_t since_ns = atomic_load_explicit(&thread->running.since_ns, memory_order_relaxed);
    const size_t size_max = thread->arena.size_max;
    running_none(thread);
    pthread_sigmask(SIG_SETMASK, &thread->running.mask, NULL);
    cox_arena_init(&thread->arena, 0, size_max);
    thread->error = (struct cox_error){0};
    return cox_fail(&thread->error, COX_ABORTED,
                    "%s, number %" PRIu64 ", was left after %" PRIu64
                    " ms in the worker's callback, which did not come out when it was paused",
                    kind_name(request->type), request->sequence,
                    (cox_now_ns() - since_ns) / COX_NSEC_PER_MSEC);
}

int cox_channel_thread_fail_paused(struct cox_channel_thread *thread)
{
    return cox_fail(&thread->error, COX_ABORTED, "paused: this rank begins nothing until a start");
}

COX_HOT static inline int call_back(struct cox_channel_thread *thread, bool leavable, bool pausable,
                                    int (*callback)(struct cox_channel_thread *thread))
{
    struct cox_lending *lending = &thread->lending;
    cox_lending_lock(lending);
    const bool may = running_begin(thread, leavable) || !pausable;
    cox_lending_unlock(lending);
    const int r = may ? callback(thread) : cox_channel_thread_fail_paused(thread);
    cox_lending_lock(lending);
    running_end(thread);
    cox_lending_unlock(lending);
    return r;
}

/* Separate: the usual way saves no registers for the jump. */
__attribute__((noinline)) static int call_leavable(
    struct cox_channel_thread *thread, int (*callback)(struct cox_channel_thread *thread))
{
    if (sigsetjmp(thread->running.frame, 0) != 0) /* to save the mask would be a system call */
        return callback_left(thread);
    return call_back(thread, true, true, callback);
}

COX_HOT int cox_channel_thread_call(struct cox_channel_thread *thread, enum cox_callback_kind kind,
                                    int (*callback)(struct cox_channel_thread *thread))
{
    const bool pausable = kind == COX_CALLBACK_PAUSABLE;
    if (pausable && thread->worker->options.leave_stuck && !thread->lending.on)
        return call_leavable(thread, callback);
    return call_back(thread, false, pausable, callback);
}

/* ---- a pause ---- */

enum stage { STAGE_ASKED, STAGE_URGED, STAGE_LEFT };

/* The callbacks that one pause waits for, by channel; 0: none. */
struct wait {
    struct cox_worker *worker;
    uint64_t numbers[PAUSABLE_COUNT];
};

static struct cox_running_callback *running_of(const struct wait *wait, size_t i)
{
    return &wait->worker->threads[channels[i]].running;
}

static bool callback_is_running(const struct wait *wait, size_t i)
{
    const uint64_t inside =
        atomic_load_explicit(&running_of(wait, i)->inside, memory_order_seq_cst);
    /* Of lent requests `inside` has the newest, until all are replied to. */
    const bool lending = wait->worker->threads[channels[i]].lending.on;
    return wait->numbers[i] &&
           (inside == wait->numbers[i] || (lending && inside > wait->numbers[i]));
}

static bool wait_is_over(const struct wait *wait)
{
    bool over = true;
    for (size_t i = 0; i < PAUSABLE_COUNT; i++)
        over = over && !callback_is_running(wait, i);
    return over;
}

/* Cancels the callbacks; others return by themselves, or are allowed to finish. */
static void wait_tell(struct wait *wait)
{
    for (size_t i = 0; i < PAUSABLE_COUNT; i++) {
        struct cox_running_callback *running = running_of(wait, i);
        wait->numbers[i] = atomic_load_explicit(&running->inside, memory_order_seq_cst);
        /* relaxed load: stored under the lock only. release; partner: the acquire of the callback's
         * check, which then sees that it is cancelled. */
        if (wait->numbers[i] >
            atomic_load_explicit(&running->cancel_sequence, memory_order_relaxed))
            atomic_store_explicit(&running->cancel_sequence, wait->numbers[i],
                                  memory_order_release);
    }
}

static bool wait_may_leave(const struct wait *wait)
{
    bool may = false;
    for (size_t i = 0; i < PAUSABLE_COUNT; i++)
        may = may || (callback_is_running(wait, i) &&
                      atomic_load_explicit(&running_of(wait, i)->leavable, memory_order_relaxed));
    return may;
}

static void wait_urge(const struct wait *wait, enum stage stage)
{
    for (size_t i = 0; i < PAUSABLE_COUNT; i++) {
        struct cox_running_callback *running = running_of(wait, i);
        /* relaxed: see the head of this file */
        const bool leavable = atomic_load_explicit(&running->leavable, memory_order_relaxed);
        if (!callback_is_running(wait, i) || !running->reachable)
            continue;
        /* release; partner: on_urge */
        if (stage == STAGE_LEFT && leavable)
            atomic_store_explicit(&running->leave, wait->numbers[i], memory_order_release);
        pthread_kill(running->thread, SIGURG);
    }
}

static int wait_fail(const struct wait *wait, struct cox_error *err)
{
    size_t i = 0;
    while (i + 1 < PAUSABLE_COUNT && !callback_is_running(wait, i))
        i++;
    const struct cox_running_callback *running = running_of(wait, i);
    /* relaxed, both: for the error text */
    const uint64_t since_ns = atomic_load_explicit(&running->since_ns, memory_order_relaxed);
    const uint32_t kind = atomic_load_explicit(&running->kind, memory_order_relaxed);
    return cox_fail(err, COX_TIMEOUT,
                    "stuck for %" PRIu64 " ms in the callback of %s, number %" PRIu64
                    " on the %s channel: it stays paused; replace the rank if it does not come out",
                    (cox_now_ns() - since_ns) / COX_NSEC_PER_MSEC, kind_name(kind),
                    wait->numbers[i], cox_channel_name(channels[i]));
}

/* Under the lock. Returns false if a callback is still running after the grace period. */
static bool wait_until_over(struct wait *wait, uint64_t grace_ns)
{
    struct cox_pause *pause = &wait->worker->pause;
    enum stage stage = STAGE_ASKED;
    uint64_t end_ns = cox_deadline_after_ns(grace_ns);
    while (!wait_is_over(wait)) {
        const uint64_t now = cox_now_ns();
        if (now >= end_ns &&
            (stage == STAGE_LEFT || (stage == STAGE_URGED && !wait_may_leave(wait))))
            return false;
        if (now >= end_ns) {
            stage++;
            end_ns = now + grace_ns; /* also if this thread is late: each stage has its time */
        }
        if (stage != STAGE_ASKED)
            wait_urge(wait, stage);
        const struct timespec until = cox_deadline_timespec(
            stage == STAGE_ASKED ? end_ns : cox_deadline_min(end_ns, now + URGE_AGAIN_NS));
        pthread_cond_timedwait(&pause->out, &pause->lock, &until);
    }
    return true;
}

int cox_worker_pause(struct cox_worker *worker, uint64_t grace_ms, struct cox_error *err)
{
    struct cox_pause *pause = &worker->pause;
    struct wait wait = {.worker = worker};
    COX_ASSERT(!own_thread || own_thread->worker != worker);
    if (grace_ms == 0)
        grace_ms = GRACE_MS_DEFAULT;
    if (grace_ms > GRACE_MS_MAX)
        grace_ms = GRACE_MS_MAX;
    pthread_mutex_lock(&pause->lock);
    atomic_fetch_add_explicit(&pause->awaiting, 1, memory_order_seq_cst);
    atomic_store_explicit(&pause->paused, true, memory_order_seq_cst);
    wait_tell(&wait);
    int r = 0;
    /* Checked once more: a callback that has just returned is not reported as stuck. */
    if (!wait_until_over(&wait, grace_ms * COX_NSEC_PER_MSEC) && !wait_is_over(&wait))
        r = wait_fail(&wait, err);
    atomic_fetch_sub_explicit(&pause->awaiting, 1, memory_order_seq_cst);
    pthread_mutex_unlock(&pause->lock);
    return r;
}

void cox_worker_resume(struct cox_worker *worker)
{
    atomic_store_explicit(&worker->pause.paused, false, memory_order_seq_cst);
}

bool cox_worker_paused(const struct cox_worker *worker)
{
    return atomic_load_explicit(&worker->pause.paused, memory_order_seq_cst);
}

bool cox_worker_cancelled(const struct cox_worker *worker, enum cox_channel_id channel,
                          uint64_t sequence)
{
    COX_ASSERT(channel == COX_CHANNEL_EXECUTE || channel == COX_CHANNEL_TRANSFER);
    const struct cox_running_callback *running = &worker->threads[channel].running;
    /* relaxed: this thread's own. */
    if (sequence == 0)
        sequence = atomic_load_explicit(&running->inside, memory_order_relaxed);
    return cox_state_cancelled(cox_state_channel(&worker->control, channel),
                               worker->control.geometry.depth, sequence) ||
           cox_state_aborted(&worker->control) ||
           /* acquire; partner: wait_tell. */
           atomic_load_explicit(&running->cancel_sequence, memory_order_acquire) >= sequence;
}

bool cox_worker_busy(const struct cox_worker *worker)
{
    bool busy = false;
    for (size_t i = 0; i < PAUSABLE_COUNT; i++)
        busy = busy || atomic_load_explicit(&worker->threads[channels[i]].running.inside,
                                            memory_order_seq_cst) != 0;
    return busy;
}
