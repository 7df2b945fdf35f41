/*
 * Ranks that die are replaced by a policy, or by order; recovery commands take their turn:
 * requirements P8, A23, A26.
 */
#include "coordinator/executor/requests_internal.h"
#include "coordinator/recovery/recovery.h"
#include "rights.h"
#include "testing.h"

#include <coxswain/server.h>

#define RANK_COUNT_MAX 8

/* ---- a group with recovery ---- */

static struct {
    /* NULL: the executor and the recovery are the test's own */
    struct cox_server *server;
    struct cox_executor *executor;
    struct cox_recovery *recovery;
    /* everything below but the counts, which are stored last */
    pthread_mutex_t lock;
    /* deaths are reported later: the last one of these */
    bool hold;
    uint32_t held;
    _Atomic uint32_t death_count, failed_count;
    struct cox_error failure;
    char log[8][1024];
    uint32_t log_count;
} group;

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context;
    pthread_mutex_lock(&group.lock);
    bool hold = group.hold;
    group.held = rank;
    struct cox_recovery *recovery = group.recovery;
    pthread_mutex_unlock(&group.lock);
    atomic_fetch_add(&group.death_count, 1);
    if (recovery && !hold)
        cox_recovery_death(recovery, rank, text);
}

static void on_failed(void *context, const struct cox_error *error)
{
    assert_ptr_equal(context, &group);
    group.failure = *error;
    atomic_fetch_add(&group.failed_count, 1);
}

static void on_log(void *context, int level, const char *text)
{
    (void)context;
    pthread_mutex_lock(&group.lock);
    if (group.log_count < 8)
        snprintf(group.log[group.log_count++], sizeof group.log[0], "%d %s", level, text);
    pthread_mutex_unlock(&group.lock);
}

/* config: of the first init; NULL: none is sent. */
static void group_start(uint32_t rank_count, const char *const *command,
                        const struct cox_config_entry *config,
                        const struct cox_recovery_options *options)
{
    const char *const plain[] = {test_worker_program(), NULL};
    struct cox_recovery_options used = *options;
    struct cox_recovery *recovery = NULL;
    pthread_mutex_init(&group.lock, NULL);
    int r = cox_executor_start(START_WITH(.rank_count = rank_count,
                                          .workers.command = command ? command : plain,
                                          .memory.attach = test_attach(), .hooks.death = on_death),
                               &group.executor, test_err());
    if (r == 0 && config) {
        struct cox_init_summary summary;
        r = cox_executor_init(group.executor, config, config->key ? 1 : 0, test_patience(),
                              &summary, test_err());
    }
    used.log = (struct cox_log){.fn = on_log};
    used.failed = on_failed;
    used.context = &group;
    if (r == 0)
        r = cox_recovery_start(group.executor, &used, &recovery, test_err());
    assert_ok(r);
    pthread_mutex_lock(&group.lock);
    group.recovery = recovery;
    pthread_mutex_unlock(&group.lock);
}

#define POLICY(...)                                                                                \
    &(const struct cox_recovery_options)                                                           \
    {                                                                                              \
        .policy = { __VA_ARGS__ }                                                                  \
    }

#define RECOVERY_WITH(...)                                                                         \
    &(const struct cox_recovery_options)                                                           \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static const struct cox_config_entry no_config[] = {{NULL, NULL}};
/* Workers that pause. */
static const char *const pausing[] = {COX_TEST_BIN_DIR "/scripted_worker", "pauses", NULL};

static void group_end(void)
{
    if (!group.server && group.executor)
        cox_executor_stop(group.executor);
    group.recovery = cox_recovery_free(group.recovery);
    if (!group.server)
        group.executor = cox_executor_free(group.executor);
    group.server = cox_server_free(group.server);
    memset(&group, 0, sizeof group);
}

static int teardown(void **state)
{
    group_end();
    return test_teardown(state);
}

#define RECOVERY_TEST(name) TEST_WITH(name, test_setup, teardown)

/* The rank's process is dead; the hook may still be to come. */
static void kill_rank(uint32_t rank)
{
    pid_t pid = cox_executor_pid(group.executor, rank);
    assert_int_equal(kill(pid, SIGKILL), 0);
}

static void await_deaths(uint32_t count)
{
    AWAIT(atomic_load(&group.death_count) >= count);
}

static void await_failed(void)
{
    AWAIT(atomic_load(&group.failed_count) > 0);
}

static struct cox_recovery_status status_now(void)
{
    struct cox_recovery_status status;
    cox_recovery_status(group.recovery, &status);
    return status;
}

