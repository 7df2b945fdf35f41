#include "gate.h"

#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/base/semaphore.h"
#include "state.h"

#include <stdlib.h>
#include <unistd.h>

/* A hint's word: the count above, the sequence below. */
#define HINT_COUNT_SHIFT COX_STATE_SHIFT
/* More tokens than this come from a process that posts without end. */
#define RESTORE_COUNT_MAX 65536u

struct cox_gate_wakeup {
    struct cox_semaphore semaphore;
    /* tokens taken by wait; written by the waiting thread only */
    _Atomic uint32_t taken;
    /* the value of `taken` at the last absorb */
    uint32_t drained_at;
    /* events absorbed whose tokens were not taken yet */
    uint32_t due;
};

COX_HOT static struct cox_gate_wakeup *gate_wakeup(struct cox_gate *gate, uint32_t rank,
                                                   enum cox_wakeup wakeup)
{
    COX_ASSERT(rank - gate->rank_first < gate->rank_count);
    return &gate->wakeups[(rank - gate->rank_first) * COX_WAKEUP_COUNT + (uint32_t)wakeup];
}

static bool wakeup_is_credit(enum cox_wakeup wakeup)
{
    return wakeup == COX_WAKEUP_REQUEST_PRODUCE || wakeup == COX_WAKEUP_RESPONSE_PRODUCE;
}

/* Returns true if no thread waits on the wakeup and its tokens carry no information. */
static bool gate_is_silent(const struct cox_gate *gate, enum cox_wakeup wakeup)
{
    return !gate->credits && wakeup_is_credit(wakeup);
}

/* The number of tokens in a new wakeup. */
static unsigned wakeup_start(enum cox_wakeup wakeup, unsigned depth)
{
    return wakeup_is_credit(wakeup) ? depth : 0;
}

/* Tokens taken so far do not count for later events. */
static void wakeup_forget(struct cox_gate_wakeup *wakeup)
{
    wakeup->drained_at = atomic_load_explicit(&wakeup->taken, memory_order_relaxed);
    wakeup->due = 0;
}

static int gate_init(struct cox_gate *gate, uint32_t rank_first, uint32_t rank_count)
{
    struct cox_gate_wakeup *wakeups =
        calloc((size_t)rank_count * COX_WAKEUP_COUNT, sizeof *wakeups);
    if (!wakeups)
        return -ENOMEM;
    *gate = (struct cox_gate){
        .rank_first = rank_first,
        .rank_count = rank_count,
        .wakeups = wakeups,
        .credits = true,
    };
    return 0;
}

int cox_gate_create_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               const struct cox_geometry *geometry, struct cox_error *err)
{
    struct cox_gate made;
    int r = gate_init(&made, 0, channel == COX_CHANNEL_ERROR ? 1 : geometry->rank_count);
    if (r)
        return cox_fail(err, r, "semaphores of %s: %s", cox_channel_name(channel),
                        cox_status_text(r));
    char object[COX_OBJECT_NAME_SIZE];
    unsigned depth = channel == COX_CHANNEL_ERROR ? 1 : geometry->depth;
    for (uint32_t rank = 0; rank < made.rank_count; rank++) {
        for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
            enum cox_wakeup wakeup = (enum cox_wakeup)b;
            if (!cox_wakeup_exists(channel, wakeup))
                continue;
            cox_name_wakeup(object, name, channel, wakeup, rank);
            r = cox_semaphore_create(&gate_wakeup(&made, rank, wakeup)->semaphore, object,
                                     wakeup_start(wakeup, depth), err);
            if (r)
                goto unlink_created;
        }
    }
    *gate = made;
    return 0;

unlink_created:
    for (uint32_t rank = 0; rank < made.rank_count; rank++)
        for (int b = 0; b < COX_WAKEUP_COUNT; b++)
            if (gate_wakeup(&made, rank, (enum cox_wakeup)b)->semaphore.sem)
                cox_semaphore_unlink(
                    cox_name_wakeup(object, name, channel, (enum cox_wakeup)b, rank));
    cox_gate_close(&made);
    return r;
}

