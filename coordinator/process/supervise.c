#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "supervise_internal.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* A process that SIGKILL has not ended by then is stuck in the kernel, and is logged. */
#define KILL_PATIENCE_MS 10000
/* How often a start that took too long kills what was started meanwhile. */
#define EXPIRED_SLICE_MS 10

/* Ends a process that is being started. With the lock held: its pidfd is not closed meanwhile. */
static void launch_kill(struct cox_child *child)
{
    /* relaxed: the kernel stores it, once. */
    int pidfd = atomic_load_explicit(&child->launched.pidfd, memory_order_relaxed);
    if (pidfd >= 0)
        cox_pidfd_signal(pidfd, SIGKILL);
}

/* Without the thread, which has ended or never ran. */
static void supervisor_destroy(struct cox_supervisor *s)
{
    for (uint32_t rank = 0; s->children && rank < s->plan.rank_count; rank++) {
        struct cox_child *child = &s->children[rank];
        cox_close_fd(&child->pidfd);
        cox_peer_close(&child->adopted);
        cox_close_fd(&child->streams[0].fd);
        cox_close_fd(&child->streams[1].fd);
    }
    cox_unreaped_deinit(s);
    free(s->children);
    free(s->polled);
    free(s->packed);
    cox_close_fd(&s->stop_fd);
    cox_launch_plan_deinit(&s->plan);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int supervisor_new(const struct cox_supervise_options *options,
                          struct cox_supervisor **ret_supervisor, struct cox_error *err)
{
    struct cox_supervisor *s = calloc(1, sizeof *s);
    if (!s)
        return cox_fail(err, -ENOMEM, "supervisor: %s", cox_status_text(-ENOMEM));
    s->hooks = options->hooks;
    s->log = options->log;
    pthread_mutex_init(&s->lock, NULL);
    cox_condition_init(&s->changed);

    s->stop_fd = -1;
    int r = cox_launch_plan_init(&s->plan, options, err);
    if (r) {
        supervisor_destroy(s);
        return r;
    }
    s->external = options->external;
    s->memory_fds = options->memory_fds;
    s->memory_fd_count = options->memory_fd_count;
    s->polled = calloc(1 + (size_t)4 * s->plan.rank_count, sizeof *s->polled);
    s->packed = calloc(1 + (size_t)4 * s->plan.rank_count, sizeof *s->packed);
    s->children = calloc(s->plan.rank_count, sizeof *s->children);
    for (uint32_t rank = 0; s->children && rank < s->plan.rank_count; rank++) {
        struct cox_child *child = &s->children[rank];
        child->supervisor = s;
        child->rank = rank;
        child->record = &options->ranks[rank];
        child->pidfd = child->adopted.pidfd = child->streams[0].fd = child->streams[1].fd = -1;
        atomic_init(&child->launched.pidfd, -1);
    }
    if (!s->polled || !s->packed || !s->children)
        r = -ENOMEM;
    else if ((s->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        r = -errno;
    else
        r = cox_fd_raise(&s->stop_fd);
    if (r) {
        supervisor_destroy(s);
        return cox_fail(err, r, "supervisor: %s", cox_status_text(r));
    }
    *ret_supervisor = s;
    return 0;
}

/* The supervisor thread blocks until the process that it starts has executed its program, which a
 * stopped one never does; only its death wakes the thread. With the lock held, until the phase
 * changes. */
static void launch_expire(struct cox_supervisor *s)
{
    s->expired = true;
    while (s->phase == COX_WATCH_LAUNCHING) {
        /* Repeated: a process may have been about to start at the first signal. Only this thread
         * closes pidfds. */
        for (uint32_t rank = 0; rank < s->plan.rank_count; rank++)
            launch_kill(&s->children[rank]);
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_after_ms(EXPIRED_SLICE_MS));
        pthread_cond_timedwait(&s->changed, &s->lock, &until);
    }
}

static int launch_fail(struct cox_supervisor *s, struct cox_error *err)
{
    if (!s->expired)
        return cox_fail(err, s->launch_error.code, "%s", s->launch_error.text);
    return cox_fail(
        err, COX_TIMEOUT,
        "rank %u: its process did not get as far as executing '%.400s' in time: was it stopped by a signal, or is the machine that slow?",
        s->launching, s->plan.program);
}

int cox_supervisor_start(const struct cox_supervise_options *options,
                         struct cox_supervisor **ret_supervisor, struct cox_error *err)
{
    struct cox_supervisor *s = NULL;
    int r = supervisor_new(options, &s, err);
    if (r)
        return r;
    r = cox_thread_start(&s->thread, cox_supervisor_main, s);
    if (r) {
        supervisor_destroy(s);
        return cox_fail(err, r, "supervisor thread: %s", cox_status_text(r));
    }
    pthread_mutex_lock(&s->lock);
    const struct timespec until =
        cox_deadline_timespec(options->deadline_ns ? options->deadline_ns : COX_DEADLINE_NEVER);
    int e = 0;
    while (s->phase == COX_WATCH_LAUNCHING && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &until);
    if (s->phase == COX_WATCH_LAUNCHING)
        launch_expire(s);
    bool failed = s->phase == COX_WATCH_FAILED;
    if (!failed) {
        /* Before any hook: what a hook calls needs the pointer. */
        *ret_supervisor = s;
        s->phase = COX_WATCH_WATCHING;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    if (failed) {
        pthread_join(s->thread, NULL);
        r = launch_fail(s, err);
        supervisor_destroy(s);
    }
    return r;
}

static struct cox_child *child_of(struct cox_supervisor *s, uint32_t rank)
{
    COX_ASSERT(rank < s->plan.rank_count);
    return &s->children[rank];
}

pid_t cox_supervisor_pid(struct cox_supervisor *s, uint32_t rank)
{
    return cox_rank_pid(child_of(s, rank)->record);
}

uint64_t cox_supervisor_see_left(struct cox_supervisor *s, uint32_t rank, bool left)
{
    struct cox_rank *record = child_of(s, rank)->record;
    const uint64_t now = cox_now_ns();
    pthread_mutex_lock(&s->lock);
    const enum cox_rank_stage stage = cox_rank_stage_of(record);
    if (left && (stage == COX_STAGE_STARTING || stage == COX_STAGE_RUNNING)) {
        record->left_ns = now;
        cox_rank_move(record, COX_STAGE_LEAVING);
    } else if (!left && stage == COX_STAGE_LEAVING && record->awaited) {
        cox_rank_move(record, COX_STAGE_RUNNING);
    }
    bool leaving = cox_rank_stage_of(record) == COX_STAGE_LEAVING;
    /* At least 1, also at the moment when it is seen. */
    uint64_t since_ns = leaving ? 1 + (now > record->left_ns ? now - record->left_ns : 0) : 0;
    pthread_mutex_unlock(&s->lock);
    return since_ns;
}

bool cox_supervisor_dead(struct cox_supervisor *s, uint32_t rank, struct cox_exit *ret_how)
{
    struct cox_child *child = child_of(s, rank);
    if (!cox_rank_is_dead(child->record))
        return false;
    pthread_mutex_lock(&s->lock);
    if (ret_how)
        *ret_how = child->how;
    pthread_mutex_unlock(&s->lock);
    return true;
}

/* With the lock held. */
static bool child_has_ended(struct cox_child *child)
{
    if (child->node[0])
        return cox_rank_is_dead(child->record) || cox_child_remote_ended(child);
    const struct cox_peer peer = {.pid = cox_rank_pid(child->record), .pidfd = child->pidfd};
    return cox_rank_is_dead(child->record) || (child->pidfd >= 0 && !cox_peer_alive(&peer));
}

bool cox_supervisor_ended(struct cox_supervisor *s, uint32_t rank)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    bool ended = child_has_ended(child);
    pthread_mutex_unlock(&s->lock);
    return ended;
}

bool cox_supervisor_exiting(struct cox_supervisor *s, uint32_t rank)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    /* Also if it is known to be dead by now, since the caller checked that a moment ago. */
    bool ended = child_has_ended(child), there = child->pidfd >= 0 && !child->node[0];
    pid_t pid = child->adopted.pidfd >= 0 ? child->adopted.pid : cox_rank_pid(child->record);
    pthread_mutex_unlock(&s->lock);
    return ended || (there && cox_peer_exiting(pid));
}

void cox_supervisor_see_dump(struct cox_supervisor *s, uint32_t rank)
{
    struct cox_child *child = child_of(s, rank);
    struct cox_rank *record = child->record;
    int number = 0;
    pthread_mutex_lock(&s->lock);
    const struct cox_peer own = {.pid = cox_rank_pid(record), .pidfd = child->pidfd};
    const struct cox_peer *serving = child->adopted.pidfd >= 0 ? &child->adopted : &own;
    /* While it is alive after /proc was read, what was read was of this process. */
    bool dumping = cox_rank_stage_serves(cox_rank_stage_of(record)) && !child->node[0] &&
                   cox_peer_dumps_core(serving->pid, &number) && cox_peer_alive(serving);
    if (dumping) {
        child->how = (struct cox_exit){.known = number > 0, .signal = number};
        child->dumping = child->ended = true;
        child->adopted_ended = child->wrapper_killed = child->adopted.pidfd >= 0;
        cox_rank_move(record, COX_STAGE_EXITING);
    }
    pthread_mutex_unlock(&s->lock);
    if (dumping)
        cox_eventfd_signal(s->stop_fd);
}

size_t cox_supervisor_last_lines(struct cox_supervisor *s, uint32_t rank, char *buffer,
                                 size_t buffer_size)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    size_t length = cox_last_lines_join(&child->last_lines, buffer, buffer_size);
    pthread_mutex_unlock(&s->lock);
    return length;
}

