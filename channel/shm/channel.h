/*
 * channel: one logical channel: its request ring, its reply slots, its gate, and the names of
 * these.
 *
 * The coordinator creates it, and each worker attaches its own rank, by the functions of a mode
 * (channel/attach). request.h, reply.h and gate.h work on the memory that is mapped here.
 *
 * Threads: create, attach and close on one thread.
 * Ownership: the caller owns struct cox_channel; it borrows the control, which must outlive it.
 * Blocks: nothing.
 * If the process dies: names stay until the control region's sweep (control.h).
 */
#ifndef COX_CHANNEL_CHANNEL_H
#define COX_CHANNEL_CHANNEL_H

#include "control.h"
#include "gate.h"
#include "tokens.h"

struct cox_channel {
    enum cox_channel_id id;
    /* borrowed */
    const struct cox_control *control;
    /* not on the error channel */
    struct cox_region request;
    /* base NULL: slots are in the memory of their ranks */
    struct cox_region response;
    /* `request` is part of the control's memory */
    bool lent;
    struct cox_gate gate;
    /* owned, see tokens.h; NULL: the other side stores state words */
    struct cox_tokens *tokens;
};

void cox_channel_close(struct cox_channel *channel); /* names stay; idempotent */

#endif
