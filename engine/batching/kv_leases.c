#include "kv_leases.h"

#include <stdlib.h>
#include <string.h>

struct cox_kv_lease *cox_kv_leases_add(struct cox_kv_leases *holds, int64_t id, uint64_t owner,
                                       uint64_t lease_ns, const int32_t *blocks, uint32_t count)
{
    struct cox_kv_lease **end = &holds->first;
    struct cox_kv_lease *hold = malloc(sizeof *hold + count * sizeof *blocks);
    if (!hold)
        return NULL;
    *hold =
        (struct cox_kv_lease){.id = id, .owner = owner, .lease_ns = lease_ns, .block_count = count};
    memcpy(hold->blocks, blocks, count * sizeof *blocks);
    while (*end)
        end = &(*end)->next;
    *end = hold;
    holds->count++;
    holds->block_count += count;
    holds->changes++;
    return hold;
}

struct cox_kv_lease *cox_kv_leases_take(struct cox_kv_leases *holds, uint64_t owner, int64_t id,
                                        uint64_t now_ns)
{
    struct cox_kv_lease **link = &holds->first;
    while (*link && ((owner && (*link)->owner != owner) || (id && (*link)->id != id) ||
                     (*link)->lease_ns > now_ns))
        link = &(*link)->next;
    struct cox_kv_lease *hold = *link;
    if (!hold)
        return NULL;
    *link = hold->next;
    holds->count--;
    holds->block_count -= hold->block_count;
    holds->changes++;
    return hold;
}

uint64_t cox_kv_leases_due_ns(const struct cox_kv_leases *holds)
{
    uint64_t due_ns = COX_DEADLINE_NEVER;
    for (const struct cox_kv_lease *hold = holds->first; hold; hold = hold->next)
        due_ns = cox_deadline_min(due_ns, hold->lease_ns);
    return due_ns;
}
