#include "python_frames.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *line_end(const char *line)
{
    return line + strcspn(line, "\n");
}

static const char *line_next(const char *line)
{
    const char *end = line_end(line);
    return *end ? end + 1 : end;
}

/* "Thread 0x... [name] (most recent call first):" or "Current thread 0x...". */
static bool is_head(const char *line, uint64_t *ret_self)
{
    const char *number = NULL;
    if (strncmp(line, "Thread 0x", 9) == 0)
        number = line + 7;
    else if (strncmp(line, "Current thread 0x", 17) == 0)
        number = line + 15;
    if (number)
        *ret_self = strtoull(number, NULL, 16);
    return number != NULL;
}

void cox_python_frames_parse(const char *text, struct cox_python_frames *ret_frames)
{
    *ret_frames = (struct cox_python_frames){0};
    struct cox_python_thread *thread = NULL;
    for (const char *line = text; *line; line = line_next(line)) {
        uint64_t self;
        if (is_head(line, &self)) {
            if (ret_frames->count == COX_PYTHON_THREAD_MAX)
                return;
            thread = &ret_frames->threads[ret_frames->count++];
            *thread = (struct cox_python_thread){.self = self, .frames = line_next(line)};
        } else if (thread && line[0] == ' ') {
            thread->size = (uint32_t)(line_next(line) - thread->frames);
        } else if (strncmp(line, "...", 3) == 0) {
            ret_frames->cut = true;
        }
    }
}

const struct cox_python_thread *cox_python_frames_of(const struct cox_python_frames *frames,
                                                     uint64_t self)
{
    for (uint32_t i = 0; i < frames->count; i++)
        if (frames->threads[i].self == self)
            return &frames->threads[i];
    return NULL;
}

bool cox_python_frame_text(const struct cox_python_thread *thread, uint32_t index, char *text,
                           uint32_t size)
{
    const char *line = thread->frames, *end = thread->frames + thread->size;
    for (; line < end; line = line_next(line))
        if (strncmp(line, "  File \"", 8) == 0 && index-- == 0)
            break;
    if (line >= end)
        return false;
    char copy[1024];
    snprintf(copy, sizeof copy, "%.*s", (int)(line_end(line) - line - 8), line + 8);
    char *quote = strstr(copy, "\", line ");
    if (!quote)
        return false;
    *quote = '\0';
    char *number = quote + 8, *in = strstr(number, " in ");
    if (!in)
        return false;
    *in = '\0';
    const char *slash = strrchr(copy, '/');
    snprintf(text, size, "%.80s (%.80s:%.12s)", in + 4, slash ? slash + 1 : copy, number);
    return true;
}
