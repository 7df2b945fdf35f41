#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/tsan.h"
#include "supervise_internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process whose pidfd is readable becomes waitable a moment later, and then its exit status is
 * known; under a debugger, only when the debugger releases it. A core of some megabytes is written
 * by then. */
#define REAP_PATIENCE_NS (100 * COX_NSEC_PER_MSEC)

void cox_child_await(struct cox_child *child)
{
    child->supervisor->alive++;
    child->record->awaited = true;
}

void cox_child_await_no_more(struct cox_child *child)
{
    child->supervisor->alive -= child->record->awaited;
    child->record->awaited = false;
}

int cox_child_begin(struct cox_child *child, const struct cox_launch_incarnation *incarnation,
                    struct cox_error *err)
{
    struct cox_supervisor *s = child->supervisor;
    pthread_mutex_lock(&s->lock);
    bool expired = s->expired;
    if (!expired)
        s->launching = child->rank;
    pthread_mutex_unlock(&s->lock);
    /* start has the reason */
    int r = expired ? COX_TIMEOUT
                    : cox_launch(&s->plan, child->rank, incarnation, &child->launched, err);
    pthread_mutex_lock(&s->lock);
    /* relaxed: stored on behalf of this thread. The pipes had room above 2, so it has. */
    child->pidfd = atomic_exchange_explicit(&child->launched.pidfd, -1, memory_order_relaxed);
    if (child->pidfd >= 0)
        cox_fd_raise(&child->pidfd);
    if (r == 0) {
        cox_rank_set_pid(child->record, child->launched.pid);
        cox_child_await(child);
        cox_rank_move(child->record, COX_STAGE_STARTING);
    } else {
        /* Restores the stage from before. */
        cox_rank_move(child->record,
                      cox_rank_pid(child->record) ? COX_STAGE_REPORTED : COX_STAGE_VACANT);
    }
    pthread_mutex_unlock(&s->lock);
    if (r)
        return r;
    child->streams[0].fd = child->launched.stream_fds[0];
    child->streams[1].fd = child->launched.stream_fds[1];
    return 0;
}

int cox_pidfd_signal(int pidfd, int number)
{
    return syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0) < 0 ? -errno : 0;
}

static void child_keep_line(void *context, const char *text, size_t size)
{
    struct cox_child *child = context;
    pthread_mutex_lock(&child->supervisor->lock);
    cox_last_lines_add(&child->last_lines, text, size);
    pthread_mutex_unlock(&child->supervisor->lock);
}

/* Where lines go. */
struct line_target {
    struct cox_child *child;
    /* 1: standard error */
    int stream;
    /* the last lines have them already */
    bool kept;
};

static void child_line(void *context, const char *text, size_t size)
{
    const struct line_target *target = context;
    struct cox_supervisor *s = target->child->supervisor;
    if (!target->kept)
        child_keep_line(target->child, text, size);
    if (s->hooks.line)
        s->hooks.line(s->hooks.context, target->child->rank, target->stream == 1, text);
}

void cox_child_read(struct cox_child *child, int stream)
{
    struct line_target target = {.child = child, .stream = stream};
    cox_output_read(&child->streams[stream], child_line, &target);
}

/* Returns false if it cannot be reaped yet. ret_info stays empty if the status is not known now. */
static bool child_try_reap(struct cox_child *child, siginfo_t *ret_info)
{
    if (!child->dumping && (cox_launch_reap(child->pidfd, false, ret_info) ||
                            errno == ECHILD)) /* or another thread has reaped it */
        return true;
    uint64_t now = cox_now_ns();
    if (!child->reap_until_ns)
        child->reap_until_ns = now + REAP_PATIENCE_NS;
    if (now < child->reap_until_ns)
        return false;
    cox_unreaped_add(child);
    return true;
}

/* The rest of a dead worker's output in a pipe; bytes NULL: no memory for it. */
struct rest {
    char *bytes;
    size_t size;
};

