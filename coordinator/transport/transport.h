/*
 * transport: a group whose ranks are not processes of this coordinator's machine.
 *
 * An executor reaches its ranks through shared memory, or through a transport,
 * which passes on what is published and brings the replies. Everything else is the same: sequence
 * numbers, gathering, deadlines, deaths, replacement, status. Between the two is the memory that
 * the executor has in any case: the transport reads a request where it was packed, and writes a
 * reply to the slot of its rank. libcoxswain-nodes.so (nodes/) is one: ranks on other machines.
 *
 *   executor -> transport: struct cox_transport, below. The executor calls its functions.
 *   transport -> executor: struct cox_transport_host.
 *
 * The far side of a transport has an executor as well, for the ranks of its machine, and passes on
 * to them what it receives: cox_executor_forward.
 *
 * Threads: publish is called with the submit lock of a channel, one request at a time per channel;
 *   the others on any thread, also at the same time. Those of the host on any thread, but for one
 *   rank on one at a time.
 * Ownership: the executor borrows the transport from start until free has returned. Bytes and texts
 *   are lent for the call.
 * Blocks: nothing but open, recorder, stacks and stop.
 */
#ifndef COX_COORDINATOR_TRANSPORT_H
#define COX_COORDINATOR_TRANSPORT_H

#include <coxswain/executor.h>

#include <sys/types.h>

struct cox_executor;
struct cox_executor_options;
struct cox_payload_memory;

/* A request, as it was published. */
struct cox_transport_request {
    enum cox_channel_id channel;
    /* ExecuteType or COX_TYPE_OPAQUE */
    uint32_t type;
    uint64_t sequence;
    /* absolute, CLOCK_MONOTONIC; COX_DEADLINE_NEVER */
    uint64_t deadline_ns;
    /* it has replies */
    bool replies;
    const struct cox_rank_set *asked;
    /* the packed message, or opaque bytes: also those of a request that does not fit a frame */
    const void *bytes;
    size_t size;
    /* Of forward, with bytes NULL: finished memory (payload_memory.h) that has opaque bytes, more
     * than a channel's request memory. The executor has a reference of its own until no rank that
     * was asked reads it: each has returned it, or is dead. NULL: none. */
    struct cox_payload_memory *memory;
};

/* What is known of a rank's process; 0: not known. */
struct cox_transport_process {
    /* stopped by a signal */
    bool stopped;
    /* as in struct cox_rank_status */
    uint64_t cpu_ns, resident_bytes;
};

/* What a transport tells its executor. */
struct cox_transport_host {
    /* The process of the rank runs, on this node, and serves the present incarnation of the rank.
     * */
    int (*attach)(struct cox_executor *executor, uint32_t rank, const char *node, pid_t pid,
                  struct cox_error *err);
    /* No process could be started for the rank; text as below. */
    void (*failed)(struct cox_executor *executor, uint32_t rank, const char *node,
                   const char *text);
    /* The rank is dead. text: how, behind "rank 5 (node b, pid 123) "; signal and exit status as in
     * struct cox_rank_result, if known. Idempotent. */
    void (*died)(struct cox_executor *executor, uint32_t rank, const char *text, bool known,
                 int signal, int exit_status);
    /* The rank has the request. For display, and for the diagnosis of hangs. */
    void (*taken)(struct cox_executor *executor, enum cox_channel_id channel, uint32_t rank,
                  uint64_t sequence);
    /* The rank has replied; NULL: too late, and the bytes are not there. failed: as *ret_failed
     * of cox_completion_raw. A reply to another request than one that waits for it is dropped, and
     * so is a second one.
     * Returns
     *   0
     *   COX_STALE: dropped
     *   COX_NO_SPACE: a reply that is larger than its slot, of which the rank's failure is told
     */
    int (*reply)(struct cox_executor *executor, enum cox_channel_id channel, uint32_t rank,
                 uint64_t sequence, const void *bytes, size_t size, bool failed,
                 struct cox_error *err);
    /* A line that the process of the rank wrote; a fault that it reported outside any reply. */
    void (*line)(struct cox_executor *executor, uint32_t rank, bool is_stderr, const char *text);
    void (*fault)(struct cox_executor *executor, int32_t rank, const char *text);
};

