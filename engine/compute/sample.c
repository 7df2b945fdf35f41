#include "sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"

/* Multipliers and key increments of Philox4x32; the increments are the golden ratio and sqrt(3) -
 * 1, as in the paper. */
#define PHILOX_MULTIPLIER_0 UINT32_C(0xD2511F53)
#define PHILOX_MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define PHILOX_INCREMENT_0 UINT32_C(0x9E3779B9)
#define PHILOX_INCREMENT_1 UINT32_C(0xBB67AE85)
#define PHILOX_ROUND_COUNT 10

struct cox_sampler {
    uint32_t vocab_size;
    /* logits after the penalty; [vocab_size] */
    float *scores;
    /* exp((score - highest) / temperature); [vocab_size] */
    double *weights;
    /* [vocab_size]; a heap in front, the tokens taken from it at the end */
    uint32_t *heap;
    /* a bit per token, all zero between calls */
    uint64_t *marked;
};

void cox_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_words[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < PHILOX_ROUND_COUNT; round++) {
        uint64_t p0 = (uint64_t)PHILOX_MULTIPLIER_0 * c0;
        uint64_t p1 = (uint64_t)PHILOX_MULTIPLIER_1 * c2;

        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += PHILOX_INCREMENT_0;
        k1 += PHILOX_INCREMENT_1;
    }
    ret_words[0] = c0;
    ret_words[1] = c1;
    ret_words[2] = c2;
    ret_words[3] = c3;
}

double cox_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];

    cox_philox(counter, key, words);
    return (double)(((uint64_t)words[1] << 32 | words[0]) >> 11) * 0x1p-53;
}

int cox_sampler_new(uint32_t vocab_size, struct cox_sampler **ret_sampler, struct cox_error *err)
{
    _cox_cleanup_(cox_sampler_freep) struct cox_sampler *sampler = calloc(1, sizeof(*sampler));

    COX_ASSERT(vocab_size > 0);
    if (sampler) {
        sampler->vocab_size = vocab_size;
        sampler->scores = calloc(vocab_size, sizeof(sampler->scores[0]));
        sampler->weights = calloc(vocab_size, sizeof(sampler->weights[0]));
        sampler->heap = calloc(vocab_size, sizeof(sampler->heap[0]));
        sampler->marked = calloc(vocab_size / 64 + 1, sizeof(sampler->marked[0]));
    }
    if (!sampler || !sampler->scores || !sampler->weights || !sampler->heap || !sampler->marked)
        return cox_fail(err, COX_NO_SPACE, "no memory to sample from %u tokens", vocab_size);
    *ret_sampler = cox_steal_ptr(&sampler);
    return 0;
}

struct cox_sampler *cox_sampler_free(struct cox_sampler *sampler)
{
    if (!sampler)
        return NULL;
    free(sampler->scores);
    free(sampler->weights);
    free(sampler->heap);
    free(sampler->marked);
    free(sampler);
    return NULL;
}

/* Comparisons are written so that a NaN fails them. */
int cox_sampling_check(const struct cox_sampling *sampling, struct cox_error *err)
{
    if (!(sampling->temperature >= 0) || isinf(sampling->temperature))
        return cox_fail(err, COX_INVALID, "temperature is %g; allowed: 0 (greedy) or above",
                        (double)sampling->temperature);
    if (!(sampling->top_p > 0 && sampling->top_p <= 1))
        return cox_fail(err, COX_INVALID, "top_p is %g; allowed: above 0, up to 1 (off)",
                        (double)sampling->top_p);
    if (sampling->top_k < 0)
        return cox_fail(err, COX_INVALID, "top_k is %d; allowed: 0 (off) or above",
                        sampling->top_k);
    if (!(sampling->repetition_penalty > 0) || isinf(sampling->repetition_penalty))
        return cox_fail(err, COX_INVALID, "repetition_penalty is %g; allowed: above 0; 1 is off",
                        (double)sampling->repetition_penalty);
    return 0;
}

/* Divides the positive and multiplies the negative scores of the tokens so far. */
static void apply_penalty(struct cox_sampler *sampler, float penalty, const int32_t *tokens,
                          uint32_t token_count)
{
    for (uint32_t i = 0; i < token_count; i++) {
        uint32_t token = (uint32_t)tokens[i];
        uint64_t bit = UINT64_C(1) << (token % 64);

        if (sampler->marked[token / 64] & bit)
            continue;
        sampler->marked[token / 64] |= bit;
        if (sampler->scores[token] > 0)
            sampler->scores[token] /= penalty;
        else
            sampler->scores[token] *= penalty;
    }
    for (uint32_t i = 0; i < token_count; i++)
        sampler->marked[(uint32_t)tokens[i] / 64] = 0;
}

static uint32_t highest(const float *scores, uint32_t count)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < count; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}

/* The order in which tokens are kept: higher scores first, then lower tokens. It is total, so that
 * all ranks agree. */
static bool before(const struct cox_sampler *sampler, uint32_t a, uint32_t b)
{
    if (sampler->scores[a] != sampler->scores[b])
        return sampler->scores[a] > sampler->scores[b];
    return a < b;
}

