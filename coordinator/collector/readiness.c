#include "readiness.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* Per epoll_wait; further events keep the fd readable. */
#define EVENT_COUNT 64

static int add(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = fd};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

int cox_readiness_open(struct cox_readiness *readiness, const int *rank_fds, uint32_t rank_count)
{
    readiness->timer_ns = COX_DEADLINE_NEVER;
    readiness->timer_fd = readiness->event_fd = -1;
    int r = 0;
    readiness->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (readiness->epoll_fd >= 0)
        readiness->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (readiness->timer_fd >= 0)
        readiness->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (readiness->event_fd < 0)
        r = -errno;
    if (r == 0)
        r = cox_fd_raise(&readiness->epoll_fd);
    if (r == 0)
        r = add(readiness->epoll_fd, readiness->timer_fd);
    if (r == 0)
        r = add(readiness->epoll_fd, readiness->event_fd);
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
        r = add(readiness->epoll_fd, rank_fds[rank]);
    if (r) {
        cox_close_fd(&readiness->epoll_fd);
        cox_close_fd(&readiness->timer_fd);
        cox_close_fd(&readiness->event_fd);
        return r;
    }
    atomic_store_explicit(&readiness->is_open, true, memory_order_release);
    return 0;
}

void cox_readiness_close(struct cox_readiness *readiness)
{
    if (!atomic_exchange_explicit(&readiness->is_open, false, memory_order_relaxed))
        return;
    cox_close_fd(&readiness->epoll_fd);
    cox_close_fd(&readiness->timer_fd);
    cox_close_fd(&readiness->event_fd);
}

void cox_readiness_signal(struct cox_readiness *readiness)
{
    if (cox_readiness_is_open(readiness))
        cox_eventfd_signal(readiness->event_fd);
}

void cox_readiness_clear(struct cox_readiness *readiness)
{
    struct epoll_event events[EVENT_COUNT];
    epoll_wait(readiness->epoll_fd, events, EVENT_COUNT, 0);
    if (readiness->timer_ns <= cox_now_ns())
        readiness->timer_ns = COX_DEADLINE_NEVER;
}

void cox_readiness_set_timer(struct cox_readiness *readiness, uint64_t at_ns)
{
    if (at_ns >= readiness->timer_ns)
        return;
    readiness->timer_ns = at_ns;
    /* A time of 0 would disarm the timer. */
    const struct itimerspec timer = {.it_value = cox_deadline_timespec(at_ns ? at_ns : 1)};
    timerfd_settime(readiness->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL);
}