int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               uint32_t rank, struct cox_error *err)
{
    struct cox_gate made;
    uint32_t pair = channel == COX_CHANNEL_ERROR ? 0 : rank;
    int r = gate_init(&made, pair, 1);
    if (r)
        return cox_fail(err, r, "semaphores of %s: %s", cox_channel_name(channel),
                        cox_status_text(r));
    char object[COX_OBJECT_NAME_SIZE];
    for (int b = 0; r == 0 && b < COX_WAKEUP_COUNT; b++) {
        enum cox_wakeup wakeup = (enum cox_wakeup)b;
        if (!cox_wakeup_exists(channel, wakeup))
            continue;
        cox_name_wakeup(object, name, channel, wakeup, pair);
        r = cox_semaphore_attach(&gate_wakeup(&made, pair, wakeup)->semaphore, object, err);
    }
    if (r) {
        cox_gate_close(&made);
        return r;
    }
    *gate = made;
    return 0;
}

int cox_gate_attach_fds(struct cox_gate *gate, const int fds[COX_WAKEUP_COUNT],
                        enum cox_channel_id channel, uint32_t rank, struct cox_error *err)
{
    struct cox_gate made;
    uint32_t pair = channel == COX_CHANNEL_ERROR ? 0 : rank;
    int r = gate_init(&made, pair, 1);
    if (r)
        return cox_fail(err, r, "semaphores of %s: %s", cox_channel_name(channel),
                        cox_status_text(r));
    for (int b = 0; r == 0 && b < COX_WAKEUP_COUNT; b++)
        if (cox_wakeup_exists(channel, (enum cox_wakeup)b))
            r = cox_semaphore_attach_fd(&gate_wakeup(&made, pair, (enum cox_wakeup)b)->semaphore,
                                        fds[b], cox_channel_name(channel), err);
    if (r) {
        cox_gate_close(&made);
        return r;
    }
    *gate = made;
    return 0;
}

int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err)
{
    int fds[COX_WAKEUP_COUNT] = {-1, -1, -1, -1}, r = 0;
    for (int b = 0; r == 0 && b < COX_WAKEUP_COUNT; b++) {
        struct cox_gate_wakeup *wakeup = gate_wakeup(gate, rank, (enum cox_wakeup)b);
        r = cox_semaphore_renew(&wakeup->semaphore, cox_channel_name(channel),
                                wakeup_start((enum cox_wakeup)b, depth), &fds[b], err);
        wakeup_forget(wakeup);
    }
    for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
        if (r)
            cox_close_fd(&fds[b]);
        else
            ret_fds[b] = fds[b];
    }
    return r;
}

void cox_gate_close(struct cox_gate *gate)
{
    for (uint32_t i = 0; gate->wakeups && i < gate->rank_count * (uint32_t)COX_WAKEUP_COUNT; i++)
        cox_semaphore_detach(&gate->wakeups[i].semaphore);
    free(gate->wakeups);
    *gate = (struct cox_gate){0};
}

void cox_gate_bind(struct cox_gate *gate, struct cox_layout_ranks_wakeup *ranks_wakeup,
                   struct cox_layout_wake_channel *wake, uint32_t depth, bool coordinator)
{
    *gate = (struct cox_gate){
        .ranks_wakeup = ranks_wakeup, .wake = wake, .depth = depth, .coordinator = coordinator};
}

/* ---- futexes ---- */

/* The word that waiters block on; NULL: no thread waits, the shared state is enough. */
COX_HOT static _Atomic uint32_t *gate_word(const struct cox_gate *gate, enum cox_wakeup wakeup)
{
    if (wakeup == COX_WAKEUP_REQUEST_CONSUME && gate->ranks_wakeup)
        return &gate->ranks_wakeup->word;
    return wakeup == COX_WAKEUP_RESPONSE_CONSUME ? &gate->wake->wakeup : NULL;
}

/* asleep: the number of waiters on the word; NULL: wakes whatever it is. */
COX_HOT static void word_wake(_Atomic uint32_t *word, const _Atomic uint32_t *asleep)
{
    /* seq_cst: the event before the word; partner: the acquire in cox_gate_wake_sequence. Before
     * the wake: a waiter that checked earlier does not block. Before the load of `asleep`: a waiter
     * that announces itself later finds in the kernel's comparison that the word has changed.
     * Partner: word_sleep. */
    atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);
    cox_fault_point(COX_FAULT_GATE_WOKEN);
    if (!asleep || atomic_load_explicit(asleep, memory_order_seq_cst) != 0)
        cox_futex_wake(word);
}

