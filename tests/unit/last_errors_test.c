#include "coordinator/process/last_errors.h"
#include "tests/lib/test.h"

static struct cox_last_errors last_errors;

PLAIN_TEST(p3_the_last_complaint_of_each_rank_is_kept)
{
    char text[COX_LAST_ERROR_SIZE] = "what was there";
    cox_last_errors_init(&last_errors);
    assert_int_equal(cox_last_errors_get(&last_errors, 5, text, sizeof text), 0);
    assert_string_equal(text, "");
    uint64_t before = cox_now_ns();
    cox_last_errors_add(&last_errors, 5, "number %d", 1);
    cox_last_errors_add(&last_errors, COX_RANK_COUNT_MAX - 1, "of another");
    cox_last_errors_add(&last_errors, 5, "number %d", 2);
    uint64_t when = cox_last_errors_get(&last_errors, 5, text, sizeof text);
    assert_string_equal(text, "number 2");
    assert_in_range(when, before, cox_now_ns());
    assert_int_equal(cox_last_errors_get(&last_errors, 5, text, sizeof text), when);
    cox_last_errors_get(&last_errors, COX_RANK_COUNT_MAX - 1, text, sizeof text);
    assert_string_equal(text, "of another");
    assert_int_equal(cox_last_errors_get(&last_errors, 4, text, sizeof text), 0);
    cox_last_errors_deinit(&last_errors);
}

PLAIN_TEST(p3_a_complaint_is_cut_off_at_a_character)
{
    char long_text[2 * COX_LAST_ERROR_SIZE], text[COX_LAST_ERROR_SIZE];
    cox_last_errors_init(&last_errors);
    /* Two bytes each, after one: the last one that begins inside does not end there. */
    for (size_t i = 0; i + 1 < sizeof long_text; i++)
        long_text[i] = (char)(i % 2 ? 0xc3 : 0xa4);
    long_text[0] = 'x';
    long_text[sizeof long_text - 1] = '\0';
    for (size_t shift = 0; shift < 2; shift++) {
        cox_last_errors_add(&last_errors, 0, "%s%s", shift ? "y" : "", long_text);
        cox_last_errors_get(&last_errors, 0, text, sizeof text);
        size_t length = strlen(text);
        assert_int_equal(length, COX_LAST_ERROR_SIZE - 1 - shift);
        assert_int_equal((unsigned char)text[length - 1], 0xa4);
    }
    cox_last_errors_deinit(&last_errors);
}
