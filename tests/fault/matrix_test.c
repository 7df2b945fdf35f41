/*
 * matrix_test: a group of three in which one process is killed, or stopped and continued, at a step of the
 * protocol: at each of them, in each process.
 *
 * The scenario (matrix_driver.c) first runs undisturbed and is counted: who passes which point how often. A point that
 * nobody passes fails the test, so a new step finds its way into the scenario. Then, for each point and process that
 * passed it: struck at its first passage, at its last, and at some in between; with the argument `all` at every one; under
 * a sanitizer at the first.
 *
 * One case again, with its journal:   test_fault_matrix POINT kill|stop RANK|coordinator PASSAGE
 *
 * Every case is a process of its own (the runner): subreaper of the driver, so that it sees whoever is left. Several
 * run at once; no verdict depends on time beyond TEST_PATIENCE_MS. Where an operation has to end at its deadline, and
 * the machine was too slow for those who should have answered before it, the case is run again with a longer one.
 */
#include "matrix.h"

#include "channel/fault.h"
#include "testing.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if COX_TESTING

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWNESS 5
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOWNESS 5
#endif
#endif
#ifndef SLOWNESS
#define SLOWNESS 1
#endif

#define COORDINATOR (-1)
#define PROCESS_COUNT (1 + MATRIX_RANK_COUNT)
/* What an operation waits for a stopped rank, at first. */
#define BRIEF_MS (300 * SLOWNESS)
#define BRIEF_FACTOR 4
#define ATTEMPT_COUNT 3
/* A driver, everything included. */
#define DRIVER_PATIENCE_MS (4 * TEST_PATIENCE_MS)
/* How long a stopped coordinator is left so. */
#define NAP_MS 50
#define RUNNER_COUNT 6
/* Failures after which no further case is begun. */
#define WRONG_MAX 10
#define JOURNAL_SIZE 32768
#define LINE_COUNT 128
#define CASE_COUNT 65536
/* Of the passages of a point, how far apart those are that are struck. */
#define PARTS 4

extern char **environ;

/* ---- the journal ---- */

struct line {
    char name[16];
    int status;
    char outcomes[MATRIX_RANK_COUNT][8];
    const char *text;
};

struct journal {
    size_t used;
    char bytes[JOURNAL_SIZE];
    char copy[JOURNAL_SIZE]; /* cut into lines */
    struct line lines[LINE_COUNT];
    size_t line_count;
};

static void journal_parse(struct journal *journal)
{
    memcpy(journal->copy, journal->bytes, sizeof journal->copy);
    char *rest = journal->copy, *text;
    journal->line_count = 0;
    while ((text = strsep(&rest, "\n")) != NULL && journal->line_count < LINE_COUNT) {
        struct line *line = &journal->lines[journal->line_count];
        int used = 0;
        if (sscanf(text, "%15s %d %7s %7s %7s |%n", line->name, &line->status, line->outcomes[0],
                   line->outcomes[1], line->outcomes[2], &used) == 5 &&
            used > 0 && text[0] != '#') {
            line->text = text + used;
            journal->line_count++;
        }
    }
}

/* ---- one case ---- */

struct death_case {
    enum cox_fault_point point;
    int process; /* COORDINATOR or a rank */
    int signal;
    uint32_t passage; /* from 1 */
    bool first;       /* it is sure to be reached */
};

enum verdict {
    FINE = 0,
    WRONG = 1,
    NOT_STRUCK = 2, /* the passage was not reached this time; fine otherwise */
    SLOW = 3,       /* the machine was too slow to tell */
};

/* What the runner knows. */
struct run {
    const struct death_case *death;
    char name[64];
    uint64_t brief_ms;
    struct cox_fault_counts *counts;
    int counts_fd;
    struct journal journal;
    int status; /* of the driver, as from waitpid */
    bool hung;
    enum verdict verdict;
    char complaints[2048];
};

/* Of the undisturbed run; written before there are runners. */
static struct journal learned;
static struct cox_fault_counts learned_counts;

