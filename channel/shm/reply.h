/*
 * reply: the reply slots of one channel: `depth` parts with a slot per rank in each.
 *
 * Threads: slot and commit on the rank's channel thread; fetch under the coordinator's lock of the
 *   channel.
 * Ownership: a slot belongs to the rank from the end of request `sequence - depth` until its
 *   commit, then to the coordinator until it has ended the request.
 * Blocks: nothing.
 * If the rank dies while it writes: nothing was committed.
 * Bytes: the bytes of a slot are input. The length is checked, the bytes are copied once, and only
 *   the copy is parsed.
 */
#ifndef COX_CHANNEL_REPLY_H
#define COX_CHANNEL_REPLY_H

#include "channel.h"

/* The slot for a reply, with its capacity. whole: only rank 0 replies, and may fill the region
 * (legacy groups). */
uint8_t *cox_reply_slot(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                        bool whole, size_t *ret_capacity);
/* The slot of the error channel for reports of `rank`, with its prefix; in a named group all ranks
 * share one. *ret_capacity: bytes behind the prefix. */
uint8_t *cox_reply_report(const struct cox_channel *channel, uint32_t rank, size_t *ret_capacity);
/* Stores the length prefix and the tag (failed: see fetch). The caller then stores `done` (state.h)
 * and wakes the coordinator. */
void cox_reply_commit(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                      size_t length, bool failed);
/* Copies a committed reply to buffer. incarnation: that of the rank's process. *ret_failed: the
 * bytes are an ExecuteResponse whatever was asked: it reports a failure, or a reply out of line.
 * Returns
 *   0
 *   COX_CORRUPT: an impossible length, or another sequence, or incarnation of group or rank; err
 *     says which
 *   COX_TOO_LARGE: it does not fit buffer
 */
int cox_reply_fetch(const struct cox_channel *channel, uint32_t rank, uint64_t sequence, bool whole,
                    uint32_t incarnation, void *buffer, size_t buffer_size, size_t *ret_length,
                    bool *ret_failed, struct cox_error *err);

/* For legacy ranks, whose tokens do not say which request they are for: erase removes what the slot
 * has, so that is_written tells whether the rank has stored a reply since. */
void cox_reply_erase(const struct cox_channel *channel, uint32_t rank, uint64_t sequence);
bool cox_reply_is_written(const struct cox_channel *channel, uint32_t rank, uint64_t sequence);

#endif
