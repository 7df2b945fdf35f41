/*
 * health: whether a group can work, by its status: every rank is there, alive and not stopped, no
 * order pauses the group, its program's note has no "not_ready", and its steps move: none has taken
 * a third of the time to its deadline without any rank changing its state. A step without a
 * deadline may take as long as it likes, and a group without requests is healthy.
 *
 * Threads: any.
 * Ownership: everything is the caller's.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_HEALTH_H
#define COX_PROGRAM_HEALTH_H

#include <coxswain/base.h>

struct CoxswainControl__StatusReply;

/* Includes the terminating zero; longer text is cut. */
#define COX_HEALTH_SIZE 512

/* True: healthy, and text is "". Otherwise text says why not, and what ends it where a command does:
 * "rank 1 (pid 123) is stopped by a signal (kill -CONT 123)". */
bool cox_health_check(const struct CoxswainControl__StatusReply *status,
                      char text[COX_HEALTH_SIZE]);

#endif
