/*
 * checkpoint: the tensors of a folder, in one model.safetensors, or in the shards that
 * model.safetensors.index.json names.
 *
 * Threads: any.
 * Ownership: the object owns its open files.
 * Blocks: only on the files.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_MODEL_CHECKPOINT_H
#define COX_MODEL_CHECKPOINT_H

#include "channel/base/idioms.h"
#include "safetensors.h"

/* Limit of the files of one checkpoint; each stays open. */
#define COX_SHARD_COUNT_MAX 256

struct cox_checkpoint;

/* Opens and checks model.safetensors of the folder or, without one, the index and all its shards.
 * Shard names with a '/' are refused, so that an index cannot reach outside its folder.
 * Returns
 *   0
 *   COX_NOT_FOUND: neither file exists, or a shard is missing
 *   COX_CORRUPT
 *   COX_INVALID: an invalid index
 *   -errno
 */
int cox_checkpoint_new(const char *directory, struct cox_checkpoint **ret_checkpoint,
                       struct cox_error *err);
struct cox_checkpoint *cox_checkpoint_free(struct cox_checkpoint *checkpoint);
COX_DEFINE_FREEP(struct cox_checkpoint, cox_checkpoint_free);

/* The name of tensor i of all files, counted from 0; NULL: no more. Lent until free. */
const char *cox_checkpoint_name(const struct cox_checkpoint *checkpoint, size_t i);
/* Returns whether there is a readable tensor of that name. */
bool cox_checkpoint_has(const struct cox_checkpoint *checkpoint, const char *name);

/* As cox_safetensors_read, from the file that contains the tensor. */
int cox_checkpoint_read(const struct cox_checkpoint *checkpoint, const char *name,
                        const uint64_t *shape, size_t dimension_count, float *buffer,
                        struct cox_error *err);
/* As cox_safetensors_read_part. */
int cox_checkpoint_read_part(const struct cox_checkpoint *checkpoint, const char *name,
                             uint64_t rows, uint64_t columns, const struct cox_tensor_part *part,
                             float *buffer, struct cox_error *err);
/* Extends a digest (digest.h) by the contents of the files. Returns as cox_safetensors_digest. */
int cox_checkpoint_digest(const struct cox_checkpoint *checkpoint, uint64_t *digest,
                          struct cox_error *err);

#endif
