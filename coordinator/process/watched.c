#include "supervise_internal.h"

#include "channel/base/fault.h"
#include "channel/base/tsan.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process whose pidfd says that it is dead becomes waitable a moment later, and then it is known
 * how it ended; under a debugger, only when that lets it go. */
#define REAP_PATIENCE_NS (100 * COX_NSEC_PER_MSEC)

void cox_watched_await(struct cox_watched *w)
{
    w->supervisor->alive++;
    w->record->awaited = true;
}

void cox_watched_await_no_more(struct cox_watched *w)
{
    w->supervisor->alive -= w->record->awaited;
    w->record->awaited = false;
}

int cox_watched_begin(struct cox_watched *w, const struct cox_launch_life *life,
                      struct cox_error *err)
{
    struct cox_supervisor *s = w->supervisor;
    pthread_mutex_lock(&s->lock);
    bool expired = s->expired;
    if (!expired)
        s->launching = w->rank;
    pthread_mutex_unlock(&s->lock);
    /* start says why */
    int r = expired ? COX_TIMEOUT : cox_launch(&s->plan, w->rank, life, &w->launched, err);
    pthread_mutex_lock(&s->lock);
    /* relaxed: stored on behalf of this thread. The pipes had room above 2, so it has. */
    w->pidfd = atomic_exchange_explicit(&w->launched.pidfd, -1, memory_order_relaxed);
    if (w->pidfd >= 0)
        cox_fd_raise(&w->pidfd);
    if (r == 0) {
        cox_rank_set_pid(w->record, w->launched.pid);
        cox_watched_await(w);
        cox_rank_move(w->record, COX_STAGE_STARTING);
    } else {
        /* As it was before. */
        cox_rank_move(w->record, cox_rank_pid(w->record) ? COX_STAGE_REPORTED : COX_STAGE_VACANT);
    }
    pthread_mutex_unlock(&s->lock);
    if (r)
        return r;
    w->streams[0].fd = w->launched.stream_fds[0];
    w->streams[1].fd = w->launched.stream_fds[1];
    return 0;
}

int cox_pidfd_signal(int pidfd, int number)
{
    return syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0) < 0 ? -errno : 0;
}

static void watched_keep_line(void *context, const char *text, size_t size)
{
    struct cox_watched *w = context;
    pthread_mutex_lock(&w->supervisor->lock);
    cox_last_lines_add(&w->last_lines, text, size);
    pthread_mutex_unlock(&w->supervisor->lock);
}

static void watched_tell_line(struct cox_watched *w, const char *text, bool is_stderr)
{
    struct cox_supervisor *s = w->supervisor;
    if (s->hooks.line)
        s->hooks.line(s->hooks.context, w->rank, is_stderr, text);
}

/* For lines that are kept already. */
static void watched_tell_stdout(void *context, const char *text, size_t size)
{
    (void)size;
    watched_tell_line(context, text, false);
}

static void watched_tell_stderr(void *context, const char *text, size_t size)
{
    (void)size;
    watched_tell_line(context, text, true);
}

static const cox_output_line_fn stream_tells[2] = {watched_tell_stdout, watched_tell_stderr};

static void watched_stdout_line(void *context, const char *text, size_t size)
{
    watched_keep_line(context, text, size);
    watched_tell_line(context, text, false);
}

static void watched_stderr_line(void *context, const char *text, size_t size)
{
    watched_keep_line(context, text, size);
    watched_tell_line(context, text, true);
}

static const cox_output_line_fn stream_lines[2] = {watched_stdout_line, watched_stderr_line};

void cox_watched_read(struct cox_watched *w, int stream)
{
    cox_output_read(&w->streams[stream], stream_lines[stream], w);
}

/* False: not yet, try again. ret_info stays empty when nobody will ever know. */
static bool watched_reap(struct cox_watched *w, siginfo_t *ret_info)
{
    if (cox_launch_reap(w->pidfd, false, ret_info) || errno == ECHILD) /* or somebody else has it */
        return true;
    uint64_t now = cox_now_ns();
    if (!w->reap_until_ns)
        w->reap_until_ns = now + REAP_PATIENCE_NS;
    if (now < w->reap_until_ns)
        return false;
    /* One of an earlier life that is still held is given up for it. */
    cox_close_fd(&w->grave_fd);
    w->grave_fd = fcntl(w->pidfd, F_DUPFD_CLOEXEC, 3);
    return true;
}

void cox_watched_visit_grave(struct cox_watched *w)
{
    siginfo_t info = {0};
    if (w->grave_fd >= 0 && (cox_launch_reap(w->grave_fd, false, &info) || errno == ECHILD))
        cox_close_fd(&w->grave_fd);
}

/* What a dead worker has left in a pipe; bytes NULL: no memory for it. */
struct rest {
    char *bytes;
    size_t size;
};

