/* The worker's own memory, shared by worker.c (start and end), attach.c, pause.c, out_of_line.c
 * (large payloads), and by serve.c and its files (one request: serve_internal.h). */
#ifndef COX_WORKER_WORKER_INTERNAL_H
#define COX_WORKER_WORKER_INTERNAL_H

#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/spin.h"
#include "channel/memory/large_payload.h"
#include "channel/recorder/probes.h"
#include "channel/recorder/recorder.h"
#include "channel/shm/channel.h"
#include "channel/shm/fd_bundle.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "channel/socket/control_socket.h"
#include "worker/sequences/table.h"
#include "lending.h"
#include "pause.h"
#include "stack_writer.h"

#include <coxswain/worker.h>

#include <pthread.h>
#include <stdatomic.h>

struct Coxswain__LargePayloadRef;
struct Coxswain__ExecuteModelRequest;
struct Coxswain__ExecuteRequest;
struct cox_served_init;

/* The memory of a reply that is out of line. */
struct cox_channel_thread_reply {
    struct cox_large_payload payload;
    /* the request whose reply it holds, which the coordinator may read; 0: none */
    uint64_t sequence;
    /* that of the last reply in it */
    uint64_t last;
    /* reserved, and not sent: a thread may be writing there */
    bool reserved;
};

/* What an opaque callback or the caller of next writes to. */
struct cox_opaque_reply {
    uint8_t *slot;
    size_t slot_capacity;
    /* the slot, or what is out of line */
    uint8_t *bytes;
    size_t capacity;
    size_t length;
    /* inside the callback */
    bool runs;
};

/* One step between next and its reply. */
struct cox_served_step {
    const struct Coxswain__ExecuteModelRequest *message;
    struct cox_weights_candidate candidate;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    uint64_t begin_ns;
};

/* The request that next has opened last. Only a step or an init uses it until the reply, while it
 * is lent: several opaque requests can be. */
struct cox_served {
    /* with the type that its message has */
    struct cox_request request;
    enum cox_lent_kind kind;
    /* it came out of line */
    bool out_of_line;
    struct cox_opaque_reply opaque;
    struct cox_served_step step;
    /* in the arena */
    struct cox_served_init *init;
    struct Coxswain__PullKVResponse *pull;
};

/* The requests of one two-way channel, and the thread that serves them. */
struct cox_channel_thread {
    struct cox_worker *worker;
    struct cox_channel channel;
    /* this rank's, in the control region */
    struct cox_layout_rank_line *line;
    struct cox_spinner spinner;
    struct cox_recorder_requests recorder;
    /* sums of the recorder as the current callback began */
    uint64_t operations, waited_ns;
    /* for the state word of the current request: when it was published, or a later clock value */
    uint64_t stamp_ns;
    /* What this rank has last stored in the line, whatever other processes have written there
     * since. */
    uint64_t taken, returned, done;
    /* if it is a thread of the library */
    pthread_t id;
    bool is_started;
    /* the thread that serves, which may be a caller of next */
    pthread_t self;
    /* the error that ended it, and so the worker; read after the join */
    int failed;
    /* private copy of a request, grown as needed */
    uint8_t *copy;
    size_t copy_size;
    /* the current request and its reply */
    struct cox_arena arena;
    /* of the current request */
    struct cox_error error;
    /* The current request, in the arena; NULL: it could not be parsed. */
    const struct Coxswain__ExecuteRequest *message;
    /* the running callback */
    struct cox_running_callback running;
    struct cox_served served;
    /* payloads of requests that are out of line */
    struct cox_large_payload_view views[COX_DEPTH_MAX];
    /* payloads of replies that are out of line */
    struct cox_channel_thread_reply replies[COX_DEPTH_MAX];
    /* protects the payloads of replies, since several threads may reply */
    pthread_mutex_t payloads_lock;
    /* of these with a sequence. Stored under payloads_lock; relaxed: one that is not seen is
     * released next time. */
    _Atomic uint32_t reply_count;
    struct cox_lending lending;
};

