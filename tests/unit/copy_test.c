/* Copies of large payloads: by memmove, and by the instructions that some processors do faster. */
#include "channel/base/copy.h"
#include "tests/lib/test.h"

#define ROOM ((size_t)4 * COX_COPY_SIZE_MIN)
#define GUARD 128

static uint8_t from[ROOM + 2 * GUARD], to[ROOM + 2 * GUARD], expected[ROOM + 2 * GUARD];

static void fill(uint8_t *bytes, uint32_t seed)
{
    for (size_t i = 0; i < sizeof from; i++)
        bytes[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
}

typedef void (*copy_fn)(uint8_t *to, const uint8_t *from, size_t size);

static void by_copy(uint8_t *a, const uint8_t *b, size_t size)
{
    cox_copy(a, b, size);
}

/* Every byte arrives, and none beside them changes. */
static void check_apart(copy_fn copy, size_t size, size_t to_offset, size_t from_offset)
{
    fill(from, 1);
    fill(to, 2);
    fill(expected, 2);
    memcpy(expected + GUARD + to_offset, from + GUARD + from_offset, size);
    copy(to + GUARD + to_offset, from + GUARD + from_offset, size);
    assert_memory_equal(to, expected, sizeof to);
}

static void check_sizes(copy_fn copy)
{
    static const size_t sizes[] = {
        64, 65, 4096, COX_COPY_SIZE_MIN - 1, COX_COPY_SIZE_MIN, COX_COPY_SIZE_MIN + 1, ROOM - 1};
    static const size_t offsets[] = {0, 1, 16, 63};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof offsets / sizeof *offsets; j++) {
            check_apart(copy, sizes[i], offsets[j], 0);
            check_apart(copy, sizes[i], 0, offsets[j]);
            check_apart(copy, sizes[i], offsets[j], 63 - offsets[j]);
        }
}

PLAIN_TEST(every_byte_is_copied_and_no_other)
{
    check_sizes(by_copy);
    check_apart(by_copy, 0, 0, 0);
    check_apart(by_copy, 1, 3, 0);
}

/* As memmove: a part of a message may lie where it is copied to, or across. */
PLAIN_TEST(what_overlaps_is_moved)
{
    static const size_t distances[] = {0, 1, 64, COX_COPY_SIZE_MIN, 2 * COX_COPY_SIZE_MIN};
    const size_t size = 2 * COX_COPY_SIZE_MIN;
    for (size_t i = 0; i < sizeof distances / sizeof *distances; i++)
        for (int up = 0; up < 2; up++) {
            const size_t a = GUARD + (up ? distances[i] : 0), b = GUARD + (up ? 0 : distances[i]);
            fill(to, 3);
            fill(expected, 3);
            memmove(expected + a, expected + b, size);
            cox_copy(to + a, to + b, size);
            assert_memory_equal(to, expected, sizeof to);
        }
}

/* On every processor, although it is used where it is faster. */
PLAIN_TEST(strings_copy_as_memcpy)
{
#ifdef COX_COPY_STRINGS
    check_sizes(cox_copy_by_strings);
#else
    skip();
#endif
}
