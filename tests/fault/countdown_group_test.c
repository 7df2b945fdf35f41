/* What starts threads and processes, up to the whole group, with each of their calls failing in
 * turn: those of the coordinator's threads too, and those of a child before it executes its
 * program. */
#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "coordinator/collector/collector.h"
#include "coordinator/collector/error_channel.h"
#include "coordinator/collector/replies.h"
#include "coordinator/process/launch.h"
#include "coordinator/process/supervise.h"
#include "engine/batching/engine_loop.h"
#include "program/cli/console.h"
#include "program/cli/foreground.h"
#include "countdown.h"
#include "testing.h"

/* ---- the coordinator's private half of a channel ---- */

static struct cox_control control = COX_CONTROL_NONE;
static struct cox_channel channels[COX_CHANNEL_COUNT];
static struct cox_collector collectors[COX_TWO_WAY_COUNT];
static const struct cox_log no_log;

static void memory_prepare(void)
{
    struct cox_geometry geometry = countdown_geometry(NULL);
    assert_ok(cox_control_create(&control, countdown_group(), &geometry, test_err()));
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        assert_ok(cox_channel_create(&channels[c], countdown_group(), &control,
                                     (enum cox_channel_id)c, test_err()));
    cox_control_unlink_names(countdown_group(), &geometry, COX_CHANNEL_COUNT);
}

static void memory_restore(void)
{
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&channels[c]);
    cox_control_close(&control);
}

static struct cox_large_payload_choice blocks;

CONSTRUCT(replies_init, cox_replies_init(object, &control.geometry, COX_CHANNEL_EXECUTE))
DESTROY(replies_deinit, cox_replies_deinit(object))

static int collector_start(void *object, struct cox_error *err)
{
    (void)err;
    struct cox_collector *collector = object;
    int r = cox_collector_init(collector, &channels[COX_CHANNEL_EXECUTE], NULL, &blocks, &no_log);
    if (r)
        return r;
    r = cox_collector_start(collector);
    if (r)
        cox_collector_deinit(collector);
    return r;
}

static void collector_free(void *object)
{
    cox_collector_stop(object);
    cox_collector_deinit(object);
}

static void on_report(void *context, int rank, const char *text)
{
    (void)context, (void)rank, (void)text;
}

static int error_channel_start(void *object, struct cox_error *err)
{
    (void)err;
    struct cox_error_channel *errors = object;
    memset(errors, 0, sizeof *errors);
    errors->channel = &channels[COX_CHANNEL_ERROR];
    errors->collectors = collectors;
    errors->report = on_report;
    return cox_error_channel_start(errors);
}

DESTROY(error_channel_stop, cox_error_channel_stop(object))

/* ---- processes ---- */

/* Found in PATH; sleeps until it is killed. */
static const char *const sleeper[] = {"sleep", "1000", NULL};
static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};

static const struct cox_supervise_options supervise_options = {
    .rank_count = COUNTDOWN_RANK_COUNT,
    .command = sleeper,
    .pass_flags = false,
    .prefix = "/countdown",
};

CONSTRUCT(launch_plan_init, cox_launch_plan_init(object, &supervise_options, err))
DESTROY(launch_plan_deinit, cox_launch_plan_deinit(object))

static struct cox_launch_plan plan;

static void launch_prepare(void)
{
    assert_ok(cox_launch_plan_init(&plan, &supervise_options, test_err()));
}

static void launch_restore(void)
{
    cox_launch_plan_deinit(&plan);
}

static int launch(void *object, struct cox_error *err)
{
    const struct cox_launch_incarnation incarnation = {.number = 1};
    struct cox_launched *launched = object, made = {.pidfd = -1};
    int r = cox_launch(&plan, 1, &incarnation, &made, err);
    int pidfd = atomic_load(&made.pidfd); /* it is the caller's in any case */
    if (r)
        cox_close_fd(&pidfd);
    else
        *launched = made;
    return r;
}

