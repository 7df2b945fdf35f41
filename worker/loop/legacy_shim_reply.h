/*
 * legacy_shim_reply: how a worker tells a legacy coordinator that a request failed.
 *
 * That coordinator drops every reply whose status is not 0, and its engine waits for ever. So the
 * status is 0, and the failure stands where the protocol has a place for it. The fault report
 * beside the reply (cox_channel_thread_reply) has the words in any case.
 *
 *   MODEL_INIT                init_result_map has nothing but `status`, which is the text
 *   MODEL_INFER, ..._SECOND   err_msg, and no outputs
 *   PD_LINK_STATUS_QUERY      no link at all: none is taken for linked
 *   LORA_OPERATION            UNSUPPORT_CMD
 *   KV_TRANSFER               PD_PULL_KV_ERROR for each pull of the request
 *   pause, ..., start         command_result and error_msg
 *   unreadable                as the request that the channel mostly has
 *
 * Threads: the channel thread's.
 * Ownership: the response points into ret_reply, the channel thread's error text and the channel
 * thread's arena.
 * Blocks: nothing.
 * If the process dies: private memory.
 */
#ifndef COX_WORKER_LEGACY_SHIM_REPLY_H
#define COX_WORKER_LEGACY_SHIM_REPLY_H

#include "serve_internal.h"

struct cox_legacy_shim_reply {
    Coxswain__ExecuteModelResponse step;
    Coxswain__ExecuteResponse__InitResults init;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry entry;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry *entries[1];
    Coxswain__PDLinkStatusResponse links;
    Coxswain__LoraOperationResponse lora;
    Coxswain__PullKVResponse pulls;
    Coxswain__RecoverCommandResponse command;
};

/* response has failed (its status is not 0) with the channel thread's error; afterwards it says so
 * with status 0. type: of the request; any other number: the request could not be read. */
void cox_legacy_shim_reply(struct cox_channel_thread *thread, uint32_t type,
                           ExecuteResponse *response, struct cox_legacy_shim_reply *ret_reply);

#endif
