/* hello reply: which processes may attach at the group's control socket, and what a rank receives.
 */
#include "channel/socket/socket.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/shm/state.h"
#include "coordinator/collector/reentrancy.h"
#include "core.h"
#include "executor_internal.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

bool cox_executor_socket_counts(struct cox_executor *executor,
                                struct cox_control_socket_counts *ret_counts)
{
    pthread_mutex_lock(&executor->memory_lock);
    bool there = executor->control_socket != NULL;
    if (there)
        cox_control_socket_counts(executor->control_socket, ret_counts);
    pthread_mutex_unlock(&executor->memory_lock);
    return there;
}

/* ---- which rank ---- */

/* A process that has left may keep its connection, while the rank belongs to another one. */
static bool holder_is_of_this_incarnation(const struct cox_executor *executor, uint32_t rank)
{
    /* relaxed: this thread wrote the first; the second changes only while no process is the rank.
     */
    const struct cox_rank *record = &executor->ranks[rank];
    return atomic_load_explicit(&record->holder.incarnation, memory_order_relaxed) ==
           cox_rank_incarnation(record);
}

/* Returns true if its process is gone, whether or not the end of its connection was seen. */
static bool slot_is_free(const struct cox_executor *executor, uint32_t rank)
{
    const struct cox_slot_holder *holder = &executor->ranks[rank].holder;
    uint64_t start;
    /* relaxed: this thread wrote them. */
    pid_t pid = atomic_load_explicit(&holder->pid, memory_order_relaxed);
    if (atomic_load_explicit(&holder->connection, memory_order_relaxed) == 0 ||
        !holder_is_of_this_incarnation(executor, rank))
        return true;
    return pid && cox_peer_start_time(pid, &start) == COX_PEER_DEAD;
}

/* Returns true if a restart waits for a process that becomes this rank. */
static bool rank_is_open_for_attach(struct cox_executor *executor, uint32_t rank)
{
    pthread_mutex_lock(&executor->memory_lock);
    bool is_open = executor->ranks[rank].open_for_attach;
    pthread_mutex_unlock(&executor->memory_lock);
    return is_open;
}

/* Returns true if no process has been this rank in this incarnation: otherwise its words, and
 * pending replies, would be taken for the next process's. */
static bool rank_is_new(struct cox_executor *executor, uint32_t rank)
{
    if (cox_state_attached(&executor->control.ranks[rank]->identity))
        return false;
    if (!executor->options.workers.external)
        return true;
    if (cox_rank_is_dead(&executor->ranks[rank]))
        return false;
    /* acquire, and after the identity, which a replacement has reset: in a group that is complete a
     * rank is new only while a restart waits for it. */
    return !atomic_load_explicit(&executor->complete, memory_order_acquire) ||
           rank_is_open_for_attach(executor, rank);
}

static int check_incarnation(const struct cox_executor *executor, const struct cox_hello *hello,
                             uint32_t rank, struct cox_error *err)
{
    uint32_t incarnation = cox_rank_incarnation(&executor->ranks[rank]);
    return hello->incarnation == 0 || hello->incarnation == incarnation
               ? 0
               : cox_fail(err, COX_STALE,
                          "rank %" PRIu32 " as incarnation %" PRIu32 ": it is at %" PRIu32
                          " by now",
                          rank, hello->incarnation, incarnation);
}

static int fail_not_new(const struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    if (!executor->options.workers.external)
        return cox_fail(
            err, COX_STATE,
            "rank %" PRIu32
            " of the group '%s' was a process that is dead or has left: another one comes only when the coordinator starts it again",
            rank, executor->name);
    return cox_fail(
        err, COX_STATE,
        "rank %" PRIu32
        " of the group '%s' was a process that is dead or has left; the group waits for an order to replace it: coxswain recover restart --rank %" PRIu32,
        rank, executor->name, rank);
}

