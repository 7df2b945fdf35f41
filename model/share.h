/*
 * share: which part of the model one rank computes: whole slices, and how it gets those of others.
 *
 * Heads, feed-forward columns and vocabulary are in COX_SLICE_COUNT slices, whatever the number of
 * ranks; a rank owns whole ones, in a row. KV heads are what the slices' heads need: where a KV
 * head serves heads of several ranks, each of them has it.
 *
 * Threads: any; values. Ownership: context is lent. Nothing blocks but gather, which is the
 * caller's. If the process dies nothing is left.
 */
#ifndef COX_MODEL_SHARE_H
#define COX_MODEL_SHARE_H

#include "model/config.h"

/* The slices of one rank. All zero: one process owns them all. */
struct cox_share {
    uint32_t slice_first;
    uint32_t slice_count; /* 0: COX_SLICE_COUNT */
    /* slices holds COX_SLICE_COUNT pieces, stride floats apart, of which this rank has filled the first
     * slice_length floats of its own; the others are gather's to use. On return ret_slices says where each piece
     * can be read, until gather is called again. Called the same number of times, with the same lengths, by all
     * ranks of one step. Returns 0, or a result that ends the step, with a text
     * in err (which may be NULL). NULL: this rank owns all slices. */
    int (*gather)(void *context, float *slices, size_t stride, size_t slice_length,
                  const float **ret_slices, struct cox_error *err);
    void *context;
};

/* The slices of a rank, without gather. Returns 0; COX_INVALID: rank_count ranks cannot own equally
 * many whole slices, err says what can. */
int cox_share_of_rank(uint32_t rank, uint32_t rank_count, struct cox_share *ret_share,
                      struct cox_error *err);

/* Returns 0; COX_INVALID slices that do not exist, or not all of them and no gather. */
int cox_share_check(const struct cox_share *share, struct cox_error *err);

/* Slices owned: slice_count, where 0 is all. */
static inline uint32_t cox_share_slice_count(const struct cox_share *share)
{
    return share->slice_count ? share->slice_count : COX_SLICE_COUNT;
}

/* The KV heads that a share computes and caches: a range, that overlaps with that of other ranks
 * when there are fewer KV heads than slices. */
struct cox_kv_heads {
    uint32_t first;
    uint32_t count;
};
struct cox_kv_heads cox_share_kv_heads(const struct cox_model_config *config,
                                       const struct cox_share *share);

#endif
