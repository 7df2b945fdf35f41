#include "console.h"

#include "channel/base/thread.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define BAR_WIDTH 20
#define COLUMN_COUNT_DEFAULT 80
#define REDRAW_NS (50 * COX_NSEC_PER_MSEC)
/* Bytes of lines that may be queued: the burst of a stack trace from every rank of a large group.
 * The program's own messages have a little more room than the workers' lines, since they report the
 * result. */
#define LINES_SIZE_MAX (256u << 10)
#define SAYS_SIZE_MAX (LINES_SIZE_MAX + (64u << 10))
#define CLEAR "\r\033[K"

struct line {
    struct line *next;
    /* lines lost between the previous one and this one */
    uint64_t dropped;
    size_t size;
    /* with its newline */
    char text[];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held over a write */
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER;
static pthread_cond_t written; /* on CLOCK_MONOTONIC */
static bool threaded, writing;
static struct line *first, *last;
static size_t waiting_size;
static uint64_t dropped;        /* since the thread took its last line */
static struct cox_progress bar; /* total 0: no bar */
static uint64_t bar_started_ns;
static bool bar_changed,
    bar_is_there; /* whether the written part of the queue has left it on the terminal */
static uint64_t bar_drawn_ns;

static size_t column_count(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col
                                                                           : COLUMN_COUNT_DEFAULT;
}

/* Never longer than a row of the terminal, since only one is removed. */
static void bar_text(char *text, size_t text_size)
{
    char hashes[BAR_WIDTH + 1], line[256], rate[64] = "", left[64] = "";
    const double seconds = (double)(cox_now_ns() - bar_started_ns) / 1e9;
    const uint64_t full = bar.done * BAR_WIDTH / bar.total;
    for (uint64_t i = 0; i < BAR_WIDTH; i++)
        hashes[i] = i < full ? '#' : '.';
    hashes[BAR_WIDTH] = 0;
    if (bar.unit && seconds > 0)
        snprintf(rate, sizeof rate, ", %.0f %s/s", (double)bar.amount / seconds, bar.unit);
    if (bar.done && bar.done < bar.total)
        snprintf(left, sizeof left, ", ETA %.0f s",
                 seconds * (double)(bar.total - bar.done) / (double)bar.done);
    snprintf(line, sizeof line, "[%s] %" PRIu64 "/%" PRIu64 " %s%s%s", hashes, bar.done, bar.total,
             bar.what, rate, left);
    snprintf(text, text_size, "\r%.*s\033[K", (int)column_count() - 1, line);
}

/* One write, or several if the kernel takes only a part. */
static void write_whole(const char *text, size_t size)
{
    while (size > 0) {
        ssize_t done = write(STDERR_FILENO, text, size);
        if (done < 0 && errno == EAGAIN) { /* another process made it non-blocking */
            struct pollfd fd = {.fd = STDERR_FILENO, .events = POLLOUT};
            poll(&fd, 1, -1);
        } else if (done < 0 && errno != EINTR) {
            return; /* its reader is gone */
        } else if (done > 0) {
            text += done;
            size -= (size_t)done;
        }
    }
}

/* The next piece for the terminal: the count of lost lines, a line, or the bar. The lock is held.
 * NULL: none; or no memory, and a line is lost. */
static char *piece_take(size_t *ret_size)
{
    struct line *line = first;
    uint64_t lost = line ? line->dropped : dropped;
    char note[128] = "", drawn[300] = "";
    if (lost)
        snprintf(note, sizeof note,
                 "coxswain: %" PRIu64 " lines are lost: standard error was not read in time\n",
                 lost);
    if (bar.total)
        bar_text(drawn, sizeof drawn);
    const char *clear = bar_is_there ? CLEAR : "";
    char *piece = NULL;
    int size = asprintf(&piece, "%s%s%.*s%s", clear, note, line ? (int)line->size : 0,
                        line ? line->text : "", drawn);
    bar_is_there = bar.total > 0;
    bar_changed = false;
    if (line) {
        first = line->next;
        last = first ? last : NULL;
        waiting_size -= line->size;
        free(line);
    } else {
        dropped = 0;
    }
    *ret_size = (size_t)size;
    return size < 0 ? NULL : piece;
}

/* The lock is held on entry and return, and released while a piece is written. */
static void pieces_write(void)
{
    while (first || dropped || bar_changed) {
        size_t size;
        char *piece = piece_take(&size);
        writing = true;
        pthread_mutex_unlock(&lock);
        if (piece)
            write_whole(piece, size);
        free(piece);
        pthread_mutex_lock(&lock);
        writing = false;
    }
}

static void *writer_main(void *argument)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        pieces_write();
        pthread_cond_broadcast(&written);
        pthread_cond_wait(&filled, &lock);
    }
    return argument;
}

