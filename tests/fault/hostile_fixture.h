/*
 * hostile_fixture: real groups whose shared memory another process, or a rank, overwrites. What
 * must hold whatever was written: no process crashes, every request ends once and by its deadline,
 * a reply counts only for its own request, stop is bounded, and the next group of the same name
 * works.
 */
#ifndef COX_TESTS_HOSTILE_FIXTURE_H
#define COX_TESTS_HOSTILE_FIXTURE_H

#include "checked_worker.h"
#include "punctual.h"
#include "testing.h"

#define WORKS_MS (20 * DEADLINE_MS)
#define START_MS (500 * SLOWNESS)
#define FINALIZE_MS (300 * SLOWNESS)
#define TERM_MS (300 * SLOWNESS)
/* Of a stop. */
#define BOUND_MS (FINALIZE_MS + TERM_MS)

extern struct punctual requests, starts, stops;

/* All flips together. */
#define FLIPS_MS 12000
#define IN_FLIGHT_MAX 65536

/* ---- groups of checked workers ---- */

struct test_group *group_start(uint32_t rank_count, const char *name);

/* Stop ends in time, and no process had crashed. */
void group_end(struct test_group *group);

/* ---- requests that check their replies ---- */

enum verdict { OWN, SPOILT, FOREIGN };

/* Fails the test when it ends too late, with a system's error, or with the reply of another
 * request. Returns the status; *ret_verdict is of a reply with status 0. */
int call_checked(struct test_group *group, uint64_t timeout_ms, enum verdict *ret_verdict);

/* Works within WORKS_MS. What is left of before may end the first calls; and where a word of a
 * rank's line is spoilt, each call is COX_CORRUPT at once, until the rank has stored that word
 * again for a request that it has taken. */
bool group_works(struct test_group *group);

void expect_own(struct test_group *group);

/* ---- many requests in flight ---- */

struct flight {
    uint64_t number;
    uint64_t deadline_ns;
    struct load *load;
    unsigned completions;
};

struct load {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct flight flights[IN_FLIGHT_MAX];
    size_t submitted, completed;
    size_t late, foreign, twice, spoilt, good, failed, odd;
    /* of the first odd one */
    char text[512];
};

void load_init(struct load *load);

void load_deinit(struct load *load);

/* On the response thread. */
void on_completion(void *context, const struct cox_completion *completion);

/* Until so many have completed. Returns how many have when the time is up. */
size_t load_await_count(struct load *load, size_t count);

/* Returns what submit said. */
int load_submit(struct test_group *group, struct load *load);

#endif
