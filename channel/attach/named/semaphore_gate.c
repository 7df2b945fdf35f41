#include "semaphore_gate.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/semaphore.h"

#include <stdlib.h>

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

static void semaphores_close(struct cox_gate *gate)
{
    for (uint32_t i = 0; gate->wakeups && i < gate->rank_count * (uint32_t)COX_WAKEUP_COUNT; i++)
        cox_semaphore_detach(&gate->wakeups[i].semaphore);
    free(gate->wakeups);
    *gate = (struct cox_gate){.ops = gate->ops};
}

COX_HOT static void semaphores_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    if (gate_is_silent(gate, wakeup))
        return;
    cox_semaphore_post(&gate_wakeup(gate, rank, wakeup)->semaphore);
    cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)wakeup));
}

COX_HOT static void semaphores_open(struct cox_gate *gate, const struct cox_rank_set *ranks)
{
    for (uint32_t rank = gate->rank_first; rank < gate->rank_first + gate->rank_count; rank++)
        if (cox_rank_set_has(ranks, rank))
            semaphores_post(gate, rank, COX_WAKEUP_REQUEST_CONSUME);
}

COX_HOT static void semaphores_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence,
                                     bool failed)
{
    (void)sequence;
    (void)failed;
    semaphores_post(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
    cox_gate_notify(gate);
}

static void semaphores_wake(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    if (gate_is_silent(gate, wakeup))
        return;
    cox_semaphore_wake(&gate_wakeup(gate, rank, wakeup)->semaphore);
    cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)wakeup));
}

COX_HOT static int semaphores_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup which,
                                   uint32_t wake_sequence, uint64_t deadline_ns)
{
    (void)wake_sequence;
    const bool signals_end = gate->signals_end && which == COX_WAKEUP_REQUEST_CONSUME;
    cox_fault_point(COX_FAULT_WAIT);
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

COX_HOT static bool semaphores_take(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    const bool taken = cox_semaphore_take(&gate_wakeup(gate, rank, wakeup)->semaphore);
    if (taken)
        cox_fault_point(COX_FAULT_TOKEN_TAKEN);
    return taken;
}

COX_HOT static void semaphores_absorb(struct cox_gate *gate, uint32_t rank, enum cox_wakeup which)
{
    if (gate_is_silent(gate, which))
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

static void gate_restore(struct cox_gate *gate, uint32_t rank, unsigned depth)
{
    for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
        enum cox_wakeup which = (enum cox_wakeup)b;
        struct cox_gate_wakeup *wakeup = gate_wakeup(gate, rank, which);
        for (unsigned i = 0; i < RESTORE_COUNT_MAX && semaphores_take(gate, rank, which); i++)
            continue;
        for (unsigned i = 0; i < wakeup_start(which, depth); i++)
            semaphores_post(gate, rank, which);
        wakeup_forget(wakeup);
    }
}

static int semaphores_reset(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                            unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err)
{
    if (!gate->credits)
        return cox_gate_renew(gate, channel, rank, depth, ret_fds, err);
    gate_restore(gate, rank, depth);
    return 0;
}

static const struct cox_gate_ops semaphore_ops = {
    .open = semaphores_open,
    .reply = semaphores_reply,
    .post = semaphores_post,
    .wake = semaphores_wake,
    .wait = semaphores_wait,
    .take = semaphores_take,
    .absorb = semaphores_absorb,
    .reset = semaphores_reset,
    .close = semaphores_close,
};

/* ---- constructors ---- */

static int gate_init(struct cox_gate *gate, uint32_t rank_first, uint32_t rank_count)
{
    struct cox_gate_wakeup *wakeups =
        calloc((size_t)rank_count * COX_WAKEUP_COUNT, sizeof *wakeups);
    if (!wakeups)
        return -ENOMEM;
    *gate = (struct cox_gate){
        .ops = &semaphore_ops,
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
    semaphores_close(&made);
    return r;
}

int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, const int *fds,
                               enum cox_channel_id channel, uint32_t rank, struct cox_error *err)
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
        struct cox_semaphore *semaphore = &gate_wakeup(&made, pair, wakeup)->semaphore;
        r = fds ? cox_semaphore_attach_fd(semaphore, fds[b], cox_channel_name(channel), err)
                : cox_semaphore_attach(semaphore,
                                       cox_name_wakeup(object, name, channel, wakeup, pair), err);
    }
    if (r) {
        semaphores_close(&made);
        return r;
    }
    *gate = made;
    return 0;
}
