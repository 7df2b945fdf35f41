/*
 * link_state: the state of a link to the KV blocks of another group. A rank keeps one per cluster
 * that it reads from (engine/rank/links.h); the coordinator merges the states of its ranks.
 *
 *     WAITING -(an attach begins)-> RUNNING -(attached)-> SUCCESS -(the owner dies)-> FAILED
 *        |                             |                     |
 *        '---(refused, no layout)------'---------------------'-(layouts differ)----> FAILED
 *
 * A failed link stays failed; linking again creates a new link. The numbers are those of the
 * control protocol (LinkState.state).
 */
#ifndef COX_PROTO_LINK_STATE_H
#define COX_PROTO_LINK_STATE_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

enum cox_link_state {
    COX_LINK_WAITING = 0,
    COX_LINK_RUNNING,
    COX_LINK_SUCCESS,
    COX_LINK_FAILED,
};

/* "waiting", "running", "success", "failed"; "unknown" outside. Static storage. */
static inline const char *cox_link_state_name(uint32_t state)
{
    static const char *const names[] = {"waiting", "running", "success", "failed"};
    return state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

/* The table of allowed state changes. */
static inline bool cox_link_may_move(enum cox_link_state from, enum cox_link_state to)
{
    return to == COX_LINK_FAILED ? from != COX_LINK_FAILED
                                 : (uint32_t)to == (uint32_t)from + 1 && from < COX_LINK_SUCCESS;
}

/* Merges the states a and b of two ranks: FAILED if either is, else RUNNING if either is. SUCCESS
 * only if both are, else WAITING. */
static inline enum cox_link_state cox_link_merge(enum cox_link_state a, enum cox_link_state b)
{
    if (a == COX_LINK_FAILED || b == COX_LINK_FAILED)
        return COX_LINK_FAILED;
    if (a == COX_LINK_RUNNING || b == COX_LINK_RUNNING)
        return COX_LINK_RUNNING;
    return a < b ? a : b;
}

#ifdef __cplusplus
}
#endif

#endif
