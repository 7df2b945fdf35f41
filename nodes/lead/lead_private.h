/* The struct of the lead, shared by lead.c (opening, frames, time), lead_hello.c (which nodes are admitted), lead_send.c and
 * lead_transport.c (what the executor calls). Threads and locks: lead.c. */
#ifndef COX_NODES_LEAD_PRIVATE_H
#define COX_NODES_LEAD_PRIVATE_H

#include "nodes/nodes.h"

#include "channel/base/log_limit.h"
#include "nodes/image.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"
#include "nodes/link/stacks_fetch.h"
#include "nodes/outbox.h"

#include <pthread.h>

/* How often the lead looks at the time. */
#define COX_LEAD_TICK_NS (20 * COX_NSEC_PER_MSEC)

/* What a node said that is not admitted. */
struct hello {
    /* 0: none */
    uint64_t agent;
    uint64_t heard_ns;
    /* another agent of this name, and when it came; 0: none */
    uint64_t rival, rival_ns;
    uint64_t epoch, silent_ms;
    /* the ranks that it has, of an earlier lead; rank_count 0: none */
    uint32_t rank_first, rank_count, world;
    char address[128];
    /* of the lead that it follows; "": of none */
    char lead_address[128];
    char server_id[64];
    uint64_t client_id;
    uint32_t pid;
    uint64_t through[COX_TWO_WAY_COUNT];
    uint64_t rank_group_incarnation;
    uint64_t images[COX_IMAGE_COUNT_MAX];
    uint32_t image_count;
    size_t fact_count;
    char **facts; /* name, value, ... */
    /* why it was refused; "": it was not */
    char refusal[400];
};

/* Whether an agent whose connection to the server has ended is there: its address is tried. A process
 * that has died refuses; silence says nothing. */
struct probe {
    /* -1: none is under way */
    int fd;
    char reason[160];
};

struct gathered {
    uint8_t *bytes;
    size_t size;
};

struct cox_nodes {
    struct cox_nodes_options options;
    struct cox_node_times times;
    char url[1024];
    char group[COX_NAME_SIZE_MAX + 1];
    char **facts; /* name, value or NULL, ... */
    size_t fact_count;
    uint32_t node_count;
    uint32_t world;
    uint64_t epoch;
    bool continued;
    bool fresh;
    enum cox_attach attach;
    uint64_t first_sequence[COX_TWO_WAY_COUNT];
    struct cox_cluster *cluster;
    struct cox_direct *direct;
    char address[160];
    struct cox_transport transport;

    pthread_mutex_t delivery;
    /* under delivery; NULL: not started, or stopped */
    struct cox_executor *executor;
    const struct cox_transport_host *host;

    pthread_mutex_t lock;
    struct cox_lead_link *links;
    struct hello *hellos;
    struct probe *probes;
    /* what the links send while one request is published: of each, NULL: nothing */
    struct gathered *gathered;
    bool gathering;
    struct cox_lead_events events;
    struct cox_images images;
    CoxNode__Peer *peers;
    CoxNode__Peer **peer_pointers;
    uint64_t peers_version;
    /* nodes are admitted when they come */
    bool started, stopping;
    /* another lead has taken the nodes over; "": no */
    char taken_over[400];
    /* since when this process has no connection; 0: it has one */
    uint64_t cut_off_ns;
    uint64_t seek_ns;
    /* faults of what nodes say */
    pthread_mutex_t fault_lock;
    struct cox_log_limit faults;
    struct cox_recorder_fetches fetches;
    /* one at a time */
    struct cox_stacks_fetch stacks;
    /* one of these has come */
    pthread_cond_t fetched;
    /* of each node, for what is too large for NATS; NULL: direct is not open */
    struct cox_outbox **outboxes;
    bool threaded;
    pthread_t thread;
};

/* ---- lead_send.c ---- */

/* A message of node.proto. The lock is held, as in the others. */
void cox_lead_send(struct cox_nodes *nodes, uint32_t node, enum cox_frame_kind kind,
                   const ProtobufCMessage *message);
/* By a direct connection. Takes bytes and fd, of which fd_size bytes follow; -1: none do. */
void cox_lead_send_large(struct cox_nodes *nodes, uint32_t node, uint32_t kind, uint8_t *bytes,
                         size_t size, int fd, uint64_t fd_size);
/* By NATS, or a direct connection. Takes bytes. */
void cox_lead_send_to(struct cox_nodes *nodes, uint32_t node, uint8_t *bytes, size_t size);
/* Of a link. Takes bytes. */
void cox_lead_on_send(void *context, const struct cox_lead_link *link, uint8_t *bytes, size_t size,
                      struct cox_large_request *large);
/* Of an outbox: it has lost a message for this node. Takes the lock. */
void cox_lead_on_lost(void *context, uint32_t node);
/* What the links have sent while `gathering`: one copy for all where that will do. */
void cox_lead_send_gathered(struct cox_nodes *nodes);

/* ---- lead_hello.c ---- */

void cox_lead_hello_clear(struct hello *hello);
/* Returns 0; COX_TAKEN, COX_STALE: it is not taken now, and comes again; COX_INVALID: the node is
 * refused; COX_CORRUPT: no honest agent says it, and nothing of it is kept. */
int cox_lead_hello_take(struct cox_nodes *nodes, uint32_t node, const CoxNode__Hello *message,
                        struct cox_error *err);
/* The node has said hello, and its ranks can begin. */
void cox_lead_admit(struct cox_nodes *nodes, uint32_t node);
/* Without its bytes, if the node has said that it has them. */
void cox_lead_image_send(struct cox_nodes *nodes, uint32_t node, const struct cox_image *image);

/* ---- lead_transport.c ---- */

/* Fills nodes->transport. */
void cox_lead_transport_init(struct cox_nodes *nodes);

#endif
