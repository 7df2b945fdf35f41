#include "coordinator/collector/complaints.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static struct cox_complaints complaints;

static void p3_the_last_complaint_of_each_rank_is_kept(void **state)
{
    (void)state;
    char text[COX_COMPLAINT_SIZE] = "what was there";
    cox_complaints_init(&complaints);
    assert_int_equal(cox_complaints_last(&complaints, 5, text, sizeof text), 0);
    assert_string_equal(text, "");
    uint64_t before = cox_now_ns();
    cox_complaints_add(&complaints, 5, "number %d", 1);
    cox_complaints_add(&complaints, COX_RANK_COUNT_MAX - 1, "of another");
    cox_complaints_add(&complaints, 5, "number %d", 2);
    uint64_t when = cox_complaints_last(&complaints, 5, text, sizeof text);
    assert_string_equal(text, "number 2");
    assert_in_range(when, before, cox_now_ns());
    assert_int_equal(cox_complaints_last(&complaints, 5, text, sizeof text), when);
    cox_complaints_last(&complaints, COX_RANK_COUNT_MAX - 1, text, sizeof text);
    assert_string_equal(text, "of another");
    assert_int_equal(cox_complaints_last(&complaints, 4, text, sizeof text), 0);
    cox_complaints_deinit(&complaints);
}

static void p3_a_complaint_is_cut_off_at_a_character(void **state)
{
    (void)state;
    char long_text[2 * COX_COMPLAINT_SIZE], text[COX_COMPLAINT_SIZE];
    cox_complaints_init(&complaints);
    /* Two bytes each, after one: the last one that begins inside does not end there. */
    for (size_t i = 0; i + 1 < sizeof long_text; i++)
        long_text[i] = (char)(i % 2 ? 0xc3 : 0xa4);
    long_text[0] = 'x';
    long_text[sizeof long_text - 1] = '\0';
    for (size_t shift = 0; shift < 2; shift++) {
        cox_complaints_add(&complaints, 0, "%s%s", shift ? "y" : "", long_text);
        cox_complaints_last(&complaints, 0, text, sizeof text);
        size_t length = strlen(text);
        assert_int_equal(length, COX_COMPLAINT_SIZE - 1 - shift);
        assert_int_equal((unsigned char)text[length - 1], 0xa4);
    }
    cox_complaints_deinit(&complaints);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(p3_the_last_complaint_of_each_rank_is_kept),
        cmocka_unit_test(p3_a_complaint_is_cut_off_at_a_character),
    };
    return cmocka_run_group_tests_name("complaints", tests, NULL, NULL);
}
