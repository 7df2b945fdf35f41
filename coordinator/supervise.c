#include "supervise.h"

#include "../channel/fault.h"
#include "../channel/peer.h"
#include "../channel/thread.h"
#include "../channel/tsan.h"
#include "launch.h"
#include "output.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A process that SIGKILL has not ended by now sits in the kernel; somebody should hear of it. */
#define KILL_PATIENCE_MS 10000
/* How often a start that took too long kills what was started meanwhile. */
#define EXPIRED_SLICE_MS 10
/* A process whose pidfd says that it is dead becomes waitable a moment later, and then it is known how it
 * ended; under a debugger, only when that lets it go. */
#define REAP_PATIENCE_NS (100 * COX_NSEC_PER_MSEC)
#define REAP_AGAIN_MS 1
#define GRAVES_AGAIN_MS 100

struct worker {
    struct cox_supervisor *supervisor;
    uint32_t rank;
    /* Its pid is of the rank's present life, and written by the supervisor thread. */
    struct cox_serving *life; /* in the supervisor's lives */
    int pidfd;                /* of the same; under the supervisor's lock */
    /* Its pidfd is there, for who waits for it, also while the supervisor thread sleeps in cox_launch. */
    struct cox_launched launched;
    /* The process that serves the rank, when that is not pid; under the supervisor's lock. */
    struct cox_peer adopted;
    /* Written by the supervisor thread, under the lock. The rank is dead when both processes are. */
    bool ended; /* pid is dead, perhaps not reaped */
    bool adopted_ended;
    bool wrapper_killed; /* by us, since the adopted process had died */
    /* Of the supervisor thread alone; index 1 is standard error. */
    struct cox_output streams[2];
    uint64_t reap_until_ns; /* 0: it was not tried yet */
    int grave_fd;           /* pidfd of a dead process that a debugger has, to be reaped one day */
    /* Under the supervisor's lock. */
    struct cox_last_lines last_lines;
    struct cox_exit how; /* once dead */
    bool core_dumped;
    struct cox_last_death last_death; /* of a life before, too */
    bool told;                        /* dead, and the death hook has returned */
    bool released; /* external: it has left the group; watched, but neither awaited nor signalled */
    pid_t former;  /* external: who was the rank before its place was vacated */
    bool let_go;   /* former lives, for all that is known */
};

/* A process to be started again; on the stack of who waits for it. */
struct relaunch {
    uint32_t rank;
    const struct cox_launch_life *life;
    struct cox_error *err;
    bool begun, done;
    int status;
};

/* LAUNCHING -> FAILED                the thread ends
 * LAUNCHING -> LAUNCHED -> WATCHING  the thread moves on when start has handed the supervisor out
 */
enum phase { LAUNCHING, FAILED, LAUNCHED, WATCHING };

struct cox_supervisor {
    /* Constant once the thread runs. */
    struct cox_launch_plan plan;
    struct cox_supervise_hooks hooks;
    struct cox_log log;
    int stop_fd;         /* eventfd, readable: look at `leaving`, and at who was adopted */
    atomic_bool leaving; /* every worker is dead and free wants the thread */
    atomic_bool ending;  /* workers were told to end */
    bool external;       /* processes are others' children, and come by enlist */
    pthread_t thread;
    struct pollfd *polled; /* of the supervisor thread alone */
    struct pollfd *packed; /* what of polled is an fd */
    struct worker *workers;
    struct cox_serving *lives; /* of all ranks; cox_supervisor_lives */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* on CLOCK_MONOTONIC; phase or alive */
    enum phase phase;
    uint32_t launching;        /* the rank whose process is being started */
    bool expired;              /* start has waited long enough: no further process is started */
    uint32_t alive;            /* workers whose death hook has not returned */
    struct relaunch *relaunch; /* NULL: none is asked for */
    bool cancelled;            /* no relaunch any more */
    struct cox_error launch_error;
};

static int worker_launch(struct worker *w, const struct cox_launch_life *life,
                         struct cox_error *err)
{
    struct cox_supervisor *s = w->supervisor;
    pthread_mutex_lock(&s->lock);
    bool expired = s->expired;
    if (!expired)
        s->launching = w->rank;
    pthread_mutex_unlock(&s->lock);
    if (expired)
        return COX_TIMEOUT; /* start says why */
    int r = cox_launch(&s->plan, w->rank, life, &w->launched, err);
    pthread_mutex_lock(&s->lock);
    /* relaxed: stored on behalf of this thread. The pipes had room above 2, so it has. */
    w->pidfd = atomic_exchange_explicit(&w->launched.pidfd, -1, memory_order_relaxed);
    if (w->pidfd >= 0)
        cox_fd_raise(&w->pidfd);
    if (r == 0)
        w->life->pid = w->launched.pid;
    pthread_mutex_unlock(&s->lock);
    if (r)
        return r;
    w->streams[0].fd = w->launched.stream_fds[0];
    w->streams[1].fd = w->launched.stream_fds[1];
    return 0;
}

