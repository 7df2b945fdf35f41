#include "control_socket.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/shm/geometry.h"
#include "client_connection.h"
#include "runtime_dir.h"
#include "socket.h"
#include "socket_file.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HELLO_MS_DEFAULT 1000
#define CLIENT_MAX_DEFAULT 512
/* How long a start may hold the runtime directory's lock. */
#define SWEEP_LOCK_MS 10000
/* Connections accepted before existing ones are served again. */
#define ACCEPT_COUNT_MAX 64
/* Without fds or memory: how long no connection is accepted. */
#define PAUSE_MS 50
/* The fds that are polled before those of clients. */
enum { POLLED_STOP, POLLED_LISTEN, POLLED_WATCH, POLLED_CLIENTS };

/* Belongs to the thread once it runs, except stop_fd. */
struct cox_control_socket {
    struct cox_socket_server server;
    uint32_t client_max;
    struct cox_socket_file file;
    int stop_fd;
    /* closed to accept and refuse a client when there are no fds left */
    int spare_fd;
    /* no connection is accepted before; 0: no pause */
    uint64_t resume_ns;
    /* no connection was accepted since the last pause */
    bool short_of_fds;
    /* no connection is accepted either; see socket_is_choked */
    bool choked;
    uint64_t next_id;
    /* client_count of client_max, in order of arrival */
    struct cox_client_connection **clients;
    uint32_t client_count;
    /* POLLED_CLIENTS, the clients in their order, and those of their processes that are watched, in
     * the same order */
    struct pollfd *polled;
    /* for counts */
    _Atomic uint32_t shown_clients, shown_fd_owners, shown_fd_entries;
    pthread_t thread;
};

/* ---- all of them ---- */

/* Removes clients without an fd. */
static void clients_remove(struct cox_control_socket *control_socket)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < control_socket->client_count; i++) {
        struct cox_client_connection *client = control_socket->clients[i];
        if (client->fd < 0)
            free(client);
        else
            control_socket->clients[kept++] = client;
    }
    control_socket->client_count = kept;
}

static void clients_expire(struct cox_control_socket *control_socket)
{
    uint64_t now_ns = cox_now_ns();
    for (uint32_t i = 0; i < control_socket->client_count; i++) {
        struct cox_client_connection *client = control_socket->clients[i];
        if (client->fd >= 0 && client->state == COX_CLIENT_HELLO && client->deadline_ns <= now_ns)
            cox_client_connection_refuse(&control_socket->server, client, COX_TIMEOUT,
                                         "%zu of %d bytes of the hello came within %" PRIu64 " ms",
                                         client->received, COX_HELLO_SIZE,
                                         control_socket->server.hello_ms);
    }
}

/* Refuses the oldest client whose hello is not complete. The text is "had come when"... Returns
 * false if there is none among the clients up to `last`. */
static bool clients_give_up_oldest(struct cox_control_socket *control_socket, uint64_t last,
                                   const char *why)
{
    for (uint32_t i = 0; i < control_socket->client_count; i++) {
        struct cox_client_connection *client = control_socket->clients[i];
        if (client->state != COX_CLIENT_HELLO || client->identity.id > last)
            continue;
        cox_client_connection_refuse(&control_socket->server, client, COX_FULL,
                                     "%zu of %d bytes of the hello had come when %s",
                                     client->received, COX_HELLO_SIZE, why);
        clients_remove(control_socket);
        return true;
    }
    return false;
}

/* Makes room for a newer client. Returns false if all clients have completed their hello. */
static bool clients_make_room(struct cox_control_socket *control_socket)
{
    char why[80];
    if (control_socket->client_count < control_socket->client_max)
        return true;
    snprintf(why, sizeof why, "a newer client needed the place, one of %" PRIu32,
             control_socket->client_max);
    return clients_give_up_oldest(control_socket, control_socket->next_id, why);
}

/* ---- accepting connections ---- */