static void launched_kill(void *object)
{
    struct cox_launched *launched = object;
    siginfo_t info = {0};
    assert_int_equal(kill(launched->pid, SIGKILL), 0);
    int pidfd = atomic_load(&launched->pidfd);
    assert_true(cox_launch_reap(pidfd, true, &info));
    assert_int_equal(info.si_status, SIGKILL); /* it lived until now */
    cox_close_fd(&pidfd);
    cox_close_fd(&launched->stream_fds[0]);
    cox_close_fd(&launched->stream_fds[1]);
}

static int supervisor_start(void *object, struct cox_error *err)
{
    static struct cox_rank ranks[COX_RANK_COUNT_MAX];
    struct cox_supervise_options options = supervise_options;
    options.ranks = ranks;
    cox_ranks_init(ranks, options.rank_count);
    return cox_supervisor_start(&options, object, err);
}

DESTROY(supervisor_free, cox_supervisor_free(*(struct cox_supervisor **)object))

/* ---- the whole group ---- */

static struct cox_executor_options executor_options = COX_EXECUTOR_OPTIONS_INIT;

CONSTRUCT(executor_start, cox_executor_start(&executor_options, object, err))
DESTROY(executor_free, cox_executor_free(*(struct cox_executor **)object))

static int rank_fds[COUNTDOWN_RANK_COUNT];

static void readiness_prepare(void)
{
    for (int rank = 0; rank < COUNTDOWN_RANK_COUNT; rank++)
        assert_true((rank_fds[rank] = eventfd(0, EFD_CLOEXEC)) >= 0);
}

static void readiness_restore(void)
{
    for (int rank = 0; rank < COUNTDOWN_RANK_COUNT; rank++)
        cox_close_fd(&rank_fds[rank]);
}

CONSTRUCT(readiness_open, cox_readiness_open(object, rank_fds, COUNTDOWN_RANK_COUNT))
DESTROY(readiness_close, cox_readiness_close(object))

static int server_start(void *object, struct cox_error *err)
{
    struct cox_server_options options = COX_SERVER_OPTIONS_INIT;
    struct cox_server *server = NULL;
    options.executor = &executor_options;
    options.init = true;
    int r = cox_server_new(&options, &server, err);
    if (r == 0)
        r = cox_server_start(server, err);
    if (r)
        cox_server_free(server);
    else
        *(struct cox_server **)object = server;
    return r;
}

DESTROY(server_free, cox_server_free(*(struct cox_server **)object))

static int foreground_start(void *object, struct cox_error *err)
{
    const struct cox_group_choice group = {
        .spin = COX_SPIN_OFF,
        .rank_count = 1,
        .name = countdown_group(),
        .depth = 1,
        .start_timeout_ms = TEST_PATIENCE_MS,
    };
    const struct cox_foreground_options options = {
        .group = &group,
        .command = scripted,
        .need_socket = true,
        .quiet = true,
    };
    struct cox_foreground *foreground = NULL;
    int r = cox_foreground_new(&foreground, err);
    if (r == 0)
        r = cox_foreground_start(foreground, &options, err);
    if (r)
        cox_foreground_free(foreground);
    else
        *(struct cox_foreground **)object = foreground;
    return r;
}

DESTROY(foreground_free, cox_foreground_free(*(struct cox_foreground **)object))

/* ---- what a live group is used by ---- */

static struct cox_executor *live;

static int engine_loop_new(void *object, struct cox_error *err)
{
    static const struct cox_engine_loop_options options = {
        .sequence_count_max = 4,
        .token_count_max = 16,
        .block_count = 16,
        .block_size = 4,
        .position_count_max = 64,
    };
    return cox_engine_loop_new(live, &options, object, err);
}

DESTROY(engine_loop_free, cox_engine_loop_free(*(struct cox_engine_loop **)object))

static int live_init(void *object, struct cox_error *err)
{
    static const struct cox_config_entry config[] = {{"key", "value"}};
    return cox_executor_init(live, config, 1, cox_deadline_after_ms(TEST_PATIENCE_MS), object, err);
}

CONSTRUCT(live_link_status,
          cox_executor_link_status(live, cox_deadline_after_ms(TEST_PATIENCE_MS), object, err))
DESTROY(link_status_deinit, cox_link_status_deinit(object))
CONSTRUCT(live_replay, cox_executor_replay_init(live, cox_deadline_after_ms(TEST_PATIENCE_MS), err))

