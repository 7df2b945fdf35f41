#include "handle_peer.h"

#include "channel/base/handle_format.h"

struct order {
    enum peer_order order;
    int64_t argument;
    struct cox_handle handle;
};

struct server {
    struct cox_exporter *exporter;
    const char *socket_path;
    /* of the last export */
    int object;
    /* end of the socket exported last */
    int other;
    struct cox_handle batch[PEER_BATCH];
};

static void server_export(struct server *server, int fd, uint64_t offset, struct peer_reply *reply)
{
    reply->result =
        cox_exporter_export(server->exporter, fd, offset, 0, &reply->handles[0], &reply->err);
    cox_close_fd(&server->object);
    server->object = fd;
}

static void server_open(const struct server *server, const struct cox_handle *handle,
                        struct peer_reply *reply)
{
    struct cox_handle_info info;
    uint8_t byte = 0;
    int fd = -1;
    reply->result = cox_handle_open(handle, server->socket_path, cox_deadline_after_ms(10000), &fd,
                                    &reply->err);
    if (reply->result == 0)
        CHECK(cox_handle_parse(handle, &info, NULL) == 0 &&
              pread(fd, &byte, 1, (off_t)info.offset) == 1);
    reply->number = byte;
    cox_close_fd(&fd);
}

static void server_batch(struct server *server, bool put, struct peer_reply *reply)
{
    for (size_t i = 0; i < PEER_BATCH && reply->result == 0; i++)
        reply->result = put ? cox_exporter_put(server->exporter, &server->batch[i])
                            : cox_exporter_export(server->exporter, server->object, 0, 0,
                                                  &server->batch[i], &reply->err);
    memcpy(reply->handles, server->batch, sizeof server->batch);
}

static void server_replace(int number)
{
    int other = object_new(PEER_OBJECT_SIZE, 77);
    CHECK(dup3(other, number, O_CLOEXEC) == number);
    close(other);
}

static void server_serve(struct server *server, const struct order *order, struct peer_reply *reply)
{
    int pair[2];
    uint8_t byte = 0;
    switch (order->order) {
    case PEER_EXPORT:
    case PEER_EXPORT_AT:
        server_export(server, object_new(PEER_OBJECT_SIZE, (unsigned)order->argument),
                      order->order == PEER_EXPORT ? 0 : 5001, reply);
        break;
    case PEER_EXPORT_SOCKET:
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        cox_close_fd(&server->other);
        server->other = pair[1];
        server_export(server, pair[0], 0, reply);
        break;
    case PEER_EXPORT_BATCH:
    case PEER_PUT_BATCH:
        server_batch(server, order->order == PEER_PUT_BATCH, reply);
        break;
    case PEER_PUT:
        reply->result = cox_exporter_put(server->exporter, &order->handle);
        break;
    case PEER_REPLACE:
        server_replace((int)order->argument);
        break;
    case PEER_SET_DUMPABLE:
        reply->result = prctl(PR_SET_DUMPABLE, (unsigned long)order->argument, 0, 0, 0);
        break;
    case PEER_TRUNCATE:
        reply->result = ftruncate(server->object, order->argument);
        break;
    case PEER_COUNT_FDS:
        reply->number = fd_count();
        break;
    case PEER_OPEN:
        server_open(server, &order->handle, reply);
        break;
    case PEER_RECEIVE_EVENT:
        reply->result = read(server->other, &byte, 1) == 1 ? 0 : -errno;
        reply->number = byte;
        break;
    }
}