static int pidfd_signal(int pidfd, int number)
{
    return syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0) < 0 ? -errno : 0;
}

/* Ends a process that is being started. With the lock held: its pidfd is not closed meanwhile. */
static void launch_kill(struct worker *w)
{
    /* relaxed: the kernel stores it, once. */
    int pidfd = atomic_load_explicit(&w->launched.pidfd, memory_order_relaxed);
    if (pidfd >= 0)
        pidfd_signal(pidfd, SIGKILL);
}

static int launch_all(struct cox_supervisor *s)
{
    if (s->external)
        return 0;
    int r = 0;
    const struct cox_launch_life first = {.generation = 1};
    for (uint32_t rank = 0; r == 0 && rank < s->plan.rank_count; rank++)
        r = worker_launch(&s->workers[rank], &first, &s->launch_error);
    return r;
}

static void launch_undo(struct cox_supervisor *s)
{
    siginfo_t info;
    for (uint32_t rank = 0; rank < s->plan.rank_count && s->workers[rank].life->pid; rank++)
        cox_launch_kill_group(s->workers[rank].life->pid, s->workers[rank].pidfd);
    for (uint32_t rank = 0; rank < s->plan.rank_count && s->workers[rank].life->pid; rank++)
        cox_launch_reap(s->workers[rank].pidfd, true, &info);
}

static void worker_keep_line(void *context, const char *text, size_t size)
{
    struct worker *w = context;
    pthread_mutex_lock(&w->supervisor->lock);
    cox_last_lines_add(&w->last_lines, text, size);
    pthread_mutex_unlock(&w->supervisor->lock);
}

static void worker_tell_line(struct worker *w, const char *text, bool is_stderr)
{
    struct cox_supervisor *s = w->supervisor;
    if (s->hooks.line)
        s->hooks.line(s->hooks.context, w->rank, is_stderr, text);
}

/* For lines that are kept already. */
static void worker_tell_stdout(void *context, const char *text, size_t size)
{
    (void)size;
    worker_tell_line(context, text, false);
}

static void worker_tell_stderr(void *context, const char *text, size_t size)
{
    (void)size;
    worker_tell_line(context, text, true);
}

static const cox_output_line_fn stream_tells[2] = {worker_tell_stdout, worker_tell_stderr};

static void worker_stdout_line(void *context, const char *text, size_t size)
{
    worker_keep_line(context, text, size);
    worker_tell_line(context, text, false);
}

static void worker_stderr_line(void *context, const char *text, size_t size)
{
    worker_keep_line(context, text, size);
    worker_tell_line(context, text, true);
}

static const cox_output_line_fn stream_lines[2] = {worker_stdout_line, worker_stderr_line};

/* False: not yet, try again. ret_info stays empty when nobody will ever know. */
static bool worker_reap(struct worker *w, siginfo_t *ret_info)
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

static void worker_visit_grave(struct worker *w)
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

static void worker_take_rest(struct worker *w, struct rest rest[2])
{
    for (int stream = 0; stream < 2; stream++) {
        const struct cox_output *output = &w->streams[stream];
        if (cox_output_take(output, &rest[stream].bytes, &rest[stream].size))
            rest[stream] = (struct rest){0};
        else
            cox_output_last(output, rest[stream].bytes, rest[stream].size, worker_keep_line, w);
    }
}

static void worker_tell_rest(struct worker *w, struct rest rest[2])
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

/* SIGKILL, for its process group as well, which only a process that was started here leads. */
static int worker_kill(struct worker *w)
{
    if (w->supervisor->external)
        return pidfd_signal(w->pidfd, SIGKILL);
    cox_launch_kill_group(w->life->pid, w->pidfd);
    return 0;
}

