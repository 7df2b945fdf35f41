#include "log_limit.h"

#include "idioms.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LIMIT_NS (COX_LOG_LIMIT_MS * COX_NSEC_PER_MSEC)

void cox_log_limit_init(struct cox_log_limit *limit, const struct cox_log *log)
{
    memset(limit, 0, sizeof *limit);
    limit->log = *log;
}

static void reason_end(struct cox_log_limit *limit, struct cox_log_reason *reason, uint64_t now_ns)
{
    if (reason->key && reason->count > COX_LOG_LIMIT_COUNT)
        cox_log_write(&limit->log, reason->level,
                      "%" PRIu64 " more like it in the last %.1f s, the last one: %s",
                      reason->count - COX_LOG_LIMIT_COUNT,
                      (double)(now_ns - reason->since_ns) / (double)COX_NSEC_PER_SEC, reason->last);
    reason->key = NULL;
}

/* Its own, an unused one, or the oldest one's. */
static struct cox_log_reason *reason_find(struct cox_log_limit *limit, const void *key, int code,
                                          uint64_t now_ns)
{
    struct cox_log_reason *found = NULL;
    for (size_t i = 0; i < COX_LOG_LIMIT_REASON_MAX; i++) {
        struct cox_log_reason *reason = &limit->reasons[i];
        if (reason->key == key && reason->code == code && now_ns - reason->since_ns < LIMIT_NS)
            return reason;
        if (!found || (found->key && (!reason->key || reason->since_ns < found->since_ns)))
            found = reason;
    }
    reason_end(limit, found, now_ns);
    *found = (struct cox_log_reason){.key = key, .code = code, .since_ns = now_ns};
    return found;
}

void cox_log_limit_write(struct cox_log_limit *limit, int level, const void *key, int code,
                         const char *format, ...)
{
    char text[1024];
    va_list args;
    cox_log_limit_turn(limit, false);
    struct cox_log_reason *reason = reason_find(limit, key ? key : format, code, cox_now_ns());
    reason->level = level;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (++reason->count <= COX_LOG_LIMIT_COUNT) {
        cox_log_write(&limit->log, level, "%s", text);
        return;
    }
    snprintf(reason->last, sizeof reason->last, "%.*s", (int)sizeof reason->last - 1, text);
    cox_text_trim(reason->last);
}

uint64_t cox_log_limit_turn(struct cox_log_limit *limit, bool all)
{
    uint64_t due_ns = COX_DEADLINE_NEVER, now_ns = cox_now_ns();
    for (size_t i = 0; i < COX_LOG_LIMIT_REASON_MAX; i++) {
        struct cox_log_reason *reason = &limit->reasons[i];
        if (!reason->key)
            continue;
        if (all || now_ns - reason->since_ns >= LIMIT_NS)
            reason_end(limit, reason, now_ns);
        else if (reason->count > COX_LOG_LIMIT_COUNT)
            due_ns = cox_deadline_min(due_ns, reason->since_ns + LIMIT_NS);
    }
    return due_ns;
}
