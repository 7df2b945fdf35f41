#include "model_fixture.h"
#include "engine/model/safetensors.h"
#include "tests/lib/test.h"

#include <math.h>

#define FILE_NAME "model.safetensors"

static char directory[FIXTURE_PATH_SIZE];
static char path[FIXTURE_PATH_SIZE + 32];

static int open_directory(void **state)
{
    (void)state;
    fixture_directory_create(directory);
    snprintf(path, sizeof(path), "%s/" FILE_NAME, directory);
    return 0;
}

static int close_directory(void **state)
{
    (void)state;
    fixture_directory_remove(directory);
    return 0;
}

static void open_fails(int code, const char *word)
{
    struct cox_safetensors *file = NULL;
    struct cox_error err = {0};
    int r = cox_safetensors_new(path, &file, &err);

    if (r != code)
        fail_msg("%d instead of %d: %s", r, code, err.text);
    assert_null(file);
    if (!strstr(err.text, word) || !strstr(err.text, FILE_NAME))
        fail_msg("\"%s\" does not say \"%s\" or the file", err.text, word);
}

TEST_OWNED(cox_safetensors_free)

static struct cox_safetensors *open_ok(void)
{
    struct cox_safetensors *file = NULL;

    assert_ok(cox_safetensors_new(path, &file, test_err()));
    return test_own(file, cox_safetensors_free_owned);
}

PLAIN_TEST(reads_three_dtypes_as_f32)
{
    /* The halves stand first, so that the file also has a tensor at an odd place of memory. */
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"half\":{\"dtype\":\"F16\",\"shape\":[6],\"data_offsets\":[0,12]},\"brain\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[12,16]},\"full\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]},\"none\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[24,24]}} ";
    struct {
        uint16_t half[6], brain[2];
        float full[2];
    } data = {
        /* 1, -2, the largest, the smallest normal, the smallest subnormal, -0 */
        {0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x8000},
        {0x3fc0, 0xc2f7}, /* 1.5, -123.5 */
        {0.1f, -3e38f},
    };
    const float halves[] = {1, -2, 65504, 0x1p-14f, 0x1p-24f, -0.0f};
    const float brains[] = {1.5f, -123.5f};
    float buffer[6];

    fixture_write_safetensors(directory, FILE_NAME, header, &data, sizeof(data));
    struct cox_safetensors *file = open_ok();
    assert_int_equal(cox_safetensors_count(file), 4);
    assert_true(cox_safetensors_has(file, "half"));
    assert_false(cox_safetensors_has(file, "__metadata__"));
    assert_int_equal(cox_safetensors_read(file, "half", (uint64_t[]){6}, 1, buffer, NULL), 0);
    assert_memory_equal(buffer, halves, sizeof(halves));
    assert_int_equal(cox_safetensors_read(file, "brain", (uint64_t[]){1, 2}, 2, buffer, NULL), 0);
    assert_memory_equal(buffer, brains, sizeof(brains));
    assert_int_equal(cox_safetensors_read(file, "full", (uint64_t[]){2}, 1, buffer, NULL), 0);
    assert_memory_equal(buffer, data.full, sizeof(data.full));
    assert_int_equal(cox_safetensors_read(file, "none", (uint64_t[]){0, 3}, 2, buffer, NULL), 0);
}

