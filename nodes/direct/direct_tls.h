/*
 * direct_tls: who a process is, to the others of its cluster: its certificate, its key, and the CA
 * by which it checks theirs. Part of direct.h.
 *
 * Threads: any; after open nothing changes.
 * Ownership: the caller closes what it has opened, after the last stream that uses it has ended.
 * Blocks: open reads files.
 * If the process dies: nothing is left.
 */
#ifndef COX_NODES_DIRECT_TLS_H
#define COX_NODES_DIRECT_TLS_H

#include "direct.h"

#include <openssl/bio.h>
#include <openssl/types.h>

/* A connected socket as TLS uses it: OpenSSL's own BIO for sockets raises SIGPIPE. */
struct cox_direct_socket {
    /* non-blocking; -1: none */
    int fd;
    /* the peer has closed */
    bool ended;
    /* errno of a call that failed otherwise; 0: none */
    int error;
    /* TLS writes record by record: of a large message several go with one call. They wait here,
     * from waiting_first to waiting_end; owned by the stream; NULL until the first of them. */
    uint8_t *waiting;
    size_t waiting_first, waiting_end;
    /* what TLS writes now may wait: the stream flushes */
    bool gathers;
};
/* Room for what waits: eight records. */
#define COX_DIRECT_WAITING_SIZE ((size_t)8 * ((16 << 10) + 256))
/* One send or recv. Returns the number of bytes; 0: it would block, the peer has closed (ended) or
 * the call has failed (error). */
size_t cox_direct_socket_send(struct cox_direct_socket *socket, const void *bytes, size_t size);
size_t cox_direct_socket_receive(struct cox_direct_socket *socket, void *bytes, size_t size);
/* Sends what waits. False: not all of it, as above. */
bool cox_direct_socket_flush(struct cox_direct_socket *socket);

struct cox_direct_tls {
    /* for both sides of connections */
    SSL_CTX *context;
    /* of cox_direct_socket */
    BIO_METHOD *method;
};

/* Reads and checks the files; own_name must be the certificate's.
 * Returns
 *   0
 *   COX_INVALID: the text has the path
 *   -ENOMEM
 */
int cox_direct_tls_open(const char *ca, const char *certificate, const char *key,
                        const char *own_name, struct cox_direct_tls *ret_tls,
                        struct cox_error *err);
void cox_direct_tls_close(struct cox_direct_tls *tls); /* idempotent */
/* TLS over the socket, which must outlive it, as client or server. NULL: no memory. */
SSL *cox_direct_tls_start(const struct cox_direct_tls *tls, struct cox_direct_socket *socket,
                          bool serves);

/* 1 to COX_DIRECT_NAME_MAX letters, digits and ".-_": what a name may be, whoever says it. */
bool cox_direct_name_is_valid(const char *name);
/* The one common name of a certificate. False: there is none, more than one, or it is not valid. */
bool cox_direct_tls_name(const X509 *certificate, char ret_name[COX_DIRECT_NAME_MAX + 1]);
/* The oldest error in this thread's queue of OpenSSL, in words; empties the queue. Static
 * storage. */
const char *cox_direct_tls_reason(void);

#endif
