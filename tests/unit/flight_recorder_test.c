/* The dump of PyTorch's flight recorder, as lines. */
#include "program/stacks/flight_recorder.h"
#include "tests/lib/test.h"

/* The caller frees it. */
static char *lines_of(const char *dump)
{
    char *text = NULL;
    size_t size;
    FILE *to = open_memstream(&text, &size);
    assert_non_null(to);
    cox_flight_recorder_print(dump, UINT64_C(100500000000), to);
    fclose(to);
    return text;
}

static void expect(const char *dump, const char *text)
{
    char *lines = lines_of(dump);
    assert_string_equal(lines, text);
    free(lines);
}

#define ENTRY(group, number, name, state, more)                                                    \
    "{\"process_group\":[" group "],\"collective_seq_id\":" number ",\"profiling_name\":\"" name   \
    "\",\"state\":\"" state "\",\"input_sizes\":[[4,2]],\"input_dtypes\":[\"Float\"]" more "}"
#define DUMP(config, entries)                                                                      \
    "{\"pg_config\":{" config "},\"entries\":[" entries "],\"version\":\"2.10\"}\n"
#define DEFAULT "\"0\",\"default_pg\""

PLAIN_TEST(a_rank_waits_in_the_first_that_has_not_completed)
{
    expect(
        DUMP("", ENTRY(DEFAULT, "1", "gloo:all_reduce", "completed", "") "," ENTRY(
                     DEFAULT, "2", "gloo:broadcast", "started",
                     ",\"time_created_ns\":95500000000") "," ENTRY(DEFAULT, "3", "nccl:all_gather",
                                                                   "scheduled", "")),
        "PyTorch's flight recorder: 1 process groups, 3 collectives, the last ones first\n"
        "torch: group 0 (default_pg): entered 3, waits in broadcast 2\n"
        "  0 3 all_gather [[4, 2]] Float: scheduled\n"
        "  0 2 broadcast [[4, 2]] Float: started, entered 5.0 s ago\n"
        "  0 1 all_reduce [[4, 2]] Float: completed\n");
}

PLAIN_TEST(what_is_retired_has_completed)
{
    expect(DUMP("", ENTRY(DEFAULT, "7", "gloo:all_reduce", "scheduled", ",\"retired\":true")),
           "PyTorch's flight recorder: 1 process groups, 1 collectives, the last ones first\n"
           "torch: group 0 (default_pg): entered 7, waits in none\n"
           "  0 7 all_reduce [[4, 2]] Float: completed\n");
}

/* As gloo has it. */
PLAIN_TEST(a_group_without_a_name_is_none)
{
    char *lines =
        lines_of(DUMP("\"\":{\"name\":\"\",\"desc\":\"\",\"ranks\":\"[]\"}",
                      ENTRY(DEFAULT, "4", "gloo:all_reduce", "scheduled", ",\"retired\":false")));
    assert_contains(lines, "1 process groups, 1 collectives");
    assert_contains(lines, "torch: group 0 (default_pg): entered 4, waits in all_reduce 4\n");
    free(lines);
}

PLAIN_TEST(a_group_that_nothing_was_recorded_of)
{
    expect(DUMP("\"3\":{\"name\":\"3\",\"desc\":\"tp\",\"ranks\":\"[0, 1]\"}", ""),
           "PyTorch's flight recorder: 2 process groups, 0 collectives, the last ones first\n"
           "torch: group 3 (tp): entered 0, waits in none\n"
           "torch: group 0 (default_pg): entered 0, waits in none\n");
}

PLAIN_TEST(sends_between_two_ranks_are_no_collectives)
{
    char *lines =
        lines_of(DUMP("", ENTRY(DEFAULT, "5", "nccl:send", "started", ",\"is_p2p\":true")));
    assert_contains(lines, "1 process groups, 0 collectives");
    assert_contains(lines, "torch: group 0 (default_pg): entered 0, waits in none\n");
    free(lines);
}

PLAIN_TEST(two_libraries_have_a_line_each)
{
    char *lines = lines_of(DUMP("", ENTRY(DEFAULT, "5", "nccl:all_reduce", "started", "")) DUMP(
        "", ENTRY("\"1\",\"cpu\"", "2", "gloo:barrier", "started", "")));
    assert_contains(lines, "2 process groups, 2 collectives");
    assert_contains(lines, "torch: group 0 (default_pg): entered 5, waits in all_reduce 5\n");
    assert_contains(lines, "torch: group 1 (cpu): entered 2, waits in barrier 2\n");
    free(lines);
}

PLAIN_TEST(words_of_a_rank_are_plain)
{
    expect(DUMP("", ENTRY("\"a b)\\u001b[2J\",\"\"", "5", "x y\\n:z (q)", "st\\u0007", "")),
           "PyTorch's flight recorder: 2 process groups, 1 collectives, the last ones first\n"
           "torch: group a_b___2J (-): entered 5, waits in z__q_ 5\n"
           "torch: group 0 (default_pg): entered 0, waits in none\n"
           "  a_b___2J 5 z__q_ [[4, 2]] Float: st_\n");
}

PLAIN_TEST(what_is_no_dump_is_said_to_be_none)
{
    static const char *const dumps[] = {"x", "[1]", "{", "5", "\"text\"", "\n", "{\"a\":1}x\n"};
    for (size_t i = 0; i < sizeof dumps / sizeof dumps[0]; i++)
        expect(dumps[i], "not there: PyTorch's flight recorder: its dump cannot be read\n");
    static const char *const odd[] = {
        "{}", "{\"entries\":5,\"pg_config\":[]}", "{\"entries\":[5,null,{}]}",
        "{\"entries\":[{\"collective_seq_id\":-5}]}", "{\"pg_config\":{}}"};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        char *lines = lines_of(odd[i]);
        assert_contains(lines, "PyTorch's flight recorder: 1 process groups");
        free(lines);
    }
}

PLAIN_TEST(the_last_ones_have_lines)
{
    char *dump = test_own(calloc(1, 200000), free);
    strcpy(dump, "{\"entries\":[");
    for (int i = 1; i <= 1000; i++)
        sprintf(dump + strlen(dump),
                "%s{\"process_group\":[\"0\",\"default_pg\"],\"collective_seq_id\":%d}",
                i > 1 ? "," : "", i);
    strcat(dump, "]}");
    char *lines = lines_of(dump);
    assert_contains(lines, "torch: group 0 (default_pg): entered 1000, waits in - 1\n");
    assert_contains(lines, "  0 1000 - ");
    assert_contains(lines, "  0 951 - ");
    assert_null(strstr(lines, "  0 950 - "));
    free(lines);
}
