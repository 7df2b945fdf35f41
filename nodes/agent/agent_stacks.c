/* agent_stacks: where the ranks of a machine stand, which its lead asks for. A thread of its own, from the first question
 * on, since it takes a third of a second, during which frames are taken and ranks are started and ended. */
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "coordinator/executor/core.h"
#include "nodes/link/stacks_fetch.h"
#include "agent_private.h"

#include <stdlib.h>

/* The lock is held. */
static void stacks_send(struct agent *agent, const struct cox_frame *ask,
                        const struct cox_stacks *stacks)
{
    for (uint32_t i = 0; i < stacks->count; i++) {
        const struct cox_rank_stacks *rank = &stacks->ranks[i];
        size_t size;
        uint8_t *bytes =
            cox_stacks_fetch_reply(ask, rank->rank, rank->summary, rank->text, cox_now_ns(), &size);
        if (bytes)
            cox_agent_send(agent, bytes, size);
    }
}

/* The lock is held, and released while the stacks are gathered. */
static void stacks_gather(struct agent *agent, const struct cox_frame *ask)
{
    struct cox_executor *executor = agent->executor;
    struct cox_rank_set asked = {{0}};
    struct cox_stacks *stacks = NULL;
    const uint64_t deadline_ns = cox_agent_link_here(&agent->link, ask->deadline_ns);
    for (uint32_t rank = agent->rank_first; rank < agent->rank_first + agent->rank_count; rank++)
        if (cox_rank_set_has(&ask->asked, rank))
            cox_rank_set_add(&asked, rank);
    agent->stacks_gathers = true;
    pthread_mutex_unlock(&agent->lock);
    const int r = cox_executor_stacks(executor, &asked, deadline_ns, &stacks);
    pthread_mutex_lock(&agent->lock);
    if (r == 0) {
        stacks_send(agent, ask, stacks);
        cox_executor_keep_stacks(executor, stacks);
    }
    agent->stacks_gathers = false;
    pthread_cond_broadcast(&agent->changed);
}

static void *stacks_main(void *context)
{
    struct agent *agent = context;
    pthread_setname_np(pthread_self(), "cox-node-stacks");
    pthread_mutex_lock(&agent->lock);
    while (!agent->ending) {
        const struct cox_frame ask = agent->stacks_asked;
        agent->stacks_asked.sequence = 0;
        if (!ask.sequence)
            pthread_cond_wait(&agent->changed, &agent->lock);
        else if (agent->executor) /* otherwise the lead waits for nothing, and not for ever */
            stacks_gather(agent, &ask);
    }
    pthread_mutex_unlock(&agent->lock);
    return NULL;
}

void cox_agent_ask_stacks(struct agent *agent, const struct cox_frame *ask)
{
    if (agent->ending)
        return;
    if (!agent->stacks_threaded)
        agent->stacks_threaded = cox_thread_start(&agent->stacks_thread, stacks_main, agent) == 0;
    agent->stacks_asked = *ask;
    agent->stacks_asked.payload = NULL;
    pthread_cond_broadcast(&agent->changed);
}

void cox_agent_await_stacks(struct agent *agent)
{
    while (agent->stacks_gathers)
        pthread_cond_wait(&agent->changed, &agent->lock);
}
