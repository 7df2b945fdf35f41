#include "measure.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

uint64_t measure_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static int usage_add_cpu(pid_t pid, struct measure_usage *usage)
{
    clockid_t clock;
    struct timespec spent;
    int e = clock_getcpuclockid(pid, &clock);
    if (e)
        return -e;
    if (clock_gettime(clock, &spent) < 0)
        return -errno;
    usage->cpu_ns += (uint64_t)spent.tv_sec * UINT64_C(1000000000) + (uint64_t)spent.tv_nsec;
    return 0;
}

static int usage_add_thread(pid_t pid, const char *thread, struct measure_usage *usage)
{
    char path[128], line[256];
    uint64_t count;
    snprintf(path, sizeof path, "/proc/%jd/task/%.32s/status", (intmax_t)pid, thread);
    FILE *file = fopen(path, "re");
    if (!file)
        return errno == ENOENT ? 0 : -errno; /* the thread has ended */
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "voluntary_ctxt_switches: %" SCNu64, &count) == 1)
            usage->sleeps += count;
        else if (sscanf(line, "nonvoluntary_ctxt_switches: %" SCNu64, &count) == 1)
            usage->preempted += count;
    }
    fclose(file);
    return 0;
}

/* Per thread: the counts in the status of a process are those of its first thread alone. */
static int usage_add_switches(pid_t pid, struct measure_usage *usage)
{
    char path[64];
    int r = 0;
    snprintf(path, sizeof path, "/proc/%jd/task", (intmax_t)pid);
    DIR *threads = opendir(path);
    if (!threads)
        return -errno;
    for (struct dirent *entry; r == 0 && (entry = readdir(threads)) != NULL;)
        if (entry->d_name[0] != '.')
            r = usage_add_thread(pid, entry->d_name, usage);
    closedir(threads);
    return r;
}

static int usage_add(int (*add)(pid_t pid, struct measure_usage *usage), const pid_t *pids,
                     uint32_t pid_count, struct measure_usage *usage)
{
    int r = add(getpid(), usage);
    for (uint32_t i = 0; r == 0 && i < pid_count; i++)
        r = add(pids[i], usage);
    return r;
}

int measure_usage_begin(const pid_t *pids, uint32_t pid_count, struct measure_usage *ret_usage)
{
    struct measure_usage usage = {0};
    int r = usage_add(usage_add_switches, pids, pid_count, &usage);
    if (r == 0)
        r = usage_add(usage_add_cpu, pids, pid_count, &usage);
    if (r == 0)
        *ret_usage = usage;
    return r;
}

int measure_usage_end(const pid_t *pids, uint32_t pid_count, struct measure_usage *ret_usage)
{
    struct measure_usage usage = {0};
    int r = usage_add(usage_add_cpu, pids, pid_count, &usage);
    if (r == 0)
        r = usage_add(usage_add_switches, pids, pid_count, &usage);
    if (r == 0)
        *ret_usage = usage;
    return r;
}

static int compare_samples(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int compare_values(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void measure_slice_fill(struct measure_slice *slice, uint64_t *samples_ns, size_t sample_count,
                        const struct measure_usage *begin, const struct measure_usage *end)
{
    const double rounds = (double)sample_count;
    qsort(samples_ns, sample_count, sizeof *samples_ns, compare_samples);
    *slice = (struct measure_slice){
        .p50_us = (double)samples_ns[sample_count / 2] / 1e3,
        .p99_us = (double)samples_ns[sample_count * 99 / 100] / 1e3,
        .cpu_us = (double)(end->cpu_ns - begin->cpu_ns) / 1e3 / rounds,
        .sleeps = (double)(end->sleeps - begin->sleeps) / rounds,
        .preempted = (double)(end->preempted - begin->preempted) / rounds,
    };
}

double measure_median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare_values);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}
