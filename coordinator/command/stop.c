/* coxswain stop: ends a running group in order, and waits until it is gone. */
#include "command.h"

#include "channel/base/peer.h"
#include "channel/socket/socket.h"
#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>

/* A group that is stuck is given 3 s to leave, 2 s after SIGTERM, and then killed. */
#define TIMEOUT_MS 30000

static void help(FILE *file)
{
    fprintf(file,
            "Usage: coxswain stop [--name NAME | --door PATH] [--timeout SEC]\n"
            "\n"
            "Asks a running group to end in order, as SIGTERM to its coordinator does, and waits\n"
            "until its coordinator is gone, and with it every worker, also those that are stuck.\n"
            "\n"
            "      --name NAME    of the group (default: the only one that is alive)\n"
            "      --door PATH    the same by its door, as `run` prints it\n"
            "      --timeout SEC  wait so long (default 30)\n"
            "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {NULL, 0, NULL, 0},
};

static int ask(struct cox_client *client, uint64_t deadline_ns, struct cox_error *err)
{
    CoxswainControl__StopRequest stop = COXSWAIN_CONTROL__STOP_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP;
    request.stop = &stop;
    CoxswainControl__ControlReply *reply;
    struct cox_error error = {0};
    int r = cox_client_ask(client, &request, deadline_ns, &reply, &error);
    if (r == COX_CLOSED) /* it had been told before */
        return 0;
    if (r)
        return cox_fail(err, r, "%s", error.text);
    return reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE
               ? 0
               : cox_fail(err, COX_CORRUPT, "the group answered something else than that it ends");
}

/* The process is gone, not only its end of the connection, which it closes a little before. */
static int await_end(struct cox_client *client, const struct cox_peer *peer, uint64_t deadline_ns,
                     struct cox_error *err)
{
    for (;;) {
        uint64_t now = cox_now_ns();
        if (now >= deadline_ns)
            return cox_fail(err, COX_TIMEOUT,
                            "the group was told to end and has not ended in time");
        struct pollfd fd = {.fd = peer->pidfd >= 0 ? peer->pidfd : client->stream.fd,
                            .events = POLLIN};
        uint64_t left_ms = (deadline_ns - now) / COX_NSEC_PER_MSEC + 1;
        int count = poll(&fd, 1, left_ms > 60000 ? 60000 : (int)left_ms);
        if (count < 0 && errno != EINTR)
            return cox_fail(err, -errno, "poll: %s", cox_status_text(-errno));
        if (count <= 0)
            continue;
        if (peer->pidfd >= 0)
            return 0;
        int r = cox_stream_fill(&client->stream);
        if (r)
            return r == COX_CLOSED ? 0 : cox_fail(err, r, "the connection to the group broke");
    }
}

static int stop(const struct cox_connection *target)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    struct cox_error error = {0};
    uint64_t deadline_ns = cox_deadline_after_ms(target->timeout_ms);
    int r = cox_connection_open(target, &client, deadline_ns, &error);
    if (r)
        return cox_exit_with(&error);
    /* Before it is told: it answers after this, so the number is still its own. */
    struct cox_socket_peer who = {0};
    if (cox_socket_peer(client.stream.fd, &who) || who.pid == 0 || cox_peer_open(who.pid, 0, &peer))
        peer = (struct cox_peer)COX_PEER_NONE;
    r = ask(&client, deadline_ns, &error);
    if (!r)
        r = await_end(&client, &peer, deadline_ns, &error);
    return r ? cox_exit_with(&error) : COX_EXIT_OK;
}

int cox_command_stop(int argc, char **argv)
{
    struct cox_connection target = {.timeout_ms = TIMEOUT_MS};
    struct cox_error error = {0};
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_TARGET_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = cox_connection_take(&target, option, argv, &error);
    }
    if (!r && optind < argc)
        r = cox_fail(&error, COX_INVALID, "'%.64s' is not expected here", argv[optind]);
    if (!r)
        r = cox_connection_check(&target, &error);
    return r ? cox_exit_usage("stop", &error) : cox_exit_flushed(stop(&target));
}
