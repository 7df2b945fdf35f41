/* server_internal: what the library has beyond server.h. Its contract is the same. */
#ifndef COX_COORDINATOR_SERVER_INTERNAL_H
#define COX_COORDINATOR_SERVER_INTERNAL_H

#include <coxswain/server.h>

/*
 * For a process that is about to exit: as cox_executor_abandon.
 *
 * Returns
 *   0
 *   COX_BUSY: start or stop is creating or removing names; try again
 */
int cox_server_abandon(struct cox_server *server);
/* The ranks' replies to the init, merged; all zero without an init. Lent until free. */
const struct cox_init_summary *cox_server_init_summary(const struct cox_server *server);
/* From now on await_recovery returns COX_CLOSED at once. */
void cox_server_cancel_recovery(struct cox_server *server);

/* "queued", "success", ...; "unknown" outside. Static storage. */
const char *cox_pull_state_name(enum cox_pull_state state);

#endif
