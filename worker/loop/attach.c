/* attach: how a worker process becomes a rank: it finds the group's memory, checks it, and claims
 * its rank. */
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/shm/region.h"
#include "channel/shm/state.h"
#include "channel/socket/runtime_dir.h"
#include "worker/group/group_memory.h"
#include "worker_internal.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define ARENA_FIRST_SIZE (64u << 10)
/* How long the control socket of a live coordinator may take to reply. */
#define HELLO_MS 10000

/* ---- the group's memory ---- */

/* The group's name is the name of its control socket. */
static void worker_name_group(struct cox_worker_options *options)
{
    const char *file = strrchr(options->control_socket, '/');
    snprintf(options->prefix, sizeof options->prefix, "/%.*s", COX_NAME_SIZE_MAX + 5,
             file ? file + 1 : options->control_socket);
    const size_t length = cox_runtime_dir_name_length(options->prefix + 1);
    if (length > 0)
        options->prefix[1 + length] = '\0';
}

/* A group that was named is in none of the places. err may be NULL. */
static void add_places(struct cox_error *err)
{
    if (!err)
        return;
    const struct cox_error first = *err;
    char places[512];
    cox_control_socket_places(places, sizeof places);
    *err = (struct cox_error){0};
    cox_fail(err, first.code, "%.400s (looked in %s)", first.text, places);
}

/* Connects to the control socket, which assigns rank, number of ranks and memory. The connection
 * stays open: its end is the end of the coordinator. */
static int worker_log_on(struct cox_worker *worker, const struct cox_worker_identity *self,
                         struct cox_error *err)
{
    struct cox_worker_options *options = &worker->options;
    const struct cox_hello hello = {
        .role = COX_HELLO_WORKER,
        .rank = options->rank,
        .rank_count = options->rank_count,
        .incarnation = options->incarnation,
        .start = self->start,
    };
    struct cox_control_connection session = {.fd = -1};
    const bool by_name = !strchr(options->control_socket, '/');
    int r = 0;
    if (by_name) {
        char name[sizeof options->control_socket];
        memcpy(name, options->control_socket, sizeof name);
        r = cox_control_socket_find(name, options->control_socket, err);
    }
    if (r == 0)
        r = cox_control_socket_connect(options->control_socket, &hello,
                                       cox_deadline_after_ms(HELLO_MS), &session, err);
    if (by_name && r == COX_NOT_FOUND)
        add_places(err);
    if (r)
        return r;
    worker->socket_fd = session.fd;
    cox_fault_point(COX_FAULT_ATTACH_ACCEPTED);
    r = cox_fd_bundle_adopt(&worker->bundle, session.fds, session.fd_count, err);
    options->rank = session.hello_reply.rank;
    options->rank_count = session.hello_reply.rank_count;
    options->incarnation = session.hello_reply.incarnation;
    if (!options->prefix[0])
        worker_name_group(options);
    return r;
}

static int worker_attach_control(struct cox_worker *worker, struct cox_error *err)
{
    const struct cox_worker_options *options = &worker->options;
    const struct cox_attach_place place = {
        .objects = options->prefix + 1,
        .rank = options->rank,
        .rank_count = options->rank_count,
        .bundle = &worker->bundle,
        .fd_count = worker->bundle.count,
        .parent_pid = options->parent_pid,
        .control = &worker->control,
    };
    return cox_attach_join(&place, &worker->attached, err);
}

/* Without pidfd_open (valgrind has none, a filter may refuse it) the kernel still ends this process
 * with its parent. */
static bool worker_ends_with_parent(pid_t coordinator)
{
    int number;
    return getppid() == coordinator && prctl(PR_GET_PDEATHSIG, &number) == 0 && number == SIGKILL;
}

