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
 * Prompts, LoRA adapters and weights need an engine: the server calls its hooks (below).
 * examples/server.c is a whole program.
 *
 * Threads: new, start, stop and free on one thread. request_stop on any, also while
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
#ifndef COX_SERVER_H
#define COX_SERVER_H

#include <coxswain/requests.h>

#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

struct cox_server;

/*
 * ==== restart_policy: what a group does when one of its ranks dies.
 *
 * Threads, ownership, blocking: plain values.
 * If the process dies: nothing is left.
 */

enum cox_on_death {
    COX_ON_DEATH_FAIL = 0, /* the group has failed */
    COX_ON_DEATH_WAIT,     /* the group waits until a restart is requested */
    /* the dead rank is replaced; in a legacy group every rank is, and that is logged */
    COX_ON_DEATH_RESTART,
    COX_ON_DEATH_RESTART_ALL, /* every rank is replaced */
    COX_ON_DEATH_COUNT,
};

/* 0: default. */
struct cox_restart_policy {
    enum cox_on_death on_death;
    /* tolerated deaths within window_ms; one more is a crash loop: the group fails; default 5 */
    uint32_t restart_max;
    /* default 60,000 */
    uint64_t window_ms;
    /* pause before the second attempt, doubled before each further one; default 100 */
    uint64_t backoff_min_ms;
    /* limit of that pause; default 5,000 */
    uint64_t backoff_max_ms;
};

/*
 * ==== kv_reference: names blocks with the keys and values of a sequence's first positions. A group
 * leases them to other groups, which pull them.
 *
 * Threads: one at a time.
 * Ownership: a copy is one allocation, which the caller owns.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */

struct cox_kv_reference {
    /* name of the group that leases the blocks */
    const char *cluster_id;
    /* epoch of that group when this reference was made */
    uint64_t epoch;
    /* sequence id in that group: the user of the blocks, and the id of the lease */
    int64_t sequence;
    /* CLOCK_MONOTONIC: the end of the lease */
    uint64_t lease_ns;
    const int32_t *blocks;
    uint32_t block_count;
};

/* One allocation, which the caller frees (free). NULL: no memory. */
COX_PUBLIC struct cox_kv_reference *cox_kv_reference_dup(const struct cox_kv_reference *reference);

/*
 * ==== prompt_hooks: the interface between a server and its engine for prompts: requests, outputs,
 * pulls of KV blocks, and the hooks that an engine sets to complete prompts.
 *
 * Each connection that brings prompts is one client of the engine. The server checks requests from
 * the socket: numbers in range, at most COX_STOP_COUNT_MAX stop tokens. If the engine cannot
 * compute a prompt, its output is an error.
 *
 * Threads: hooks with a client are called by one thread at a time for each client. Each client has
 *   a thread of its own, so the engine locks state that clients share. Hooks with a context: any
 *   thread.
 * Ownership: a request is lent for the call. The server owns an output: what it points to is
 *   allocated with malloc and freed by cox_prompt_output_deinit.
 * Blocks: no hook may block. take returns COX_EMPTY instead; the engine writes to wake_fd later.
 * If the process dies: private memory; nothing is left.
 */

#define COX_STOP_COUNT_MAX 8

struct cox_prompt_sampling {
    /* 0: greedy */
    float temperature;
    /* 1: off */
    float top_p;
    /* 0: off */
    int32_t top_k;
    int32_t seed;
};

struct cox_prompt_request {
    /* the prompt */
    const int32_t *tokens;
    uint32_t token_count;
    /* tokens to generate, at most; at least 1 */
    uint32_t new_count_max;
    /* if the KV cache or the positions do not suffice: generate fewer tokens, do not refuse */
    bool shorten;
    struct cox_prompt_sampling sampling;
    int32_t stop_tokens[COX_STOP_COUNT_MAX];
    uint32_t stop_count;
    /* name of the LoRA adapter; NULL: none */
    const char *lora;
    /* private to the engine; the server sets neither */
    void *context;
    uint64_t owner;
    /* Blocks from which the keys and values of all tokens but the last one are pulled. NULL: they
     * are computed.
     */
    const struct cox_kv_reference *source;
    /* the request ends with the pull, successful or not; tokens are not read */
    bool pull_only;
    /* not 0: the pull is cancelled after this time */
    uint64_t pull_ms;
    /* not 0: the prompt ends with its first token, and its blocks are leased for this time */
    uint64_t hold_ms;
};

