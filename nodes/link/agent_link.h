/*
 * agent_link: the lead, as the agent of a node sees it: which lead it follows, which requests came and
 * which were answered.
 *
 *   FREE --welcome--> FOLLOWING --silence--> LOST --frame of it--> FOLLOWING
 *     ^                                       '-- no lead until lead_grace --> OVER
 *     a welcome of a greater epoch, or a new incarnation: FOLLOWING, from any state but OVER
 *
 * The rules, each of which the model in tests/model/nodes checks:
 *   - a request counts only with the epoch and the incarnation that the agent was admitted with; a
 *     lead with a smaller epoch than one that was followed is not followed;
 *   - requests run in their order: one whose `previous` is not the last that was taken waits, and the
 *     lead is told at once what is there;
 *   - a request that was taken is never run again: if it is answered, the answer is sent again;
 *   - a request whose deadline has passed is not run, and is answered so;
 *   - answers are kept until their frame is needed again;
 *   - beats as in lead_link.h; one is also due when a request was not answered beat_ms after it came,
 *     so that the lead does not send it again;
 *   - to frames of a lead that it does not follow any more it says hello: that lead ends.
 *
 * Like lead_link.h it does no input or output and has no clock. Times of the lead are translated by
 * the smallest difference between the clocks that a frame has shown in the last seconds, so that the
 * time on the way counts.
 *
 * Threads: one at a time, under the caller's lock.
 */
#ifndef COX_NODES_AGENT_LINK_H
#define COX_NODES_AGENT_LINK_H

#include "frame.h"
#include "nodes/node.pb-c.h"

enum cox_lead_state {
    COX_LEAD_FREE = 0,
    COX_LEAD_FOLLOWING,
    COX_LEAD_LOST,
    COX_LEAD_OVER,
};

struct cox_agent_request {
    /* 0: none */
    uint64_t sequence;
    /* a frame that waits for its turn, head and payload, or its head alone; NULL: it was taken */
    uint8_t *frame;
    /* of both */
    size_t size;
    /* has the payload; a reference; NULL: none */
    struct cox_payload_memory *memory;
    bool taken;
    /* the answer, a frame; NULL: not yet, or it has none */
    uint8_t *answer;
    size_t answer_size;
    /* it may be on its way as long */
    uint64_t again_ns;
    uint64_t came_ns;
    bool answered;
    /* all its ranks have replied, or are dead */
    bool done;
};

struct cox_agent_channel {
    /* the last request that was taken, and up to where all are done */
    uint64_t taken, done;
    /* the last one that a beat has spoken of */
    uint64_t said;
    uint64_t void_through;
    /* requests up to here do not come any more */
    uint64_t gone;
    /* as the lead says: requests up to here have ended */
    uint64_t ended;
    struct cox_agent_request requests[COX_NODE_DEPTH_MAX];
};

struct cox_agent_rank {
    uint32_t incarnation;
    CoxNode__RankState state;
    uint32_t pid;
    char text[448];
    bool known;
    int signal, exit_status;
    bool stopped;
    /* of its process, for the next beat, which clears them; 0: not told in it */
    uint64_t cpu_ns, resident_bytes;
};

/* A node of the group, as the lead says; this one, too. */
struct cox_agent_peer {
    char node[COX_NODE_NAME_MAX + 1];
    char address[128];
    uint32_t rank_first, rank_count;
    uint64_t incarnation;
};

struct cox_agent_link {
    struct cox_agent_peer peers[COX_NODE_COUNT_MAX];
    uint32_t peer_count;
    uint64_t peers_version;
    struct cox_node_times times;
    enum cox_lead_state state;
    uint64_t agent;
    uint64_t epoch, incarnation;
    uint32_t rank_first, rank_count, depth;
    /* of the lead that is followed, or was last */
    char lead_address[128];
    uint64_t heard_ns, lost_ns;
    /* as in struct cox_lead_link */
    uint64_t beat_ns, spoke_ns;
    bool changed, again;
    /* the last hello */
    uint64_t hello_ns;
    /* what the lead wants */
    uint32_t wanted[COX_RANK_COUNT_MAX], killed[COX_RANK_COUNT_MAX];
    bool finishing, failed;
    struct cox_agent_channel channels[COX_TWO_WAY_COUNT];
    struct cox_agent_rank ranks[COX_RANK_COUNT_MAX];
    /* this clock minus the lead's: the smallest of this period and of the one before */
    int64_t offset_ns, offset_before_ns;
    uint64_t offset_since_ns;
    /* of its connection, for beats; the caller's */
    char server_id[64];
    uint64_t client_id;
    /* connections that its agent has refused; the caller's */
    uint32_t refused;
    /* counts */
    uint64_t repeated, expired, stale, gaps;
    void *context;
    /* A frame for the lead. Takes bytes (free). */
    void (*send)(void *context, uint8_t *bytes, size_t size);
};

