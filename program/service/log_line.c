#include "log_line.h"

#include "channel/base/idioms.h"
#include "channel/text/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIME_SIZE 64

static const char *level_name(int level)
{
    static const char *const names[] = {"emergency", "alert",  "critical", "error",
                                        "warning",   "notice", "info",     "debug"};
    return level >= 0 && level < (int)(sizeof names / sizeof *names) ? names[level] : "info";
}

static void time_text(char text[TIME_SIZE], const struct timespec *time)
{
    struct tm parts;
    char seconds[TIME_SIZE / 2] = "";
    if (gmtime_r(&time->tv_sec, &parts))
        strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text, TIME_SIZE, "%s.%03ldZ", seconds, time->tv_nsec / 1000000);
}

int cox_log_format_parse(const char *text, enum cox_log_format *ret_format, struct cox_error *err)
{
    if (strcmp(text, "text") && strcmp(text, "json"))
        return cox_fail(err, COX_INVALID, "--log-format is '%.64s': expected text or json", text);
    *ret_format = strcmp(text, "json") == 0 ? COX_LOG_JSON : COX_LOG_TEXT;
    return 0;
}

char *cox_log_line(enum cox_log_format format, bool priority, const struct cox_log_event *event)
{
    char time[TIME_SIZE], rank[32] = "", before[8] = "", *line = NULL;
    _cox_cleanup_(cox_free_ptr) char *escaped =
        cox_text_escape(event->text, format == COX_LOG_PLAIN, format == COX_LOG_JSON);
    int size;
    if (!escaped)
        return NULL;
    time_text(time, &event->time);
    if (priority)
        snprintf(before, sizeof before, "<%d>", event->level & 7);
    if (event->rank >= 0)
        snprintf(rank, sizeof rank,
                 format == COX_LOG_JSON   ? "\"rank\":%" PRId64 ","
                 : format == COX_LOG_TEXT ? "rank %" PRId64 ":"
                                          : "[rank %" PRId64 "]",
                 event->rank);
    if (format == COX_LOG_JSON)
        size = asprintf(
            &line, "%s{\"time\":\"%s\",\"level\":\"%s\",\"source\":\"%s\",%s\"message\":\"%s\"}\n",
            before, time, level_name(event->level), event->rank < 0 ? "coxswain" : "worker", rank,
            escaped);
    else
        size = asprintf(&line, "%s%s%s%s%s%s %s\n", before, format == COX_LOG_TEXT ? time : "",
                        format == COX_LOG_TEXT ? " " : "",
                        format == COX_LOG_TEXT ? level_name(event->level) : "",
                        format == COX_LOG_TEXT ? " " : "", event->rank < 0 ? "coxswain:" : rank,
                        escaped);
    return size < 0 ? NULL : line;
}
