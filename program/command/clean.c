/* coxswain clean: removes what dead groups left in /dev/shm, and their sockets. */
#include "program/cli/runner.h"

#include "channel/attach/named/names.h"
#include "channel/shm/control.h"
#include "channel/socket/control_socket.h"
#include "program/cli/console.h"
#include "program/service/leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns the exit status. asked: the user named this group; then it is an error if it is alive.
 * sockets: how many were removed, which is not nothing. */
static int clean_one(const char *name, bool asked, uint32_t sockets)
{
    struct cox_error err = {0};
    uint32_t count = 0;
    int r = cox_name_check(name, &err);
    if (r == 0)
        r = cox_control_sweep(name, &count, &err);
    if (r == 0 && count > 0)
        printf("removed %s: %" PRIu32 " names\n", name, count);
    else if (r == 0 && asked && sockets == 0)
        printf("nothing to remove of %s\n", name);
    else if (r == COX_TAKEN && !asked)
        printf("kept %s: it is alive\n", name);
    else if ((r == COX_DENIED || r == COX_BUSY) && !asked) /* BUSY: another process cleans */
        printf("kept %s: %s\n", name, err.text);
    else if (r)
        return cox_exit_with(&err);
    return COX_EXIT_OK;
}

static int clean_all(uint32_t sockets)
{
    DIR *folder = opendir("/dev/shm");
    if (!folder) {
        cox_console_say("/dev/shm: %s", cox_status_text(-errno));
        return COX_EXIT_FAILED;
    }
    int status = COX_EXIT_OK;
    uint32_t groups = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char name[COX_NAME_SIZE_MAX + 1];
        struct stat st;
        /* Groups of other users are ignored. */
        if (!cox_leftovers_group(entry->d_name, name) ||
            fstatat(dirfd(folder), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            st.st_uid != geteuid())
            continue;
        groups++;
        int one = clean_one(name, false, sockets);
        status = status ? status : one;
    }
    closedir(folder);
    if (groups == 0 && sockets == 0)
        printf("no group of this user is in /dev/shm\n");
    return status;
}

/* Returns the exit status. r, err: of the sweep. */
static int tell_sockets(int r, uint32_t count, const struct cox_error *err)
{
    if (count > 0)
        printf("removed %" PRIu32 " socket%s without a listener\n", count, count == 1 ? "" : "s");
    if (r == COX_BUSY) /* another process starts or cleans, and removes them */
        printf("kept sockets: %s\n", err->text);
    else if (r)
        return cox_exit_with(err);
    return COX_EXIT_OK;
}

struct clean_choice {
    int count;
    char *const *names;
};

static int take_names(void *context, int count, char *const *words, struct cox_error *err)
{
    struct clean_choice *choice = context;
    (void)err;
    choice->count = count;
    choice->names = words;
    return 0;
}

static int run(void *context)
{
    const struct clean_choice *choice = context;
    struct cox_error err = {0};
    uint32_t sockets = 0;
    /* Of all dead groups: no process can use them. */
    int r = cox_control_socket_sweep(NULL, &sockets, &err);
    int status = choice->count == 0 ? clean_all(sockets) : COX_EXIT_OK;
    for (int i = 0; i < choice->count; i++) {
        int one = clean_one(choice->names[i], true, sockets);
        status = status ? status : one;
    }
    const int told = tell_sockets(r, sockets, &err);
    return status ? status : told;
}

const struct cox_command cox_command_clean = {
    .name = "clean",
    .summary = "remove what dead groups left in shared memory",
    .arguments = "[NAME]...",
    .text =
        "Removes the regions and semaphores that dead groups left in /dev/shm: of the groups "
        "named, or of all groups of this user. A group is removed only after the lock of its "
        "control region was won, so that a live one is never touched. Also removes, whichever "
        "groups are named, all sockets in the runtime directory ($COXSWAIN_RUNTIME_DIR, $XDG_RUNTIME_DIR/coxswain or /tmp/coxswain-UID) "
        "that no process listens on, as every start does.",
    .examples = "  coxswain clean          what dead groups left\n"
                "  coxswain clean mine\n",
    .choice_size = sizeof(struct clean_choice),
    .words = take_names,
    .run = run,
};