/* In words, of what is known by now. With the lock held. */
static void worker_describe(struct worker *w, bool dead, char *buffer, size_t buffer_size)
{
    char who[96];
    bool wrapped = w->adopted.pid != 0;
    if (wrapped)
        snprintf(who, sizeof who, "rank %u (pid %d, in its wrapper %d) is %s", w->rank,
                 w->adopted.pid, w->life->pid, dead ? "dead" : "alive");
    else
        snprintf(who, sizeof who, "rank %u (pid %d)", w->rank, w->life->pid);
    const char *whose = wrapped ? "; its wrapper" : "";
    if (!w->life->pid) {
        snprintf(buffer, buffer_size, "rank %u has not logged on", w->rank);
    } else if (!dead) {
        snprintf(buffer, buffer_size, "%s%s", who, wrapped ? "" : " is alive");
    } else if (w->wrapper_killed && !w->how.known) {
        snprintf(buffer, buffer_size, "%s; how, only its wrapper knows", who);
    } else if (w->let_go) {
        snprintf(buffer, buffer_size, "rank %u (pid %d) left the group and was let go", w->rank,
                 w->life->pid);
    } else if (!w->how.known && w->supervisor->external) {
        snprintf(buffer, buffer_size, "%s is dead; how, only who started it knows", who);
    } else if (!w->how.known) {
        snprintf(
            buffer, buffer_size,
            "%s%s, nobody knows how: this program ignores SIGCHLD, waited for it elsewhere, or "
            "a debugger has it",
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
static void worker_keep_death(struct worker *w)
{
    if (atomic_load_explicit(&w->supervisor->ending, memory_order_acquire))
        return;
    struct cox_last_death *death = &w->last_death;
    death->count++;
    death->when_ns = cox_now_ns();
    worker_describe(w, true, death->text, sizeof death->text);
    cox_last_lines_join(&w->last_lines, death->last_lines, sizeof death->last_lines);
}

/* Both its processes are dead. Reap, last lines, state, and who waits for the rank is woken; all the
 * lines, which may be a pipe full and take the host long, and its hook come after that. Only then the
 * count: whoever waited for it knows that the hooks are through. */
static void worker_bury(struct worker *w)
{
    struct cox_supervisor *s = w->supervisor;
    siginfo_t info = {0};
    worker_kill(w); /* while the number is its own: it is not reaped */
    if (!s->external && !worker_reap(w, &info))
        return;
    cox_fault_point(COX_FAULT_DEATH_SEEN);
    struct rest rest[2];
    worker_take_rest(w, rest);
    struct cox_exit how = {.known = info.si_pid != 0};
    if (how.known && info.si_code == CLD_EXITED)
        how.exit_status = info.si_status;
    else if (how.known)
        how.signal = info.si_status;
    pthread_mutex_lock(&s->lock);
    w->core_dumped = how.known && info.si_code == CLD_DUMPED;
    if (w->wrapper_killed && how.signal == SIGKILL)
        how = (struct cox_exit){.known = false}; /* it is our doing */
    w->how = how;
    worker_keep_death(w);
    pthread_mutex_unlock(&s->lock);
    cox_tsan_has_died();
    atomic_store_explicit(&w->life->dead, true, memory_order_release);
    cox_fault_point(COX_FAULT_DEATH_STORED);

    if (s->hooks.wake)
        s->hooks.wake(s->hooks.context, w->rank);
    worker_tell_rest(w, rest);
    if (s->hooks.death)
        s->hooks.death(s->hooks.context, w->rank, w->life->pid, &how);
    cox_fault_point(COX_FAULT_DEATH_TOLD);
    pthread_mutex_lock(&s->lock);
    s->alive -= !w->released;
    w->told = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static bool worker_is_dead(struct worker *w)
{
    return cox_serving_dead(w->life);
}

/* Of the polled set; a negative fd, which is what a thing of the past has, is skipped by poll. Under the
 * lock: adopt, and where processes come from outside enlist and release, change them on other threads. */
static void worker_polled_fds(struct worker *w, int *ret_fd, int *ret_adopted_fd)
{
    pthread_mutex_lock(&w->supervisor->lock);
    *ret_fd = w->ended ? -1 : w->pidfd;
    *ret_adopted_fd = w->adopted_ended || worker_is_dead(w) ? -1 : w->adopted.pidfd;
    pthread_mutex_unlock(&w->supervisor->lock);
}

/* In the order stop, pidfds, adopted pidfds, pipes. */
static int watch_poll(struct cox_supervisor *s)
{
    uint32_t count = s->plan.rank_count;
    struct pollfd *pidfds = s->polled + 1, *adopted = pidfds + count, *streams = adopted + count;
    int timeout_ms = -1;
    s->polled[0] = (struct pollfd){.fd = s->stop_fd, .events = POLLIN};
    for (uint32_t rank = 0; rank < count; rank++) {
        struct worker *w = &s->workers[rank];
        pidfds[rank] = adopted[rank] = (struct pollfd){.events = POLLIN};
        worker_polled_fds(w, &pidfds[rank].fd, &adopted[rank].fd);
        for (int stream = 0; stream < 2; stream++)
            streams[2 * rank + (uint32_t)stream] =
                (struct pollfd){.fd = w->streams[stream].fd, .events = POLLIN};
        if (w->reap_until_ns && !worker_is_dead(w))
            timeout_ms = REAP_AGAIN_MS;
        else if (w->grave_fd >= 0 && timeout_ms < 0)
            timeout_ms = GRAVES_AGAIN_MS;
    }
    /* The kernel refuses more entries than the process may have fds, and counts negative ones, too. */
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

/* The process that served the rank is dead; without it the wrapper is nothing, unless it is the end and
 * it has something left to do. */
static void worker_adopted_ended(struct worker *w)
{
    bool ending = atomic_load_explicit(&w->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&w->supervisor->lock);
    w->adopted_ended = true;
    w->wrapper_killed = !w->ended && !ending;
    if (w->wrapper_killed)
        cox_launch_kill_group(w->life->pid, w->pidfd);
    pthread_mutex_unlock(&w->supervisor->lock);
}

/* The process that was started is dead. One that serves in its place goes, too; if it is the end, as one
 * that was told by the same signals. The dead one is not reaped before: it keeps the group's number. */
static void worker_ended(struct worker *w)
{
    bool ending = atomic_load_explicit(&w->supervisor->ending, memory_order_acquire);
    pthread_mutex_lock(&w->supervisor->lock);
    /* It was polled without the lock: by now the rank may have been released, or be another process. */
    const struct cox_peer peer = {.pid = w->life->pid, .pidfd = w->pidfd};
    bool ended = !w->supervisor->external || (w->pidfd >= 0 && !cox_peer_alive(&peer));
    w->ended = w->ended || ended;
    if (ended && w->adopted.pidfd >= 0 && !w->adopted_ended && !ending) {
        cox_launch_kill_group(w->life->pid, w->pidfd);
        pidfd_signal(w->adopted.pidfd, SIGKILL);
    }
    pthread_mutex_unlock(&w->supervisor->lock);
}

static bool worker_is_gone(struct worker *w)
{
    pthread_mutex_lock(&w->supervisor->lock);
    bool gone = w->ended && w->life->pid && !worker_is_dead(w) &&
                (w->adopted.pidfd < 0 || w->adopted_ended);
    pthread_mutex_unlock(&w->supervisor->lock);
    return gone;
}

/* Nothing of its last life is left. */
static void worker_be_born(struct worker *w)
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
    atomic_store_explicit(&w->life->adopted_pid, 0, memory_order_relaxed);
    w->reap_until_ns = 0;
    w->ended = w->adopted_ended = w->wrapper_killed = w->told = false;
    w->last_lines = (struct cox_last_lines){0};
    pthread_mutex_unlock(&s->lock);
}

static void watch_relaunch(struct cox_supervisor *s)
{
    pthread_mutex_lock(&s->lock);
    struct relaunch *relaunch = s->relaunch;
    s->relaunch = NULL;
    if (relaunch)
        relaunch->begun = true;
    pthread_mutex_unlock(&s->lock);
    if (!relaunch)
        return;
    struct worker *w = &s->workers[relaunch->rank];
    worker_be_born(w);
    int r = worker_launch(w, relaunch->life, relaunch->err);
    pthread_mutex_lock(&s->lock);
    w->told = w->ended = r != 0;
    s->alive += r == 0;
    /* release: as where it is set. */
    if (r == 0)
        atomic_store_explicit(&w->life->dead, false, memory_order_release);
    relaunch->status = r;
    relaunch->done = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* False: the thread may leave. */
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
            /* No memory in the kernel, or the host lowered its limit of fds below what is open. It
             * may pass. */
            cox_log_write(&s->log, 3, "supervisor: poll: %s", cox_status_text(r));
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
            continue;
        }
        if (s->polled[0].revents && !watch_woken(s))
            return;
        for (uint32_t rank = 0; rank < count; rank++) {
            if (adopted[rank].revents)
                worker_adopted_ended(&s->workers[rank]);
            if (pidfds[rank].revents)
                worker_ended(&s->workers[rank]);
            if (worker_is_gone(&s->workers[rank]))
                worker_bury(&s->workers[rank]);
            worker_visit_grave(&s->workers[rank]);
        }
        for (uint32_t i = 0; i < 2 * count; i++)
            if (streams[i].revents && s->workers[i / 2].streams[i % 2].fd >= 0)
                cox_output_read(&s->workers[i / 2].streams[i % 2], stream_lines[i % 2],
                                &s->workers[i / 2]);
    }
}

static void *supervisor_main(void *context)
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
    s->phase = failed ? FAILED : LAUNCHED;
    pthread_cond_broadcast(&s->changed);
    while (s->phase == LAUNCHED)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    if (!failed)
        watch(s);
    return NULL;
}

/* Without the thread: it has ended or was never there. */
static void supervisor_destroy(struct cox_supervisor *s)
{
    for (uint32_t rank = 0; s->workers && s->lives && rank < s->plan.rank_count; rank++) {
        struct worker *w = &s->workers[rank];
        worker_visit_grave(w);
        cox_close_fd(&w->grave_fd);
        cox_close_fd(&w->pidfd);
        cox_peer_close(&w->adopted);
        cox_close_fd(&w->streams[0].fd);
        cox_close_fd(&w->streams[1].fd);
    }
    free(s->workers);
    free(s->lives);
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
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attributes);
    pthread_condattr_destroy(&attributes);

    s->stop_fd = -1;
    int r = cox_launch_plan_init(&s->plan, options, err);
    if (r) {
        supervisor_destroy(s);
        return r;
    }
    s->external = options->external;
    s->alive = s->external ? 0 : s->plan.rank_count;
    s->polled = calloc(1 + (size_t)4 * s->plan.rank_count, sizeof *s->polled);
    s->packed = calloc(1 + (size_t)4 * s->plan.rank_count, sizeof *s->packed);
    s->workers = calloc(s->plan.rank_count, sizeof *s->workers);
    s->lives = calloc(s->plan.rank_count, sizeof *s->lives);
    for (uint32_t rank = 0; s->workers && s->lives && rank < s->plan.rank_count; rank++) {
        struct worker *w = &s->workers[rank];
        w->supervisor = s;
        w->rank = rank;
        w->life = &s->lives[rank];
        w->ended = w->told = s->external;
        w->pidfd = w->adopted.pidfd = w->streams[0].fd = w->streams[1].fd = w->grave_fd = -1;
        atomic_init(&w->launched.pidfd, -1);
    }
    if (!s->polled || !s->packed || !s->workers || !s->lives)
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

/* The supervisor thread sleeps until the process it starts has executed its program, which a stopped one
 * never does; only its death wakes the thread. With the lock held, until the phase is another. */
static void launch_expire(struct cox_supervisor *s)
{
    s->expired = true;
    while (s->phase == LAUNCHING) {
        /* Again and again: a process may have been on its way when the first of these went out. Nobody
         * closes a pidfd before this thread does. */
        for (uint32_t rank = 0; rank < s->plan.rank_count; rank++)
            launch_kill(&s->workers[rank]);
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_after_ms(EXPIRED_SLICE_MS));
        pthread_cond_timedwait(&s->changed, &s->lock, &until);
    }
}

