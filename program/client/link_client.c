#include "link_client.h"

#include "channel/base/idioms.h"
#include "coordinator/server/group_links.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The interval between queries whether ranks have linked. */
#define LOOK_NS (5 * COX_NSEC_PER_MSEC)
/* Added to the deadline: the group itself fails at the deadline, and its error names the late rank.
 */
#define REPLY_NS (2 * COX_NSEC_PER_SEC)

static uint64_t ms_until(uint64_t deadline_ns)
{
    const uint64_t now = cox_now_ns();
    return deadline_ns > now ? (deadline_ns - now) / COX_NSEC_PER_MSEC + 1 : 1;
}

static uint64_t reply_deadline_ns(uint64_t deadline_ns)
{
    return deadline_ns < COX_DEADLINE_NEVER - REPLY_NS ? deadline_ns + REPLY_NS
                                                       : COX_DEADLINE_NEVER;
}

int cox_client_kv_info(struct cox_client *client, int64_t hold, uint64_t deadline_ns,
                       struct CoxswainControl__KvInfoReply **ret_info, struct cox_error *err)
{
    CoxswainControl__KvInfoRequest info = COXSWAIN_CONTROL__KV_INFO_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    info.has_hold = hold != 0;
    info.hold = hold;
    int r = cox_client_expect(client, COX_REQUEST(KV_INFO), &info.base, COX_REPLY(KV_INFO),
                              deadline_ns, &reply, err);
    if (r)
        return r;
    CoxswainControl__KvInfoReply *told = (CoxswainControl__KvInfoReply *)(uintptr_t)reply;
    if (!told->has_remote_info || !told->has_epoch || (hold && !told->hold))
        return cox_fail(err, COX_CORRUPT, "what the group says of its KV caches is not complete");
    *ret_info = told;
    return 0;
}

int cox_client_link_status(struct cox_client *client, uint64_t deadline_ns,
                           struct CoxswainControl__LinkStatusReply **ret_status,
                           struct cox_error *err)
{
    CoxswainControl__LinkStatusRequest status = COXSWAIN_CONTROL__LINK_STATUS_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    COX_SET(&status, timeout_ms, ms_until(deadline_ns));
    int r = cox_client_expect(client, COX_REQUEST(LINK_STATUS), &status.base,
                              COX_REPLY(LINK_STATUS), reply_deadline_ns(deadline_ns), &reply, err);
    if (!r)
        *ret_status = (struct CoxswainControl__LinkStatusReply *)(uintptr_t)reply;
    return r;
}

/* The state of one link. A link that is no longer in the list was removed. */
static int state_ask(struct cox_client *reader, const char *owner_name, uint64_t deadline_ns,
                     enum cox_link_state *ret_state, struct cox_error *err)
{
    CoxswainControl__LinkStatusReply *status;
    int r = cox_client_link_status(reader, deadline_ns, &status, err);
    if (r)
        return r;
    for (size_t i = 0; i < status->n_links; i++) {
        const CoxswainControl__LinkState *link = status->links[i];
        if (!link->cluster_id || strcmp(link->cluster_id, owner_name) != 0)
            continue;
        *ret_state = (enum cox_link_state)link->state;
        if (link->state != COX_LINK_FAILED)
            return 0;
        return cox_fail(err, COX_REJECTED, "'%s' could not be linked: %s (%" PRId32 ")", owner_name,
                        link->text ? link->text : "no reason was given", link->code);
    }
    return cox_fail(err, COX_STALE, "'%s' was unlinked meanwhile", owner_name);
}

static int link_await(struct cox_client *reader, const char *owner_name, uint64_t deadline_ns,
                      struct cox_error *err)
{
    for (;;) {
        enum cox_link_state state = COX_LINK_WAITING;
        int r = state_ask(reader, owner_name, deadline_ns, &state, err);
        if (r || state == COX_LINK_SUCCESS)
            return r;
        if (cox_now_ns() >= deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "'%s' is not linked in time: %s", owner_name,
                            cox_link_state_name(state));
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}

int cox_link_groups(struct cox_client *reader, struct cox_client *owner, const char *owner_name,
                    bool wait, uint64_t deadline_ns, uint64_t *ret_epoch, struct cox_error *err)
{
    CoxswainControl__KvInfoReply *info;
    CoxswainControl__LinkRequest link = COXSWAIN_CONTROL__LINK_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    int r = cox_client_kv_info(owner, 0, deadline_ns, &info, err);
    if (r)
        return r;
    uint64_t epoch = info->epoch;
    COX_SET(&link, remote_info, info->remote_info);
    COX_SET(&link, timeout_ms, ms_until(deadline_ns));
    r = cox_client_expect(reader, COX_REQUEST(LINK), &link.base, COX_REPLY(DONE),
                          reply_deadline_ns(deadline_ns), &reply, err);
    if (!r && wait)
        r = link_await(reader, owner_name, deadline_ns, err);
    if (!r)
        *ret_epoch = epoch;
    return r;
}
