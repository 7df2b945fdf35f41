/*
 * punctual: whether what is over its time ends soon after it.
 *
 * One end that is HANG_MS late fails at once. One that is SLACK_MS late may be the machine's: a few
 * of them pass, one in ten does not, since a wait of the product is in most of them.
 *
 * Threads: any may note; check when all is over.
 */
#ifndef COX_TESTS_PUNCTUAL_H
#define COX_TESTS_PUNCTUAL_H

#include <coxswain/base.h>

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

/* Of this build. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWNESS 5
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOWNESS 5
#endif
#endif
#ifndef SLOWNESS
#define SLOWNESS 1
#endif

/* How much later than its deadline a request may end: most of them, and each. */
#define SLACK_MS (1000 * SLOWNESS)
#define HANG_MS (20000 * SLOWNESS)
#define DEADLINE_MS (100 * SLOWNESS)
/* How long a seed runs. */
#define SEED_MS (400 * SLOWNESS)

struct punctual {
    const char *what;
    /* that were over their time, and of those the late ones */
    _Atomic uint32_t count, late;
};

/* It has ended, and was to end at this time. False: it hung. */
static inline bool punctual_note(struct punctual *punctual, uint64_t due_ns)
{
    const uint64_t now_ns = cox_now_ns();
    if (now_ns > due_ns) {
        atomic_fetch_add(&punctual->count, 1);
        atomic_fetch_add(&punctual->late, now_ns > due_ns + SLACK_MS * COX_NSEC_PER_MSEC);
    }
    return now_ns <= due_ns + HANG_MS * COX_NSEC_PER_MSEC;
}

/* Returns the exit status: 1 if too many were late. */
static inline int punctual_check(const struct punctual *punctual)
{
    const uint32_t count = atomic_load(&punctual->count), late = atomic_load(&punctual->late);
    printf("%s: %" PRIu32 " were over their time, %" PRIu32 " by more than %d ms\n", punctual->what,
           count, late, (int)SLACK_MS);
    return late > 2 + count / 10;
}

/* Into an order that is the same in every run. */
static inline void shuffle(uint32_t *items, uint32_t count)
{
    uint64_t state = 4711;
    for (uint32_t i = count; i > 1; i--) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        uint32_t j = (uint32_t)(state % i), item = items[i - 1];
        items[i - 1] = items[j];
        items[j] = item;
    }
}

#endif
