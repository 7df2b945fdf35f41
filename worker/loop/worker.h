/*
 * worker: the worker side of a group: attach as one rank, reply requests with callbacks, end with
 * the coordinator.
 *
 * Processes and threads: one struct cox_worker per process. new, run and free on one thread; stop
 *   from anywhere, signal handlers included; report_fault from any thread. new starts a thread that
 *   ends the process with its coordinator (COX_ORPHAN_EXIT), until free. run starts one thread
 *   per two-way channel, with all signals blocked but those of faults (execute, transfer: and
 *   SIGURG, which is the library's while run runs), and calls each callback on the thread of its
 *   channel:
 *     execute            init, execute, cleanup, opaque
 *     shared_sync_link   link, link_status, lora
 *     transfer           pull_kv
 *     recover_command    pause, pause_net, clear, reinit, start: so they overtake a stuck execute
 *   A callback blocks its own channel only, and callbacks of different channels run at the same
 *   time.
 * Ownership: requests and batches are lent to the callback; responses are filled by it, with memory
 *   from the arena it is given or memory that outlives the call.
 * Blocks: new waits for nothing; run blocks until the worker ends.
 * Failures: a callback returns 0, or anything else to reply with an error; its text reaches the
 *   coordinator with the rank. An error of any rank ends the request for all. A legacy coordinator
 *   drops every reply and report whose status is not 0: it gets the failure with status 0, in the
 *   words of its own protocol (err_msg of a step, the init status, the LoRA status UNSUPPORT_CMD, a
 *   code for each pull, command_result), and beside it the text as a fault report.
 * If the process dies: its slot and lines stay as they are; the coordinator sees the death and no
 *   half-written reply.
 * If the coordinator dies: the process ends, also before run, and in or after finalize (on_orphan).
 *   One that the coordinator started itself gets SIGKILL from the kernel, from its first
 *   instruction on, also when stopped. One inside wrappers (sh -c, timeout) ends itself, which a
 *   stopped process cannot do; so new asks the kernel for SIGKILL at the death of the wrapper, from
 *   then until free, where on_orphan is COX_ORPHAN_EXIT and the wrapper has one thread. What is
 *   left: stopped inside two wrappers that both stay, or inside one with threads, a worker ends
 *   when it is continued. Before new the library knows of nothing: a wrapped worker should attach
 *   first and load its weights in init.
 */
#ifndef COX_WORKER_WORKER_H
#define COX_WORKER_WORKER_H

#include "../../channel/base/base.h"
#include "../../proto/wire.h"
#include "../sequences/batch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_worker;
struct Coxswain__PDLinkRequest;
struct Coxswain__PDLinkStatusResponse;
struct Coxswain__PullKVRequest;
struct Coxswain__PullKVResponse;
struct Coxswain__LoraOperationRequest;
struct Coxswain__LoraOperationResponse;

/* What to do when the coordinator is gone. */
enum cox_orphan_action {
    COX_ORPHAN_EXIT = 0, /* _exit(70) at once, whatever callbacks or the host do */
    COX_ORPHAN_RETURN,   /* run returns COX_PEER_DEAD once running callbacks have returned; only a
                            process that the coordinator did not start itself gets that far */
};

/* Whichever rank is free. */
#define COX_WORKER_RANK_ANY UINT32_MAX

