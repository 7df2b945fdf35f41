/*
 * holder: a process that holds weights for others, so that they outlive who loaded them. It
 * computes nothing, maps nothing, and serves protocol.h on one thread.
 *
 * Threads: one.
 * Blocks: run, until it is ended.
 * If the process dies: weights stay with those who have mapped them, the next process loads its
 *   own, and the next holder of this user begins empty.
 */
#ifndef COX_PROGRAM_WEIGHTS_HOLDER_H
#define COX_PROGRAM_WEIGHTS_HOLDER_H

#include "program/service/notify.h"

/* Holds weights until SIGTERM, SIGINT or SIGHUP, or, without stay, until it has had neither weights
 * nor a connection for 10 s. notify is told when it listens.
 * Returns
 *   0
 *   COX_TAKEN: this user has a holder in this runtime directory; err has its process
 *   COX_DENIED, COX_NOT_FOUND, COX_TOO_LARGE: the runtime directory, as in runtime_dir.h
 *   -errno
 */
int cox_holder_run(bool stay, const struct cox_notify *notify, struct cox_error *err);

#endif
