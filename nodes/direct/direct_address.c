#include "direct_address.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>

/* More than the connections that may be open: a cluster that starts opens them all at once. */
#define BACKLOG 512

static void list_free(struct addrinfo **list)
{
    if (*list)
        freeaddrinfo(*list);
}

/* Splits at the last colon; the brackets of an IPv6 address go. */
static bool address_split(const char *address, char host[COX_DIRECT_ADDRESS_MAX + 1],
                          const char **ret_port)
{
    const char *colon = strrchr(address, ':');
    if (!colon || colon == address || strlen(address) > COX_DIRECT_ADDRESS_MAX)
        return false;
    const char *begin = address, *end = colon;
    if (*begin == '[' && end[-1] == ']')
        begin++, end--;
    else if (strcspn(begin, ":[]") != (size_t)(end - begin))
        return false;
    const size_t digits = strspn(colon + 1, "0123456789");
    if (begin >= end || digits < 1 || digits > 5 || colon[1 + digits] ||
        strtoul(colon + 1, NULL, 10) > UINT16_MAX)
        return false;
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    *ret_port = colon + 1;
    return true;
}

bool cox_direct_address_is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, address, sizeof in);
        return ntohl(in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    }
    if (address->sa_family != AF_INET6)
        return false;
    struct sockaddr_in6 in6;
    memcpy(&in6, address, sizeof in6);
    return IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr) ||
           (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr) && in6.sin6_addr.s6_addr[12] == IN_LOOPBACKNET);
}

int cox_direct_address_resolve(const char *address, bool loopback_only, struct addrinfo **ret_list,
                               struct cox_error *err)
{
    char host[COX_DIRECT_ADDRESS_MAX + 1];
    const char *port;
    if (!address_split(address, host, &port))
        return cox_fail(err, COX_INVALID,
                        "'%.280s' is not an address: HOST:PORT or [IPV6]:PORT, the port a number",
                        address);
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    _cox_cleanup_(list_free) struct addrinfo *list = NULL;
    const int e = getaddrinfo(host, port, &hints, &list);
    if (e)
        return cox_fail(err, COX_INVALID, "cannot find the host of %s: %s", address,
                        e == EAI_SYSTEM ? strerror(errno) : gai_strerror(e));
    for (const struct addrinfo *a = list; loopback_only && a; a = a->ai_next)
        if (!cox_direct_address_is_loopback(a->ai_addr))
            return cox_fail(err, COX_DENIED,
                            "%s is not a loopback address: connections between hosts need TLS",
                            address);
    *ret_list = cox_steal_ptr(&list);
    return 0;
}

void cox_direct_address_format(const struct sockaddr *address, socklen_t size, char ret_text[80])
{
    char host[64], port[8];
    if (getnameinfo(address, size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        strcpy(ret_text, "an unknown address");
    else
        snprintf(ret_text, 80, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

int cox_direct_address_configure(int fd)
{
    /* The end of a message must not wait for an acknowledgment. The kernel sizes the buffers: a
     * size that is set here would also be the largest. */
    return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)) ? -errno : 0;
}

static int socket_new(const struct addrinfo *address, int flags, int *ret_fd)
{
    _cox_cleanup_(cox_close_fd) int fd = socket(
        address->ai_family, address->ai_socktype | SOCK_CLOEXEC | flags, address->ai_protocol);
    if (fd < 0)
        return -errno;
    int r = cox_fd_raise(&fd);
    if (r)
        return r;
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_direct_address_socket(const struct addrinfo *address, int *ret_fd)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = socket_new(address, SOCK_NONBLOCK, &fd);
    if (r == 0)
        r = cox_direct_address_configure(fd);
    if (r == 0)
        *ret_fd = cox_steal_fd(&fd);
    return r;
}

static int listen_at(const struct addrinfo *address, int *ret_fd, uint16_t *ret_port)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = socket_new(address, 0, &fd);
    if (r)
        return r;
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    /* Connections of an earlier process on this port may still be in TIME_WAIT. */
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) ||
        bind(fd, address->ai_addr, address->ai_addrlen) || listen(fd, BACKLOG) ||
        getsockname(fd, (struct sockaddr *)&own, &size))
        return -errno;
    in_port_t port;
    if (own.ss_family == AF_INET)
        memcpy(&port, (char *)&own + offsetof(struct sockaddr_in, sin_port), sizeof port);
    else
        memcpy(&port, (char *)&own + offsetof(struct sockaddr_in6, sin6_port), sizeof port);
    *ret_port = ntohs(port);
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_direct_address_listen(const struct addrinfo *list, int *ret_fd, uint16_t *ret_port)
{
    int r = -EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; r && a; a = a->ai_next)
        r = listen_at(a, ret_fd, ret_port);
    return r;
}

int cox_direct_probe(const char *address)
{
    char host[COX_DIRECT_ADDRESS_MAX + 1];
    const char *port;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
    _cox_cleanup_(list_free) struct addrinfo *list = NULL;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    if (!address_split(address, host, &port) || getaddrinfo(host, port, &hints, &list))
        return -EINVAL;
    const int r = cox_direct_address_socket(list, &fd);
    if (r)
        return r;
    if (connect(fd, list->ai_addr, list->ai_addrlen) && errno != EINPROGRESS)
        return -errno; /* on the same machine the answer is there at once */
    return cox_steal_fd(&fd);
}

int cox_direct_probe_result(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    int error = 0;
    socklen_t size = sizeof error;
    if (poll(&ready, 1, 0) <= 0)
        return -EINPROGRESS;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) ? -errno : -error;
}
