/*
 * worker: the worker side of a group: attaches to it as one rank, serves its requests with
 * callbacks, and ends with the coordinator.
 *
 * Processes: one struct cox_worker per process.
 * Threads: the caller calls new, run and free on one thread; stop on any thread or in a signal
 *   handler; report_fault on any thread. new starts a thread that ends the process when the
 *   coordinator dies (COX_ORPHAN_EXIT); it runs until free. run starts one thread per two-way
 *   channel and calls each callback on its channel's thread:
 *     execute            init, execute, cleanup, opaque
 *     shared_sync_link   link, link_status, lora
 *     transfer           pull_kv
 *     recover_command    pause, pause_net, clear, reinit, start: they overtake a stuck execute
 *   A callback blocks its own channel only. Callbacks of different channels run at the same time.
 * Signals: channel threads block all signals but those of faults. The execute and transfer threads
 *   also accept SIGURG, which the library owns while run runs.
 * Ownership: requests and batches are lent to the callback. The callback fills the responses, from
 *   the arena it is given or from memory that outlives the call.
 * Blocks: new never blocks. run blocks until the worker ends.
 * Failures: a callback returns 0, or another value to reply with an error. The error ends the
 *   request for all ranks; the coordinator gets its text and the rank. A legacy coordinator drops
 *   each reply and report whose status is not 0. It therefore gets the failure with status 0, in
 *   the fields of its own protocol: err_msg of a step, the init status, the LoRA status
 *   UNSUPPORT_CMD, a code per pull, or command_result. The text follows as a fault report.
 * If the process dies: its slots and its lines in the shared state stay as they are. The
 *   coordinator detects the death, and never reads a half-written reply.
 * If the coordinator dies: the process ends (on_orphan), also before run, and in or after finalize.
 *   A child of the coordinator gets SIGKILL from the kernel, from its first instruction on, also
 *     while stopped.
 *   A worker inside wrappers (sh -c, timeout) ends itself, which it cannot do while stopped. new
 *     therefore asks the kernel for SIGKILL at the wrapper's death, until free. This needs
 *     COX_ORPHAN_EXIT and a wrapper with one thread.
 *   Not covered: a stopped worker inside two wrappers that survive, or inside one with threads. It
 *     ends when it is continued.
 *   Before new, the library cannot end the process: a wrapped worker should attach first, and load
 *     its weights in init.
 */
#ifndef COX_WORKER_H
#define COX_WORKER_H

#include <coxswain/base.h>
#include <coxswain/handle.h>

#include <string.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * ==== batch: one step of inference, as the execute callback of a worker sees it.
 *
 * The view does not depend on the wire format (packed columns that refer to the sequence table, or
 * the nested SequenceGroupMetadata of legacy coordinators). Every row is complete: it has all
 * tokens and the whole block table of its sequence.
 *
 * Threads: a view belongs to the thread whose callback got it, until that callback returns.
 * Ownership: every pointer is lent by the worker library until the callback returns.
 * Blocks: nothing here blocks.
 * If the process dies: the view is private memory; nothing is left.
 */

/* Block tables of one sequence, at most: one per KV-cache manager. */
#define COX_BLOCK_TABLE_COUNT_MAX 4
/* Bytes of a LoRA adapter's name, at most. */
#define COX_LORA_NAME_LENGTH_MAX 128
/* Stop tokens of one sequence, at most. */
#define COX_STOP_TOKEN_COUNT_MAX 8

enum cox_forward_type { /* values of ForwardType in executor.proto */
                        COX_FORWARD_PREFILL = 0,
                        COX_FORWARD_DECODE = 1,
                        COX_FORWARD_EXTEND = 2,
                        COX_FORWARD_MIXED = 3,
                        COX_FORWARD_CLEAR = 4,
                        COX_FORWARD_DUMMY = 5, /* no rows; keeps ranks synchronized */
};

struct cox_sampling {
    /* 0: greedy */
    float temperature;
    /* 1: off */
    float top_p;
    /* 0: off */
    int32_t top_k;
    /* 1: off */
    float repetition_penalty;
    /* the draw at position p is a function of (seed, p) alone, so a recomputation repeats it */
    uint64_t seed;
};

struct cox_block_table {
    /* ids of KV blocks, in order of position */
    const int32_t *blocks;
    uint32_t count;
};

/* One sequence of the step. */
struct cox_batch_row {
    /* the coordinator's sequence id */
    int64_t id;
    /* index in the sequence table, stable while the sequence lives */
    uint32_t slot;
    /* of the first token to compute; 0-based */
    uint32_t position;
    /* tokens to compute: positions [position, position + token_count) */
    uint32_t token_count;
    /* sample the token that follows the last one computed */
    bool emit;
    /* all tokens of the sequence from position 0; position + token_count of them */
    const int32_t *tokens;
    /* cox_batch.table_count of them; [0] is the main one */
    const struct cox_block_table *tables;
    const struct cox_sampling *sampling;
    /* the adapter it is computed with; NULL: none */
    const char *lora_id;
};

