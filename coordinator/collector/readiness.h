/*
 * readiness: an fd that polls readable when the completions of a channel are worth collecting, for
 * hosts with an event loop of their own.
 *
 * It is an epoll fd over three kinds of fds: the eventfd of each rank, to which that rank writes
 * after a reply; a timerfd for deadlines and for requests whose wakeup may be lost; an eventfd of
 * the coordinator for everything else (a death, a completion that another thread gathered, stop).
 * All of them are edge-triggered: their counts are never read, so a rank that reads its own eventfd
 * empty, or makes it blocking, harms only itself. The timer then notices its reply.
 *
 * Threads: signal from any. The rest with the collector's lock.
 * Ownership: the struct owns its fds; those of the ranks are borrowed until close.
 * Blocks: nothing.
 * If the process dies: fds close by themselves.
 */
#ifndef COX_COORDINATOR_READINESS_H
#define COX_COORDINATOR_READINESS_H

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#include <stdatomic.h>

struct cox_readiness {
    /* release, after the fds below; partner: signal */
    _Atomic bool is_open;
    int epoll_fd;
    int timer_fd;
    int event_fd;
    /* when the timer expires or has expired; COX_DEADLINE_NEVER: it is not set */
    uint64_t timer_ns;
};

/* Returns 0 or -errno; then nothing is open. */
int cox_readiness_open(struct cox_readiness *readiness, const int *rank_fds, uint32_t rank_count);
/* Idempotent; fine for a struct of zeros. */
void cox_readiness_close(struct cox_readiness *readiness);

COX_HOT static inline bool cox_readiness_is_open(const struct cox_readiness *readiness)
{
    return atomic_load_explicit(&readiness->is_open, memory_order_acquire);
}

/* Makes the fd readable. Nothing where it is not open. */
void cox_readiness_signal(struct cox_readiness *readiness);
/* Makes the fd unreadable until the next event; an expired timer counts as not set. To be called
 * before the replies are read. */
void cox_readiness_clear(struct cox_readiness *readiness);
/* The fd becomes readable at at_ns (CLOCK_MONOTONIC) at the latest. A timer that expires earlier,
 * or has expired and was not cleared, stays as it is: setting it for each request and back would
 * cost two calls each. */
void cox_readiness_set_timer(struct cox_readiness *readiness, uint64_t at_ns);

#endif
