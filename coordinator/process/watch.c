#include "supervise_internal.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

/* The interval at which reaping is tried: a process that has just died, and one that a debugger
 * holds, or whose core is being written. */
#define REAP_AGAIN_MS 1
#define UNREAPED_AGAIN_MS 100

static int launch_all(struct cox_supervisor *s)
{
    if (s->external)
        return 0;
    int r = 0;
    const uint32_t end = s->plan.local_first + s->plan.local_count;
    for (uint32_t rank = s->plan.local_first; r == 0 && rank < end; rank++) {
        const struct cox_launch_incarnation first = {
            .number = 1,
            .fds = s->memory_fds ? &s->memory_fds[rank * s->memory_fd_count] : NULL,
            .fd_count = s->memory_fd_count,
        };
        cox_child_reset(&s->children[rank]);
        r = cox_child_begin(&s->children[rank], &first, &s->launch_error);
    }
    return r;
}

static void launch_undo(struct cox_supervisor *s)
{
    siginfo_t info;
    const uint32_t end = s->plan.local_first + s->plan.local_count;
    for (uint32_t rank = s->plan.local_first; rank < end && cox_rank_pid(s->children[rank].record);
         rank++)
        cox_launch_kill_group(cox_rank_pid(s->children[rank].record), s->children[rank].pidfd);
    for (uint32_t rank = s->plan.local_first; rank < end && cox_rank_pid(s->children[rank].record);
         rank++)
        cox_launch_reap(s->children[rank].pidfd, true, &info);
}

/* In the order stop, pidfds, adopted pidfds, pipes. */
static int watch_poll(struct cox_supervisor *s)
{
    uint32_t count = s->plan.rank_count;
    struct pollfd *pidfds = s->polled + 1, *adopted = pidfds + count, *streams = adopted + count;
    int timeout_ms = -1;
    s->polled[0] = (struct pollfd){.fd = s->stop_fd, .events = POLLIN};
    for (uint32_t rank = 0; rank < count; rank++) {
        struct cox_child *child = &s->children[rank];
        pidfds[rank] = adopted[rank] = (struct pollfd){.events = POLLIN};
        cox_child_polled_fds(child, &pidfds[rank].fd, &adopted[rank].fd);
        for (int stream = 0; stream < 2; stream++)
            streams[2 * rank + (uint32_t)stream] =
                (struct pollfd){.fd = child->streams[stream].fd, .events = POLLIN};
        if (child->reap_until_ns && !cox_rank_is_dead(child->record))
            timeout_ms = REAP_AGAIN_MS;
    }
    if (s->unreaped_count && timeout_ms < 0)
        timeout_ms = UNREAPED_AGAIN_MS;
    /* The kernel refuses more entries than the process may have fds, and counts negative ones. */
    nfds_t packed_count = 0;
    for (uint32_t i = 0; i < 1 + 4 * count; i++)
        if (s->polled[i].fd >= 0)
            s->packed[packed_count++] = s->polled[i];
    int r = poll(s->packed, packed_count, timeout_ms) < 0 ? -errno : 0;
    for (uint32_t i = 1 + 4 * count; i-- > 0;)
        if (s->polled[i].fd >= 0)
            s->polled[i].revents = s->packed[--packed_count].revents;
    return r;
}

static void watch_relaunch(struct cox_supervisor *s)
{
    pthread_mutex_lock(&s->lock);
    struct cox_relaunch *relaunch = s->relaunch;
    s->relaunch = NULL;
    if (relaunch)
        relaunch->begun = true;
    pthread_mutex_unlock(&s->lock);
    if (!relaunch)
        return;
    struct cox_child *child = &s->children[relaunch->rank];
    cox_child_reset(child);
    int r = cox_child_begin(child, relaunch->incarnation, relaunch->err);
    pthread_mutex_lock(&s->lock);
    relaunch->status = r;
    relaunch->done = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* Returns false if the thread may end. */
static bool watch_woken(struct cox_supervisor *s)
{
    uint64_t count;
    ssize_t got = read(s->stop_fd, &count, sizeof count);
    (void)got;
    watch_relaunch(s);
    return !atomic_load_explicit(&s->leaving, memory_order_acquire);
}

static void watch(struct cox_supervisor *s)
{
    uint32_t count = s->plan.rank_count;
    struct pollfd *pidfds = s->polled + 1, *adopted = pidfds + count, *streams = adopted + count;
    for (;;) {
        int r = watch_poll(s);
        if (r == -EINTR)
            continue;
        if (r) {
            /* The kernel has no memory, or the host lowered its limit of fds below the number of
             * open ones: try again. */
            cox_log_write(&s->log, 3, "supervisor: poll: %s", cox_status_text(r));
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
            continue;
        }
        if (s->polled[0].revents && !watch_woken(s))
            return;
        for (uint32_t rank = 0; rank < count; rank++) {
            if (adopted[rank].revents)
                cox_child_adopted_ended(&s->children[rank]);
            if (pidfds[rank].revents)
                cox_child_ended(&s->children[rank]);
            if (cox_child_is_gone(&s->children[rank]))
                cox_child_reap(&s->children[rank]);
        }
        cox_unreaped_retry(s);
        for (uint32_t i = 0; i < 2 * count; i++)
            if (streams[i].revents && s->children[i / 2].streams[i % 2].fd >= 0)
                cox_child_read(&s->children[i / 2], (int)(i % 2));
    }
}

void *cox_supervisor_main(void *context)
{
    struct cox_supervisor *s = context;
    pthread_setname_np(pthread_self(), "cox-supervise");
    int r = launch_all(s);
    pthread_mutex_lock(&s->lock);
    bool failed = r || s->expired;
    if (failed) {
        pthread_mutex_unlock(&s->lock);
        launch_undo(s);
        pthread_mutex_lock(&s->lock);
    }
    s->phase = failed ? COX_WATCH_FAILED : COX_WATCH_LAUNCHED;
    pthread_cond_broadcast(&s->changed);
    while (s->phase == COX_WATCH_LAUNCHED)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    if (!failed)
        watch(s);
    return NULL;
}
