#include "gate.h"

#include <stdlib.h>

#include "fault.h"
#include "semaphore.h"

struct cox_gate_bell {
    struct cox_semaphore semaphore;
    _Atomic uint32_t taken; /* tokens taken by wait since the last settle */
    uint32_t due;           /* events settled whose tokens were not taken yet */
};

struct cox_gate_ops {
    void (*post)(struct cox_gate_bell *bell);
    bool (*take)(struct cox_gate_bell *bell);
    int (*wait)(struct cox_gate_bell *bell, uint64_t deadline_ns);
    void (*close)(struct cox_gate_bell *bell);
};

static void semaphore_bell_post(struct cox_gate_bell *bell)
{
    cox_semaphore_post(&bell->semaphore);
}

static bool semaphore_bell_take(struct cox_gate_bell *bell)
{
    return cox_semaphore_take(&bell->semaphore);
}

static int semaphore_bell_wait(struct cox_gate_bell *bell, uint64_t deadline_ns)
{
    return cox_semaphore_wait(&bell->semaphore, deadline_ns);
}

static void semaphore_bell_close(struct cox_gate_bell *bell)
{
    cox_semaphore_detach(&bell->semaphore);
}

static const struct cox_gate_ops semaphore_ops = {
    .post = semaphore_bell_post,
    .take = semaphore_bell_take,
    .wait = semaphore_bell_wait,
    .close = semaphore_bell_close,
};

static struct cox_gate_bell *gate_bell(struct cox_gate *gate, uint32_t rank, enum cox_bell bell)
{
    COX_ASSERT(rank - gate->rank_first < gate->rank_count);
    return &gate->bells[(rank - gate->rank_first) * COX_BELL_COUNT + (uint32_t)bell];
}

/* Tokens that a new bell holds. */
static unsigned bell_start(enum cox_bell bell, unsigned depth)
{
    bool produce = bell == COX_BELL_REQUEST_PRODUCE || bell == COX_BELL_RESPONSE_PRODUCE;
    return produce ? depth : 0;
}

static int gate_init(struct cox_gate *gate, uint32_t rank_first, uint32_t rank_count)
{
    struct cox_gate_bell *bells = calloc((size_t)rank_count * COX_BELL_COUNT, sizeof *bells);
    if (!bells)
        return -ENOMEM;
    *gate = (struct cox_gate){
        .ops = &semaphore_ops,
        .rank_first = rank_first,
        .rank_count = rank_count,
        .bells = bells,
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
        for (int b = 0; b < COX_BELL_COUNT; b++) {
            enum cox_bell bell = (enum cox_bell)b;
            if (!cox_bell_exists(channel, bell))
                continue;
            cox_name_bell(object, name, channel, bell, rank);
            r = cox_semaphore_create(&gate_bell(&made, rank, bell)->semaphore, object,
                                     bell_start(bell, depth), err);
            if (r)
                goto unlink_created;
        }
    }
    *gate = made;
    return 0;

unlink_created:
    for (uint32_t rank = 0; rank < made.rank_count; rank++)
        for (int b = 0; b < COX_BELL_COUNT; b++)
            if (gate_bell(&made, rank, (enum cox_bell)b)->semaphore.sem)
                cox_semaphore_unlink(cox_name_bell(object, name, channel, (enum cox_bell)b, rank));
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
    for (int b = 0; r == 0 && b < COX_BELL_COUNT; b++) {
        enum cox_bell bell = (enum cox_bell)b;
        if (!cox_bell_exists(channel, bell))
            continue;
        cox_name_bell(object, name, channel, bell, pair);
        r = cox_semaphore_attach(&gate_bell(&made, pair, bell)->semaphore, object, err);
    }
    if (r) {
        cox_gate_close(&made);
        return r;
    }
    *gate = made;
    return 0;
}

