/* coxswain clean: removes what dead groups left in /dev/shm, and their sockets. */
#include "command.h"

#include "channel/shm/control.h"
#include "channel/socket/door.h"
#include "console.h"

#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX "_control"

static void help(FILE *file)
{
    fprintf(file,
            "Usage: coxswain clean [NAME]...\n"
            "\n"
            "Removes the regions and semaphores that dead groups left in /dev/shm: of the groups\n"
            "named, or of all groups of this user. A group is removed only after the lock of its\n"
            "control region was won, so that a live one is never touched. And, whoever is named,\n"
            "all sockets in $XDG_RUNTIME_DIR/coxswain (or /tmp/coxswain-UID) that nobody listens\n"
            "on, as every start does.\n"
            "\n"
            "  -h, --help  this text\n");
    cox_exit_help(file);
}

/* Returns the exit status. asked: the user named this group, so that its being alive is worth an
 * error. */
static int clean_one(const char *name, bool asked)
{
    struct cox_error err = {0};
    uint32_t count = 0;
    int r = cox_name_check(name, &err);
    if (r == 0)
        r = cox_control_sweep(name, &count, &err);
    if (r == 0 && count > 0)
        printf("removed %s: %" PRIu32 " names\n", name, count);
    else if (r == 0 && asked)
        printf("nothing to remove of %s\n", name);
    else if (r == COX_TAKEN && !asked)
        printf("kept %s: it is alive\n", name);
    else if ((r == COX_DENIED || r == COX_BUSY) && !asked) /* BUSY: somebody else cleans */
        printf("kept %s: %s\n", name, err.text);
    else if (r)
        return cox_exit_with(&err);
    return COX_EXIT_OK;
}

/* The name of the group whose control region this entry is; false: it is none. */
static bool group_of(const char *entry, char *name, size_t name_size)
{
    size_t length = strlen(entry), suffix = strlen(SUFFIX);
    if (length <= suffix || strcmp(entry + length - suffix, SUFFIX) != 0 ||
        length - suffix >= name_size)
        return false;
    memcpy(name, entry, length - suffix);
    name[length - suffix] = '\0';
    return cox_name_check(name, NULL) == 0;
}

static int clean_all(void)
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
        /* Of other users there may be groups too; they are none of our business. */
        if (!group_of(entry->d_name, name, sizeof name) ||
            fstatat(dirfd(folder), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            st.st_uid != geteuid())
            continue;
        groups++;
        int one = clean_one(name, false);
        status = status ? status : one;
    }
    closedir(folder);
    if (groups == 0)
        printf("no group of this user is in /dev/shm\n");
    return status;
}

/* Of all dead groups: none of them is of any use to anybody. */
static int clean_doors(void)
{
    struct cox_error err = {0};
    uint32_t count = 0;
    int r = cox_door_sweep(NULL, &count, &err);
    if (count > 0)
        printf("removed %" PRIu32 " socket%s that nobody listened on\n", count,
               count == 1 ? "" : "s");
    if (r == COX_BUSY) /* somebody else starts or cleans, and does it */
        printf("kept sockets: %s\n", err.text);
    else if (r)
        return cox_exit_with(&err);
    return COX_EXIT_OK;
}

int cox_command_clean(int argc, char **argv)
{
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
    struct cox_error err = {0};
    for (int option; (option = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        cox_fail(&err, COX_INVALID, "%.64s is no option of this command", argv[optind - 1]);
        return cox_exit_usage("clean", &err);
    }
    int status = optind == argc ? clean_all() : COX_EXIT_OK;
    for (int i = optind; i < argc; i++) {
        int one = clean_one(argv[i], true);
        status = status ? status : one;
    }
    int doors = clean_doors();
    return cox_exit_flushed(status ? status : doors);
}
