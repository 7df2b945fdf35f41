/* pause: whose signal it is, and the account of a callback that is left. What a pause does to
 * callbacks is in multi/pause. */

#include "worker/loop/pause.h"
#include "worker/loop/worker_internal.h"
#include "tests/lib/test.h"

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
PLAIN_TEST(m12_the_hosts_own_signal_still_reaches_it)
{
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

/* ---- a callback that is left ---- */

static int leaves(struct cox_channel_thread *thread)
{
    const uint64_t inside = atomic_load(&thread->running.inside);
    atomic_store(&thread->running.leave, inside);
    raise(SIGURG);
    fail(); /* the handler has jumped */
    return 0;
}

/* As if the signal came after the end was counted, and before it was stored for a pause. */
static int leaves_at_its_end(struct cox_channel_thread *thread)
{
    thread->running.count = 0;
    return leaves(thread);
}

static int returns(struct cox_channel_thread *thread)
{
    return atomic_load(&thread->running.inside) == thread->served.request.sequence ? 5 : 6;
}

PLAIN_TEST(a_callback_ends_once_whenever_it_is_left)
{
    int (*const callbacks[])(struct cox_channel_thread *) = {leaves, leaves_at_its_end};
    struct cox_worker *worker = calloc(1, sizeof *worker);
    struct cox_channel_thread *thread = &worker->threads[COX_CHANNEL_EXECUTE];
    assert_non_null(worker);
    worker->options.leave_stuck = true;
    thread->worker = worker;
    thread->channel.id = COX_CHANNEL_EXECUTE;
    cox_pause_init(&worker->pause);
    cox_pause_listen();
    cox_channel_thread_begin(thread);
    for (size_t i = 0; i < sizeof callbacks / sizeof *callbacks; i++) {
        thread->served.request.sequence++;
        assert_int_equal(cox_channel_thread_call(thread, COX_CALLBACK_PAUSABLE, callbacks[i]),
                         COX_ABORTED);
        cox_arena_deinit(&thread->arena);
        assert_false(cox_worker_busy(worker));
        thread->served.request.sequence++;
        assert_int_equal(cox_channel_thread_call(thread, COX_CALLBACK_PAUSABLE, returns), 5);
        assert_false(cox_worker_busy(worker));
    }
    cox_channel_thread_end(thread);
    cox_pause_unlisten();
    cox_pause_deinit(&worker->pause);
    free(worker);
}
