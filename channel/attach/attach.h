/*
 * attach: how the processes of a group come by its memory and its gates.
 *
 * There is one way for each kind of worker, and each has a folder: `named` (regions and semaphores
 * with names in /dev/shm), `sealed` (memfds and futexes, passed as fds), `legacy` (named, for
 * workers of MindIE-LLM, which know neither the control region nor the messages of Coxswain). A
 * struct cox_attach_mode is one such way. The group's geometry has it; outside these folders no
 * code asks which one it is, but what it can do (limits), or calls one of its functions.
 *
 * Processes: the coordinator has a struct cox_attach_group, each rank a struct cox_attached. Both
 *   fill in a control (channel/shm/control.h) and channels (channel/shm/channel.h), whose gates
 *   (channel/shm/gate.h) are of the mode's kind.
 * Threads: a mode is constant; of a group, or of what a rank has, one call at a time.
 * Ownership: modes are static storage. A group owns its memory, and what is lent stays its own; the
 *   caller owns control and channels, and closes channels before, control after the group is freed.
 * Blocks: create, for at most some seconds, while a dead group's memory is freed.
 * If the process dies: named and legacy: names stay, until the next start of that name, or a sweep
 *   (channel/attach/named/names.h). Sealed: nothing.
 */
#ifndef COX_CHANNEL_ATTACH_H
#define COX_CHANNEL_ATTACH_H

#include <coxswain/base.h>

#include <stdbool.h>
#include <stdint.h>

struct cox_attach_group;
struct cox_attached;
struct cox_channel;
struct cox_control;
struct cox_fd_bundle;
struct cox_geometry;
struct cox_region;

/* The memory in which the ranks form their group (coxswain/group.h). */
enum cox_attach_rank_group {
    COX_ATTACH_NO_RANK_GROUP,
    COX_ATTACH_WINDOWS,     /* one object, which all ranks write; a window per incarnation */
    COX_ATTACH_MEMBER_OWNED /* each rank has memory that it alone writes */
};

/* What a group can do, as facts about its ranks and its memory. */
struct cox_attach_limits {
    /* frames of a channel, if the user does not choose */
    uint32_t depth_default;
    enum cox_attach_rank_group rank_group;
    /* The coordinator stores state words that the rank reads. False: tokens are the events. */
    bool coordinator_words;
    /* Ranks announce themselves, and store state words of their own. False: a process that was
     * started is the rank, and its tokens are the events; it has no recorder and never spins. */
    bool rank_words;
    /* Ranks know the messages and fields that Coxswain adds to the executor protocol: opaque and
     * large payloads, requests to some of the ranks, epochs, columns, shared weights. */
    bool extensions;
    /* A dead rank can be replaced while the others live on. */
    bool replaces_one;
    /* The objects' names change at every start (geometry.serial). */
    bool has_serial;
    /* On channels and types without slots, rank 0 alone replies, and may fill the region. */
    bool whole_replies;
    /* A rank's lines, slots, reports and recorder are in memory that it alone writes. False: they
     * are in regions that all ranks write. */
    bool memory_per_rank;
    /* Ranks are not trusted: they, and what they start, may give the group no commands. */
    bool guards_commands;
};

/* Sizes of whole regions, where they do not follow from depth and ranks; in bytes. */
struct cox_attach_sizes {
    uint64_t request[COX_CHANNEL_COUNT];
    uint64_t response[COX_CHANNEL_COUNT];
    uint64_t slot_stride;
};

/* What a group takes of the machine. */
struct cox_attach_account {
    /* of all regions, the control region included */
    uint64_t region_bytes;
    /* of the largest object, even where it takes less memory */
    uint64_t region_size_max;
    uint64_t semaphore_count;
    /* in /dev/shm, of regions and semaphores, each an inode; 0: nothing of it is needed */
    uint64_t name_count;
};

/* What a group is made of; all of it is lent until the group is freed. */
struct cox_attach_request {
    const char *name;
    const struct cox_geometry *geometry;
    /* on huge pages, where no rank can punch holes and some are free */
    bool huge_pages;
    /* filled in by create; closed by the caller */
    struct cox_control *control;
    /* COX_CHANNEL_COUNT; the same */
    struct cox_channel *channels;
};

