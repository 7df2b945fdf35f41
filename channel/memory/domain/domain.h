/*
 * domain: kinds of memory that blocks may lie in, each a table of functions.
 *
 * For processes that trust each other: memory of a domain is shared by its fd. A process that got a
 * read-only fd cannot write through it. But a process of the same user may reopen the memory
 * (/proc/self/fd), if that kind of memory allows it.
 *
 * A domain is named by two numbers, kind and device, which travel between processes. The functions
 * never travel: each process has a table of its own in private memory, and refuses numbers without
 * an entry. Built in:
 *
 *   COX_DOMAIN_HOST    a sealed memfd that every process maps: blocks have addresses
 *   COX_DOMAIN_BOUNCE  host memory that is never mapped, accessed by copies alone (pread and
 *                      pwrite on its memfd), like a device that the host cannot address. For
 *                      tests, and a template for a domain of your own
 *   COX_DOMAIN_CUDA    device memory, exported and imported as an fd, once cox_domains_add_cuda has
 *                      found a driver (domain_cuda.h)
 *
 * Threads: add from one thread, before other threads use the table; find, and the functions of a
 *   memory, from any.
 * Ownership: the caller owns the table and keeps it until everything made with it is freed; memory
 *   belongs to its creator or attacher. An fd from create is lent until destroy; attach dups.
 * Blocks: only for the copies themselves.
 * If the process dies: the kernel frees the memory with the last process that has its fd or
 *   mapping.
 */
#ifndef COX_CHANNEL_MEMORY_DOMAIN_H
#define COX_CHANNEL_MEMORY_DOMAIN_H

#include "../../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum cox_domain_kind {
    COX_DOMAIN_HOST = 1,
    COX_DOMAIN_BOUNCE = 2,
    COX_DOMAIN_CUDA = 3,
    COX_DOMAIN_USER_FIRST = 64, /* yours: 64 to 127 */
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

/* One process's view of a piece of memory. Domains append fields of their own. */
struct cox_domain_memory {
    const struct cox_domain_functions *functions;
    uint64_t size;
    /* other processes attach with it; lent until destroy; -1: it cannot be shared */
    int fd;
    /* host address; NULL: accessible by copies only */
    void *address;
    /* device address, for kernels; 0: none */
    uint64_t device_address;
    bool writable;
};

/* Ranges were checked by the caller. All functions that return something return
 *   0
 *   COX_NO_SPACE: no memory of this kind is left
 *   COX_DENIED: the process may not use it so
 *   COX_CORRUPT: an fd that is no such memory
 *   COX_UNSUPPORTED: the domain cannot do it
 *   -errno
 * and err has the reason. */
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
    /* Within the domain, also between two memories; ranges do not overlap. NULL, or COX_UNSUPPORTED
     * for these two: the copy goes through the host. */
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

/* With the host and bounce domains. Returns 0 or -ENOMEM. */
COX_PUBLIC int cox_domains_new(struct cox_domains **ret_domains);
COX_PUBLIC struct cox_domains *cox_domains_free(struct cox_domains *domains); /* NULL-safe */
/* functions and context are borrowed until free. device_count: devices 0 to this - 1 exist.
 * Returns
 *   0
 *   COX_INVALID: kind is not one of yours, no device, or a required function is missing (all are
 *     but copy, and the pair of commit and decommit)
 *   COX_BUSY: there is such a kind
 *   COX_FULL
 */
COX_PUBLIC int cox_domains_add(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                               const struct cox_domain_functions *functions, void *context,
                               struct cox_error *err);
/* Checks a size before that much memory of the host is taken: the kernel overcommits, and a request
 * beyond the free memory ends with processes killed, not always this one. on_demand: it is only
 * reserved, and taken as it is touched.
 * Returns
 *   0
 *   COX_INVALID: 0 bytes
 *   COX_NO_SPACE: err has what is needed and what is free
 *   -errno
 */
COX_PUBLIC int cox_domain_check_host_size(uint64_t size, bool on_demand, struct cox_error *err);
#ifdef COX_INTERNAL
/* Numbers are input.
 * Returns
 *   0
 *   COX_INVALID: no such kind here, or no such device
 */
int cox_domains_find(const struct cox_domains *domains, struct cox_domain_id id,
                     const struct cox_domain_functions **ret_functions, void **ret_context,
                     struct cox_error *err);

/* Between memories of any two domains: directly where they are one and it can, else through the
 * host, a piece at a time.
 * Returns what the domains return, and
 *   COX_INVALID: a range is not in its memory, or two of the same memory overlap without being one
 *   COX_DENIED: the target is attached for reading only
 */
int cox_domain_copy(struct cox_domain_memory *to, uint64_t to_offset,
                    struct cox_domain_memory *from, uint64_t from_offset, uint64_t size,
                    struct cox_error *err);
int cox_domain_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                       uint64_t size, struct cox_error *err);
int cox_domain_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                         uint64_t size, struct cox_error *err);
#endif

#ifdef __cplusplus
}
#endif

#endif