static int choose_rank(struct cox_executor *executor, const struct cox_hello *hello,
                       uint32_t *ret_rank, struct cox_error *err)
{
    uint32_t rank_count = executor->geometry.rank_count, rank = hello->rank;
    if (hello->rank_count && hello->rank_count != rank_count)
        return cox_fail(err, COX_INVALID,
                        "world size %" PRIu32 ": the group '%s' has %" PRIu32 " ranks",
                        hello->rank_count, executor->name, rank_count);
    if (rank == COX_HELLO_RANK_ANY) {
        if (!executor->options.workers.external)
            return cox_fail(err, COX_INVALID,
                            "this group starts its workers itself, and none without a rank");
        for (rank = 0;
             rank < rank_count && (!slot_is_free(executor, rank) || !rank_is_new(executor, rank));
             rank++)
            continue;
        if (rank == rank_count)
            return cox_fail(
                err, COX_TAKEN,
                "all %" PRIu32
                " ranks of the group '%s' are there, or were; one that is dead is open for attach once its restart is ordered (coxswain recover restart)",
                rank_count, executor->name);
    }
    if (rank >= rank_count)
        return cox_fail(err, COX_INVALID,
                        "rank %" PRIu32 ": the group '%s' has the ranks 0 to %" PRIu32, rank,
                        executor->name, rank_count - 1);
    int r = check_incarnation(executor, hello, rank, err);
    if (r)
        return r;
    if (!slot_is_free(executor, rank))
        return cox_fail(err, COX_TAKEN, "rank %" PRIu32 " of the group '%s' is process %jd already",
                        rank, executor->name,
                        (intmax_t)atomic_load_explicit(&executor->ranks[rank].holder.pid,
                                                       memory_order_relaxed));
    if (!rank_is_new(executor, rank))
        return fail_not_new(executor, rank, err);
    *ret_rank = rank;
    return 0;
}

static int check_sizes(const struct cox_executor *executor, const struct cox_hello *hello,
                       struct cox_error *err)
{
    const struct cox_layout_channel *execute = &executor->geometry.channels[COX_CHANNEL_EXECUTE];
    if (hello->request_size_min > execute->frame_size - COX_PREFIX_SIZE ||
        hello->response_size_min > execute->slot_stride - COX_PREFIX_SIZE)
        return cox_fail(err, COX_TOO_LARGE,
                        "requests of %" PRIu64 " and replies of %" PRIu64
                        " bytes are needed: this group's frames hold %" PRIu64 " and %" PRIu64
                        " (--size execute.request=BYTES, --size execute.reply=BYTES)",
                        hello->request_size_min, hello->response_size_min,
                        execute->frame_size - COX_PREFIX_SIZE,
                        execute->slot_stride - COX_PREFIX_SIZE);
    return 0;
}

/* A group that starts its workers accepts no others; one that does not must be able to watch them.
 */
static int check_process(const struct cox_executor *executor,
                         const struct cox_control_client *client, struct cox_error *err)
{
    if (!executor->options.workers.external)
        return client->pid > 0 && cox_peer_descends(client->pid, getpid())
                   ? 0
                   : cox_fail(
                         err, COX_DENIED,
                         "the group '%s' starts its workers itself; process %jd is none of them (coxswain run --worker none waits for workers that are started by hand)",
                         executor->name, (intmax_t)client->pid);
    if (client->pid == 0)
        return cox_fail(
            err, COX_DENIED,
            "a process in another pid namespace cannot be watched: share that of the coordinator (docker run --pid=...)");
    if (client->pid == getpid())
        return cox_fail(
            err, COX_INVALID,
            "this process is the coordinator: a rank is a process of its own, which may be signalled");
    return 0;
}

/* What it starts from now on gives no commands either. A process of root cannot be held back. */
static int mark_process(const struct cox_executor *executor,
                        const struct cox_control_client *client, uint32_t rank,
                        struct cox_error *err)
{
    const int r = cox_peer_lower_mark(client->pid);
    if (r == 0 || !executor->geometry.mode->limits.guards_commands || client->uid != geteuid())
        return 0;
    return cox_fail(
        err, COX_DENIED,
        "rank %" PRIu32
        ", process %jd: its limit RLIMIT_LOCKS, which keeps it from giving commands, cannot be lowered: %s (start it with the user and group of the coordinator)",
        rank, (intmax_t)client->pid, cox_status_text(r));
}

