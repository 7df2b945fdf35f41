#include "signals.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

static void die_of(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    raise(number); /* pending, for this thread */
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    _exit(128 + number);
}

static void *signals_main(void *context)
{
    struct cox_signals *signals = context;
    uint64_t deadline = COX_DEADLINE_NEVER;
    int first = 0;
    struct pollfd fds[2] = {
        {.fd = signals->signal_fd, .events = POLLIN},
        {.fd = signals->end_fd, .events = POLLIN},
    };
    for (;;) {
        if (poll(fds, 2, cox_deadline_poll_ms(deadline)) < 0 && errno != EINTR)
            return NULL;
        if (fds[1].revents)
            return NULL;
        if (cox_now_ns() >= deadline) {
            deadline = cox_deadline_after_ms(signals->end_ms);
            if (!signals->taken(signals->context, first))
                die_of(first);
            continue;
        }
        struct signalfd_siginfo info;
        if (!fds[0].revents || read(signals->signal_fd, &info, sizeof info) != sizeof info)
            continue;
        if (info.ssi_signo == SIGCHLD)
            signals->child_changed(signals->context);
        else if (!signals->taken(signals->context, (int)info.ssi_signo))
            die_of((int)info.ssi_signo);
        else if (!first) {
            first = (int)info.ssi_signo;
            deadline = cox_deadline_after_ms(signals->end_ms);
        }
    }
}

int cox_signals_start(struct cox_signals *signals, bool (*taken)(void *context, int number),
                      void (*child_changed)(void *context), void *context, struct cox_error *err)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    sigset_t set;
    sigemptyset(&set);
    signals->taken = taken;
    signals->child_changed = child_changed;
    signals->context = context;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction action;
        /* A signal that was ignored at the start (nohup, a shell's background job) stays ignored; a
         * signalfd would still get it. */
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&set, numbers[i]);
    }
    if (child_changed)
        sigaddset(&set, SIGCHLD);
    /* Before any thread is made: all threads inherit the mask. */
    int r = -pthread_sigmask(SIG_BLOCK, &set, &signals->old_mask);
    signals->masked = r == 0;
    if (!r && (signals->signal_fd = signalfd(-1, &set, SFD_CLOEXEC)) < 0)
        r = -errno;
    if (!r && (signals->end_fd = eventfd(0, EFD_CLOEXEC)) < 0)
        r = -errno;
    if (!r)
        r = -pthread_create(&signals->thread, NULL, signals_main, signals);
    if (r)
        return cox_fail(err, r, "cannot take signals: %s", cox_status_text(r));
    signals->threaded = true;
    return 0;
}

void cox_signals_end(struct cox_signals *signals)
{
    if (signals->threaded) {
        const uint64_t one = 1;
        while (write(signals->end_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
        pthread_join(signals->thread, NULL);
        signals->threaded = false;
    }
    cox_close_fd(&signals->signal_fd);
    cox_close_fd(&signals->end_fd);
    if (signals->masked)
        pthread_sigmask(SIG_SETMASK, &signals->old_mask, NULL);
    signals->masked = false;
}
