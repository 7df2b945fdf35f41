/* What another machine sends of its ranks. */
#include "coordinator/stacks/paragraph.h"
#include "coordinator/stacks/stacks.h"
#include "tests/lib/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Those of ranks 0, 1, ...; NULL: it is not there, "node b is silent". */
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
    return stacks;
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
    cox_stacks_free(stacks);
}

PLAIN_TEST(what_a_terminal_obeys_is_gone)
{
    const char *const texts[] = {"summary: in \x1b[2J\x9b"
                                 "2J\ttab\r\nline\x07\x1b]0;title\x07\n\x7f\n"};
    struct cox_stacks *stacks = gather(texts, 1);
    assert_string_equal(stacks->ranks[0].summary, "in ?[2J?2J?tab?");
    assert_string_equal(stacks->ranks[0].text, "line??]0;title?\n?\n");
    cox_stacks_free(stacks);
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
        cox_stacks_free(stacks);
    }
}

PLAIN_TEST(a_summary_is_cut)
{
    char *text = malloc(100001);
    assert_non_null(text);
    memset(text, 'a', 100000);
    text[100000] = '\0';
    memcpy(text, "summary: ", 9);
    const char *const texts[] = {text, text};
    struct cox_stacks *stacks = gather(texts, 2);
    assert_int_equal(strlen(stacks->ranks[0].summary), COX_STACKS_SUMMARY_SIZE - 1);
    assert_string_equal(stacks->ranks[0].text, "");
    cox_stacks_free(stacks);
    free(text);
}
