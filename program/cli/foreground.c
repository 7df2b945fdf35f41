#include "foreground.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "coordinator/executor/core.h"
#include "coordinator/server/server_internal.h"
#include "console.h"
#include "program/service/leftovers.h"
#include "signals.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

struct cox_foreground {
    uint32_t rank_count;
    bool quiet;
    struct cox_signals signals;

    /* everything below */
    pthread_mutex_t lock;
    /* NULL: not made yet, being freed, or freed */
    struct cox_server *server;
    /* the group is complete: its server's executor may be used */
    bool complete;
    void (*on_stop)(void *context);
    void *on_stop_context;
    int signal_number;
};

/* ---- hooks of the executor ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)is_stderr;
    const struct cox_foreground *foreground = context;
    if (!foreground->quiet)
        cox_console_worker(rank, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    (void)context;
    if (rank < 0)
        cox_console_log(4, "rank unknown reports: %s", text);
    else
        cox_console_log(4, "rank %" PRId32 " reports: %s", rank, text);
}

/* Of the server and the executor. A recovery is no warning. Information, such as all frames of a
 * rank that hangs, is for logs, not for a person at a terminal. */
static void on_log(void *context, int level, const char *text)
{
    const struct cox_foreground *foreground = context;
    const int most = isatty(STDERR_FILENO) ? 5 : 6;
    if (level <= 4 || (level <= most && foreground && !foreground->quiet))
        cox_console_log(level, "%s", text);
}

/* The command to type is printed when the control socket listens, so that it works at once. */
static void on_waiting(void *context, const char *name, const char *control_socket)
{
    const struct cox_foreground *foreground = context;
    (void)control_socket;
    cox_console_say("waiting for %" PRIu32 " worker%s: coxswain-worker --socket %s",
                    foreground->rank_count, foreground->rank_count == 1 ? "" : "s", name);
}

struct cox_log cox_foreground_log(void)
{
    return (struct cox_log){.fn = on_log};
}

struct cox_log cox_foreground_full_log(struct cox_foreground *foreground)
{
    return (struct cox_log){.fn = on_log, .context = foreground};
}

/* ---- the end is asked for ---- */

/* False: it was asked for before. */
static bool stop_take(struct cox_foreground *foreground, int number)
{
    pthread_mutex_lock(&foreground->lock);
    bool first = !foreground->signal_number;
    if (first) {
        foreground->signal_number = number;
        if (foreground->on_stop)
            foreground->on_stop(foreground->on_stop_context);
        if (foreground->server)
            cox_server_request_stop(foreground->server);
    }
    pthread_mutex_unlock(&foreground->lock);
    return first;
}

/* A second signal ends this process without waiting, but after the clean-up: if the main thread is
 * inside start or free, it cleans up itself, soon. */
static bool on_signal(void *context, int number)
{
    struct cox_foreground *foreground = context;
    if (stop_take(foreground, number))
        return true;
    pthread_mutex_lock(&foreground->lock);
    bool making = foreground->server && cox_server_abandon(foreground->server) == COX_BUSY;
    pthread_mutex_unlock(&foreground->lock);
    return making;
}

/* ---- a worker is stopped ---- */

/* The lock is held. A process behind a wrapper is no child, and not known here. */
static void worker_changed(struct cox_foreground *foreground, const siginfo_t *info)
{
    struct cox_executor *executor = cox_server_executor(foreground->server);
    for (uint32_t rank = 0; rank < foreground->rank_count; rank++) {
        if (cox_executor_pid(executor, rank) != info->si_pid)
            continue;
        if (info->si_code == CLD_CONTINUED)
            cox_console_say("rank %" PRIu32 " (pid %d) continues", rank, (int)info->si_pid);
        else
            cox_console_say("rank %" PRIu32 " (pid %d) is stopped by signal %d (%s), and the group "
                            "waits for it: kill -CONT %d",
                            rank, (int)info->si_pid, info->si_status, strsignal(info->si_status),
                            (int)info->si_pid);
    }
}

/* Workers that have ended are left to the supervisor. One signal may stand for several changes. */
static void on_child_changed(void *context)
{
    struct cox_foreground *foreground = context;
    pthread_mutex_lock(&foreground->lock);
    while (foreground->complete && !foreground->quiet) {
        siginfo_t info = {.si_pid = 0};
        if (waitid(P_ALL, 0, &info, WSTOPPED | WCONTINUED | WNOHANG) < 0 || info.si_pid == 0)
            break;
        worker_changed(foreground, &info);
    }
    pthread_mutex_unlock(&foreground->lock);
}

static void set_complete(struct cox_foreground *foreground, bool complete)
{
    pthread_mutex_lock(&foreground->lock);
    foreground->complete = complete;
    pthread_mutex_unlock(&foreground->lock);
}

