/* matrix_renew: a rank that was killed is started again, and its next incarnation is struck at each
 * of its steps. */
#include "matrix.h"

#if COX_TESTING

#define RANK (MATRIX_RANK_COUNT - 1)
/* An incarnation is struck once, the next one is not. */
#define LIFE_COUNT 3

/* ---- the driver ---- */

static const char *line_prefix;

static void journal(const char *name, int status, const char *text)
{
    printf("%s%s %d - - - | %s\n", line_prefix, name, status, text);
    fflush(stdout);
}

static int echo(struct cox_executor *executor, uint64_t patience_ms, struct cox_error *err)
{
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(patience_ms)};
    *err = (struct cox_error){0};
    return cox_executor_call_opaque(executor, "echo once more", 14, &options, NULL, NULL, err);
}

/* It is late: it continues and gives its late reply, after which all reply again. */
static int go_on(struct cox_executor *executor, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    int r;
    do {
        kill(cox_executor_pid(executor, RANK), SIGCONT);
        r = echo(executor, 500, err);
    } while (r == COX_TIMEOUT && cox_now_ns() < deadline_ns);
    return r;
}

/* The last init, then a request; late ranks go on, and are asked once more. Returns how it ended.
 */
static int life_try(struct cox_executor *executor, uint64_t brief_ms)
{
    int r = cox_executor_replay_init(executor, cox_deadline_after_ms(brief_ms), test_err());
    journal("replay", r, test_error.text);
    if (r == COX_TIMEOUT) {
        r = go_on(executor, test_err());
        journal("echo", r, test_error.text);
        r = cox_executor_replay_init(executor, cox_deadline_after_ms(TEST_PATIENCE_MS), test_err());
        journal("replay", r, test_error.text);
    }
    if (r)
        return r;
    r = echo(executor, brief_ms, test_err());
    journal("echo", r, test_error.text);
    if (r != COX_TIMEOUT)
        return r;
    r = go_on(executor, test_err());
    journal("echo", r, test_error.text);
    return r;
}

static void lives_run(struct cox_executor *executor, uint64_t brief_ms)
{
    struct cox_init_summary summary;
    journal("init",
            cox_executor_init(executor, NULL, 0, cox_deadline_after_ms(TEST_PATIENCE_MS), &summary,
                              test_err()),
            test_error.text);
    const uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    kill(cox_executor_pid(executor, RANK), SIGKILL);
    while (echo(executor, TEST_PATIENCE_MS, test_err()) == 0 && cox_now_ns() < deadline_ns)
        continue;
    for (int life = 2, r = -1; life <= LIFE_COUNT && r; life++) {
        r = cox_executor_restart(executor, RANK, cox_deadline_after_ms(brief_ms), test_err());
        journal("renew", r, test_error.text);
        if (r == 0)
            r = life_try(executor, brief_ms);
    }
}

int matrix_renew_drive(const char *name, uint64_t brief_ms, const char *prefix)
{
    static const char *const command[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .rank_count = MATRIX_RANK_COUNT,
        .workers.command = command,
        .memory.attach = test_attach(),
        .times.start_timeout_ms = TEST_PATIENCE_MS,
        .times.finalize_ms = brief_ms,
        .times.term_ms = brief_ms,
    };
    struct cox_executor *executor = NULL;
    line_prefix = prefix;
    int r = cox_executor_start(&options, &executor, test_err());
    journal("start", r, test_error.text);
    if (r)
        return 1;
    lives_run(executor, brief_ms);
    journal("stop", (int)cox_executor_stop(executor), "");
    cox_executor_free(executor);
    journal("end", 0, "");
    return 0;
}

/* ---- the judge ---- */

/* The one failure of the incarnation that was struck. */
static void judge_failure(struct matrix_run *run, const struct matrix_line *line)
{
    const bool kill = run->death->signal == SIGKILL;
    char rank[32];
    snprintf(rank, sizeof rank, "rank %d", RANK);
    if (line->status != (kill ? COX_PEER_DEAD : COX_TIMEOUT))
        matrix_complain(run, MATRIX_WRONG, "%s: status %d", line->name, line->status);
    else if (!strstr(line->text, rank))
        matrix_complain(run, kill ? MATRIX_WRONG : MATRIX_SLOW, "%s does not name the rank",
                        line->name);
    else if (kill && !strstr(line->text, "was killed by signal 9"))
        matrix_complain(run, MATRIX_WRONG, "%s does not name the signal", line->name);
}

static void judge_lives(struct matrix_run *run)
{
    const struct matrix_journal *journal = &run->journal;
    const bool stop = run->death && run->death->signal == SIGSTOP;
    size_t failures = 0;
    int last = -1;
    for (size_t i = 0; i < journal->line_count; i++) {
        const struct matrix_line *line = &journal->lines[i];
        bool is_stop = strcmp(line->name, "stop") == 0;
        if (strcmp(line->name, "echo") == 0)
            last = line->status;
        if (line->status == 0 || (is_stop && stop))
            continue;
        if (is_stop || !run->death || failures++)
            matrix_complain(run, MATRIX_WRONG, "%s: status %d: %s", line->name, line->status,
                            line->text);
        else
            judge_failure(run, line);
    }
    if (last != 0)
        matrix_complain(run, MATRIX_WRONG, "the rank is not back");
    if (!journal->line_count || strcmp(journal->lines[journal->line_count - 1].name, "end") != 0 ||
        !WIFEXITED(run->status) || WEXITSTATUS(run->status) != 0)
        matrix_complain(run, MATRIX_WRONG, "no good end: %#x", (unsigned)run->status);
}

void matrix_renew_judge(struct matrix_run *run)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    matrix_counts_new(run);
    matrix_sockets_new(run);
    setenv("COXSWAIN_FAULT_INCARNATION", "2", 1);
    int orphans = matrix_driver_run(run, MATRIX_RENEW);
    judge_lives(run);
    if (orphans)
        matrix_complain(run, MATRIX_WRONG, "%d processes were left behind", orphans);
    if (test_count_names(run->name))
        matrix_complain(run, MATRIX_WRONG, "%zu names are left", test_count_names(run->name));
    matrix_sockets_end(run);
    /* Not wrong at once: at the end of a group, whether a rank wakes its own channel threads
     * depends on which of them has seen the goodbye. The case is repeated until it strikes, or
     * fails. */
    if (run->death && run->verdict == MATRIX_FINE && !atomic_load(&run->counts->struck))
        matrix_complain(run, run->death->first ? MATRIX_SLOW : MATRIX_NOT_STRUCK,
                        "the plan has not struck");
}

#endif
