/*
 * large_payload: bytes that do not fit their frame or slot, in memory of their own that the frame
 * or slot refers to.
 *
 * A block is one memfd, written by its sender, sealed, and open to others for reading only; what
 * travels is a reference: its handle (handle.h), and how many bytes of it are meant. There is no
 * shared count and no allocator that could be spoilt: who holds a block is known to the kernel, and
 * what anybody held who died is free with him.
 *
 *   sender   reserve -> written -> its reference is published -> let go, once nobody is to open it
 *            any more
 *   reader   opens by the handle; what it has mapped stays, whatever the sender does meanwhile
 *
 * When nobody is to open it any more is what the frame or slot says that refers to it: a frame that
 * every asked rank has returned or is dead for, a slot whose request has ended. Blocks up to
 * COX_LARGE_PAYLOAD_KEEP_SIZE are kept by both sides, for the next message in the same frame or
 * slot: their pages are there, and they are mapped. Larger ones go at once.
 *
 * Private to the library.
 * Threads: a sender may be used by any; a block or a view by one at a time.
 * Ownership: a block's memory is its sender's, and lent until it is let go; a view's is lent until
 * that is let go. Blocks: nothing but the making of pages, and a visit at the group's door, a
 * second at most, where there is one: a block is left there
 *   as well, for readers who may not take fds out of the sender (Yama, seccomp).
 * Bytes: a reference is another process's writing. Its handle has to be of the process that is
 *   expected, and mean memory that cannot shrink; what is read of a process that is not trusted is
 *   read by copy.
 * If the sender dies: what is open stays valid, the rest is gone (COX_PEER_DEAD). If a reader dies:
 * nothing is left.
 */
#ifndef COX_CHANNEL_LARGE_PAYLOAD_H
#define COX_CHANNEL_LARGE_PAYLOAD_H

#include "channel/handle/handle.h"
#include "channel/shm/region.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define COX_LARGE_PAYLOAD_KEEP_SIZE (UINT64_C(4) << 20)
/* The most that a side may be told to send or take. */
#define COX_LARGE_PAYLOAD_SIZE_MAX (UINT64_C(1) << 40)

struct cox_large_payload_ref {
    struct cox_handle handle;
    /* bytes of it that are meant */
    uint64_t size;
};

/* One process that sends; all its blocks have been dropped before deinit. */
struct cox_large_payload_sender {
    /* of the exporters, which the first reserve makes */
    pthread_mutex_t lock;
    /* leaves what it exports at the door; NULL: there is none */
    struct cox_exporter *exporter;
    /* for what the door does not take */
    struct cox_exporter *plain;
    /* that it has, kept ones too; for display */
    _Atomic uint64_t block_count;
    _Atomic uint64_t block_bytes;
};

void cox_large_payload_sender_init(struct cox_large_payload_sender *sender);
void cox_large_payload_sender_deinit(struct cox_large_payload_sender *sender);

struct cox_large_payload {
    /* where the sender writes; base NULL: there is none */
    struct cox_region region;
    struct cox_handle handle;
    /* whose the handle is */
    struct cox_exporter *exporter;
};

/* Afterwards the block has room for size bytes, each reserved; what was in it is lost. door_path:
 * of the group, NULL: none; looked at by the first reserve of a sender. Where the door does not
 * take it, readers have the kernel's way alone. Returns 0; COX_NO_SPACE; what cox_exporter_new and
 * _export return. Unless 0 there is no block. */
int cox_large_payload_reserve(struct cox_large_payload_sender *sender, const char *door_path,
                              uint64_t size, struct cox_large_payload *block,
                              struct cox_error *err);
/* size bytes of it. */
struct cox_large_payload_ref cox_large_payload_refer(const struct cox_large_payload *block,
                                                     uint64_t size);
/* It is too large to be kept. */
bool cox_large_payload_is_transient(const struct cox_large_payload *block);
/* Idempotent; a zeroed block is fine. */
void cox_large_payload_drop(struct cox_large_payload_sender *sender,
                            struct cox_large_payload *block);

/* Who is expected to have sent it. */
struct cox_large_payload_origin {
    pid_t pid;
    /* 0: whatever process has that pid */
    uint64_t start;
    /* NULL: none */
    const char *door_path;
};

/* What a reader has mapped; all zero: nothing. */
struct cox_large_payload_view {
    struct cox_handle handle;
    struct cox_region region;
};

/* Maps it for reading, unless that is mapped already. Returns 0, and *ret_bytes are lent until
 * let_go; COX_CORRUPT: no such reference can be; also memory that could shrink; COX_NO_SPACE; as
 * cox_handle_open. */
int cox_large_payload_view_map(struct cox_large_payload_view *view,
                               const struct cox_large_payload_ref *ref,
                               const struct cox_large_payload_origin *peer,
                               const uint8_t **ret_bytes, struct cox_error *err);
void cox_large_payload_view_release(
    struct cox_large_payload_view *view);                              /* what is small is kept */
void cox_large_payload_view_drop(struct cox_large_payload_view *view); /* idempotent */

/* Copies its ref->size bytes to buffer. Bytes that the sender writes meanwhile may be any. Returns
 * as map. */
int cox_large_payload_read(const struct cox_large_payload_ref *ref,
                           const struct cox_large_payload_origin *peer, void *buffer,
                           struct cox_error *err);

#endif
