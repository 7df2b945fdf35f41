#include "http.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "program/client/client.h"
#include "program/metrics/http_address.h"
#include "program/metrics/metrics.h"
#include "program/metrics/request.h"
#include "program/weights/weights_client.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* At a time; for a further one another is closed. */
#define CONNECTION_COUNT_MAX 128
/* In a row, before those that were accepted are served. */
#define ACCEPT_COUNT_MAX 16
/* From the accept until the whole head has arrived, and again until the reply is taken. */
#define TRANSFER_MS 5000
#define STATUS_MS 5000
/* For the holder of weights, without which the group's numbers are served all the same. */
#define WEIGHTS_MS 500
/* Until the next attempt to accept, where the process has no fd or memory left. */
#define PAUSE_MS 100

enum state {
    READS,
    /* waits for the group's status */
    ASKS,
    WRITES,
};

struct connection {
    int fd;
    enum state state;
    /* its peer's, and how many connections are of that one */
    struct in6_addr network;
    uint32_t share;
    /* of READS and WRITES */
    uint64_t deadline_ns;
    /* ASKS: for /metrics, not for /readyz; and the first fetch that began after the request */
    bool asks_metrics;
    uint64_t fetch;
    bool head_only;
    /* the peer sends no more: it is gone, or, rarely, waits for its reply all the same */
    bool sends_no_more;
    /* the request */
    size_t size;
    char bytes[COX_HTTP_REQUEST_SIZE_MAX];
    /* the reply; NULL: none yet */
    char *reply;
    size_t reply_size, sent;
};

struct cox_metrics_server {
    int listen_fd;
    /* an eventfd: there are replies to write, or the end has come */
    int wake_fd;
    pthread_t threads[2];
    unsigned int thread_count;
    /* of the group; NULL: not given */
    char *name, *socket_path;
    struct cox_http_address address;
    char url[COX_HTTP_URL_SIZE];

    pthread_mutex_t lock;
    /* a connection asks, or the end has come */
    pthread_cond_t asked;
    /* under lock */
    bool stops;
    uint64_t fetches;
    /* The oldest first. The thread that polls adds and removes; the one that fetches turns ASKS
     * into WRITES. */
    struct connection *connections[CONNECTION_COUNT_MAX];
    uint32_t connection_count;
    /* of the thread that polls; accepts nothing before; 0: accepts */
    uint64_t resume_ns;
};

/* ---- replies ---- */

/* Without memory for it the connection is closed. */
static void reply_with(struct connection *connection, unsigned int status, const char *type,
                       const char *body, size_t size)
{
    char head[256], date[64];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &utc));
    const size_t head_size = (size_t)snprintf(
        head, sizeof head,
        "HTTP/1.1 %u %s\r\nDate: %s\r\n%sContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
        status, cox_http_reason(status), date,
        status == COX_HTTP_METHOD_NOT_ALLOWED ? "Allow: GET, HEAD\r\n" : "", type, size);
    const size_t body_size = connection->head_only ? 0 : size;
    connection->state = WRITES;
    connection->deadline_ns = cox_deadline_after_ms(TRANSFER_MS);
    connection->reply = malloc(head_size + body_size);
    if (!connection->reply)
        return;
    memcpy(connection->reply, head, head_size);
    memcpy(connection->reply + head_size, body, body_size);
    connection->reply_size = head_size + body_size;
}

static void reply_line(struct connection *connection, unsigned int status, const char *line)
{
    char text[COX_HEALTH_SIZE + sizeof((struct cox_error *)NULL)->text];
    const int size = snprintf(text, sizeof text, "%s\n", line);
    reply_with(connection, status, "text/plain; charset=utf-8", text, (size_t)size);
}

/* ---- the group's status, on a thread of its own ---- */

struct fetched {
    int status;
    struct cox_error err;
    /* of a status that came */
    char *metrics;
    size_t metrics_size;
    bool ready;
    char reason[COX_HEALTH_SIZE];
};

