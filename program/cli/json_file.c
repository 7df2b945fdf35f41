#include "json_file.h"

#include "channel/base/idioms.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_SIZE_MAX ((size_t)1 << 20)

/* Reads the whole file and adds a zero. O_NONBLOCK: a FIFO of that name is opened and refused; the
 * open does not block. */
static int text_read(const char *option, const char *path, char **ret_text, size_t *ret_size,
                     struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat info;
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
        return cox_fail(err, COX_NOT_FOUND, "%s: %s does not exist", option, path);
    if (fd < 0 || fstat(fd, &info) < 0) {
        int r = -errno;
        return cox_fail(err, r, "%s: cannot open %s: %s", option, path, cox_status_text(r));
    }
    if (!S_ISREG(info.st_mode))
        return cox_fail(err, COX_INVALID, "%s: %s is not a regular file", option, path);
    if ((uint64_t)info.st_size > FILE_SIZE_MAX)
        return cox_fail(err, COX_TOO_LARGE, "%s: %s has %jd bytes, at most %zu make sense", option,
                        path, (intmax_t)info.st_size, FILE_SIZE_MAX);
    _cox_cleanup_(cox_free_ptr) char *text = malloc((size_t)info.st_size + 1);
    size_t size = 0;
    ssize_t got = text ? 1 : 0;
    while (got > 0 && size < (size_t)info.st_size) {
        got = read(fd, text + size, (size_t)info.st_size - size);
        size += got > 0 ? (size_t)got : 0;
    }
    if (!text || got < 0) {
        int r = text ? -errno : -ENOMEM;
        return cox_fail(err, r, "%s: cannot read %s: %s", option, path, cox_status_text(r));
    }
    text[size] = '\0';
    *ret_text = cox_steal_ptr(&text);
    *ret_size = size;
    return 0;
}

int cox_json_file_read(const char *option, const char *path, struct cox_json_file *ret_file,
                       struct cox_error *err)
{
    _cox_cleanup_(cox_json_file_deinit) struct cox_json_file file = {.path = path};
    size_t size = 0;
    int r = text_read(option, path, &file.text, &size, err);
    if (r)
        return r;
    json_error_t error;
    file.root = json_loadb(file.text, size, JSON_REJECT_DUPLICATES, &error);
    /* The parser has a text for every mistake in the file, and none if it ran out of memory. */
    if (!file.root && !error.text[0])
        return cox_fail(err, -ENOMEM, "no memory to read %s", path);
    if (!file.root)
        return cox_fail(err, COX_INVALID, "%s, line %d, column %d: not valid JSON: %s", path,
                        error.line, error.column, error.text);
    if (!json_is_object(file.root))
        return cox_fail(err, COX_INVALID, "%s, line 1: expected an object, {\"KEY\": VALUE, ...}",
                        path);
    *ret_file = file;
    file = (struct cox_json_file){0};
    return 0;
}

void cox_json_file_deinit(struct cox_json_file *file)
{
    json_decref(file->root);
    free(file->text);
    *file = (struct cox_json_file){0};
}

/* The line of the index-th key of the outer object. The text is valid JSON. */
static int key_line(const char *text, size_t index)
{
    int line = 1, depth = 0, key_at = 1;
    for (const char *at = text; *at; at++) {
        if (*at == '\n') {
            line++;
        } else if (*at == '{' || *at == '[') {
            depth++;
        } else if (*at == '}' || *at == ']') {
            depth--;
        } else if (*at == '"') {
            key_at = line;
            for (at++; *at && *at != '"'; at++)
                at += *at == '\\' && at[1];
            if (!*at)
                break;
        } else if (*at == ':' && depth == 1 && index-- == 0) {
            return key_at;
        }
    }
    return line;
}

int cox_json_file_line(const struct cox_json_file *file, const char *key)
{
    size_t index = 0;
    /* The parser keeps the order of the file. */
    for (void *at = json_object_iter(file->root); at; at = json_object_iter_next(file->root, at)) {
        if (strcmp(json_object_iter_key(at), key) == 0)
            break;
        index++;
    }
    return key_line(file->text, index);
}
