/*
 * table_model: a naive reference for worker/table: fixed arrays, searched in line, copied whole for
 * every step. A step is applied to a copy; commit is taking the copy, revert is forgetting it.
 */
#ifndef COX_TESTS_UNIT_TABLE_MODEL_H
#define COX_TESTS_UNIT_TABLE_MODEL_H

#include "worker/sequences/table.h"
#include "table_request.h"

#include <coxswain/worker.h>

#define MODEL_SLOT_MAX 8
#define MODEL_TOKEN_MAX 40

struct model_sequence {
    bool live;
    int64_t id;
    char request_id[200];
    uint32_t token_count;
    int32_t tokens[MODEL_TOKEN_MAX];
    uint32_t announced_count;
    uint32_t table_count;
    uint32_t block_counts[4];
    int32_t blocks[4][MODEL_TOKEN_MAX];
    struct cox_sampling sampling;
};

struct model_row {
    uint32_t slot;
    uint32_t position;
    uint32_t token_count;
    bool emit;
};

struct model {
    uint64_t base;
    struct model_sequence slots[MODEL_SLOT_MAX];
    /* of the last step applied */
    uint64_t sequence;
    uint32_t table_count;
    uint32_t row_count;
    struct model_row rows[MODEL_SLOT_MAX];
    bool finished[MODEL_SLOT_MAX];
};

/* *after is garbage unless 0 is returned. */
int model_apply(const struct model *before, uint64_t sequence, const Request *request,
                struct model *after);
void model_commit(struct model *model, const struct cox_batch_output *outputs);

/* Fail the test on any difference. */
void model_check_batch(const struct model *model, const Request *request,
                       const struct cox_batch *batch);
void model_check_table(const struct model *model, const struct cox_table *table);

/* The index, the bits and the numbers of a table fit its slots, and no step is under way. */
void table_check_invariants(const struct cox_table *table);
/* Everything a table holds, as bytes to compare. Returns the size. */
size_t table_dump(const struct cox_table *table, unsigned char *bytes, size_t capacity);

#endif
