/*
 * link_client: a third process links two running groups: it passes the description of one to the
 * other.
 *
 * Threads: one.
 * Ownership: clients are the caller's; what replies point to is lent by them as client.h says.
 * Blocks: until the deadline; two seconds more, for the reply of a group that ended at its
 * deadline. If the process dies: links that were made stay.
 */
#ifndef COX_PROGRAM_LINK_CLIENT_H
#define COX_PROGRAM_LINK_CLIENT_H

#include "client.h"

struct CoxswainControl__KvInfoReply;
struct CoxswainControl__LinkStatusReply;

/* hold: of a sequence, 0: none. */
int cox_client_kv_info(struct cox_client *client, int64_t hold, uint64_t deadline_ns,
                       struct CoxswainControl__KvInfoReply **ret_info, struct cox_error *err);
int cox_client_link_status(struct cox_client *client, uint64_t deadline_ns,
                           struct CoxswainControl__LinkStatusReply **ret_status,
                           struct cox_error *err);

/* The ranks of `reader` link the KV caches of `owner`. *ret_epoch: of the owner, that was linked.
 * wait: until every rank of the reader has linked. Returns 0; the error that either group replies
 * with; COX_REJECTED: a rank could not, err has its reason; COX_TIMEOUT: one has not yet;
 * COX_STALE: the link was removed meanwhile. */
int cox_link_groups(struct cox_client *reader, struct cox_client *owner, const char *owner_name,
                    bool wait, uint64_t deadline_ns, uint64_t *ret_epoch, struct cox_error *err);

#endif