COX_HOT static int word_sleep(_Atomic uint32_t *word, _Atomic uint32_t *asleep,
                              uint32_t wake_sequence, uint64_t deadline_ns, bool signals_end)
{
    /* seq_cst: see word_wake. A count, because there may be many waiters; a process that is killed
     * here stays counted. */
    atomic_fetch_add_explicit(asleep, 1, memory_order_seq_cst);
    const int r = cox_futex_wait_signals(word, wake_sequence, deadline_ns, signals_end);
    /* relaxed: a stale count costs a system call. Below zero: the count was overwritten meanwhile.
     * A count that stays too low would suppress wakeups for good, so it is raised; a thread that
     * sees it below zero adds no more than it subtracted. */
    if ((int32_t)atomic_fetch_sub_explicit(asleep, 1, memory_order_relaxed) <= 0)
        atomic_fetch_add_explicit(asleep, 1, memory_order_relaxed);
    return r;
}

COX_HOT static void futex_post(struct cox_gate *gate, enum cox_wakeup wakeup)
{
    _Atomic uint32_t *word = gate_word(gate, wakeup);
    if (word && wakeup == COX_WAKEUP_REQUEST_CONSUME && !gate->coordinator)
        cox_futex_wake(word);
    else if (word)
        word_wake(word, NULL);
}

/* Counts a reply. Returns true if it was the last one of a request that is still current. */
COX_HOT static bool hint_count(_Atomic uint64_t *hint, uint64_t sequence)
{
    /* relaxed: the exchange below checks again. */
    uint64_t seen = atomic_load_explicit(hint, memory_order_relaxed), next;
    do {
        if (seen << 8 != sequence << 8 || seen >> HINT_COUNT_SHIFT == 0)
            return false;
        next = seen - (UINT64_C(1) << HINT_COUNT_SHIFT);
        /* acq_rel: the last rank has every `done` before it, so the thread that it wakes sees them.
         */
    } while (!atomic_compare_exchange_weak_explicit(hint, &seen, next, memory_order_acq_rel,
                                                    memory_order_relaxed));
    return next >> HINT_COUNT_SHIFT == 0;
}

COX_HOT void cox_gate_arm(struct cox_gate *gate, uint64_t sequence, uint32_t count)
{
    if (!cox_gate_shared(gate))
        return;
    /* relaxed: visible with the publication, which follows. */
    atomic_store_explicit(&gate->wake->hints[cox_geometry_frame(sequence, gate->depth)].word,
                          (sequence << 8) >> 8 | (uint64_t)count << HINT_COUNT_SHIFT,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_HINT_ARMED);
}

void cox_gate_set_notify(struct cox_gate *gate, const struct cox_layout_channel_state *state,
                         int notify_fd)
{
    gate->state = state;
    gate->notify_fd = notify_fd;
}

/* For hosts of a coordinator that wait in poll, or in an event loop. */
COX_HOT static void gate_notify(const struct cox_gate *gate)
{
    if (!gate->state || !cox_state_notifies(gate->state))
        return;
    const uint64_t one = 1;
    /* Fails when the counter is at its maximum; then the fd is readable anyway. */
    const ssize_t written = write(gate->notify_fd, &one, sizeof one);
    (void)written;
}

COX_HOT void cox_gate_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence, bool failed)
{
    if (!cox_gate_shared(gate)) {
        cox_gate_post(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
        gate_notify(gate);
        return;
    }
    bool last =
        hint_count(&gate->wake->hints[cox_geometry_frame(sequence, gate->depth)].word, sequence);
    cox_fault_point(COX_FAULT_HINT_COUNTED);
    if (!last && !failed)
        return;
    word_wake(&gate->wake->wakeup, &gate->wake->coordinator_sleeps);
    gate_notify(gate);
}

COX_HOT uint32_t cox_gate_wake_sequence(const struct cox_gate *gate, enum cox_wakeup wakeup)
{
    const _Atomic uint32_t *word = cox_gate_shared(gate) ? gate_word(gate, wakeup) : NULL;
    /* acquire: partner is word_wake. */
    return word ? atomic_load_explicit(word, memory_order_acquire) : 0;
}

/* ---- both kinds ---- */

COX_HOT void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks)
{
    if (cox_gate_shared(gate)) {
        word_wake(&gate->ranks_wakeup->word, &gate->ranks_wakeup->asleep);
        return;
    }
    for (uint32_t rank = gate->rank_first; rank < gate->rank_first + gate->rank_count; rank++)
        if (cox_rank_set_has(ranks, rank))
            cox_gate_post(gate, rank, COX_WAKEUP_REQUEST_CONSUME);
}

