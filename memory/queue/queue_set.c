/* Waits on several queues: on the futex of each subscriber, and on one of the set that trigger
 * increments. */
#include "queue_set.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "queue_internal.h"

#include <stdlib.h>

#define SET_MAX 64
#ifndef SYS_futex_waitv /* Linux 5.16 */
#define SYS_futex_waitv 449
#endif
#define WAITER_SIZE_U32 2 /* FUTEX_32 */
/* Poll interval without futex_waitv. */
#define FALLBACK_SLICE_NS (10 * COX_NSEC_PER_MSEC)
/* Limit for one queue's lock: its owner may be stopped, and the other queues, triggers and the
 * deadline must not wait. */
#define LOCK_SLICE_NS (10 * COX_NSEC_PER_MSEC)

/* The kernel's struct futex_waitv, which older headers lack. */
struct waiter {
    uint64_t value, address;
    uint32_t flags, reserved;
};

struct cox_queue_set {
    struct cox_subscriber *subscribers[SET_MAX];
    uint32_t count, turn;
    /* incremented by trigger; reported ones are in reported */
    _Atomic uint32_t triggers;
    uint32_t reported;
    /* the kernel has no futex_waitv */
    bool one_word;
};

int cox_queue_set_new(struct cox_queue_set **ret_set)
{
    struct cox_queue_set *set = calloc(1, sizeof *set);
    if (!set)
        return -ENOMEM;
    *ret_set = set;
    return 0;
}

struct cox_queue_set *cox_queue_set_free(struct cox_queue_set *set)
{
    for (uint32_t i = 0; set && i < set->count; i++)
        set->subscribers[i]->set = NULL;
    free(set);
    return NULL;
}

#if COX_TESTING
void cox_queue_set_use_one_word(struct cox_queue_set *set)
{
    set->one_word = true;
}
#endif

int cox_queue_set_add(struct cox_queue_set *set, struct cox_subscriber *subscriber,
                      struct cox_error *err)
{
    if (subscriber->set)
        return cox_fail(err, COX_BUSY, "the subscriber is in %s",
                        subscriber->set == set ? "this set" : "another set");
    if (set->count == SET_MAX)
        return cox_fail(err, COX_FULL, "a set has %d subscribers at most", SET_MAX);
    set->subscribers[set->count++] = subscriber;
    subscriber->set = set;
    return 0;
}

void cox_queue_set_remove(struct cox_queue_set *set, struct cox_subscriber *subscriber)
{
    for (uint32_t i = 0; i < set->count; i++) {
        if (set->subscribers[i] != subscriber)
            continue;
        set->count--;
        /* Keeps the order of the others, and whose turn it is. */
        for (uint32_t k = i; k < set->count; k++)
            set->subscribers[k] = set->subscribers[k + 1];
        set->turn -= set->turn > i;
        subscriber->set = NULL;
        return;
    }
}

void cox_queue_set_trigger(struct cox_queue_set *set)
{
    int kept = errno; /* of the code that a signal handler interrupted */
    /* release: partner is the acquire load of wait, which then sees what the caller did before. */
    atomic_fetch_add_explicit(&set->triggers, 1, memory_order_release);
    cox_futex_wake(&set->triggers);
    errno = kept;
}

/* The next subscriber with a message, round robin. NULL: none. */
static struct cox_subscriber *set_ready(struct cox_queue_set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        uint32_t at = (set->turn + i) % set->count;
        if (cox_subscriber_pending(set->subscribers[at]) > 0) {
            set->turn = (at + 1) % set->count;
            return set->subscribers[at];
        }
    }
    return NULL;
}

static int set_enter(struct cox_queue *queue, uint64_t deadline_ns)
{
    return cox_queue_enter_until(
        queue, cox_deadline_min(cox_deadline_after_ns(LOCK_SLICE_NS), deadline_ns), NULL);
}

/* Whether other processes left pending frees since the last check. seq_cst: partner is
 * pending_free_add (queue_rows.c). */
static bool is_behind(const struct cox_subscriber *subscriber, uint64_t *ret_turn)
{
    *ret_turn = atomic_load(&subscriber->queue->layout->state.pending_free_turn);
    return *ret_turn != subscriber->pending_free_seen;
}

static bool set_is_behind(const struct cox_queue_set *set)
{
    uint64_t turn;
    for (uint32_t i = 0; i < set->count; i++)
        if (is_behind(set->subscribers[i], &turn))
            return true;
    return false;
}

static void set_drain(struct cox_queue_set *set, uint64_t deadline_ns)
{
    for (uint32_t i = 0; i < set->count; i++) {
        struct cox_subscriber *subscriber = set->subscribers[i];
        struct cox_queue *queue = subscriber->queue;
        uint64_t turn;
        if (!is_behind(subscriber, &turn))
            continue;
        int r = set_enter(queue, deadline_ns);
        if (r == COX_TIMEOUT)
            continue; /* retried in the next round */
        if (r == 0) {
            cox_queue_drain(queue);
            cox_queue_leave(queue);
        }
        subscriber->pending_free_seen = turn;
    }
}

