/*
 * legacy_failure: how a worker tells a legacy coordinator that a request failed.
 *
 * That coordinator drops every reply whose status is not 0, and its engine waits for ever. So the
 * status is 0, and the failure stands where the protocol has a place for it. The fault report
 * beside the reply of the worker has the words in any case.
 *
 *   MODEL_INIT                init_result_map has nothing but `status`, which is the text
 *   MODEL_INFER, ..._SECOND   err_msg, and no outputs
 *   PD_LINK_STATUS_QUERY      no link at all: none is taken for linked
 *   LORA_OPERATION            UNSUPPORT_CMD
 *   KV_TRANSFER               PD_PULL_KV_ERROR for each pull of the request
 *   pause, ..., start         command_result and error_msg
 *   unreadable                as the request that the channel mostly has
 *
 * Threads: one per call.
 * Ownership: the response points into ret_reply, the error's text and the arena.
 * Blocks: nothing.
 * If the process dies: private memory.
 */
#ifndef COX_PROTO_LEGACY_FAILURE_H
#define COX_PROTO_LEGACY_FAILURE_H

#include "proto/executor.pb-c.h"

#include <coxswain/base.h>

/* A request that failed. All of it is lent. */
struct cox_legacy_failure {
    enum cox_channel_id channel;
    /* of the request; any other number: the request could not be read */
    uint32_t type;
    int32_t device;
    /* NULL: it could not be read */
    const Coxswain__ExecuteRequest *message;
    struct cox_arena *arena;
    /* its text may be empty, and is mended */
    struct cox_error *error;
};

/* The parts of a reply. */
struct cox_legacy_reply {
    Coxswain__ExecuteModelResponse step;
    Coxswain__ExecuteResponse__InitResults init;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry entry;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry *entries[1];
    Coxswain__PDLinkStatusResponse links;
    Coxswain__LoraOperationResponse lora;
    Coxswain__PullKVResponse pulls;
    Coxswain__RecoverCommandResponse command;
};

/* response has failed (its status is not 0); afterwards it says so with status 0. */
void cox_legacy_failure_fill(const struct cox_legacy_failure *failure,
                             Coxswain__ExecuteResponse *response,
                             struct cox_legacy_reply *ret_reply);

#endif