/* Until recovery says that it is doing this; "": nothing. */
static struct cox_recovery_status await_doing(const char *part)
{
    struct cox_recovery_status status = status_now();
    for (uint64_t end_ns = test_patience();
         part[0] ? !strstr(status.doing, part) : status.doing[0] != '\0'; status = status_now()) {
        if (cox_now_ns() > end_ns)
            fail_msg("recovery is '%s', expected '%s'", status.doing, part);
        sched_yield();
    }
    return status;
}

static int await_recovery(int code)
{
    struct cox_error err = {0};
    if (code)
        cox_fail(&err, code, "as a step would say");
    return cox_recovery_await(group.recovery, COX_DEADLINE_NEVER, &err);
}

static uint32_t incarnation(uint32_t rank)
{
    return test_rank_status(group.executor, rank).incarnation;
}

static void visit_nothing(void *context, const struct cox_completion *completion)
{
    (void)context;
    (void)completion;
}

static int echo_in(uint64_t epoch)
{
    return cox_executor_call_opaque(
        group.executor, "echo x", 6,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience(), .epoch = epoch),
        visit_nothing, NULL, test_err());
}

static void expect_echo(void)
{
    assert_ok(echo_in(0));
}

static bool replaced; /* by the last order */

static int order_restart(uint32_t rank, bool kill, struct cox_error *err)
{
    return cox_recovery_restart(group.recovery, rank, kill, test_patience(), &replaced, err);
}

/* ---- things that wait, on threads of their own ---- */

struct task {
    pthread_t thread;
    void (*run)(struct task *task);
    int code;
    enum cox_recover_command command;
    uint32_t rank;
    /* a restart of a rank that lives does nothing */
    bool spares;
    uint64_t deadline_ns;
    int result;
    struct cox_error error;
    struct cox_recover_result results[RANK_COUNT_MAX];
};

static void *task_main(void *argument)
{
    struct task *task = argument;
    task->run(task);
    return NULL;
}

static void task_await(struct task *task)
{
    if (task->code)
        cox_fail(&task->error, task->code, "as a step would say");
    task->result = cox_recovery_await(group.recovery, COX_DEADLINE_NEVER, &task->error);
}

static void task_command(struct task *task)
{
    task->result = cox_recovery_command(group.recovery, task->command, task->deadline_ns,
                                        task->results, &task->error);
}

static void task_restart(struct task *task)
{
    bool was_replaced;
    task->result = cox_recovery_restart(group.recovery, task->rank, !task->spares,
                                        task->deadline_ns, &was_replaced, &task->error);
}

static void task_start(struct task *task)
{
    task->thread = test_thread(task_main, task);
}

static int task_join(struct task *task)
{
    pthread_join(task->thread, NULL);
    return task->result;
}

/* ---- policies ---- */

RECOVERY_TEST(p8_a_dead_rank_is_replaced_and_initialized)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        group_start(n, NULL, no_config,
                    POLICY(.on_death = COX_ON_DEATH_RESTART, .restart_max = 100));
        assert_int_equal(await_recovery(0), 0);
        for (uint32_t rank = 0; rank < n; rank++) {
            kill_rank(rank);
            assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
            assert_int_equal(await_recovery(0), 0);
            assert_int_equal(incarnation(rank), 2);
            expect_echo();
        }
        assert_contains(group.log[0], "5 rank 0 (pid ");
        assert_contains(group.log[0], "was killed by signal 9 (Killed): replaced by process ");
        assert_contains(group.log[0], "(incarnation 2) in ");
        assert_int_equal(group.failed_count, 0);
        group_end();
    }
}

