/*
 * server: a group that `coxswain status`, `stop`, `recover` and the other commands can be used on:
 * an executor, the recovery of its ranks, its links, and a control socket that serves all of it.
 * What only an engine can do (prompts, adapters, weights) it does by hooks (hooks.h).
 *
 * Threads: new, start, stop and free from one thread; request_stop and abandon from any, also while
 *   start or stop runs; the rest from any once start has returned, await_recovery from one at a time.
 *   Functions of executor.h and operations.h may be used beside it, except that stop and free of
 *   the executor are the server's.
 * Ownership: what the options point to is borrowed until start has returned; contexts and hooks
 *   until free has. The executor is lent until free.
 * Blocks: start until every rank has attached and answered the init, or the executor's start
 *   timeout; wait and await_recovery as they say; stop until the workers have ended, which
 *   finalize_ms + term_ms bound, and until the connections' threads have. The rest nothing.
 * Results: COX_CLOSED is the caller's own doing, or that of `coxswain stop`: the group is to end.
 *   COX_PEER_DEAD: a worker has died, and its death is not made good.
 * If the process dies: the kernel kills the workers and closes the connections, by which clients
 *   know; the socket and the names are removed by the next start under the same name.
 */
#ifndef COX_COORDINATOR_SERVER_H
#define COX_COORDINATOR_SERVER_H

#include "../recovery/restart_policy.h"
#include "hooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_server;

/* 0 or NULL means default, except where required. Begin with COX_SERVER_OPTIONS_INIT. */
struct cox_server_options {
    /* of this struct, as the caller was compiled; set by COX_SERVER_OPTIONS_INIT */
    size_t size;
    /* Required. Its hooks work as ever, except that control has to be NULL: that is the server's.
     * Set need_door: without a socket nobody is served. */
    const struct cox_executor_options *executor;
    /* send MODEL_INIT with these entries, also to ranks that were replaced */
    bool init;
    const struct cox_config_entry *config;
    size_t config_count;
    /* default: the executor's start timeout */
    uint64_t init_ms;
    /* what the death of a rank does */
    struct cox_restart_policy restart;
    /* Links to other groups, for pulls of KV blocks, with the first prompt; not of legacy groups.
     */
    bool links;
    /* at the start, with links: a PDRole of executor.proto; default standard */
    uint32_t role;
    /* that status tells: an absolute directory */
    const char *model;
    /* that prompts are refused with, if there are no prompt hooks; default: that there are none */
    const char *prompts_refusal;
    const struct cox_server_hooks *hooks;
    /* 4: something went wrong; 5: something was made good. NULL: the executor's. */
    struct cox_log log;
    /* `coxswain stop` asks for the end: wait returns. On a connection's thread, may be called
     * again; must not block. NULL: wait alone tells. */
    void (*stop_requested)(void *context);
    void *context;
};
#define COX_SERVER_OPTIONS_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(struct cox_server_options)                                                  \
    }

/* Checks the options; starts nothing. Returns 0; COX_INVALID: err says which option; -ENOMEM;
 * -errno. */
COX_PUBLIC int cox_server_new(const struct cox_server_options *options,
                              struct cox_server **ret_server, struct cox_error *err);
/* Starts and initializes the group, and serves it from when its socket is there: what cannot be
 * done yet is refused in words. Once. Returns 0; what cox_executor_start, cox_executor_init and the
 * hooks return; COX_CLOSED: request_stop was called. Unless 0, free is all that may follow. */
COX_PUBLIC int cox_server_start(struct cox_server *server, struct cox_error *err);
/* Ends the workers and the connections: nothing of the group is left, and of the functions below
 * wait, request_stop, abandon and free may be called. Idempotent. Not inside a hook. */
COX_PUBLIC void cox_server_stop(struct cox_server *server);
/* Stops if needed, frees. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_server *cox_server_free(struct cox_server *server);

/* Waits until the end is asked for. Returns COX_CLOSED: it is, by request_stop or `coxswain stop`;
 * COX_PEER_DEAD: the group has failed, err tells; COX_TIMEOUT. */
COX_PUBLIC int cox_server_wait(struct cox_server *server, uint64_t deadline_ns,
                               struct cox_error *err);
/* Asks for the end, as `coxswain stop` does, but for the hook. Idempotent. */
COX_PUBLIC void cox_server_request_stop(struct cox_server *server);
/* For a process that is about to end at once: as cox_executor_abandon. Returns 0; COX_BUSY: start
 * or stop is creating or removing names just now, which is theirs to finish, soon. */
COX_PUBLIC int cox_server_abandon(struct cox_server *server);

/* Also inside the hooks ready and later ones. */
COX_PUBLIC struct cox_executor *cox_server_executor(struct cox_server *server);
/* What the ranks said at init; all zero without one. Lent until free. */
COX_PUBLIC const struct cox_init_summary *cox_server_init_summary(const struct cox_server *server);

/* For who runs steps, when one has failed or was refused (err, on entry: how): sleeps while a rank
 * is dead or being replaced, a recovery command runs, or the group is paused. Returns 0: nothing
 * was wrong; 1: it was since the last call, and is no more: the ranks have forgotten what they
 * computed; COX_PEER_DEAD: the group has failed, err tells; COX_CLOSED: it ends, or
 * cancel_recovery was called. */
COX_PUBLIC int cox_server_await_recovery(struct cox_server *server, struct cox_error *err);
/* From now on await_recovery returns COX_CLOSED at once. */
COX_PUBLIC void cox_server_cancel_recovery(struct cox_server *server);

#ifdef __cplusplus
}
#endif

#endif