/* Takes ownership of fd. */
static void socket_let_in(struct cox_control_socket *control_socket, int fd)
{
    struct cox_socket_peer peer;
    struct cox_client_connection *client = NULL;
    char reason[128] = "";
    int r = cox_socket_read_peer(fd, &peer), code = COX_REJECTED;
    if (r == 0 && peer.uid != geteuid() && peer.uid != 0) {
        code = COX_DENIED;
        snprintf(reason, sizeof reason, "user %u may not come in: expected %u or 0", peer.uid,
                 geteuid());
    } else if (r == 0 && !clients_make_room(control_socket)) {
        code = COX_FULL;
        snprintf(reason, sizeof reason, "%" PRIu32 " connections are open: there may be no more",
                 control_socket->client_max);
    } else if (r == 0) {
        client = calloc(1, sizeof *client);
        r = client ? 0 : -ENOMEM;
    }
    if (!client) {
        if (r)
            snprintf(reason, sizeof reason, "the client: %s", cox_status_text(r));
        cox_log_limit_write(&control_socket->server.log, 4, NULL, code,
                            "control socket: refused: %s", reason);
        cox_client_connection_turn_away(fd, code, reason);
        cox_closer_hang_up(control_socket->server.closer, &fd);
        return;
    }
    client->state = COX_CLIENT_HELLO;
    client->fd = fd;
    client->brought_fd = -1;
    client->pidfd = -1;
    client->deadline_ns = cox_deadline_after_ms(control_socket->server.hello_ms);
    client->identity = (struct cox_control_client){
        .id = ++control_socket->next_id, .pid = peer.pid, .uid = peer.uid};
    control_socket->clients[control_socket->client_count++] = client;
}

static void spare_open(struct cox_control_socket *control_socket)
{
    if (control_socket->spare_fd >= 0)
        return;
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && cox_fd_raise(&fd) < 0)
        cox_close_fd(&fd);
    control_socket->spare_fd = fd;
}

/* No fd or no memory is left. A pending connection makes poll return again and again. So it is
 * accepted with the spare fd and refused, and then accepting pauses. */
