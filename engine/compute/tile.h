/*
 * tile: arithmetic on tiles of COX_TILE_ROWS token rows, with the same bits for a row whatever its
 * place in the tile and whatever the other rows hold.
 *
 * Matrix kernels give a row other bits for other numbers of rows, so every product has exactly
 * COX_TILE_ROWS rows, padded with zeros. Eight, not more: the Haswell and Zen kernels of OpenBLAS
 * 0.3.21 treat the last rows of sixteen differently from the first twelve, while all kernels that
 * were tried treat eight alike. Because that is a property of a library and a processor,
 * cox_tile_rows_alike asks the very kernel that will be used; where the reply is no, products are
 * made row by row, slower and safe.
 *
 * Any thread, on its own buffers. Nothing is owned, nothing blocks. If the process dies nothing is
 * left.
 */
#ifndef COX_WORKER_MODEL_TILE_H
#define COX_WORKER_MODEL_TILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COX_TILE_ROWS 8u

/* One matrix, [out][in] with a leading dimension, to multiply tiles by. */
struct cox_matrix {
    const float *weights;
    /* floats from one row to the next */
    size_t leading;
    size_t out;
    size_t in;
};

/* One BLAS thread in this process: ranks are the parallelism here, and a second thread would split
 * products at other places. Call once before the first product. */
void cox_tile_start(void);

/* output[row][0 .. out) = the sums over i of input[row][i] * weights[.][i], for COX_TILE_ROWS rows,
 * input_leading and output_leading floats apart. rows_apart: one product per row. */
void cox_tile_multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                       float *output, size_t output_leading, bool rows_apart);

/* Puts one row, made up here, in all places of a tile and multiplies it by the matrix. scratch:
 * COX_TILE_ROWS * (in + out) floats. True when all rows came out with the same bits. */
bool cox_tile_rows_alike(const struct cox_matrix *matrix, float *scratch);

/* output = input / rms(input) * gain, per row of length floats, for COX_TILE_ROWS rows. */
void cox_tile_rms_norm(const float *input, const float *gain, float eps, size_t length,
                       float *output);

/* gate = silu(gate) * up, over columns of COX_TILE_ROWS rows that are leading floats apart. */
void cox_tile_silu_multiply(float *gate, const float *up, size_t columns, size_t leading);

/* target += parts[0] + ... in this order. */
void cox_tile_add_parts(float *target, const float *const *parts, size_t part_count, size_t length);

#endif
