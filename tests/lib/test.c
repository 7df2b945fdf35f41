#include "test.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct test_entry *entries;

/* Constructors run in no promised order; tests are read, and run, from the top of a file. */
void test_register(struct test_entry *entry)
{
    struct test_entry **at = &entries;
    while (*at && (strcmp((*at)->file, entry->file) != 0 || (*at)->line < entry->line))
        at = &(*at)->next;
    entry->next = *at;
    *at = entry;
}

int test_run(CMFixtureFunction setup, CMFixtureFunction teardown)
{
    size_t count = 0;
    for (const struct test_entry *entry = entries; entry; entry = entry->next)
        count++;
    if (count == 0) {
        printf("no tests in this build: they need its fault points (COX_TESTING)\n");
        return 77;
    }
    struct CMUnitTest *tests = calloc(count, sizeof *tests);
    if (!tests)
        return -1;
    count = 0;
    for (const struct test_entry *entry = entries; entry; entry = entry->next)
        tests[count++] = entry->test;
    int failed =
        _cmocka_run_group_tests(program_invocation_short_name, tests, count, setup, teardown);
    free(tests);
    return failed;
}

void assert_contains(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("'%s' is not in: %s", part, text);
}
