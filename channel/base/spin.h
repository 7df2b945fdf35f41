/*
 * spin: looks for a while before a sleep, where that pays: between two processes that each have a
 * processor a reply comes within a microsecond, and a sleep with its wake-up costs several, on a
 * virtual machine tens.
 *
 * The rule is decided once for a group, by its coordinator, and told to the ranks (layout.h):
 * everybody looks for budget_ns before a sleep if the participants, coordinator and ranks, fit the
 * processors that this process may use (affinity, and the quota of its control groups), and not at
 * all if they do not, since who looks then keeps the one from running whom he waits for. Measured
 * at two processors and 4 ranks: 62 us a round with a blind spin, 23 without.
 *
 * That they fit does not say where they are: two that share a processor, since somebody else has
 * the other one, find nothing by looking, each for its whole budget (measured: 105 us a round
 * instead of 4). So whoever has looked in vain sleeps at once for the next 1, 3, 7... waits, and
 * one that he finds something by begins anew. At the end of that row, ever more rarely, one look is
 * long enough for the kernel to part the two (COX_SPIN_MOVE_NS).
 *
 * The budget is about what the sleep that it saves costs both sides: so whoever waits for longer
 * than that pays at most as much again. An idle group costs nothing: it looks for one budget, and
 * sleeps.
 *
 * Threads: a spinner is one thread's; the rest any.
 * Ownership: nothing to free.
 * Blocks: cox_spin_until for the budget at most, now and then for COX_SPIN_MOVE_NS, and never past
 * its deadline. If the process dies: private memory.
 */
#ifndef COX_CHANNEL_SPIN_H
#define COX_CHANNEL_SPIN_H

#include "base.h"

enum cox_spin {
    COX_SPIN_AUTO = 0, /* COX_SPIN_AUTO_NS where the participants fit */
    COX_SPIN_OFF,      /* sleeps at once */
    /* COX_SPIN_MAX_NS where they fit: for steps that follow one another after longer gaps */
    COX_SPIN_MAX,
    COX_SPIN_COUNT,
};

#define COX_SPIN_AUTO_NS UINT32_C(50000)
#define COX_SPIN_MAX_NS UINT32_C(2000000)

#ifdef COX_INTERNAL
/* off, auto, max; NULL: no such setting */
const char *cox_spin_name(uint32_t spin);
/* Processors that the threads of this process may use at a time: those of its affinity, and no more
 * than the quota of its control groups, of which parts do not count. At least 1. Reads /sys and
 * /proc. */
uint32_t cox_cpu_count(void);
/* For so many threads that wait for each other; 0: they do not fit. */
uint32_t cox_spin_budget_ns(enum cox_spin spin, uint32_t participant_count);
#endif

/* Off its processor for so long, somebody else needs it. */
#define COX_SPIN_GAP_NS UINT64_C(200000)
/* Waits that sleep at once after looking was in vain again and again. */
#define COX_SPIN_SKIP_MAX 31
/* Then once a look of some ticks, in which the kernel moves one of two runners that share a
 * processor to a free one, which it does not do for two that wake each other up in turn: at first,
 * and again after 1 s, 2 s, 4 s... 64 s. Measured, of two that shared one of two processors: a
 * round of 3.5 us became one of 2.4. */
#define COX_SPIN_MOVE_NS (8 * COX_NSEC_PER_MSEC)
#define COX_SPIN_MOVE_AGAIN_NS COX_NSEC_PER_SEC
#define COX_SPIN_MOVE_DOUBLINGS 6

struct cox_spinner {
    uint32_t budget_ns;
    /* waits to be skipped after the next time in vain */
    uint32_t vain;
    /* waits that sleep at once from now on */
    uint32_t skip;
    /* looks of ticks so far */
    uint32_t moves;
    /* the next one is not before */
    uint64_t move_ns;
    /* waits that ended without a sleep; for display */
    uint64_t found;
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

static inline bool cox_spin_in_vain(struct cox_spinner *spinner, uint32_t vain)
{
    spinner->skip = spinner->vain = vain < COX_SPIN_SKIP_MAX ? vain : COX_SPIN_SKIP_MAX;
    return false;
}

/* How long to look now. */
static inline uint64_t cox_spin_span(struct cox_spinner *spinner, uint64_t now_ns)
{
    if (spinner->vain < COX_SPIN_SKIP_MAX || now_ns < spinner->move_ns)
        return spinner->budget_ns;
    spinner->move_ns = now_ns + (COX_SPIN_MOVE_AGAIN_NS << spinner->moves);
    spinner->moves += spinner->moves < COX_SPIN_MOVE_DOUBLINGS;
    return COX_SPIN_MOVE_NS;
}

/* Looks whether `there` until the budget is used up or the deadline has come, or not at all while
 * that is in vain. */
static inline bool cox_spin_until(struct cox_spinner *spinner, bool (*there)(const void *context),
                                  const void *context, uint64_t deadline_ns)
{
    enum { LOOKS = 16 }; /* between two readings of the clock */
    if (spinner->budget_ns == 0)
        return false;
    if (spinner->skip > 0) {
        spinner->skip--;
        return false;
    }
    const uint64_t begin = cox_now_ns(), span = cox_spin_span(spinner, begin);
    bool gap = false;
    for (uint64_t last = begin; last - begin < span && last < deadline_ns && !gap;) {
        for (int i = 0; i < LOOKS; i++) {
            if (there(context)) {
                if (last - begin < spinner->budget_ns)
                    spinner->vain = 0;
                spinner->found++;
                return true;
            }
            cox_cpu_relax();
        }
        const uint64_t now = cox_now_ns();
        gap = now - last >= COX_SPIN_GAP_NS && span == spinner->budget_ns;
        last = now;
    }
    return cox_spin_in_vain(spinner, gap ? COX_SPIN_SKIP_MAX : 2 * spinner->vain + 1);
}

#endif
