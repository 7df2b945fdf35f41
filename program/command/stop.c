/* coxswain stop: ends a running group in order, and waits until it is gone. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/socket/socket.h"
#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>

/* A stuck group has 3 s to leave, 2 s after SIGTERM, and is then killed. */
#define TIMEOUT_MS 30000
/* How long a program that may have other work lives on after its group, and is still waited for. */
#define PROGRAM_MS 2000

/* *ret_done: lent by the client; untouched if the group is already ending. */
static int ask(struct cox_client *client, uint64_t deadline_ns,
               const CoxswainControl__Done **ret_done, struct cox_error *err)
{
    CoxswainControl__StopRequest stop = COXSWAIN_CONTROL__STOP_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP;
    request.stop = &stop;
    CoxswainControl__ControlReply *reply = NULL;
    struct cox_error error = {0};
    int r = cox_client_ask(client, &request, deadline_ns, &reply, &error);
    if (r == COX_CLOSED) /* it is already stopping */
        return 0;
    if (r)
        return cox_fail(err, r, "%s", error.text);
    if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE)
        return cox_fail(err, COX_CORRUPT, "the group replied something other than that it ends");
    *ret_done = reply->done;
    return 0;
}

/* Waits for the end of the group, which is that of the connection, and then for that of the
 * process, which usually comes a little later. */
static int await_end(struct cox_client *client, const struct cox_peer *peer, bool process_ends,
                     uint64_t deadline_ns, struct cox_error *err)
{
    bool ended = false;
    for (;;) {
        if (cox_now_ns() >= deadline_ns)
            return ended && !process_ends
                       ? 0
                       : cox_fail(err, COX_TIMEOUT,
                                  "the group has the order to end and has not ended in time");
        struct pollfd fds[] = {{.fd = peer->pidfd, .events = POLLIN},
                               {.fd = ended ? -1 : client->stream.fd, .events = POLLIN}};
        int count = poll(fds, 2, cox_deadline_poll_ms(deadline_ns));
        if (count < 0 && errno != EINTR)
            return cox_fail(err, -errno, "poll: %s", cox_status_text(-errno));
        if (count <= 0)
            continue;
        if (fds[0].revents)
            return 0;
        int r = cox_stream_fill(&client->stream);
        if (r && r != COX_CLOSED)
            return cox_fail(err, r, "the connection to the group broke");
        if (r && peer->pidfd < 0)
            return 0;
        ended = r == COX_CLOSED;
        if (ended && !process_ends)
            deadline_ns = cox_deadline_min(deadline_ns, cox_deadline_after_ms(PROGRAM_MS));
    }
}

static int stop(const void *choice, struct cox_client *client, uint64_t timeout_ms,
                uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    (void)choice, (void)timeout_ms;
    /* Before the request: the coordinator replies after this, so the pid is still its own. */
    struct cox_socket_peer socket_peer = {0};
    if (cox_socket_read_peer(client->stream.fd, &socket_peer) || socket_peer.pid == 0 ||
        cox_peer_open(socket_peer.pid, 0, &peer))
        peer = (struct cox_peer)COX_PEER_NONE;
    const CoxswainControl__Done *done = NULL;
    int r = ask(client, deadline_ns, &done, err);
    if (r)
        return r;
    *ret_reply = done ? &done->base : NULL;
    return await_end(client, &peer, done && done->process_ends, deadline_ns, err);
}

static int run(void *choice)
{
    static const struct cox_client_command command = {
        .reply = &coxswain_control__done__descriptor,
        .did = "has ended",
        .timeout_ms = TIMEOUT_MS,
        .ask = stop,
    };
    return cox_client_command_run(&command, choice, choice);
}

const struct cox_command cox_command_stop = {
    .name = "stop",
    .summary = "end a running group and wait until it is gone",
    .arguments = "[NAME]",
    .text = "Asks a running group to end in order, as SIGTERM to its coordinator does, and waits "
            "until its coordinator is gone, and with it every worker, also those that are stuck "
            "(at most 30 s by default). In a program that lives on, as one of Python may, the "
            "group ends, and its calls fail.",
    .examples = "  coxswain stop mine\n",
    .choice_size = sizeof(struct cox_connection),
    .groups = {{&cox_connection_options, 0}},
    .words = cox_connection_words,
    .run = run,
};