static void sift_down(struct cox_sampler *sampler, uint32_t count, uint32_t index)
{
    uint32_t *heap = sampler->heap;

    for (;;) {
        uint32_t child = 2 * index + 1;
        uint32_t moved = heap[index];

        if (child >= count)
            return;
        if (child + 1 < count && before(sampler, heap[child + 1], heap[child]))
            child++;
        if (!before(sampler, heap[child], moved))
            return;
        heap[index] = heap[child];
        heap[child] = moved;
        index = child;
    }
}

/* Removes the best of count tokens from the heap and stores it behind the heap, at count - 1. */
static uint32_t take_best(struct cox_sampler *sampler, uint32_t count)
{
    uint32_t best = sampler->heap[0];

    sampler->heap[0] = sampler->heap[count - 1];
    sampler->heap[count - 1] = best;
    sift_down(sampler, count - 1, 0);
    return best;
}

/* Draws by weight among the tokens order[0], order[-1], ... order[1 - count] (order NULL: tokens 0
 * to count - 1). total is the sum of their weights in that order. */
static uint32_t draw(const struct cox_sampler *sampler, const uint32_t *order, uint32_t count,
                     double total, double uniform)
{
    double target = uniform * total, sum = 0;
    uint32_t chosen = order ? order[0] : 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t token = order ? *(order - i) : i;

        /* A weight may have underflowed to 0; such a token is never drawn. */
        if (sampler->weights[token] > 0)
            chosen = token;
        sum += sampler->weights[token];
        if (sum > target)
            break;
    }
    return chosen;
}

/* Keeps the best tokens until top_k or top_p is reached, and draws among them. total: of all
 * weights. */
static uint32_t draw_best(struct cox_sampler *sampler, const struct cox_sampling *sampling,
                          double total, double uniform)
{
    const uint32_t vocab_size = sampler->vocab_size;
    const uint32_t *order = &sampler->heap[vocab_size - 1];
    uint32_t count_max = vocab_size, count = 0;
    double sum = 0;

    for (uint32_t i = 0; i < vocab_size; i++)
        sampler->heap[i] = i;
    for (uint32_t i = vocab_size / 2; i-- > 0;)
        sift_down(sampler, vocab_size, i);

    if (sampling->top_k > 0 && (uint32_t)sampling->top_k < vocab_size) {
        count_max = (uint32_t)sampling->top_k;
        total = 0;
        for (uint32_t i = 0; i < count_max; i++)
            total += sampler->weights[take_best(sampler, vocab_size - i)];
        while (count < count_max && (count == 0 || sum < (double)sampling->top_p * total))
            sum += sampler->weights[*(order - count++)];
    } else {
        while (count < count_max && (count == 0 || sum < (double)sampling->top_p * total)) {
            sum += sampler->weights[take_best(sampler, vocab_size - count)];
            count++;
        }
    }
    return draw(sampler, order, count, sum, uniform);
}

static uint32_t draw_seeded(struct cox_sampler *sampler, const struct cox_sampling *sampling,
                            uint64_t position)
{
    const uint32_t vocab_size = sampler->vocab_size;
    const double top = sampler->scores[highest(sampler->scores, vocab_size)];
    double uniform = cox_uniform(sampling->seed, position);
    double total = 0;

    for (uint32_t i = 0; i < vocab_size; i++) {
        sampler->weights[i] =
            exp(((double)sampler->scores[i] - top) / (double)sampling->temperature);
        total += sampler->weights[i];
    }
    if (sampling->top_k == 0 && sampling->top_p >= 1)
        return draw(sampler, NULL, vocab_size, total, uniform);
    return draw_best(sampler, sampling, total, uniform);
}

static float plain_logprob(const float *logits, uint32_t vocab_size, uint32_t token)
{
    const double top = logits[highest(logits, vocab_size)];
    double sum = 0;

    for (uint32_t i = 0; i < vocab_size; i++)
        sum += exp((double)logits[i] - top);
    return (float)((double)logits[token] - top - log(sum));
}

int cox_sampler_draw(struct cox_sampler *sampler, const struct cox_sampling *sampling,
                     const int32_t *tokens, uint32_t token_count, const float *logits,
                     struct cox_batch_output *ret_output, struct cox_error *err)
{
    const uint32_t vocab_size = sampler->vocab_size;
    uint32_t token;

    for (uint32_t i = 0; i < vocab_size; i++)
        if (!isfinite(logits[i]))
            return cox_fail(
                err, COX_INVALID,
                "the logit of token %u is not finite; the weights or the KV cache do not fit this model",
                i);
    memcpy(sampler->scores, logits, vocab_size * sizeof(logits[0]));
    if (sampling->repetition_penalty < 1 || sampling->repetition_penalty > 1)
        apply_penalty(sampler, sampling->repetition_penalty, tokens, token_count);
    if (sampling->temperature > 0)
        token = draw_seeded(sampler, sampling, token_count);
    else
        token = highest(sampler->scores, vocab_size);
    ret_output->token = (int32_t)token;
    ret_output->logprob = plain_logprob(logits, vocab_size, token);
    return 0;
}