RECOVERY_TEST(p8_a_recovery_meanwhile_is_reported_once)
{
    group_start(2, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    kill_rank(1);
    await_deaths(1);
    AWAIT(incarnation(1) >= 2);
    await_doing("");
    assert_int_equal(await_recovery(COX_STALE), COX_STALE);
    assert_int_equal(await_recovery(COX_STALE), 0);
    assert_int_equal(status_now().recent_deaths, 1);
}

/* A step has ended of a death whose hook is not called yet. */
RECOVERY_TEST(p8_a_death_that_is_not_told_yet_is_waited_for)
{
    struct task task = {.run = task_await, .code = COX_PEER_DEAD};
    group_start(2, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    pthread_mutex_lock(&group.lock);
    group.hold = true;
    pthread_mutex_unlock(&group.lock);
    kill_rank(1);
    await_deaths(1);
    task_start(&task);
    pthread_mutex_lock(&group.lock);
    group.hold = false;
    pthread_mutex_unlock(&group.lock);
    cox_recovery_death(group.recovery, group.held, "rank 1 is dead");
    assert_int_equal(task_join(&task), COX_STALE);
    assert_int_equal(incarnation(1), 2);
}

/* A planner of steps may not notice meanwhile: no step of its own was in flight. */
RECOVERY_TEST(p8_what_builds_on_ranks_that_are_no_more_is_refused)
{
    group_start(2, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    uint64_t epoch = cox_executor_epoch(group.executor);
    assert_int_equal(echo_in(epoch), 0);
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    assert_int_equal(echo_in(epoch), COX_STALE);
    epoch = cox_executor_epoch(group.executor);
    assert_int_equal(echo_in(epoch), 0);
    assert_int_equal(echo_in(0), 0);
    group_end();
    /* A rank that is there again, before it is initialized, knows nothing either. */
    group_start(2, NULL, NULL, POLICY(.on_death = COX_ON_DEATH_WAIT));
    epoch = cox_executor_epoch(group.executor);
    assert_ok(order_restart(1, true, test_err()));
    assert_int_equal(echo_in(epoch), COX_STALE);
}

RECOVERY_TEST(p8_two_ranks_at_once)
{
    group_start(4, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    pid_t others[] = {cox_executor_pid(group.executor, 0), cox_executor_pid(group.executor, 2)};
    kill_rank(1);
    kill_rank(3);
    int r;
    do {
        r = await_recovery(COX_PEER_DEAD);
        assert_true(r == 0 || r == COX_STALE);
    } while (incarnation(1) < 2 || incarnation(3) < 2);
    assert_int_equal(await_recovery(0), 0);
    expect_echo();
    assert_int_equal(cox_executor_pid(group.executor, 0), others[0]);
    assert_int_equal(cox_executor_pid(group.executor, 2), others[1]);
}

RECOVERY_TEST(p8_a_new_one_that_dies_half_way_is_replaced_again)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", NULL};
    group_start(2, fragile, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .backoff_min_ms = 1, .backoff_max_ms = 2));
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    assert_int_equal(incarnation(1), 4);
    assert_contains(group.log[0], "4 the group is not recovered yet: rank 1");
    expect_echo();
}

/* The first death, and every new one: the limit counts all of them. */
RECOVERY_TEST(p8_more_deaths_than_the_limit_are_a_crash_loop)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", "4", "5", NULL};
    group_start(2, fragile, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .restart_max = 3, .backoff_min_ms = 1,
                       .backoff_max_ms = 2));
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_PEER_DEAD);
    await_failed();
    assert_int_equal(incarnation(1), 4);
    assert_int_equal(group.failure.code, COX_PEER_DEAD);
    assert_contains(group.failure.text, "4 deaths within 60 s");
    assert_contains(group.failure.text, "more than the 3");
    assert_contains(group.failure.text, "after 3 tries: rank 1 (pid ");
    assert_contains(group.failure.text, "was killed by signal 9");
    assert_string_equal(status_now().doing, "the group has failed");
    assert_int_equal(status_now().recent_deaths, 4);
    assert_int_equal(cox_recovery_await(group.recovery, COX_DEADLINE_NEVER, test_err()),
                     COX_PEER_DEAD);
    assert_string_equal(test_error.text, group.failure.text);
    assert_refused(order_restart(1, false, test_err()), COX_PEER_DEAD, "the group has failed");
    assert_int_equal(group.failed_count, 1);
}

/* As many deaths, but each of them alone in its window. */
RECOVERY_TEST(p8_deaths_far_apart_are_no_crash_loop)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", "4", "5", NULL};
    group_start(2, fragile, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .restart_max = 1, .window_ms = 1,
                       .backoff_min_ms = 5, .backoff_max_ms = 5));
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    assert_int_equal(incarnation(1), 6);
    expect_echo();
}

static uint32_t pause_of(const char *doing)
{
    unsigned pause_ms = 0;
    if (sscanf(doing, "pausing %u ms before the next try", &pause_ms) != 1)
        fail_msg("no pause: %s", doing);
    return pause_ms;
}

/* The first try comes at once; then the pause doubles up to its end. An order does not wait for it.
 */
