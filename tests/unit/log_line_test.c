#include "program/service/log_line.h"
#include "tests/lib/test.h"

static void check(enum cox_log_format format, bool priority, int level, int64_t rank,
                  const char *text, const char *expected)
{
    const struct cox_log_event event = {
        .time = {1764082707, 123456789}, .level = level, .rank = rank, .text = text};
    char *line = cox_log_line(format, priority, &event);
    assert_non_null(line);
    assert_string_equal(line, expected);
    free(line);
}

PLAIN_TEST(test_formats)
{
    check(COX_LOG_PLAIN, false, 4, -1, "a\nb\tc", "coxswain: a\\nb\tc\n");
    check(COX_LOG_PLAIN, false, 6, 2, "a", "[rank 2] a\n");
    check(COX_LOG_PLAIN, true, 3, -1, "a", "<3>coxswain: a\n");
    check(COX_LOG_TEXT, false, 4, -1, "a\nb", "2025-11-25T14:58:27.123Z warning coxswain: a\\nb\n");
    check(COX_LOG_TEXT, true, 6, 12, "a", "<6>2025-11-25T14:58:27.123Z info rank 12: a\n");
    check(
        COX_LOG_JSON, false, 5, -1, "a",
        "{\"time\":\"2025-11-25T14:58:27.123Z\",\"level\":\"notice\",\"source\":\"coxswain\",\"message\":\"a\"}\n");
    check(
        COX_LOG_JSON, false, 6, 0, "a",
        "{\"time\":\"2025-11-25T14:58:27.123Z\",\"level\":\"info\",\"source\":\"worker\",\"rank\":0,\"message\":\"a\"}\n");
}

/* What a worker writes is bytes, and no line of the log may be forged or spoilt by them. */
PLAIN_TEST(test_bytes)
{
#define HEAD "2025-11-25T14:58:27.123Z info rank 1: "
#define BAD "\xef\xbf\xbd"
    check(COX_LOG_TEXT, false, 6, 1, "tab\tcr\resc\x1b[31m", HEAD "tab\\tcr\\resc\\u001b[31m\n");
    check(COX_LOG_PLAIN, false, 6, 1,
          "a\rcoxswain: rank 0 was killed\x1b[2J\xc2\x9b"
          "2J\xe2\x80\xae",
          "[rank 1] a\\rcoxswain: rank 0 was killed\\u001b[2J\\u009b2J\\u202e\n");
    check(COX_LOG_PLAIN, false, 6, 1, "\xc3\xa4\t\xe2\x82\xac\x80",
          "[rank 1] \xc3\xa4\t\xe2\x82\xac" BAD "\n");
    check(COX_LOG_TEXT, false, 6, 1, "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x9a\xa3",
          HEAD "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x9a\xa3\n");
    /* alone, too long, a surrogate, beyond Unicode, cut off */
    check(COX_LOG_TEXT, false, 6, 1, "\x80", HEAD BAD "\n");
    check(COX_LOG_TEXT, false, 6, 1, "\xc0\xaf", HEAD BAD BAD "\n");
    check(COX_LOG_TEXT, false, 6, 1, "\xed\xa0\x80", HEAD BAD BAD BAD "\n");
    check(COX_LOG_TEXT, false, 6, 1, "\xf4\x90\x80\x80", HEAD BAD BAD BAD BAD "\n");
    check(COX_LOG_TEXT, false, 6, 1, "a\xe2\x82", HEAD "a" BAD BAD "\n");
    check(
        COX_LOG_JSON, false, 6, 1, "\"\\\x7f",
        "{\"time\":\"2025-11-25T14:58:27.123Z\",\"level\":\"info\",\"source\":\"worker\",\"rank\":1,"
        "\"message\":\"\\\"\\\\\\u007f\"}\n");
}

PLAIN_TEST(test_names)
{
    enum cox_log_format format = COX_LOG_PLAIN;
    assert_int_equal(cox_log_format_parse("json", &format, NULL), 0);
    assert_int_equal(format, COX_LOG_JSON);
    assert_int_equal(cox_log_format_parse("text", &format, NULL), 0);
    assert_int_equal(format, COX_LOG_TEXT);
    assert_refused(cox_log_format_parse("xml", &format, test_err()), COX_INVALID,
                   "expected text or json");
}
