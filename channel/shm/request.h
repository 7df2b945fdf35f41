/*
 * request: the broadcast ring of one channel. One writer, N readers, `depth` equal frames.
 *
 * Threads: frame and publish under the coordinator's submit lock; read on the rank's channel
 *   thread.
 * Ownership: bytes of a frame are lent until the rank returns it (state.h) or the coordinator
 *   publishes it.
 * Blocks: nothing.
 * If the coordinator dies while it writes: the frame was never published.
 * If a rank dies while it reads: its death frees the frame.
 */
#ifndef COX_CHANNEL_REQUEST_H
#define COX_CHANNEL_REQUEST_H

#include "channel.h"

struct cox_request {
    uint64_t sequence;
    /* as in the record (layout.h) */
    uint32_t type;
    /* no lower rank was asked: this one sends the payload */
    bool lowest;
    /* in shared memory */
    const uint8_t *bytes;
    size_t size;
};

/* Where the payload of `sequence` goes, and how much fits. */
uint8_t *cox_request_frame(const struct cox_channel *channel, uint64_t sequence,
                           size_t *ret_capacity);
/* Stores the length prefix and the record, and makes it visible. The caller then opens the gate. */
void cox_request_publish(const struct cox_channel *channel, uint64_t sequence, uint32_t type,
                         size_t length, const struct cox_rank_set *asked);
/* Reads what was published as `sequence` for `rank`. Returns 0; COX_EMPTY: it does not name this
 * rank, skip it; COX_CORRUPT: a length that is not possible; all but the bytes is filled in, since
 * the type says whether somebody waits for a reply. */
int cox_request_read(const struct cox_channel *channel, uint64_t sequence, uint32_t rank,
                     struct cox_request *ret_request);

#endif
