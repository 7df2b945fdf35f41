/*
 * spin: polls a condition for a short time before a wait blocks, if that is likely to save time.
 * Between two processes on two processors a reply arrives within a microsecond. Blocking and waking
 * take several microseconds, on a virtual machine tens.
 *
 * A waiter checks the condition COX_SPIN_LOOKS times, with a pause of the processor between two
 * checks, then calls sched_yield, and so on until its budget is used up. Then it blocks. Whether
 * all participants have a processor is not asked:
 *   - Alone on its processor, the waiter gets it back at once.
 *   - Another participant that shares it runs instead, which costs a switch and no wakeup.
 *   - Any other program runs instead for a slice of the scheduler, some milliseconds.
 *
 * Measured on a virtual machine with two processors that builds used as well, in rounds that
 * alternate with those of an earlier rule: pause without yields, and no spin where participants
 * outnumber processors. Round trips, new by old:
 *   ranks                                       1     2     4     8
 *   all on one processor, named, median       0.84  0.51  0.45  0.94
 *   all on one processor, sealed, median      0.79  0.71  0.69  0.92
 *   placed by the kernel, sealed, median      0.89  0.82  0.97  0.90
 *   beside two busy loops, named, mean        0.96  0.75  0.84  0.78
 *   quota of one processor, named, CPU        1.18  0.95  0.68  0.95
 * Where the kernel places the processes, the earlier rule measured twice differs by up to 1.34.
 *
 * Spins in vain make a waiter rest: for a time its waits block at once. The rest is the length of
 * the spin, doubled with every further spin in vain, up to 2^COX_SPIN_DOUBLINGS times. So the time
 * spent in vain is soon a thousandth, however long a yield takes. A spin that exceeded its budget
 * by COX_SPIN_LONG_NS begins with a rest of 2^COX_SPIN_LONG_DOUBLINGS times: it has given a slice
 * to another program, and a thread that blocks and is woken interrupts that program instead. A
 * successful spin begins anew. One that a yield brought within COX_SPIN_LATE_FACTOR budgets does
 * neither: other participants ran, and the first round after a pause is such, with caches that are
 * cold. Rests are counted in time, not in waits: where short and long waits alternate, the rest
 * after a long wait in vain is over before the long wait is. A wait that is cut into several calls,
 * so that Python runs its signal handlers in between, is one wait (cox_spin_once): else an idle
 * second would double the rest ten times. A thread whose last wait began COX_SPIN_IDLE_NS ago was
 * idle, and begins anew: what interrupted its spin may be past. A rank that is idle while an
 * interpreter starts would rest for 4 s otherwise, through the whole next burst of requests.
 *
 * The budget covers the 50 to 100 us of Python between two requests of a coordinator in Python. An
 * idle group spins for one budget, and then blocks. Measured on an idle virtual machine with two
 * processors whose wakeups take 30 to 100 us, medians of alternating rounds, new budget by 50 us:
 *   budget                                                    100 us      200 us
 *   empty requests of a Python coordinator, 1 rank            0.62        0.57
 *   1, 2, 4, 8 ranks, placed by the kernel               0.8 to 1.1  0.8 to 1.0
 *   all on one processor                                 0.5 to 1.0  0.6 to 1.0
 *   beside two busy loops                                1.0 to 1.3  1.0 to 1.4
 *   a request each 10 ms, CPU                            1.0 to 1.1  1.0 to 1.3
 *   quota of one processor, CPU                          0.9 to 1.5  0.9 to 1.1
 * Two groups with the same budget differ by as much, after where the kernel places them; only the
 * first line and CPU at 200 us are beyond that. Under a quota of a control group a spin costs
 * quota, in a row of requests about as much as the blocking and waking that it replaces, or less.
 *
 * Threads: a spinner belongs to one thread; all else: any.
 * Ownership: nothing to free.
 * Blocks: cox_spin_until spins for the budget, and gives up the processor by sched_yield.
 * If the process dies: private memory.
 */
#ifndef COX_CHANNEL_SPIN_H
#define COX_CHANNEL_SPIN_H

#include <coxswain/base.h>

#include <sched.h>

#define COX_SPIN_AUTO_NS UINT32_C(100000)
#define COX_SPIN_MAX_NS UINT32_C(2000000)

