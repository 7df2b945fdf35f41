/*
 * fd entries: the fds that a control socket keeps for the handles of fd owners (fd_store.h), and
 * the bytes they are asked for with.
 *
 * A request is 128 bytes, little-endian, one fd with its first byte where something is put:
 *
 *   0   op u32           enum cox_fd_store_op
 *   4   reserved u32
 *   8   number u64       whatever the fd owner likes: the reply has it again
 *   16  reserved, zero
 *   64  handle, 64 bytes
 *
 * The reply is 16 bytes, one fd with its first byte where something is fetched:
 *
 *   0   status u32       enum cox_status
 *   4   reserved u32
 *   8   number u64
 *
 * Private to the library.
 * Threads: one at a time, the control socket's.
 * Ownership: fds that are kept belong to the fd entries.
 * Blocks: nothing.
 * If the process dies: all is forgotten.
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
/* bytes are a stranger's. Returns 0, or COX_CORRUPT: no status, or reserved bytes that are set. */
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
    /* of them an eighth is not for the one that has left most */
    uint32_t max;
};

/* One connection; all zero but for pid before its first request. */
struct cox_fd_owner {
    /* 0: cannot be seen from here, so that its handles are not checked for theirs */
    pid_t pid;
    /* what it left */
    struct cox_fd_entry *first;
    uint32_t count;
};

/* closer is borrowed. */
void cox_fd_entries_init(struct cox_fd_entries *fd_entries, uint32_t max,
                         struct cox_closer *closer);
/* Gives all that is kept to the closer; no fd owner may be used after it. Idempotent. */
void cox_fd_entries_deinit(struct cox_fd_entries *fd_entries);

/* What an fd owner asks. bytes are a stranger's. *fd is what came with them, -1: nothing; when it
 * is kept it is -1 after the call. *ret_fd, -1 for none, is lent: it has to be sent with the reply
 * before the next call. *ret_number: as in the request. Returns the status to reply: 0;
 * COX_INVALID: no such operation, reserved bytes that are set, no fd where one is needed;
 * COX_DENIED: a handle of another process, or not of this fd; COX_TAKEN; COX_FULL; COX_NOT_FOUND.
 */
int cox_fd_entries_serve(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner,
                         const uint8_t bytes[COX_FD_STORE_REQUEST_SIZE], int *fd, int *ret_fd,
                         uint64_t *ret_number);
/* Its connection has ended: gives what it left to the closer. */
void cox_fd_entries_forget(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner);

#endif