void cox_supervisor_describe(struct cox_supervisor *s, uint32_t rank, char *buffer,
                             size_t buffer_size)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    cox_child_describe(child, cox_rank_is_dead(child->record), buffer, buffer_size);
    pthread_mutex_unlock(&s->lock);
}

void cox_supervisor_last_death(struct cox_supervisor *s, uint32_t rank,
                               struct cox_last_death *ret_death)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    *ret_death = child->last_death;
    pthread_mutex_unlock(&s->lock);
}

/* With the lock held. */
static void child_run(struct cox_child *child)
{
    if (cox_rank_stage_of(child->record) == COX_STAGE_STARTING)
        cox_rank_move(child->record, COX_STAGE_RUNNING);
}

int cox_supervisor_adopt(struct cox_supervisor *s, uint32_t rank, pid_t pid, uint64_t start)
{
    struct cox_child *child = child_of(s, rank);
    if (pid == cox_rank_pid(child->record)) {
        pthread_mutex_lock(&s->lock);
        child_run(child);
        pthread_mutex_unlock(&s->lock);
        return 0;
    }
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, start, &peer);
    if (r)
        return r;
    /* pid and start were written by other processes: otherwise a stranger could be signalled. */
    bool ours = cox_peer_descends(pid, cox_rank_pid(child->record));
    pthread_mutex_lock(&s->lock);
    if (child->ended || !cox_rank_stage_lives(cox_rank_stage_of(child->record))) {
        /* No thread would ever poll it. */
        if (ours)
            cox_pidfd_signal(peer.pidfd, SIGKILL);
        r = COX_PEER_DEAD;
    } else if (!ours) {
        r = COX_DENIED;
    } else {
        child->adopted = peer;
        atomic_store_explicit(&child->record->adopted_pid, peer.pid, memory_order_relaxed);
        peer.pidfd = -1;
        child_run(child);
    }
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        cox_eventfd_signal(s->stop_fd);
    return r;
}

