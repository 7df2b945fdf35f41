/*
 * Inits with real workers: each gives the rank group memory of its own, the last can be said again,
 * and the engine state that inits, deaths and recovery commands leave decides whether steps are let
 * in. Requirements P8, M12, K25.
 */
#include "channel/shm/geometry.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/operation.h"
#include "rights.h"
#include "steps.h"

#include <sys/mount.h>

#define RANK_COUNT 2

static const struct cox_config_entry telling[] = {{"tell", ""}, {"npu", "77"}, {"empty", NULL}};
#define TELLING telling, 3

static int init_with(struct test_group *g, const struct cox_config_entry *config, size_t count,
                     uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_init_summary summary;
    *err = (struct cox_error){0};
    return cox_executor_init(test_group_executor(g), config, count, deadline_ns, &summary, err);
}

static void init_group(struct test_group *g)
{
    assert_ok(init_with(g, TELLING, test_patience(), test_err()));
}

static int replay(struct test_group *g, struct cox_error *err)
{
    *err = (struct cox_error){0};
    return cox_executor_replay_init(test_group_executor(g), test_patience(), err);
}

static enum cox_engine_state state_of(struct test_group *g)
{
    return cox_executor_engine_state(test_group_executor(g));
}

static const Coxswain__ExecuteRequest *step_empty(struct test_step *s)
{
    test_step_init(s, 0, COXSWAIN__FORWARD_TYPE__MIXED);
    return &s->request;
}

static int step_call(struct test_group *g, struct cox_error *err)
{
    struct test_step s;
    OWN_COMPLETION c = {0};
    step_empty(&s);
    *err = (struct cox_error){0};
    return test_step_call(g, &s, test_patience(), &c, err);
}

static void expect_step(struct test_group *g)
{
    assert_ok(step_call(g, test_err()));
}

/* A step in which all ranks are until the pipe is released. */
static void step_blocks(struct test_group *g, const struct test_pipe *pipe)
{
    struct test_step s;
    struct cox_executor *executor = test_group_executor(g);
    assert_int_equal(test_call(g, NULL, "step block 1 %s", test_pipe_path(pipe)), 0);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g), 0);
    assert_ok(cox_executor_submit(
        executor, step_empty(&s),
        SUBMIT_WITH(.gather = COX_GATHER_RANK0, .deadline_ns = test_patience()), NULL, test_err()));
    test_await_lines(g, -1, "blocked", RANK_COUNT);
}

/* ---- the memory of the rank group ---- */

/* What it takes now; of the one object that this process has of it, or, in a sealed group, of those
 * of all ranks, each counted once. */
static uint64_t group_bytes(void)
{
    struct stat st = {0};
    ino_t seen[4 * RANK_COUNT];
    uint64_t bytes = 0;
    size_t count = 0;
    char target[256];
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        ssize_t length = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = '\0';
        if (!strstr(target, "_group"))
            continue;
        assert_int_equal(fstatat(dirfd(dir), entry->d_name, &st, 0), 0);
        size_t known = 0;
        while (known < count && seen[known] != st.st_ino)
            known++;
        if (known < count)
            continue;
        assert_true(count < sizeof seen / sizeof seen[0]);
        seen[count++] = st.st_ino;
        bytes += (uint64_t)st.st_blocks * 512;
    }
    closedir(dir);
    assert_int_equal(count, test_attach() == COX_ATTACH_SEALED ? 2 * RANK_COUNT : 1);
    return bytes;
}

static uint64_t window_of(uint32_t rank_count)
{
    const struct cox_geometry_choice choice = {0};
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(rank_count, &choice, &geometry, NULL), 0);
    if (test_attach() == COX_ATTACH_SEALED)
        return rank_count * (cox_geometry_group_words_size() + cox_geometry_group_payload_size());
    return cox_geometry_group_size(&geometry);
}

/* Another incarnation and another window each time, of which only the last takes memory; windows
 * are used in turn. A sealed group has no windows: a rank has the same memory in every incarnation.
 */