int cox_gate_attach_fds(struct cox_gate *gate, const int fds[COX_BELL_COUNT],
                        enum cox_channel_id channel, uint32_t rank, struct cox_error *err)
{
    struct cox_gate made;
    uint32_t pair = channel == COX_CHANNEL_ERROR ? 0 : rank;
    int r = gate_init(&made, pair, 1);
    if (r)
        return cox_fail(err, r, "semaphores of %s: %s", cox_channel_name(channel),
                        cox_status_text(r));
    for (int b = 0; r == 0 && b < COX_BELL_COUNT; b++)
        if (cox_bell_exists(channel, (enum cox_bell)b))
            r = cox_semaphore_attach_fd(&gate_bell(&made, pair, (enum cox_bell)b)->semaphore,
                                        fds[b], cox_channel_name(channel), err);
    if (r) {
        cox_gate_close(&made);
        return r;
    }
    *gate = made;
    return 0;
}

int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_BELL_COUNT], struct cox_error *err)
{
    int fds[COX_BELL_COUNT] = {-1, -1, -1, -1}, r = 0;
    for (int b = 0; r == 0 && b < COX_BELL_COUNT; b++) {
        struct cox_gate_bell *bell = gate_bell(gate, rank, (enum cox_bell)b);
        r = cox_semaphore_renew(&bell->semaphore, cox_channel_name(channel),
                                bell_start((enum cox_bell)b, depth), &fds[b], err);
        atomic_store_explicit(&bell->taken, 0, memory_order_relaxed);
        bell->due = 0;
    }
    for (int b = 0; b < COX_BELL_COUNT; b++) {
        if (r)
            cox_close_fd(&fds[b]);
        else
            ret_fds[b] = fds[b];
    }
    return r;
}

void cox_gate_close(struct cox_gate *gate)
{
    for (uint32_t i = 0; gate->bells && i < gate->rank_count * (uint32_t)COX_BELL_COUNT; i++)
        gate->ops->close(&gate->bells[i]);
    free(gate->bells);
    gate->bells = NULL;
    gate->rank_count = 0;
}

void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks)
{
    for (uint32_t rank = gate->rank_first; rank < gate->rank_first + gate->rank_count; rank++)
        if (cox_rank_set_has(ranks, rank))
            cox_gate_post(gate, rank, COX_BELL_REQUEST_CONSUME);
}

void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_bell bell)
{
    gate->ops->post(gate_bell(gate, rank, bell));
    cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)bell));
}

int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_bell which, uint64_t deadline_ns)
{
    struct cox_gate_bell *bell = gate_bell(gate, rank, which);
    cox_fault_point(COX_FAULT_WAIT);
    int r = gate->ops->wait(bell, deadline_ns);
    /* relaxed: a count of hints. A wait may overlap a settle of another thread; what is miscounted
     * then is one spurious wake-up. */
    if (r == 0)
        cox_fault_point(COX_FAULT_WAIT_TOOK);
    if (r == 0)
        atomic_fetch_add_explicit(&bell->taken, 1, memory_order_relaxed);
    return r;
}

bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_bell bell)
{
    bool taken = gate->ops->take(gate_bell(gate, rank, bell));
    if (taken)
        cox_fault_point(COX_FAULT_TOKEN_TAKEN);
    return taken;
}

void cox_gate_settle(struct cox_gate *gate, uint32_t rank, enum cox_bell which)
{
    struct cox_gate_bell *bell = gate_bell(gate, rank, which);
    /* One token belongs to this event; more than one taken were debts, or spurious and are
     * forgotten. */
    uint32_t owed = bell->due + 1;
    uint32_t taken = atomic_exchange_explicit(&bell->taken, 0, memory_order_relaxed);
    bell->due = taken < owed ? owed - taken : 0;
    while (bell->due > 0 && gate->ops->take(bell)) {
        cox_fault_point(COX_FAULT_TOKEN_TAKEN);
        bell->due--;
    }
}
