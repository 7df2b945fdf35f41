/* Spinning before a sleep: when it is allowed, for how long, and how often in vain. */
#include "channel/base/spin.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void settings_have_names(void **state)
{
    (void)state;
    assert_string_equal(cox_spin_name(COX_SPIN_AUTO), "auto");
    assert_string_equal(cox_spin_name(COX_SPIN_OFF), "off");
    assert_string_equal(cox_spin_name(COX_SPIN_MAX), "max");
    assert_null(cox_spin_name(COX_SPIN_COUNT));
    assert_null(cox_spin_name(UINT32_MAX));
}

static void who_does_not_fit_sleeps(void **state)
{
    const uint32_t count = cox_cpu_count();
    (void)state;
    assert_in_range(count, 1, sysconf(_SC_NPROCESSORS_CONF));
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_AUTO, count), COX_SPIN_AUTO_NS);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_MAX, count), COX_SPIN_MAX_NS);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_AUTO, count + 1), 0);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_MAX, count + 1), 0);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_OFF, 1), 0);
}

/* Returns the child's exit status: 0, or which of its checks has failed. */
static int on_one_processor(void)
{
    const pid_t pid = fork();
    if (pid == 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET((unsigned)sched_getcpu(), &one);
        if (sched_setaffinity(0, sizeof one, &one))
            _exit(1);
        if (cox_cpu_count() != 1)
            _exit(2);
        if (cox_spin_budget_ns(COX_SPIN_AUTO, 2) || cox_spin_budget_ns(COX_SPIN_MAX, 2))
            _exit(3);
        if (cox_spin_budget_ns(COX_SPIN_AUTO, 1) != COX_SPIN_AUTO_NS)
            _exit(4);
        _exit(0);
    }
    int status = -1;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void two_that_may_use_one_processor_do_not_fit(void **state)
{
    (void)state;
    assert_int_equal(on_one_processor(), 0);
}

struct look {
    /* looks so far */
    uint64_t count;
    /* the look that finds it; 0: none does */
    uint64_t there;
};

static bool look(const void *context)
{
    struct look *l = *(struct look *const *)context;
    return ++l->count == l->there;
}

static bool wait_once(struct cox_spinner *spinner, struct look *l, uint64_t there)
{
    *l = (struct look){.there = there};
    return cox_spin_until(spinner, look, &l, COX_DEADLINE_NEVER);
}

static void without_a_budget_no_waiter_spins(void **state)
{
    struct cox_spinner spinner = {0};
    struct look l;
    (void)state;
    assert_false(wait_once(&spinner, &l, 1));
    assert_int_equal(l.count, 0);
}

static void what_is_there_is_found(void **state)
{
    struct cox_spinner spinner = {.budget_ns = UINT32_MAX};
    struct look l;
    (void)state;
    for (uint64_t there = 1; there <= 16; there++) { /* no reading of the clock in between */
        assert_true(wait_once(&spinner, &l, there));
        assert_int_equal(l.count, there);
        assert_int_equal(spinner.found, there);
    }
}

/* Nor the look that is longer than the budget. */
static void nobody_looks_past_a_deadline(void **state)
{
    struct cox_spinner spinners[] = {
        {.budget_ns = UINT32_MAX},
        {.budget_ns = 1, .vain = COX_SPIN_SKIP_MAX},
    };
    (void)state;
    for (size_t i = 0; i < sizeof spinners / sizeof *spinners; i++) {
        struct look own = {.there = 1}, *l = &own;
        assert_false(cox_spin_until(&spinners[i], look, &l, cox_now_ns()));
        assert_int_equal(own.count, 0);
    }
}

/* Some looks, and in blocks: the clock is read between them. */
static void what_never_comes_is_given_up(void **state)
{
    struct cox_spinner spinner = {.budget_ns = 1};
    struct look l;
    (void)state;
    assert_false(wait_once(&spinner, &l, 0));
    assert_in_range(l.count, 1, 16);
    assert_int_equal(spinner.found, 0);
}

/* How many waits slept at once before the next one looked. */
static uint32_t skipped(struct cox_spinner *spinner, uint64_t there)
{
    struct look l;
    for (uint32_t count = 0; count < 1000; count++) {
        const bool found = wait_once(spinner, &l, there);
        assert_int_equal(found, l.count > 0 && there > 0);
        if (l.count > 0)
            return count;
    }
    fail_msg("nobody looks any more");
    return 0;
}

/* False: it was off its processor meanwhile, and skips as many as can be. */
static bool looks_less_often(struct cox_spinner *spinner)
{
    static const uint32_t skips[] = {0, 1, 3, 7, 15, 31, 31, 31};
    bool same = true;
    for (size_t i = 0; i < sizeof skips / sizeof skips[0]; i++) {
        const uint32_t count = skipped(spinner, 0);
        assert_true(count == skips[i] || count == COX_SPIN_SKIP_MAX);
        same = same && count == skips[i];
    }
    /* And anew, once it finds something. */
    assert_int_equal(skipped(spinner, 1), COX_SPIN_SKIP_MAX);
    return same;
}

static void looking_in_vain_is_done_less_often(void **state)
{
    struct cox_spinner spinner = {.budget_ns = 1};
    (void)state;
    int same_count = 0;
    for (int i = 0; i < 100; i++)
        same_count += looks_less_often(&spinner);
    assert_true(same_count > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_have_names),
        cmocka_unit_test(who_does_not_fit_sleeps),
        cmocka_unit_test(two_that_may_use_one_processor_do_not_fit),
        cmocka_unit_test(without_a_budget_no_waiter_spins),
        cmocka_unit_test(what_is_there_is_found),
        cmocka_unit_test(nobody_looks_past_a_deadline),
        cmocka_unit_test(what_never_comes_is_given_up),
        cmocka_unit_test(looking_in_vain_is_done_less_often),
    };
    return cmocka_run_group_tests_name("spin", tests, NULL, NULL);
}
