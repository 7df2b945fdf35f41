#include "fault.h"

#if COX_TESTING

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "futex.h"

#define COORDINATOR (-1)

static const char *const names[COX_FAULT_POINT_COUNT] = {
#define NAME(constant, name) name,
    COX_FAULT_POINTS(NAME)
#undef NAME
};

enum action {
    ACTION_NONE,
    ACTION_KILL,
    ACTION_STOP,
    ACTION_SPIN,
    ACTION_READ,
    ACTION_HOLD,
    ACTION_COUNT
};
static const char *const actions[ACTION_COUNT] = {"", "kill", "stop", "spin", "read", "hold"};

struct plan {
    enum action action;
    enum cox_fault_point point;
    int rank;
    uint32_t count;
};
/* In one word, since cox_fault_arm stores it while other threads pass points: see plan_packed. */
static _Atomic uint64_t plan_word;
static struct cox_fault_counts *counts; /* NULL: no counting */
static pthread_once_t plan_once = PTHREAD_ONCE_INIT;
static _Atomic int own_rank = COORDINATOR;
static _Atomic uint32_t passages;
static _Atomic uint32_t arms; /* plans so far; held threads block on it */

static _Noreturn void plan_refuse(const char *text)
{
    fprintf(
        stderr,
        "COXSWAIN_FAULT is '%s': expected NAME:kill|stop|spin|read|hold[:RANK|coordinator[:COUNT]]\n",
        text);
    abort();
}

static uint64_t plan_packed(struct plan plan)
{
    return (uint64_t)plan.action << 56 | (uint64_t)plan.point << 40 |
           (uint64_t)(uint16_t)plan.rank << 24 | (plan.count & 0xffffff);
}

static struct plan plan_unpacked(uint64_t word)
{
    return (struct plan){.action = (enum action)(word >> 56),
                         .point = (enum cox_fault_point)(word >> 40 & 0xffff),
                         .rank = (int16_t)(word >> 24),
                         .count = (uint32_t)(word & 0xffffff)};
}

/* Returns the packed plan. */
static uint64_t plan_parse(const char *text)
{
    char name[64], action[8], rank[16] = "coordinator";
    unsigned count = 1, point = 0, number = ACTION_NONE + 1;
    if (sscanf(text, "%63[^:]:%7[^:]:%15[^:]:%u", name, action, rank, &count) < 2)
        plan_refuse(text);
    while (point < COX_FAULT_POINT_COUNT && strcmp(names[point], name) != 0)
        point++;
    while (number < ACTION_COUNT && strcmp(actions[number], action) != 0)
        number++;
    if (point == COX_FAULT_POINT_COUNT || number == ACTION_COUNT || count == 0 || count > 0xffffff)
        plan_refuse(text);
    return plan_packed((struct plan){
        .action = (enum action)number,
        .point = (enum cox_fault_point)point,
        .rank = strcmp(rank, "coordinator") == 0 ? COORDINATOR : atoi(rank),
        .count = count,
    });
}

static void counts_map(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *map =
        fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        perror(path);
        abort();
    }
    close(fd);
    counts = map;
}

static void plan_read(void)
{
    const char *text = getenv("COXSWAIN_FAULT"), *path = getenv("COXSWAIN_FAULT_COUNTS");
    const char *only = getenv("COXSWAIN_FAULT_INCARNATION"),
               *incarnation = getenv("COXSWAIN_INCARNATION");
    if (only && (!incarnation || strcmp(only, incarnation) != 0))
        return;
    if (text)
        atomic_store_explicit(&plan_word, plan_parse(text), memory_order_release);
    if (path)
        counts_map(path);
}

void cox_fault_arm(const char *text)
{
    pthread_once(&plan_once, plan_read);
    atomic_store_explicit(&plan_word, 0, memory_order_relaxed);
    atomic_store_explicit(&passages, 0, memory_order_relaxed);
    /* release: the count starts at 0; partner is the load in cox_fault_point. */
    if (text)
        atomic_store_explicit(&plan_word, plan_parse(text), memory_order_release);
    atomic_fetch_add_explicit(&arms, 1, memory_order_release);
    cox_futex_wake(&arms);
}

void cox_fault_rank(int rank)
{
    pthread_once(&plan_once, plan_read);
    atomic_store_explicit(&own_rank, rank, memory_order_relaxed);
}

const char *cox_fault_name(enum cox_fault_point point)
{
    return names[point];
}

/* Returns when a signal has a handler. */
static void read_nothing(void)
{
    int fds[2];
    char byte;
    if (pipe2(fds, O_CLOEXEC) < 0) {
        perror("a pipe to read nothing from");
        abort();
    }
    ssize_t got = read(fds[0], &byte, 1);
    (void)got;
    close(fds[0]);
    close(fds[1]);
}

static void strike(enum action action, uint32_t arm)
{
    if (action == ACTION_SPIN)
        for (;;)
            ; /* a constant condition: the compiler must not assume that the loop ends */
    if (action == ACTION_READ)
        read_nothing();
    else if (action == ACTION_HOLD)
        while (atomic_load_explicit(&arms, memory_order_acquire) == arm)
            cox_futex_wait(&arms, arm, COX_DEADLINE_NEVER);
    else
        /* To this thread by number, because it may be the child of a bare clone: a stop of the
         * process may reach another thread first, while this one continues. */
        syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid),
                action == ACTION_KILL ? SIGKILL : SIGSTOP);
}

void cox_fault_point_of(enum cox_fault_point point, int rank)
{
    pthread_once(&plan_once, plan_read);
    /* acquire: partner is the store in cox_fault_arm. The rest is relaxed: counts. */
    const struct plan plan = plan_unpacked(atomic_load_explicit(&plan_word, memory_order_acquire));
    if (counts && rank + 1 < COX_FAULT_PROCESS_COUNT)
        atomic_fetch_add_explicit(&counts->passed[point][rank + 1], 1, memory_order_relaxed);
    if (plan.action == ACTION_NONE || plan.point != point || plan.rank != rank ||
        atomic_fetch_add_explicit(&passages, 1, memory_order_relaxed) + 1 != plan.count)
        return;
    /* Before the strike is visible, since a test may set the next plan at once. */
    const uint32_t arm = atomic_load_explicit(&arms, memory_order_relaxed);
    if (counts)
        atomic_fetch_add_explicit(&counts->struck, 1, memory_order_release);
    strike(plan.action, arm);
}

void cox_fault_point(enum cox_fault_point point)
{
    cox_fault_point_of(point, atomic_load_explicit(&own_rank, memory_order_relaxed));
}

#else

/* An empty translation unit is not ISO C. */
typedef int cox_fault_unused;

#endif
