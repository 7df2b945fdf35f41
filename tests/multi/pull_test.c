/*
 * KV blocks pulled between two groups of the reference model, each rank from the one there that has
 * its number: rows M10, M11 and P9. What the workers say is looked at rank by rank.
 */
#include "channel/base/fault.h"
#include "channel/kv/kv_internal.h"
#include "proto/executor.pb-c.h"
#include "kv_group.h"

#define CODE(name) COXSWAIN__PDERROR_CODE__##name
#define ROLE(name) COXSWAIN__PDROLE__##name##_ROLE
#define STEP_COUNT 8u

static const int32_t prompt_blocks[] = {2, 4, -1};
static const int32_t decode_blocks[] = {1, 8, 3, 5, -1};
static const int32_t elsewhere[] = {10, 11, -1};

/* The prompt is in blocks 2 and 4 of A, as sequence 7, and B is linked to it as "A", epoch 1. */
struct pair {
    struct kv_group a, b;
    struct kv_sequence s;
};

static void pair_start(struct pair *pair, uint32_t rank_count)
{
    const struct kv_options options = {.rank_count = rank_count};
    kv_start(&pair->a, &options);
    kv_start(&pair->b, &options);
    kv_link_all(&pair->b, &pair->a, "A", 1);
    kv_sequence(&pair->s, 7, prompt_blocks);
    kv_step(&pair->a, &pair->s, 0, true, -1);
}

static void pair_stop(struct pair *pair)
{
    kv_stop(&pair->b);
    kv_stop(&pair->a);
}

/* A test over it. */
#define PAIR_TEST(name)                                                                            \
    static void name##_in(struct pair *pair);                                                      \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct pair made;                                                                          \
        pair_start(&made, 2);                                                                      \
        name##_in(&made);                                                                          \
        pair_stop(&made);                                                                          \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct pair *pair)

/* Of sequence 7 there into sequence 9 here. */
static struct kv_pull pull_of(const char *id)
{
    return (struct kv_pull){.id = id,
                            .cluster = "A",
                            .from = {2, 4},
                            .to = {1, 8},
                            .from_count = 2,
                            .to_count = 2,
                            .from_sequence = 7,
                            .to_sequence = 9,
                            .epoch = 1};
}

static void expect_pulled(struct pair *pair, const char *id)
{
    const struct kv_pull pull = pull_of(id);
    kv_expect_pull(&pair->b, &pull, 0, CODE(SUCCESS), "");
}

static void expect_refused(struct pair *pair, const struct kv_pull *pull, int status,
                           const char *text)
{
    kv_expect_pull(&pair->b, pull, status, CODE(PD_PULL_KV_ERROR), text);
}

static void expect_taken(struct pair *pair, const struct kv_pull *pull)
{
    kv_expect_pull(&pair->b, pull, 0, CODE(SUCCESS), "");
}

/* A step of sequence 8 in A, in these blocks. */
static void step_other(struct pair *pair, const int32_t *blocks, int finished)
{
    struct kv_sequence other;
    kv_sequence(&other, 8, blocks);
    other.slot = 1;
    kv_step(&pair->a, &other, 0, true, finished);
}

/* Sequence 7 in A, computed anew. */
static void step_anew(struct pair *pair, const int32_t *blocks)
{
    kv_sequence(&pair->s, 7, blocks);
    pair->a.base = 0;
    kv_step(&pair->a, &pair->s, 0, true, -1);
}

/* Bits, not values. */
static void expect_same_bits(const struct kv_sequence *a, const struct kv_sequence *b)
{
    assert_int_equal(a->token_count, b->token_count);
    assert_memory_equal(a->tokens, b->tokens, sizeof a->tokens);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
}

static void reference_of(struct kv_sequence *s, uint32_t rank_count)
{
    struct kv_group g;
    kv_start(&g, &(struct kv_options){.rank_count = rank_count});
    kv_sequence(s, 7, decode_blocks);
    kv_step(&g, s, 0, true, -1);
    kv_decode(&g, s, STEP_COUNT);
    kv_stop(&g);
}

/* B continues with what it has pulled. */
static void expect_decodes(struct pair *pair, const struct kv_sequence *reference, int finished)
{
    struct kv_sequence t = pair->s;
    t.id = 9;
    memset(t.blocks, 0, sizeof t.blocks);
    for (t.block_count = 0; decode_blocks[t.block_count] >= 0; t.block_count++)
        t.blocks[t.block_count] = decode_blocks[t.block_count];
    kv_step(&pair->b, &t, KV_PROMPT_LENGTH, true, finished);
    kv_decode(&pair->b, &t, STEP_COUNT - 1);
    expect_same_bits(&t, reference);
}