/* The pid is that of the connected process. By now it may belong to another one, which must not be
 * taken for the rank and killed. */
static int register_process(struct cox_executor *executor, const struct cox_control_client *client,
                            uint32_t rank, struct cox_error *err)
{
    uint64_t start;
    if (!executor->options.workers.external)
        return 0;
    int r = cox_peer_start_time(client->pid, &start);
    if (r == 0 && client->hello.start && client->hello.start != start)
        return cox_fail(
            err, COX_PEER_DEAD,
            "process %jd was started at %" PRIu64 " and says %" PRIu64
            ": it is another one, or in a pid namespace of its own: share that of the coordinator (docker run --pid=...)",
            (intmax_t)client->pid, start, client->hello.start);
    if (r == 0 && mark_process(executor, client, rank, err))
        return COX_DENIED;
    if (r == 0)
        r = cox_supervisor_register(executor->supervisor, rank, client->pid, start);
    return r ? cox_fail(
                   err, r, "rank %" PRIu32 ", process %jd: %s", rank, (intmax_t)client->pid,
                   r == -ENOSYS || r == -EPERM
                       ? "pidfd_open is missing or denied, without which workers that are started by other means cannot be watched (coxswain doctor)"
                       : cox_status_text(r))
             : 0;
}

/* ---- what it is given ---- */

int cox_executor_lend(struct cox_executor *executor, uint32_t rank, int *ret_fds,
                      uint32_t *ret_count, struct cox_error *err)
{
    pthread_mutex_lock(&executor->memory_lock);
    const int r = cox_attach_lend(executor->memory, rank, ret_fds, ret_count, err);
    pthread_mutex_unlock(&executor->memory_lock);
    return r;
}

void cox_executor_put_away(struct cox_executor *executor, uint32_t rank, bool lent)
{
    pthread_mutex_lock(&executor->memory_lock);
    cox_attach_put_away(executor->memory, rank, lent);
    pthread_mutex_unlock(&executor->memory_lock);
}

/* A process that connected before as this rank never became it, but may have written; and memory
 * that was made for a new process is all zero. */
static void reset_rank(struct cox_executor *executor, uint32_t rank)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_reset_line(&executor->collectors[c], rank);
    cox_state_reset_identity(&executor->control.ranks[rank]->identity);
    cox_recorders_renew(executor, rank);
}

static int hand_out(struct cox_executor *executor, uint32_t rank,
                    struct cox_control_socket_reply *reply, struct cox_error *err)
{
    /* relaxed: this thread wrote it. */
    bool tried =
        atomic_load_explicit(&executor->ranks[rank].holder.pid, memory_order_relaxed) != 0 &&
        holder_is_of_this_incarnation(executor, rank);
    bool renewed = false;
    struct cox_attach_fds fds = {.fds = reply->fds};
    pthread_mutex_lock(&executor->memory_lock);
    int r = cox_attach_hand_out(executor->memory, rank, &fds, &renewed, err);
    pthread_mutex_unlock(&executor->memory_lock);
    reply->fd_count = fds.count;
    reply->given = fds.given;
    if (r == 0 && (tried || renewed))
        reset_rank(executor, rank);
    /* Ranks that this process starts inherit it. */
    if (r == 0 && executor->options.workers.external && executor->options.collect)
        reply->fds[reply->fd_count++] = executor->notify_fds[rank];
    if (r == 0)
        r = cox_attach_give(executor->memory, rank, err);
    return r;
}

