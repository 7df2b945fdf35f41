/*
 * native: the C half of the Python package. Calls that block release the GIL, because cffi does
 * that around each; only coxpy_interrupted takes it. What the library's own threads report (lines,
 * deaths, recovery requests) waits here in C until a thread of Python fetches it.
 *
 * Threads: any, except where a function says otherwise.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COXPY_NATIVE_H
#define COXPY_NATIVE_H

#include <coxswain/base.h>
#include <coxswain/executor.h>
#include <coxswain/group.h>
#include <coxswain/handle.h>
#include <coxswain/kv.h>
#include <coxswain/memory.h>
#include <coxswain/requests.h>
#include <coxswain/server.h>
#include <coxswain/worker.h>

#include <stdlib.h>

/* ---- coordinator.c: a group ---- */

struct coxpy_group;

enum coxpy_event_kind {
    COXPY_EVENT_LINE = 1,   /* a rank wrote a line to its standard output */
    COXPY_EVENT_ERROR_LINE, /* or to its standard error */
    COXPY_EVENT_LOG,        /* the library logs; level as in syslog(3) */
    COXPY_EVENT_FAULT,      /* a rank reports a fault; rank -1: unknown */
    COXPY_EVENT_DEATH,
    COXPY_EVENT_WAITING, /* external ranks can connect; text: the path of the control socket */
    COXPY_EVENT_STOP,    /* `coxswain stop` was received; text: from which process */
    COXPY_EVENT_DROPPED, /* the host does not fetch: level events were dropped */
};

struct coxpy_event {
    struct coxpy_event *next;
    int kind;
    int32_t rank;
    int level;
    char text[];
};

/* The options are copied, what they point to is borrowed until start has returned. Returns as
 * cox_server_new. */
int coxpy_group_new(const struct cox_executor_options *executor,
                    const struct cox_server_options *server, struct coxpy_group **ret_group,
                    struct cox_error *err);
/* Begins to start, on a thread of its own. Once. Returns 0 or -errno. */
int coxpy_group_start(struct coxpy_group *group, struct cox_error *err);
/* Waits until the start is over, at most until deadline_ns; false: it is not. *ret_result: as
 * cox_server_start. */
bool coxpy_group_await_start(struct coxpy_group *group, uint64_t deadline_ns, int *ret_result,
                             struct cox_error *err);
/* Lent while no thread is in stop. */
struct cox_server *coxpy_group_server(struct coxpy_group *group);
/* Blocks while a rank is dead or being replaced. Any thread; one at a time is inside, the others get
 * COX_TIMEOUT at their deadline. Returns as cox_server_await_recovery. */
int coxpy_group_await_recovery(struct coxpy_group *group, uint64_t deadline_ns,
                               struct cox_error *err);
/* Cancels a start that is not over, ends the workers and frees the executor: no thread may be inside
 * it. Ends next_event. Idempotent, on one thread at a time. */
void coxpy_group_stop(struct coxpy_group *group);
/* Stops if needed, waits until no thread is inside next_event, and frees. NULL-safe, returns NULL. */
struct coxpy_group *coxpy_group_free(struct coxpy_group *group);
/* Blocks until there is an event, which becomes the caller's. NULL: stopped, and all are fetched. */
struct coxpy_event *coxpy_group_next_event(struct coxpy_group *group);
void coxpy_event_free(struct coxpy_event *event);

/* cox_executor_submit_opaque with plain arguments. key becomes the completion's request_context. */
int coxpy_submit(struct cox_executor *executor, const void *bytes, size_t size, int gather,
                 const struct cox_rank_set *asked, uint64_t deadline_ns, uintptr_t key,
                 uint64_t *ret_sequence, struct cox_error *err);

/* As coxpy_submit, by cox_executor_submit_parts. */
int coxpy_submit_parts(struct cox_executor *executor, const struct iovec *parts, size_t part_count,
                       int gather, const struct cox_rank_set *asked, uint64_t deadline_ns,
                       uintptr_t key, uint64_t *ret_sequence, struct cox_error *err);

/* ---- batch.c: a step as columns ---- */

