#include "http.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "program/client/client.h"
#include "program/metrics/metrics.h"
#include "program/metrics/request.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Each serves one connection at a time: /healthz replies while some wait for a slow status. */
#define THREAD_COUNT 8
/* Until a request has arrived, and again until its reply is taken. */
#define TRANSFER_MS 5000
#define STATUS_MS 5000
/* Until the next attempt to accept, where the process has no fd or memory left. */
#define PAUSE_MS 100
#define BACKLOG 64
#define UNIX_PREFIX "unix:"

struct cox_metrics_server {
    int listen_fd;
    /* an eventfd, readable from the beginning of free on */
    int stop_fd;
    pthread_t threads[THREAD_COUNT];
    unsigned int thread_count;
    /* of the group; NULL: not given */
    char *name, *socket_path;
    /* of a unix socket; empty: none */
    char path[sizeof((struct sockaddr_un *)NULL)->sun_path];
    char url[160];
};

/* ---- replies ---- */

struct reply {
    unsigned int status;
    const char *type;
    /* owned; NULL: there was no memory for it */
    char *text;
    size_t size;
};

static void reply_line(struct reply *reply, unsigned int status, const char *line)
{
    const int size = asprintf(&reply->text, "%s\n", line);
    reply->status = status;
    reply->type = "text/plain; charset=utf-8";
    if (size < 0)
        reply->text = NULL;
    else
        reply->size = (size_t)size;
}

static void reply_metrics(struct reply *reply, const struct CoxswainControl__StatusReply *status)
{
    FILE *file = open_memstream(&reply->text, &reply->size);
    if (!file)
        return;
    reply->status = COX_HTTP_OK;
    reply->type = COX_METRICS_CONTENT_TYPE;
    cox_metrics_write(file, status);
    if (fclose(file)) {
        free(reply->text);
        reply->text = NULL;
    }
}

/* Both that need the group's status. */
static void reply_status(const struct cox_metrics_server *server, struct reply *reply, bool metrics)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct CoxswainControl__StatusReply *status;
    struct cox_error err = {0};
    char reason[COX_HEALTH_SIZE];
    const uint64_t deadline_ns = cox_deadline_after_ms(STATUS_MS);
    int r = server->socket_path
                ? cox_client_open_path(&client, server->socket_path, deadline_ns, &err)
                : cox_client_open(&client, server->name, deadline_ns, &err);
    if (!r)
        r = cox_client_status(&client, deadline_ns, &status, &err);
    if (r)
        reply_line(reply, COX_HTTP_UNAVAILABLE, err.text);
    else if (metrics)
        reply_metrics(reply, status);
    else if (!cox_metrics_ready(status, reason))
        reply_line(reply, COX_HTTP_UNAVAILABLE, reason);
    else
        reply_line(reply, COX_HTTP_OK, "ready");
}

static bool asks(const struct cox_http_request *request, const char *path)
{
    return request->path_size == strlen(path) &&
           memcmp(request->path, path, request->path_size) == 0;
}

static void reply_to(const struct cox_metrics_server *server,
                     const struct cox_http_request *request, struct reply *reply)
{
    if (asks(request, "/metrics"))
        reply_status(server, reply, true);
    else if (asks(request, "/readyz"))
        reply_status(server, reply, false);
    else if (asks(request, "/healthz"))
        reply_line(reply, COX_HTTP_OK, "alive");
    else
        reply_line(reply, COX_HTTP_NOT_FOUND, "there are /metrics, /healthz and /readyz");
}

/* ---- connections ---- */

/* Waits until fd is ready. Returns false at the deadline, and where the server ends. */
static bool await(const struct cox_metrics_server *server, int fd, short events,
                  uint64_t deadline_ns)
{
    struct pollfd fds[2] = {{.fd = fd, .events = events},
                            {.fd = server->stop_fd, .events = POLLIN}};
    int count;
    do
        count = poll(fds, 2, cox_deadline_poll_ms(deadline_ns));
    while (count < 0 && errno == EINTR);
    return count > 0 && !fds[1].revents && cox_now_ns() < deadline_ns;
}

/* Returns the status, or 0 where the connection has ended, or is too slow. */
static unsigned int receive(const struct cox_metrics_server *server, int fd,
                            char bytes[COX_HTTP_REQUEST_SIZE_MAX], struct cox_http_request *request)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(TRANSFER_MS);
    size_t size = 0;
    unsigned int status = 0;
    while (!status && await(server, fd, POLLIN, deadline_ns)) {
        const ssize_t got = recv(fd, bytes + size, COX_HTTP_REQUEST_SIZE_MAX - size, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            return 0;
        size += got > 0 ? (size_t)got : 0;
        status = cox_http_request_parse(bytes, size, request);
    }
    return status;
}

