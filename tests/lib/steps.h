/*
 * steps: inference requests of a few sequences, as a coordinator sends them in columns.
 *
 * Threads: one. Ownership: the caller's memory; a request lends that of its rows. Blocks:
 * test_step_call, until the step is over.
 */
#ifndef COX_TESTS_LIB_STEPS_H
#define COX_TESTS_LIB_STEPS_H

#include "proto/executor.pb-c.h"
#include "testing.h"

#define STEP_ROW_MAX 8

struct test_row {
    int64_t id;
    uint32_t slot;
    const char *lora;
    /* of the sequence so far; the row is of those from position on */
    const int32_t *tokens;
    uint32_t token_count, position;
    /* The ranks do not have it yet. */
    bool announce;
    const int32_t *blocks;
    uint32_t block_count;
};

struct test_step {
    Coxswain__ExecuteRequest request;
    Coxswain__ExecuteModelRequest model;
    Coxswain__StepDelta delta;
    Coxswain__StepSequence sequences[STEP_ROW_MAX], *announced[STEP_ROW_MAX];
    Coxswain__StepBlockTable tables[STEP_ROW_MAX], *table_pointers[STEP_ROW_MAX];
    uint32_t row_slot[STEP_ROW_MAX], row_position[STEP_ROW_MAX], row_count[STEP_ROW_MAX];
};

/* Without rows. */
void test_step_init(struct test_step *step, uint64_t base, Coxswain__ForwardType forward_type);
void test_step_add(struct test_step *step, const struct test_row *row);
/* From rank 0; *completion is valid before, or zero, and has the tokens after. */
int test_step_call(struct test_group *group, const struct test_step *step, uint64_t deadline_ns,
                   struct test_completion *completion, struct cox_error *err);

#endif
