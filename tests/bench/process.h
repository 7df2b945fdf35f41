/*
 * process: a subject (subject.h) from the conductor's side.
 *
 * One thread. Ownership: the caller's, until free, which ends it and everything that it started.
 * Blocks: every verb but start and quit, until it is answered, or its time is over, which the
 *   subject does not survive: its own, or the time at which the run has to be over.
 * If the conductor dies: the kernel kills the subject, and with it what it started.
 */
#ifndef BENCH_PROCESS_H
#define BENCH_PROCESS_H

#include "placement.h"
#include "procfs.h"

#include <stdbool.h>
#include <stdint.h>

enum process_state {
    PROCESS_READY,
    PROCESS_SKIPPED, /* it cannot run here, or is not built; text says why */
    PROCESS_FAILED,  /* it died, or said so; text says why */
    PROCESS_LATE,    /* the time of the run was over; text says so */
};

/* What a row says that had no time. */
#define PROCESS_OVER "no time left"

struct process {
    pid_t pid;
    /* its stdin, its stdout */
    int in_fd, out_fd;
    enum process_state state;
    /* when it was ready */
    struct procfs_tree tree;
    /* those of them that ran although no request was made */
    struct procfs_tree spinners;
    /* that any of them may run on */
    int processors;
    bool stopped;
    enum placement placement;
    /* when the run has to be over */
    uint64_t until_ns;
    /* where it goes when it is freed, for a row that follows; NULL: it ends then */
    struct process *home;
    /* it was told to end its row, or itself */
    bool quits;
    char text[512];
};

/* Starts it; several may start at the same time. argv is NULL-terminated. until_ns: UINT64_MAX:
 * there is no such time. What went wrong is in the state. */
void process_start(const char *const *argv, enum placement placement, uint64_t until_ns,
                   struct process *process);
/* Takes the one that is at home, in place of a start: `words` are what it would be called with. */
void process_again(const char *const *words, enum placement placement, uint64_t until_ns,
                   struct process *home, struct process *process);
/* Returns when it is ready, or has failed. */
void process_await(struct process *process, bool spins_idle);
/* What was not started, or is not asked any more: the time of the run is over. */
void process_give_up(struct process *process);
/* It ends, or its row does; free waits for that. */
void process_quit(struct process *process);
void process_free(struct process *process); /* idempotent */

/* From here on ctrl-C and SIGTERM do not end this process, but give up every subject, until the
 * second one comes. */
void process_catch_stop(void);
bool process_stopped(void);

/* Stops those of its processes that spin while idle, and no other: a launcher would forward our
 * signals too late, and the process that cleans up after the others must be running when we are
 * killed. */
void process_pause(struct process *process);
void process_resume(struct process *process);

/* Return false when the state is FAILED now. samples_ns: count of them. */
bool process_slice(struct process *process, uint64_t *samples_ns, size_t count, int timeout_ms);
bool process_rate(struct process *process, uint64_t *samples_ns, size_t count, uint64_t period_ns);
bool process_allocations(struct process *process, uint64_t *ret_count);
bool process_idle(struct process *process, uint32_t ms);

#endif
