/*
 * matrix_test: a group of three in which one process is killed, or stopped and continued, at a step
 * of the protocol: at each of them, in each process. Groups are named, or, with
 * COXSWAIN_TEST_ATTACH=sealed in the environment, sealed. The scenario (matrix_driver.c) first runs
 * undisturbed, and the passages of each process at each point are counted. A point that is never
 * passed fails the test, unless matrix_points.c assigns it to the other kind of group or to another
 * test, so that a new step must enter the scenario. Then each point is struck in each process that
 * passed it: at its first passage, at its last, and at some in between; with the argument `all` at
 * every one; under a sanitizer at the first. One case again, with its journal: test_fault_matrix
 * [renewed] POINT kill|stop RANK|coordinator PASSAGE. Every case is a process of its own (the
 * runner): subreaper of the driver, so that it finds remaining processes. Several run at once; no
 * verdict depends on time beyond TEST_PATIENCE_MS. If an operation must end at its deadline, and
 * the machine was too slow for the ranks that should have replied before it, the case is run again
 * with a longer one.
 */
#include "matrix.h"
#include "punctual.h"

#if COX_TESTING

/* What an operation waits for a stopped rank, at first. */
#define BRIEF_MS (300 * SLOWNESS)
#define BRIEF_FACTOR 4
#define ATTEMPT_COUNT 3
#define RUNNER_COUNT 6
/* Failures after which no further case is begun. */
#define WRONG_MAX 10
#define CASE_COUNT 65536
/* Of the passages of a point, how far apart those are that are struck. */
#define PARTS 4
/* Undisturbed runs of a rank that is started again. How often it sleeps, and posts, in its short
 * life differs from run to run by a factor of up to 7; the fewest passages are reached in all. */
#define RENEWED_RUN_COUNT 3

/* Of the undisturbed run. */
static struct cox_fault_counts learned_counts, learned_renewed;

static unsigned round_number; /* of run_all */

/* ---- many cases ---- */

static void case_print(const struct matrix_case *death, char *text, size_t size)
{
    snprintf(text, size, "%s%s %s %s %" PRIu32, death->renewed ? "renewed " : "",
             cox_fault_name(death->point), death->signal == SIGKILL ? "kill" : "stop",
             matrix_process_name(death->process), death->passage);
}

/* In a process of its own. Error messages and journal go to fd. */
static _Noreturn void runner_main(const struct matrix_case *death, size_t number, uint64_t brief_ms,
                                  int fd, bool talkative)
{
    static struct matrix_run run;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run.death = death;
    run.brief_ms = brief_ms;
    /* Never twice: a case that fails may leave names. */
    snprintf(run.name, sizeof run.name, "test_%d_matrix_%u_%zu_", getppid(), round_number, number);
    if (death->renewed) {
        if (death->signal == SIGKILL)
            run.brief_ms = TEST_PATIENCE_MS;
        matrix_renew_judge(&run);
    } else {
        matrix_judge(&run);
    }
    if (run.verdict == MATRIX_WRONG || run.verdict == MATRIX_SLOW || talkative) {
        char text[128];
        case_print(death, text, sizeof text);
        dprintf(fd, "%s:\n%s%s\n", text, run.problems, run.journal.bytes);
    }
    _exit((int)run.verdict);
}

struct runner {
    pid_t pid;
    FILE *report;
    /* of its case */
    size_t number;
    int attempt;
};

static void runner_start(struct runner *runner, const struct matrix_case *cases, size_t number,
                         int attempt)
{
    uint64_t brief_ms = BRIEF_MS;
    for (int i = 0; i < attempt; i++)
        brief_ms *= BRIEF_FACTOR;
    *runner = (struct runner){.report = tmpfile(), .number = number, .attempt = attempt};
    assert_non_null(runner->report);
    runner->pid = fork();
    assert_true(runner->pid >= 0);
    if (runner->pid == 0)
        runner_main(&cases[number], number, brief_ms, fileno(runner->report), false);
}

static void report_show(FILE *report)
{
    char text[512];
    rewind(report);
    while (fgets(text, sizeof text, report))
        print_message("%s", text);
}

struct tally {
    size_t cases, wrong, not_struck, repeated;
};

/* Takes the verdict of a runner that has ended. False: its case is to be run again. */
static bool runner_end(struct runner *runner, const struct matrix_case *cases, int status,
                       struct tally *tally)
{
    int verdict = WIFEXITED(status) ? WEXITSTATUS(status) : MATRIX_WRONG;
    bool again = verdict == MATRIX_SLOW && runner->attempt + 1 < ATTEMPT_COUNT;
    tally->repeated += again;
    tally->not_struck += verdict == MATRIX_NOT_STRUCK;
    if (!again && verdict != MATRIX_FINE && verdict != MATRIX_NOT_STRUCK) {
        tally->wrong++;
        report_show(runner->report);
        if (!WIFEXITED(status)) {
            char text[128];
            case_print(&cases[runner->number], text, sizeof text);
            print_error("%s: the runner's status is %#x\n", text, (unsigned)status);
        }
    }
    fclose(runner->report);
    runner->pid = 0;
    return !again;
}