/* Loads the futexes and announces the wait, before the last check. */
static void set_arm(struct cox_queue_set *set, struct waiter waiters[SET_MAX + 1])
{
    for (uint32_t i = 0; i < set->count; i++) {
        struct cox_queue_layout_subscriber *line = cox_subscriber_line(set->subscribers[i]);
        /* relaxed: ordered by the next store. */
        uint32_t seen = COX_QUEUE_LOAD(line->subscriber_wake);
        waiters[i] = (struct waiter){
            .value = seen, .address = (uintptr_t)&line->subscriber_wake, .flags = WAITER_SIZE_U32};
        /* seq_cst: partner is cox_queue_wake_subscriber. */
        atomic_store(&line->subscriber_sleeping, 1);
        cox_fault_point(COX_FAULT_QUEUE_ARMED);
    }
}

static void set_disarm(struct cox_queue_set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        /* relaxed: a spurious wakeup is harmless. */
        atomic_store_explicit(&cox_subscriber_line(set->subscribers[i])->subscriber_sleeping, 0,
                              memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_DISARMED);
    }
}

/* Waits for the lock of queues where a message is being published: then it is published, or not.
 * *ret_waited: there was one, or still is. */
static int set_await_publishers(struct cox_queue_set *set, uint64_t deadline_ns, bool *ret_waited)
{
    *ret_waited = false;
    for (uint32_t i = 0; i < set->count; i++) {
        struct cox_queue *queue = set->subscribers[i]->queue;
        struct cox_queue_layout_state *state = &queue->layout->state;
        /* seq_cst: partner is the store of announce. */
        if (atomic_load(&state->queue_publishing) == 0)
            continue;
        *ret_waited = true;
        int r = set_enter(queue, deadline_ns);
        if (r == COX_TIMEOUT)
            continue;
        if (r)
            return r;
        /* The lock is ours, so no process publishes: a value here is left over from a death, or
         * corrupt. */
        atomic_store(&state->queue_publishing, 0);
        cox_fault_point(COX_FAULT_QUEUE_PUBLISHER_AWAITED);
        cox_queue_leave(queue);
    }
    return 0;
}

/* Returns 0: woken, also spuriously; COX_TIMEOUT; -errno. */
static int set_block(struct cox_queue_set *set, struct waiter waiters[SET_MAX + 1],
                     uint32_t triggers, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    if (!set->one_word) {
        waiters[set->count] = (struct waiter){
            .value = triggers, .address = (uintptr_t)&set->triggers, .flags = WAITER_SIZE_U32};
        long r = syscall(SYS_futex_waitv, waiters, set->count + 1, 0,
                         deadline_ns == COX_DEADLINE_NEVER ? NULL : &until, CLOCK_MONOTONIC);
        if (r >= 0 || errno == EAGAIN || errno == EINTR)
            return 0;
        if (errno == ETIMEDOUT)
            return COX_TIMEOUT;
        if (errno == EFAULT) /* a page that is being punched out: see futex.h */
            return cox_now_ns() < deadline_ns ? 0 : COX_TIMEOUT;
        if (errno != ENOSYS && errno != EPERM)
            return -errno;
        set->one_word = true; /* permanently */
    }
    const uint64_t slice_ns = cox_deadline_after_ns(FALLBACK_SLICE_NS);
    int r = cox_futex_wait(&set->triggers, triggers, cox_deadline_min(slice_ns, deadline_ns));
    return r == COX_TIMEOUT && slice_ns < deadline_ns ? 0 : r;
}

int cox_queue_set_wait(struct cox_queue_set *set, uint64_t deadline_ns,
                       struct cox_subscriber **ret_subscriber)
{
    struct waiter waiters[SET_MAX + 1];
    for (;;) {
        /* acquire: partner is the release of trigger. */
        uint32_t triggers = atomic_load_explicit(&set->triggers, memory_order_acquire);
        if (triggers != set->reported) {
            set->reported++;
            return COX_ABORTED;
        }
        if (set->count == 0)
            return COX_EMPTY;
        set_drain(set, deadline_ns);
        struct cox_subscriber *ready = set_ready(set);
        if (!ready && cox_now_ns() >= deadline_ns)
            return COX_TIMEOUT;
        int r = 0;
        if (!ready) {
            bool waited;
            set_arm(set, waiters);
            r = set_await_publishers(set, deadline_ns, &waited);
            ready = r ? NULL : set_ready(set);
            if (r == 0 && !ready && !waited && !set_is_behind(set))
                r = set_block(set, waiters, triggers, deadline_ns);
            set_disarm(set);
        }
        if (ready) {
            *ret_subscriber = ready;
            return 0;
        }
        if (r && r != COX_TIMEOUT)
            return r;
    }
}