static void fetch(const struct cox_metrics_server *server, struct fetched *fetched)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct CoxswainControl__StatusReply *status;
    const uint64_t deadline_ns = cox_deadline_after_ms(STATUS_MS);
    int r = server->socket_path
                ? cox_client_open_path(&client, server->socket_path, deadline_ns, &fetched->err)
                : cox_client_open(&client, server->name, deadline_ns, &fetched->err);
    if (r == 0)
        r = cox_client_status(&client, deadline_ns, &status, &fetched->err);
    if (r == 0) {
        FILE *file = open_memstream(&fetched->metrics, &fetched->metrics_size);
        json_t *weights = NULL;
        cox_weights_list(cox_deadline_after_ms(WEIGHTS_MS), &weights, NULL);
        fetched->ready = cox_metrics_ready(status, fetched->reason);
        if (file)
            cox_metrics_write(file, status, weights);
        json_decref(weights);
        if (!file || fclose(file))
            r = cox_fail(&fetched->err, -ENOMEM, "no memory for the metrics");
    }
    fetched->status = r;
}

static void reply_fetched(struct connection *connection, const struct fetched *fetched)
{
    if (fetched->status)
        reply_line(connection, COX_HTTP_UNAVAILABLE, fetched->err.text);
    else if (connection->asks_metrics)
        reply_with(connection, COX_HTTP_OK, COX_METRICS_CONTENT_TYPE, fetched->metrics,
                   fetched->metrics_size);
    else if (fetched->ready)
        reply_line(connection, COX_HTTP_OK, "ready");
    else
        reply_line(connection, COX_HTTP_UNAVAILABLE, fetched->reason);
}

static bool is_asked(const struct cox_metrics_server *server)
{
    for (uint32_t i = 0; i < server->connection_count; i++)
        if (server->connections[i]->state == ASKS)
            return true;
    return false;
}

static void wake(const struct cox_metrics_server *server)
{
    const ssize_t written = write(server->wake_fd, &(uint64_t){1}, sizeof(uint64_t));
    COX_ASSERT(written == sizeof(uint64_t)); /* its counter never gets full */
}

/* One status replies to all that asked before it was asked for. One that does not come replies to
 * all: those that asked meanwhile would wait as long. */
static void *fetch_main(void *context)
{
    struct cox_metrics_server *server = context;
    pthread_mutex_lock(&server->lock);
    for (;;) {
        while (!server->stops && !is_asked(server))
            pthread_cond_wait(&server->asked, &server->lock);
        if (server->stops)
            break;
        server->fetches++;
        pthread_mutex_unlock(&server->lock);
        struct fetched fetched = {0};
        fetch(server, &fetched);
        pthread_mutex_lock(&server->lock);
        for (uint32_t i = 0; i < server->connection_count; i++) {
            struct connection *connection = server->connections[i];
            if (connection->state == ASKS &&
                (fetched.status || connection->fetch <= server->fetches))
                reply_fetched(connection, &fetched);
        }
        wake(server);
        free(fetched.metrics);
    }
    pthread_mutex_unlock(&server->lock);
    return NULL;
}

/* ---- connections, on the thread that polls; with lock held ---- */

static bool is_of(const struct connection *connection, const struct in6_addr *network)
{
    return memcmp(&connection->network, network, sizeof *network) == 0;
}

static void share_renew(struct cox_metrics_server *server, struct in6_addr network)
{
    uint32_t share = 0;
    for (uint32_t i = 0; i < server->connection_count; i++)
        share += is_of(server->connections[i], &network);
    for (uint32_t i = 0; i < server->connection_count; i++)
        if (is_of(server->connections[i], &network))
            server->connections[i]->share = share;
}

static void connection_add(struct cox_metrics_server *server, struct connection *connection)
{
    server->connections[server->connection_count++] = connection;
    share_renew(server, connection->network);
}

static void connection_remove(struct cox_metrics_server *server, uint32_t i)
{
    struct connection *connection = server->connections[i];
    memmove(&server->connections[i], &server->connections[i + 1],
            (--server->connection_count - i) * sizeof *server->connections);
    share_renew(server, connection->network);
    close(connection->fd);
    free(connection->reply);
    free(connection);
}

static bool asks_for(const struct cox_http_request *request, const char *path)
{
    return request->path_size == strlen(path) &&
           memcmp(request->path, path, request->path_size) == 0;
}

static void take_request(struct cox_metrics_server *server, struct connection *connection,
                         unsigned int status, const struct cox_http_request *request)
{
    connection->head_only = request->head_only;
    connection->asks_metrics = asks_for(request, "/metrics");
    if (status != COX_HTTP_OK) {
        reply_line(connection, status, cox_http_reason(status));
    } else if (connection->asks_metrics || asks_for(request, "/readyz")) {
        connection->state = ASKS;
        connection->fetch = server->fetches + 1;
        pthread_cond_signal(&server->asked);
    } else if (asks_for(request, "/healthz")) {
        reply_line(connection, COX_HTTP_OK, "alive");
    } else {
        reply_line(connection, COX_HTTP_NOT_FOUND, "there are /metrics, /healthz and /readyz");
    }
}

