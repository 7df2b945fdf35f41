#include "rank.h"

#include "channel/base/idioms.h"

#define TO(stage) (1u << COX_STAGE_##stage)

/* sets of the stages that come next */
static const uint32_t moves[COX_STAGE_COUNT] = {
    /* a client becomes the rank; a process is started; no process came, and the rank is dead as
     * before */
    [COX_STAGE_VACANT] = TO(STARTING) | TO(LAUNCHING) | TO(REPORTED),
    [COX_STAGE_STARTING] = TO(RUNNING) | TO(LEAVING) | TO(EXITING) | TO(VACANT),
    [COX_STAGE_RUNNING] = TO(LEAVING) | TO(EXITING) | TO(VACANT),
    /* it writes its own words, and may undo that it has left */
    [COX_STAGE_LEAVING] = TO(RUNNING) | TO(EXITING) | TO(VACANT),
    [COX_STAGE_EXITING] = TO(DEAD),
    [COX_STAGE_DEAD] = TO(REPORTED),
    [COX_STAGE_REPORTED] = TO(LAUNCHING) | TO(VACANT),
    /* executed; not executed, after another process or the first time */
    [COX_STAGE_LAUNCHING] = TO(STARTING) | TO(REPORTED) | TO(VACANT),
};

void cox_ranks_init(struct cox_rank *ranks, uint32_t rank_count)
{
    for (uint32_t i = 0; i < rank_count; i++) {
        ranks[i] = (struct cox_rank){.previous = {.incarnation = 1}};
        atomic_init(&ranks[i].stage, COX_STAGE_VACANT);
        atomic_init(&ranks[i].incarnation, 1);
    }
}

bool cox_rank_may_move(enum cox_rank_stage from, enum cox_rank_stage to)
{
    return (size_t)from < COX_STAGE_COUNT && (size_t)to < COX_STAGE_COUNT &&
           (moves[from] & (1u << to)) != 0;
}

const char *cox_rank_invariant(const struct cox_rank *rank)
{
    const enum cox_rank_stage stage = cox_rank_stage_of(rank);
    const pid_t pid = cox_rank_pid(rank);
    if ((size_t)stage >= COX_STAGE_COUNT)
        return "its stage is none";
    if (pid == 0 && stage != COX_STAGE_VACANT && stage != COX_STAGE_LAUNCHING)
        return "it has no process";
    if (pid != 0 && stage == COX_STAGE_VACANT)
        return "it is vacant, and has a process";
    if (pid == 0 && atomic_load_explicit(&rank->adopted_pid, memory_order_relaxed) != 0)
        return "a process serves in the place of none";
    if (rank->awaited && !cox_rank_stage_lives(stage) && stage != COX_STAGE_DEAD)
        return "the end of no process is awaited";
    if (!rank->awaited && (stage == COX_STAGE_STARTING || stage == COX_STAGE_RUNNING))
        return "its end is not awaited";
    if ((stage == COX_STAGE_LEAVING) && rank->left_ns == 0)
        return "it leaves since never";
    /* acquire: an incarnation is counted before the restart that made it. */
    const uint32_t restarts = atomic_load_explicit(&rank->restarts, memory_order_acquire);
    if (restarts >= cox_rank_incarnation(rank))
        return "it was restarted more often than it was started";
    return NULL;
}

void cox_rank_move(struct cox_rank *rank, enum cox_rank_stage to)
{
#if COX_TESTING
    /* relaxed: only this thread, which holds the lock, writes it. */
    const uint32_t from = atomic_load_explicit(&rank->stage, memory_order_relaxed);
    COX_ASSERT(cox_rank_may_move((enum cox_rank_stage)from, to));
#endif
    /* relaxed: the store of the stage releases it. */
    if (to == COX_STAGE_EXITING)
        atomic_store_explicit(&rank->exiting_ns, cox_now_ns(), memory_order_relaxed);
    /* release: partner is cox_rank_stage_of. */
    atomic_store_explicit(&rank->stage, to, memory_order_release);
#if COX_TESTING
    COX_ASSERT(cox_rank_invariant(rank) == NULL);
#endif
}
