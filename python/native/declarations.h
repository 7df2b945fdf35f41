/* What the package uses of the library, for cffi (build.py). "..." is filled in by the compiler, so
 * that no layout is repeated here. The contracts stand in the installed headers. */

typedef int... pid_t;

#define COX_RANK_COUNT_MAX ...
#define COX_CHANNEL_EXECUTE ...
#define COX_CHANNEL_LINK ...
#define COX_CHANNEL_TRANSFER ...
#define COX_CHANNEL_RECOVER ...
#define COX_TWO_WAY_COUNT ...
#define COX_TYPE_OPAQUE ...

/* ---- base ---- */

#define COX_TIMEOUT ...
#define COX_PEER_DEAD ...
#define COX_STALE ...
#define COX_CLOSED ...
#define COX_FULL ...
#define COX_LATE ...
#define COX_VERSION ...
#define COX_CORRUPT ...
#define COX_DENIED ...
#define COX_TOO_LARGE ...
#define COX_NO_SPACE ...
#define COX_TAKEN ...
#define COX_ABORTED ...
#define COX_REJECTED ...
#define COX_DEADLOCK ...
#define COX_BUSY ...
#define COX_INVALID ...
#define COX_NOT_FOUND ...
#define COX_EXEC_FAILED ...
#define COX_DIVERGED ...
#define COX_STATE ...
#define COX_EMPTY ...
#define COX_UNSUPPORTED ...

struct iovec {
    void *iov_base;
    size_t iov_len;
    ...;
};

struct cox_error {
    int code;
    char text[...];
    ...;
};
struct cox_rank_set {
    uint64_t words[...];
    ...;
};
const char *cox_version(void);
const char *cox_status_text(int status);
uint64_t cox_now_ns(void);

/* ---- coordinator ---- */

#define COX_ATTACH_NAMED ...
#define COX_ATTACH_SEALED ...
#define COX_SPIN_AUTO ...
#define COX_SPIN_OFF ...
#define COX_ON_DEATH_FAIL ...
#define COX_ON_DEATH_WAIT ...
#define COX_ON_DEATH_RESTART ...
#define COX_ON_DEATH_RESTART_ALL ...
#define COX_GATHER_RANK0 ...
#define COX_GATHER_ALL ...
#define COX_GATHER_FIRST_ERROR ...
#define COX_OUTCOME_NOT_ASKED ...
#define COX_OUTCOME_OK ...
#define COX_OUTCOME_ERROR ...
#define COX_OUTCOME_DEAD ...
#define COX_OUTCOME_LATE ...

struct cox_cluster_access {
    const char *url;
    const char *ca;
    const char *certificate;
    const char *key;
    bool insecure_loopback;
    ...;
};
struct cox_node_times {
    uint64_t suspect_ms;
    uint64_t dead_ms;
    uint64_t lead_grace_ms;
    ...;
};
struct cox_node_fact {
    const char *name;
    const char *value;
    ...;
};
struct cox_executor_nodes {
    size_t size;
    const char *nodes;
    struct cox_cluster_access access;
    const char *listen;
    struct cox_node_times times;
    const struct cox_node_fact *facts;
    size_t fact_count;
    int attach;
    bool fresh;
    ...;
};

struct cox_node_place;
int cox_nodes_parse(const char *nodes, struct cox_node_place *ret_places, uint32_t *ret_node_count,
                    uint32_t *ret_rank_count, struct cox_error *err);

struct cox_executor;
struct cox_executor_options {
    size_t size;
    const char *name;
    uint32_t rank_count;
    const char *const *command;
    bool no_flags;
    const char *const *environment;
    const char *working_directory;
    const int32_t *devices;
    const int *fork_server_fds;
    uint32_t depth;
    int spin;
    int attach;
    bool external_workers;
    bool no_socket;
    bool collect;
    const char *crash_dir;
    const struct cox_executor_nodes *nodes;
    uint64_t request_size[];
    uint64_t response_size[];
    const char *runtime_dir;
    bool need_socket;
    uint64_t start_timeout_ms;
    uint64_t finalize_ms;
    uint64_t term_ms;
    ...;
};
struct cox_restart_policy {
    int on_death;
    uint32_t restart_max;
    uint64_t window_ms;
    uint64_t backoff_min_ms;
    uint64_t backoff_max_ms;
    ...;
};
struct cox_server_options {
    size_t size;
    struct cox_restart_policy restart;
    const char *prompts_refusal;
    ...;
};

