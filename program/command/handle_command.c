/* coxswain handle: prints the contents of a by-value handle, and whether it opens here. */
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "channel/socket/control_socket.h"
#include "program/cli/console.h"
#include "program/cli/runner.h"

#include <ctype.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define DEADLINE_MS 1000
#define DUMP_SIZE_DEFAULT 64
#define DUMP_SIZE_MAX (UINT64_C(1) << 20)
#define ROW_SIZE 16
/* Of a file: 128 digits with any blanks between them. */
#define TEXT_SIZE_MAX 1024

struct handle_options {
    const char *file;
    const char *socket_path;
    const char *name;
    uint64_t dump_size;
    bool hex;
    /* the control socket of `name` */
    char found[COX_SOCKET_PATH_SIZE];
};

/* ---- the file ---- */

static int text_read(const char *path, char *text, size_t *ret_size, struct cox_error *err)
{
    bool standard = strcmp(path, "-") == 0;
    _cox_cleanup_(cox_close_fd) int own = standard ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    int fd = standard ? STDIN_FILENO : own;
    size_t size = 0;
    ssize_t length = fd < 0 ? -1 : 0;
    while (fd >= 0 && size < TEXT_SIZE_MAX) {
        length = read(fd, text + size, TEXT_SIZE_MAX - size);
        if (length <= 0 && !(length < 0 && errno == EINTR))
            break;
        size += length > 0 ? (size_t)length : 0;
    }
    if (length < 0) {
        int e = errno;
        return cox_fail(err, COX_INVALID, "%.200s: %s", path, cox_status_text(-e));
    }
    *ret_size = size;
    return 0;
}

static int digit_value(char digit)
{
    const char *digits = "0123456789abcdef";
    const char *found = digit ? strchr(digits, tolower((unsigned char)digit)) : NULL;
    return found ? (int)(found - digits) : -1;
}

static int hex_decode(const char *path, char *text, size_t *size, struct cox_error *err)
{
    size_t count = 0;
    uint8_t byte = 0;
    for (size_t i = 0; i < *size; i++) {
        if (isspace((unsigned char)text[i]))
            continue;
        int value = digit_value(text[i]);
        if (value < 0)
            return cox_fail(err, COX_INVALID, "%.200s: byte %zu is no hexadecimal digit", path, i);
        byte = (uint8_t)(byte << 4 | value);
        if (count++ % 2)
            text[count / 2 - 1] = (char)byte;
    }
    if (count % 2)
        return cox_fail(err, COX_INVALID, "%.200s: %zu digits, expected %d", path, count,
                        2 * COX_HANDLE_SIZE);
    *size = count / 2;
    return 0;
}

static int handle_read(const struct handle_options *options, struct cox_handle *ret_handle,
                       struct cox_error *err)
{
    char text[TEXT_SIZE_MAX];
    size_t size = 0;
    int r = text_read(options->file, text, &size, err);
    if (r == 0 && options->hex)
        r = hex_decode(options->file, text, &size, err);
    if (r)
        return r;
    if (size != COX_HANDLE_SIZE) {
        size_t decoded = size;
        bool digits = !options->hex && hex_decode(options->file, text, &decoded, NULL) == 0 &&
                      decoded == COX_HANDLE_SIZE;
        return cox_fail(err, COX_INVALID, "%.200s: %zu%s bytes, a handle has %d%s", options->file,
                        size, size == TEXT_SIZE_MAX ? " or more" : "", COX_HANDLE_SIZE,
                        digits ? "; these are hexadecimal digits: read them with --hex" : "");
    }
    memcpy(ret_handle->bytes, text, COX_HANDLE_SIZE);
    return 0;
}

/* ---- what is in it ---- */

static const char *exporter_state(const struct cox_handle_info *info, bool here)
{
    uint64_t start;
    if (!here)
        return "unknown from here";
    int r = cox_peer_start_time((pid_t)info->pid, &start);
    if (r == COX_PEER_DEAD)
        return "gone";
    if (r)
        return r == -EACCES ? "hidden by /proc (hidepid)" : cox_status_text(r);
    if (start != info->start)
        return "gone: the pid is another process's by now";
    return cox_peer_exiting((pid_t)info->pid) ? "gone, or about to be" : "alive";
}

static void info_print(const struct cox_handle_info *info)
{
    uint64_t system;
    int r = cox_handle_system(&system, NULL);
    bool here = r == 0 && system == info->system;
    printf("kind        %s\n",
           info->kind == COX_HANDLE_MEMORY ? "memory" : "other: a socket, a pipe, a device, ...");
    printf("exporter    process %" PRIu32 ", %s\n", info->pid, exporter_state(info, here));
    printf("start       %" PRIu64 ", in clock ticks since boot\n", info->start);
    printf("system      %016" PRIx64 ", %s\n", info->system,
           r      ? cox_status_text(r)
           : here ? "this one"
                  : "not this one: another machine, boot, pid or time namespace");
    printf("fd          %" PRIu32 " there\n", info->fd);
    printf("object      device %u:%u, inode %" PRIu64 "\n", major((dev_t)info->dev),
           minor((dev_t)info->dev), info->ino);
    if (info->kind == COX_HANDLE_MEMORY)
        printf("size        %" PRIu64 " bytes\n", info->size);
    else
        printf("size        nothing to map\n");
    printf("offset      %" PRIu64 "\n", info->offset);
    printf("serial      %" PRIu32 "\n", info->serial);
}

