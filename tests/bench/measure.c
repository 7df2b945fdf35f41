#include "measure.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

uint64_t measure_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void measure_sleep_until(uint64_t until_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(until_ns / UINT64_C(1000000000)),
                                   .tv_nsec = (long)(until_ns % UINT64_C(1000000000))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
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

double measure_median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare_values);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double measure_quantile(double *values, size_t count, double share)
{
    qsort(values, count, sizeof *values, compare_values);
    return values[(size_t)(share * (double)(count - 1) + 0.5)];
}

void measure_sort(uint64_t *samples_ns, size_t count)
{
    qsort(samples_ns, count, sizeof *samples_ns, compare_samples);
}

double measure_slope(const double *x, const double *y, size_t count)
{
    double n = (double)count, sx = 0, sy = 0, sxx = 0, sxy = 0;
    for (size_t i = 0; i < count; i++) {
        sx += x[i];
        sy += y[i];
        sxx += x[i] * x[i];
        sxy += x[i] * y[i];
    }
    return (n * sxy - sx * sy) / (n * sxx - sx * sx);
}
