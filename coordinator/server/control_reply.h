/*
 * control_reply: the replies of a group to its clients, as messages of proto/control.proto.
 *
 * Threads: any.
 * Ownership: a reply is in the arena, or lent by the source.
 * Errors: as of proto/message.h: what found no memory is missing, and the arena is exhausted.
 * Blocks: status: nothing, see cox_executor_read_status. recover, lora, weights and the requests
 * about links: until their deadlines; weights also while files are read; recorder and stacks: for
 * seconds.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_CONTROL_REPLY_H
#define COX_COORDINATOR_CONTROL_REPLY_H

#include "control_source.h"

struct cox_arena;
typedef struct CoxswainControl__ControlReply control_reply;
typedef struct CoxswainControl__ControlRequest control_request;
struct CoxswainControl__Error;
struct CoxswainControl__LoraReply;
struct CoxswainControl__LoraRequest;
struct CoxswainControl__PhaseStatus;
struct CoxswainControl__PullReply;
struct CoxswainControl__RecoverReply;
struct CoxswainControl__RecoverRequest;
struct CoxswainControl__RecoveryStatus;
struct CoxswainControl__TransferStatus;
struct CoxswainControl__WeightsReply;
struct CoxswainControl__WeightsRequest;
struct CoxswainControl__WeightsStatus;

#define COX_CONTROL_INITIALIZING "the group is still being initialized"

/* Carries out status, recorder, stacks, recover, lora, weights, kv_info, link, link_status or role,
 * and fills in the reply; phase.executor is not NULL. Returns
 *   0: also if it failed in a way that the reply tells
 *   -ENOMEM, -errno: there is no reply
 *   another code: it could not be done, and err, with the reason, is the reply
 */
int cox_control_reply_make(const struct cox_control_source *source, const control_request *request,
                           struct cox_arena *arena, control_reply *reply, struct cox_error *err);

/* ---- its parts ---- */

int cox_control_reply_recover(const struct cox_control_source *source,
                              const struct CoxswainControl__RecoverRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__RecoverReply **ret_reply,
                              struct cox_error *err);
int cox_control_reply_lora(const struct cox_control_source *source,
                           const struct CoxswainControl__LoraRequest *request,
                           struct cox_arena *arena, struct CoxswainControl__LoraReply **ret_reply,
                           struct cox_error *err);
int cox_control_reply_weights(const struct cox_control_source *source,
                              const struct CoxswainControl__WeightsRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__WeightsReply **ret_reply,
                              struct cox_error *err);
/* kv_info, link, link_status and role. */
int cox_control_reply_links(const struct cox_control_source *source, const control_request *request,
                            struct cox_arena *arena, control_reply *reply, struct cox_error *err);

/* NULL: no memory. */
struct CoxswainControl__Error *cox_control_reply_error(struct cox_arena *arena, int code,
                                                       const char *text);
/* Of a request with a timeout, at most an hour. */
uint64_t cox_control_reply_deadline(bool given, uint64_t timeout_ms, uint64_t default_ms);
/* Fills in a histogram. name: static storage. */
void cox_control_reply_phase(struct CoxswainControl__PhaseStatus *message, const char *name,
                             const struct cox_phase_stats *stats, struct cox_arena *arena);
/* NULL: nothing was counted, or there is no memory. */
struct CoxswainControl__PhaseStatus *cox_control_reply_phase_new(
    const char *name, const struct cox_phase_stats *stats, struct cox_arena *arena);
/* The state of recovery; phase.recovery is not NULL. */
struct CoxswainControl__RecoveryStatus *cox_control_reply_recovery(
    const struct cox_control_source *source, struct cox_arena *arena);
/* Which weights are in use; hooks.weights is not NULL. NULL also: every rank has loaded its own. */
struct CoxswainControl__WeightsStatus *cox_control_reply_weights_status(
    const struct cox_control_source *source, struct cox_arena *arena);
/* prompts and links are not NULL. */
struct CoxswainControl__TransferStatus *cox_control_reply_transfer_status(
    const struct cox_control_source *source, struct cox_arena *arena);

/* The result of a pull, which is lent. NULL: no memory. */
struct CoxswainControl__PullReply *cox_control_reply_pull(const struct cox_prompt_output *result,
                                                          struct cox_arena *arena);

#endif
