/*
 * notify: messages to the service manager that started this process: datagrams of "NAME=VALUE"
 * lines to the socket in NOTIFY_SOCKET, as in sd_notify(3).
 *
 * Threads: take before any other thread exists, since it changes the environment; send from any.
 * Ownership: the struct is the caller's.
 * Blocks: send, 5 s at most, if the manager does not read.
 * If the process dies: the manager sees it as its child.
 */
#ifndef COX_PROGRAM_NOTIFY_H
#define COX_PROGRAM_NOTIFY_H

#include <coxswain/base.h>

struct cox_notify {
    /* -1: nobody is told */
    int fd;
    /* the manager ends the service after so long without "WATCHDOG=1"; 0: never */
    uint64_t watchdog_ns;
};

#define COX_NOTIFY_NONE                                                                            \
    {                                                                                              \
        .fd = -1                                                                                   \
    }

/*
 * Takes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of the environment, so that no worker
 * speaks for the service. Without NOTIFY_SOCKET, send does nothing.
 *
 * Returns
 *   0
 *   COX_INVALID: NOTIFY_SOCKET is no address of a socket
 *   -errno
 */
int cox_notify_take(struct cox_notify *notify, struct cox_error *err);
void cox_notify_deinit(struct cox_notify *notify); /* idempotent; a COX_NOTIFY_NONE is fine */
/* A message that cannot be sent is lost. */
void cox_notify_send(const struct cox_notify *notify, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
