/* What starts threads and processes, up to the whole group, with each of their calls failing in
 * turn: those of the coordinator's threads too, and those of a child before it executes its
 * program. */
#include "channel/attach/named/names.h"
#include "channel/attach/named/named_channel.h"
#include "channel/base/idioms.h"
#include "coordinator/collector/collect.h"
#include "coordinator/collector/error_channel.h"
#include "coordinator/collector/gathering.h"
#include "coordinator/process/launch.h"
#include "coordinator/process/supervise.h"
#include "engine/batching/engine_loop.h"
#include "program/cli/console.h"
#include "program/cli/foreground.h"
#include "countdown.h"
#include "testing.h"

#include <coxswain/executor.h>
#include <coxswain/requests.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define RANK_COUNT 2

static const char *group_name(void)
{
    static char name[64];
    return countdown_name(name, "g");
}

/* ---- the coordinator's private half of a channel ---- */

static struct cox_control control = COX_CONTROL_NONE;
static struct cox_channel channels[COX_CHANNEL_COUNT];
static struct cox_collector collectors[COX_TWO_WAY_COUNT];
static const struct cox_log no_log;

static struct cox_geometry geometry_make(void)
{
    struct cox_geometry_choice choice = {.depth = 2};
    struct cox_geometry geometry;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        choice.request_size[c] = 8192;
        choice.response_size[c] = 65536;
    }
    assert_int_equal(cox_geometry_resolve(RANK_COUNT, &choice, &geometry, NULL), 0);
    return geometry;
}

static void memory_prepare(void)
{
    struct cox_geometry geometry = geometry_make();
    struct cox_error err = {0};
    if (cox_control_create(&control, group_name(), &geometry, &err))
        fail_msg("%s", err.text);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        if (cox_channel_create(&channels[c], group_name(), &control, (enum cox_channel_id)c, &err))
            fail_msg("%s", err.text);
    cox_control_unlink_names(group_name(), &geometry, COX_CHANNEL_COUNT);
}

static void memory_restore(void)
{
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&channels[c]);
    cox_control_close(&control);
}

static struct cox_blocks_choice blocks;

CONSTRUCT(gathering_init, cox_gathering_init(object, &control.geometry, COX_CHANNEL_EXECUTE))
DESTROY(gathering_deinit, cox_gathering_deinit(object))

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

static const struct countdown_subject half_gathering =
    SUBJECT(gathering_init, MAKES(struct cox_gathering, gathering_deinit),
            AROUND(memory_prepare, memory_restore), .in_place = true, .wordless = true);
static const struct countdown_subject half_collector = NAMED_SUBJECT(
    "collector_init and start", collector_start, MAKES(struct cox_collector, collector_free),
    AROUND(memory_prepare, memory_restore), .in_place = true, .wordless = true);
static const struct countdown_subject half_error_channel =
    SUBJECT(error_channel_start, MAKES(struct cox_error_channel, error_channel_stop),
            AROUND(memory_prepare, memory_restore), .in_place = true, .wordless = true);

/* ---- processes ---- */

/* Found in PATH; sleeps until it is killed. */
static const char *const sleeper[] = {"sleep", "1000", NULL};
static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};

static const struct cox_supervise_options supervise_options = {
    .rank_count = RANK_COUNT,
    .command = sleeper,
    .pass_flags = false,
    .prefix = "/countdown",
};

CONSTRUCT(launch_plan_init, cox_launch_plan_init(object, &supervise_options, err))
DESTROY(launch_plan_deinit, cox_launch_plan_deinit(object))

static struct cox_launch_plan plan;

static void launch_prepare(void)
{
    struct cox_error err = {0};
    if (cox_launch_plan_init(&plan, &supervise_options, &err))
        fail_msg("%s", err.text);
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

static const struct countdown_subject process_plan =
    SUBJECT(launch_plan_init, MAKES(struct cox_launch_plan, launch_plan_deinit), .lenient = true);
static const struct countdown_subject process_launch =
    SUBJECT(launch, MAKES(struct cox_launched, launched_kill),
            AROUND(launch_prepare, launch_restore), .word = "is no program");
static const struct countdown_subject process_supervisor =
    SUBJECT(supervisor_start, MAKES(struct cox_supervisor *, supervisor_free), .lenient = true,
            .costly = true);

/* ---- the whole group ---- */

static struct cox_executor_options executor_options = COX_EXECUTOR_OPTIONS_INIT;

static void executor_choose(uint32_t depth, bool legacy)
{
    executor_options = (struct cox_executor_options){
        .size = sizeof(struct cox_executor_options),
        .name = group_name(),
        .rank_count = RANK_COUNT,
        .workers.command = scripted,
        .workers.environment_only = true,
        .spin = COX_SPIN_OFF,              /* a failure to read the processors is not an error */
        .socket.use = COX_SOCKET_REQUIRED, /* or what it fails for would be logged alone */
        .depth = depth,
        .workers.legacy = legacy,
        .times.start_timeout_ms = TEST_PATIENCE_MS,
        /* Legacy workers may not have attached yet, and then hear no goodbye. */
        .times.finalize_ms = legacy ? 1 : TEST_PATIENCE_MS,
    };
    /* Small: what is reserved is written to. */
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        executor_options.memory.request_size[c] = 16384;
        executor_options.memory.response_size[c] =
            legacy ? RANK_COUNT * COX_LEGACY_SLOT_STRIDE : UINT64_C(131072);
    }
}

CONSTRUCT(executor_start, cox_executor_start(&executor_options, object, err))
DESTROY(executor_free, cox_executor_free(*(struct cox_executor **)object))

static const struct countdown_subject group_executor = SUBJECT(
    executor_start, MAKES(struct cox_executor *, executor_free), .lenient = true, .costly = true);