static void on_stop_request(void *context, const char *text)
{
    (void)text;
    stop_take(context, SIGTERM);
}

/* ---- constructor and destructor ---- */

int cox_foreground_new(struct cox_foreground **ret_foreground, struct cox_error *err)
{
    _cox_cleanup_(cox_foreground_freep) struct cox_foreground *foreground =
        calloc(1, sizeof *foreground);
    if (!foreground)
        return cox_fail(err, -ENOMEM, "no memory");
    foreground->signals = (struct cox_signals)COX_SIGNALS_NONE;
    pthread_mutex_init(&foreground->lock, NULL);
    int r = cox_signals_start(&foreground->signals, on_signal, on_child_changed, foreground, err);
    if (r)
        return r;
    cox_console_start(); /* before hooks can run: they must not block on standard error */
    *ret_foreground = cox_steal_ptr(&foreground);
    return 0;
}

static struct cox_executor_options executor_options_make(const struct cox_foreground_options *from,
                                                         struct cox_foreground *foreground)
{
    const struct cox_group_choice *group = from->group;
    struct cox_executor_options made = {
        .size = sizeof(struct cox_executor_options),
        .name = group->name,
        .rank_count = group->rank_count,
        .workers.command = from->command,
        .depth = group->depth,
        .spin = group->spin,
        .workers.legacy = group->legacy_workers,
        .nodes = from->nodes,
        .memory.attach = from->nodes ? COX_ATTACH_NAMED : group->attach,
        .memory.refuse_large_payloads = group->no_large_payloads,
        .recorder.crash_dir = cox_group_choice_crash_dir(group),
        .recorder.crash_contents = group->crash_contents,
        .recorder.stacks = cox_group_choice_stacks(),
        .memory.large_payload_size_max = group->large_payload_size,
        .memory.reply_size_max = group->large_payload_size,
        .workers.external = from->external,
        .socket.use = from->need_socket ? COX_SOCKET_REQUIRED : COX_SOCKET_IF_POSSIBLE,
        .times.start_timeout_ms = group->start_timeout_ms,
        .hooks.log = cox_foreground_full_log(foreground),
        .hooks.context = foreground,
        .hooks.line = on_line,
        .hooks.fault = on_fault,
        .hooks.waiting = on_waiting,
    };
    memcpy(made.memory.request_size, group->request_size, sizeof group->request_size);
    memcpy(made.memory.response_size, group->response_size, sizeof group->response_size);
#if COX_TESTING
    /* What tests look at: names that a group leaves, and a group without recorders. */
    made.memory.keep_names = getenv("COXSWAIN_TEST_KEEP_NAMES") != NULL;
    if (getenv("COXSWAIN_TEST_NO_RECORDER"))
        made.recorder.use = COX_RECORDER_NONE;
#endif
    return made;
}

static int server_make(struct cox_foreground *foreground,
                       const struct cox_foreground_options *options,
                       const struct cox_config_entry *config, size_t config_count,
                       struct cox_error *err)
{
    const struct cox_executor_options executor = executor_options_make(options, foreground);
    _cox_cleanup_(cox_free_ptr) char *model =
        options->model ? realpath(options->model, NULL) : NULL;
    struct cox_server_options made = COX_SERVER_OPTIONS_INIT;
    struct cox_server *server = NULL;
    made.executor = &executor;
    made.init = true;
    made.config = config;
    made.config_count = config_count;
    made.restart = options->group->recovery;
    made.links = options->links;
    made.role = options->role;
    made.model = model;
    made.prompts_refusal = options->prompts_refusal;
    made.hooks = options->hooks;
    made.log = cox_foreground_full_log(foreground);
    made.stop_requested = on_stop_request;
    made.context = foreground;
    made.process_ends = true;
    int r = cox_server_new(&made, &server, err);
    if (r)
        return r;
    pthread_mutex_lock(&foreground->lock);
    foreground->server = server;
    if (foreground->signal_number)
        cox_server_request_stop(server);
    pthread_mutex_unlock(&foreground->lock);
    return cox_server_start(server, err);
}

#define FDS_OF_GROUP 31
#define FDS_OF_RANK 3
/* Three of each rank are for where fds are exchanged over the control socket alone. */
#define FDS_OF_SEALED_GROUP 23
#define FDS_OF_SEALED_RANK 9
/* The fds that a rank inherits are copied above the numbers that they get there (launch.c). */
#define FDS_OF_SEALED_MIN 40

