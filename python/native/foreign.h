/* What the declarations of Coxswain's headers use and do not bring, for cffi: of the system's types and of the
 * messages (executor.proto) the fields that the package reads. The compiler fills in "...". */

typedef int... pid_t;
typedef int... dev_t;
typedef int... ino_t;
struct timespec {
    ...;
};
struct iovec {
    void *iov_base;
    size_t iov_len;
    ...;
};
struct Coxswain__LoraOperationRequest {
    char *lora_name;
    char *lora_path;
    int lora_op_type;
    ...;
};
struct Coxswain__HostInfo {
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

/* memory/domain/domain_table.h */
int cox_domain_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                       uint64_t size, struct cox_error *err);
int cox_domain_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                         uint64_t size, struct cox_error *err);
int cox_domain_cuda_uuid(const struct cox_domains *domains, uint32_t device, uint8_t ret_uuid[16],
                         struct cox_error *err);
int cox_domain_cuda_make_private(struct cox_domain_memory *memory, struct cox_error *err);