/* Rows, columns, both and neither of a 3 x 4 matrix that counts from 1, in each dtype. */
PLAIN_TEST(reads_parts_of_a_matrix)
{
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    static const struct cox_tensor_part parts[] = {
        {0, 3, 0, 4}, {1, 1, 0, 4}, {1, 2, 0, 4}, {0, 3, 1, 2},
        {2, 1, 3, 1}, {3, 0, 0, 4}, {1, 2, 2, 0},
    };

    for (size_t d = 0; d < 3; d++) {
        const uint32_t size = d ? 2 : 4;
        uint16_t halves[12];
        float floats[12];
        char header[128];

        for (uint32_t i = 0; i < 12; i++) {
            uint32_t bits;

            floats[i] = (float)(i + 1);
            memcpy(&bits, &floats[i], sizeof(bits));
            /* BF16 is the upper half; F16 has another exponent, and these numbers fit. */
            halves[i] = (uint16_t)(d == 2 ? bits >> 16
                                          : (((bits >> 23) - 112) << 10) | ((bits >> 13) & 1023));
        }
        snprintf(header, sizeof(header),
                 "{\"t\":{\"dtype\":\"%s\",\"shape\":[3,4],\"data_offsets\":[0,%u]}}", dtypes[d],
                 12 * size);
        fixture_write_safetensors(directory, FILE_NAME, header,
                                  d ? (const void *)halves : (const void *)floats, 12 * size);
        struct cox_safetensors *file = open_ok();
        for (size_t p = 0; p < sizeof(parts) / sizeof(parts[0]); p++) {
            const struct cox_tensor_part *part = &parts[p];
            float buffer[13];

            for (size_t i = 0; i < 13; i++)
                buffer[i] = -7;
            assert_int_equal(cox_safetensors_read_part(file, "t", 3, 4, part, buffer, NULL), 0);
            for (size_t i = 0; i < part->row_count * part->column_count; i++) {
                const uint64_t row = part->row_first + i / part->column_count;
                const uint64_t column = part->column_first + i % part->column_count;

                assert_true((uint64_t)buffer[i] == row * 4 + column + 1);
            }
            assert_true(buffer[part->row_count * part->column_count] < -6);
            assert_int_equal(cox_safetensors_read_part(file, "t", 4, 3, part, buffer, NULL),
                             COX_INVALID);
            assert_int_equal(cox_safetensors_read_part(file, "u", 3, 4, part, buffer, NULL),
                             COX_NOT_FOUND);
        }
    }
}

/* Only what is read is looked at, and the text counts in the whole tensor. */
PLAIN_TEST(a_part_is_refused_for_its_own_numbers_alone)
{
    static const char header[] =
        "{\"t\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}";
    const float numbers[] = {1, 2, 3, 4, (float)INFINITY, 6};
    float buffer[6];

    fixture_write_safetensors(directory, FILE_NAME, header, numbers, sizeof(numbers));
    struct cox_safetensors *file = open_ok();
    assert_ok(cox_safetensors_read_part(file, "t", 2, 3, &(struct cox_tensor_part){0, 2, 2, 1},
                                        buffer, test_err()));
    assert_refused(cox_safetensors_read_part(file, "t", 2, 3, &(struct cox_tensor_part){1, 1, 1, 2},
                                             buffer, test_err()),
                   COX_INVALID, "number 4 of tensor t is not finite");
}

PLAIN_TEST(every_half_is_the_float_of_its_value)
{
    static const char header[] =
        "{\"t\":{\"dtype\":\"F16\",\"shape\":[31744],\"data_offsets\":[0,63488]}}";
    uint16_t *halves = test_own(calloc(31744, sizeof(*halves)), free);
    float *numbers = test_own(calloc(31744, sizeof(*numbers)), free);

    assert_true(halves && numbers);
    for (uint32_t i = 0; i < 31744; i++) /* all that are positive and finite */
        halves[i] = (uint16_t)i;
    fixture_write_safetensors(directory, FILE_NAME, header, halves, 63488);
    struct cox_safetensors *file = open_ok();
    assert_int_equal(cox_safetensors_read(file, "t", (uint64_t[]){31744}, 1, numbers, NULL), 0);
    for (uint32_t i = 0; i < 31744; i++) {
        double step = ldexp(1, i < 2048 ? -24 : (int)(i >> 10) - 25);
        double value = i < 1024 ? i * step : (1024 + (i & 1023)) * step;

        assert_true((double)numbers[i] >= value && (double)numbers[i] <= value);
    }
}

PLAIN_TEST(refuses_files_that_are_too_short_or_something_else)
{
    const uint64_t sizes[] = {0, 1, 100, UINT64_C(100000001), UINT64_MAX};
    struct cox_safetensors *file = NULL;

    fixture_write(directory, FILE_NAME, "", 0);
    open_fails(COX_CORRUPT, "0 bytes");
    fixture_write(directory, FILE_NAME, "abcdefg", 7);
    open_fails(COX_CORRUPT, "7 bytes");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        fixture_write(directory, FILE_NAME, &sizes[i], sizeof(sizes[i]));
        open_fails(COX_CORRUPT, "its header would have");
    }
    assert_int_equal(remove(path), 0);
    open_fails(COX_NOT_FOUND, "does not exist");
    assert_int_equal(mkdir(path, 0700), 0);
    open_fails(COX_CORRUPT, "not a regular file");
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    open_fails(COX_CORRUPT, "not a regular file");
    assert_int_equal(remove(path), 0);
    assert_int_equal(cox_safetensors_new(path, &file, NULL), COX_NOT_FOUND); /* err is optional */
}