RECOVERY_TEST(p8_the_pause_between_tries_doubles)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", "4", NULL};
    const uint32_t pauses[] = {1000000, 2000000, 3000000};
    group_start(2, fragile, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .window_ms = 3600000,
                       .backoff_min_ms = 1000000, .backoff_max_ms = 3000000));
    kill_rank(1);
    for (uint32_t k = 0; k < 3; k++) {
        assert_in_range(pause_of(await_doing("pausing").doing), pauses[k] - 900000, pauses[k]);
        assert_int_equal(incarnation(1), k + 2);
        int r = order_restart(1, false, test_err());
        assert_int_equal(r, k < 2 ? COX_PEER_DEAD : 0);
        assert_int_equal(replaced, k == 2);
    }
    assert_int_equal(await_recovery(0), COX_STALE);
    expect_echo();
    assert_int_equal(status_now().recent_deaths, 2); /* and the first try; orders do not count */
    /* It had been replaced several times: its next death is not made good at once. */
    kill_rank(1);
    assert_in_range(pause_of(await_doing("pausing").doing), 2100000, 3000000);
}

RECOVERY_TEST(p8_without_a_policy_a_death_is_the_end)
{
    group_start(2, NULL, no_config, RECOVERY_WITH(0));
    kill_rank(0);
    await_failed();
    assert_contains(group.failure.text, "rank 0 (pid ");
    assert_contains(group.failure.text, "was killed by signal 9");
    assert_int_equal(cox_recovery_await(group.recovery, COX_DEADLINE_NEVER, test_err()),
                     COX_PEER_DEAD);
    assert_string_equal(test_error.text, group.failure.text);
    /* A caller with a more detailed error keeps it. */
    struct cox_error known = {.code = COX_PEER_DEAD, .text = "in the midst of step 7"};
    assert_int_equal(cox_recovery_await(group.recovery, COX_DEADLINE_NEVER, &known), COX_PEER_DEAD);
    assert_string_equal(known.text, "in the midst of step 7");
    assert_int_equal(incarnation(0), 1);
    assert_int_equal(group.failed_count, 1);
}

RECOVERY_TEST(p8_a_group_waits_for_the_order)
{
    struct task task = {.run = task_await, .code = COX_PEER_DEAD};
    group_start(3, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_WAIT));
    kill_rank(0);
    kill_rank(2);
    await_deaths(2);
    task_start(&task);
    await_doing("coxswain recover restart --rank ");
    /* One is replaced, and the other one still missing: the group cannot continue. */
    assert_ok(order_restart(2, false, test_err()));
    assert_true(replaced);
    await_doing("restart --rank 0");
    assert_ok(order_restart(1, false, test_err()));
    assert_false(replaced);
    assert_ok(order_restart(0, false, test_err()));
    assert_int_equal(task_join(&task), COX_STALE);
    expect_echo();
    assert_int_equal(group.failed_count, 0);
}

RECOVERY_TEST(p8_a_wait_for_the_order_ends_at_its_deadline)
{
    group_start(2, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_WAIT));
    kill_rank(1);
    await_doing("coxswain recover restart --rank 1");
    const uint64_t deadlines_ns[] = {0, cox_deadline_after_ms(100)};
    for (int i = 0; i < 2; i++) {
        struct cox_error err = {0};
        cox_fail(&err, COX_PEER_DEAD, "as a step would say");
        assert_int_equal(cox_recovery_await(group.recovery, deadlines_ns[i], &err), COX_TIMEOUT);
        assert_int_equal(err.code, COX_TIMEOUT);
        assert_contains(err.text, "waiting for an order");
    }
    assert_true(cox_now_ns() >= deadlines_ns[1]);
    assert_ok(order_restart(1, false, test_err()));
    assert_int_equal(cox_recovery_await(group.recovery, 0, test_err()), COX_STALE);
    assert_ok(cox_recovery_await(group.recovery, 0, test_err()));
    assert_int_equal(incarnation(1), 2);
    expect_echo();
}

RECOVERY_TEST(p8_a_server_of_ones_own_replaces_a_rank_by_order)
{
    const char *const command[] = {test_worker_program(), NULL};
    struct cox_server_options options = COX_SERVER_OPTIONS_INIT;
    options.executor =
        START_WITH(.rank_count = 2, .workers.command = command, .memory.attach = test_attach());
    options.init = true;
    options.restart.on_death = COX_ON_DEATH_WAIT;
    assert_ok(cox_server_new(&options, &group.server, test_err()));
    assert_ok(cox_server_start(group.server, test_err()));
    group.executor = cox_server_executor(group.server);

    assert_int_equal(cox_server_restart(group.server, 2, false, test_patience(), test_err()),
                     COX_INVALID);
    assert_ok(cox_server_restart(group.server, 1, false, test_patience(), test_err()));
    assert_int_equal(incarnation(1), 1); /* it lives */
    kill_rank(1);
    AWAIT(test_rank_status(group.executor, 1).liveness == COX_LIVENESS_DEAD);
    struct cox_error err = {0};
    cox_fail(&err, COX_PEER_DEAD, "as a step would say");
    assert_int_equal(cox_server_await_recovery(group.server, cox_deadline_after_ms(100), &err),
                     COX_TIMEOUT);
    assert_ok(cox_server_restart(group.server, 1, false, test_patience(), test_err()));
    assert_int_equal(incarnation(1), 2);
    assert_int_equal(cox_server_await_recovery(group.server, test_patience(), test_err()),
                     COX_STALE);
    expect_echo();
    assert_ok(cox_server_restart(group.server, 0, true, test_patience(), test_err()));
    assert_int_equal(incarnation(0), 2);
    expect_echo();
}

