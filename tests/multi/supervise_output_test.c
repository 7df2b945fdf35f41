/* supervise_output: what ranks write, in lines, and no rank delays another. */
#include "coordinator/process/output.h"
#include "supervise_fixture.h"

TEST(m14_lines_carry_rank_and_stream)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        _cox_cleanup_(group_free) struct group g;
        group_start(&g, n, "echo out $R; echo; echo err $R >&2; printf 'cut %s' $R");
        group_await_end(&g);
        for (uint32_t rank = 0; rank < n; rank++) {
            char expected[32];
            snprintf(expected, sizeof expected, "out %u", rank);
            assert_string_equal(group_line(&g, rank, false, 0), expected);
            assert_string_equal(group_line(&g, rank, false, 1), "");
            snprintf(expected, sizeof expected, "cut %u", rank);
            assert_string_equal(group_line(&g, rank, false, 2), expected);
            assert_null(group_line(&g, rank, false, 3));
            snprintf(expected, sizeof expected, "err %u", rank);
            assert_string_equal(group_line(&g, rank, true, 0), expected);
            assert_null(group_line(&g, rank, true, 1));
            assert_int_equal(g.deaths[rank].times, 1);
            assert_int_equal(g.deaths[rank].pid, cox_supervisor_pid(g.supervisor, rank));
        }
    }
}

TEST(m14_long_and_binary_lines)
{
    _cox_cleanup_(group_free) struct group g;
    group_start(
        &g, 1,
        "x() { head -c $1 /dev/zero | tr '\\0' x; }; x 10000; echo; x 4000; echo; x 8000; echo; printf 'a\\0b\\001\\033\\377\\r\\n\\0'");
    group_await_end(&g);
    const size_t sizes[] = {4000, 4000, 2000, 4000, 4000, 4000};
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(strlen(group_line(&g, 0, false, i)), sizes[i]);
        assert_int_equal(strspn(group_line(&g, 0, false, i), "x"), sizes[i]);
    }
    assert_string_equal(group_line(&g, 0, false, 6), "a?b\001\033\377\r");
    assert_string_equal(group_line(&g, 0, false, 7), "?");
    assert_null(group_line(&g, 0, false, 8));
}

static void collect_text(void *context, const char *text, size_t size)
{
    char **to = context;
    assert_int_equal(strlen(text), size);
    assert_true(size <= COX_OUTPUT_LINE_MAX);
    *to = stpcpy(stpcpy(*to, text), "|");
}

TEST(m14_lines_do_not_depend_on_how_they_arrive)
{
    enum { SIZE = 20000 };
    static char bytes[SIZE], whole[2 * SIZE], parts[2 * SIZE];
    static struct cox_output output;
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = i < 12001 ? 'x' : i % 97 == 0 ? '\n' : i % 31 == 0 ? '\0' : 'y';
    char *to = whole;
    cox_output_feed(&output, bytes, SIZE, collect_text, &to);
    cox_output_finish(&output, collect_text, &to);
    for (size_t step = 1; step < 9000; step = step * 3 + 1) {
        to = parts;
        for (size_t at = 0; at < SIZE; at += step)
            cox_output_feed(&output, bytes + at, step < SIZE - at ? step : SIZE - at, collect_text,
                            &to);
        cox_output_finish(&output, collect_text, &to);
        assert_string_equal(parts, whole);
    }
}

TEST(m14_last_lines)
{
    struct group g;
    group_start(
        &g, 2,
        "[ $R = 1 ] && exit; head -c 1000 /dev/zero | tr '\\0' x; echo; seq 1 100; echo end >&2");
    group_await_end(&g);
    char text[8000], expected[200] = "";
    size_t length = cox_supervisor_last_lines(g.supervisor, 0, text, sizeof text);
    assert_int_equal(length, strlen(text));
    /* The two streams have no order between them, the numbers have. */
    for (int i = 86; i <= 100; i++)
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%d%s", i,
                 i < 100 ? "\n" : "");
    assert_contains(text, expected);
    assert_contains(text, "end");
    assert_int_equal(cox_supervisor_last_lines(g.supervisor, 1, text, sizeof text), 0);
    assert_string_equal(text, "");
    group_free(&g);

    static struct cox_last_lines lines;
    char line[1000];
    memset(line, 'z', sizeof line);
    cox_last_lines_add(&lines, "older", 5);
    cox_last_lines_add(&lines, line, sizeof line);
    cox_last_lines_add(&lines, "newest", 6);
    assert_int_equal(cox_last_lines_join(&lines, text, sizeof text), 5 + 1 + 400 + 1 + 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 408), 400 + 1 + 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 407), 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 7), 6);
    assert_string_equal(text, "newest");
    assert_int_equal(cox_last_lines_join(&lines, text, 4), 3);
    assert_string_equal(text, "new");
    assert_int_equal(cox_last_lines_join(&lines, text, 1), 0);
    assert_int_equal(cox_last_lines_join(&lines, text, 0), 0);
}

