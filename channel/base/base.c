#include <coxswain/base.h>

#include "base_internal.h"
#include "idioms.h"

#include <coxswain/version.h>

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const status_texts[COX_STATUS_COUNT] = {
    [COX_OK] = "ok",
    [COX_TIMEOUT] = "timed out",
    [COX_PEER_DEAD] = "a process that owed a reply is dead",
    [COX_STALE] = "stale: built on a state the other side does not have",
    [COX_CLOSED] = "closed",
    [COX_FULL] = "full",
    [COX_LATE] = "a rank still owes an earlier reply",
    [COX_VERSION] = "version or geometry mismatch",
    [COX_CORRUPT] = "corrupt",
    [COX_DENIED] = "denied",
    [COX_TOO_LARGE] = "too large",
    [COX_NO_SPACE] = "no space",
    [COX_TAKEN] = "name taken by a live group",
    [COX_ABORTED] = "aborted",
    [COX_REJECTED] = "a rank replied with an error",
    [COX_DEADLOCK] = "a blocking call from inside a handler",
    [COX_BUSY] = "already started or registered",
    [COX_INVALID] = "invalid",
    [COX_NOT_FOUND] = "not found",
    [COX_EXEC_FAILED] = "the program could not be executed",
    [COX_DIVERGED] = "ranks that must agree do not",
    [COX_STATE] = "not legal in the present state",
    [COX_EMPTY] = "empty",
    [COX_UNSUPPORTED] = "not supported by the other side",
};

const char *cox_version(void)
{
    return COX_VERSION_TEXT;
}

const char *cox_status_text(int status)
{
    if (status < 0) {
        const char *text =
            status == INT_MIN ? NULL : strerrordesc_np(-status); /* -INT_MIN overflows */
        return text ? text : "unknown system error";
    }
    if (status >= COX_STATUS_COUNT)
        return "unknown status";
    return status_texts[status];
}

int cox_fail(struct cox_error *err, int code, const char *format, ...)
{
    if (err && err->code == 0) {
        err->code = code;
        va_list args;
        va_start(args, format);
        int length = vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        if (length >= (int)sizeof err->text)
            cox_text_trim(err->text);
    }
    return code;
}

void cox_log_write(const struct cox_log *log, int level, const char *format, ...)
{
    if (!log || !log->fn)
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    if (vsnprintf(text, sizeof text, format, args) >= (int)sizeof text)
        cox_text_trim(text);
    va_end(args);
    log->fn(log->context, level, text);
}

COX_HOT uint64_t cox_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * COX_NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

COX_HOT uint64_t cox_now_coarse_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &ts);
    return (uint64_t)ts.tv_sec * COX_NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

uint64_t cox_deadline_after_ns(uint64_t duration_ns)
{
    uint64_t now = cox_now_ns();
    return duration_ns > COX_DEADLINE_NEVER - now ? COX_DEADLINE_NEVER : now + duration_ns;
}

int cox_deadline_poll_ms(uint64_t deadline_ns)
{
    if (deadline_ns == COX_DEADLINE_NEVER)
        return -1;
    const uint64_t now_ns = cox_now_ns();
    const uint64_t left_ms =
        now_ns < deadline_ns ? (deadline_ns - now_ns - 1) / COX_NSEC_PER_MSEC + 1 : 0;
    return left_ms < INT_MAX ? (int)left_ms : INT_MAX;
}

int cox_fd_raise(int *fd)
{
    if (*fd > STDERR_FILENO)
        return 0;
    int raised = fcntl(*fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (raised < 0)
        return -errno;
    close(*fd);
    *fd = raised;
    return 0;
}

ssize_t cox_small_file_read(const char *path, char *text, size_t text_size)
{
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t length;
    do
        length = read(fd, text, text_size - 1);
    while (length < 0 && errno == EINTR);
    if (length < 0)
        return -errno;
    text[length] = '\0';
    return length;
}