/* fds for a rank that asks at the control socket. */
struct cox_attach_fds {
    /* room for fd_count of the mode; the caller's */
    int *fds;
    uint32_t count;
    /* bit i: the caller has to close fds[i], also after a failure; the others are lent */
    uint64_t given;
};

/* Of the memory that a rank owns as a member of the rank group: its words, and its values. */
#define COX_ATTACH_MEMBER_FD_COUNT 2

/* Where a process that is to be a rank finds its group; all of it is lent until it leaves. */
struct cox_attach_place {
    /* of the objects' names, without a slash */
    const char *objects;
    uint32_t rank, rank_count;
    /* what it has inherited, or got at the control socket; fd_count 0: it attaches by names */
    struct cox_fd_bundle *bundle;
    uint32_t fd_count;
    /* of a coordinator that need not have a control region; 0: it has one */
    int32_t parent_pid;
    /* filled in; closed by the caller after it has left */
    struct cox_control *control;
};

struct cox_attach_mode {
    /* in status and in layout */
    const char *name;
    /* in the hello reply, and for nodes */
    enum cox_attach attach;
    /* what a wait blocks on, for messages */
    const char *wakeup_name;
    /* in the header of the control region (layout.h) */
    uint32_t layout_flags;
    /* how many fds a rank gets where it gets fds; 0: never */
    uint32_t fd_count;
    struct cox_attach_limits limits;
    /* NULL: frames and slots have sizes of their own */
    const struct cox_attach_sizes *sizes;
    /* Checks what the mode demands beyond what geometry.h says. Returns 0 or code. */
    int (*check)(const struct cox_geometry *geometry, int code, struct cox_error *err);
    void (*account)(const struct cox_geometry *geometry, struct cox_attach_account *ret_account);

    /* The coordinator's; see the functions below, which have the contracts. */
    int (*create)(const struct cox_attach_request *request, struct cox_attach_group **ret_group,
                  struct cox_error *err);
    struct cox_attach_group *(*free)(struct cox_attach_group *group);
    /* NULL: nothing has a name */
    int (*remove_names)(struct cox_attach_group *group);
    int (*lend)(struct cox_attach_group *group, uint32_t rank, int *ret_fds, uint32_t *ret_count,
                struct cox_error *err);
    int (*hand_out)(struct cox_attach_group *group, uint32_t rank, struct cox_attach_fds *fds,
                    bool *ret_renewed, struct cox_error *err);
    /* NULL: all ranks write the same regions */
    int (*give)(struct cox_attach_group *group, uint32_t rank, struct cox_error *err);
    void (*put_away)(struct cox_attach_group *group, uint32_t rank, bool lent);
    int (*renew_rank)(struct cox_attach_group *group, uint32_t rank, struct cox_error *err);
    /* NULL: wakeups are no fds */
    int *(*wakeup_fds)(struct cox_attach_group *group, uint32_t rank, enum cox_channel_id channel);
    /* NULL: ranks find nothing by its name once they have attached */
    int (*renew_all)(struct cox_attach_group *group, struct cox_error *err);
    /* both NULL: a rank's memory of the rank group is new with its process */
    int (*renew_rank_group)(struct cox_attach_group *group, uint64_t incarnation,
                            struct cox_error *err);
    int (*keep_rank_group)(struct cox_attach_group *group, uint64_t incarnation);
    int *(*member_fds)(struct cox_attach_group *group, uint32_t rank);

    /* A rank's. */
    int (*join)(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                struct cox_error *err);
    struct cox_attached *(*leave)(struct cox_attached *attached);
    int (*join_channel)(struct cox_attached *attached, struct cox_channel *channel,
                        enum cox_channel_id id, struct cox_error *err);
    int (*join_rank_group)(struct cox_attached *attached, int *ret_fd, struct cox_region *ret_own,
                           struct cox_region *ret_hints, struct cox_error *err);
    int (*open_recorder)(struct cox_attached *attached, int *ret_fd, int *ret_opened_fd,
                         struct cox_error *err);
};

/* The coordinator's memory of a group. Each mode has more behind it. One call at a time. */
struct cox_attach_group {
    const struct cox_attach_mode *mode;
    struct cox_attach_request request;
    /* the memory of the rank group: of all windows, -1; the hints of members, NULL */
    int rank_group_fd;
    void *rank_group_hints;
};

