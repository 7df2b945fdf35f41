/*
 * domain_table: what the domains that the library brings along need of the table, beyond domain.h.
 *
 * Threads, blocks, deaths: as domain.h says.
 * Ownership: a context that comes with a release belongs to the table.
 */
#ifndef COX_CHANNEL_MEMORY_DOMAIN_TABLE_H
#define COX_CHANNEL_MEMORY_DOMAIN_TABLE_H

#include "domain.h"

extern const struct cox_domain_functions cox_domain_host_functions;
extern const struct cox_domain_functions cox_domain_bounce_functions;

/* As cox_domains_add, for any kind. release (NULL: nothing to do) is called with context by
 * cox_domains_free; after a failure context stays the caller's. */
int cox_domains_add_builtin(struct cox_domains *domains, uint32_t kind, uint32_t device_count,
                            const struct cox_domain_functions *functions, void *context,
                            void (*release)(void *context), struct cox_error *err);

/* Whether host memory of that size may be asked for at all. Reserving more than there is does not
 * fail: it takes all, and the kernel kills processes for it, not always the one that asked. Returns
 * 0; COX_INVALID: 0 bytes; COX_NO_SPACE: what is needed and what there is; -errno. */
int cox_domain_check_host_size(uint64_t size, bool on_demand, struct cox_error *err);
/* The same before so much of it is reserved. */
int cox_domain_check_host_free(uint64_t size, struct cox_error *err);
/* Whether fd is memory of this user that can neither shrink nor grow, of size bytes or more, and
 * may be written if that is asked for. Returns 0; COX_INVALID: 0 bytes; COX_DENIED; COX_CORRUPT:
 * too small; -errno. */
int cox_domain_check_host_fd(int fd, uint64_t size, bool writable, struct cox_error *err);

/* commit and decommit of any domain whose memory is a memfd. */
int cox_domain_host_commit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                           struct cox_error *err);
void cox_domain_host_decommit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size);

#endif
