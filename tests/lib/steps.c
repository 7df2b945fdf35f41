#include "steps.h"

void test_step_init(struct test_step *step, uint64_t base, Coxswain__ForwardType forward_type)
{
    *step = (struct test_step){
        .request = REQUEST_OF(MODEL_INFER, EXECUTE_MODEL_REQUEST, &step->model),
        .model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT,
        .delta = COXSWAIN__STEP_DELTA__INIT,
    };
    step->model.has_forward_type = 1;
    step->model.forward_type = forward_type;
    step->model.step = &step->delta;
    step->delta.has_base_sequence = step->delta.has_table_count = 1;
    step->delta.base_sequence = base;
    step->delta.table_count = 1;
    step->delta.announced = step->announced;
    step->delta.row_slot = step->row_slot;
    step->delta.row_position = step->row_position;
    step->delta.row_token_count = step->row_count;
}

void test_step_add(struct test_step *step, const struct test_row *row)
{
    Coxswain__StepDelta *delta = &step->delta;
    const size_t i = delta->n_row_slot++;
    assert_true(i < STEP_ROW_MAX);
    delta->n_row_position = delta->n_row_token_count = delta->n_row_slot;
    step->row_slot[i] = row->slot;
    step->row_position[i] = row->position;
    step->row_count[i] = row->token_count - row->position;
    if (!row->announce)
        return;
    Coxswain__StepSequence *sequence = step->announced[delta->n_announced++] = &step->sequences[i];
    coxswain__step_sequence__init(sequence);
    sequence->has_seq_id = sequence->has_slot = 1;
    sequence->seq_id = row->id;
    sequence->slot = row->slot;
    sequence->lora_id = (char *)(uintptr_t)row->lora;
    sequence->n_tokens = row->token_count;
    sequence->tokens = (int32_t *)(uintptr_t)row->tokens;
    sequence->n_tables = row->table_count ? row->table_count : 1;
    sequence->tables = step->table_pointers[i];
    for (size_t t = 0; t < sequence->n_tables; t++) {
        Coxswain__StepBlockTable *table = step->table_pointers[i][t] = &step->tables[i][t];
        coxswain__step_block_table__init(table);
        table->n_blocks = row->block_count;
        table->blocks = (int32_t *)(uintptr_t)row->blocks + t * row->block_count;
    }
}

static void copy(void *context, const struct cox_completion *completion)
{
    test_completion_copy(context, completion);
}

int test_step_call(struct test_group *group, const struct test_step *step, uint64_t deadline_ns,
                   struct test_completion *completion, struct cox_error *err)
{
    test_completion_deinit(completion);
    return cox_executor_call(test_group_executor(group), &step->request,
                             SUBMIT_WITH(.deadline_ns = deadline_ns), copy, completion, err);
}
