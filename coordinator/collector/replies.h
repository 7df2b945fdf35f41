/*
 * replies: those to one request. Copies them out of shared memory, checks and unpacks them.
 *
 * Each frame of a channel has one, so that a request whose deadline passes can end while an earlier
 * one is still in flight.
 *
 * A reply that is out of line (channel/memory/large_payload.h) is taken in two steps: its reference
 * from the slot, then its bytes, which may take a while.
 *
 * Threads: one at a time, that of the collector.
 * Ownership: results point into it and live until it begins again or releases its memory.
 * Blocks: only on a connection to the control socket for a large payload. Allocates when an arena
 *   passes its high-water mark, and for large payloads.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_REPLIES_H
#define COX_COORDINATOR_REPLIES_H

#include "channel/memory/large_payload.h"
#include "channel/shm/channel.h"
#include "coordinator/process/supervise.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "stats.h"

#include <coxswain/executor.h>

#define COX_RANK_TEXT_SIZE 1024

/* Limits for replies that are out of line. */
struct cox_reply_limits {
    /* 0: such replies are refused */
    uint64_t size_max;
    /* the process whose memory they are in; 0: that of the rank */
    pid_t origin;
    /* NULL: none */
    const char *socket_path;
};

struct cox_replies {
    uint32_t rank_count;
    struct cox_rank_result *results;
    struct cox_replies_rank {
        /* capacity of its slot */
        size_t slot_capacity;
        /* where the reply is, if it is out of line */
        struct cox_large_payload_ref ref;
        /* private copy of such a reply; NULL: none */
        uint8_t *large;
        bool out_of_line;
        /* the reply as the rank wrote it; NULL: it was refused */
        const uint8_t *raw;
        size_t raw_size;
        /* its tag said that it is an ExecuteResponse */
        bool raw_failed;
        /* it is late, and others may wait for it: it has not taken the request, or cannot go on */
        bool delays;
        /* COX_RANK_TEXT_SIZE bytes; kept apart, so that the fields that each round reads are
         * adjacent */
        char *text;
    } * ranks;
    char *texts;
    /* Private copies of the replies, packed in the order in which they were taken: small ones share
     * a page and its address translation. Has room for all slots, and is touched only as far as
     * replies reach. */
    uint8_t *copies;
    size_t copied;
    /* ranks from this one on have replied, or were not asked */
    uint32_t left;
    /* a rank has failed, or is dead */
    bool failed;
    /* a reply is out of line, or was announced so */
    bool out_of_line;
    struct cox_arena arena;
    struct cox_stats_taken taken;
    /* The result of the request, once it has ended; it points into this struct. */
    struct cox_completion completion;
    /* in a list of those that are lent, or of spare ones */
    struct cox_replies *next;
    /* Lent while it is still that of its frame. */
    bool in_place;
    char text[2048];
};

int cox_replies_init(struct cox_replies *replies, const struct cox_geometry *geometry,
                     enum cox_channel_id channel);
void cox_replies_deinit(struct cox_replies *replies); /* idempotent; a zeroed one is fine */

/* Starts over: every asked rank owes a reply (COX_OUTCOME_LATE). */
void cox_replies_begin(struct cox_replies *replies, const struct cox_rank_set *asked,
                       const struct cox_rank *ranks);
/* Takes the reply of a rank from its slot; its result becomes OK or ERROR. Returns true if the
 * reply is out of line: the result stays LATE until take_large. */
bool cox_replies_take(struct cox_replies *replies, const struct cox_channel *channel, uint32_t rank,
                      uint64_t sequence, uint32_t type, uint32_t incarnation);
/* After take has returned true: copies and checks the reply; the result becomes OK or ERROR. view:
 * of replies of this rank, which stays mapped for the next one.
 * Returns
 *   0
 *   COX_PEER_DEAD: the rank died before its memory could be opened: there is no reply, and the
 *     result stays LATE
 */
int cox_replies_take_large(struct cox_replies *replies, const struct cox_reply_limits *reply_limits,
                           struct cox_large_payload_view *view, uint32_t rank, uint32_t type);
/* True if let_go has memory to release. */
bool cox_replies_holds(const struct cox_replies *replies);
/* Releases the memory that only large replies need. The results are invalid afterwards. */
void cox_replies_let_go(struct cox_replies *replies);
/* Frees a reply whose memory was taken (cox_executor_take_reply). NULL: nothing. */
void cox_replies_free_reply(uint8_t *bytes);
/* The rank will not reply any more; its result becomes DEAD. */
void cox_replies_set_dead(struct cox_replies *replies, uint32_t rank,
                          struct cox_supervisor *supervisor);

/* The status of the request: 0, or the status of the failed ranks; ended_by if none has failed. A
 * death outranks a rank's own failure, which outranks what follows from one (STALE, ABORTED). */
int cox_replies_status(const struct cox_replies *replies, int ended_by);
/* Keeps the payload that the policy asks for. Returns that of RANK0, else NULL. */
const struct cox_rank_result *cox_replies_choose(struct cox_replies *replies,
                                                 enum cox_gather policy);

#endif
