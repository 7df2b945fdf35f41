/*
 * fd entries: the fds that a control socket keeps for the handles of fd owners (fd_store.h), and
 * the requests for them.
 *
 * A request is 128 bytes, little-endian. A put has one fd with its first byte:
 *
 *   0   op u32           enum cox_fd_store_op
 *   4   reserved u32
 *   8   number u64       chosen by the sender; repeated in the reply
 *   16  reserved, zero
 *   64  handle, 64 bytes
 *
 * The reply is 16 bytes. That of a get has one fd with its first byte:
 *
 *   0   status u32       enum cox_status
 *   4   reserved u32
 *   8   number u64
 *
 * Private to the library.
 * Threads: one at a time, the control socket's.
 * Ownership: fds that are kept belong to the fd entries.
 * Blocks: nothing.
 * If the process dies: all entries are gone.
 */
#ifndef COX_CHANNEL_FD_ENTRIES_H
#define COX_CHANNEL_FD_ENTRIES_H

#include "closer.h"
#include "channel/base/handle_format.h"

#include <sys/types.h>

#define COX_FD_STORE_REQUEST_SIZE 128
#define COX_FD_STORE_REPLY_SIZE 16

enum cox_fd_store_op {
    COX_FD_STORE_PUT = 1,
    COX_FD_STORE_REMOVE = 2,
    COX_FD_STORE_GET = 3,
};

void cox_fd_store_request_format(enum cox_fd_store_op op, uint64_t number,
                                 const struct cox_handle *handle,
                                 uint8_t bytes[COX_FD_STORE_REQUEST_SIZE]);
void cox_fd_store_reply_format(int status, uint64_t number, uint8_t bytes[COX_FD_STORE_REPLY_SIZE]);
/* bytes are input. Returns 0, or COX_CORRUPT: not a status, or reserved bytes that are set. */
int cox_fd_store_reply_parse(const uint8_t bytes[COX_FD_STORE_REPLY_SIZE], int *ret_status,
                             uint64_t *ret_number);

struct cox_fd_entry;

struct cox_fd_entries {
    /* bucket_count, a power of two; NULL: none yet */
    struct cox_fd_entry **buckets;
    uint32_t bucket_count;
    uint32_t count;
    /* borrowed */
    struct cox_closer *closer;
    /* an eighth of them is not available to the owner that has most */
    uint32_t max;
};

/* One connection; all zero except pid before its first request. */
struct cox_fd_owner {
    /* 0: not visible here, so its handles are not compared with it */
    pid_t pid;
    /* its entries */
    struct cox_fd_entry *first;
    uint32_t count;
};

/* closer is borrowed. */
void cox_fd_entries_init(struct cox_fd_entries *fd_entries, uint32_t max,
                         struct cox_closer *closer);
/* Gives all fds to the closer; no fd owner may be used afterwards. Idempotent. */
void cox_fd_entries_deinit(struct cox_fd_entries *fd_entries);

/* Serves a request of an fd owner. bytes are input. *fd came with them, -1: none; it is set to -1
 * if it is kept. *ret_fd, -1 for none, is lent: it must be sent with the reply before the next
 * call. *ret_number: as in the request. Returns the status to reply:
 *   0
 *   COX_INVALID: no such operation, reserved bytes that are set, or no fd where one is needed
 *   COX_DENIED: a handle of another process, or of another fd
 *   COX_TAKEN
 *   COX_FULL
 *   COX_NOT_FOUND
 */
int cox_fd_entries_serve(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner,
                         const uint8_t bytes[COX_FD_STORE_REQUEST_SIZE], int *fd, int *ret_fd,
                         uint64_t *ret_number);
/* The connection has ended: gives the owner's fds to the closer. */
void cox_fd_entries_forget(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner);

#endif
