#include "program/cli/signals.h"
#include "tests/lib/test.h"

static bool taken(void *context, int number)
{
    atomic_int *counts = context;
    if (number == SIGTERM)
        atomic_fetch_add(counts, 1);
    return true;
}

/* The main thread may be inside a write that never returns. */
PLAIN_TEST(a_process_that_does_not_end_gets_its_signal_again)
{
    atomic_int count = 0;
    struct cox_signals signals = COX_SIGNALS_NONE;
    signals.end_ms = 10;
    assert_int_equal(cox_signals_start(&signals, taken, NULL, &count, NULL), 0);
    kill(getpid(), SIGTERM);
    AWAIT(atomic_load(&count) >= 3);
    cox_signals_end(&signals);
}

PLAIN_TEST(a_signal_counts_once_until_then)
{
    atomic_int count = 0;
    struct cox_signals signals = COX_SIGNALS_NONE;
    assert_int_equal(signals.end_ms, 20000);
    assert_int_equal(cox_signals_start(&signals, taken, NULL, &count, NULL), 0);
    kill(getpid(), SIGTERM);
    AWAIT(atomic_load(&count));
    cox_signals_end(&signals);
    assert_int_equal(count, 1);
}
