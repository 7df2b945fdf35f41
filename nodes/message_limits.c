#include "message_limits.h"

#include "nodes/direct/direct.h"
#include "nodes/group_relay.h"
#include "nodes/image.h"
#include "nodes/kv_relay.h"
#include "nodes/link/frame.h"
#include "nodes/nodes.h"

#include <inttypes.h>
#include <string.h>

/* Who says it. */
enum sender {
    NOBODY = 0,
    LEAD,
    /* of the same group */
    NODE,
    /* of any group */
    ANY_NODE,
};

struct rule {
    enum sender to_lead, to_agent;
    uint64_t size_max;
};

/* A fetch has a head of less than 4 KiB. */
static const struct rule rules[] = {
    [COX_DIRECT_FRAME] = {.to_lead = NODE, .to_agent = LEAD, .size_max = COX_DIRECT_SIZE_MAX},
    [COX_DIRECT_GROUP] = {.to_agent = NODE, .size_max = COX_DIRECT_SIZE_MAX},
    [COX_DIRECT_IMAGE] = {.to_agent = LEAD, .size_max = COX_DIRECT_SIZE_MAX},
    [COX_DIRECT_DROP_IMAGE] = {.to_agent = LEAD, .size_max = sizeof(struct cox_handle)},
    [COX_DIRECT_FETCH] = {.to_agent = ANY_NODE,
                          .size_max = 4096 + COX_KV_FETCH_COUNT_MAX * sizeof(uint32_t)},
    [COX_DIRECT_BLOCKS] = {.to_agent = ANY_NODE, .size_max = COX_DIRECT_SIZE_MAX},
};

static bool may_say(enum sender sender, const char *peer, bool same_group)
{
    switch (sender) {
    case LEAD:
        return same_group && strcmp(peer, "lead") == 0;
    case NODE:
        return same_group && strncmp(peer, "node-", 5) == 0;
    case ANY_NODE:
        return strncmp(peer, "node-", 5) == 0;
    default:
        return false;
    }
}

int cox_message_check(bool at_lead, const char *own_group, const char *peer, const char *group,
                      uint32_t kind, uint64_t size, const uint8_t *front, struct cox_error *err)
{
    static const struct rule none = {0};
    const struct rule *rule = kind < sizeof rules / sizeof *rules ? &rules[kind] : &none;
    const enum sender sender = at_lead ? rule->to_lead : rule->to_agent;
    if (!may_say(sender, peer, strcmp(group, own_group) == 0))
        return cox_fail(err, COX_DENIED,
                        "%s of the group '%s' may send no message of kind %" PRIu32 " here", peer,
                        group, kind);
    if (size > rule->size_max)
        return cox_fail(err, COX_TOO_LARGE,
                        "a message of kind %" PRIu32 " has %" PRIu64 " bytes: at most %" PRIu64
                        " are taken",
                        kind, size, rule->size_max);
    return kind == COX_DIRECT_FRAME ? cox_frame_check(front, size, err) : 0;
}