static void writer_start(void)
{
    cox_condition_init(&written);
    pthread_t thread;
    bool started = cox_thread_start(&thread, writer_main, NULL) == 0;
    if (started)
        pthread_detach(thread);
    pthread_mutex_lock(&lock);
    threaded = started;
    pthread_mutex_unlock(&lock);
}

void cox_console_start(void)
{
    pthread_once(&once, writer_start);
}

bool cox_console_flush(uint64_t deadline_ns)
{
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&lock);
    while (threaded && (first || dropped || bar_changed || writing) && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&written, &lock, &deadline);
    bool all = !first && !dropped && !writing;
    pthread_mutex_unlock(&lock);
    return all;
}

/* Wakes the thread to write. The lock is held. */
static void wake(void)
{
    if (threaded)
        pthread_cond_signal(&filled);
    else if (!writing)
        pieces_write();
}

static void line_add(const char *prefix, size_t size_max, const char *format, va_list args)
{
    char *text = NULL;
    int size = vasprintf(&text, format, args);
    size_t prefix_size = strlen(prefix), whole = prefix_size + (size_t)size + 1;
    struct line *line = size < 0 ? NULL : malloc(sizeof *line + whole);
    if (line) {
        *line = (struct line){.size = whole};
        memcpy(line->text, prefix, prefix_size);
        memcpy(line->text + prefix_size, text, (size_t)size);
        line->text[whole - 1] = '\n';
    }
    if (size >= 0)
        free(text);
    pthread_mutex_lock(&lock);
    if (line && waiting_size + whole <= size_max) {
        line->dropped = dropped;
        dropped = 0;
        waiting_size += whole;
        if (last)
            last->next = line;
        else
            first = line;
        last = line;
        line = NULL;
    } else {
        dropped++;
    }
    wake();
    pthread_mutex_unlock(&lock);
    free(line);
}

void cox_console_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_add("coxswain: ", SAYS_SIZE_MAX, format, args);
    va_end(args);
}

void cox_console_line(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_add("", LINES_SIZE_MAX, format, args);
    va_end(args);
}

void cox_console_progress(const struct cox_progress *progress)
{
    if (!isatty(STDERR_FILENO))
        return;
    pthread_mutex_lock(&lock);
    uint64_t now = cox_now_ns();
    if (!bar.total)
        bar_started_ns = now;
    bar = *progress;
    if (now - bar_drawn_ns >= REDRAW_NS) {
        bar_drawn_ns = now;
        bar_changed = true;
        wake();
    }
    pthread_mutex_unlock(&lock);
}

void cox_console_progress_end(void)
{
    pthread_mutex_lock(&lock);
    bar_changed = bar.total > 0;
    bar.total = 0;
    wake();
    pthread_mutex_unlock(&lock);
}

/* A line that is drawn between this and the output is overwritten, and drawn again. */
void cox_console_make_room(void)
{
    pthread_mutex_lock(&lock);
    bool is_there = bar.total > 0;
    pthread_mutex_unlock(&lock);
    if (is_there && isatty(STDOUT_FILENO))
        fputs(CLEAR, stdout);
}
