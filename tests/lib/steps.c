#include "steps.h"

void test_step_init(struct test_step *step, uint64_t base, Coxswain__ForwardType forward_type)
{
    *step = (struct test_step){
        .request = COXSWAIN__EXECUTE_REQUEST__INIT,
        .model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT,
        .delta = COXSWAIN__STEP_DELTA__INIT,
    };
    step->request.has_execute_type = 1;
    step->request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    step->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    step->request.execute_model_request = &step->model;
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
    sequence->n_tables = 1;
    sequence->tables = &step->table_pointers[i];
    step->table_pointers[i] = &step->tables[i];
    coxswain__step_block_table__init(&step->tables[i]);
    step->tables[i].n_blocks = row->block_count;
    step->tables[i].blocks = (int32_t *)(uintptr_t)row->blocks;
}

static void copy(void *context, const struct cox_completion *completion)
{
    test_completion_copy(context, completion);
}

int test_step_call(struct test_group *group, const struct test_step *step, uint64_t deadline_ns,
                   struct test_completion *completion, struct cox_error *err)
{
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_RANK0,
                                               .deadline_ns = deadline_ns};
    test_completion_deinit(completion);
    return cox_executor_call(test_group_executor(group), &step->request, &options, copy, completion,
                             err);
}
