#include "matrix.h"

#include "channel/socket/runtime_dir.h"

#if COX_TESTING

struct matrix_journal matrix_learned;

static bool is_flight(const struct matrix_line *line)
{
    return strncmp(line->name, "flight", 6) == 0;
}

static bool is_asked(const struct matrix_line *line, int rank)
{
    return strcmp(line->outcomes[rank], "-") != 0;
}

/* There was a completion. */
static bool is_told(const struct matrix_line *line)
{
    return is_asked(line, 0) || is_asked(line, 1) || is_asked(line, 2);
}

/* The first operation that met the dead rank: status, text and each rank's outcome. */
static void judge_dead(struct matrix_run *run, const struct matrix_line *line)
{
    char rank[32];
    int bad = run->death->process;
    snprintf(rank, sizeof rank, "rank %d (pid ", bad);
    if (line->status != COX_PEER_DEAD)
        matrix_complain(run, MATRIX_WRONG, "%s: status %d, expected %d", line->name, line->status,
                        COX_PEER_DEAD);
    if (!strstr(line->text, rank) || !strstr(line->text, "was killed by signal 9"))
        matrix_complain(run, MATRIX_WRONG, "%s does not name rank %d and its signal", line->name,
                        bad);
    for (int r = 0; r < MATRIX_RANK_COUNT; r++) {
        const char *is = line->outcomes[r];
        if (!is_told(line) || (!is_asked(line, r) && strcmp(line->name, "first") == 0))
            continue;
        bool failing = strcmp(line->name, "fail") == 0 || strcmp(line->name, "stale") == 0;
        bool right = r == bad ? strcmp(is, "dead9") == 0
                              : strcmp(is, "ok") == 0 || strcmp(is, "late") == 0 ||
                                    (failing && strcmp(is, "error") == 0);
        if (!right)
            matrix_complain(run, MATRIX_WRONG, "%s: rank %d is %s", line->name, r, is);
    }
}

/* The first operation that met the stopped rank. What may come of a slow machine is tried again
 * with more time, in which a fault of ours would show again. */
static void judge_late(struct matrix_run *run, const struct matrix_line *line)
{
    char rank[32];
    int bad = run->death->process;
    snprintf(rank, sizeof rank, "rank %d", bad);
    if (line->status != COX_TIMEOUT)
        matrix_complain(run, MATRIX_WRONG, "%s: status %d, expected %d", line->name, line->status,
                        COX_TIMEOUT);
    if (!strstr(line->text, rank)) {
        matrix_complain(run, MATRIX_SLOW, "%s does not name rank %d", line->name, bad);
        return;
    }
    /* Without a completion there was no room for the request: the error names the late rank,
     * without a cause. */
    bool why = is_told(line) || strcmp(line->name, "start") == 0;
    if (why && !strstr(line->text, "stopped by a signal"))
        matrix_complain(run, MATRIX_SLOW, "%s does not say that the rank is stopped", line->name);
    for (int r = 0; r < MATRIX_RANK_COUNT; r++) {
        const char *is = line->outcomes[r];
        if (!is_told(line) || (!is_asked(line, r) && strcmp(line->name, "first") == 0))
            continue;
        /* The error channel has one slot: a rank that is stopped while it holds the slot delays the
         * others. */
        bool waits = strcmp(is, "late") == 0 && strcmp(line->name, "fault") == 0;
        if (strcmp(is, r == bad ? "late" : "ok") != 0 && !waits)
            matrix_complain(run, MATRIX_SLOW, "%s: rank %d is %s", line->name, r, is);
    }
}

/* An operation that ended as it does undisturbed: all asked ranks have replied. */
static void judge_usual(struct matrix_run *run, const struct matrix_line *line,
                        const struct matrix_line *usual, bool bad_is_gone)
{
    for (int r = 0; usual->status == 0 && r < MATRIX_RANK_COUNT; r++) {
        bool gone = bad_is_gone && r == run->death->process;
        const char *expected = gone ? "-" : usual->outcomes[r];
        /* Asked of the lowest of the living. */
        if (strcmp(line->name, "first") != 0 && strcmp(line->outcomes[r], expected) != 0)
            matrix_complain(run, MATRIX_WRONG, "%s: rank %d is %s, expected %s", line->name, r,
                            line->outcomes[r], expected);
    }
}

