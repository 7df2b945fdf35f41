/*
 * take: a worker that takes requests and replies to them, in place of callbacks.
 *
 *   struct cox_worker_request request;
 *   cox_worker_start(worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), &err);
 *   while (cox_worker_next(worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, &err) == 0)
 *       cox_worker_reply(worker, request.sequence, request.bytes, request.size, &err);
 *   cox_worker_join(worker, &err);
 *
 * What is lent, and what is not: on the execute channel a request without a callback is lent to the
 *   caller of next: an opaque request, a step, an init that brings a configuration. Everything else
 *   that arrives on a taken channel is served inside next, on the calling thread, as cox_worker_run
 *   serves it: by its callback, or refused where it has none. So the callbacks of a taken channel
 *   run on no thread of the library. Link, transfer and recovery requests are always served by
 *   callbacks: their replies are messages that take an arena, and one of them at a time is enough.
 * Threads: start, join and free on one thread. next on any, one at a time per channel. reply,
 *   reply_error, reply_step, reply_init and cancelled on any thread, also while another one is
 *   inside next. wake and stop from anywhere, signal handlers included. The library's own threads
 *   serve the channels that are not taken, and one sleeps until the worker stops; no request of a
 *   taken channel passes through them.
 * Order: opaque requests may be replied to in any order, as many at a time as the group is deep.
 *   Replies are published in the order of the requests: one that overtakes is kept in its slot
 *   until the earlier ones are there, since a rank tells its progress by one number, which all
 *   that the coordinator concludes of a rank's order rests on. A step or an init is replied to
 *   before anything else is taken: the next step builds on its result.
 * Ownership: request.bytes, .batch, .outputs and .init are lent until the reply; so is .reply, the
 *   memory that the coordinator reads the reply from: a caller that writes there saves a copy.
 * Without a reply: the request stays in flight until its deadline, and is then late: the channel
 *   takes nothing new (COX_LATE) until the reply is there, also one that is of no more use. At join
 *   and free nothing is replied to; the coordinator sees a rank that has left, and the requests
 *   that it asked of it end with COX_PEER_DEAD.
 * Errors: err may be NULL; each call here begins it anew.
 * Blocks: next until its deadline, a request, wake, stop, or a signal; reply where the reply needs
 *   memory of its own, as long as that takes; reply_error for 100 ms at most; join until the worker
 *   stops.
 * If the process dies: as with callbacks: no reply is half published, and the coordinator sees the
 *   death. Replies that waited for their turn are lost with it.
 */
#ifndef COX_WORKER_TAKE_H
#define COX_WORKER_TAKE_H

#include "worker.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For start: the caller takes from these channels. */
#define COX_WORKER_TAKES(channel) (UINT32_C(1) << (channel))

struct cox_worker_request {
    enum cox_channel_id channel;
    /* COX_TYPE_OPAQUE, MODEL_INFER, MODEL_INFER_SECOND or MODEL_INIT (ExecuteType) */
    uint32_t type;
    /* its number on its channel: what the reply names it by */
    uint64_t sequence;
    /* An opaque request. In shared memory that other ranks of a named group could write: read each
     * byte once, or copy. NULL otherwise. */
    const uint8_t *bytes;
    size_t size;
    /* Where an opaque reply of up to reply_capacity bytes may be written, to spare a copy. A longer
     * one is given to reply from elsewhere. */
    uint8_t *reply;
    size_t reply_capacity;
    /* A step, and batch->row_count outputs to be filled. NULL otherwise. */
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    /* An init. NULL otherwise. */
    const struct cox_init_request *init;
    /* 0; for later fields */
    uint64_t reserved[8];
};

/*
 * Begins to serve. takes: channels that the caller takes from, COX_WORKER_TAKES joined by |; each
 * of the others gets a thread of the library, which calls back.
 *
 * Returns
 *   0
 *   COX_BUSY: it serves already
 *   COX_INVALID: no such channel
 *   -errno
 */
COX_PUBLIC int cox_worker_start(struct cox_worker *worker, uint32_t takes, struct cox_error *err);

