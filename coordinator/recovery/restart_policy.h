/*
 * restart_policy: what a group does when one of its ranks dies.
 *
 * Threads, ownership, blocking: plain values.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_RESTART_POLICY_H
#define COX_COORDINATOR_RESTART_POLICY_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

enum cox_on_death {
    COX_ON_DEATH_FAIL = 0, /* the group has failed */
    COX_ON_DEATH_WAIT,     /* the group waits until a restart is requested */
    /* the dead rank is replaced; in a legacy group every rank is, and that is logged */
    COX_ON_DEATH_RESTART,
    COX_ON_DEATH_RESTART_ALL, /* every rank is replaced */
    COX_ON_DEATH_COUNT,
};
#ifdef COX_INTERNAL
/* "fail", "wait", "restart", "restart-all"; "unknown" outside. Static storage. */
const char *cox_on_death_name(uint32_t on_death);
#endif

/* 0: default. */
struct cox_restart_policy {
    enum cox_on_death on_death;
    /* tolerated deaths within window_ms; one more is a crash loop: the group fails; default 5 */
    uint32_t restart_max;
    /* default 60,000 */
    uint64_t window_ms;
    /* pause before the second attempt, doubled before each further one; default 100 */
    uint64_t backoff_min_ms;
    /* limit of that pause; default 5,000 */
    uint64_t backoff_max_ms;
};

#ifdef __cplusplus
}
#endif

#endif