void cox_agent_link_init(struct cox_agent_link *link, uint64_t agent);
void cox_agent_link_deinit(struct cox_agent_link *link);
/* A welcome for this agent. Returns 0: it is followed, from now on; COX_STALE: a greater epoch was
 * followed before. */
int cox_agent_link_follow(struct cox_agent_link *link, const CoxNode__Welcome *welcome,
                          uint64_t now_ns);
/* A REQUEST, LEAD_BEAT, RECORDER_ASK or STACKS_ASK, which is the caller's to answer. Returns 0; COX_STALE: dropped; COX_CORRUPT. Afterwards the caller runs what
 * cox_agent_link_next returns, and looks at wanted, killed, finishing and void_through. */
int cox_agent_link_receive(struct cox_agent_link *link, const struct cox_frame *frame,
                           uint64_t now_ns, struct cox_error *err);
/* The same. *bytes: what the frame was unpacked from; where the request needs it, it is taken, and
 * *bytes is NULL. */
int cox_agent_link_receive_owned(struct cox_agent_link *link, const struct cox_frame *frame,
                                 uint8_t **bytes, uint64_t now_ns, struct cox_error *err);
/* The same, of a REQUEST whose payload is in memory, to which the request then has a reference of
 * its own until it was taken. */
int cox_agent_link_receive_memory(struct cox_agent_link *link, const struct cox_frame *frame,
                                  struct cox_payload_memory *memory, uint64_t now_ns,
                                  struct cox_error *err);
/* Whether a hello is due after this frame, for which receive has returned r (a SEEK: COX_STALE): the
 * lead seeks, or does not know that it is not followed. describe is called then. */
bool cox_agent_link_greets(const struct cox_agent_link *link, const struct cox_frame *frame, int r,
                           uint64_t now_ns);
/* The next request of the channel to be run; returns false: there is none. Lent until taken.
 * *ret_deadline_ns: on this clock. One whose deadline has passed is answered, and skipped. */
bool cox_agent_link_next(struct cox_agent_link *link, uint32_t channel, uint64_t now_ns,
                         struct cox_frame *ret_frame, uint64_t *ret_deadline_ns);
/* This clock minus the lead's, with the shortest way of a frame. */
int64_t cox_agent_link_offset(const struct cox_agent_link *link);
/* A time of the lead, on this clock. */
uint64_t cox_agent_link_here(const struct cox_agent_link *link, uint64_t lead_ns);
/* The request that next has returned was handed to the ranks, or was refused by them (then it is
 * answered next). no_reply: it has no answer. */
void cox_agent_link_taken(struct cox_agent_link *link, uint32_t channel, uint64_t sequence,
                          bool no_reply);
/* done: no rank owes a reply any more. */
/* Answers that were sent may not have come: they are sent when the lead asks again. */
void cox_agent_link_lost(struct cox_agent_link *link);
void cox_agent_link_answer(struct cox_agent_link *link, uint32_t channel, uint64_t sequence,
                           const struct cox_answer *answer, bool done, uint64_t now_ns);
/* Ranks that were late have replied. */
void cox_agent_link_done(struct cox_agent_link *link, uint32_t channel, uint64_t sequence);
void cox_agent_link_set_rank(struct cox_agent_link *link, uint32_t rank,
                             const struct cox_agent_rank *is);
/* Beats; a lead that is lost; a grace that is over. */
void cox_agent_link_tick(struct cox_agent_link *link, uint64_t now_ns);
/* The lead is followed no more, and another one may come. */
void cox_agent_link_release(struct cox_agent_link *link);
/* Where no lead is followed, forgets an epoch that cannot be at this time (limits.h): its lead had a
 * wrong clock, or this machine has been set right, and no later lead would be followed. Returns
 * whether it did. */
bool cox_agent_link_forget(struct cox_agent_link *link, uint64_t real_ns);
/* The agent ends: tells its lead. */
void cox_agent_link_leave(struct cox_agent_link *link, const char *text, uint64_t now_ns);
/* For Hello: fills message, whose channels point into channels. */
void cox_agent_link_describe(struct cox_agent_link *link, uint64_t now_ns, CoxNode__Hello *message,
                             CoxNode__Channel *channels, CoxNode__Channel **pointers);

#endif
