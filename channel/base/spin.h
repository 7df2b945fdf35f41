/*
 * spin: polls a condition for a short time before a wait blocks, if that is likely to save time.
 * Between two processes on two processors a reply arrives within a microsecond. Blocking and waking
 * take several microseconds, on a virtual machine tens.
 *
 * The coordinator decides once for the group, and stores the decision for the ranks (layout.h). The
 * participants are the coordinator and the ranks. They fit if there are at least as many processors
 * that this process may use (affinity, and the quota of its control groups). If they fit, each wait
 * spins for budget_ns before it blocks. If they do not fit, no wait spins: a spinning thread would
 * keep the thread that it waits for from running. Measured on two processors with 4 ranks: 62 us
 * per round with unconditional spinning, 23 us without.
 *
 * Participants that fit may still share a processor. If an unrelated process occupies one of two
 * processors, two participants share the other, and each spins in vain for its whole budget
 * (measured: 105 us per round instead of 4). So after a spin in vain the next 1, 3, 7... waits
 * block at once; a successful spin resets this. Once that series has reached its limit, one spin at
 * growing intervals is long enough for the kernel to move one of the two to another processor
 * (COX_SPIN_MOVE_NS).
 *
 * The budget is about the time that both sides save if the wait does not block, so a longer wait
 * costs at most twice as much. An idle group spins for one budget, and then blocks.
 *
 * Threads: a spinner belongs to one thread; all else: any.
 * Ownership: nothing to free.
 * Blocks: cox_spin_until spins for the budget, rarely for COX_SPIN_MOVE_NS, and never beyond its
 *   deadline.
 * If the process dies: private memory.
 */
#ifndef COX_CHANNEL_SPIN_H
#define COX_CHANNEL_SPIN_H

#include "base.h"

enum cox_spin {
    COX_SPIN_AUTO = 0, /* COX_SPIN_AUTO_NS if the participants fit */
    COX_SPIN_OFF,      /* never spins */
    /* COX_SPIN_MAX_NS if the participants fit: for steps with longer gaps between them */
    COX_SPIN_MAX,
    COX_SPIN_COUNT,
};

#define COX_SPIN_AUTO_NS UINT32_C(50000)
#define COX_SPIN_MAX_NS UINT32_C(2000000)

#ifdef COX_INTERNAL
/* "off", "auto" or "max"; NULL: no such setting. Static storage. */
const char *cox_spin_name(uint32_t spin);
/* Processors that the threads of this process may use at a time: those of its affinity, limited by
 * the quota of its control groups, rounded down. At least 1. Reads /sys and /proc. */
uint32_t cox_cpu_count(void);
/* The budget for this many threads that wait for each other; 0: they do not fit. */
uint32_t cox_spin_budget_ns(enum cox_spin spin, uint32_t participant_count);
#endif

/* A gap this long between two readings of the clock shows that another thread uses the processor.
 */
#define COX_SPIN_GAP_NS UINT64_C(200000)
/* Limit of waits that block at once after repeated spins in vain. */
#define COX_SPIN_SKIP_MAX 31
/* Length of the rare long spin: some ticks of the kernel. If two running threads share a processor,
 * the kernel then moves one of them to a free processor. It does not do so for two threads that
 * wake each other in turn. Repeated after 1 s, 2 s, 4 s... 64 s. Measured with two threads on one
 * of two processors: a round took 3.5 us before and 2.4 us after. */
#define COX_SPIN_MOVE_NS (8 * COX_NSEC_PER_MSEC)
#define COX_SPIN_MOVE_AGAIN_NS COX_NSEC_PER_SEC
#define COX_SPIN_MOVE_DOUBLINGS 6

struct cox_spinner {
    uint32_t budget_ns;
    /* length of the present series of waits that block at once; 0 after a successful spin */
    uint32_t vain;
    /* waits left that block at once */
    uint32_t skip;
    /* long spins so far, at most COX_SPIN_MOVE_DOUBLINGS */
    uint32_t moves;
    /* the next long spin is not before this time */
    uint64_t move_ns;
    /* waits that ended without blocking; for display */
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

/* How long to spin now. */
static inline uint64_t cox_spin_span(struct cox_spinner *spinner, uint64_t now_ns)
{
    if (spinner->vain < COX_SPIN_SKIP_MAX || now_ns < spinner->move_ns)
        return spinner->budget_ns;
    spinner->move_ns = now_ns + (COX_SPIN_MOVE_AGAIN_NS << spinner->moves);
    spinner->moves += spinner->moves < COX_SPIN_MOVE_DOUBLINGS;
    return COX_SPIN_MOVE_NS;
}

/* Polls `there` until it is true, the budget is used up or the deadline has passed. Returns false
 * at once if spinning is off or was in vain recently. */
static inline bool cox_spin_until(struct cox_spinner *spinner, bool (*there)(const void *context),
                                  const void *context, uint64_t deadline_ns)
{
    enum { CHECKS = 16 }; /* between two readings of the clock */
    if (spinner->budget_ns == 0)
        return false;
    if (spinner->skip > 0) {
        spinner->skip--;
        return false;
    }
    const uint64_t begin = cox_now_ns(), span = cox_spin_span(spinner, begin);
    bool gap = false;
    for (uint64_t last = begin; last - begin < span && last < deadline_ns && !gap;) {
        for (int i = 0; i < CHECKS; i++) {
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