static void socket_pause(struct cox_control_socket *control_socket, int e)
{
    if (!control_socket->short_of_fds) /* this may last for hours */
        cox_log_limit_write(&control_socket->server.log, 4, NULL, 0,
                            "control socket: accepts no client, except for a try every %d ms: %s",
                            PAUSE_MS, cox_status_text(-e));
    control_socket->short_of_fds = true;
    if (control_socket->spare_fd >= 0) {
        cox_close_fd(&control_socket->spare_fd);
        int fd = accept4(control_socket->file.listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            cox_client_connection_turn_away(fd, COX_FULL, "the coordinator may not open more fds");
        cox_closer_hang_up(control_socket->server.closer, &fd);
        spare_open(control_socket);
    }
    control_socket->resume_ns = cox_deadline_after_ms(PAUSE_MS);
}

static void socket_accept(struct cox_control_socket *control_socket)
{
    const uint64_t last_read = control_socket->next_id;
    for (int i = 0; i < ACCEPT_COUNT_MAX; i++) {
        int fd = accept4(control_socket->file.listen_fd, NULL, NULL, SOCK_CLOEXEC);
        int e = fd < 0 ? errno : -cox_fd_raise(&fd); /* accept fails for want of fds, too */
        if (e == 0) {
            control_socket->short_of_fds = false;
            socket_let_in(control_socket, fd);
            continue;
        }
        cox_close_fd(&fd);
        if (e == EAGAIN || e == EWOULDBLOCK)
            return;
        if (e == EINTR || e == ECONNABORTED)
            continue;
        /* The kernel allocates an fd before it checks for a connection. */
        if (cox_socket_wait(control_socket->file.listen_fd, POLLIN, 0) == COX_TIMEOUT)
            return;
        if (clients_give_up_oldest(control_socket, last_read, "a newer client needed its fd"))
            continue;
        /* The connections accepted just now were not read yet. */
        if (control_socket->next_id > last_read)
            return;
        socket_pause(control_socket, e);
        return;
    }
}

/* ---- one turn of the thread ---- */

/* Returns true if so many closes hang that further fds could not be closed. */
static bool socket_is_choked(const struct cox_control_socket *control_socket)
{
    return cox_closer_counts(control_socket->server.closer).waiting >= COX_CLOSER_WAITING_MAX;
}

/* The end of the next wait: the first hello that is late, or the end of a pause. */
static uint64_t socket_deadline(struct cox_control_socket *control_socket)
{
    uint64_t deadline_ns = cox_closer_turn(control_socket->server.closer);
    if (control_socket->resume_ns)
        deadline_ns = cox_deadline_min(deadline_ns, control_socket->resume_ns);
    deadline_ns = cox_deadline_min(deadline_ns, cox_socket_file_turn(&control_socket->file));
    deadline_ns =
        cox_deadline_min(deadline_ns, cox_log_limit_turn(&control_socket->server.log, false));
    if (socket_is_choked(control_socket))
        deadline_ns = cox_deadline_min(deadline_ns, cox_deadline_after_ms(PAUSE_MS));
    for (uint32_t i = 0; i < control_socket->client_count; i++)
        if (control_socket->clients[i]->state == COX_CLIENT_HELLO)
            deadline_ns = cox_deadline_min(deadline_ns, control_socket->clients[i]->deadline_ns);
    return deadline_ns;
}

static void socket_poll(struct cox_control_socket *control_socket)
{
    struct pollfd *polled = control_socket->polled;
    /* First, since it may replace the socket that listens. */
    const uint64_t deadline_ns = socket_deadline(control_socket);
    polled[POLLED_STOP] = (struct pollfd){.fd = control_socket->stop_fd, .events = POLLIN};
    polled[POLLED_WATCH] = (struct pollfd){.fd = control_socket->file.watch_fd, .events = POLLIN};
    const bool choked = socket_is_choked(control_socket);
    if (choked && !control_socket->choked)
        cox_log_limit_write(
            &control_socket->server.log, 4, NULL, 0,
            "control socket: accepts no client and no fd: %d fds that were sent here wait to be closed, and their closes hang (SO_LINGER, FUSE)",
            COX_CLOSER_WAITING_MAX);
    control_socket->choked = choked;
    polled[POLLED_LISTEN] = (struct pollfd){
        .fd = control_socket->resume_ns || choked ? -1 : control_socket->file.listen_fd,
        .events = POLLIN};
    for (uint32_t i = 0; i < control_socket->client_count; i++)
        polled[POLLED_CLIENTS + i] =
            (struct pollfd){.fd = choked && control_socket->clients[i]->state != COX_CLIENT_WORKER
                                      ? -1
                                      : control_socket->clients[i]->fd,
                            .events = POLLIN};
    nfds_t count = POLLED_CLIENTS + control_socket->client_count;
    for (uint32_t i = 0; i < control_socket->client_count; i++)
        if (control_socket->clients[i]->pidfd >= 0)
            polled[count++] =
                (struct pollfd){.fd = control_socket->clients[i]->pidfd, .events = POLLIN};
    int r = poll(polled, count, cox_deadline_poll_ms(deadline_ns));
    if (r >= 0)
        return;
    for (nfds_t i = 0; i < count; i++)
        polled[i].revents = 0;
    /* The kernel has no memory, or a limit on fds was lowered: try again later; the control socket
     * can still be closed. */
    if (errno != EINTR && poll(polled, 1, PAUSE_MS) < 0) {
        polled[POLLED_STOP].revents = 0;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * (long)COX_NSEC_PER_MSEC}, NULL);
    }
}

/* In the order in which socket_poll has listed them. */
static void clients_serve(struct cox_control_socket *control_socket)
{
    const struct pollfd *process =
        control_socket->polled + POLLED_CLIENTS + control_socket->client_count;
    for (uint32_t i = 0; i < control_socket->client_count; i++) {
        struct cox_client_connection *client = control_socket->clients[i];
        if (client->pidfd >= 0 && (process++)->revents)
            cox_client_connection_died(&control_socket->server, client);
        else if (control_socket->polled[POLLED_CLIENTS + i].revents)
            cox_client_connection_read(&control_socket->server, client);
    }
}

/* relaxed: only for display. */
static void socket_show(struct cox_control_socket *control_socket)
{
    atomic_store_explicit(&control_socket->shown_clients, control_socket->client_count,
                          memory_order_relaxed);
    atomic_store_explicit(&control_socket->shown_fd_owners, control_socket->server.fd_owner_count,
                          memory_order_relaxed);
    atomic_store_explicit(&control_socket->shown_fd_entries,
                          control_socket->server.fd_entries.count, memory_order_relaxed);
}

/* ---- the thread ---- */

