/* A group with real workers, from start to end: names and memory at start, workers that do not
 * come, several groups at once, idle time, and a bounded end. */
#include "channel/base/tsan.h"
#include "channel/shm/geometry.h"
#include "testing.h"

#include <glob.h>

/* Starting fails with this code, and leaves nothing. */
static void expect_refused(const struct cox_executor_options *options, int code, const char *says)
{
    struct test_group *g = NULL;
    assert_refused(test_group_try(options, &g, test_err()), code, says);
    assert_null(g);
}

/* Files in /dev/shm of these names; globfree. */
static glob_t names_of(const char *before, const char *name)
{
    char pattern[256];
    glob_t found;
    snprintf(pattern, sizeof pattern, "/dev/shm/%s%s_*", before, name);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    return found;
}

/* ---- names ---- */

TEST(m16_a_live_name_is_taken)
{
    char name[64], pid[32];
    const struct cox_executor_options *options =
        START_WITH(.rank_count = 2, .memory.keep_names = true, .name = test_unique_name(name));
    struct test_group *g = test_group_start(2, options);
    size_t names = test_count_names(name);
    assert_int_equal(names, 1 + 4 * (2 + 2 * 4) + 1 + 2 + 1);
    expect_refused(options, COX_TAKEN, "taken by a live group");
    snprintf(pid, sizeof pid, "process %d", getpid());
    assert_contains(test_error.text, pid);
    assert_int_equal(test_count_names(name), names);
    test_expect_echo(g, "untouched");
    test_group_free(g);
    assert_int_equal(test_count_names(name), 0);
    test_group_free(test_group_start(2, options)); /* free again */
}

/* As logind does it at logout, or a person by hand. */
static void remove_names(const char *name)
{
    for (int sem = 0; sem < 2; sem++) {
        glob_t found = names_of(sem ? "sem." : "", name);
        for (size_t i = 0; i < found.gl_pathc; i++)
            assert_int_equal(unlink(found.gl_pathv[i]), 0);
        globfree(&found);
    }
    assert_int_equal(test_count_names(name), 0);
}

static void keep_warning(void *context, int level, const char *text)
{
    if (level <= 4)
        snprintf(context, 512, "%s", text);
}

/* It works on, its end is no failure, and the log names possible culprits. */
TEST(p7_b49_a_group_works_on_without_its_names)
{
    char name[64], warning[512] = "";
    const struct cox_executor_options *options =
        START_WITH(.name = test_unique_name(name), .memory.keep_names = true,
                   .hooks.log = {.fn = keep_warning, .context = warning});
    struct test_group *g = test_group_start(4, options);
    test_expect_echo(g, "with names");
    remove_names(name);
    for (int i = 0; i < 20; i++)
        test_expect_echo(g, "without");
    assert_string_equal(warning, "");
    assert_int_equal(cox_executor_stop(test_group_executor(g)), 0);
    test_group_free(g);
    assert_contains(warning, name);
    assert_contains(warning, "RemoveIPC");
    /* And without that, there is no such warning. */
    warning[0] = '\0';
    test_group_free(test_group_start(2, options));
    assert_string_equal(warning, "");
}

/* The names that a group lost may be another's when it ends. */
TEST(b49_b54_the_next_group_under_the_name_is_left_alone)
{
    char name[64];
    /* With a control socket, the name would be taken by that. */
    const struct cox_executor_options *options =
        START_WITH(.name = test_unique_name(name), .memory.keep_names = true,
                   .socket.use = COX_SOCKET_NONE);
    struct test_group *first = test_group_start(2, options);
    size_t count = test_count_names(name);
    remove_names(name);
    struct test_group *second = test_group_start(2, options);
    test_group_free(first);
    assert_int_equal(test_count_names(name), count);
    test_expect_echo(second, "x");
    test_group_free(second);
    assert_int_equal(test_count_names(name), 0);
}

TEST(m16_b45_mode_is_0600_under_any_umask)
{
    test_needs_names();
    static const mode_t masks[] = {0777, 0, 0277, 022};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        char name[64];
        mode_t saved = umask(masks[i]);
        struct test_group *g = NULL;
        int r = test_group_try(
            START_WITH(.rank_count = 2, .memory.keep_names = true, .name = test_unique_name(name)),
            &g, test_err());
        umask(saved);
        if (r)
            fail_msg("umask %04o: %s", masks[i], test_error.text);
        glob_t found = names_of("*", name);
        for (size_t k = 0; k < found.gl_pathc; k++) {
            struct stat st;
            assert_int_equal(lstat(found.gl_pathv[k], &st), 0);
            assert_int_equal(st.st_mode, S_IFREG | 0600);
            assert_int_equal(st.st_uid, geteuid());
        }
        assert_true(found.gl_pathc > 40);
        globfree(&found);
        test_expect_echo(g, "x");
        test_group_free(g);
    }
}

