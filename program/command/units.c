#include "units.h"

#include <stddef.h>
#include <stdio.h>

/* Each unit is `step` times the previous one. */
static const char *scale(char *text, uint64_t number, double step, const char *const *units,
                         size_t unit_count)
{
    double scaled = (double)number;
    size_t unit = 0;
    while (scaled >= 999.5 && unit + 1 < unit_count) {
        scaled /= step;
        unit++;
    }
    int digits = unit == 0 || scaled >= 99.95 ? 0 : scaled >= 9.995 ? 1 : 2;
    snprintf(text, COX_UNITS_SIZE, "%.*f%s", digits, scaled, units[unit]);
    return text;
}

const char *cox_units_duration(char *text, uint64_t ns)
{
    static const char *const units[] = {"ns", "us", "ms", "s"};
    return scale(text, ns, 1000, units, sizeof units / sizeof *units);
}

const char *cox_units_bytes(char *text, uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    return scale(text, bytes, 1024, units, sizeof units / sizeof *units);
}