struct cox_rank_result {
    int outcome;
    int32_t code;
    const char *text;
    pid_t pid;
    int signal;
    int exit_status;
    bool taken;
    uint64_t silent_ns;
    const void *bytes;
    size_t size;
    ...;
};
struct cox_completion {
    uint64_t sequence;
    int status;
    const char *text;
    uint32_t rank_count;
    const struct cox_rank_result *ranks;
    const struct cox_rank_result *payload;
    void *request_context;
    ...;
};

#define COX_LIVENESS_ALIVE ...
#define COX_LIVENESS_DEAD ...
#define COX_LIVENESS_LEFT ...
#define COX_LIVENESS_ABSENT ...

struct cox_rank_channel_status {
    bool known;
    uint32_t state;
    uint64_t sequence;
    uint64_t age_ns;
    ...;
};
struct cox_rank_status {
    pid_t pid;
    pid_t serving_pid;
    uint32_t incarnation;
    int liveness;
    bool stopped;
    uint64_t cpu_ns;
    uint32_t deaths;
    uint32_t restarts;
    int32_t signal;
    int32_t exit_status;
    char death[...];
    char last_lines[...];
    char last_error[...];
    uint64_t last_error_age_ns;
    struct cox_rank_channel_status channels[...];
    char trouble[...];
    ...;
};
struct cox_channel_stats {
    uint64_t submitted;
    uint64_t completed;
    uint64_t failed;
    uint64_t timeouts;
    uint64_t divergences;
    uint64_t late_replies;
    uint64_t rewakes;
    uint64_t wakeups;
    uint64_t spins;
    uint64_t request_bytes;
    uint64_t reply_bytes;
    ...;
};
struct cox_channel_status_of_executor {
    uint64_t published;
    uint64_t ended;
    uint32_t in_flight;
    struct cox_rank_set late;
    struct cox_channel_stats stats;
};
struct cox_executor_status {
    const char *name;
    const char *socket;
    const char *attach;
    const char *engine_state;
    uint32_t rank_count;
    uint32_t depth;
    uint32_t instance;
    uint64_t uptime_ns;
    uint64_t cpu_ns;
    uint32_t spin_ns;
    bool legacy;
    bool stopping;
    uint64_t deaths;
    uint64_t restarts;
    ...;
};
uint32_t cox_executor_stop(struct cox_executor *executor);
int cox_executor_kill(struct cox_executor *executor, uint32_t rank, struct cox_error *err);
int cox_executor_completions(struct cox_executor *executor, int channel,
                             struct cox_completion *ret_completions, uint32_t count_max,
                             uint64_t deadline_ns, uint32_t *ret_count, struct cox_error *err);
int cox_executor_fd(struct cox_executor *executor, int channel, int *ret_fd, struct cox_error *err);
void cox_executor_read_status(struct cox_executor *executor, struct cox_executor_status *ret_status,
                              struct cox_rank_status *ret_ranks);

/* ---- worker ---- */

#define COX_WORKER_RANK_ANY ...
#define COX_ORPHAN_EXIT ...

struct cox_worker;
struct coxpy_worker;
struct cox_worker_options {
    size_t size;
    char prefix[...];
    uint32_t rank;
    uint32_t rank_count;
    int32_t device;
    uint32_t incarnation;
    char control_socket[...];
    char fd_store[...];
    int32_t parent_pid;
    int on_orphan;
    ...;
};
struct cox_init_request {
    uint64_t sequence;
    bool replayed;
    const struct cox_group_options *group;
    ...;
};
struct cox_worker_request {
    int channel;
    uint32_t type;
    uint64_t sequence;
    const uint8_t *bytes;
    size_t size;
    uint8_t *reply;
    size_t reply_capacity;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    const struct cox_init_request *init;
    ...;
};
int cox_worker_options_parse(struct cox_worker_options *options, int *argc, char **argv,
                             struct cox_error *err);
uint32_t cox_worker_rank(const struct cox_worker *worker);
int cox_worker_next(struct cox_worker *worker, int channel, uint64_t deadline_ns,
                    struct cox_worker_request *ret_request, struct cox_error *err);
int cox_worker_reply(struct cox_worker *worker, uint64_t sequence, const void *bytes, size_t size,
                     struct cox_error *err);
