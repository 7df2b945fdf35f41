/*
 * request: the head of an HTTP/1 request, as far as a server needs it that only lends texts: its
 * method and its path. Each connection has one request.
 *
 * Threads: any.
 * Ownership: path points into the bytes.
 * Blocks: nothing.
 * Bytes: untrusted. Nothing behind size is read, and nothing of the header fields is used.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_METRICS_REQUEST_H
#define COX_PROGRAM_METRICS_REQUEST_H

#include <stdbool.h>
#include <stddef.h>

#define COX_HTTP_REQUEST_SIZE_MAX 8192u

enum cox_http_status {
    COX_HTTP_OK = 200,
    COX_HTTP_BAD_REQUEST = 400,
    COX_HTTP_NOT_FOUND = 404,
    COX_HTTP_METHOD_NOT_ALLOWED = 405,
    COX_HTTP_TOO_LARGE = 431,
    COX_HTTP_UNAVAILABLE = 503,
    COX_HTTP_VERSION = 505,
};

struct cox_http_request {
    /* without a query */
    const char *path;
    size_t path_size;
    /* HEAD: the reply has no body */
    bool head_only;
};

/* Parses what has arrived.
 * Returns
 *   0: the head is not complete; ret_request is untouched, as it is by every status but OK
 *   COX_HTTP_OK: a GET or a HEAD
 *   BAD_REQUEST, METHOD_NOT_ALLOWED, VERSION: what else it is
 *   COX_HTTP_TOO_LARGE: the head is not complete at COX_HTTP_REQUEST_SIZE_MAX bytes
 */
unsigned int cox_http_request_parse(const char *bytes, size_t size,
                                    struct cox_http_request *ret_request);

/* The text of a status: "Not Found". */
const char *cox_http_reason(unsigned int status);

#endif
