/*
 * workers: the processes of a peer that has no launcher of its own: forked, and killed with their
 * parent. Started on the coordinator's main thread, before a library of the peer starts threads;
 * the caller owns the struct. Stopping blocks until the workers are reaped. If the coordinator
 * dies: the kernel kills them (PR_SET_PDEATHSIG).
 */
#ifndef BENCH_PEERS_WORKERS_H
#define BENCH_PEERS_WORKERS_H

#include <stdint.h>
#include <sys/types.h>

#include <coxswain/base.h>

struct workers {
    /* owned */
    pid_t *pids;
    uint32_t started;
};

/* What a worker does for ever; it returns when it cannot go on, what it says is printed, and the
 * subject ends. */
typedef const char *(*workers_main_fn)(const void *context, uint32_t rank);

/* Forks `count` of them. Returns 0 or an error, after which none is there. */
int workers_start(struct workers *workers, uint32_t count, workers_main_fn main_fn,
                  const void *context, struct cox_error *err);
/* Any number of times. */
void workers_stop(struct workers *workers);

#endif