int cox_worker_reply_parts(struct cox_worker *worker, uint64_t sequence, const struct iovec *parts,
                           size_t part_count, struct cox_error *err);
int cox_worker_reply_error(struct cox_worker *worker, uint64_t sequence, int code, const char *text,
                           const void *detail, size_t detail_size, struct cox_error *err);
int cox_worker_reply_step(struct cox_worker *worker, uint64_t sequence, const int32_t *tokens,
                          const float *logprobs, uint32_t count, struct cox_error *err);
void cox_worker_set_digest(struct cox_worker *worker, int which, uint64_t value);
bool cox_worker_cancelled(const struct cox_worker *worker, int channel, uint64_t sequence);
void cox_worker_wake(struct cox_worker *worker, int channel);
void cox_worker_stop(struct cox_worker *worker);
int cox_worker_join(struct cox_worker *worker, struct cox_error *err);
int cox_worker_report_fault(struct cox_worker *worker, const char *text, uint64_t deadline_ns);
int cox_worker_pause(struct cox_worker *worker, uint64_t grace_ms, struct cox_error *err);
void cox_worker_resume(struct cox_worker *worker);
bool cox_worker_busy(const struct cox_worker *worker);

struct cox_kv_cache_desc {
    int32_t block_count;
    int32_t block_size;
    uint32_t compression_ratio;
    int32_t cache_type;
};
struct cox_kv_layout {
    uint32_t rank;
    uint32_t rank_count;
    uint32_t layer_count;
    uint32_t kv_head_first;
    uint32_t kv_head_count;
    uint32_t head_dim;
    uint32_t block_size;
    uint32_t element_bytes;
    uint64_t block_bytes;
    uint64_t model_digest;
};
struct cox_kv_pool {
    uint32_t block_count;
    uint8_t handle[64];
    struct cox_kv_layout layout;
};
struct Coxswain__KvPool;
int cox_kv_pool_read(const struct Coxswain__KvPool *message, struct cox_kv_pool *ret_pool,
                     struct cox_error *err);
int cox_kv_layout_check(const struct cox_kv_layout *theirs, const struct cox_kv_layout *ours,
                        struct cox_error *err);
struct cox_init_result {
    int64_t cpu_block_count;
    int64_t npu_block_count;
    int64_t max_position_embeddings;
    struct cox_kv_cache_desc kv_caches[...];
    uint32_t kv_cache_count;
    struct cox_kv_pool kv_pool;
    ...;
};
const char *cox_init_request_get(const struct cox_init_request *request, const char *key);
bool cox_init_request_cancelled(const struct cox_init_request *request);
void cox_init_result_init(struct cox_init_result *ret_result);
int cox_worker_reply_init(struct cox_worker *worker, uint64_t sequence,
                          const struct cox_init_result *result, struct cox_error *err);

struct cox_batch_row {
    int64_t id;
    uint32_t slot;
    uint32_t position;
    uint32_t token_count;
    bool emit;
    const int32_t *tokens;
    const char *lora_id;
    ...;
};
struct cox_batch {
    uint64_t sequence;
    int forward_type;
    uint32_t row_count;
    const struct cox_batch_row *rows;
    uint32_t table_count;
    uint32_t swap_in_count;
    uint32_t swap_out_count;
    uint32_t copy_count;
    uint32_t finished_count;
    uint64_t weights_version;
    ...;
};
bool cox_batch_cancelled(const struct cox_batch *batch);
uint64_t cox_batch_void_through(const struct cox_batch *batch);

/* ---- this package: coordinator.c ---- */

struct coxpy_group;
struct coxpy_event {
    struct coxpy_event *next;
    int kind;
    int32_t rank;
    int level;
    char text[];
};
#define COXPY_EVENT_LINE ...
#define COXPY_EVENT_ERROR_LINE ...
#define COXPY_EVENT_LOG ...
#define COXPY_EVENT_FAULT ...
#define COXPY_EVENT_DEATH ...
#define COXPY_EVENT_WAITING ...
#define COXPY_EVENT_STOP ...
#define COXPY_EVENT_DROPPED ...
int coxpy_group_new(const struct cox_executor_options *executor,
                    const struct cox_server_options *server, struct coxpy_group **ret_group,
                    struct cox_error *err);
int coxpy_group_start(struct coxpy_group *group, struct cox_error *err);
bool coxpy_group_await_start(struct coxpy_group *group, uint64_t deadline_ns, int *ret_result,
                             struct cox_error *err);
