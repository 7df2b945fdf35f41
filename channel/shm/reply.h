/*
 * reply: the reply slots of one channel: `depth` parts, in each a slot per rank.
 *
 * Threads: slot and commit on the rank's channel thread; fetch under the coordinator's lock of the
 *   channel.
 * Ownership: a slot is the rank's from the end of request `sequence - depth` until its commit, then
 *   the coordinator's until it has ended the request.
 * Blocks: nothing.
 * If the rank dies while it writes: nothing was committed. Bytes in a slot are input: the length is
 *   checked, the bytes are copied once, and only the copy is looked at.
 */
#ifndef COX_CHANNEL_REPLY_H
#define COX_CHANNEL_REPLY_H

#include "channel.h"

/* whole: rank 0 alone replies and may fill the region (legacy groups only). */
uint8_t *cox_reply_slot(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                        bool whole, size_t *ret_capacity);
/* The slot of the error channel that `rank` reports in, with its prefix; all share one in a named
 * group. *ret_capacity: bytes behind the prefix. */
uint8_t *cox_reply_report(const struct cox_channel *channel, uint32_t rank, size_t *ret_capacity);
/* Stores the length prefix and the tag (failed: what fetch tells); the caller then stores `done`
 * (state.h) and rings. */
void cox_reply_commit(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                      size_t length, bool failed);
/* Copies a committed reply to buffer. generation: of the rank's process, 0 for a rank without
 * lines, whose identity is not checked. *ret_failed: the bytes are an ExecuteResponse, whatever was
 * asked: it tells of a failure, or of a block. Returns 0; COX_CORRUPT with the reason in err: an
 * impossible length, another sequence, epoch or generation; COX_TOO_LARGE: does not fit buffer. */
int cox_reply_fetch(const struct cox_channel *channel, uint32_t rank, uint64_t sequence, bool whole,
                    uint32_t generation, void *buffer, size_t buffer_size, size_t *ret_length,
                    bool *ret_failed, struct cox_error *err);

#endif
