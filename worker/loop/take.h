/*
 * take: lets a host take requests and reply to them on its own threads, instead of in callbacks.
 *
 *   struct cox_worker_request request;
 *   cox_worker_start(worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), &err);
 *   while (cox_worker_next(worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, &err) == 0)
 *       cox_worker_reply(worker, request.sequence, request.bytes, request.size, &err);
 *   cox_worker_join(worker, &err);
 *
 * Lent requests: on the execute channel, next lends requests without a callback to its caller:
 *   opaque requests, steps, and inits that bring a configuration. next serves every other request
 *   of a taken channel itself, on the calling thread, as cox_worker_run does: it runs the callback,
 *   or refuses a request without one. So no thread of the library runs callbacks of a taken
 *   channel. Link, transfer and recovery requests are always served by callbacks, one at a time:
 *   their replies are messages that need an arena.
 * Threads: start, join and free on one thread. next on any thread, one at a time per channel.
 *   reply, reply_error, reply_step, reply_init and cancelled on any thread, also while another one
 *   is inside next. wake and stop on any thread or in a signal handler. Threads of the library
 *   serve the channels that are not taken. One more blocks until the worker stops. No request of a
 *   taken channel passes through them.
 * Order: up to `depth` opaque requests may be lent at a time, and be replied to in any order. The
 *   library publishes the replies in the order of the requests: a reply ahead of its turn waits in
 *   its slot. The reason: a rank publishes its progress as one number, up to which it has replied.
 *   While a step or an init is lent, next returns COX_BUSY: what follows builds on its result.
 * Ownership: request.bytes, .batch, .outputs and .init are lent until the reply. So is .reply, the
 *   slot from which the coordinator reads the reply: writing the reply there saves a copy.
 * Without a reply: the request ends at its deadline. The coordinator then refuses new requests on
 *   the channel (COX_LATE) until the rank replies, although it drops that reply. join and free
 *   reply to nothing: the coordinator treats the rank as having left, and requests that asked it
 *   end with COX_PEER_DEAD.
 * Errors: err may be NULL; each call clears it first.
 * Blocks: next until its deadline, a request, wake, stop, or a signal. reply only while it
 *   allocates memory for a reply that does not fit its slot. reply_error for 100 ms at most. join
 *   until the worker stops.
 * If the process dies: as with callbacks, the coordinator detects the death and never reads a
 *   half-written reply. Replies that waited for their turn are lost.
 */
#ifndef COX_WORKER_TAKE_H
#define COX_WORKER_TAKE_H

#include <sys/uio.h>

#include <coxswain/worker.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A channel as a bit of the `takes` argument of start. */
#define COX_WORKER_TAKES(channel) (UINT32_C(1) << (channel))

struct cox_worker_request {
    enum cox_channel_id channel;
    /* COX_TYPE_OPAQUE, MODEL_INFER, MODEL_INFER_SECOND or MODEL_INIT (ExecuteType) */
    uint32_t type;
    /* number of the request on its channel; the reply functions take it */
    uint64_t sequence;
    /* An opaque request, else NULL. It lies in shared memory, which other ranks of a named group
     * could write: read each byte once, or copy. */
    const uint8_t *bytes;
    size_t size;
    /* An opaque reply of up to reply_capacity bytes may be written here, which saves a copy. For a
     * longer one, pass other memory to cox_worker_reply. */
    uint8_t *reply;
    size_t reply_capacity;
    /* A step, and room for its batch->row_count outputs; else NULL. */
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    /* An init, else NULL. */
    const struct cox_init_request *init;
    /* 0; for later fields */
    uint64_t reserved[8];
};

/*
 * Starts serving. takes: the channels that the caller takes from, COX_WORKER_TAKES joined by |.
 * Each other channel gets a thread of the library, which runs its callbacks.
 *
 * Returns
 *   0
 *   COX_BUSY: the worker was started already
 *   COX_INVALID: no such channel
 *   -errno
 */
COX_PUBLIC int cox_worker_start(struct cox_worker *worker, uint32_t takes, struct cox_error *err);

/*
 * Blocks until a request of the channel is lent, or until deadline_ns (CLOCK_MONOTONIC; 0: does not
 * block; COX_DEADLINE_NEVER). *ret_request is written only if it returns 0.
 *
 * A signal interrupts the wait if its handler runs on this thread. There are two exceptions:
 * SA_RESTART without a deadline, and a signal that arrives just before the wait. A host that must
 * react to signals calls wake in its handler, or uses short deadlines.
 *
 * Returns
 *   0: a request is lent
 *   COX_TIMEOUT: no request arrived before the deadline
 *   COX_EMPTY: cox_worker_wake was called
 *   -EINTR: this thread handled a signal while it waited; the caller may call again
 *   COX_CLOSED: the group has ended (finalize, stop of the coordinator), or cox_worker_stop was
 *     called; err says which; every later call returns the same
 *   COX_PEER_DEAD: the coordinator has died (only with COX_ORPHAN_RETURN; otherwise the process
 *     ends)
 *   COX_BUSY: another thread is inside next on this channel, or a step or an init is lent
 *   COX_STATE: the channel is not taken, see start
 *   COX_INVALID: no such channel
 *   COX_CORRUPT: the shared state is invalid: a new request is in the frame of a lent one
 *   -errno: the wait failed
 */
