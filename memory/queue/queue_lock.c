#include "queue_lock.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/peer.h"

#include <inttypes.h>
#include <unistd.h>

#define START_BITS 42
#define START_MAX ((UINT64_C(1) << START_BITS) - 1)
#define PID_MAX ((UINT64_C(1) << 22) - 1) /* PID_MAX_LIMIT of the kernel */

/* The lock is held for less than a context switch takes, so a few spins are often cheaper than
 * blocking. */
#define SPIN_COUNT 100
/* The first slice is short: a word that names no live process is detected soon. */
#define FIRST_SLICE_NS COX_NSEC_PER_MSEC
#define SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* One of the waiters wins a dead owner's lock, and the losers then see a live owner. A waiter that
 * loses so often faces a process that keeps overwriting the word. */
#define LOST_MAX 20

int cox_queue_identity(uint64_t *ret_identity, struct cox_error *err)
{
    const pid_t pid = getpid();
    uint64_t start;
    int r = cox_peer_start_time(pid, &start);
    if (r)
        return cox_fail(err, r, "own start time: %s", cox_status_text(r));
    if ((uint64_t)pid > PID_MAX || start > START_MAX)
        return cox_fail(err, COX_CORRUPT, "pid %jd, start time %" PRIu64 ": no such process",
                        (intmax_t)pid, start);
    *ret_identity = (uint64_t)pid << START_BITS | start;
    return 0;
}

bool cox_queue_identity_alive(uint64_t identity)
{
    const pid_t pid = (pid_t)cox_queue_identity_pid(identity);
    const uint64_t start = identity & START_MAX;
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t seen = start;
    /* A start time of 0 would match any process with that pid. */
    if (pid == 0 || start == 0)
        return false;
    int r = cox_peer_open(pid, start, &peer);
    cox_peer_close(&peer);
    if (r == 0 || r == COX_PEER_DEAD)
        return r == 0;
    /* No free fd, or the number is a thread, not a process: compares the start time in /proc. Only
     * COX_PEER_DEAD or another start time means dead. */
    return cox_peer_start_time(pid, &seen) != COX_PEER_DEAD && seen == start;
}

/* seq_cst, here and in unlock: either the owner that unlocks sees the waiter, or the waiter sees
 * the lock free. acquire: for what the last owner did. */
static bool lock_try(struct cox_queue_layout_lock *lock, uint64_t owner, uint64_t identity)
{
    if (!atomic_compare_exchange_strong(&lock->lock_owner, &owner, identity))
        return false;
    /* relaxed: only shows waiters that the lock changes hands. */
    atomic_fetch_add_explicit(&lock->lock_turns, 1, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_LOCKED);
    return true;
}

/* Owner and turn that a waiter saw last, and when its patience ends. */
struct lock_watch {
    uint64_t owner, turns, until_ns;
};

static int lock_watch(struct lock_watch *watch, uint64_t owner, uint64_t turns,
                      struct cox_error *err)
{
    if (owner != watch->owner || turns != watch->turns)
        *watch =
            (struct lock_watch){owner, turns, cox_deadline_after_ms(COX_QUEUE_LOCK_PATIENCE_MS)};
    if (cox_now_ns() < watch->until_ns)
        return 0;
    return cox_fail(
        err, COX_TIMEOUT,
        "process %" PRIu32
        " keeps the queue's lock for %d ms: it is stopped, or the queue's memory is corrupt",
        cox_queue_identity_pid(owner), COX_QUEUE_LOCK_PATIENCE_MS);
}

int cox_queue_lock_until(struct cox_queue_layout_lock *lock, uint64_t identity,
                         uint64_t deadline_ns, bool *ret_repair, struct cox_error *err)
{
    struct lock_watch watch = {0};
    int lost = 0;
    *ret_repair = false;
    for (int spin = 0; spin < SPIN_COUNT; spin++)
        if (atomic_load_explicit(&lock->lock_owner, memory_order_relaxed) == 0 &&
            lock_try(lock, 0, identity))
            return 0;
    for (uint64_t slice = FIRST_SLICE_NS;; slice = SLICE_NS) {
        /* relaxed: ordered by the exchange below. */
        uint32_t seen = atomic_load_explicit(&lock->lock_wake, memory_order_relaxed);
        atomic_store(&lock->lock_waiting, 1);
        if (lock_try(lock, 0, identity))
            return 0;
        int r = cox_futex_wait(&lock->lock_wake, seen,
                               cox_deadline_min(cox_deadline_after_ns(slice), deadline_ns));
        if (r == 0)
            continue;
        if (r != COX_TIMEOUT)
            return cox_fail(err, r, "waiting for the queue's lock: %s", cox_status_text(r));
        uint64_t owner = atomic_load_explicit(&lock->lock_owner, memory_order_relaxed);
        uint64_t turns = atomic_load_explicit(&lock->lock_turns, memory_order_relaxed);
        if (owner == 0)
            continue;
        if (!cox_queue_identity_alive(owner)) {
            /* Identities are never reused, so exactly one process wins this. */
            if (lock_try(lock, owner, identity)) {
                *ret_repair = true;
                return 0;
            }
            if (++lost == LOST_MAX)
                return cox_fail(
                    err, COX_TIMEOUT,
                    "the queue's lock names one dead process after another: a process keeps overwriting the queue's memory");
            continue;
        }
        r = lock_watch(&watch, owner, turns, err);
        if (r == 0 && cox_now_ns() >= deadline_ns)
            r = cox_fail(err, COX_TIMEOUT, "process %" PRIu32 " has the queue's lock",
                         cox_queue_identity_pid(owner));
        if (r)
            return r;
    }
}

void cox_queue_unlock(struct cox_queue_layout_lock *lock, uint64_t identity)
{
    /* Fails if another process overwrote the word. */
    atomic_compare_exchange_strong(&lock->lock_owner, &identity, 0);
    if (atomic_load(&lock->lock_waiting) && atomic_exchange(&lock->lock_waiting, 0)) {
        /* relaxed: the word only has to differ from what a waiter saw. */
        atomic_fetch_add_explicit(&lock->lock_wake, 1, memory_order_relaxed);
        cox_futex_wake(&lock->lock_wake);
    }
    cox_fault_point(COX_FAULT_QUEUE_UNLOCKED);
}