struct cox_worker_options {
    /* set by COX_WORKER_OPTIONS_INIT (base.h) */
    size_t size;
    /* "/NAME": the group */
    char prefix[160];
    /* 0 to rank_count - 1 */
    uint32_t rank;
    /* checked against the group */
    uint32_t rank_count;
    /* passed on, not used by the library */
    int32_t device;
    /* which life of this rank; 1 is the first */
    uint32_t generation;
    /* Path of the group's control socket, or, without a slash, the group's name: new logs on there,
     * and is told the memory, and what of rank, rank_count and generation is left open: rank
     * COX_WORKER_RANK_ANY, the others 0. prefix is then for messages only. Empty: by names, or by
     * fds. */
    char control_socket[4096];
    /* Path of the group's control socket, where fds are left and fetched that the kernel does not
     * let one process take out of another (Yama, seccomp): what is too large for its frame or slot.
     * Empty: as control socket. */
    char fd_store[4096];
    /* with fd_count > 0: the group's memory as open fds (channel/shm/inherit.h), */
    int fd_first;
    /* which new takes; a rank that is started again has no names to go by */
    uint32_t fd_count;
    /* An eventfd to which the rank writes after its replies, when the host of the coordinator asks
     * for that (cox_executor_fd); new takes it. 0: none, or it comes over the control socket. */
    int notify_fd;
    /* coordinator; checked against the group; a legacy one is known by this alone */
    int32_t parent_pid;
    enum cox_orphan_action on_orphan;
    /* A callback (execute, opaque, pull_kv) that stays inside after a pause (cox_worker_pause) and
     * a signal is left by a jump out of a signal handler, wherever it is: what it allocated leaks,
     * what it had locked stays locked, also inside the C library (malloc, stdio; out of scanf glibc
     * cannot be left at all, the process ends), no destructor runs, threads it has started go on.
     * Only for callbacks that can stand it, which run on the stack they were called on, and which
     * put cox_worker_disable_leave around what must not be abandoned. false: such a rank stays
     * stuck until it is replaced. */
    bool leave_stuck;
    /* cap on an unpacked request; 0: 256 MiB, and of one that did not fit its frame twice its size
     * beside */
    size_t request_size_max;
    /* live sequences; 0: 4096 */
    uint32_t sequence_count_max;
    /* tokens of one sequence; 0: 131072 */
    uint32_t token_count_max;
    struct cox_log log;
};
#define COX_WORKER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_worker_options)

/* Fills options from the environment that the coordinator sets (COXSWAIN_PREFIX, _RANK,
 * _WORLD_SIZE, _DEVICE, _PARENT_PID, _GENERATION, _FDS and _NOTIFY_FD, which are removed from it,
 * and _DOOR, the fd store, which is the control socket as well where _ATTACH is sealed) and then
 * from the flags --socket, --local_rank, --local_world_size, --npu_num_per_dp, --npu_device_id,
 * --parent_pid, --shm_name_prefix (value in the next argument or after '='). When --npu_num_per_dp
 * is smaller than the world size, the node has several groups: rank is taken modulo it.
 * --global_rank and --global_world_size are accepted and not used. Flags it knows are removed from
 * argv and *argc; all others stay, in order. Returns
 *   0
 *   COX_INVALID: err names what is missing or makes no sense; options and argv are as before
 */
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

/* How the keys and values of a rank lie in the blocks of its KV cache. Ranks of two groups can take
 * blocks from each other where all of it is the same. model_digest is of the whole model, whatever
 * part of it is this rank's: ranks of one group that tell different ones cannot compute together,
 * and their init fails (COX_DIVERGED). */
struct cox_kv_layout {
    uint32_t rank, rank_count;
    uint32_t layer_count;
    /* of this rank */
    uint32_t kv_head_first, kv_head_count;
    uint32_t head_dim;
    /* positions per block */
    uint32_t block_size;
    /* 4: F32 */
    uint32_t element_bytes;
    uint64_t block_bytes;
    /* of configuration and weights; 0: it does not say */
    uint64_t model_digest;
};

/* What other groups need to read the KV cache of a rank. */
struct cox_kv_pool {
    /* 0: there is none for others */
    uint32_t block_count;
    /* struct cox_handle (channel/handle/handle.h) of KV blocks (channel/memory/pool/kv_blocks.h) */
    uint8_t handle[64];
    struct cox_kv_layout layout;
};

struct Coxswain__KvPool;
/* Reads what a link request carries of the other group's rank (executor.proto, KvPool).
 * Returns
 *   0
 *   COX_CORRUPT: a field is missing or impossible, err says which
 */
COX_PUBLIC int cox_kv_pool_read(const struct Coxswain__KvPool *message,
                                struct cox_kv_pool *ret_pool, struct cox_error *err);
/* Compares two layouts: blocks can be copied between ranks whose layouts are equal.
 * Returns
 *   0
 *   COX_INVALID: err names every field that differs, with both values
 */
COX_PUBLIC int cox_kv_layout_check(const struct cox_kv_layout *theirs,
                                   const struct cox_kv_layout *ours, struct cox_error *err);

