/*
 * control_server: the coordinator's end of its control connections (proto/control.proto): status,
 * stop, prompts, recovery, links and pulls.
 *
 * Every connection has a thread of its own and touches no worker: status is answered also when all
 * of them are stuck or dead. Of COX_CONTROL_CONNECTION_MAX connections at a time, the last few are
 * kept for those that neither bring prompts nor give orders that may take long (recover, lora,
 * links, weights), and when there are as many, one that asks for nothing, or does not take its
 * answer, goes for the new one: so nobody takes status and stop away.
 *
 * Threads: new, attach, serve_with, recover_with, lora_with, link_with, refuse and free from one
 * thread; take from any, it does not block. Ownership: fds are taken; executor, recovery, lora,
 * links and serving are borrowed until free, model and the refusal are
 *   dup'd.
 * Blocks: free until every connection's thread has ended, which is at once, except that one inside
 *   recovery or lora ends when that is stopped; the rest nothing.
 * A connection that asks nothing, or takes no answer, for 10 s is closed; one that brought prompts
 *   lives as long as the service or its other side, but after such 10 s without prompts that are
 *   computed for it, and at the end of the last lease of what it had held, another one may have its
 *   place; and one that asked for the end lives as long as they do.
 * If the process dies: the kernel closes the connections, and that is how the other sides know.
 */
#ifndef COX_COORDINATOR_CONTROL_SERVER_H
#define COX_COORDINATOR_CONTROL_SERVER_H

#include "engine/batching/serving.h"

#define COX_CONTROL_CONNECTION_MAX 32
#define COX_CONTROL_PROMPTS_MAX 24
#define COX_CONTROL_ORDERS_MAX 24
#define COX_CONTROL_BUSY_MAX 28 /* prompts and orders */
/* With the end of the text; what is longer is cut. */
#define COX_REFUSAL_SIZE 512

struct cox_lora;
struct cox_group_links;
struct cox_recovery;
struct cox_control_server;

struct cox_control_server_options {
    /* folder; NULL: none is known */
    const char *model;
    /* Somebody asks for the end. On a connection's thread, may be called again; must not block. */
    void (*stop)(void *context);
    void *context;
};

/* Until attach, every request but stop is refused: the group is being started. Returns 0; -ENOMEM;
 * -errno. */
int cox_control_server_new(const struct cox_control_server_options *options,
                           struct cox_control_server **ret_service, struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_control_server *cox_control_server_free(struct cox_control_server *service);

void cox_control_server_attach(struct cox_control_server *service, struct cox_executor *executor);
/* From now on prompts are taken, or refused with another reason (and before attach every request
 * but stop). NULL: it is being started. */
void cox_control_server_serve_with(struct cox_control_server *service, struct cox_serving *serving);
/* From now on recovery commands are taken. */
void cox_control_server_recover_with(struct cox_control_server *service,
                                     struct cox_recovery *recovery);
/* From now on LoRA operations are. */
void cox_control_server_lora_with(struct cox_control_server *service, struct cox_lora *lora);
/* From now on links are made, and prompts held and pulled. */
void cox_control_server_link_with(struct cox_control_server *service,
                                  struct cox_group_links *links);
/* What status tells of, and a request replaces, from now on; NULL: ranks have loaded their own.
 * Borrowed until free. */
void cox_control_server_weights_with(struct cox_control_server *service,
                                     struct cox_shared_weights *weights);
void cox_control_server_refuse(struct cox_control_server *service,
                               const char *refusal); /* copied */

/* Serves a connection, a stream socket. Returns 0; COX_FULL: too many are busy, or wait to be
 * closed; -ENOMEM; -errno. Unless 0 fd stays the caller's. */
int cox_control_server_take(struct cox_control_server *service, int fd, struct cox_error *err);
/* Connections whose threads have not ended. */
uint32_t cox_control_server_connection_count(struct cox_control_server *service);

#endif
