/* What another machine sends of its ranks, and what PyTorch's flight recorders say of them. */
#include "coordinator/stacks/paragraph.h"
#include "coordinator/stacks/stacks.h"
#include "tests/lib/test.h"

TEST_OWNED(cox_stacks_free)

/* Those of ranks 0, 1, ...; NULL: it is not there, "node b is silent". The test's own. */
static struct cox_stacks *gather(const char *const *texts, uint32_t count)
{
    struct cox_stacks_target targets[COX_RANK_COUNT_MAX] = {{0}};
    struct cox_stacks *stacks = NULL;
    for (uint32_t rank = 0; rank < count; rank++) {
        targets[rank] = (struct cox_stacks_target){.rank = rank, .pid = 1};
        if (texts[rank])
            targets[rank].text = strdup(texts[rank]);
        else
            strcpy(targets[rank].why, "node b is silent");
    }
    assert_int_equal(cox_stacks_gather(targets, count, -1, cox_deadline_after_ms(1000), &stacks),
                     0);
    assert_int_equal(stacks->count, count);
    return test_own(stacks, cox_stacks_free_owned);
}

static void expect(const char *const *texts, uint32_t count, const char *paragraph)
{
    assert_string_equal(gather(texts, count)->paragraph, paragraph);
}

PLAIN_TEST(a_text_has_its_summary_and_its_lines)
{
    const char *const texts[] = {"summary: in a\nprocess 1: ...\n", NULL, "process 3\n",
                                 "summary: in a\n"};
    struct cox_stacks *stacks = gather(texts, 4);
    assert_string_equal(stacks->ranks[0].summary, "in a");
    assert_string_equal(stacks->ranks[0].text, "process 1: ...\n");
    assert_string_equal(stacks->ranks[1].summary, "node b is silent");
    assert_string_equal(stacks->ranks[1].text, "not there: node b is silent\n");
    assert_string_equal(stacks->ranks[2].summary, "nothing is known");
    assert_string_equal(stacks->paragraph, "rank 1: node b is silent; rank 2: nothing is known; "
                                           "ranks 0,3: in a");
}

PLAIN_TEST(what_a_terminal_obeys_is_gone)
{
    const char *const texts[] = {"summary: in \x1b[2J\x9b"
                                 "2J\ttab\r\nline\x07\x1b]0;title\x07\n\x7f\n"};
    struct cox_stacks *stacks = gather(texts, 1);
    assert_string_equal(stacks->ranks[0].summary, "in ?[2J?2J?tab?");
    assert_string_equal(stacks->ranks[0].text, "line??]0;title?\n?\n");
}

PLAIN_TEST(a_summary_has_no_path_of_a_machine)
{
    static const struct {
        const char *line, *summary;
    } lines[] = {
        {"in f (/srv/secret/model.py:97) called from g (/a/b.py:1)",
         "in f (model.py:97) called from g (b.py:1)"},
        {"/usr/bin/coxswain cannot be started: no such file",
         "coxswain cannot be started: no such file"},
        {"where its core is: /var/crash/core.%e", "where its core is: core.%e"},
        {"40 tokens/s, and/or 1/2", "40 tokens/s, and/or 1/2"},
        {"'/etc/passwd' \"/etc/shadow\"", "'passwd' \"shadow\""},
        {"in /", "in "},
        {"path=/a/b/", "path="},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        char text[200];
        const char *const texts[] = {text};
        snprintf(text, sizeof text, "summary: %s\nFile \"/srv/secret/model.py\"\n", lines[i].line);
        struct cox_stacks *stacks = gather(texts, 1);
        assert_string_equal(stacks->ranks[0].summary, lines[i].summary);
        assert_string_equal(stacks->ranks[0].text, "File \"/srv/secret/model.py\"\n");
    }
}

PLAIN_TEST(a_summary_is_cut)
{
    char *text = test_own(malloc(100001), free);
    memset(text, 'a', 100000);
    text[100000] = '\0';
    memcpy(text, "summary: ", 9);
    const char *const texts[] = {text, text};
    struct cox_stacks *stacks = gather(texts, 2);
    assert_int_equal(strlen(stacks->ranks[0].summary), COX_STACKS_SUMMARY_SIZE - 1);
    assert_string_equal(stacks->ranks[0].text, "");
}

