#include "console.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "program/service/visible.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
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
/* As in syslog(3). */
#define LEVEL_NOTICE 5
#define LEVEL_INFORMATION 6
#define CLEAR "\r\033[K"

struct line {
    struct line *next;
    /* lines lost between the previous one and this one */
    uint64_t dropped;
    size_t size;
    /* with its newline */
    char text[];
};

/* Written before any thread is started. */
static enum cox_log_format log_format = COX_LOG_PLAIN;
static bool log_priority;

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

static void line_add(int level, int64_t rank, size_t size_max, const char *text)
{
    struct cox_log_event event = {.level = level, .rank = rank, .text = text};
    clock_gettime(CLOCK_REALTIME, &event.time);
    _cox_cleanup_(cox_free_ptr) char *whole_line = cox_log_line(log_format, log_priority, &event);
    size_t whole = whole_line ? strlen(whole_line) : 0;
    struct line *line = whole_line ? malloc(sizeof *line + whole) : NULL;
    if (line) {
        *line = (struct line){.size = whole};
        memcpy(line->text, whole_line, whole);
    }
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

/* The journal says where standard error has to lead, so that a redirected one is none. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    struct stat info;
    char own[64];
    if (!stream || fstat(STDERR_FILENO, &info))
        return false;
    snprintf(own, sizeof own, "%ju:%ju", (uintmax_t)info.st_dev, (uintmax_t)info.st_ino);
    return strcmp(stream, own) == 0;
}

void cox_console_set_format(enum cox_log_format format)
{
    log_format = format;
    log_priority = stderr_is_journal();
}

int cox_console_take_format(void *member, const char *text, struct cox_error *err)
{
    enum cox_log_format *format = member;
    int r = cox_log_format_parse(text, format, err);
    if (r == 0)
        cox_console_set_format(*format);
    return r;
}

static void say(int level, const char *format, va_list args)
{
    _cox_cleanup_(cox_free_ptr) char *text = NULL, *visible = NULL;
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    visible = text ? cox_visible_text(text) : NULL; /* it may quote what a user has given */
    line_add(level, -1, SAYS_SIZE_MAX, visible ? visible : format);
}

void cox_console_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(LEVEL_NOTICE, format, args);
    va_end(args);
}

void cox_console_log(int level, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(level, format, args);
    va_end(args);
}

void cox_console_worker(uint32_t rank, const char *text)
{
    line_add(LEVEL_INFORMATION, rank, LINES_SIZE_MAX, text);
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
