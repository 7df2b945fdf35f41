/*
 * matrix: the death matrix, in six parts: the driver, a process that is the coordinator of a group
 * (matrix_driver.c); the runner, which starts a driver and finds remaining processes
 * (matrix_run.c); the judge, which reads its journal (matrix_judge.c); a rank that is started again
 * (matrix_renew.c); the points of each process (matrix_points.c); and the cases (matrix_test.c).
 * The journal is the driver's standard output, a line per operation: NAME STATUS R0 R1 R2 | TEXT.
 * Rn: '-' not asked or no completion, ok, error, late, deadN (signal N). Lines with # are for the
 * reader.
 */
#ifndef COX_TESTS_FAULT_MATRIX_H
#define COX_TESTS_FAULT_MATRIX_H

#include "channel/base/fault.h"
#include "testing.h"

#define MATRIX_RANK_COUNT 3
#define MATRIX_FLIGHT_COUNT 4
#define MATRIX_COORDINATOR (-1)
#define MATRIX_PROCESS_COUNT (1 + MATRIX_RANK_COUNT)
#define MATRIX_JOURNAL_SIZE 32768
#define MATRIX_LINE_COUNT 128
/* A line for the reader: the driver waits no longer for the step to be reached. */
#define MATRIX_TOO_SLOW "# too slow"

/* driver NAME MODE RANK BRIEF_MS */
enum matrix_mode {
    MATRIX_LEARN = 'l', /* nothing happens, and no second group */
    MATRIX_PLAIN = 'p', /* every operation waits as long as it takes, for every rank */
    MATRIX_KILL = 'k',  /* the same; when RANK is dead, the others are asked */
    MATRIX_STOP = 's',  /* an operation waits BRIEF_MS, then RANK is continued and all are asked */
    MATRIX_AFTER = 'a', /* the second group only */
    MATRIX_RENEW = 'r', /* another group, in which a rank is killed and started again */
    MATRIX_OTHER =
        'o', /* the same, and before it the control socket of another group in the same folder */
};

struct matrix_line {
    char name[32];
    int status;
    char outcomes[MATRIX_RANK_COUNT][8];
    const char *text;
};

struct matrix_journal {
    size_t used;
    char bytes[MATRIX_JOURNAL_SIZE];
    /* cut into lines */
    char copy[MATRIX_JOURNAL_SIZE];
    struct matrix_line lines[MATRIX_LINE_COUNT];
    size_t line_count;
};

struct matrix_case {
    enum cox_fault_point point;
    /* MATRIX_COORDINATOR or a rank */
    int process;
    int signal;
    /* from 1 */
    uint32_t passage;
    /* it is sure to be reached */
    bool first;
    /* of the rank's second incarnation: matrix_renew.c */
    bool renewed;
};

enum matrix_verdict {
    MATRIX_FINE = 0,
    MATRIX_WRONG = 1,
    MATRIX_NOT_STRUCK = 2, /* the passage was not reached this time; fine otherwise */
    MATRIX_SLOW = 3,       /* the machine was too slow to tell */
};

/* What the runner knows. */
struct matrix_run {
    const struct matrix_case *death;
    char name[64];
    /* its own XDG_RUNTIME_DIR */
    char folder[64];
    uint64_t brief_ms;
    struct cox_fault_counts *counts;
    int counts_fd;
    struct matrix_journal journal;
    /* of the driver, as from waitpid */
    int status;
    bool hung;
    enum matrix_verdict verdict;
    char problems[2048];
};

/* The process itself, and what it does in MATRIX_RENEW; its lines' names begin with prefix. */
int matrix_renew_drive(const char *name, uint64_t brief_ms, const char *prefix);
int matrix_driver(int argc, char **argv);

/* Starts a driver in `mode`, follows it to its end, and reads its journal. Returns how many
 * processes it left, which are gone by then. */
int matrix_driver_run(struct matrix_run *run, enum matrix_mode mode);
void matrix_counts_new(struct matrix_run *run);
const char *matrix_process_name(int process);
/* A folder for the sockets of this run alone; and its end: what is left in it is complained of. */
void matrix_sockets_new(struct matrix_run *run);
void matrix_sockets_end(struct matrix_run *run);
/* What is in the folder for sockets; name (of COX_SOCKET_PATH_SIZE bytes, may be NULL): of the last
 * one. */
uint32_t matrix_sockets_count(char *name);

/* Of the undisturbed run: checks that each point is passed by exactly the kinds of groups that must
 * pass it. Returns the number of wrong points, which it prints. */
size_t matrix_points_check(const struct cox_fault_counts *counts);

/* Of the undisturbed run; written before there are runners. */
extern struct matrix_journal matrix_learned;
void matrix_journal_parse(struct matrix_journal *journal);
/* The first line of that name; line_count: none. */
size_t matrix_learned_index(const char *name);

__attribute__((format(printf, 3, 4))) void matrix_complain(struct matrix_run *run,
                                                           enum matrix_verdict verdict,
                                                           const char *format, ...);
/* Runs the case and judges it. */
void matrix_judge(struct matrix_run *run);
/* The same for the next incarnation of a killed rank; without a case nothing is struck. */
void matrix_renew_judge(struct matrix_run *run);

#endif
