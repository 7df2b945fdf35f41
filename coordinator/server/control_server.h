/*
 * control_server: the coordinator's end of its control connections (proto/control.proto): status,
 * stop, prompts, recovery, links and pulls.
 *
 * Every connection has a thread of its own, which touches no worker: status works also when all
 * workers are stuck or dead. Of COX_CONTROL_CONNECTION_MAX connections at a time, the last few are
 * kept for those that neither bring prompts nor give orders that may take long (recover, lora,
 * links, weights), and when there are as many, one that asks for nothing, or does not take its
 * reply, is closed for the new one: so status and stop stay reachable.
 *
 * Threads: new and free from one thread; the rest from any, and does not block.
 * Ownership: fds are taken; what hooks and a phase point to is borrowed until free, model is dup'd.
 * Blocks: free until every connection's thread has ended, which is at once, except that one inside
 *   recovery or lora ends when that is stopped; the rest nothing.
 * A connection that asks nothing, or takes no reply, for 10 s is closed; one that brought prompts
 *   lives as long as the service or its other side, but after such 10 s without prompts that are
 *   computed for it, and at the end of the last lease of what it had held, another one may have its
 *   place; and one that asked for the end lives as long as they do.
 * If the process dies: the kernel closes the connections, and that is how the other sides know.
 */
#ifndef COX_COORDINATOR_CONTROL_SERVER_H
#define COX_COORDINATOR_CONTROL_SERVER_H

#include "control_source.h"

#define COX_CONTROL_CONNECTION_MAX 32
#define COX_CONTROL_PROMPTS_MAX 24
#define COX_CONTROL_ORDERS_MAX 24
#define COX_CONTROL_BUSY_MAX 28 /* prompts and orders */

struct cox_control_server;

struct cox_control_options {
    /* directory; NULL: none is known */
    const char *model;
    struct cox_server_hooks hooks;
    /* A client has sent a stop. Called on a connection's thread, possibly more than once; must not
     * block. */
    void (*stop)(void *context);
    void *context;
};

/* Until the first update every request but stop is refused: the group is being started. Returns 0;
 * -ENOMEM; -errno. */
int cox_control_server_new(const struct cox_control_options *options,
                           struct cox_control_server **ret_server, struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_control_server *cox_control_server_free(struct cox_control_server *server);

/* Sets the phase, which decides what requests are possible. It is copied; what it points to is
 * borrowed until free. An empty refusal: the group is being started. Any thread. */
void cox_control_server_update(struct cox_control_server *server,
                               const struct cox_control_phase *phase);

/* Serves a connection, a stream socket. Returns 0; COX_FULL: too many are busy, or wait to be
 * closed; -ENOMEM; -errno. On failure fd stays the caller's. */
int cox_control_server_take(struct cox_control_server *service, int fd, struct cox_error *err);
/* Connections whose threads have not ended. */
uint32_t cox_control_server_connection_count(struct cox_control_server *service);

#endif
