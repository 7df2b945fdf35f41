/*
 * testing: what tests with real ranks share: groups of scripted workers (processes, or threads:
 * ranks.h), completions that can be waited for, pipes that hold workers, and a look at what was
 * left behind.
 *
 * Processes and threads: everything on the test's thread. Hooks and handlers record on their own
 *   threads and never assert (cmocka jumps).
 * Ownership: groups and pipes belong to the library until freed; teardown frees what a failed test
 *   left.
 * Blocks: every await until it happened or TEST_PATIENCE_MS have passed, which fails the test. If
 *   the test dies: the kernel kills the workers; pipes stay in the temporary folder.
 */
#ifndef COX_TESTS_LIB_TESTING_H
#define COX_TESTS_LIB_TESTING_H

#include "coordinator/executor/core.h"
#include "tests/lib/test.h"

#include <coxswain/executor.h>
#include <coxswain/requests.h>

/* How long a test waits before it calls something lost; generous, sanitizers on a busy machine are
 * slow. */
#define TEST_PATIENCE_MS 30000
/* The deadline of one that starts to wait now. */
uint64_t test_patience(void);
/* In a loop that waits for something: yields, and fails the test past the deadline. */
void test_yield(uint64_t deadline_ns);
/* False: the deadline passed. Needs no test's thread. */
bool test_sem_await(sem_t *semaphore);
/* Per request, where a test does not care. */
#define TEST_ALL_RANKS UINT64_C(0)

/* cmocka fixtures: teardown fails when the test left fds, children, threads, or names in /dev/shm.
 */
int test_setup(void **state);
int test_teardown(void **state);
#define TEST(name) TEST_WITH(name, test_setup, test_teardown)

/* ---- what a completion said, copied ---- */

struct test_rank {
    enum cox_outcome outcome;
    int32_t code;
    /* never NULL */
    char *text;
    pid_t pid;
    int signal;
    int exit_status;
    bool taken;
    uint64_t silent_ns;
    bool has_payload;
    /* size bytes and a NUL; never NULL */
    char *bytes;
    size_t size;
};

struct test_completion {
    uint64_t sequence;
    enum cox_channel_id channel;
    uint32_t type;
    int status;
    /* never NULL */
    char *text;
    uint32_t rank_count;
    struct test_rank *ranks;
    /* RANK0: whose; -1: none */
    int payload_rank;
    void *request_context;
    uint64_t submitted_ns, published_ns, completed_ns;
    /* of a step's payload; ids: where the coordinator is MindIE-LLM's */
    int32_t *tokens;
    int64_t *ids;
    float *logprobs;
    size_t token_count, logprob_count;
};
void test_completion_copy(struct test_completion *copy, const struct cox_completion *completion);
void test_completion_deinit(struct test_completion *completion); /* idempotent */
/* One that goes with its scope: OWN_COMPLETION c = {0}; */
#define OWN_COMPLETION _cox_cleanup_(test_completion_deinit) struct test_completion

/* ---- groups ---- */

struct test_group;

/* rank_count scripted workers; base (may be NULL) gives everything else but command and hooks.
 * Fails the test when the group does not start. */
struct test_group *test_group_start(uint32_t rank_count, const struct cox_executor_options *base);
/* The same, for starts that are to fail: options->command NULL means the scripted worker.
 * *ret_group is set when 0 is returned. */
int test_group_try(const struct cox_executor_options *options, struct test_group **ret_group,
                   struct cox_error *err);
struct test_group *test_group_free(struct test_group *group); /* stops; returns NULL */
/* One that goes with its scope: OWN_GROUP *g = test_group_start(2, NULL); */
#define OWN_GROUP __attribute__((unused)) _cox_cleanup_(test_group_end) struct test_group
static inline void test_group_end(struct test_group **own)
{
    *own = test_group_free(*own);
}
struct cox_executor *test_group_executor(struct test_group *group);
/* Parts of its status. On any thread. */
struct cox_channel_stats test_stats(struct cox_executor *executor, enum cox_channel_id channel);
size_t test_request_size_max(struct cox_executor *executor, enum cox_channel_id channel);
/* As cox_executor_lora_results, with a status per rank. On any thread. */
int test_lora(struct cox_executor *executor, const struct Coxswain__LoraOperationRequest *request,
              uint64_t deadline_ns, int32_t *ret_statuses, struct cox_error *err);
const char *test_worker_program(void);
/* This program, and the command of one that is its own worker. */
extern char test_program[4096];
extern const char *const test_own_command[3]; /* test_program, "worker", NULL */

