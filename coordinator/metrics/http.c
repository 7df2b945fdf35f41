#include "http.h"

#include "channel/base/idioms.h"
#include "coordinator/client/client.h"
#include "coordinator/metrics/metrics.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define STATUS_MS 5000
#define IDLE_SECONDS 30
#define CONNECTION_COUNT_MAX 16
#define BACKLOG 64
#define UNIX_PREFIX "unix:"

struct cox_metrics_server {
    struct MHD_Daemon *daemon;
    /* of the group; NULL: not given */
    char *name, *socket_path;
    /* of a unix socket; empty: none */
    char path[sizeof((struct sockaddr_un *)NULL)->sun_path];
    char url[160];
};

/* ---- requests ---- */

static enum MHD_Result reply(struct MHD_Connection *connection, unsigned int code, const char *type,
                             char *text, size_t size)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(size, text, MHD_RESPMEM_MUST_FREE);
    if (!response) {
        free(text);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    enum MHD_Result result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result reply_line(struct MHD_Connection *connection, unsigned int code,
                                  const char *line)
{
    char *text = NULL;
    const int size = asprintf(&text, "%s\n", line);
    return size < 0 ? MHD_NO
                    : reply(connection, code, "text/plain; charset=utf-8", text, (size_t)size);
}

static enum MHD_Result reply_metrics(struct MHD_Connection *connection,
                                     const struct CoxswainControl__StatusReply *status)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return MHD_NO;
    cox_metrics_write(file, status);
    if (fclose(file)) {
        free(text);
        return MHD_NO;
    }
    return reply(connection, MHD_HTTP_OK, COX_METRICS_CONTENT_TYPE, text, size);
}

/* Both that need the group's status. */
static enum MHD_Result serve_status(const struct cox_metrics_server *server,
                                    struct MHD_Connection *connection, bool metrics)
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
        return reply_line(connection, MHD_HTTP_SERVICE_UNAVAILABLE, err.text);
    if (metrics)
        return reply_metrics(connection, status);
    if (!cox_metrics_ready(status, reason))
        return reply_line(connection, MHD_HTTP_SERVICE_UNAVAILABLE, reason);
    return reply_line(connection, MHD_HTTP_OK, "ready");
}

static enum MHD_Result serve(void *context, struct MHD_Connection *connection, const char *url,
                             const char *method, const char *version, const char *upload,
                             size_t *upload_size, void **request)
{
    const struct cox_metrics_server *server = context;
    static int seen;
    (void)version, (void)upload;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return MHD_NO; /* closes the connection: a body is not read */
    if (!*request) {   /* the headers are there */
        *request = &seen;
        return MHD_YES;
    }
    if (*upload_size)
        return MHD_NO;
    if (!strcmp(url, "/metrics"))
        return serve_status(server, connection, true);
    if (!strcmp(url, "/readyz"))
        return serve_status(server, connection, false);
    if (!strcmp(url, "/healthz"))
        return reply_line(connection, MHD_HTTP_OK, "alive");
    return reply_line(connection, MHD_HTTP_NOT_FOUND, "there are /metrics, /healthz and /readyz");
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

int cox_metrics_server_new(const char *address, const char *name, const char *socket_path,
                           struct cox_metrics_server **ret_server, struct cox_error *err)
{
    union address at;
    socklen_t size = 0;
    int r = parse_address(address, &at, &size, err);
    if (r)
        return r;
    struct cox_metrics_server *server = calloc(1, sizeof *server);
    if (server) {
        server->name = name ? strdup(name) : NULL;
        server->socket_path = socket_path ? strdup(socket_path) : NULL;
    }
    if (!server || (name && !server->name) || (socket_path && !server->socket_path)) {
        cox_metrics_server_free(server);
        return cox_fail(err, -ENOMEM, "no memory for the metrics");
    }
    const int fd = listen_at(&at, size);
    if (fd < 0) {
        cox_metrics_server_free(server);
        return cox_fail(err, fd, "metrics address %.200s: %s", address, cox_status_text(fd));
    }
    note_url(server, fd, &at);
    server->daemon =
        MHD_start_daemon(MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD |
                             MHD_USE_ITC | MHD_USE_POLL,
                         0, NULL, NULL, serve, server, MHD_OPTION_LISTEN_SOCKET, fd,
                         MHD_OPTION_CONNECTION_LIMIT, (unsigned int)CONNECTION_COUNT_MAX,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned int)IDLE_SECONDS, MHD_OPTION_END);
    if (!server->daemon) {
        close(fd);
        cox_metrics_server_free(server);
        return cox_fail(err, -EAGAIN, "metrics address %.200s: the HTTP server cannot start",
                        address);
    }
    *ret_server = server;
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
    if (server->daemon)
        MHD_stop_daemon(server->daemon); /* closes the listening socket, too */
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