#define ENTRY(name, dtype, shape, begin, end)                                                      \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end   \
    "]}"

PLAIN_TEST(refuses_headers_that_make_no_sense)
{
    /* All with 16 bytes of data. */
    static const struct {
        const char *header, *word;
    } cases[] = {
        {"nonsense", "not valid JSON"},
        {"[1, 2]", "not an object"},
        {"{\"a\": NaN}", "not valid JSON"},
        {"{\"a\": 7}", "not an object"},
        {"{}", "which has 16"},
        {"{" ENTRY("a", "F32", "[4]", "0", "16") "," ENTRY("a", "F32", "[4]", "0", "16") "}",
         "duplicate"},
        {"{" ENTRY("a", "F31", "[4]", "0", "16") "}", "unknown dtype \"F31\""},
        {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,16]}}", "no dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,16]}}", "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4]}}", "data_offsets"},
        {"{" ENTRY("a", "F32", "[1,1,1,1,1,1,1,1,4]", "0", "16") "}", "at most 8"},
        {"{" ENTRY("a", "F32", "[-4]", "0", "16") "}", "from 0 up"},
        {"{" ENTRY("a", "F32", "[4.0]", "0", "16") "}", "from 0 up"},
        {"{" ENTRY("a", "F32", "[4294967296,4294967296]", "0", "16") "}", "beyond 64 bits"},
        {"{" ENTRY("a", "F32", "[4611686018427387904]", "0", "16") "}", "beyond 64 bits"},
        {"{" ENTRY("a", "F32", "[5]", "0", "20") "}", "is the file complete"},
        {"{" ENTRY("a", "F32", "[4]", "8", "9223372036854775807") "}", "is the file complete"},
        {"{" ENTRY("a", "F32", "[4]", "0", "99999999999999999999") "}", "not valid JSON"},
        {"{" ENTRY("a", "F32", "[4]", "16", "0") "}", "begin <= end"},
        {"{" ENTRY("a", "F32", "[4]", "-8", "8") "}", "begin <= end"},
        {"{" ENTRY("a", "F32", "[3]", "0", "16") "}", "need 12"},
        {"{" ENTRY("a", "F16", "[1]", "0", "2") "," ENTRY("b", "F32", "[3]", "2", "14") "," ENTRY(
             "c", "F16", "[1]", "14", "16") "}",
         "multiple of 4"},
        {"{" ENTRY("a", "F32", "[3]", "0", "12") "," ENTRY("b", "F32", "[2]", "8", "16") "}",
         "overlaps tensor a"},
        {"{" ENTRY("a", "F32", "[1]", "0", "4") "," ENTRY("b", "F32", "[2]", "8", "16") "}",
         "belong to no tensor"},
        {"{" ENTRY("a", "F32", "[3]", "0", "12") "}", "which has 16"},
    };
    const float data[4] = {1, 2, 3, 4};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fixture_write_safetensors(directory, FILE_NAME, cases[i].header, data, sizeof(data));
        open_fails(COX_CORRUPT, cases[i].word);
    }
}

/* Every length of a good file but the whole one, and a byte more. */
PLAIN_TEST(refuses_every_truncation)
{
    static const char header[] =
        "{" ENTRY("a", "F32", "[2]", "0", "8") "," ENTRY("b", "BF16", "[2,2]", "8", "16") "}";
    char bytes[sizeof(uint64_t) + sizeof(header) + 16] = {0};
    const uint64_t header_size = sizeof(header) - 1;
    const size_t size = sizeof(header_size) + (size_t)header_size + 16;

    memcpy(bytes, &header_size, sizeof(header_size));
    memcpy(bytes + sizeof(header_size), header, sizeof(header) - 1);
    for (size_t cut = 0; cut < size; cut++) {
        fixture_write(directory, FILE_NAME, bytes, cut);
        open_fails(COX_CORRUPT, "");
    }
    fixture_write(directory, FILE_NAME, bytes, size + 1);
    open_fails(COX_CORRUPT, "which has 17");
    fixture_write(directory, FILE_NAME, bytes, size);
    open_ok();
}

