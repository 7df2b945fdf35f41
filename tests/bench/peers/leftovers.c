#include "leftovers.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *position)
{
    (void)status;
    (void)type;
    (void)position;
    remove(path); /* what cannot be removed keeps its folder */
    return 0;
}

void leftovers_remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

static _Noreturn void guard_main(leftovers_fn remove_fn, const void *context, int fd)
{
    sigset_t all;
    char byte;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL); /* what ends the others comes to their whole group */
    const int nothing_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing_fd >= 0) {
        /* they get EOF when the main process ends */
        dup2(nothing_fd, STDIN_FILENO);
        dup2(nothing_fd, STDOUT_FILENO);
        dup2(nothing_fd, STDERR_FILENO);
    }
    while (read(fd, &byte, 1) != 0)
        continue;
    remove_fn(context);
    _exit(0);
}

int leftovers_guard(leftovers_fn remove_fn, const void *context, int *ret_fd, pid_t *ret_pid,
                    struct cox_error *err)
{
    int fds[2];
    if (pipe(fds) < 0)
        return cox_fail(err, -errno, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[1]);
        guard_main(remove_fn, context, fds[0]);
    }
    close(fds[0]);
    if (pid < 0) {
        int r = cox_fail(err, -errno, "fork: %s", strerror(errno));
        close(fds[1]);
        return r;
    }
    *ret_fd = fds[1];
    *ret_pid = pid;
    return 0;
}
