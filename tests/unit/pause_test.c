/* pause: whose signal it is. What a pause does to callbacks is in multi/pause. */
#include <coxswain/base.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "worker/loop/pause.h"

#include <signal.h>

static volatile sig_atomic_t plain_count, detailed_count;

static void on_plain(int number)
{
    plain_count += number == SIGURG;
}

static void on_detailed(int number, siginfo_t *info, void *context)
{
    detailed_count += number == SIGURG && info && context;
}

/* A host that uses the signal itself still gets it, while the library listens and afterwards. */
static void m12_the_hosts_own_signal_still_reaches_it(void **state)
{
    (void)state;
    const struct sigaction plain = {.sa_handler = on_plain};
    const struct sigaction detailed = {.sa_sigaction = on_detailed, .sa_flags = SA_SIGINFO};
    struct sigaction before;
    assert_int_equal(sigaction(SIGURG, &plain, &before), 0);
    cox_pause_listen();
    cox_pause_listen(); /* a second worker of the process */
    raise(SIGURG);
    assert_int_equal(plain_count, 1);
    cox_pause_unlisten();
    raise(SIGURG);
    assert_int_equal(plain_count, 2);
    cox_pause_unlisten();
    raise(SIGURG);
    assert_int_equal(plain_count, 3);

    assert_int_equal(sigaction(SIGURG, &detailed, NULL), 0);
    cox_pause_listen();
    raise(SIGURG);
    assert_int_equal(detailed_count, 1);
    cox_pause_unlisten();

    /* One without a handler is not ended by it. */
    assert_int_equal(signal(SIGURG, SIG_DFL) == SIG_ERR, false);
    cox_pause_listen();
    raise(SIGURG);
    cox_pause_unlisten();
    assert_int_equal(plain_count, 3);
    assert_int_equal(detailed_count, 1);
    sigaction(SIGURG, &before, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(m12_the_hosts_own_signal_still_reaches_it),
    };
    return cmocka_run_group_tests_name("pause", tests, NULL, NULL);
}
