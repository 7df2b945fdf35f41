/*
 * print_draws < CASES
 *
 * Prints the token and the logprob that the sampler draws for each case, one line each. A case is
 * numbers with blanks between: seed, temperature, top_k, top_p, repetition penalty; the number of
 * tokens so far, and the tokens; the number of logits, and the logits. Floats may be hexadecimal.
 */
#include "engine/compute/sample.h"

#include <inttypes.h>
#include <stdio.h>

#define COUNT_MAX 65536u

static int32_t tokens[COUNT_MAX];
static float logits[COUNT_MAX];

/* Returns false at the end of the input. */
static bool read_case(struct cox_sampling *sampling, uint32_t *ret_tokens, uint32_t *ret_logits)
{
    bool ok =
        scanf("%" SCNu64 "%f%" SCNd32 "%f%f%" SCNu32, &sampling->seed, &sampling->temperature,
              &sampling->top_k, &sampling->top_p, &sampling->repetition_penalty, ret_tokens) == 6 &&
        *ret_tokens <= COUNT_MAX;
    for (uint32_t i = 0; ok && i < *ret_tokens; i++)
        ok = scanf("%" SCNd32, &tokens[i]) == 1;
    ok = ok && scanf("%" SCNu32, ret_logits) == 1 && *ret_logits <= COUNT_MAX;
    for (uint32_t i = 0; ok && i < *ret_logits; i++)
        ok = scanf("%f", &logits[i]) == 1;
    return ok;
}

int main(void)
{
    struct cox_sampling sampling;
    uint32_t token_count, vocab_size;
    struct cox_error err = {0};

    while (read_case(&sampling, &token_count, &vocab_size)) {
        struct cox_batch_output output = {.token = -1};
        struct cox_sampler *sampler = NULL;
        int r = cox_sampling_check(&sampling, &err);

        if (!r)
            r = cox_sampler_new(vocab_size, &sampler, &err);
        if (!r)
            r = cox_sampler_draw(sampler, &sampling, tokens, token_count, logits, &output, &err);
        cox_sampler_free(sampler);
        if (r) {
            fprintf(stderr, "print_draws: %s\n", err.text);
            return 1;
        }
        printf("%" PRId32 " %a\n", output.token, (double)output.logprob);
    }
    return 0;
}
