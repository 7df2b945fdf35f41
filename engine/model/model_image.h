/*
 * model_image: a whole model in memory that describes itself: a head with configuration and digest,
 * then the weights in the layout of weights.h. One process fills it from a folder; other processes
 * need only the image.
 *
 * Threads: any.
 * Ownership: the functions own nothing.
 * Blocks: fill, while it reads the files; read does not block.
 * Bytes: an image is input. The head is copied once and checked, so that no number in it leads
 *   outside the image. Weights are not checked here; the arithmetic tolerates any numbers.
 * If the process dies: a half-filled image has garbage and no head. Its owner shares it only after
 *   the fill has returned.
 */
#ifndef COX_MODEL_IMAGE_H
#define COX_MODEL_IMAGE_H

#include "weights.h"

struct cox_model_image {
    struct cox_model_config config;
    /* digest.h */
    uint64_t digest;
    /* in the image, aligned to COX_WEIGHTS_ALIGNMENT */
    const float *weights;
    uint64_t weights_size;
};

/* Bytes of an image for this configuration. */
uint64_t cox_model_image_size(const struct cox_model_config *config);

/* Loads config.json of a folder. Returns as cox_model_config_load, or -ENOMEM. */
int cox_model_folder_config(const char *directory, struct cox_model_config *ret_config,
                            struct cox_error *err);

/* Fills image, of cox_model_image_size bytes aligned to COX_WEIGHTS_ALIGNMENT, from the folder that
 * config was loaded from. The head is written last. progress is as that of cox_weights_fill.
 * Returns as cox_weights_fill and cox_model_digest_verify, except that any fault of the files is
 * COX_INVALID. */
int cox_model_image_fill(const struct cox_model_config *config, const char *directory, void *image,
                         bool (*progress)(void *context, uint32_t done, uint32_t count),
                         void *context, struct cox_error *err);

/* Checks an image of size bytes, aligned as above, and returns its contents.
 * Returns
 *   0
 *   COX_CORRUPT, COX_VERSION: not a valid image, err says why
 */
int cox_model_image_read(const void *image, uint64_t size, struct cox_model_image *ret_image,
                         struct cox_error *err);

/* Checks whether the weights of one model can replace the other's while caches, engine loops and
 * clients stay. Returns 0, or COX_INVALID: err says what differs. */
int cox_model_config_compare(const struct cox_model_config *present,
                             const struct cox_model_config *other, struct cox_error *err);

#endif
