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
#define STEP_TABLE_MAX 2

/* A request whose body is the caller's: REQUEST_OF(KV_TRANSFER, PULL_KV_REQUEST, &pull). */
#define REQUEST_OF(type, body_case, body)                                                          \
    test_request(COXSWAIN__EXECUTE_TYPE__##type, COXSWAIN__EXECUTE_REQUEST__REQUEST_##body_case,   \
                 body)
static inline Coxswain__ExecuteRequest test_request(Coxswain__ExecuteType type,
                                                    Coxswain__ExecuteRequest__RequestCase body_case,
                                                    void *body)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = type;
    request.request_case = body_case;
    request.pull_kv_request = body; /* of a union of pointers */
    return request;
}

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
    /* each of so many blocks; 0: one table */
    uint32_t table_count;
};

struct test_step {
    Coxswain__ExecuteRequest request;
    Coxswain__ExecuteModelRequest model;
    Coxswain__StepDelta delta;
    Coxswain__StepSequence sequences[STEP_ROW_MAX], *announced[STEP_ROW_MAX];
    Coxswain__StepBlockTable tables[STEP_ROW_MAX][STEP_TABLE_MAX];
    Coxswain__StepBlockTable *table_pointers[STEP_ROW_MAX][STEP_TABLE_MAX];
    uint32_t row_slot[STEP_ROW_MAX], row_position[STEP_ROW_MAX], row_count[STEP_ROW_MAX];
};

/* Without rows. */
void test_step_init(struct test_step *step, uint64_t base, Coxswain__ForwardType forward_type);
void test_step_add(struct test_step *step, const struct test_row *row);
/* From rank 0; *completion is valid before, or zero, and has the tokens after. */
int test_step_call(struct test_group *group, const struct test_step *step, uint64_t deadline_ns,
                   struct test_completion *completion, struct cox_error *err);

#endif
