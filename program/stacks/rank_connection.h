/*
 * rank_connection: the helper's part of stack_protocol.h.
 *
 * Threads: one. A forked child may ask on the connection that it inherits; then the parent closes
 *   it, and opens another.
 * Ownership: the struct has the fd and the mapping.
 * Blocks: open and ask, until their deadlines.
 * If the process dies: the rank sees the end of the connection, and is not affected.
 */
#ifndef COX_PROGRAM_RANK_CONNECTION_H
#define COX_PROGRAM_RANK_CONNECTION_H

#include "stack_copy.h"

#include <sys/types.h>

struct cox_rank_connection {
    pid_t pid;
    /* -1: none */
    int fd;
};

/* Rings, and takes the rank's connection. Returns 0; COX_UNSUPPORTED: no coordinator has started
 * this process; COX_NOT_FOUND: the rank has no doorbell; COX_CORRUPT: it is none; COX_TIMEOUT: the
 * rank does not come; -errno. */
int cox_rank_connection_open(struct cox_rank_connection *connection, pid_t pid,
                             uint64_t deadline_ns);
void cox_rank_connection_close(struct cox_rank_connection *connection); /* idempotent */
/* Asks for what the flags (enum cox_stack_wanted) say, and waits; all that comes is checked. Only
 * system calls. Text goes to copy->text, and threads to copy->threads. Returns 0; COX_TIMEOUT;
 * COX_CORRUPT; COX_CLOSED: there is no connection, or it has ended; -errno. */
int cox_rank_connection_ask(struct cox_rank_connection *connection, uint32_t flags,
                            uint64_t deadline_ns, struct cox_stack_copy *copy);
/* Asks for the dump of PyTorch's flight recorder, and waits. *ret_text, with a zero at its end, is
 * the caller's, of malloc; untouched unless *ret_torch is COX_STACK_TORCH_THERE. Returns 0;
 * COX_TIMEOUT; COX_CORRUPT; COX_CLOSED; -ENOMEM; -errno. */
int cox_rank_connection_ask_torch(struct cox_rank_connection *connection, uint64_t deadline_ns,
                                  enum cox_stack_torch *ret_torch, char **ret_text);

#endif
