/*
 * operation: what each ExecuteType means: its channel, whether it is answered, and by whom. One
 * table for both sides.
 *
 * Threads: any; constant data.
 * Blocks: nothing.
 * If the process dies: nothing is left. Source: the operations table of the executor protocol
 *   (executor.proto holds the numbers).
 */
#ifndef COX_PROTO_OPERATION_H
#define COX_PROTO_OPERATION_H

#include "../channel/base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_operation {
    const char *name;            /* "MODEL_INFER" */
    enum cox_channel_id channel; /* where it travels; finalize goes to every two-way channel */
    bool replies;                /* every asked rank answers */
    bool legacy_slotted; /* legacy ranks answer with a payload each, else rank 0 alone has one,
                          * which may fill the region */
    bool step;           /* moves the sequence table: given up as a whole through void_through */
};

/* NULL for a number that is no ExecuteType. COX_TYPE_OPAQUE is an operation too ("OPAQUE",
 * execute). */
COX_PUBLIC const struct cox_operation *cox_operation_find(uint32_t execute_type);

#ifdef __cplusplus
}
#endif

#endif