RECOVERY_TEST(p8_all_are_started_again)
{
    group_start(3, NULL, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART_ALL));
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    for (uint32_t rank = 0; rank < 3; rank++)
        assert_int_equal(incarnation(rank), 2);
    expect_echo();
    assert_int_equal(status_now().recent_deaths, 1); /* the others were ended */
    assert_int_equal(await_recovery(0), 0);
}

/* ---- orders ---- */

RECOVERY_TEST(p8_a_living_rank_is_killed_only_by_order)
{
    for (int policy = COX_ON_DEATH_FAIL; policy < COX_ON_DEATH_COUNT; policy++) {
        group_start(2, NULL, no_config, POLICY(.on_death = (enum cox_on_death)policy));
        pid_t pid = cox_executor_pid(group.executor, 1);
        assert_ok(order_restart(1, false, test_err()));
        assert_false(replaced);
        assert_int_equal(cox_executor_pid(group.executor, 1), pid);
        assert_ok(order_restart(1, true, test_err()));
        assert_true(replaced);
        assert_int_not_equal(cox_executor_pid(group.executor, 1), pid);
        assert_int_equal(incarnation(0), policy == COX_ON_DEATH_RESTART_ALL ? 2 : 1);
        assert_int_equal(await_recovery(0), COX_STALE);
        expect_echo();
        assert_int_equal(status_now().recent_deaths, 0);
        assert_int_equal(group.failed_count, 0);
        assert_int_equal(order_restart(2, true, test_err()), COX_INVALID);
        group_end();
    }
}

static int command(enum cox_recover_command which, struct cox_recover_result *results,
                   struct cox_error *err)
{
    *err = (struct cox_error){0};
    return cox_recovery_command(group.recovery, which, test_patience(), results, err);
}