__attribute__((format(printf, 3, 4))) static void complain(struct run *run, enum verdict verdict,
                                                           const char *format, ...)
{
    if (run->verdict != WRONG)
        run->verdict = verdict;
    size_t used = strlen(run->complaints);
    va_list args;
    va_start(args, format);
    vsnprintf(run->complaints + used, sizeof run->complaints - used, format, args);
    va_end(args);
    used = strlen(run->complaints);
    snprintf(run->complaints + used, sizeof run->complaints - used, "\n");
}

static const char *process_name(int process)
{
    static const char *const names[PROCESS_COUNT] = {"coordinator", "0", "1", "2"};
    return names[process + 1];
}

/* ---- the runner: a driver and whoever it leaves ---- */

static void counts_new(struct run *run)
{
    run->counts_fd = memfd_create("counts", MFD_CLOEXEC);
    COX_ASSERT(run->counts_fd >= 0 && ftruncate(run->counts_fd, sizeof *run->counts) == 0);
    run->counts =
        mmap(NULL, sizeof *run->counts, PROT_READ | PROT_WRITE, MAP_SHARED, run->counts_fd, 0);
    COX_ASSERT(run->counts != MAP_FAILED);
}

static pid_t driver_spawn(struct run *run, enum matrix_mode mode, int *ret_out)
{
    int out[2];
    char path[64], mode_text[2] = {(char)mode}, brief[24];
    COX_ASSERT(pipe2(out, O_CLOEXEC | O_NONBLOCK) == 0);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), run->counts_fd);
    snprintf(brief, sizeof brief, "%" PRIu64, run->brief_ms);
    setenv("COXSWAIN_FAULT_COUNTS", path, 1);
    unsetenv("COXSWAIN_FAULT");
    if (run->death && mode != MATRIX_AFTER) {
        char plan[128];
        snprintf(plan, sizeof plan, "%s:%s:%s:%" PRIu32, cox_fault_name(run->death->point),
                 run->death->signal == SIGKILL ? "kill" : "stop", process_name(run->death->process),
                 run->death->passage);
        setenv("COXSWAIN_FAULT", plan, 1);
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_adddup2(&actions, out[1], 2);
    /* A group of its own, for the end of everybody in it. */
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const char *rank = process_name(run->death ? run->death->process : COORDINATOR);
    char *const argv[] = {"matrix", "driver", run->name, mode_text, (char *)(uintptr_t)rank,
                          brief,    NULL};
    pid_t pid;
    COX_ASSERT(posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, argv, environ) == 0);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    *ret_out = out[0];
    return pid;
}

static void journal_read(struct journal *journal, int fd)
{
    size_t room;
    ssize_t got;
    while ((room = sizeof journal->bytes - 1 - journal->used) > 0 &&
           (got = read(fd, journal->bytes + journal->used, room)) > 0)
        journal->used += (size_t)got;
    journal->bytes[journal->used] = '\0';
}

static void pause_ms(uint64_t ms)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)(ms * COX_NSEC_PER_MSEC)}, NULL);
}

/* Until the driver has ended; one that is stopped goes on after a nap. */
static void driver_follow(struct run *run, pid_t pid, int out)
{
    uint64_t deadline_ns = cox_deadline_after_ms(DRIVER_PATIENCE_MS);
    run->hung = false;
    for (;;) {
        struct pollfd p = {.fd = out, .events = POLLIN};
        poll(&p, 1, 5);
        journal_read(&run->journal, out);
        if (waitpid(pid, &run->status, WNOHANG | WUNTRACED) == pid) {
            if (!WIFSTOPPED(run->status))
                break;
            pause_ms(NAP_MS);
            kill(pid, SIGCONT);
        }
        if (cox_now_ns() >= deadline_ns && !run->hung) {
            run->hung = true;
            kill(-pid, SIGKILL);
        }
    }
    journal_read(&run->journal, out);
    close(out);
}

