/*
 * fd_bundle: the memory of a group as open fds, for a rank that is replaced when the names are
 * gone.
 *
 * The order is fixed, and passed to the new process in COXSWAIN_FDS as `FIRST:COUNT`:
 *
 *   0              control region
 *   1 + 6 c        request region of channel c, for reading (c: 0 to 3, enum cox_channel_id)
 *   2 + 6 c        response region
 *   3 + 6 c + b    wakeup b of the rank (enum cox_wakeup): semaphores of its own, newly made
 *   25             response region of the error channel
 *   26, 27         its two wakeups, which all ranks share
 *   28             memory of the rank group (coxswain/group.h)
 *
 * A rank of a sealed group gets fewer fds, those of sealed.h in its order; the count tells which it
 * is. Over the control socket one more may follow: the eventfd by which the rank notifies the
 * coordinator of replies. A rank that the coordinator starts inherits that one separately, as
 * number COXSWAIN_NOTIFY_FD.
 *
 * Threads: one at a time per struct.
 * Ownership: the struct owns its fds.
 * Blocks: nothing.
 * If the process dies: fds close by themselves; nothing here has a name.
 */
#ifndef COX_CHANNEL_FD_BUNDLE_H
#define COX_CHANNEL_FD_BUNDLE_H

#include "channel.h"
#include "sealed.h"

#define COX_FD_BUNDLE_COUNT 29

struct cox_fd_bundle {
    /* -1: not there */
    int fds[COX_FD_BUNDLE_COUNT];
    /* COX_FD_BUNDLE_COUNT or COX_SEALED_FD_COUNT; 0: nothing was taken */
    uint32_t count;
    /* an eventfd; -1: none */
    int notify_fd;
};

#define COX_FD_BUNDLE_CONTROL 0
#define COX_FD_BUNDLE_GROUP 28
static inline int cox_fd_bundle_request(enum cox_channel_id channel)
{
    return 1 + 6 * (int)channel;
}
static inline int cox_fd_bundle_response(enum cox_channel_id channel)
{
    return channel == COX_CHANNEL_ERROR ? 25 : 2 + 6 * (int)channel;
}
static inline int cox_fd_bundle_wakeup(enum cox_channel_id channel, enum cox_wakeup wakeup)
{
    return channel == COX_CHANNEL_ERROR ? 26 + (wakeup == COX_WAKEUP_RESPONSE_CONSUME)
                                        : 3 + 6 * (int)channel + (int)wakeup;
}

void cox_fd_bundle_init(struct cox_fd_bundle *bundle);  /* all -1 */
void cox_fd_bundle_close(struct cox_fd_bundle *bundle); /* idempotent */
/* Coordinator, while the names exist: opens the objects that all ranks share; the wakeups of ranks
 * stay -1. Returns 0 or -errno. */
int cox_fd_bundle_open(struct cox_fd_bundle *bundle, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err);

/* Worker: takes ownership of the fds first to first + count - 1 if it returns 0. Returns 0;
 * COX_INVALID: another count, or one of them is not open; COX_DENIED: one is not a non-empty file
 * of this user; -errno. */
int cox_fd_bundle_take(struct cox_fd_bundle *bundle, int first, uint32_t count,
                       struct cox_error *err);
/* Worker: the same for fds from the control socket; on failure they are closed. */
int cox_fd_bundle_adopt(struct cox_fd_bundle *bundle, int *fds, uint32_t count,
                        struct cox_error *err);
/* Worker: takes over COXSWAIN_NOTIFY_FD. Returns 0; COX_INVALID: it is not open; COX_DENIED: it is
 * a file, not an eventfd; -errno. */
int cox_fd_bundle_take_notify(struct cox_fd_bundle *bundle, int fd, struct cox_error *err);
/* Worker: attaches one channel from the fds, which stay open. The same checks and codes as
 * cox_channel_attach; a file need not have a name. */
int cox_fd_bundle_attach(const struct cox_fd_bundle *bundle, struct cox_channel *channel,
                         const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                         struct cox_error *err);

#endif