/* No byte of the header, set to anything, does more than give an error or another good file. */
PLAIN_TEST(survives_every_changed_header_byte)
{
    static const char header[] =
        "{" ENTRY("a", "F32", "[2]", "0", "8") "," ENTRY("b", "F16", "[2,2]", "8", "16") "}";
    char bytes[sizeof(uint64_t) + sizeof(header) + 16] = {0};
    const uint64_t header_size = sizeof(header) - 1;
    const size_t size = sizeof(header_size) + (size_t)header_size + 16;
    static const char values[] = {0, 1, '0', '9', '-', '"', '{', ']', ',', (char)0xff};

    memcpy(bytes, &header_size, sizeof(header_size));
    memcpy(bytes + sizeof(header_size), header, sizeof(header) - 1);
    for (size_t i = 0; i < size - 16; i++)
        for (size_t v = 0; v < sizeof(values); v++) {
            struct cox_safetensors *file = NULL;
            char kept = bytes[i];
            float buffer[4];

            bytes[i] = values[v];
            fixture_write(directory, FILE_NAME, bytes, size);
            if (cox_safetensors_new(path, &file, NULL) == 0) {
                (void)cox_safetensors_read(file, "a", (uint64_t[]){2}, 1, buffer, NULL);
                (void)cox_safetensors_read(file, "b", (uint64_t[]){2, 2}, 2, buffer, NULL);
            }
            cox_safetensors_free(file);
            bytes[i] = kept;
        }
}

static void read_fails(const struct cox_safetensors *file, const char *name, const uint64_t *shape,
                       size_t dimension_count, int code, const char *word)
{
    struct cox_error err = {0};
    float buffer[16];

    assert_int_equal(cox_safetensors_read(file, name, shape, dimension_count, buffer, &err), code);
    if (!strstr(err.text, word) || !strstr(err.text, FILE_NAME))
        fail_msg("\"%s\" does not say \"%s\" or the file", err.text, word);
}

PLAIN_TEST(read_refuses_wrong_tensors)
{
    static const char header[] =
        "{" ENTRY("a", "F32", "[2,1]", "0", "8") "," ENTRY("i", "I32", "[2]", "8", "16") "," ENTRY(
            "n", "F32", "[2]", "16", "24") "," ENTRY("h", "F16", "[2]", "24",
                                                     "28") "," ENTRY("s", "F32", "[]", "28",
                                                                     "32") "}";
    const uint64_t shape[] = {2, 1};
    const float data[8] = {1, 2, 3, 4, 5, NAN, 0, 1};
    uint16_t *halves;
    float copy[8];

    memcpy(copy, data, sizeof(copy));
    halves = (uint16_t *)(void *)&copy[6];
    halves[1] = 0xfc00; /* minus infinity */
    fixture_write_safetensors(directory, FILE_NAME, header, copy, sizeof(copy));
    struct cox_safetensors *file = open_ok();
    read_fails(file, "b", shape, 2, COX_NOT_FOUND, "no tensor b");
    read_fails(file, "a", shape, 1, COX_INVALID, "shape [2, 1]");
    read_fails(file, "a", (uint64_t[]){1, 2}, 2, COX_INVALID, "implies [1, 2]");
    read_fails(file, "s", shape, 1, COX_INVALID, "shape []");
    read_fails(file, "i", shape, 1, COX_INVALID, "dtype I32");
    read_fails(file, "n", shape, 1, COX_INVALID, "number 1 of tensor n is not finite");
    read_fails(file, "h", shape, 1, COX_INVALID, "number 1 of tensor h is not finite");
    /* Cut short after it was opened: an error, not a signal. */
    assert_int_equal(truncate(path, 100), 0);
    read_fails(file, "a", shape, 2, COX_CORRUPT, "truncated");
    assert_null(cox_safetensors_free(NULL));
}

int main(void)
{
    return test_run(open_directory, close_directory);
}