/* Whoever has lost its parent is a child of the runner now. Returns how many there were. */
static int orphans_reap(struct run *run, pid_t group)
{
    int count = 0;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0)
            return count;
        count += pid > 0;
        if (pid == 0)
            pause_ms(1);
        if (cox_now_ns() >= deadline_ns) {
            complain(run, WRONG, "a process goes on without its coordinator");
            kill(-group, SIGKILL);
            deadline_ns = COX_DEADLINE_NEVER;
        }
    }
}

static int driver_run(struct run *run, enum matrix_mode mode)
{
    int out;
    pid_t pid = driver_spawn(run, mode, &out);
    driver_follow(run, pid, out);
    if (run->hung)
        complain(run, WRONG, "the driver does not come to an end");
    int orphans = orphans_reap(run, pid);
    journal_parse(&run->journal);
    return orphans;
}

/* ---- the judge ---- */

static bool is_flight(const struct line *line)
{
    return strncmp(line->name, "flight", 6) == 0;
}

static bool is_asked(const struct line *line, int rank)
{
    return strcmp(line->outcomes[rank], "-") != 0;
}

/* There was a completion. */
static bool is_told(const struct line *line)
{
    return is_asked(line, 0) || is_asked(line, 1) || is_asked(line, 2);
}

/* The first operation that met the dead rank: status, text and each rank's outcome. */
static void judge_dead(struct run *run, const struct line *line)
{
    char rank[32];
    int bad = run->death->process;
    snprintf(rank, sizeof rank, "rank %d (pid ", bad);
    if (line->status != COX_PEER_DEAD)
        complain(run, WRONG, "%s: status %d, expected %d", line->name, line->status, COX_PEER_DEAD);
    if (!strstr(line->text, rank) || !strstr(line->text, "was killed by signal 9"))
        complain(run, WRONG, "%s does not name rank %d and its signal", line->name, bad);
    for (int r = 0; r < MATRIX_RANK_COUNT; r++) {
        const char *is = line->outcomes[r];
        if (!is_told(line) || (!is_asked(line, r) && strcmp(line->name, "first") == 0))
            continue;
        bool failing = strcmp(line->name, "fail") == 0 || strcmp(line->name, "stale") == 0;
        bool right = r == bad ? strcmp(is, "dead9") == 0
                              : strcmp(is, "ok") == 0 || strcmp(is, "late") == 0 ||
                                    (failing && strcmp(is, "error") == 0);
        if (!right)
            complain(run, WRONG, "%s: rank %d is %s", line->name, r, is);
    }
}

/* The first operation that met the stopped rank. */
static void judge_late(struct run *run, const struct line *line)
{
    char rank[32];
    int bad = run->death->process;
    snprintf(rank, sizeof rank, "rank %d", bad);
    if (line->status != COX_TIMEOUT)
        complain(run, WRONG, "%s: status %d, expected %d", line->name, line->status, COX_TIMEOUT);
    if (!strstr(line->text, rank)) {
        complain(run, strstr(line->text, "rank ") ? SLOW : WRONG, "%s does not name rank %d",
                 line->name, bad);
        return;
    }
    /* Without a completion there was no room for the request: who owes what is told, not why. */
    bool why = is_told(line) || strcmp(line->name, "start") == 0;
    if (why && !strstr(line->text, "stopped by a signal"))
        complain(run, WRONG, "%s does not say that the rank is stopped", line->name);
    for (int r = 0; r < MATRIX_RANK_COUNT; r++) {
        const char *is = line->outcomes[r];
        if (!is_told(line) || (!is_asked(line, r) && strcmp(line->name, "first") == 0))
            continue;
        /* The error channel has one slot: who holds it while it is stopped keeps the others waiting. */
        bool waits = strcmp(is, "late") == 0 && strcmp(line->name, "fault") == 0;
        if (strcmp(is, r == bad ? "late" : "ok") != 0 && !waits)
            complain(run, strcmp(is, "late") == 0 ? SLOW : WRONG, "%s: rank %d is %s", line->name,
                     r, is);
    }
}

