/*
 * sample: draws the next token from a row of logits, greedy or seeded.
 *
 * A draw depends only on logits, tokens so far, sampling, seed and position. There is no generator
 * state, so a sequence recomputed in any batch and on any rank draws the same tokens.
 *
 * Threads: one at a time per sampler.
 * Ownership: the object owns its scratch, allocated at creation; all else is lent for the call.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_SAMPLE_H
#define COX_ENGINE_SAMPLE_H

#include "channel/base/idioms.h"

#include <coxswain/worker.h>

struct cox_sampler;

/* Allocates scratch for one vocabulary. Returns 0 or COX_NO_SPACE. */
int cox_sampler_new(uint32_t vocab_size, struct cox_sampler **ret_sampler, struct cox_error *err);
struct cox_sampler *cox_sampler_free(struct cox_sampler *sampler);
COX_DEFINE_FREEP(struct cox_sampler, cox_sampler_free);

/* Checks: temperature 0 or above and finite; top_p above 0 up to 1; top_k 0 or above;
 * repetition_penalty above 0 and finite. Returns 0, or COX_INVALID: err has the name, the value and
 * the allowed range. */
int cox_sampling_check(const struct cox_sampling *sampling, struct cox_error *err);

/* Draws the token that follows tokens[0 .. token_count), from vocab_size logits. sampling must have
 * passed cox_sampling_check, and all tokens are below vocab_size.
 *
 * Order: repetition penalty (on the tokens so far, each once), temperature, top_k, top_p, draw;
 * each as in Hugging Face's generation. Temperature 0 takes the highest logit. In a tie the lower
 * token wins, also in the order of top_k and top_p. The draw is number token_count of the seed.
 * logprob is the token's under the plain softmax of the logits, before penalty and temperature.
 * Returns
 *   0
 *   COX_INVALID: a logit that is not finite
 */
int cox_sampler_draw(struct cox_sampler *sampler, const struct cox_sampling *sampling,
                     const int32_t *tokens, uint32_t token_count, const float *logits,
                     struct cox_batch_output *ret_output, struct cox_error *err);

/* Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011: four words for a 128-bit counter and a 64-bit key. */
void cox_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_words[4]);

/* A number in [0, 1) with 53 random bits: draw number `position` of a seed. */
double cox_uniform(uint64_t seed, uint64_t position);

#endif
