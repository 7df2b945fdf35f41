/*
 * hooks: what a server asks of the engine that it serves. An engine fills in what it has; a request
 * for something that is NULL is refused in words ("this group has no LoRA adapters: ...").
 *
 * Threads: attached and ready on the thread of cox_server_start; replayed on recovery's; ending on
 *   that of cox_server_stop. The rest on the threads of connections, several at a time.
 * Ownership: context and the structs are lent until cox_server_stop has returned. Hooks other than
 *   attached and ending are called from when attached has returned 0.
 * Blocks: load, unload, replace and replayed until their deadline; once ending was called, nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_HOOKS_H
#define COX_COORDINATOR_HOOKS_H

#include "../executor/operations.h"
#include "prompt_hooks.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_server;

struct cox_lora_info {
    char *name;
    char *path;
    /* "loading", "loaded", "unloading", "unsettled"; static storage */
    const char *state;
    uint64_t uses;
};
/* infos, names and paths were made with malloc. NULL is fine. */
COX_PUBLIC void cox_lora_infos_free(struct cox_lora_info *infos, size_t count);

struct cox_lora_hooks {
    /* In the order of loading. *ret_infos is given, for cox_lora_infos_free. Returns 0 or -ENOMEM.
     */
    int (*list)(void *context, struct cox_lora_info **ret_infos, size_t *ret_count);
    /* ret_results: one for each rank, filled in also on failure; status -1: no reply. path: an
     * absolute directory. Returns 0: every rank has it; COX_INVALID: a name or path that cannot be,
     * then no rank was asked; or another status, which goes to the client with err's text. */
    int (*load)(void *context, const char *name, const char *path, uint64_t deadline_ns,
                struct cox_lora_result *ret_results, struct cox_error *err);
    /* The same for an adapter that is not to be used any more. */
    int (*unload)(void *context, const char *name, uint64_t deadline_ns,
                  struct cox_lora_result *ret_results, struct cox_error *err);
};

struct cox_weights_status {
    /* that the ranks compute with; the first is 1 */
    uint64_t version;
    /* on its way; 0: none */
    uint64_t next;
    /* of configuration and weights */
    uint64_t digest;
    /* bytes of one version */
    uint64_t size;
};

struct cox_weights_hooks {
    /* Returns 0; COX_UNSUPPORTED: every rank has loaded its own. */
    int (*status)(void *context, struct cox_weights_status *ret_status);
    /* The weights of an absolute directory in place of those in use. Returns 0: every rank computes
     * with them; or another status, which goes to the client with err's text. */
    int (*replace)(void *context, const char *directory, uint64_t deadline_ns,
                   uint64_t *ret_version, struct cox_error *err);
};

/* NULL everywhere: the engine has no such thing. */
struct cox_server_hooks {
    /* of every hook here */
    void *context;
    /* All ranks have attached; none was told to initialize. Not 0: cox_server_start fails so. */
    int (*attached)(void *context, struct cox_executor *executor, struct cox_error *err);
    /* The ranks are initialized, and recovery is at work: from when it returned 0 on, prompts and
     * links are served. Not 0: cox_server_start fails so. */
    int (*ready)(void *context, struct cox_server *server, struct cox_error *err);
    /* Ranks were replaced, and the init was replayed: gives them what else they had. Not 0: the
     * group is not able to run steps yet, as when the init had failed so. */
    int (*replayed)(void *context, uint64_t deadline_ns, struct cox_error *err);
    /* The executor has stopped: hooks that block return COX_CLOSED, now and later. */
    void (*ending)(void *context);
    const struct cox_prompt_hooks *prompts;
    const struct cox_lora_hooks *lora;
    const struct cox_weights_hooks *weights;
};

#ifdef __cplusplus
}
#endif

#endif