/* An operation that ended as it does undisturbed: those who are asked have answered. */
static void judge_usual(struct run *run, const struct line *line, const struct line *usual,
                        bool bad_is_gone)
{
    for (int r = 0; usual->status == 0 && r < MATRIX_RANK_COUNT; r++) {
        bool gone = bad_is_gone && r == run->death->process;
        const char *expected = gone ? "-" : usual->outcomes[r];
        /* Asked of the lowest of the living. */
        if (strcmp(line->name, "first") != 0 && strcmp(line->outcomes[r], expected) != 0)
            complain(run, WRONG, "%s: rank %d is %s, expected %s", line->name, r, line->outcomes[r],
                     expected);
    }
}

static size_t learned_index(const char *name)
{
    size_t i = 0;
    while (i < learned.line_count && strcmp(learned.lines[i].name, name) != 0)
        i++;
    return i;
}

/* The first group, line for line. At most one failure, as judge tells; what failed is then done again. Returns the
 * number of lines read. */
static size_t judge_first(struct run *run, void (*judge)(struct run *, const struct line *))
{
    bool felt = false, in_flight = false; /* a failed round of flights goes on */
    size_t next = 0, i = 0, count = learned_index("fds");
    bool kill = run->death && run->death->signal == SIGKILL;
    for (; i < run->journal.line_count && next < count; i++) {
        const struct line *line = &run->journal.lines[i], *usual = &learned.lines[next];
        if (in_flight && is_flight(line)) {
            if (strcmp(line->name, "flight0") != 0)
                continue;
            in_flight = false;
            usual = &learned.lines[next = learned_index("flight0")];
        }
        if (strcmp(line->name, usual->name) != 0) {
            complain(run, WRONG, "%s, expected %s", line->name, usual->name);
            return i;
        }
        bool stop_signals = strcmp(line->name, "stop") == 0 && judge && !kill;
        if (line->status == usual->status || stop_signals) {
            judge_usual(run, line, usual, felt && kill);
            next++;
        } else if (judge && !felt) {
            judge(run, line);
            felt = true;
            in_flight = is_flight(line);
            if (strcmp(line->name, "start") == 0)
                return i + 1;
        } else {
            complain(run, WRONG, "%s: status %d, expected %d", line->name, line->status,
                     usual->status);
        }
    }
    if (next < count)
        complain(run, WRONG, "no %s", learned.lines[next].name);
    return i;
}

/* The second group, what the driver found in itself, and what it left in the system. */
static void judge_rest(struct run *run, size_t i, int orphans)
{
    static const char *const rest[] = {"second-start", "second-echo", "second-stop", "fds", "end"};
    for (size_t k = 0; k < sizeof rest / sizeof rest[0]; k++, i++)
        if (i >= run->journal.line_count || strcmp(run->journal.lines[i].name, rest[k]) != 0 ||
            run->journal.lines[i].status != 0)
            complain(run, WRONG, "no good %s", rest[k]);
    if (!WIFEXITED(run->status) || WEXITSTATUS(run->status) != 0)
        complain(run, WRONG, "the driver's status is %#x", (unsigned)run->status);
    if (orphans)
        complain(run, WRONG, "%d processes were left behind", orphans);
    if (test_count_names(run->name))
        complain(run, WRONG, "%zu names are left", test_count_names(run->name));
}

/* Killed: up to there everything was as usual; nobody stays; names only of a group that was not complete. */
static void judge_coordinator_death(struct run *run)
{
    struct journal *journal = &run->journal;
    if (!WIFSIGNALED(run->status) || WTERMSIG(run->status) != SIGKILL)
        complain(run, WRONG, "the coordinator's status is %#x", (unsigned)run->status);
    for (size_t i = 0; i < journal->line_count; i++)
        if (strcmp(journal->lines[i].name, learned.lines[i].name) != 0 ||
            journal->lines[i].status != learned.lines[i].status)
            complain(run, WRONG, "before its death: %s %d, expected %s %d", journal->lines[i].name,
                     journal->lines[i].status, learned.lines[i].name, learned.lines[i].status);
    bool complete = journal->line_count > 0 || run->death->point == COX_FAULT_STARTED;
    if (complete && test_count_names(run->name))
        complain(run, WRONG, "%zu names are left of a complete group", test_count_names(run->name));
    journal->used = 0;
    int orphans = driver_run(run, MATRIX_AFTER);
    judge_rest(run, 0, orphans);
}

