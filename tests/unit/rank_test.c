/* The record of a rank: its table of moves, its invariant, and the one function that moves it. */
#include "coordinator/process/rank.h"
#include "tests/lib/test.h"

/* The rows are where it moves from, in the order of the enum; written down a second time, so that a
 * change of the table is one on purpose. */
static const char *const allowed[COX_STAGE_COUNT] = {
    /*                       V S R L E D R L */
    [COX_STAGE_VACANT] = /*    */ ".X....XX", [COX_STAGE_STARTING] = /*  */ "X.XXX...",
    [COX_STAGE_RUNNING] = /*   */ "X..XX...", [COX_STAGE_LEAVING] = /*   */ "X.X.X...",
    [COX_STAGE_EXITING] = /*   */ ".....X..", [COX_STAGE_DEAD] = /*      */ "......X.",
    [COX_STAGE_REPORTED] = /*  */ "X......X", [COX_STAGE_LAUNCHING] = /* */ "XX....X.",
};

/* A record that is as its stage wants it. */
static struct cox_rank record_at(enum cox_rank_stage stage)
{
    struct cox_rank record;
    cox_ranks_init(&record, 1);
    record.stage = stage;
    record.pid = stage == COX_STAGE_VACANT || stage == COX_STAGE_LAUNCHING ? 0 : 7;
    record.awaited = stage >= COX_STAGE_STARTING && stage <= COX_STAGE_DEAD;
    record.left_ns = stage == COX_STAGE_LEAVING ? 1 : 0;
    return record;
}

/* The fields that go with a stage, before the move there. */
static void prepare(struct cox_rank *record, enum cox_rank_stage to)
{
    const struct cox_rank wanted = record_at(to);
    record->pid = wanted.pid;
    record->awaited = wanted.awaited;
    record->left_ns = wanted.left_ns;
}

static bool moves_with(enum cox_rank_stage from, enum cox_rank_stage to, bool prepared)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const struct rlimit none = {0};
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGABRT, SIG_DFL);
        close(STDERR_FILENO);
        struct cox_rank record = record_at(from);
        if (prepared)
            prepare(&record, to);
        cox_rank_move(&record, to);
        _exit(cox_rank_stage_of(&record) == to ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGABRT);
        return false;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return true;
}

static bool moves(enum cox_rank_stage from, enum cox_rank_stage to)
{
    return moves_with(from, to, true);
}

PLAIN_TEST(each_move_is_allowed_or_refused)
{
    for (uint32_t from = 0; from < COX_STAGE_COUNT; from++)
        for (uint32_t to = 0; to < COX_STAGE_COUNT; to++) {
            const bool wanted = allowed[from][to] == 'X';
            if (cox_rank_may_move(from, to) != wanted)
                fail_msg("stage %u -> %u", from, to);
#if COX_TESTING
            if (moves(from, to) != wanted)
                fail_msg("stage %u -> %u, moved", from, to);
#endif
        }
    assert_false(cox_rank_may_move(COX_STAGE_COUNT, COX_STAGE_VACANT));
    assert_false(cox_rank_may_move(COX_STAGE_VACANT, COX_STAGE_COUNT));
}

PLAIN_TEST(every_stage_is_reached_and_left)
{
    for (uint32_t stage = 0; stage < COX_STAGE_COUNT; stage++) {
        bool reached = false, left = false;
        for (uint32_t other = 0; other < COX_STAGE_COUNT; other++) {
            reached = reached || cox_rank_may_move(other, stage);
            left = left || cox_rank_may_move(stage, other);
        }
        assert_true(reached && left);
    }
}

PLAIN_TEST(the_invariant_names_what_is_wrong)
{
    for (uint32_t stage = 0; stage < COX_STAGE_COUNT; stage++) {
        struct cox_rank record = record_at(stage);
        assert_null(cox_rank_invariant(&record));
        record.restarts = 1; /* in its first incarnation */
        assert_non_null(cox_rank_invariant(&record));
        record.incarnation = 2;
        assert_null(cox_rank_invariant(&record));

        record = record_at(stage);
        record.pid = record.pid ? 0 : 7;
        if (stage == COX_STAGE_LAUNCHING) /* after another process, or the first */
            assert_null(cox_rank_invariant(&record));
        else
            assert_non_null(cox_rank_invariant(&record));

        record = record_at(stage);
        record.awaited = !record.awaited;
        /* One that has left is awaited no more, also when it dies. */
        if (stage >= COX_STAGE_LEAVING && stage <= COX_STAGE_DEAD)
            assert_null(cox_rank_invariant(&record));
        else
            assert_non_null(cox_rank_invariant(&record));
    }
    struct cox_rank record = record_at(COX_STAGE_VACANT);
    record.adopted_pid = 8;
    assert_non_null(cox_rank_invariant(&record));
    record = record_at(COX_STAGE_LEAVING);
    record.left_ns = 0;
    assert_non_null(cox_rank_invariant(&record));
    record = record_at(COX_STAGE_VACANT);
    record.stage = COX_STAGE_COUNT;
    assert_non_null(cox_rank_invariant(&record));
}

#if COX_TESTING
PLAIN_TEST(a_move_that_breaks_the_invariant_is_refused)
{
    assert_false(moves_with(COX_STAGE_VACANT, COX_STAGE_STARTING, false)); /* of no process */
}
#endif

/* What the rest of the coordinator asks. */
PLAIN_TEST(live_serving_and_dead_processes)
{
    static const struct {
        bool lives, serves, dead;
    } wanted[COX_STAGE_COUNT] = {
        [COX_STAGE_VACANT] = {false, false, false},  [COX_STAGE_STARTING] = {true, true, false},
        [COX_STAGE_RUNNING] = {true, true, false},   [COX_STAGE_LEAVING] = {true, true, false},
        [COX_STAGE_EXITING] = {true, false, false},  [COX_STAGE_DEAD] = {false, false, true},
        [COX_STAGE_REPORTED] = {false, false, true}, [COX_STAGE_LAUNCHING] = {false, false, true},
    };
    for (uint32_t stage = 0; stage < COX_STAGE_COUNT; stage++) {
        const struct cox_rank record = record_at(stage);
        assert_int_equal(cox_rank_stage_lives(stage), wanted[stage].lives);
        assert_int_equal(cox_rank_stage_serves(stage), wanted[stage].serves);
        assert_int_equal(cox_rank_is_dead(&record), wanted[stage].dead);
    }
}
