/*
 * link_world: both links of the protocol between a lead and the agent of a node
 * (nodes/link/lead_link.h, agent_link.h), joined by a network in memory that loses, repeats, delays
 * and reorders, under seeds.
 *
 * The world has one node, two leads of which the second takes over, and agents that follow each
 * other. Subjects are as those of NATS: what a lead sends goes to the agent of the moment, what an
 * agent sends to every lead. The agent's clock is not the lead's.
 */
#ifndef COX_TESTS_NODES_LINK_WORLD_H
#define COX_TESTS_NODES_LINK_WORLD_H

#include "channel/memory/payload_memory.h"
#include "nodes/link/agent_link.h"
#include "nodes/link/lead_link.h"
#include "tests/lib/test.h"

#define RANK_FIRST 2u
#define RANK_COUNT 2u
#define WORLD_SIZE 6u
#define DEPTH 4u
#define LEAD_COUNT 2u
#define MS COX_NSEC_PER_MSEC
#define SKEW_NS (UINT64_C(7777) * MS)
#define LEAD_TICK_MS 10
#define AGENT_TICK_MS 5
#define SEED_COUNT 3000
#define PACKET_MAX 4096

struct packet {
    uint64_t due_ns;
    bool to_lead;
    uint8_t *bytes;
    size_t size;
};

/* A request, as the executor of the lead sees it. */
struct asked {
    /* 0: none */
    uint64_t sequence;
    uint64_t incarnation;
    uint64_t deadline_ns;
    /* bits, of RANK_FIRST on */
    uint32_t owed, replied;
    bool replies, taken;
};

struct lead {
    bool alive;
    struct cox_lead_link link;
    struct cox_lead_events events;
    uint64_t seek_ns, heard_ns;
    uint64_t next[COX_TWO_WAY_COUNT];
    struct asked asked[COX_TWO_WAY_COUNT][DEPTH];
    uint64_t last_reply[COX_TWO_WAY_COUNT][RANK_COUNT];
    uint32_t wanted[RANK_COUNT];
    bool attached[RANK_COUNT];
    /* another lead has taken the node over */
    bool superseded;
    uint32_t ended, late, suspicions, deaths, ups;
    char died_text[256];
};

/* A request that the ranks of the agent have. */
struct work {
    /* 0: none */
    uint64_t sequence;
    uint64_t epoch, incarnation;
    uint64_t finish_ns, done_ns;
    uint32_t asked;
    bool answered;
};

struct faults {
    /* of 1000 */
    uint32_t loss, repeat;
    uint32_t delay_ms, delay_max_ms;
    bool reorder;
    /* each happens at any ms with this chance, of 100,000 */
    uint32_t partition, restart, rank_death, takeover;
    /* of 1000 answers, those that leave out a rank */
    uint32_t late;
};

struct world {
    uint64_t random;
    uint64_t now_ns;
    struct faults faults;
    /* until */
    uint64_t cut_to_lead_ns, cut_to_agent_ns;
    uint64_t last_due_ns[2];
    struct packet packets[PACKET_MAX];
    size_t packet_count;
    struct lead leads[LEAD_COUNT];
    uint32_t lead_now;
    struct cox_agent_link agent;
    struct cox_payload_memory_pool memory;
    uint64_t agent_id;
    uint32_t claimed[RANK_COUNT];
    bool dead[RANK_COUNT];
    struct work work[COX_TWO_WAY_COUNT][DEPTH];
    /* of the last request that ran, on any agent: epoch and number */
    uint64_t run_epoch[COX_TWO_WAY_COUNT], run_sequence[COX_TWO_WAY_COUNT];
    uint64_t followed_epoch, followed_incarnation;
    /* of frames that the agent took */
    uint64_t transit_min_ns;
    bool publishing;
    /* half of the requests go to all nodes, where the lead could send them so */
    bool to_all;
    uint64_t runs, resent, expired;
    /* frames that were sent, and their bytes, by kind */
    uint64_t sent[COX_FRAME_KIND_COUNT], sent_bytes[COX_FRAME_KIND_COUNT];
};

extern const struct cox_node_times times;
extern uint64_t seed_now;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            print_message("seed %" PRIu64 "\n", seed_now);                                         \
            fail_msg("%s:%d: %s", __FILE__, __LINE__, #condition);                                 \
        }                                                                                          \
    } while (0)

uint64_t agent_now(const struct world *world);
void agent_start(struct world *world);
void lead_start(struct world *world, uint32_t index, uint64_t epoch, uint64_t first);
void lead_pump(struct world *world, struct lead *lead);
bool lead_publish(struct world *world, struct lead *lead, uint32_t c, uint32_t bits, bool replies,
                  uint64_t deadline_ns);
uint32_t lead_owed(const struct lead *lead);
void net_deliver(struct world *world);
void world_run(struct world *world, uint64_t ms);
struct world *world_new(uint64_t seed, const struct faults *faults);
void world_free(struct world *world);
void world_heal(struct world *world);
struct world *world_up(void);
/* A frame between the first lead and its node; its bytes are the test's own. */
struct cox_frame frame_of(const struct world *world, enum cox_frame_kind kind,
                          const ProtobufCMessage *message);
/* A test over such a world; lead is its first. */
#define WORLD_TEST(name)                                                                           \
    static void name##_in(struct world *world, struct lead *lead);                                 \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        struct world *up = world_up();                                                             \
        name##_in(up, &up->leads[0]);                                                              \
        world_free(up);                                                                            \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct world *world,                             \
                          __attribute__((unused)) struct lead *lead)
void publish(struct world *world, uint32_t c, uint32_t bits, bool replies);

#endif
