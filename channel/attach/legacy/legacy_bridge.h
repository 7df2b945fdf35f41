/*
 * legacy_bridge: turns the tokens of legacy ranks into state words, for the coordinator (tokens.h).
 *
 * A legacy rank does not know the shared state. Its tokens are the events: one on request_produce
 * means that it has read the frame, one on response_consume that its reply is complete. The bridge
 * takes these tokens and writes what they mean into the rank's lines. It is the counterpart of
 * legacy_shim.h. The lines are in memory that other processes can write, so the bridge has its own
 * record and corrects them.
 *
 * A legacy group has a depth of 1. Therefore a token belongs to the last request that asked its
 * rank. A rank that returns the frame only after its reply breaks the protocol (docs/wire.md); the
 * bridge reports its reply when both tokens are there. A MindIE-LLM worker that gets SIGTERM posts
 * all its semaphores: a token without a reply in the slot is dropped, where a reply belongs there.
 *
 * Threads, blocking, and what is left if a rank dies: as in channel/shm/tokens.h.
 * Ownership: the channel is borrowed, and owns the object.
 */
#ifndef COX_CHANNEL_LEGACY_BRIDGE_H
#define COX_CHANNEL_LEGACY_BRIDGE_H

#include "channel/shm/channel.h"

/* For channel->tokens, of a coordinator's channel. Returns 0 or -ENOMEM. */
int cox_legacy_bridge_new(struct cox_channel *channel, struct cox_tokens **ret_tokens);

#endif