static struct runner *runner_find(struct runner *runners, pid_t pid)
{
    for (size_t i = 0; i < RUNNER_COUNT; i++)
        if (runners[i].pid == pid)
            return &runners[i];
    return NULL;
}

static void run_all(const struct matrix_case *cases, size_t case_count)
{
    struct runner runners[RUNNER_COUNT] = {{0}};
    struct tally tally = {.cases = case_count};
    uint64_t begin_ns = cox_now_ns();
    size_t next = 0, running = 0;
    round_number++;
    while (next < case_count || running > 0) {
        struct runner *runner = runner_find(runners, 0);
        if (tally.wrong >= WRONG_MAX)
            case_count = next; /* enough to look at */
        if (next < case_count && runner) {
            runner_start(runner, cases, next++, 0);
            running++;
            continue;
        }
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        runner = runner_find(runners, pid);
        if (pid < 0 || !runner)
            fail_msg("a runner is lost: %s", strerror(errno));
        struct runner ended = *runner;
        if (runner_end(runner, cases, status, &tally))
            running--;
        else
            runner_start(runner, cases, ended.number, ended.attempt + 1);
    }
    print_message("%zu cases in %" PRIu64 " ms; %zu were not struck, %zu repeated\n", tally.cases,
                  (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC, tally.not_struck, tally.repeated);
    if (tally.wrong)
        fail_msg("%zu of %zu cases, %zu in all", tally.wrong, next, tally.cases);
    /* How often a process sleeps differs from run to run, little else does. */
    assert_true(tally.not_struck * 4 <= tally.cases);
}

/* ---- the matrix ---- */

static enum { FIRST, SOME, EVERY } density = SLOWNESS > 1 ? FIRST : SOME;

/* The first passage, the last, and PARTS - 1 in between; or every one. Returns the one behind
 * `passage`; 0: none. */
static uint32_t passage_next(uint32_t passage, uint32_t passed)
{
    if (passage >= passed || (passage > 0 && density == FIRST))
        return 0;
    if (passage == 0 || density == EVERY)
        return passage + 1;
    for (uint32_t part = 1; part < PARTS; part++)
        if (passed * part / PARTS > passage)
            return passed * part / PARTS;
    return passed;
}

static size_t cases_make(struct matrix_case *cases, int signal, bool of_ranks, bool renewed)
{
    const struct cox_fault_counts *counts = renewed ? &learned_renewed : &learned_counts;
    const int from = of_ranks ? 0 : MATRIX_COORDINATOR, to = of_ranks ? MATRIX_RANK_COUNT : 0;
    size_t count = 0;
    for (int point = 0; point < COX_FAULT_POINT_COUNT; point++)
        for (int process = from; process < to; process++) {
            uint32_t passed = atomic_load(&counts->passed[point][process + 1]);
            for (uint32_t passage = 0; (passage = passage_next(passage, passed)) > 0;) {
                COX_ASSERT(count < CASE_COUNT);
                cases[count++] =
                    (struct matrix_case){.point = (enum cox_fault_point)point,
                                         .process = process,
                                         .signal = signal,
                                         .passage = passage,
                                         /* Whether a token lies there already is chance. */
                                         .first = passage == 1 && point != COX_FAULT_TOKEN_TAKEN,
                                         .renewed = renewed};
            }
        }
    return count;
}

static void matrix_run(int signal, bool of_ranks)
{
    static struct matrix_case cases[CASE_COUNT];
    run_all(cases, cases_make(cases, signal, of_ranks, false));
}

static void matrix_run_renewed(int signal)
{
    static struct matrix_case cases[CASE_COUNT];
    size_t count = cases_make(cases, signal, true, true);
    assert_true(count > 20); /* the second incarnation was counted */
    run_all(cases, count);
}

static void counts_take_fewest(struct cox_fault_counts *fewest,
                               const struct cox_fault_counts *counts)
{
    for (int point = 0; point < COX_FAULT_POINT_COUNT; point++)
        for (int process = 0; process < MATRIX_PROCESS_COUNT; process++) {
            const uint32_t passed = atomic_load(&counts->passed[point][process]);
            if (passed < atomic_load(&fewest->passed[point][process]))
                atomic_store(&fewest->passed[point][process], passed);
        }
}

/* A process of its own as well: this one stays without orphans. */
static int scenario_learn(void)
{
    struct shared {
        struct matrix_journal journal;
        struct cox_fault_counts counts, renewed;
        int orphans, status;
    } *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    COX_ASSERT(shared != MAP_FAILED);
    pid_t pid = fork();
    if (pid == 0) {
        static struct matrix_run run;
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        snprintf(run.name, sizeof run.name, "test_%d_matrix_learn_", getppid());
        matrix_counts_new(&run);
        matrix_sockets_new(&run);
        shared->orphans = matrix_driver_run(&run, MATRIX_LEARN);
        matrix_sockets_end(&run);
        shared->status = run.status ? run.status : (int)run.verdict;
        shared->journal = run.journal;
        memcpy(&shared->counts, run.counts, sizeof shared->counts);
        run.brief_ms = TEST_PATIENCE_MS;
        for (int i = 0; i < RENEWED_RUN_COUNT && !run.verdict; i++) {
            run.journal.used = 0;
            matrix_renew_judge(&run);
            if (i == 0)
                memcpy(&shared->renewed, run.counts, sizeof shared->renewed);
            counts_take_fewest(&shared->renewed, run.counts);
        }
        if (run.verdict)
            fprintf(stderr, "a rank started again, undisturbed: %s%s\n", run.problems,
                    run.journal.bytes);
        shared->status |= (int)run.verdict;
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    matrix_learned = shared->journal;
    matrix_journal_parse(&matrix_learned);
    memcpy(&learned_counts, &shared->counts, sizeof learned_counts);
    memcpy(&learned_renewed, &shared->renewed, sizeof learned_renewed);
    bool good = !shared->orphans && !shared->status &&
                matrix_learned_index("end") < matrix_learned.line_count;
    if (!good)
        fprintf(stderr, "the undisturbed run fails:\n%s\n", matrix_learned.bytes);
    munmap(shared, sizeof *shared);
    return good ? 0 : -1;
}

TEST(every_step_is_passed)
{
    assert_int_equal(matrix_points_check(&learned_counts), 0);
    for (size_t i = 0; i < matrix_learned.line_count; i++)
        if (matrix_learned.lines[i].status != 0 && matrix_learned.lines[i].status != COX_REJECTED &&
            matrix_learned.lines[i].status != COX_STALE)
            fail_msg("undisturbed, %s ends with %d", matrix_learned.lines[i].name,
                     matrix_learned.lines[i].status);
}

TEST(p1_p2_b3_b46_a_rank_killed_at_any_step_is_named_and_the_others_go_on)
{
    matrix_run(SIGKILL, true);
}

TEST(p3_p4_s4_b2_a_rank_stopped_at_any_step_is_late_and_comes_back)
{
    matrix_run(SIGSTOP, true);
}

TEST(p2_p7_b4_b53_a_coordinator_killed_at_any_step_leaves_nothing)
{
    matrix_run(SIGKILL, false);
}

TEST(b52_a_coordinator_stopped_at_any_step_goes_on)
{
    matrix_run(SIGSTOP, false);
}

TEST(p8_p1_a_rank_started_again_is_killed_at_any_step_and_comes_once_more)
{
    matrix_run_renewed(SIGKILL);
}

TEST(p8_b2_a_rank_started_again_is_stopped_at_any_step_and_comes_back)
{
    matrix_run_renewed(SIGSTOP);
}

static int setup_all(void **state)
{
    (void)state;
    return scenario_learn();
}

/* POINT ACTION PROCESS PASSAGE */
static int one_case(char **words, bool renewed)
{
    struct matrix_case death = {
        .point = COX_FAULT_POINT_COUNT, .process = MATRIX_COORDINATOR, .renewed = renewed};
    for (int point = 0; point < COX_FAULT_POINT_COUNT; point++)
        if (strcmp(words[0], cox_fault_name((enum cox_fault_point)point)) == 0)
            death.point = (enum cox_fault_point)point;
    death.signal = strcmp(words[1], "kill") == 0 ? SIGKILL : SIGSTOP;
    if (strcmp(words[2], "coordinator") != 0)
        death.process = atoi(words[2]);
    death.passage = (uint32_t)atoi(words[3]);
    if (death.point == COX_FAULT_POINT_COUNT || death.process >= MATRIX_RANK_COUNT)
        return 2;
    if (scenario_learn())
        return 1;
    runner_main(&death, 0, BRIEF_MS, STDOUT_FILENO, true);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "driver") == 0)
        return matrix_driver(argc, argv);
    if (argc == 5 || (argc == 6 && strcmp(argv[1], "renewed") == 0))
        return one_case(argv + argc - 4, argc == 6);
    if (argc == 2 && strcmp(argv[1], "all") == 0)
        density = EVERY;
    return test_run(setup_all, NULL);
}

#endif
