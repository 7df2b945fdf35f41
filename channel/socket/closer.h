/*
 * closer: receives fds that other processes send, and closes them without blocking the caller.
 *
 * The process that sent an fd can make its last close block: a lingering socket (SO_LINGER) with
 * bytes that its peer does not read, or a file of a FUSE mount whose server does not reply.
 * close(2) is not the only such call: the kernel also closes the fds in a connection's queue when
 * the connection is closed, and fds that a receive has no room for. Therefore received fds, and
 * connections with fds in their queue, are closed by separate threads, after lingering was switched
 * off. A receive takes no fds that are not wanted.
 *
 * Switching lingering off affects every process that has the same socket. Only this process's fds
 * are closed.
 *
 * One thread closes everything. A further one, up to COX_CLOSER_THREAD_MAX, is started when all
 * threads have been in the same close for COX_CLOSER_HANG_MS. No thread exists before the first
 * close, and idle threads block.
 *
 * Threads: give, hang_up, turn and counts from any; new and free from one. receive: as the
 *   socket's.
 * Ownership: fds that are given belong to the closer.
 * Blocks: free, for at most COX_CLOSER_END_MS, or, if no thread could be created, until it has
 *   closed everything itself; nothing else.
 * If the process dies: the kernel closes everything, without lingering.
 */
#ifndef COX_CHANNEL_CLOSER_H
#define COX_CHANNEL_CLOSER_H

#include <coxswain/base.h>

#define COX_CLOSER_THREAD_MAX 8
#define COX_CLOSER_HANG_MS 200
#define COX_CLOSER_END_MS 1000
/* A receiver of fds should stop receiving while so many are waiting. */
#define COX_CLOSER_WAITING_MAX 1024

struct cox_closer;

struct cox_closer_counts {
    /* fds that are not closed yet, including hanging ones */
    uint32_t waiting;
    /* closes that have taken longer than COX_CLOSER_HANG_MS */
    uint32_t hanging;
    uint64_t closed;
};

/* Returns 0 or -ENOMEM. */
int cox_closer_new(struct cox_closer **ret_closer);
/* Closes everything. What is not closed within COX_CLOSER_END_MS is left to the threads, which use
 * only the closer's own memory; the last of them frees it. Without a thread this function closes
 * it. NULL-safe, returns NULL. */
struct cox_closer *cox_closer_free(struct cox_closer *closer);

/* Closes *fd, which another process sent, and sets it to -1; -1 is ignored. Without memory for the
 * queue it is closed here. */
void cox_closer_give(struct cox_closer *closer, int *fd);
/* Closes *fd, a connection that can carry fds, and sets it to -1. It is closed here if its queue
 * contains no fd. */
void cox_closer_hang_up(struct cox_closer *closer, int *fd);
/* Starts a further thread if all are blocked. Returns when it is due again, usually
 * COX_DEADLINE_NEVER. */
uint64_t cox_closer_turn(struct cox_closer *closer);
struct cox_closer_counts cox_closer_counts(struct cox_closer *closer);

/* Receives up to size bytes, at least 1, from a stream socket, and at most one fd, if ret_fd is not
 * NULL. Out-of-band bytes are received like others. *ret_size 0: the peer has closed. *ret_fd: the
 * fd, or -1; set also on failure, and then to be given to a closer. On failure everything stays in
 * the socket's queue.
 * Returns
 *   0
 *   COX_EMPTY: nothing is there
 *   COX_CORRUPT: more fds, or other control messages
 *   -EMFILE: this process has no room for the fd
 *   -errno
 */
int cox_closer_receive(int fd, void *bytes, size_t size, size_t *ret_size, int *ret_fd);

#endif