struct cox_executor *coxpy_group_executor(struct coxpy_group *group);
int coxpy_group_restart(struct coxpy_group *group, uint32_t rank, bool kill, uint64_t deadline_ns,
                        struct cox_error *err);
int coxpy_group_await_recovery(struct coxpy_group *group, uint64_t deadline_ns,
                               struct cox_error *err);
int coxpy_group_take_name(struct coxpy_group *group, const char *name, struct cox_error *err);
int coxpy_group_set_note(struct coxpy_group *group, const char *note, struct cox_error *err);
void coxpy_group_stop(struct coxpy_group *group);
struct coxpy_group *coxpy_group_free(struct coxpy_group *group);
struct coxpy_event *coxpy_group_next_event(struct coxpy_group *group);
void coxpy_event_free(struct coxpy_event *event);
int coxpy_submit(struct cox_executor *executor, const void *bytes, size_t size, int gather,
                 const struct cox_rank_set *asked, uint64_t deadline_ns, uintptr_t key,
                 uint64_t *ret_sequence, struct cox_error *err);
int coxpy_submit_parts(struct cox_executor *executor, const struct iovec *parts, size_t part_count,
                       int gather, const struct cox_rank_set *asked, uint64_t deadline_ns,
                       uintptr_t key, uint64_t *ret_sequence, struct cox_error *err);
bool cox_executor_take_reply(struct cox_executor *executor, int channel,
                             const struct cox_rank_result *result);
void cox_executor_free_reply(void *bytes);
void coxpy_channel_status(const struct cox_executor_status *status, int channel,
                          struct cox_channel_status_of_executor *ret_status);

/* ---- this package: batch.c ---- */

#define COXPY_IDS ...
#define COXPY_SEEDS ...
#define COXPY_SLOTS ...
#define COXPY_STARTS ...
#define COXPY_TOKENS ...
#define COXPY_POSITIONS ...
#define COXPY_TEMPERATURES ...
#define COXPY_TOP_PS ...
#define COXPY_TOP_KS ...
#define COXPY_PENALTIES ...
#define COXPY_EMITS ...
#define COXPY_FINISHED ...
#define COXPY_SWAP_IN ...
#define COXPY_SWAP_OUT ...
#define COXPY_COPY ...
#define COXPY_TABLES ...
struct coxpy_columns {
    size_t size;
    size_t offsets[...];
    uint32_t row_count;
    uint32_t token_count;
    uint32_t table_widths[...];
};
void coxpy_batch_measure(const struct cox_batch *batch, struct coxpy_columns *ret_columns);
void coxpy_batch_fill(const struct cox_batch *batch, const struct coxpy_columns *columns,
                      uint8_t *memory);

/* ---- this package: worker.c ---- */

#define COXPY_LINK ...
#define COXPY_LINK_STATUS ...
#define COXPY_LORA ...
#define COXPY_PULL ...
#define COXPY_PAUSE ...
#define COXPY_PAUSE_NET ...
#define COXPY_CLEAR ...
#define COXPY_REINIT ...
#define COXPY_START ...
#define COXPY_SERVES_LORA ...
#define COXPY_SERVES_LINK ...
#define COXPY_SERVES_PULL ...
#define COXPY_SERVES_RECOVER ...

