/* Where the threads of Python are, written without the GIL: by the handler that faulthandler has for
 * a signal, which is called as a function. No signal is ever sent, so no system call of the worker
 * ends early. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The handler is of the process, as faulthandler is. */
static struct {
    _Atomic(void (*)(int)) handler;
    _Atomic int inside;
    int number, fd;
    struct sigaction before;
} frames;

int coxpy_frames_signal(void)
{
    for (int number = SIGRTMAX; number >= SIGRTMIN; number--)
        if (sigaction(number, NULL, &frames.before) == 0 &&
            !(frames.before.sa_flags & SA_SIGINFO) && frames.before.sa_handler == SIG_DFL)
            return number;
    return 0;
}

bool coxpy_frames_take(int number, int fd)
{
    struct sigaction now;
    if (sigaction(number, NULL, &now) < 0 || sigaction(number, &frames.before, NULL) < 0 ||
        (now.sa_flags & SA_SIGINFO) || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)
        return false;
    frames.number = number;
    frames.fd = fd;
    atomic_store(&frames.handler, now.sa_handler);
    return true;
}

void coxpy_frames_end(void)
{
    atomic_store(&frames.handler, NULL);
    /* A dump takes less than a millisecond, or as long as a tracer holds its readers. */
    while (atomic_load(&frames.inside))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

void coxpy_frames_write(void *context, int fd)
{
    (void)context;
    atomic_fetch_add(&frames.inside, 1);
    void (*handler)(int) = atomic_load(&frames.handler);
    /* faulthandler writes to the number that it was given. */
    if (handler && dup3(fd, frames.fd, O_CLOEXEC) >= 0)
        handler(frames.number);
    atomic_fetch_sub(&frames.inside, 1);
}
