/* transport: what a transport tells its executor. It does for a rank what the rank itself does in
 * shared memory: it attaches, takes requests, and replies. */
#include "coordinator/transport/transport.h"

#include "channel/base/idioms.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/executor.pb-c.h"
#include "proto/large_payload_ref.h"
#include "proto/wire.h"
#include "core.h"
#include "executor_internal.h"

#include <coxswain/requests.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* A remote process has no start time here; 0 stands for a rank that did not state it. */
#define REMOTE_START 1

static struct cox_large_payload *remote_reply(struct cox_executor *executor,
                                              enum cox_channel_id channel, uint32_t rank,
                                              uint64_t sequence)
{
    const struct cox_geometry *geometry = &executor->geometry;
    const size_t frame = cox_geometry_frame(sequence, geometry->depth);
    return &executor->remote_replies[((size_t)channel * geometry->depth + frame) *
                                         geometry->rank_count +
                                     rank];
}

static size_t remote_reply_count(const struct cox_executor *executor)
{
    return (size_t)COX_TWO_WAY_COUNT * executor->geometry.depth * executor->geometry.rank_count;
}

int cox_executor_share(struct cox_executor *executor, const struct cox_handle *handle, int fd,
                       uint64_t size, uint64_t digest, struct cox_error *err)
{
    const struct cox_transport *transport = executor->remote.transport;
    if (!transport)
        return 0;
    if (!transport->share)
        return cox_fail(err, COX_UNSUPPORTED, "the transport shares no memory");
    return transport->share(transport->context, handle, fd, size, digest, err);
}

void cox_executor_unshare(struct cox_executor *executor, const struct cox_handle *handle)
{
    const struct cox_transport *transport = executor ? executor->remote.transport : NULL;
    if (transport && transport->unshare)
        transport->unshare(transport->context, handle);
}

void cox_executor_kill_remote(void *context, uint32_t rank)
{
    const struct cox_executor *executor = context;
    const struct cox_transport *transport = executor->remote.transport;
    transport->kill(transport->context, rank);
}

static int transport_attach(struct cox_executor *executor, uint32_t rank, const char *node,
                            pid_t pid, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int end_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    _cox_cleanup_(cox_close_fd) int kept_fd = end_fd < 0 ? -1 : fcntl(end_fd, F_DUPFD_CLOEXEC, 3);
    if (rank >= executor->geometry.rank_count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32, rank);
    if (kept_fd < 0)
        return cox_fail(err, -errno, "eventfd: %s", cox_status_text(-errno));
    struct cox_layout_rank *own = executor->control.ranks[rank];
    const uint32_t group_incarnation = executor->control.group_incarnation;
    const uint32_t incarnation = cox_rank_incarnation(&executor->ranks[rank]);
    pthread_mutex_lock(&executor->transport_lock);
    int r = cox_supervisor_register_remote(executor->supervisor, rank, node, pid,
                                           cox_steal_fd(&end_fd));
    if (r == 0 && !cox_state_claim_identity(&own->identity, (uint32_t)pid, REMOTE_START))
        r = COX_TAKEN;
    if (r == 0) {
        cox_close_fd(&executor->remote_ends[rank]);
        executor->remote_ends[rank] = cox_steal_fd(&kept_fd);
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
            cox_state_set_incarnation(&own->lines[c], group_incarnation, incarnation);
        cox_state_announce_identity(&own->identity, group_incarnation, incarnation);
        /* As an attaching worker: the thread that waits for the rank is woken. */
        cox_gate_post(&executor->channels[COX_CHANNEL_EXECUTE].gate, rank,
                      COX_WAKEUP_RESPONSE_CONSUME);
    }
    pthread_mutex_unlock(&executor->transport_lock);
    return r ? cox_fail(err, r, "rank %" PRIu32 " on node %s: %s", rank, node, cox_status_text(r))
             : 0;
}

static void transport_died(struct cox_executor *executor, uint32_t rank, const char *text,
                           bool known, int signal, int exit_status)
{
    const struct cox_exit how = {.known = known, .signal = signal, .exit_status = exit_status};
    pthread_mutex_lock(&executor->transport_lock);
    if (executor->remote_ends[rank] >= 0) {
        cox_supervisor_set_remote_end(executor->supervisor, rank, &how, text);
        cox_eventfd_signal(executor->remote_ends[rank]);
        cox_close_fd(&executor->remote_ends[rank]);
    }
    pthread_mutex_unlock(&executor->transport_lock);
}