TEST(m14_a_flood_starves_no_client)
{
    _cox_cleanup_(group_free) struct group g;
    group_start(
        &g, 4,
        "[ $R = 0 ] && exec yes flood; [ $R = 1 ] && exec yes flood >&2; echo ready; read x < /dev/null; exec sleep 1000");
    group_await_seen(&g, 0, 100000);
    group_await_seen(&g, 1, 100000);
    group_await_line(&g, 2, false, "ready");
    group_await_line(&g, 3, false, "ready");
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 2), SIGKILL), 0);
    group_await_death(&g, 2);
    /* And the flood continues, while a flooding rank's own death is seen, too. */
    group_await_seen(&g, 0, 100000);
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 1), SIGKILL), 0);
    group_await_death(&g, 1);
    group_await_seen(&g, 0, 100000);
    assert_false(cox_supervisor_dead(g.supervisor, 0, NULL));
    assert_false(cox_supervisor_dead(g.supervisor, 3, NULL));
}

struct refill {
    int write_fd;
    size_t lines;
};

static void refill_pipe(void *context, const char *text, size_t size)
{
    struct refill *refill = context;
    (void)text;
    (void)size;
    if (++refill->lines < 1000000) /* so that a mistake here ends, too */
        while (write(refill->write_fd, "again\n", 6) == 6)
            ;
}

TEST(m14_reading_is_bounded)
{
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    static struct cox_output output;
    output.fd = fds[0];
    /* A writer so fast that the pipe is never empty. */
    struct refill refill = {.write_fd = fds[1]};
    refill_pipe(&refill, NULL, 0);
    assert_int_equal(cox_output_read(&output, refill_pipe, &refill), COX_OUTPUT_READ_MAX);
    cox_output_drain(&output, refill_pipe, &refill);
    assert_true(refill.lines < 200000);
    close(fds[0]);
    close(fds[1]);
}

/* The thread of the supervisor is held in the hook while one rank fills its pipe and another writes
 * a line. */
struct gate {
    /* for its lock and condition */
    struct group group;
    bool reached, open;
    /* of rank 0, when rank 1 had its turn */
    uint64_t bytes_before;
    uint64_t bytes;
    bool turn_seen;
};

static void on_gated_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct gate *gate = context;
    (void)is_stderr;
    pthread_mutex_lock(&gate->group.lock);
    gate->reached = true;
    pthread_cond_broadcast(&gate->group.changed);
    while (!gate->open)
        pthread_cond_wait(&gate->group.changed, &gate->group.lock);
    if (rank == 0)
        gate->bytes += strlen(text) + 1;
    if (rank == 1 && !gate->turn_seen) {
        gate->turn_seen = true;
        gate->bytes_before = gate->bytes;
        pthread_cond_broadcast(&gate->group.changed);
    }
    pthread_mutex_unlock(&gate->group.lock);
}

static void await_stop(struct cox_supervisor *supervisor, uint32_t rank)
{
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)cox_supervisor_pid(supervisor, rank), &info, WSTOPPED), 0);
}

TEST(m14_ranks_take_turns)
{
    struct gate gate = {.open = false};
    group_init(&gate.group);
    uint64_t deadline_ns = group_deadline();
    const char *const command[] = {
        "sh", "-c",
        "if [ $COXSWAIN_RANK = 0 ]; then echo start; kill -STOP $$; yes | head -c 60000; kill -STOP $$; else kill -STOP $$; echo line; kill -STOP $$; fi",
        NULL};
    assert_ok(GROUP_TRY(&gate.group, test_err(), .rank_count = 2, .command = command,
                        .hooks = {.context = &gate, .line = on_gated_line}));
    struct cox_supervisor *supervisor = gate.group.supervisor;
    pthread_mutex_lock(&gate.group.lock);
    while (!gate.reached && group_wait_change(&gate.group, deadline_ns))
        ;
    assert_true(gate.reached);
    pthread_mutex_unlock(&gate.group.lock);
    for (uint32_t rank = 0; rank < 2; rank++) {
        await_stop(supervisor, rank);
        assert_int_equal(kill(cox_supervisor_pid(supervisor, rank), SIGCONT), 0);
        await_stop(supervisor, rank);
    }
    pthread_mutex_lock(&gate.group.lock);
    gate.open = true;
    pthread_cond_broadcast(&gate.group.changed);
    while (!gate.turn_seen && group_wait_change(&gate.group, deadline_ns))
        ;
    pthread_mutex_unlock(&gate.group.lock);
    assert_true(gate.bytes_before > 0);
    assert_true(gate.bytes_before <= 2 * COX_OUTPUT_READ_MAX);
    group_free(&gate.group);
}
