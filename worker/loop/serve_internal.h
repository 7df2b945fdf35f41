/*
 * What the files that serve a channel thread's requests share: serve.c (which request it is, and
 * what is called), serve_init.c, reply_message.c (what goes back, and in what). For no one else.
 *
 * Threads: the channel thread's.
 */
#ifndef COX_WORKER_SERVE_INTERNAL_H
#define COX_WORKER_SERVE_INTERNAL_H

#include "proto/executor.pb-c.h"
#include "worker/group/group_memory.h"
#include "worker_internal.h"

#include <coxswain/worker.h>

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteResponse ExecuteResponse;
/* How long the announcement of a failing reply on the error channel may block; the collector finds
 * it without that, too. */
#define NOTICE_MS 100
#define RESULT(name) COXSWAIN__EXECUTE_RESPONSE__RESULT_##name

void cox_channel_thread_return(struct cox_channel_thread *thread, uint64_t sequence);
/* Calls a callback, of any channel. */
static inline int cox_channel_thread_call_any(struct cox_channel_thread *thread,
                                              const struct cox_request *request,
                                              enum cox_callback_kind kind,
                                              int (*callback)(void *argument), void *argument)
{
    return thread->lending.on ? cox_lending_call(thread, request, kind, callback, argument)
                              : cox_channel_thread_call(thread, request, kind, callback, argument);
}

/* Call before the reply is written. Returns false if the worker leaves before the slot is free. */
bool cox_channel_thread_begin_reply(struct cox_channel_thread *thread, uint64_t sequence);
/* Returns the slot for the reply. NULL: the worker leaves before the slot is free. */
uint8_t *cox_channel_thread_slot(struct cox_channel_thread *thread, uint64_t sequence, bool whole,
                                 size_t *ret_capacity);
/* Publishes the bytes in the slot. message: an ExecuteResponse, also where replies are opaque.
 * status: of the reply, not 0: a failure. */
void cox_channel_thread_send(struct cox_channel_thread *thread, uint64_t sequence, size_t length,
                             bool message, int status);
/* Publishes a reply that is out of line: stores its reference in the slot. */
void cox_channel_thread_send_block(struct cox_channel_thread *thread, uint64_t sequence,
                                   uint32_t type, uint64_t size);
/* For requests without a reply, and legacy ranks without a payload. */
void cox_channel_thread_done(struct cox_channel_thread *thread, uint64_t sequence, bool post);
/* Sends a failure. If the text does not fit it is shortened. text is the caller's, and is
 * response->error_text. */
void cox_channel_thread_send_failure(struct cox_channel_thread *thread, uint64_t sequence,
                                     uint32_t type, ExecuteResponse *response, char *text,
                                     uint8_t *slot, size_t capacity);
/* Makes the response an error with the channel thread's text. */
void cox_channel_thread_fail(struct cox_channel_thread *thread, ExecuteResponse *response,
                             int status);
/* Sends the response, out of line if it does not fit the slot, and as an error if that is
 * impossible, too. */
void cox_channel_thread_reply(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type,
                              ExecuteResponse *response);

void cox_channel_thread_reply_init_request(struct cox_channel_thread *thread,
                                           const struct cox_request *request,
                                           const ExecuteRequest *message);
/* Ends a lent init or step: r as from a callback, with the channel thread's error. */
void cox_channel_thread_end_init(struct cox_channel_thread *thread,
                                 const struct cox_served_init *init, struct cox_init_result *result,
                                 int r);
void cox_channel_thread_end_step(struct cox_channel_thread *thread, struct cox_served_step *step,
                                 int r);

/* One init between its request and its reply. */
struct cox_served_init {
    /* what the callback sees */
    struct cox_init_request request;
    uint32_t type;
    const struct cox_channel_thread *thread;
    /* what the request points to */
    struct cox_group_options group;
    struct cox_group_sealed sealed;
    struct cox_weights_candidate weights;
    char control_socket[COX_SOCKET_PATH_SIZE];
};

/* One step between its request and its reply. */
struct cox_served_step {
    const struct cox_request *request;
    const Coxswain__ExecuteModelRequest *message;
    struct cox_weights_candidate candidate;
    /* NULL: it never began */
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    uint64_t begin_ns;
};

/* An arena that has grown for one large request is not kept. */
void cox_channel_thread_trim(struct cox_channel_thread *thread);

/* ---- legacy_shim_reply.c ---- */

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
