/* The struct of the agent, shared by agent.c (opening, frames, time), agent_send.c, agent_stacks.c, agent_ranks.c
 * (processes) and agent_requests.c. Threads and locks: agent.c. */
#ifndef COX_NODES_AGENT_PRIVATE_H
#define COX_NODES_AGENT_PRIVATE_H

#include "nodes/nodes.h"

#include <coxswain/executor.h>
#include "channel/base/log_limit.h"
#include "channel/memory/payload_memory.h"
#include "nodes/group_relay.h"
#include "nodes/image.h"
#include "nodes/kv_relay.h"
#include "nodes/link/agent_link.h"
#include "nodes/outbox.h"

#include <pthread.h>

struct agent {
    const struct cox_node_agent_options *options;
    struct cox_cluster *cluster;
    struct cox_direct *direct;
    struct cox_group_relay *relay;
    struct cox_kv_relay *kv;
    /* of large requests; outlives direct, link and executor */
    struct cox_payload_memory_pool memory;
    char address[160];

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct cox_agent_link link;
    uint64_t cancelled_through[COX_TWO_WAY_COUNT], ended_through[COX_TWO_WAY_COUNT];
    enum cox_lead_state told;
    /* what the ranks were started with */
    uint32_t world, rank_first, rank_count, depth;
    uint64_t request_size[COX_CHANNEL_COUNT], response_size[COX_CHANNEL_COUNT];
    bool no_recorder;
    enum cox_attach attach;
    /* a lead wants ranks; they are other ones than those that run, which get nothing more */
    bool wanted, renew;
    /* They could not be started, as these incarnations: tried again for a later one. */
    bool not_started;
    uint32_t start_failed[COX_RANK_COUNT_MAX];
    /* NULL: no ranks run */
    struct cox_executor *executor;
    /* of each rank here: the incarnation that its process stands for with the present lead; 0: none yet */
    uint32_t claimed[COX_RANK_COUNT_MAX];
    /* its process is dead, and is not being replaced */
    bool dead[COX_RANK_COUNT_MAX];
    uint32_t killed[COX_RANK_COUNT_MAX];
    /* the request that the kv thread fetches blocks for; 0: none */
    uint64_t pulling;
    struct cox_images images;
    /* for what is too large for NATS; NULL: direct is not open */
    struct cox_outbox *outbox;
    /* all that frames of the lead need is there */
    bool opened;
    /* why the agent ends; 0 with ending: the group has ended */
    bool ending;
    int end_code;
    char end_text[400];
    /* faults of what peers say */
    pthread_mutex_t fault_lock;
    struct cox_log_limit faults;
    bool threaded, time_threaded, kv_threaded, stacks_threaded;
    pthread_t thread, time_thread, kv_thread, stacks_thread;
    /* the last STACKS_ASK, which is not answered yet; sequence 0: none */
    struct cox_frame stacks_asked;
    /* the stacks thread uses the executor */
    bool stacks_gathers;
};

/* ---- agent.c ---- */

/* For its user: a change of its state. */
void cox_agent_say(const struct agent *agent, const char *text);

/* ---- agent_send.c ---- */

/* Of the link: by NATS, or a direct connection. Takes bytes. The lock is held, as in the next ones. */
void cox_agent_send(void *context, uint8_t *bytes, size_t size);
/* Of the outbox: it has lost a message. Takes the lock. */
void cox_agent_on_lost(void *context, uint32_t number);
void cox_agent_send_hello(struct agent *agent);
/* What a rank has printed, or a fault that the executor has found. */
void cox_agent_send_text(struct agent *agent, int32_t rank, bool is_stderr, bool is_fault,
                         const char *text);
/* The flight recorders of the ranks that the lead asks for. */
void cox_agent_send_recorders(struct agent *agent, const struct cox_frame *ask);

/* ---- agent_stacks.c ---- */

/* The lead asks where ranks stand. The lock is held. */
void cox_agent_ask_stacks(struct agent *agent, const struct cox_frame *ask);
/* Until the executor is not used for it. The lock is held, and released meanwhile. */
void cox_agent_await_stacks(struct agent *agent);

/* ---- agent_ranks.c ---- */

/* Ends the ranks, which takes time. Takes the lock. */
void cox_agent_stop_ranks(struct agent *agent);
/* The thread that starts, replaces and ends ranks. */
void *cox_agent_ranks_main(void *context);

/* ---- agent_requests.c ---- */

/* Of the executor: the ranks have replied. */
void cox_agent_on_forwarded(void *context, const struct cox_completion *completion);
/* Hands requests to the ranks as long as there is room. The lock is held. */
void cox_agent_run_requests(struct agent *agent);
/* The thread that runs the requests of the transfer channel. */
void *cox_agent_kv_main(void *context);

#endif
