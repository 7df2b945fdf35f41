/* kv_internal: what the library has beyond kv.h. Its contract is the same. */
#ifndef COX_CHANNEL_KV_INTERNAL_H
#define COX_CHANNEL_KV_INTERNAL_H

#include "channel/base/idioms.h"

#include <coxswain/kv.h>

/* The same, but no page of a block is there before reserve: for copies of blocks of which few are
 * ever used. Does not take the time that so much memory takes. */
int cox_kv_blocks_new_sparse(uint32_t block_count, uint64_t block_size,
                             struct cox_kv_blocks **ret_blocks, struct cox_error *err);
/* Before a block of sparse ones is written first: else a write without free memory kills the
 * process.
 * Returns
 *   0
 *   COX_INVALID: no such block
 *   COX_NO_SPACE
 *   -errno
 */
int cox_kv_blocks_reserve(struct cox_kv_blocks *blocks, uint32_t block);
COX_DEFINE_FREEP(struct cox_kv_blocks, cox_kv_blocks_free);

COX_DEFINE_FREEP(struct cox_kv_view, cox_kv_view_free);

#endif