static int worker_check_group(struct cox_worker *worker, struct cox_error *err)
{
    const struct cox_worker_options *options = &worker->options;
    const struct cox_layout_header *header = &worker->control.layout->header;
    /* Copies: the process that is compared is the one that is opened. */
    const uint32_t pid = header->coordinator_pid;
    const uint64_t start = header->coordinator_start;
    if (options->rank_count != worker->control.geometry.rank_count)
        return cox_fail(err, COX_INVALID,
                        "the group %s has %" PRIu32 " ranks, this worker's world size is %" PRIu32,
                        options->prefix, worker->control.geometry.rank_count, options->rank_count);
    if (options->rank >= options->rank_count)
        return cox_fail(err, COX_INVALID,
                        "rank %" PRIu32 " of a group of %" PRIu32 ": expected 0 to %" PRIu32,
                        options->rank, options->rank_count, options->rank_count - 1);
    if (options->parent_pid && (uint32_t)options->parent_pid != pid)
        return cox_fail(err, COX_INVALID,
                        "the group %s belongs to process %" PRIu32
                        ", this worker's --parent_pid is %" PRId32,
                        options->prefix, pid, options->parent_pid);
    int r = cox_peer_open((pid_t)pid, start, &worker->coordinator);
    /* Its pid is of another namespace, or /proc hides the process: the connection shows its end. */
    if ((r == COX_PEER_DEAD || r == -EACCES) && worker->socket_fd >= 0)
        return 0;
    if ((r == -ENOSYS || r == -EPERM) && worker_ends_with_parent((pid_t)pid)) {
        worker->coordinator.pid = (pid_t)pid;
        return 0;
    }
    if (r)
        return cox_fail(err, r, "the coordinator of %s, process %" PRIu32 ": %s", options->prefix,
                        pid, cox_status_text(r));
    return 0;
}

static int worker_attach_group(struct cox_worker *worker, struct cox_error *err)
{
    struct cox_region own[COX_ATTACH_MEMBER_FD_COUNT] = {{0}}, hints = {0};
    int r = cox_attach_join_rank_group(worker->attached, &worker->group_fd, own, &hints, err);
    if (r || !own[0].base)
        return r;
    worker->group_memory =
        cox_group_memory_new(own, &hints, worker->options.rank, worker->options.rank_count);
    if (worker->group_memory)
        return 0;
    for (int i = 0; i < COX_ATTACH_MEMBER_FD_COUNT; i++)
        cox_region_detach(&own[i]);
    cox_region_detach(&hints);
    return cox_fail(err, -ENOMEM, "no memory for the rank group");
}

/* The kernel kills a wrapper (sh -c, timeout) with the coordinator that started it, but not the
 * wrapper's child, which cannot watch the coordinator's pidfd while it is stopped. So this process
 * ends with its wrapper, whose death is the death of the rank anyhow. Only if the wrapper has one
 * thread: the signal is sent when the thread that forked ends. */
static int worker_follow_wrapper(struct cox_worker *worker, struct cox_error *err)
{
    pid_t parent = getppid(), coordinator = worker->coordinator.pid;
    uint64_t thread_count;
    int present;
    if (worker->options.on_orphan != COX_ORPHAN_EXIT || parent == coordinator ||
        !cox_peer_descends(parent, coordinator) || cox_peer_thread_count(parent, &thread_count) ||
        thread_count != 1)
        return 0;
    if (prctl(PR_GET_PDEATHSIG, &present) < 0 || present != 0)
        return 0; /* the host has set one already */
    worker->follows_wrapper = prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
    if (getppid() != parent) /* before the signal was armed */
        return cox_fail(err, COX_PEER_DEAD, "the wrapper of this worker, process %jd, is gone",
                        (intmax_t)parent);
    return 0;
}

int cox_worker_enter(struct cox_worker *worker, const struct cox_worker_identity *self,
                     struct cox_error *err)
{
    const struct cox_worker_options *options = &worker->options;
    int r = 0;
    if (options->fd_count)
        r = cox_fd_bundle_take(&worker->bundle, options->fd_first, options->fd_count, err);
    else if (options->control_socket[0])
        r = worker_log_on(worker, self, err);
    if (r == 0 && options->notify_fd)
        r = cox_fd_bundle_take_notify(&worker->bundle, options->notify_fd, err);
    if (r == 0)
        r = worker_attach_control(worker, err);
    cox_fault_point(COX_FAULT_ATTACH_CONTROL);
    if (r == 0)
        r = worker_check_group(worker, err);
    if (r == 0)
        r = worker_follow_wrapper(worker, err);
    return r;
}

/* ---- the rank's place in it ---- */

struct cox_layout_identity *cox_worker_identity(struct cox_worker *worker)
{
    return &worker->control.ranks[worker->options.rank]->identity;
}

/* Two processes that serve one rank would each take every other request. From here on only this one
 * writes the rank's lines. */