/* ---- what it opens ---- */

static void row_print(uint64_t offset, const uint8_t *bytes, size_t count)
{
    printf("%08" PRIx64 " ", offset);
    for (size_t i = 0; i < ROW_SIZE; i++) {
        if (i % 8 == 0)
            printf(" ");
        if (i < count)
            printf("%02x ", bytes[i]);
        else
            printf("   ");
    }
    printf(" |");
    for (size_t i = 0; i < count; i++)
        printf("%c", bytes[i] >= ' ' && bytes[i] <= '~' ? bytes[i] : '.');
    printf("|\n");
}

/* With read, since access to a mapping that shrinks meanwhile would be fatal. */
static int memory_print(const struct cox_handle_info *info, int fd, uint64_t size,
                        struct cox_error *err)
{
    size = size < info->size ? size : info->size;
    for (uint64_t at = 0; at < size; at += ROW_SIZE) {
        uint8_t row[ROW_SIZE];
        size_t wanted = size - at < ROW_SIZE ? (size_t)(size - at) : ROW_SIZE;
        ssize_t count;
        do
            count = pread(fd, row, wanted, (off_t)(info->offset + at));
        while (count < 0 && errno == EINTR);
        if (count < 0) {
            int e = errno;
            return cox_fail(err, -e, "the memory cannot be read: %s", cox_status_text(-e));
        }
        if ((size_t)count < wanted)
            return cox_fail(err, COX_NOT_FOUND, "the object was truncated while it was read");
        row_print(at, row, wanted);
    }
    return 0;
}

static int opened_print(const struct handle_options *options, const struct cox_handle *handle,
                        const struct cox_handle_info *info, struct cox_error *err)
{
    static const char *const ways[] = {
        [COX_HANDLE_BY_DUP] = "dup: it is this process's own",
        [COX_HANDLE_BY_PIDFD] = "pidfd_getfd",
        [COX_HANDLE_BY_SOCKET] = "the control socket",
        [COX_HANDLE_BY_PROC] = "/proc",
    };
    enum cox_handle_way way;
    int fd = -1;
    int r = cox_handle_open_way(handle, options->socket_path, cox_deadline_after_ms(DEADLINE_MS),
                                &fd, &way, err);
    if (r)
        return r;
    printf("opened by   %s\n", ways[way]);
    if (info->kind == COX_HANDLE_MEMORY)
        r = memory_print(info, fd, options->dump_size, err);
    close(fd);
    return r;
}

/* ---- the command ---- */

static int take_file(void *choice, int count, char *const *words, struct cox_error *err)
{
    struct handle_options *options = choice;
    if (count != 1)
        return cox_fail(err, COX_INVALID, "%d files named, expected one", count);
    if (options->socket_path && options->name)
        return cox_fail(err, COX_INVALID,
                        "--socket and --name are two ways to say the same: use one");
    options->file = words[0];
    if (!options->name)
        return 0;
    options->socket_path = options->found;
    return cox_control_socket_find(options->name, options->found, err);
}

static void init(void *choice)
{
    struct handle_options *options = choice;
    options->dump_size = DUMP_SIZE_DEFAULT;
}

static int run(void *choice)
{
    const struct handle_options *options = choice;
    struct cox_handle handle;
    struct cox_handle_info info;
    struct cox_error err = {0}, why = {0};
    int r = handle_read(options, &handle, &err);
    if (r == 0 && cox_handle_parse(&handle, &info, &why))
        r = cox_fail(&err, COX_INVALID, "%.200s: %s", options->file, why.text);
    if (r) { /* an error of the file, not of a worker */
        cox_console_say("%s", err.text);
        return COX_EXIT_USAGE;
    }
    info_print(&info);
    return opened_print(options, &handle, &info, &err) ? cox_exit_with(&err) : COX_EXIT_OK;
}

#define TEXT(number) TEXT_OF(number)
#define TEXT_OF(number) #number

static const struct cox_option option_table[] = {
    {"hex", NULL, "FILE has the handle as 128 hexadecimal digits; blanks do not count",
     COX_FLAG(struct handle_options, hex)},
    {"bytes", "N",
     "print at most N bytes of the memory (default " TEXT(DUMP_SIZE_DEFAULT) ", 0: none)",
     COX_NUMBER(struct handle_options, dump_size, 0, DUMP_SIZE_MAX)},
    {"socket", "PATH", "where to ask for it when pidfd_getfd is missing or denied",
     COX_TEXT(struct handle_options, socket_path)},
    {"name", "NAME", "the same: the control socket of this group",
     COX_TEXT(struct handle_options, name)},
    {0},
};
static const struct cox_option_group handle_group = {.options = option_table};

const struct cox_command cox_command_handle = {
    .name = "handle",
    .summary = "say what a by-value handle means, and open it",
    .arguments = "FILE",
    .text = "Reads the 64 bytes of a by-value handle from FILE (-: standard input), prints what is "
            "in them and whether its exporter lives, opens the handle as a worker would, prints "
            "the way that was taken, and the first bytes of the memory.",
    .examples = "  coxswain handle FILE --bytes 64\n",
    .choice_size = sizeof(struct handle_options),
    .init = init,
    .groups = {{&handle_group, 0}},
    .words = take_file,
    .run = run,
};
