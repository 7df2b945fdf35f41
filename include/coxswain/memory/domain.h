/*
 * domain: kinds of memory that can contain blocks, each with a table of functions.
 *
 * For processes that trust each other: memory of a domain is shared by its fd. A process with a
 * read-only fd cannot write through that fd. But a process of the same user may reopen the memory
 * for writing (/proc/self/fd), if that kind of memory allows it.
 *
 * Two numbers, kind and device, identify a domain in all processes. The functions are never shared:
 * each process has its own table in private memory, and refuses numbers without an entry. Built in:
 *
 *   COX_DOMAIN_HOST    a sealed memfd that every process maps: blocks have addresses
 *   COX_DOMAIN_BOUNCE  host memory that is never mapped, accessed only by copies (pread and
 *                      pwrite on its memfd), like a device that the host cannot address. For
 *                      tests, and as a template for user-defined domains
 *   COX_DOMAIN_CUDA    device memory, exported and imported as an fd, if cox_domains_add_cuda
 *                      has found a driver (domain_cuda.h)
 *
 * Threads: add from one thread, before other threads use the table; find, and the functions of a
 *   memory, from any.
 * Ownership: the caller owns the table and keeps it until everything made with it is freed. The
 *   process that created or attached a memory destroys it. An fd from create is lent until destroy;
 *   attach dups.
 * Blocks: only while it copies.
 * If the process dies: the kernel frees the memory with the last process that has its fd or
 *   mapping.
 */
#ifndef COX_MEMORY_DOMAIN_H
#define COX_MEMORY_DOMAIN_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

enum cox_domain_kind {
    COX_DOMAIN_HOST = 1,
    COX_DOMAIN_BOUNCE = 2,
    COX_DOMAIN_CUDA = 3,
    COX_DOMAIN_USER_FIRST = 64, /* user-defined: 64 to 127 */
    COX_DOMAIN_USER_LAST = 127,
};

/* Limit of domains in one table, each device counted, and of one queue. */
#define COX_DOMAIN_COUNT_MAX 32

struct cox_domain_id {
    uint32_t kind;
    /* 0 if there is only one */
    uint32_t device;
};

static inline bool cox_domain_equal(struct cox_domain_id a, struct cox_domain_id b)
{
    return a.kind == b.kind && a.device == b.device;
}

/* A memory as one process has attached it. Domains append fields of their own. */
struct cox_domain_memory {
    const struct cox_domain_functions *functions;
    uint64_t size;
    /* other processes attach with it; lent until destroy; -1: it cannot be shared */
    int fd;
    /* host address; NULL: accessible only by copies */
    void *address;
    /* device address, for kernels; 0: none */
    uint64_t device_address;
    bool writable;
};

/* The library checks ranges before it calls these functions. Those that return int return
 *   0
 *   COX_NO_SPACE: no memory of this kind is left
 *   COX_DENIED: the process has no permission for it
 *   COX_CORRUPT: the fd is not a memory of this kind
 *   COX_UNSUPPORTED: the domain cannot do it
 *   -errno
 * and set err to the reason. */
struct cox_domain_functions {
    /* "host"; for messages */
    const char *name;
    /* Creates memory of size bytes, all zero, that can neither shrink nor grow. on_demand: commit
     * allocates pages, not create. */
    int (*create)(void *context, uint32_t device, uint64_t size, bool on_demand,
                  struct cox_domain_memory **ret_memory, struct cox_error *err);
    /* Attaches to the memory behind fd, of this or another process. */
    int (*attach)(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                  struct cox_domain_memory **ret_memory, struct cox_error *err);
    /* frees this process's view */
    void (*destroy)(struct cox_domain_memory *memory);
    int (*copy_to)(struct cox_domain_memory *memory, uint64_t offset, const void *host, size_t size,
                   struct cox_error *err);
    int (*copy_from)(struct cox_domain_memory *memory, uint64_t offset, void *host, size_t size,
                     struct cox_error *err);
    /* Copies within the domain, also between two memories; ranges do not overlap. If it is NULL, or
     * returns COX_UNSUPPORTED for these two, the library copies through the host. */
    int (*copy)(struct cox_domain_memory *to, uint64_t to_offset, struct cox_domain_memory *from,
                uint64_t from_offset, size_t size, struct cox_error *err);
    /* Allocate and release the pages of a range of an on_demand memory. Released pages read as
     * zeros; a page only partly in the range is zeroed there and kept. NULL: create allocates
     * everything. */
    int (*commit)(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                  struct cox_error *err);
    void (*decommit)(struct cox_domain_memory *memory, uint64_t offset, uint64_t size);
};

struct cox_domains;

/* Makes a table with the host and bounce domains. Returns 0 or -ENOMEM. */
COX_PUBLIC int cox_domains_new(struct cox_domains **ret_domains);
COX_PUBLIC struct cox_domains *cox_domains_free(struct cox_domains *domains); /* NULL-safe */
/* functions and context are borrowed until free. device_count: devices 0 to this - 1 exist.
 * Returns
 *   0
 *   COX_INVALID: kind is not user-defined, device_count is 0, or a required function is missing
 *     (all are required but copy, and the pair of commit and decommit)
 *   COX_BUSY: the table has this kind already
 *   COX_FULL
 */
COX_PUBLIC int cox_domains_add(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                               const struct cox_domain_functions *functions, void *context,
                               struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