static void send_all(const struct cox_metrics_server *server, int fd, const char *bytes,
                     size_t size, uint64_t deadline_ns)
{
    while (size && await(server, fd, POLLOUT, deadline_ns)) {
        const ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR)
            return;
        bytes += sent > 0 ? sent : 0;
        size -= sent > 0 ? (size_t)sent : 0;
    }
}

static void serve(const struct cox_metrics_server *server, int fd)
{
    char bytes[COX_HTTP_REQUEST_SIZE_MAX], head[256], date[64];
    struct cox_http_request request = {0};
    struct reply reply = {0};
    const unsigned int status = receive(server, fd, bytes, &request);
    if (!status)
        return;
    if (status == COX_HTTP_OK)
        reply_to(server, &request, &reply);
    else
        reply_line(&reply, status, cox_http_reason(status));
    if (!reply.text)
        return;
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &utc));
    const int size = snprintf(
        head, sizeof head,
        "HTTP/1.1 %u %s\r\nDate: %s\r\n%sContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
        reply.status, cox_http_reason(reply.status), date,
        reply.status == COX_HTTP_METHOD_NOT_ALLOWED ? "Allow: GET, HEAD\r\n" : "", reply.type,
        reply.size);
    const uint64_t deadline_ns = cox_deadline_after_ms(TRANSFER_MS);
    send_all(server, fd, head, (size_t)size, deadline_ns);
    if (!request.head_only)
        send_all(server, fd, reply.text, reply.size, deadline_ns);
    free(reply.text);
}

static void *serve_connections(void *context)
{
    const struct cox_metrics_server *server = context;
    while (await(server, server->listen_fd, POLLIN, COX_DEADLINE_NEVER)) {
        /* Non-blocking: another thread may have been first. */
        _cox_cleanup_(cox_close_fd) int fd =
            accept4(server->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            serve(server, fd);
        else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            await(server, -1, 0, cox_deadline_after_ms(PAUSE_MS));
    }
    return NULL;
}

/* ---- the address ---- */

union address {
    struct sockaddr any;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    struct sockaddr_un un;
};

static int parse_port(const char *text, in_port_t *ret_port)
{
    char *end;
    errno = 0;
    const unsigned long port = strtoul(text, &end, 10);
    if (!*text || *text < '0' || *text > '9' || *end || errno || port > UINT16_MAX)
        return COX_INVALID;
    *ret_port = htons((uint16_t)port);
    return 0;
}

static int parse_inet(const char *text, union address *ret_address, socklen_t *ret_size)
{
    char host[INET6_ADDRSTRLEN + 2] = "127.0.0.1";
    const char *colon = strrchr(text, ':'), *port = colon ? colon + 1 : text;
    const size_t size = colon ? (size_t)(colon - text) : strlen(host);
    in_port_t number;
    if (size >= sizeof host || parse_port(port, &number))
        return COX_INVALID;
    if (colon) {
        memcpy(host, text, size);
        host[size] = '\0';
    }
    memset(ret_address, 0, sizeof *ret_address);
    if (host[0] == '[' && host[size - 1] == ']') {
        host[size - 1] = '\0';
        ret_address->in6.sin6_family = AF_INET6;
        ret_address->in6.sin6_port = number;
        *ret_size = sizeof ret_address->in6;
        return inet_pton(AF_INET6, host + 1, &ret_address->in6.sin6_addr) == 1 ? 0 : COX_INVALID;
    }
    ret_address->in.sin_family = AF_INET;
    ret_address->in.sin_port = number;
    *ret_size = sizeof ret_address->in;
    return inet_pton(AF_INET, strcmp(host, "localhost") ? host : "127.0.0.1",
                     &ret_address->in.sin_addr) == 1
               ? 0
               : COX_INVALID;
}

static int parse_address(const char *text, union address *ret_address, socklen_t *ret_size,
                         struct cox_error *err)
{
    const char *path = text + strlen(UNIX_PREFIX);
    if (strncmp(text, UNIX_PREFIX, strlen(UNIX_PREFIX)) != 0)
        return parse_inet(text, ret_address, ret_size)
                   ? cox_fail(
                         err, COX_INVALID,
                         "metrics address '%.200s': expected ADDRESS:PORT with a numeric address "
                         "([ADDRESS]:PORT for IPv6), PORT, or unix:PATH",
                         text)
                   : 0;
    memset(ret_address, 0, sizeof *ret_address);
    if (!*path || strlen(path) >= sizeof ret_address->un.sun_path)
        return cox_fail(err, COX_INVALID,
                        "metrics address: the path of a unix socket has 1 to %zu bytes",
                        sizeof ret_address->un.sun_path - 1);
    ret_address->un.sun_family = AF_UNIX;
    strcpy(ret_address->un.sun_path, path);
    *ret_size = sizeof ret_address->un;
    return 0;
}

int cox_metrics_address_check(const char *address, struct cox_error *err)
{
    union address at;
    socklen_t size;
    return parse_address(address, &at, &size, err);
}

/* A socket that nobody listens on is of a process that died. */
static void remove_dead(const struct sockaddr_un *address)
{
    struct stat info;
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && lstat(address->sun_path, &info) == 0 && S_ISSOCK(info.st_mode) &&
        connect(fd, (const struct sockaddr *)address, sizeof *address) < 0 && errno == ECONNREFUSED)
        unlink(address->sun_path);
}