static int rank_fds[RANK_COUNT];

static void readiness_prepare(void)
{
    for (int rank = 0; rank < RANK_COUNT; rank++)
        assert_true((rank_fds[rank] = eventfd(0, EFD_CLOEXEC)) >= 0);
}

static void readiness_restore(void)
{
    for (int rank = 0; rank < RANK_COUNT; rank++)
        cox_close_fd(&rank_fds[rank]);
}

CONSTRUCT(readiness_open, cox_readiness_open(object, rank_fds, RANK_COUNT))
DESTROY(readiness_close, cox_readiness_close(object))

static const struct countdown_subject collector_readiness =
    SUBJECT(readiness_open, MAKES(struct cox_readiness, readiness_close),
            AROUND(readiness_prepare, readiness_restore), .in_place = true, .wordless = true);

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

static const struct countdown_subject group_server =
    SUBJECT(server_start, MAKES(struct cox_server *, server_free), .lenient = true, .costly = true);

static int foreground_start(void *object, struct cox_error *err)
{
    const struct cox_group_choice group = {
        .spin = COX_SPIN_OFF,
        .rank_count = 1,
        .name = group_name(),
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

static const struct countdown_subject group_foreground =
    SUBJECT(foreground_start, MAKES(struct cox_foreground *, foreground_free), .lenient = true,
            .costly = true);

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

static const struct countdown_subject live_scheduler =
    SUBJECT(engine_loop_new, MAKES(struct cox_engine_loop *, engine_loop_free));

static int live_init(void *object, struct cox_error *err)
{
    static const struct cox_config_entry config[] = {{"key", "value"}};
    return cox_executor_init(live, config, 1, cox_deadline_after_ms(TEST_PATIENCE_MS), object, err);
}

CONSTRUCT(live_link_status,
          cox_executor_link_status(live, cox_deadline_after_ms(TEST_PATIENCE_MS), object, err))
DESTROY(link_status_deinit, cox_link_status_deinit(object))
CONSTRUCT(live_replay, cox_executor_replay_init(live, cox_deadline_after_ms(TEST_PATIENCE_MS), err))

/* Memory of a former generation of the rank group is released with the next one, if it was not
 * before. */
static const struct countdown_subject live_summary =
    SUBJECT(live_init, .size = sizeof(struct cox_init_summary), .lenient = true);
static const struct countdown_subject live_again = SUBJECT(live_replay, .lenient = true);
static const struct countdown_subject live_links =
    SUBJECT(live_link_status, MAKES(struct cox_link_status, link_status_deinit));

/* ---- tests ---- */

TEST(b15_b19_collectors_and_the_fault_thread_are_undone_when_any_call_fails)
{
    countdown_once(&half_gathering);
    countdown_sticky(&half_gathering);
    countdown_once(&half_collector);
    countdown_sticky(&half_collector);
    countdown_interrupted(&half_collector);
    countdown_once(&half_error_channel);
    countdown_sticky(&half_error_channel);
    countdown_interrupted(&half_error_channel);
}

TEST(b15_a_launch_is_undone_when_any_call_fails_also_in_the_child)
{
    countdown_once(&process_plan);
    countdown_once(&process_launch);
    countdown_interrupted(&process_launch);
}

TEST(b19_a_launch_reports_the_first_of_many_failures)
{
    countdown_sticky(&process_plan);
    countdown_sticky(&process_launch);
}

TEST(b15_no_worker_outlives_a_supervisor_that_could_not_start)
{
    countdown_once(&process_supervisor);
    countdown_interrupted(&process_supervisor);
}

TEST(b19_a_supervisor_reports_the_first_of_many_failures)
{
    countdown_sticky(&process_supervisor);
}

TEST(b4_b15_nothing_is_left_of_a_group_when_any_call_of_its_start_fails)
{
    executor_choose(2, false);
    executor_options.collect = true;
    countdown_once(&group_executor);
}

TEST(b19_a_group_reports_the_first_of_many_failures)
{
    executor_choose(1, false);
    countdown_sticky(&group_executor);
}

TEST(b4_b15_nothing_is_left_of_a_legacy_group_when_any_call_of_its_start_fails)
{
    executor_choose(1, true);
    countdown_once(&group_executor);
}

TEST(a_group_starts_through_interruptions)
{
    executor_choose(1, false);
    countdown_interrupted(&group_executor);
}

TEST(b15_b19_an_fd_for_event_loops_is_undone_when_any_call_fails)
{
    countdown_once(&collector_readiness);
    countdown_sticky(&collector_readiness);
}

TEST(b4_b15_nothing_is_left_of_a_server_when_any_call_of_its_start_fails)
{
    executor_choose(1, false);
    countdown_once(&group_server);
}

TEST(b15_b19_a_foreground_group_gives_signals_and_fds_back_when_any_call_fails)
{
    countdown_once(&group_foreground);
    countdown_sticky(&group_foreground);
}

TEST(b19_what_could_not_be_made_leaves_its_group_alone)
{
    struct cox_error err = {0};
    executor_choose(1, false);
    if (cox_executor_start(&executor_options, &live, &err))
        fail_msg("%s", err.text);
    const struct countdown_subject *const uses[] = {&live_scheduler, &live_summary, &live_again,
                                                    &live_links};
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        countdown_once(uses[i]);
        countdown_sticky(uses[i]);
        countdown_interrupted(uses[i]);
    }
    live = cox_executor_free(live);
}

/* Every variable is two allocations for every process. */
static void environment_shrink(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    clearenv();
    setenv("PATH", path, 1);
    /* This process was checked before; its workers are killed at arbitrary steps. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
}

int main(void)
{
    environment_shrink();
    cox_console_start(); /* its thread stays for good; it is none of a group's */
    return test_run(NULL, NULL);
}