/* The main of a program that is a worker: serves, and prints what has ended it. ret_worker (may be
 * NULL) is set meanwhile. Returns the exit status. */
struct cox_worker;
struct cox_worker_options;
struct cox_worker_callbacks;
int test_worker_main(int argc, char **argv, struct cox_worker_options *options,
                     const struct cox_worker_callbacks *callbacks, void *context,
                     struct cox_worker **ret_worker);

/* A test over a group `g` of scripted workers, with its `executor`. */
#define GROUP_TEST(name, rank_count)                                                               \
    static void name##_in(struct test_group *g, struct cox_executor *executor);                    \
    TEST(name)                                                                                     \
    {                                                                                              \
        struct test_group *own = test_group_start(rank_count, NULL);                               \
        name##_in(own, test_group_executor(own));                                                  \
        test_group_free(own);                                                                      \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct test_group *g,                            \
                          __attribute__((unused)) struct cox_executor *executor)

/* The same, with members of its struct cox_executor_options. */
#define GROUP_TEST_WITH(name, rank_count, ...)                                                     \
    static void name##_in(struct test_group *g, struct cox_executor *executor);                    \
    TEST(name)                                                                                     \
    {                                                                                              \
        const struct cox_executor_options options = {.size = sizeof options, __VA_ARGS__};         \
        struct test_group *own = test_group_start(rank_count, &options);                           \
        name##_in(own, test_group_executor(own));                                                  \
        test_group_free(own);                                                                      \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct test_group *g,                            \
                          __attribute__((unused)) struct cox_executor *executor)

/* The same over groups of 1, 2, 4 and 8, one after the other; n is how many. */
#define GROUPS_TEST(name)                                                                          \
    static void name##_in(struct test_group *g, struct cox_executor *executor, uint32_t n);        \
    TEST(name)                                                                                     \
    {                                                                                              \
        for (uint32_t rank_count = 1; rank_count <= 8; rank_count *= 2) {                          \
            struct test_group *own = test_group_start(rank_count, NULL);                           \
            name##_in(own, test_group_executor(own), rank_count);                                  \
            test_group_free(own);                                                                  \
        }                                                                                          \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct test_group *g,                            \
                          __attribute__((unused)) struct cox_executor *executor,                   \
                          __attribute__((unused)) uint32_t n)

/* Lines that workers wrote to stdout or stderr. rank -1: any. Waits until `count` of them start
 * with text. */
void test_await_lines(struct test_group *group, int rank, const char *text, size_t count);
size_t test_count_lines(struct test_group *group, int rank, const char *text);
void test_await_faults(struct test_group *group, size_t count);
/* "R text"; the i-th fault in order of arrival. Lent until the group is freed. */
const char *test_fault(struct test_group *group, size_t i);
void test_await_death(struct test_group *group, uint32_t rank);
/* As the death hook got it. */
const char *test_death_text(struct test_group *group, uint32_t rank);

/* ---- ranks, one by one ---- */

pid_t test_pid(struct test_group *group, uint32_t rank);
/* On return the death is in the shared state: requests that ask the rank are refused, and it can be
 * replaced. */
void test_kill_rank(struct test_group *group, uint32_t rank);
void test_restart_rank(struct test_group *group, uint32_t rank);
/* An init without configuration, which has to succeed. */
void test_init(struct test_group *group);
/* As cox_executor_recover with patience; results may be NULL. */
int test_recover(struct test_group *group, enum cox_recover_command command,
                 struct cox_recover_result *results, struct cox_error *err);
/* What cox_executor_read_status has of it. */
struct cox_rank_status test_rank_status(struct cox_executor *executor, uint32_t rank);
/* How many commands the process was asked so far, this one included: tells an old process from a
 * new one. */
unsigned test_served(struct test_group *group, uint32_t rank);

/* ---- requests ---- */

struct test_how {
    enum cox_gather gather;
    /* bits; TEST_ALL_RANKS: all */
    uint64_t ranks;
    /* 0: TEST_PATIENCE_MS */
    uint64_t timeout_ms;
    void *context;
    /* a second completion follows when late ranks have replied */
    bool report_late;
};
extern const struct test_how test_all; /* from all ranks, with nothing else */

/* Options of a call or a start, by the members that are not 0, where they are used once. */
#define SUBMIT_WITH(...)                                                                           \
    &(const struct cox_submit_options)                                                             \
    {                                                                                              \
        .size = sizeof(struct cox_submit_options), __VA_ARGS__                                     \
    }
