/*
 * direct_world: what the tests of direct connections (nodes/direct) share: certificates, which
 * certificates_make puts into a folder of this program, a receiver that remembers what came, and
 * processes to connect with.
 */
#ifndef COX_TESTS_NODES_DIRECT_WORLD_H
#define COX_TESTS_NODES_DIRECT_WORLD_H

#include "nodes/direct/direct.h"
#include "tests/lib/test.h"

#define PATIENCE_MS 30000
#define MIB ((size_t)1 << 20)

/* The group's setup and teardown: FILE.crt and FILE.key of each kind, ca.crt, foreign-ca.crt. */
int certificates_make(void **state);
int certificates_remove(void **state);
/* Of a file of that folder; the last eight stay. */
const char *path(const char *file);

/* A test's: no fd, thread or child is left. */
int setup(void **state);
int teardown(void **state);
#define TEST(name) TEST_WITH(name, setup, teardown)
void moment(void);

/* A receiver that remembers: the last message, and every end. */
struct box {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* on_message does not return */
    bool held;
    /* written under the lock, and read without */
    _Atomic uint32_t message_count, end_count;
    /* of the last end */
    _Atomic bool end_has_peer;
    uint64_t next[8];
    bool disorder;
    char peer[64], group[64];
    uint32_t kind;
    uint8_t *bytes;
    size_t size;
    int end_code;
    char ends[8192];
};

/* Boxes, and what opens below, are the test's (test_own). */
struct box *box_new(void);
void box_hold(struct box *box, bool held);
void box_await(struct box *box, uint32_t message_count);
void box_await_end(struct box *box, const char *text);
void box_forget(struct box *box);

/* file: of the certificate; NULL: without TLS. box: NULL: it does not listen. */
struct cox_direct_options options_of(const char *name, const char *file, struct box *box);
struct cox_direct *opened(const struct cox_direct_options *options);
struct cox_direct *node_of(const char *group, const char *name, const char *file, struct box *box);
struct cox_direct *node(const char *name, const char *file, struct box *box);
/* "127.0.0.1:PORT"; the last one stays. */
const char *address_of(uint16_t port);
int send_bytes(struct cox_direct *from, const char *peer, uint16_t port, uint32_t kind,
               const void *bytes, size_t size, uint64_t timeout_ms, struct cox_error *err);
/* Fails the test if it is not sent. */
void sends(struct cox_direct *from, const char *peer, uint16_t port, const char *text);
/* Fails the test if it is sent, or refused otherwise. */
void refuses(struct cox_direct *from, const char *peer, uint16_t port, int code, const char *text);
/* A socket of the test's own that listens. */
int raw_listen(uint16_t *ret_port);

#endif