static void child_take_rest(struct cox_child *child, struct rest rest[2])
{
    for (int stream = 0; stream < 2; stream++) {
        const struct cox_output *output = &child->streams[stream];
        if (cox_output_take(output, &rest[stream].bytes, &rest[stream].size))
            rest[stream] = (struct rest){0};
        else
            cox_output_last(output, rest[stream].bytes, rest[stream].size, child_keep_line, child);
    }
}

static void child_tell_rest(struct cox_child *child, struct rest rest[2])
{
    for (int stream = 0; stream < 2; stream++) {
        struct cox_output *output = &child->streams[stream];
        struct line_target target = {
            .child = child, .stream = stream, .kept = rest[stream].bytes != NULL};
        if (!rest[stream].bytes) {
            cox_output_drain(output, child_line, &target);
            continue;
        }
        cox_output_feed(output, rest[stream].bytes, rest[stream].size, child_line, &target);
        cox_output_finish(output, child_line, &target);
        free(rest[stream].bytes);
    }
}

int cox_child_kill(struct cox_child *child)
{
    struct cox_supervisor *s = child->supervisor;
    if (child->node[0]) {
        if (s->hooks.kill && !cox_rank_is_dead(child->record))
            s->hooks.kill(s->hooks.context, child->rank);
        return 0;
    }
    if (child->dumping)
        return 0;
    if (s->external)
        return cox_pidfd_signal(child->pidfd, SIGKILL);
    cox_launch_kill_group(cox_rank_pid(child->record), child->pidfd);
    return 0;
}

/* With the lock held. False when the core is written. */
static bool child_dumps(const struct cox_child *child)
{
    const struct cox_peer own = {.pid = cox_rank_pid(child->record), .pidfd = child->pidfd};
    return child->dumping && cox_peer_alive(child->adopted.pidfd >= 0 ? &child->adopted : &own);
}

static const char *signal_text(int number)
{
    const char *text = sigdescr_np(number);
    return text ? text : "real-time signal";
}

static void child_describe_dump(const struct cox_child *child, char *buffer, size_t buffer_size)
{
    char wrapper[48] = "";
    if (child->adopted.pid)
        snprintf(wrapper, sizeof wrapper, ", in its wrapper %d", cox_rank_pid(child->record));
    int length = snprintf(buffer, buffer_size, "rank %u (pid %d%s) is dumping core", child->rank,
                          cox_rank_serving_pid(child->record), wrapper);
    if (child->how.known && length < (int)buffer_size)
        snprintf(buffer + length, buffer_size - (size_t)length, " after signal %d (%s)",
                 child->how.signal, signal_text(child->how.signal));
}

void cox_child_describe(struct cox_child *child, bool dead, char *buffer, size_t buffer_size)
{
    char name_text[96];
    bool wrapped = child->adopted.pid != 0;
    if (child->node[0] && cox_rank_pid(child->record) == COX_SUPERVISOR_PID_NONE)
        snprintf(name_text, sizeof name_text, "rank %u (node %s)", child->rank, child->node);
    else if (child->node[0])
        snprintf(name_text, sizeof name_text, "rank %u (node %s, pid %d)", child->rank, child->node,
                 cox_rank_pid(child->record));
    else if (wrapped)
        snprintf(name_text, sizeof name_text, "rank %u (pid %d, in its wrapper %d) is %s",
                 child->rank, child->adopted.pid, cox_rank_pid(child->record),
                 dead ? "dead" : "alive");
    else
        snprintf(name_text, sizeof name_text, "rank %u (pid %d)", child->rank,
                 cox_rank_pid(child->record));
    const char *whose = wrapped ? "; its wrapper" : "";
    /* How another's child has ended is not told again when its core is written. */
    if (dead && (child->supervisor->external ? child_dumps(child) : child->dumping)) {
        child_describe_dump(child, buffer, buffer_size);
    } else if (!cox_rank_pid(child->record)) {
        snprintf(buffer, buffer_size, "rank %u has not attached", child->rank);
    } else if (!dead) {
        snprintf(buffer, buffer_size, "%s%s", name_text, wrapped ? "" : " is alive");
    } else if (child->node[0] && child->remote_end[0]) {
        snprintf(buffer, buffer_size, "%s %s", name_text, child->remote_end);
    } else if (child->wrapper_killed && !child->how.known) {
        snprintf(buffer, buffer_size, "%s; how is known only to its wrapper", name_text);
    } else if (child->left_alive) {
        snprintf(buffer, buffer_size, "rank %u (pid %d) left the group and was released",
                 child->rank, cox_rank_pid(child->record));
    } else if (!child->how.known && child->supervisor->external) {
        snprintf(buffer, buffer_size,
                 "%s is dead; how is known only to the process that started it", name_text);
    } else if (!child->how.known) {
        snprintf(
            buffer, buffer_size,
            "%s%s, how is unknown: this program ignores SIGCHLD, waited for it elsewhere, or a debugger has it",
            name_text, wrapped ? "" : " is dead");
    } else if (child->how.signal) {
        snprintf(buffer, buffer_size, "%s%s was killed by signal %d (%s)%s", name_text, whose,
                 child->how.signal, signal_text(child->how.signal),
                 child->core_dumped ? " (core dumped)" : "");
    } else {
        snprintf(buffer, buffer_size, "%s%s exited with status %d", name_text, whose,
                 child->how.exit_status);
    }
}

