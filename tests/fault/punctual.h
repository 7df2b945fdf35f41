/*
 * punctual: whether what is over its time ends soon after it.
 *
 * One end that is HANG_MS late fails at once. One that is SLACK_MS late may be the machine's: a few
 * of them pass, one in ten does not, since a wait of the product is in most of them. The program
 * that includes this defines SLACK_MS and HANG_MS.
 *
 * Threads: any may note; check when all is over.
 */
#ifndef COX_TESTS_PUNCTUAL_H
#define COX_TESTS_PUNCTUAL_H

#include <coxswain/base.h>

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

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

#endif
