/* matrix_points: which points are passed by one kind of group only, or by neither. */
#include "matrix.h"

#if COX_TESTING

enum kind {
    BOTH = 0,
    NAMED,
    SEALED,
    ELSEWHERE, /* by neither scenario: killed and stopped there by the test that the row names */
};

/* What is not here, both kinds pass. A row is checked both ways: one that says too little, or too
 * much, fails. */
static const struct row {
    enum cox_fault_point point;
    enum kind kind;
    const char *test;
} rows[] = {
    {COX_FAULT_CONTROL_LINKED, NAMED, NULL},
    {COX_FAULT_REGION_NAMED, NAMED, NULL},
    {COX_FAULT_REGION_CREATED, NAMED, NULL},
    {COX_FAULT_SEMAPHORE_FILLED, NAMED, NULL},
    {COX_FAULT_SEMAPHORE_LINKED, NAMED, NULL},
    {COX_FAULT_CHANNEL_CREATED, NAMED, NULL},
    {COX_FAULT_POSTED_REQUEST_PRODUCE, ELSEWHERE, "tests/legacy/native_test.py"},
    {COX_FAULT_POSTED_REQUEST_CONSUME, NAMED, NULL},
    {COX_FAULT_POSTED_RESPONSE_PRODUCE, NAMED, NULL},
    {COX_FAULT_POSTED_RESPONSE_CONSUME, NAMED, NULL},
    {COX_FAULT_WAIT_TOOK, NAMED, NULL},
    {COX_FAULT_TOKEN_TAKEN, NAMED, NULL},
    {COX_FAULT_SEMAPHORE_RENEWED, NAMED, NULL},
    {COX_FAULT_MEMORY_RENEWED, SEALED, NULL},
    {COX_FAULT_MEMORY_SEALED, SEALED, NULL},
    {COX_FAULT_WINDOW_RENEWED, NAMED, NULL},
    {COX_FAULT_WINDOWS_KEPT, NAMED, NULL},
    {COX_FAULT_ATTACH_ACCEPTED, ELSEWHERE, "tests/fault/replace_test.c"},
    {COX_FAULT_HINT_ARMED, SEALED, NULL},
    {COX_FAULT_HINT_COUNTED, SEALED, NULL},
    {COX_FAULT_GATE_WOKEN, SEALED, NULL},
    {COX_FAULT_LAUNCH_ASKED, ELSEWHERE, "tests/multi/fork_server_test.c"},
    {COX_FAULT_LAUNCH_ADOPTED, ELSEWHERE, "tests/multi/fork_server_test.c"},
    {COX_FAULT_LAUNCH_UNDONE, ELSEWHERE, "tests/multi/fork_server_test.c"},
    {COX_FAULT_EXCHANGE_MADE, ELSEWHERE, "tests/multi/tensor_test.c"},
    {COX_FAULT_EXCHANGE_WRITTEN, ELSEWHERE, "tests/multi/tensor_test.c"},
    {COX_FAULT_EXCHANGE_READ, ELSEWHERE, "tests/multi/tensor_test.c"},
    {COX_FAULT_LORA_READ, ELSEWHERE, "tests/multi/lora_test.c"},
    {COX_FAULT_LORA_LOADED, ELSEWHERE, "tests/multi/lora_test.c"},
    {COX_FAULT_LORA_REMOVED, ELSEWHERE, "tests/multi/lora_test.c"},
    {COX_FAULT_KV_MADE, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_KV_TAKEN, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_KV_GIVEN, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_KV_LOOKED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_KV_COPIED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_CACHE_EXPORTED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_LINK_ATTACHED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_LINK_DETACHED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_PULL_COPIED, ELSEWHERE, "tests/multi/pull_test.c"},
    {COX_FAULT_WEIGHTS_FILLED, ELSEWHERE, "tests/multi/weights_test.py"},
    {COX_FAULT_WEIGHTS_PUBLISHED, ELSEWHERE, "tests/multi/weights_test.py"},
    {COX_FAULT_WEIGHTS_RETIRED, ELSEWHERE, "tests/multi/weights_test.py"},
    {COX_FAULT_WEIGHTS_TAKEN, ELSEWHERE, "tests/multi/weights_test.py"},
    {COX_FAULT_WEIGHTS_SWITCHED, ELSEWHERE, "tests/multi/weights_test.py"},
    {COX_FAULT_RANK_OFFERED, ELSEWHERE, "tests/fault/replace_test.c"},
    {COX_FAULT_REGION_RENEWED, ELSEWHERE, "tests/fault/replace_test.c"},
    {COX_FAULT_QUEUE_FILLED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_LOCKED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_UNLOCKED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_DOMAIN_ENTERED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_DOMAIN_CLEARED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_POOL_ENTERED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_POOL_CLEARED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_POOL_CLOSED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PUBLISHER_JOINED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PUBLISHER_LEFT, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_SUBSCRIBER_JOINED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_SUBSCRIBER_LEFT, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_INTENDED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PINNED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_INTENT_CLEARED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_ANNOUNCED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_WAKING, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_WOKEN, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPY_FILLED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_ROW_FILLED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PUBLISHED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PUBLISH_DONE, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_SKIPPED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_TAKEN, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_TAKE_COUNTED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPYING, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPIED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPY_SHARED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPY_OVER, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COPY_UNPINNED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_ROW_ENDING, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_ROW_ENDED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_COUNTED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_FREE_PENDING, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_DRAINED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_REAPED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_REPAIRING, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_REPAIRED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_ARMED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_DISARMED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_QUEUE_PUBLISHER_AWAITED, ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {COX_FAULT_GROUP_FILLED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_LINKED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_LOCKED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_SWEPT, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_CLAIMED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_SAID, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_UNLINK_WAITS, ELSEWHERE, "tests/multi/rank_group_join_test.c"},
    {COX_FAULT_GROUP_UNLINKED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_FORMED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_VALUE, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_ARRIVED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_COUNTED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_WAKES, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_SLEEPS, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_WOKEN, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_DONE, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_ABORTED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_ALIGNED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_BOUND, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_OFFERED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_GROUP_ACCEPTED, ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {COX_FAULT_POOL_MADE, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_JOINED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_CLAIMED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_COUNTED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_USED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_UNCOUNTED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_CLOSING, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_CHECKED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_REOPENED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_FREED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_HINTED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_PAGES, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_RETAINED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_SLAB, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_QUEUE, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_PINNED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_UNPINNED, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_SWEEPING, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_SWEPT, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_POOL_LEFT, ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {COX_FAULT_DOMAIN_COMMITTED, ELSEWHERE, "tests/multi/domain_test.c"},
    {COX_FAULT_DOMAIN_RETURNED, ELSEWHERE, "tests/multi/domain_test.c"},
};

static const char *const kind_texts[] = {[BOTH] = "both kinds of groups",
                                         [NAMED] = "named groups only",
                                         [SEALED] = "sealed groups only",
                                         [ELSEWHERE] = "neither scenario"};

static const struct row *row_of(enum cox_fault_point point)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].point == point)
            return &rows[i];
    return NULL;
}