/* What a rank says of itself at init. A legacy coordinator reads the device blocks from
 * npu_block_count or from kv_caches[0].block_count, by its release: of the two, one that is 0 is
 * sent as the other, and a rank without kv_caches describes one of npu_block_count blocks, of no
 * block size. */
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

/* Looks a key up in the init configuration; NULL when absent. */
struct cox_init_request;
COX_PUBLIC const char *cox_init_request_get(const struct cox_init_request *request,
                                            const char *key);

/* Number of the init request on its channel, as batches have theirs. */
COX_PUBLIC uint64_t cox_init_request_sequence(const struct cox_init_request *request);

/* True when this init is said again, word for word, because a rank was replaced: a rank that has
 * replied to it before may keep what it loaded and reply the same; its rank group is formed anew in
 * any case. */
COX_PUBLIC bool cox_init_request_replayed(const struct cox_init_request *request);

/* options starts as COX_GROUP_OPTIONS_INIT (asserted). Sets what the ranks are to form their group
 * with in this init: fd, fd_offset, rank, rank_count and life; the rest stays the caller's. Each
 * init has memory of its own, all zero, so that nobody who is still in the group before writes
 * into this one. fd is -1 where there is no memory for a group (legacy); it is lent until
 * cox_worker_free. In a sealed group it sets `sealed` in their place, lent until the callback
 * returns, and the group of the init before has to be left before one is joined in this one. */
struct cox_group_options;
COX_PUBLIC void cox_init_request_group(const struct cox_init_request *request,
                                       struct cox_group_options *options);

/* The weights that the coordinator shares, as the init names them.
 * Returns
 *   0
 *   COX_EMPTY: none; ranks load their weights themselves
 *   COX_CORRUPT
 */
COX_PUBLIC int cox_init_request_weights(const struct cox_init_request *request,
                                        struct cox_weights_candidate *ret_candidate,
                                        struct cox_error *err);
/* Path of the control socket, where cox_handle_open can fetch handles that cannot be opened
 * otherwise. False: the group has none, or the path does not fit buffer. */
COX_PUBLIC bool cox_init_request_socket(const struct cox_init_request *request, char *buffer,
                                        size_t size);

/* True once nobody waits for this init any more (timeout, another rank's failure), and once the
 * worker is to pause (cox_worker_pause): a long callback may ask and return COX_ABORTED early.
 * Lock-free, from the callback's thread, until it returns. */
COX_PUBLIC bool cox_init_request_aborted(const struct cox_init_request *request);

/* True once nobody waits for the reply to the pull_kv that is being called (timeout, another
 * rank's failure), and once the worker is to pause: it should come out then. Lock-free, from that
 * callback's thread. */
COX_PUBLIC bool cox_worker_pull_aborted(const struct cox_worker *worker);

/* Any callback may be NULL: the request is then replied to with COX_UNSUPPORTED (no-reply requests
 * are dropped; a legacy coordinator gets a fault report for a link). Only an init that brings no
 * configuration succeeds without a callback, and tells of nothing: no blocks, no positions, no KV
 * cache. */