/* Memory of a former incarnation of the rank group is released with the next one, if it was not
 * before. */

/* ---- tests ---- */

TEST(b15_b19_collectors_and_the_fault_thread_are_undone_when_any_call_fails)
{
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(replies_init, MAKES(struct cox_replies, replies_deinit),
                      AROUND(memory_prepare, memory_restore), .in_place = true, .wordless = true));
    COUNTDOWN(EACH_MODE,
              NAMED_SUBJECT("collector_init and start", collector_start,
                            MAKES(struct cox_collector, collector_free),
                            AROUND(memory_prepare, memory_restore), .in_place = true,
                            .wordless = true),
              SUBJECT(error_channel_start, MAKES(struct cox_error_channel, error_channel_stop),
                      AROUND(memory_prepare, memory_restore), .in_place = true, .wordless = true));
}

COUNTDOWN_TEST(b15_b19_a_launch_is_undone_when_any_call_fails_also_in_the_child, EACH_MODE,
               SUBJECT(launch_plan_init, MAKES(struct cox_launch_plan, launch_plan_deinit),
                       .lenient = true),
               SUBJECT(launch, MAKES(struct cox_launched, launched_kill),
                       AROUND(launch_prepare, launch_restore), .word = "is no program"))

COUNTDOWN_TEST(b15_b19_no_worker_outlives_a_supervisor_that_could_not_start, EACH_MODE,
               SUBJECT(supervisor_start, MAKES(struct cox_supervisor *, supervisor_free),
                       .lenient = true, .costly = true))

static void group_try(unsigned modes)
{
    static const struct countdown_subject group =
        SUBJECT(executor_start, MAKES(struct cox_executor *, executor_free), .lenient = true,
                .costly = true);
    countdown_try(&group, 1, modes);
}

TEST(b4_b15_b19_nothing_is_left_of_a_group_when_any_call_of_its_start_fails)
{
    executor_options = countdown_options(COX_ATTACH_NAMED, false);
    group_try(FAIL_REST | INTERRUPT);
    executor_options.depth = 2;
    executor_options.collect = true;
    group_try(FAIL_ONE);
}

TEST(b4_b15_nothing_is_left_of_a_legacy_group_when_any_call_of_its_start_fails)
{
    executor_options = countdown_options(COX_ATTACH_NAMED, true);
    group_try(FAIL_ONE);
}

COUNTDOWN_TEST(b15_b19_an_fd_for_event_loops_is_undone_when_any_call_fails, FAIL_ONE | FAIL_REST,
               SUBJECT(readiness_open, MAKES(struct cox_readiness, readiness_close),
                       AROUND(readiness_prepare, readiness_restore), .in_place = true,
                       .wordless = true))

TEST(b4_b15_nothing_is_left_of_a_server_when_any_call_of_its_start_fails)
{
    executor_options = countdown_options(COX_ATTACH_NAMED, false);
    COUNTDOWN(FAIL_ONE, SUBJECT(server_start, MAKES(struct cox_server *, server_free),
                                .lenient = true, .costly = true));
}

COUNTDOWN_TEST(b15_b19_a_foreground_group_gives_signals_and_fds_back_when_any_call_fails,
               FAIL_ONE | FAIL_REST,
               SUBJECT(foreground_start, MAKES(struct cox_foreground *, foreground_free),
                       .lenient = true, .costly = true))

TEST(b19_what_could_not_be_made_leaves_its_group_alone)
{
    executor_options = countdown_options(COX_ATTACH_NAMED, false);
    assert_ok(cox_executor_start(&executor_options, &live, test_err()));
    COUNTDOWN(EACH_MODE,
              SUBJECT(engine_loop_new, MAKES(struct cox_engine_loop *, engine_loop_free)),
              SUBJECT(live_init, .size = sizeof(struct cox_init_summary), .lenient = true),
              SUBJECT(live_replay, .lenient = true),
              SUBJECT(live_link_status, MAKES(struct cox_link_status, link_status_deinit)));
    live = cox_executor_free(live);
}

int main(void)
{
    countdown_environment_shrink();
    cox_console_start(); /* its thread stays for good; it is none of a group's */
    return test_run(NULL, NULL);
}
