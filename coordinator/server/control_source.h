/*
 * control_source: the phase of a group, from start to end, which decides what requests are possible
 * now.
 *
 * Threads: a phase is copied under the lock of the control server; a source is one connection's.
 * Ownership: all pointers are borrowed.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_CONTROL_SOURCE_H
#define COX_COORDINATOR_CONTROL_SOURCE_H

#include "group_links.h"

#include <coxswain/server.h>

/* Includes the terminating zero; longer text is cut. */
#define COX_REFUSAL_SIZE 512

/* Includes the terminating zero; a longer note is refused. */
#define COX_NOTE_SIZE 4096

struct cox_recovery;

struct cox_control_phase {
    /* NULL: the group is being started, every request but stop is refused */
    struct cox_executor *executor;
    /* NULL: it is being initialized; until then neither recover nor lora is served */
    struct cox_recovery *recovery;
    /* NULL: it has no links */
    struct cox_group_links *links;
    /* the prompt hooks, if set, can be called */
    bool prompts;
    /* the reason why not, or why every request is refused */
    char refusal[COX_REFUSAL_SIZE];
};

struct cox_control_source {
    struct cox_control_phase phase;
    struct cox_server_hooks hooks;
    /* NULL: prompts are refused with phase.refusal */
    const struct cox_prompt_hooks *prompts;
    /* NULL: none is known */
    const char *model;
    /* an empty one: none */
    char note[COX_NOTE_SIZE];
    /* the group has the order to end */
    bool stopping;
    /* control connections, and of them those with prompts */
    uint32_t connections, connections_max;
    uint32_t prompt_connections, prompt_connections_max;
};

#endif
