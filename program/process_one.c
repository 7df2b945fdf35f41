#include "process_one.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* Takes the exit status of all that have ended. */
static void reap(pid_t child)
{
    pid_t pid;
    int status;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == child)
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int cox_process_one(void)
{
    if (getpid() != 1)
        return 0;
    /* The kernel keeps from process 1 what it neither handles nor blocks. */
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    pid_t child = fork();
    if (child < 0)
        return -errno;
    if (child == 0) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        return 0;
    }
    for (;;) {
        siginfo_t info;
        const int number = sigwaitinfo(&all, &info);
        if (number == SIGCHLD)
            reap(child);
        else if (number > 0 && info.si_code != SI_KERNEL)
            kill(child, number);
    }
}
