#include "legacy_bridge.h"

#include <stdlib.h>

#include "channel/shm/state.h"
#include "coordinator/process/rank.h"
#include "proto/executor.pb-c.h"

/* A worker that follows the protocol never has more tokens than this in one place. */
#define TOKEN_COUNT_MAX 1024

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
    /* Tokens that this process posts or has posted to end its own wait. relaxed: a count; the
     * semaphore orders everything else. */
    _Atomic uint32_t expected;
};

int cox_legacy_bridge_init(struct cox_legacy_bridge *bridge, struct cox_channel *channel)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    struct cox_legacy_rank *ranks =
        geometry->legacy ? calloc(geometry->rank_count, sizeof *ranks) : NULL;
    if (geometry->legacy && !ranks)
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
                                  const struct cox_rank_set *asked, uint64_t sequence)
{
    for (uint32_t rank = 0; rank < bridge->channel->control->geometry.rank_count; rank++) {
        if (!cox_rank_set_has(asked, rank))
            continue;
        rank_drop_tokens(bridge, rank);
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