/* What a rank has of its group. Each mode has more behind it. */
struct cox_attached {
    const struct cox_attach_mode *mode;
    struct cox_attach_place place;
};

/* The modes, for the functions below, and for tests. A worker of Coxswain under a coordinator of
 * MindIE-LLM is in `shim`. */
extern const struct cox_attach_mode cox_attach_named, cox_attach_sealed, cox_attach_legacy,
    cox_attach_shim;

/* The mode of those who do not choose. */
extern const struct cox_attach_mode *const cox_attach_default;

/* What a user has chosen. */
struct cox_attach_choice {
    enum cox_attach attach;
    bool legacy_workers;
    /* ranks are started by hand */
    bool external;
    /* ranks are on other machines: none attaches to this group's memory */
    bool elsewhere;
};

/* The mode of a user's choice, which is read here alone. Returns 0; COX_INVALID: parts of it
 * exclude each other, err says which. */
int cox_attach_choose(const struct cox_attach_choice *choice,
                      const struct cox_attach_mode **ret_mode, struct cox_error *err);
/* The name of the mode in which workers of Coxswain attach so. */
const char *cox_attach_name(enum cox_attach attach);
/* The mode of a group from the flags in its header. Returns 0; COX_CORRUPT. */
int cox_attach_of_flags(uint32_t layout_flags, const struct cox_attach_mode **ret_mode,
                        struct cox_error *err);
/* The mode of a group from the number of fds that a rank gets. Returns 0; COX_INVALID. */
int cox_attach_of_fd_count(uint32_t fd_count, const struct cox_attach_mode **ret_mode,
                           struct cox_error *err);

/* ---- the coordinator's ---- */

/* Removes what a dead group of this name left, and creates the memory and the gates. Blocks for at
 * most some seconds, for the memory of that group's processes.
 * Returns
 *   0
 *   COX_TAKEN: a live group has the name, err says which process
 *   COX_DENIED: another kind of object has the name
 *   COX_NO_SPACE: err says what is needed
 *   -errno
 * On failure nothing is left. */
static inline int cox_attach_create(const struct cox_attach_mode *mode,
                                    const struct cox_attach_request *request,
                                    struct cox_attach_group **ret_group, struct cox_error *err)
{
    return mode->create(request, ret_group, err);
}
/* Names stay. Returns NULL; NULL-safe. */
static inline struct cox_attach_group *cox_attach_free(struct cox_attach_group *group)
{
    return group ? group->mode->free(group) : NULL;
}
/* Removes the names, if there are any yet. Idempotent; NULL-safe. Returns 0; COX_NOT_FOUND: another
 * process has removed them, and nothing was removed now. */
static inline int cox_attach_unlink(struct cox_attach_group *group)
{
    return group && group->mode->remove_names ? group->mode->remove_names(group) : 0;
}
/* For a process that is about to be started as the rank: the fds that it inherits, lent until
 * put_away; from here on only the rank writes what it alone may. ret_fds has room for any mode's
 * (COX_FD_BUNDLE_COUNT). *ret_count 0: it attaches by names. Returns 0 or -errno. */
static inline int cox_attach_lend(struct cox_attach_group *group, uint32_t rank, int *ret_fds,
                                  uint32_t *ret_count, struct cox_error *err)
{
    return group->mode->lend(group, rank, ret_fds, ret_count, err);
}
/* For a process that asks at the control socket: the same, given or lent as `fds` says.
 * *ret_renewed: the rank's memory is new, since a process that got it did not become the rank. The
 * caller may write it until give. Returns 0; COX_NO_SPACE; -errno. */
static inline int cox_attach_hand_out(struct cox_attach_group *group, uint32_t rank,
                                      struct cox_attach_fds *fds, bool *ret_renewed,
                                      struct cox_error *err)
{
    return group->mode->hand_out(group, rank, fds, ret_renewed, err);
}
/* From here on only the rank writes what it alone may. Returns 0 or -errno. */
static inline int cox_attach_give(struct cox_attach_group *group, uint32_t rank,
                                  struct cox_error *err)
{
    return group->mode->give ? group->mode->give(group, rank, err) : 0;
}
/* A process has become the rank, or none will: this one keeps no fd that was for it alone. lent: by
 * lend. */
