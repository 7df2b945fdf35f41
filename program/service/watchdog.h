/*
 * watchdog: feeds the service manager's watchdog while the group answers.
 *
 * A thread asks for the group's status at its control socket, as `coxswain status` does, three
 * times per period of the watchdog. It feeds when the reply is there, no rank is stopped by a
 * signal, and no rank is late with a reply whose deadline has passed. A rank that is dead is the
 * policy's matter (--on-death), and a pause is an operator's: both are fed.
 *
 * Without a watchdog in the manager's environment there is no thread.
 *
 * Threads: start and free on one.
 * Ownership: notify and log are borrowed until free.
 * Blocks: free until the request under way has ended, a third of the period at most.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_WATCHDOG_H
#define COX_PROGRAM_WATCHDOG_H

#include "channel/base/idioms.h"
#include "notify.h"

struct cox_watchdog;

/* control_socket: the path. Returns 0, with NULL where there is no watchdog; -ENOMEM; -errno. */
int cox_watchdog_start(const struct cox_notify *notify, const char *control_socket,
                       const struct cox_log *log, struct cox_watchdog **ret_watchdog,
                       struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_watchdog *cox_watchdog_free(struct cox_watchdog *watchdog);
COX_DEFINE_FREEP(struct cox_watchdog, cox_watchdog_free);

#endif
