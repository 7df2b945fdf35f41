#include "executor_internal.h"
#include "operations.h"
#include <signal.h>
#include <stdlib.h>
int cox_executor_kill(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    int r = cox_supervisor_signal(executor->supervisor, rank, SIGKILL);
    return r == COX_PEER_DEAD || r == 0 ? 0 : cox_fail(err, r, "kill");
}
int cox_executor_restart_all(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    int r = 0;
    for (uint32_t k = 0; k < executor->geometry.rank_count; k++) {
        cox_executor_kill(executor, k, NULL);
        cox_supervisor_await_end(executor->supervisor, k, deadline_ns, NULL);
    }
    for (uint32_t k = 0; !r && k < executor->geometry.rank_count; k++)
        r = cox_executor_restart(executor, k, deadline_ns, err);
    return r;
}
