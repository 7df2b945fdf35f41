/*
 * sample: the next token from a row of logits, greedy or seeded.
 *
 * A draw is a function of (logits, tokens so far, sampling, seed, position) alone: no generator
 * state is kept, so a recomputation of a sequence, in any batch and on any rank, draws the same
 * tokens again.
 *
 * Threads: one sampler per thread at a time.
 * Ownership: the object owns its scratch; all else is lent for the call. Nothing blocks, nothing is
 *   allocated after creation. If the process dies nothing is left.
 */
#ifndef COX_WORKER_MODEL_SAMPLE_H
#define COX_WORKER_MODEL_SAMPLE_H

#include "worker/sequences/batch.h"

struct cox_sampler;

/* Scratch for one vocabulary. Returns 0; COX_NO_SPACE. */
int cox_sampler_new(uint32_t vocab_size, struct cox_sampler **ret_sampler, struct cox_error *err);
struct cox_sampler *cox_sampler_free(struct cox_sampler *sampler);
void cox_sampler_freep(struct cox_sampler **sampler); /* for _cox_cleanup_ */

/* Checks: temperature 0 or above and finite; top_p above 0 up to 1; top_k 0 or above;
 * repetition_penalty above 0 and finite. Returns 0; COX_INVALID with the name, the value and what
 * is allowed. */
int cox_sampling_check(const struct cox_sampling *sampling, struct cox_error *err);

/* The token that follows tokens[0 .. token_count), from vocab_size logits.
 *
 * Order: repetition penalty (on the tokens so far, each once), temperature, top_k, top_p, draw; the
 * same meaning of each as in Hugging Face's generation. Temperature 0 takes the highest logit; the
 * lower token wins a tie, there and in the order of top_k and top_p. The draw is number token_count
 * of the seed. logprob is that of the token under the plain softmax of the logits, before penalty
 * and temperature. sampling must have passed cox_sampling_check. Returns 0; COX_INVALID a logit
 * that is not finite, or a token outside the vocabulary. */
int cox_sampler_draw(struct cox_sampler *sampler, const struct cox_sampling *sampling,
                     const int32_t *tokens, uint32_t token_count, const float *logits,
                     struct cox_batch_output *ret_output, struct cox_error *err);

/* Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011: four words for a 128-bit counter and a 64-bit key. */
void cox_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_words[4]);

/* A number in [0, 1) with 53 bits: draw number position of a seed. */
double cox_uniform(uint64_t seed, uint64_t position);

#endif
