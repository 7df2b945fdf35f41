/*
 * That a product has the bits of two plain loops in every row of a tile: at every place and beside
 * any other rows. The test tile has the kernel that this processor gets, tile_baseline the one of
 * an x86-64 processor without AVX2.
 */
#include "engine/compute/tile.h"
#include "tests/lib/test.h"

#include <math.h>

/* Beside multiples of the kernel's 8 sums, 4 columns and 512 columns, and around them. */
static const size_t outs[] = {1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 44, 86, 176, 256};
static const size_t ins[] = {1, 3, 4, 5, 8, 10, 44, 64, 86, 128, 385, 511, 512, 513, 1024, 1030};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Of input, matrix and output: a product reads and writes slices of wider rows. */
#define GAP 13
#define UNTOUCHED 4711.0f

static float noise(uint32_t *state)
{
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return (float)(int32_t)*state * 0x1p-31f;
}

static float *new_noise(size_t length, uint32_t seed)
{
    /* No longer than what may be read: sanitizers see what is read behind it. */
    float *numbers = malloc(length * sizeof(float));

    COX_ASSERT(numbers);
    for (size_t i = 0; i < length; i++)
        numbers[i] = noise(&seed);
    return numbers;
}

/* What tile.h promises, in its words. */
static float sum_of_terms(const float *weights, const float *input, size_t in)
{
    float sum = 0;

    for (size_t i = 0; i < in; i++)
        sum += weights[i] * input[i];
    return sum;
}

/* Neighbours are zeros, noise, huge numbers and a NaN in turn. */
static void fill_neighbours(float *input, size_t length, size_t kind, uint32_t *state)
{
    for (size_t i = 0; i < length; i++)
        input[i] = kind == 0 ? 0 : noise(state) * (kind == 2 ? 1e30f : 1);
    if (kind == 3)
        input[length / 2] = NAN;
}

static void check_shape(size_t out, size_t in, size_t gap)
{
    const size_t input_leading = in + gap, output_leading = out + gap;
    const size_t input_length = (COX_TILE_ROWS - 1) * input_leading + in;
    const size_t output_length = (COX_TILE_ROWS - 1) * output_leading + out;
    float *weights = new_noise((out - 1) * (in + gap) + in, 1), *row = new_noise(in, 2);
    float *input = new_noise(input_length, 3), *output = new_noise(output_length, 4);
    float *expected = new_noise(out, 5);
    const struct cox_matrix matrix = {weights, in + gap, out, in};
    uint32_t state = 9;

    for (size_t o = 0; o < out; o++)
        expected[o] = sum_of_terms(weights + o * matrix.leading, row, in);
    for (size_t kind = 0; kind < 4; kind++)
        for (size_t place = 0; place < COX_TILE_ROWS; place++) {
            fill_neighbours(input, input_length, kind, &state);
            memcpy(input + place * input_leading, row, in * sizeof(float));
            for (size_t i = 0; i < output_length; i++)
                output[i] = UNTOUCHED;
            cox_tile_multiply(&matrix, input, input_leading, output, output_leading);
            if (memcmp(expected, output + place * output_leading, out * sizeof(float)) != 0)
                fail_msg("%zu sums of %zu terms: other bits in row %zu, neighbours %zu", out, in,
                         place, kind);
            for (size_t i = 0; i < output_length; i++)
                if (i % output_leading >= out && memcmp(&output[i], &(float){UNTOUCHED}, 4) != 0)
                    fail_msg("%zu sums of %zu terms: it wrote between the rows", out, in);
        }
    free(weights);
    free(row);
    free(input);
    free(output);
    free(expected);
}

PLAIN_TEST(s5_row_has_the_bits_of_two_plain_loops_at_every_place_of_a_tile)
{
    for (size_t o = 0; o < COUNT(outs); o++)
        for (size_t i = 0; i < COUNT(ins); i++) {
            check_shape(outs[o], ins[i], 0);
            check_shape(outs[o], ins[i], GAP);
        }
}

PLAIN_TEST(small_functions_compute_what_they_say)
{
    float input[COX_TILE_ROWS * 2] = {3, 4}, gain[2] = {1, 2}, output[COX_TILE_ROWS * 2];
    float gate[COX_TILE_ROWS * 3] = {0, 1, 7}, up[COX_TILE_ROWS * 3] = {5, 2, 7};
    const float parts[] = {1, 10, 2, 20, 3, 30};
    const float *const places[] = {parts, parts + 2, parts + 4};
    float target[2] = {100, 200};

    cox_tile_rms_norm(input, gain, 1e-6f, 2, output);
    assert_true(fabsf(output[0] - 3 / sqrtf(12.5f)) < 1e-6f);
    assert_true(fabsf(output[1] - 8 / sqrtf(12.5f)) < 1e-6f);
    assert_true(output[2] >= 0 && output[2] <= 0); /* a padding row stays zero */
    cox_tile_silu_multiply(gate, up, 2, 3);
    assert_true(gate[0] >= 0 && gate[0] <= 0);
    assert_true(fabsf(gate[1] - 2 / (1 + expf(-1))) < 1e-6f);
    assert_true(gate[2] >= 7 && gate[2] <= 7); /* beyond the columns: untouched */
    cox_tile_add_parts(target, places, 3, 2);
    assert_true(target[0] >= 106 && target[0] <= 106);
    assert_true(target[1] >= 260 && target[1] <= 260);
}