enum cox_finish {
    COX_FINISH_STOP,   /* the last of the tokens is a stop token, or the worker ended the prompt */
    COX_FINISH_LENGTH, /* new_count_max */
    COX_FINISH_ERROR,  /* error has the reason */
};

/* engine/batching/transfers.h has the diagram. */
enum cox_pull_state {
    COX_PULL_QUEUED = 0,
    COX_PULL_SENT,
    COX_PULL_SUCCESS,
    COX_PULL_FAILED,
    COX_PULL_TIMEOUT,
    COX_PULL_PEER_DEAD,
    COX_PULL_CANCELLED,
    COX_PULL_STATE_COUNT,
};

/* The result of a pull on one rank. */
struct cox_pull_rank {
    bool replied;
    /* PDErrorCode */
    int32_t code;
    /* enum cox_status of the failure; 0: the rank gave none */
    int32_t status;
    uint64_t copied_bytes, copy_ns;
    char text[256];
};

/* How a pull ended. One allocation: ranks follow the struct. */
struct cox_pull_report {
    enum cox_pull_state state;
    /* not SUCCESS */
    struct cox_error error;
    uint32_t rank_count;
    struct cox_pull_rank *ranks;
};

struct cox_prompt_output {
    /* index given to submit */
    uint64_t index;
    enum cox_finish finish;
    /* the generated tokens; NULL: none */
    int32_t *tokens;
    uint32_t token_count;
    /* COX_FINISH_ERROR; else NULL */
    struct cox_error *error;
    /* True: this reports the end of the pull, not of the prompt. The source is no longer needed;
     * error is the reason if the pull failed. */
    bool is_pulled;
    /* the pull failed, and the prompt was computed here */
    bool recomputed;
    /* the KV lease of the prompt's blocks; NULL: none */
    struct cox_kv_reference *hold;
    /* for a request with pull_only */
    struct cox_pull_report *report;
};
/* Idempotent. */
static inline void cox_prompt_output_deinit(struct cox_prompt_output *output)
{
    free(output->tokens);
    free(output->error);
    free(output->hold);
    free(output->report);
    const uint64_t index = output->index;
    memset(output, 0, sizeof *output);
    output->index = index;
}

struct cox_transfers_status {
    /* pulls that have not ended */
    uint64_t running;
    /* so far */
    uint64_t succeeded;
    /* so far, including TIMEOUT and PEER_DEAD */
    uint64_t failed;
    uint64_t cancelled;
    /* pulls that were not the first attempt */
    uint64_t retries;
    uint64_t late_results;
    /* bytes copied by all ranks */
    uint64_t bytes;
    /* Copying time, summed over ranks, which copy in parallel. Includes waits for a destination. */
    uint64_t copy_ns;
    /* Median speed of one rank in one pull, over the last complete pulls; 0: none. */
    uint64_t bytes_per_s;
    uint64_t quarantined_blocks;
};

struct cox_prompts_status {
    uint32_t client_count;
    /* limit of prompts without an output, per client; 0: no limit */
    uint32_t prompt_count_max;
    /* of the files that clients make tokens of texts with, as they were at the start; 0: unknown */
    uint64_t text_digest;
    /* prompts that are not computed yet */
    uint64_t waiting;
    /* prompts that are being computed */
    uint64_t running;
    /* prompts whose output is ready and was not taken */
    uint64_t unread;
    /* so far, failed ones included */
    uint64_t completed;
    /* so far */
    uint64_t cancelled;
    uint64_t generated_tokens;
    /* blocks of the KV cache, as of the last step's start */
    uint32_t free_blocks;
    uint32_t block_count;
    /* KV leases that have not ended */
    uint64_t holds;
    uint64_t held_blocks;
    /* sequences that could not be pulled and were computed here, so far */
    uint64_t recomputed;
    struct cox_transfers_status transfer;
};

