#include "http_address.h"

#include "channel/base/idioms.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define UNIX_PREFIX "unix:"
/* More than that wait in the kernel only while a turn of the server lasts. */
#define BACKLOG 1024

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

static int parse_inet(const char *text, union cox_http_sockaddr *ret_address, socklen_t *ret_size)
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

static int parse(const char *text, union cox_http_sockaddr *ret_address, socklen_t *ret_size,
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

int cox_http_address_take(void *member, const char *text, struct cox_error *err)
{
    struct cox_http_address *address = member;
    address->text = text;
    return parse(text, &address->at, &address->size, err);
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

int cox_http_address_listen(const struct cox_http_address *address)
{
    const int on = 1;
    int fd = socket(address->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (address->at.any.sa_family == AF_UNIX) {
        remove_dead(&address->at.un);
        fchmod(fd, S_IRUSR | S_IWUSR); /* the mode of the file that bind makes */
    } else {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    if (bind(fd, &address->at.any, address->size) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    const int e = errno;
    close(fd);
    return -e;
}

void cox_http_address_url(int fd, const struct cox_http_address *wanted,
                          char url[COX_HTTP_URL_SIZE])
{
    union cox_http_sockaddr bound = wanted->at;
    socklen_t size = sizeof bound;
    char host[INET6_ADDRSTRLEN] = "";
    if (wanted->at.any.sa_family == AF_UNIX) {
        snprintf(url, COX_HTTP_URL_SIZE, UNIX_PREFIX "%s", wanted->at.un.sun_path);
        return;
    }
    getsockname(fd, &bound.any, &size);
    const bool six = bound.any.sa_family == AF_INET6;
    inet_ntop(bound.any.sa_family,
              six ? (const void *)&bound.in6.sin6_addr : (const void *)&bound.in.sin_addr, host,
              sizeof host);
    snprintf(url, COX_HTTP_URL_SIZE, six ? "http://[%s]:%u/metrics" : "http://%s:%u/metrics", host,
             (unsigned)ntohs(six ? bound.in6.sin6_port : bound.in.sin_port));
}

struct in6_addr cox_http_address_network(const union cox_http_sockaddr *peer)
{
    struct in6_addr network = {0};
    if (peer->any.sa_family == AF_INET)
        memcpy(&network, &peer->in.sin_addr, sizeof peer->in.sin_addr);
    else if (peer->any.sa_family == AF_INET6)
        memcpy(&network, &peer->in6.sin6_addr, IN6_IS_ADDR_V4MAPPED(&peer->in6.sin6_addr) ? 16 : 8);
    return network;
}