size_t matrix_learned_index(const char *name)
{
    size_t i = 0;
    while (i < matrix_learned.line_count && strcmp(matrix_learned.lines[i].name, name) != 0)
        i++;
    return i;
}

/* The first group, line for line. At most one failure, as judge tells; what failed is then done
 * again. Returns the number of lines read. */
static size_t judge_first(struct matrix_run *run,
                          void (*judge)(struct matrix_run *, const struct matrix_line *))
{
    bool felt = false, in_flight = false; /* a failed round of flights continues */
    size_t next = 0, i = 0, count = matrix_learned_index("names");
    bool kill = run->death && run->death->signal == SIGKILL;
    for (; i < run->journal.line_count && next < count; i++) {
        const struct matrix_line *line = &run->journal.lines[i],
                                 *usual = &matrix_learned.lines[next];
        /* Ranks are not struck there, so it is left out. */
        while (run->death && run->death->process != MATRIX_COORDINATOR &&
               strncmp(usual->name, "restart", 7) == 0)
            usual = &matrix_learned.lines[++next];
        if (next == count)
            break;
        if (in_flight && is_flight(line)) {
            if (strcmp(line->name, "flight0") != 0)
                continue;
            in_flight = false;
            usual = &matrix_learned.lines[next = matrix_learned_index("flight0")];
        }
        if (strcmp(line->name, usual->name) != 0) {
            matrix_complain(run, MATRIX_WRONG, "%s, expected %s", line->name, usual->name);
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
        } else if (!judge && line->status == COX_TIMEOUT && strcmp(line->name, "start") == 0) {
            matrix_complain(run, MATRIX_SLOW, "the start was not given the time to be struck");
            return i + 1;
        } else {
            matrix_complain(run, MATRIX_WRONG, "%s: status %d, expected %d", line->name,
                            line->status, usual->status);
        }
    }
    bool left_out = next < count && strncmp(matrix_learned.lines[next].name, "restart", 7) == 0 &&
                    run->death && run->death->process != MATRIX_COORDINATOR;
    if (next < count && !left_out)
        matrix_complain(run, MATRIX_WRONG, "no %s", matrix_learned.lines[next].name);
    return i;
}

/* The second group, what the driver found in itself, and what it left in the system. */
static void judge_rest(struct matrix_run *run, size_t i, enum matrix_mode mode, int orphans)
{
    static const struct {
        const char *name;
        /* only behind the first group; only in MATRIX_OTHER */
        bool first, other;
    } rest[] = {
        {"names", true, false},        {"sockets", true, false},
        {"other", false, true},        {"second-start", false, false},
        {"second-echo", false, false}, {"second-stop", false, false},
        {"fds", false, false},         {"end", false, false},
    };
    const bool after = mode == MATRIX_AFTER || mode == MATRIX_OTHER;
    for (size_t k = 0; k < sizeof rest / sizeof rest[0]; k++) {
        if ((rest[k].first && after) || (rest[k].other && mode != MATRIX_OTHER))
            continue;
        if (i >= run->journal.line_count || strcmp(run->journal.lines[i].name, rest[k].name) != 0 ||
            run->journal.lines[i].status != 0)
            matrix_complain(run, MATRIX_WRONG, "no good %s", rest[k].name);
        i++;
    }
    if (!WIFEXITED(run->status) || WEXITSTATUS(run->status) != 0)
        matrix_complain(run, MATRIX_WRONG, "the driver's status is %#x", (unsigned)run->status);
    if (orphans)
        matrix_complain(run, MATRIX_WRONG, "%d processes were left behind", orphans);
    if (test_count_names(run->name))
        matrix_complain(run, MATRIX_WRONG, "%zu names are left", test_count_names(run->name));
}

/* Leftovers that the start sweeps before it makes anything. */
static bool is_of_sweep(enum cox_fault_point point)
{
    return point == COX_FAULT_CONTROL_SWEEP || point == COX_FAULT_CONTROL_LOCKED ||
           point == COX_FAULT_NAME_UNLINKED || point == COX_FAULT_CONTROL_UNLINK;
}