/* Returns false where the connection has ended. */
static bool receive(struct cox_metrics_server *server, struct connection *connection)
{
    struct cox_http_request request = {0};
    const ssize_t got = recv(connection->fd, connection->bytes + connection->size,
                             sizeof connection->bytes - connection->size, 0);
    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    connection->size += (size_t)got;
    const unsigned int status =
        cox_http_request_parse(connection->bytes, connection->size, &request);
    if (status)
        take_request(server, connection, status, &request);
    return true;
}

/* Returns false where all is sent, or the connection has ended. */
static bool send_more(struct connection *connection)
{
    while (connection->sent < connection->reply_size) {
        const ssize_t sent = send(connection->fd, connection->reply + connection->sent,
                                  connection->reply_size - connection->sent, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            return errno == EAGAIN;
        connection->sent += sent > 0 ? (size_t)sent : 0;
    }
    return false;
}

/* Returns false where the connection has ended, or has had its time. */
static bool connection_turn(struct cox_metrics_server *server, struct connection *connection,
                            short events, uint64_t now_ns)
{
    if (connection->state == READS && events && !receive(server, connection))
        return false;
    connection->sends_no_more |= (events & POLLRDHUP) != 0;
    if (connection->state == ASKS)
        return !(events & (POLLERR | POLLHUP));
    if (connection->state == WRITES && !send_more(connection))
        return false;
    return now_ns < connection->deadline_ns;
}

/* Closes one for a new one: of those who have the most, the oldest that has sent no request, or is
 * likely gone; else the oldest. A request usually comes with its connection, so that who sends one
 * and waits is served. */
static void make_room(struct cox_metrics_server *server)
{
    uint32_t victim = 0, most = 0;
    bool waits = true; /* the victim, for its reply */
    for (uint32_t i = 0; i < server->connection_count; i++) {
        const struct connection *connection = server->connections[i];
        const bool own = connection->state != READS && !connection->sends_no_more;
        if (connection->share > most || (connection->share == most && waits && !own)) {
            victim = i;
            most = connection->share;
            waits = own;
        }
    }
    connection_remove(server, victim);
}

static void accept_all(struct cox_metrics_server *server)
{
    for (unsigned int i = 0; i < ACCEPT_COUNT_MAX; i++) {
        union cox_http_sockaddr peer = {0};
        socklen_t size = sizeof peer;
        const int fd = accept4(server->listen_fd, &peer.any, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct connection *connection = fd < 0 ? NULL : calloc(1, sizeof *connection);
        if (!connection) {
            const bool full = fd >= 0 || errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
                              errno == ENOMEM;
            if (fd >= 0)
                close(fd);
            if (full)
                server->resume_ns = cox_deadline_after_ms(PAUSE_MS);
            if (full && server->connection_count)
                make_room(server);
            return;
        }
        if (server->connection_count == CONNECTION_COUNT_MAX)
            make_room(server);
        connection->fd = fd;
        connection->network = cox_http_address_network(&peer);
        connection->deadline_ns = cox_deadline_after_ms(TRANSFER_MS);
        connection_add(server, connection);
    }
}

enum { POLLED_WAKE, POLLED_LISTEN, POLLED_CONNECTIONS };

static short events_of(const struct connection *connection)
{
    if (connection->state == ASKS)
        return connection->sends_no_more ? 0 : POLLRDHUP;
    return connection->state == READS ? POLLIN : POLLOUT;
}

/* Returns the deadline of the wait. */
static uint64_t poll_prepare(const struct cox_metrics_server *server, struct pollfd *polled)
{
    uint64_t deadline_ns = server->resume_ns ? server->resume_ns : COX_DEADLINE_NEVER;
    polled[POLLED_WAKE] = (struct pollfd){.fd = server->wake_fd, .events = POLLIN};
    polled[POLLED_LISTEN] =
        (struct pollfd){.fd = server->resume_ns ? -1 : server->listen_fd, .events = POLLIN};
    for (uint32_t i = 0; i < server->connection_count; i++) {
        const struct connection *connection = server->connections[i];
        polled[POLLED_CONNECTIONS + i] =
            (struct pollfd){.fd = connection->fd, .events = events_of(connection)};
        if (connection->state != ASKS)
            deadline_ns = cox_deadline_min(deadline_ns, connection->deadline_ns);
    }
    return deadline_ns;
}

static void *poll_main(void *context)
{
    struct cox_metrics_server *server = context;
    struct pollfd polled[POLLED_CONNECTIONS + CONNECTION_COUNT_MAX];
    uint64_t count;
    pthread_mutex_lock(&server->lock);
    while (!server->stops) {
        const uint64_t deadline_ns = poll_prepare(server, polled);
        const nfds_t fd_count = POLLED_CONNECTIONS + server->connection_count;
        pthread_mutex_unlock(&server->lock);
        const int found = poll(polled, fd_count, cox_deadline_poll_ms(deadline_ns));
        if (found > 0 && polled[POLLED_WAKE].revents)
            eventfd_read(server->wake_fd, &count);
        pthread_mutex_lock(&server->lock);
        const uint64_t now_ns = cox_now_ns();
        for (nfds_t i = fd_count; i-- > POLLED_CONNECTIONS;)
            if (!connection_turn(server, server->connections[i - POLLED_CONNECTIONS],
                                 found > 0 ? polled[i].revents : 0, now_ns))
                connection_remove(server, (uint32_t)(i - POLLED_CONNECTIONS));
        if (server->resume_ns && now_ns >= server->resume_ns)
            server->resume_ns = 0;
        if (found > 0 && polled[POLLED_LISTEN].revents)
            accept_all(server);
    }
    pthread_mutex_unlock(&server->lock);
    return NULL;
}

/* ---- constructor and destructor ---- */

static int start(struct cox_metrics_server *server)
{
    static void *(*const mains[])(void *context) = {poll_main, fetch_main};
    server->wake_fd = eventfd(0, EFD_CLOEXEC);
    int r = server->wake_fd < 0 ? -errno : 0;
    while (r == 0 && server->thread_count < sizeof mains / sizeof mains[0]) {
        r = cox_thread_start(&server->threads[server->thread_count], mains[server->thread_count],
                             server);
        server->thread_count += r == 0;
    }
    return r;
}

int cox_metrics_server_new(const struct cox_http_address *address, const char *name,
                           const char *socket_path, struct cox_metrics_server **ret_server,
                           struct cox_error *err)
{
    _cox_cleanup_(cox_metrics_server_freep) struct cox_metrics_server *server =
        calloc(1, sizeof *server);
    if (server) {
        server->listen_fd = server->wake_fd = -1;
        pthread_mutex_init(&server->lock, NULL);
        pthread_cond_init(&server->asked, NULL);
        server->name = name ? strdup(name) : NULL;
        server->socket_path = socket_path ? strdup(socket_path) : NULL;
    }
    if (!server || (name && !server->name) || (socket_path && !server->socket_path))
        return cox_fail(err, -ENOMEM, "no memory for the metrics");
    int r = server->listen_fd = cox_http_address_listen(address);
    if (r >= 0) {
        server->address = *address;
        cox_http_address_url(server->listen_fd, address, server->url);
        r = start(server);
    }
    if (r)
        return cox_fail(err, r, "metrics address %.200s: %s", address->text, cox_status_text(r));
    *ret_server = cox_steal_ptr(&server);
    return 0;
}

const char *cox_metrics_server_url(const struct cox_metrics_server *server)
{
    return server->url;
}

struct cox_metrics_server *cox_metrics_server_free(struct cox_metrics_server *server)
{
    if (!server)
        return NULL;
    pthread_mutex_lock(&server->lock);
    server->stops = true;
    pthread_cond_signal(&server->asked);
    pthread_mutex_unlock(&server->lock);
    if (server->thread_count)
        wake(server);
    for (unsigned int i = 0; i < server->thread_count; i++)
        pthread_join(server->threads[i], NULL);
    while (server->connection_count)
        connection_remove(server, server->connection_count - 1);
    cox_close_fd(&server->listen_fd);
    cox_close_fd(&server->wake_fd);
    if (server->address.at.any.sa_family == AF_UNIX)
        unlink(server->address.at.un.sun_path);
    pthread_mutex_destroy(&server->lock);
    pthread_cond_destroy(&server->asked);
    free(server->name);
    free(server->socket_path);
    free(server);
    return NULL;
}
