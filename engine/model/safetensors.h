/*
 * safetensors: one .safetensors file, checked completely when it is opened, and read tensor by
 * tensor as F32.
 *
 * Format: the length of the header, 8 bytes, little-endian; the header, a JSON object of name:
 * {dtype, shape, data_offsets: [begin, end)}; then the data, which the tensors cover without
 * overlap or gap.
 *
 * Threads: any; several may read one open file at the same time.
 * Ownership: the object owns its fd and its names.
 * Blocks: only on the file. The file may change while it is open: that gives other numbers or
 *   COX_CORRUPT, never a crash.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_MODEL_SAFETENSORS_H
#define COX_MODEL_SAFETENSORS_H

#include "channel/base/idioms.h"

#include <coxswain/base.h>

#define COX_TENSOR_DIMENSION_COUNT_MAX 8

struct cox_safetensors;

/* Opens and checks a file: length and JSON of the header, known dtypes, sizes equal to the product
 * of the shape, offsets in range and aligned to the dtype, no overlap, no gap, no name twice.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_CORRUPT: err has what was found and what was expected
 *   -errno
 */
int cox_safetensors_new(const char *path, struct cox_safetensors **ret_file, struct cox_error *err);
struct cox_safetensors *cox_safetensors_free(struct cox_safetensors *file);
COX_DEFINE_FREEP(struct cox_safetensors, cox_safetensors_free);

size_t cox_safetensors_count(const struct cox_safetensors *file);
/* The name of tensor i, below the count; lent until free. */
const char *cox_safetensors_name(const struct cox_safetensors *file, size_t i);
bool cox_safetensors_has(const struct cox_safetensors *file, const char *name);
/* Gets the ret_count dimensions of a tensor. Returns 0, or COX_NOT_FOUND: no tensor of that name.
 */
int cox_safetensors_shape(const struct cox_safetensors *file, const char *name,
                          uint64_t ret_shape[COX_TENSOR_DIMENSION_COUNT_MAX], size_t *ret_count,
                          struct cox_error *err);

/* Reads a tensor of dtype F32, F16 or BF16 and exactly that shape, as F32 in row order, into the
 * caller's buffer. Numbers that are not finite are refused: they would silently make every token
 * that uses them nonsense. After a failure the buffer is undefined.
 * Returns
 *   0
 *   COX_NOT_FOUND: no tensor of that name
 *   COX_INVALID: another shape or dtype, or a number that is not finite
 *   COX_CORRUPT: the file became shorter
 *   -errno
 */
int cox_safetensors_read(const struct cox_safetensors *file, const char *name,
                         const uint64_t *shape, size_t dimension_count, float *buffer,
                         struct cox_error *err);

/* A range of rows and columns within the shape of a matrix. */
struct cox_tensor_part {
    uint64_t row_first;
    /* may be 0: the tensor is checked but not read */
    uint64_t row_count;
    uint64_t column_first;
    uint64_t column_count;
};

/* As cox_safetensors_read for a part of a rows x columns matrix. buffer receives row_count rows of
 * column_count numbers, without gaps. Only numbers that are read are checked to be finite. */
int cox_safetensors_read_part(const struct cox_safetensors *file, const char *name, uint64_t rows,
                              uint64_t columns, const struct cox_tensor_part *part, float *buffer,
                              struct cox_error *err);

/* Extends a digest (digest.h) by the header, the size and a sample of the data.
 * Returns
 *   0
 *   COX_CORRUPT: the file became shorter
 *   -errno
 */
int cox_safetensors_digest(const struct cox_safetensors *file, uint64_t *digest,
                           struct cox_error *err);

#endif
