/*
 * What the files that serve a channel thread's requests share: serve.c (which request it is, and
 * what is called), serve_init.c, reply_message.c (what goes back, and in what). For no one else.
 *
 * Threads: the thread inside next; of a lent step or init the one that replies.
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

/* ---- serve.c: what next and its caller do with a request ---- */

/* Reads the request that was taken, thread->served.request, and prepares what its callback gets.
 * status: the result of cox_request_read. Returns false if nothing is left to do: it was refused,
 * or is the goodbye. */
bool cox_channel_thread_open(struct cox_channel_thread *thread, int status);
/* Calls back, and replies. */
void cox_channel_thread_answer(struct cox_channel_thread *thread);
/* Instead: replies with the channel thread's error. */
void cox_channel_thread_refuse(struct cox_channel_thread *thread, int status);
/* At the end of both: releases what came out of line. */
void cox_channel_thread_close(struct cox_channel_thread *thread);

/* Replies to the step. r: the result of its callback, with the channel thread's error. */
void cox_channel_thread_end_step(struct cox_channel_thread *thread, int r);
/* The same for an init, with the result in thread->served.init. */
void cox_channel_thread_end_init(struct cox_channel_thread *thread, int r);
/* Prepares what the init callback gets. Returns 0, or the channel thread's error. */
int cox_channel_thread_begin_init(struct cox_channel_thread *thread);
int cox_channel_thread_call_init(struct cox_channel_thread *thread);

/* ---- reply_message.c ---- */

/* Call before the reply is written. Returns false if the worker leaves before the slot is free. */
bool cox_channel_thread_begin_reply(struct cox_channel_thread *thread, uint64_t sequence);
/* Returns the slot for the reply. NULL: the worker leaves before the slot is free. */
uint8_t *cox_channel_thread_slot(struct cox_channel_thread *thread, uint64_t sequence, bool whole,
                                 size_t *ret_capacity);
/* Publishes the bytes in the slot. message: an ExecuteResponse, also where replies are opaque. */
void cox_channel_thread_send(struct cox_channel_thread *thread, uint64_t sequence, size_t length,
                             bool message);
/* Publishes a reply that is out of line: stores its reference in the slot. */
void cox_channel_thread_send_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                     uint32_t type, uint64_t size);
/* Ends thread->served.request without a payload: it has no reply, or, with post, a legacy rank only
 * posts a token. */
void cox_channel_thread_done(struct cox_channel_thread *thread, bool post);
/* Sends a failure. Where it does not fit, the detail is left out, then the text is shortened. text
 * is the caller's, and is response->error_text. */
void cox_channel_thread_send_failure(struct cox_channel_thread *thread, uint64_t sequence,
                                     uint32_t type, ExecuteResponse *response, char *text,
                                     uint8_t *slot, size_t capacity);
/* Makes the response an error with the channel thread's text. */
void cox_channel_thread_fail(struct cox_channel_thread *thread, ExecuteResponse *response,
                             int status);
/* Sends the response to thread->served.request, out of line if it does not fit the slot, and as an
 * error if that is impossible, too. */
void cox_channel_thread_reply(struct cox_channel_thread *thread, ExecuteResponse *response);

/* One init between next and its reply. */
struct cox_served_init {
    /* what the callback sees, and fills in */
    struct cox_init_request request;
    struct cox_init_result result;
    /* what the request points to */
    struct cox_group_options group;
    struct cox_group_sealed sealed;
    struct cox_weights_candidate weights;
    char control_socket[COX_SOCKET_PATH_SIZE];
};

#endif