TEST(m11_pulled_blocks_decode_to_the_same_bits)
{
    for (uint32_t n = 1; n <= 4; n *= 2) {
        struct kv_sequence reference;
        struct pair pair;
        reference_of(&reference, n);
        pair_start(&pair, n);
        expect_pulled(&pair, "r1");
        expect_decodes(&pair, &reference, -1);
        pair_stop(&pair);
    }
}

/* Without our fields of a request: the blocks are pulled unchecked, except those without a user. */
PAIR_TEST(m11_a_pull_without_sequences_takes_the_blocks_as_they_are)
{
    struct kv_sequence reference;
    struct kv_pull pull = pull_of("r1");
    reference_of(&reference, 2);
    pull.from_sequence = pull.to_sequence = 0;
    pull.epoch = 0;
    expect_taken(pair, &pull);
    expect_decodes(pair, &reference, -1);
    pull.from[0] = 11;
    expect_refused(pair, &pull, COX_STALE, "A: block 11 belongs to no sequence");
}

PAIR_TEST(m11_partial_success_is_kept)
{
    struct kv_sequence reference;
    struct kv_replies replies;
    struct kv_pull pulls[3] = {pull_of("foreign"), pull_of("good"), pull_of("unknown")};
    reference_of(&reference, 2);
    pulls[0].from_sequence = 8;
    pulls[0].to[0] = 12;
    pulls[0].to[1] = 13;
    pulls[2].cluster = "C";
    kv_pull(&pair->b, pulls, 3, 0, &replies);
    assert_int_equal(replies.status, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        const struct kv_reply *a = replies.ranks[rank];
        assert_int_equal(a[0].code, CODE(PD_PULL_KV_ERROR));
        assert_int_equal(a[0].status, COX_STALE);
        assert_int_equal(a[1].code, CODE(SUCCESS));
        assert_int_equal(a[1].status, 0);
        assert_int_equal(a[1].bytes, 2 * pair->a.pools[rank].layout.block_bytes);
        assert_int_equal(a[2].code, CODE(PD_PULL_KV_UNKNOWN_ERROR));
        assert_int_equal(a[2].status, COX_NOT_FOUND);
    }
    expect_decodes(pair, &reference, -1);
}

PAIR_TEST(m11_tables_of_several_managers_are_all_copied)
{
    struct kv_sequence reference;
    struct kv_replies replies;
    struct kv_pull pull = pull_of("r1");
    reference_of(&reference, 2);
    pull.table_count = 2;
    kv_pull(&pair->b, &pull, 1, 0, &replies);
    assert_int_equal(replies.ranks[0][0].status, 0);
    assert_int_equal(replies.ranks[1][0].bytes, 2 * pair->a.pools[1].layout.block_bytes);
    expect_decodes(pair, &reference, -1);
    /* Two tables of 1 and 1 there, of 1 and 2 here. */
    pull.to_count = 3;
    pull.to[2] = 12;
    expect_refused(pair, &pull, COX_INVALID, "block table 1 has 1 blocks there and 2 here");
    pull.table_count = 6;
    expect_refused(pair, &pull, COX_TOO_LARGE, "6 block tables: at most 4");
}

/* ---- what is refused ---- */

PAIR_TEST(p9_pulls_that_name_what_is_not_there_are_refused)
{
    struct kv_pull pull;

    pull = pull_of("unknown");
    pull.cluster = "nowhere";
    kv_expect_pull(&pair->b, &pull, COX_NOT_FOUND, CODE(PD_PULL_KV_UNKNOWN_ERROR), "nowhere");
    pull = pull_of("epoch");
    pull.epoch = 2;
    expect_refused(pair, &pull, COX_STALE, "linked in epoch 1, and the pull is for epoch 2");
    pull = pull_of("source");
    pull.from[1] = KV_BLOCK_COUNT;
    expect_refused(pair, &pull, COX_INVALID, "block 16 of A does not exist; there are 16");
    pull = pull_of("destination");
    pull.to[0] = KV_BLOCK_COUNT;
    expect_refused(pair, &pull, COX_INVALID, "KV block 16 does not exist; there are 16");
    pull = pull_of("negative");
    pull.from[0] = -1;
    expect_refused(pair, &pull, COX_INVALID, "such blocks do not exist");
    pull = pull_of("huge");
    pull.to[1] = INT64_C(1) << 40;
    expect_refused(pair, &pull, COX_INVALID, "such blocks do not exist");
    pull = pull_of("twice");
    pull.to[0] = pull.to[1];
    expect_refused(pair, &pull, COX_INVALID, "KV block 8 is a destination twice");
    pull = pull_of("uneven");
    pull.to_count = 1;
    expect_refused(pair, &pull, COX_INVALID, "block table 0 has 2 blocks there and 1 here");
    pull = pull_of("empty");
    pull.from_count = pull.to_count = 0;
    expect_refused(pair, &pull, COX_INVALID, "block tables of 0 blocks");

    /* All of that has done nothing. */
    expect_pulled(pair, "r1");
}