/* A version of the model's weights that the coordinator shares. It is in an image: memory that no
 * process can write any more (COX_REGION_SEALED). */
struct cox_weights_candidate {
    /* from 1; only grows */
    uint64_t version;
    /* bytes of the image */
    uint64_t size;
    /* of the request that named it; COX_DEADLINE_NEVER: it has none */
    uint64_t deadline_ns;
    /* of the image (cox_handle_open) */
    struct cox_handle handle;
};

struct cox_block_pair {
    int32_t from;
    int32_t to;
};

struct cox_batch {
    /* sequence number of the request on its channel */
    uint64_t sequence;
    enum cox_forward_type forward_type;
    uint32_t row_count;
    const struct cox_batch_row *rows;
    /* block tables per row, 1 to COX_BLOCK_TABLE_COUNT_MAX */
    uint32_t table_count;
    /* Block moves to do before the rows, in this order: swap_out (device to host), swap_in (host to
     * device), copy (device to device). */
    const struct cox_block_pair *swap_in;
    uint32_t swap_in_count;
    const struct cox_block_pair *swap_out;
    uint32_t swap_out_count;
    const struct cox_block_pair *copy;
    uint32_t copy_count;
    /* Sequences that ended since the last step: forget what is kept for these slots. */
    const uint32_t *finished_slots;
    uint32_t finished_count;
    /* Version of the model's weights with which all ranks compute this step; 0: the coordinator
     * shares no weights. */
    uint64_t weights_version;
    /* That version's memory, as long as some rank may not have attached it; then NULL. */
    const struct cox_weights_candidate *weights;
    /* private to the worker library */
    const void *void_word;
    /* the same; NULL: never paused */
    const void *cancel_word;
};

/* What the callback fills, one per row. */
struct cox_batch_output {
    /* the sampled token; -1 where emit is false */
    int32_t token;
    /* of that token under the unscaled distribution, 0 where not computed */
    float logprob;
};

/* True once the coordinator has cancelled this step (timeout, another rank's failure), or the
 * worker is pausing (cox_worker_pause). A long callback may poll it between layers and return
 * COX_ABORTED early. Lock-free; on the callback's thread. */
COX_PUBLIC bool cox_batch_cancelled(const struct cox_batch *batch);

/* Sequence number up to which steps have been cancelled; 0: none. During a step that is not
 * cancelled, all ranks read the same number, and it has grown if an earlier step failed on any
 * rank. So ranks that wait for each other can resynchronize at the same step (cox_group_align).
 * Lock-free; on the callback's thread. */
COX_PUBLIC uint64_t cox_batch_void_through(const struct cox_batch *batch);

/* ==== worker ==== */

struct cox_group_options;
struct cox_worker;
struct Coxswain__PDLinkRequest;
struct Coxswain__PDLinkStatusResponse;
struct Coxswain__PullKVRequest;
struct Coxswain__PullKVResponse;
struct Coxswain__LoraOperationRequest;
struct Coxswain__LoraOperationResponse;

/* What the worker does when the coordinator has died. */
enum cox_orphan_action {
    COX_ORPHAN_EXIT = 0, /* _exit(70) at once, whatever callbacks or the host are doing */
    /* run returns COX_PEER_DEAD after running callbacks have returned. A child of the coordinator
     * never gets that far: the kernel kills it. */
    COX_ORPHAN_RETURN,
};

/* Any free rank. */
#define COX_WORKER_RANK_ANY UINT32_MAX

