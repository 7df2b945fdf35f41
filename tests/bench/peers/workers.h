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
    /* the workers wait for its end; -1: it was closed */
    int go_fd;
};

/* What a worker does for ever; it returns when it cannot go on, what it says is printed, and the
 * subject ends. */
typedef const char *(*workers_main_fn)(const void *context, uint32_t rank);

/* Forks `count` of them, which wait for go. Returns 0 or an error, after which none is there. */
int workers_start(struct workers *workers, uint32_t count, workers_main_fn main_fn,
                  const void *context, struct cox_error *err);
/* The coordinator listens: a worker that connected before would try again 100 ms later, or more. */
void workers_go(struct workers *workers);
/* Any number of times; a zeroed one is fine. */
void workers_stop(struct workers *workers);

#endif