RECOVERY_TEST(a26_commands_are_idempotent_and_a_paused_group_sleeps)
{
    struct cox_recover_result results[2];
    group_start(2, pausing, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    const enum cox_recover_command commands[] = {COX_RECOVER_PAUSE, COX_RECOVER_REINIT,
                                                 COX_RECOVER_START};
    struct task task = {.run = task_await, .code = COX_STATE};
    for (size_t i = 0; i < 3; i++) {
        assert_ok(command(commands[i], results, test_err()));
        assert_string_equal(results[1].text, "");
        if (i == 0)
            task_start(&task);
        assert_ok(command(commands[i], results, test_err()));
        assert_string_equal(results[0].text, "already");
        assert_string_equal(results[1].text, "already");
    }
    assert_int_equal(task_join(&task), COX_STALE);
    assert_int_equal(await_recovery(0), 0); /* it was not told before start */
    assert_refused(command(COX_RECOVER_REINIT, results, test_err()), COX_STATE,
                   "legal are pause, pause-net, clear");
    expect_echo();
}

RECOVERY_TEST(a26_a_pause_that_came_to_some_ranks_only_is_undone_by_start)
{
    struct cox_recover_result results[2];
    struct task task = {.run = task_await, .code = COX_ABORTED};
    group_start(2, pausing, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    const pid_t pid = cox_executor_pid(group.executor, 1);
    test_stop_process(pid);
    assert_int_equal(cox_recovery_command(group.recovery, COX_RECOVER_PAUSE,
                                          cox_deadline_after_ms(50), results, test_err()),
                     COX_TIMEOUT);
    assert_int_equal(results[1].result, -1);
    await_doing("some ranks are paused");
    assert_int_equal(cox_executor_engine_state(group.executor), COX_ENGINE_NORMAL);
    task_start(&task);
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_ok(command(COX_RECOVER_START, results, test_err()));
    assert_string_equal(results[0].text, ""); /* both were asked */
    assert_int_equal(task_join(&task), COX_STALE);
    await_doing("");
    expect_echo();
    assert_ok(command(COX_RECOVER_START, results, test_err()));
    assert_string_equal(results[0].text, "already");
}

RECOVERY_TEST(p8_a_rank_that_dies_in_a_pause_leaves_the_group_paused)
{
    struct cox_recover_result results[2];
    struct task task = {.run = task_await, .code = COX_PEER_DEAD};
    group_start(2, pausing, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    assert_ok(command(COX_RECOVER_PAUSE, results, test_err()));
    kill_rank(1);
    await_deaths(1);
    task_start(&task);
    AWAIT(incarnation(1) >= 2);
    await_doing("");
    assert_int_equal(cox_executor_engine_state(group.executor), COX_ENGINE_PAUSE);
    assert_ok(command(COX_RECOVER_START, results, test_err()));
    assert_int_equal(task_join(&task), COX_STALE);
    assert_int_equal(await_recovery(0), 0);
    assert_int_equal(cox_executor_engine_state(group.executor), COX_ENGINE_NORMAL);
}

/* ---- deadlines, stop ---- */

/* A group whose init blocks, replayed for a replacement: recovery is inside the executor until the
 * pipe is released. */
static struct test_pipe *start_blocked(const struct cox_recovery_options *options)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_config_entry config[] = {{"block", test_pipe_path(pipe)}};
    test_pipe_release(pipe, 2);
    group_start(2, NULL, config, options);
    kill_rank(1);
    await_doing("initializing");
    return pipe;
}

RECOVERY_TEST(a23_an_order_that_does_not_get_its_turn_ends_at_its_deadline)
{
    struct test_pipe *pipe = start_blocked(POLICY(.on_death = COX_ON_DEATH_RESTART));
    struct cox_recover_result results[2];
    uint64_t soon = cox_deadline_after_ms(50);
    assert_refused(
        cox_recovery_command(group.recovery, COX_RECOVER_CLEAR, soon, results, test_err()),
        COX_TIMEOUT, "initializing the ranks again");
    assert_int_equal(results[0].result, -1);
    assert_int_equal(cox_recovery_restart(group.recovery, 0, false, soon, &replaced, test_err()),
                     COX_TIMEOUT);
    /* The others keep their places. */
    struct task task = {
        .run = task_command, .command = COX_RECOVER_CLEAR, .deadline_ns = test_patience()};
    task_start(&task);
    test_pipe_release(pipe, 2);
    assert_int_equal(task_join(&task), 0);
    assert_int_equal(await_recovery(0), COX_STALE);
    assert_int_equal(incarnation(0), 1);
    expect_echo();
}

/* Nothing is released before the rank has been replaced: a kill that waited for its turn would
 * never come. */
RECOVERY_TEST(m12_p8_an_order_to_kill_does_not_wait_for_its_turn)
{
    struct test_pipe *pipe =
        start_blocked(RECOVERY_WITH(.policy.on_death = COX_ON_DEATH_RESTART,
                                    .restart_ms = 1000 * (uint64_t)TEST_PATIENCE_MS));
    struct task task = {.run = task_restart, .deadline_ns = test_patience()};
    task_start(&task);
    AWAIT(incarnation(0) >= 2);
    test_pipe_release(pipe, 4);
    if (task_join(&task))
        fail_msg("restart: %d: %s", task.result, task.error.text);
    await_recovery(0);
    assert_int_equal(incarnation(0), 2);
    expect_echo();
}

RECOVERY_TEST(p8_a_rank_that_dies_while_init_is_replayed_is_replaced_too)
{
    struct test_pipe *pipe = start_blocked(POLICY(.on_death = COX_ON_DEATH_RESTART));
    kill_rank(0);
    test_pipe_release(pipe, 4);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    assert_int_equal(incarnation(0), 2);
    assert_int_equal(incarnation(1), 2);
    expect_echo();
}

/* It hangs, and is tried again: nothing waits for ever. */
RECOVERY_TEST(p8_an_init_that_hangs_is_given_up_and_counts)
{
    start_blocked(RECOVERY_WITH(.policy.on_death = COX_ON_DEATH_RESTART, .restart_ms = 300,
                                .policy.restart_max = 2, .policy.backoff_min_ms = 1,
                                .policy.backoff_max_ms = 1));
    await_failed();
    assert_contains(group.failure.text, "3 deaths within 60 s");
    assert_int_equal(await_recovery(0), COX_PEER_DEAD);
}

/* It lives and does not reply: its death would never be reported. */
RECOVERY_TEST(p8_a_rank_that_hangs_in_the_init_is_killed_and_replaced)
{
    struct test_pipe *pipe =
        start_blocked(RECOVERY_WITH(.policy.on_death = COX_ON_DEATH_RESTART, .restart_ms = 2000,
                                    .policy.restart_max = 1000, .policy.backoff_min_ms = 1,
                                    .policy.backoff_max_ms = 1));
    test_pipe_release(pipe, 1); /* either of them */
    AWAIT(incarnation(0) + incarnation(1) >= 4);
    test_pipe_release(pipe, 64);
    assert_int_equal(await_recovery(0), COX_STALE);
    assert_int_equal(group.failed_count, 0);
    expect_echo();
}

/* Each of them lasts longer than the window, in which there is never more than one. */
RECOVERY_TEST(p8_inits_that_hang_one_after_the_other_are_no_hope)
{
    start_blocked(RECOVERY_WITH(.policy.on_death = COX_ON_DEATH_RESTART, .restart_ms = 300,
                                .policy.window_ms = 1, .policy.restart_max = 2,
                                .policy.backoff_min_ms = 5, .policy.backoff_max_ms = 5));
    await_failed();
    assert_contains(group.failure.text, "3 tries in a row did not end within 0.3 s");
    assert_int_equal(await_recovery(0), COX_PEER_DEAD);
}

/* A group of which rank 1 is replaced by order, and the init does not end. */
static struct test_pipe *start_half_replaced(const struct cox_recovery_options *options)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_config_entry config[] = {{"block", test_pipe_path(pipe)}};
    test_pipe_release(pipe, 2);
    group_start(2, NULL, config, options);
    assert_int_equal(cox_recovery_restart(group.recovery, 1, true, cox_deadline_after_ms(2000),
                                          &replaced, test_err()),
                     COX_TIMEOUT);
    return pipe;
}

RECOVERY_TEST(p8_without_a_policy_an_order_that_fails_half_way_is_the_end)
{
    start_half_replaced(RECOVERY_WITH(0));
    assert_int_equal(await_recovery(0), COX_PEER_DEAD); /* and no thread sleeps for ever */
    await_failed();
}

RECOVERY_TEST(p8_an_order_that_fails_half_way_can_be_given_again)
{
    struct test_pipe *pipe = start_half_replaced(POLICY(.on_death = COX_ON_DEATH_WAIT));
    assert_contains(status_now().doing, "waiting for an order: coxswain recover restart");
    /* No rank is paused: a start, and a second one, does nothing. */
    struct cox_recover_result results[2];
    assert_int_equal(cox_executor_engine_state(group.executor), COX_ENGINE_ABNORMAL);
    for (int i = 0; i < 2; i++) {
        assert_ok(command(COX_RECOVER_START, results, test_err()));
        assert_string_equal(results[0].text, "already");
    }
    test_pipe_release(pipe, 64);
    assert_ok(order_restart(1, false, test_err()));
    assert_int_equal(await_recovery(0), COX_STALE);
    assert_false(status_now().unready);
    expect_echo();
}

/* One order waits for a rank which the next one kills: that is no death that the policy knows an
 * reply to. */
RECOVERY_TEST(p8_a_rank_killed_before_its_orders_turn_is_not_the_end)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_config_entry config[] = {{"block", test_pipe_path(pipe)}};
    struct task first = {.run = task_restart, .rank = 1, .deadline_ns = test_patience()};
    struct task second = {.run = task_restart, .deadline_ns = test_patience()};
    test_pipe_release(pipe, 2);
    group_start(2, NULL, config, RECOVERY_WITH(0));
    task_start(&first);
    await_doing("initializing");
    task_start(&second);
    await_deaths(2);
    test_pipe_release(pipe, 64);
    assert_int_equal(task_join(&first), COX_PEER_DEAD);
    if (task_join(&second))
        fail_msg("%d: %s", second.result, second.error.text);
    assert_int_equal(await_recovery(0), COX_STALE);
    assert_int_equal(group.failed_count, 0);
    expect_echo();
}