/* Takes the vacant slot, and *fd. node: "": it is on this machine. The lock is held. */
static int child_register(struct cox_child *child, const char *node, pid_t pid, int *fd)
{
    if (cox_rank_is_dead(child->record))
        return COX_STATE; /* its lines and its memory are the dead one's until it is released */
    if (cox_rank_stage_of(child->record) != COX_STAGE_VACANT)
        return COX_TAKEN;
    child->pidfd = cox_steal_fd(fd);
    snprintf(child->node, sizeof child->node, "%s", node);
    child->remote_how = (struct cox_exit){0};
    child->remote_end[0] = '\0';
    cox_rank_set_pid(child->record, pid);
    child->ended = child->left_alive = false;
    cox_child_await(child);
    cox_rank_move(child->record, COX_STAGE_STARTING);
    return 0;
}

int cox_supervisor_register(struct cox_supervisor *s, uint32_t rank, pid_t pid, uint64_t start)
{
    COX_ASSERT(s->external);
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, start, &peer);
    if (r)
        return r;
    pthread_mutex_lock(&s->lock);
    r = child_register(child_of(s, rank), "", pid, &peer.pidfd);
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        cox_eventfd_signal(s->stop_fd);
    return r;
}

int cox_supervisor_register_remote(struct cox_supervisor *s, uint32_t rank, const char *node,
                                   pid_t pid, int end_fd)
{
    COX_ASSERT(s->external);
    _cox_cleanup_(cox_close_fd) int fd = end_fd;
    pthread_mutex_lock(&s->lock);
    int r = child_register(child_of(s, rank), node, pid, &fd);
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        cox_eventfd_signal(s->stop_fd);
    return r;
}

