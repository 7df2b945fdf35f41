/*
 * tile: arithmetic on tiles of COX_TILE_ROWS token rows. A row has the same bits whatever its place
 * in the tile, and whatever the other rows contain.
 *
 * Matrix kernels give a row other bits for other numbers of rows, so every product has exactly
 * COX_TILE_ROWS rows, padded with zeros. The number is eight because the Haswell and Zen kernels of
 * OpenBLAS 0.3.21 treat the last rows of sixteen differently from the first twelve. All kernels
 * tested treat eight alike. As this depends on library and processor, cox_tile_rows_alike tests the
 * kernel that will be used. If it treats rows differently, products are made row by row, which is
 * slower and safe.
 *
 * Threads: any, on its own buffers.
 * Ownership: nothing is owned.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_WORKER_MODEL_TILE_H
#define COX_WORKER_MODEL_TILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COX_TILE_ROWS 8u

/* A matrix [out][in] with a leading dimension, by which tiles are multiplied. */
struct cox_matrix {
    const float *weights;
    /* floats from one row to the next */
    size_t leading;
    size_t out;
    size_t in;
};

/* Sets OpenBLAS to one thread in this process. The ranks are the parallelism, and a second thread
 * would split products at other places. To be called once before the first product. */
void cox_tile_start(void);

/* output[row][0 .. out) = the sums over i of input[row][i] * weights[.][i], for COX_TILE_ROWS rows,
 * input_leading and output_leading floats apart. rows_apart: one product per row. */
void cox_tile_multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                       float *output, size_t output_leading, bool rows_apart);

/* Fills a tile with copies of one generated row and multiplies it by the matrix. scratch:
 * COX_TILE_ROWS * (in + out) floats. Returns true when all result rows have the same bits. */
bool cox_tile_rows_alike(const struct cox_matrix *matrix, float *scratch);

/* output = input / rms(input) * gain, per row of length floats, for COX_TILE_ROWS rows. */
void cox_tile_rms_norm(const float *input, const float *gain, float eps, size_t length,
                       float *output);

/* gate = silu(gate) * up, over columns of COX_TILE_ROWS rows that are leading floats apart. */
void cox_tile_silu_multiply(float *gate, const float *up, size_t columns, size_t leading);

/* target += parts[0] + ... in this order. */
void cox_tile_add_parts(float *target, const float *const *parts, size_t part_count, size_t length);

#endif