static void *socket_main(void *argument)
{
    struct cox_control_socket *control_socket = argument;
    for (;;) {
        socket_show(control_socket);
        socket_poll(control_socket);
        if (control_socket->polled[POLLED_STOP].revents)
            return NULL;
        clients_serve(control_socket);
        clients_expire(control_socket);
        clients_remove(control_socket);
        if (control_socket->polled[POLLED_LISTEN].revents)
            socket_accept(control_socket);
        if (control_socket->polled[POLLED_WATCH].revents)
            cox_socket_file_changed(&control_socket->file);
        if (control_socket->resume_ns && control_socket->resume_ns <= cox_now_ns()) {
            spare_open(control_socket);
            control_socket->resume_ns = 0;
        }
    }
}

/* ---- open and close ---- */

static uint32_t fd_entry_max_default(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur / 4 > UINT32_MAX / 2)
        return UINT32_MAX / 2;
    return limit.rlim_cur < 4 ? 1 : (uint32_t)(limit.rlim_cur / 4);
}

/* Sets the options; opens nothing. */
static struct cox_control_socket *socket_new(const struct cox_control_socket_options *options,
                                             const struct cox_control_socket_hooks *hooks)
{
    struct cox_control_socket *control_socket = calloc(1, sizeof *control_socket);
    if (!control_socket)
        return NULL;
    *control_socket = (struct cox_control_socket){
        .server = {.hooks = *hooks,
                   .hello_ms = options->hello_ms ? options->hello_ms : HELLO_MS_DEFAULT},
        .client_max = options->client_max ? options->client_max : CLIENT_MAX_DEFAULT,
        .stop_fd = -1,
        .spare_fd = -1,
    };
    /* The rest is for workers, at most COX_RANK_COUNT_MAX, and commands. */
    control_socket->server.fd_owner_max =
        control_socket->client_max - control_socket->client_max * 3 / 8;
    cox_log_limit_init(&control_socket->server.log, &options->log);
    control_socket->clients =
        calloc(control_socket->client_max, sizeof(struct cox_client_connection *));
    control_socket->polled = calloc(2 * (size_t)control_socket->client_max + POLLED_CLIENTS,
                                    sizeof *control_socket->polled);
    if (!control_socket->clients || !control_socket->polled ||
        cox_closer_new(&control_socket->server.closer)) {
        free(control_socket->clients);
        free(control_socket->polled);
        free(control_socket);
        return NULL;
    }
    cox_socket_file_init(&control_socket->file, control_socket->server.closer,
                         &control_socket->server.log.log);
    cox_fd_entries_init(&control_socket->server.fd_entries,
                        options->fd_entry_max ? options->fd_entry_max : fd_entry_max_default(),
                        control_socket->server.closer);
    return control_socket;
}

/* Connections that were not accepted yet: the fds they have sent would be closed with the socket.
 */
