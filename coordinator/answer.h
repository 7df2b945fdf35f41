/*
 * answer: what a group says of itself, as a message of proto/control.proto.
 *
 * Threads: any.
 * Ownership: the message lives in the arena.
 * Blocks: nothing; see cox_executor_status.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_ANSWER_H
#define COX_COORDINATOR_ANSWER_H

#include "serving.h"

struct cox_arena;
struct CoxswainControl__StatusReply;

struct cox_answer_source {
    struct cox_executor *executor;
    struct cox_serving *serving; /* NULL: it takes no prompts, */
    const char *refusal;         /* because */
    const char *model;           /* NULL: none is known */
};

/* Returns 0 or -ENOMEM. */
int cox_answer_status(const struct cox_answer_source *source, struct cox_arena *arena,
                      struct CoxswainControl__StatusReply **ret_status);

#endif