struct cox_worker_options {
    /* set by COX_WORKER_OPTIONS_INIT (base.h) */
    size_t size;
    /* name of the group: "/NAME" */
    char prefix[160];
    /* 0 to rank_count - 1 */
    uint32_t rank;
    /* must match the group */
    uint32_t rank_count;
    /* for the host; the library does not use it */
    int32_t device;
    /* incarnation of this rank; 1 is the first */
    uint32_t incarnation;
    /* Path of the group's control socket, or, without a slash, the group's name. new connects there
     * and receives the memory, and also rank, rank_count and incarnation where these are left open:
     * rank COX_WORKER_RANK_ANY, the others 0. prefix is then used in messages only. Empty: attach
     * by names or fds. */
    char control_socket[4096];
    /* Path of the control socket that serves as fd store. Processes exchange fds there when the
     * kernel denies pidfd_getfd (Yama, seccomp), for payloads too large for a frame or slot. Empty:
     * the same as control_socket. */
    char fd_store[4096];
    /* with fd_count > 0: first of the open fds of the group's memory */
    int fd_first;
    /* new takes ownership of the fds; a restarted rank has no names to attach by */
    uint32_t fd_count;
    /* An eventfd that the rank writes after its replies, when the coordinator's host asks for it
     * (cox_executor_fd). new takes ownership. 0: none, or the control socket delivers it. */
    int notify_fd;
    /* pid of the coordinator; must match the group. A legacy coordinator is identified by it alone.
     */
    int32_t parent_pid;
    enum cox_orphan_action on_orphan;
    /* true: a callback (execute, opaque, pull_kv) that ignores a pause (cox_worker_pause) and its
     * signals is left by siglongjmp out of a signal handler, wherever it is. What it allocated
     * leaks. Locks it held stay locked, also inside the C library (malloc, stdio). No destructor
     * runs, and threads it started continue. scanf of glibc cannot be left: the process ends.
     * Only for callbacks that tolerate this and run on the stack they were called on. They put
     * cox_worker_allow_leave around code that must not be abandoned.
     * false: a stuck rank stays stuck until it is replaced. */
    bool leave_stuck;
    /* Upper limit of an unpacked request; 0: 256 MiB. A request that did not fit its frame may use
     * twice its size in addition. */
    size_t request_size_max;
    /* live sequences, at most; 0: 4096 */
    uint32_t sequence_count_max;
    /* tokens of one sequence, at most; 0: 131072 */
    uint32_t token_count_max;
    struct cox_log log;
    /* Writes to fd where an interpreter's threads are, when somebody asks for the stacks of this
     * rank (coxswain stacks), for example as faulthandler does. On a thread of the library, while
     * all other threads of the process may be stopped: it takes no lock and allocates nothing.
     * NULL: of CPython, if the process has it; else nothing. */
    void (*write_frames)(void *context, int fd);
    void *frames_context;
};
#define COX_WORKER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_worker_options)

/* Fills options from the environment, then from flags; flags take precedence.
 * Environment, set by the coordinator: COXSWAIN_PREFIX, _RANK, _WORLD_SIZE, _DEVICE, _PARENT_PID,
 * _INCARNATION, _FDS, _NOTIFY_FD and _SOCKET. _FDS and _NOTIFY_FD are removed from it. _SOCKET is
 * the fd store. Flags, with the value after '='
 * or in the next argument: --socket, --local_rank, --local_world_size, --npu_num_per_dp,
 * --npu_device_id, --parent_pid, --shm_name_prefix. When --npu_num_per_dp is smaller than the world
 * size, the node has several groups: rank is taken modulo it. --global_rank and --global_world_size
 * are accepted and ignored. Known flags are removed from argv and *argc; all others stay, in order.
 * Returns
 *   0
 *   COX_INVALID: a value is missing or invalid, err names it; options and argv are unchanged */
COX_PUBLIC int cox_worker_options_parse(struct cox_worker_options *options, int *argc, char **argv,
                                        struct cox_error *err);

struct cox_kv_cache_desc {
    int32_t block_count;
    /* positions per block */
    int32_t block_size;
    uint32_t compression_ratio;
    int32_t cache_type;
};

#define COX_KV_CACHE_DESC_COUNT_MAX 8

/* Layout of a rank's keys and values in the blocks of its KV cache. Ranks of two groups can copy
 * blocks from each other when all fields are equal. model_digest covers the whole model, whatever
 * part this rank has. Ranks of one group with different digests cannot compute together: their init
 * fails (COX_DIVERGED). */
struct cox_kv_layout {
    uint32_t rank, rank_count;
    uint32_t layer_count;
    /* the KV heads of this rank */
    uint32_t kv_head_first, kv_head_count;
    uint32_t head_dim;
    /* positions per block */
    uint32_t block_size;
    /* 4: F32 */
    uint32_t element_bytes;
    uint64_t block_bytes;
    /* of configuration and weights; 0: unknown */
    uint64_t model_digest;
};

/* What other groups need to read the KV cache of a rank. */
struct cox_kv_pool {
    /* 0: the rank exports no KV cache */
    uint32_t block_count;
    /* struct cox_handle (coxswain/handle.h) of the KV blocks
     * (coxswain/kv.h) */
    uint8_t handle[64];
    struct cox_kv_layout layout;
};

struct Coxswain__KvPool;
/* Reads the KV pool of another group's rank from a link request (executor.proto, KvPool).
 * Returns
 *   0
 *   COX_CORRUPT: a field is missing or impossible, err names it */
COX_PUBLIC int cox_kv_pool_read(const struct Coxswain__KvPool *message,
                                struct cox_kv_pool *ret_pool, struct cox_error *err);
/* Checks that two layouts are equal, so that blocks can be copied between their ranks.
 * Returns
 *   0
 *   COX_INVALID: err names each field that differs, with both values */
COX_PUBLIC int cox_kv_layout_check(const struct cox_kv_layout *theirs,
                                   const struct cox_kv_layout *ours, struct cox_error *err);

/* What a rank reports at init. A legacy coordinator reads the device blocks from npu_block_count or
 * from kv_caches[0].block_count, depending on its release. If one of the two is 0, the library
 * sends it as the other. A rank without kv_caches is described by one of npu_block_count blocks
 * with block size 0. */
