/* table_fixture: one table under test, and steps that it applies, refuses or reverts. */
#ifndef COX_TESTS_TABLE_FIXTURE_H
#define COX_TESTS_TABLE_FIXTURE_H

#include "worker/sequences/table_private.h"
#include "table_request.h"
#include "tests/lib/test.h"

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

/* ---- a table under test ---- */

extern const int32_t numbers[16];

struct fixture {
    struct cox_table *table;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    struct cox_error err;
    /* of the last step tried */
    uint64_t sequence;
};

extern struct fixture f;

extern unsigned char dump_before[1 << 20];
extern unsigned char dump_after[1 << 20];

void table_start(uint32_t sequence_count_max, uint32_t token_count_max);

int table_setup(void **state);

int table_teardown(void **state);

int apply(const Request *request);

/* Applies and commits; row i emits first_token + i. */
void advance(const Request *request, int32_t first_token);

/* The step is refused with this status and leaves every byte alone. */
void refuse(const Request *request, int status);

Request *packed(uint32_t forward_type);

/* Sequences 100 and 101 in slots 0 and 3: prompts of 5 and 3 tokens, blocks {7, 8} and {9},
 * computed. Known are 6 and 4 tokens then. */
void two_sequences(void);

void check_tokens(uint32_t slot, const int32_t *tokens, uint32_t count);

/* ---- the nested form ---- */

Metadata *nested_prompt(Request *request, const char *request_id, int64_t id, size_t token_count,
                        size_t block_count);

#define TEST(name) TEST_WITH(name, table_setup, table_teardown)

#endif