PAIR_TEST(p9_blocks_of_another_sequence_are_stale)
{
    static const int32_t reused[] = {2, 6, -1};
    struct kv_pull pull;

    pull = pull_of("foreign");
    pull.from_sequence = 8;
    expect_refused(pair, &pull, COX_STALE, "A: block 2 belongs to another sequence");
    /* Block 6 was never written. */
    pull = pull_of("unwritten");
    pull.from[1] = 6;
    expect_refused(pair, &pull, COX_STALE, "A: block 6 belongs to another sequence, or to none");

    /* Block 2 is another sequence's now. */
    step_other(pair, reused, -1);
    pull = pull_of("reused");
    expect_refused(pair, &pull, COX_STALE, "A: block 2 belongs to another sequence");
    pull.from_sequence = 8;
    pull.from[1] = 6;
    expect_taken(pair, &pull);
}

PAIR_TEST(p9_blocks_of_a_sequence_that_was_cleaned_up_are_stale)
{
    const int64_t id = 7;
    const struct kv_pull pull = pull_of("r2");
    expect_pulled(pair, "r1");
    assert_ok(cox_executor_cleanup(test_group_executor(pair->a.group), &id, 1, kv_patience(),
                                   test_err()));
    /* It has no reply: a call on the same channel is behind it. */
    kv_arm(&pair->a, 0, "");
    kv_arm(&pair->a, 1, "");
    expect_refused(pair, &pull, COX_STALE, "belongs to another sequence, or to none");
}

PAIR_TEST(p9_blocks_of_a_sequence_that_has_finished_are_stale)
{
    const struct kv_pull pull = pull_of("r2");
    expect_pulled(pair, "r1");
    step_other(pair, elsewhere, 0);
    expect_refused(pair, &pull, COX_STALE, "belongs to another sequence, or to none");
}

/* A sequence that is computed anew has nothing of what it had before. */
PAIR_TEST(p9_blocks_of_a_sequence_that_began_anew_are_stale)
{
    struct kv_pull pull = pull_of("r2");
    step_anew(pair, elsewhere);
    expect_refused(pair, &pull, COX_STALE, "belongs to another sequence, or to none");
    pull.from[0] = 10;
    pull.from[1] = 11;
    expect_taken(pair, &pull);
}

/* An init, also one that is said again, forgets all; a reinit as well. What others know of the pool
 * holds. */
PAIR_TEST(p9_after_init_and_reinit_all_is_stale_and_the_link_holds)
{
    struct cox_recover_result results[2];
    const struct kv_pull pull = pull_of("r2");
    struct kv_sequence reference;
    reference_of(&reference, 2);
    for (int way = 0; way < 2; way++) {
        struct cox_executor *a = test_group_executor(pair->a.group);
        if (way == 0)
            kv_init(&pair->a, true);
        for (int c = COX_RECOVER_PAUSE; way == 1 && c <= COX_RECOVER_START; c++)
            if (c != COX_RECOVER_PAUSE_NET &&
                cox_executor_recover(a, (enum cox_recover_command)c, kv_patience(), results,
                                     test_err()))
                fail_msg("%s", test_error.text);
        pair->a.base = 0;
        expect_refused(pair, &pull, COX_STALE, "belongs to another sequence, or to none");
        step_anew(pair, prompt_blocks);
        expect_pulled(pair, "r1");
        expect_decodes(pair, &reference, way == 0 ? -1 : 0);
    }
}

/* ---- deadline, lease, cancel, and what else ends a pull ---- */

PAIR_TEST(p9_a_deadline_or_lease_that_is_over_refuses)
{
    struct kv_pull pull;
    pull = pull_of("deadline");
    pull.deadline_ns = cox_now_ns();
    expect_refused(pair, &pull, COX_TIMEOUT, "its deadline has passed");
    pull = pull_of("lease");
    pull.lease_ns = cox_now_ns();
    expect_refused(pair, &pull, COX_STALE, "the lease of A on the blocks has expired");
    pull = pull_of("both in time");
    pull.lease_ns = pull.deadline_ns = kv_patience();
    expect_taken(pair, &pull);
}

/* Copies a block. Returns as cox_kv_view_copy; user COX_KV_UNUSED: any user's. */
static int copied(const struct cox_kv_view *view, int64_t block, uint64_t user)
{
    void *bytes = malloc(cox_kv_view_info(view).block_size);
    assert_non_null(bytes);
    const int r = cox_kv_view_copy(view, (uint32_t)block, user, 0, bytes, NULL);
    free(bytes);
    return r;
}

#if COX_TESTING

