/*
 * rights: what a test is allowed to do where it runs: as root, as an ordinary user, in a container.
 *
 * Processes and threads: the functions that unshare change the calling process, which should be a
 * child with one thread.
 * Ownership: nothing.
 * Blocks: for a child that ends at once.
 */
#ifndef COX_TESTS_LIB_RIGHTS_H
#define COX_TESTS_LIB_RIGHTS_H

#include "channel/handle/handle_internal.h"
#include "tests/lib/posix.h"

#include <coxswain/handle.h>

#include <grp.h>
#include <sys/mount.h>

#undef BLOCK_SIZE /* of <linux/fs.h>, which <sys/mount.h> includes; tests have their own */

/* The user that tests become, and give files to. */
#define TEST_OTHER_USER 65534

/* In a child. Root has neither right in a user namespace that maps uid 0 alone. */
static inline int rights_try_other_user(void)
{
    int fd = memfd_create("rights", MFD_CLOEXEC);
    return fd >= 0 && fchown(fd, TEST_OTHER_USER, (gid_t)-1) == 0 && setgroups(0, NULL) == 0 &&
                   setresgid(TEST_OTHER_USER, TEST_OTHER_USER, TEST_OTHER_USER) == 0 &&
                   setresuid(TEST_OTHER_USER, TEST_OTHER_USER, TEST_OTHER_USER) == 0
               ? 0
               : 1;
}

/* True when this process may become TEST_OTHER_USER and give files to it. Otherwise a line on
 * stderr says, once per process, that what needs another user is skipped. */
static inline bool test_can_switch_user(void)
{
    static pid_t asked;
    static bool can;
    int status = -1;
    if (asked == getpid())
        return can;
    asked = getpid();
    can = false;
    if (geteuid() == 0) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(rights_try_other_user());
        can = pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
    }
    if (!can)
        fprintf(stderr, "no right to become user %d: what needs another user is skipped\n",
                TEST_OTHER_USER);
    return can;
}

/* True when pidfd_getfd takes fds out of other processes of this user. Docker's seccomp profile
 * denies it. */
static inline bool test_can_take_fds(void)
{
    struct cox_handle_probe ways;
    if (cox_handle_query(NULL, 0, &ways) == 0 && ways.pidfd_getfd)
        return true;
    fprintf(stderr, "pidfd_getfd is denied: what needs it is skipped\n");
    return false;
}

static inline bool rights_write(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int length = fd < 0 ? -1 : dprintf(fd, "%s", text);
    if (fd >= 0)
        close(fd);
    return length > 0;
}

/* Gives the calling process mounts of its own; nothing that it mounts is seen by others. An
 * ordinary user gets them in a user namespace, in which it keeps its uid. False: not permitted. */
static inline bool test_unshare_mounts(void)
{
    char uids[64], gids[64];
    if (unshare(CLONE_NEWNS)) {
        snprintf(uids, sizeof uids, "%u %u 1", geteuid(), geteuid());
        snprintf(gids, sizeof gids, "%u %u 1", getegid(), getegid());
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) || !rights_write("/proc/self/setgroups", "deny") ||
            !rights_write("/proc/self/uid_map", uids) || !rights_write("/proc/self/gid_map", gids))
            return false;
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* The same with an empty /dev/shm of its own; options as of mount -o, such as "size=1m". False: not
 * permitted. */
static inline bool test_unshare_shm(const char *options)
{
    return test_unshare_mounts() && mount("tmpfs", "/dev/shm", "tmpfs", 0, options) == 0;
}

#endif
