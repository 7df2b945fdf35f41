/*
 * console: standard error, shared by messages, the workers' lines and a progress bar, none of which
 * garbles another.
 *
 * A write to a paused terminal or an unread pipe blocks for ever, and a thread that watches
 * processes must not block. So after start, lines are queued, and one thread writes them, each with
 * one write. When the queue is full, lines are lost; a line in their place says how many.
 *
 * Threads: any.
 * Ownership: nothing; one per process, since it is the process's standard error. The thread is
 *   never joined: it may be inside a write that never returns.
 * Blocks: before start, on standard error; after it only flush, until its deadline.
 * If the process dies: a progress bar stays on the terminal, and what is queued is lost.
 */
#ifndef COX_PROGRAM_CONSOLE_H
#define COX_PROGRAM_CONSOLE_H

#include "program/service/log_line.h"

/* From now on no call here blocks on standard error. If no thread can be made, nothing changes. */
void cox_console_start(void);
/* Blocks until the queue is written. False: the deadline has passed before that. */
bool cox_console_flush(uint64_t deadline_ns);

/* How lines look from now on; before, and without a call, they are plain. Called before start. If
 * standard error is systemd's journal (JOURNAL_STREAM), each line begins with its level. */
void cox_console_set_format(enum cox_log_format format);
/* Takes --log-format into an enum cox_log_format, which is set, too. Returns 0, or COX_INVALID. */
int cox_console_take_format(void *format, const char *text, struct cox_error *err);

/* "coxswain: TEXT", with level 5, as in syslog(3), or another one. */
void cox_console_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cox_console_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "[rank RANK] TEXT": a line that a worker wrote. */
void cox_console_worker(uint32_t rank, const char *text);
struct cox_progress {
    /* "prompts"; static storage */
    const char *what;
    uint64_t done, total;
    /* "tokens": so many so far, shown per second; NULL: there is no rate. Static storage. */
    const char *unit;
    uint64_t amount;
};
/* Draws a line: a bar, "12/40 prompts", "1234 tokens/s", "ETA 3 s", the time since the first call.
 * Nothing when standard error is no terminal. */
void cox_console_progress(const struct cox_progress *progress);
/* Removes the line. */
void cox_console_progress_end(void);
/* To be called before lines are written to standard output: if they go to a terminal, the progress
 * line makes room for them. */
void cox_console_make_room(void);

#endif