static void transport_failed(struct cox_executor *executor, uint32_t rank, const char *node,
                             const char *text)
{
    int end_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int kept_fd = end_fd < 0 ? -1 : fcntl(end_fd, F_DUPFD_CLOEXEC, 3);
    pthread_mutex_lock(&executor->transport_lock);
    if (kept_fd >= 0 &&
        cox_supervisor_register_remote(executor->supervisor, rank, node, COX_SUPERVISOR_PID_NONE,
                                       cox_steal_fd(&end_fd)) == 0) {
        cox_close_fd(&executor->remote_ends[rank]);
        executor->remote_ends[rank] = cox_steal_fd(&kept_fd);
    }
    cox_close_fd(&end_fd);
    cox_close_fd(&kept_fd);
    pthread_mutex_unlock(&executor->transport_lock);
    transport_died(executor, rank, text, false, 0, -1);
}

/* A request without a reply is done once it was taken, and all before it are done. transport_lock
 * is held. */
static void remote_advance(struct cox_executor *executor, enum cox_channel_id channel,
                           uint32_t rank, struct cox_layout_rank_line *line)
{
    const uint64_t taken = cox_state_taken(line), depth = executor->geometry.depth;
    const uint64_t before = cox_state_done(line);
    /* Of those that are longer ago none is awaited. */
    uint64_t done = taken > before + depth ? taken - depth : before;
    while (done < taken && !cox_collector_awaits(&executor->collectors[channel], rank, done + 1))
        done++;
    if (done > before)
        cox_state_set_done(line, done);
}

static void transport_taken(struct cox_executor *executor, enum cox_channel_id channel,
                            uint32_t rank, uint64_t sequence)
{
    struct cox_layout_rank_line *line = cox_state_line(&executor->control, rank, channel);
    pthread_mutex_lock(&executor->transport_lock);
    if (executor->remote_ends[rank] >= 0 && cox_state_taken(line) < sequence) {
        cox_state_set_taken(line, sequence);
        /* The node has its own copy of the frame. */
        cox_state_set_returned(line, sequence);
        const bool awaits = cox_collector_awaits(&executor->collectors[channel], rank, sequence);
        cox_state_set_rank(line, awaits ? COX_RANK_RUNNING : COX_RANK_IDLE, sequence, cox_now_ns());
        remote_advance(executor, channel, rank, line);
    }
    pthread_mutex_unlock(&executor->transport_lock);
}

/* A reply that does not fit its slot. Returns the length of its reference, in the slot. */
static int reply_out_of_line(struct cox_executor *executor, enum cox_channel_id channel,
                             uint32_t rank, uint64_t sequence, const void *bytes, size_t size,
                             uint8_t *slot, size_t capacity, size_t *ret_length,
                             struct cox_error *err)
{
    struct cox_large_payload *payload = remote_reply(executor, channel, rank, sequence);
    struct cox_error why = {0};
    if (size > executor->large_payloads.reply_limits.size_max)
        return cox_fail(err, COX_NO_SPACE, "a reply of %zu bytes, at most %" PRIu64 " are taken",
                        size, executor->large_payloads.reply_limits.size_max);
    int r = cox_large_payload_reserve(&executor->large_payloads.sender, NULL, size, payload, &why);
    if (r)
        return cox_fail(err, COX_NO_SPACE, "a reply of %zu bytes: %s", size, why.text);
    memcpy(payload->region.base, bytes, size);
    struct cox_large_payload_ref ref = cox_large_payload_refer(payload, size);
    Coxswain__LargePayloadRef reference;
    Coxswain__ExecuteResponse outer = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_large_payload_ref_fill(&reference, &ref);
    outer.large_payload = &reference;
    COX_SET(&outer, rank, (int32_t)rank);
    r = cox_wire_response_pack(&outer, slot, capacity, ret_length);
    return r ? cox_fail(err, r, "the slot has no room for a reference") : 0;
}

/* The slot of a rank that could not be given its reply: says so. */
static size_t reply_refusal(uint32_t rank, int r, const char *text, uint8_t *slot, size_t capacity)
{
    Coxswain__ExecuteResponse refusal = COXSWAIN__EXECUTE_RESPONSE__INIT;
    size_t length = 0;
    COX_SET(&refusal, status, r);
    COX_SET(&refusal, rank, (int32_t)rank);
    refusal.error_text = (char *)(uintptr_t)text;
    if (cox_wire_response_pack(&refusal, slot, capacity, &length))
        return 0;
    return length;
}

