/*
 * frame: what travels between a lead and the agents of its nodes, over NATS or a direct connection.
 *
 * A frame is a head of 96 bytes, little-endian, and a payload:
 *
 *   0   u32  magic "CXN1"
 *   4   u8   kind
 *   5   u8   channel
 *   6   u16  0
 *   8   u32  type of the request: ExecuteType or COX_TYPE_OPAQUE
 *   12  u32  bytes of the payload
 *   16  u64  epoch: the lead's; a greater one is a later lead
 *   24  u64  incarnation of the node, as this lead has admitted it; REQUEST_ALL: the version of the
 *            peers, which says the incarnation of each node
 *   32  u64  sequence
 *   40  u64  previous: the sequence before it on this channel that went to this node
 *   48  u64  deadline, CLOCK_MONOTONIC of the lead; ~0: none
 *   56  u64  sent, CLOCK_MONOTONIC of the sender
 *   64  u64  asked ranks, 0 to 63
 *   72  u64  asked ranks, 64 to 127
 *   80  u64  steps up to this sequence are cancelled
 *   88  u64  requests up to this sequence are not sent any more: the node waits for none of them
 *
 * The payload of REQUEST and REQUEST_ALL is that of the request; of ANSWER, the replies (below); of
 * RECORDER, a flight recorder; of STACKS, text; RECORDER_ASK and STACKS_ASK have none; of the others,
 * a message of node.proto.
 *
 * Bytes: frames are input. unpack checks everything but what protobuf checks.
 * Threads: plain values.
 */
#ifndef COX_NODES_FRAME_H
#define COX_NODES_FRAME_H

#include "nodes_common.h"

struct cox_payload_memory;

#define COX_FRAME_PROTOCOL 1u
#define COX_FRAME_HEAD_SIZE 96
/* Bytes of text of one rank. */
#define COX_FRAME_STACKS_MAX ((size_t)256 << 10)

enum cox_frame_kind {
    /* lead -> node */
    COX_FRAME_SEEK = 1,
    COX_FRAME_WELCOME,
    COX_FRAME_REQUEST,
    COX_FRAME_LEAD_BEAT,
    /* node -> lead */
    COX_FRAME_HELLO,
    COX_FRAME_ANSWER,
    COX_FRAME_AGENT_BEAT,
    COX_FRAME_TEXT,
    /* lead -> all nodes: what would be the same REQUEST to each. Sent only while every node is alive,
     * and has said that it has this version of the peers. It is sent again as a REQUEST. */
    COX_FRAME_REQUEST_ALL,
    /* lead -> node, and back (recorder_fetch.h) */
    COX_FRAME_RECORDER_ASK,
    COX_FRAME_RECORDER,
    /* lead -> node, and back (stacks_fetch.h) */
    COX_FRAME_STACKS_ASK,
    COX_FRAME_STACKS,
    COX_FRAME_KIND_COUNT
};

struct cox_frame {
    enum cox_frame_kind kind;
    uint32_t channel;
    uint32_t type;
    uint64_t epoch;
    uint64_t incarnation;
    uint64_t sequence;
    uint64_t previous;
    uint64_t deadline_ns;
    uint64_t sent_ns;
    uint64_t void_through;
    uint64_t gone;
    struct cox_rank_set asked;
    /* lent; NULL, with a size: it is in memory, which the agent has beside the frame */
    const uint8_t *payload;
    size_t size;
    /* lent, with payload NULL */
    struct cox_payload_memory *memory;
};

/* Writes the head; the payload follows it. */
void cox_frame_pack_head(const struct cox_frame *frame, uint8_t head[COX_FRAME_HEAD_SIZE]);
/* Whether a frame of that size may begin so: its head, of which bytes has at least the smaller of both
 * sizes. Returns 0; COX_CORRUPT: err says what is wrong. */
int cox_frame_check(const uint8_t *bytes, size_t size, struct cox_error *err);
/* payload points into bytes. Returns 0; COX_CORRUPT: err says what is wrong. */
int cox_frame_unpack(const uint8_t *bytes, size_t size, struct cox_frame *ret_frame,
                     struct cox_error *err);
/* How long a frame of that size may be on its way: slower connections are given up. */
static inline uint64_t cox_frame_transfer_ns(size_t size)
{
    return size * 100; /* 10 MB/s */
}
/* A frame that soon shows the other side that its sender lives, as a beat does. What is larger, or goes
 * by a direct connection, may be on its way for longer than a node may be silent. */
static inline bool cox_frame_shows_life(size_t size)
{
    return size <= 65536;
}
/* Whether an agent passes its payload on as it is, so that it may come in memory: an opaque request, on
 * the channel of those. */
bool cox_frame_is_passed_on(const struct cox_frame *frame);
/* Bytes of the payload that a frame of this kind may have. */
size_t cox_frame_size_max(enum cox_frame_kind kind);
const char *cox_frame_kind_name(enum cox_frame_kind kind);
/* Whether two packed frames of this size differ in the incarnation alone. */
bool cox_frame_same_for_all(const uint8_t *bytes, const uint8_t *other, size_t size);
/* Makes a packed REQUEST one to all nodes. */
void cox_frame_address_all(uint8_t *bytes, uint64_t peers_version);

/* The payload of an ANSWER: u32 status, u32 count, and for each reply u32 rank, u32 flags, u32 size
 * and the bytes. */
enum cox_answer_flags {
    COX_ANSWER_REPLIED = 1, /* otherwise the rank is dead or late */
    COX_ANSWER_DEAD = 2,
    COX_ANSWER_FAILED = 4, /* the bytes are an ExecuteResponse even to an opaque request */
    COX_ANSWER_FLAGS = 7,
};

struct cox_answer_reply {
    uint32_t rank;
    uint32_t flags;
    const uint8_t *bytes;
    size_t size;
};

struct cox_answer {
    int32_t status;
    uint32_t count;
    struct cox_answer_reply replies[COX_RANK_COUNT_MAX];
};

size_t cox_answer_size(const struct cox_answer *answer);
/* buffer has cox_answer_size bytes. */
void cox_answer_pack(const struct cox_answer *answer, uint8_t *buffer);
/* Checks sizes, ranks (below rank_end, each once) and flags. Returns 0; COX_CORRUPT. */
int cox_answer_unpack(const uint8_t *bytes, size_t size, uint32_t rank_first, uint32_t rank_end,
                      struct cox_answer *ret_answer, struct cox_error *err);

#endif
