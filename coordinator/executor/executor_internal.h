/* The executor's private state, shared by the files that implement executor.h and requests.h. */
#ifndef COX_COORDINATOR_EXECUTOR_INTERNAL_H
#define COX_COORDINATOR_EXECUTOR_INTERNAL_H

#include "channel/shm/channel.h"
#include "channel/socket/control_socket.h"
#include "channel/shm/fd_bundle.h"
#include "channel/shm/state.h"
#include "coordinator/collector/collector.h"
#include "coordinator/process/last_errors.h"
#include "coordinator/stacks/incidents.h"
#include "coordinator/transport/transport.h"
#include <coxswain/executor.h>
#include "coordinator/collector/error_channel.h"
#include <coxswain/requests.h>
#include "forward.h"
#include "recorders.h"

struct cox_executor {
    /* command and devices are only valid during start */
    struct cox_executor_options options;
    /* all ranks are on other machines, which no worker of this one becomes */
    bool elsewhere;
    /* `transport` also with options.nodes */
    struct cox_executor_remote remote;
    char name[COX_NAME_SIZE_MAX + 1];
    /* of cox_executor_take_name; release after other_name, acquire before it is read */
    _Atomic bool renamed;
    char other_name[COX_NAME_SIZE_MAX + 1];
    /* cox_name_objects */
    char objects[COX_NAME_SIZE_MAX + 1];
    /* cox_peer_own_mark() before the first rank */
    uint64_t mark;
    /* when start was called */
    uint64_t started_ns;
    struct cox_geometry geometry;
    struct cox_control control;
    struct cox_channel channels[COX_CHANNEL_COUNT];
    /* what `control` and `channels` are in; NULL: not created */
    struct cox_attach_group *memory;
    /* NULL: none */
    struct cox_control_socket *control_socket;
    /* One record per rank (rank.h). */
    struct cox_rank ranks[COX_RANK_COUNT_MAX];
    /* protects `memory`, open_for_attach of the ranks, and the end of the control socket */
    pthread_mutex_t memory_lock;
    struct cox_collector collectors[COX_TWO_WAY_COUNT];
    /* With options.collect: each rank's eventfd for cox_executor_fd; -1: not made. */
    int notify_fds[COX_RANK_COUNT_MAX];
    struct cox_large_payload_choice large_payloads;
    struct cox_last_errors last_errors;
    struct cox_recorders recorders;
    struct cox_incidents incidents;
    struct cox_supervisor *supervisor;
    /* options.nodes; NULL: none */
    struct cox_nodes *nodes;
    const struct cox_nodes_library *nodes_library;
    /* how the ranks attach, on whatever machine: "named" or "sealed" */
    const char *attach;
    /* of each rank that a transport reaches: the write end of its end_fd; -1: no process. Under
     * transport_lock. */
    int remote_ends[COX_RANK_COUNT_MAX];
    /* replies that are larger than their slot, by channel, frame and rank; the same lock */
    struct cox_large_payload *remote_replies;
    pthread_mutex_t transport_lock;
    /* the supervisor is there, for the control socket's thread */
    _Atomic bool supervised;
    _Atomic bool started;
    _Atomic bool stopping;

    struct cox_error_channel error_channel;
    /* start has returned */
    _Atomic bool complete;
    /* threads inside submit, call or recover; stop waits for them */
    _Atomic uint32_t callers;

    /* protects those below; never held over a call; taken with submit_lock of a collector held, and
     * with no other */
    pthread_mutex_t recover_lock;
    /* CLOCK_MONOTONIC; recovering or in_init became false */
    pthread_cond_t recover_cond;
    /* a recovery command runs; one at a time */
    bool recovering;
    /* name of the command that runs, if steps are refused meanwhile */
    const char *gates_steps;
    /* never BUSY, which is derived */
    enum cox_engine_state engine_state;
    /* a pause has failed, and no start followed: some ranks refuse steps, whatever the state is */
    bool partially_paused;

    /* one init at a time */
    bool in_init;
    /* the present or last init has reached the ranks */
    bool init_sent;
    /* Ranks may lack the state to run steps on: one was replaced, or an init that reached them has
     * failed, and none has succeeded since. */
    bool init_void;
    /* of stop: why the group ended, for transport->stop */
    bool failed;
    /* the last init that succeeded; belongs to the thread in init */
    struct cox_init_record *init_record;
    /* as of the last init that succeeded; NULL: none */
    struct cox_kv_caches *kv_caches;
    /* digest of the model since the last renewal; 0: as the caches say */
    _Atomic uint64_t kv_digest;
    /* renewals; release after kv_digest, acquire before it is read */
    _Atomic uint64_t kv_changes;
    /* NULL: ranks load the weights themselves */
    void (*announce_weights)(void *context, struct cox_weights_announcement *ret_announcement);
    /* both are set before the first init */
    void *announce_context;
    /* incarnation of the rank group of the last init that was sent; 0: none was */
    _Atomic uint64_t rank_group_incarnation;
    /* belongs to the thread in init; see group_handles.h */
    struct cox_group_handles *group_handles;
    /* NULL: there was no init in a sealed group whose other ranks are elsewhere */
    struct cox_mirror_memory *mirror_memory;
};

/* ---- init.c ---- */

struct cox_init_record *cox_init_record_free(struct cox_init_record *record); /* NULL-safe */
/* ---- remote_info.c ---- */