/* A pull that every rank of B is running, on a thread of its own: it has copied one block, and
 * continues when released. */
struct waiting {
    struct pair *pair;
    struct kv_pull pull;
    uint64_t timeout_ms;
    struct kv_replies replies;
    pthread_t thread;
};

static void *waiting_main(void *argument)
{
    struct waiting *w = argument;
    kv_pull(&w->pair->b, &w->pull, 1, w->timeout_ms, &w->replies);
    return NULL;
}

static void waiting_start(struct waiting *w, struct pair *pair, struct kv_pull pull,
                          uint64_t timeout_ms)
{
    const uint64_t until_ns = kv_patience();
    char plan[32];
    *w = (struct waiting){.pair = pair, .pull = pull, .timeout_ms = timeout_ms};
    for (uint32_t rank = 0; rank < pair->b.rank_count; rank++) {
        snprintf(plan, sizeof plan, "pull.copied:hold:%" PRIu32, rank);
        kv_arm(&pair->b, rank, plan);
    }
    w->thread = test_thread(waiting_main, w);
    /* They have begun once the destination has no user; a pause fails a pull that has not begun in
     * a rank as a whole. */
    for (uint32_t rank = 0; rank < pair->b.rank_count; rank++) {
        struct cox_kv_view *view = kv_attach(&pair->b, rank);
        while (copied(view, pull.to[1], COX_KV_UNUSED) != COX_STALE)
            if (cox_now_ns() > until_ns)
                fail_msg("rank %u does not begin to pull '%s'", rank, pull.id);
        cox_kv_view_free(view);
    }
}

static void waiting_let(struct waiting *w)
{
    for (uint32_t rank = 0; rank < w->pair->b.rank_count; rank++)
        kv_arm(&w->pair->b, rank, "");
}

/* All ranks have this result. */
static void waiting_end(struct waiting *w, int status, const char *text)
{
    assert_int_equal(pthread_join(w->thread, NULL), 0);
    for (uint32_t rank = 0; rank < w->pair->b.rank_count; rank++) {
        const struct kv_reply *a = &w->replies.ranks[rank][0];
        if (w->replies.status || a->status != status || !strstr(a->text, text))
            fail_msg("rank %u: expected %s, '%s'; got %d, %s, '%s'", rank, cox_status_text(status),
                     text, w->replies.status, cox_status_text(a->status), a->text);
    }
}

/* Once it is let go on. */
static void waiting_expect(struct waiting *w, int status, const char *text)
{
    waiting_let(w);
    waiting_end(w, status, text);
}

/* Something of B's own, so that its user shows whether it is pulled over. */
static void give_blocks(struct pair *pair)
{
    expect_pulled(pair, "first");
}

PAIR_TEST(p9_a_pull_ends_at_its_deadline_while_it_waits)
{
    struct waiting w;
    struct kv_pull pull = pull_of("r2");
    give_blocks(pair);
    pull.deadline_ns = cox_deadline_after_ms(1000);
    waiting_start(&w, pair, pull, 0);
    while (cox_now_ns() < pull.deadline_ns)
        ;
    waiting_expect(&w, COX_TIMEOUT, "its deadline has passed");
    pull.id = "r3";
    pull.deadline_ns = 0;
    expect_pulled(pair, "r4");
}

static void cancel(struct pair *pair, const char *id)
{
    kv_link(&pair->b, NULL, &(struct kv_link){.cluster = "A", .role = -1, .cancelled = id});
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_string_equal(kv_link_state(&pair->b, rank, "A"), "success"); /* behind it */
}

PAIR_TEST(p9_a_pull_is_cancelled_while_it_waits_and_before_it_comes)
{
    struct waiting w;
    give_blocks(pair);
    waiting_start(&w, pair, pull_of("r2"), 0);
    cancel(pair, "other");
    cancel(pair, "r2");
    waiting_expect(&w, COX_ABORTED, "cancelled");

    cancel(pair, "r3");
    const struct kv_pull pull = pull_of("r3");
    expect_refused(pair, &pull, COX_ABORTED, "cancelled before it began");
    /* It was for one pull. */
    expect_pulled(pair, "r3");
}

PAIR_TEST(p9_unlinking_and_linking_anew_end_a_pull_that_waits)
{
    struct waiting w;
    give_blocks(pair);
    waiting_start(&w, pair, pull_of("r2"), 0);
    kv_link_all(&pair->b, &pair->a, "A", 2);
    waiting_expect(&w, COX_STALE, "A was linked again meanwhile");

    struct kv_pull pull = pull_of("r3");
    pull.epoch = 2;
    expect_taken(pair, &pull);
    waiting_start(&w, pair, pull, 0);
    kv_link(&pair->b, &pair->a, &(struct kv_link){.cluster = "A", .unlink = true, .role = -1});
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_string_equal(kv_link_state(&pair->b, rank, "A"), "");
    waiting_expect(&w, COX_CLOSED, "A was unlinked meanwhile");
    pull.id = "r4";
    kv_expect_pull(&pair->b, &pull, COX_NOT_FOUND, CODE(PD_PULL_KV_UNKNOWN_ERROR), "no link to A");
}

