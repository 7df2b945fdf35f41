/* matrix_points: which points are passed by one kind of group only, or by neither. */
#include "matrix.h"

#if COX_TESTING

enum kind {
    BOTH = 0,
    NAMED,
    SEALED,
    ELSEWHERE, /* by neither scenario: killed and stopped there by the test that the row names */
};

/* What is not here, both kinds pass. A row is checked both ways: one that says too little, or too much, fails. */
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
    {COX_FAULT_POSTED_REQUEST_PRODUCE, NAMED, NULL},
    {COX_FAULT_POSTED_REQUEST_CONSUME, NAMED, NULL},
    {COX_FAULT_POSTED_RESPONSE_PRODUCE, NAMED, NULL},
    {COX_FAULT_POSTED_RESPONSE_CONSUME, NAMED, NULL},
    {COX_FAULT_WAIT_TOOK, NAMED, NULL},
    {COX_FAULT_TOKEN_TAKEN, NAMED, NULL},
    {COX_FAULT_SEMAPHORE_RENEWED, NAMED, NULL},
    {COX_FAULT_MEMORY_CREATED, SEALED, NULL},
    {COX_FAULT_MEMORY_RENEWED, SEALED, NULL},
    {COX_FAULT_ATTACH_WELCOMED, SEALED, NULL},
    {COX_FAULT_SOCKET_SENT, SEALED, NULL},
    {COX_FAULT_DOOR_ASKED, SEALED, NULL},
    {COX_FAULT_DOOR_WELCOMED, SEALED, NULL},
    {COX_FAULT_HINT_ARMED, SEALED, NULL},
    {COX_FAULT_HINT_COUNTED, SEALED, NULL},
    {COX_FAULT_BELL_RUNG, SEALED, NULL},
};

static const char *const kind_texts[] = {[BOTH] = "both kinds of groups",
                                         [NAMED] = "named groups only",
                                         [SEALED] = "sealed groups only",
                                         [ELSEWHERE] = "neither scenario"};

static enum kind kind_of(enum cox_fault_point point)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].point == point)
            return rows[i].kind;
    return BOTH;
}

size_t matrix_points_check(const struct cox_fault_counts *counts)
{
    const enum kind own = test_attach() == COX_ATTACH_SEALED ? SEALED : NAMED;
    size_t wrong = 0;
    for (int p = 0; p < COX_FAULT_POINT_COUNT; p++) {
        const enum cox_fault_point point = (enum cox_fault_point)p;
        const enum kind kind = kind_of(point);
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