int cox_worker_claim(struct cox_worker *worker, const struct cox_worker_identity *self,
                     struct cox_error *err)
{
    struct cox_layout_identity *identity = cox_worker_identity(worker);
    worker->claimed = cox_state_claim_identity(identity, (uint32_t)self->pid, self->start);
    if (worker->claimed)
        return 0;
    const struct cox_identity holder = cox_state_identity(identity);
    return cox_fail(
        err, COX_TAKEN,
        "rank %" PRIu32 " of %s %s process %" PRIu32
        ": one process serves a rank, and another only after the coordinator started it again",
        worker->options.rank, worker->options.prefix,
        holder.state == COX_IDENTITY_LEFT ? "was left by" : "is held by", holder.pid);
}

/* The rank's position on this channel: at the start, or where the coordinator has set the line of a
 * replaced rank. Read once. */
static int worker_attach_line(struct cox_channel_thread *thread, struct cox_error *err)
{
    /* In this order: a request may be published meanwhile. */
    uint64_t taken = cox_state_taken(thread->line);
    uint64_t published =
        cox_state_published(cox_state_channel(&thread->worker->control, thread->channel.id));
    if (taken > published)
        return cox_fail(err, COX_CORRUPT,
                        "the %s channel of rank %" PRIu32 " stands at sequence %" PRIu64
                        ", but only %" PRIu64 " were published",
                        cox_channel_name(thread->channel.id), thread->worker->options.rank, taken,
                        published);
    thread->taken = thread->returned = thread->done = taken;
    return 0;
}

/* A group without recorders is served as any other. */
static int worker_attach_recorder(struct cox_worker *worker, const struct cox_worker_identity *self,
                                  struct cox_error *err)
{
    const struct cox_worker_options *options = &worker->options;
    const struct cox_geometry *geometry = &worker->control.geometry;
    _cox_cleanup_(cox_close_fd) int opened_fd = -1;
    int fd = -1;
    if (!geometry->recorder)
        return 0;
    int r = cox_attach_open_recorder(worker->attached, &fd, &opened_fd, err);
    if (r)
        return r;
    r = cox_recorder_attach(fd, cox_geometry_recorder_offset(geometry, options->rank),
                            options->rank, options->incarnation, self->start, &worker->recorder);
    if (r && r != COX_NOT_FOUND)
        return cox_fail(err, r, "the recorder of rank %" PRIu32 ": %s", options->rank,
                        cox_status_text(r));
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        worker->threads[c].recorder =
            cox_recorder_requests(worker->recorder, (enum cox_channel_id)c);
    return 0;
}

int cox_worker_attach_channels(struct cox_worker *worker, const struct cox_worker_identity *self,
                               struct cox_error *err)
{
    const struct cox_worker_options *options = &worker->options;
    worker->notify_fd = cox_steal_fd(&worker->bundle.notify_fd);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_channel_thread *thread = &worker->threads[c];
        thread->worker = worker;
        int r = cox_attach_join_channel(worker->attached, &thread->channel, (enum cox_channel_id)c,
                                        err);
        if (r)
            return r;
        if (worker->notify_fd >= 0)
            cox_gate_set_notify(&thread->channel.gate,
                                cox_state_channel(&worker->control, (enum cox_channel_id)c),
                                worker->notify_fd);
        thread->line = cox_state_line(&worker->control, options->rank, (enum cox_channel_id)c);
        cox_state_set_incarnation(thread->line, worker->control.group_incarnation,
                                  options->incarnation);
        r = worker_attach_line(thread, err);
        if (r)
            return r;
        r = cox_arena_init(&thread->arena, ARENA_FIRST_SIZE, options->request_size_max);
        if (r)
            return cox_fail(err, r, "no memory for requests");
        cox_fault_point(COX_FAULT_ATTACH_CHANNEL);
    }
    int r =
        cox_attach_join_channel(worker->attached, &worker->error_channel, COX_CHANNEL_ERROR, err);
    if (r == 0)
        r = worker_attach_group(worker, err);
    return r ? r : worker_attach_recorder(worker, self, err);
}

/* From here on the coordinator relies on this rank. */
void cox_worker_announce(struct cox_worker *worker)
{
    cox_state_announce_identity(cox_worker_identity(worker), worker->control.group_incarnation,
                                worker->options.incarnation);
    if (cox_worker_limits(worker)->rank_words)
        cox_gate_post(&worker->threads[COX_CHANNEL_EXECUTE].channel.gate, worker->options.rank,
                      COX_WAKEUP_RESPONSE_CONSUME);
    cox_fault_point(COX_FAULT_ATTACHED);
}
