#include "tile.h"

#include <math.h>
#include <string.h>

/* Sums that a kernel has in registers, each of all rows of a tile. */
#define SUMS 8u
/* Columns at a time: 16 KiB of input, which stay in the processor's first cache. */
#define STRETCH 512u

#define INLINE static inline __attribute__((always_inline))

/* A number of each row. Compilers divide it where the processor's vectors are shorter. */
typedef float rows __attribute__((vector_size(COX_TILE_ROWS * sizeof(float)), may_alias));

/* ---- transposition ---- */

typedef float four __attribute__((vector_size(4 * sizeof(float))));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(4 * sizeof(int32_t))));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

INLINE void transpose_four(const float *from, size_t from_leading, float *to, size_t to_leading)
{
    four in[4], out[4];

    for (size_t i = 0; i < 4; i++)
        memcpy(&in[i], from + i * from_leading, sizeof in[i]);
    const four low01 = SHUFFLE(in[0], in[1], 0, 4, 1, 5), low23 = SHUFFLE(in[2], in[3], 0, 4, 1, 5);
    const four top01 = SHUFFLE(in[0], in[1], 2, 6, 3, 7), top23 = SHUFFLE(in[2], in[3], 2, 6, 3, 7);
    out[0] = SHUFFLE(low01, low23, 0, 1, 4, 5);
    out[1] = SHUFFLE(low01, low23, 2, 3, 6, 7);
    out[2] = SHUFFLE(top01, top23, 0, 1, 4, 5);
    out[3] = SHUFFLE(top01, top23, 2, 3, 6, 7);
    for (size_t i = 0; i < 4; i++)
        memcpy(to + i * to_leading, &out[i], sizeof out[i]);
}

/* to[j][i] = from[i][j], for i < height and j < width. */
INLINE void transpose(const float *from, size_t from_leading, size_t height, size_t width,
                      float *to, size_t to_leading)
{
    for (size_t i = 0; i < height; i += 4)
        for (size_t j = 0; j < width; j += 4)
            if (height - i >= 4 && width - j >= 4)
                transpose_four(from + i * from_leading + j, from_leading, to + j * to_leading + i,
                               to_leading);
            else
                for (size_t k = i; k < i + 4 && k < height; k++)
                    for (size_t l = j; l < j + 4 && l < width; l++)
                        to[l * to_leading + k] = from[k * from_leading + l];
}

/* ---- products ---- */

/* sums[j] += the terms of `count` columns of the matrix's row first + j. Where the matrix ends
 * before, its last row stands in, and nobody reads that sum. */
INLINE void add_terms(const struct cox_matrix *matrix, size_t first, size_t column, size_t count,
                      const rows *tile, rows *sums)
{
    const float *weights[SUMS];
    rows sum[SUMS];

    for (size_t j = 0; j < SUMS; j++) {
        const size_t row = first + j < matrix->out ? first + j : matrix->out - 1;
        weights[j] = matrix->weights + row * matrix->leading + column;
    }
    memcpy(sum, sums, sizeof sum);
    for (size_t i = 0; i < count; i++) {
#pragma GCC unroll 8
        for (size_t j = 0; j < SUMS; j++)
            sum[j] += weights[j][i] * tile[i];
    }
    memcpy(sums, sum, sizeof sum);
}

INLINE void multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                     float *output, size_t output_leading)
{
    rows tile[STRETCH];

    for (size_t column = 0; column < matrix->in; column += STRETCH) {
        const size_t left = matrix->in - column, count = left < STRETCH ? left : STRETCH;

        transpose(input + column, input_leading, COX_TILE_ROWS, count, (float *)tile,
                  COX_TILE_ROWS);
        for (size_t first = 0; first < matrix->out; first += SUMS) {
            const size_t more = matrix->out - first, width = more < SUMS ? more : SUMS;
            rows sums[SUMS] = {0};

            if (column)
                transpose(output + first, output_leading, COX_TILE_ROWS, width, (float *)sums,
                          COX_TILE_ROWS);
            add_terms(matrix, first, column, count, tile, sums);
            transpose((const float *)sums, COX_TILE_ROWS, width, COX_TILE_ROWS, output + first,
                      output_leading);
        }
    }
}

#if defined(__x86_64__) && !defined(COX_TILE_BASELINE)
/* Without FMA: fused, a product is not rounded, and sums have other bits. */
__attribute__((target("avx2"))) static void multiply_avx2(const struct cox_matrix *matrix,
                                                          const float *input, size_t input_leading,
                                                          float *output, size_t output_leading)
{
    multiply(matrix, input, input_leading, output, output_leading);
}
#endif

void cox_tile_multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                       float *output, size_t output_leading)
{
#if defined(__x86_64__) && !defined(COX_TILE_BASELINE)
    if (__builtin_cpu_supports("avx2")) {
        multiply_avx2(matrix, input, input_leading, output, output_leading);
        return;
    }
#endif
    multiply(matrix, input, input_leading, output, output_leading);
}

/* ---- the rest ---- */

void cox_tile_rms_norm(const float *input, const float *gain, float eps, size_t length,
                       float *output)
{
    for (size_t row = 0; row < COX_TILE_ROWS; row++) {
        const float *from = input + row * length;
        float *to = output + row * length;
        double squares = 0;

        for (size_t i = 0; i < length; i++)
            squares += (double)from[i] * (double)from[i];
        float scale = (float)(1.0 / sqrt(squares / (double)length + (double)eps));
        for (size_t i = 0; i < length; i++)
            to[i] = gain[i] * (from[i] * scale);
    }
}

void cox_tile_silu_multiply(float *gate, const float *up, size_t columns, size_t leading)
{
    for (size_t row = 0; row < COX_TILE_ROWS; row++)
        for (size_t i = row * leading; i < row * leading + columns; i++)
            gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* In stretches of a length known to the compiler, which vectorises them, and reads each part
 * sequentially. */
static void add_stretch(float *restrict target, const float *const *parts, size_t part_count,
                        size_t from)
{
    float sum[STRETCH];

    memcpy(sum, parts[0] + from, sizeof sum);
    for (size_t part = 1; part < part_count; part++) {
        const float *restrict one = parts[part] + from;

        for (size_t i = 0; i < STRETCH; i++)
            sum[i] += one[i];
    }
    for (size_t i = 0; i < STRETCH; i++)
        target[from + i] += sum[i];
}

void cox_tile_add_parts(float *target, const float *const *parts, size_t part_count, size_t length)
{
    size_t i = 0;

    for (; length - i >= STRETCH; i += STRETCH)
        add_stretch(target, parts, part_count, i);
    for (; i < length; i++) {
        float sum = parts[0][i];

        for (size_t part = 1; part < part_count; part++)
            sum += parts[part][i];
        target[i] += sum;
    }
}
