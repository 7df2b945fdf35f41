#include "machine.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "measure.h"

/* Since the machine was started, in seconds of one processor. */
struct machine_times {
    double busy, steal, total;
};

static struct machine_times times_begin;
static double own_begin;
static uint64_t begin_ns;

/* "L1 Data 32K": the first processor's, as the kernel tells them. */
static json_t *caches_new(void)
{
    static const char *const words[] = {"level", "type", "size"};
    json_t *caches = json_array();
    for (int index = 0; index < 8; index++) {
        char path[96], word[3][16] = {"", "", ""}, text[48];
        int found = 0;
        for (int i = 0; i < 3; i++) {
            snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index,
                     words[i]);
            FILE *file = fopen(path, "re");
            found += file && fscanf(file, "%15s", word[i]) == 1;
            if (file)
                fclose(file);
        }
        if (found != 3)
            break;
        snprintf(text, sizeof text, "L%s %s %s", word[0], word[1], word[2]);
        json_array_append_new(caches, json_string(text));
    }
    return caches;
}

static struct machine_times times_read(void)
{
    /* user, nice, system, idle, iowait, irq, softirq, steal */
    double ticks[8] = {0};
    FILE *file = fopen("/proc/stat", "re");
    if (file) {
        int found = fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &ticks[0], &ticks[1],
                           &ticks[2], &ticks[3], &ticks[4], &ticks[5], &ticks[6], &ticks[7]);
        fclose(file);
        if (found != 8)
            memset(ticks, 0, sizeof ticks);
    }
    const double rate = (double)sysconf(_SC_CLK_TCK);
    struct machine_times times = {.steal = ticks[7] / rate};
    times.busy = (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / rate;
    times.total = times.busy + times.steal + (ticks[3] + ticks[4]) / rate;
    return times;
}

/* Processor time of this process and of all that it has reaped, in seconds. */
static double own_read(void)
{
    double seconds = 0;
    static const int whose[] = {RUSAGE_SELF, RUSAGE_CHILDREN};
    for (size_t i = 0; i < sizeof whose / sizeof *whose; i++) {
        struct rusage usage;
        if (getrusage(whose[i], &usage) == 0)
            seconds += (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                       (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    }
    return seconds;
}

/* The commit of the checkout that the folder is in; NULL: none, or there is no git. */
static json_t *commit_new(const char *folder)
{
    char command[4352], commit[64] = "";
    if (strchr(folder, '\'') ||
        snprintf(command, sizeof command, "git -C '%s' rev-parse HEAD 2>/dev/null", folder) >=
            (int)sizeof command)
        return NULL;
    FILE *git = popen(command, "re");
    const bool found = git && fscanf(git, "%63[0-9a-f]", commit) == 1;
    if (git)
        pclose(git);
    return found ? json_string(commit) : NULL;
}

static json_t *load_new(void)
{
    double load[3] = {0};
    if (getloadavg(load, 3) != 3)
        return json_array();
    return json_pack("[f, f, f]", load[0], load[1], load[2]);
}

json_t *machine_begin(const char *folder)
{
    struct utsname name;
    char date[32] = "";
    const time_t now = time(NULL);
    struct tm broken;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    times_begin = times_read();
    own_begin = own_read();
    begin_ns = measure_now_ns();
    if (uname(&name) < 0)
        return json_object();
    if (gmtime_r(&now, &broken))
        strftime(date, sizeof date, "%Y-%m-%d", &broken);
    json_t *machine =
        json_pack("{s:s, s:s, s:s, s:i, s:o, s:o}", "date", date, "kernel", name.release, "machine",
                  name.machine, "processors", (int)sysconf(_SC_NPROCESSORS_ONLN), "caches",
                  caches_new(), "load_begin", load_new());
    json_t *commit = commit_new(folder);
    if (machine && commit)
        json_object_set(machine, "commit", commit);
    json_decref(commit);
    return machine ? machine : json_object();
}

void machine_end(json_t *machine)
{
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    const struct machine_times now = times_read();
    const double total = now.total - times_begin.total, own = own_read() - own_begin;
    const double others = now.busy - times_begin.busy - own;
    json_object_set_new(machine, "load_end", load_new());
    json_object_set_new(machine, "seconds", json_real((double)(measure_now_ns() - begin_ns) / 1e9));
    if (total <= 0)
        return;
    json_object_set_new(machine, "elsewhere", json_real(others > 0 ? others / total : 0));
    json_object_set_new(machine, "steal", json_real((now.steal - times_begin.steal) / total));
}

static double number_of(const json_t *object, const char *name)
{
    return json_number_value(json_object_get(object, name));
}

void machine_print(const json_t *machine)
{
    const char *commit = json_string_value(json_object_get(machine, "commit"));
    printf("\n%s, Linux %s, %.0f processors, commit %.12s: %.0f s, load %.1f to %.1f; of all "
           "processors' time other programs had %.1f %%, other guests %.1f %%\n",
           json_string_value(json_object_get(machine, "machine")),
           json_string_value(json_object_get(machine, "kernel")), number_of(machine, "processors"),
           commit ? commit : "unknown", number_of(machine, "seconds"),
           json_number_value(json_array_get(json_object_get(machine, "load_begin"), 0)),
           json_number_value(json_array_get(json_object_get(machine, "load_end"), 0)),
           100 * number_of(machine, "elsewhere"), 100 * number_of(machine, "steal"));
}