struct cox_init_result {
    /* blocks of the swap space */
    int64_t cpu_block_count;
    /* blocks of the KV cache; the coordinator takes the smallest of all ranks */
    int64_t npu_block_count;
    int64_t max_position_embeddings;
    int64_t mem_pool_id;
    /* -1: none */
    int64_t start_thinking_id;
    /* -1: none */
    int64_t stop_thinking_id;
    /* comma separated; NULL: none */
    const char *early_stopping_ids;
    struct cox_kv_cache_desc kv_caches[COX_KV_CACHE_DESC_COUNT_MAX];
    uint32_t kv_cache_count;
    struct cox_kv_pool kv_pool;
};

struct cox_init_entry {
    const char *key;
    const char *value;
};

/* An init, lent until the callback returns. */
struct cox_init_request {
    /* the init's sequence number on its channel, as cox_batch.sequence is a step's */
    uint64_t sequence;
    /* The coordinator sends an init again, unchanged, because it replaced a rank. A rank that
     * completed this init before may keep what it loaded, and gives the same reply. Every rank must
     * join its rank group again. */
    bool replayed;
    /* the configuration */
    uint32_t entry_count;
    const struct cox_init_entry *entries;
    /* Where the ranks form their rank group: copy it, and set the members that are the caller's.
     * Named group: fd, fd_offset, rank, rank_count and incarnation are set. Each init has memory of
     * its own, all zero, so that a rank still in the previous group cannot write to it. fd is lent
     * until cox_worker_free; it is -1 where the coordinator has no such memory (legacy). Sealed
     * group: `sealed` is set instead, lent until the callback returns. The rank leaves the previous
     * init's group before it joins this one. */
    const struct cox_group_options *group;
    /* The coordinator's shared weights; NULL: none, each rank loads its weights itself. */
    const struct cox_weights_candidate *weights;
    /* Path of the control socket, from which cox_handle_open can fetch handles that it cannot open
     * otherwise. NULL: the group has none. */
    const char *control_socket;
};

/* Looks up a key of the configuration; NULL when absent. */
static inline const char *cox_init_request_get(const struct cox_init_request *request,
                                               const char *key)
{
    for (uint32_t i = 0; i < request->entry_count; i++) {
        if (strcmp(request->entries[i].key, key) == 0)
            return request->entries[i].value;
    }
    return NULL;
}

/* True once a request of the execute or the transfer channel, or the group, has ended (deadline,
 * failure or death of another rank), or the worker is pausing. A callback should then return. The
 * reply to a lent request is owed nevertheless; the coordinator drops that of an ended request. A
 * long init polls it with its own sequence, and returns COX_ABORTED. sequence 0: the request of the
 * opaque or pull_kv callback that runs on this thread. Lock-free. */
COX_PUBLIC bool cox_worker_cancelled(const struct cox_worker *worker, enum cox_channel_id channel,
                                     uint64_t sequence);

/* Any callback may be NULL. Its requests then get the reply COX_UNSUPPORTED; those without a reply
 * are dropped. For a dropped link, a legacy coordinator gets a fault report. Without an init
 * callback, an init succeeds only if it brings no configuration. Its result is then empty: no
 * blocks, no positions, no KV cache. */
