/*
 * control_server: serves the coordinator's control connections (proto/control.proto): status, stop,
 * prompts, recovery, adapters, weights, links and pulls.
 *
 * Each connection has its own thread, and no thread calls a worker: status works even if all
 * workers are stuck or dead. Where none can be started, a spare one serves a connection, one at a
 * time. Two rules keep places free for status and stop:
 *   - Connections with prompts, and orders in progress (recover, lora, weights, link, link status,
 *     role), may together be COX_CONTROL_BUSY_MAX.
 *   - If all places are taken, a new connection gets the place of an idle one, which is closed.
 *     Idle means: no request is in progress, or the client does not read the replies.
 *
 * All connections together have a budget of memory, COX_CONTROL_MEMORY_MAX. The request that
 * exceeds it is refused as busy, and its connection ends; small requests are always served. While
 * it is unpacked, one request more may be there.
 *
 * A connection without prompts is closed 10 s after its last request. One with prompts stays open
 * until the server or the client ends. It counts as idle only after 10 s, and after the last lease
 * of KV blocks held for it has expired. One that has sent a stop stays open in the same way, and
 * never counts as idle.
 *
 * Threads: new and free on one thread; the rest on any.
 * Ownership: take owns fd if it succeeds. model is copied. What the hooks and a phase point to is
 *   borrowed until free.
 * Blocks: free until the thread of every connection has ended. That is at once, except for a thread
 *   inside recovery or lora, which ends when these are stopped. The rest does not block.
 * If the process dies: the kernel closes the connections, from which the clients learn of it.
 */
#ifndef COX_COORDINATOR_CONTROL_SERVER_H
#define COX_COORDINATOR_CONTROL_SERVER_H

#include "control_source.h"

#define COX_CONTROL_CONNECTION_MAX 32
#define COX_CONTROL_PROMPTS_MAX 24
#define COX_CONTROL_ORDERS_MAX 24
/* connections with prompts, and orders in progress */
#define COX_CONTROL_BUSY_MAX 28
/* Bytes of requests and replies of all connections together, but for the first 256 KiB of each. */
#define COX_CONTROL_MEMORY_MAX ((size_t)256 << 20)

struct cox_control_server;

struct cox_control_options {
    /* directory; NULL: none is known */
    const char *model;
    struct cox_server_hooks hooks;
    /* A client, the process pid (0: unknown), has sent a stop. Called on a connection's thread,
     * possibly more than once; must not block. */
    void (*stop)(void *context, pid_t pid);
    void *context;
    /* who gives orders that change the group */
    struct cox_log log;
    /* as of cox_server_options */
    bool process_ends;
};

/* Starts in the phase in which the group is being started: until the first update, every request
 * but stop is refused. Returns 0; -ENOMEM; -errno. */
int cox_control_server_new(const struct cox_control_options *options,
                           struct cox_control_server **ret_server, struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_control_server *cox_control_server_free(struct cox_control_server *server);

/* Sets the phase, which decides which requests are possible. The phase is copied; what it points to
 * is borrowed until free. An empty refusal means that the group is being started. */
void cox_control_server_update(struct cox_control_server *server,
                               const struct cox_control_phase *phase);

/* Sets the text that status shows beside the group's own figures; empty: none. Copied.
 * Returns
 *   0
 *   COX_TOO_LARGE: it has COX_NOTE_SIZE bytes or more */
int cox_control_server_set_note(struct cox_control_server *server, const char *note,
                                struct cox_error *err);

/* Serves a connection. fd: a stream socket; on failure it stays the caller's.
 * Returns
 *   0
 *   COX_FULL: no connection is idle, or too many still wait to be closed
 *   -ENOMEM
 *   -errno */
int cox_control_server_take(struct cox_control_server *service, int fd, struct cox_error *err);
/* The number of connections whose threads have not ended. */
uint32_t cox_control_server_connection_count(struct cox_control_server *service);

#endif
