#include "engine/compute/sample.h"
#include "tests/lib/test.h"

#include <math.h>

#define DRAW_COUNT 20000u

static const struct cox_sampling greedy = {.top_p = 1, .repetition_penalty = 1};

TEST_OWNED(cox_sampler_free)

/* The test's own. */
static struct cox_sampler *open_sampler(uint32_t vocab_size)
{
    struct cox_sampler *sampler = NULL;

    assert_int_equal(cox_sampler_new(vocab_size, &sampler, NULL), 0);
    return test_own(sampler, cox_sampler_free_owned);
}

/* Draws at a position; the tokens so far are all token 0, unless tokens says more. */
static struct cox_batch_output draw_at(struct cox_sampler *sampler,
                                       const struct cox_sampling *sampling, const float *logits,
                                       uint32_t position)
{
    static const int32_t zeros[DRAW_COUNT];
    struct cox_batch_output output = {0};

    assert_ok(cox_sampler_draw(sampler, sampling, zeros, position, logits, &output, test_err()));
    return output;
}

/* How often each token comes, over positions 0 to DRAW_COUNT - 1, as shares. */
static void draw_shares(const struct cox_sampling *sampling, const float *logits,
                        uint32_t vocab_size, double *shares)
{
    struct cox_sampler *sampler = open_sampler(vocab_size);

    memset(shares, 0, vocab_size * sizeof(shares[0]));
    for (uint32_t i = 0; i < DRAW_COUNT; i++)
        shares[draw_at(sampler, sampling, logits, i).token] += 1.0 / DRAW_COUNT;
}

static void assert_near(double a, double b, double error)
{
    if (fabs(a - b) > error)
        fail_msg("%g is not within %g of %g", a, error, b);
}

/* The known replies that come with the authors' Random123 library. */
PLAIN_TEST(philox_gives_the_known_replies)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } cases[] = {
        {{0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX},
         {UINT32_MAX, UINT32_MAX},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    uint32_t words[4];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cox_philox(cases[i].counter, cases[i].key, words);
        assert_memory_equal(words, cases[i].words, sizeof(words));
    }
}

PLAIN_TEST(uniform_depends_on_seed_and_position)
{
    double sum = 0;

    for (uint64_t i = 0; i < 10000; i++) {
        double number = cox_uniform(5, i);

        assert_true(number >= 0 && number < 1);
        sum += number;
    }
    assert_near(sum / 10000, 0.5, 0.02);
    assert_true(cox_uniform(5, 1) < cox_uniform(5, 2) || cox_uniform(5, 1) > cox_uniform(5, 2));
    assert_true(cox_uniform(5, 1) < cox_uniform(6, 1) || cox_uniform(5, 1) > cox_uniform(6, 1));
    assert_true(cox_uniform(UINT64_C(1) << 32, 1) < cox_uniform(0, 1) ||
                cox_uniform(UINT64_C(1) << 32, 1) > cox_uniform(0, 1));
}

PLAIN_TEST(greedy_takes_the_highest_and_the_lowest_of_a_tie)
{
    const float logits[] = {-1, 3, 0, 3, 2};
    struct cox_sampler *sampler = open_sampler(5);
    struct cox_batch_output output = draw_at(sampler, &greedy, logits, 3);
    double sum = exp(-1) + exp(3) + 1 + exp(3) + exp(2);

    assert_int_equal(output.token, 1);
    assert_near((double)output.logprob, 3 - log(sum), 1e-6);
}

PLAIN_TEST(draws_follow_the_softmax)
{
    const float logits[] = {0, 1, 2, -1, -40};
    struct cox_sampling sampling = {
        .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 3};
    double shares[5], sum = 1 + exp(1) + exp(2) + exp(-1);

    draw_shares(&sampling, logits, 5, shares);
    for (int i = 0; i < 4; i++)
        assert_near(shares[i], exp((double)logits[i]) / sum, 0.01);
    assert_near(shares[4], 0, 1e-9);
    sampling.temperature = 0.5f;
    draw_shares(&sampling, logits, 5, shares);
    sum = 1 + exp(2) + exp(4) + exp(-2);
    assert_near(shares[2], exp(4) / sum, 0.01);
    assert_near(shares[1], exp(2) / sum, 0.01);
    sampling.temperature = 1e-30f; /* as good as greedy, without a division that overflows */
    draw_shares(&sampling, logits, 5, shares);
    assert_near(shares[2], 1, 1e-9);
}

PLAIN_TEST(top_k_and_top_p_keep_the_best)
{
    /* Probabilities 0.4, 0.3, 0.2, 0.1. */
    const float logits[] = {logf(0.1f), logf(0.3f), logf(0.4f), logf(0.2f)};
    struct cox_sampling sampling = {
        .temperature = 1, .top_p = 1, .top_k = 2, .repetition_penalty = 1, .seed = 8};
    double shares[4];

    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[2], 4.0 / 7, 0.01);
    assert_near(shares[1], 3.0 / 7, 0.01);
    sampling.top_k = 1;
    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[2], 1, 1e-9);
    sampling.top_k = 99; /* more than there are: off */
    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[0], 0.1, 0.01);
    sampling.top_k = 0;
    sampling.top_p = 0.6f; /* 0.4 is too little, 0.7 enough */
    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[2], 4.0 / 7, 0.01);
    assert_near(shares[1], 3.0 / 7, 0.01);
    sampling.top_p = 1e-6f; /* one token always stays */
    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[2], 1, 1e-9);
    sampling.top_k = 3; /* top_p is of what top_k left: 4/9 + 3/9 is above 0.75 */
    sampling.top_p = 0.75f;
    draw_shares(&sampling, logits, 4, shares);
    assert_near(shares[2], 4.0 / 7, 0.01);
    assert_near(shares[3], 0, 1e-9);
}

