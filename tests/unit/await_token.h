/*
 * await_token: waits until a token was taken.
 *
 * A wait also ends with COX_EMPTY: the one that posted a token calls the kernel after that, and by
 * then the token may be taken and its taker asleep again.
 */
#ifndef COX_TESTS_AWAIT_TOKEN_H
#define COX_TESTS_AWAIT_TOKEN_H

#include "channel/base/semaphore.h"
#include "channel/shm/gate.h"

/* As long as no sane run takes. */
#define AWAIT_TOKEN_MS 20000

/* Returns 0; COX_TIMEOUT. */
static inline int await_semaphore(struct cox_semaphore *semaphore)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(AWAIT_TOKEN_MS);
    int r;
    do
        r = cox_semaphore_wait(semaphore, deadline_ns);
    while (r == COX_EMPTY);
    return r;
}

/* The same, of a gate of semaphores. */
static inline int await_token(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(AWAIT_TOKEN_MS);
    int r;
    do
        r = cox_gate_wait(gate, rank, wakeup, 0, deadline_ns);
    while (r == COX_EMPTY);
    return r;
}

#endif
