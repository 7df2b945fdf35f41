/*
 * hooks: functions through which a server calls its engine. An engine sets the hooks that it
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
#ifndef COX_COORDINATOR_HOOKS_H
#define COX_COORDINATOR_HOOKS_H

#include <coxswain/requests.h>
#include "prompt_hooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_server;

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

#ifdef __cplusplus
}
#endif

#endif
