#include "names.h"

#include "channel/shm/geometry.h"
#include "channel/socket/runtime_dir.h"
#include "client.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

/* A dead group's socket refuses connections, and a stuck one accepts none until the deadline. */
static bool lives(const char *name, uint64_t deadline_ns)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    return cox_client_open(&client, name, deadline_ns, NULL) == 0;
}

int cox_client_names(void (*each)(void *context, const char *name), void *context,
                     uint64_t deadline_ns, struct cox_error *err)
{
    char runtime_dir[COX_SOCKET_PATH_SIZE];
    int r = cox_control_socket_find("x", runtime_dir, err);
    if (r)
        return r;
    *strrchr(runtime_dir, '/') = '\0';
    DIR *stream = opendir(runtime_dir);
    if (!stream && errno == ENOENT)
        return 0;
    if (!stream) {
        r = -errno;
        return cox_fail(err, r, "%s: %s", runtime_dir, cox_status_text(r));
    }
    const struct dirent *entry;
    while ((entry = readdir(stream))) {
        const size_t length = cox_runtime_dir_name_length(entry->d_name);
        char name[sizeof entry->d_name];
        /* Each socket has an old name too. That of a long name has only a part of it. */
        if (length == 0 || strcmp(entry->d_name + length, COX_RUNTIME_DIR_SOCKET_END))
            continue;
        snprintf(name, sizeof name, "%.*s", (int)length, entry->d_name);
        if (cox_name_check(name, NULL) == 0 && lives(name, deadline_ns))
            each(context, name);
    }
    closedir(stream);
    return 0;
}
