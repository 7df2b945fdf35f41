#include "output.h"

#include "channel/base/idioms.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static void output_emit(struct cox_output *output, cox_output_line_fn line, void *context)
{
    size_t size = output->size;
    output->text[size] = '\0';
    output->size = 0;
    line(context, output->text, size);
}

/* Appends bytes that contain no newline. */
static void output_append(struct cox_output *output, const char *bytes, size_t size,
                          cox_output_line_fn line, void *context)
{
    while (size > 0) {
        /* A full piece is sent only when another byte follows: a line of exactly the limit is one
         * line, not a piece and an empty rest. */
        if (output->size == COX_OUTPUT_LINE_MAX)
            output_emit(output, line, context);
        size_t room = COX_OUTPUT_LINE_MAX - output->size;
        size_t part = size < room ? size : room;
        char *to = output->text + output->size;
        memcpy(to, bytes, part);
        for (char *nul = to; (nul = memchr(nul, '\0', (size_t)(to + part - nul))) != NULL;)
            *nul = '?';
        output->size += part;
        bytes += part;
        size -= part;
    }
}

void cox_output_feed(struct cox_output *output, const char *bytes, size_t size,
                     cox_output_line_fn line, void *context)
{
    const char *end = bytes + size;
    while (bytes < end) {
        const char *newline = memchr(bytes, '\n', (size_t)(end - bytes));
        output_append(output, bytes, (size_t)((newline ? newline : end) - bytes), line, context);
        if (!newline)
            return;
        output_emit(output, line, context);
        bytes = newline + 1;
    }
}

void cox_output_finish(struct cox_output *output, cox_output_line_fn line, void *context)
{
    if (output->size > 0)
        output_emit(output, line, context);
}

size_t cox_output_read(struct cox_output *output, cox_output_line_fn line, void *context)
{
    char bytes[COX_OUTPUT_READ_MAX];
    ssize_t size;
    do
        size = read(output->fd, bytes, sizeof bytes);
    while (size < 0 && errno == EINTR);
    if (size > 0) {
        cox_output_feed(output, bytes, (size_t)size, line, context);
        return (size_t)size;
    }
    if (size == 0 || errno != EAGAIN) {
        cox_output_finish(output, line, context);
        cox_close_fd(&output->fd);
    }
    return 0;
}

void cox_output_drain(struct cox_output *output, cox_output_line_fn line, void *context)
{
    if (output->fd < 0)
        return;
    int capacity = fcntl(output->fd, F_GETPIPE_SZ);
    size_t left = capacity > 0 ? (size_t)capacity : 65536;
    size_t size = 1;
    while (output->fd >= 0 && left > 0 && size > 0) {
        size = cox_output_read(output, line, context);
        left -= size < left ? size : left;
    }
    cox_output_finish(output, line, context);
}

int cox_output_take(const struct cox_output *output, char **ret_bytes, size_t *ret_size)
{
    int there = 0;
    if (output->fd < 0 || ioctl(output->fd, FIONREAD, &there) < 0)
        there = 0;
    char *bytes = malloc((size_t)there + 1);
    if (!bytes)
        return -ENOMEM;
    size_t size = 0;
    while (size < (size_t)there) {
        ssize_t got = read(output->fd, bytes + size, (size_t)there - size);
        if (got == 0 || (got < 0 && errno != EINTR))
            break;
        size += got > 0 ? (size_t)got : 0;
    }
    *ret_bytes = bytes;
    *ret_size = size;
    return 0;
}

void cox_output_last(const struct cox_output *output, const char *bytes, size_t size,
                     cox_output_line_fn line, void *context)
{
    struct cox_output copy = *output;
    const char *from = bytes + size;
    for (int newlines = 0; from && newlines <= COX_LAST_LINES; newlines++)
        from = memrchr(bytes, '\n', (size_t)(from - bytes));
    if (from) {
        copy.size = 0;
        size -= (size_t)(from + 1 - bytes);
        bytes = from + 1;
    }
    cox_output_feed(&copy, bytes, size, line, context);
    cox_output_finish(&copy, line, context);
}

void cox_output_print(uint32_t rank, bool is_stderr, const char *text)
{
    /* A pipe that polls writable has room for it: it is no longer than PIPE_BUF. */
    char line[COX_OUTPUT_LINE_MAX + 32];
    struct pollfd stream = {.fd = is_stderr ? STDERR_FILENO : STDOUT_FILENO, .events = POLLOUT};
    const int size = snprintf(line, sizeof line, "rank %" PRIu32 ": %s\n", rank, text);
    if (poll(&stream, 1, 0) == 1 && stream.revents == POLLOUT)
        while (write(stream.fd, line, (size_t)size) < 0 && errno == EINTR)
            ;
}

void cox_last_lines_add(struct cox_last_lines *lines, const char *text, size_t size)
{
    size_t kept = size < COX_LAST_LINE_MAX ? size : COX_LAST_LINE_MAX;
    char *to = lines->texts[lines->next];
    memcpy(to, text, kept);
    to[kept] = '\0';
    lines->next = (lines->next + 1) % COX_LAST_LINES;
    if (lines->count < COX_LAST_LINES)
        lines->count++;
}

/* The line that came age lines before the newest. */
static const char *last_line(const struct cox_last_lines *lines, uint32_t age)
{
    return lines->texts[(lines->next + COX_LAST_LINES - 1 - age) % COX_LAST_LINES];
}

size_t cox_last_lines_join(const struct cox_last_lines *lines, char *buffer, size_t buffer_size)
{
    if (buffer_size == 0)
        return 0;
    buffer[0] = '\0';
    if (lines->count == 0)
        return 0;
    /* Counts how many fit, from the newest backwards. Every line but the newest needs a newline. */
    uint32_t fitting = 0;
    size_t total = 0;
    while (fitting < lines->count) {
        size_t more = strlen(last_line(lines, fitting)) + (fitting > 0);
        if (more >= buffer_size - total)
            break;
        total += more;
        fitting++;
    }
    if (fitting == 0) {
        memcpy(buffer, last_line(lines, 0), buffer_size - 1);
        buffer[buffer_size - 1] = '\0';
        return buffer_size - 1;
    }
    char *to = buffer;
    while (fitting-- > 0) {
        to = stpcpy(to, last_line(lines, fitting));
        if (fitting > 0)
            *to++ = '\n';
    }
    *to = '\0';
    return (size_t)(to - buffer);
}
