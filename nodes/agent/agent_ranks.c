/* agent_ranks: starts, replaces and ends the ranks of a machine, and says which have died. */
#include "channel/base/thread.h"
#include "coordinator/executor/core.h"
#include "agent_private.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define START_TIMEOUT_MS 60000

/* ---- hooks of the executor ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct agent *agent = context;
    agent->options->line(agent->options->context, rank, is_stderr, text);
    cox_agent_send_text(agent, (int32_t)rank, is_stderr, false, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    cox_agent_send_text(context, rank, false, true, text);
}

/* "rank 5 (pid 123) was killed by ...": the lead knows rank and node. */
static const char *behind_name(const char *text)
{
    const char *end = strstr(text, ") ");
    return end ? end + 2 : text;
}

/* The lock is held. */
static void rank_say_dead(struct agent *agent, uint32_t rank, uint32_t pid, const char *text,
                          bool known, int signal, int exit_status)
{
    const uint32_t i = rank - agent->rank_first;
    /* One that died before it stood for anything was that. */
    if (!agent->claimed[i])
        agent->claimed[i] = agent->link.wanted[i];
    struct cox_agent_rank is = {
        .incarnation = agent->claimed[i],
        .state = COX_NODE__RANK_STATE__DEAD,
        .pid = pid,
        .known = known,
        .signal = signal,
        .exit_status = exit_status,
    };
    snprintf(is.text, sizeof is.text, "%s", text);
    agent->dead[i] = true;
    cox_agent_link_set_rank(&agent->link, rank, &is);
    cox_agent_link_tick(&agent->link, cox_now_ns());
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct agent *agent = context;
    char ignored[8];
    (void)ignored;
    pthread_mutex_lock(&agent->lock);
    struct cox_executor *executor = agent->executor;
    pthread_mutex_unlock(&agent->lock);
    struct cox_executor_status status;
    struct cox_rank_status *ranks = executor ? calloc(COX_RANK_COUNT_MAX, sizeof *ranks) : NULL;
    int signal = 0, exit_status = -1;
    uint32_t pid = 0;
    if (ranks) {
        cox_executor_read_status(executor, &status, ranks);
        signal = ranks[rank].signal;
        exit_status = ranks[rank].exit_status;
        pid = (uint32_t)ranks[rank].pid;
    }
    free(ranks);
    cox_agent_say(agent, text);
    pthread_mutex_lock(&agent->lock);
    rank_say_dead(agent, rank, pid, behind_name(text), signal || exit_status >= 0, signal,
                  exit_status);
    pthread_mutex_unlock(&agent->lock);
}

/* ---- ranks ---- */

/* Compares what the lead wants with what runs. Returns a rank that needs another process, -1: none.
 * The lock is held. */
static int32_t ranks_compare(struct agent *agent)
{
    struct cox_agent_link *link = &agent->link;
    int32_t needs = -1;
    if (!agent->executor || agent->renew || link->state != COX_LEAD_FOLLOWING)
        return -1;
    for (uint32_t i = 0; i < agent->rank_count; i++) {
        const uint32_t rank = agent->rank_first + i, wanted = link->wanted[i];
        if (link->killed[i] && link->killed[i] == agent->claimed[i] &&
            agent->killed[i] != link->killed[i]) {
            agent->killed[i] = link->killed[i];
            cox_executor_kill(agent->executor, rank, NULL);
        }
        if (!wanted || agent->claimed[i] == wanted)
            continue;
        if (!agent->dead[i] && !agent->claimed[i]) {
            agent->claimed[i] = wanted;
            const struct cox_agent_rank is = {
                .incarnation = wanted,
                .state = COX_NODE__RANK_STATE__UP,
                .pid = (uint32_t)cox_executor_pid(agent->executor, rank),
            };
            cox_agent_link_set_rank(link, rank, &is);
        } else if (!agent->dead[i]) {
            /* The lead has given it up, and it lives. */
            if (agent->killed[i] != agent->claimed[i]) {
                agent->killed[i] = agent->claimed[i];
                cox_executor_kill(agent->executor, rank, NULL);
            }
        } else if (needs < 0) {
            needs = (int32_t)rank;
        }
    }
    return needs;
}

