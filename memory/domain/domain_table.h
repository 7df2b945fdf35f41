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

#endif
