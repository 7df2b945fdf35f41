/*
 * domain: kinds of memory that blocks may lie in, each a table of functions.
 *
 * For processes that trust each other: memory of a domain is shared as its fd is. Who got it
 * read-only cannot write it by that fd; a process of the same user may open the same memory anew
 * (/proc/self/fd), where the kind of memory lets it.
 *
 * A domain is named by two numbers, kind and device, which travel between processes; the functions
 * never do: each process has a table of its own, in private memory, and numbers that it has no
 * entry for are refused. Built in:
 *
 *   COX_DOMAIN_HOST    a sealed memfd that everybody maps: blocks have addresses
 *   COX_DOMAIN_BOUNCE  host memory that nobody maps: it is reached by copies alone (pread, pwrite
 *                      on its memfd), as a device without a window is. For tests, and the template
 *                      for a domain of your own: domain_bounce.c is that and no more
 *   COX_DOMAIN_CUDA    device memory, exported and imported as an fd, once
 *                      cox_domains_add_cuda has found a driver (domain_cuda.h)
 *
 * Threads: add from one thread, before others look; find, and the functions of a memory, from any.
 * Ownership: the caller owns the table and keeps it until everything made with it is gone; memory
 *   is its creator's or attacher's. An fd that create gives is lent until destroy; attach dups.
 * Blocks: nothing but the copies themselves.
 * If the process dies: the kernel frees the memory with the last process that has its fd or
 * mapping.
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

/* Domains in one table, each device counted, and of one queue, at most. */
#define COX_DOMAIN_COUNT_MAX 32

struct cox_domain_id {
    uint32_t kind;
    /* 0 where there is only one */
    uint32_t device;
};

static inline bool cox_domain_equal(struct cox_domain_id a, struct cox_domain_id b)
{
    return a.kind == b.kind && a.device == b.device;
}

/* One piece of memory of a domain, as one process sees it. Domains put more behind it. */
struct cox_domain_memory {
    const struct cox_domain_functions *functions;
    uint64_t size;
    /* what others attach with; lent until destroy; -1: it cannot be shared */
    int fd;
    /* where the host may read and write it; NULL: by copies only */
    void *address;
    /* as the domain's own functions (kernels) name it; 0: none */
    uint64_t device_address;
    bool writable;
};

/* All functions return 0, COX_NO_SPACE, COX_DENIED, COX_CORRUPT (an fd that is no such memory),
 * COX_UNSUPPORTED, or -errno, with err telling. Ranges were checked by the caller. */
struct cox_domain_functions {
    /* "host"; for messages */
    const char *name;
    /* A new memory of size bytes, all zero, that can neither shrink nor grow. on_demand: pages are
     * reserved by commit, not now. */
    int (*create)(void *context, uint32_t device, uint64_t size, bool on_demand,
                  struct cox_domain_memory **ret_memory, struct cox_error *err);
    /* The memory behind fd, in this or another process. */
    int (*attach)(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                  struct cox_domain_memory **ret_memory, struct cox_error *err);
    /* this process's view of it */
    void (*destroy)(struct cox_domain_memory *memory);
    int (*copy_to)(struct cox_domain_memory *memory, uint64_t offset, const void *host, size_t size,
                   struct cox_error *err);
    int (*copy_from)(struct cox_domain_memory *memory, uint64_t offset, void *host, size_t size,
                     struct cox_error *err);
    /* Within the domain, also between two memories; they do not overlap. NULL, or COX_UNSUPPORTED
     * for these two: through the host. */
    int (*copy)(struct cox_domain_memory *to, uint64_t to_offset, struct cox_domain_memory *from,
                uint64_t from_offset, size_t size, struct cox_error *err);
    /* Reserves, and gives back, the pages of a range of a memory made on_demand; what was given
     * back reads as zeros (pages that are only in part in the range are emptied there, and kept).
     * NULL: the domain reserves everything at create. */
    int (*commit)(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                  struct cox_error *err);
    void (*decommit)(struct cox_domain_memory *memory, uint64_t offset, uint64_t size);
};

struct cox_domains;

/* With host and bounce. Returns 0 or -ENOMEM. */
COX_PUBLIC int cox_domains_new(struct cox_domains **ret_domains);
COX_PUBLIC struct cox_domains *cox_domains_free(struct cox_domains *domains); /* NULL-safe */
/* functions and context are borrowed until free. device_count: devices 0 to this - 1 exist. Returns
 * 0; COX_INVALID: kind is not one of yours, no device, or a required function is missing (all are
 * but copy, and the pair of commit and decommit); COX_BUSY: there is such a kind; COX_FULL. */
COX_PUBLIC int cox_domains_add(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                               const struct cox_domain_functions *functions, void *context,
                               struct cox_error *err);
/* Numbers are input. Returns 0; COX_INVALID: no such kind here, or no such device. */
COX_PUBLIC int cox_domains_find(const struct cox_domains *domains, struct cox_domain_id id,
                                const struct cox_domain_functions **ret_functions,
                                void **ret_context, struct cox_error *err);

/* Between memories of any two domains: directly where they are one and it can, else through the
 * host, a piece at a time. Ranges are checked: COX_INVALID, also where two of the same memory
 * overlap without being one; COX_DENIED: the target is attached for reading only. */
COX_PUBLIC int cox_domain_copy(struct cox_domain_memory *to, uint64_t to_offset,
                               struct cox_domain_memory *from, uint64_t from_offset, uint64_t size,
                               struct cox_error *err);
COX_PUBLIC int cox_domain_copy_to(struct cox_domain_memory *memory, uint64_t offset,
                                  const void *host, uint64_t size, struct cox_error *err);
COX_PUBLIC int cox_domain_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                                    uint64_t size, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