struct cox_worker_callbacks {
    /* set by COX_WORKER_CALLBACKS_INIT (base.h) */
    size_t size;
    int (*init)(void *context, const struct cox_init_request *request,
                struct cox_init_result *result, struct cox_error *err);
    /* outputs: batch->row_count of them. The sequence table advances only when execute returns 0.
     */
    int (*execute)(void *context, const struct cox_batch *batch, struct cox_batch_output *outputs,
                   struct cox_error *err);
    /* Sequences ended without a further step: release the state kept for these slots. No reply. */
    void (*cleanup)(void *context, const uint32_t *slots, uint32_t count);
    /* A request whose bytes only the application interprets. They are lent in place, in shared
     * memory that other ranks of a named group could write: read each byte once, or copy. A request
     * that did not fit its frame is in memory that only the coordinator can write, the same memory
     * for all ranks. For a reply longer than reply_capacity, call cox_worker_reply_grow. */
    int (*opaque)(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                  size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err);
    /* Starts linking, unlinking or a role change; link_status reports the state. No reply. The
     * request may also name pulls to cancel (cancelled_pulls), while pull_kv runs.
     * coxswain-worker is the example for link, link_status and pull_kv: links.h, pulls.h,
     * transfer.h. Another worker does the same as follows:
     *   - It keeps its KV cache in KV blocks (cox_kv_blocks_new), exports their fd
     *     (cox_exporter_export), and reports them in kv_pool at init.
     *   - link attaches to the KV blocks of another group's ranks (cox_handle_open,
     *     cox_kv_view_attach).
     *   - pull_kv copies a block under the user that the request names (cox_kv_view_copy,
     *     cox_kv_user_of) with a deadline of a moment. On COX_EMPTY, as for a block that
     *     still comes from another machine, it looks whether it must end, and copies again.
     *   - Before a step writes a block that belonged to another sequence, it calls
     *     cox_kv_blocks_take, and cox_kv_blocks_give after it. */
    void (*link)(void *context, const struct Coxswain__PDLinkRequest *request);
    int (*link_status)(void *context, struct cox_arena *arena,
                       struct Coxswain__PDLinkStatusResponse *response, struct cox_error *err);
    /* lora_op_status is UNSUPPORT_CMD unless the callback sets another; text accompanies a failure.
     */
    int (*lora)(void *context, const struct Coxswain__LoraOperationRequest *request,
                struct cox_arena *arena, struct Coxswain__LoraOperationResponse *response,
                struct cox_error *err);
    /* One result per request, each with its own code: one failed pull does not fail the others. A
     * long callback polls cox_worker_cancelled. */
    int (*pull_kv)(void *context, const struct Coxswain__PullKVRequest *request,
                   struct cox_arena *arena, struct Coxswain__PullKVResponse *response,
                   struct cox_error *err);
    /* The recovery commands. A result other than 0 is reported as command_result with the text. The
     * coordinator may repeat them, and may call them on a rank that missed an earlier one because
     * it was replaced. After a reinit that returned 0 the rank has no sequences: a step that builds
     * on an earlier one fails with COX_STALE. */
    int (*pause)(void *context, struct cox_error *err);
    int (*pause_net)(void *context, struct cox_error *err);
    int (*clear)(void *context, struct cox_error *err);
    int (*reinit)(void *context, struct cox_error *err);
    int (*start)(void *context, struct cox_error *err);
    /* The coordinator has finalized the group. Called once, after the execute channel is done, on
     * the thread of run, before run returns. */
    void (*finalize)(void *context);
};
#define COX_WORKER_CALLBACKS_INIT COX_OPTIONS_INIT(struct cox_worker_callbacks)

/* Attaches to the group as options->rank. A legacy group is one that has no shared state; it needs
 * parent_pid. options and callbacks are copied; context is borrowed until free.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such group
 *   COX_DENIED: an object with another owner, mode or type
 *   COX_VERSION
 *   COX_CORRUPT
 *   COX_INVALID: the options; rank or world size do not fit the group
 *   COX_PEER_DEAD: its coordinator or its wrapper is dead
 *   COX_TAKEN: another process has attached as this rank, err names it; the rank is free again once
 *     the coordinator restarts it. Never in a legacy group, which does not record this
 *   -errno */
COX_PUBLIC int cox_worker_new(const struct cox_worker_options *options,
                              const struct cox_worker_callbacks *callbacks, void *context,
                              struct cox_worker **ret_worker, struct cox_error *err);
/* NULL-safe, returns NULL. Wakes threads blocked in report_fault, which then return COX_CLOSED, and
 * waits for them. No call may follow. In the child of a fork it only unmaps memory: the rank is the
 * parent's. */
COX_PUBLIC struct cox_worker *cox_worker_free(struct cox_worker *worker);

/* The rank and the world size; valid once new has returned. */
COX_PUBLIC uint32_t cox_worker_rank(const struct cox_worker *worker);

/* Serves until the coordinator finalizes, stop is called, or the coordinator dies. On return the
 * rank has left the group: requests that ask it fail, even while the process lives on.
 * Returns
 *   0: after finalize or stop
 *   COX_PEER_DEAD: the coordinator has died (only with COX_ORPHAN_RETURN)
 *   COX_CORRUPT: the shared memory is invalid
 *   COX_BUSY: the worker was started already (cox_worker_start)
 *   -errno */
COX_PUBLIC int cox_worker_run(struct cox_worker *worker, struct cox_error *err);

/* Makes run return after running callbacks have returned. Async-signal-safe, idempotent. */
COX_PUBLIC void cox_worker_stop(struct cox_worker *worker);

/* Allocates memory for a reply of up to size bytes, which replaces the buffer that the callback was
 * given. Nothing is copied from that buffer: the callback writes the whole reply here before it
 * returns. Another call replaces the memory again. On the thread of an opaque callback; lent until
 * it returns.
 * Returns
 *   0
 *   COX_STATE: no opaque callback runs on this thread
 *   COX_NO_SPACE
 *   COX_TOO_LARGE: a legacy coordinator accepts no more than fits a slot
 *   -errno */
COX_PUBLIC int cox_worker_reply_grow(struct cox_worker *worker, size_t size, uint8_t **ret_reply,
                                     struct cox_error *err);

/* Sets two times that the reply to this step reports: the time spent in operations with other
 * ranks, and the part of it spent waiting for them. A second call replaces the first. Without a
 * call the reply has no such times, as for a rank without a group. On the thread of an execute
 * callback. */