PLAIN_TEST(ties_are_kept_in_the_order_of_the_tokens)
{
    const float logits[] = {1, 1, 1, 1, 1, 1, 1, 1};
    struct cox_sampling sampling = {
        .temperature = 1, .top_p = 1, .top_k = 3, .repetition_penalty = 1, .seed = 1};
    double shares[8];

    draw_shares(&sampling, logits, 8, shares);
    for (int i = 0; i < 8; i++)
        assert_near(shares[i], i < 3 ? 1.0 / 3 : 0, 0.01);
}

/* Sorting by heap against the obvious way, for all k. */
PLAIN_TEST(top_k_agrees_with_a_plain_selection)
{
    enum { COUNT = 50 };
    struct cox_sampler *sampler = open_sampler(COUNT);
    struct cox_sampling sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    float logits[COUNT];

    for (uint32_t i = 0; i < COUNT; i++)
        logits[i] = (float)floor(cox_uniform(77, i) * 20); /* with ties */
    for (int32_t k = 1; k < COUNT; k++) {
        sampling.top_k = k;
        for (uint32_t draw = 0; draw < 50; draw++) {
            int32_t token, better = 0;

            sampling.seed = draw;
            token = draw_at(sampler, &sampling, logits, (uint32_t)k).token;
            for (int32_t i = 0; i < COUNT; i++)
                if (logits[i] > logits[token] || (i < token && !(logits[i] < logits[token])))
                    better++;
            assert_true(better < k);
        }
    }
}

PLAIN_TEST(repetition_penalty_counts_each_token_once)
{
    const float logits[] = {4, 3, -1, -1.5f};
    const int32_t tokens[] = {0, 0, 0, 2};
    struct cox_sampling sampling = {.top_p = 1, .repetition_penalty = 1.5f};
    struct cox_sampler *sampler = open_sampler(4);
    struct cox_batch_output output;
    double sum = exp(4) + exp(3) + exp(-1) + exp(-1.5);

    for (int again = 0; again < 2; again++) { /* nothing is kept from call to call */
        assert_int_equal(cox_sampler_draw(sampler, &sampling, tokens, 4, logits, &output, NULL), 0);
        assert_int_equal(output.token, 1);                       /* 4 / 1.5 is below 3 */
        assert_near((double)output.logprob, 3 - log(sum), 1e-6); /* of the plain softmax */
    }
    sampling.repetition_penalty = 1.3f; /* once: 4 / 1.3 is above 3; three times would be below */
    assert_int_equal(cox_sampler_draw(sampler, &sampling, tokens, 4, logits, &output, NULL), 0);
    assert_int_equal(output.token, 0);
}

PLAIN_TEST(draw_repeats_for_the_same_seed_and_position)
{
    const struct cox_sampling sampling = {
        .temperature = 1.3f, .top_p = 0.95f, .repetition_penalty = 1, .seed = UINT64_MAX};
    struct cox_sampler *first = open_sampler(64), *second = open_sampler(64);
    float logits[64];
    int32_t tokens[32];
    bool all_equal = true;

    for (uint32_t i = 0; i < 64; i++)
        logits[i] = (float)cox_uniform(1, i);
    for (uint32_t i = 0; i < 32; i++)
        tokens[i] = draw_at(first, &sampling, logits, i).token;
    for (uint32_t i = 32; i-- > 0;) {
        assert_int_equal(draw_at(second, &sampling, logits, i).token, tokens[i]);
        all_equal &= tokens[i] == tokens[0];
    }
    assert_false(all_equal);
}

PLAIN_TEST(bad_input_is_refused)
{
    const struct cox_sampling bad[] = {
        {.temperature = -0.1f, .top_p = 1, .repetition_penalty = 1},
        {.temperature = NAN, .top_p = 1, .repetition_penalty = 1},
        {.temperature = INFINITY, .top_p = 1, .repetition_penalty = 1},
        {.top_p = 0, .repetition_penalty = 1},
        {.top_p = 1.01f, .repetition_penalty = 1},
        {.top_p = NAN, .repetition_penalty = 1},
        {.top_p = 1, .top_k = -1, .repetition_penalty = 1},
        {.top_p = 1, .repetition_penalty = 0},
        {.top_p = 1, .repetition_penalty = NAN},
        {.top_p = 1, .repetition_penalty = INFINITY},
    };
    struct cox_sampler *sampler = open_sampler(3);
    struct cox_batch_output output;
    float logits[] = {0, NAN, 0};
    const int32_t tokens[] = {1};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(cox_sampling_check(&bad[i], NULL), COX_INVALID);
    assert_int_equal(cox_sampling_check(&greedy, NULL), 0);
    assert_int_equal(cox_sampler_draw(sampler, &greedy, tokens, 1, logits, &output, NULL),
                     COX_INVALID);
    logits[1] = INFINITY;
    assert_int_equal(cox_sampler_draw(sampler, &greedy, tokens, 1, logits, &output, NULL),
                     COX_INVALID);
}
