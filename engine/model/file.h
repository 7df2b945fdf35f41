/*
 * file: reading the files of a checkpoint: whole ranges of bytes, and JSON objects.
 *
 * Reads go through pread and never through a mapping: a file that is cut short while it is read, or
 * a bad disk, is then a return value and not a SIGBUS.
 *
 * Any process, any thread; nothing is shared. The caller owns what is returned: fds are
 * close-on-exec, a JSON tree ends with json_decref (or the cleanup below). Blocks only on the file.
 * If the process dies nothing is left.
 */
#ifndef COX_MODEL_FILE_H
#define COX_MODEL_FILE_H

#include "channel/base/base.h"

#include <jansson.h>

/* Opens a regular file for reading; a FIFO, device or folder is refused and not waited for.
 * Returns 0; COX_NOT_FOUND; COX_CORRUPT not a regular file; a negative errno. */
int cox_file_open(const char *path, int *ret_fd, uint64_t *ret_size, struct cox_error *err);

/* Reads exactly size bytes at offset into the caller's buffer, over short reads and EINTR; path is
 * for the text. Returns 0; COX_CORRUPT the file ends earlier; a negative errno. */
int cox_file_read(int fd, const char *path, uint64_t offset, void *buffer, size_t size,
                  struct cox_error *err);

/* Parses size bytes of text, which must be one JSON object without duplicate keys. path and part
 * ("header", "content") are for the text of the error. Returns 0 and gives the tree; COX_CORRUPT;
 * -ENOMEM. */
int cox_json_parse(const char *text, size_t size, const char *path, const char *part,
                   json_t **ret_root, struct cox_error *err);

/* Opens, reads and parses a file of at most size_max bytes.
 * Returns 0 and gives the tree; the codes of the three functions above; COX_TOO_LARGE more than
 * size_max bytes; -ENOMEM. */
int cox_json_load(const char *path, size_t size_max, json_t **ret_root, struct cox_error *err);

/* What is wrong with the files of a model is wrong input of the user's, whoever reads them, and no
 * fault of a process: a code that says the former becomes COX_INVALID, COX_NOT_FOUND and all others
 * stay. Returns the code, which is err's, too. */
int cox_file_blame(int r, struct cox_error *err);

/* For _cox_cleanup_ on a json_t *. */
void cox_json_unref(json_t **root);

#endif
