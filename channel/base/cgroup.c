#include "cgroup.h"

#include "base_internal.h"
#include "idioms.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* "No limit" of version 1: the largest number of whole pages, which depends on their size. */
#define MEMORY_WITHOUT_LIMIT (UINT64_C(1) << 62)

struct resource {
    const char *controller;
    /* by version, 1 and 2 */
    const char *file[2];
    const char *used[2];
};

static const struct resource cpu = {"cpu", {"cpu.cfs_quota_us", "cpu.max"}, {NULL, NULL}};
static const struct resource memory = {
    "memory", {"memory.limit_in_bytes", "memory.max"}, {"memory.usage_in_bytes", "memory.current"}};
static const struct resource pids = {
    "pids", {"pids.max", "pids.max"}, {"pids.current", "pids.current"}};

/* The place of the process in one hierarchy, as paths that can be opened. */
struct place {
    int version;
    /* the highest group that can be seen */
    char top[PATH_MAX];
    /* the process's own: top, or below it */
    char group[PATH_MAX];
};

/* Returns 0 or -errno. */
static int file_read(const char *folder, const char *name, char *buffer, size_t buffer_size)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return -ENAMETOOLONG;
    const ssize_t length = cox_small_file_read(path, buffer, buffer_size);
    return length < 0 ? (int)length : 0;
}

/* Returns true if the comma-separated list contains the word. */
static bool list_has(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *item = list; item; item = strchr(item, ',')) {
        item += *item == ',';
        if (strncmp(item, word, length) == 0 && strchr(",\n", item[length]))
            return true;
    }
    return false;
}

/* mountinfo escapes spaces as a backslash and three octal digits. */
static void unescape(char *text)
{
    char *to = text;
    unsigned byte;
    for (const char *from = text; *from; to++) {
        if (*from == '\\' && sscanf(from + 1, "%3o", &byte) == 1) {
            *to = (char)byte;
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

static FILE *proc_open(const char *root, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/%s", root, name);
    return fopen(path, "re");
}

/* The path of the process's group in the hierarchy that has the controller. Returns the version of
 * that hierarchy: 1 when a line names the controller, else 2; 0: there is neither. */
static int group_find(const char *root, const char *controller, char *group, size_t group_size)
{
    FILE *file = proc_open(root, "cgroup");
    char line[PATH_MAX + 256];
    int version = 0;
    while (file && version != 1 && fgets(line, sizeof line, file)) {
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        bool named = list_has(++controllers, controller);
        if (!named && *controllers)
            continue;
        version = named ? 1 : 2;
        snprintf(group, group_size, "%s", path);
    }
    if (file)
        fclose(file);
    return version;
}

/* Returns true if the line is about the hierarchy and shows a mount that contains the group. */
static bool place_match(char *line, const char *root, const char *controller, const char *group,
                        struct place *place)
{
    char mount_root[PATH_MAX], mount_point[PATH_MAX], type[32], options[1024];
    const char *rest = strstr(line, " - "); /* optional fields come before */
    if (!rest || sscanf(rest, " - %31s %*s %1023s", type, options) != 2 ||
        sscanf(line, "%*s %*s %*s %4095s %4095s", mount_root, mount_point) != 2)
        return false;
    if (place->version == 2 ? strcmp(type, "cgroup2") != 0
                            : strcmp(type, "cgroup") != 0 || !list_has(options, controller))
        return false;
    unescape(mount_root);
    unescape(mount_point);
    /* A container's mount may begin below the root of the kernel's group names. */
    size_t length = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
    if (strncmp(group, mount_root, length) != 0 || !strchr("/", group[length]) ||
        strncmp(group + length, "/..", 3) == 0)
        return false;
    const char *below = strcmp(group + length, "/") == 0 ? "" : group + length;
    char procs[PATH_MAX];
    /* Another file system may be mounted over it. */
    return snprintf(place->top, sizeof place->top, "%s%s", root, mount_point) <
               (int)sizeof place->top &&
           snprintf(place->group, sizeof place->group, "%s%s", place->top, below) <
               (int)sizeof place->group &&
           snprintf(procs, sizeof procs, "%s/cgroup.procs", place->group) < (int)sizeof procs &&
           access(procs, F_OK) == 0;
}

static bool place_find(const char *root, const char *controller, struct place *place)
{
    char group[PATH_MAX];
    place->version = group_find(root, controller, group, sizeof group);
    if (!place->version)
        return false;
    FILE *file = proc_open(root, "mountinfo");
    char line[3 * PATH_MAX];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file))
        found = place_match(line, root, controller, group, place);
    if (file)
        fclose(file);
    return found;
}

/* *ret_limit is UINT64_MAX if the group has no limit. Returns 0 or -errno. */
static int limit_read(const struct resource *resource, const struct place *place,
                      uint64_t *ret_limit)
{
    char text[128], period_text[64];
    int64_t quota, period;
    *ret_limit = UINT64_MAX;
    int r = file_read(place->group, resource->file[place->version - 1], text, sizeof text);
    /* The root group has no such file, nor has a group whose parent does not delegate the
     * controller; that the folder is a group was checked. */
    if (r)
        return r == -ENOENT ? 0 : r;
    if (strncmp(text, "max", 3) == 0 || strncmp(text, "-1", 2) == 0)
        return 0;
    if (resource != &cpu) {
        uint64_t limit;
        if (sscanf(text, "%" SCNu64, &limit) != 1)
            return -EINVAL;
        if (limit < MEMORY_WITHOUT_LIMIT)
            *ret_limit = limit;
        return 0;
    }
    if (place->version == 1) {
        r = file_read(place->group, "cpu.cfs_period_us", period_text, sizeof period_text);
        if (r)
            return r;
        text[strcspn(text, "\n")] = ' ';
        strncat(text, period_text, sizeof text - strlen(text) - 1);
    }
    if (sscanf(text, "%" SCNd64 " %" SCNd64, &quota, &period) != 2 || quota <= 0 || period <= 0)
        return -EINVAL;
    *ret_limit = (uint64_t)quota * 1000000 / (uint64_t)period;
    return 0;
}

static void resource_read(const struct resource *resource, const char *root,
                          struct cox_cgroup_limit *ret_limit)
{
    struct cox_cgroup_limit found = {.state = COX_CGROUP_UNKNOWN};
    struct place place;
    bool all = place_find(root, resource->controller, &place), more = all;
    while (more) {
        uint64_t limit;
        if (limit_read(resource, &place, &limit)) {
            all = false;
        } else if (limit != UINT64_MAX &&
                   (found.state != COX_CGROUP_LIMITED || limit < found.limit)) {
            const char *used = resource->used[place.version - 1];
            char text[64] = "";
            found = (struct cox_cgroup_limit){.state = COX_CGROUP_LIMITED, .limit = limit};
            if (used && file_read(place.group, used, text, sizeof text) == 0)
                sscanf(text, "%" SCNu64, &found.used);
            snprintf(found.file, sizeof found.file, "%.*s/%s", (int)(sizeof found.file - 64),
                     place.group, resource->file[place.version - 1]);
        }
        more = strcmp(place.group, place.top) != 0;
        if (more)
            *strrchr(place.group, '/') = '\0';
    }
    if (all && found.state == COX_CGROUP_UNKNOWN)
        found.state = COX_CGROUP_NONE;
    *ret_limit = found;
}

void cox_cgroup_read(const char *root, struct cox_cgroup *ret_cgroup)
{
    resource_read(&cpu, root, &ret_cgroup->cpu);
    resource_read(&memory, root, &ret_cgroup->memory);
    resource_read(&pids, root, &ret_cgroup->pids);
}
