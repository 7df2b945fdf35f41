/*
 * That a row of a tile has the same bits at every place and beside any other rows, for the matrix
 * kernels of this processor and, by starting itself again, for those of others it can run.
 */
#include "engine/compute/tile.h"
#include "channel/base/base.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const size_t outs[] = {2, 8, 10, 12, 16, 32, 44, 64, 86, 128, 176, 256, 512};
static const size_t ins[] = {1, 8, 10, 16, 44, 60, 64, 86, 128, 256, 384, 385, 688, 1024};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Room for the largest shape, twice as wide as the product reads. */
#define LEADING(n) (2 * (n))
#define LENGTH_MAX ((size_t)1024 * 2048)

struct buffers {
    float *weights, *input, *output, *row, *expected;
};

static float noise(uint32_t *state)
{
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return (float)(int32_t)*state * 0x1p-31f;
}

static struct buffers open_buffers(void)
{
    struct buffers b;
    uint32_t state = 1;

    b.weights = calloc(LENGTH_MAX, sizeof(float));
    b.input = calloc(COX_TILE_ROWS * LEADING(1024), sizeof(float));
    b.output = calloc(COX_TILE_ROWS * LEADING(1024), sizeof(float));
    b.row = calloc(1024, sizeof(float));
    b.expected = calloc(1024, sizeof(float));
    COX_ASSERT(b.weights && b.input && b.output && b.row && b.expected);
    for (size_t i = 0; i < LENGTH_MAX; i++)
        b.weights[i] = noise(&state);
    for (size_t i = 0; i < 1024; i++)
        b.row[i] = noise(&state);
    return b;
}

static void close_buffers(struct buffers *b)
{
    free(b->weights);
    free(b->input);
    free(b->output);
    free(b->row);
    free(b->expected);
}

/* Neighbours are zeros, noise, huge numbers and a NaN in turn. */
static void fill_neighbours(float *input, size_t length, size_t kind, uint32_t *state)
{
    for (size_t i = 0; i < length; i++)
        input[i] = kind == 0 ? 0 : noise(state) * (kind == 2 ? 1e30f : 1);
    if (kind == 3)
        input[length / 2] = NAN;
}

/* The number of (place, neighbours) for which the row came out otherwise. */
static int count_differences(struct buffers *b, size_t in, size_t out, size_t input_leading,
                             size_t weights_leading, size_t output_leading)
{
    const struct cox_matrix matrix = {b->weights, weights_leading, out, in};
    uint32_t state = 9;
    int differences = 0;

    for (size_t kind = 0; kind < 4; kind++)
        for (size_t place = 0; place < COX_TILE_ROWS; place++) {
            fill_neighbours(b->input, COX_TILE_ROWS * input_leading, kind, &state);
            memcpy(b->input + place * input_leading, b->row, in * sizeof(float));
            cox_tile_multiply(&matrix, b->input, input_leading, b->output, output_leading, false);
            if (kind == 0 && place == 0)
                memcpy(b->expected, b->output, out * sizeof(float));
            if (memcmp(b->expected, b->output + place * output_leading, out * sizeof(float)))
                differences++;
        }
    return differences;
}

static int count_bad_shapes(void)
{
    struct buffers b = open_buffers();
    int bad = 0;

    cox_tile_start();
    for (size_t o = 0; o < COUNT(outs); o++)
        for (size_t i = 0; i < COUNT(ins); i++) {
            const size_t in = ins[i], out = outs[o];
            /* Column-parallel, then row-parallel: a slice of wider rows. */
            int differences = count_differences(&b, in, out, in, in, LEADING(out)) +
                              count_differences(&b, in, out, LEADING(in), LEADING(in), out);

            if (differences) {
                fprintf(stderr, "%zu columns, %zu sums: %d differences\n", out, in, differences);
                bad++;
            }
        }
    close_buffers(&b);
    return bad;
}

static void s5_row_has_the_same_bits_at_every_place_of_a_tile(void **state)
{
    (void)state;
    assert_int_equal(count_bad_shapes(), 0);
}

#if defined(__x86_64__)
/* OpenBLAS chooses its kernels when it is loaded: another choice is another process. */
static void s5_row_has_the_same_bits_with_the_kernels_of_other_processors(void **state)
{
    const struct {
        const char *name;
        bool runs;
    } cores[] = {
        {"Nehalem", __builtin_cpu_supports("sse4.2")},
        {"Sandybridge", __builtin_cpu_supports("avx")},
        {"Haswell", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
        {"Zen", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
        {"SkylakeX", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
    };

    (void)state;
    for (size_t i = 0; i < COUNT(cores); i++) {
        int status = 0;
        pid_t pid;

        if (!cores[i].runs)
            continue;
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            setenv("OPENBLAS_CORETYPE", cores[i].name, 1);
            execl("/proc/self/exe", "tile_test", "--only-shapes", (char *)NULL);
            _exit(127);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("kernels of %s: status %#x", cores[i].name, (unsigned int)status);
    }
}
#endif

static void rows_apart_gives_the_same_product(void **state)
{
    struct buffers b = open_buffers();
    const struct cox_matrix matrix = {b.weights, 96, 40, 64};
    float apart[COX_TILE_ROWS * 40];
    uint32_t seed = 5;

    (void)state;
    fill_neighbours(b.input, COX_TILE_ROWS * 64, 1, &seed);
    cox_tile_multiply(&matrix, b.input, 64, b.output, 40, false);
    cox_tile_multiply(&matrix, b.input, 64, apart, 40, true);
    for (size_t i = 0; i < COX_TILE_ROWS * 40; i++)
        assert_true(fabsf(apart[i] - b.output[i]) < 1e-4f);
    close_buffers(&b);
}

static void probe_agrees_with_the_shapes(void **state)
{
    struct buffers b = open_buffers();
    const struct cox_matrix matrix = {b.weights, 96, 40, 64};
    float scratch[COX_TILE_ROWS * (40 + 64)];

    (void)state;
    assert_true(cox_tile_rows_alike(&matrix, scratch));
    close_buffers(&b);
}

static void small_functions_compute_what_they_say(void **state)
{
    float input[COX_TILE_ROWS * 2] = {3, 4}, gain[2] = {1, 2}, output[COX_TILE_ROWS * 2];
    float gate[COX_TILE_ROWS * 3] = {0, 1, 7}, up[COX_TILE_ROWS * 3] = {5, 2, 7};
    const float parts[] = {1, 10, 2, 20, 3, 30};
    const float *const places[] = {parts, parts + 2, parts + 4};
    float target[2] = {100, 200};

    (void)state;
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(s5_row_has_the_same_bits_at_every_place_of_a_tile),
#if defined(__x86_64__)
        cmocka_unit_test(s5_row_has_the_same_bits_with_the_kernels_of_other_processors),
#endif
        cmocka_unit_test(rows_apart_gives_the_same_product),
        cmocka_unit_test(probe_agrees_with_the_shapes),
        cmocka_unit_test(small_functions_compute_what_they_say),
    };

    if (argc == 2 && !strcmp(argv[1], "--only-shapes"))
        return count_bad_shapes() ? 1 : 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