enum coxpy_column {
    COXPY_IDS,          /* int64 per row: the sequence */
    COXPY_SEEDS,        /* uint64 per row */
    COXPY_SLOTS,        /* uint32 per row */
    COXPY_STARTS,       /* int32, rows + 1: row i computes tokens [starts[i], starts[i + 1]) */
    COXPY_TOKENS,       /* int32 per token to compute */
    COXPY_POSITIONS,    /* int32 per token to compute */
    COXPY_TEMPERATURES, /* float per row */
    COXPY_TOP_PS,       /* float per row */
    COXPY_TOP_KS,       /* int32 per row */
    COXPY_PENALTIES,    /* float per row */
    COXPY_EMITS,        /* bool per row */
    COXPY_FINISHED,     /* uint32: slots */
    COXPY_SWAP_IN,      /* int32 pairs: from, to */
    COXPY_SWAP_OUT,
    COXPY_COPY,
    COXPY_TABLES, /* int32, rows x width, -1 behind the last block; one per block table */
    COXPY_COLUMN_COUNT = COXPY_TABLES + COX_BLOCK_TABLE_COUNT_MAX,
};

/* Where each column lies, in bytes from the start of the memory. */
struct coxpy_columns {
    size_t size;
    size_t offsets[COXPY_COLUMN_COUNT];
    uint32_t row_count;
    uint32_t token_count;
    uint32_t table_widths[COX_BLOCK_TABLE_COUNT_MAX];
};
/* Says where the columns lie, and fills them in if the memory, aligned to 8, has room for them. Returns
 * whether it has: otherwise ret_columns->size is what they need. */
bool coxpy_batch_fill(const struct cox_batch *batch, uint8_t *memory, size_t size,
                      struct coxpy_columns *ret_columns);

/* ---- worker.c: a rank ---- */

/* A request of the link, transfer or recovery channel, which a thread of the library waits with. */
enum coxpy_order_kind {
    COXPY_LINK = 1,
    COXPY_LINK_STATUS,
    COXPY_LORA,
    COXPY_PULL,
    COXPY_PAUSE,
    COXPY_PAUSE_NET,
    COXPY_CLEAR,
    COXPY_REINIT,
    COXPY_START,
};
struct coxpy_order {
    int kind;
    /* by kind; lent until the order is done */
    const struct Coxswain__LoraOperationRequest *lora;
    const struct Coxswain__PDLinkRequest *link;
    const struct Coxswain__PullKVRequest *pull;
    struct Coxswain__LoraOperationResponse *lora_response;
    struct Coxswain__PDLinkStatusResponse *link_response;
    struct Coxswain__PullKVResponse *pull_response;
    struct cox_arena *arena;
    struct cox_error *err;
    int result;
    bool taken, done;
};

/* ---- frames.c: the frames of Python, for cox_worker_options.write_frames ---- */

/* A signal that nothing handles; 0: there is none. */
int coxpy_frames_signal(void);
/* Takes the handler that faulthandler has registered for it, which writes to fd, and leaves the
 * signal as it was. Returns false: it has registered none. On the thread of coxpy_frames_signal. */
bool coxpy_frames_take(int number, int fd);
/* Before the interpreter ends: nothing is written any more. */
void coxpy_frames_end(void);
/* As write_frames. */
void coxpy_frames_write(void *context, int fd);

/* ---- watch.c: deaths of processes of the host, told by a thread that never needs the GIL ----
 *
 * The thread waits for the processes and for what they write. It passes that on, and writes one line
 * for a death, to out_fd. So the line is there at once, whatever holds the GIL. The host then fetches
 * the death with coxpy_watch_next.
 *
 * Blocks: the thread waits for room in out_fd for a second at most; what finds none is dropped, and
 * then it waits no more until there is room. Calls on a child may wait for that, too.
 * A child belongs to the host, which unrefs it, and as long as it is watched also to the thread. */
struct coxpy_watch;
struct coxpy_child;

/* out_fd is borrowed. Returns 0 or -errno. */
int coxpy_watch_new(int out_fd, struct coxpy_watch **ret_watch);
/* Ends the thread: no other thread may be inside. NULL-safe, returns NULL. */
struct coxpy_watch *coxpy_watch_free(struct coxpy_watch *watch);
/* Watches a child of this process. name: in texts, "rank 1". error_fd: the read end of a pipe that does
 * not block, which the child owns from now on; -1: none. Returns 0 or -errno; error_fd is the caller's
 * then. */
int coxpy_watch_add(struct coxpy_watch *watch, const char *name, int64_t pid, int error_fd,
                    struct coxpy_child **ret_child);
