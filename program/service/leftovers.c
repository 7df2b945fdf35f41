#include "leftovers.h"

#include <coxswain/base.h>
#include "channel/base/idioms.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER "/dev/shm"
#define CONTROL_END "_control"

/* Returns true if the entry is the control region of a dead group of this user. A shared lock: two
 * that look at the same time do not take each other for a coordinator. */
static bool is_dead(int folder_fd, const char *entry)
{
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd =
        openat(folder_fd, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    return fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
           flock(fd, LOCK_SH | LOCK_NB) == 0;
}

bool cox_leftovers_group(const char *entry, char name[COX_NAME_SIZE_MAX + 1])
{
    const size_t length = strlen(entry), end = strlen(CONTROL_END);
    if (length <= end || strcmp(entry + length - end, CONTROL_END) != 0 ||
        length - end > COX_NAME_SIZE_MAX)
        return false;
    memcpy(name, entry, length - end);
    name[length - end] = '\0';
    return cox_name_check(name, NULL) == 0;
}

/* Other tests leave such names at the same time. */
static bool counts_here(const char *name)
{
#if COX_TESTING
    const char *prefix = getenv("COXSWAIN_TEST_LEFTOVERS");
    return prefix && strncmp(name, prefix, strlen(prefix)) == 0;
#else
    (void)name;
    return true;
#endif
}

static uint32_t names_count(const char *name)
{
    const size_t length = strlen(name);
    uint32_t count = 0;
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *entry; folder && (entry = readdir(folder));) {
        const char *start = entry->d_name;
        if (strncmp(start, "sem.", 4) == 0)
            start += 4;
        count += strncmp(start, name, length) == 0 && start[length] == '_';
    }
    if (folder)
        closedir(folder);
    return count;
}

bool cox_leftovers_find(const char *own_name, char text[COX_LEFTOVERS_TEXT_SIZE])
{
    char name[COX_NAME_SIZE_MAX + 1], one[COX_NAME_SIZE_MAX + 1] = "";
    uint32_t groups = 0, names = 0;
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *entry; folder && (entry = readdir(folder));) {
        if (!cox_leftovers_group(entry->d_name, name) || !counts_here(name) ||
            (own_name && strcmp(name, own_name) == 0) || !is_dead(dirfd(folder), entry->d_name))
            continue;
        groups++;
        names += names_count(name);
        memcpy(one, name, sizeof one);
    }
    if (folder)
        closedir(folder);
    if (groups == 1)
        snprintf(text, COX_LEFTOVERS_TEXT_SIZE,
                 "the group '%s', which was killed, has left %" PRIu32 " names in " FOLDER
                 ": coxswain clean removes them",
                 one, names);
    else if (groups)
        snprintf(text, COX_LEFTOVERS_TEXT_SIZE,
                 "%" PRIu32 " groups, which were killed, have left %" PRIu32 " names in " FOLDER
                 ": coxswain clean removes them",
                 groups, names);
    return groups > 0;
}