struct cox_worker_callbacks {
    /* set by COX_WORKER_CALLBACKS_INIT (base.h) */
    size_t size;
    int (*init)(void *context, const struct cox_init_request *request,
                struct cox_init_result *result, struct cox_error *err);
    /* outputs: batch->row_count of them. The sequence table moves only when this returns 0. */
    int (*execute)(void *context, const struct cox_batch *batch, struct cox_batch_output *outputs,
                   struct cox_error *err);
    /* Sequences ended without a further step: forget what is kept for these slots. No reply. */
    void (*cleanup)(void *context, const uint32_t *slots, uint32_t count);
    /* Bytes only the two ends understand. Bytes are lent in place, in shared memory that other
     * ranks of a named group could write: read once, or copy. What did not fit its frame is in
     * memory that the coordinator alone can write, the same for every rank. A longer reply than
     * reply_capacity: cox_worker_reply_grow. */
    int (*opaque)(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                  size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err);
    /* Starts linking, unlinking or a switch of role; the state is told by link_status. No reply.
     * It also tells of pulls to end (cancelled_pulls), while pull_kv runs. How coxswain-worker does
     * these four is in links.h, pulls.h and transfer.h; a worker of its own has its KV cache in KV
     * blocks (channel/memory/pool/kv_blocks.h: cox_kv_blocks_new; cox_exporter_export of their fd)
     * and tells of them in kv_pool at init; link attaches to those of another group's ranks
     * (cox_handle_open, cox_kv_view_attach); pull_kv copies a block under the generation that the
     * request names (cox_kv_view_copy); before a step writes a block that belonged to another
     * sequence it calls cox_kv_blocks_take, and after it cox_kv_blocks_give. */
    void (*link)(void *context, const struct Coxswain__PDLinkRequest *request);
    int (*link_status)(void *context, struct cox_arena *arena,
                       struct Coxswain__PDLinkStatusResponse *response, struct cox_error *err);
    /* lora_op_status is UNSUPPORT_CMD unless the callback sets another; text goes with a failure.
     */
    int (*lora)(void *context, const struct Coxswain__LoraOperationRequest *request,
                struct cox_arena *arena, struct Coxswain__LoraOperationResponse *response,
                struct cox_error *err);
    /* A result per request, each with its code: one that fails is no failure of the others. A long
     * one asks cox_worker_pull_aborted. */
    int (*pull_kv)(void *context, const struct Coxswain__PullKVRequest *request,
                   struct cox_arena *arena, struct Coxswain__PullKVResponse *response,
                   struct cox_error *err);
    /* The recovery commands. A result other than 0 is told as command_result with the text. They
     * may be repeated, and be called on a rank that an earlier one did not reach (one that was
     * replaced meanwhile). After a reinit that returned 0 the rank knows no sequence: a step that
     * builds on an earlier one is replied to with COX_STALE. */
    int (*pause)(void *context, struct cox_error *err);
    int (*pause_net)(void *context, struct cox_error *err);
    int (*clear)(void *context, struct cox_error *err);
    int (*reinit)(void *context, struct cox_error *err);
    int (*start)(void *context, struct cox_error *err);
    /* The coordinator said goodbye; once, after it run returns. Called on the thread of run. */
    void (*finalize)(void *context);
};
#define COX_WORKER_CALLBACKS_INIT COX_OPTIONS_INIT(struct cox_worker_callbacks)

/* Attaches to the group as options->rank: one of ours, or, where parent_pid is given and there is
 * no control region, one of a legacy coordinator. options and callbacks are copied; context is
 * borrowed until free.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such group
 *   COX_DENIED: an object with another owner, mode or type
 *   COX_VERSION
 *   COX_CORRUPT
 *   COX_INVALID: the options; rank or world size do not fit the group
 *   COX_PEER_DEAD: its coordinator or its wrapper is gone
 *   COX_TAKEN: another process is this rank, err says which, and it stays so until the coordinator
 *     starts the rank again (a legacy coordinator has no place to say so)
 *   -errno
 */
COX_PUBLIC int cox_worker_new(const struct cox_worker_options *options,
                              const struct cox_worker_callbacks *callbacks, void *context,
                              struct cox_worker **ret_worker, struct cox_error *err);
/* NULL-safe, returns NULL. Threads inside report_fault come out first, with COX_CLOSED; none may
 * come later. */
/* In the child of a fork it only lets go of memory: the rank is the parent's. */
COX_PUBLIC struct cox_worker *cox_worker_free(struct cox_worker *worker);

/* Which rank of how many this is; once new has returned. */
COX_PUBLIC uint32_t cox_worker_rank(const struct cox_worker *worker);
#ifdef COX_INTERNAL
uint32_t cox_worker_rank_count(const struct cox_worker *worker);
#endif

/* Serves until the coordinator finalizes, stop is called, or the coordinator dies. On return the
 * rank has left the group: requests to it fail, also while the process lives on.
 * Returns
 *   0: after finalize or stop
 *   COX_PEER_DEAD: the coordinator is gone (only with COX_ORPHAN_RETURN)
 *   COX_CORRUPT: shared memory makes no sense any more
 *   -errno
 */
COX_PUBLIC int cox_worker_run(struct cox_worker *worker, struct cox_error *err);

/* Asks run to return once running callbacks have. Async-signal-safe, idempotent. */
COX_PUBLIC void cox_worker_stop(struct cox_worker *worker);