void cox_supervisor_set_remote_end(struct cox_supervisor *s, uint32_t rank,
                                   const struct cox_exit *how, const char *text)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    child->remote_how = *how;
    snprintf(child->remote_end, sizeof child->remote_end, "%s", text);
    pthread_mutex_unlock(&s->lock);
}

void cox_supervisor_add_line(struct cox_supervisor *s, uint32_t rank, const char *text)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    cox_last_lines_add(&child->last_lines, text, strlen(text));
    pthread_mutex_unlock(&s->lock);
}

bool cox_supervisor_node(struct cox_supervisor *s, uint32_t rank, char *buffer, size_t buffer_size)
{
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    snprintf(buffer, buffer_size, "%s", child->node);
    pthread_mutex_unlock(&s->lock);
    return buffer[0] != '\0';
}

/* With the lock held. No process is the rank. */
static void child_release_slot(struct cox_child *child)
{
    cox_close_fd(&child->pidfd);
    child->node[0] = '\0';
    child->dumping = false;
    child->record->left_ns = 0;
    cox_rank_set_pid(child->record, 0);
    cox_rank_move(child->record, COX_STAGE_VACANT);
}

void cox_supervisor_set_left(struct cox_supervisor *s, uint32_t rank, bool has_served)
{
    COX_ASSERT(s->external);
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    const struct cox_peer peer = {.pid = cox_rank_pid(child->record), .pidfd = child->pidfd};
    const enum cox_rank_stage stage = cox_rank_stage_of(child->record);
    if (cox_rank_stage_serves(stage) && child->record->awaited && cox_peer_alive(&peer) &&
        !cox_peer_exiting(peer.pid)) {
        cox_child_await_no_more(child);
        if (!has_served) {
            child->former_pid = child->former_pid ? child->former_pid : peer.pid;
            child_release_slot(child);
        } else if (stage != COX_STAGE_LEAVING) {
            child->record->left_ns = cox_now_ns();
            cox_rank_move(child->record, COX_STAGE_LEAVING);
        }
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
}

/* With the lock held. Returns true if the thread has seen an end and has not reported it. */
static bool child_is_ending(const struct cox_child *child)
{
    const enum cox_rank_stage stage = cox_rank_stage_of(child->record);
    return stage == COX_STAGE_EXITING || stage == COX_STAGE_DEAD;
}

int cox_supervisor_release_slot(struct cox_supervisor *s, uint32_t rank, uint64_t deadline_ns,
                                struct cox_error *err)
{
    COX_ASSERT(s->external);
    /* A hook that waits would wait for itself. */
    COX_ASSERT(!pthread_equal(pthread_self(), s->thread));
    struct cox_child *child = child_of(s, rank);
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&s->lock);
    /* Its end has begun: the thread is about to report it, without the lock. */
    while (child_is_ending(child) && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    bool released = !child_is_ending(child);
    if (released && cox_rank_stage_of(child->record) != COX_STAGE_VACANT) {
        if (cox_rank_stage_serves(cox_rank_stage_of(child->record))) {
            cox_child_await_no_more(child);
            child->left_alive = true;
        }
        child->former_pid = cox_rank_pid(child->record);
        child_release_slot(child);
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return released ? 0 : cox_fail(err, COX_TIMEOUT, "rank %u: hooks did not return in time", rank);
}

bool cox_supervisor_cancel_slot(struct cox_supervisor *s, uint32_t rank)
{
    COX_ASSERT(s->external);
    struct cox_child *child = child_of(s, rank);
    pthread_mutex_lock(&s->lock);
    bool vacant = cox_rank_stage_of(child->record) == COX_STAGE_VACANT;
    if (vacant) {
        cox_rank_set_pid(child->record, child->former_pid);
        cox_rank_move(child->record, COX_STAGE_REPORTED);
    }
    pthread_mutex_unlock(&s->lock);
    return vacant;
}

int cox_supervisor_kill(struct cox_supervisor *s, uint32_t rank, pid_t pid)
{
    struct cox_child *child = child_of(s, rank);
    int r = 0;
    pthread_mutex_lock(&s->lock);
    bool serves = pid == 0 || cox_rank_pid(child->record) == pid || child->adopted.pid == pid;
    if (serves && !cox_rank_is_dead(child->record) && child->pidfd >= 0 && child->record->awaited) {
        if (cox_peer_alive(&child->adopted))
            r = cox_pidfd_signal(child->adopted.pidfd, SIGKILL);
        int killed = cox_child_kill(child);
        r = r ? r : killed;
    }
    pthread_mutex_unlock(&s->lock);
    return r == -ESRCH ? 0 : r;
}

/* With the lock held. Returns true if no death remains to be reported. */
static bool child_is_reported(const struct cox_child *child)
{
    const enum cox_rank_stage stage = cox_rank_stage_of(child->record);
    return stage == COX_STAGE_REPORTED || stage == COX_STAGE_VACANT;
}

int cox_supervisor_await_end(struct cox_supervisor *s, uint32_t rank, uint64_t deadline_ns,
                             struct cox_error *err)
{
    struct cox_child *child = child_of(s, rank);
    /* A hook that waits would wait for itself. */
    COX_ASSERT(!pthread_equal(pthread_self(), s->thread));
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&s->lock);
    while (!child_is_reported(child) && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    bool reported = child_is_reported(child);
    pthread_mutex_unlock(&s->lock);
    return reported ? 0
                    : cox_fail(err, COX_TIMEOUT, "rank %u (pid %d) %s", rank,
                               cox_rank_pid(child->record),
                               cox_rank_is_dead(child->record)
                                   ? "is dead, but a hook did not return in time"
                                   : "is alive still");
}

void cox_supervisor_cancel(struct cox_supervisor *s)
{
    pthread_mutex_lock(&s->lock);
    s->cancelled = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

int cox_supervisor_relaunch(struct cox_supervisor *s, uint32_t rank,
                            const struct cox_launch_incarnation *incarnation, uint64_t deadline_ns,
                            struct cox_error *err)
{
    struct cox_child *child = child_of(s, rank);
    if (!cox_rank_is_dead(child->record))
        return cox_fail(err, COX_STATE, "rank %u (pid %d) is alive", rank,
                        cox_rank_pid(child->record));
    int r = cox_supervisor_await_end(s, rank, deadline_ns, err);
    if (r)
        return r;
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    struct cox_relaunch own = {.rank = rank, .incarnation = incarnation, .err = err};
    int e = 0;
    pthread_mutex_lock(&s->lock);
    while (s->relaunch && e != ETIMEDOUT) /* another thread's */
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    if (s->relaunch) {
        pthread_mutex_unlock(&s->lock);
        return cox_fail(err, COX_TIMEOUT, "rank %u: another rank is being started", rank);
    }
    s->relaunch = &own;
    cox_eventfd_signal(s->stop_fd);
    /* Once begun it belongs to the thread until done; a process that does not execute its program
     * by then is killed. */
    while (!own.done) {
        const struct timespec slice =
            cox_deadline_timespec(cox_deadline_after_ms(EXPIRED_SLICE_MS));
        bool late = s->cancelled || cox_now_ns() >= deadline_ns;
        if (late && !own.begun)
            break;
        if (late)
            launch_kill(child);
        e = pthread_cond_timedwait(&s->changed, &s->lock, late ? &slice : &deadline);
    }
    bool cancelled = s->cancelled;
    bool taken_back = !own.done;
    if (taken_back)
        s->relaunch = NULL;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (!taken_back)
        return own.status;
    return cancelled ? cox_fail(err, COX_CLOSED, "the group stops")
                     : cox_fail(err, COX_TIMEOUT, "rank %u: hooks did not return in time", rank);
}

void cox_supervisor_expect_end(struct cox_supervisor *s)
{
    atomic_store_explicit(&s->ending, true, memory_order_release);
}

int cox_supervisor_wait(struct cox_supervisor *s, uint64_t deadline_ns)
{
    /* A hook that waits would wait for itself. */
    COX_ASSERT(!pthread_equal(pthread_self(), s->thread));
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&s->lock);
    while (s->alive > 0 && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    bool all_dead = s->alive == 0;
    pthread_mutex_unlock(&s->lock);
    return all_dead ? 0 : COX_TIMEOUT;
}

/* The kernel is asked which live, since it knows of a death before the thread does. */
uint32_t cox_supervisor_signal_all(struct cox_supervisor *s, int number)
{
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < s->plan.rank_count; rank++) {
        struct cox_child *child = &s->children[rank];
        pthread_mutex_lock(&s->lock);
        const struct cox_peer peer = {.pid = cox_rank_pid(child->record),
                                      .pidfd = child->record->awaited ? child->pidfd : -1};
        bool adopted = cox_peer_alive(&child->adopted), heard = false;
        if (child->node[0]) {
            /* It ends when the group's end is told, or at the latest now. */
            heard = number == SIGKILL && cox_rank_stage_serves(cox_rank_stage_of(child->record)) &&
                    cox_child_kill(child) == 0;
            count += heard;
            pthread_mutex_unlock(&s->lock);
            continue;
        }
        const bool dead = cox_rank_is_dead(child->record);
        if (adopted)
            heard = cox_pidfd_signal(child->adopted.pidfd, number) == 0;
        /* A wrapper ends with its child; a worker that ended with its wrapper would have no time to
         * clean up. */
        if (!dead && !(adopted && number == SIGTERM) && cox_peer_alive(&peer))
            heard = cox_pidfd_signal(child->pidfd, number) == 0 || heard;
        count += heard;
        if (number == SIGKILL && !dead && peer.pidfd >= 0)
            cox_child_kill(child);
        pthread_mutex_unlock(&s->lock);
    }
    return count;
}

static uint32_t supervisor_end_ranks(struct cox_supervisor *s, uint64_t term_ms)
{
    cox_supervisor_expect_end(s);
    if (cox_supervisor_wait(s, cox_now_ns()) == 0)
        return 0;
    uint32_t signalled = cox_supervisor_signal_all(s, SIGTERM);
    cox_supervisor_signal_all(s, SIGCONT);
    if (cox_supervisor_wait(s, cox_deadline_after_ms(term_ms)) == 0)
        return signalled;
    cox_supervisor_signal_all(s, SIGKILL);
    if (cox_supervisor_wait(s, cox_deadline_after_ms(KILL_PATIENCE_MS)) == 0)
        return signalled;
    for (uint32_t rank = 0; rank < s->plan.rank_count; rank++)
        if (!cox_rank_is_dead(s->children[rank].record))
            cox_log_write(
                &s->log, 3,
                "rank %u (pid %d) has not ended %d s after SIGKILL: it is held in the kernel, see /proc/%d/stack",
                rank, cox_rank_pid(s->children[rank].record), KILL_PATIENCE_MS / 1000,
                cox_rank_pid(s->children[rank].record));
    cox_supervisor_wait(s, COX_DEADLINE_NEVER);
    return signalled;
}

uint32_t cox_supervisor_end(struct cox_supervisor *s, uint64_t term_ms)
{
    uint32_t signalled = supervisor_end_ranks(s, term_ms);
    cox_unreaped_end(s);
    return signalled;
}

struct cox_supervisor *cox_supervisor_free(struct cox_supervisor *s)
{
    if (!s)
        return NULL;
    cox_supervisor_end(s, 0);
    atomic_store_explicit(&s->leaving, true, memory_order_release);
    cox_eventfd_signal(s->stop_fd);
    pthread_join(s->thread, NULL);
    supervisor_destroy(s);
    return NULL;
}
