#include "dialog.h"

#include "channel/base/idioms.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MARK "> "
/* So long what was said before may take to be written, so that the mark comes after it. */
#define FLUSH_MS 1000

/* Standard output may be a file. Nothing depends on the mark. */
static void mark_show(void)
{
    cox_console_flush(cox_deadline_after_ms(FLUSH_MS));
    if (isatty(STDERR_FILENO) && write(STDERR_FILENO, MARK, strlen(MARK)) < 0)
        return;
}

/* Returns 0; COX_CLOSED; -errno. */
static int input_await(int stop_fd)
{
    struct pollfd fds[2] = {
        {.fd = STDIN_FILENO, .events = POLLIN},
        {.fd = stop_fd, .events = POLLIN},
    };
    while (poll(fds, 2, -1) < 0)
        if (errno != EINTR)
            return -errno;
    return fds[1].revents ? COX_CLOSED : 0;
}

int cox_dialog_read(int stop_fd, char **ret_line, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *line = NULL;
    size_t size = 0, capacity = 0;
    mark_show();
    for (;;) {
        char part[4096];
        int r = input_await(stop_fd);
        ssize_t count = r ? 0 : read(STDIN_FILENO, part, sizeof part);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return cox_fail(err, -errno, "standard input: %s", cox_status_text(-errno));
        if (r == COX_CLOSED)
            return cox_fail(err, r, "stopped");
        if (r)
            return cox_fail(err, r, "standard input: %s", cox_status_text(r));
        if (count == 0 && size == 0)
            return COX_EMPTY;
        r = cox_reserve((void **)&line, &capacity, size + (size_t)count + 1, 1);
        if (r)
            return cox_fail(err, r, "no memory for a line");
        memcpy(line + size, part, (size_t)count);
        size += (size_t)count;
        line[size] = '\0';
        /* A terminal gives one line at a time, or less if Ctrl-D was typed within it. */
        if (count == 0 || line[size - 1] == '\n')
            break;
    }
    line[strcspn(line, "\n")] = '\0';
    *ret_line = cox_steal_ptr(&line);
    return 0;
}
