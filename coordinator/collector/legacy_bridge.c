#include "legacy_bridge.h"

#include <endian.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/tsan.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "coordinator/process/rank.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"

/* A worker that follows the protocol never has more tokens than this in one place. */
#define TOKEN_COUNT_MAX 1024
/* A longer report is no report of a legacy rank, whose slot is smaller. */
#define REPORT_SIZE_MAX 4096
#define REPORT_ARENA_SIZE_MAX (1u << 16)

/* What the tokens of a rank have shown. The lines are a copy of it: other processes can write
 * there, so every update stores it again where it differs. */
struct cox_legacy_rank {
    /* the last request that asked the rank */
    uint64_t sequence;
    /* the incarnation of the rank at that request */
    uint32_t incarnation;
    /* the requests up to which it has returned the frame, and has replied */
    uint64_t returned, done;
    /* its response_consume token was taken, its request_produce token was not */
    bool replied;
    /* its reply to that request has a message in its slot */
    bool writes;
    /* Tokens that this process posts or has posted to end its own wait. relaxed: a count; the
     * semaphore orders everything else. */
    _Atomic uint32_t expected;
};

int cox_legacy_bridge_init(struct cox_legacy_bridge *bridge, struct cox_channel *channel)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    struct cox_legacy_rank *ranks =
        !geometry->mode->limits.rank_words ? calloc(geometry->rank_count, sizeof *ranks) : NULL;
    if (!geometry->mode->limits.rank_words && !ranks)
        return -ENOMEM;
    *bridge = (struct cox_legacy_bridge){.ranks = ranks, .channel = channel};
    return 0;
}

void cox_legacy_bridge_deinit(struct cox_legacy_bridge *bridge)
{
    free(bridge->ranks);
    bridge->ranks = NULL;
}

static struct cox_layout_rank_line *bridge_line(const struct cox_legacy_bridge *bridge,
                                                uint32_t rank)
{
    return cox_state_line(bridge->channel->control, rank, bridge->channel->id);
}

static void line_store(const struct cox_legacy_bridge *bridge, uint32_t rank)
{
    const struct cox_legacy_rank *own = &bridge->ranks[rank];
    const struct cox_control *control = bridge->channel->control;
    struct cox_layout_rank_line *line = bridge_line(bridge, rank);
    if (cox_state_returned(line) != own->returned || cox_state_taken(line) != own->returned) {
        cox_state_set_taken(line, own->returned);
        cox_state_set_rank(line, COX_RANK_RUNNING, own->returned, cox_now_ns());
        cox_state_set_returned(line, own->returned);
    }
    if (cox_state_done(line) != own->done) {
        cox_state_set_incarnation(line, control->instance, own->incarnation);
        cox_state_set_tag(line, control->geometry.depth, own->done, false);
        cox_state_set_rank(line, COX_RANK_IDLE, own->done, cox_now_ns());
        cox_state_set_done(line, own->done);
    }
}