/* A restart that kills ends the init that the others wait for: a command would then get its turn
 * before the stop, and rightly report the death. */
RECOVERY_TEST(b16_stop_ends_all_waits)
{
    for (int spares = 0; spares < 2; spares++) {
        start_blocked(POLICY(.on_death = COX_ON_DEATH_RESTART));
        struct task tasks[] = {
            {.run = task_await, .code = COX_PEER_DEAD},
            {.run = task_restart, .spares = spares, .deadline_ns = COX_DEADLINE_NEVER},
            {.run = task_command, .command = COX_RECOVER_CLEAR, .deadline_ns = test_patience()},
        };
        const size_t count = spares ? 3 : 2;
        for (size_t i = 0; i < count; i++)
            task_start(&tasks[i]);
        cox_executor_stop(group.executor);
        cox_recovery_stop(group.recovery);
        for (size_t i = 0; i < count; i++)
            if (task_join(&tasks[i]) != COX_CLOSED)
                fail_msg("task %zu: %d: %s", i, tasks[i].result, tasks[i].error.text);
        assert_int_equal(await_recovery(0), COX_CLOSED);
        assert_int_equal(group.failed_count, 0);
        group_end();
    }
}

RECOVERY_TEST(b16_stop_ends_a_pause_and_cancel_ends_an_await)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", NULL};
    struct task task = {.run = task_await, .code = COX_PEER_DEAD};
    group_start(2, fragile, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .backoff_min_ms = 3600000,
                       .backoff_max_ms = 3600000));
    kill_rank(1);
    await_doing("pausing");
    task_start(&task);
    cox_recovery_cancel(group.recovery);
    assert_int_equal(task_join(&task), COX_CLOSED);
    assert_int_equal(await_recovery(0), COX_CLOSED); /* before it sleeps as well */
    cox_recovery_stop(group.recovery);               /* the group is alive */
    cox_recovery_stop(group.recovery);
}