TEST(m16_names_are_gone_once_all_are_attached)
{
    test_needs_names();
    char name[64];
    OWN_GROUP *g = test_group_start(8, START_WITH(.name = test_unique_name(name)));
    assert_int_equal(test_count_names(name), 0);
    test_expect_echo(g, "x");
}

/* ---- memory ---- */

TEST(p6_printed_sizes_are_the_sizes_used)
{
    test_needs_names();
    for (uint32_t n = 1; n <= 8; n *= 2)
        for (uint32_t depth = 0; depth <= 8; depth += 4) {
            char name[64];
            const struct cox_geometry_choice choice = {.depth = depth};
            struct cox_geometry geometry;
            assert_ok(cox_geometry_resolve(n, &choice, &geometry, test_err()));
            OWN_GROUP *g =
                test_group_start(n, START_WITH(.memory.keep_names = true,
                                               .name = test_unique_name(name), .depth = depth));
            uint64_t regions = 0, semaphores = 0, reserved = 0, holes;
            glob_t found = names_of("*", name);
            for (size_t i = 0; i < found.gl_pathc; i++) {
                struct stat st;
                assert_int_equal(stat(found.gl_pathv[i], &st), 0);
                if (strstr(found.gl_pathv[i], "/sem.")) {
                    semaphores += (uint64_t)st.st_size;
                } else {
                    regions += (uint64_t)st.st_size;
                    reserved += (uint64_t)st.st_blocks * 512;
                }
            }
            globfree(&found);
            /* All windows of the rank group but one are holes. */
            holes = cox_geometry_group_object_size(&geometry) - cox_geometry_group_size(&geometry);
            assert_int_equal(regions - holes, cox_geometry_account(&geometry).region_bytes);
            assert_int_equal(semaphores, cox_geometry_semaphore_bytes(&geometry));
            assert_true(reserved >= regions - holes);              /* every page is there */
            assert_true(reserved - (regions - holes) < 32 * 4096); /* and no other */
            if (n == 8 && depth == 0)
                assert_true(reserved + semaphores < 16 * 1024 * 1024);
        }
}

TEST(m16_geometry_that_cannot_be_is_refused)
{
    struct cox_executor_options options = {.size = sizeof(struct cox_executor_options),
                                           .rank_count = 0};
    expect_refused(&options, COX_INVALID, "0 ranks");
    options.rank_count = COX_RANK_COUNT_MAX + 1;
    expect_refused(&options, COX_INVALID, "129 ranks");
    options.rank_count = 2;
    options.depth = 33;
    expect_refused(&options, COX_INVALID, "depth 33");
    options.depth = 2;
    options.workers.legacy = true;
    expect_refused(&options, COX_INVALID, "depth 1");
    options.workers.legacy = false;
    options.memory.request_size[COX_CHANNEL_TRANSFER] = 256;
    expect_refused(&options, COX_INVALID, "transfer");
    const char *const nothing[] = {NULL};
    expect_refused(START_WITH(.rank_count = 1, .workers.command = nothing), COX_INVALID, "command");
}

/* ---- workers that do not come ---- */

