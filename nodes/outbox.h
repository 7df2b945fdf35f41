/*
 * outbox: what waits to go to one process by a direct connection, in its order, while the caller
 * goes on.
 *
 * A thread of the outbox sends it. It is started with the first message, so that an outbox without
 * messages costs nothing. Processes have an outbox each: one that does not read delays no other.
 *
 * Threads: put and drop on any, also under a lock that `lost` takes.
 * Ownership: options are copied, direct is lent until free. put takes bytes, fd and large.
 * Blocks: put and drop do not. free does until a send that is under way has ended: cox_direct_end
 *   first makes it fail.
 */
#ifndef COX_NODES_OUTBOX_H
#define COX_NODES_OUTBOX_H

#include "nodes/direct/direct.h"
#include "nodes/link/large_request.h"

struct cox_outbox;

struct cox_outbox_options {
    struct cox_direct *direct;
    /* the name of the process, as for cox_direct_send; copied */
    const char *peer;
    struct cox_log log;
    void *context;
    /* lost is told it */
    uint32_t number;
    /* A message was not sent, which is logged. On the outbox's thread. */
    void (*lost)(void *context, uint32_t number);
};

/* Returns 0 or -ENOMEM. */
int cox_outbox_new(const struct cox_outbox_options *options, struct cox_outbox **ret_outbox);
/* Messages that wait are dropped. NULL-safe, returns NULL. */
struct cox_outbox *cox_outbox_free(struct cox_outbox *outbox);
/* The process is dead: drops what waits, and all connections to it and from it (cox_direct_drop). */
void cox_outbox_drop(struct cox_outbox *outbox);
/* Drops what waits. What is being sent goes on. */
void cox_outbox_clear(struct cox_outbox *outbox);
/* Sends bytes, and behind them, if fd is not -1, fd_size bytes of the memory fd. address: as for
 * cox_direct_send; "": it is dropped. Without memory or a thread it is dropped, too, as if it were lost
 * on the way; and if it has more than 64 KiB, and 256 MiB wait already: nobody reads them. */
void cox_outbox_put(struct cox_outbox *outbox, const char *address, uint32_t kind, uint8_t *bytes,
                    size_t size, int fd, uint64_t fd_size);
/* The same, and behind bytes those of a large request, also while they are copied. Dropped if of large
 * requests more than 1 GiB waits already. */
void cox_outbox_put_large(struct cox_outbox *outbox, const char *address, uint32_t kind,
                          uint8_t *bytes, size_t size, struct cox_large_request *large);

#endif