struct cox_worker {
    struct cox_worker_options options;
    /* points to callbacks_copy */
    const struct cox_worker_callbacks *callbacks;
    struct cox_worker_callbacks callbacks_copy;
    void *context;
    /* during new */
    struct cox_fd_bundle bundle;
    /* what `control` and the channels are in */
    struct cox_attached *attached;
    /* the connection, if the worker attached at the control socket; -1 */
    int socket_fd;
    /* memory of the rank group; -1: there is none, or group_memory */
    int group_fd;
    /* an eventfd that is written to after replies when the coordinator's host asks for that; -1:
     * none */
    int notify_fd;
    /* as a member of the rank group, where each owns its own; NULL */
    struct cox_group_memory *group_memory;
    /* NULL: nothing is recorded */
    struct cox_recorder *recorder;
    struct cox_control control;
    struct cox_peer coordinator;
    /* new armed PDEATHSIG of its thread, free disarms it */
    bool follows_wrapper;
    /* the process that called new; a forked child differs */
    pid_t own_pid;
    /* this process is the rank, and has not left */
    bool claimed;
    struct cox_channel_thread threads[COX_TWO_WAY_COUNT];
    struct cox_channel error_channel;
    pthread_mutex_t error_lock;
    /* on CLOCK_MONOTONIC; reporting became false */
    pthread_cond_t error_cond;
    /* reports in a slot of its own; while reporting */
    uint64_t report_count;
    /* one report at a time from this process */
    bool reporting;
    /* threads inside a report; free waits for them */
    _Atomic uint32_t reporters;
    /* the execute channel thread's */
    struct cox_table *table;
    /* Of the current step; the execute channel thread's. */
    bool group_time_warned;
    uint64_t group_ns, group_wait_ns;
    struct cox_large_payload_sender large_payloads;
    /* request_size_max is the default */
    bool request_size_default;
    struct cox_pause pause;
    /* eventfd: stop was called, or a channel thread ended */
    int wake_fd;
    /* eventfd: free waits for the guard to end */
    int guard_fd;
    pthread_t guard;
    /* a thread ends the process with its coordinator */
    bool guarded;
    struct cox_stack_writer stacks;
    _Atomic bool stopping;
    _Atomic bool finalized;
    /* the coordinator has died, before stopping */
    _Atomic bool orphaned;
    /* channel threads that serve */
    _Atomic uint32_t running;
    /* threads inside cox_worker_next */
    _Atomic uint32_t takers;
    /* channel threads were started, and not yet joined */
    bool started;
    /* the thread that watches if start has returned, */
    pthread_t watcher;
    bool has_watcher;
    /* and its result */
    int watched;
};

/* What the group can do. */
static inline const struct cox_attach_limits *cox_worker_limits(const struct cox_worker *worker)
{
    return &worker->control.geometry.mode->limits;
}

/* A rank's identity for its coordinator. */
struct cox_worker_identity {
    pid_t pid;
    /* /proc/<pid>/stat field 22 */
    uint64_t start;
};

/* As cox_worker_new, with the identity of another process, whose death is the rank's: for tests
 * that run ranks as threads. */
int cox_worker_new_as(const struct cox_worker_identity *self,
                      const struct cox_worker_options *options,
                      const struct cox_worker_callbacks *callbacks, void *context,
                      struct cox_worker **ret_worker, struct cox_error *err);

static inline void cox_channel_thread_set_taken(struct cox_channel_thread *thread,
                                                uint64_t sequence)
{
    thread->taken = sequence;
    cox_state_set_taken(thread->line, sequence);
}

static inline void cox_channel_thread_set_returned(struct cox_channel_thread *thread,
                                                   uint64_t sequence)
{
    thread->returned = sequence;
    cox_state_set_returned(thread->line, sequence);
}

/* Stores the state for display; on a taken channel the lending stores it. */
static inline void cox_channel_thread_set_state(struct cox_channel_thread *thread,
                                                enum cox_rank_state state, uint64_t sequence)
{
    if (!thread->lending.on)
        cox_state_set_rank(thread->line, state, sequence, thread->stamp_ns);
}

static inline void cox_channel_thread_set_done(struct cox_channel_thread *thread, uint64_t sequence)
{
    thread->done = sequence;
    cox_state_set_done(thread->line, sequence);
}

/* ---- the recorder: the points at which a request's record gets its times ---- */

/* Inlined whatever the compiler thinks: a call costs as much as what these do. */
#define COX_INLINE __attribute__((always_inline)) static inline

/* The frame was read. */
COX_INLINE void cox_channel_thread_record_take(struct cox_channel_thread *thread,
                                               const struct cox_request *request)
{
    COX_PROBE(request__take, thread->channel.id, request->sequence, request->type, request->size);
    /* The size of what is in a frame has 32 bits. */
    cox_recorder_take(&thread->recorder, request->sequence,
                      (uint64_t)request->type << 32 | (uint32_t)request->size);
}

/* Its callback begins. now_ns 0: the clock was not read. */
COX_HOT static inline void cox_channel_thread_record_begin(struct cox_channel_thread *thread,
                                                           uint64_t sequence, uint32_t type,
                                                           uint64_t now_ns)
{
    COX_PROBE(callback__enter, thread->channel.id, sequence, type, 0);
    if (!thread->recorder.records)
        return;
    const struct cox_recorder *recorder = thread->worker->recorder;
    /* relaxed: sums. */
    thread->operations = atomic_load_explicit(&recorder->operations, memory_order_relaxed);
    thread->waited_ns = atomic_load_explicit(&recorder->waited_ns, memory_order_relaxed);
    cox_recorder_begin(&thread->recorder, sequence, now_ns);
}