static void run_case(struct run *run)
{
    const struct death_case *death = run->death;
    bool of_rank = death->process != COORDINATOR, kill = death->signal == SIGKILL;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    counts_new(run);
    int orphans = driver_run(run, !of_rank ? MATRIX_PLAIN : kill ? MATRIX_KILL : MATRIX_STOP);
    bool struck = atomic_load(&run->counts->struck);
    if (struck && kill && !of_rank)
        judge_coordinator_death(run);
    else
        judge_rest(run,
                   judge_first(run, !struck || !of_rank ? NULL
                                    : kill              ? judge_dead
                                                        : judge_late),
                   orphans);
    if (!struck && run->verdict == FINE)
        complain(run, death->first ? WRONG : NOT_STRUCK, "the plan has not struck");
}

/* ---- many cases ---- */

static void case_print(const struct death_case *death, char *text, size_t size)
{
    snprintf(text, size, "%s %s %s %" PRIu32, cox_fault_name(death->point),
             death->signal == SIGKILL ? "kill" : "stop", process_name(death->process),
             death->passage);
}

/* In a process of its own. Complaints and journal go to fd. */
static _Noreturn void runner_main(const struct death_case *death, size_t number, uint64_t brief_ms,
                                  int fd, bool talkative)
{
    static struct run run;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run.death = death;
    run.brief_ms = brief_ms;
    snprintf(run.name, sizeof run.name, "test_%d_matrix_%zu_", getppid(), number);
    run_case(&run);
    if (run.verdict == WRONG || run.verdict == SLOW || talkative) {
        char text[128];
        case_print(death, text, sizeof text);
        dprintf(fd, "%s:\n%s%s\n", text, run.complaints, run.journal.bytes);
    }
    _exit((int)run.verdict);
}

struct runner {
    pid_t pid;
    FILE *report;
    size_t number; /* of its case */
    int attempt;
};

