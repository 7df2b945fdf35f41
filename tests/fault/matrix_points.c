/* matrix_points: which points are passed by one kind of group only, or by neither. */
#include "matrix.h"

#if COX_TESTING

enum kind {
    BOTH = 0,
    NAMED,
    SEALED,
    ELSEWHERE, /* by neither scenario: killed and stopped there by the test that the row names */
};

/* What is not here, both kinds pass. The first row that fits counts, and is checked both ways: one
 * that says too little, or too much, fails. */
static const struct row {
    /* a point, or with a dot at its end all that begin so */
    const char *point;
    enum kind kind;
    const char *test;
} rows[] = {
    {"control.linked", NAMED, NULL},
    {"region.renewed", ELSEWHERE, "tests/fault/replace_test.c"},
    {"region.", NAMED, NULL},
    {"semaphore.", NAMED, NULL},
    {"channel.created", NAMED, NULL},
    {"memory.sealed", SEALED, NULL},
    {"memory.renewed", SEALED, NULL},
    {"launch.asked", ELSEWHERE, "tests/multi/fork_server_test.c"},
    {"launch.adopted", ELSEWHERE, "tests/multi/fork_server_test.c"},
    {"launch.undone", ELSEWHERE, "tests/multi/fork_server_test.c"},
    {"attach.accepted", ELSEWHERE, "tests/fault/replace_test.c"},
    {"rank.offered", ELSEWHERE, "tests/fault/replace_test.c"},
    {"gate.woken", SEALED, NULL},
    {"hint.", SEALED, NULL},
    {"posted.request_produce", ELSEWHERE, "tests/legacy/native_test.py"},
    {"posted.", NAMED, NULL},
    {"wait.took", NAMED, NULL},
    {"token.taken", NAMED, NULL},
    {"window.renewed", NAMED, NULL},
    {"windows.kept", NAMED, NULL},
    {"exchange.", ELSEWHERE, "tests/multi/tensor_test.c"},
    {"lora.", ELSEWHERE, "tests/multi/lora_test.c"},
    {"weights.", ELSEWHERE, "tests/multi/weights_test.py"},
    {"kv.", ELSEWHERE, "tests/multi/pull_test.c"},
    {"cache.", ELSEWHERE, "tests/multi/pull_test.c"},
    {"link.", ELSEWHERE, "tests/multi/pull_test.c"},
    {"pull.", ELSEWHERE, "tests/multi/pull_test.c"},
    {"group.left", BOTH, NULL},
    {"group.unlink_waits", ELSEWHERE, "tests/multi/rank_group_join_test.c"},
    {"group.", ELSEWHERE, "tests/fault/rank_group_kill_test.c"},
    {"queue.", ELSEWHERE, "tests/fault/queue_kill_test.c"},
    {"pool.", ELSEWHERE, "tests/fault/pool_kill_test.c"},
    {"domain.", ELSEWHERE, "tests/multi/domain_test.c"},
};

static const char *const kind_texts[] = {[BOTH] = "both kinds of groups",
                                         [NAMED] = "named groups only",
                                         [SEALED] = "sealed groups only",
                                         [ELSEWHERE] = "neither scenario"};

static const struct row *row_of(const char *point)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const size_t length = strlen(rows[i].point);
        const bool all = rows[i].point[length - 1] == '.';
        if (strncmp(point, rows[i].point, length) == 0 && (all || !point[length]))
            return &rows[i];
    }
    return NULL;
}

/* A plan of that test is about the point, or one after the other about all that begin so. */
static bool is_struck_elsewhere(const struct row *row, const char *point)
{
    char path[4096], line[512], name[80], all[80];
    snprintf(path, sizeof path, COX_TEST_SOURCE_DIR "/%s", row->test);
    int length = snprintf(name, sizeof name, "\"%s", point);
    snprintf(all, sizeof all, "\"%s\"", row->point);
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *where = strstr(line, name);
        found = (where && strchr("\":", where[length]) != NULL) || strstr(line, all);
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
        const char *point = cox_fault_name((enum cox_fault_point)p);
        const struct row *row = row_of(point);
        const enum kind kind = row ? row->kind : BOTH;
        if (kind == ELSEWHERE && !is_struck_elsewhere(row, point)) {
            wrong++;
            print_error("%s does not strike at %s\n", row->test, point);
        }
        uint32_t passed = 0;
        for (int process = 0; process < MATRIX_PROCESS_COUNT; process++)
            passed += atomic_load(&counts->passed[p][process]);
        bool expected = kind == BOTH || kind == own;
        if (expected == (passed > 0))
            continue;
        wrong++;
        print_error("%s passes %s, which is of %s: %s\n", passed ? "this scenario" : "nobody",
                    point, kind_texts[kind],
                    passed ? "correct its row in matrix_points.c"
                           : "let the scenario of matrix_driver.c do it, or give it a row");
    }
    print_message("%d points\n", COX_FAULT_POINT_COUNT);
    return wrong;
}

#endif