/* All of them are required, except where NULL is allowed. */
struct cox_prompt_hooks {
    /* set by COX_PROMPT_HOOKS_INIT (base.h) */
    size_t size;
    /* wake_fd: an eventfd of the server. The engine writes to it when take has an output.
     * Returns
     *   0
     *   -ENOMEM
     *   -errno
     */
    int (*open)(void *context, int wake_fd, void **ret_client);
    /* Cancels the client's prompts and ends its KV leases. */
    void (*close)(void *client);
    /* Queues a prompt.
     * Returns
     *   0: take has its output later
     *   COX_FULL: the server has to take outputs first
     *   -ENOMEM
     */
    int (*submit)(void *client, const struct cox_prompt_request *request, uint64_t index);
    /* The oldest output, or the end of a pull.
     * Returns
     *   0
     *   COX_EMPTY
     */
    int (*take)(void *client, struct cox_prompt_output *ret_output);
    /* Number of prompts of the client whose output was not taken yet. */
    uint32_t (*outstanding)(void *client);
    /* Cancels all prompts of the client: they get no output. */
    void (*cancel)(void *client);
    void (*status)(void *context, struct cox_prompts_status *ret_status);
    /* Ends a KV lease of this client. Has no effect on an expired lease, or on that of another
     * client. NULL: the engine leases nothing.
     * Returns
     *   0
     *   COX_FULL
     *   -ENOMEM
     */
    int (*release)(void *client, int64_t sequence);
    /* Finds the KV lease of this sequence, for another group that pulls it. The server frees it
     * with free. NULL: the engine leases nothing.
     * Returns
     *   0
     *   COX_NOT_FOUND: err says more
     *   -ENOMEM
     */
    int (*find_hold)(void *context, int64_t sequence, struct cox_kv_reference **ret_reference,
                     struct cox_error *err);
};
#define COX_PROMPT_HOOKS_INIT COX_OPTIONS_INIT(struct cox_prompt_hooks)

/*
 * ==== hooks: functions through which a server calls its engine. An engine sets the hooks that it
 * supports. A client's request that needs a hook which is NULL is refused with a text ("this group
 * has no LoRA adapters: ...").
 *
 * Threads: attached and ready are called on the thread of cox_server_start, replayed on that of
 *   recovery, ending on that of cox_server_stop. All others are called on the threads of
 *   connections, several at a time.
 * Ownership: context and the structs are lent until cox_server_stop has returned. Hooks other than
 *   attached and ending are called only after attached has returned 0.
 * Blocks: load, unload, replace and replayed may block until their deadline, but must return at
 *   once after ending was called. The others must not block.
 * If the process dies: private memory; nothing is left.
 */

struct cox_lora_info {
    const char *name;
    const char *path;
    /* "loading", "loaded", "unloading", "unsettled"; static storage */
    const char *state;
    uint64_t uses;
};

struct cox_lora_hooks {
    /* set by COX_LORA_HOOKS_INIT (base.h) */
    size_t size;
    /* Adapters in the order in which they were loaded. *ret_infos is one allocation, with the names
     * and paths, which the server frees (free).
     * Returns
     *   0
     *   -ENOMEM
     */
    int (*list)(void *context, struct cox_lora_info **ret_infos, size_t *ret_count);
    /* path: an absolute directory. ret_results: one per rank, set also on failure; status -1: the
     * rank did not reply.
     * Returns
     *   0: every rank has loaded it
     *   COX_INVALID: the name or the path is not valid, and no rank was asked
     *   another status: the client gets it, with err's text
     */
    int (*load)(void *context, const char *name, const char *path, uint64_t deadline_ns,
                struct cox_lora_result *ret_results, struct cox_error *err);
    /* The same to unload an adapter. */
    int (*unload)(void *context, const char *name, uint64_t deadline_ns,
                  struct cox_lora_result *ret_results, struct cox_error *err);
};
#define COX_LORA_HOOKS_INIT COX_OPTIONS_INIT(struct cox_lora_hooks)