#define START_WITH(...)                                                                            \
    &(const struct cox_executor_options)                                                           \
    {                                                                                              \
        .size = sizeof(struct cox_executor_options), __VA_ARGS__                                   \
    }

/* Calls with a command of the scripted worker; gather ALL from all ranks. Returns what call
 * returns; *ret_completion (may be NULL; valid before, or zero) is filled in any case, and emptied
 * when there was no completion. */
int test_call(struct test_group *group, struct test_completion *ret_completion, const char *format,
              ...) __attribute__((format(printf, 3, 4)));
int test_call_how(struct test_group *group, struct test_completion *ret_completion,
                  const struct test_how *how, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* A call that is published and ends at its deadline: in a few milliseconds a busy machine may get
 * to neither. */
void test_call_in_vain(struct test_group *group, struct test_completion *ret_completion,
                       const struct test_how *how, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
int test_call_bytes(struct test_group *group, struct test_completion *ret_completion,
                    const struct test_how *how, const void *bytes, size_t size);
/* The text of the last failure of the functions here. */
const char *test_error_text(const struct test_group *group);
/* Fails the test unless the call returned 0 and every asked rank replied with this text. */
void test_expect_echo(struct test_group *group, const char *text);

/* Submits; completions are collected by a handler that the first submit registers. */
int test_submit(struct test_group *group, const struct test_how *how, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The n-th completion (from 0) in order of arrival, waited for; lent until the group is freed. */
const struct test_completion *test_await(struct test_group *group, size_t n);
size_t test_completion_count(struct test_group *group);
/* The handler of test_submit, for tests that register it on other channels; context is the group.
 */
void test_handler(void *context, const struct cox_completion *completion);
/* Submits again while there is no room (FULL, LATE), or the deadline comes before it is published
 * (TIMEOUT: of a few milliseconds, on a busy machine). Returns the first other result. */
int test_submit_persist(struct test_group *group, const struct test_how *how, const char *text);
/* What needs ranks to do something before a deadline: with a longer one if they were not in time,
 * on a busy machine. in_time: true if they were. */
void test_with_longer_deadlines(bool (*in_time)(uint64_t timeout_ms));

/* ---- pipes that hold a worker ---- */

/* A named pipe; a worker that opens it blocks until released. */
struct test_pipe;
struct test_pipe *test_pipe_new(void);
const char *test_pipe_path(const struct test_pipe *pipe);
void test_pipe_release(struct test_pipe *pipe, size_t count); /* that many readers go on */

/* ---- processes ---- */

/* Runs this program again with one argument and waits. Returns its exit status, or 128 + signal. */
int test_helper_run(const char *mode);
/* The same in two steps; its standard input and output are pipes. */
struct test_helper {
    pid_t pid;
    /* write to it, read from it */
    int in, out;
};
struct test_helper test_helper_start(const char *mode, const char *argument);
int test_helper_wait(struct test_helper *helper);

/* Skips a test that is about processes themselves where ranks are threads (ranks.h). */
void test_needs_processes(void);
/* Skips a test that is about names in /dev/shm where groups have none. */
void test_needs_names(void);
/* How groups are attached to where a test does not say: COXSWAIN_TEST_ATTACH is sealed, or not set.
 */
enum cox_attach test_attach(void);
/* Where the sockets of this program's groups are; empty after every test. */
const char *test_runtime_dir(void);
/* A coordinator was killed: its socket is still there, without a listener. Asserts that there were
 * `count` of these, and removes them. */
void test_sweep_sockets(uint32_t count);
/* Stops a process; on return none of its threads runs any more (the signal alone says nothing of
 * that). Needs processes. */
void test_stop_process(pid_t pid);

/* Names in /dev/shm that contain the text. */
size_t test_count_names(const char *text);
size_t test_count_fds(void); /* open in this process */
/* Of any process: entries of the folder /proc/PID/WHAT; lines of its maps that contain the text. */
size_t test_count_proc(pid_t pid, const char *what);
size_t test_count_maps(pid_t pid, const char *text);
/* On return the thread of the group's control socket has closed all fds of earlier connections: a
 * rank may already be in the group before the control socket has closed what it sent to the rank.
 */
void test_await_socket(struct test_group *group);
/* What the names of this process start with: pid and time. The pid alone does not do: a killed test
 * leaves its names, and its pid is used again. */
const char *test_name_prefix(void);
/* A name for a group that no other test has: test_name_prefix() and a number. */
const char *test_unique_name(char buffer[64]);

#endif
