/*
 * control_source: how far a group is, and with that what can be asked of it now.
 *
 * Threads: a phase is copied under the lock of the control server; a source is one connection's.
 * Ownership: all pointers are borrowed.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_CONTROL_SOURCE_H
#define COX_COORDINATOR_CONTROL_SOURCE_H

#include "group_links.h"
#include "hooks.h"

/* With the end of the text; what is longer is cut. */
#define COX_REFUSAL_SIZE 512

struct cox_recovery;

struct cox_control_phase {
    /* NULL: the group is being started, every request but stop is refused */
    struct cox_executor *executor;
    /* NULL: it is being initialized, and so long neither recover nor lora is served */
    struct cox_recovery *recovery;
    /* NULL: it takes no part in transfers */
    struct cox_group_links *links;
    /* the prompt hooks, if there are any, can be called */
    bool prompts;
    /* why not, or why every request is refused */
    char refusal[COX_REFUSAL_SIZE];
};

struct cox_control_source {
    struct cox_control_phase phase;
    struct cox_server_hooks hooks;
    /* NULL: prompts are refused with phase.refusal */
    const struct cox_prompt_hooks *prompts;
    /* NULL: none is known */
    const char *model;
    /* control connections, and of them those with prompts */
    uint32_t connections, connections_max;
    uint32_t prompt_connections, prompt_connections_max;
};

#endif
