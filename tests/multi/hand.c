#include "hand.h"

extern char **environ;

/* ---- the group ---- */

static void log_keep(void *context, int level, const char *text)
{
    struct hand *hand = context;
    pthread_mutex_lock(&hand->lock);
    size_t room = sizeof hand->log - hand->log_used;
    int length = snprintf(hand->log + hand->log_used, room, "%d %s\n", level, text);
    if ((size_t)length < room)
        hand->log_used += (size_t)length;
    pthread_mutex_unlock(&hand->lock);
}

static void *start_main(void *argument)
{
    struct hand *hand = argument;
    hand->result = test_group_try(&hand->options, &hand->group, &hand->err);
    return NULL;
}

void hand_open(struct hand *hand, uint32_t rank_count, enum cox_attach attach)
{
    struct stat st;
    hand->result = -1;
    pthread_mutex_init(&hand->lock, NULL);
    hand->options.size = sizeof hand->options;
    hand->options.name = test_unique_name(hand->name);
    hand->options.rank_count = rank_count;
    hand->options.memory.attach = attach;
    hand->options.workers.external = true;
    if (!hand->options.times.start_timeout_ms)
        hand->options.times.start_timeout_ms = TEST_PATIENCE_MS;
    hand->options.hooks.log = (struct cox_log){log_keep, hand};
    if (!hand->options.times.finalize_ms)
        hand->options.times.finalize_ms = TEST_PATIENCE_MS;
    snprintf(hand->control_socket, sizeof hand->control_socket, "%s/%s.sock", test_runtime_dir(),
             hand->name);
    hand->thread = test_thread(start_main, hand);
    AWAIT(stat(hand->control_socket, &st) >= 0);
}

void hand_complete(struct hand *hand)
{
    pthread_join(hand->thread, NULL);
    if (hand->result)
        fail_msg("%d: %s", hand->result, hand->err.text);
}

void hand_free(struct hand *hand)
{
    hand->group = test_group_free(hand->group);
    pthread_mutex_destroy(&hand->lock);
}

size_t hand_log_count(struct hand *hand, const char *text)
{
    size_t count = 0;
    pthread_mutex_lock(&hand->lock);
    for (const char *at = hand->log; (at = strstr(at, text)) != NULL; at++)
        count++;
    pthread_mutex_unlock(&hand->lock);
    return count;
}

void hand_await_log(struct hand *hand, const char *text, size_t count)
{
    const uint64_t deadline_ns = test_patience();
    for (; hand_log_count(hand, text) < count; sched_yield())
        if (cox_now_ns() >= deadline_ns)
            fail_msg("not %zu times '%s' in the log: %s", count, text, hand->log);
}

/* ---- workers ---- */

pid_t hand_worker_of(const struct hand *hand, const char *rank, const char *rank_count)
{
    pid_t pid;
    posix_spawnattr_t own_group;
    char *argv[8] = {"worker", "--socket", (char *)(uintptr_t)hand->control_socket};
    int argc = 3;
    if (rank)
        argv[argc++] = "--local_rank", argv[argc++] = (char *)(uintptr_t)rank;
    if (rank_count)
        argv[argc++] = "--local_world_size", argv[argc++] = (char *)(uintptr_t)rank_count;
    posix_spawnattr_init(&own_group);
    posix_spawnattr_setflags(&own_group, POSIX_SPAWN_SETPGROUP);
    assert_int_equal(posix_spawn(&pid, test_worker_program(), NULL, &own_group, argv, environ), 0);
    posix_spawnattr_destroy(&own_group);
    return pid;
}

pid_t hand_worker(const struct hand *hand, const char *rank)
{
    return hand_worker_of(hand, rank, NULL);
}

int hand_worker_end(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void hand_kill(struct hand *hand, uint32_t rank)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    pid_t pid = cox_executor_pid(test_group_executor(hand->group), rank);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(hand_worker_end(pid), 128 + SIGKILL);
    int r;
    while ((r = test_call_how(hand->group, NULL, &how, "echo still there?")) == 0)
        continue;
    assert_int_equal(r, COX_PEER_DEAD);
}

/* ---- orders ---- */

static void *order_main(void *argument)
{
    struct order *order = argument;
    order->result =
        cox_executor_restart(order->executor, order->rank, order->deadline_ns, &order->err);
    return NULL;
}

void order_give(struct order *order, struct hand *hand, uint32_t rank, uint64_t deadline_ns,
                size_t offered)
{
    *order = (struct order){.executor = test_group_executor(hand->group),
                            .rank = rank,
                            .deadline_ns = deadline_ns,
                            .result = -1};
    order->thread = test_thread(order_main, order);
    hand_await_log(hand, "waits for a process to attach", offered);
}

int order_end(struct order *order)
{
    pthread_join(order->thread, NULL);
    return order->result;
}
