/*
 * spin: looks for a while before a sleep, where that pays: between two processes that each have a processor an answer
 * comes within a microsecond, and a sleep with its wake-up costs several, on a virtual machine tens.
 *
 * The rule is decided once for a group, by its coordinator, and told to the ranks (layout.h): everybody looks for
 * budget_ns before a sleep if the participants, coordinator and ranks, fit the processors that this process may use
 * (affinity, and the quota of its control groups), and not at all if they do not, since who looks then keeps the one
 * from running whom he waits for. Measured at two processors and 4 ranks: 62 us a round with a blind spin, 23 without.
 * Who looks and finds that he was off his processor meanwhile rests for a while: somebody else needs it.
 *
 * The budget is about what the sleep that it saves costs both sides: so whoever waits for longer than that pays at most as
 * much again. An idle group costs nothing: it looks for one budget, and sleeps.
 *
 * Threads: a spinner is one thread's; the rest any.
 * Ownership: nothing to free.
 * Blocks: cox_spin_until for the budget at most.
 * If the process dies: private memory.
 */
#ifndef COX_CHANNEL_SPIN_H
#define COX_CHANNEL_SPIN_H

#include "base.h"

enum cox_spin {
    COX_SPIN_AUTO = 0, /* COX_SPIN_AUTO_NS where the participants fit */
    COX_SPIN_OFF,      /* sleeps at once */
    COX_SPIN_MAX, /* COX_SPIN_MAX_NS where they fit: for steps that follow one another after longer gaps */
    COX_SPIN_COUNT,
};

#define COX_SPIN_AUTO_NS UINT32_C(50000)
#define COX_SPIN_MAX_NS UINT32_C(2000000)

/* off, auto, max; NULL: no such setting */
COX_PUBLIC const char *cox_spin_name(uint32_t spin);
/* Processors that the threads of this process may use at a time: those of its affinity, and no more than the quota of its
 * control groups, of which parts do not count. At least 1. Reads /sys and /proc. */
uint32_t cox_cpu_count(void);
/* For so many threads that wait for each other; 0: they do not fit. */
uint32_t cox_spin_budget_ns(enum cox_spin spin, uint32_t participant_count);

/* Off the processor for so long: it is needed by others. */
#define COX_SPIN_GAP_NS UINT64_C(200000)
/* Then nobody looks for so long. */
#define COX_SPIN_REST_NS (100 * COX_NSEC_PER_MSEC)

struct cox_spinner {
    uint32_t budget_ns;
    uint64_t rest_ns; /* until then it sleeps at once */
    uint64_t found;   /* waits that ended without a sleep; for display */
};

static inline void cox_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* Looks whether `there` until the budget is used up. Returns what it saw last. */
static inline bool cox_spin_until(struct cox_spinner *spinner, bool (*there)(const void *context),
                                  const void *context)
{
    enum { LOOKS = 16 }; /* between two readings of the clock */
    if (spinner->budget_ns == 0)
        return false;
    uint64_t last = cox_now_ns();
    const uint64_t until = last + spinner->budget_ns;
    if (last < spinner->rest_ns)
        return false;
    while (last < until) {
        for (int i = 0; i < LOOKS; i++) {
            if (there(context)) {
                spinner->found++;
                return true;
            }
            cox_cpu_relax();
        }
        const uint64_t now = cox_now_ns();
        if (now - last >= COX_SPIN_GAP_NS) {
            spinner->rest_ns = now + COX_SPIN_REST_NS;
            break;
        }
        last = now;
    }
    return there(context);
}

#endif