static int on_worker(void *context, const struct cox_control_client *client,
                     struct cox_control_socket_reply *reply, struct cox_error *err)
{
    struct cox_executor *executor = context;
    const struct cox_hello *hello = &client->hello;
    uint32_t rank = 0;
    if (!executor->geometry.mode->limits.rank_words)
        return cox_fail(err, COX_UNSUPPORTED,
                        "legacy workers do not attach through the control socket");
    if (executor->elsewhere)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the ranks of the group '%s' are on other machines: start them there "
                        "(coxswain node)",
                        executor->name);
    if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
        return cox_fail(err, COX_CLOSED, "the group '%s' stops", executor->name);
    int r = choose_rank(executor, hello, &rank, err);
    if (r)
        return r;
    struct cox_rank *record = &executor->ranks[rank];
    const uint32_t incarnation = cox_rank_incarnation(record);
    r = check_sizes(executor, hello, err);
    if (r == 0)
        r = check_process(executor, client, err);
    if (r == 0)
        r = hand_out(executor, rank, reply, err);
    if (r == 0)
        r = register_process(executor, client, rank, err);
    if (r)
        return r;
    reply->hello_reply = (struct cox_hello_reply){
        .attach = executor->geometry.mode->attach,
        .rank = rank,
        .rank_count = executor->geometry.rank_count,
        .incarnation = incarnation,
        .group_incarnation = executor->control.group_incarnation,
    };
    /* A rank that is a thread of this process (in tests) names the process whose death is its own.
     */
    atomic_store_explicit(&record->holder.pid, client->pid == getpid() ? 0 : client->pid,
                          memory_order_relaxed);
    atomic_store_explicit(&record->holder.incarnation, incarnation, memory_order_relaxed);
    atomic_store_explicit(&record->holder.connection, client->id, memory_order_relaxed);
    return 0;
}

/* Its process has ended, or its connection, which it should keep: from now on its writes to the
 * rank's memory do not count. A process that has left, or never attached, may continue with
 * something else, and is spared unless it was started here. */
static void on_worker_gone(void *context, const struct cox_control_client *client)
{
    struct cox_executor *executor = context;
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++) {
        if (atomic_load_explicit(&executor->ranks[rank].holder.connection, memory_order_relaxed) !=
            client->id)
            continue;
        atomic_store_explicit(&executor->ranks[rank].holder.connection, 0, memory_order_relaxed);
        if (!atomic_load_explicit(&executor->supervised, memory_order_acquire))
            continue;
        bool attached = cox_state_attached(&executor->control.ranks[rank]->identity);
        if (attached && !cox_state_left(&executor->control, rank))
            /* By now the rank may have another process. */
            cox_supervisor_kill(executor->supervisor, rank, client->pid);
        else if (executor->options.workers.external)
            cox_supervisor_set_left(executor->supervisor, rank, attached);
    }
}

/* A rank of a sealed group, and what it has started, gives no commands: it could have other ranks
 * replaced and weights exchanged, and so change results that it cannot write. A process whose pid
 * cannot be seen from here is not in this pid namespace, as all that ranks start is. */
static int check_command(const struct cox_executor *executor,
                         const struct cox_control_client *client, int fd, struct cox_error *err)
{
    char program[COX_PEER_PROGRAM_SIZE];
    uint64_t mark = 0;
    if (!executor->geometry.mode->limits.guards_commands || client->pid == 0 ||
        client->uid != geteuid())
        return 0;
    /* The pidfd is that of the process that connected. While it lives, /proc shows it under its
     * pid. */
    _cox_cleanup_(cox_close_fd) int pidfd = -1;
    int r = cox_socket_open_peer(fd, &pidfd);
    if (r == 0 || r == COX_UNSUPPORTED)
        r = cox_peer_read_mark(client->pid, &mark);
    const struct cox_peer peer = {.pid = client->pid, .pidfd = pidfd};
    if (r == 0 && pidfd >= 0 && !cox_peer_alive(&peer))
        r = COX_PEER_DEAD;
    if (r)
        return cox_fail(err, COX_DENIED,
                        "whether process %jd was started by a rank, which may give no commands to "
                        "a sealed group, cannot be seen: %s",
                        (intmax_t)client->pid, cox_status_text(r));
    if (mark >= executor->mark)
        return 0;
    cox_peer_read_program(client->pid, program);
    return cox_fail(err, COX_DENIED,
                    "process %jd (%s) is a rank or was started by one: ranks give no commands to a "
                    "sealed group; give them from a shell that no rank has started",
                    (intmax_t)client->pid, program);
}

