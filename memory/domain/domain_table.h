/*
 * domain_table: the table, for built-in domains (beyond domain.h).
 *
 * Threads, blocking, death: as domain.h.
 * Ownership: a context with a release function belongs to the table.
 */
#ifndef COX_MEMORY_DOMAIN_TABLE_H
#define COX_MEMORY_DOMAIN_TABLE_H

#include <coxswain/memory/domain.h>

extern const struct cox_domain_functions cox_domain_host_functions;
extern const struct cox_domain_functions cox_domain_bounce_functions;

/* As cox_domains_add, for any kind. cox_domains_free calls release (NULL: nothing to do) with
 * context; on failure the caller keeps context. */
int cox_domains_add_builtin(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                            const struct cox_domain_functions *functions, void *context,
                            void (*release)(void *context), struct cox_error *err);

/* commit and decommit of any domain whose memory is a memfd. */
int cox_domain_host_commit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                           struct cox_error *err);
void cox_domain_host_decommit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size);

/* Finds a domain. id is untrusted input.
 * Returns
 *   0
 *   COX_INVALID: the table has no such kind, or no such device
 */
int cox_domains_find(const struct cox_domains *domains, struct cox_domain_id id,
                     const struct cox_domain_functions **ret_functions, void **ret_context,
                     struct cox_error *err);

/* Copies between memories of any two domains: directly if both are in one domain that can do it,
 * else through the host, a piece at a time.
 * Returns what the domains return, and
 *   COX_INVALID: a range is not in its memory, or two different ranges of one memory overlap
 *   COX_DENIED: the target is attached for reading only
 */
int cox_domain_copy(struct cox_domain_memory *to, uint64_t to_offset,
                    struct cox_domain_memory *from, uint64_t from_offset, uint64_t size,
                    struct cox_error *err);
int cox_domain_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                       uint64_t size, struct cox_error *err);
int cox_domain_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                         uint64_t size, struct cox_error *err);

/* The 16 bytes that name a device of COX_DOMAIN_CUDA, in every process and after every start.
 * Returns
 *   0
 *   COX_INVALID: the table has no such device
 *   COX_UNSUPPORTED, -EIO: the driver has none for it
 */
int cox_domain_cuda_uuid(const struct cox_domains *domains, uint32_t device, uint8_t ret_uuid[16],
                         struct cox_error *err);
/* Of a memory of COX_DOMAIN_CUDA: what this process sees at its device address becomes a copy of
 * its own, which it may write. Its fd is closed and -1. Waits until the device has done what this
 * process has given it; no other thread may give it more meanwhile.
 * Returns
 *   0
 *   COX_STATE: in a fork's child
 *   -ENOMEM
 *   COX_NO_SPACE, COX_DENIED, COX_UNSUPPORTED, -EIO: the driver's. The memory is as it was, or
 *     mapped nowhere: a kernel that uses it may fail
 */
int cox_domain_cuda_make_private(struct cox_domain_memory *memory, struct cox_error *err);

/* cox_domains_add_cuda with the driver library of this path or name. */
int cox_domains_add_cuda_library(struct cox_domains *domains, const char *library,
                                 struct cox_error *err);

#endif