struct Coxswain__LoraOperationRequest {
    char *lora_name;
    char *lora_path;
    int lora_op_type;
    ...;
};
struct Coxswain__HostInfo {
    char *host_ip;
    char *cluster_id;
    ...;
};
struct Coxswain__RemoteInfo {
    size_t n_host_info;
    struct Coxswain__HostInfo **host_info;
    size_t n_kv_pools;
    struct Coxswain__KvPool **kv_pools;
    char *control_socket;
    uint64_t epoch;
    ...;
};
struct Coxswain__PDLinkRequest__PDLinkInfo {
    int pd_role;
    int change_role;
    size_t n_link_info;
    struct Coxswain__RemoteInfo **link_info;
    size_t n_unlink_info;
    struct Coxswain__RemoteInfo **unlink_info;
    ...;
};
struct Coxswain__PDLinkRequest {
    size_t n_pd_link_info;
    struct Coxswain__PDLinkRequest__PDLinkInfo **pd_link_info;
    size_t n_cancelled_pulls;
    char **cancelled_pulls;
    ...;
};
typedef struct {
    size_t len;
    uint8_t *data;
} ProtobufCBinaryData;
struct Coxswain__SequenceGroupMetadata {
    char *request_id;
    ...;
};
struct Coxswain__PullKVRequest__PullKVInfo {
    size_t n_src_block_tables;
    ProtobufCBinaryData *src_block_tables;
    size_t n_dst_block_tables;
    ProtobufCBinaryData *dst_block_tables;
    char *cluster_id;
    struct Coxswain__SequenceGroupMetadata *seq_group_metadata;
    int has_src_sequence;
    int64_t src_sequence;
    int has_dst_sequence;
    int64_t dst_sequence;
    uint64_t deadline_ns;
    uint64_t lease_ns;
    uint64_t epoch;
    ...;
};
struct Coxswain__PullKVRequest {
    size_t n_pull_kv_infos;
    struct Coxswain__PullKVRequest__PullKVInfo **pull_kv_infos;
    ...;
};
struct coxpy_order {
    int kind;
    const struct Coxswain__LoraOperationRequest *lora;
    const struct Coxswain__PDLinkRequest *link;
    const struct Coxswain__PullKVRequest *pull;
    ...;
};
struct coxpy_order *coxpy_order_next(struct coxpy_worker *worker, int channel);
size_t coxpy_order_message(const struct coxpy_order *order, uint8_t *buffer);
int coxpy_order_link_state(struct coxpy_order *order, const char *cluster_id, int state, int code,
                           const char *text);
int coxpy_order_pull_result(struct coxpy_order *order, const char *request_id,
                            uint64_t copied_bytes, uint64_t copy_ns, int status, const char *text);
void coxpy_order_done(struct coxpy_worker *worker, struct coxpy_order *order, int result, int lora,
                      const char *text);

int coxpy_worker_new(const struct cox_worker_options *options, uint32_t served,
                     struct coxpy_worker **ret_worker, struct cox_error *err);
struct cox_worker *coxpy_worker_of(struct coxpy_worker *worker);
int coxpy_worker_start(struct coxpy_worker *worker, struct cox_error *err);
void coxpy_worker_end(struct coxpy_worker *worker);
struct coxpy_worker *coxpy_worker_free(struct coxpy_worker *worker);
uint32_t coxpy_worker_cleanups(struct coxpy_worker *worker, uint32_t *slots, uint32_t count_max);

/* ---- rank group ---- */

#define COX_GROUP_VALUE_SIZE_MIN ...
#define COX_GROUP_FD_KEEP ...
#define COX_GROUP_FD_CONSUME ...

struct cox_group;
struct cox_group_sealed;
struct cox_group_options {
    size_t size;
    const char *name;
    int fd;
    const struct cox_group_sealed *sealed;
    uint64_t fd_offset;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t value_size;
    uint64_t generation;
    uint64_t deadline_ns;
    bool (*cancelled)(void *context);
    void *context;
    ...;
};
uint64_t cox_group_memory_size(uint32_t rank_count, uint32_t value_size);
int cox_group_join(const struct cox_group_options *options, struct cox_group **ret_group,
                   struct cox_error *err);
struct cox_group *cox_group_leave(struct cox_group *group);
struct cox_group_info {
    uint32_t rank;
    uint32_t rank_count;
    ...;
};
struct cox_group_info cox_group_get_info(const struct cox_group *group);
int cox_group_align(struct cox_group *group, uint64_t epoch);
void cox_group_abort(struct cox_group *group);
void cox_group_blame(struct cox_group *group, uint32_t rank);
int cox_group_subgroup(struct cox_group *group, const char *name,
                       const struct cox_rank_set *members, struct cox_group **ret_subgroup,
                       struct cox_error *err);
int cox_group_barrier(struct cox_group *group, uint64_t deadline_ns, struct cox_error *err);
int cox_group_gather(struct cox_group *group, const void *value, size_t size, void *values,
                     uint64_t deadline_ns, struct cox_error *err);
int cox_group_gather_fds(struct cox_group *group, int fd, int mode, int *fds, uint64_t deadline_ns,
                         struct cox_error *err);
int cox_group_broadcast_fd(struct cox_group *group, uint32_t source, int fd, int mode, int *ret_fd,
                           uint64_t deadline_ns, struct cox_error *err);
bool coxpy_interrupted(void *raised);

/* ---- handles ---- */