/* A plan of that test is about the point. */
static bool is_struck_elsewhere(const char *test, enum cox_fault_point point)
{
    char path[4096], line[512], name[80];
    snprintf(path, sizeof path, COX_TEST_SOURCE_DIR "/%s", test);
    int length = snprintf(name, sizeof name, "\"%s", cox_fault_name(point));
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *where = strstr(line, name);
        found = where && strchr("\":", where[length]) != NULL;
    }
    if (file)
        fclose(file);
    return found;
}

size_t matrix_points_check(const struct cox_fault_counts *counts)
{
    const enum kind own = test_attach() == COX_ATTACH_SEALED ? SEALED : NAMED;
    size_t wrong = 0;
    for (int p = 0; p < COX_FAULT_POINT_COUNT; p++) {
        const enum cox_fault_point point = (enum cox_fault_point)p;
        const struct row *row = row_of(point);
        const enum kind kind = row ? row->kind : BOTH;
        if (kind == ELSEWHERE && !is_struck_elsewhere(row->test, point)) {
            wrong++;
            print_error("%s does not strike at %s\n", row->test, cox_fault_name(point));
        }
        uint32_t passed = 0;
        for (int process = 0; process < MATRIX_PROCESS_COUNT; process++)
            passed += atomic_load(&counts->passed[point][process]);
        bool expected = kind == BOTH || kind == own;
        if (expected == (passed > 0))
            continue;
        wrong++;
        print_error("%s passes %s, which is of %s: %s\n", passed ? "this scenario" : "nobody",
                    cox_fault_name(point), kind_texts[kind],
                    passed ? "correct its row in matrix_points.c"
                           : "let the scenario of matrix_driver.c do it, or give it a row");
    }
    print_message("%d points\n", COX_FAULT_POINT_COUNT);
    return wrong;
}

#endif
