/*
 * fd_bundle: the memory of a group as open fds, for a rank that does not attach by names.
 *
 * Their order is that of the group's mode: channel/attach/named/named_channel.h or sealed.h; the
 * count tells which. It is passed to the new process in COXSWAIN_FDS as `FIRST:COUNT`. Over the
 * control socket one more may follow: the eventfd by which the rank notifies the coordinator of
 * replies. A rank that the coordinator starts inherits that one separately, as number
 * COXSWAIN_NOTIFY_FD.
 *
 * Threads: one at a time per struct.
 * Ownership: the struct owns its fds.
 * Blocks: nothing.
 * If the process dies: fds close by themselves; nothing here has a name.
 */
#ifndef COX_CHANNEL_FD_BUNDLE_H
#define COX_CHANNEL_FD_BUNDLE_H

#include "channel/attach/attach.h"

/* fds of a rank, at most */
#define COX_FD_BUNDLE_COUNT 29

struct cox_fd_bundle {
    /* -1: not there */
    int fds[COX_FD_BUNDLE_COUNT];
    /* fd_count of the mode; 0: nothing was taken */
    uint32_t count;
    /* an eventfd; -1: none */
    int notify_fd;
};

void cox_fd_bundle_init(struct cox_fd_bundle *bundle);  /* all -1 */
void cox_fd_bundle_close(struct cox_fd_bundle *bundle); /* idempotent */
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

#endif
