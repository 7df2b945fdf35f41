#include "request.h"

#include <string.h>

#define END "\r\n\r\n"
#define VERSION "HTTP/1."

static bool is(const char *bytes, size_t size, const char *text)
{
    return size == strlen(text) && memcmp(bytes, text, size) == 0;
}

unsigned int cox_http_request_parse(const char *bytes, size_t size,
                                    struct cox_http_request *ret_request)
{
    if (!memmem(bytes, size, END, strlen(END)))
        return size < COX_HTTP_REQUEST_SIZE_MAX ? 0 : COX_HTTP_TOO_LARGE;
    /* METHOD SPACE PATH SPACE VERSION */
    const char *end = memchr(bytes, '\r', size);
    const char *path = memchr(bytes, ' ', (size_t)(end - bytes));
    const char *version = path ? memchr(path + 1, ' ', (size_t)(end - path - 1)) : NULL;
    if (!version || path[1] != '/' || memchr(version + 1, ' ', (size_t)(end - version - 1)))
        return COX_HTTP_BAD_REQUEST;
    const size_t method_size = (size_t)(path - bytes);
    path++;
    if ((size_t)(end - version - 1) != strlen(VERSION) + 1 ||
        memcmp(version + 1, VERSION, strlen(VERSION)) != 0)
        return COX_HTTP_VERSION;
    const bool head_only = is(bytes, method_size, "HEAD");
    if (!head_only && !is(bytes, method_size, "GET"))
        return COX_HTTP_METHOD_NOT_ALLOWED;
    const char *query = memchr(path, '?', (size_t)(version - path));
    *ret_request = (struct cox_http_request){
        .path = path,
        .path_size = (size_t)((query ? query : version) - path),
        .head_only = head_only,
    };
    return COX_HTTP_OK;
}

const char *cox_http_reason(unsigned int status)
{
    switch ((enum cox_http_status)status) {
    case COX_HTTP_OK:
        return "OK";
    case COX_HTTP_BAD_REQUEST:
        return "Bad Request";
    case COX_HTTP_NOT_FOUND:
        return "Not Found";
    case COX_HTTP_METHOD_NOT_ALLOWED:
        return "Method Not Allowed";
    case COX_HTTP_TOO_LARGE:
        return "Request Header Fields Too Large";
    case COX_HTTP_UNAVAILABLE:
        return "Service Unavailable";
    case COX_HTTP_VERSION:
        return "HTTP Version Not Supported";
    }
    return "Error";
}
