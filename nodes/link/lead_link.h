/*
 * lead_link: one node, as the lead sees it: whether it is there, what was sent to it, and what it owes.
 *
 *   ABSENT --hello--> ALIVE <--silence, frame--> SUSPECT --silence--> ABSENT
 *                       '------------- its connection ended ------------^
 *
 * The rules, each of which the model in tests/model/nodes checks:
 *   - a frame counts only with the epoch of this lead and the present incarnation of the node; each
 *     admission is a new incarnation;
 *   - a request that the node has not acknowledged after again_ms is sent again: by a beat, which
 *     says up to which request the node has them all, or by its answer;
 *   - an answer that a beat speaks of and that did not come is asked for again, by the request;
 *   - answers are passed on in the order of their requests, once;
 *   - to a suspect node nothing is sent but beats;
 *   - a beat is sent at each change, again after beat_ms, and whenever nothing else was sent for
 *     beat_ms; every tenth is sent in any case, since only beats say all;
 *   - silence while the lead itself was stopped says nothing of the node;
 *   - a dead node owes nothing: its ranks are dead, and what comes from it is dropped.
 *
 * It does no input or output and has no clock: the caller says what came and what time it is, sends
 * what comes out, and handles the events. So the same code runs in the lead, in tests, and in the
 * simulation (tests/nodes).
 *
 * Threads: one at a time per link, under the caller's lock.
 * Ownership: the link owns copies of requests until they are answered. Frames and events that come
 *   out are the caller's.
 */
#ifndef COX_NODES_LEAD_LINK_H
#define COX_NODES_LEAD_LINK_H

#include "frame.h"
#include "large_request.h"
#include "nodes/node.pb-c.h"

enum cox_node_state {
    COX_NODE_ABSENT = 0,
    COX_NODE_ALIVE,
    COX_NODE_SUSPECT,
};

struct cox_lead_request {
    /* 0: none */
    uint64_t sequence;
    /* head and payload, or the head alone; NULL: answered, not needed any more */
    uint8_t *frame;
    size_t size;
    /* the payload, where it is large: the links share it; NULL: it is in frame */
    struct cox_large_request *large;
    /* 0: not yet, since the node was suspect */
    uint64_t sent_ns;
    /* not before: it may be on its way as long */
    uint64_t again_ns;
    uint32_t sent_count;
    bool replies;
    bool acknowledged;
    /* its answer, held until those before it are there; NULL: it has not come */
    uint8_t *answer;
    size_t answer_size;
    bool answered;
    /* asked ranks of the node that owe a reply */
    struct cox_rank_set owed;
    /* Ranks that the answer says to be dead: the node says why they died, which may be after it. If
     * it does not within dead_ms, they are late. */
    struct cox_rank_set dead;
    uint64_t answered_ns;
};

struct cox_lead_channel {
    /* of all requests of the group, and of those to this node */
    uint64_t published, last_sent;
    /* answers up to here were passed on */
    uint64_t delivered;
    uint64_t void_through;
    /* requests up to here were given up before the node had them */
    uint64_t gone;
    /* requests up to here have ended, one of them without the replies of all ranks */
    uint64_t ended;
    struct cox_lead_request requests[COX_NODE_DEPTH_MAX];
};

enum cox_lead_event_kind {
    /* a rank has replied; bytes NULL: late */
    COX_LEAD_REPLY,
    /* the node has the requests up to `sequence` */
    COX_LEAD_TAKEN,
    COX_LEAD_RANK_UP,
    COX_LEAD_RANK_DIED,
    /* the state of the node has changed: text */
    COX_LEAD_NODE_STATE,
};

struct cox_lead_event {
    struct cox_lead_event *next;
    enum cox_lead_event_kind kind;
    uint32_t node;
    uint32_t rank;
    uint32_t channel;
    uint64_t sequence;
    /* REPLY: into owned, or NULL */
    const uint8_t *bytes;
    size_t size;
    bool failed;
    /* what free() frees with the event; NULL: nothing */
    uint8_t *owned;
    enum cox_node_state state;
    uint32_t pid;
    bool known;
    int signal, exit_status;
    char text[448];
};

struct cox_lead_events {
    struct cox_lead_event *first, **end;
};

struct cox_lead_rank {
    /* the incarnation that the executor wants; 0: none */
    uint32_t wanted;
    /* the incarnation that is attached to the executor; 0: none */
    uint32_t attached;
    uint32_t killed;
    /* its process is stopped by a signal */
    bool stopped;
    /* of its process, as a beat said last; 0: none has */
    uint64_t cpu_ns, resident_bytes;
};