/* Of a killed coordinator, at most its socket is left, without a listener. */
static void judge_dead_socket(struct matrix_run *run)
{
    char file[COX_SOCKET_PATH_SIZE], path[COX_SOCKET_PATH_SIZE];
    char own[COX_RUNTIME_DIR_FILE_SIZE];
    uint32_t count = matrix_sockets_count(file);
    cox_runtime_dir_file(run->name, own);
    if (count > 1)
        matrix_complain(run, MATRIX_WRONG, "%u sockets are left", count);
    if (count == 0)
        return;
    const bool is_own = strcmp(file, own) == 0;
    if (!is_own && strcmp(file, COX_RUNTIME_DIR_NEW_FILE) != 0)
        matrix_complain(run, MATRIX_WRONG, "%s is left", file);
    cox_fault_arm(NULL); /* the plan, which is in the environment, was for the dead one */
    const struct cox_hello hello = {.role = COX_HELLO_COMMAND};
    struct cox_control_connection session = {.fd = -1};
    cox_control_socket_find(run->name, path, NULL);
    int expected = is_own ? COX_CLOSED : COX_NOT_FOUND;
    int r = cox_control_socket_connect(path, &hello, cox_deadline_after_ms(TEST_PATIENCE_MS),
                                       &session, NULL);
    if (r != expected)
        matrix_complain(run, MATRIX_WRONG, "at the control socket of the dead: %d, expected %d", r,
                        expected);
    cox_control_connection_close(&session);
}

/* Killed: everything before was as usual; no process remains; names only of a group that was not
 * complete. */
static void judge_coordinator_death(struct matrix_run *run)
{
    struct matrix_journal *journal = &run->journal;
    if (!WIFSIGNALED(run->status) || WTERMSIG(run->status) != SIGKILL)
        matrix_complain(run, MATRIX_WRONG, "the coordinator's status is %#x",
                        (unsigned)run->status);
    for (size_t i = 0; i < journal->line_count; i++)
        if (strcmp(journal->lines[i].name, matrix_learned.lines[i].name) != 0 ||
            journal->lines[i].status != matrix_learned.lines[i].status)
            matrix_complain(run, MATRIX_WRONG, "before its death: %s %d, expected %s %d",
                            journal->lines[i].name, journal->lines[i].status,
                            matrix_learned.lines[i].name, matrix_learned.lines[i].status);
    /* Each stop is followed by another start. */
    const char *last = journal->line_count ? journal->lines[journal->line_count - 1].name : "stop";
    bool complete = !strstr(last, "stop") || run->death->point == COX_FAULT_STARTED;
    bool nameless = test_attach() == COX_ATTACH_SEALED && !is_of_sweep(run->death->point);
    if ((complete || nameless) && test_count_names(run->name))
        matrix_complain(run, MATRIX_WRONG, "%zu names are left of a %s group",
                        test_count_names(run->name), nameless ? "sealed" : "complete");
    judge_dead_socket(run);
    journal->used = 0;
    /* The next start in that folder removes the socket, under this name or another one. */
    enum matrix_mode mode = run->death->passage % 2 ? MATRIX_AFTER : MATRIX_OTHER;
    int orphans = matrix_driver_run(run, mode);
    judge_rest(run, 0, mode, orphans);
}

void matrix_judge(struct matrix_run *run)
{
    const struct matrix_case *death = run->death;
    bool of_rank = death->process != MATRIX_COORDINATOR, kill = death->signal == SIGKILL;
    enum matrix_mode mode = !of_rank ? MATRIX_PLAIN : kill ? MATRIX_KILL : MATRIX_STOP;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    matrix_counts_new(run);
    matrix_sockets_new(run);
    int orphans = matrix_driver_run(run, mode);
    bool struck = atomic_load(&run->counts->struck);
    if (struck && kill && !of_rank)
        judge_coordinator_death(run);
    else
        judge_rest(run,
                   judge_first(run, !struck || !of_rank ? NULL
                                    : kill              ? judge_dead
                                                        : judge_late),
                   mode, orphans);
    matrix_sockets_end(run);
    /* What failed then is nothing that the rank was struck by. */
    if (strstr(run->journal.bytes, MATRIX_TOO_SLOW))
        run->verdict = MATRIX_SLOW;
    if (!struck && run->verdict == MATRIX_FINE)
        matrix_complain(run, death->first ? MATRIX_WRONG : MATRIX_NOT_STRUCK,
                        "the plan has not struck");
}

#endif
