/*
 * hand: a group that waits for workers, on a thread of its own, the workers that a test starts for
 * it, and orders to replace ranks.
 *
 * Threads: the test's alone. Ownership: struct hand and what it has are the caller's, until
 *   hand_free. Blocks: as testing.h. If the process dies: workers end with their group.
 */
#ifndef COX_TESTS_MULTI_HAND_H
#define COX_TESTS_MULTI_HAND_H

#include "testing.h"

#define HAND_LOG_SIZE 16384

struct hand {
    /* what else of it is set before hand_open stays */
    struct cox_executor_options options;
    char name[64], control_socket[160];
    struct test_group *group;
    struct cox_error err;
    int result;
    pthread_t thread;
    pthread_mutex_t lock;
    /* lines, oldest first */
    char log[HAND_LOG_SIZE];
    size_t log_used;
};

/* Workers can log on. */
void hand_open(struct hand *hand, uint32_t rank_count, enum cox_attach attach);
/* All did. */
void hand_complete(struct hand *hand);
void hand_free(struct hand *hand);
/* Waits until so many lines of the log have this in them. */
void hand_await_log(struct hand *hand, const char *text, size_t count);
size_t hand_log_count(struct hand *hand, const char *text);

/* A scripted worker that logs on, in a process group of its own; rank NULL: whichever is free. */
pid_t hand_worker(const struct hand *hand, const char *rank);
/* The same, which says its world size too (NULL: not). */
pid_t hand_worker_of(const struct hand *hand, const char *rank, const char *rank_count);
/* Its exit status, or 128 + signal. */
int hand_worker_end(pid_t pid);
/* Kills the rank's process, which ends as told; on return requests to the rank are refused. */
void hand_kill(struct hand *hand, uint32_t rank);

/* A replacement that waits, on a thread of its own. */
struct order {
    struct cox_executor *executor;
    /* UINT32_MAX: all */
    uint32_t rank;
    uint64_t deadline_ns;
    pthread_t thread;
    int result;
    struct cox_error err;
};
#define ORDER_ALL UINT32_MAX
/* On return the group waits for so many ranks more, `offered` of them in all since it was opened.
 */
void order_give(struct order *order, struct hand *hand, uint32_t rank, uint64_t deadline_ns,
                size_t offered);
int order_end(struct order *order);

/* A test over a named group, and then over a sealed one. */
#define ATTACH_TEST(name)                                                                          \
    static void name##_of(enum cox_attach attach);                                                 \
    TEST(name)                                                                                     \
    {                                                                                              \
        name##_of(COX_ATTACH_NAMED);                                                               \
        name##_of(COX_ATTACH_SEALED);                                                              \
    }                                                                                              \
    static void name##_of(enum cox_attach attach)

#endif
