/*
 * gathering: the replies to one request, as they come in: copied out of shared memory, checked,
 * unpacked.
 *
 * There is one for every frame of a channel, so that a request whose deadline passes can end while
 * the one before it still waits.
 *
 * A reply in a block (channel/memory/large_payload.h) is taken in two steps: its reference out of
 * the slot, and then, which may take a while, the bytes out of the block.
 *
 * Threads: the collector's, one at a time.
 * Ownership: results point into the gathering and live until it begins again, or lets go.
 * Blocks: nothing but a connection to the control socket for a block; allocates when an arena
 * passes its high-water mark, and for blocks. If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_GATHERING_H
#define COX_COORDINATOR_GATHERING_H

#include "channel/memory/large_payload.h"
#include "channel/shm/channel.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "completion.h"
#include "stats.h"
#include "coordinator/process/supervise.h"

#define COX_RANK_TEXT_SIZE 1024

/* How replies in blocks are taken. */
struct cox_reply_limits {
    /* 0: not at all */
    uint64_t size_max;
    /* NULL: none */
    const char *socket_path;
};

struct cox_gathering {
    uint32_t rank_count;
    struct cox_rank_result *results;
    struct cox_gathering_rank {
        /* of its reply, at most */
        size_t slot_capacity;
        /* of the block that the reply is in */
        struct cox_large_payload_ref ref;
        /* private copy of it; NULL: none */
        uint8_t *block;
        bool in_block;
        /* COX_RANK_TEXT_SIZE bytes of texts: apart, so that what every round touches lies together
         */
        char *text;
    } * ranks;
    char *texts;
    /* Private copies of the replies, one behind the other in the order in which they were taken:
     * small ones are on one page, whose translation serves them all. With room for all slots;
     * touched only as far as replies reach. */
    uint8_t *copies;
    size_t copied;
    /* ranks from it on have replied, or were not asked */
    uint32_t left;
    /* one of them has failed, or is dead */
    bool failed;
    /* a reply is, or was to be, in a block */
    bool in_blocks;
    struct cox_arena arena;
    struct cox_stats_taken taken;
    char text[2048];
};

int cox_gathering_init(struct cox_gathering *gathering, const struct cox_geometry *geometry,
                       enum cox_channel_id channel);
void cox_gathering_deinit(struct cox_gathering *gathering); /* idempotent; a zeroed one is fine */

/* Forgets what was there: every asked rank owes a reply (COX_OUTCOME_LATE). */
void cox_gathering_begin(struct cox_gathering *gathering, const struct cox_rank_set *asked,
                         const struct cox_rank *ranks);
/* Takes the reply of a rank out of its slot; its result becomes OK or ERROR. generation 0: a rank
 * without lines. Returns true: it is in a block; the result stays LATE until take_block. */
bool cox_gathering_take(struct cox_gathering *gathering, const struct cox_channel *channel,
                        uint32_t rank, uint64_t sequence, uint32_t type, uint32_t generation);
/* After take has returned true: copies and checks it; the result becomes OK or ERROR. Returns 0;
 * COX_PEER_DEAD: the rank died before its block could be opened, so there is no reply, and the
 * result stays LATE. */
int cox_gathering_take_block(struct cox_gathering *gathering,
                             const struct cox_reply_limits *reply_limits, uint32_t rank,
                             uint32_t type);
/* True: there is something for let_go to give back. */
bool cox_gathering_holds(const struct cox_gathering *gathering);
/* Nobody looks at the results any more: gives back the memory that only large ones need. */
void cox_gathering_let_go(struct cox_gathering *gathering);
/* A legacy rank that only waited and posted. */
void cox_gathering_take_empty(struct cox_gathering *gathering, uint32_t rank);
/* A rank that will not reply any more; its result becomes DEAD. */
void cox_gathering_set_dead(struct cox_gathering *gathering, uint32_t rank,
                            struct cox_supervisor *supervisor);

/* What became of the request: 0, or what the failed ranks make of it; ended_by when none has
 * failed. A death outranks a rank's own failure, and that what follows from one (STALE, ABORTED).
 */
int cox_gathering_status(const struct cox_gathering *gathering, int ended_by);
/* Leaves payload where the policy asks for it. Returns the one of RANK0, else NULL. */
const struct cox_rank_result *cox_gathering_choose(struct cox_gathering *gathering,
                                                   enum cox_gather policy);

#endif
