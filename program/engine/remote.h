/*
 * remote: completes prompts with a running group, over a control connection.
 *
 * Threads: one.
 * Ownership: everything is the caller's.
 * Blocks: until every prompt is done, the group has ended, its coordinator stops replying
 *   (cox_client_watch), or stop_fd is readable. stop_fd is polled only between watch requests.
 * If the process dies: the group cancels its prompts.
 */
#ifndef COX_PROGRAM_REMOTE_H
#define COX_PROGRAM_REMOTE_H

#include "program/client/client.h"
#include "prompts.h"

/* As cox_prompts_complete; the engine loop's limits in options are ignored. name: the group's.
 * window: prompts that the group has at a time, at least 1 and at most what it accepts. stop_fd:
 * readable when the run must end with COX_CLOSED; it is not read.
 * Returns
 *   as cox_prompts_complete
 *   COX_CLOSED: also when the group has ended
 *   COX_TIMEOUT: the coordinator does not reply, or no reply came for options' timeout_ms
 *   COX_CORRUPT
 *   the group's refusal
 *   -errno
 */
int cox_remote_complete(struct cox_prompts *prompts, struct cox_client *client, const char *name,
                        uint32_t window, int stop_fd, const struct cox_complete_options *options,
                        struct cox_engine_loop_stats *ret_stats, struct cox_error *err);

/* Copies the options that are common to all prompts into a request. stop_tokens: room for
 * COX_EOS_COUNT_MAX tokens, lent to the request. */
struct CoxswainControl__CompleteRequest;
void cox_remote_fill(const struct cox_complete_options *options,
                     struct CoxswainControl__CompleteRequest *complete, int32_t *stop_tokens);

#endif
