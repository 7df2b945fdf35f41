/*
 * subject: one thing that is measured: a coordinator process and its workers, which the conductor
 * (main.c) starts, tells how many rounds to run, and stops. A floor, a way of using Coxswain, or a
 * peer; each peer is a program of its own, so that it is optional at build, and that its crash, its
 * threads and its spinning are its own.
 *
 * A round: one request of request_size bytes to every worker, one reply of reply_size bytes from
 * each, all replies looked at. Every worker reads every byte of the request, where the transport
 * left it (load.h), and no more: what a transport copies is its own cost.
 *
 * Called as    PROGRAM [WORD...] --ranks N --bytes B --reply-bytes R [--world M]
 * and then spoken with by lines on stdin and stdout:
 *     <- "ready\n"               all workers are attached and have answered
 *     -> "slice COUNT\n"         runs COUNT rounds back to back
 *     <- "done COUNT\n", then COUNT times a u64 in native order: nanoseconds of each round
 *     -> "rate COUNT PERIOD_NS\n" the same, each round at its time of an absolute clock
 *     -> "idle MS\n"             nothing for so long; <- "done 0\n"
 *     -> "allocations\n"         in the last slice, by all processes; <- "done N\n", or an error
 *     -> "end\n"                 its workers end, or block; <- "done 0\n"
 *     -> "again ARGUMENT...\n"   after end: as if it had been called with these; <- "ready\n"
 *     -> "quit\n", or end of file  stops the workers and exits 0
 *     <- "error TEXT\n" at any time, and it exits 1; "skip TEXT\n" instead of ready: cannot run
 * here A subject that takes seconds to start is asked for many rows by one process: --world says
 * how many ranks a row has at most. All its processes are its descendants; none outlives it
 * (PR_SET_PDEATHSIG, or the peer's own way). stderr is the conductor's.
 */
#ifndef BENCH_SUBJECT_H
#define BENCH_SUBJECT_H

#include <stddef.h>
#include <stdint.h>

#include <coxswain/base.h>

struct subject_options {
    uint32_t rank_count;
    /* of all rows that may follow; at least rank_count */
    uint32_t world;
    /* at least LOAD_SIZE_MIN */
    size_t request_size;
    /* at least LOAD_SIZE_MIN */
    size_t reply_size;
};

struct subject_ops {
    /* Started and attached. Returns 0; COX_UNSUPPORTED: not here, told as skip; another error. */
    int (*start)(const struct subject_options *options, void **ret_subject, struct cox_error *err);
    /* One round, in the caller's thread; request has request_size bytes, of which load_number
     * writes the first. NULL where run is given. Returns 0, or an error. */
    int (*round)(void *subject, uint8_t *request, uint64_t round, struct cox_error *err);
    /* COUNT rounds, for a subject that measures in another thread. NULL if round is given. */
    int (*run)(void *subject, uint8_t *request, uint64_t *samples_ns, size_t count,
               struct cox_error *err);
    /* Calls of the allocator in the last slice, by all processes; NULL: not counted. */
    uint64_t (*allocations)(void *subject);
    void (*stop)(void *subject);
};

/* The main of a subject: reads the options from argv (those of its own are taken out before),
 * serves stdin. Returns the exit status. */
int subject_main(int argc, char **argv, const struct subject_ops *ops);

#endif
