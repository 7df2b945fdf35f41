/* Spinning before a sleep: for how long, and how often in vain. */
#include "channel/base/spin.h"
#include "tests/lib/test.h"

PLAIN_TEST(settings_have_names)
{
    assert_string_equal(cox_spin_name(COX_SPIN_AUTO), "auto");
    assert_string_equal(cox_spin_name(COX_SPIN_OFF), "off");
    assert_string_equal(cox_spin_name(COX_SPIN_MAX), "max");
    assert_null(cox_spin_name(COX_SPIN_COUNT));
    assert_null(cox_spin_name(UINT32_MAX));
}

PLAIN_TEST(each_setting_has_a_budget)
{
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_AUTO), COX_SPIN_AUTO_NS);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_MAX), COX_SPIN_MAX_NS);
    assert_int_equal(cox_spin_budget_ns(COX_SPIN_OFF), 0);
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

PLAIN_TEST(without_a_budget_no_waiter_spins)
{
    struct cox_spinner spinner = {0};
    struct look l;
    assert_false(wait_once(&spinner, &l, 1));
    assert_int_equal(l.count, 0);
}

PLAIN_TEST(what_is_there_is_found)
{
    struct cox_spinner spinner = {.budget_ns = UINT32_MAX};
    struct look l;
    for (uint64_t there = 1; there <= 3 * COX_SPIN_LOOKS; there++) {
        assert_true(wait_once(&spinner, &l, there));
        assert_int_equal(l.count, there);
        assert_int_equal(spinner.found, there);
    }
}

PLAIN_TEST(no_waiter_spins_past_a_deadline)
{
    struct cox_spinner spinner = {.budget_ns = UINT32_MAX};
    struct look own = {.there = 2}, *l = &own;
    assert_false(cox_spin_until(&spinner, look, &l, cox_now_ns()));
    assert_in_range(own.count, 0, 1);
}

/* One look after the last yield, which may have brought it. */
PLAIN_TEST(what_never_comes_is_given_up)
{
    struct cox_spinner spinner = {.budget_ns = 1};
    struct look l;
    assert_false(wait_once(&spinner, &l, 0));
    assert_int_equal(l.count, COX_SPIN_LOOKS + 1);
    assert_int_equal(spinner.found, 0);
    assert_true(spinner.rest_until_ns > 0);
}

#define LOOK_MS 20

/* Sleeps: where many programs want the processor, one that computed so long would lose it. */
static bool look_long(const void *context)
{
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * COX_NSEC_PER_MSEC}, NULL);
    return look(context);
}

/* A spin of COX_SPIN_LOOKS looks, by this budget, and one look more, which finds it. */
static struct cox_spinner late(uint32_t budget_ms)
{
    struct cox_spinner spinner = {.budget_ns = budget_ms * (uint32_t)COX_NSEC_PER_MSEC};
    struct look own = {.there = COX_SPIN_LOOKS + 1}, *l = &own;
    assert_true(cox_spin_until(&spinner, look_long, &l, COX_DEADLINE_NEVER));
    assert_int_equal(spinner.found, 1);
    return spinner;
}

/* Other participants ran meanwhile. If it took long, another program did, and blocking would have
 * taken less time. */
PLAIN_TEST(what_comes_after_the_budget_is_found_and_makes_a_waiter_rest_if_it_took_long)
{
    struct cox_spinner spinner = late(LOOK_MS * COX_SPIN_LOOKS / 2);
    /* Unless another program does run in between. */
    for (int i = 0; i < 100 && spinner.rest_until_ns; i++)
        spinner = late(LOOK_MS * COX_SPIN_LOOKS / 2);
    assert_true(spinner.rest_until_ns == 0 && spinner.vain == 0);
    spinner = late(LOOK_MS * COX_SPIN_LOOKS / COX_SPIN_LATE_FACTOR / 2);
    assert_true(spinner.rest_until_ns > 0);
    assert_true(spinner.vain > COX_SPIN_LONG_DOUBLINGS);
}

PLAIN_TEST(a_waiter_that_rests_blocks_at_once)
{
    struct cox_spinner spinner = {
        .budget_ns = UINT32_MAX, .rest_until_ns = UINT64_MAX, .last_ns = cox_now_ns()};
    struct look l;
    assert_false(wait_once(&spinner, &l, 1));
    assert_int_equal(l.count, 0);
    spinner.rest_until_ns = cox_now_ns();
    assert_true(wait_once(&spinner, &l, 1));
}

