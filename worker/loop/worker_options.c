#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/options.h"
#include "channel/shm/geometry.h"
#include <coxswain/worker.h>

enum {
    FIELD_PREFIX = 1,
    FIELD_RANK = 2,
    FIELD_RANK_COUNT = 4,
    FIELD_ALL = 7,
};

static int parse_number(const char *what, const char *text, int64_t min, int64_t max,
                        int64_t *ret_value, struct cox_error *err)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max)
        return cox_fail(err, COX_INVALID, "%s is '%.60s': expected a number from %lld to %lld",
                        what, text, (long long)min, (long long)max);
    *ret_value = value;
    return 0;
}

static int parse_prefix(const char *what, const char *text, struct cox_worker_options *options,
                        struct cox_error *err)
{
    if (text[0] != '/')
        return cox_fail(err, COX_INVALID, "%s is '%.60s': expected a slash and the group's name",
                        what, text);
    int r = cox_name_check(text + 1, err);
    if (r == 0)
        snprintf(options->prefix, sizeof options->prefix, "%s", text);
    return r;
}

/* Sets the option `name`; unknown names are ignored. *found collects the required ones. */
static int set_option(struct cox_worker_options *options, const char *what, const char *name,
                      const char *text, unsigned *found, uint32_t *group_size,
                      struct cox_error *err)
{
    int64_t value = 0;
    int r = 0;
    if (strcmp(name, "prefix") == 0) {
        r = parse_prefix(what, text, options, err);
        *found |= FIELD_PREFIX;
    } else if (strcmp(name, "rank") == 0) {
        r = parse_number(what, text, 0, COX_RANK_COUNT_MAX - 1, &value, err);
        options->rank = (uint32_t)value;
        *found |= FIELD_RANK;
    } else if (strcmp(name, "world_size") == 0) {
        r = parse_number(what, text, 1, COX_RANK_COUNT_MAX, &value, err);
        options->rank_count = (uint32_t)value;
        *found |= FIELD_RANK_COUNT;
    } else if (strcmp(name, "ranks_per_group") == 0) {
        r = parse_number(what, text, 1, COX_RANK_COUNT_MAX, &value, err);
        *group_size = (uint32_t)value;
    } else if (strcmp(name, "device") == 0) {
        r = parse_number(what, text, INT32_MIN, INT32_MAX, &value, err);
        options->device = (int32_t)value;
    } else if (strcmp(name, "parent_pid") == 0) {
        r = parse_number(what, text, 1, INT32_MAX, &value, err);
        options->parent_pid = (int32_t)value;
    } else if (strcmp(name, "fds") == 0) {
        char rest;
        if (sscanf(text, "%d:%" SCNu32 "%c", &options->fd_first, &options->fd_count, &rest) != 2)
            r = cox_fail(err, COX_INVALID, "%s is '%.60s': expected FIRST:COUNT", what, text);
    } else if (strcmp(name, "notify_fd") == 0) {
        r = parse_number(what, text, 3, INT32_MAX, &value, err);
        options->notify_fd = (int)value;
    } else if (strcmp(name, "socket") == 0) {
        if (!text[0] || strlen(text) >= sizeof options->control_socket)
            r = cox_fail(err, COX_INVALID,
                         "%s: expected the path of a socket, under %zu characters", what,
                         sizeof options->control_socket);
        else
            snprintf(options->control_socket, sizeof options->control_socket, "%s", text);
    } else if (strcmp(name, "incarnation") == 0) {
        r = parse_number(what, text, 1, UINT32_MAX, &value, err);
        options->incarnation = (uint32_t)value;
    }
    return r;
}

static const struct {
    const char *flag;
    const char *variable;
    const char *name;
} sources[] = {
    {"--shm_name_prefix", "COXSWAIN_PREFIX", "prefix"},
    {"--local_rank", "COXSWAIN_RANK", "rank"},
    {"--local_world_size", "COXSWAIN_WORLD_SIZE", "world_size"},
    {"--npu_num_per_dp", NULL, "ranks_per_group"},
    {"--npu_device_id", "COXSWAIN_DEVICE", "device"},
    {"--parent_pid", "COXSWAIN_PARENT_PID", "parent_pid"},
    {"--global_rank", NULL, "ignored"}, /* of groups that span machines, which this one does not */
    {"--global_world_size", NULL, "ignored"},
    {NULL, "COXSWAIN_INCARNATION", "incarnation"},
    {NULL, "COXSWAIN_FDS", "fds"},
    {NULL, "COXSWAIN_NOTIFY_FD", "notify_fd"},
    {"--socket", NULL, "socket"},
};