/* Returns an fd or -errno. */
static int listen_at(const union address *address, socklen_t size)
{
    const int on = 1;
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (address->any.sa_family == AF_UNIX) {
        remove_dead(&address->un);
        fchmod(fd, S_IRUSR | S_IWUSR); /* the mode of the file that bind makes */
    } else {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    if (bind(fd, &address->any, size) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    const int e = errno;
    close(fd);
    return -e;
}

static void note_url(struct cox_metrics_server *server, int fd, const union address *wanted)
{
    union address bound = *wanted;
    socklen_t size = sizeof bound;
    char host[INET6_ADDRSTRLEN] = "";
    if (wanted->any.sa_family == AF_UNIX) {
        strcpy(server->path, wanted->un.sun_path);
        snprintf(server->url, sizeof server->url, UNIX_PREFIX "%s", server->path);
        return;
    }
    getsockname(fd, &bound.any, &size);
    const bool six = bound.any.sa_family == AF_INET6;
    inet_ntop(bound.any.sa_family,
              six ? (const void *)&bound.in6.sin6_addr : (const void *)&bound.in.sin_addr, host,
              sizeof host);
    snprintf(server->url, sizeof server->url,
             six ? "http://[%s]:%u/metrics" : "http://%s:%u/metrics", host,
             (unsigned)ntohs(six ? bound.in6.sin6_port : bound.in.sin_port));
}

/* ---- constructor and destructor ---- */

static int start(struct cox_metrics_server *server)
{
    server->stop_fd = eventfd(0, EFD_CLOEXEC);
    int r = server->stop_fd < 0 ? -errno : 0;
    while (!r && server->thread_count < THREAD_COUNT) {
        r = cox_thread_start(&server->threads[server->thread_count], serve_connections, server);
        server->thread_count += !r;
    }
    return r;
}

int cox_metrics_server_new(const char *address, const char *name, const char *socket_path,
                           struct cox_metrics_server **ret_server, struct cox_error *err)
{
    union address at;
    socklen_t size = 0;
    int r = parse_address(address, &at, &size, err);
    if (r)
        return r;
    _cox_cleanup_(cox_metrics_server_freep) struct cox_metrics_server *server =
        calloc(1, sizeof *server);
    if (server) {
        server->listen_fd = server->stop_fd = -1;
        server->name = name ? strdup(name) : NULL;
        server->socket_path = socket_path ? strdup(socket_path) : NULL;
    }
    if (!server || (name && !server->name) || (socket_path && !server->socket_path))
        return cox_fail(err, -ENOMEM, "no memory for the metrics");
    r = server->listen_fd = listen_at(&at, size);
    if (r >= 0) {
        note_url(server, server->listen_fd, &at);
        r = start(server);
    }
    if (r)
        return cox_fail(err, r, "metrics address %.200s: %s", address, cox_status_text(r));
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
    if (server->thread_count) {
        const ssize_t written = write(server->stop_fd, &(uint64_t){1}, sizeof(uint64_t));
        COX_ASSERT(written == sizeof(uint64_t)); /* nothing else has written */
    }
    for (unsigned int i = 0; i < server->thread_count; i++)
        pthread_join(server->threads[i], NULL);
    cox_close_fd(&server->listen_fd);
    cox_close_fd(&server->stop_fd);
    if (server->path[0])
        unlink(server->path);
    free(server->name);
    free(server->socket_path);
    free(server);
    return NULL;
}

void cox_metrics_server_freep(struct cox_metrics_server **server)
{
    *server = cox_metrics_server_free(*server);
}