RECOVERY_TEST(p8_a_group_without_an_init_is_well_without_one)
{
    group_start(2, NULL, NULL, POLICY(.on_death = COX_ON_DEATH_RESTART));
    kill_rank(1);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    expect_echo();
    assert_contains(group.log[0], "replaced by process");
}

RECOVERY_TEST(p8_a_program_that_is_gone_is_not_tried_for_ever)
{
    char path[] = "/tmp/cox_recovery_XXXXXX", link[64];
    assert_non_null(mkdtemp(path));
    snprintf(link, sizeof link, "%s/worker", path);
    assert_int_equal(symlink(test_worker_program(), link), 0);
    const char *const command[] = {link, NULL};
    group_start(2, command, no_config, POLICY(.on_death = COX_ON_DEATH_RESTART));
    assert_int_equal(unlink(link), 0);
    assert_int_equal(rmdir(path), 0);
    kill_rank(1);
    await_failed();
    assert_contains(group.failure.text, "cannot be recovered");
    assert_contains(group.failure.text, link);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_PEER_DEAD);
}

/* ---- want of space ---- */

static bool shm_is_private(void)
{
    static int made; /* 1: yes; -1: it cannot be */
    if (!made)
        made = test_unshare_shm("mode=1777,size=64m") ? 1 : -1;
    return made > 0;
}

static void shm_fill(void)
{
    static char page[65536];
    int fd = open("/dev/shm/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (write(fd, page, sizeof page) > 0)
        continue;
    assert_int_equal(errno, ENOSPC);
    close(fd);
}

/* More tries than deaths are allowed, and none of them is one. */
RECOVERY_TEST(g2b_a_replacement_waits_for_space)
{
    test_needs_names();
    if (!shm_is_private())
        skip();
    group_start(2, NULL, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .restart_max = 1, .backoff_min_ms = 1,
                       .backoff_max_ms = 2));
    shm_fill();
    kill_rank(1);
    /* Each try leaves the state that is looked for, and the next one follows. */
    for (int i = 0; i < 8; i++) {
        await_doing("replacing rank 1");
        await_doing("waiting for what a replacement needs: ");
    }
    assert_int_equal(status_now().recent_deaths, 1);
    assert_int_equal(group.failed_count, 0);
    assert_int_equal(unlink("/dev/shm/filler"), 0);
    assert_int_equal(await_recovery(COX_PEER_DEAD), COX_STALE);
    expect_echo();
    assert_string_equal(status_now().doing, "");
    assert_int_equal(status_now().recent_deaths, 1);
}

RECOVERY_TEST(g2b_space_that_never_comes_is_an_error_that_says_so)
{
    test_needs_names();
    if (!shm_is_private())
        skip();
    group_start(2, NULL, no_config,
                POLICY(.on_death = COX_ON_DEATH_RESTART, .window_ms = 200, .backoff_min_ms = 1,
                       .backoff_max_ms = 20));
    shm_fill();
    kill_rank(1);
    await_failed();
    unlink("/dev/shm/filler");
    assert_contains(group.failure.text, "what it needs was not there for 0.");
    assert_contains(group.failure.text, "No space left on device");
    assert_contains(group.failure.text, "needed in /dev/shm, 0 are free");
}