static int try_recover(struct pair *pair, enum cox_recover_command command, struct cox_error *err)
{
    struct cox_recover_result results[2];
    return cox_executor_recover(test_group_executor(pair->b.group), command, kv_patience(), results,
                                err);
}

static void recover(struct pair *pair, enum cox_recover_command command)
{
    assert_ok(try_recover(pair, command, test_err()));
}

/* A clear does not end before the pull does: the first one, while the pull is held, says so. */
PAIR_TEST(p9_clear_ends_a_pull_and_so_does_pause)
{
    struct waiting w;
    give_blocks(pair);
    waiting_start(&w, pair, pull_of("r2"), 0);
    assert_int_not_equal(try_recover(pair, COX_RECOVER_CLEAR, test_err()), 0);
    assert_contains(test_error.text, "did not end in time");
    waiting_expect(&w, COX_ABORTED, "");
    recover(pair, COX_RECOVER_CLEAR);
    expect_pulled(pair, "r3");

    /* Once it is to come out, the worker lets it go on (kv_group.c). */
    waiting_start(&w, pair, pull_of("r4"), 0);
    recover(pair, COX_RECOVER_PAUSE_NET);
    waiting_end(&w, COX_ABORTED, "");
    recover(pair, COX_RECOVER_START);
    expect_pulled(pair, "r5");
}

/* The coordinator gives the transfer up: the rank is free for the next one once it is let. */
PAIR_TEST(p9_a_pull_without_a_waiter_ends)
{
    struct waiting w;
    give_blocks(pair);
    waiting_start(&w, pair, pull_of("r2"), 1000);
    assert_int_equal(pthread_join(w.thread, NULL), 0);
    assert_int_equal(w.replies.status, COX_TIMEOUT);
    waiting_let(&w);
    expect_pulled(pair, "r3");
    /* The first one came out before, and has given nothing. */
}

#endif

/* The blocks that a failed pull has written have no user. */
PAIR_TEST(p9_the_destination_of_a_failed_pull_has_no_user)
{
    struct kv_pull pull = pull_of("r2");
    expect_pulled(pair, "r1");
    struct cox_kv_view *view = kv_attach(&pair->b, 0);
    assert_int_equal(copied(view, 1, 9), 0);
    pull.from[1] = 6; /* the first block is copied, the second is not there */
    expect_refused(pair, &pull, COX_STALE, "");
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(copied(view, pull.to[i], COX_KV_UNUSED), COX_STALE);
    cox_kv_view_free(view);
}

/* ---- one writer ---- */

/* Each rank of group B attacks the KV cache of each rank of group A, which B is linked to. Every
 * way is closed, and the texts of both groups are those of a group alone. */
TEST(g1d_a_rank_of_a_linked_group_cannot_write_kv_blocks)
{
    static const int32_t blocks[] = {2, 4, 10, 11, -1};
    struct kv_sequence reference;
    struct pair pair;
    char could[256] = "";
    reference_of(&reference, 2);
    kv_start(&pair.a, &(struct kv_options){.rank_count = 2});
    kv_start(&pair.b, &(struct kv_options){.rank_count = 2});
    kv_link_all(&pair.b, &pair.a, "A", 1);
    kv_sequence(&pair.s, 7, blocks);
    kv_step(&pair.a, &pair.s, 0, true, -1);
    const struct kv_sequence prompt = pair.s;
    for (uint32_t rank = 0; rank < 2; rank++)
        snprintf(could + strlen(could), sizeof could - strlen(could), "%.100s",
                 kv_attack(&pair.b, &pair.a, rank));
    kv_decode(&pair.a, &pair.s, STEP_COUNT);
    const bool same = memcmp(pair.s.logprobs, reference.logprobs, sizeof reference.logprobs) == 0;
    if (could[0])
        fail_msg("a rank of B could: %s; the text of A is %s", could,
                 same ? "the same" : "another");
    expect_same_bits(&pair.s, &reference);
    pair.s = prompt;
    expect_pulled(&pair, "r1");
    expect_decodes(&pair, &reference, -1);
    pair_stop(&pair);
}

/* ---- links ---- */

