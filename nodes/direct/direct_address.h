/*
 * direct_address: the addresses of direct.h, "HOST:PORT", and sockets for them.
 *
 * Threads: any.
 * Ownership: the caller frees lists with freeaddrinfo, and closes fds.
 * Blocks: resolve, for a host that is not a number, as long as the C library looks for it.
 * If the process dies: nothing is left.
 */
#ifndef COX_NODES_DIRECT_ADDRESS_H
#define COX_NODES_DIRECT_ADDRESS_H

#include "direct.h"

#include <netdb.h>
#include <sys/socket.h>

/* "HOST:PORT", with the longest host name of DNS. */
#define COX_DIRECT_ADDRESS_MAX 262

/* Parses and looks up "HOST:PORT" or "[IPv6]:PORT".
 * Returns
 *   0: the list has at least one entry
 *   COX_INVALID: not an address, or an unknown host
 *   COX_DENIED: loopback_only, and one of the list is not
 */
int cox_direct_address_resolve(const char *address, bool loopback_only, struct addrinfo **ret_list,
                               struct cox_error *err);
bool cox_direct_address_is_loopback(const struct sockaddr *address);
/* "10.0.0.3:41000", "[::1]:41000". */
void cox_direct_address_format(const struct sockaddr *address, socklen_t size, char ret_text[80]);

/* A non-blocking socket with the options of every connection. Returns 0 or -errno. */
int cox_direct_address_socket(const struct addrinfo *address, int *ret_fd);
/* A blocking socket that listens at the first address of the list that can be had.
 * Returns 0 or -errno. */
int cox_direct_address_listen(const struct addrinfo *list, int *ret_fd, uint16_t *ret_port);
/* The options of every connection, for one that was accepted. Returns 0 or -errno. */
int cox_direct_address_configure(int fd);

#endif
