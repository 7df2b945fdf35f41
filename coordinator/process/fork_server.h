/*
 * fork_server: asks a fork server for a worker: a process that has loaded what workers need, and
 * forks one where executing a program would load all of it again
 * (python/coxswain/_internal/fork_server.py).
 *
 * The worker becomes a child of this process, as one that it forked itself: its exit status is
 * exact, and its parent's end is its own. For that the server forks twice. The process in between
 * ends at once, and this process is the subreaper (PR_SET_CHILD_SUBREAPER) that inherits the
 * worker; only while it asks, unless the host is one anyway.
 *
 *   coordinator             server          in between      worker
 *   request, fds    ----->  forks  -------> forks  ------>  waits for the end of its parent
 *                   <---------------------- BORN, ends
 *                   <-------------------------------------  READY: the coordinator is its parent,
 *   opens its pidfd                                         PDEATHSIG is armed
 *   GO              ------------------------------------->  runs
 *
 * Answers come on a socket of the request's own, which ends when all who could answer have ended.
 * A worker that gets no GO ends.
 *
 * Threads: any. One thread of a process asks at a time; others wait for it.
 * Ownership: the socket of the server and all fds are lent for the call; the pidfd is the caller's.
 * Blocks: until the worker runs, or 10 s.
 * If the process dies: the worker has SIGKILL as its PDEATHSIG, or sees that its parent is another.
 *   The signal is sent when the main thread of this process ends.
 */
#ifndef COX_COORDINATOR_FORK_SERVER_H
#define COX_COORDINATOR_FORK_SERVER_H

#include <coxswain/base.h>

#include <sys/types.h>

/* Fds that a worker gets besides its standard ones, at most, however it is started. */
#define COX_FORK_SERVER_FD_COUNT_MAX 30

struct cox_fork_request {
    /* a SOCK_SEQPACKET socket whose other end the server has */
    int server_fd;
    uint32_t rank;
    /* the worker gets the mark of peer.h */
    bool mark;
    /* NULL-terminated */
    char *const *environment;
    /* standard output and error */
    int stream_fds[2];
    /* which the worker has from 4 on */
    const int *fds;
    uint32_t fd_count;
};

/* Returns 0: the worker runs; COX_DENIED: the server refuses, err has its reason; COX_CLOSED: it is
 * gone; COX_TIMEOUT: it does not answer; COX_CORRUPT: it answered with another process; -errno.
 * After a failure no process of the request runs, and unless the server refused, its socket is shut
 * down: it ends. */
int cox_fork_server_ask(const struct cox_fork_request *request, pid_t *ret_pid, int *ret_pidfd,
                        struct cox_error *err);

#endif