PAIR_TEST(m10_groups_of_another_shape_are_refused_with_what_differs)
{
    struct kv_group c;

    kv_start(&c, &(struct kv_options){.rank_count = 2, .block_size = 8});
    kv_link(&pair->b, &c, &(struct kv_link){.cluster = "C", .epoch = 1, .role = -1});
    for (uint32_t rank = 0; rank < 2; rank++) {
        const char *text = kv_link_state(&pair->b, rank, "C");
        assert_contains(text, "failed");
        assert_contains(text, "block_size 8 there, 4 here; block_bytes");
    }
    kv_stop(&c);
    struct kv_pull pull = pull_of("r1");
    pull.cluster = "C";
    expect_refused(pair, &pull, COX_INVALID, "the link to C has failed: its KV blocks");

    kv_start(&c, &(struct kv_options){.rank_count = 1});
    kv_link(&pair->b, &c, &(struct kv_link){.cluster = "D", .epoch = 1, .role = -1});
    assert_contains(kv_link_state(&pair->b, 1, "D"), "rank_count 1 there, 2 here");
    kv_stop(&c);

    /* Each other field of A's description. */
    for (int field = 0; field < 7; field++) {
        static const char *const names[] = {"rank ",        "layer_count ", "kv_head_first ",
                                            "kv_head_",     "head_dim ",    "element_bytes ",
                                            "model_digest "};
        struct cox_kv_pool pools[2] = {pair->a.pools[0], pair->a.pools[1]};
        for (uint32_t rank = 0; rank < 2; rank++) {
            struct cox_kv_layout *l = &pools[rank].layout;
            uint32_t *const numbers[] = {&l->rank,          &l->layer_count, &l->kv_head_first,
                                         &l->kv_head_count, &l->head_dim,    &l->element_bytes};
            if (field < 6)
                *numbers[field] += 1;
            else
                l->model_digest ^= 1;
        }
        kv_link(&pair->b, &pair->a,
                &(struct kv_link){
                    .cluster = "E", .epoch = (uint64_t)field + 1, .role = -1, .pools = pools});
        for (uint32_t rank = 0; rank < 2; rank++) {
            const char *text = kv_link_state(&pair->b, rank, "E");
            assert_contains(text, names[field]);
        }
    }
    expect_pulled(pair, "r1");
}

PAIR_TEST(m10_a_group_that_is_gone_fails_on_every_rank)
{
    const struct kv_pull pull = pull_of("r2");
    expect_pulled(pair, "r1");
    kv_stop(&pair->a);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_non_null(
            strstr(kv_link_state(&pair->b, rank, "A"), "failed the remote rank has died"));
    expect_refused(pair, &pull, COX_PEER_DEAD, "");
    /* Nor can it be linked again. */
    kv_link(&pair->b, &pair->a, &(struct kv_link){.cluster = "A", .epoch = 1, .role = -1});
    assert_contains(kv_link_state(&pair->b, 0, "A"), "failed");
}

PAIR_TEST(m10_a_group_that_was_restarted_is_linked_anew)
{
    struct kv_pull pull = pull_of("r1");
    struct kv_sequence reference;
    reference_of(&reference, 2);
    kv_stop(&pair->a);
    kv_start(&pair->a, &(struct kv_options){.rank_count = 2});
    kv_sequence(&pair->s, 7, prompt_blocks);
    kv_step(&pair->a, &pair->s, 0, true, -1);
    kv_link_all(&pair->b, &pair->a, "A", 2);
    expect_refused(pair, &pull, COX_STALE, "epoch 2, and the pull is for epoch 1");
    pull.epoch = 2;
    expect_taken(pair, &pull);
    expect_decodes(pair, &reference, -1);
}

/* And the link stays. */
static void switch_role(struct pair *pair, int role)
{
    kv_link(&pair->b, NULL, &(struct kv_link){.cluster = "A", .role = role, .change_role = true});
    assert_string_equal(kv_link_state(&pair->b, 0, "A"), "success"); /* behind it */
}

PAIR_TEST(m10_the_roles_of_a_live_group_are_switched)
{
    struct kv_sequence reference;
    const struct kv_pull pull = pull_of("r1");
    reference_of(&reference, 2);
    switch_role(pair, ROLE(PREFILL));
    expect_refused(pair, &pull, COX_STATE, "role is prefill");
    switch_role(pair, 17); /* which does not exist, and changes nothing */
    expect_refused(pair, &pull, COX_STATE, "role is prefill");
    switch_role(pair, ROLE(DECODE));
    expect_pulled(pair, "r2");
    expect_decodes(pair, &reference, -1);
    switch_role(pair, ROLE(STANDARD));
    expect_pulled(pair, "r3");
}

