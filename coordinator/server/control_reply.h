/*
 * control_reply: the replies of a group to its clients, as messages of proto/control.proto.
 *
 * Threads: any.
 * Ownership: the message lives in the arena.
 * Blocks: status: nothing, see cox_executor_read_status. recover, lora, weights and the requests
 * about links: until their deadlines; weights also while files are read.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_CONTROL_REPLY_H
#define COX_COORDINATOR_CONTROL_REPLY_H

#include "control_source.h"

struct cox_arena;
struct CoxswainControl__ControlReply;
struct CoxswainControl__ControlRequest;
struct CoxswainControl__LoraReply;
struct CoxswainControl__LoraRequest;
struct CoxswainControl__RecoverReply;
struct CoxswainControl__RecoverRequest;
struct CoxswainControl__RecoveryStatus;
struct CoxswainControl__PhaseStatus;
struct CoxswainControl__StatusReply;
struct CoxswainControl__WeightsReply;
struct CoxswainControl__WeightsRequest;
struct CoxswainControl__WeightsStatus;

/* Returns 0 or -ENOMEM. */
int cox_control_reply_status(const struct cox_control_source *source, struct cox_arena *arena,
                             struct CoxswainControl__StatusReply **ret_status);
/* Stacks, lent to the reply. Texts are cut so that all ranks fit a reply. Returns 0 or -ENOMEM. */
struct cox_stacks;
struct CoxswainControl__StacksReply;
int cox_control_reply_stacks(const struct cox_stacks *stacks, struct cox_arena *arena,
                             struct CoxswainControl__StacksReply **ret_reply);
/* A histogram. name: static storage. Returns 0 or -ENOMEM. */
int cox_control_reply_phase(struct CoxswainControl__PhaseStatus *message, const char *name,
                            const struct cox_phase_stats *stats, struct cox_arena *arena);
/* The state of recovery; phase.recovery is not NULL. */
int cox_control_reply_recovery(const struct cox_control_source *source, struct cox_arena *arena,
                               struct CoxswainControl__RecoveryStatus **ret_status);
/* Carries the request out; phase.recovery is not NULL. Returns 0, also if it failed: the reply has
 * the error; COX_INVALID: an invalid request, err has the reason; -ENOMEM. */
int cox_control_reply_recover(const struct cox_control_source *source,
                              const struct CoxswainControl__RecoverRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__RecoverReply **ret_reply,
                              struct cox_error *err);
/* The same for a LoRA request; hooks.lora is not NULL. */
int cox_control_reply_lora(const struct cox_control_source *source,
                           const struct CoxswainControl__LoraRequest *request,
                           struct cox_arena *arena, struct CoxswainControl__LoraReply **ret_reply,
                           struct cox_error *err);
/* Which weights are in use; hooks.weights is not NULL. Returns 0; COX_UNSUPPORTED: every rank has
 * loaded its own; -ENOMEM. */
int cox_control_reply_weights_status(const struct cox_control_source *source,
                                     struct cox_arena *arena,
                                     struct CoxswainControl__WeightsStatus **ret_status);
/* Carries the request out; hooks.weights is not NULL. Returns as cox_control_reply_recover. */
int cox_control_reply_weights(const struct cox_control_source *source,
                              const struct CoxswainControl__WeightsRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__WeightsReply **ret_reply,
                              struct cox_error *err);

/* Part of the status; prompts and links are not NULL. Returns 0 or -ENOMEM. */
struct CoxswainControl__TransferStatus;
int cox_control_reply_transfer_status(const struct cox_control_source *source,
                                      struct cox_arena *arena,
                                      struct CoxswainControl__TransferStatus **ret_status);
/* kv_info, link, link_status or role: carries the command out and fills in the reply. Returns 0;
 * -ENOMEM; another code: it could not be done, and err, with the reason, is the reply. */
int cox_control_reply_links(const struct cox_control_source *source,
                            const struct CoxswainControl__ControlRequest *request,
                            struct cox_arena *arena, struct CoxswainControl__ControlReply *reply,
                            struct cox_error *err);
/* The result of a pull, which is lent. Returns 0 or -ENOMEM. */
struct CoxswainControl__PullReply;
int cox_control_reply_pull(const struct cox_prompt_output *result, struct cox_arena *arena,
                           struct CoxswainControl__PullReply **ret_reply);

#endif
