/*
 * log_limit: a log for events that unknown processes cause, with a limit on its rate.
 *
 * A reason is a literal and a code. Each reason may write COX_LOG_LIMIT_COUNT lines in
 * COX_LOG_LIMIT_MS; further ones are counted, and their number is logged at the end of that time.
 * So a flood of one reason writes about 2 KiB in that time.
 *
 * Threads: one at a time.
 * Ownership: the object owns all it refers to.
 * Blocks: nothing but what the log does; allocates nothing.
 * If the process dies: counts that were not logged are lost.
 */
#ifndef COX_CHANNEL_LOG_LIMIT_H
#define COX_CHANNEL_LOG_LIMIT_H

#include <coxswain/base.h>

#define COX_LOG_LIMIT_COUNT 8
#define COX_LOG_LIMIT_MS 10000
/* Reasons that are counted at a time; a further one replaces the oldest. */
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
/* key: the literal that identifies the reason, compared as a pointer; NULL: the format. code
 * distinguishes reasons with the same key. */
void cox_log_limit_write(struct cox_log_limit *limit, int level, const void *key, int code,
                         const char *format, ...) __attribute__((format(printf, 5, 6)));
/* Logs the counts whose time is over; all: every count. Returns when it is due again;
 * COX_DEADLINE_NEVER: nothing is counted. */
uint64_t cox_log_limit_turn(struct cox_log_limit *limit, bool all);

#endif