GROUP_TEST(k25_every_init_has_memory_of_its_own, RANK_COUNT)
{
    const uint64_t window = window_of(RANK_COUNT);
    assert_int_equal(group_bytes(), window);
    size_t fds = 0;
    for (uint64_t incarnation = 1; incarnation <= 40; incarnation++) {
        char line[64];
        const bool again = incarnation % 3 == 0;
        if (!again)
            init_group(g);
        else if (replay(g, test_err()))
            fail_msg("%s", test_error.text);
        snprintf(line, sizeof line, "init incarnation %" PRIu64 " at %" PRIu64 "%s", incarnation,
                 test_attach() == COX_ATTACH_SEALED ? 0
                                                    : incarnation % COX_GROUP_WINDOW_COUNT * window,
                 again ? " again" : "");
        test_await_lines(g, 0, line, 1);
        test_await_lines(g, 1, line, 1);
        assert_int_equal(group_bytes(), window);
        if (incarnation == 1) {
            test_await_socket(g);
            fds = test_count_fds();
        }
    }
    test_await_socket(g);
    assert_int_equal(test_count_fds(), fds);
}

/* An init that fails is an incarnation as well; its window and the one before stay until one
 * succeeds. */
GROUP_TEST(k25_a_failed_init_takes_an_incarnation, RANK_COUNT)
{
    static const struct cox_config_entry failing[] = {{"tell", ""}, {"fail", "1"}};
    init_group(g);
    assert_int_equal(init_with(g, failing, 2, test_patience(), test_err()), COX_REJECTED);
    assert_int_equal(group_bytes(), (test_attach() == COX_ATTACH_SEALED ? UINT64_C(1) : 2) *
                                        window_of(RANK_COUNT));
    /* What is said again is the one that succeeded. */
    assert_ok(replay(g, test_err()));
    test_await_lines(g, 0, "init incarnation 3", 1);
    test_await_lines(g, 1, "init incarnation 3", 1);
    assert_int_equal(group_bytes(), window_of(RANK_COUNT));
}

/* Several of those would take one window after the other, at last the one in which the ranks are.
 */
GROUP_TEST_WITH(k25_an_init_that_reaches_no_rank_takes_no_incarnation, RANK_COUNT, .depth = 4)
{
    struct test_pipe *pipe = test_pipe_new();
    init_group(g);
    step_blocks(g, pipe);
    for (int i = 0; i < COX_GROUP_WINDOW_COUNT + 2; i++) {
        assert_int_equal(init_with(g, TELLING, cox_deadline_after_ms(5), test_err()), COX_TIMEOUT);
        assert_int_equal(cox_executor_replay_init(executor, cox_deadline_after_ms(5), test_err()),
                         COX_TIMEOUT);
        assert_in_range(group_bytes(), 1, 2 * window_of(RANK_COUNT));
    }
    test_pipe_release(pipe, RANK_COUNT);
    assert_int_equal(test_await(g, 0)->status, 0);
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    init_group(g);
    test_await_lines(g, 0, "init incarnation 2 ", 1);
    test_await_lines(g, 1, "init incarnation 2 ", 1);
}

/* In a mount namespace of its own, where /dev/shm has room for the group and half a window. */
static int helper_full_shm(void)
{
    char size[64];
    struct cox_geometry geometry;
    const struct cox_geometry_choice choice = {0};
    struct cox_init_summary summary;
    if (cox_geometry_resolve(RANK_COUNT, &choice, &geometry, test_err()))
        return 2;
    const uint64_t window = cox_geometry_group_size(&geometry);
    snprintf(size, sizeof size, "size=%" PRIu64 ",mode=1777",
             cox_geometry_memory_bytes(&geometry) + window / 2);
    if (!test_unshare_shm(size))
        return 77;
    struct test_group *g = NULL;
    if (test_group_try(START_WITH(.rank_count = RANK_COUNT, .memory.keep_names = true), &g,
                       test_err()))
        return 3;
    struct cox_executor *executor = test_group_executor(g);
    /* The first is in the window that is there. */
    if (cox_executor_init(executor, NULL, 0, test_patience(), &summary, test_err()))
        return 4;
    for (int i = 0; i < 2; i++) {
        char needed[64];
        snprintf(needed, sizeof needed, "needs %" PRIu64 " bytes of /dev/shm", window);
        int r = i ? cox_executor_replay_init(executor, test_patience(), test_err())
                  : cox_executor_init(executor, NULL, 0, test_patience(), &summary, test_err());
        if (r != COX_NO_SPACE || !strstr(test_error.text, needed))
            return 5;
    }
    /* Nothing was sent, and the group is as before. */
    if (cox_executor_engine_state(executor) != COX_ENGINE_NORMAL || step_call(g, test_err()))
        return 6;
    if (mount("tmpfs", "/dev/shm", "tmpfs", MS_REMOUNT, "size=64m,mode=1777") ||
        cox_executor_replay_init(executor, test_patience(), test_err()))
        return 7;
    test_group_free(g);
    return 0;
}

