/*
 * file: reads the files of a checkpoint: ranges of bytes, and JSON objects.
 *
 * Reads use pread and never a mapping. So a file truncated meanwhile, or a bad disk, gives an error
 * code and not a SIGBUS.
 *
 * Threads: any.
 * Ownership: the caller owns what is returned. fds are close-on-exec; a JSON tree is freed with
 *   json_decref, or the cleanup function below.
 * Blocks: only on the file.
 * If the process dies: nothing is left.
 */
#ifndef COX_MODEL_FILE_H
#define COX_MODEL_FILE_H

#include <coxswain/base.h>

#include <jansson.h>

/* Opens a regular file for reading. FIFOs, devices and folders are refused without blocking.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_CORRUPT: not a regular file
 *   -errno
 */
int cox_file_open(const char *path, int *ret_fd, uint64_t *ret_size, struct cox_error *err);

/* Reads exactly size bytes at offset into the caller's buffer, continuing after short reads and
 * EINTR. path is for the error text.
 * Returns
 *   0
 *   COX_CORRUPT: the file is shorter
 *   -errno
 */
int cox_file_read(int fd, const char *path, uint64_t offset, void *buffer, size_t size,
                  struct cox_error *err);

/* Parses size bytes of text, which must be one JSON object without duplicate keys. path and part
 * ("header", "content") are for the error text. Returns 0 and the tree, COX_CORRUPT, or -ENOMEM. */
int cox_json_parse(const char *text, size_t size, const char *path, const char *part,
                   json_t **ret_root, struct cox_error *err);

/* Opens, reads and parses a file of at most size_max bytes.
 * Returns
 *   0 and the tree
 *   as the three functions above
 *   COX_TOO_LARGE: more than size_max bytes
 *   -ENOMEM
 */
int cox_json_load(const char *path, size_t size_max, json_t **ret_root, struct cox_error *err);

/* Writes the value as JSON into text, for an error; "a long value" if that needs more than
 * size - 1 bytes. size is at least 13. Returns text. */
const char *cox_json_text(const json_t *value, char *text, size_t size);

/* Faults in the files of a model are invalid input of the user, not the fault of a process that
 * reads them. So codes for faulty bytes become COX_INVALID; COX_NOT_FOUND and all others stay.
 * Returns the code, which is also err's. */
int cox_file_blame(int r, struct cox_error *err);

/* For _cox_cleanup_ on a json_t *. */
void cox_json_unref(json_t **root);

#endif
