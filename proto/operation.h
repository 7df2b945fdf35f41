/*
 * operation: what each ExecuteType means: its channel, whether ranks reply, and which. One table
 * for both sides.
 *
 * Threads: any; constant data.
 * Blocks: nothing.
 * If the process dies: nothing is left. Source: the operations table of the executor protocol
 *   (executor.proto holds the numbers).
 */
#ifndef COX_PROTO_OPERATION_H
#define COX_PROTO_OPERATION_H

#include <coxswain/base.h>

struct cox_operation {
    /* "MODEL_INFER" */
    const char *name;
    /* where it travels; finalize goes to every two-way channel */
    enum cox_channel_id channel;
    /* every asked rank replies */
    bool replies;
    /* legacy ranks reply with a payload each, else rank 0 alone has one, which may fill the region
     */
    bool legacy_slotted;
    /* moves the sequence table: cancelled as a whole through void_through */
    bool step;
};

/* NULL for a number that is no ExecuteType. COX_TYPE_OPAQUE is an operation too ("OPAQUE",
 * execute). */
const struct cox_operation *cox_operation_find(uint32_t execute_type);

#endif
