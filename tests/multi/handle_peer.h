/*
 * handle_peer: a process of its own that exports on request: the common part of the tests of
 * by-value handles between processes. Threads: one. Ownership: a peer belongs to the test until
 * ended. Blocks: until the peer has replied. If the test dies: the kernel kills the peer; one that
 * left its parent ends with its socket.
 */
#ifndef COX_TESTS_MULTI_HANDLE_PEER_H
#define COX_TESTS_MULTI_HANDLE_PEER_H

#include "tests/unit/handle_fixture.h"

#define PEER_OBJECT_SIZE 20000
#define PEER_BATCH 64

struct peer_options {
    /* 0: as the test */
    uid_t uid;
    /* NULL: none */
    const char *socket_path;
    /* neither child nor parent of a process here, in a session of its own */
    bool unrelated;
    /* 0: as the test */
    uint32_t fd_limit;
};

struct peer {
    pid_t pid;
    bool unrelated;
    int socket;
};

enum peer_order {
    PEER_EXPORT = 1, /* a new object, pattern seed `argument` */
    PEER_EXPORT_AT,  /* the same, from byte 5001 on */
    PEER_EXPORT_SOCKET,
    PEER_EXPORT_BATCH, /* PEER_BATCH handles of one object */
    PEER_PUT,
    PEER_PUT_BATCH,     /* all of the last batch */
    PEER_REPLACE,       /* another object behind the exporter's back; argument: the fd number */
    PEER_SET_DUMPABLE,  /* argument */
    PEER_TRUNCATE,      /* the object of the last export, to `argument` bytes */
    PEER_COUNT_FDS,     /* -> number */
    PEER_OPEN,          /* -> result of cox_handle_open, number: the first byte of what it means */
    PEER_RECEIVE_EVENT, /* a byte from the other end of the socket exported last -> number */
};

struct peer_reply {
    int result;
    int number;
    struct cox_error err;
    struct cox_handle handles[PEER_BATCH];
};

struct peer peer_start(const struct peer_options *options);
/* Fails the test unless it replies. */
struct peer_reply peer_ask(const struct peer *peer, enum peer_order order, int64_t argument,
                           const struct cox_handle *handle);
/* The order has to succeed; returns its first handle. */
struct cox_handle peer_export(const struct peer *peer, enum peer_order order, unsigned seed);
void peer_kill(const struct peer *peer); /* dead on return, not reaped */
void peer_end(struct peer *peer);        /* dead or not */

/* A child has ended with 0; with 77 the test is skipped. */
void child_expect(int status);
/* Opens it, for reading where it is memory; CHECKed in children, too. */
const struct cox_import *import_open(struct cox_importer *importer,
                                     const struct cox_handle *handle);
/* What opening it returns, for reading. */
int import_try(struct cox_importer *importer, const struct cox_handle *handle);
/* The byte of a mapped object. */
uint8_t import_byte(const struct cox_import *import, size_t at);

#endif
