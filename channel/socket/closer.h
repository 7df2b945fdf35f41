/*
 * closer: fds that other processes sent: how they are taken, and how they are closed without
 * anybody waiting for it.
 *
 * The last close of a file can block for as long as whoever sent it likes: a socket that lingers
 * (SO_LINGER) over bytes that nobody reads; every close of a file of a FUSE mount whose process
 * does not reply. And it is not only close(2) that closes: the kernel closes what lies in a
 * connection's queue when the connection is closed, and what a receive had no room for, on the
 * thread that did either. So what came from others, and connections in whose queue fds lie, are
 * closed by threads of their own, lingering switched off first; and of a message nothing is taken
 * that is not wanted.
 *
 * Turning lingering off is seen by whoever has the same socket. An fd that is closed is this
 * process's own: nobody else's is closed by it.
 *
 * One thread does it all; another one, up to COX_CLOSER_THREAD_MAX, begins where all are at the
 * same close for COX_CLOSER_HANG_MS. None is started before there is something to close, and one
 * that has nothing to do sleeps.
 *
 * Threads: give, hang_up, turn and counts from any; new and free from one. receive: as the
 * socket's. Ownership: fds that are given are the closer's. Blocks: free for COX_CLOSER_END_MS at
 * most, and where no thread could be made, until it has closed all itself; the rest nothing. If the
 * process dies: the kernel closes all, and does not linger.
 */
#ifndef COX_CHANNEL_CLOSER_H
#define COX_CHANNEL_CLOSER_H

#include "channel/base/base.h"

#define COX_CLOSER_THREAD_MAX 8
#define COX_CLOSER_HANG_MS 200
#define COX_CLOSER_END_MS 1000
/* Whoever makes fds come should let no more come while so many wait. */
#define COX_CLOSER_WAITING_MAX 1024

struct cox_closer;

struct cox_closer_counts {
    /* fds that are not closed yet, the hanging ones among them */
    uint32_t waiting;
    /* closes that have lasted for COX_CLOSER_HANG_MS */
    uint32_t hanging;
    uint64_t closed;
};

/* Returns 0 or -ENOMEM. */
int cox_closer_new(struct cox_closer **ret_closer);
/* Closes what there is. What is not closed within COX_CLOSER_END_MS is left to the threads, which
 * end behind it, or with the process: they have nothing but the closer's own memory, which the last
 * of them frees. Without a thread it is closed here. NULL-safe, returns NULL. */
struct cox_closer *cox_closer_free(struct cox_closer *closer);

/* *fd came from somebody else; -1 after it, and -1 is nothing. Without memory for one more it is
 * closed here. */
void cox_closer_give(struct cox_closer *closer, int *fd);
/* *fd is a connection over which fds can come, and ends: here where none lies in its queue. -1
 * after it. */
void cox_closer_hang_up(struct cox_closer *closer, int *fd);
/* Another thread, where all are stuck. Returns when it is to be called again, which is
 * COX_DEADLINE_NEVER mostly. */
uint64_t cox_closer_turn(struct cox_closer *closer);
struct cox_closer_counts cox_closer_counts(struct cox_closer *closer);

/* What there is on a stream socket, up to size bytes, at least 1, and no fd but one, where ret_fd
 * is not NULL. Bytes out of band come as others do. *ret_size 0: the other side has closed.
 * *ret_fd: what came, -1: nothing; also where this fails, and to be given to a closer then, too.
 * Returns 0; COX_EMPTY: nothing is there; COX_CORRUPT: more fds, or other control messages;
 * -EMFILE: no fd is left here for the one that came; -errno. Unless 0 it all lies in the socket
 * still. */
int cox_closer_receive(int fd, void *bytes, size_t size, size_t *ret_size, int *ret_fd);

#endif
