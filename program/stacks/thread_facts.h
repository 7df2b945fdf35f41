/*
 * thread_facts: what /proc says of the threads of a process: asleep, running, given no processor,
 * in the kernel, stopped; where in the kernel.
 *
 * Threads: one. Blocks: 20 ms, the time between two looks.
 * Ownership: the caller's memory.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_THREAD_FACTS_H
#define COX_PROGRAM_THREAD_FACTS_H

#include "channel/stacks/stack_protocol.h"

#include <stdbool.h>
#include <sys/types.h>

#define COX_THREAD_LOOK_MS 20

struct cox_thread_facts {
    pid_t tid;
    char name[16];
    /* R, S, D, T (stopped), t (traced), Z; 0: it has ended */
    char state;
    /* it has run between the two looks */
    bool ran;
    /* time on a processor, of the first look */
    uint64_t run_ns;
    /* in the kernel: the system call, and the function that waits; "": unknown, or not permitted */
    char call[32], channel[48];
};

struct cox_process_facts {
    uint32_t count;
    /* that are not in threads */
    uint32_t more;
    struct cox_thread_facts threads[COX_STACK_THREAD_MAX];
    /* why call is missing: -errno; 0: it is not */
    int call_error;
};

/* Two looks. Returns 0; COX_PEER_DEAD: there is no such process; -errno. */
int cox_process_facts_read(pid_t pid, struct cox_process_facts *ret_facts);
/* "asleep in futex (futex_do_wait)", "running", "stopped by a signal", ... */
void cox_thread_facts_text(const struct cox_thread_facts *thread, char *text, size_t size);

#endif