#define COX_HANDLE_MEMORY ...
#define COX_IMPORT_FD ...
#define COX_IMPORT_READ ...
#define COX_IMPORT_WRITE ...
#define COX_PTRACE_PROCESS ...
#define COX_PTRACE_ANY ...

struct cox_handle {
    uint8_t bytes[...];
};
struct cox_handle_info {
    int kind;
    uint32_t pid;
    uint64_t size;
    uint64_t offset;
    ...;
};
struct cox_exporter;
struct cox_exporter_options {
    size_t size;
    const char *socket_path;
    int ptrace_policy;
    int32_t ptrace_pid;
    ...;
};
struct cox_importer;
struct cox_importer_options {
    size_t size;
    const char *socket_path;
    ...;
};
struct cox_import {
    int fd;
    const void *base;
    uint64_t size;
    bool writable;
    ...;
};
int cox_handle_parse(const struct cox_handle *handle, struct cox_handle_info *ret_info,
                     struct cox_error *err);
int cox_handle_open(const struct cox_handle *handle, const char *socket_path, uint64_t deadline_ns,
                    int *ret_fd, struct cox_error *err);
int cox_exporter_new(const struct cox_exporter_options *options, struct cox_exporter **ret_exporter,
                     struct cox_error *err);
struct cox_exporter *cox_exporter_free(struct cox_exporter *exporter);
int cox_exporter_export(struct cox_exporter *exporter, int fd, uint64_t offset, uint64_t size,
                        struct cox_handle *ret_handle, struct cox_error *err);
int cox_exporter_put(struct cox_exporter *exporter, const struct cox_handle *handle);
int cox_importer_new(const struct cox_importer_options *options, struct cox_importer **ret_importer,
                     struct cox_error *err);
struct cox_importer *cox_importer_free(struct cox_importer *importer);
int cox_importer_open(struct cox_importer *importer, const struct cox_handle *handle, int flags,
                      const struct cox_import **ret_import, struct cox_error *err);
void cox_importer_close(struct cox_importer *importer, const struct cox_import *import);

/* ---- pools ---- */

#define COX_POOL_FIXED ...
#define COX_POOL_SLAB ...

struct cox_pool;
struct cox_pool_options {
    size_t size;
    int strategy;
    uint64_t block_size;
    uint32_t block_count;
    uint64_t slab_size;
    uint64_t slabs_size;
    uint32_t owner_count_max;
    bool on_demand;
    ...;
};
struct cox_pool_attach_options {
    size_t size;
    bool read_only;
    ...;
};
struct cox_block_ref {
    uint64_t size;
    ...;
};
struct cox_pool_handle {
    struct cox_handle words, blocks;
};
struct cox_pool_stats {
    uint32_t block_count, free_count;
    uint64_t size, used_size;
    uint32_t owner_count;
    uint64_t reference_count, pin_count;
    uint64_t allocated, freed;
    uint64_t swept;
    ...;
};
int cox_pool_create(const struct cox_pool_options *options, struct cox_pool **ret_pool,
                    struct cox_error *err);
int cox_pool_attach(const int *fds, const struct cox_pool_attach_options *options,
                    struct cox_pool **ret_pool, struct cox_error *err);
struct cox_pool *cox_pool_free(struct cox_pool *pool);
void cox_pool_fds(const struct cox_pool *pool, int *ret_fds);
int cox_pool_export(struct cox_pool *pool, struct cox_exporter *exporter, bool read_only,
                    struct cox_pool_handle *ret_handle, struct cox_error *err);
int cox_pool_open(const struct cox_pool_handle *handle, const char *socket_path,
                  uint64_t deadline_ns, const struct cox_pool_attach_options *options,
                  struct cox_pool **ret_pool, struct cox_error *err);
int cox_pool_allocate(struct cox_pool *pool, uint64_t size, struct cox_block_ref *ret_ref,
                      struct cox_error *err);
int cox_pool_ref(struct cox_pool *pool, const struct cox_block_ref *ref, struct cox_error *err);
int cox_pool_unref(struct cox_pool *pool, const struct cox_block_ref *ref, struct cox_error *err);
void *cox_pool_pointer(const struct cox_pool *pool, const struct cox_block_ref *ref);
uint64_t cox_pool_sweep(struct cox_pool *pool);
void cox_pool_read_stats(const struct cox_pool *pool, struct cox_pool_stats *ret_stats);

/* ---- queues ---- */

