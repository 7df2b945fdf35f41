/*
 * rank_group_sealed_test: a rank of a sealed group is killed while it zeroes its words for its next
 * incarnation in the rank group. It is in no incarnation then, and none of its words name it; the
 * other ranks, if not stopped, still get its death.
 */
#include "testing.h"

#include <coxswain/group.h>
#include <coxswain/worker.h>

#define RANK_COUNT 3
#define VICTIM 1
#define RESULTS "COX_TEST_RESULTS"
#define JOIN_MS 2000

/* Of each rank, how its join ended; shared by all. */
struct result {
    _Atomic bool there;
    struct cox_error err;
};

static struct result *results_map(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    COX_ASSERT(fd >= 0);
    void *map =
        mmap(NULL, RANK_COUNT * sizeof(struct result), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    COX_ASSERT(map != MAP_FAILED);
    cox_close_fd(&fd);
    return map;
}

/* ---- the worker ---- */

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *init_result, struct cox_error *err)
{
    struct result *result =
        results_map(getenv(RESULTS)) + ((const struct cox_worker_options *)context)->rank;
    struct cox_group *group = NULL;
    /* Nothing aborts the group, not even the coordinator that sees the death. */
    struct cox_group_options options = *request->group;
    (void)init_result;
    options.deadline_ns = cox_deadline_after_ms(JOIN_MS);
    int r = cox_group_join(&options, &group, err);
    result->err = *err;
    atomic_store(&result->there, true);
    cox_group_leave(group);
    return r;
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .init = on_init};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    return test_worker_main(argc, argv, &options, &callbacks, &options, NULL);
}

/* ---- the group ---- */

static void strike(const char *plan)
{
    struct cox_init_summary summary;
    char path[64];
    int fd = memfd_create("results", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, RANK_COUNT * sizeof(struct result)) == 0);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), fd);
    setenv(RESULTS, path, 1);
    setenv("COXSWAIN_FAULT", plan, 1);
    struct result *results = results_map(path);
    struct test_group *group =
        test_group_start(RANK_COUNT, START_WITH(.workers.command = test_own_command,
                                                .memory.attach = COX_ATTACH_SEALED));
    unsetenv("COXSWAIN_FAULT");
    const uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    assert_int_equal(
        cox_executor_init(test_group_executor(group), NULL, 0, deadline_ns, &summary, test_err()),
        COX_PEER_DEAD);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        AWAIT(!(rank != VICTIM && !atomic_load(&results[rank].there)));
        if (rank != VICTIM &&
            (results[rank].err.code != COX_PEER_DEAD || !strstr(results[rank].err.text, "rank 1 ")))
            fail_msg("%s: rank %" PRIu32 ": %d: %s", plan, rank, results[rank].err.code,
                     results[rank].err.text);
    }
    test_group_free(group);
    munmap(results, RANK_COUNT * sizeof *results);
    cox_close_fd(&fd);
}

TEST(b3_killed_between_two_incarnations_of_the_rank_group)
{
#if !COX_TESTING
    skip();
#endif
    strike("group.claimed:kill:1:1");
    strike("group.claimed:kill:1:2");
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc - 1, argv + 1);
    return test_run(NULL, NULL);
}