/*
 * The next request of a channel, or what there is instead until deadline_ns (CLOCK_MONOTONIC; 0:
 * does not wait; COX_DEADLINE_NEVER). *ret_request is written only with 0.
 *
 * A signal ends a wait that it interrupts, if its handler runs on this thread: but not with
 * SA_RESTART where there is no deadline, nor if it comes just before the wait. A host that has to
 * react to signals calls wake in the handler, or uses short deadlines.
 *
 * Returns
 *   0: a request is lent
 *   COX_TIMEOUT: none came until the deadline
 *   COX_EMPTY: cox_worker_wake was called
 *   -EINTR: this thread handled a signal while it waited: call again, or leave
 *   COX_CLOSED: the group has ended (finalize, stop of the coordinator), or cox_worker_stop was
 *     called; err says which; so does every later call
 *   COX_PEER_DEAD: the coordinator has died, with COX_ORPHAN_RETURN; else the process ends then
 *   COX_BUSY: another thread is inside next on this channel, or a step or an init is lent
 *   COX_STATE: the channel is not taken, see start
 *   COX_INVALID: no such channel
 *   COX_CORRUPT: the shared state makes no sense any more
 *   -errno: there can be no wait here
 */
COX_PUBLIC int cox_worker_next(struct cox_worker *worker, enum cox_channel_id channel,
                               uint64_t deadline_ns, struct cox_worker_request *ret_request,
                               struct cox_error *err);

/*
 * Replies to a lent opaque request with size bytes, which are copied, unless they are in
 * request.reply. What does not fit there goes out of line. Unless 0 is returned the request stays
 * lent, to be replied to with something else.
 *
 * Returns
 *   0
 *   COX_STATE: this worker has no such request: replied to already, or not taken
 *   COX_INVALID: it is a step or an init
 *   COX_TOO_LARGE: the group has no large payloads, and a slot less room
 *   COX_NO_SPACE: there is no memory for it
 *   -errno
 */
COX_PUBLIC int cox_worker_reply(struct cox_worker *worker, uint64_t sequence, const void *bytes,
                                size_t size, struct cox_error *err);

/*
 * Fails any lent request: code and text reach the coordinator with the rank, and end the request
 * for all ranks. code: an enum cox_status or a negative errno. NULL: the text of the code. Text
 * that does not fit is cut.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply
 *   COX_INVALID: code is 0
 */
COX_PUBLIC int cox_worker_reply_error(struct cox_worker *worker, uint64_t sequence, int code,
                                      const char *text, struct cox_error *err);

/*
 * Replies to a lent step, by columns of count == batch->row_count values: the sampled token of each
 * row, -1 where it does not emit, and its logprob. tokens NULL: both are in request.outputs;
 * logprobs NULL: all are 0. The sequence table moves.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply
 *   COX_INVALID: it is no step, or count is another
 */
COX_PUBLIC int cox_worker_reply_step(struct cox_worker *worker, uint64_t sequence,
                                     const int32_t *tokens, const float *logprobs, uint32_t count,
                                     struct cox_error *err);

/* As a callback finds it: no blocks, no positions, no thinking. */
COX_PUBLIC void cox_init_result_init(struct cox_init_result *ret_result);
/*
 * Replies to a lent init.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply
 *   COX_INVALID: it is no init
 *   COX_TOO_LARGE: kv_cache_count
 */
COX_PUBLIC int cox_worker_reply_init(struct cox_worker *worker, uint64_t sequence,
                                     const struct cox_init_result *result, struct cox_error *err);

/* True once the reply has no reader: the request of the execute channel, or the group, has ended
 * (deadline, failure or death of another rank); also when the worker is pausing. The caller must
 * still reply; the reply is dropped. For a request that is lent; sequence 0: for the opaque
 * callback that this thread is in. Lock-free. */
COX_PUBLIC bool cox_worker_cancelled(const struct cox_worker *worker, uint64_t sequence);

/* Ends the next that waits on this channel, or else the one that comes, with COX_EMPTY.
 * Async-signal-safe. In a legacy group, where tokens are the news, only at its deadline. */
COX_PUBLIC void cox_worker_wake(struct cox_worker *worker, enum cox_channel_id channel);

/*
 * Waits until the worker stops, leaves the group and ends the library's threads. What is lent is
 * lent no more. Once.
 *
 * Returns
 *   0: after finalize or stop
 *   COX_PEER_DEAD: the coordinator is gone (only with COX_ORPHAN_RETURN)
 *   COX_STATE: it was not started, or is joined already
 *   -errno
 */
COX_PUBLIC int cox_worker_join(struct cox_worker *worker, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