/* Its callback has returned. */
COX_HOT static inline void cox_channel_thread_record_end(struct cox_channel_thread *thread,
                                                         uint64_t sequence, uint32_t type, int r,
                                                         uint64_t now_ns)
{
    COX_PROBE(callback__return, thread->channel.id, sequence, type, r);
    if (!thread->recorder.records)
        return;
    if (thread->channel.id == COX_CHANNEL_EXECUTE)
        cox_recorder_group(thread->worker->recorder, &thread->recorder, sequence,
                           thread->operations, thread->waited_ns);
    cox_recorder_end(&thread->recorder, sequence, now_ns);
}

/* The reply is about to be published. Any thread that replies to a lent request. */
COX_INLINE void cox_channel_thread_record_reply(const struct cox_channel_thread *thread,
                                                uint64_t sequence, int status, uint64_t size)
{
    COX_PROBE(request__reply, thread->channel.id, sequence, status, size);
    cox_recorder_reply(&thread->recorder, sequence, cox_recorder_result_word(status, size));
}

static inline bool cox_worker_stopping(const struct cox_worker *worker)
{
    return atomic_load_explicit(&worker->stopping, memory_order_acquire);
}

/* ---- attach.c, in the order of cox_worker_new ---- */

/* Finds the group and its coordinator, and checks both. */
int cox_worker_enter(struct cox_worker *worker, const struct cox_worker_identity *self,
                     struct cox_error *err);
int cox_worker_claim(struct cox_worker *worker, const struct cox_worker_identity *self,
                     struct cox_error *err);
int cox_worker_attach_channels(struct cox_worker *worker, const struct cox_worker_identity *self,
                               struct cox_error *err);
void cox_worker_announce(struct cox_worker *worker);
struct cox_layout_identity *cox_worker_identity(struct cox_worker *worker);

/* ---- take.c ---- */

/* Serves its channel until the worker leaves or the coordinator says goodbye; argument is the
 * struct cox_channel_thread. */
void *cox_channel_thread_main(void *argument);
/* A channel thread has received the goodbye, which is for all channels. */
void cox_worker_finalized(struct cox_worker *worker);

/* ---- out_of_line.c: requests and replies out of line ---- */

bool cox_channel_thread_has_payloads(const struct cox_channel_thread *thread);
/* The mapped payload of the request in this frame. */
static inline struct cox_large_payload_view *cox_channel_thread_view(
    struct cox_channel_thread *thread, uint64_t sequence)
{
    return &thread->views[cox_geometry_frame(sequence, thread->worker->control.geometry.depth)];
}
/* The bytes of a request, in place, lent until close. Returns 0, or what cox_large_payload_view_map
 * returns, in the channel thread's error. */
int cox_channel_thread_open_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                    const struct Coxswain__LargePayloadRef *message,
                                    const uint8_t **ret_bytes, size_t *ret_size);
void cox_channel_thread_close_payload(struct cox_channel_thread *thread, uint64_t sequence);
/* A lazy copy of the request that is open. Returns as cox_large_payload_view_copy. */
int cox_channel_thread_copy_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                    size_t size, void **ret_bytes, struct cox_error *err);
/* Reserves memory for a reply that does not fit its slot. Returns as cox_large_payload_reserve. */
int cox_channel_thread_reserve_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                       uint64_t size, uint8_t **ret_bytes, struct cox_error *err);
/* The same, with these parts of `size` bytes in it, one after the other. */
int cox_channel_thread_write_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                     const struct iovec *parts, uint64_t size,
                                     struct cox_error *err);
/* Call after it was written. Returns the reference to send. */
struct cox_large_payload_ref cox_channel_thread_refer_payload(struct cox_channel_thread *thread,
                                                              uint64_t sequence, uint64_t size);
/* Releases the memory of a reply that is not sent in it. */
void cox_channel_thread_release_payload(struct cox_channel_thread *thread, uint64_t sequence);
/* Releases the memory of replies to requests that have ended. */
void cox_channel_thread_release_payloads(struct cox_channel_thread *thread);
void cox_channel_thread_drop_payloads(struct cox_channel_thread *thread); /* idempotent */

/* ---- report.c ---- */

/* Reports a fault; channel < 0: about no request. */
int cox_worker_tell(struct cox_worker *worker, int channel, uint64_t sequence, const char *text,
                    uint64_t deadline_ns);

bool cox_worker_paused(const struct cox_worker *worker);

#endif
