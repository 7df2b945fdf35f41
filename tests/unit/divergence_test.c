/* report: which of a step's replies disagree, in what, and since when. */
#include "coordinator/collector/report.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"
#include "tests/lib/test.h"

#define RANK_COUNT 8
#define DIGESTS_SIZE (1 + COX_DIGEST_COUNT)

/* The replies to one step. */
static struct {
    struct cox_channel channel;
    struct cox_collector collector;
    struct cox_entry entry;
    struct cox_replies replies;
    struct cox_rank_result results[RANK_COUNT];
    Coxswain__ExecuteResponse responses[RANK_COUNT];
    Coxswain__ExecuteModelResponse models[RANK_COUNT];
    Coxswain__StepResult steps[RANK_COUNT];
    uint64_t digests[RANK_COUNT][DIGESTS_SIZE];
    struct cox_rank_set odd;
} s;

/* All ranks say the same of step `sequence`, whose chain began with `begin`. */
static void all_agree(uint64_t sequence, uint64_t begin)
{
    s.channel.id = COX_CHANNEL_EXECUTE;
    s.collector.channel = &s.channel;
    s.entry.sequence = sequence;
    s.entry.operation = cox_operation_find(COXSWAIN__EXECUTE_TYPE__MODEL_INFER);
    s.replies.rank_count = RANK_COUNT;
    s.replies.results = s.results;
    s.replies.text[0] = '\0';
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        coxswain__execute_response__init(&s.responses[rank]);
        coxswain__execute_model_response__init(&s.models[rank]);
        coxswain__step_result__init(&s.steps[rank]);
        s.results[rank].response = &s.responses[rank];
        s.responses[rank].result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
        s.responses[rank].execute_model_response = &s.models[rank];
        s.models[rank].step = &s.steps[rank];
        s.steps[rank].n_digests = DIGESTS_SIZE;
        s.steps[rank].digests = s.digests[rank];
        s.digests[rank][0] = begin;
        for (uint64_t i = 1; i < DIGESTS_SIZE; i++)
            s.digests[rank][i] = 16 * i;
    }
}

static int compare(void)
{
    return cox_report_divergence(&s.collector, &s.entry, &s.replies, &s.odd);
}

static void expect(const char *text, uint64_t odd)
{
    assert_int_equal(compare(), COX_DIVERGED);
    assert_contains(s.replies.text, text);
    assert_true(s.odd.words[0] == odd && s.odd.words[1] == 0);
}

PLAIN_TEST(s2_each_digest_has_its_name_and_its_sides)
{
    static const char *const names[] = {"steps since", "sequence ids", "positions", "block tables",
                                        "sampled tokens"};
    char text[256];
    for (uint32_t i = 0; i < DIGESTS_SIZE; i++)
        for (uint32_t bad = 0; bad < RANK_COUNT; bad++) {
            memset(&s, 0, sizeof s);
            all_agree(9, 4);
            s.digests[bad][i] = 0xab;
            snprintf(text, sizeof text, "differ in %s: ranks ", names[i]);
            expect(text, UINT64_C(1) << bad);
            snprintf(text, sizeof text, ", rank %u has 00000000000000ab", bad);
            assert_contains(s.replies.text, text);
            assert_contains(s.replies.text,
                            "; first in step 9, of the chain that began with step 4");
        }
    all_agree(9, 4);
    s.digests[1][2] = s.digests[5][2] = 1;
    s.digests[5][4] = 2;
    expect("positions: ranks 0,2-4,6-7 have 0000000000000020, ranks 1,5 have 0000000000000001; "
           "sampled tokens: ranks 0-4,6-7 have 0000000000000040, rank 5 has 0000000000000002;",
           1 << 1 | 1 << 5);
}

PLAIN_TEST(s2_without_a_majority_all_ranks_are_named)
{
    memset(&s, 0, sizeof s);
    all_agree(9, 4);
    for (uint32_t rank = 4; rank < RANK_COUNT; rank++)
        s.digests[rank][1] = 3;
    expect("sequence ids: ranks 0-3 have 0000000000000010, ranks 4-7 have 0000000000000003;", 0xff);
    /* More sides than are told apart. */
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        s.digests[rank][1] = 100 + rank;
    expect("rank 3 has 0000000000000067, ranks 4-7 have others;", 0xff);
    /* Nor are they, while most of the ranks agree, which come last. */
    all_agree(9, 4);
    for (uint32_t rank = 0; rank < 3; rank++)
        s.digests[rank][1] = 100 + rank;
    expect("sequence ids: ranks 3-7 have 0000000000000010, rank 0 has 0000000000000064, rank 1", 7);
    /* The largest side is not that of rank 0. */
    all_agree(9, 4);
    s.digests[0][1] = s.digests[3][1] = 5;
    expect("sequence ids: ranks 1-2,4-7 have 0000000000000010, ranks 0,3 have ", 1 | 1 << 3);
}

PLAIN_TEST(s2_what_has_no_digest_is_not_compared)
{
    memset(&s, 0, sizeof s);
    all_agree(9, 4);
    assert_int_equal(compare(), 0);
    assert_string_equal(s.replies.text, "");
    /* None, in each of the four: a rank that does not sample. */
    for (uint32_t i = 1; i < DIGESTS_SIZE; i++) {
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
            all_agree(9, 4);
            s.digests[rank][i] = 0;
            assert_int_equal(compare(), 0);
        }
        all_agree(9, 4);
        s.digests[2][i] = 0;
        s.digests[3][i] = 7;
        expect(": ranks 0-1,4-7 have ", 1 << 3);
    }
    /* Replies of an older or a newer peer, of no step, and none at all. */
    all_agree(9, 4);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        s.digests[rank][1] = rank == 7 ? 5 : rank;
    s.steps[0].n_digests = 0;
    s.steps[1].n_digests = DIGESTS_SIZE + 1;
    s.models[2].step = NULL;
    s.responses[3].execute_model_response = NULL;
    s.responses[4].result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT__NOT_SET;
    s.results[6].response = NULL;
    assert_int_equal(compare(), 0);
}

/* Steps that were published before the first one was known to differ continue its chain. */
PLAIN_TEST(s2_the_first_step_of_a_chain_is_remembered)
{
    memset(&s, 0, sizeof s);
    for (uint64_t sequence = 9; sequence < 12; sequence++) {
        all_agree(sequence, 4);
        s.digests[2][3] = sequence;
        expect("; first in step 9, of the chain that began with step 4", 1 << 2);
    }
    all_agree(12, 12);
    assert_int_equal(compare(), 0);
    all_agree(13, 12);
    s.digests[6][1] = 1;
    expect("execute sequence 13 (MODEL_INFER)", 1 << 6);
    assert_contains(s.replies.text, "; first in step 13, of the chain that began with step 12");
}
