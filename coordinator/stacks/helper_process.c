#include "helper_process.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "coordinator/process/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

struct start {
    const char *program;
    char *const *arguments, *const *environment;
    int output_fd, null_fd;
    /* above 3; -1: none */
    int extra_fd;
    /* of the child, which shares this memory until it has executed its program */
    int error;
};

COX_LAUNCH_CHILD static int child_main(void *argument)
{
    struct start *start = argument;
    const uint64_t none = 0, default_action[8] = {0};
    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, default_action, NULL, sizeof none);
    syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    syscall(SYS_setpgid, 0, 0);
    if (syscall(SYS_dup3, start->output_fd, 1, 0) < 0 ||
        syscall(SYS_dup3, start->null_fd, 0, 0) < 0 ||
        syscall(SYS_dup3, start->null_fd, 2, 0) < 0 ||
        (start->extra_fd >= 0 && syscall(SYS_dup3, start->extra_fd, 3, 0) < 0)) {
        start->error = errno;
        syscall(SYS_exit_group, 127);
    }
    syscall(SYS_close_range, start->extra_fd >= 0 ? 4 : 3, ~0U, 0);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, sizeof none);
    syscall(SYS_execve, start->program, start->arguments, start->environment);
    start->error = errno;
    syscall(SYS_exit_group, 127);
    return 0;
}

int cox_helper_process_start(const char *program, char *const *arguments, char *const *environment,
                             int extra_fd, struct cox_helper_process *ret_helper)
{
    _cox_cleanup_(cox_close_fd) int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    int ends[2] = {-1, -1};
    if (null_fd < 0 || pipe2(ends, O_CLOEXEC) < 0)
        return -errno;
    struct cox_helper_process helper = {.pidfd = -1, .output_fd = ends[0]};
    _cox_cleanup_(cox_close_fd) int output_fd = ends[1];
    /* Of a host without standard streams they may be 0 to 2, which the child replaces. */
    if (cox_fd_raise(&null_fd) || cox_fd_raise(&output_fd)) {
        cox_close_fd(&helper.output_fd);
        return -EMFILE;
    }
    _cox_cleanup_(cox_close_fd) int raised_fd =
        extra_fd >= 0 ? fcntl(extra_fd, F_DUPFD_CLOEXEC, 4) : -1;
    if (extra_fd >= 0 && raised_fd < 0) {
        cox_close_fd(&helper.output_fd);
        return -errno;
    }
    struct start start = {program, arguments, environment, output_fd, null_fd, raised_fd, 0};
    fcntl(helper.output_fd, F_SETFL, O_NONBLOCK);
    _Atomic int pidfd = -1;
    if (cox_launch_clone(child_main, &start, &pidfd) < 0) {
        const int error = errno;
        cox_close_fd(&helper.output_fd);
        return -error;
    }
    helper.pidfd = pidfd;
    if (start.error) {
        cox_helper_process_end(&helper);
        return -start.error;
    }
    *ret_helper = helper;
    return 0;
}

void cox_helper_process_ask(struct cox_helper_process *helper)
{
    if (helper->pidfd < 0 || helper->end_ns)
        return;
    helper->end_ns = cox_deadline_after_ms(COX_HELPER_END_MS);
    syscall(SYS_pidfd_send_signal, helper->pidfd, SIGTERM, NULL, 0);
}

void cox_helper_process_end(struct cox_helper_process *helper)
{
    siginfo_t info = {0};
    cox_helper_process_ask(helper);
    if (helper->pidfd >= 0) {
        struct pollfd ended = {.fd = helper->pidfd, .events = POLLIN};
        while (!ended.revents && cox_now_ns() < helper->end_ns)
            poll(&ended, 1, COX_HELPER_END_MS);
        syscall(SYS_pidfd_send_signal, helper->pidfd, SIGKILL, NULL, 0);
        cox_launch_reap(helper->pidfd, true, &info);
    }
    cox_close_fd(&helper->pidfd);
    cox_close_fd(&helper->output_fd);
}