static void watched_take_rest(struct cox_watched *w, struct rest rest[2])
{
    for (int stream = 0; stream < 2; stream++) {
        const struct cox_output *output = &w->streams[stream];
        if (cox_output_take(output, &rest[stream].bytes, &rest[stream].size))
            rest[stream] = (struct rest){0};
        else
            cox_output_last(output, rest[stream].bytes, rest[stream].size, watched_keep_line, w);
    }
}

static void watched_tell_rest(struct cox_watched *w, struct rest rest[2])
{
    for (int stream = 0; stream < 2; stream++) {
        struct cox_output *output = &w->streams[stream];
        if (!rest[stream].bytes) {
            cox_output_drain(output, stream_lines[stream], w);
            continue;
        }
        cox_output_feed(output, rest[stream].bytes, rest[stream].size, stream_tells[stream], w);
        cox_output_finish(output, stream_tells[stream], w);
        free(rest[stream].bytes);
    }
}

int cox_watched_kill(struct cox_watched *w)
{
    if (w->supervisor->external)
        return cox_pidfd_signal(w->pidfd, SIGKILL);
    cox_launch_kill_group(cox_rank_pid(w->record), w->pidfd);
    return 0;
}

void cox_watched_describe(struct cox_watched *w, bool dead, char *buffer, size_t buffer_size)
{
    char who[96];
    bool wrapped = w->adopted.pid != 0;
    if (wrapped)
        snprintf(who, sizeof who, "rank %u (pid %d, in its wrapper %d) is %s", w->rank,
                 w->adopted.pid, cox_rank_pid(w->record), dead ? "dead" : "alive");
    else
        snprintf(who, sizeof who, "rank %u (pid %d)", w->rank, cox_rank_pid(w->record));
    const char *whose = wrapped ? "; its wrapper" : "";
    if (!cox_rank_pid(w->record)) {
        snprintf(buffer, buffer_size, "rank %u has not logged on", w->rank);
    } else if (!dead) {
        snprintf(buffer, buffer_size, "%s%s", who, wrapped ? "" : " is alive");
    } else if (w->wrapper_killed && !w->how.known) {
        snprintf(buffer, buffer_size, "%s; how, only its wrapper knows", who);
    } else if (w->let_go) {
        snprintf(buffer, buffer_size, "rank %u (pid %d) left the group and was let go", w->rank,
                 cox_rank_pid(w->record));
    } else if (!w->how.known && w->supervisor->external) {
        snprintf(buffer, buffer_size, "%s is dead; how, only who started it knows", who);
    } else if (!w->how.known) {
        snprintf(
            buffer, buffer_size,
            "%s%s, nobody knows how: this program ignores SIGCHLD, waited for it elsewhere, or a debugger has it",
            who, wrapped ? "" : " is dead");
    } else if (w->how.signal) {
        const char *name = sigdescr_np(w->how.signal);
        snprintf(buffer, buffer_size, "%s%s was killed by signal %d (%s)%s", who, whose,
                 w->how.signal, name ? name : "real-time signal",
                 w->core_dumped ? " (core dumped)" : "");
    } else {
        snprintf(buffer, buffer_size, "%s%s exited with status %d", who, whose, w->how.exit_status);
    }
}

/* With the lock held, when all of it is known. */
static void watched_keep_death(struct cox_watched *w)
{
    if (atomic_load_explicit(&w->supervisor->ending, memory_order_acquire))
        return;
    struct cox_last_death *death = &w->last_death;
    death->count++;
    death->when_ns = cox_now_ns();
    cox_watched_describe(w, true, death->text, sizeof death->text);
    cox_last_lines_join(&w->last_lines, death->last_lines, sizeof death->last_lines);
}

/* Both its processes are dead. Reap, last lines, state, and who waits for the rank is woken; all
 * the lines, which may be a pipe full and take the host long, and its hook come after that. Only
 * then the count: whoever waited for it knows that the hooks are through. */
