#include "tile.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

void cox_tile_start(void)
{
    openblas_set_num_threads(1);
}

static void multiply(const struct cox_matrix *matrix, size_t rows, const float *input,
                     size_t input_leading, float *output, size_t output_leading)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, (blasint)matrix->out,
                (blasint)matrix->in, 1.0f, input, (blasint)input_leading, matrix->weights,
                (blasint)matrix->leading, 0.0f, output, (blasint)output_leading);
}

void cox_tile_multiply(const struct cox_matrix *matrix, const float *input, size_t input_leading,
                       float *output, size_t output_leading, bool rows_apart)
{
    if (!rows_apart) {
        multiply(matrix, COX_TILE_ROWS, input, input_leading, output, output_leading);
        return;
    }
    for (size_t row = 0; row < COX_TILE_ROWS; row++)
        multiply(matrix, 1, input + row * input_leading, input_leading,
                 output + row * output_leading, output_leading);
}

bool cox_tile_rows_alike(const struct cox_matrix *matrix, float *scratch)
{
    float *input = scratch;
    float *output = scratch + COX_TILE_ROWS * matrix->in;
    uint32_t noise = 1;

    /* Numbers of both signs with all mantissa bits in use, so that any other order of the sums
     * rounds differently somewhere. */
    for (size_t i = 0; i < matrix->in; i++) {
        noise = noise * UINT32_C(1664525) + UINT32_C(1013904223);
        float number = (float)(int32_t)noise * 0x1p-31f;
        for (size_t row = 0; row < COX_TILE_ROWS; row++)
            input[row * matrix->in + i] = number;
    }
    multiply(matrix, COX_TILE_ROWS, input, matrix->in, output, matrix->out);
    for (size_t row = 1; row < COX_TILE_ROWS; row++)
        if (memcmp(output, output + row * matrix->out, matrix->out * sizeof(float)) != 0)
            return false;
    return true;
}

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

/* Stretches of a length known to the compiler: it vectorises them, and reads each part
 * sequentially. */
#define STRETCH 512

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