struct cox_queue;
struct cox_publisher;
struct cox_subscriber;
struct cox_queue_set;
struct cox_queue_options {
    size_t size;
    uint32_t depth;
    uint32_t publisher_count_max;
    uint32_t subscriber_count_max;
    ...;
};
struct cox_publisher_options {
    size_t size;
    struct cox_pool *pool;
    struct cox_exporter *exporter;
    bool read_only;
    const char *socket_path;
    ...;
};
struct cox_subscriber_options {
    size_t size;
    struct cox_pool *const *pools;
    uint32_t pool_count;
    const char *socket_path;
    ...;
};
struct cox_message {
    struct cox_block_ref ref;
    struct cox_pool *pool;
    uint64_t length;
    uint64_t user_data;
    uint64_t number;
    uint64_t skipped;
    ...;
};
int cox_queue_create(const struct cox_queue_options *options, struct cox_queue **ret_queue,
                     struct cox_error *err);
int cox_queue_attach(int fd, const struct cox_queue_options *expected, struct cox_queue **ret_queue,
                     struct cox_error *err);
struct cox_queue *cox_queue_free(struct cox_queue *queue);
int cox_queue_fd(const struct cox_queue *queue);
int cox_queue_export(struct cox_queue *queue, struct cox_exporter *exporter,
                     struct cox_handle *ret_handle, struct cox_error *err);
int cox_queue_open(const struct cox_handle *handle, const char *socket_path, uint64_t deadline_ns,
                   const struct cox_queue_options *expected, struct cox_queue **ret_queue,
                   struct cox_error *err);
uint32_t cox_queue_sweep(struct cox_queue *queue);
int cox_publisher_new(struct cox_queue *queue, const struct cox_publisher_options *options,
                      struct cox_publisher **ret_publisher, struct cox_error *err);
struct cox_publisher *cox_publisher_free(struct cox_publisher *publisher);
int cox_publisher_publish(struct cox_publisher *publisher, const struct cox_block_ref *ref,
                          uint64_t length, uint64_t user_data, uint64_t *ret_number,
                          struct cox_error *err);
int cox_subscriber_new(struct cox_queue *queue, const struct cox_subscriber_options *options,
                       struct cox_subscriber **ret_subscriber, struct cox_error *err);
struct cox_subscriber *cox_subscriber_free(struct cox_subscriber *subscriber);
int cox_subscriber_take(struct cox_subscriber *subscriber, struct cox_message *ret_message,
                        struct cox_error *err);
uint64_t cox_subscriber_pending(const struct cox_subscriber *subscriber);
int cox_queue_set_new(struct cox_queue_set **ret_set);
struct cox_queue_set *cox_queue_set_free(struct cox_queue_set *set);
int cox_queue_set_add(struct cox_queue_set *set, struct cox_subscriber *subscriber,
                      struct cox_error *err);
int cox_queue_set_wait(struct cox_queue_set *set, uint64_t deadline_ns,
                       struct cox_subscriber **ret_subscriber);

uint64_t cox_kv_generation_of(int64_t sequence);
int cox_kv_blocks_new(uint32_t block_count, uint64_t block_size, struct cox_kv_blocks **ret_blocks,
                      struct cox_error *err);
struct cox_kv_blocks *cox_kv_blocks_free(struct cox_kv_blocks *blocks);
struct cox_kv_info {
    uint32_t block_count;
    uint64_t block_size;
    void *memory;
    int fd;
};
struct cox_kv_info cox_kv_blocks_info(const struct cox_kv_blocks *blocks);
int cox_kv_blocks_take(struct cox_kv_blocks *blocks, uint32_t block);
int cox_kv_blocks_expect(struct cox_kv_blocks *blocks, uint32_t block);
int cox_kv_blocks_give(struct cox_kv_blocks *blocks, uint32_t block, uint64_t generation);
uint64_t cox_kv_blocks_generation(const struct cox_kv_blocks *blocks, uint32_t block);
int cox_kv_view_attach(int fd, struct cox_kv_view **ret_view, struct cox_error *err);
struct cox_kv_view *cox_kv_view_free(struct cox_kv_view *view);
struct cox_kv_info cox_kv_view_info(const struct cox_kv_view *view);
int cox_kv_view_copy(const struct cox_kv_view *view, uint32_t block, uint64_t generation, void *to,
                     struct cox_error *err);
int cox_kv_view_await(const struct cox_kv_view *view, uint32_t block, uint64_t deadline_ns);
