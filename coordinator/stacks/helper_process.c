#include "helper_process.h"

#include "channel/base/idioms.h"
#include "channel/base/tsan.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILD_STACK_SIZE ((size_t)64 << 10)

struct start {
    const char *program;
    char *const *arguments, *const *environment;
    int output_fd, null_fd;
    /* of the child, which shares this memory until it has executed its program */
    int error;
};

/* Only system calls, in memory that the other threads go on using; see launch.c. */
static int child_main(void *argument)
{
    struct start *start = argument;
    const uint64_t none = 0, default_action[8] = {0};
    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, default_action, NULL, sizeof none);
    syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    syscall(SYS_setpgid, 0, 0);
    if (syscall(SYS_dup3, start->output_fd, 1, 0) < 0 ||
        syscall(SYS_dup3, start->null_fd, 0, 0) < 0 ||
        syscall(SYS_dup3, start->null_fd, 2, 0) < 0) {
        start->error = errno;
        syscall(SYS_exit_group, 127);
    }
#ifdef SYS_close_range
    syscall(SYS_close_range, 3, ~0U, 0);
#endif
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, sizeof none);
    syscall(SYS_execve, start->program, start->arguments, start->environment);
    start->error = errno;
    syscall(SYS_exit_group, 127);
    return 0;
}

static pid_t child_start(struct start *start, int *ret_pidfd)
{
    const uint64_t all = ~UINT64_C(0);
    uint64_t before;
    char *stack = mmap(NULL, CHILD_STACK_SIZE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED)
        return -1;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
#ifdef COX_TSAN
    pid_t pid = (pid_t)syscall(SYS_clone, (unsigned long)(CLONE_VFORK | CLONE_PIDFD | SIGCHLD),
                               NULL, ret_pidfd, NULL, NULL);
    if (pid == 0)
        child_main(start);
#else
    pid_t pid = clone(child_main, stack + CHILD_STACK_SIZE,
                      CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, start, ret_pidfd);
#endif
    const int error = errno;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
    munmap(stack, CHILD_STACK_SIZE);
    errno = error;
    return pid;
}

int cox_helper_process_start(const char *program, char *const *arguments, char *const *environment,
                             struct cox_helper_process *ret_helper)
{
    _cox_cleanup_(cox_close_fd) int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    int ends[2] = {-1, -1};
    if (null_fd < 0 || pipe2(ends, O_CLOEXEC) < 0)
        return -errno;
    struct cox_helper_process helper = {.pidfd = -1, .output_fd = ends[0]};
    _cox_cleanup_(cox_close_fd) int output_fd = ends[1];
    struct start start = {program, arguments, environment, output_fd, null_fd, 0};
    fcntl(helper.output_fd, F_SETFL, O_NONBLOCK);
    if (child_start(&start, &helper.pidfd) < 0) {
        const int error = errno;
        cox_close_fd(&helper.output_fd);
        return -error;
    }
    if (start.error) {
        cox_helper_process_end(&helper);
        return -start.error;
    }
    *ret_helper = helper;
    return 0;
}

void cox_helper_process_end(struct cox_helper_process *helper)
{
    siginfo_t info;
    if (helper->pidfd >= 0) {
        syscall(SYS_pidfd_send_signal, helper->pidfd, SIGKILL, NULL, 0);
        /* ECHILD: the host has reaped it, or ignores SIGCHLD. */
        while (waitid(P_PIDFD, (id_t)helper->pidfd, &info, WEXITED) < 0 && errno == EINTR)
            continue;
    }
    cox_close_fd(&helper->pidfd);
    cox_close_fd(&helper->output_fd);
}