/* With the lock held, once everything is known. */
static void child_keep_death(struct cox_child *child)
{
    if (atomic_load_explicit(&child->supervisor->ending, memory_order_acquire))
        return;
    struct cox_last_death *death = &child->last_death;
    death->count++;
    death->when_ns = cox_now_ns();
    cox_child_describe(child, true, death->text, sizeof death->text);
    cox_last_lines_join(&child->last_lines, death->last_lines, sizeof death->last_lines);
}

void cox_child_set_how(struct cox_child *child, const siginfo_t *info)
{
    struct cox_exit how = {.known = info->si_pid != 0};
    if (how.known && info->si_code == CLD_EXITED)
        how.exit_status = info->si_status;
    else if (how.known)
        how.signal = info->si_status;
    child->core_dumped = how.known && info->si_code == CLD_DUMPED;
    if (child->wrapper_killed && how.signal == SIGKILL)
        how = (struct cox_exit){.known = false}; /* this process has killed it */
    child->how = how;
}

/* Both its processes are dead. First it is reaped, its last lines and state are recorded, and
 * waiters for the rank are woken. Then follow all remaining lines, which may fill a pipe and take
 * the host time, and the death hook. Only then the count changes: a waiter for it knows that the
 * hooks have returned. */
void cox_child_reap(struct cox_child *child)
{
    struct cox_supervisor *s = child->supervisor;
    siginfo_t info = {0};
    pthread_mutex_lock(&s->lock);
    child->dumping = child_dumps(child); /* else it is dead as any other */
    pthread_mutex_unlock(&s->lock);
    if (!child->node[0])
        cox_child_kill(child); /* while the pid is its own: it is not reaped yet */
    if (!s->external && !child_try_reap(child, &info))
        return;
    cox_fault_point(COX_FAULT_DEATH_SEEN);
    struct rest rest[2];
    child_take_rest(child, rest);
    cox_tsan_has_died();
    pthread_mutex_lock(&s->lock);
    if (child->node[0])
        child->how = child->remote_how;
    else if (!child->dumping)
        cox_child_set_how(child, &info);
    const struct cox_exit how = child->how;
    child_keep_death(child);
    cox_rank_move(child->record, COX_STAGE_DEAD);
    pthread_mutex_unlock(&s->lock);
    cox_fault_point(COX_FAULT_DEATH_STORED);

    if (s->hooks.wake)
        s->hooks.wake(s->hooks.context, child->rank);
    child_tell_rest(child, rest);
    if (s->hooks.death)
        s->hooks.death(s->hooks.context, child->rank, cox_rank_pid(child->record), &how);
    cox_fault_point(COX_FAULT_DEATH_REPORTED);
    pthread_mutex_lock(&s->lock);
    cox_child_await_no_more(child);
    cox_rank_move(child->record, COX_STAGE_REPORTED);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* The fds to poll; poll skips negative ones, of what has ended. Under the lock: adopt, and with
 * external processes register and set_left, change them on other threads. */
void cox_child_polled_fds(struct cox_child *child, int *ret_fd, int *ret_adopted_fd)
{
    pthread_mutex_lock(&child->supervisor->lock);
    const bool lives = cox_rank_stage_lives(cox_rank_stage_of(child->record));
    *ret_fd = child->ended || !lives ? -1 : child->pidfd;
    *ret_adopted_fd = child->adopted_ended || !lives ? -1 : child->adopted.pidfd;
    pthread_mutex_unlock(&child->supervisor->lock);
}

bool cox_child_remote_ended(const struct cox_child *child)
{
    struct pollfd end = {.fd = child->pidfd, .events = POLLIN};
    return child->pidfd >= 0 && poll(&end, 1, 0) > 0;
}

/* With the lock held. */
static void child_see_end(struct cox_child *child)
{
    if (cox_rank_stage_serves(cox_rank_stage_of(child->record)))
        cox_rank_move(child->record, COX_STAGE_EXITING);
}

/* The process that served the rank is dead. Its wrapper is killed, unless the group is ending: then
 * it may have work left. */
void cox_child_adopted_ended(struct cox_child *child)
{
    bool ending = atomic_load_explicit(&child->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&child->supervisor->lock);
    child->adopted_ended = true;
    child_see_end(child);
    if (!child->ended && !ending) {
        /* The death of the wrapper may have ended it, and be seen later. */
        child->wrapper_killed = !cox_peer_exiting(cox_rank_pid(child->record));
        cox_launch_kill_group(cox_rank_pid(child->record), child->pidfd);
    }
    pthread_mutex_unlock(&child->supervisor->lock);
}

/* The process that was started is dead. A process that serves in its place is killed; if the group
 * is ending it got the same signals, and is left to end. The dead one is not reaped before: it
 * keeps the process group's number. */
void cox_child_ended(struct cox_child *child)
{
    bool ending = atomic_load_explicit(&child->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&child->supervisor->lock);
    /* It was polled without the lock: by now the rank may have been released, or have another
     * process. */
    const struct cox_peer peer = {.pid = cox_rank_pid(child->record), .pidfd = child->pidfd};
    bool ended = child->node[0] ? cox_child_remote_ended(child)
                                : !child->supervisor->external ||
                                      (child->pidfd >= 0 && !cox_peer_alive(&peer));
    if (ended) {
        child->ended = true;
        child_see_end(child);
    }
    if (ended && child->adopted.pidfd >= 0 && !child->adopted_ended && !ending) {
        cox_launch_kill_group(cox_rank_pid(child->record), child->pidfd);
        cox_pidfd_signal(child->adopted.pidfd, SIGKILL);
    }
    pthread_mutex_unlock(&child->supervisor->lock);
}

bool cox_child_is_gone(struct cox_child *child)
{
    pthread_mutex_lock(&child->supervisor->lock);
    bool gone = cox_rank_stage_of(child->record) == COX_STAGE_EXITING && child->ended &&
                (child->adopted.pidfd < 0 || child->adopted_ended);
    pthread_mutex_unlock(&child->supervisor->lock);
    return gone;
}

void cox_child_reset(struct cox_child *child)
{
    struct cox_supervisor *s = child->supervisor;
    for (int stream = 0; stream < 2; stream++) {
        cox_close_fd(
            &child->streams[stream].fd); /* a child of the dead may still hold the other end */
        child->streams[stream].size = 0;
    }
    pthread_mutex_lock(&s->lock);
    cox_close_fd(&child->pidfd);
    cox_peer_close(&child->adopted);
    child->adopted.pid = 0;
    atomic_store_explicit(&child->record->adopted_pid, 0, memory_order_relaxed);
    child->reap_until_ns = 0;
    child->ended = child->adopted_ended = child->wrapper_killed = child->dumping = false;
    child->record->left_ns = 0;
    child->last_lines = (struct cox_last_lines){0};
    cox_rank_move(child->record, COX_STAGE_LAUNCHING);
    pthread_mutex_unlock(&s->lock);
}
