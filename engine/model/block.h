/*
 * block: a whole model in one block of memory that describes itself: a head with configuration and
 * digest, then the weights in the layout of weights.h. One process fills it from a folder; others
 * need the block alone.
 *
 * Any process, any thread. The functions own nothing. Filling blocks on reading the files, reading
 * on nothing. Bytes of a block are input: the head is copied once and checked, so that no number in
 * it leads outside of the block; the weights are numbers, and whoever computes with them survives
 * any. If the process dies half-way through a fill the block holds rubbish without a head: who
 * shares it publishes it only after the fill returned.
 */
#ifndef COX_MODEL_BLOCK_H
#define COX_MODEL_BLOCK_H

#include "weights.h"

struct cox_model_block {
    struct cox_model_config config;
    /* digest.h */
    uint64_t digest;
    /* in the block, aligned to COX_WEIGHTS_ALIGNMENT */
    const float *weights;
    uint64_t weights_size;
};

/* Bytes of a block for this configuration. */
uint64_t cox_model_block_size(const struct cox_model_config *config);

/* Loads config.json of a folder. Returns as cox_model_config_load; -ENOMEM. */
int cox_model_folder_config(const char *directory, struct cox_model_config *ret_config,
                            struct cox_error *err);

/* Fills block, of cox_model_block_size bytes aligned to COX_WEIGHTS_ALIGNMENT, from the folder that
 * config was loaded from; the head comes last. cancelled (NULL: never) is asked now and then.
 * Returns as cox_weights_fill_until and cox_model_digest_verify, but COX_INVALID for whatever is
 * wrong with the files. */
int cox_model_block_fill(const struct cox_model_config *config, const char *directory, void *block,
                         bool (*cancelled)(void *context), void *context, struct cox_error *err);

/* What is in a block of size bytes, aligned as above. Returns 0; COX_CORRUPT, COX_VERSION: no such
 * block, err says why. */
int cox_model_block_read(const void *block, uint64_t size, struct cox_model_block *ret_block,
                         struct cox_error *err);

/* Whether weights of one can take the place of the other's while caches, engine loops and who asks
 * for texts stay as they are. Returns 0; COX_INVALID: err says what differs. */
int cox_model_config_compare(const struct cox_model_config *present,
                             const struct cox_model_config *other, struct cox_error *err);

#endif
