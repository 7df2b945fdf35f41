/* A long run: requests submitted from the handler as fast as they complete, then calls; whatever
 * grows is a leak. The argument is how many requests; a tenth of it are calls. */
#include "channel/base/thread.h"
#include "channel/base/tsan.h"
#include "testing.h"

#define RANK_COUNT 4
#define IN_FLIGHT 4
/* Resident memory of a process may still move a little: malloc's arenas, stacks that are touched
 * for the first time. */
#define SLACK_KIB 512

static long request_count = 100000;

struct usage {
    long resident_kib, fds, threads;
};

static struct usage usage_of(pid_t pid)
{
    struct usage usage = {.fds = (long)test_count_proc(pid, "fd"),
                          .threads = (long)test_count_proc(pid, "task")};
    char path[64], line[200];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "RssAnon: %ld", &usage.resident_kib); /* shared memory is reserved at start */
    fclose(file);
    return usage;
}

static void usage_of_all(struct test_group *g, struct usage *all)
{
    all[0] = usage_of(getpid());
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        all[1 + rank] = usage_of(cox_executor_pid(test_group_executor(g), rank));
}

struct soak {
    struct cox_executor *executor;
    pthread_mutex_t lock;
    pthread_cond_t done;
    long left, completed, wrong, submit_failures;
    uint64_t next_sequence;
};

static int soak_submit(struct soak *soak)
{
    char text[32];
    int length = snprintf(text, sizeof text, "echo %ld", soak->left);
    const struct cox_submit_options options = {
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_ALL,
        .deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS),
        .request_context = (void *)(intptr_t)soak->left,
    };
    return cox_executor_submit_opaque(soak->executor, text, (size_t)length, &options, NULL, NULL);
}

static void soak_handler(void *context, const struct cox_completion *completion)
{
    struct soak *soak = context;
    char expected[32];
    size_t length = (size_t)snprintf(expected, sizeof expected, "%" PRIdPTR,
                                     (intptr_t)completion->request_context);
    bool good = completion->status == 0 && completion->sequence == ++soak->next_sequence;
    for (uint32_t rank = 0; good && rank < completion->rank_count; rank++)
        good = completion->ranks[rank].outcome == COX_OUTCOME_OK &&
               completion->ranks[rank].size == length &&
               memcmp(completion->ranks[rank].bytes, expected, length) == 0;
    pthread_mutex_lock(&soak->lock);
    soak->wrong += !good;
    soak->completed++;
    /* A completion makes room for one more. */
    if (soak->left > 0) {
        soak->left--;
        soak->submit_failures += soak_submit(soak) != 0;
    }
    pthread_cond_signal(&soak->done);
    pthread_mutex_unlock(&soak->lock);
}

/* The window stays full by the handler alone. */
static void soak_requests(struct soak *soak, long count)
{
    pthread_mutex_lock(&soak->lock);
    soak->left = count;
    long target = soak->completed + count;
    for (int i = 0; i < IN_FLIGHT && soak->left > 0; i++) {
        soak->left--;
        soak->submit_failures += soak_submit(soak) != 0;
    }
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS * 4);
    const struct timespec until = {.tv_sec = (time_t)(deadline_ns / COX_NSEC_PER_SEC)};
    while (soak->completed < target && soak->submit_failures == 0 && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&soak->done, &soak->lock, &until);
    assert_int_equal(soak->completed, target);
    assert_int_equal(soak->submit_failures, 0);
    assert_int_equal(soak->wrong, 0);
    pthread_mutex_unlock(&soak->lock);
}

static void soak_calls(struct test_group *g, long count)
{
    for (long i = 0; i < count; i++) {
        char text[32];
        snprintf(text, sizeof text, "%ld", i);
        test_expect_echo(g, text);
    }
}

GROUP_TEST(m5_b29_nothing_grows_in_a_long_run, RANK_COUNT)
{
    struct soak soak = {.executor = test_group_executor(g), .lock = PTHREAD_MUTEX_INITIALIZER};
    cox_condition_init(&soak.done);
    assert_ok(cox_executor_set_handler(soak.executor, COX_CHANNEL_EXECUTE, soak_handler, &soak));
    struct usage before[1 + RANK_COUNT], after[1 + RANK_COUNT];
    long warm = request_count / 20 + 1;
    soak_requests(&soak, warm);
    soak.next_sequence += (uint64_t)warm / 10;
    soak_calls(g, warm / 10);
    usage_of_all(g, before);
    uint64_t begin_ns = cox_now_ns();
    soak_requests(&soak, request_count);
    uint64_t middle_ns = cox_now_ns();
    soak.next_sequence += (uint64_t)request_count / 10;
    soak_calls(g, request_count / 10);
    uint64_t end_ns = cox_now_ns();
    usage_of_all(g, after);
    print_message("%ld requests in %.2f s, %ld calls in %.2f s\n", request_count,
                  (double)(middle_ns - begin_ns) / 1e9, request_count / 10,
                  (double)(end_ns - middle_ns) / 1e9);
    for (size_t i = 0; i < 1 + RANK_COUNT; i++) {
        assert_int_equal(after[i].fds, before[i].fds);
        assert_int_equal(after[i].threads, before[i].threads);
#if !TEST_SANITIZED /* they keep what was freed */
        if (after[i].resident_kib > before[i].resident_kib + SLACK_KIB)
            fail_msg("process %zu grew from %ld to %ld KiB", i, before[i].resident_kib,
                     after[i].resident_kib);
#endif
    }
    const struct cox_channel_stats stats = test_stats(soak.executor, COX_CHANNEL_EXECUTE);
    assert_int_equal(stats.submitted, stats.completed);
    assert_int_equal(stats.failed, 0);
    assert_int_equal(stats.late_replies, 0);
    pthread_cond_destroy(&soak.done);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        request_count = atol(argv[1]);
    return test_run(NULL, NULL);
}