struct cox_weights_status {
    /* the version that the ranks compute with; the first is 1 */
    uint64_t version;
    /* the version being loaded; 0: none */
    uint64_t next;
    /* digest of configuration and weights */
    uint64_t digest;
    /* bytes of one version */
    uint64_t size;
};

struct cox_weights_hooks {
    /* set by COX_WEIGHTS_HOOKS_INIT (base.h) */
    size_t size;
    /*
     * Returns
     *   0
     *   COX_UNSUPPORTED: every rank has loaded its weights itself
     */
    int (*status)(void *context, struct cox_weights_status *ret_status);
    /* Replaces the weights by those of an absolute directory.
     * Returns
     *   0: every rank computes with them
     *   another status: the client gets it, with err's text
     */
    int (*replace)(void *context, const char *directory, uint64_t deadline_ns,
                   uint64_t *ret_version, struct cox_error *err);
};
#define COX_WEIGHTS_HOOKS_INIT COX_OPTIONS_INIT(struct cox_weights_hooks)

/* A hook that is NULL is not supported. */
struct cox_server_hooks {
    /* set by COX_SERVER_HOOKS_INIT (base.h) */
    size_t size;
    /* argument of every hook here */
    void *context;
    /* All ranks have attached; none is initialized. If it does not return 0, cox_server_start
     * returns its value. */
    int (*attached)(void *context, struct cox_executor *executor, struct cox_error *err);
    /* The ranks are initialized, and recovery is running. Once this has returned 0, prompts and
     * links are served. If it does not return 0, cox_server_start returns its value. */
    int (*ready)(void *context, struct cox_server *server, struct cox_error *err);
    /* Ranks were replaced, and the init was replayed: the engine restores their other state. If it
     * does not return 0, the group cannot run steps yet, as after a failed init. */
    int (*replayed)(void *context, uint64_t deadline_ns, struct cox_error *err);
    /* The executor has stopped: from now on hooks that block must return COX_CLOSED at once. */
    void (*ending)(void *context);
    const struct cox_prompt_hooks *prompts;
    const struct cox_lora_hooks *lora;
    const struct cox_weights_hooks *weights;
};
#define COX_SERVER_HOOKS_INIT COX_OPTIONS_INIT(struct cox_server_hooks)

/* ==== server ==== */

/* 0 or NULL means default, except where required. */
struct cox_server_options {
    /* set by COX_SERVER_OPTIONS_INIT (base.h) */
    size_t size;
    /* Required. Its hooks are called as without a server, but control must be NULL: the server sets
     * it. Set COX_SOCKET_REQUIRED: no client can reach a group without a socket. With
     * COX_SOCKET_NONE clients are served from cox_server_take_name on. */
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
/* Ends the workers and the connections. Afterwards only wait, request_stop and free may be
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

/* May also be called inside the hook ready, and inside hooks called after it. */
COX_PUBLIC struct cox_executor *cox_server_executor(struct cox_server *server);

/*
 * Opens the control socket of a group that was started with COX_SOCKET_NONE, under this name, which
 * cox_executor_read_status returns from then on. For a group that stands by for another one,
 * which has the name and has ended by now. Names in /dev/shm stay as they are. Any thread, one at a
 * time, not beside stop. After a failure it may be called again, with
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
 * object is shown as a line for each key, and is an object in status --json. Its key "not_ready" is
 * a text that makes the group degraded, and /readyz 503: why the program cannot serve. An engine
 * sets it until its ranks have run a first step. Before start, too. Copied. Any thread.
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
 *   COX_CLOSED: the group ends
 *   COX_TIMEOUT: err says what it waits for
 */
COX_PUBLIC int cox_server_await_recovery(struct cox_server *server, uint64_t deadline_ns,
                                         struct cox_error *err);
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