static int launch_fail(struct cox_supervisor *s, struct cox_error *err)
{
    if (!s->expired)
        return cox_fail(err, s->launch_error.code, "%s", s->launch_error.text);
    return cox_fail(err, COX_TIMEOUT,
                    "rank %u: its process did not get as far as executing '%.400s' in time: was it "
                    "stopped by a signal, or is the machine that slow?",
                    s->launching, s->plan.program);
}

int cox_supervisor_start(const struct cox_supervise_options *options,
                         struct cox_supervisor **ret_supervisor, struct cox_error *err)
{
    struct cox_supervisor *s = NULL;
    int r = supervisor_new(options, &s, err);
    if (r)
        return r;
    r = cox_thread_start(&s->thread, supervisor_main, s);
    if (r) {
        supervisor_destroy(s);
        return cox_fail(err, r, "supervisor thread: %s", cox_status_text(r));
    }
    pthread_mutex_lock(&s->lock);
    const struct timespec until =
        cox_deadline_timespec(options->deadline_ns ? options->deadline_ns : COX_DEADLINE_NEVER);
    int e = 0;
    while (s->phase == LAUNCHING && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &until);
    if (s->phase == LAUNCHING)
        launch_expire(s);
    bool failed = s->phase == FAILED;
    if (!failed) {
        /* Before any hook: what a hook calls needs the pointer. */
        *ret_supervisor = s;
        s->phase = WATCHING;
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

static void supervisor_wake(struct cox_supervisor *s)
{
    const uint64_t one = 1;
    ssize_t written = write(s->stop_fd, &one, sizeof one);
    (void)written; /* a full counter is as readable as one */
}

static struct worker *worker_of(struct cox_supervisor *s, uint32_t rank)
{
    COX_ASSERT(rank < s->plan.rank_count);
    return &s->workers[rank];
}

pid_t cox_supervisor_pid(struct cox_supervisor *s, uint32_t rank)
{
    return worker_of(s, rank)->life->pid;
}

const struct cox_serving *cox_supervisor_lives(const struct cox_supervisor *s)
{
    return s->lives;
}

pid_t cox_supervisor_serving_pid(struct cox_supervisor *s, uint32_t rank)
{
    return cox_serving_pid(worker_of(s, rank)->life);
}

int cox_supervisor_pidfd(struct cox_supervisor *s, uint32_t rank)
{
    pthread_mutex_lock(&s->lock);
    int fd = worker_of(s, rank)->pidfd;
    pthread_mutex_unlock(&s->lock);
    return fd;
}

bool cox_supervisor_dead(struct cox_supervisor *s, uint32_t rank, struct cox_exit *ret_how)
{
    struct worker *w = worker_of(s, rank);
    if (!worker_is_dead(w))
        return false;
    pthread_mutex_lock(&s->lock);
    if (ret_how)
        *ret_how = w->how;
    pthread_mutex_unlock(&s->lock);
    return true;
}

bool cox_supervisor_dying(struct cox_supervisor *s, uint32_t rank)
{
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    const struct cox_peer peer = {.pid = w->life->pid, .pidfd = w->pidfd};
    bool dead = worker_is_dead(w);
    pid_t pid = w->adopted.pidfd >= 0 ? w->adopted.pid : w->life->pid;
    bool there = w->pidfd >= 0, ended = there && !cox_peer_alive(&peer);
    pthread_mutex_unlock(&s->lock);
    /* Also when it is known as dead by now: whoever asks looked for that a moment ago. */
    return dead || ended || (there && cox_peer_exiting(pid));
}

size_t cox_supervisor_last_lines(struct cox_supervisor *s, uint32_t rank, char *buffer,
                                 size_t buffer_size)
{
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    size_t length = cox_last_lines_join(&w->last_lines, buffer, buffer_size);
    pthread_mutex_unlock(&s->lock);
    return length;
}

void cox_supervisor_describe(struct cox_supervisor *s, uint32_t rank, char *buffer,
                             size_t buffer_size)
{
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    worker_describe(w, worker_is_dead(w), buffer, buffer_size);
    pthread_mutex_unlock(&s->lock);
}

void cox_supervisor_last_death(struct cox_supervisor *s, uint32_t rank,
                               struct cox_last_death *ret_death)
{
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    *ret_death = w->last_death;
    pthread_mutex_unlock(&s->lock);
}

int cox_supervisor_adopt(struct cox_supervisor *s, uint32_t rank, pid_t pid, uint64_t start)
{
    struct worker *w = worker_of(s, rank);
    if (pid == w->life->pid)
        return 0;
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, start, &peer);
    if (r)
        return r;
    /* pid and start were written by others: a stranger's would get our signals. */
    bool ours = cox_peer_descends(pid, w->life->pid);
    pthread_mutex_lock(&s->lock);
    if (w->ended) {
        /* Nobody would ever look at it. */
        if (ours)
            pidfd_signal(peer.pidfd, SIGKILL);
        r = COX_PEER_DEAD;
    } else if (!ours) {
        r = COX_DENIED;
    } else {
        w->adopted = peer;
        atomic_store_explicit(&w->life->adopted_pid, peer.pid, memory_order_relaxed);
        peer.pidfd = -1;
    }
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        supervisor_wake(s);
    return r;
}

int cox_supervisor_enlist(struct cox_supervisor *s, uint32_t rank, pid_t pid, uint64_t start)
{
    COX_ASSERT(s->external);
    struct worker *w = worker_of(s, rank);
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, start, &peer);
    if (r)
        return r;
    pthread_mutex_lock(&s->lock);
    if (worker_is_dead(w)) {
        r = COX_STATE; /* its lines and its memory are the dead one's until the place is vacated */
    } else if (!w->told) {
        r = COX_TAKEN;
    } else {
        w->pidfd = cox_steal_fd(&peer.pidfd);
        w->life->pid = pid;
        w->ended = w->told = w->let_go = false;
        s->alive++;
    }
    pthread_mutex_unlock(&s->lock);
    if (r == 0)
        supervisor_wake(s);
    return r;
}

