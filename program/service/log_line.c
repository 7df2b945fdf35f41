#include "log_line.h"

#include "channel/base/idioms.h"

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

/* The size of the UTF-8 character at text; 0: there is none. */
static size_t character_size(const unsigned char *text)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t size = text[0] < 0x80   ? 1
                  : text[0] < 0xc2 ? 0
                  : text[0] < 0xe0 ? 2
                  : text[0] < 0xf0 ? 3
                  : text[0] < 0xf5 ? 4
                                   : 0;
    uint32_t code = size < 2 ? text[0] : text[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (text[i] & 0x3fu);
    }
    bool surrogate = code >= 0xd800 && code < 0xe000;
    return size > 1 && (code < least[size] || surrogate || code > 0x10ffff) ? 0 : size;
}

/* Escapes as JSON does. Bytes that are no UTF-8 become U+FFFD. quotes: also " and \. */
static char *escape(const char *text, bool quotes)
{
    char *escaped = malloc(6 * strlen(text) + 1), *to = escaped;
    for (const unsigned char *from = (const unsigned char *)text; escaped && *from;) {
        const size_t size = character_size(from);
        if (quotes && (*from == '"' || *from == '\\'))
            to += sprintf(to, "\\%c", *from);
        else if (*from == '\n' || *from == '\r' || *from == '\t')
            to += sprintf(to, "\\%c", *from == '\n' ? 'n' : *from == '\r' ? 'r' : 't');
        else if (*from < 0x20 || *from == 0x7f)
            to += sprintf(to, "\\u%04x", *from);
        else if (size == 0)
            to += sprintf(to, "\xef\xbf\xbd");
        else
            to = (char *)memcpy(to, from, size) + size;
        from += size ? size : 1;
    }
    if (escaped)
        *to = '\0';
    return escaped;
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
        format == COX_LOG_PLAIN ? strdup(event->text) : escape(event->text, format == COX_LOG_JSON);
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
