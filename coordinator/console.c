#include "console.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#define BAR_WIDTH 40
#define REDRAW_NS (50 * COX_NSEC_PER_MSEC)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t bar_done, bar_total; /* total 0: no bar is there */
static uint64_t bar_drawn_ns;

static void bar_clear(void)
{
    if (bar_total)
        fputs("\r\033[K", stderr);
}

static void bar_draw(void)
{
    if (!bar_total)
        return;
    char bar[BAR_WIDTH + 1];
    int filled = (int)(bar_done * BAR_WIDTH / bar_total);
    for (int i = 0; i < BAR_WIDTH; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[BAR_WIDTH] = 0;
    fprintf(stderr, "\r[%s] %" PRIu64 "/%" PRIu64 "\033[K", bar, bar_done, bar_total);
    fflush(stderr);
}

static void line_write(const char *prefix, const char *format, va_list args)
{
    pthread_mutex_lock(&lock);
    bar_clear();
    fputs(prefix, stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    bar_draw();
    pthread_mutex_unlock(&lock);
}

void cox_console_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_write("coxswain: ", format, args);
    va_end(args);
}

void cox_console_line(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    line_write("", format, args);
    va_end(args);
}

void cox_console_progress(uint64_t done, uint64_t total)
{
    if (!isatty(STDERR_FILENO))
        return;
    pthread_mutex_lock(&lock);
    bar_done = done;
    bar_total = total;
    uint64_t now = cox_now_ns();
    if (now - bar_drawn_ns >= REDRAW_NS) {
        bar_drawn_ns = now;
        bar_draw();
    }
    pthread_mutex_unlock(&lock);
}

void cox_console_progress_end(void)
{
    pthread_mutex_lock(&lock);
    bar_clear();
    bar_total = 0;
    fflush(stderr);
    pthread_mutex_unlock(&lock);
}
