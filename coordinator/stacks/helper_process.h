/*
 * helper_process: a short-lived process that this one starts, and whose output it reads.
 *
 * It gets no fd but its standard ones and one more, no handler, no blocked signal, and a process
 * group of its own. When the thread that started it ends, the kernel kills it. It is reaped by its
 * pidfd, so that nobody's pid is ever taken for it; the host may see a SIGCHLD.
 *
 * Threads: any; start and end of one on one thread.
 * Blocks: start until the program is executed; end until it is dead.
 * If the process dies: the kernel kills the helper.
 */
#ifndef COX_COORDINATOR_HELPER_PROCESS_H
#define COX_COORDINATOR_HELPER_PROCESS_H

#include <coxswain/base.h>

#define COX_HELPER_END_MS 1000

struct cox_helper_process {
    int pidfd;
    /* the read end of its standard output, which does not block */
    int output_fd;
    /* when one that was asked to end is killed; 0: it was not asked */
    uint64_t end_ns;
};

#define COX_HELPER_PROCESS_NONE                                                                    \
    {                                                                                              \
        .pidfd = -1, .output_fd = -1                                                               \
    }

/* program: its path. arguments and environment end with NULL. extra_fd: it has it as 3; lent; -1:
 * none. Returns 0; -errno. */
int cox_helper_process_start(const char *program, char *const *arguments, char *const *environment,
                             int extra_fd, struct cox_helper_process *ret_helper);
/* Asks it to end, by SIGTERM, so that it can reap a child of its own. It is killed where that takes
 * COX_HELPER_END_MS. Several are asked before the first end, so that they end at the same time. */
void cox_helper_process_ask(struct cox_helper_process *helper);
/* Asks one that was not asked, kills one whose time is up, and reaps it. Idempotent. */
void cox_helper_process_end(struct cox_helper_process *helper);

#endif