COX_PUBLIC void cox_worker_tell_group_time(struct cox_worker *worker, uint64_t group_ns,
                                           uint64_t wait_ns);

/* Replaces one of the digests of the present step, for a worker that knows better than the library
 * what its ranks must agree on. The library computes all four itself: of the rows of the batch and
 * the sampled tokens (none where every token of the rank is -1). It chains the value with those of
 * the steps before, up to the last step with base 0. value: of this step alone; 0: the rank is not
 * compared in it. If ranks differ, the coordinator ends the step with COX_DIVERGED.
 * On the thread of an execute callback, or, with cox_worker_next, between a step and its reply. */
COX_PUBLIC void cox_worker_set_digest(struct cox_worker *worker, enum cox_digest which,
                                      uint64_t value);

/* false: options.leave_stuck does not make this thread leave its callback, until true. A leave that
 * falls due meanwhile happens at the first SIGURG afterwards. A callback puts the two calls around
 * code that must not be abandoned halfway: a held lock, an allocation, a file being written. They
 * do not affect other threads, and do not nest. */
COX_PUBLIC void cox_worker_allow_leave(bool allow);

/* ---- for the recovery callbacks ---- */

/* Pauses the worker: until resume, steps, pulls and opaque requests get the reply COX_ABORTED at
 * once; init and cleanup are still served.
 * Blocks until the running callbacks of the execute and transfer channels end, in stages:
 *   1. cox_batch_cancelled and cox_worker_cancelled return true,
 *     which asks the callbacks to return.
 *   2. After grace_ms (0: 500; at most a day) their threads get SIGURG every 50 ms, which ends
 *     blocking system calls with EINTR.
 *   3. After grace_ms again, with options.leave_stuck, a callback is left by siglongjmp, and its
 *     request gets the reply COX_ABORTED. init and cleanup get signals but are never left: what
 *     they were allocating or freeing would leak.
 * A stuck rank thus takes 2 * grace_ms (one second by default), or 3 * grace_ms at most. It takes
 * longer if this process gets no processor time. Idempotent: a second pause repeats the stages for
 * the callbacks that run then. Any thread but those of the two channels (asserted), for example in
 * a recovery callback.
 * Returns
 *   0: no callback is running
 *   COX_TIMEOUT: a callback is still running, err names it, its request and its age; the worker
 *     stays paused */
COX_PUBLIC int cox_worker_pause(struct cox_worker *worker, uint64_t grace_ms,
                                struct cox_error *err);
/* Ends a pause. Idempotent. After an init that is not a replay the group is in state NORMAL, where
 * a start command is not legal. So the init callback calls this itself, unless
 * cox_init_request.replayed. */
COX_PUBLIC void cox_worker_resume(struct cox_worker *worker);
/* True while a callback of the execute or transfer channel is running. If a thread stores a flag
 * with seq_cst and this call then returns false, the next callback sees the flag when it loads it
 * at its start. */
COX_PUBLIC bool cox_worker_busy(const struct cox_worker *worker);

/* ---- for the lora callback ---- */

/* Retires an adapter before it is unloaded. Until the lora callback returns, steps that announce a
 * sequence with it are refused (COX_BUSY). Blocks until no live sequence uses it, at most until the
 * request's deadline (5 s if it has none), the request's cancellation, or the worker's end. Only
 * live sequences have rows with this lora_id, so after success no callback reads the adapter.
 * Inside the lora callback only.
 * Returns
 *   0
 *   COX_BUSY: some sequences still use it, err has their number; steps are not refused any more
 *   -ENOMEM */
COX_PUBLIC int cox_worker_lora_retire(struct cox_worker *worker, const char *lora_id,
                                      struct cox_error *err);

/* Reports a fault to the coordinator outside any reply, on the error channel. The text is cut to
 * what fits. Waits for the slot until deadline_ns; a past deadline takes the slot only if it is
 * free.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_CLOSED: the worker is leaving the group
 *   -errno */
COX_PUBLIC int cox_worker_report_fault(struct cox_worker *worker, const char *text,
                                       uint64_t deadline_ns);