/* A response_consume token was taken: it is the rank's, unless this process has posted it. */
static void rank_count_token(struct cox_legacy_rank *own)
{
    uint32_t expected = atomic_load_explicit(&own->expected, memory_order_relaxed);
    while (expected > 0)
        if (atomic_compare_exchange_weak_explicit(&own->expected, &expected, expected - 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            return;
    own->replied = true;
}

void cox_legacy_bridge_update_rank(struct cox_legacy_bridge *bridge, uint32_t rank)
{
    struct cox_gate *gate = &bridge->channel->gate;
    struct cox_legacy_rank *own = &bridge->ranks[rank];
    /* response_consume first: the rank posted the other token before it. */
    for (int i = 0; i < TOKEN_COUNT_MAX && !own->replied &&
                    cox_gate_take(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
         i++)
        rank_count_token(own);
    if (own->writes && !cox_reply_is_written(bridge->channel, rank, own->sequence))
        own->replied = false;
    for (int i = 0; i < TOKEN_COUNT_MAX && cox_gate_take(gate, rank, COX_WAKEUP_REQUEST_PRODUCE);
         i++)
        own->returned = own->sequence;
    if (own->replied && own->returned == own->sequence) {
        own->replied = false;
        own->done = own->sequence;
    }
    line_store(bridge, rank);
}

void cox_legacy_bridge_waited(struct cox_legacy_bridge *bridge, uint32_t rank)
{
    if (!bridge->ranks)
        return;
    rank_count_token(&bridge->ranks[rank]);
    cox_legacy_bridge_update_rank(bridge, rank);
}

/* Takes and drops all tokens of the rank, its own and those that this process has posted. */
static void rank_drop_tokens(struct cox_legacy_bridge *bridge, uint32_t rank)
{
    struct cox_gate *gate = &bridge->channel->gate;
    for (int i = 0; i < TOKEN_COUNT_MAX && cox_gate_take(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
         i++)
        rank_count_token(&bridge->ranks[rank]);
    for (int i = 0; i < TOKEN_COUNT_MAX && cox_gate_take(gate, rank, COX_WAKEUP_REQUEST_PRODUCE);
         i++)
        continue;
    bridge->ranks[rank].replied = false;
}

void cox_legacy_bridge_publish_to(struct cox_legacy_bridge *bridge, const struct cox_rank *records,
                                  const struct cox_rank_set *asked, uint64_t sequence, bool slotted)
{
    bridge->report_count = bridge->reports ? cox_legacy_reports_count(bridge->reports, NULL, 0) : 0;
    for (uint32_t rank = 0; rank < bridge->channel->control->geometry.rank_count; rank++) {
        if (!cox_rank_set_has(asked, rank))
            continue;
        rank_drop_tokens(bridge, rank);
        bridge->ranks[rank].writes = slotted || rank == 0;
        if (bridge->ranks[rank].writes)
            cox_reply_erase(bridge->channel, rank, sequence);
        bridge->ranks[rank].sequence = sequence;
        bridge->ranks[rank].incarnation = cox_rank_incarnation(&records[rank]);
    }
}

void cox_legacy_bridge_expect_wake(struct cox_legacy_bridge *bridge, uint32_t rank)
{
    if (bridge->ranks)
        atomic_fetch_add_explicit(&bridge->ranks[rank].expected, 1, memory_order_relaxed);
}

void cox_legacy_bridge_reset(struct cox_legacy_bridge *bridge, uint32_t rank, uint64_t published)
{
    if (!bridge->ranks)
        return;
    struct cox_legacy_rank *own = &bridge->ranks[rank];
    rank_drop_tokens(bridge, rank);
    own->sequence = own->returned = own->done = published;
}

void cox_legacy_bridge_read_reply(Coxswain__ExecuteResponse *response, uint32_t rank)
{
    const Coxswain__ExecuteModelResponse *step =
        response->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE
            ? response->execute_model_response
            : NULL;
    response->rank = (int32_t)rank;
    response->bulk = NULL;
    if (response->status == 0 && step && step->n_outputs == 0 && step->err_msg && step->err_msg[0])
        response->status = COX_REJECTED;
}

/* ---- reports on the error channel ---- */

void cox_legacy_reports_init(struct cox_legacy_reports *reports, struct cox_channel *channel)
{
    *reports = (struct cox_legacy_reports){.channel = channel};
    pthread_mutex_init(&reports->lock, NULL);
}

const char *cox_legacy_report_text(const Coxswain__ExecuteResponse *report)
{
    if (report->error_text)
        return report->error_text;
    if (report->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE &&
        report->execute_model_response && report->execute_model_response->err_msg)
        return report->execute_model_response->err_msg;
    return "a fault without words";
}

bool cox_legacy_report_is_of_request(const Coxswain__ExecuteResponse *report)
{
    return report->has_error_sequence && report->has_error_channel &&
           report->error_channel < COX_TWO_WAY_COUNT;
}

static size_t slot_copy(const struct cox_legacy_reports *reports, uint8_t *bytes, size_t capacity,
                        size_t *ret_over)
{
    const uint8_t *base = reports->channel->response.base;
    uint32_t prefix;
    memcpy(&prefix, base, sizeof prefix);
    const size_t length = le32toh(prefix);
    *ret_over = length > capacity ? length : 0;
    if (*ret_over)
        return 0;
    memcpy(bytes, base + COX_PREFIX_SIZE, length);
    return length;
}

/* Under the lock: counts the report in the slot, once. One that its rank still writes is counted
 * later. */
static void slot_count(struct cox_legacy_reports *reports)
{
    const size_t room = reports->channel->response.size - COX_PREFIX_SIZE;
    uint8_t bytes[REPORT_SIZE_MAX];
    size_t over;
    struct cox_arena arena;
    Coxswain__ExecuteResponse *report;
    const size_t length =
        reports->slot_counted
            ? 0
            : slot_copy(reports, bytes, room < sizeof bytes ? room : sizeof bytes, &over);
    if (length == 0 || cox_arena_init(&arena, 0, REPORT_ARENA_SIZE_MAX))
        return;
    if (cox_wire_response_unpack(&arena, bytes, length, &report) == 0 &&
        !cox_legacy_report_is_of_request(report)) {
        reports->slot_counted = true;
        reports->count++;
        snprintf(reports->text, sizeof reports->text, "%.*s", (int)sizeof reports->text - 1,
                 cox_legacy_report_text(report));
        cox_text_trim(reports->text);
    }
    cox_arena_deinit(&arena);
}

uint64_t cox_legacy_reports_count(struct cox_legacy_reports *reports, char *text, size_t text_size)
{
    pthread_mutex_lock(&reports->lock);
    slot_count(reports);
    const uint64_t count = reports->count;
    if (text)
        snprintf(text, text_size, "%s", reports->text);
    pthread_mutex_unlock(&reports->lock);
    return count;
}

size_t cox_legacy_reports_take(struct cox_legacy_reports *reports, uint8_t *bytes, size_t capacity,
                               size_t *ret_over)
{
    uint8_t *base = reports->channel->response.base;
    /* No state word orders this slot: the token does, here and in the worker. */
    cox_tsan_acquire(base);
    pthread_mutex_lock(&reports->lock);
    slot_count(reports);
    reports->slot_counted = false;
    const size_t length = slot_copy(reports, bytes, capacity, ret_over);
    cox_fault_point(COX_FAULT_REPORT_FETCHED);
    memset(base, 0, COX_PREFIX_SIZE); /* so that the same report is not read twice */
    pthread_mutex_unlock(&reports->lock);
    cox_tsan_release(base);
    return length;
}

void cox_legacy_bridge_read_reports(struct cox_legacy_bridge *bridge,
                                    const Coxswain__ExecuteResponse *response, char *text,
                                    size_t text_size)
{
    if (!bridge->ranks || !bridge->reports || !response ||
        response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE ||
        cox_legacy_reports_count(bridge->reports, text, text_size) == bridge->report_count)
        return;
    response->execute_model_response->err_msg = text;
}
