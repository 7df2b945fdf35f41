/*
 * server: runs a group that `coxswain status`, `stop`, `recover` and the other commands can reach.
 * It has an executor, the recovery of its ranks, its links to other groups, and a control socket.
 *
 *   struct cox_server_options options = COX_SERVER_OPTIONS_INIT;
 *   options.executor = &executor_options;
 *   r = cox_server_new(&options, &server, &err);
 *   r = cox_server_start(server, &err);
 *   ... requests through cox_server_executor(server) ...
 *   r = cox_server_wait(server, COX_DEADLINE_NEVER, &err);
 *   cox_server_free(server);
 *
 * Prompts, LoRA adapters and weights need an engine: the server calls its hooks (hooks.h).
 * examples/server.c is a whole program.
 *
 * Threads: new, start, stop and free on one thread. request_stop and abandon on any, also while
 *   start or stop runs. The rest on any once start has returned, await_recovery on one at a time.
 *   Functions of executor.h and requests.h may be used beside the server, except for free of the
 *   executor. A host whose threads use the executor stops it first (cox_executor_stop: they return
 *   COX_CLOSED), waits until none is inside, and then calls cox_server_stop, which frees it.
 * Ownership: what the options point to is borrowed until start has returned; contexts and hooks
 *   until free has. The executor is lent until free.
 * Blocks: start until every rank has attached and replied to the init, or until the start timeout
 *   of the executor has passed. wait and await_recovery as described there. stop until the workers
 *   have ended (finalize_ms + term_ms at most), and the threads of the connections. Nothing else.
 * If the process dies: the kernel kills the workers and closes the connections. The next start
 *   under the same name removes the socket and the names.
 */
#ifndef COX_COORDINATOR_SERVER_H
#define COX_COORDINATOR_SERVER_H

#include "../../coordinator/recovery/restart_policy.h"
#include "../../coordinator/server/hooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_server;

/* 0 or NULL means default, except where required. */
struct cox_server_options {
    /* set by COX_SERVER_OPTIONS_INIT (base.h) */
    size_t size;
    /* Required. Its hooks are called as without a server, but control must be NULL: the server sets
     * it. Set need_socket: no client can reach a group without a socket. With no_socket clients are
     * served from cox_server_take_name on. */
    const struct cox_executor_options *executor;
    /* Send MODEL_INIT with these entries, also to ranks that were replaced. */
    bool init;
    const struct cox_config_entry *config;
    size_t config_count;
    /* default: the executor's start timeout */
    uint64_t init_ms;
    /* what the server does when a rank dies */
    struct cox_restart_policy restart;
    /* Serve links to other groups, for pulls of KV blocks. Not for legacy groups. */
    bool links;
    /* with links: the initial role, a PDRole of executor.proto; default standard */
    uint32_t role;
    /* an absolute directory, shown by status */
    const char *model;
    /* without prompt hooks: the text with which prompts are refused */
    const char *prompts_refusal;
    /* the engine's hooks; NULL: none */
    const struct cox_server_hooks *hooks;
    /* level 4: something failed; 5: something was recovered. NULL: the executor's. */
    struct cox_log log;
    /* `coxswain stop` was received, and wait returns; text (lent) says from which process. The host
     * is to end the group. Called on a connection's thread, possibly more than once; must not
     * block. NULL: only wait returns. */
    void (*stop_requested)(void *context, const char *text);
    /* argument of stop_requested */
    void *context;
    /* This process ends with its group: `coxswain stop` waits for that, and otherwise for 2 s at
     * most, since the process may have other work. */
    bool process_ends;
};
#define COX_SERVER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_server_options)

/*
 * Checks the options; starts nothing.
 *
 * Returns
 *   0
 *   COX_INVALID: err says which option
 *   -ENOMEM
 *   -errno
 */
COX_PUBLIC int cox_server_new(const struct cox_server_options *options,
                              struct cox_server **ret_server, struct cox_error *err);
/*
 * Starts and initializes the group. Clients are served as soon as the socket exists; requests that
 * are not possible yet are refused with a text. Call it once; after a failure only free may be
 * called.
 *
 * Returns
 *   0
 *   COX_CLOSED: request_stop was called, or `coxswain stop` was received
 *   another status: of cox_executor_start, cox_executor_init or a hook
 */
