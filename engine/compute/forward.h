/*
 * forward: the token rows of a batch through the layers of the model, to logits.
 *
 * The arithmetic is defined once, for every number of ranks and every batch. Token rows are
 * gathered in tiles of COX_TILE_ROWS; heads, feed-forward columns and vocabulary are in
 * the slices of share.h. Query, gate, up and output layers are one product per tile and slice,
 * keys and values one per tile and KV head; the two layers that sum over heads or columns are one
 * product per tile and slice, and the products are added in the order of the slices. The row of the
 * embedding that a token stands for is copied from the rank that owns its slice of the vocabulary.
 * No number depends on which rank computed which slice, so logits have the same bits for
 * every number of ranks that divides the slices.
 *
 * Rows that name a LoRA adapter (adapter.h) are brought together by adapter, again in tiles, and
 * what it adds is added to their rows alone: to query, key and value where they are, to the
 * attention output per slice, before slices are summed. So a row has the same bits whatever
 * adapters the others have.
 *
 * Threads: one at a time per object, the worker's step thread.
 * Ownership: weights and cache are lent; the object owns its scratch, all of it allocated at
 *   creation.
 * Blocks: not by itself; the caller's gather may wait for other ranks. If the process dies nothing
 *   is left but what was written to lent cache blocks; positions are explicit, so a repeat writes
 *   the same there.
 */
#ifndef COX_WORKER_MODEL_FORWARD_H
#define COX_WORKER_MODEL_FORWARD_H

#include "adapter.h"
#include "cache.h"
#include "engine/model/weights.h"

/* Tiles computed together, where the caller does not say: longer prompts go through in chunks of
 * them. */
#define COX_TILE_COUNT_DEFAULT 16u
#define COX_TILE_COUNT_MAX 1024u

struct cox_forward;

/* weights: a block that holds the slices of the share, with its layout, lent until free: the whole
 * model, or what the share needs. tile_count_max 0: COX_TILE_COUNT_DEFAULT. Returns 0 and gives the
 * object; COX_INVALID a share or tile count that cannot be; COX_NO_SPACE. */
int cox_forward_new(const struct cox_model_config *config, const struct cox_weights_layout *layout,
                    const float *weights, const struct cox_share *share, uint32_t tile_count_max,
                    struct cox_forward **ret_forward, struct cox_error *err);
struct cox_forward *cox_forward_free(struct cox_forward *forward);
void cox_forward_freep(struct cox_forward **forward); /* for _cox_cleanup_ */

/* True when this machine's matrix kernels treat rows of a tile differently, and products are made
 * row by row. */
bool cox_forward_rows_apart(const struct cox_forward *forward);

/* Where rows find the adapters that they name; NULL: rows name none. source is copied, what it
 * points to is lent until free. */
void cox_forward_set_adapters(struct cox_forward *forward, const struct cox_adapter_source *source);

/* The longest slice, in floats, that gather is called with. */
size_t cox_forward_slice_length_max(const struct cox_forward *forward);

/* Gets the vocab_size logits that follow the last token of a row of the batch; they live until it
 * returns. Returns 0, or a result that ends the run. */
typedef int (*cox_logits_fn)(void *context, uint32_t row, const float *logits);

/* Computes all rows of the batch and calls fn, in order of the rows, for each row that emits, or
 * with all_rows for each row. The batch was checked (model.h), the adapters that it names are
 * there; keys and values land in the cache as they are computed. Returns 0; COX_ABORTED the batch
 * was given up meanwhile; what gather or fn returned. */
int cox_forward_run(struct cox_forward *forward, struct cox_cache *cache,
                    const struct cox_batch *batch, bool all_rows, cox_logits_fn fn, void *context,
                    struct cox_error *err);

#endif