/* Where the threads of a rank are, as its machine has sent it. */
struct cox_transport_stacks {
    /* Foreign bytes with a zero at the end, COX_STACKS_TEXT_MAX at most: a line "summary: ...", and
     * those of cox_rank_stacks (executor.h). Of malloc, the caller's; NULL: there is none. */
    char *text;
    /* why not, in words */
    char why[256];
};

struct cox_transport {
    void *context;
    /* The ranks were started for an earlier coordinator, and may have loaded what the first init
     * asks for: it is sent as a replay. NULL: false. */
    bool (*continued)(void *context);
    /* Before the first request: the executor is made, and its ranks may attach. The functions of
     * host may be called until stop has returned. Returns 0 or an enum cox_status. */
    int (*start)(void *context, struct cox_executor *executor,
                 const struct cox_transport_host *host, struct cox_error *err);
    /* The number above which the first request of each channel is numbered; called once, before
     * start. NULL: 0. */
    uint64_t (*first_sequence)(void *context, enum cox_channel_id channel);
    /* A process is wanted for the rank, as this incarnation; it attaches (attach of the host). In
     * start: all of them, with incarnation 1. Returns 0 or an enum cox_status. */
    int (*open)(void *context, uint32_t rank, uint32_t incarnation, struct cox_error *err);
    /* SIGKILL for the process of the rank; its death is reported like any other. */
    void (*kill)(void *context, uint32_t rank);
    /* A request was published. Copies what it keeps; must not block. */
    void (*publish)(void *context, const struct cox_transport_request *request);
    /* Steps up to this number are cancelled. */
    void (*cancel_steps)(void *context, enum cox_channel_id channel, uint64_t through);
    /* Requests up to this number have ended, one of them without the replies of all ranks: those
     * that still run one may stop. Called with a lock of the channel. */
    void (*ended)(void *context, enum cox_channel_id channel, uint64_t through);
    /* Requests will name this memory by its handle (struct cox_handle): ranks elsewhere get a copy
     * of it before the first of them, under a handle of their own in its place. fd: an image
     * (region.h), size bytes, which stays the caller's. digest: of the content; memory with the
     * same one is not sent again. NULL: not supported. Returns 0 or an enum cox_status. */
    int (*share)(void *context, const void *handle, int fd, uint64_t size, uint64_t digest,
                 struct cox_error *err);
    /* No request names it any more. */
    void (*unshare)(void *context, const void *handle);
    /* Where a rank is: its node, and "HOST:PORT" of the agent there, for other groups. Returns
     * false if that is not known. NULL: never. */
    bool (*place)(void *context, uint32_t rank, char *node, size_t node_size, char *address,
                  size_t address_size);
    /* Why a rank that is alive may not answer now ("node b is suspect: not heard for 412 ms");
     * returns false if there is nothing to say. For display. */
    bool (*trouble)(void *context, uint32_t rank, char *buffer, size_t buffer_size);
    /* The process of the rank, as its node said last. Does not block; called with locks of the
     * channel. NULL: nothing is known. */
    void (*process)(void *context, uint32_t rank, struct cox_transport_process *ret_process);
    /* Copies the flight recorder of the rank into cox_recorder_area_size bytes, its times on the
     * clock of this machine. Blocks until its node has sent it, or deadline_ns; the node is not
     * waited for once it is suspect. NULL: not supported.
     * Returns
     *   0
     *   COX_NOT_FOUND: nothing is recorded there
     *   COX_PEER_DEAD: the node, which err names, is suspect or dead
     *   COX_TIMEOUT: the node, which err names, has sent nothing by deadline_ns
     *   COX_CORRUPT: what it sent is no recorder of the rank
     *   COX_CLOSED: the transport stops
     *   -ENOMEM
     */
    int (*recorder)(void *context, uint32_t rank, void *copy, uint64_t deadline_ns,
                    struct cox_error *err);
    /* Reads where the threads of the asked ranks are: fills in ret_stacks[rank] of each, which are
     * zero. Blocks until their nodes have sent it, or deadline_ns, but not for a dead node. One
     * thread at a time. NULL: not supported. */
    void (*stacks)(void *context, const struct cox_rank_set *asked, uint64_t deadline_ns,
                   struct cox_transport_stacks *ret_stacks);
    /* Whether another coordinator has taken the ranks over: all of them have died or failed, and
     * none can be started again. Called with locks. NULL: 0.
     * Returns
     *   0: no
     *   COX_TAKEN: err says which one
     */
    int (*taken_over)(void *context, struct cox_error *err);
    /* Connections to this machine and to nodes that ended before they had shown a certificate of
     * the cluster, so far. For display. NULL: there are none. */
    uint64_t (*refused)(void *context);
    /* The group ends: what was published before is sent. failed: not in order, but since a rank
     * was dead, or an init had not succeeded. Afterwards no function of host is called. */
    void (*stop)(void *context, bool failed);
};

