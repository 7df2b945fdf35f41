/*
 * legacy_bridge: turns the tokens of legacy ranks into state words, for the collector.
 *
 * A legacy rank does not know the shared state. Its tokens are the events: one on request_produce
 * means that it has read the frame, one on response_consume that its reply is complete. The bridge
 * takes these tokens and writes what they mean into the rank's lines, so that the collector reads
 * state words whatever the rank is. It is the counterpart of channel/attach/legacy/legacy_shim.h.
 * In a group without legacy ranks every function returns at once. The lines are in memory that
 * other processes can write, so the bridge has its own record and corrects them.
 *
 * A legacy group has a depth of 1. Therefore a token belongs to the last request that asked its
 * rank. A rank that returns the frame only after its reply breaks the protocol (docs/wire.md); the
 * bridge reports its reply when both tokens are there. A MindIE-LLM worker that gets SIGTERM posts
 * all its semaphores: a token without a reply in the slot is dropped, where a reply belongs there.
 *
 * A step that failed on a legacy rank looks like one that succeeded: the reply has a token for each
 * sequence, and the failure is a report on the error channel, made before the rank's token. The
 * bridge puts such a report into the reply.
 *
 * Threads: with the collector's lock, except cox_legacy_bridge_expect_wake: any.
 * Ownership: the channel is borrowed; the object is the caller's.
 * Blocks: nothing.
 * If a rank dies: its tokens stay, and are taken as usual; reset drops them.
 */
#ifndef COX_COORDINATOR_LEGACY_BRIDGE_H
#define COX_COORDINATOR_LEGACY_BRIDGE_H

#include "channel/shm/channel.h"

#include <pthread.h>

#define COX_REPORT_TEXT_SIZE 512

struct Coxswain__ExecuteResponse;
struct cox_rank;
struct cox_legacy_rank;

/* The slot of the error channel in a named group, and what was reported there. The error channel
 * takes the reports; the bridge only asks whether there was one. Zeroed: no channel, no reports. */
struct cox_legacy_reports {
    /* borrowed */
    struct cox_channel *channel;
    pthread_mutex_t lock;
    /* under lock: reports that belong to no request, the one in the slot with them if it was
     * counted, and the text of the last one */
    uint64_t count;
    bool slot_counted;
    char text[COX_REPORT_TEXT_SIZE];
};

struct cox_legacy_bridge {
    /* NULL: the group has no legacy ranks */
    struct cox_legacy_rank *ranks;
    struct cox_channel *channel;
    /* of the group, set by the owner; NULL: none */
    struct cox_legacy_reports *reports;
    /* their count when the last request was published */
    uint64_t report_count;
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
                                  const struct cox_rank_set *asked, uint64_t sequence,
                                  bool slotted);
/* To be called before request `sequence` is published to these ranks: the tokens and replies that
 * exist now belong to earlier requests. records: of all ranks of the group. slotted: every rank
 * writes its reply; else rank 0 alone does. */
static inline void cox_legacy_bridge_publish(struct cox_legacy_bridge *bridge,
                                             const struct cox_rank *records,
                                             const struct cox_rank_set *asked, uint64_t sequence,
                                             bool slotted)
{
    if (bridge->ranks)
        cox_legacy_bridge_publish_to(bridge, records, asked, sequence, slotted);
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
/* All ranks have replied to a step. If one has reported a fault meanwhile, err_msg of the reply
 * becomes the last such report, which is stored in text. response: of rank 0, unpacked by the
 * collector; NULL: none. */
void cox_legacy_bridge_read_reports(struct cox_legacy_bridge *bridge,
                                    const struct Coxswain__ExecuteResponse *response, char *text,
                                    size_t text_size);

void cox_legacy_reports_init(struct cox_legacy_reports *reports, struct cox_channel *channel);
/* Any thread. Returns the number of reports so far that belong to no request, with the one that is
 * in the slot and was not taken yet. text: of the last one, "" for none; NULL: not wanted. */
uint64_t cox_legacy_reports_count(struct cox_legacy_reports *reports, char *text, size_t text_size);
/* For the error channel, which has the token of the slot: copies the report to bytes, and empties
 * the slot. Returns its length; 0: none, or *ret_over is its length, which is over capacity. */
size_t cox_legacy_reports_take(struct cox_legacy_reports *reports, uint8_t *bytes, size_t capacity,
                               size_t *ret_over);
/* What it says. */
const char *cox_legacy_report_text(const struct Coxswain__ExecuteResponse *report);
/* It is about a request, whose reply has the failure; MindIE-LLM's are not. */
bool cox_legacy_report_is_of_request(const struct Coxswain__ExecuteResponse *report);

#endif
