/* table_private: what a table is made of, for table.c and tests. */
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
    /* of the steps up to base, and whether the step under way continues them */
    uint64_t chain[COX_STEP_CHAIN_SIZE];
    bool chained;
    /* each row of the step under way has one token and one block table */
    bool single;
    /* digests that the caller has set for the step under way: bits of enum cox_digest */
    uint32_t own_digests;
    uint64_t own_values[COX_DIGEST_COUNT];
    /* between apply and its commit or revert */
    bool pending;
};

#endif
