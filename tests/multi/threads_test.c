/* Threads: those of the host that are inside while the group stops, and those of the library that
 * take no signal of the host. */
#include "channel/base/tsan.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "testing.h"

/* ---- threads of the host ---- */

struct client {
    struct cox_executor *executor;
    int (*ask)(struct cox_executor *executor);
    /* until it is closed */
    bool again;
    _Atomic uint32_t replies;
    int result;
};

static uint64_t far_away(void)
{
    return cox_deadline_after_ms(10 * TEST_PATIENCE_MS);
}

static int ask_call(struct cox_executor *executor)
{
    return cox_executor_call_opaque(
        executor, "echo x", 6, SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = far_away()),
        NULL, NULL, test_err());
}

static int ask_link_status(struct cox_executor *executor)
{
    struct cox_link_status status = {0};
    int r = cox_executor_link_status(executor, far_away(), &status, test_err());
    if (r == 0)
        cox_link_status_deinit(&status);
    return r;
}

static int ask_recover(struct cox_executor *executor)
{
    struct cox_recover_result results[2];
    return cox_executor_recover(executor, COX_RECOVER_CLEAR, far_away(), results, test_err());
}

static int ask_init(struct cox_executor *executor)
{
    struct cox_init_summary summary;
    return cox_executor_init(executor, NULL, 0, far_away(), &summary, test_err());
}

static int ask_lora(struct cox_executor *executor)
{
    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    int32_t statuses[2];
    return test_lora(executor, &lora, far_away(), statuses, test_err());
}

static int ask_submit(struct cox_executor *executor)
{
    int r = cox_executor_submit_opaque(
        executor, "echo x", 6, SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = far_away()),
        NULL, test_err());
    return r == COX_FULL || r == COX_LATE ? 0 : r;
}

static int (*const asks[])(struct cox_executor *) = {
    ask_call,    ask_call, ask_link_status, ask_link_status, ask_recover,
    ask_recover, ask_lora, ask_init,        ask_submit,
};
#define ASK_COUNT (sizeof asks / sizeof asks[0])

static void *client_main(void *argument)
{
    struct client *client = argument;
    do {
        client->result = client->ask(client->executor);
        atomic_fetch_add(&client->replies, client->result == 0);
    } while (client->again && client->result == 0);
    return NULL;
}

static void clients_start(struct client *clients, pthread_t *threads, size_t count,
                          struct test_group *g, bool again)
{
    for (size_t i = 0; i < count; i++) {
        clients[i] =
            (struct client){.executor = test_group_executor(g), .ask = asks[i], .again = again};
        COX_ASSERT(pthread_create(&threads[i], NULL, client_main, &clients[i]) == 0);
    }
}

static void ignore(void *context, const struct cox_completion *completion)
{
    (void)context;
    (void)completion;
}

TEST(m9_a_stop_among_callers_closes_them_all)
{
    for (int round = 0; round < 10; round++) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = 1 + (uint32_t)round % 4));
        assert_int_equal(
            cox_executor_set_handler(test_group_executor(g), COX_CHANNEL_EXECUTE, ignore, NULL), 0);
        struct client clients[ASK_COUNT];
        pthread_t threads[ASK_COUNT];
        clients_start(clients, threads, ASK_COUNT, g, true);
        for (size_t i = 0; i < ASK_COUNT; i++)
            AWAIT(atomic_load(&clients[i].replies) >= 5);
        uint64_t begin = cox_now_ns();
        cox_executor_stop(test_group_executor(g));
        uint64_t took = cox_now_ns() - begin;
        for (size_t i = 0; i < ASK_COUNT; i++)
            pthread_join(threads[i], NULL);
        assert_true(took < TEST_PATIENCE_MS * COX_NSEC_PER_MSEC);
        for (size_t i = 0; i < ASK_COUNT; i++)
            assert_int_equal(clients[i].result, COX_CLOSED);
    }
}

/* Each of them waits for something else: the reply of a rank that sleeps, room behind it, the
 * gathering thread, the command before. If the executor is freed meanwhile, it lets them return
 * first. */
TEST(m9_a_free_lets_callers_out_first)
{
    const size_t count = ASK_COUNT - 1;
    for (uint32_t depth = 1; depth <= 4; depth += 3) {
        struct test_group *g = test_group_start(
            2, START_WITH(.depth = depth, .times.finalize_ms = 200, .times.term_ms = 500));
        test_expect_echo(g, "x");
        test_stop_process(cox_executor_pid(test_group_executor(g), 1));
        struct client clients[ASK_COUNT];
        pthread_t threads[ASK_COUNT];
        clients_start(clients, threads, count, g, false);
        /* One of the two recovery commands is inside a call as well, and so is the init. */
        _Atomic uint32_t *callers = &test_group_executor(g)->callers;
        AWAIT(atomic_load(callers) >= count + 2);
        uint64_t begin = cox_now_ns();
        test_group_free(g);
        uint64_t took = cox_now_ns() - begin;
        for (size_t i = 0; i < count; i++)
            pthread_join(threads[i], NULL);
        assert_true(took < TEST_PATIENCE_MS * COX_NSEC_PER_MSEC);
        for (size_t i = 0; i < count; i++)
            assert_int_equal(clients[i].result, COX_CLOSED);
    }
}

struct stay {
    struct cox_executor *executor;
    sem_t inside, freed;
    int result;
    bool stopped, left_alone;
};

/* Long enough for a free that does not wait; with ranks that leave at once it takes some
 * milliseconds. */
#define STAY_MS 300

