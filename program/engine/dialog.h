/*
 * dialog: prompts that somebody types at a terminal, one after the other.
 *
 * The terminal edits the line (backspace, Ctrl-W, Ctrl-U) before it is read. Ctrl-D ends the
 * dialog.
 *
 * Threads: one.
 * Ownership: lines are the caller's.
 * Blocks: until a line was typed, or stop_fd is readable.
 * If the process dies: nothing is left; the terminal's settings are not touched.
 */
#ifndef COX_PROGRAM_DIALOG_H
#define COX_PROGRAM_DIALOG_H

#include "program/cli/console.h"

/* Shows "> " on the terminal and reads the next line from standard input. stop_fd is not read.
 * Returns
 *   0: *ret_line, without its end, is to be freed
 *   COX_EMPTY: the input has ended
 *   COX_CLOSED: stop_fd is readable
 *   -errno
 */
int cox_dialog_read(int stop_fd, char **ret_line, struct cox_error *err);

#endif