TEST(p2_a_worker_that_does_not_attach_ends_the_start)
{
    static const struct {
        const char *command[4];
        int code;
        const char *says;
    } cases[] = {
        {{NULL, "quit", "3"}, COX_PEER_DEAD, "exited with status 3"},
        {{NULL, "quit", "0"}, COX_PEER_DEAD, "quits as told"},
        {{"/bin/true"}, COX_PEER_DEAD, "it may be no Coxswain worker: a worker attaches"},
        {{"/bin/ls"},
         COX_PEER_DEAD,
         "(options.workers.environment_only leaves them out); its last"},
        {{NULL, "never"}, COX_TIMEOUT, "did not attach in time"},
        {{"/bin/sh", "-c", "exec sleep 1000"}, COX_TIMEOUT, "is it a Coxswain worker?"},
        {{NULL, "world"}, COX_PEER_DEAD, "ranks"},
        {{NULL, "group"}, COX_PEER_DEAD, "does not exist"},
        {{"/bin/sh", "-c", "kill -SEGV $$"}, COX_PEER_DEAD, "signal 11"},
        {{"/no/such/worker"}, COX_EXEC_FAILED, "/no/such/worker"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (uint32_t n = 1; n <= 8; n *= 2) {
            const char *command[5] = {0};
            memcpy(command, cases[i].command, sizeof cases[i].command);
            if (!command[0])
                command[0] = test_worker_program();
            /* An attaching process gets the group's memory, and does not look it up by name. */
            if (cases[i].command[1] && strcmp(cases[i].command[1], "group") == 0 &&
                test_attach() == COX_ATTACH_SEALED)
                continue;
            /* Enough to execute them all, or the timeout itself is tested. */
            expect_refused(
                START_WITH(.rank_count = n, .workers.command = command,
                           .times.start_timeout_ms = cases[i].code == COX_TIMEOUT ? 800 : 0),
                cases[i].code, cases[i].says);
            assert_contains(test_error.text, "rank ");
        }
}

/* ---- several groups ---- */

TEST(m17_several_groups_in_one_process)
{
    struct test_group *groups[4];
    for (uint32_t i = 0; i < 4; i++)
        groups[i] = test_group_start(1 + i, NULL);
    for (int round = 0; round < 50; round++)
        for (uint32_t i = 0; i < 4; i++) {
            char text[32];
            snprintf(text, sizeof text, "group %u round %d", i, round);
            test_expect_echo(groups[i], text);
        }
    /* The end of one, or a death in it, is nothing to the others. */
    kill(cox_executor_pid(test_group_executor(groups[1]), 1), SIGKILL);
    test_await_death(groups[1], 1);
    test_group_free(groups[0]);
    test_expect_echo(groups[2], "x");
    test_expect_echo(groups[3], "x");
    for (uint32_t i = 1; i < 4; i++)
        test_group_free(groups[i]);
}

/* ---- idle ---- */

static long switches_of(pid_t pid)
{
    char folder[64];
    long sum = 0;
    snprintf(folder, sizeof folder, "/proc/%d/task", pid);
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[400], line[200];
        /* The thread that measures has switches of its own. */
        if (entry->d_name[0] == '.' || (pid == getpid() && atoi(entry->d_name) == pid))
            continue;
        snprintf(path, sizeof path, "%s/%s/status", folder, entry->d_name);
        FILE *file = fopen(path, "re");
        long count = 0;
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, "voluntary_ctxt_switches: %ld", &count) == 1)
                sum += count;
        if (file)
            fclose(file);
    }
    closedir(dir);
    return sum;
}

static long group_switches(struct test_group *g, uint32_t n)
{
    long sum = switches_of(getpid());
    for (uint32_t rank = 0; rank < n; rank++)
        sum += switches_of(cox_executor_pid(test_group_executor(g), rank));
    return sum;
}

TEST(p5_idle_costs_no_wakeup)
{
#ifdef COX_TSAN
    skip(); /* it has a thread of its own, which wakes up */
#endif
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        test_expect_echo(g, "busy once");
        /* What is on its way to sleep may arrive later; a wake-up that repeats is in every window.
         */
        uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
        long before, after;
        do {
            before = group_switches(g, n);
            nanosleep(&(struct timespec){.tv_nsec = 300000000},
                      NULL); /* the absence of something takes time */
            after = group_switches(g, n);
        } while (before != after && cox_now_ns() < deadline_ns);
        assert_int_equal(after - before, 0);
        test_expect_echo(g, "awake");
    }
}

/* ---- the end ---- */

TEST(m15_workers_that_listen_leave_by_themselves)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, START_WITH(.times.finalize_ms = TEST_PATIENCE_MS));
        test_expect_echo(g, "x");
        assert_int_equal(cox_executor_stop(test_group_executor(g)), 0);
        for (uint32_t rank = 0; rank < n; rank++)
            assert_int_equal(test_count_lines(g, (int)rank, "finalized"), 1);
    }
}

GROUP_TEST_WITH(m15_the_end_is_bounded_whatever_workers_do, 6, .times.finalize_ms = 200,
                .times.term_ms = 200)
{
    struct test_pipe *pipe = test_pipe_new();
    /* 0 is fine, 1 spins, 2 hears no SIGTERM and blocks, 3 is stopped, 4 is dead, 5 blocks. */
    assert_int_equal(test_call(g, NULL, "only 2 deaf"), 0);
    assert_int_equal(test_submit(g, &test_all, "each echo x|spin|block %s|echo x|kill 9|block %s",
                                 test_pipe_path(pipe), test_pipe_path(pipe)),
                     0);
    assert_int_equal(test_await(g, 0)->status, COX_PEER_DEAD);
    test_await_lines(g, -1, "blocked", 2);
    kill(cox_executor_pid(executor, 3), SIGSTOP);
    uint64_t begin_ns = cox_now_ns();
    uint32_t signalled = cox_executor_stop(executor);
    uint64_t took_ns = cox_now_ns() - begin_ns;
    assert_in_range(signalled, 4, 5); /* 0 may have left by itself */
    assert_true(took_ns < 15 * COX_NSEC_PER_SEC);
    assert_int_equal(test_completion_count(g), 1);
}
