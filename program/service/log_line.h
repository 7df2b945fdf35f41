/*
 * log_line: one event of a log as one line, with time and level, as text or JSON.
 *
 *   2026-11-25T14:58:27.123Z warning coxswain: rank 1 is stopped
 *   2026-11-25T14:58:27.123Z info rank 2: what the worker wrote
 *   {"time":"2026-11-25T14:58:27.123Z","level":"info","source":"worker","rank":2,"message":"..."}
 *
 * Threads: any.
 * Ownership: the line is the caller's.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_LOG_LINE_H
#define COX_PROGRAM_LOG_LINE_H

#include <coxswain/base.h>

#include <time.h>

enum cox_log_format {
    /* without time and level: for people at a terminal */
    COX_LOG_PLAIN,
    COX_LOG_TEXT,
    COX_LOG_JSON,
};

struct cox_log_event {
    struct timespec time;
    /* as in syslog(3) */
    int level;
    /* of the worker that wrote it; -1: it is the program's own message */
    int64_t rank;
    const char *text;
};

/* "text" or "json". Returns 0 or COX_INVALID. */
int cox_log_format_parse(const char *text, enum cox_log_format *ret_format, struct cox_error *err);
/* priority: the line begins with "<LEVEL>", which systemd's journal takes off (sd-daemon(3)).
 * Returns the line with its newline, for free; NULL: no memory. Newlines and other control
 * characters of the text are escaped (cox_text_escape); tabs stay in a plain line. */
char *cox_log_line(enum cox_log_format format, bool priority, const struct cox_log_event *event);

#endif