/*
 * ==== take: lets a host take requests and reply to them on its own threads, instead of in
 * callbacks.
 *
 *   struct cox_worker_request request;
 *   cox_worker_start(worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), &err);
 *   while (cox_worker_next(worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, &err) == 0)
 *       cox_worker_reply(worker, request.sequence, request.bytes, request.size, &err);
 *   cox_worker_join(worker, &err);
 *
 * Lent requests: on the execute channel, next lends requests without a callback to its caller:
 *   opaque requests, steps, and inits that bring a configuration. next serves every other request
 *   of a taken channel itself, on the calling thread, as cox_worker_run does: it runs the callback,
 *   or refuses a request without one. So no thread of the library runs callbacks of a taken
 *   channel. Link, transfer and recovery requests are always served by callbacks, one at a time:
 *   their replies are messages that need an arena.
 * Threads: start, join and free on one thread. next on any thread, one at a time per channel.
 *   reply, reply_error, reply_step, reply_init and cancelled on any thread, also while another one
 *   is inside next. wake and stop on any thread or in a signal handler. Threads of the library
 *   serve the channels that are not taken. One more blocks until the worker stops. No request of a
 *   taken channel passes through them.
 * Order: up to `depth` opaque requests may be lent at a time, and be replied to in any order. The
 *   library publishes the replies in the order of the requests: a reply ahead of its turn waits in
 *   its slot. The reason: a rank publishes its progress as one number, up to which it has replied.
 *   While a step or an init is lent, next returns COX_BUSY: what follows builds on its result.
 * Ownership: request.bytes, .batch, .outputs and .init are lent until the reply. So is .reply, the
 *   slot from which the coordinator reads the reply: writing the reply there saves a copy.
 * Without a reply: the request ends at its deadline. The coordinator then refuses new requests on
 *   the channel (COX_LATE) until the rank replies, although it drops that reply. join and free
 *   reply to nothing: the coordinator treats the rank as having left, and requests that asked it
 *   end with COX_PEER_DEAD.
 * Errors: err may be NULL; each call clears it first.
 * Blocks: next until its deadline, a request, wake, stop, or a signal. reply only while it
 *   allocates memory for a reply that does not fit its slot. reply_error for 100 ms at most. join
 *   until the worker stops.
 * If the process dies: as with callbacks, the coordinator detects the death and never reads a
 *   half-written reply. Replies that waited for their turn are lost.
 */

/* A channel as a bit of the `takes` argument of start. */
#define COX_WORKER_TAKES(channel) (UINT32_C(1) << (channel))

struct cox_worker_request {
    enum cox_channel_id channel;
    /* COX_TYPE_OPAQUE, MODEL_INFER, MODEL_INFER_SECOND or MODEL_INIT (ExecuteType) */
    uint32_t type;
    /* number of the request on its channel; the reply functions take it */
    uint64_t sequence;
    /* An opaque request, else NULL. It lies in shared memory, which other ranks of a named group
     * could write: read each byte once, or copy. */
    const uint8_t *bytes;
    size_t size;
    /* An opaque reply of up to reply_capacity bytes may be written here, which saves a copy. For a
     * longer one, pass other memory to cox_worker_reply. */
    uint8_t *reply;
    size_t reply_capacity;
    /* A step, and room for its batch->row_count outputs; else NULL. */
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    /* An init, else NULL. */
    const struct cox_init_request *init;
    /* 0; for later fields */
    uint64_t reserved[8];
};

/*
 * Starts serving. takes: the channels that the caller takes from, COX_WORKER_TAKES joined by |.
 * Each other channel gets a thread of the library, which runs its callbacks.
 *
 * Returns
 *   0
 *   COX_BUSY: the worker was started already
 *   COX_INVALID: no such channel
 *   -errno
 */
COX_PUBLIC int cox_worker_start(struct cox_worker *worker, uint32_t takes, struct cox_error *err);

/*
 * Blocks until a request of the channel is lent, or until deadline_ns (CLOCK_MONOTONIC; 0: does not
 * block; COX_DEADLINE_NEVER). *ret_request is written only if it returns 0.
 *
 * A signal interrupts the wait if its handler runs on this thread. There are two exceptions:
 * SA_RESTART without a deadline, and a signal that arrives just before the wait. A host that must
 * react to signals calls wake in its handler, or uses short deadlines.
 *
 * Returns
 *   0: a request is lent
 *   COX_TIMEOUT: no request arrived before the deadline
 *   COX_EMPTY: cox_worker_wake was called
 *   -EINTR: this thread handled a signal while it waited; the caller may call again
 *   COX_CLOSED: the group has ended (finalize, stop of the coordinator), or cox_worker_stop was
 *     called; err says which; every later call returns the same
 *   COX_PEER_DEAD: the coordinator has died (only with COX_ORPHAN_RETURN; otherwise the process
 *     ends)
 *   COX_BUSY: another thread is inside next on this channel, or a step or an init is lent
 *   COX_STATE: the channel is not taken, see start
 *   COX_INVALID: no such channel
 *   COX_CORRUPT: the shared state is invalid: a new request is in the frame of a lent one
 *   -errno: the wait failed
 */
COX_PUBLIC int cox_worker_next(struct cox_worker *worker, enum cox_channel_id channel,
                               uint64_t deadline_ns, struct cox_worker_request *ret_request,
                               struct cox_error *err);

/*
 * Makes a copy of a lent opaque request that is out of line, request->size bytes of private memory,
 * which the caller may write to. It costs nothing until then: a page is copied when it is written.
 * What is to outlive the reply is completed first; a fork completes it for the child. request: as
 * next has written it; its bytes stay lent. *ret_bytes is the caller's, who frees it with
 * cox_worker_free_copy, on any thread, also after join.
 *
 * Returns
 *   0
 *   COX_EMPTY: the request is in its frame; memcpy copies it
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: the request is a step or an init
 *   COX_NO_SPACE: no memory for the mapping
 *   as cox_handle_open: its memory cannot be opened again
 */
