/* Ranks that do not run the same: what differs, on which ranks, and since when. */
#include "chats.h"

#include <sys/uio.h>

static void step_digests_are(struct test_group *g, const char *sides, uint64_t sequence,
                             uint64_t first, const struct chat *chats, uint64_t base,
                             uint64_t *ret_sequence)
{
    struct step s;
    OWN_COMPLETION c = {0};
    char text[256];
    step_init(&s, base, COX_FORWARD_DECODE);
    step_row(&s, &chats[0], false);
    assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), COX_DIVERGED);
    snprintf(text, sizeof text, "execute sequence %" PRIu64 " (MODEL_INFER)", c.sequence);
    assert_contains(c.text, text);
    assert_contains(c.text, sides);
    snprintf(text, sizeof text,
             "first in step %" PRIu64 ", of the chain that began with step %" PRIu64,
             sequence ? sequence : c.sequence, first);
    assert_contains(c.text, text);
    *ret_sequence = c.sequence;
}

/* Where rank 2 has the first row of its step, and its block table. */
static void addresses_of(struct test_group *g, uint32_t rank, uintptr_t *ret_rows,
                         uintptr_t *ret_blocks)
{
    OWN_COMPLETION c = {0};
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    assert_int_equal(test_call_how(g, &c, &how, "tell at"), 0);
    assert_int_equal(sscanf(c.ranks[rank].bytes, "%" SCNxPTR " %" SCNxPTR, ret_rows, ret_blocks),
                     2);
}

static void bend(struct test_group *g, uint32_t rank, uintptr_t address, const void *bytes,
                 size_t size)
{
    const struct iovec from = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    const struct iovec to = {.iov_base = (void *)address, .iov_len = size};
    const pid_t pid = cox_executor_pid(test_group_executor(g), rank);
    assert_int_equal(process_vm_writev(pid, &from, 1, &to, 1, 0), size);
}

static uint64_t prefill(struct test_group *g, struct chat *chats)
{
    struct step s;
    OWN_COMPLETION c = {0};
    step_init(&s, 0, COX_FORWARD_PREFILL);
    step_row(&s, &chats[0], true);
    assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), 0);
    chats[0].tokens[chats[0].count++] = c.tokens[0];
    const uint64_t base = c.sequence;
    return base;
}

/* One block of rank 2's table changes behind its back. The step that uses it is none, status names
 * the rank, and with base 0 the ranks are equal again. */
TEST(s2_a_rank_with_a_bent_block_table_is_named)
{
    for (uint32_t which = 0; which < 2; which++) { /* of its two blocks */
        struct test_group *g = test_group_start(4, NULL);
        struct cox_executor *executor = test_group_executor(g);
        struct chat chats[CHAT_COUNT];
        chats_init(chats);
        uint64_t base = prefill(g, chats);
        uintptr_t rows, blocks;
        addresses_of(g, 2, &rows, &blocks);
        const int32_t block = 4711;
        bend(g, 2, blocks + which * sizeof block, &block, sizeof block);
        uint64_t sequence;
        step_digests_are(g, "block tables: ranks 0-1,3 have ", 0, base, chats, base, &sequence);
        struct cox_executor_status status;
        struct cox_rank_status ranks[4];
        cox_executor_read_status(executor, &status, ranks);
        assert_contains(ranks[2].last_error, "block tables: ranks 0-1,3 have ");
        assert_contains(ranks[2].last_error, ", rank 2 has ");
        assert_int_equal(ranks[1].last_error[0], '\0');
        assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].stats.divergences, 1);
        /* Whoever goes on regardless is told where it began. */
        uint64_t later;
        step_digests_are(g, "block tables: ranks 0-1,3 have ", sequence, base, chats, sequence,
                         &later);
        prefill(g, chats);
        cox_executor_read_status(executor, &status, ranks);
        assert_int_equal(status.channels[COX_CHANNEL_EXECUTE].stats.divergences, 2);
        test_group_free(g);
    }
}

/* While rank 2 is in its callback, its row gets another id, or another position. */
TEST(s2_a_rank_with_a_bent_row_is_named)
{
    static const struct {
        size_t offset;
        const char *sides;
    } kinds[] = {
        {offsetof(struct cox_batch_row, id), "differ in sequence ids: ranks 0-1 have "},
        {offsetof(struct cox_batch_row, position), "differ in positions: ranks 0-1 have "},
    };
    struct test_pipe *pipe = test_pipe_new();
    OWN_GROUP *g = test_group_start(3, NULL);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        struct chat chats[CHAT_COUNT];
        struct step s;
        OWN_COMPLETION c = {0};
        chats_init(chats);
        uint64_t base = prefill(g, chats);
        uintptr_t rows, blocks;
        addresses_of(g, 2, &rows, &blocks);
        if (k == 0)
            assert_ok(cox_executor_set_handler(test_group_executor(g), COX_CHANNEL_EXECUTE,
                                               test_handler, g));
        assert_int_equal(test_call(g, NULL, "only 2 step block 1 %s", test_pipe_path(pipe)), 0);
        step_init(&s, base, COX_FORWARD_DECODE);
        step_row(&s, &chats[0], false);
        assert_int_equal(step_submit(g, &s), 0);
        test_await_lines(g, 2, "blocked", k + 1);
        const uint32_t value = chats[0].count;
        bend(g, 2, rows + kinds[k].offset, &value, sizeof value);
        test_pipe_release(pipe, 1);
        const struct test_completion *ended = test_await(g, k);
        assert_int_equal(ended->status, COX_DIVERGED);
        assert_contains(ended->text, kinds[k].sides);
        assert_contains(ended->text, ", rank 2 has ");
        assert_null(strstr(ended->text, "block tables"));
        assert_null(strstr(ended->text, "tokens"));
        assert_int_equal(test_call(g, &c, "tell batch"), 0);
    }
}

/* A worker of one's own that knows what must agree. */
GROUP_TEST(s2_a_worker_sets_digests_of_its_own, 2)
{
    struct chat chats[CHAT_COUNT];
    chats_init(chats);
    /* The same on both; of one rank none, in each of the four. */
    uint64_t base = prefill(g, chats);
    for (int which = 0; which < COX_DIGEST_COUNT; which++) {
        assert_int_equal(test_call(g, NULL, "step digest 1 %d 17", which), 0);
        assert_int_equal(chats_step_one(g, chats, &base), 0);
        assert_int_equal(test_call(g, NULL, "only %d step digest 1 %d 0", which % 2, which), 0);
        assert_int_equal(chats_step_one(g, chats, &base), 0);
        base = 0;
        assert_int_equal(chats_step_one(g, chats, &base), 0);
    }
    /* Others: no rank is in the majority, and both are named. */
    assert_int_equal(test_call(g, NULL, "only 1 step digest 1 %d 18", COX_DIGEST_POSITIONS), 0);
    uint64_t sequence;
    step_digests_are(g, "positions: rank 0 has ", 0, base, chats, base, &sequence);
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    cox_executor_read_status(executor, &status, ranks);
    for (uint32_t r = 0; r < 2; r++)
        assert_contains(ranks[r].last_error, "positions: rank 0 has ");
}