static int reply_take(struct cox_executor *executor, enum cox_channel_id id, uint32_t rank,
                      uint64_t sequence, const void *bytes, size_t size, bool failed,
                      struct cox_error *err)
{
    struct cox_channel *channel = &executor->channels[id];
    struct cox_layout_rank_line *line = cox_state_line(&executor->control, rank, id);
    const uint32_t incarnation = cox_rank_incarnation(&executor->ranks[rank]);
    size_t capacity, length = size;
    pthread_mutex_lock(&executor->transport_lock);
    if (executor->remote_ends[rank] < 0 || cox_state_done(line) >= sequence ||
        !cox_collector_awaits(&executor->collectors[id], rank, sequence)) {
        pthread_mutex_unlock(&executor->transport_lock);
        return COX_STALE;
    }
    int r = 0;
    uint8_t *slot = cox_reply_slot(channel, rank, sequence, false, &capacity);
    if (bytes && size <= capacity) {
        memcpy(slot, bytes, size);
    } else if (!bytes) {
        /* The request may be in flight here still. */
        length = reply_refusal(rank, COX_ABORTED,
                               "its node had ended the request before it replied", slot, capacity);
        failed = true;
    } else {
        struct cox_error why = {0};
        r = reply_out_of_line(executor, id, rank, sequence, bytes, size, slot, capacity, &length,
                              &why);
        failed = true; /* an ExecuteResponse, whatever was asked */
        if (r) {
            length = reply_refusal(rank, r, why.text, slot, capacity);
            cox_fail(err, r, "%s", why.text);
        }
    }
    cox_state_set_incarnation(line, executor->control.group_incarnation, incarnation);
    if (cox_state_taken(line) < sequence) {
        cox_state_set_taken(line, sequence);
        cox_state_set_returned(line, sequence);
    }
    cox_reply_commit(channel, rank, sequence, length, failed);
    cox_state_set_rank(line, COX_RANK_IDLE, sequence, cox_now_ns());
    cox_state_set_done(line, sequence);
    remote_advance(executor, id, rank, line);
    pthread_mutex_unlock(&executor->transport_lock);
    cox_gate_reply(&channel->gate, rank, sequence, failed);
    /* As a rank does that has an eventfd. */
    if (executor->notify_fds[rank] >= 0 &&
        cox_state_notifies(cox_state_channel(&executor->control, id))) {
        cox_eventfd_signal(executor->notify_fds[rank]);
    }
    return r;
}

static int transport_reply(struct cox_executor *executor, enum cox_channel_id id, uint32_t rank,
                           uint64_t sequence, const void *bytes, size_t size, bool failed,
                           struct cox_error *err)
{
    const uint64_t depth = executor->geometry.depth;
    uint64_t before = cox_state_done(cox_state_line(&executor->control, rank, id));
    /* A rank replies in order. So it has replied to those before, too late for its node; otherwise
     * `done` would speak of replies that are not in their slots. */
    for (before = before + depth < sequence ? sequence - depth : before; before + 1 < sequence;
         before++)
        reply_take(executor, id, rank, before + 1, NULL, 0, false, NULL);
    return reply_take(executor, id, rank, sequence, bytes, size, failed, err);
}

static void transport_line(struct cox_executor *executor, uint32_t rank, bool is_stderr,
                           const char *text)
{
    cox_supervisor_add_line(executor->supervisor, rank, text);
    executor->options.hooks.line(executor->options.hooks.context, rank, is_stderr, text);
}

static void transport_fault(struct cox_executor *executor, int32_t rank, const char *text)
{
    executor->error_channel.report(executor->error_channel.context, rank, text);
}

static const struct cox_transport_host transport_host = {
    .attach = transport_attach,
    .failed = transport_failed,
    .died = transport_died,
    .taken = transport_taken,
    .reply = transport_reply,
    .line = transport_line,
    .fault = transport_fault,
};

int cox_executor_open_transport(struct cox_executor *executor, struct cox_error *err)
{
    const struct cox_transport *transport = executor->remote.transport;
    executor->remote_replies =
        calloc(remote_reply_count(executor), sizeof *executor->remote_replies);
    if (!executor->remote_replies)
        return cox_fail(err, -ENOMEM, "no memory for the replies of other nodes");
    executor->large_payloads.reply_limits.origin = getpid();
    int r = transport->start(transport->context, executor, &transport_host, err);
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++)
        r = transport->open(transport->context, rank, 1, err);
    return r;
}

int cox_executor_taken_over(struct cox_executor *executor, struct cox_error *err)
{
    const struct cox_transport *transport = executor->remote.transport;
    return transport && transport->taken_over ? transport->taken_over(transport->context, err) : 0;
}

void cox_executor_close_transport(struct cox_executor *executor)
{
    const struct cox_transport *transport = executor->remote.transport;
    if (!transport || !executor->remote_replies)
        return;
    transport->stop(transport->context, executor->failed);
    /* No process is known any more: the ranks end on their nodes. */
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        transport_died(executor, rank, "was left to its node at the end of the group", false, 0,
                       -1);
    for (size_t i = 0; i < remote_reply_count(executor); i++)
        cox_large_payload_drop(&executor->large_payloads.sender, &executor->remote_replies[i]);
}