static void start_ranks(struct agent *agent)
{
    const struct cox_node_agent_options *from = agent->options;
    char name[COX_NAME_SIZE_MAX + 1];
    struct cox_executor_options options = COX_EXECUTOR_OPTIONS_INIT;
    struct cox_executor_remote remote = {.forwarded = cox_agent_on_forwarded,
                                         .forwarded_model = from->model};
    struct cox_executor *executor = NULL;
    struct cox_error why = {0};
    pthread_mutex_lock(&agent->lock);
    snprintf(name, sizeof name, "%.30s.%s", from->group, from->node);
    options.name = name;
    options.rank_count = agent->world;
    remote.rank_first = agent->rank_first;
    remote.rank_here = agent->rank_count;
    options.workers.command = from->command;
    options.workers.environment_only = true;
    options.depth = agent->depth;
    options.memory.attach = agent->attach;
    options.recorder.use = agent->no_recorder ? COX_RECORDER_NONE : COX_RECORDER_ALWAYS;
    memcpy(options.memory.request_size, agent->request_size, sizeof options.memory.request_size);
    memcpy(options.memory.response_size, agent->response_size, sizeof options.memory.response_size);
    options.recorder.crash_dir = agent->no_recorder ? NULL : from->crash_dir;
    options.times.start_timeout_ms = START_TIMEOUT_MS;
    options.hooks.log = from->log;
    options.hooks.context = agent;
    options.hooks.line = on_line;
    options.hooks.fault = on_fault;
    options.hooks.death = on_death;
    /* Before there are processes, which may die at once. */
    memset(agent->claimed, 0, sizeof agent->claimed);
    memset(agent->dead, 0, sizeof agent->dead);
    memset(agent->killed, 0, sizeof agent->killed);
    pthread_mutex_unlock(&agent->lock);
    int r = cox_executor_start_remote(&options, &remote, &executor, &why);
    char text[sizeof why.text + 32];
    snprintf(text, sizeof text, "could not be started: %s", why.text);
    pthread_mutex_lock(&agent->lock);
    if (r) {
        /* The lead's start, or replacement, fails with this text; it may want another one. */
        agent->wanted = false;
        agent->not_started = true;
        for (uint32_t i = 0; i < agent->rank_count; i++) {
            agent->start_failed[i] = agent->link.wanted[i];
            if (agent->link.wanted[i])
                rank_say_dead(agent, agent->rank_first + i, 0, text, false, 0, -1);
        }
        memset(agent->dead, 0, sizeof agent->dead);
    } else {
        agent->executor = executor;
        memset(agent->cancelled_through, 0, sizeof agent->cancelled_through);
        memset(agent->ended_through, 0, sizeof agent->ended_through);
        ranks_compare(agent);
        cox_agent_link_tick(&agent->link, cox_now_ns());
        cox_agent_run_requests(agent);
    }
    pthread_mutex_unlock(&agent->lock);
    if (r)
        cox_agent_say(agent, why.text);
}

void cox_agent_stop_ranks(struct agent *agent)
{
    pthread_mutex_lock(&agent->lock);
    struct cox_executor *executor = agent->executor;
    const uint64_t epoch = agent->link.epoch, incarnation = agent->link.incarnation;
    agent->executor = NULL;
    agent->renew = false;
    pthread_mutex_unlock(&agent->lock);
    if (!executor)
        return;
    cox_group_relay_pause(agent->relay);
    cox_executor_stop(executor);
    cox_kv_relay_unlink(agent->kv);
    pthread_mutex_lock(&agent->lock);
    cox_agent_await_stacks(agent);
    /* Unless another lead has come, for which these have never stood, or comes meanwhile. */
    const bool same = agent->link.epoch == epoch && agent->link.incarnation == incarnation &&
                      agent->link.state == COX_LEAD_FOLLOWING;
    for (uint32_t i = 0; i < agent->rank_count && same; i++)
        if (!agent->dead[i] && agent->claimed[i])
            rank_say_dead(agent, agent->rank_first + i, 0, "has ended with its group", true, 0, 0);
    pthread_mutex_unlock(&agent->lock);
    cox_executor_free(executor);
}

static void restart_rank(struct agent *agent, uint32_t rank)
{
    const uint32_t i = rank - agent->rank_first;
    struct cox_error why = {0};
    /* Before there is another process, which may die at once. */
    pthread_mutex_lock(&agent->lock);
    agent->dead[i] = false;
    agent->claimed[i] = 0;
    pthread_mutex_unlock(&agent->lock);
    int r =
        cox_executor_restart(agent->executor, rank, cox_deadline_after_ms(START_TIMEOUT_MS), &why);
    pthread_mutex_lock(&agent->lock);
    if (r == 0)
        ranks_compare(agent);
    else
        rank_say_dead(agent, rank, 0, why.text, false, 0, -1); /* the next attempt is the lead's */
    cox_agent_link_tick(&agent->link, cox_now_ns());
    pthread_mutex_unlock(&agent->lock);
}

/* Ranks that could not be started are tried again when the lead wants another incarnation. */
static void start_again(struct agent *agent)
{
    if (agent->executor || agent->wanted || !agent->not_started ||
        agent->link.state != COX_LEAD_FOLLOWING)
        return;
    for (uint32_t i = 0; i < agent->rank_count; i++)
        agent->wanted = agent->wanted || agent->link.wanted[i] > agent->start_failed[i];
    if (agent->wanted)
        agent->not_started = false;
}

/* Starts, replaces and ends ranks. */
void *cox_agent_ranks_main(void *context)
{
    struct agent *agent = context;
    pthread_setname_np(pthread_self(), "cox-node-ranks");
    pthread_mutex_lock(&agent->lock);
    while (!agent->ending) {
        const int32_t needs = ranks_compare(agent);
        start_again(agent);
        const bool renew = agent->renew, start = agent->wanted && !agent->executor;
        pthread_mutex_unlock(&agent->lock);
        if (renew)
            cox_agent_stop_ranks(agent);
        else if (start)
            start_ranks(agent);
        else if (needs >= 0)
            restart_rank(agent, (uint32_t)needs);
        pthread_mutex_lock(&agent->lock);
        if (!renew && !start && needs < 0 && !agent->ending)
            pthread_cond_wait(&agent->changed, &agent->lock);
    }
    pthread_mutex_unlock(&agent->lock);
    return NULL;
}
