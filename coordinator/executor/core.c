/* core: what is known of an executor, for the files of this folder and for its host. */
#include "core.h"

#include "channel/base/idioms.h"
#include "executor_internal.h"

const char *cox_executor_name(const struct cox_executor *executor)
{
    /* acquire: the name; partner: cox_executor_take_name. */
    bool renamed = atomic_load_explicit(&executor->renamed, memory_order_acquire);
    return renamed ? executor->other_name : executor->name;
}

uint32_t cox_executor_rank_count(const struct cox_executor *executor)
{
    return executor->geometry.rank_count;
}

const struct cox_attach_limits *cox_executor_limits(const struct cox_executor *executor)
{
    return &executor->geometry.mode->limits;
}

pid_t cox_executor_pid(const struct cox_executor *executor, uint32_t rank)
{
    COX_ASSERT(rank < executor->geometry.rank_count);
    return cox_rank_pid(&executor->ranks[rank]);
}

pid_t cox_executor_serving_pid(const struct cox_executor *executor, uint32_t rank)
{
    COX_ASSERT(rank < executor->geometry.rank_count);
    return cox_rank_serving_pid(&executor->ranks[rank]);
}

bool cox_executor_node(struct cox_executor *executor, uint32_t rank, char *buffer,
                       size_t buffer_size)
{
    return cox_supervisor_node(executor->supervisor, rank, buffer, buffer_size);
}

const char *cox_executor_socket(const struct cox_executor *executor)
{
    return executor->control_socket ? cox_control_socket_path(executor->control_socket) : NULL;
}

uint64_t cox_executor_epoch(const struct cox_executor *executor)
{
    /* relaxed: each grows before the lock is released under which a step can be published next. */
    uint64_t epoch =
        1 + atomic_load_explicit(&executor->rank_group_incarnation, memory_order_relaxed);
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        epoch += atomic_load_explicit(&executor->ranks[rank].restarts, memory_order_relaxed);
    return epoch;
}