/* "off", "auto" or "max"; NULL: no such setting. Static storage. */
const char *cox_spin_name(uint32_t spin);
uint32_t cox_spin_budget_ns(enum cox_spin spin);

/* Checks between two yields. A check takes some nanoseconds and a yield some hundreds, so a waiter
 * that is alone on its processor mostly checks. */
#define COX_SPIN_LOOKS 8
/* A yield that took longer has given a slice of the scheduler to another program: participants
 * mostly keep a processor for less. */
#define COX_SPIN_LONG_NS COX_NSEC_PER_MSEC
#define COX_SPIN_LONG_DOUBLINGS 7
#define COX_SPIN_DOUBLINGS 10
/* So many budgets a spin may take that finds it after all, and is not in vain: participants ran. */
#define COX_SPIN_LATE_FACTOR 4
/* Twice the time after which a wait for a reply is cut. */
#define COX_SPIN_IDLE_NS (100 * COX_NSEC_PER_MSEC)
/* Limit of a rest, if a spin took very long: the process was stopped, or throttled. */
#define COX_SPIN_REST_MAX_NS (4 * COX_NSEC_PER_SEC)

struct cox_spinner {
    uint32_t budget_ns;
    /* doublings of the next rest */
    uint32_t vain;
    /* waits before this time block at once */
    uint64_t rest_until_ns;
    /* when the last wait began */
    uint64_t last_ns;
    /* waits that ended without blocking; for display */
    uint64_t found;
    /* of cox_spin_once: what the last spin in vain waited for; 0: none */
    uint64_t event;
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

/* A spin has taken so long, in vain. */
static inline void cox_spin_rest(struct cox_spinner *spinner, uint64_t now_ns, uint64_t spent_ns)
{
    if (spent_ns > spinner->budget_ns + COX_SPIN_LONG_NS && spinner->vain < COX_SPIN_LONG_DOUBLINGS)
        spinner->vain = COX_SPIN_LONG_DOUBLINGS;
    const uint64_t rest_ns = spent_ns << spinner->vain;
    spinner->rest_until_ns =
        now_ns + (rest_ns < COX_SPIN_REST_MAX_NS ? rest_ns : COX_SPIN_REST_MAX_NS);
    spinner->vain += spinner->vain < COX_SPIN_DOUBLINGS;
}

/* Polls `there` until it is true, the budget is used up or the deadline has passed. Returns false
 * at once if spinning is off, or was in vain recently. */
static inline bool cox_spin_until(struct cox_spinner *spinner, bool (*there)(const void *context),
                                  const void *context, uint64_t deadline_ns)
{
    if (spinner->budget_ns == 0)
        return false;
    const uint64_t begin = cox_now_ns();
    if (begin - spinner->last_ns > COX_SPIN_IDLE_NS)
        spinner->rest_until_ns = spinner->vain = 0;
    spinner->last_ns = begin;
    if (begin < spinner->rest_until_ns || begin >= deadline_ns)
        return false;
    uint64_t now = begin;
    while (now - begin < spinner->budget_ns && now < deadline_ns) {
        for (int i = 0; i < COX_SPIN_LOOKS; i++) {
            if (there(context)) {
                spinner->vain = 0;
                spinner->found++;
                return true;
            }
            cox_cpu_relax();
        }
        sched_yield();
        now = cox_now_ns();
    }
    const bool found = there(context);
    spinner->found += found;
    /* A yield may have brought it. One that took long gave a slice to another program: blocking
     * would have taken less. */
    if (!found || now - begin > COX_SPIN_LATE_FACTOR * (uint64_t)spinner->budget_ns)
        cox_spin_rest(spinner, now, now - begin);
    return found;
}

/* As cox_spin_until, but at most one spin in vain for an event. event: not 0. */
static inline bool cox_spin_once(struct cox_spinner *spinner, uint64_t event,
                                 bool (*there)(const void *context), const void *context,
                                 uint64_t deadline_ns)
{
    const uint64_t rest_until_ns = spinner->rest_until_ns;
    if (spinner->event == event)
        return false;
    if (cox_spin_until(spinner, there, context, deadline_ns))
        return true;
    if (spinner->rest_until_ns != rest_until_ns)
        spinner->event = event;
    return false;
}

#endif