void cox_supervisor_release(struct cox_supervisor *s, uint32_t rank, bool has_served)
{
    COX_ASSERT(s->external);
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    const struct cox_peer peer = {.pid = w->life->pid, .pidfd = w->pidfd};
    if (!w->ended && !w->released && cox_peer_alive(&peer) && !cox_peer_exiting(w->life->pid)) {
        w->released = has_served;
        if (!has_served) {
            cox_close_fd(&w->pidfd);
            w->life->pid = 0;
            w->ended = w->told = true;
        }
        s->alive--;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
}

int cox_supervisor_vacate(struct cox_supervisor *s, uint32_t rank, uint64_t deadline_ns,
                          struct cox_error *err)
{
    COX_ASSERT(s->external);
    /* A hook that waits would wait for itself. */
    COX_ASSERT(!pthread_equal(pthread_self(), s->thread));
    struct worker *w = worker_of(s, rank);
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&s->lock);
    /* Its end has begun: the thread is about to tell of it, without the lock. */
    while (w->ended && !w->told && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    bool vacated = !w->ended || w->told;
    if (vacated && w->life->pid) {
        if (!w->ended) {
            s->alive -= !w->released;
            w->let_go = true;
        }
        w->former = w->life->pid;
        w->life->pid = 0;
        cox_close_fd(&w->pidfd);
        w->released = false;
        w->ended = w->told = true;
        atomic_store_explicit(&w->life->dead, false, memory_order_release);
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return vacated ? 0 : cox_fail(err, COX_TIMEOUT, "rank %u: hooks did not return in time", rank);
}

bool cox_supervisor_withdraw(struct cox_supervisor *s, uint32_t rank)
{
    COX_ASSERT(s->external);
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    bool vacant = w->life->pid == 0;
    if (vacant) {
        /* Dead first: one with a pid that has ended is buried once more otherwise. */
        atomic_store_explicit(&w->life->dead, true, memory_order_release);
        w->life->pid = w->former;
    }
    pthread_mutex_unlock(&s->lock);
    return vacant;
}

int cox_supervisor_kill(struct cox_supervisor *s, uint32_t rank, pid_t pid)
{
    struct worker *w = worker_of(s, rank);
    int r = 0;
    pthread_mutex_lock(&s->lock);
    bool serves = pid == 0 || w->life->pid == pid || w->adopted.pid == pid;
    if (serves && !worker_is_dead(w) && w->pidfd >= 0 && !w->released) {
        if (cox_peer_alive(&w->adopted))
            r = pidfd_signal(w->adopted.pidfd, SIGKILL);
        int killed = worker_kill(w);
        r = r ? r : killed;
    }
    pthread_mutex_unlock(&s->lock);
    return r == -ESRCH ? 0 : r;
}

int cox_supervisor_await_end(struct cox_supervisor *s, uint32_t rank, uint64_t deadline_ns,
                             struct cox_error *err)
{
    struct worker *w = worker_of(s, rank);
    /* A hook that waits would wait for itself. */
    COX_ASSERT(!pthread_equal(pthread_self(), s->thread));
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&s->lock);
    while (!w->told && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    bool told = w->told;
    pthread_mutex_unlock(&s->lock);
    return told ? 0
                : cox_fail(err, COX_TIMEOUT, "rank %u (pid %d) %s", rank, w->life->pid,
                           worker_is_dead(w) ? "is dead, but a hook did not return in time"
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
                            const struct cox_launch_life *life, uint64_t deadline_ns,
                            struct cox_error *err)
{
    struct worker *w = worker_of(s, rank);
    if (!worker_is_dead(w))
        return cox_fail(err, COX_STATE, "rank %u (pid %d) is alive", rank, w->life->pid);
    int r = cox_supervisor_await_end(s, rank, deadline_ns, err);
    if (r)
        return r;
    const struct timespec deadline = cox_deadline_timespec(deadline_ns);
    struct relaunch own = {.rank = rank, .life = life, .err = err};
    int e = 0;
    pthread_mutex_lock(&s->lock);
    while (s->relaunch && e != ETIMEDOUT) /* somebody else's */
        e = pthread_cond_timedwait(&s->changed, &s->lock, &deadline);
    if (s->relaunch) {
        pthread_mutex_unlock(&s->lock);
        return cox_fail(err, COX_TIMEOUT, "rank %u: another rank is being started", rank);
    }
    s->relaunch = &own;
    supervisor_wake(s);
    /* Once begun it is the thread's until done; a process that does not get as far as executing its
     * program by then is killed. */
    while (!own.done) {
        const struct timespec slice =
            cox_deadline_timespec(cox_deadline_after_ms(EXPIRED_SLICE_MS));
        bool late = s->cancelled || cox_now_ns() >= deadline_ns;
        if (late && !own.begun)
            break;
        if (late)
            launch_kill(w);
        e = pthread_cond_timedwait(&s->changed, &s->lock, late ? &slice : &deadline);
    }
    bool cancelled = s->cancelled;
    bool withdrawn = !own.done;
    if (withdrawn)
        s->relaunch = NULL;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (!withdrawn)
        return own.status;
    return cancelled ? cox_fail(err, COX_CLOSED, "the group stops")
                     : cox_fail(err, COX_TIMEOUT, "rank %u: hooks did not return in time", rank);
}

void cox_supervisor_expect_end(struct cox_supervisor *s)
{
    atomic_store_explicit(&s->ending, true, memory_order_release);
}

int cox_supervisor_signal(struct cox_supervisor *s, uint32_t rank, int signal_number)
{
    struct worker *w = worker_of(s, rank);
    pthread_mutex_lock(&s->lock);
    int r = worker_is_dead(w) ? -ESRCH : pidfd_signal(w->pidfd, signal_number);
    pthread_mutex_unlock(&s->lock);
    return r == -ESRCH ? COX_PEER_DEAD : r;
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

/* The kernel is asked who lives, since it knows of a death before the thread does. */
uint32_t cox_supervisor_signal_all(struct cox_supervisor *s, int number)
{
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < s->plan.rank_count; rank++) {
        struct worker *w = &s->workers[rank];
        pthread_mutex_lock(&s->lock);
        const struct cox_peer peer = {.pid = w->life->pid, .pidfd = w->released ? -1 : w->pidfd};
        bool adopted = cox_peer_alive(&w->adopted), heard = false;
        if (adopted)
            heard = pidfd_signal(w->adopted.pidfd, number) == 0;
        /* A wrapper ends with what it wraps; a worker that goes with its wrapper would have no time. */
        if (!worker_is_dead(w) && !(adopted && number == SIGTERM) && cox_peer_alive(&peer))
            heard = pidfd_signal(w->pidfd, number) == 0 || heard;
        count += heard;
        if (number == SIGKILL && !worker_is_dead(w) && peer.pidfd >= 0)
            worker_kill(w);
        pthread_mutex_unlock(&s->lock);
    }
    return count;
}

uint32_t cox_supervisor_end(struct cox_supervisor *s, uint64_t exit_ms, uint64_t term_ms)
{
    cox_supervisor_expect_end(s);
    if (cox_supervisor_wait(s, cox_deadline_after_ms(exit_ms)) == 0)
        return 0;
    uint32_t signalled = cox_supervisor_signal_all(s, SIGTERM);
    cox_supervisor_signal_all(s, SIGCONT);
    if (cox_supervisor_wait(s, cox_deadline_after_ms(term_ms)) == 0)
        return signalled;
    cox_supervisor_signal_all(s, SIGKILL);
    if (cox_supervisor_wait(s, cox_deadline_after_ms(KILL_PATIENCE_MS)) == 0)
        return signalled;
    for (uint32_t rank = 0; rank < s->plan.rank_count; rank++)
        if (!worker_is_dead(&s->workers[rank]))
            cox_log_write(
                &s->log, 3,
                "rank %u (pid %d) has not ended %d s after SIGKILL: it is held in the kernel, see "
                "/proc/%d/stack",
                rank, s->workers[rank].life->pid, KILL_PATIENCE_MS / 1000,
                s->workers[rank].life->pid);
    cox_supervisor_wait(s, COX_DEADLINE_NEVER);
    return signalled;
}

struct cox_supervisor *cox_supervisor_free(struct cox_supervisor *s)
{
    if (!s)
        return NULL;
    cox_supervisor_end(s, 0, 0);
    atomic_store_explicit(&s->leaving, true, memory_order_release);
    supervisor_wake(s);
    pthread_join(s->thread, NULL);
    supervisor_destroy(s);
    return NULL;
}