COX_HOT void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    if (cox_gate_shared(gate)) {
        futex_post(gate, wakeup);
        return;
    }
    if (gate_is_silent(gate, wakeup))
        return;
    cox_semaphore_post(&gate_wakeup(gate, rank, wakeup)->semaphore);
    cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)wakeup));
}

void cox_gate_wake(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    if (cox_gate_shared(gate)) {
        futex_post(gate, wakeup);
        return;
    }
    if (gate_is_silent(gate, wakeup))
        return;
    cox_semaphore_wake(&gate_wakeup(gate, rank, wakeup)->semaphore);
    cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)wakeup));
}

COX_HOT int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup which,
                          uint32_t wake_sequence, uint64_t deadline_ns)
{
    const bool signals_end = gate->signals_end && which == COX_WAKEUP_REQUEST_CONSUME;
    cox_fault_point(COX_FAULT_WAIT);
    if (cox_gate_shared(gate)) {
        _Atomic uint32_t *word = gate_word(gate, which);
        COX_ASSERT(word);
        _Atomic uint32_t *asleep = which == COX_WAKEUP_RESPONSE_CONSUME
                                       ? &gate->wake->coordinator_sleeps
                                       : &gate->ranks_wakeup->asleep;
        return word_sleep(word, asleep, wake_sequence, deadline_ns, signals_end);
    }
    struct cox_gate_wakeup *wakeup = gate_wakeup(gate, rank, which);
    int r = cox_semaphore_wait_signals(&wakeup->semaphore, deadline_ns, signals_end);
    if (r)
        return r;
    cox_fault_point(COX_FAULT_WAIT_TOOK);
    /* relaxed: a count of hints. Not a locked instruction, which would wait, right after a context
     * switch, for all earlier stores. Only one thread waits, and absorb only reads; an absorb that
     * overlaps counts the token next time. */
    const uint32_t taken = atomic_load_explicit(&wakeup->taken, memory_order_relaxed);
    atomic_store_explicit(&wakeup->taken, taken + 1, memory_order_relaxed);
    return 0;
}

COX_HOT bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    bool taken =
        !cox_gate_shared(gate) && cox_semaphore_take(&gate_wakeup(gate, rank, wakeup)->semaphore);
    if (taken)
        cox_fault_point(COX_FAULT_TOKEN_TAKEN);
    return taken;
}

COX_HOT void cox_gate_absorb(struct cox_gate *gate, uint32_t rank, enum cox_wakeup which)
{
    if (cox_gate_shared(gate) || gate_is_silent(gate, which))
        return;
    struct cox_gate_wakeup *wakeup = gate_wakeup(gate, rank, which);
    /* One token belongs to this event. Further tokens that were taken belong to earlier events, or
     * were spurious and are dropped. */
    uint32_t owed = wakeup->due + 1;
    const uint32_t now = atomic_load_explicit(&wakeup->taken, memory_order_relaxed);
    const uint32_t taken = now - wakeup->drained_at;
    wakeup->drained_at = now;
    wakeup->due = taken < owed ? owed - taken : 0;
    while (wakeup->due > 0 && cox_semaphore_take(&wakeup->semaphore)) {
        cox_fault_point(COX_FAULT_TOKEN_TAKEN);
        wakeup->due--;
    }
}

COX_HOT void cox_gate_consume_reply(struct cox_gate *gate, uint32_t rank)
{
    if (gate->credits)
        cox_gate_post(gate, rank, COX_WAKEUP_RESPONSE_PRODUCE);
    else
        cox_gate_absorb(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
}

bool cox_gate_rewake(struct cox_gate *gate, uint32_t rank)
{
    if (gate->credits)
        return false;
    cox_gate_wake(gate, rank, COX_WAKEUP_REQUEST_CONSUME);
    return true;
}

static void gate_restore(struct cox_gate *gate, uint32_t rank, unsigned depth)
{
    for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
        enum cox_wakeup which = (enum cox_wakeup)b;
        struct cox_gate_wakeup *wakeup = gate_wakeup(gate, rank, which);
        for (unsigned i = 0; i < RESTORE_COUNT_MAX && cox_gate_take(gate, rank, which); i++)
            continue;
        for (unsigned i = 0; i < wakeup_start(which, depth); i++)
            cox_gate_post(gate, rank, which);
        wakeup_forget(wakeup);
    }
}

int cox_gate_reset(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err)
{
    if (cox_gate_shared(gate))
        return 0;
    if (!gate->credits)
        return cox_gate_renew(gate, channel, rank, depth, ret_fds, err);
    gate_restore(gate, rank, depth);
    return 0;
}
