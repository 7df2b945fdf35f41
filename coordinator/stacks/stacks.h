/*
 * stacks: where the threads of each rank are, gathered by one helper process per rank, all at once,
 * until a deadline. What a helper has written by then counts.
 *
 * Bytes: what a helper has written, or another machine has sent, is input. What a terminal obeys is
 *   gone, a rank has COX_STACKS_TEXT_MAX bytes, and its summary has no path of a machine.
 * Threads: any.
 * Ownership: gather gives what cox_stacks_free (executor.h) takes.
 * Blocks: until all helpers have ended, or the deadline; no lock is held meanwhile.
 * If the process dies: the kernel kills the helpers, and lets go of the ranks.
 */
#ifndef COX_COORDINATOR_STACKS_H
#define COX_COORDINATOR_STACKS_H

#include <coxswain/executor.h>

/* Bytes of one rank. */
#define COX_STACKS_TEXT_MAX ((size_t)256 << 10)
/* For all ranks together. */
#define COX_STACKS_MS 1000
/* Where it can wait for a busy machine: the time that a helper waits for a processor comes on top,
 * up to this. */
#define COX_STACKS_BUSY_MS 3000

struct cox_stacks_target {
    uint32_t rank;
    pid_t pid;
    /* why this process cannot have them, in words; "": it can */
    char why[640];
    /* what another machine has sent of it (transport.h), which gather takes; NULL: a helper reads
     * it */
    char *text;
    /* of the request that the rank is at; 0: it is idle, or unknown */
    uint64_t age_ns;
    /* in words, "MODEL_INFER 7"; "": none */
    char request[64];
};

/* Ranks that are read at the same time. */
uint32_t cox_stacks_at_a_time(void);

/* A helper has COX_STACKS_MS, and the time that it waits for a processor, up to the deadline.
 * cancelled: a pipe or eventfd that becomes readable to end it early; -1: none. Returns 0;
 * -ENOMEM. A helper that cannot be started is the text of its rank. */
int cox_stacks_gather(const struct cox_stacks_target *targets, uint32_t count, int cancelled,
                      uint64_t deadline_ns, struct cox_stacks **ret_stacks);

#endif