struct cox_lead_link {
    const struct cox_node_times *times;
    /* place among the nodes of the group */
    uint32_t index;
    char node[COX_NODE_NAME_MAX + 1];
    uint32_t rank_first, rank_count, world, depth;
    uint64_t epoch;
    enum cox_node_state state;
    /* counts admissions, from 1 */
    uint64_t incarnation;
    /* the agent that is admitted */
    uint64_t agent;
    char server_id[64];
    uint64_t client_id;
    char address[128];
    uint64_t heard_ns;
    /* the last beat; and the last frame that shows life */
    uint64_t beat_ns, spoke_ns;
    uint64_t tick_ns;
    /* a beat is due at once; the next one is due, since one that says a change may be lost */
    bool changed, again;
    bool finishing, failed;
    /* why it is absent, in words; "": it was never there */
    char reason[400];
    struct cox_lead_channel channels[COX_TWO_WAY_COUNT];
    struct cox_lead_rank ranks[COX_RANK_COUNT_MAX];
    /* peers, for beats; the caller's. The version grows with each change; and the one that the node has */
    CoxNode__Peer *const *peers;
    size_t peer_count;
    uint64_t peers_version, peers_there;
    /* counts, for metrics */
    uint64_t refused;
    /* of them, what this agent has said */
    uint32_t refused_said;
    uint64_t sent, asked_again, stale, deaths, suspicions;
    void *context;
    /* A frame for the node. Takes bytes (free). large: lent, what follows them; NULL: nothing. */
    void (*send)(void *context, const struct cox_lead_link *link, uint8_t *bytes, size_t size,
                 struct cox_large_request *large);
    struct cox_lead_events *events;
};

void cox_lead_link_init(struct cox_lead_link *link, const char *node, uint32_t rank_first,
                        uint32_t rank_count, uint32_t world, uint32_t depth);
void cox_lead_link_deinit(struct cox_lead_link *link);
/* The node is admitted: a new incarnation, whose requests begin after what was published so far. */
void cox_lead_link_admit(struct cox_lead_link *link, uint64_t agent, uint64_t now_ns);
/* A request of the group was published, whether or not it asks ranks of the node. large: lent, has or
 * gets its bytes, and the link keeps a reference in place of a copy; NULL: none. Without memory for a
 * copy the ranks of the node are late at once. */
void cox_lead_link_publish(struct cox_lead_link *link, const struct cox_transport_request *request,
                           struct cox_large_request *large, uint64_t now_ns);
void cox_lead_link_cancel(struct cox_lead_link *link, uint32_t channel, uint64_t through);
/* Requests up to this number have ended: ranks that still run one may stop. */
void cox_lead_link_end(struct cox_lead_link *link, uint32_t channel, uint64_t through);
void cox_lead_link_want(struct cox_lead_link *link, uint32_t rank, uint32_t incarnation);
void cox_lead_link_kill(struct cox_lead_link *link, uint32_t rank);
/* A frame of the admitted node: ANSWER or AGENT_BEAT. Returns 0; COX_STALE: dropped, since it is of
 * another epoch or incarnation; COX_CORRUPT. */
int cox_lead_link_receive(struct cox_lead_link *link, const struct cox_frame *frame,
                          uint64_t now_ns, struct cox_error *err);
/* Beats, requests that are sent again, suspicion and death. */
void cox_lead_link_tick(struct cox_lead_link *link, uint64_t now_ns);
/* What was sent to the node may not have come: requests that it has not acknowledged are sent again. */
void cox_lead_link_lost(struct cox_lead_link *link, uint64_t now_ns);
/* Something says that the node may be dead: it is suspect at once, until it is heard. text: as in die. */
void cox_lead_link_suspect(struct cox_lead_link *link, const char *text);
/* The node is dead: text follows its name, as in "has not been heard for 812 ms". */
void cox_lead_link_die(struct cox_lead_link *link, const char *text);
/* The node is dead, as in die, and ranks that were wanted and never came have failed. */
void cox_lead_link_give_up(struct cox_lead_link *link, const char *text);
/* Whether an agent has this protocol and release. Returns false: refusal says what differs. */
bool cox_lead_link_release_agrees(const struct cox_lead_link *link, const CoxNode__Hello *hello,
                                  char *refusal, size_t size);
/* "b is suspect: not heard for 412 ms"; false: nothing to say. */
bool cox_lead_link_trouble(const struct cox_lead_link *link, uint64_t now_ns, char *buffer,
                           size_t buffer_size);

void cox_lead_events_init(struct cox_lead_events *events);
struct cox_lead_event *cox_lead_events_take(struct cox_lead_events *events);
void cox_lead_event_free(struct cox_lead_event *event);

/* Packs a message of node.proto, NULL: none, into a frame, which the caller frees; NULL: no memory. */
uint8_t *cox_frame_of_message(const struct cox_frame *head, const ProtobufCMessage *message,
                              size_t *ret_size);

#endif