/* ---- the far side ---- */

/* The reply of a rank of this machine, as the rank wrote it: what is passed on. Lent until the
 * handler returns. NULL: the rank has not replied, or its reply was refused here (its result says
 * why), or it came after the end of the request (COX_LATE). *ret_failed: the bytes are an
 * ExecuteResponse, also where the request was opaque: they report a failure. */
const uint8_t *cox_completion_raw(const struct cox_completion *completion, uint32_t rank,
                                  size_t *ret_size, bool *ret_failed);

/* What an executor has besides its public options; all zero: nothing. */
struct cox_executor_remote {
    /* The ranks are reached by it, as those of options.nodes are. Borrowed until free has returned.
     * NULL: through shared memory. */
    const struct cox_transport *transport;
    /* The far side of a transport: this machine has the ranks rank_first to rank_first + rank_here
     * - 1 of the rank_count; rank_here 0: all of them. Requests come by cox_executor_forward, and
     * `forwarded` gets their replies, with hooks.context. There are no other requests and no
     * handlers then. workers.devices: rank_here of them. NULL: none of this. */
    cox_completion_fn forwarded;
    uint32_t rank_first;
    uint32_t rank_here;
    /* with forwarded: replaces `model` in the configuration of an init; NULL: it stays */
    const char *forwarded_model;
};
/* As cox_executor_start. */
int cox_executor_start_remote(const struct cox_executor_options *options,
                              const struct cox_executor_remote *remote,
                              struct cox_executor **ret_executor, struct cox_error *err);

/* Passes on a request that was published elsewhere, under its number, to those of its ranks that
 * are here. Numbers only grow; those between belong to requests that ask no
 * rank of this machine. `forwarded` gets the replies, once, and once more if ranks were late.
 * An init forms the rank group of all ranks here. Only in an executor with `forwarded`, whose
 * other functions for requests are then not used. Returns
 *   0
 *   COX_FULL: the frame is in use
 *   COX_LATE: a rank still owes a reply
 *   COX_STALE: the number, or a later one, was passed on before
 *   COX_PEER_DEAD: an asked rank of this machine is dead
 *   COX_CORRUPT: bytes of an init that cannot be read
 *   COX_INVALID: memory for what fits a frame
 *   as cox_executor_submit
 */
int cox_executor_forward(struct cox_executor *executor, const struct cox_transport_request *request,
                         struct cox_error *err);
/* Requests up to this number have ended where they came from: those that are in flight here end
 * with COX_TIMEOUT, so that ranks may stop. */
void cox_executor_end_forwarded(struct cox_executor *executor, enum cox_channel_id channel,
                                uint64_t through);
/* Steps up to this number are cancelled: ranks drop them, and stop waiting in them. */
void cox_executor_cancel_steps(struct cox_executor *executor, enum cox_channel_id channel,
                               uint64_t through);
/* The memory of the rank group that the last init has formed, for a mirror of the ranks of other
 * machines (worker/group/group_mirror.h). */
struct cox_group_window {
    uint64_t incarnation;
    uint32_t value_size;
    /* named attach: one object; -1: each rank has its own */
    int fd;
    uint64_t offset;
    /* sealed attach: of each rank, those of other machines writable; and the wakeups */
    void *words[COX_RANK_COUNT_MAX], *values[COX_RANK_COUNT_MAX];
    void *wakeups;
};
/* The fd and the memory stay the executor's, until the next init.
 * Returns
 *   0
 *   COX_UNSUPPORTED: there was no init, or all ranks are here
 */
int cox_executor_group_window(const struct cox_executor *executor,
                              struct cox_group_window *ret_window);
/* The last number that was passed on. */
uint64_t cox_executor_forwarded_through(struct cox_executor *executor, enum cox_channel_id channel);

#endif