COX_PUBLIC int cox_worker_copy_request(struct cox_worker *worker,
                                       const struct cox_worker_request *request, void **ret_bytes,
                                       struct cox_error *err);
/*
 * Copies the pages that were not written, so that the whole copy outlives the reply. Call it before
 * the reply. Any thread, while others read and write the copy; idempotent.
 *
 * Returns
 *   0
 *   COX_NO_SPACE: no memory for them
 */
COX_PUBLIC int cox_worker_complete_copy(void *bytes);
/* NULL: nothing. */
COX_PUBLIC void cox_worker_free_copy(void *bytes);

/*
 * Replies to a lent opaque request with the bytes of all parts, one after the other. They may be
 * the request's. They are copied, unless they are already in request.reply. A reply longer than
 * reply_capacity is sent out of line. On failure the request stays lent, and the caller may reply
 * to it again.
 *
 * Returns
 *   0
 *   COX_STATE: the request is not lent: it was replied to already, or was not taken
 *   COX_INVALID: the request is a step or an init
 *   COX_TOO_LARGE: the reply does not fit a slot, and the group has no large payloads
 *   COX_NO_SPACE: no memory for the reply
 *   -errno
 */
COX_PUBLIC int cox_worker_reply_parts(struct cox_worker *worker, uint64_t sequence,
                                      const struct iovec *parts, size_t part_count,
                                      struct cox_error *err);

/* The same for bytes that lie in one place. */
static inline int cox_worker_reply(struct cox_worker *worker, uint64_t sequence, const void *bytes,
                                   size_t size, struct cox_error *err)
{
    struct iovec part;
    part.iov_base = (void *)(uintptr_t)bytes;
    part.iov_len = size;
    return cox_worker_reply_parts(worker, sequence, &part, 1, err);
}

/*
 * Fails a lent request of any type, for all ranks. The coordinator gets the code, the text and the
 * rank. code: an enum cox_status or a negative errno. text NULL: the text of the code. A text that
 * does not fit is cut off. detail: for an opaque request, detail_size bytes beside the text that
 * only the application interprets: cox_rank_result.bytes of a rank that failed. They are left out
 * where they do not fit the slot, and for a step or an init.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: code is 0
 */
COX_PUBLIC int cox_worker_reply_error(struct cox_worker *worker, uint64_t sequence, int code,
                                      const char *text, const void *detail, size_t detail_size,
                                      struct cox_error *err);

/*
 * Replies to a lent step with two arrays of count == batch->row_count values: the sampled token of
 * each row (-1 where it does not emit) and its logprob. tokens NULL: the caller has filled
 * request.outputs. logprobs NULL: all are 0. The sequence table advances.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: the request is not a step, or count is not batch->row_count
 */
COX_PUBLIC int cox_worker_reply_step(struct cox_worker *worker, uint64_t sequence,
                                     const int32_t *tokens, const float *logprobs, uint32_t count,
                                     struct cox_error *err);

/* Sets the values that an init callback starts with: no blocks, positions or thinking ids. */
static inline void cox_init_result_init(struct cox_init_result *ret_result)
{
    memset(ret_result, 0, sizeof *ret_result);
    ret_result->start_thinking_id = ret_result->stop_thinking_id = -1;
}
/*
 * Replies to a lent init.
 *
 * Returns
 *   0
 *   COX_STATE: as cox_worker_reply_parts
 *   COX_INVALID: the request is not an init
 *   COX_TOO_LARGE: kv_cache_count is above COX_KV_CACHE_DESC_COUNT_MAX
 */
COX_PUBLIC int cox_worker_reply_init(struct cox_worker *worker, uint64_t sequence,
                                     const struct cox_init_result *result, struct cox_error *err);

/* Makes the present call of next on this channel, or else the following one, return COX_EMPTY. In a
 * legacy group a call that blocks already returns COX_EMPTY only when a request arrives, or
 * COX_TIMEOUT at its deadline: there the tokens are the events, so none is posted to wake it. A
 * later call returns that request. Async-signal-safe. */
COX_PUBLIC void cox_worker_wake(struct cox_worker *worker, enum cox_channel_id channel);

/*
 * Blocks until the worker stops, then joins the library's threads and leaves the group. Nothing is
 * lent any more. Call it once.
 *
 * Returns
 *   0: after finalize or stop
 *   COX_PEER_DEAD: the coordinator has died (only with COX_ORPHAN_RETURN)
 *   COX_STATE: the worker was not started, or is joined already
 *   -errno
 */
COX_PUBLIC int cox_worker_join(struct cox_worker *worker, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
