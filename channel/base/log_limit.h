/*
 * log_limit: a log for what strangers cause, which a storm of them does not fill.
 *
 * Of each reason, which is a literal and a code, COX_LOG_LIMIT_COUNT lines are written in
 * COX_LOG_LIMIT_MS; the rest is counted, and its number told when that time is over. So a storm of
 * one reason is about 2 KiB in that time, whatever its length.
 *
 * Threads: one at a time.
 * Ownership: all of it is inside.
 * Blocks: nothing but what the log does; allocates nothing.
 * If the process dies: what was counted and not told is lost.
 */
#ifndef COX_CHANNEL_LOG_LIMIT_H
#define COX_CHANNEL_LOG_LIMIT_H

#include "base.h"

#define COX_LOG_LIMIT_COUNT 8
#define COX_LOG_LIMIT_MS 10000
/* Reasons at a time; one more ends the time of the oldest. */
#define COX_LOG_LIMIT_REASON_MAX 24
#define COX_LOG_LIMIT_TEXT_SIZE 256

struct cox_log_limit {
    struct cox_log log;
    struct cox_log_reason {
        /* NULL: unused */
        const void *key;
        int code;
        int level;
        uint64_t since_ns;
        /* since then */
        uint64_t count;
        /* of those not written */
        char last[COX_LOG_LIMIT_TEXT_SIZE];
    } reasons[COX_LOG_LIMIT_REASON_MAX];
};

void cox_log_limit_init(struct cox_log_limit *limit, const struct cox_log *log);
/* key: the literal that stands for the reason, compared as a pointer; NULL: the format. code tells
 * reasons with the same one apart. */
void cox_log_limit_write(struct cox_log_limit *limit, int level, const void *key, int code,
                         const char *format, ...) __attribute__((format(printf, 5, 6)));
/* Tells of what was not written and whose time is over; all: of everything. Returns when it is to
 * be called again; COX_DEADLINE_NEVER: there is nothing to tell. */
uint64_t cox_log_limit_turn(struct cox_log_limit *limit, bool all);

#endif
