/*
 * named: regions and semaphores with names in /dev/shm, as the design card has them.
 *
 * Every rank writes the same regions: this way is for ranks that trust each other. `legacy` stands
 * on it. Contracts: channel/attach/attach.h.
 */
#ifndef COX_CHANNEL_ATTACH_NAMED_H
#define COX_CHANNEL_ATTACH_NAMED_H

#include "channel/shm/fd_bundle.h"
#include "channel/shm/geometry.h"

struct cox_named_group {
    struct cox_attach_group base;
    /* cox_name_objects */
    char objects[COX_NAME_SIZE_MAX + 1];
    /* the names are in /dev/shm, those of the first parts_made of COX_CONTROL_PART_COUNT */
    bool linked;
    int parts_made;
    /* What the next process of a rank gets where names are gone: what all ranks share, which is
     * lent, and wakeups of its own. count 0: not opened. */
    struct cox_fd_bundle shared;
    struct cox_fd_bundle replacements[COX_RANK_COUNT_MAX];
};

/* Also of sealed groups: there is no serial. */
int cox_named_check(const struct cox_geometry *geometry, int code, struct cox_error *err);
void cox_named_account(const struct cox_geometry *geometry, struct cox_attach_account *ret_account);
int cox_named_create(const struct cox_attach_request *request, struct cox_attach_group **ret_group,
                     struct cox_error *err);
/* For a create that fails later: as if it had failed itself. */
void cox_named_undo(struct cox_attach_group *group);
struct cox_attach_group *cox_named_free(struct cox_attach_group *group);
int cox_named_unlink(struct cox_attach_group *group);
int cox_named_lend(struct cox_attach_group *group, uint32_t rank, int *ret_fds, uint32_t *ret_count,
                   struct cox_error *err);
int cox_named_hand_out(struct cox_attach_group *group, uint32_t rank, struct cox_attach_fds *fds,
                       bool *ret_renewed, struct cox_error *err);
void cox_named_put_away(struct cox_attach_group *group, uint32_t rank, bool lent);
int cox_named_renew_rank(struct cox_attach_group *group, uint32_t rank, struct cox_error *err);
int *cox_named_wakeup_fds(struct cox_attach_group *group, uint32_t rank,
                          enum cox_channel_id channel);
int cox_named_renew_rank_group(struct cox_attach_group *group, uint64_t incarnation,
                               struct cox_error *err);
int cox_named_keep_rank_group(struct cox_attach_group *group, uint64_t incarnation);

int cox_named_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                   struct cox_error *err);
struct cox_attached *cox_named_leave(struct cox_attached *attached);
int cox_named_join_channel(struct cox_attached *attached, struct cox_channel *channel,
                           enum cox_channel_id id, struct cox_error *err);
int cox_named_join_rank_group(struct cox_attached *attached, int *ret_fd,
                              struct cox_region *ret_own, struct cox_region *ret_hints,
                              struct cox_error *err);
int cox_named_open_recorder(struct cox_attached *attached, int *ret_fd, int *ret_opened_fd,
                            struct cox_error *err);

/* The functions above, for struct cox_attach_mode. */
#define COX_NAMED_FUNCTIONS                                                                        \
    .account = cox_named_account, .free = cox_named_free, .remove_names = cox_named_unlink,        \
    .lend = cox_named_lend, .hand_out = cox_named_hand_out, .put_away = cox_named_put_away,        \
    .renew_rank = cox_named_renew_rank, .wakeup_fds = cox_named_wakeup_fds,                        \
    .renew_rank_group = cox_named_renew_rank_group, .keep_rank_group = cox_named_keep_rank_group,  \
    .leave = cox_named_leave, .join_rank_group = cox_named_join_rank_group,                        \
    .open_recorder = cox_named_open_recorder

#endif