static void runner_start(struct runner *runner, const struct death_case *cases, size_t number,
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
static bool runner_end(struct runner *runner, const struct death_case *cases, int status,
                       struct tally *tally)
{
    (void)cases;
    int verdict = WIFEXITED(status) ? WEXITSTATUS(status) : WRONG;
    bool again = verdict == SLOW && runner->attempt + 1 < ATTEMPT_COUNT;
    tally->repeated += again;
    tally->not_struck += verdict == NOT_STRUCK;
    if (!again && verdict != FINE && verdict != NOT_STRUCK) {
        tally->wrong++;
        report_show(runner->report);
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

static void run_all(const struct death_case *cases, size_t case_count)
{
    struct runner runners[RUNNER_COUNT] = {{0}};
    struct tally tally = {.cases = case_count};
    uint64_t begin_ns = cox_now_ns();
    size_t next = 0, running = 0;
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

/* The first passage, the last, and PARTS - 1 in between; or every one. Returns the one behind `passage`; 0: none. */
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

static size_t cases_make(struct death_case *cases, int signal, bool of_ranks)
{
    const int from = of_ranks ? 0 : COORDINATOR, to = of_ranks ? MATRIX_RANK_COUNT : 0;
    size_t count = 0;
    for (int point = 0; point < COX_FAULT_POINT_COUNT; point++)
        for (int process = from; process < to; process++) {
            uint32_t passed = atomic_load(&learned_counts.passed[point][process + 1]);
            for (uint32_t passage = 0; (passage = passage_next(passage, passed)) > 0;) {
                COX_ASSERT(count < CASE_COUNT);
                cases[count++] = (struct death_case){.point = (enum cox_fault_point)point,
                                                     .process = process,
                                                     .signal = signal,
                                                     .passage = passage,
                                                     .first = passage == 1};
            }
        }
    return count;
}

static void matrix_run(int signal, bool of_ranks)
{
    static struct death_case cases[CASE_COUNT];
    run_all(cases, cases_make(cases, signal, of_ranks));
}

/* A process of its own as well: this one stays without orphans. */
static int scenario_learn(void)
{
    struct shared {
        struct journal journal;
        struct cox_fault_counts counts;
        int orphans, status;
    } *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    COX_ASSERT(shared != MAP_FAILED);
    pid_t pid = fork();
    if (pid == 0) {
        static struct run run;
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        snprintf(run.name, sizeof run.name, "test_%d_matrix_learn_", getppid());
        counts_new(&run);
        shared->orphans = driver_run(&run, MATRIX_LEARN);
        shared->status = run.status;
        shared->journal = run.journal;
        memcpy(&shared->counts, run.counts, sizeof shared->counts);
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    learned = shared->journal;
    journal_parse(&learned);
    memcpy(&learned_counts, &shared->counts, sizeof learned_counts);
    bool good = !shared->orphans && !shared->status && learned_index("end") < learned.line_count;
    if (!good)
        fprintf(stderr, "the undisturbed run fails:\n%s\n", learned.bytes);
    munmap(shared, sizeof *shared);
    return good ? 0 : -1;
}

static void every_step_is_passed(void **state)
{
    (void)state;
    size_t never = 0;
    for (int point = 0; point < COX_FAULT_POINT_COUNT; point++) {
        uint32_t passed = 0;
        for (int process = 0; process < PROCESS_COUNT; process++)
            passed += atomic_load(&learned_counts.passed[point][process]);
        if (passed == 0) {
            print_error("nobody passes %s: let the scenario of matrix_driver.c do it\n",
                        cox_fault_name((enum cox_fault_point)point));
            never++;
        }
    }
    print_message("%d points\n", COX_FAULT_POINT_COUNT);
    assert_int_equal(never, 0);
    for (size_t i = 0; i < learned.line_count; i++)
        if (learned.lines[i].status != 0 && learned.lines[i].status != COX_REJECTED &&
            learned.lines[i].status != COX_STALE)
            fail_msg("undisturbed, %s ends with %d", learned.lines[i].name,
                     learned.lines[i].status);
}

static void p1_p2_b3_b46_a_rank_killed_at_any_step_is_named_and_the_others_go_on(void **state)
{
    (void)state;
    matrix_run(SIGKILL, true);
}

static void p3_p4_s4_b2_a_rank_stopped_at_any_step_is_late_and_comes_back(void **state)
{
    (void)state;
    matrix_run(SIGSTOP, true);
}

static void p2_p7_b4_b53_a_coordinator_killed_at_any_step_leaves_nothing(void **state)
{
    (void)state;
    matrix_run(SIGKILL, false);
}

static void b52_a_coordinator_stopped_at_any_step_goes_on(void **state)
{
    (void)state;
    matrix_run(SIGSTOP, false);
}

static int setup_all(void **state)
{
    (void)state;
    return scenario_learn();
}

/* POINT ACTION PROCESS PASSAGE */
static int one_case(char **words)
{
    struct death_case death = {.point = COX_FAULT_POINT_COUNT, .process = COORDINATOR};
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
    const struct CMUnitTest tests[] = {
        TEST(every_step_is_passed),
        TEST(p1_p2_b3_b46_a_rank_killed_at_any_step_is_named_and_the_others_go_on),
        TEST(p3_p4_s4_b2_a_rank_stopped_at_any_step_is_late_and_comes_back),
        TEST(p2_p7_b4_b53_a_coordinator_killed_at_any_step_leaves_nothing),
        TEST(b52_a_coordinator_stopped_at_any_step_goes_on),
    };
    if (argc > 1 && strcmp(argv[1], "driver") == 0)
        return matrix_driver(argc, argv);
    if (argc == 5)
        return one_case(argv + 1);
    if (argc == 2 && strcmp(argv[1], "all") == 0)
        density = EVERY;
    return cmocka_run_group_tests_name("matrix", tests, setup_all, NULL);
}

#else

int main(void)
{
    printf("needs the fault points of the testing build (COX_TESTING)\n");
    return 77;
}

#endif
