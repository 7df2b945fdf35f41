/*
 * forward: computes the token rows of a batch through the layers of the model, to logits.
 *
 * The order of the arithmetic is the same for every number of ranks and every batch. Token rows are
 * processed in tiles of COX_TILE_ROWS. Heads, feed-forward columns and vocabulary are divided into
 * the slices of share.h. Query, gate, up and output layers are one product per tile and slice; keys
 * and values one per tile and KV head. The two layers that sum over heads or columns are one
 * product per tile and slice, added in slice order. The embedding row of a token is copied from the
 * rank that owns its vocabulary slice. No number depends on which rank computed a slice, so logits
 * have the same bits for every number of ranks that divides the slices.
 *
 * Rows with a LoRA adapter (adapter.h) are grouped by adapter, again in tiles. The adapter's
 * contribution is added to their rows only: in place to query, key and value; per slice to the
 * attention output, before slices are summed. So a row has the same bits whatever adapters the
 * other rows have.
 *
 * Threads: one at a time per object, the worker's step thread.
 * Ownership: weights and cache are lent; the object owns its scratch, all allocated at creation.
 * Blocks: nothing, except that the caller's gather may wait for other ranks.
 * If the process dies: the blocks of the cache keep what was written. Positions are explicit, so a
 *   repeated step writes the same bytes.
 */
#ifndef COX_ENGINE_FORWARD_H
#define COX_ENGINE_FORWARD_H

#include "channel/base/idioms.h"
#include "adapter.h"
#include "cache.h"
#include "engine/model/weights.h"

/* Tiles computed together by default; a longer prompt is computed in several passes. */
#define COX_TILE_COUNT_DEFAULT 16u
#define COX_TILE_COUNT_MAX 1024u

struct cox_forward;

/* weights: a block with the slices of the share, in its layout, lent until free; the whole model,
 * or only what the share needs. tile_count_max 0: COX_TILE_COUNT_DEFAULT. adapters, how rows find
 * those that they name, is copied; what it points to is lent until free. All zero: no row may name
 * one.
 * Returns
 *   0
 *   COX_INVALID: an impossible share or tile count
 *   COX_NO_SPACE
 */
int cox_forward_new(const struct cox_model_config *config, const struct cox_weights_layout *layout,
                    const float *weights, const struct cox_share *share, uint32_t tile_count_max,
                    const struct cox_adapter_source *adapters, struct cox_forward **ret_forward,
                    struct cox_error *err);
struct cox_forward *cox_forward_free(struct cox_forward *forward);
COX_DEFINE_FREEP(struct cox_forward, cox_forward_free);

/* The longest slice, in floats, that gather is called with. */
size_t cox_forward_slice_length_max(const struct cox_forward *forward);

/* Receives the vocab_size logits that follow the last token of a row of the batch, lent for the
 * call. Returns 0, or a result that ends the run. */
typedef int (*cox_logits_fn)(void *context, uint32_t row, const float *logits);

/* Computes all rows of the batch. Calls fn, in row order, for each row that emits, or with all_rows
 * for every row. The caller has checked the batch (model.h) and that its adapters exist. Keys and
 * values are stored in the cache as they are computed.
 * Returns
 *   0
 *   COX_ABORTED: the batch was cancelled meanwhile
 *   the result of gather or fn
 */
int cox_forward_run(struct cox_forward *forward, struct cox_cache *cache,
                    const struct cox_batch *batch, bool all_rows, cox_logits_fn fn, void *context,
                    struct cox_error *err);

#endif