TEST(b51_k26_an_init_without_memory_for_the_rank_group_says_so)
{
    test_needs_names();
    int status = test_helper_run("full_shm");
    if (status == 77)
        skip();
    assert_int_equal(status, 0);
}

/* ---- the same once more ---- */

GROUP_TEST(p8_without_an_init_there_is_no_replay, RANK_COUNT)
{
    static const struct cox_config_entry failing[] = {{"fail", "0"}};
    assert_refused(replay(g, test_err()), COX_STATE, "no init");
    assert_int_equal(init_with(g, failing, 1, test_patience(), test_err()), COX_REJECTED);
    assert_int_equal(replay(g, test_err()), COX_STATE);
    /* Users of the bare executor restart all the same. */
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    assert_int_equal(replay(g, test_err()), COX_STATE);
    assert_int_equal(state_of(g), COX_ENGINE_INIT);
    test_expect_echo(g, "x");
}

GROUPS_TEST(p8_a_replaced_rank_gets_the_same_init)
{
    init_group(g);
    test_kill_rank(g, n - 1);
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    assert_int_equal(replay(g, test_err()), COX_PEER_DEAD); /* it reaches no rank */
    test_restart_rank(g, n - 1);
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    assert_ok(replay(g, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    expect_step(g);
    /* "tell" was in it. */
    for (uint32_t rank = 0; rank < n; rank++)
        test_await_lines(g, (int)rank, "init incarnation 2", 1);
}

GROUP_TEST(p8_another_reply_than_before_is_reported, RANK_COUNT)
{
    static const struct cox_config_entry odd[] = {{"odd_again", "0"}};
    assert_ok(init_with(g, odd, 1, test_patience(), test_err()));
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    assert_refused(replay(g, test_err()), COX_DIVERGED, "otherwise than at first");
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    init_group(g);
    assert_ok(replay(g, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
}

/* ---- order ---- */

struct other_thread {
    struct test_group *group;
    /* NULL: the last init once more */
    const char *path;
    int result;
    struct cox_error err;
};

static void *init_main(void *argument)
{
    struct other_thread *other = argument;
    const struct cox_config_entry config[] = {{"block", other->path}, {"tell", ""}};
    other->result = other->path ? init_with(other->group, config, 2, test_patience(), &other->err)
                                : replay(other->group, &other->err);
    return NULL;
}

GROUP_TEST(b2_one_init_at_a_time, RANK_COUNT)
{
    struct test_pipe *pipe = test_pipe_new();
    struct other_thread others[2] = {{.group = g, .path = test_pipe_path(pipe)}, {.group = g}};
    pthread_t threads[2];
    init_group(g);
    threads[0] = test_thread(init_main, &others[0]);
    test_await_lines(g, -1, "blocked", 2);
    assert_refused(init_with(g, TELLING, cox_deadline_after_ms(50), test_err()), COX_TIMEOUT,
                   "another init");
    assert_int_equal(cox_executor_replay_init(executor, cox_deadline_after_ms(50), NULL),
                     COX_TIMEOUT);
    threads[1] = test_thread(init_main, &others[1]);
    /* The second says again what the first has said by then, so each rank reads twice. */
    test_pipe_release(pipe, 2 * RANK_COUNT);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++)
        if (others[i].result)
            fail_msg("%d: %s", others[i].result, others[i].err.text);
    test_await_lines(g, 0, "init incarnation 3", 1);
}

GROUP_TEST(m15_a_stop_ends_inits_that_wait, RANK_COUNT)
{
    struct test_pipe *pipe = test_pipe_new();
    struct other_thread others[2] = {{.group = g, .path = test_pipe_path(pipe)}, {.group = g}};
    pthread_t threads[2];
    init_group(g);
    for (int i = 0; i < 2; i++) {
        threads[i] = test_thread(init_main, &others[i]);
        test_await_lines(g, -1, "blocked", 2);
    }
    cox_executor_stop(executor);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(others[i].result, COX_CLOSED);
    }
}

/* The first rank to leave the rank group would end the step for the others. */
GROUP_TEST_WITH(k28_an_init_waits_for_the_steps_before_it, RANK_COUNT, .depth = 4)
{
    struct test_pipe *pipe = test_pipe_new();
    init_group(g);
    step_blocks(g, pipe);
    assert_int_equal(state_of(g), COX_ENGINE_BUSY);
    assert_refused(init_with(g, TELLING, cox_deadline_after_ms(50), test_err()), COX_TIMEOUT,
                   "steps in flight");
    test_pipe_release(pipe, RANK_COUNT);
    assert_int_equal(test_await(g, 0)->status, 0);
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    init_group(g);
}

/* ---- the engine's state ---- */

/* Init, start and what is said again meet a group in each state; a death meets it, too. */
TEST(m12_a_replay_leaves_a_paused_group_paused)
{
    static const struct {
        enum cox_recover_command commands[2];
        int count;
        enum cox_engine_state state;
    } rows[] = {
        {{COX_RECOVER_PAUSE}, 1, COX_ENGINE_PAUSE},
        {{COX_RECOVER_PAUSE, COX_RECOVER_REINIT}, 2, COX_ENGINE_READY},
    };
    for (size_t row = 0; row < 2; row++) {
        OWN_GROUP *g = test_group_start(RANK_COUNT, NULL);
        init_group(g);
        for (int i = 0; i < rows[row].count; i++)
            assert_ok(test_recover(g, rows[row].commands[i], NULL, test_err()));
        test_kill_rank(g, 0);
        assert_int_equal(state_of(g), rows[row].state);
        test_restart_rank(g, 0);
        assert_ok(replay(g, test_err()));
        assert_int_equal(state_of(g), rows[row].state);
        assert_int_equal(step_call(g, test_err()), COX_STATE);
        assert_ok(test_recover(g, COX_RECOVER_START, NULL, test_err()));
        assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
        expect_step(g);
        /* A new init is a new beginning. */
        assert_ok(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()));
        init_group(g);
        assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
        expect_step(g);
    }
}

/* The ranks have let go of what they had: nothing but an init makes them able to run steps. */
GROUP_TEST(m12_an_init_that_failed_leaves_no_group_normal, RANK_COUNT)
{
    static const struct cox_config_entry failing[] = {{"fail", "1"}};
    init_group(g);
    assert_int_equal(init_with(g, failing, 1, test_patience(), test_err()), COX_REJECTED);
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    /* One that is not sent changes nothing. */
    assert_int_equal(init_with(g, TELLING, 1, test_err()), COX_TIMEOUT);
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    assert_ok(replay(g, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    assert_int_equal(init_with(g, TELLING, 1, test_err()), COX_TIMEOUT);
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    /* Nor does a start. */
    assert_ok(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()));
    assert_int_equal(init_with(g, failing, 1, test_patience(), test_err()), COX_REJECTED);
    assert_int_equal(state_of(g), COX_ENGINE_PAUSE);
    assert_ok(test_recover(g, COX_RECOVER_START, NULL, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    init_group(g);
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    expect_step(g);
}

/* The new process knows of no init. */
GROUP_TEST(m12_a_start_makes_no_group_normal_with_a_rank_that_was_replaced, RANK_COUNT)
{
    init_group(g);
    assert_ok(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()));
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    assert_ok(test_recover(g, COX_RECOVER_START, NULL, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    assert_ok(replay(g, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
}

/* One rank does not pause, and is replaced; the others are paused until a start. */
GROUP_TEST(m12_a_pause_that_failed_outlives_a_replay_until_a_start, RANK_COUNT)
{
    init_group(g);
    assert_false(cox_executor_partially_paused(executor));
    assert_int_equal(test_call(g, NULL, "only 1 recover pause 5 no"), 0);
    assert_int_equal(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()), COX_REJECTED);
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    assert_ok(replay(g, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    assert_true(cox_executor_partially_paused(executor));
    assert_ok(test_recover(g, COX_RECOVER_START, NULL, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_NORMAL);
    assert_false(cox_executor_partially_paused(executor));
    assert_int_equal(test_recover(g, COX_RECOVER_START, NULL, test_err()), COX_STATE);
}

GROUP_TEST(m12_a_group_with_a_death_can_be_paused, RANK_COUNT)
{
    init_group(g);
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    assert_int_equal(state_of(g), COX_ENGINE_ABNORMAL);
    assert_refused(test_recover(g, COX_RECOVER_START, NULL, test_err()), COX_STATE, "ABNORMAL");
    assert_ok(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()));
    assert_int_equal(state_of(g), COX_ENGINE_PAUSE);
}

static void expect_refused(struct test_group *g, const char *state, const char *command)
{
    struct test_step s;
    assert_refused(step_call(g, test_err()), COX_STATE, state);
    assert_contains(test_error.text, command);
    assert_refused(
        cox_executor_submit(test_group_executor(g), step_empty(&s),
                            SUBMIT_WITH(.gather = COX_GATHER_RANK0, .deadline_ns = test_patience()),
                            NULL, test_err()),
        COX_STATE, state);
    /* Requests other than steps are served. */
    test_expect_echo(g, "no step");
}

struct other_command {
    struct test_group *group;
    enum cox_recover_command command;
    int result;
};

static void *recover_main(void *argument)
{
    struct other_command *other = argument;
    other->result = test_recover(other->group, other->command, NULL, test_err());
    return NULL;
}

TEST(m12_steps_are_refused_while_the_engine_is_paused)
{
    static const struct {
        enum cox_recover_command command;
        const char *name;
        /* its state; NULL: steps are let in */
        const char *during;
        const char *after;
    } rows[] = {
        {COX_RECOVER_CLEAR, "clear", NULL, NULL},
        {COX_RECOVER_PAUSE, "pause", "NORMAL", "PAUSE"},
        {COX_RECOVER_CLEAR, "clear", "PAUSE", "PAUSE"},
        {COX_RECOVER_REINIT, "reinit", "PAUSE", "READY"},
        {COX_RECOVER_START, "start", "READY", NULL},
        {COX_RECOVER_PAUSE_NET, "pause_net", "NORMAL", "PAUSE"},
        {COX_RECOVER_START, "start", "PAUSE", NULL},
    };
    OWN_GROUP *g = test_group_start(RANK_COUNT, NULL);
    struct test_pipe *pipe = test_pipe_new();
    init_group(g);
    assert_int_equal(
        cox_executor_set_handler(test_group_executor(g), COX_CHANNEL_EXECUTE, test_handler, g), 0);
    expect_step(g);
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        struct other_command other = {g, rows[row].command, -1};
        assert_int_equal(
            test_call(g, NULL, "recover %s block %s", rows[row].name, test_pipe_path(pipe)), 0);
        pthread_t thread = test_thread(recover_main, &other);
        test_await_lines(g, -1, "blocked", RANK_COUNT * (row + 1));
        if (rows[row].during)
            expect_refused(g, rows[row].during,
                           rows[row].command == COX_RECOVER_CLEAR       ? "start"
                           : rows[row].command == COX_RECOVER_PAUSE_NET ? "pause-net"
                                                                        : rows[row].name);
        else
            expect_step(g);
        test_pipe_release(pipe, RANK_COUNT);
        pthread_join(thread, NULL);
        assert_int_equal(other.result, 0);
        assert_int_equal(test_call(g, NULL, "recover %s 0 fine", rows[row].name),
                         0); /* no more blocking */
        if (rows[row].after)
            expect_refused(g, rows[row].after, "start");
        else
            expect_step(g);
    }
    /* One that is not legal bars nothing, and one that fails no more than before. */
    assert_int_equal(test_recover(g, COX_RECOVER_REINIT, NULL, test_err()), COX_STATE);
    expect_step(g);
    assert_int_equal(test_call(g, NULL, "recover pause 5 no"), 0);
    assert_int_equal(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()), COX_REJECTED);
    expect_step(g);
}

/* As the ranks see it: none is asked for a step behind its reply to a pause. */
static void *stepper_main(void *argument)
{
    struct other_command *other = argument;
    while ((other->result = step_call(other->group, test_err())) == 0)
        continue;
    return NULL;
}

static uint64_t steps_served(struct test_group *g)
{
    return test_stats(test_group_executor(g), COX_CHANNEL_EXECUTE).submitted;
}

GROUP_TEST(m12_no_step_slips_in_behind_a_pause, RANK_COUNT)
{
    init_group(g);
    for (int i = 0; i < 50; i++) {
        struct other_command other = {.group = g};
        const uint64_t before = steps_served(g);
        pthread_t thread = test_thread(stepper_main, &other);
        AWAIT(steps_served(g) >= before + 3);
        assert_ok(test_recover(g, COX_RECOVER_PAUSE, NULL, test_err()));
        const uint64_t paused = steps_served(g);
        pthread_join(thread, NULL);
        assert_int_equal(other.result, COX_STATE);
        assert_int_equal(steps_served(g), paused);
        assert_ok(test_recover(g, COX_RECOVER_START, NULL, test_err()));
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "full_shm") == 0)
        return helper_full_shm();
    return test_run(NULL, NULL);
}
