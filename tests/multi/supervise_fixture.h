/* supervise_fixture: the supervisor with real processes: shells and small programs as workers.
 * Whatever a test waits for, it waits for by the hooks, with a deadline. After each test this
 * process has the fds it had before, and no children. */
#ifndef COX_TESTS_SUPERVISE_FIXTURE_H
#define COX_TESTS_SUPERVISE_FIXTURE_H

#include "coordinator/process/supervise.h"
#include "tests/lib/test.h"

#define PATIENCE_MS 30000

/* What the hooks said. */
struct line {
    uint32_t rank;
    bool is_stderr;
    char *text;
};

struct death {
    pid_t pid;
    uint32_t times;
    uint64_t told_ns;
    struct cox_exit how, getter;
    char description[200], last_lines[200];
};

struct group {
    struct cox_supervisor *supervisor;
    struct cox_rank ranks[COX_RANK_COUNT_MAX];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct line *lines;
    size_t line_count;
    uint64_t seen_by_rank[COX_RANK_COUNT_MAX];
    struct death deaths[COX_RANK_COUNT_MAX];
    uint32_t death_count;
};

void on_line(void *context, uint32_t rank, bool is_stderr, const char *text);

void on_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how);

void group_init(struct group *g);

/* Starts a group that was initialized; without hooks it gets the ones above. */
int group_try_with(struct group *g, struct cox_supervise_options options, struct cox_error *err);
#define GROUP_TRY(g, err, ...) group_try_with(g, (struct cox_supervise_options){__VA_ARGS__}, err)

int group_try(struct group *g, uint32_t rank_count, const char *const *command,
              struct cox_error *err);

/* Every rank runs the script; R is its rank. */
void group_start(struct group *g, uint32_t rank_count, const char *script);

void group_free(struct group *g);

uint64_t group_deadline(void);

/* With the lock held. False: the deadline has passed. */
bool group_wait_change(struct group *g, uint64_t deadline_ns);

/* The first line of a rank that starts with the text; it stays where it is until group_free. */
const char *group_await_line(struct group *g, uint32_t rank, bool is_stderr, const char *start);

void group_await_seen(struct group *g, uint32_t rank, uint64_t more);

void group_await_death(struct group *g, uint32_t rank);

void group_await_end(struct group *g);

/* The text of the n-th line of a rank's stream, after all is over. */
const char *group_line(struct group *g, uint32_t rank, bool is_stderr, size_t n);

int count_fds(void);

extern int fds_before;

int setup(void **state);

int teardown(void **state);

/* Runs this program again with other arguments. */
pid_t helper_start(const char *mode, int *ret_read_fd);

int helper_wait(pid_t pid);

#define TEST(name) TEST_WITH(name, setup, teardown)

#endif
