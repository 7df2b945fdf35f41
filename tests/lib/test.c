#include "test.h"

static struct test_entry *entries;
static pid_t test_thread; /* that runs the tests */

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
    test_thread = gettid();
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

/* ---- calls that return a code and an error ---- */

_Thread_local struct cox_error test_error;

struct cox_error *test_err(void)
{
    cox_error_clear(&test_error);
    return &test_error;
}

void test_check_ok(int r, const char *call, const char *file, int line)
{
    if (r) {
        print_error("%s: %d\n%s\n", call, r, test_error.text);
        _fail(file, line);
    }
    cox_error_clear(&test_error); /* it is not the next call's */
}

void test_check_refused(int r, int code, const char *part, const char *call, const char *file,
                        int line)
{
    if (r == code && strstr(test_error.text, part))
        return;
    print_error("%s: %d, expected %d and '%s'\n%s\n", call, r, code, part, test_error.text);
    _fail(file, line);
}

/* ---- waiting ---- */

struct timespec test_await_since(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now;
}

void test_await_more(const struct timespec *since, const char *condition, const char *file,
                     int line)
{
    sched_yield();
    if (test_await_since().tv_sec - since->tv_sec < AWAIT_S)
        return;
    print_error("not in %d s: %s\n", AWAIT_S, condition);
    if (gettid() == test_thread)
        _fail(file, line);
    fprintf(stderr, "%s:%d\n", file, line);
    _exit(1);
}