/* The thread forgets a child. Nothing is told of it any more. */
void coxpy_watch_forget(struct coxpy_watch *watch, struct coxpy_child *child);
/* No death is news any more. */
void coxpy_watch_quiet(struct coxpy_watch *watch);
/* Has coxpy_watch_next return. */
void coxpy_watch_wake(struct coxpy_watch *watch);
/* Blocks until a child has ended, and returns it once, lent; NULL: a child has written something,
 * coxpy_watch_wake was called, or the deadline has passed. One thread. */
const struct coxpy_child *coxpy_watch_next(struct coxpy_watch *watch, uint64_t deadline_ns);
/* Its death is no news. */
void coxpy_child_expect(struct coxpy_child *child);
/* SIGKILL; nothing if it has ended. */
void coxpy_child_kill(struct coxpy_child *child);
/* Whether it has ended, and how: by a signal, or else with an exit code. -1, -1: another wait has
 * reaped it first. It is not reaped here. */
bool coxpy_child_end(struct coxpy_child *child, int *ret_signal, int *ret_code);
/* How it has ended, in words. details: with its pid and last lines. Returns the length. */
size_t coxpy_child_text(struct coxpy_child *child, bool details, char *text, size_t size);
void coxpy_child_unref(struct coxpy_child *child);

/* ---- device_memory.c: memory of CUDA devices, of memory/domain ---- */

/* library: the driver, NULL: that of the machine. Returns as cox_domains_add_cuda. */
int coxpy_devices_new(const char *library, struct cox_domains **ret_devices, struct cox_error *err);
/* Return COX_INVALID: no such device; and as the functions of a domain (domain.h). devices stays open
 * until the memory is freed. attach: for reading. */
int coxpy_device_memory_create(const struct cox_domains *devices, uint32_t device, uint64_t size,
                               struct cox_domain_memory **ret_memory, struct cox_error *err);
int coxpy_device_memory_attach(const struct cox_domains *devices, uint32_t device, int fd,
                               uint64_t size, struct cox_domain_memory **ret_memory,
                               struct cox_error *err);
void coxpy_device_memory_free(struct cox_domain_memory *memory);

struct coxpy_worker;

/* The orders that Python serves, joined by |. */
#define COXPY_SERVES_LORA 1u
#define COXPY_SERVES_LINK 2u
#define COXPY_SERVES_PULL 4u
#define COXPY_SERVES_RECOVER 8u

/* Attaches. Orders that are not served are refused by the library. Returns as cox_worker_new. */
int coxpy_worker_new(const struct cox_worker_options *options, uint32_t served,
                     struct coxpy_worker **ret_worker, struct cox_error *err);
struct cox_worker *coxpy_worker_of(struct coxpy_worker *worker);
/* Callbacks that wait for Python, and threads that wait for callbacks, return. */
void coxpy_worker_end(struct coxpy_worker *worker);
struct coxpy_worker *coxpy_worker_free(struct coxpy_worker *worker);
/* Blocks until a request of this channel waits for Python. NULL: the worker has ended. */
struct coxpy_order *coxpy_order_next(struct coxpy_worker *worker, int channel);
/* The message in protobuf's encoding: returns its size; writes it where buffer is not NULL. */
size_t coxpy_order_message(const struct coxpy_order *order, uint8_t *buffer);
/* Parts of the reply, before done. The state of a link: 0 failed (code: PDErrorCode), 1 linked, 2
 * running, 3 waiting. The result of a pull: status 0, or why it failed, with a text. Return 0 or
 * -ENOMEM. */
int coxpy_order_link_state(struct coxpy_order *order, const char *cluster_id, int state, int code,
                           const char *text);
int coxpy_order_pull_result(struct coxpy_order *order, const char *request_id,
                            uint64_t copied_bytes, uint64_t copy_ns, int status, const char *text);
/* The callback returns result; text goes with one that is not 0. lora: LoraOperationStatus. */
void coxpy_order_done(struct coxpy_worker *worker, struct coxpy_order *order, int result, int lora,
                      const char *text);

/* Slots of sequences that have ended without a step, taken from the list; at most count_max. */
uint32_t coxpy_worker_cleanups(struct coxpy_worker *worker, uint32_t *slots, uint32_t count_max);

/* ---- ranks.c: a rank group ---- */

/* cox_group_options.cancelled: runs Python's signal handlers every 50 ms of a wait, if the thread
 * that waits is the main thread. raised: a Python list, which gets the exception of a handler that
 * raises; then the wait ends. The thread is one of Python's, which released the GIL for this call.
 */
bool coxpy_interrupted(void *raised);

#endif
