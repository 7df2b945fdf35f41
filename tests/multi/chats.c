#include "chats.h"

void chats_init(struct chat *chats)
{
    for (uint32_t i = 0; i < CHAT_COUNT; i++) {
        chats[i] = (struct chat){.id = 1000 + i, .slot = 7 * i + 1, .count = 3 + i};
        for (uint32_t t = 0; t < chats[i].count; t++)
            chats[i].tokens[t] = (int32_t)(100 * i + t);
    }
}

void step_init(struct step *s, uint64_t base, int forward_type)
{
    *s = (struct step){
        .request = COXSWAIN__EXECUTE_REQUEST__INIT,
        .model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT,
        .delta = COXSWAIN__STEP_DELTA__INIT,
    };
    s->request.has_execute_type = 1;
    s->request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    s->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    s->request.execute_model_request = &s->model;
    s->model.step = &s->delta;
    s->model.has_forward_type = 1;
    s->model.forward_type = (Coxswain__ForwardType)forward_type;
    s->delta.has_base_sequence = 1;
    s->delta.base_sequence = base;
    s->delta.has_table_count = 1;
    s->delta.table_count = 2;
    s->delta.announced = s->announced;
    s->delta.row_slot = s->row_slot;
    s->delta.row_position = s->row_position;
    s->delta.row_token_count = s->row_count;
}

/* The row of a chat: all of it where it is announced, its last token otherwise. */
void step_row(struct step *s, const struct chat *chat, bool announce)
{
    size_t row = s->delta.n_row_slot++;
    s->delta.n_row_position = s->delta.n_row_token_count = s->delta.n_row_slot;
    s->row_slot[row] = chat->slot;
    s->row_position[row] = announce ? 0 : chat->count - 1;
    s->row_count[row] = announce ? chat->count : 1;
    if (!announce)
        return;
    size_t i = s->delta.n_announced++;
    Coxswain__StepSequence *sequence = &s->sequences[i];
    coxswain__step_sequence__init(sequence);
    s->announced[i] = sequence;
    sequence->has_seq_id = sequence->has_slot = 1;
    sequence->seq_id = chat->id;
    sequence->slot = chat->slot;
    sequence->n_tokens = chat->count;
    sequence->tokens = (int32_t *)(uintptr_t)chat->tokens;
    sequence->n_tables = 2;
    sequence->tables = s->table_pointers[i];
    for (int t = 0; t < 2; t++) {
        coxswain__step_block_table__init(&s->tables[i][t]);
        s->table_pointers[i][t] = &s->tables[i][t];
        s->tables[i][t].n_blocks = 2;
        s->tables[i][t].blocks = &s->blocks[i][2 * t];
        for (int b = 0; b < 2; b++)
            s->blocks[i][2 * t + b] = (int32_t)(chat->slot * 10 + 100 * (uint32_t)t + (uint32_t)b);
    }
}

static void visit_copy(void *context, const struct cox_completion *completion)
{
    test_completion_copy(context, completion);
}

/* Runs the step; *c is the caller's to deinit. */
int step_call(struct test_group *g, const struct step *s, uint64_t timeout_ms,
              struct test_completion *c)
{
    test_completion_deinit(c);
    return cox_executor_call(
        test_group_executor(g), &s->request,
        SUBMIT_WITH(.gather = COX_GATHER_RANK0, .deadline_ns = cox_deadline_after_ms(timeout_ms)),
        visit_copy, c, test_err());
}

int step_submit(struct test_group *g, const struct step *s)
{
    return cox_executor_submit(test_group_executor(g), &s->request,
                               SUBMIT_WITH(.gather = COX_GATHER_RANK0,
                                           .deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS)),
                               NULL, NULL);
}

/* One step of all chats. Returns its status; on success the tokens are appended and *base moves,
 * otherwise *base is 0, so that the next one announces everything. */
int chats_step(struct test_group *g, struct chat *chats, uint64_t *base, uint64_t timeout_ms)
{
    struct step s;
    OWN_COMPLETION c = {0};
    step_init(&s, *base, *base ? COX_FORWARD_DECODE : COX_FORWARD_PREFILL);
    for (uint32_t i = 0; i < CHAT_COUNT; i++)
        step_row(&s, &chats[i], *base == 0);
    int r = step_call(g, &s, timeout_ms, &c);
    *base = r == 0 ? c.sequence : 0;
    if (r == 0) {
        assert_int_equal(c.token_count, CHAT_COUNT);
        for (uint32_t i = 0; i < CHAT_COUNT; i++)
            chats[i].tokens[chats[i].count++] = c.tokens[i];
    }
    return r;
}

/* The same with the first chat alone. */
int chats_step_one(struct test_group *g, struct chat *chats, uint64_t *base)
{
    struct step s;
    OWN_COMPLETION c = {0};
    step_init(&s, *base, *base ? COX_FORWARD_DECODE : COX_FORWARD_PREFILL);
    step_row(&s, &chats[0], *base == 0);
    int r = step_call(g, &s, TEST_PATIENCE_MS, &c);
    *base = r == 0 ? c.sequence : 0;
    if (r == 0)
        chats[0].tokens[chats[0].count++] = c.tokens[0];
    return r;
}