void cox_watched_bury(struct cox_watched *w)
{
    struct cox_supervisor *s = w->supervisor;
    siginfo_t info = {0};
    cox_watched_kill(w); /* while the number is its own: it is not reaped */
    if (!s->external && !watched_reap(w, &info))
        return;
    cox_fault_point(COX_FAULT_DEATH_SEEN);
    struct rest rest[2];
    watched_take_rest(w, rest);
    struct cox_exit how = {.known = info.si_pid != 0};
    if (how.known && info.si_code == CLD_EXITED)
        how.exit_status = info.si_status;
    else if (how.known)
        how.signal = info.si_status;
    cox_tsan_has_died();
    pthread_mutex_lock(&s->lock);
    w->core_dumped = how.known && info.si_code == CLD_DUMPED;
    if (w->wrapper_killed && how.signal == SIGKILL)
        how = (struct cox_exit){.known = false}; /* it is our doing */
    w->how = how;
    watched_keep_death(w);
    cox_rank_move(w->record, COX_STAGE_DEAD);
    pthread_mutex_unlock(&s->lock);
    cox_fault_point(COX_FAULT_DEATH_STORED);

    if (s->hooks.wake)
        s->hooks.wake(s->hooks.context, w->rank);
    watched_tell_rest(w, rest);
    if (s->hooks.death)
        s->hooks.death(s->hooks.context, w->rank, cox_rank_pid(w->record), &how);
    cox_fault_point(COX_FAULT_DEATH_TOLD);
    pthread_mutex_lock(&s->lock);
    cox_watched_await_no_more(w);
    cox_rank_move(w->record, COX_STAGE_REPORTED);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

bool cox_watched_is_dead(struct cox_watched *w)
{
    return cox_rank_is_dead(w->record);
}

/* Of the polled set; a negative fd, which is what a thing of the past has, is skipped by poll.
 * Under the lock: adopt, and where processes come from outside enlist and release, change them on
 * other threads. */
void cox_watched_polled_fds(struct cox_watched *w, int *ret_fd, int *ret_adopted_fd)
{
    pthread_mutex_lock(&w->supervisor->lock);
    const bool lives = cox_rank_stage_lives(cox_rank_stage_of(w->record));
    *ret_fd = w->ended || !lives ? -1 : w->pidfd;
    *ret_adopted_fd = w->adopted_ended || !lives ? -1 : w->adopted.pidfd;
    pthread_mutex_unlock(&w->supervisor->lock);
}

/* With the lock held. */
static void watched_see_end(struct cox_watched *w)
{
    if (cox_rank_stage_serves(cox_rank_stage_of(w->record)))
        cox_rank_move(w->record, COX_STAGE_EXITING);
}

/* The process that served the rank is dead; without it the wrapper is nothing, unless it is the end
 * and it has something left to do. */
void cox_watched_adopted_ended(struct cox_watched *w)
{
    bool ending = atomic_load_explicit(&w->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&w->supervisor->lock);
    w->adopted_ended = true;
    watched_see_end(w);
    if (!w->ended && !ending) {
        /* It may have been the death of the wrapper that ended it, and is seen first. */
        w->wrapper_killed = !cox_peer_exiting(cox_rank_pid(w->record));
        cox_launch_kill_group(cox_rank_pid(w->record), w->pidfd);
    }
    pthread_mutex_unlock(&w->supervisor->lock);
}

/* The process that was started is dead. One that serves in its place goes, too; if it is the end,
 * as one that was told by the same signals. The dead one is not reaped before: it keeps the group's
 * number. */
void cox_watched_ended(struct cox_watched *w)
{
    bool ending = atomic_load_explicit(&w->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&w->supervisor->lock);
    /* It was polled without the lock: by now the rank may have been released, or be another
     * process. */
    const struct cox_peer peer = {.pid = cox_rank_pid(w->record), .pidfd = w->pidfd};
    bool ended = !w->supervisor->external || (w->pidfd >= 0 && !cox_peer_alive(&peer));
    if (ended) {
        w->ended = true;
        watched_see_end(w);
    }
    if (ended && w->adopted.pidfd >= 0 && !w->adopted_ended && !ending) {
        cox_launch_kill_group(cox_rank_pid(w->record), w->pidfd);
        cox_pidfd_signal(w->adopted.pidfd, SIGKILL);
    }
    pthread_mutex_unlock(&w->supervisor->lock);
}

bool cox_watched_is_gone(struct cox_watched *w)
{
    pthread_mutex_lock(&w->supervisor->lock);
    bool gone = cox_rank_stage_of(w->record) == COX_STAGE_EXITING && w->ended &&
                (w->adopted.pidfd < 0 || w->adopted_ended);
    pthread_mutex_unlock(&w->supervisor->lock);
    return gone;
}

void cox_watched_be_born(struct cox_watched *w)
{
    struct cox_supervisor *s = w->supervisor;
    for (int stream = 0; stream < 2; stream++) {
        cox_close_fd(&w->streams[stream].fd); /* a child of the dead may still hold the other end */
        w->streams[stream].size = 0;
    }
    pthread_mutex_lock(&s->lock);
    cox_close_fd(&w->pidfd);
    cox_peer_close(&w->adopted);
    w->adopted.pid = 0;
    atomic_store_explicit(&w->record->adopted_pid, 0, memory_order_relaxed);
    w->reap_until_ns = 0;
    w->ended = w->adopted_ended = w->wrapper_killed = false;
    w->record->left_ns = 0;
    w->last_lines = (struct cox_last_lines){0};
    cox_rank_move(w->record, COX_STAGE_LAUNCHING);
    pthread_mutex_unlock(&s->lock);
}
