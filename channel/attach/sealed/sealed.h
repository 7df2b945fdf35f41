/*
 * sealed: the memory of a group in which nothing has a name, and no rank can touch what is not its
 * own.
 *
 * Five kinds of memfds; layout.h and worker/group/group_layout.h say what is where in them:
 *
 *   request memory  mapped by the coordinator, then sealed against shrinking, growing and any
 *                   further writing (F_SEAL_FUTURE_WRITE); ranks get it as an fd that is open for
 *                   reading only
 *   rank memory     one per rank, sealed against shrinking and growing; only that rank gets it.
 *                   Another one is made for every incarnation of the rank, so that late writes of a
 *                   dead process reach no group
 *   wake memory     words that all processes may write. They are hints: they say when to check,
 *                   never what is true
 *   group memory    two per rank, of the rank group (coxswain/group.h): its words, and its
 *                   values (`cox_payload_group`: what a rank computes it can falsify, so these it
 *                   may). The coordinator maps neither. The rank is the first to have them: it maps
 *                   them and then seals them against any further writing, by any process and fd.
 *                   Then the other ranks get them, and can only read. Made anew for every
 *                   incarnation of the rank, like rank memory
 *
 * So a process can write its own memory, which no other process writes once the rank has it, and
 * the hints.
 *
 * Threads: create, attach, renew and close from one thread at a time.
 * Ownership: the caller owns struct cox_sealed and struct cox_control, which has the request
 * memory. Blocks: nothing. If the process dies: the kernel frees all of it with the last process
 * that has it.
 */
#ifndef COX_CHANNEL_SEALED_H
#define COX_CHANNEL_SEALED_H

#include "channel/shm/channel.h"

/* The fds that a rank gets, in this order. */
enum cox_sealed_fd {
    COX_SEALED_REQUEST = 0,
    COX_SEALED_RANK,
    COX_SEALED_WAKE,
    COX_SEALED_GROUP,
    COX_SEALED_GROUP_PAYLOAD,
    COX_SEALED_FD_COUNT,
};
/* The seals of memory with one writer, which has it mapped. */
#define COX_SEALED_OWNED                                                                           \
    ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL))

struct cox_sealed {
    struct cox_region wake;
    /* worker: only its own */
    struct cox_region ranks[COX_RANK_COUNT_MAX];
    /* Worker: its memory as a member of the rank group, and the hints of that group, a second
     * mapping of these. A user that takes one leaves {NULL, 0}. */
    struct cox_region group[COX_ATTACH_MEMBER_FD_COUNT], group_hints;
    /* The coordinator's, for hand_out; -1: none. */
    int request_fd, wake_fd;
    int rank_fds[COX_RANK_COUNT_MAX];
    int group_fds[COX_RANK_COUNT_MAX][COX_ATTACH_MEMBER_FD_COUNT];
};

void cox_sealed_init(struct cox_sealed *sealed);

/* Coordinator: creates the memory; control gets the request memory, with its header filled.
 * huge_pages: the request memory is on huge pages if there are any; memory in which ranks can punch
 * holes never is. Returns 0; COX_NO_SPACE; -errno. On failure nothing is left. */
int cox_sealed_create(struct cox_sealed *sealed, struct cox_control *control,
                      const struct cox_geometry *geometry, bool huge_pages, struct cox_error *err);
/* Coordinator: new memory for the next process of a dead rank, its own at the same address and that
 * of the rank group, all zero. Returns 0; COX_NO_SPACE: nothing has changed; -errno: it may be new
 * in part, so call it again before the memory is handed out. */
int cox_sealed_renew_rank(struct cox_sealed *sealed, const struct cox_geometry *geometry,
                          uint32_t rank, struct cox_error *err);
/* The fds for a rank; all are lent. */
void cox_sealed_hand_out(const struct cox_sealed *sealed, uint32_t rank,
                         int ret_fds[COX_SEALED_FD_COUNT]);

/* Worker: attaches the memory of its rank; the fds stay the caller's. Checks seals and sizes before
 * anything is read, and the header as control.h says. Its memory of the rank group is sealed once
 * it is mapped, so this works only once.
 * Returns
 *   0
 *   COX_DENIED: memory that could shrink, or another user's
 *   COX_VERSION
 *   COX_CORRUPT
 *   COX_INVALID: no such rank
 *   -errno
 */
int cox_sealed_attach(struct cox_sealed *sealed, struct cox_control *control, uint32_t rank,
                      const int fds[COX_SEALED_FD_COUNT], struct cox_error *err);

/* A channel, as coordinator for all ranks, or as worker for its own. Cannot fail. */
void cox_channel_bind(struct cox_channel *channel, const struct cox_sealed *sealed,
                      const struct cox_control *control, enum cox_channel_id id, bool coordinator);

/* Checks that this is memory of the rank group that only its rank can write, now and later. label
 * is for err. Returns 0; COX_DENIED: a seal is missing, or it is other memory, err says which;
 * COX_CORRUPT: another size than given; -errno. */
int cox_sealed_check_group(int fd, uint64_t size, const char *label, struct cox_error *err);

/* Closes all but the memory that control has. Idempotent. */
void cox_sealed_close(struct cox_sealed *sealed);

/* ---- words ---- */

static inline struct cox_layout_reports *cox_sealed_reports(const struct cox_control *control)
{
    return (struct cox_layout_reports *)(void *)control->layout->ranks;
}
static inline struct cox_layout_wake_channel *cox_sealed_wake(const struct cox_sealed *sealed,
                                                              enum cox_channel_id channel)
{
    return &((struct cox_layout_wake *)sealed->wake.base)->channels[channel];
}

/* The error channel. A rank reports in its own slot; its line counts its reports in `done`, and the
 * coordinator those that it has taken out in `fetched`.
 * Rank: waits until its slot is free for report `number`. Returns 0; COX_TIMEOUT; -errno. */
int cox_sealed_await_heard(const struct cox_control *control, uint32_t rank, uint64_t number,
                           uint64_t deadline_ns);
/* Coordinator: frees the slot of the rank. */
void cox_sealed_set_heard(const struct cox_control *control, uint32_t rank, uint64_t number);

#endif
