/*
 * attach: how the processes of a group come by its memory and its gates.
 *
 * There is one way for each kind of worker, and each has a folder: `named` (regions and semaphores
 * with names in /dev/shm), `sealed` (memfds and futexes, passed as fds), `legacy` (named, for
 * workers of MindIE-LLM, which know neither the control region nor the messages of Coxswain). A
 * struct cox_attach_mode is one such way. The group's geometry has it; outside these folders no
 * code asks which one it is, but what it can do (limits), or calls one of its functions.
 *
 * Threads: any; a mode is constant.
 * Ownership: static storage.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_ATTACH_H
#define COX_CHANNEL_ATTACH_H

#include <coxswain/base.h>

#include <stdbool.h>
#include <stdint.h>

struct cox_geometry;

/* The memory in which the ranks form their group (coxswain/group.h). */
enum cox_attach_rank_group {
    COX_ATTACH_NO_RANK_GROUP,
    COX_ATTACH_WINDOWS,     /* one object, which all ranks write; a window per generation */
    COX_ATTACH_MEMBER_OWNED /* each rank has memory that it alone writes */
};

/* What a group can do, as facts about its ranks and its memory. */
struct cox_attach_limits {
    /* frames of a channel: at most, and if the user does not choose */
    uint32_t depth_max, depth_default;
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
    /* in /dev/shm, of regions and semaphores; 0: nothing of it is needed */
    uint64_t name_count;
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
    /* how many of them the first process of a rank inherits; 0: it attaches by names */
    uint32_t inherited_fd_count;
    struct cox_attach_limits limits;
    /* NULL: frames and slots have sizes of their own */
    const struct cox_attach_sizes *sizes;
    /* Checks what the mode demands beyond what geometry.h says. Returns 0 or code. */
    int (*check)(const struct cox_geometry *geometry, int code, struct cox_error *err);
    void (*account)(const struct cox_geometry *geometry, struct cox_attach_account *ret_account);
};

/* The modes, for the functions below, and for tests. */
extern const struct cox_attach_mode cox_attach_named, cox_attach_sealed, cox_attach_legacy;

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

#endif
