/*
 * share: the part of the model that one rank computes, in whole slices, and how it gets the slices
 * of other ranks.
 *
 * Heads, feed-forward columns and vocabulary are divided into slices. Their number depends only on
 * the model's heads, so all numbers of ranks compute the same bits. A rank owns consecutive whole
 * slices. Its KV heads are those that the heads of its slices need: a KV head that serves heads of
 * several ranks is on each of them.
 *
 * Threads: any; these are values.
 * Ownership: context is lent.
 * Blocks: nothing, except the caller's gather.
 * If the process dies: nothing is left.
 */
#ifndef COX_MODEL_SHARE_H
#define COX_MODEL_SHARE_H

#include "config.h"

/* Slices of a model whose number of heads is a multiple of this. */
#define COX_SLICE_COUNT 8
/* Limit of the slices of any model. */
#define COX_SLICE_COUNT_MAX 64

/* Slices of the model: COX_SLICE_COUNT if that divides the heads. Otherwise one for each KV head
 * and the heads that it serves; with more than COX_SLICE_COUNT_MAX KV heads, a divisor of their
 * number. 9 heads over 3 KV heads: 3. */
uint32_t cox_slice_count(const struct cox_model_config *config);

/* One rank's part. All zero: one process owns all slices. */
struct cox_share {
    uint32_t rank;
    /* 0: a single rank, and no gather */
    uint32_t rank_count;
    /* Gets the slices of all ranks. slices has room for one piece per slice of the model, stride
     * floats apart. This rank has filled the first slice_length floats of its own pieces; gather
     * may use the others. On return ret_slices has the address of each piece, valid until the next
     * gather. All ranks of a step call it equally often, with the same lengths. Returns 0, or a
     * result that ends the step, with a text in err (which may be NULL). NULL: this rank owns all
     * slices. */
    int (*gather)(void *context, float *slices, size_t stride, size_t slice_length,
                  const float **ret_slices, struct cox_error *err);
    void *context;
    /* Called when a result of the last gather is not finite, though this rank's input was, to find
     * the rank at fault. Returns 0: unknown; or a result that ends the step, with the rank in err.
     * NULL: 0. */
    int (*blame)(void *context, const float *const *slices, size_t slice_length,
                 struct cox_error *err);
};

/* Returns 0, or COX_INVALID: this number of ranks cannot own equally many whole slices of the model
 * (err says which numbers can), or rank is out of range. */
int cox_share_check(const struct cox_model_config *config, const struct cox_share *share,
                    struct cox_error *err);

/* The slices that a share owns, of the model's cox_slice_count. The share must be checked. */
struct cox_slices {
    uint32_t first;
    uint32_t count;
};
struct cox_slices cox_share_slices(const struct cox_model_config *config,
                                   const struct cox_share *share);

/* The KV heads that a share computes and caches. With fewer KV heads than slices, the ranges of
 * several ranks overlap. */
struct cox_kv_heads {
    uint32_t first;
    uint32_t count;
};
struct cox_kv_heads cox_share_kv_heads(const struct cox_model_config *config,
                                       const struct cox_share *share);

#endif
