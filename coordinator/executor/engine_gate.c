#include "engine_gate.h"

#include "executor_internal.h"
#include "requests_internal.h"

const char *cox_engine_state_name(enum cox_engine_state state)
{
    static const char *const names[] = {"READY", "NORMAL", "ABNORMAL", "PAUSE", "INIT", "BUSY"};
    return (size_t)state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

enum cox_engine_state cox_executor_look_state(struct cox_executor *executor)
{
    if (executor->engine_state == COX_ENGINE_NORMAL && executor->init_void)
        executor->engine_state = COX_ENGINE_ABNORMAL;
    for (uint32_t rank = 0;
         executor->engine_state == COX_ENGINE_NORMAL && rank < executor->geometry.rank_count;
         rank++)
        if (cox_rank_is_dead(&executor->ranks[rank]))
            executor->engine_state = COX_ENGINE_ABNORMAL;
    return executor->engine_state;
}

enum cox_engine_state cox_executor_engine_state(const struct cox_executor *executor)
{
    struct cox_executor *own = (struct cox_executor *)(uintptr_t)executor;
    pthread_mutex_lock(&own->recover_lock);
    enum cox_engine_state state = cox_executor_look_state(own);
    pthread_mutex_unlock(&own->recover_lock);
    return state == COX_ENGINE_NORMAL &&
                   cox_collector_in_step(&own->collectors[COX_CHANNEL_EXECUTE])
               ? COX_ENGINE_BUSY
               : state;
}

bool cox_executor_partially_paused(const struct cox_executor *executor)
{
    struct cox_executor *own = (struct cox_executor *)(uintptr_t)executor;
    pthread_mutex_lock(&own->recover_lock);
    bool partially_paused = own->partially_paused;
    pthread_mutex_unlock(&own->recover_lock);
    return partially_paused;
}

/* ---- where the state moves ---- */

void cox_executor_set_normal(struct cox_executor *executor, bool unless_paused)
{
    pthread_mutex_lock(&executor->recover_lock);
    executor->init_void = false;
    /* An ordinary init makes the ranks continue, as from PAUSE. */
    executor->partially_paused = executor->partially_paused && unless_paused;
    if (!unless_paused ||
        (executor->engine_state != COX_ENGINE_PAUSE && executor->engine_state != COX_ENGINE_READY))
        executor->engine_state = COX_ENGINE_NORMAL;
    /* A death that was reported before is not reported again. */
    cox_executor_look_state(executor);
    pthread_mutex_unlock(&executor->recover_lock);
}

void cox_executor_note_sent(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->recover_lock);
    executor->init_sent = true;
    pthread_mutex_unlock(&executor->recover_lock);
}

void cox_executor_note_replaced(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->recover_lock);
    executor->init_void = true;
    pthread_mutex_unlock(&executor->recover_lock);
}

void cox_executor_note_death(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->recover_lock);
    cox_executor_look_state(executor);
    pthread_mutex_unlock(&executor->recover_lock);
}

int cox_executor_admit_step(struct cox_executor *executor, struct cox_error *err)
{
    pthread_mutex_lock(&executor->recover_lock);
    const char *command = executor->gates_steps;
    enum cox_engine_state state = executor->engine_state;
    pthread_mutex_unlock(&executor->recover_lock);
    if (command)
        return cox_fail(err, COX_STATE,
                        "no steps in state %s while the recovery command %s runs: wait for its end",
                        cox_engine_state_name(state), command);
    if (state != COX_ENGINE_PAUSE && state != COX_ENGINE_READY)
        return 0;
    return cox_fail(
        err, COX_STATE,
        "no steps in state %s: the engine is paused; the recovery command start lets them in again (coxswain recover start)",
        cox_engine_state_name(state));
}
