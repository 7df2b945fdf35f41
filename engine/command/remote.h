/*
 * remote: prompts completed by a running group, over a control connection.
 *
 * Threads: one.
 * Ownership: everything is the caller's.
 * Blocks: until every prompt is done, the group has ended or its coordinator does not reply any
 *   more (cox_client_watch), or stop_fd is readable, which is looked at between such questions.
 * If the process dies: the group forgets what it asked.
 */
#ifndef COX_COORDINATOR_REMOTE_H
#define COX_COORDINATOR_REMOTE_H

#include "coordinator/client/client.h"
#include "prompts.h"

/* As cox_prompts_complete, which see. Of options, limits of the engine loop are not looked at.
 * name: the group's. window: prompts that the group has at a time, at least 1, and not more than it
 * takes. stop_fd: readable when the run is to end with COX_CLOSED; stays as it is. Returns what
 * cox_prompts_complete returns; COX_CLOSED also when the group has ended; COX_TIMEOUT; COX_CORRUPT;
 * what the group refuses with; -errno. */
int cox_remote_complete(struct cox_prompts *prompts, struct cox_client *client, const char *name,
                        uint32_t window, int stop_fd, const struct cox_complete_options *options,
                        struct cox_engine_loop_stats *ret_stats, struct cox_error *err);

/* What options say of every prompt, into a request. stop_tokens: room for COX_EOS_COUNT_MAX of
 * them, lent to it. */
struct CoxswainControl__CompleteRequest;
void cox_remote_fill(const struct cox_complete_options *options,
                     struct CoxswainControl__CompleteRequest *complete, int32_t *stop_tokens);

#endif