/* ---- collectives ---- */

#define IN(name, entered, waits)                                                                   \
    "summary: in a\ntorch: group " name ": entered " entered ", waits in " waits "\n"

PLAIN_TEST(the_rank_that_the_others_wait_for_is_named)
{
    static const struct {
        const char *texts[4];
        uint32_t count;
        const char *paragraph;
    } cases[] = {
        {{IN("0 (default_pg)", "4711", "all_reduce 4711"), IN("0 (default_pg)", "4710", "none"),
          IN("0 (default_pg)", "4713", "all_reduce 4711"),
          IN("0 (default_pg)", "4711", "all_reduce 4711")},
         4,
         "PyTorch: rank 1 never entered all_reduce 4711; ranks 0,2-3 wait in it; ranks 0-3: in a"},
        /* Ranks that are not read are not named. */
        {{IN("0 (default_pg)", "5", "broadcast 5"), NULL, IN("0 (default_pg)", "4", "none"),
          "summary: in a\n"},
         4,
         "PyTorch: rank 2 never entered broadcast 5; rank 0 waits in it; "
         "rank 1: node b is silent; ranks 0,2-3: in a, and may wait for it"},
        /* No rank waits. */
        {{IN("0 (default_pg)", "5", "none"), IN("0 (default_pg)", "4", "none")},
         2,
         "ranks 0-1: in a"},
        /* All ranks wait in it. */
        {{IN("7 (undefined)", "5", "all_gather 5"), IN("7 (undefined)", "5", "all_gather 5")},
         2,
         "PyTorch: ranks 0-1 wait in all_gather 5 of process group 7; ranks 0-1: in a"},
        /* A rank has completed it. */
        {{IN("0 (tp)", "5", "all_reduce 5"), IN("0 (tp)", "6", "all_reduce 6"),
          IN("0 (tp)", "5", "none")},
         3,
         "PyTorch: ranks 1-2 have completed all_reduce 5 of process group tp; rank 0 waits in it; "
         "ranks 0-2: in a"},
        /* A rank is in another collective of that number. */
        {{IN("0 (default_pg)", "5", "all_reduce 5"), IN("0 (default_pg)", "5", "broadcast 5"),
          IN("0 (default_pg)", "5", "all_reduce 5")},
         3,
         "PyTorch: rank 1 waits in broadcast 5; ranks 0,2 wait in all_reduce 5; ranks 0-2: in a"},
        /* A group that a rank is missing in comes first. */
        {{IN("0 (default_pg)", "5",
             "all_reduce 5") "torch: group 1 (tp): entered 9, waits in broadcast 9\n",
          IN("0 (default_pg)", "5",
             "all_reduce 5") "torch: group 1 (tp): entered 8, waits in none\n"},
         2,
         "PyTorch: rank 1 never entered broadcast 9 of process group tp; rank 0 waits in it; "
         "PyTorch: ranks 0-1 wait in all_reduce 5; ranks 0-1: in a"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect(cases[i].texts, cases[i].count, cases[i].paragraph);
}

PLAIN_TEST(lines_that_are_none_say_nothing)
{
    static const char *const lines[] = {"torch: group",
                                        "torch: group  (x): entered 5, waits in all_reduce 5",
                                        "torch: group 0 (): entered 5, waits in all_reduce 5",
                                        "torch: group 0 (x): entered five, waits in all_reduce 5",
                                        "torch: group 0 (x): entered 5, waits in ",
                                        "torch: group 0 (x): entered 5, waits in all_reduce",
                                        "torch: group 0 (x): entered 5, waits in all_reduce x",
                                        " torch: group 0 (x): entered 5, waits in all_reduce 5"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        char text[200];
        const char *const texts[] = {text};
        snprintf(text, sizeof text, "summary: in a\n%s\n", lines[i]);
        expect(texts, 1, "rank 0: in a");
    }
}

PLAIN_TEST(more_groups_than_are_compared)
{
    char *text = test_own(calloc(1, 100000), free);
    strcpy(text, "summary: in a\n");
    for (int i = 0; i < 1000; i++)
        sprintf(text + strlen(text), "torch: group %d (g%d): entered 5, waits in none\n", i, i);
    const char *const texts[] = {text, text, text};
    expect(texts, 3, "ranks 0-2: in a");
}