static _Noreturn void server_main(const struct peer_options *options, int socket)
{
    struct server server = {.socket_path = options->socket_path, .object = -1, .other = -1};
    const struct cox_exporter_options exporter = {.size = sizeof(struct cox_exporter_options),
                                                  .socket_path = options->socket_path,
                                                  .deadline_ms = 10000};
    struct order order;
    if (options->uid)
        user_change(options->uid);
    if (options->fd_limit) {
        const struct rlimit limit = {options->fd_limit, options->fd_limit};
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    }
    if (cox_exporter_new(&exporter, &server.exporter, test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(server.exporter);
    pid_t pid = getpid();
    CHECK(send(socket, &pid, sizeof pid, MSG_NOSIGNAL) == sizeof pid);
    while (recv(socket, &order, sizeof order, 0) == sizeof order) {
        struct peer_reply reply = {.result = 0};
        server_serve(&server, &order, &reply);
        CHECK(send(socket, &reply, sizeof reply, MSG_NOSIGNAL) == sizeof reply);
    }
    cox_exporter_free(server.exporter);
    _exit(0);
}

/* A child of no process here; and not before the parent has gone, whose death would be this one's
 * (user_change). */
static void leave_family(void)
{
    const pid_t parent = getpid();
    CHECK(setsid() >= 0);
    if (fork() != 0)
        _exit(0);
    AWAIT(getppid() != parent);
}

struct peer peer_start(const struct peer_options *options)
{
    static const struct peer_options none;
    struct peer peer = {.unrelated = options && options->unrelated};
    int pair[2];
    options = options ? options : &none;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (!options->unrelated)
            CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
        else
            leave_family();
        /* Nothing of the test's, nor of the peers before: they end when the test closes their
         * sockets. */
        CHECK(dup3(pair[1], 3, O_CLOEXEC) == 3 || pair[1] == 3);
        CHECK(close_range(4, ~0U, 0) == 0);
        server_main(options, 3);
    }
    close(pair[1]);
    peer.socket = pair[0];
    if (options->unrelated)
        child_join(pid);
    assert_int_equal(recv(peer.socket, &peer.pid, sizeof peer.pid, 0), sizeof peer.pid);
    return peer;
}

struct peer_reply peer_ask(const struct peer *peer, enum peer_order which, int64_t argument,
                           const struct cox_handle *handle)
{
    struct order order = {.order = which, .argument = argument};
    struct peer_reply reply;
    if (handle)
        order.handle = *handle;
    assert_int_equal(send(peer->socket, &order, sizeof order, MSG_NOSIGNAL), sizeof order);
    assert_int_equal(recv(peer->socket, &reply, sizeof reply, 0), sizeof reply);
    return reply;
}

struct cox_handle peer_export(const struct peer *peer, enum peer_order order, unsigned seed)
{
    struct peer_reply reply = peer_ask(peer, order, seed, NULL);
    if (reply.result)
        fail_msg("export: %d %s", reply.result, reply.err.text);
    return reply.handles[0];
}

void peer_kill(const struct peer *peer)
{
    siginfo_t info;
    char byte;
    assert_int_equal(kill(peer->pid, SIGKILL), 0);
    if (!peer->unrelated)
        assert_int_equal(waitid(P_PID, (id_t)peer->pid, &info, WEXITED | WNOWAIT), 0);
    else
        assert_int_equal(recv(peer->socket, &byte, 1, 0), 0);
}

void peer_end(struct peer *peer)
{
    close(peer->socket);
    if (!peer->unrelated)
        child_status(peer->pid);
}

void child_expect(int status)
{
    test_needs(!WIFEXITED(status) || WEXITSTATUS(status) != 77);
    assert_int_equal(status, 0);
}

int import_try(struct cox_importer *importer, const struct cox_handle *handle)
{
    const struct cox_import *import;
    return cox_importer_open(importer, handle, COX_IMPORT_READ, &import, test_err());
}

const struct cox_import *import_open(struct cox_importer *importer, const struct cox_handle *handle)
{
    const bool memory = handle->bytes[COX_HANDLE_AT_KIND] == COX_HANDLE_MEMORY;
    const struct cox_import *import;
    if (cox_importer_open(importer, handle, memory ? COX_IMPORT_READ : COX_IMPORT_FD, &import,
                          test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(test_error.code == 0);
    return import;
}

uint8_t import_byte(const struct cox_import *import, size_t at)
{
    return ((const uint8_t *)import->base)[at];
}