static inline void cox_attach_put_away(struct cox_attach_group *group, uint32_t rank, bool lent)
{
    group->mode->put_away(group, rank, lent);
}
/* For the next process of a dead rank: new memory, all zero, where the rank has its own. The caller
 * then resets the gates, whose new wakeups go to wakeup_fds. Returns 0; COX_NO_SPACE; -errno: it
 * may be new in part, so try again. */
static inline int cox_attach_renew_rank(struct cox_attach_group *group, uint32_t rank,
                                        struct cox_error *err)
{
    return group->mode->renew_rank(group, rank, err);
}
/* Where cox_gate_reset puts the fds of the rank's new wakeups on this channel. NULL: wakeups are no
 * fds. */
static inline int *cox_attach_wakeup_fds(struct cox_attach_group *group, uint32_t rank,
                                         enum cox_channel_id channel)
{
    return group->mode->wakeup_fds ? group->mode->wakeup_fds(group, rank, channel) : NULL;
}
/* While every rank is dead: new memory under the old names. Returns 0, also where ranks find
 * nothing by its name; COX_NOT_FOUND: another process has removed the names; COX_CLOSED: unlink
 * has; COX_NO_SPACE; -errno: some may be new, so try again. */
static inline int cox_attach_renew_all(struct cox_attach_group *group, struct cox_error *err)
{
    return group->mode->renew_all ? group->mode->renew_all(group, err) : 0;
}
/* Memory for another incarnation of the rank group, all zero; and gives back that of all others,
 * once every rank uses this one or is dead. Without windows both do nothing. Return 0;
 * COX_NO_SPACE; -errno. */
static inline int cox_attach_renew_rank_group(struct cox_attach_group *group, uint64_t incarnation,
                                              struct cox_error *err)
{
    return group->mode->renew_rank_group ? group->mode->renew_rank_group(group, incarnation, err)
                                         : 0;
}
static inline int cox_attach_keep_rank_group(struct cox_attach_group *group, uint64_t incarnation)
{
    return group->mode->keep_rank_group ? group->mode->keep_rank_group(group, incarnation) : 0;
}
/* The fds of the memory that the rank owns as a member of the rank group; -1: taken. The caller may
 * take them. NULL: members own none. */
static inline int *cox_attach_member_fds(struct cox_attach_group *group, uint32_t rank)
{
    return group->mode->member_fds ? group->mode->member_fds(group, rank) : NULL;
}

/* ---- a rank's ---- */

/* Finds the group, maps its control region, or what stands for it, and checks it (control.h).
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_DENIED, COX_CORRUPT, COX_VERSION: it is not as it should be
 *   COX_INVALID: another number of fds, or no such rank
 *   COX_PEER_DEAD: there is no process parent_pid
 *   -errno
 */
int cox_attach_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                    struct cox_error *err);
/* Returns NULL; NULL-safe. Channels stay until they are closed. */
static inline struct cox_attached *cox_attach_leave(struct cox_attached *attached)
{
    return attached ? attached->mode->leave(attached) : NULL;
}
/* Attaches the rank's end of a channel. The same codes. */
static inline int cox_attach_join_channel(struct cox_attached *attached,
                                          struct cox_channel *channel, enum cox_channel_id id,
                                          struct cox_error *err)
{
    return attached->mode->join_channel(attached, channel, id, err);
}
/* Gives the memory of the rank group: an fd of its windows, or the regions that this rank owns
 * (COX_ATTACH_MEMBER_FD_COUNT) and the hints. What a group has not stays as it was. */
static inline int cox_attach_join_rank_group(struct cox_attached *attached, int *ret_fd,
                                             struct cox_region *ret_own,
                                             struct cox_region *ret_hints, struct cox_error *err)
{
    return attached->mode->join_rank_group(attached, ret_fd, ret_own, ret_hints, err);
}
/* An fd of what the rank's flight recorder is in. *ret_opened_fd: the same, if the caller has to
 * close it; else unchanged. */
static inline int cox_attach_open_recorder(struct cox_attached *attached, int *ret_fd,
                                           int *ret_opened_fd, struct cox_error *err)
{
    return attached->mode->open_recorder(attached, ret_fd, ret_opened_fd, err);
}

#endif