/* In an opaque callback, on its thread: memory for a reply of up to size bytes, instead of what
 * the callback was given; it is to be there whole when the callback returns, and nothing is copied
 * to it from before. Again: another one instead. Lent until the callback returns.
 * Returns
 *   0
 *   COX_STATE: no such callback
 *   COX_NO_SPACE
 *   COX_TOO_LARGE: legacy coordinators take no more than fits a slot
 *   -errno
 */
COX_PUBLIC int cox_worker_reply_grow(struct cox_worker *worker, size_t size, uint8_t **ret_reply,
                                     struct cox_error *err);

/* In an execute callback, on its thread: of this step so many nanoseconds went into operations with
 * other ranks, wait_ns of them waiting for those; told with the reply. Again: instead. Not called:
 * there is no group. */
COX_PUBLIC void cox_worker_tell_group_time(struct cox_worker *worker, uint64_t group_ns,
                                           uint64_t wait_ns);

/* Between the two calls options.leave_stuck does not make the calling thread leave its callback; a
 * leave that became due meanwhile happens at the next SIGURG. A callback puts them around what must
 * not be abandoned halfway: a lock that is held, memory that is allocated, a file that is written.
 * The callback's thread only; no effect on others. They do not nest. */
COX_PUBLIC void cox_worker_disable_leave(void);
COX_PUBLIC void cox_worker_enable_leave(void);

/* ---- for the recovery callbacks ---- */

/* No step, pull or opaque request is begun from now on until resume: they are replied to with
 * COX_ABORTED at once; init and cleanup are begun as ever. The callback that runs on the execute
 * channel, and that on the transfer channel, is told to come out (cox_batch_aborted,
 * cox_init_request_aborted) and waited for. After grace_ms (0: 500; a day at most) its thread gets
 * SIGURG every 50 ms, by which a system call that blocks ends with EINTR; after as long again, with
 * options.leave_stuck, it is left by a jump, and the request is replied to with COX_ABORTED. An
 * init or a cleanup is told and gets signals, but is never left: what it was allocating or letting
 * go of would be known to nobody. So it takes 2 grace_ms, and 3 at most: a second for a rank that
 * is stuck, with the default; longer if this process is held up. Idempotent: again, what is inside
 * by then is told, and waited for, anew. From a recovery callback, or any thread but those of the
 * two channels (asserted). Returns
 *   0: what was inside has come out
 *   COX_TIMEOUT: a callback still is, err says which, in what request and for how long; it
 *     stays paused
 */
COX_PUBLIC int cox_worker_pause(struct cox_worker *worker, uint64_t grace_ms,
                                struct cox_error *err);
/* Requests are begun again. Idempotent. An init that is not replayed makes the group NORMAL, where
 * no start is legal: its callback resumes. */
COX_PUBLIC void cox_worker_resume(struct cox_worker *worker);
#ifdef COX_INTERNAL
bool cox_worker_paused(const struct cox_worker *worker);
#endif
/* A callback of the execute or of the transfer channel is inside. A thread that has stored what
 * such a callback looks at first, and then finds none here, will not be missed by the next one
 * (both seq_cst). */
COX_PUBLIC bool cox_worker_busy(const struct cox_worker *worker);

/* ---- for the lora callback ---- */

/* Before an adapter is taken away: steps that announce a sequence with it are refused (COX_BUSY)
 * from now on, until admit, and those that live are waited for: until the request's deadline, or 5
 * s where it has none, until the coordinator has given it up, or the worker leaves. A step's rows
 * with this lora_id are rows of sequences that live, so on success none is looking at the adapter,
 * and none will. Inside the lora callback only.
 * Returns
 *   0
 *   COX_BUSY: some live still, err says how many, and they are admitted again
 *   -ENOMEM
 */
COX_PUBLIC int cox_worker_lora_retire(struct cox_worker *worker, const char *lora_id,
                                      struct cox_error *err);
COX_PUBLIC void cox_worker_lora_admit(struct cox_worker *worker, const char *lora_id);

/* Tells the coordinator of a fault outside any reply, on the error channel; text is cut to what
 * fits. Waits for the slot until deadline_ns; when that has passed, it is taken if it is free.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_CLOSED: the worker leaves
 *   -errno
 */
COX_PUBLIC int cox_worker_report_fault(struct cox_worker *worker, const char *text,
                                       uint64_t deadline_ns);

#ifdef __cplusplus
}
#endif

#endif
