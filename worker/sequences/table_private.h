/* table_private: what a table is made of, for table.c and its test. */
#ifndef COX_WORKER_TABLE_PRIVATE_H
#define COX_WORKER_TABLE_PRIVATE_H

#include "batch_builder.h"
#include "sequence_store.h"
#include "table.h"

struct cox_table {
    /* the sequences */
    struct cox_sequence_store store;
    /* the view of the step under way */
    struct cox_batch_builder builder;
    const void *void_word;
    const void *cancel_word;
    uint64_t base;
    /* between apply and its commit or revert */
    bool pending;
};

#endif
