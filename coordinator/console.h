/*
 * console: standard error, shared by messages, the workers' lines and a progress bar, none of which
 * garbles another.
 *
 * Threads: any.
 * Ownership: nothing; one per process, since it is the process's standard error.
 * Blocks: on standard error.
 * If the process dies: a progress bar stays on the terminal.
 */
#ifndef COX_COORDINATOR_CONSOLE_H
#define COX_COORDINATOR_CONSOLE_H

#include "../channel/base.h"

/* "coxswain: TEXT" */
void cox_console_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* TEXT as it is, with a newline. */
void cox_console_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Draws the bar; nothing when standard error is no terminal. */
void cox_console_progress(uint64_t done, uint64_t total);
/* Takes the bar away. */
void cox_console_progress_end(void);

#endif
