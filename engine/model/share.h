/*
 * share: which part of the model one rank computes: whole slices, and how it gets those of others.
 *
 * Heads, feed-forward columns and vocabulary are in slices, as many as the model's heads allow and
 * whatever the number of ranks, so that all numbers of ranks compute the same bits. A rank owns
 * whole slices, in a row. KV heads are what the slices' heads need: where a KV head serves heads of
 * several ranks, each of them has it.
 *
 * Threads: any; values. Ownership: context is lent. Nothing blocks but gather, which is the
 * caller's. If the process dies nothing is left.
 */
#ifndef COX_MODEL_SHARE_H
#define COX_MODEL_SHARE_H

#include "config.h"

/* Slices of a model whose number of heads is a multiple of it. */
#define COX_SLICE_COUNT 8
/* Slices of any model, at most. */
#define COX_SLICE_COUNT_MAX 64

/* Slices of the model: COX_SLICE_COUNT where it divides the heads; else one for each KV head and
 * the heads that it serves, or, of more than COX_SLICE_COUNT_MAX KV heads, as many as divide them.
 * 9 heads over 3 KV heads: 3. */
uint32_t cox_slice_count(const struct cox_model_config *config);

/* One rank's part. All zero: one process owns all slices. */
struct cox_share {
    uint32_t rank;
    /* 0: one, and no gather */
    uint32_t rank_count;
    /* slices holds one piece for each slice of the model, stride floats apart, of which this rank
     * has filled the first slice_length floats of its own; the others are gather's to use. On
     * return ret_slices says where each piece can be read, until gather is called again. Called the
     * same number of times, with the same lengths, by all ranks of one step. Returns 0, or a result
     * that ends the step, with a text in err (which may be NULL). NULL: this rank owns all slices.
     */
    int (*gather)(void *context, float *slices, size_t stride, size_t slice_length,
                  const float **ret_slices, struct cox_error *err);
    void *context;
    /* What came of the slices of the last gather is not finite, though what went in was: whose
     * slice is it? Returns 0: it cannot be told; or a result that ends the step, with the rank in
     * err. NULL: 0. */
    int (*blame)(void *context, const float *const *slices, size_t slice_length,
                 struct cox_error *err);
};

/* Returns 0; COX_INVALID: so many ranks cannot own equally many whole slices of the model, err says
 * what can; or there is no such rank. */
int cox_share_check(const struct cox_model_config *config, const struct cox_share *share,
                    struct cox_error *err);

/* The slices that a share owns, of the cox_slice_count of the model. The share was checked. */
struct cox_slices {
    uint32_t first;
    uint32_t count;
};
struct cox_slices cox_share_slices(const struct cox_model_config *config,
                                   const struct cox_share *share);

/* The KV heads that a share computes and caches: a range, that overlaps with that of other ranks
 * when there are fewer KV heads than slices. */
struct cox_kv_heads {
    uint32_t first;
    uint32_t count;
};
struct cox_kv_heads cox_share_kv_heads(const struct cox_model_config *config,
                                       const struct cox_share *share);

#endif