static void socket_end_waiting(struct cox_control_socket *control_socket)
{
    for (int i = 0; control_socket->file.listen_fd >= 0 && i < COX_SOCKET_BACKLOG; i++) {
        int fd = accept4(control_socket->file.listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            return;
        cox_closer_hang_up(control_socket->server.closer, &fd);
    }
}

/* Frees what was created so far; no thread runs. */
static void socket_free(struct cox_control_socket *control_socket)
{
    cox_socket_file_remove(&control_socket->file);
    for (uint32_t i = 0; i < control_socket->client_count; i++) {
        cox_client_connection_drop(&control_socket->server, control_socket->clients[i]);
        free(control_socket->clients[i]);
    }
    cox_fd_entries_deinit(&control_socket->server.fd_entries);
    socket_end_waiting(control_socket);
    cox_socket_file_close(&control_socket->file);
    cox_closer_free(control_socket->server.closer);
    cox_log_limit_turn(&control_socket->server.log, true);
    cox_close_fd(&control_socket->stop_fd);
    cox_close_fd(&control_socket->spare_fd);
    free(control_socket->clients);
    free(control_socket->polled);
    free(control_socket);
}

static int socket_open_fds(struct cox_control_socket *control_socket, struct cox_error *err)
{
    control_socket->stop_fd = eventfd(0, EFD_CLOEXEC);
    int r = control_socket->stop_fd < 0 ? -errno : cox_fd_raise(&control_socket->stop_fd);
    if (r == 0)
        control_socket->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (r == 0)
        r = control_socket->spare_fd < 0 ? -errno : cox_fd_raise(&control_socket->spare_fd);
    return r ? cox_fail(err, r, "fds of the control socket: %s", cox_status_text(r)) : 0;
}

int cox_control_socket_open(const struct cox_control_socket_options *options,
                            const struct cox_control_socket_hooks *hooks,
                            struct cox_control_socket **ret_socket, struct cox_error *err)
{
    char runtime_dir[COX_SOCKET_PATH_SIZE];
    int r = cox_name_check(options->name, err);
    if (r == 0 && !options->runtime_dir)
        r = cox_runtime_dir_default(runtime_dir, err);
    if (r)
        return r;
    const char *where = options->runtime_dir ? options->runtime_dir : runtime_dir;
    struct cox_control_socket *control_socket = socket_new(options, hooks);
    if (!control_socket)
        return cox_fail(err, -ENOMEM, "the control socket: %s", cox_status_text(-ENOMEM));
    r = socket_open_fds(control_socket, err);
    if (r == 0)
        r = cox_socket_file_open(&control_socket->file, options->name, where, err);
    if (r == 0) {
        r = cox_thread_start(&control_socket->thread, socket_main, control_socket);
        if (r)
            cox_fail(err, r, "the thread of the control socket: %s", cox_status_text(r));
    }
    if (r) {
        socket_free(control_socket);
        return r;
    }
    *ret_socket = control_socket;
    return 0;
}

void cox_control_socket_unname(struct cox_control_socket *control_socket)
{
    cox_socket_file_remove(&control_socket->file);
}

void cox_control_socket_counts(const struct cox_control_socket *control_socket,
                               struct cox_control_socket_counts *ret_counts)
{
    const struct cox_closer_counts closes = cox_closer_counts(control_socket->server.closer);
    *ret_counts = (struct cox_control_socket_counts){
        .clients = atomic_load_explicit(&control_socket->shown_clients, memory_order_relaxed),
        .client_max = control_socket->client_max,
        .fd_owners = atomic_load_explicit(&control_socket->shown_fd_owners, memory_order_relaxed),
        .fd_owner_max = control_socket->server.fd_owner_max,
        .fd_entries = atomic_load_explicit(&control_socket->shown_fd_entries, memory_order_relaxed),
        .fd_entry_max = control_socket->server.fd_entries.max,
        .closing = closes.waiting,
        .closing_max = COX_CLOSER_WAITING_MAX,
        .hanging = closes.hanging,
    };
}

struct cox_control_socket *cox_control_socket_close(struct cox_control_socket *control_socket)
{
    if (!control_socket)
        return NULL;
    COX_ASSERT(!pthread_equal(pthread_self(),
                              control_socket->thread)); /* a hook cannot end its own thread */
    uint64_t one = 1;
    ssize_t r;
    do
        r = write(control_socket->stop_fd, &one, sizeof one);
    while (r < 0 && errno == EINTR);
    pthread_join(control_socket->thread, NULL);
    socket_free(control_socket);
    return NULL;
}

const char *cox_control_socket_path(const struct cox_control_socket *control_socket)
{
    return control_socket->file.path;
}

int cox_control_socket_sweep(const char *runtime_dir, uint32_t *ret_count, struct cox_error *err)
{
    char buffer[COX_SOCKET_PATH_SIZE];
    struct cox_error why = {0};
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1;
    uint32_t count = 0;
    int r = runtime_dir ? 0 : cox_runtime_dir_default(buffer, err);
    if (r)
        return r;
    r = cox_runtime_dir_open(runtime_dir ? runtime_dir : buffer, false, &runtime_dir_fd, &why);
    if (r == 0)
        r = cox_runtime_dir_lock(runtime_dir_fd, cox_deadline_after_ms(SWEEP_LOCK_MS), &why);
    if (r == 0) {
        r = cox_runtime_dir_sweep(runtime_dir_fd, &count, &why);
        cox_runtime_dir_unlock(runtime_dir_fd);
    }
    if (r && r != COX_NOT_FOUND)
        return cox_fail(err, r, "%s", why.text);
    *ret_count = count;
    return 0;
}
