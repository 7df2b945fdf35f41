/*
 * legacy_bridge: turns the tokens of legacy ranks into state words, for the collector.
 *
 * A legacy rank does not know the shared state. Its tokens are the events: one on request_produce
 * means that it has read the frame, one on response_consume that its reply is complete. The bridge
 * takes these tokens and writes what they mean into the rank's lines, so that the collector reads
 * state words whatever the rank is. It is the counterpart of worker/loop/legacy_shim.h. In a group
 * without legacy ranks every function returns at once. The lines are in memory that other processes
 * can write, so the bridge has its own record and corrects them.
 *
 * A legacy group has a depth of 1. Therefore a token belongs to the last request that asked its
 * rank. A rank that returns the frame only after its reply breaks the protocol (docs/wire.md); the
 * bridge reports its reply when both tokens are there.
 *
 * Threads: with the collector's lock, except cox_legacy_bridge_expect_wake: any.
 * Ownership: the channel is borrowed; the object is the caller's.
 * Blocks: nothing.
 * If a rank dies: its tokens stay, and are taken as usual; reset drops them.
 */
#ifndef COX_COORDINATOR_LEGACY_BRIDGE_H
#define COX_COORDINATOR_LEGACY_BRIDGE_H

#include "channel/shm/channel.h"

struct Coxswain__ExecuteResponse;
struct cox_rank;
struct cox_legacy_rank;

struct cox_legacy_bridge {
    /* NULL: the group has no legacy ranks */
    struct cox_legacy_rank *ranks;
    struct cox_channel *channel;
};

/* Returns 0 or -ENOMEM; on failure *bridge is unchanged. */
int cox_legacy_bridge_init(struct cox_legacy_bridge *bridge, struct cox_channel *channel);
void cox_legacy_bridge_deinit(struct cox_legacy_bridge *bridge);

void cox_legacy_bridge_update_rank(struct cox_legacy_bridge *bridge, uint32_t rank);
/* To be called before the lines of a rank are read: takes its tokens and brings its lines up to
 * date, also where another process has overwritten them. */
static inline void cox_legacy_bridge_update(struct cox_legacy_bridge *bridge, uint32_t rank)
{
    if (bridge->ranks)
        cox_legacy_bridge_update_rank(bridge, rank);
}

void cox_legacy_bridge_publish_to(struct cox_legacy_bridge *bridge, const struct cox_rank *records,
                                  const struct cox_rank_set *asked, uint64_t sequence);
/* To be called before request `sequence` is published to these ranks: the tokens that exist now
 * belong to earlier requests. records: of all ranks of the group. */
static inline void cox_legacy_bridge_publish(struct cox_legacy_bridge *bridge,
                                             const struct cox_rank *records,
                                             const struct cox_rank_set *asked, uint64_t sequence)
{
    if (bridge->ranks)
        cox_legacy_bridge_publish_to(bridge, records, asked, sequence);
}

/* To be called after a wait on the rank's response_consume has taken a token. */
void cox_legacy_bridge_waited(struct cox_legacy_bridge *bridge, uint32_t rank);
/* To be called before this process posts the rank's response_consume, to end its own wait: that
 * token is not a reply. */
void cox_legacy_bridge_expect_wake(struct cox_legacy_bridge *bridge, uint32_t rank);
/* The process of the rank is dead, and requests up to `published` are over: drops its tokens. The
 * caller then resets the gate and the lines. */
void cox_legacy_bridge_reset(struct cox_legacy_bridge *bridge, uint32_t rank, uint64_t published);

/* Brings the unpacked reply of a legacy rank into our form: with its rank, without a reference to a
 * large payload, and with COX_REJECTED as the status of a failed step, for which a legacy rank
 * sends status 0 and a text in place of outputs. */
void cox_legacy_bridge_read_reply(struct Coxswain__ExecuteResponse *response, uint32_t rank);

#endif
