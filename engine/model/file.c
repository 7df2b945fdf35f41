#include "file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel/base/idioms.h"

int cox_file_open(const char *path, int *ret_fd, uint64_t *ret_size, struct cox_error *err)
{
    /* With O_NONBLOCK a FIFO of that name is opened and refused below, instead of blocking. */
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat stat;

    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
        return cox_fail(err, COX_NOT_FOUND, "%s does not exist", path);
    if (fd < 0 || fstat(fd, &stat) < 0) {
        int r = -errno;
        return cox_fail(err, r, "cannot open %s: %s", path, cox_status_text(r));
    }
    if (!S_ISREG(stat.st_mode))
        return cox_fail(err, COX_CORRUPT, "%s is not a regular file", path);

    *ret_size = (uint64_t)stat.st_size;
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_file_read(int fd, const char *path, uint64_t offset, void *buffer, size_t size,
                  struct cox_error *err)
{
    size_t done = 0;

    while (done < size) {
        ssize_t n = pread(fd, (char *)buffer + done, size - done, (off_t)(offset + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            int r = -errno;
            return cox_fail(err, r, "cannot read %s: %s", path, cox_status_text(r));
        }
        if (n == 0)
            return cox_fail(
                err, COX_CORRUPT,
                "%s ends at or before byte %llu and bytes up to %llu are needed; was it replaced or truncated?",
                path, (unsigned long long)(offset + done), (unsigned long long)(offset + size));
        done += (size_t)n;
    }
    return 0;
}

int cox_file_blame(int r, struct cox_error *err)
{
    static const int input[] = {COX_CORRUPT, COX_TOO_LARGE, -EACCES,       -EPERM,
                                -ELOOP,      -EISDIR,       -ENAMETOOLONG, -ENXIO};

    for (size_t i = 0; i < sizeof input / sizeof input[0]; i++) {
        if (r != input[i])
            continue;
        if (err)
            err->code = COX_INVALID;
        return COX_INVALID;
    }
    return r;
}

int cox_json_parse(const char *text, size_t size, const char *path, const char *part,
                   json_t **ret_root, struct cox_error *err)
{
    json_error_t error;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);

    /* The parser has a text for every mistake in the input, but none when it is out of memory. */
    if (!root && !error.text[0])
        return cox_fail(err, -ENOMEM, "%s: no memory for its %s", path, part);
    if (!root)
        return cox_fail(err, COX_CORRUPT, "%s: the %s is not valid JSON: %s (line %d, column %d)",
                        path, part, error.text, error.line, error.column);
    if (!json_is_object(root)) {
        json_decref(root);
        return cox_fail(err, COX_CORRUPT, "%s: the %s is JSON but not an object", path, part);
    }
    *ret_root = root;
    return 0;
}

int cox_json_load(const char *path, size_t size_max, json_t **ret_root, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    _cox_cleanup_(cox_free_ptr) char *text = NULL;
    uint64_t size;
    int r;

    r = cox_file_open(path, &fd, &size, err);
    if (r)
        return r;
    if (size > size_max)
        return cox_fail(err, COX_TOO_LARGE, "%s has %llu bytes; at most %zu are allowed", path,
                        (unsigned long long)size, size_max);
    text = malloc((size_t)size + 1); /* + 1: never malloc(0) */
    if (!text)
        return cox_fail(err, -ENOMEM, "no memory to read %s", path);
    r = cox_file_read(fd, path, 0, text, (size_t)size, err);
    if (r)
        return r;
    return cox_json_parse(text, (size_t)size, path, "content", ret_root, err);
}

const char *cox_json_text(const json_t *value, char *text, size_t size)
{
    size_t n = json_dumpb(value, text, size - 1, JSON_ENCODE_ANY | JSON_COMPACT);

    if (n < size)
        text[n] = '\0';
    if (n == 0 || n >= size)
        memcpy(text, "a long value", sizeof("a long value"));
    return text;
}

void cox_json_unref(json_t **root)
{
    json_decref(*root);
}
