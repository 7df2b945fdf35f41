/*
 * tile: arithmetic on tiles of COX_TILE_ROWS token rows. A row has the same bits whatever its place
 * in the tile, and whatever the other rows contain.
 *
 * A matrix product adds the terms of each sum one by one, in the order of the columns, and rounds
 * every product and every sum: the bits are those of two plain loops, on all processors. The rows
 * of a tile are the lanes of a vector. So rows never meet, and no sum is spread over lanes, which
 * would change the order. A tile with fewer rows is padded with zeros.
 *
 * Speed: of one core of an EPYC of 2021 (AVX2), in GFLOP/s beside OpenBLAS 0.3.21 with one thread:
 *
 *     sums x terms     this   OpenBLAS
 *     128 x 16           19         22      of the shipped model, as the next two
 *     44 x 128           31         28
 *     16 x 128           33         30
 *     128 x 256          56         37      of the widened models of the tests
 *     512 x 512          49         34
 *     4096 x 4096        17         11      weights from memory
 *
 * A processor without AVX2 has a third of that. `coxswain generate -n 1`, all its processes from
 * start to end, takes 0.39 s of processor time for the prompts of models/sums/heldout.txt, with
 * OpenBLAS 0.47 s; a model of hidden size 512, 60 prompts of 20 tokens: 1.30 s and 1.49 s; the same
 * with 10 prompts one after the other: 2.26 s and 2.55 s. (The least of five, on a loaded machine.)
 *
 * Threads: any, on its own buffers.
 * Ownership: nothing is owned.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_ENGINE_TILE_H
#define COX_ENGINE_TILE_H

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

/* output[row][0 .. out) = the sums over i of input[row][i] * weights[.][i], for COX_TILE_ROWS rows,
 * input_leading and output_leading floats apart. */
void cox_tile_multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                       float *output, size_t output_leading);

/* output = input / rms(input) * gain, per row of length floats, for COX_TILE_ROWS rows. */
void cox_tile_rms_norm(const float *input, const float *gain, float eps, size_t length,
                       float *output);

/* gate = silu(gate) * up, over columns of COX_TILE_ROWS rows that are leading floats apart. */
void cox_tile_silu_multiply(float *gate, const float *up, size_t columns, size_t leading);

/* target += parts[0] + ... in this order. */
void cox_tile_add_parts(float *target, const float *const *parts, size_t part_count, size_t length);

#endif
