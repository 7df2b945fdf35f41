/*
 * stream: TCP connections between a lead and its nodes, for the transports that have nothing of
 * their own. Nodes connect, and tell their index first.
 *
 * Main thread. The caller owns every fd that it is given. Connecting blocks until the lead listens,
 * at most STREAM_PATIENCE_MS; accepting until all nodes are there. If the process dies: the kernel
 * closes its sockets.
 */
#ifndef NODES_BENCH_STREAM_H
#define NODES_BENCH_STREAM_H

#include "peer.h"

#define STREAM_PATIENCE_MS 10000

/* Of the lead: one blocking socket per node, in the order of their indices. Returns 0 or an error,
 * reported already, after which none is open. */
int stream_accept(const struct peer_options *options, int *ret_fds);
/* Of a node. Returns a blocking socket, or an error, reported already. */
int stream_connect(const struct peer_options *options);

/* All bytes. Return 0, -errno, or -ECONNRESET for an end. */
int stream_send(int fd, const void *bytes, size_t size);
int stream_receive(int fd, void *bytes, size_t size);

#endif
