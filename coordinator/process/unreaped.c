#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "launch.h"
#include "supervise_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

/* At the end of a group, a process whose core has not grown for so long is killed: what should
 * write it hangs. */
#define DUMP_PATIENCE_MS 2000

void cox_unreaped_add(struct cox_child *child)
{
    struct cox_supervisor *s = child->supervisor;
    pthread_mutex_lock(&s->lock);
    const int serving_fd = child->adopted.pidfd >= 0 ? child->adopted.pidfd : child->pidfd;
    struct cox_unreaped *more = realloc(s->unreaped, (s->unreaped_count + 1) * sizeof *s->unreaped);
    if (more) {
        s->unreaped = more;
        more[s->unreaped_count++] = (struct cox_unreaped){
            .rank = child->rank,
            .pid = cox_rank_pid(child->record),
            .pidfd = fcntl(child->pidfd, F_DUPFD_CLOEXEC, 3),
            .dumping_fd = child->dumping ? fcntl(serving_fd, F_DUPFD_CLOEXEC, 3) : -1,
            .dumping_pid = cox_rank_serving_pid(child->record),
        };
    }
    pthread_mutex_unlock(&s->lock);
}

/* With the lock held. Returns true if it is reaped, or never can be. */
static bool unreaped_reap(struct cox_unreaped *unreaped, siginfo_t *ret_info)
{
    const struct cox_peer dumper = {.pid = unreaped->dumping_pid, .pidfd = unreaped->dumping_fd};
    if (cox_peer_alive(&dumper))
        return false;
    /* Its process group was spared with it. */
    if (unreaped->dumping_fd >= 0)
        cox_launch_kill_group(unreaped->pid, unreaped->pidfd);
    return cox_launch_reap(unreaped->pidfd, false, ret_info) || errno != 0;
}

/* With the lock held, which the thread gives up meanwhile. */
static void unreaped_drop(struct cox_supervisor *s, uint32_t index, const siginfo_t *info)
{
    struct cox_unreaped dropped = s->unreaped[index];
    struct cox_child *child = &s->children[dropped.rank];
    s->unreaped[index] = s->unreaped[--s->unreaped_count];
    /* The rank may have another process by now. */
    if (child->dumping && cox_rank_pid(child->record) == dropped.pid) {
        child->dumping = false;
        /* Another thread of the host may have reaped it; the signal is known all the same. */
        if (info->si_pid || child->adopted.pid)
            cox_child_set_how(child, info);
    }
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    /* How a process ended that is not the one that was started is not known here. */
    if (dropped.dumping_fd >= 0 && dropped.dumping_pid == info->si_pid)
        cox_log_write(&s->log, 6, "rank %u (pid %d) has ended, its core is %s", dropped.rank,
                      dropped.dumping_pid, info->si_code == CLD_DUMPED ? "written" : "cut off");
    cox_close_fd(&dropped.pidfd);
    cox_close_fd(&dropped.dumping_fd);
    pthread_mutex_lock(&s->lock);
}

void cox_unreaped_retry(struct cox_supervisor *s)
{
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = s->unreaped_count; i-- > 0;) {
        siginfo_t info = {0};
        if (unreaped_reap(&s->unreaped[i], &info))
            unreaped_drop(s, i, &info);
    }
    pthread_mutex_unlock(&s->lock);
}

/* With the lock held. The next process from *at on whose core is not written; NULL: none. */
static const struct cox_unreaped *unreaped_next(const struct cox_supervisor *s, uint32_t *at)
{
    while (*at < s->unreaped_count) {
        const struct cox_unreaped *unreaped = &s->unreaped[(*at)++];
        if (unreaped->dumping_fd >= 0)
            return unreaped;
    }
    return NULL;
}

/* With the lock held. Their processor time, which grows while their cores do. */
static uint64_t unreaped_spent_ns(const struct cox_supervisor *s)
{
    uint64_t sum_ns = 0;
    const struct cox_unreaped *unreaped;
    for (uint32_t at = 0; (unreaped = unreaped_next(s, &at));) {
        uint64_t spent_ns = 0;
        cox_peer_cpu_time(unreaped->dumping_pid, &spent_ns);
        sum_ns += spent_ns;
    }
    return sum_ns;
}

/* With the lock held. Returns false if a core is still being written after DUMP_PATIENCE_MS. */
static bool unreaped_await(struct cox_supervisor *s)
{
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(DUMP_PATIENCE_MS));
    int e = 0;
    while (unreaped_next(s, &(uint32_t){0}) && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &until);
    return !unreaped_next(s, &(uint32_t){0});
}

void cox_unreaped_end(struct cox_supervisor *s)
{
    const struct cox_unreaped *unreaped;
    pthread_mutex_lock(&s->lock);
    for (uint32_t at = 0; (unreaped = unreaped_next(s, &at));) {
        const struct cox_unreaped dumper = *unreaped;
        pthread_mutex_unlock(&s->lock);
        cox_log_write(
            &s->log, 4,
            "the group ends when rank %u (pid %d) has written its core; kill -9 %d cuts it off",
            dumper.rank, dumper.dumping_pid, dumper.dumping_pid);
        pthread_mutex_lock(&s->lock);
    }
    uint64_t spent_ns = unreaped_spent_ns(s), before_ns = UINT64_MAX;
    while (spent_ns != before_ns && !unreaped_await(s)) {
        before_ns = spent_ns;
        spent_ns = unreaped_spent_ns(s);
    }
    for (uint32_t at = 0; (unreaped = unreaped_next(s, &at));)
        cox_pidfd_signal(unreaped->dumping_fd, SIGKILL);
    unreaped_await(s);
    pthread_mutex_unlock(&s->lock);
}

void cox_unreaped_deinit(struct cox_supervisor *s)
{
    cox_unreaped_retry(s);
    for (uint32_t i = 0; i < s->unreaped_count; i++) {
        cox_close_fd(&s->unreaped[i].pidfd);
        cox_close_fd(&s->unreaped[i].dumping_fd);
    }
    free(s->unreaped);
}