static int on_command(void *context, const struct cox_control_client *client, int fd,
                      struct cox_error *err)
{
    struct cox_executor *executor = context;
    if (!executor->options.hooks.control)
        return cox_fail(err, COX_UNSUPPORTED, "the program of the group '%s' takes no commands",
                        executor->name);
    int r = check_command(executor, client, fd, err);
    if (r)
        return r;
    struct cox_reentrancy inside;
    cox_reentrancy_enter(&inside, executor);
    r = executor->options.hooks.control(executor->options.hooks.context, fd, err);
    cox_reentrancy_exit(&inside);
    return r;
}

/* Returns true if this user cannot use, or create, the runtime directory: after su, XDG_RUNTIME_DIR
 * still belongs to another user. */
static bool is_no_place(int r)
{
    static const int reasons[] = {COX_DENIED, COX_NOT_FOUND, COX_TOO_LARGE, -EACCES,
                                  -EPERM,     -EROFS,        -ENOENT,       -ENOTDIR,
                                  -ELOOP,     -ENAMETOOLONG, -ENOSPC,       -EDQUOT};
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        if (r == reasons[i])
            return true;
    return false;
}

static int socket_open(struct cox_executor *executor, const char *name,
                       struct cox_control_socket **ret_socket, struct cox_error *err)
{
    const struct cox_control_socket_options options = {
        .name = name,
        .runtime_dir = executor->options.socket.runtime_dir,
        .log = executor->options.hooks.log,
    };
    const struct cox_control_socket_hooks hooks = {
        .context = executor,
        .worker = on_worker,
        .worker_gone = on_worker_gone,
        .command = on_command,
    };
    return cox_control_socket_open(&options, &hooks, ret_socket, err);
}

int cox_executor_open_socket(struct cox_executor *executor, struct cox_error *err)
{
    if (executor->options.socket.use == COX_SOCKET_NONE)
        return 0;
    struct cox_error why = {0};
    struct cox_control_socket *control_socket = NULL;
    int r = socket_open(executor, executor->name, &control_socket, &why);
    pthread_mutex_lock(&executor->memory_lock); /* readers of the status */
    executor->control_socket = control_socket;
    pthread_mutex_unlock(&executor->memory_lock);
    bool needed =
        executor->options.socket.use == COX_SOCKET_REQUIRED || executor->options.workers.external;
    if (r == 0 || needed || !is_no_place(r))
        return r ? cox_fail(err, r, "%s", why.text) : 0;
    cox_log_write(&executor->options.hooks.log, 4,
                  "no control socket: coxswain status and stop cannot reach this group: %s",
                  why.text);
    return 0;
}

int cox_executor_take_name(struct cox_executor *executor, const char *name, struct cox_error *err)
{
    int r = cox_name_check(name, err);
    if (r)
        return r;
    if (executor->control_socket)
        return cox_fail(err, COX_STATE, "the group has the name '%s', and a control socket",
                        cox_executor_name(executor));
    if (!atomic_load_explicit(&executor->renamed, memory_order_relaxed)) { /* this thread's */
        snprintf(executor->other_name, sizeof executor->other_name, "%s", name);
        /* release: the name, before any client can ask for it. Partner: cox_executor_name. */
        atomic_store_explicit(&executor->renamed, true, memory_order_release);
    } else if (strcmp(name, executor->other_name) != 0) {
        return cox_fail(err, COX_STATE, "the group has the name '%s'", executor->other_name);
    }
    struct cox_control_socket *control_socket = NULL;
    r = socket_open(executor, name, &control_socket, err);
    if (r)
        return r;
    pthread_mutex_lock(&executor->memory_lock); /* readers of the status */
    executor->control_socket = control_socket;
    pthread_mutex_unlock(&executor->memory_lock);
    return 0;
}

void cox_executor_close_socket(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->memory_lock); /* readers of the status have finished */
    struct cox_control_socket *control_socket = executor->control_socket;
    executor->control_socket = NULL;
    pthread_mutex_unlock(&executor->memory_lock);
    cox_control_socket_close(control_socket);
}
