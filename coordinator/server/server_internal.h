/* server_internal: what the library has beyond server.h. Its contract is the same. */
#ifndef COX_COORDINATOR_SERVER_INTERNAL_H
#define COX_COORDINATOR_SERVER_INTERNAL_H

#include <coxswain/server.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * For a process that is about to exit: as cox_executor_abandon.
 *
 * Returns
 *   0
 *   COX_BUSY: start or stop is creating or removing names; try again
 */
int cox_server_abandon(struct cox_server *server);

/* "queued", "success", ...; "unknown" outside. Static storage. */
const char *cox_pull_state_name(enum cox_pull_state state);

#ifdef __cplusplus
}
#endif

#endif