uint64_t cox_foreground_fd_count(uint32_t rank_count, bool sealed, bool weights)
{
    uint64_t count = (sealed ? FDS_OF_SEALED_GROUP : FDS_OF_GROUP) +
                     (sealed ? FDS_OF_SEALED_RANK : FDS_OF_RANK) * (uint64_t)rank_count;
    if (sealed && count < FDS_OF_SEALED_MIN)
        count = FDS_OF_SEALED_MIN;
    return count + (weights ? COX_FOREGROUND_FDS_OF_WEIGHTS : 0);
}

/* Names what needs no room where a group found none. */
static int explain_space(const struct cox_group_choice *group, int r, struct cox_error *err)
{
    const struct cox_error first = *err;
    if ((r != COX_NO_SPACE && r != -ENOSPC) || !cox_group_choice_limits(group)->extensions ||
        cox_group_choice_limits(group)->memory_per_rank || !strstr(first.text, "/dev/shm"))
        return r;
    *err = (struct cox_error){0};
    return cox_fail(err, r, "%.900s; or use --attach sealed, which takes nothing of /dev/shm",
                    first.text);
}

/* Adds a shortage of fds to the error, which rarely shows it: for instance, a control socket that
 * cannot accept closes the connection of a rank. */
static int explain_failure(const struct cox_foreground_options *options, int r,
                           struct cox_error *err)
{
    const struct cox_group_choice *group = options->group;
    struct rlimit limit;
    uint64_t needed =
        cox_foreground_fd_count(group->rank_count, cox_group_choice_limits(group)->memory_per_rank,
                                options->shared_weights);
    struct cox_error first = *err;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= needed) {
        /* COX_CLOSED is reserved for signals. */
        return r == COX_CLOSED ? err->code = COX_STATE : explain_space(group, r, err);
    }
    *err = (struct cox_error){0};
    return cox_fail(err, r == COX_CLOSED ? -EMFILE : r,
                    "%.700s (this process may have %ju files open, a coordinator of %" PRIu32
                    " ranks needs %" PRIu64 ": ulimit -n %" PRIu64 ")",
                    first.text, (uintmax_t)limit.rlim_cur, group->rank_count, needed, needed);
}

int cox_foreground_start(struct cox_foreground *foreground,
                         const struct cox_foreground_options *options, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) struct cox_config_entry *config =
        calloc(options->config_count + 1, sizeof *config);
    size_t count = 0;
    if (!config)
        return cox_fail(err, -ENOMEM, "no memory for the init configuration");
    foreground->rank_count = options->group->rank_count;
    foreground->quiet = options->quiet;
    char left[COX_LEFTOVERS_TEXT_SIZE];
    if (!options->quiet && cox_leftovers_find(options->group->name, left))
        cox_console_say("%s", left);
    if (options->model)
        config[count++] = (struct cox_config_entry){"model", options->model};
    for (size_t i = 0; i < options->config_count; i++)
        config[count++] = options->config[i];
    int r = options->prepare ? options->prepare(options->hooks->context, err) : 0;
    if (!r)
        r = server_make(foreground, options, config, count, err);
    if (r && cox_foreground_signal(foreground))
        return COX_CLOSED;
    if (r)
        return explain_failure(options, r, err);
    set_complete(foreground, true);
    on_child_changed(foreground); /* those that were stopped before */
    return 0;
}

struct cox_foreground *cox_foreground_free(struct cox_foreground *foreground)
{
    if (foreground) {
        set_complete(foreground, false);
        /* A second signal meanwhile abandons it. */
        if (foreground->server)
            cox_server_stop(foreground->server);
        pthread_mutex_lock(&foreground->lock);
        struct cox_server *server = cox_steal_ptr(&foreground->server);
        pthread_mutex_unlock(&foreground->lock);
        cox_server_free(server);
        cox_signals_end(&foreground->signals);
        pthread_mutex_destroy(&foreground->lock);
        free(foreground);
    }
    return NULL;
}

/* ---- the end ---- */

void cox_foreground_on_stop(struct cox_foreground *foreground, void (*fn)(void *context),
                            void *context)
{
    pthread_mutex_lock(&foreground->lock);
    foreground->on_stop = fn;
    foreground->on_stop_context = context;
    if (fn && foreground->signal_number)
        fn(context);
    pthread_mutex_unlock(&foreground->lock);
}

int cox_foreground_signal(struct cox_foreground *foreground)
{
    pthread_mutex_lock(&foreground->lock);
    int number = foreground->signal_number;
    pthread_mutex_unlock(&foreground->lock);
    return number;
}

int cox_foreground_wait(struct cox_foreground *foreground, struct cox_error *err)
{
    int r = cox_server_wait(foreground->server, COX_DEADLINE_NEVER, err);
    return r == COX_PEER_DEAD ? -r : cox_foreground_signal(foreground);
}
