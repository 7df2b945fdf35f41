/*
 * kv_relay: pulls of KV blocks from a group whose ranks are on another machine.
 *
 * A rank copies blocks out of the memory of another group's rank, which a link names by a handle. For a
 * rank of another machine the agent keeps KV blocks of its own in its place: the link gets their handle.
 * Before a pull is passed on, its blocks are expected (COX_KV_EXPECTED); then the agent fetches them from
 * the other agent, by a direct connection, and puts them there under their user. The rank pulls as
 * it does on one machine, and waits for each block that has not come. The other agent copies them as a
 * rank would, and says of each whether it still belongs to that user: one that does not is unused
 * here in the end, so that the pull finds it stale. They come in pieces, so that reading, sending and
 * both copies are at work at once.
 *
 * A process may fetch from the ranks of an agent only: the handle must be of one of them. Pieces are taken
 * from the node that was asked only. The other agent is of another group, mostly.
 *
 * One request at a time is expected and pulled, after the ranks have replied to the one before: else
 * they could copy a block of it that is expected anew.
 *
 * Fetches of other agents are served on threads of the relay: the thread of a connection only reads, or
 * two agents that fetch from each other would wait for each other.
 *
 * The relay's blocks have no pages before the first pull of each: they are as many as the other rank has.
 *
 * Threads: link on one at a time, and expect, pull and give_up on one at a time; they may be two, and a
 *   link that is removed during its pull ends it. take and cancel on any.
 * Blocks: pull, until the blocks are there, cancel, the deadlines, 0.5 s after the end of the process
 *   that has them, or if no piece has come for 15 s and a second for 10 MB of a block. end, for sends that
 *   are under way.
 */
#ifndef COX_NODES_KV_RELAY_H
#define COX_NODES_KV_RELAY_H

#include "nodes/direct/direct.h"
#include "nodes/link/nodes_common.h"
#include "proto/executor.pb-c.h"

#define COX_DIRECT_FETCH 5u
#define COX_DIRECT_BLOCKS 6u
/* Blocks that one fetch may ask for. */
#define COX_KV_FETCH_COUNT_MAX 65536

struct cox_kv_relay;

/* address: "HOST:PORT" of direct. is_rank: whether a process is a rank of this agent; called on the
 * connection's thread. */
int cox_kv_relay_new(struct cox_direct *direct, const char *address, const struct cox_log *log,
                     bool (*is_rank)(void *context, pid_t pid), void *context,
                     struct cox_kv_relay **ret_relay, struct cox_error *err);
/* Serves no fetch from now on, and waits for those under way: after cox_direct_end, before
 * cox_direct_close. */
void cox_kv_relay_end(struct cox_kv_relay *relay);
struct cox_kv_relay *cox_kv_relay_free(struct cox_kv_relay *relay); /* NULL-safe; calls end */
/* Puts own blocks in the place of those of other machines, for these ranks. The request then points
 * into the relay, until the next link. Returns 0; COX_NO_SPACE: no memory for them; COX_INVALID. */
int cox_kv_relay_link(struct cox_kv_relay *relay, Coxswain__PDLinkRequest *request,
                      uint32_t rank_first, uint32_t rank_count, const char *control_socket,
                      struct cox_error *err);
/* The ranks have ended, and with them all links. As link, one at a time. */
void cox_kv_relay_unlink(struct cox_kv_relay *relay);
/* Says that what the pulls of a request copy is on its way: then the request may be passed on, and pull
 * or give_up has to follow. */
void cox_kv_relay_expect(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                         uint32_t rank_first, uint32_t rank_count);
/* Nothing will come of what was expected: the request was not passed on. */
void cox_kv_relay_give_up(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                          uint32_t rank_first, uint32_t rank_count);
/* Fetches what is expected. What cannot be had is unused in the end, and logged. The deadlines and leases
 * of the request are on this machine's clock. */
void cox_kv_relay_pull(struct cox_kv_relay *relay, const Coxswain__PullKVRequest *request,
                       uint32_t rank_first, uint32_t rank_count, uint64_t deadline_ns);
/* Nobody waits any more for what is expected, or is being fetched: ends the pull. */
void cox_kv_relay_cancel(struct cox_kv_relay *relay);
/* The same, and for pulls to come; also one whose question is still on its way to an agent that does
 * not take it. Blocks until that is given up, which is soon. */
void cox_kv_relay_stop(struct cox_kv_relay *relay);
/* A direct message of these kinds, of the process `peer`. Takes bytes (free). */
void cox_kv_relay_take(struct cox_kv_relay *relay, const char *peer, uint32_t kind, uint8_t *bytes,
                       size_t size);

#endif