/* Whatever has interrupted its spin. */
PLAIN_TEST(a_waiter_that_was_idle_does_not_rest)
{
    struct look own = {0}, *l = &own;
    struct cox_spinner spinner = {.budget_ns = COX_SPIN_AUTO_NS};
    assert_false(cox_spin_once(&spinner, 1, look_long, &l, COX_DEADLINE_NEVER));
    assert_true(spinner.rest_until_ns > cox_now_ns() + COX_NSEC_PER_SEC);
    spinner.budget_ns = UINT32_MAX;
    spinner.last_ns -= COX_SPIN_IDLE_NS;
    own = (struct look){.there = 2};
    assert_true(cox_spin_once(&spinner, 2, look, &l, COX_DEADLINE_NEVER));
    assert_int_equal(spinner.rest_until_ns, 0);
    assert_int_equal(spinner.vain, 0);
}

/* However short its rest would be. */
PLAIN_TEST(a_wait_in_several_calls_spins_in_vain_once)
{
    struct cox_spinner spinner = {.budget_ns = 1};
    struct look own, *l = &own;
    for (uint64_t event = 1; event <= 3; event++) {
        own = (struct look){0};
        for (int call = 0; call < 20; call++) {
            spinner.rest_until_ns = 0;
            assert_false(cox_spin_once(&spinner, event, look, &l, COX_DEADLINE_NEVER));
        }
        assert_int_equal(own.count, COX_SPIN_LOOKS + 1);
    }
    /* What is found is no spin in vain, and nor is a wait that rests. */
    spinner = (struct cox_spinner){
        .budget_ns = UINT32_MAX, .rest_until_ns = UINT64_MAX, .last_ns = cox_now_ns()};
    assert_false(cox_spin_once(&spinner, 4, look, &l, COX_DEADLINE_NEVER));
    spinner.rest_until_ns = 0;
    for (int call = 0; call < 3; call++) {
        own = (struct look){.there = 1};
        assert_true(cox_spin_once(&spinner, 4, look, &l, COX_DEADLINE_NEVER));
    }
}

static uint64_t rest_of(struct cox_spinner *spinner, uint64_t spent_ns)
{
    const uint64_t now_ns = 1000;
    cox_spin_rest(spinner, now_ns, spent_ns);
    return spinner->rest_until_ns - now_ns;
}

PLAIN_TEST(each_spin_in_vain_doubles_the_rest)
{
    struct cox_spinner spinner = {.budget_ns = COX_SPIN_AUTO_NS};
    struct look l;
    for (uint32_t i = 0; i <= COX_SPIN_DOUBLINGS; i++)
        assert_int_equal(rest_of(&spinner, COX_SPIN_AUTO_NS), (uint64_t)COX_SPIN_AUTO_NS << i);
    assert_int_equal(rest_of(&spinner, COX_SPIN_AUTO_NS),
                     (uint64_t)COX_SPIN_AUTO_NS << COX_SPIN_DOUBLINGS);
    /* And anew, once a spin was successful. */
    spinner.budget_ns = UINT32_MAX;
    spinner.rest_until_ns = 0;
    assert_true(wait_once(&spinner, &l, 1));
    assert_int_equal(rest_of(&spinner, COX_SPIN_AUTO_NS), COX_SPIN_AUTO_NS);
}

PLAIN_TEST(a_long_spin_is_followed_by_a_long_rest)
{
    const uint64_t slice_ns = 3 * COX_NSEC_PER_MSEC;
    struct cox_spinner spinner = {.budget_ns = COX_SPIN_AUTO_NS};
    const uint64_t short_ns = COX_SPIN_AUTO_NS + COX_SPIN_LONG_NS;
    assert_int_equal(rest_of(&spinner, short_ns), short_ns);
    assert_int_equal(rest_of(&spinner, slice_ns), slice_ns << COX_SPIN_LONG_DOUBLINGS);
    assert_int_equal(rest_of(&spinner, slice_ns), slice_ns << (COX_SPIN_LONG_DOUBLINGS + 1));
    /* Beyond the budget: not the budget itself. */
    spinner = (struct cox_spinner){.budget_ns = COX_SPIN_MAX_NS};
    assert_int_equal(rest_of(&spinner, COX_SPIN_MAX_NS + 1), COX_SPIN_MAX_NS + 1);
    /* A process that was stopped for a day rests no longer than others. */
    assert_int_equal(rest_of(&spinner, 86400 * COX_NSEC_PER_SEC), COX_SPIN_REST_MAX_NS);
}
