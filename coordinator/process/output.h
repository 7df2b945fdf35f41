/*
 * output: the output of a worker: a pipe, its bytes split into lines, and a ring of the last lines
 * of a rank.
 *
 * Threads: no locks of its own; one thread at a time per object.
 * Ownership: the objects are the caller's memory; an output owns its fd. Strings for the line
 *   function are lent for the call.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_OUTPUT_H
#define COX_COORDINATOR_OUTPUT_H

#include <coxswain/base.h>

/* A longer line is passed on in pieces of exactly this many bytes, and a rest. */
#define COX_OUTPUT_LINE_MAX 4000

/* The size of a ring: enough for the end of a stack trace. */
#define COX_LAST_LINES 16
#define COX_LAST_LINE_MAX 400

/* One line without its newline, terminated by a NUL. */
typedef void (*cox_output_line_fn)(void *context, const char *text, size_t size);

/* Bytes taken from one pipe per turn: with 8 ranks that write at full speed, a death is still seen
 * within 128 KiB of lines. */
#define COX_OUTPUT_READ_MAX 8192

/* One stream. */
struct cox_output {
    /* read end, O_NONBLOCK; -1: ended, or read elsewhere */
    int fd;
    /* bytes of an incomplete line */
    size_t size;
    char text[COX_OUTPUT_LINE_MAX + 1];
};

/* Takes size bytes, and calls line for each line that they complete. The bytes are passed on
 * unchanged, except that a NUL becomes '?', because a line is a C string. */
void cox_output_feed(struct cox_output *output, const char *bytes, size_t size,
                     cox_output_line_fn line, void *context);
/* The stream has ended: bytes after the last newline are a line as well. */
void cox_output_finish(struct cox_output *output, cox_output_line_fn line, void *context);

/* Reads the fd at most once, and feeds. At end of file or an error it closes the fd and finishes
 * the line. Returns the number of bytes; 0: nothing now, or nothing any more. */
size_t cox_output_read(struct cox_output *output, cox_output_line_fn line, void *context);
/* Reads what a dead writer left in the pipe, and finishes the line. It does not wait for end of
 * file, since a child of the dead process may hold the pipe open, and takes at most one pipe's
 * capacity, since that child may go on writing; the bytes of the dead process come first. */
void cox_output_drain(struct cox_output *output, cox_output_line_fn line, void *context);

/* Takes all bytes that are in the pipe now, for cox_output_feed; they become the caller's. Returns
 * 0, also when there are none; -ENOMEM. */
int cox_output_take(const struct cox_output *output, char **ret_bytes, size_t *ret_size);
/* What feed with these bytes and finish would come to, as far as a ring of last lines keeps it: no
 * more work than that, however much there is. The output stays as it is. */
void cox_output_last(const struct cox_output *output, const char *bytes, size_t size,
                     cox_output_line_fn line, void *context);

/* Writes "rank R: TEXT" to this process's standard output or error, in one piece. Never blocks: a
 * line for which there is no room, since nobody reads, is dropped. */
void cox_output_print(uint32_t rank, bool is_stderr, const char *text);

/* The last lines, of both streams of a rank together. */
struct cox_last_lines {
    /* kept, at most COX_LAST_LINES */
    uint32_t count;
    /* the slot that the next line takes, the oldest one once all are taken */
    uint32_t next;
    char texts[COX_LAST_LINES][COX_LAST_LINE_MAX + 1];
};

/* Keeps the first COX_LAST_LINE_MAX bytes of a line, and drops the oldest when full. */
void cox_last_lines_add(struct cox_last_lines *lines, const char *text, size_t size);
/* The lines, newest last, joined by newlines, in buffer, terminated. As many of the newest as fit
 * whole; if not even one does, the beginning of the newest. Returns the length. */
size_t cox_last_lines_join(const struct cox_last_lines *lines, char *buffer, size_t buffer_size);

#endif