/* At the control socket of the blocks' group. */
TEST(m10_a_rank_that_may_not_take_fds_gets_them_otherwise)
{
    struct kv_sequence reference;
    struct pair pair;
    reference_of(&reference, 2);
    kv_start(&pair.a, &(struct kv_options){.rank_count = 2});
    kv_start(&pair.b, &(struct kv_options){.rank_count = 2, .denied = true});
    kv_sequence(&pair.s, 7, prompt_blocks);
    kv_step(&pair.a, &pair.s, 0, true, -1);
    kv_link_all(&pair.b, &pair.a, "A", 1);
    expect_pulled(&pair, "r1");
    expect_decodes(&pair, &reference, -1);
    /* Without a control socket they are opened by /proc. */
    struct kv_group without_socket = {.rank_count = 2};
    memcpy(without_socket.pools, pair.a.pools, sizeof without_socket.pools);
    kv_link(&pair.b, &without_socket, &(struct kv_link){.cluster = "D", .epoch = 1, .role = -1});
    assert_string_equal(kv_link_state(&pair.b, 0, "D"), "success");
    pair_stop(&pair);
}

/* Mappings of KV blocks in a process: its own, and those it is linked to. */
static size_t mapping_count(pid_t pid)
{
    return test_count_maps(pid, "memfd:cox_payload_kv");
}

PAIR_TEST(m10_unlinking_lets_go_of_the_memory)
{
    const pid_t reader = test_pid(pair->b.group, 0);
    assert_int_equal(mapping_count(reader), 2);
    for (uint64_t epoch = 2; epoch < 50; epoch++)
        kv_link_all(&pair->b, &pair->a, "A", epoch);
    assert_int_equal(mapping_count(reader), 2);
    kv_link(&pair->b, &pair->a, &(struct kv_link){.cluster = "A", .unlink = true, .role = -1});
    assert_string_equal(kv_link_state(&pair->b, 0, "A"), "");
    assert_int_equal(mapping_count(reader), 1);
}

/* ---- death ---- */

#if COX_TESTING

/* All blocks can be written. */
static void expect_all_writable(struct kv_group *g)
{
    static const int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, -1},
                         others[] = {8, 9, 10, 11, 12, 13, 14, 15, -1};
    struct kv_sequence s;
    kv_sequence(&s, 50, all);
    g->base = 0;
    for (uint32_t i = 0; i < 2; i++) {
        s.token_count = KV_BLOCK_SIZE * KV_BLOCKS_MAX - 1;
        memset(s.tokens, 0, sizeof s.tokens);
        for (uint32_t k = 0; k < s.token_count; k++)
            s.tokens[k] = kv_prompt[k % KV_PROMPT_LENGTH];
        kv_step(g, &s, 0, true, i ? 0 : -1);
        kv_sequence(&s, 51, others);
    }
}

static void kill_reader(const char *point, uint32_t nth, uint32_t rank)
{
    struct kv_replies replies;
    struct pair pair;
    char plan[64];
    const struct kv_pull pull = pull_of("r1");
    const bool links = strncmp(point, "link.", 5) == 0;
    print_message("%s, %" PRIu32 ", rank %" PRIu32 "\n", point, nth, rank);
    pair_start(&pair, 2);
    snprintf(plan, sizeof plan, "%s:kill:%" PRIu32 ":%" PRIu32, point, rank, nth);
    kv_arm(&pair.b, rank, plan);
    if (links) {
        kv_link(&pair.b, &pair.a, &(struct kv_link){.cluster = "A", .epoch = 2, .role = -1});
    } else {
        kv_pull(&pair.b, &pull, 1, 0, &replies);
        assert_int_equal(replies.status, COX_PEER_DEAD);
    }
    test_await_death(pair.b.group, rank);
    expect_all_writable(&pair.a);
    pair_stop(&pair);
}

TEST(p9_m11_a_reader_killed_at_any_point_leaves_nothing)
{
    static const struct {
        const char *point;
        /* that it is passed in the pull of two blocks */
        uint32_t times;
    } points[] = {{"kv.taken", 2}, {"kv.looked", 2},     {"kv.copied", 2},    {"pull.copied", 2},
                  {"kv.given", 2}, {"link.attached", 1}, {"link.detached", 1}};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++)
        for (uint32_t nth = 1; nth <= points[i].times; nth++)
            for (uint32_t rank = 0; rank < 2; rank++)
                kill_reader(points[i].point, nth, rank);
}

static void await_stopped(struct kv_group *g, uint32_t rank)
{
    AWAIT(test_rank_status(test_group_executor(g->group), rank).stopped);
}

/* The rank that links has the memory by then, and gets no notice that the process is gone. */
PAIR_TEST(m10_an_owner_killed_while_it_is_linked_fails_the_link)
{
    struct kv_pull pull = pull_of("r1");
    struct kv_replies replies;
    kv_arm(&pair->b, 1, "link.attached:stop:1");
    kv_link(&pair->b, &pair->a, &(struct kv_link){.cluster = "A", .epoch = 2, .role = -1});
    await_stopped(&pair->b, 1);
    kill(test_pid(pair->a.group, 1), SIGKILL);
    test_await_death(pair->a.group, 1);
    kill(test_pid(pair->b.group, 1), SIGCONT);
    assert_contains(kv_link_state(&pair->b, 1, "A"), "failed the remote rank has died");
    assert_string_equal(kv_link_state(&pair->b, 0, "A"), "success");
    pull.epoch = 2;
    kv_pull(&pair->b, &pull, 1, 0, &replies);
    assert_int_equal(replies.status, 0);
    assert_int_equal(replies.ranks[0][0].status, 0);
    assert_int_equal(replies.ranks[1][0].status, COX_PEER_DEAD);
}

