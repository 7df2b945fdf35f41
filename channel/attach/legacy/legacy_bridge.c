#include "legacy_bridge.h"

#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "channel/shm/tokens.h"

#include <stdlib.h>

/* A worker that follows the protocol never has more tokens than this in one place. */
#define TOKEN_COUNT_MAX 1024

/* What the tokens of a rank have shown. The lines are a copy of it: other processes can write
 * there, so every update stores it again where it differs. */
struct legacy_rank {
    /* the last request that asked the rank */
    uint64_t sequence;
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

struct legacy_bridge {
    struct cox_tokens base;
    /* borrowed */
    struct cox_channel *channel;
    struct legacy_rank ranks[];
};

static struct legacy_bridge *bridge_of(struct cox_tokens *tokens)
{
    return (struct legacy_bridge *)tokens;
}

static struct cox_layout_rank_line *bridge_line(const struct legacy_bridge *bridge, uint32_t rank)
{
    return cox_state_line(bridge->channel->control, rank, bridge->channel->id);
}

static void line_store(const struct legacy_bridge *bridge, uint32_t rank)
{
    const struct legacy_rank *own = &bridge->ranks[rank];
    const struct cox_control *control = bridge->channel->control;
    struct cox_layout_rank_line *line = bridge_line(bridge, rank);
    if (cox_state_returned(line) != own->returned || cox_state_taken(line) != own->returned) {
        cox_state_set_taken(line, own->returned);
        cox_state_set_rank(line, COX_RANK_RUNNING, own->returned, cox_now_ns());
        cox_state_set_returned(line, own->returned);
    }
    if (cox_state_done(line) != own->done) {
        cox_state_set_incarnation(line, control->group_incarnation, own->incarnation);
        cox_state_set_tag(line, control->geometry.depth, own->done, false);
        cox_state_set_rank(line, COX_RANK_IDLE, own->done, cox_now_ns());
        cox_state_set_done(line, own->done);
    }
}

/* A response_consume token was taken: it is the rank's, unless this process has posted it. */
static void rank_count_token(struct legacy_rank *own)
{
    uint32_t expected = atomic_load_explicit(&own->expected, memory_order_relaxed);
    while (expected > 0)
        if (atomic_compare_exchange_weak_explicit(&own->expected, &expected, expected - 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            return;
    own->replied = true;
}

static void bridge_update(struct cox_tokens *tokens, uint32_t rank)
{
    struct legacy_bridge *bridge = bridge_of(tokens);
    struct cox_gate *gate = &bridge->channel->gate;
    struct legacy_rank *own = &bridge->ranks[rank];
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

static void bridge_waited(struct cox_tokens *tokens, uint32_t rank)
{
    rank_count_token(&bridge_of(tokens)->ranks[rank]);
    bridge_update(tokens, rank);
}

/* Takes and drops all tokens of the rank, its own and those that this process has posted. */
static void rank_drop_tokens(struct legacy_bridge *bridge, uint32_t rank)
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

static void bridge_publish(struct cox_tokens *tokens, const struct cox_rank_set *asked,
                           uint64_t sequence, bool slotted)
{
    struct legacy_bridge *bridge = bridge_of(tokens);
    for (uint32_t rank = 0; rank < bridge->channel->control->geometry.rank_count; rank++) {
        if (!cox_rank_set_has(asked, rank))
            continue;
        rank_drop_tokens(bridge, rank);
        bridge->ranks[rank].writes = slotted || rank == 0;
        if (bridge->ranks[rank].writes)
            cox_reply_erase(bridge->channel, rank, sequence);
        bridge->ranks[rank].sequence = sequence;
    }
}

static void bridge_expect_wake(struct cox_tokens *tokens, uint32_t rank)
{
    atomic_fetch_add_explicit(&bridge_of(tokens)->ranks[rank].expected, 1, memory_order_relaxed);
}

static void bridge_reset(struct cox_tokens *tokens, uint32_t rank, uint64_t published,
                         uint32_t incarnation)
{
    struct legacy_bridge *bridge = bridge_of(tokens);
    struct legacy_rank *own = &bridge->ranks[rank];
    rank_drop_tokens(bridge, rank);
    own->sequence = own->returned = own->done = published;
    own->incarnation = incarnation;
}

static struct cox_tokens *bridge_free(struct cox_tokens *tokens)
{
    free(bridge_of(tokens));
    return NULL;
}

static const struct cox_tokens_ops bridge_ops = {
    .update = bridge_update,
    .publish = bridge_publish,
    .waited = bridge_waited,
    .expect_wake = bridge_expect_wake,
    .reset = bridge_reset,
    .free = bridge_free,
};

int cox_legacy_bridge_new(struct cox_channel *channel, struct cox_tokens **ret_tokens)
{
    const uint32_t rank_count = channel->control->geometry.rank_count;
    struct legacy_bridge *bridge = calloc(1, sizeof *bridge + rank_count * sizeof *bridge->ranks);
    if (!bridge)
        return -ENOMEM;
    bridge->base.ops = &bridge_ops;
    bridge->channel = channel;
    for (uint32_t rank = 0; rank < rank_count; rank++)
        bridge->ranks[rank].incarnation = 1;
    *ret_tokens = &bridge->base;
    return 0;
}