/* Returns some time after another thread has begun to free the group. */
static void stay_visit(void *context, const struct cox_completion *completion)
{
    struct stay *stay = context;
    (void)completion;
    sem_post(&stay->inside);
    uint64_t deadline_ns = test_patience();
    while (!stay->stopped && cox_now_ns() < deadline_ns) {
        stay->stopped = atomic_load(&stay->executor->stopping);
        sched_yield();
    }
    const uint64_t until_ns = cox_deadline_after_ms(STAY_MS);
    while (!stay->left_alone && cox_now_ns() < until_ns) {
        stay->left_alone = sem_trywait(&stay->freed) == 0;
        sched_yield();
    }
}

static void *stay_main(void *argument)
{
    struct stay *stay = argument;
    Coxswain__PDLinkStatusRequest body = COXSWAIN__PDLINK_STATUS_REQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__PD_LINK_STATUS_QUERY;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_STATUS_REQUEST;
    request.pd_link_status_request = &body;
    stay->result = cox_executor_call(
        stay->executor, &request, SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = far_away()),
        stay_visit, stay, test_err());
    return NULL;
}

TEST(m9_a_free_waits_for_a_handler)
{
    struct test_group *g = test_group_start(2, NULL);
    struct stay stay = {.executor = test_group_executor(g), .result = -1};
    sem_init(&stay.inside, 0, 0);
    sem_init(&stay.freed, 0, 0);
    pthread_t thread = test_thread(stay_main, &stay);
    assert_true(test_sem_await(&stay.inside));
    test_group_free(g);
    sem_post(&stay.freed);
    pthread_join(thread, NULL);
    assert_true(stay.stopped);
    assert_false(stay.left_alone);
    assert_int_equal(stay.result, 0); /* every rank had replied */
    sem_destroy(&stay.inside);
    sem_destroy(&stay.freed);
}

/* ---- threads of the library ---- */

/* Of the C library, which no mask holds, those that cannot be blocked, and those of faults. */
#define BIT(number) (UINT64_C(1) << ((number)-1))
#define FAULTS                                                                                     \
    (BIT(SIGSEGV) | BIT(SIGBUS) | BIT(SIGFPE) | BIT(SIGILL) | BIT(SIGTRAP) | BIT(SIGSYS) |         \
     BIT(SIGABRT))
#define NEVER_BLOCKED (BIT(SIGKILL) | BIT(SIGSTOP) | UINT64_C(3) << (32 - 1) | FAULTS)
#define TASK_COUNT_MAX 64

/* The threads of a process but its first, as text. */
static size_t tasks_of(pid_t pid, pid_t *tasks)
{
    char path[64];
    size_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL && count < TASK_COUNT_MAX;)
        if (atoi(entry->d_name) > 0 && atoi(entry->d_name) != pid)
            tasks[count++] = atoi(entry->d_name);
    closedir(dir);
    return count;
}

static uint64_t blocked_by(pid_t pid, pid_t task)
{
    char path[64], line[256];
    uint64_t blocked = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/status", pid, task);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "SigBlk: %" SCNx64, &blocked);
    fclose(file);
    return blocked;
}

static bool is_among(pid_t task, const pid_t *tasks, size_t count)
{
    bool among = false;
    for (size_t i = 0; i < count; i++)
        among = among || tasks[i] == task;
    return among;
}

/* Of the threads that are there beside those of before: they are deaf, except that urged_count of
 * them take SIGURG, by which a callback that hangs is interrupted. */
static void expect_deaf(pid_t pid, const pid_t *before, size_t before_count, size_t count_min,
                        size_t urged_count)
{
    pid_t tasks[TASK_COUNT_MAX];
    uint64_t deadline_ns = test_patience();
    size_t count = tasks_of(pid, tasks), seen = 0, urged = 0;
    /* A worker that replies on one channel may still be starting the threads of the others. */
    while (count < before_count + count_min && cox_now_ns() < deadline_ns) {
        sched_yield();
        count = tasks_of(pid, tasks);
    }
    for (size_t i = 0; i < count; i++) {
        if (is_among(tasks[i], before, before_count))
            continue;
        seen++;
        uint64_t blocked = blocked_by(pid, tasks[i]);
        /* One that is being started has everything blocked until it begins. */
        while ((blocked & FAULTS) && cox_now_ns() < deadline_ns) {
            sched_yield();
            blocked = blocked_by(pid, tasks[i]);
        }
        const bool takes_urg = urged < urged_count && !(blocked & BIT(SIGURG));
        urged += takes_urg;
        blocked |= takes_urg ? BIT(SIGURG) : 0;
        if ((blocked | NEVER_BLOCKED) != UINT64_MAX || (blocked & FAULTS))
            fail_msg("thread %d of %d blocks only %016" PRIx64, tasks[i], pid, blocked);
    }
    assert_true(seen >= count_min);
}

TEST(m5_threads_of_the_library_take_no_signals)
{
#ifdef COX_TSAN
    skip(); /* its runtime has threads and masks of its own */
#endif
    test_needs_processes();
    pid_t before[TASK_COUNT_MAX];
    size_t before_count = tasks_of(getpid(), before);
    sigset_t mask_before, mask_after;
    pthread_sigmask(SIG_SETMASK, NULL, &mask_before);
    OWN_GROUP *g = test_group_start(2, NULL);
    test_expect_echo(g, "x");
    pthread_sigmask(SIG_SETMASK, NULL, &mask_after); /* the host's own is as it was */
    for (int number = 1; number < NSIG; number++)
        assert_int_equal(sigismember(&mask_before, number), sigismember(&mask_after, number));
    /* The supervisor, the error thread, two that gather. */
    expect_deaf(getpid(), before, before_count, 4, 0);
    /* A channel thread per channel; those of execute and transfer can be interrupted. */
    for (uint32_t rank = 0; rank < 2; rank++)
        expect_deaf(cox_executor_pid(test_group_executor(g), rank), NULL, 0, COX_TWO_WAY_COUNT, 2);
}
