/*
 * http_address: where the metrics are served: ADDRESS:PORT ([ADDRESS]:PORT for IPv6), PORT alone
 * for 127.0.0.1, or unix:PATH.
 *
 * Threads: any.
 * Ownership: the caller owns what is filled, and the fd; an address borrows its text.
 * Blocks: nothing.
 * If the process dies: a unix socket stays as a file; the next one at this path removes it.
 */
#ifndef COX_PROGRAM_HTTP_ADDRESS_H
#define COX_PROGRAM_HTTP_ADDRESS_H

#include <coxswain/base.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#define COX_HTTP_URL_SIZE 160

union cox_http_sockaddr {
    struct sockaddr any;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
    struct sockaddr_un un;
};

struct cox_http_address {
    /* what was parsed, lent; NULL: no address */
    const char *text;
    union cox_http_sockaddr at;
    socklen_t size;
};

/* Into a struct cox_http_address. Returns 0, or COX_INVALID. */
int cox_http_address_take(void *address, const char *text, struct cox_error *err);
/* Returns a non-blocking fd that listens, or -errno. */
int cox_http_address_listen(const struct cox_http_address *address);
/* Where the fd listens: "http://127.0.0.1:9400/metrics", or "unix:PATH". */
void cox_http_address_url(int fd, const struct cox_http_address *wanted,
                          char url[COX_HTTP_URL_SIZE]);
/* Who a peer is, for its share of the connections: its IPv4 address, the first 64 bits of its IPv6
 * address, which one machine has all addresses below, or 0 for a unix socket. */
struct in6_addr cox_http_address_network(const union cox_http_sockaddr *peer);

#endif