/* A pair whose reader of rank 0 stops at this point of a pull; on return it has. */
static void stopped_start(struct pair *pair, struct waiting *w, const char *point)
{
    char plan[64];
    pair_start(pair, 2);
    snprintf(plan, sizeof plan, "%s:stop:0", point);
    kv_arm(&pair->b, 0, plan);
    *w = (struct waiting){.pair = pair, .pull = pull_of("r1")};
    w->thread = test_thread(waiting_main, w);
    await_stopped(&pair->b, 0);
}

/* Returns its reply. */
static const struct kv_reply *stopped_end(struct pair *pair, struct waiting *w)
{
    kill(test_pid(pair->b.group, 0), SIGCONT);
    pthread_join(w->thread, NULL);
    assert_int_equal(w->replies.status, 0);
    return &w->replies.ranks[0][0];
}

/* A reader that is stopped in the middle of a copy delays no other: the other group writes the
 * block at once, and what the reader has copied, before or after, is stale. The rank beside it has
 * its blocks. */
TEST(g1d_a_reader_stopped_in_a_copy_delays_no_other_and_gets_nothing)
{
    static const char *const points[] = {"kv.looked", "kv.copied"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct waiting w;
        struct pair pair;
        stopped_start(&pair, &w, points[i]);
        /* Of another sequence, and then of the same one anew: what is there has the user that
         * was asked for. */
        step_other(&pair, (const int32_t[]){2, 6, -1}, 0);
        step_anew(&pair, prompt_blocks);
        const struct kv_reply *reply = stopped_end(&pair, &w);
        assert_int_equal(reply->status, COX_STALE);
        assert_contains(reply->text, "A: block 2 was taken while it was");
        expect_pulled(&pair, "r2");
        pair_stop(&pair);
    }
}

TEST(p9_an_owner_killed_in_the_copy_ends_the_pull_once)
{
    static const char *const points[] = {"kv.taken", "kv.looked", "kv.copied", "pull.copied"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct waiting w;
        struct pair pair;
        stopped_start(&pair, &w, points[i]);
        kill(test_pid(pair.a.group, 0), SIGKILL);
        test_await_death(pair.a.group, 0);
        /* What was there is there: the memory stays. With less, it is the death. */
        const struct kv_reply *reply = stopped_end(&pair, &w);
        assert_true(reply->status == 0 || reply->status == COX_PEER_DEAD);
        assert_int_equal(reply->code, reply->status ? CODE(PD_PULL_KV_ERROR) : CODE(SUCCESS));
        assert_contains(kv_link_state(&pair.b, 0, "A"), "failed the remote rank has died");
        pair_stop(&pair);
    }
}

TEST(p9_an_owner_killed_in_its_step_fails_its_pulls_alone)
{
    static const char *const points[] = {"kv.taken", "kv.given"};
    const struct kv_pull pull = pull_of("r1");
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct kv_sequence other;
        struct pair pair;
        char plan[64];
        pair_start(&pair, 2);
        snprintf(plan, sizeof plan, "%s:kill:0", points[i]);
        kv_arm(&pair.a, 0, plan);
        kv_sequence(&other, 8, elsewhere);
        other.slot = 1;
        assert_int_equal(kv_try_step(&pair.a, &other, 0, true, -1, test_err()), COX_PEER_DEAD);
        struct kv_replies replies;
        kv_pull(&pair.b, &pull, 1, 0, &replies);
        assert_int_equal(replies.status, 0);
        assert_int_equal(replies.ranks[0][0].status, COX_PEER_DEAD);
        assert_int_equal(replies.ranks[1][0].status, 0); /* the live one has its blocks */
        pair_stop(&pair);
    }
}

TEST(p9_an_owner_killed_as_it_exports_fails_its_init)
{
    static const char *const plans[] = {"kv.made:kill:1", "cache.exported:kill:1"};
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        struct kv_group g;
        const struct kv_options options = {.rank_count = 2, .plan = plans[i]};
        assert_int_equal(kv_try(&g, &options, test_err()), COX_PEER_DEAD);
        kv_stop(&g);
    }
}

#endif

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return kv_worker_main(argc - 1, argv + 1);
    return test_run(NULL, NULL);
}