COX_PUBLIC int cox_server_start(struct cox_server *server, struct cox_error *err);
/* Ends the workers and the connections. Afterwards only wait, request_stop, abandon and free may be
 * called. Idempotent. Not inside a hook. */
COX_PUBLIC void cox_server_stop(struct cox_server *server);
/* Stops if needed, frees. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_server *cox_server_free(struct cox_server *server);

/*
 * Blocks until the group has to end, or until deadline_ns.
 *
 * Returns
 *   COX_CLOSED: request_stop was called, or `coxswain stop` was received: err says from which
 *     process
 *   COX_PEER_DEAD: the group has failed; err says why
 *   COX_TIMEOUT
 */
COX_PUBLIC int cox_server_wait(struct cox_server *server, uint64_t deadline_ns,
                               struct cox_error *err);
/* As `coxswain stop`, without the hook stop_requested. Idempotent. Takes a lock: not in a signal
 * handler. */
COX_PUBLIC void cox_server_request_stop(struct cox_server *server);
#ifdef COX_INTERNAL
/*
 * For a process that is about to exit: as cox_executor_abandon.
 *
 * Returns
 *   0
 *   COX_BUSY: start or stop is creating or removing names; try again
 */
int cox_server_abandon(struct cox_server *server);
#endif

/* May also be called inside the hook ready, and inside hooks called after it. */
COX_PUBLIC struct cox_executor *cox_server_executor(struct cox_server *server);
/* The ranks' replies to the init, merged; all zero without an init. Lent until free. */
COX_PUBLIC const struct cox_init_summary *cox_server_init_summary(const struct cox_server *server);

/*
 * Opens the control socket of a group that was started with no_socket, under this name, which
 * cox_executor_name and status return from then on. For a group that stands by for another one,
 * which has the name and has ended by now. Names in /dev/shm stay as they are. Any thread, one at a
 * time, beside neither stop nor cox_executor_socket. After a failure it may be called again, with
 * the same name.
 *
 * Returns
 *   0
 *   COX_STATE: the group has a control socket, or another name
 *   COX_TAKEN: a live group listens under this name
 *   COX_INVALID: the name
 *   another status: of the control socket
 */
COX_PUBLIC int cox_server_take_name(struct cox_server *server, const char *name,
                                    struct cox_error *err);
/*
 * Sets the text that `coxswain status` shows beside the group's own figures, for example of what
 * the program did about deaths; it replaces the one before, and an empty one removes it. A JSON
 * object is shown as a line for each key, and is an object in status --json. Copied. Any thread.
 *
 * Returns
 *   0
 *   COX_TOO_LARGE: it has 4,096 bytes or more
 *   COX_CLOSED: the group has ended
 */
COX_PUBLIC int cox_server_set_note(struct cox_server *server, const char *note,
                                   struct cox_error *err);

/*
 * For the thread that runs steps, after a step failed or was refused (err, on entry: its error).
 * Blocks while a rank is dead or being replaced, a recovery command runs, or the group is paused,
 * at most until deadline_ns.
 *
 * Returns
 *   0: there was nothing to recover from
 *   COX_STALE: the group was recovered since the last call; the ranks have lost what they computed
 *   COX_PEER_DEAD: the group has failed; err says why
 *   COX_CLOSED: the group ends, or cancel_recovery was called
 *   COX_TIMEOUT: err says what it waits for
 */
COX_PUBLIC int cox_server_await_recovery(struct cox_server *server, uint64_t deadline_ns,
                                         struct cox_error *err);
/* From now on await_recovery returns COX_CLOSED at once. */
COX_PUBLIC void cox_server_cancel_recovery(struct cox_server *server);
/*
 * As `coxswain recover restart --rank R`: replaces a dead rank now, whatever the policy, its limit
 * and its pauses. kill: also a rank that lives. The init is replayed once no rank is dead. Blocks
 * until the new process has attached, or deadline_ns. Any thread; not inside a hook.
 *
 * Returns
 *   0: also when the rank lives and nothing was done
 *   COX_INVALID: no such rank
 *   COX_PEER_DEAD: the new process has died; or the group has failed before (COX_ON_DEATH_FAIL)
 *   COX_TIMEOUT
 *   COX_CLOSED: the group ends
 *   another status: of cox_executor_restart or cox_executor_replay_init
 */
COX_PUBLIC int cox_server_restart(struct cox_server *server, uint32_t rank, bool kill,
                                  uint64_t deadline_ns, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