COX_PUBLIC int cox_worker_next(struct cox_worker *worker, enum cox_channel_id channel,
                               uint64_t deadline_ns, struct cox_worker_request *ret_request,
                               struct cox_error *err);

/*
 * Replies to a lent opaque request with the bytes of all parts, one after the other. They may be
 * the request's. They are copied, unless they are already in request.reply. A reply longer than
 * reply_capacity is sent out of line. On failure the request stays lent, and the caller may reply
 * to it again.
 *
 * Returns
 *   0
 *   COX_STATE: the request is not lent: it was replied to already, or was not taken
 *   COX_INVALID: the request is a step or an init
 *   COX_TOO_LARGE: the reply does not fit a slot, and the group has no large payloads
 *   COX_NO_SPACE: no memory for the reply
 *   -errno
 */
COX_PUBLIC int cox_worker_reply_parts(struct cox_worker *worker, uint64_t sequence,
                                      const struct iovec *parts, size_t part_count,
                                      struct cox_error *err);

/* The same for bytes that lie in one place. */
static inline int cox_worker_reply(struct cox_worker *worker, uint64_t sequence, const void *bytes,
                                   size_t size, struct cox_error *err)
{
    struct iovec part;
    part.iov_base = (void *)(uintptr_t)bytes;
    part.iov_len = size;
    return cox_worker_reply_parts(worker, sequence, &part, 1, err);
}

/*
 * Fails a lent request of any type, for all ranks. The coordinator gets the code, the text and the
 * rank. code: an enum cox_status or a negative errno. text NULL: the text of the code. A text that
 * does not fit is cut off. detail: for an opaque request, detail_size bytes beside the text that
 * only the application interprets: cox_rank_result.bytes of a rank that failed. They are left out
 * where they do not fit the slot, and for a step or an init.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: code is 0
 */
COX_PUBLIC int cox_worker_reply_error(struct cox_worker *worker, uint64_t sequence, int code,
                                      const char *text, const void *detail, size_t detail_size,
                                      struct cox_error *err);

/*
 * Replies to a lent step with two arrays of count == batch->row_count values: the sampled token of
 * each row (-1 where it does not emit) and its logprob. tokens NULL: the caller has filled
 * request.outputs. logprobs NULL: all are 0. The sequence table advances.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: the request is not a step, or count is not batch->row_count
 */
COX_PUBLIC int cox_worker_reply_step(struct cox_worker *worker, uint64_t sequence,
                                     const int32_t *tokens, const float *logprobs, uint32_t count,
                                     struct cox_error *err);

/* Sets the values that an init callback starts with: no blocks, positions or thinking ids. */
static inline void cox_init_result_init(struct cox_init_result *ret_result)
{
    memset(ret_result, 0, sizeof *ret_result);
    ret_result->start_thinking_id = ret_result->stop_thinking_id = -1;
}
/*
 * Replies to a lent init.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: the request is not an init
 *   COX_TOO_LARGE: kv_cache_count is above COX_KV_CACHE_DESC_COUNT_MAX
 */
COX_PUBLIC int cox_worker_reply_init(struct cox_worker *worker, uint64_t sequence,
                                     const struct cox_init_result *result, struct cox_error *err);

/* Makes the present call of next on this channel, or else the following one, return COX_EMPTY. In a
 * legacy group a call that blocks already returns COX_EMPTY only when a request arrives, or
 * COX_TIMEOUT at its deadline: there the tokens are the events, so none is posted to wake it. A
 * later call returns that request. Async-signal-safe. */
COX_PUBLIC void cox_worker_wake(struct cox_worker *worker, enum cox_channel_id channel);

/*
 * Blocks until the worker stops, then joins the library's threads and leaves the group. Nothing is
 * lent any more. Call it once.
 *
 * Returns
 *   0: after finalize or stop
 *   COX_PEER_DEAD: the coordinator has died (only with COX_ORPHAN_RETURN)
 *   COX_STATE: the worker was not started, or is joined already
 *   -errno
 */
COX_PUBLIC int cox_worker_join(struct cox_worker *worker, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
