/*
 * request: the broadcast ring of one channel: one writer, N readers, `depth` frames of equal size.
 *
 * Threads: frame and publish under the coordinator's submit lock; read on the rank's channel
 *   thread.
 * Ownership: the bytes of a frame are lent until the rank returns it (state.h) or the coordinator
 *   publishes it again.
 * Blocks: nothing.
 * If the coordinator dies while it writes: the frame was never published.
 * If a rank dies while it reads: its death frees the frame.
 */
#ifndef COX_CHANNEL_REQUEST_H
#define COX_CHANNEL_REQUEST_H

#include "channel.h"

struct cox_request {
    uint64_t sequence;
    /* type of the request, as in the record (layout.h) */
    uint32_t type;
    /* no lower rank was asked: this rank sends the payload */
    bool lowest;
    /* in shared memory */
    const uint8_t *bytes;
    size_t size;
};

/* The frame for the payload of `sequence`, and its capacity. */
uint8_t *cox_request_frame(const struct cox_channel *channel, uint64_t sequence,
                           size_t *ret_capacity);
/* Stores the length prefix and the record, and publishes them. The caller then opens the gate. */
void cox_request_publish(const struct cox_channel *channel, uint64_t sequence, uint32_t type,
                         size_t length, const struct cox_rank_set *asked);
/* Reads the request that was published as `sequence`, for `rank`.
 * Returns
 *   0
 *   COX_EMPTY: it does not ask this rank; skip it
 *   COX_CORRUPT: an impossible length. All fields but the bytes are set, since the type tells
 *     whether a reply is expected
 */
int cox_request_read(const struct cox_channel *channel, uint64_t sequence, uint32_t rank,
                     struct cox_request *ret_request);

#endif
