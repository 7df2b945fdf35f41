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
    test_step_init(&s->own, base, (Coxswain__ForwardType)forward_type);
    s->own.delta.table_count = 2;
}

/* The row of a chat: all of it where it is announced, its last token otherwise. */
void step_row(struct step *s, const struct chat *chat, bool announce)
{
    int32_t *blocks = s->blocks[s->own.delta.n_row_slot];
    for (int32_t b = 0; b < 4; b++)
        blocks[b] = (int32_t)chat->slot * 10 + 100 * (b / 2) + b % 2;
    test_step_add(&s->own, &(struct test_row){.id = chat->id,
                                              .slot = chat->slot,
                                              .tokens = chat->tokens,
                                              .token_count = chat->count,
                                              .position = announce ? 0 : chat->count - 1,
                                              .announce = announce,
                                              .blocks = blocks,
                                              .block_count = 2,
                                              .table_count = 2});
}

/* Runs the step; *c is the caller's to deinit. */
int step_call(struct test_group *g, const struct step *s, uint64_t timeout_ms,
              struct test_completion *c)
{
    return test_step_call(g, &s->own, cox_deadline_after_ms(timeout_ms), c, test_err());
}

int step_submit(struct test_group *g, const struct step *s)
{
    return cox_executor_submit(test_group_executor(g), &s->own.request,
                               SUBMIT_WITH(.deadline_ns = test_patience()), NULL, NULL);
}

static int step_of(struct test_group *g, struct chat *chats, uint32_t count, uint64_t *base,
                   uint64_t timeout_ms)
{
    struct step s;
    OWN_COMPLETION c = {0};
    step_init(&s, *base, *base ? COX_FORWARD_DECODE : COX_FORWARD_PREFILL);
    for (uint32_t i = 0; i < count; i++)
        step_row(&s, &chats[i], *base == 0);
    int r = step_call(g, &s, timeout_ms, &c);
    *base = r == 0 ? c.sequence : 0;
    assert_true(r || c.token_count == count);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        chats[i].tokens[chats[i].count++] = c.tokens[i];
    return r;
}

/* One step of all chats. Returns its status; on success the tokens are appended and *base moves,
 * otherwise *base is 0, so that the next one announces everything. */
int chats_step(struct test_group *g, struct chat *chats, uint64_t *base, uint64_t timeout_ms)
{
    return step_of(g, chats, CHAT_COUNT, base, timeout_ms);
}

/* The same with the first chat alone. */
int chats_step_one(struct test_group *g, struct chat *chats, uint64_t *base)
{
    return step_of(g, chats, 1, base, TEST_PATIENCE_MS);
}