/* The KV caches that the ranks describe in one reply to init. NULL: no memory. */
struct cox_kv_caches *cox_kv_caches_new(const struct cox_completion *completion);
struct cox_kv_caches *cox_kv_caches_free(struct cox_kv_caches *caches); /* NULL-safe */
/* These caches are offered from now on, in the present epoch. Takes ownership. */
void cox_executor_set_kv_caches(struct cox_executor *executor, struct cox_kv_caches *caches);

/* ---- attach.c ---- */

/* Checks the process that has attached as the rank, and watches it from now on. Returns 0;
 * COX_CORRUPT; COX_DENIED: it is not a descendant of the process that was started; COX_PEER_DEAD.
 */
int cox_executor_check_identity(struct cox_executor *executor, uint32_t rank,
                                struct cox_error *err);
/* Describes a failure: how the rank ended or that it lives, `what`, and its last lines. */
int cox_executor_describe_failure(struct cox_executor *executor, uint32_t rank, int code,
                                  const char *what, struct cox_error *err);

/* Waits until all ranks here have attached, and watches their processes from then on. Returns 0;
 * COX_TIMEOUT; COX_CLOSED: options.cancelled; COX_PEER_DEAD; as check_identity. */
int cox_executor_await_attached(struct cox_executor *executor, uint64_t deadline_ns,
                                struct cox_error *err);

/* ---- worker_hello.c: the group's control socket ---- */

/* Does nothing with COX_SOCKET_NONE. Returns 0, also if the group runs without a socket (logged);
 * COX_TAKEN; what cox_control_socket_open returns. */
int cox_executor_open_socket(struct cox_executor *executor, struct cox_error *err);
void cox_executor_close_socket(struct cox_executor *executor); /* idempotent */
/* cox_attach_lend and cox_attach_put_away, with memory_lock. */
int cox_executor_lend(struct cox_executor *executor, uint32_t rank, int *ret_fds,
                      uint32_t *ret_count, struct cox_error *err);
void cox_executor_put_away(struct cox_executor *executor, uint32_t rank, bool lent);

/* Marks ranks that do not attach as running from their start. */
int cox_executor_adopt_ranks(struct cox_executor *executor, struct cox_error *err);
/* True if processes become ranks that this program does not start. */
static inline bool cox_executor_is_external(const struct cox_executor *executor)
{
    return executor->options.workers.external || executor->remote.transport;
}

/* False: the rank is on another machine, and another executor has it (rank_here). */
static inline bool cox_executor_has_rank(const struct cox_executor *executor, uint32_t rank)
{
    return executor->remote.rank_here == 0 ||
           (rank >= executor->remote.rank_first &&
            rank - executor->remote.rank_first < executor->remote.rank_here);
}

/* ---- status.c ---- */

/* Before the first request: stacks are gathered when one passes its deadline. Returns 0; -errno. */
int cox_executor_open_incidents(struct cox_executor *executor, struct cox_error *err);

/* ---- transport.c ---- */

int cox_executor_open_transport(struct cox_executor *executor, struct cox_error *err);
void cox_executor_close_transport(struct cox_executor *executor);
/* As cox_supervise_hooks.kill. */
void cox_executor_kill_remote(void *context, uint32_t rank);

/* ---- submit.c: for forward.c ---- */

/* The payload of a frame: a message, or bytes. */
struct cox_payload {
    /* NULL: bytes */
    const struct Coxswain__ExecuteRequest *request;
    /* NULL: they are in parts, or in memory */
    const void *bytes;
    const struct iovec *parts;
    /* finished; NULL: not in memory */
    struct cox_payload_memory *memory;
    /* of the bytes, of all parts, or of the memory */
    size_t size;
    /* the bytes are a message */
    bool packed;
};

/* After begin: packs the request into its frame, or out of line, and commits it; aborts it where
 * that fails. */
int cox_executor_pack(struct cox_collector *collector, const struct cox_payload *payload,
                      struct cox_entry *entry, struct cox_error *err);

/* ---- init.c: for forward.c ---- */

/* Before an init of this incarnation is published: memory for the rank group. */
int cox_executor_renew_group(struct cox_executor *executor, uint64_t incarnation,
                             struct cox_error *err);

/* True for channels whose completions go to a registered handler. */
static inline bool cox_executor_is_async(enum cox_channel_id channel)
{
    return channel == COX_CHANNEL_EXECUTE || channel == COX_CHANNEL_TRANSFER;
}

/* True if it has left the group, by its own word, and its process lives. */
static inline bool cox_executor_sees_left(struct cox_executor *executor, uint32_t rank)
{
    return cox_supervisor_see_left(executor->supervisor, rank,
                                   cox_state_left(&executor->control, rank)) > 0;
}

/* The calling thread is inside until exit, which is the cleanup of the variable that enter returns.
 */
static inline struct cox_executor *cox_executor_enter(struct cox_executor *executor)
{
    /* acq_rel: partner is the acquire in stop. A thread that exited uses the executor no more. */
    atomic_fetch_add_explicit(&executor->callers, 1, memory_order_acq_rel);
    return executor;
}

static inline void cox_executor_exit(struct cox_executor **executor)
{
    atomic_fetch_sub_explicit(&(*executor)->callers, 1, memory_order_acq_rel);
}

#endif
