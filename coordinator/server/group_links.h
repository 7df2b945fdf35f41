/*
 * group_links: the other groups whose KV caches the ranks of this one read, and the role of this
 * group.
 *
 * The links are kept, and sent again to ranks that were replaced. A link names one epoch of the
 * other group. When that group replaces a rank, its epoch changes, pulls fail for that reason, and
 * it is linked again.
 *
 * Threads: new and free from one thread; the rest from any. Orders run one at a time: COX_TIMEOUT
 * if another one runs until the deadline.
 * Ownership: the executor is borrowed until free.
 * Blocks: orders and status until their deadline; role and list nothing.
 * If the process dies: private memory; the ranks end with the coordinator.
 */
#ifndef COX_COORDINATOR_GROUP_LINKS_H
#define COX_COORDINATOR_GROUP_LINKS_H

#include "channel/base/idioms.h"

#include <coxswain/requests.h>

struct cox_group_links;

enum cox_role { /* values of PDRole */
                COX_ROLE_PREFILL = 1,
                COX_ROLE_DECODE = 2,
                COX_ROLE_STANDARD = 3,
};
/* "prefill", "decode", "standard"; "unknown" outside. Static storage. */
const char *cox_role_name(uint32_t role);
/* Returns 0 or COX_INVALID. */
int cox_role_parse(const char *text, enum cox_role *ret_role, struct cox_error *err);

/* Its role is standard. Returns 0 or -ENOMEM. */
int cox_group_links_new(struct cox_executor *executor, const struct cox_log *log,
                        struct cox_group_links **ret_links, struct cox_error *err);
struct cox_group_links *cox_group_links_free(struct cox_group_links *links); /* NULL-safe */
COX_DEFINE_FREEP(struct cox_group_links, cox_group_links_free);

/* bytes: RemoteInfo of the other group, from another process, so checked. Sends the ranks the link
 * request; its progress is in the status. A link of the same group replaces the previous one.
 * Returns 0; COX_CORRUPT: no such bytes; COX_TOO_LARGE; COX_INVALID: this group itself, other ranks
 * or another layout, err says which; COX_FULL: too many links; what cox_executor_remote_info and
 * cox_executor_link return. */
int cox_group_links_link(struct cox_group_links *links, const void *bytes, size_t size,
                         uint64_t deadline_ns, struct cox_error *err);
/* Returns 0; COX_NOT_FOUND: it is not linked; what cox_executor_link returns. */
int cox_group_links_unlink(struct cox_group_links *links, const char *cluster_id,
                           uint64_t deadline_ns, struct cox_error *err);
/* Sends the role to the ranks. Returns 0; COX_INVALID: no such role; what cox_executor_link
 * returns. */
int cox_group_links_set_role(struct cox_group_links *links, uint32_t role, uint64_t deadline_ns,
                             struct cox_error *err);
enum cox_role cox_group_links_role(struct cox_group_links *links);
/* After ranks were replaced: sends role and links again, and waits until the ranks have linked or
 * failed. Failures are logged: pulls will report them again. */
void cox_group_links_resend(struct cox_group_links *links, uint64_t deadline_ns);

struct cox_group_link {
    char *cluster_id;
    enum cox_link_state state;
    /* the epoch that was linked; 0: only ranks know of this link */
    uint64_t epoch;
    /* FAILED: PDErrorCode */
    int32_t code;
    /* FAILED: the reason; NULL: no rank gave one */
    char *text;
};
/* The states of all ranks, merged, in order of the names. A link that no rank mentions is WAITING.
 * *ret_list is freed with cox_group_link_list_free. Returns as cox_executor_link_status. */
int cox_group_links_status(struct cox_group_links *links, uint64_t deadline_ns,
                           struct cox_group_link **ret_list, size_t *ret_count,
                           struct cox_error *err);
/* The same without asking any rank: all are WAITING. Returns 0 or -ENOMEM. */
int cox_group_links_list(struct cox_group_links *links, struct cox_group_link **ret_list,
                         size_t *ret_count);
void cox_group_link_list_free(struct cox_group_link *list, size_t count);

#endif
