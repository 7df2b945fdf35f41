/*
 * direct_object: what the two halves of direct.h share: direct.c sends, direct_incoming.c receives.
 *
 * Threads: as in direct.h. `lock` guards what stands below it; it is not held while anything
 *   blocks, nor while a callback runs.
 * Ownership: a connection belongs to the thread that uses it, which alone closes its fd, and only
 *   when nobody else finds it any more. Others shut it down, under the lock.
 * Blocks: incoming_stop, until the callbacks that run have returned.
 * If the process dies: the kernel ends the connections.
 */
#ifndef COX_NODES_DIRECT_OBJECT_H
#define COX_NODES_DIRECT_OBJECT_H

#include "direct.h"
#include "direct_address.h"
#include "direct_stream.h"
#include "direct_tls.h"

#include <pthread.h>

struct cox_direct_incoming;

/* A process at an address. */
struct cox_direct_peer {
    char name[COX_DIRECT_NAME_SIZE];
    char address[COX_DIRECT_ADDRESS_MAX + 1];
    /* of the send that has `busy`; without one, under the lock: */
    struct cox_direct_stream stream;

    /* under the lock: */
    struct cox_direct_peer *next;
    /* sends that have begun: nobody else may free it then */
    uint32_t send_count;
    /* one of them uses the stream */
    bool busy;
    /* of the process that was reached here last; not known before */
    bool greeted;
    char group[COX_DIRECT_NAME_SIZE];
    /* busy was reset, or the peer dropped, or closing */
    pthread_cond_t idle;
    /* the stream's, also while it connects, for those that shut it down; -1: none */
    int fd;
    /* a send that finds another number than at its beginning has failed */
    uint64_t drop_count;
};

struct cox_direct {
    char name[COX_DIRECT_NAME_SIZE], group[COX_DIRECT_NAME_SIZE];
    bool insecure;
    /* empty if insecure */
    struct cox_direct_tls tls;
    uint64_t size_max;
    void *context;
    void (*on_message)(void *context, const char *peer, const char *group, uint32_t kind,
                       uint8_t *bytes, size_t size);
    int (*on_announce)(void *context, const char *peer, const char *group, uint32_t kind,
                       uint64_t size, const uint8_t *front, struct cox_error *err);
    bool (*to_memory)(void *context, uint32_t kind, uint64_t size, const uint8_t *front);
    void (*on_memory)(void *context, const char *peer, const char *group, uint32_t kind,
                      const uint8_t *front, struct cox_payload_memory *memory,
                      uint64_t memory_size);
    struct cox_payload_memory_pool *memory;
    void (*on_end)(void *context, const char *peer, int code, const char *text);
    /* -1: does not listen */
    int listen_fd;
    uint16_t port;
    pthread_t accepting;

    pthread_mutex_t lock;
    /* an incoming connection has ended, a send has, or closing */
    pthread_cond_t changed;
    bool closing;
    /* each address that is sent to; others go when one is added */
    struct cox_direct_peer *peers;
    /* calls of send */
    uint32_t send_count;
    struct cox_direct_incoming *incoming;
    uint32_t incoming_count;
    /* ever */
    uint64_t accept_count, refused_count;
    /* the connection that ended last: its thread has not been joined */
    struct cox_direct_incoming *ended;
};

/* Starts the thread that accepts at listen_fd. Returns 0 or -errno. */
int cox_direct_incoming_start(struct cox_direct *direct);
/* closing is set: ends all incoming connections and their threads. */
void cox_direct_incoming_stop(struct cox_direct *direct);
/* Ends those of one process of this group. The lock is held. */
void cox_direct_incoming_drop(struct cox_direct *direct, const char *peer);

#endif
