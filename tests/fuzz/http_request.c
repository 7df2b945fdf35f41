/* The head of an HTTP request of any bytes: refused, or a method and a path that stand there. */
#include "fuzz.h"

#include "program/metrics/request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct cox_http_request untouched = {.path = "untouched", .path_size = 9};
    struct cox_http_request request = untouched;
    /* Exactly as long, so that a sanitizer sees what is read behind it. */
    char *bytes = malloc(size ? size : 1);

    FUZZ_CHECK(bytes);
    if (size)
        memcpy(bytes, data, size);
    const unsigned int status = cox_http_request_parse(bytes, size, &request);
    if (status == COX_HTTP_OK) {
        const size_t method_size = request.head_only ? 5 : 4;
        FUZZ_CHECK(memcmp(bytes, request.head_only ? "HEAD " : "GET ", method_size) == 0);
        FUZZ_CHECK(request.path == bytes + method_size && request.path[0] == '/');
        FUZZ_CHECK(request.path_size > 0 && method_size + request.path_size < size);
        FUZZ_CHECK(!memchr(request.path, ' ', request.path_size) &&
                   !memchr(request.path, '?', request.path_size) &&
                   !memchr(request.path, '\r', request.path_size));
    } else {
        FUZZ_CHECK(request.path == untouched.path && !request.head_only);
        FUZZ_CHECK(status ? strcmp(cox_http_reason(status), "Error") != 0
                          : size < COX_HTTP_REQUEST_SIZE_MAX);
    }
    free(bytes);
    return 0;
}