/* The index of the flag argv[a]; -1: none. *ret_text: its value, in the same argument or,
 * *ret_count 2, in the next; NULL: none. */
static int find_flag(int argc, char **argv, int a, const char **ret_text, int *ret_count)
{
    for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++) {
        size_t length = sources[s].flag ? strlen(sources[s].flag) : 0;
        if (!length || strncmp(argv[a], sources[s].flag, length) != 0 ||
            (argv[a][length] != '=' && argv[a][length] != '\0'))
            continue;
        bool same = argv[a][length] == '=';
        *ret_count = same || a + 1 == argc ? 1 : 2;
        *ret_text = same ? argv[a] + length + 1 : *ret_count == 2 ? argv[a + 1] : NULL;
        return (int)s;
    }
    return -1;
}

int cox_worker_options_parse(struct cox_worker_options *options, int *argc, char **argv,
                             struct cox_error *err)
{
    unsigned found = 0;
    uint32_t group_size = 0;
    struct cox_worker_options parsed;
    int r = cox_options_copy(&parsed, sizeof parsed, options, "cox_worker_options", err);
    if (r)
        return r;
    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        const char *text = sources[i].variable ? getenv(sources[i].variable) : NULL;
        r = text ? set_option(&parsed, sources[i].variable, sources[i].name, text, &found,
                              &group_size, err)
                 : 0;
        if (r)
            return r;
    }
    const char *text;
    int count;
    for (int a = 1; a < *argc; a += count) {
        int s = find_flag(*argc, argv, a, &text, &count);
        if (s < 0) {
            count = 1;
            continue;
        }
        if (!text)
            return cox_fail(err, COX_INVALID, "%s needs a value", sources[s].flag);
        r = set_option(&parsed, sources[s].flag, sources[s].name, text, &found, &group_size, err);
        if (r)
            return r;
    }
    /* Where fds of handles come from; a worker attaches there only by --socket. */
    const char *control_socket = getenv("COXSWAIN_SOCKET");
    if (control_socket && !parsed.fd_store[0] && strlen(control_socket) < sizeof parsed.fd_store)
        snprintf(parsed.fd_store, sizeof parsed.fd_store, "%s", control_socket);
    if (parsed.control_socket[0]) {
        parsed.rank = found & FIELD_RANK ? parsed.rank : COX_WORKER_RANK_ANY;
        found |= FIELD_ALL;
    }
    if ((found & FIELD_ALL) != FIELD_ALL)
        return cox_fail(
            err, COX_INVALID,
            "not given%s%s%s; a worker is started by a coordinator (coxswain run -- COMMAND), or needs --socket, or --shm_name_prefix, --local_rank and --local_world_size",
            found & FIELD_PREFIX ? "" : ", which group", found & FIELD_RANK ? "" : ", which rank",
            found & FIELD_RANK_COUNT ? "" : ", how many ranks");
    int kept = *argc > 0; /* argv[0] is the program */
    for (int a = 1; a < *argc; a += count)
        if (find_flag(*argc, argv, a, &text, &count) < 0) {
            argv[kept++] = argv[a];
            count = 1;
        }
    /* With several groups on one node, the flags count ranks over all of them. */
    if (!parsed.incarnation && !parsed.control_socket[0])
        parsed.incarnation = 1;
    if (group_size && group_size < parsed.rank_count) {
        parsed.rank %= group_size;
        parsed.rank_count = group_size;
    }
    /* Removed, because a child would take its own fds of these numbers for them. */
    if (parsed.fd_count)
        unsetenv("COXSWAIN_FDS");
    if (parsed.notify_fd)
        unsetenv("COXSWAIN_NOTIFY_FD");
    argv[kept] = NULL;
    *argc = kept;
    /* Only as many bytes as the caller knows. */
    parsed.size = options->size;
    memcpy(options, &parsed, parsed.size < sizeof parsed ? parsed.size : sizeof parsed);
    return 0;
}
