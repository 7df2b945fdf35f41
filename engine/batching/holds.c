#include "holds.h"

#include <stdlib.h>
#include <string.h>

struct cox_hold *cox_holds_add(struct cox_holds *holds, int64_t id, uint64_t owner,
                               uint64_t lease_ns, const int32_t *blocks, uint32_t count)
{
    struct cox_hold **end = &holds->first;
    struct cox_hold *hold = malloc(sizeof *hold + count * sizeof *blocks);
    if (!hold)
        return NULL;
    *hold = (struct cox_hold){.id = id, .owner = owner, .lease_ns = lease_ns, .block_count = count};
    memcpy(hold->blocks, blocks, count * sizeof *blocks);
    while (*end)
        end = &(*end)->next;
    *end = hold;
    holds->count++;
    holds->block_count += count;
    holds->changes++;
    return hold;
}

struct cox_hold *cox_holds_take(struct cox_holds *holds, uint64_t owner, int64_t id,
                                uint64_t now_ns)
{
    struct cox_hold **link = &holds->first;
    while (*link && ((owner && (*link)->owner != owner) || (id && (*link)->id != id) ||
                     (*link)->lease_ns > now_ns))
        link = &(*link)->next;
    struct cox_hold *hold = *link;
    if (!hold)
        return NULL;
    *link = hold->next;
    holds->count--;
    holds->block_count -= hold->block_count;
    holds->changes++;
    return hold;
}

uint64_t cox_holds_due_ns(const struct cox_holds *holds)
{
    uint64_t due_ns = COX_DEADLINE_NEVER;
    for (const struct cox_hold *hold = holds->first; hold; hold = hold->next)
        due_ns = cox_deadline_min(due_ns, hold->lease_ns);
    return due_ns;
}
