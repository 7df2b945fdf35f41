#include "futex_gate.h"

#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"

/* A hint's word: the count above, the sequence below. */
#define HINT_COUNT_SHIFT COX_STATE_SHIFT

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
    /* seq_cst: the event before the word; partner: the acquire in futexes_wake_sequence. Before
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

COX_HOT static void futexes_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    (void)rank;
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

COX_HOT static void futexes_arm(struct cox_gate *gate, uint64_t sequence, uint32_t count)
{
    /* relaxed: visible with the publication, which follows. */
    atomic_store_explicit(&gate->wake->hints[cox_geometry_frame(sequence, gate->depth)].word,
                          (sequence << 8) >> 8 | (uint64_t)count << HINT_COUNT_SHIFT,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_HINT_ARMED);
}

COX_HOT static void futexes_open(struct cox_gate *gate, const struct cox_rank_set *ranks)
{
    (void)ranks;
    word_wake(&gate->ranks_wakeup->word, &gate->ranks_wakeup->asleep);
}

COX_HOT static void futexes_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence,
                                  bool failed)
{
    (void)rank;
    bool last =
        hint_count(&gate->wake->hints[cox_geometry_frame(sequence, gate->depth)].word, sequence);
    cox_fault_point(COX_FAULT_HINT_COUNTED);
    if (!last && !failed)
        return;
    word_wake(&gate->wake->wakeup, &gate->wake->coordinator_sleeps);
    cox_gate_notify(gate);
}

COX_HOT static uint32_t futexes_wake_sequence(const struct cox_gate *gate, enum cox_wakeup wakeup)
{
    const _Atomic uint32_t *word = gate_word(gate, wakeup);
    /* acquire: partner is word_wake. */
    return word ? atomic_load_explicit(word, memory_order_acquire) : 0;
}

COX_HOT static int futexes_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup which,
                                uint32_t wake_sequence, uint64_t deadline_ns)
{
    const bool signals_end = gate->signals_end && which == COX_WAKEUP_REQUEST_CONSUME;
    (void)rank;
    cox_fault_point(COX_FAULT_WAIT);
    _Atomic uint32_t *word = gate_word(gate, which);
    COX_ASSERT(word);
    _Atomic uint32_t *asleep = which == COX_WAKEUP_RESPONSE_CONSUME
                                   ? &gate->wake->coordinator_sleeps
                                   : &gate->ranks_wakeup->asleep;
    return word_sleep(word, asleep, wake_sequence, deadline_ns, signals_end);
}

/* The words are borrowed. */
static void futexes_close(struct cox_gate *gate)
{
    *gate = (struct cox_gate){.ops = gate->ops};
}

static const struct cox_gate_ops futex_ops = {
    .shared = true,
    .arm = futexes_arm,
    .open = futexes_open,
    .reply = futexes_reply,
    .post = futexes_post,
    .wake = futexes_post,
    .wake_sequence = futexes_wake_sequence,
    .wait = futexes_wait,
    .close = futexes_close,
};

void cox_gate_bind(struct cox_gate *gate, struct cox_layout_ranks_wakeup *ranks_wakeup,
                   struct cox_layout_wake_channel *wake, uint32_t depth, bool coordinator)
{
    *gate = (struct cox_gate){.ops = &futex_ops,
                              .ranks_wakeup = ranks_wakeup,
                              .wake = wake,
                              .depth = depth,
                              .coordinator = coordinator};
}
