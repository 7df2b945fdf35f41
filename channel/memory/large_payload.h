/*
 * large_payload: a request or reply too large for its frame or slot, sent out of line in memory of
 * its own. The frame or slot carries a reference instead of the bytes.
 *
 * Each payload is one memfd: its sender writes it through a mapping, seals it, and exports an fd
 * that is open for reading only. What travels is a reference: a handle (handle.h) and the size of
 * the message. There is no shared reference count and no allocator to corrupt: the kernel counts
 * the mappings, and a dead process's share is freed with it.
 *
 *   sender   reserve -> write -> publish the reference -> drop, when no reader will open it
 *            or fill in place of both, where the bytes are at hand, or adopt, where the memory is
 *   reader   opens by the handle; its mapping stays valid whatever the sender does
 *
 * The frame or slot with the reference tells when no reader will open the payload: every
 * asked rank has returned the frame or is dead, or the slot's request has ended. Both sides keep
 * payloads up to COX_LARGE_PAYLOAD_KEEP_SIZE for the next message in the same frame or slot, which
 * spares page faults and mmap calls. Larger ones are freed at once.
 *
 * Private to the library.
 * Threads: any thread may use a sender; one thread at a time uses a payload or a view.
 * Ownership: a payload's memory belongs to its sender and is lent until drop; a view's bytes are
 *   lent until release.
 * Blocks: while pages are allocated, and for at most 1 s on the group's control socket, if there is
 *   one. The sender stores its fd there too, for readers that may not take fds out of the sender
 *   (Yama, seccomp).
 * Bytes: a reference is input from another process. Its handle must belong to the expected process
 *   and name memory that cannot shrink. Bytes of an untrusted process are read by copy.
 * If the sender dies: mappings stay valid, opening fails with COX_PEER_DEAD. If a reader dies:
 *   nothing is left.
 */
#ifndef COX_CHANNEL_LARGE_PAYLOAD_H
#define COX_CHANNEL_LARGE_PAYLOAD_H

#include <coxswain/handle.h>
#include "channel/shm/region.h"
#include "payload_memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define COX_LARGE_PAYLOAD_KEEP_SIZE (UINT64_C(8) << 20)
/* Upper limit of what a side can be configured to send or accept. */
#define COX_LARGE_PAYLOAD_SIZE_MAX (UINT64_C(1) << 40)

struct cox_large_payload_ref {
    struct cox_handle handle;
    /* of the message; the memory may be larger */
    uint64_t size;
};

/* One sending process. All its payloads must be dropped before deinit. */
struct cox_large_payload_sender {
    /* guards the exporters, which the first reserve creates */
    pthread_mutex_t lock;
    /* stores exported fds at the control socket; NULL: there is none */
    struct cox_exporter *exporter;
    /* without a control socket; also the fallback when storing there fails */
    struct cox_exporter *plain;
    /* payloads that exist, kept ones included; for display */
    _Atomic uint64_t payload_count;
    _Atomic uint64_t payload_bytes;
};

void cox_large_payload_sender_init(struct cox_large_payload_sender *sender);
void cox_large_payload_sender_deinit(struct cox_large_payload_sender *sender);

struct cox_large_payload {
    /* the sender writes here, unless it was filled; base NULL: empty */
    struct cox_region region;
    bool is_filled;
    /* where it was adopted */
    struct cox_payload_memory *memory;
    struct cox_handle handle;
    /* that exported the handle */
    struct cox_exporter *exporter;
};

/* Makes room for size bytes, all of them allocated; the previous content is lost. Reuses the memory
 * when it is large enough. socket_path: control socket of the group, NULL: none; read by the first
 * reserve of a sender only. When storing the fd there fails, readers need pidfd_getfd.
 * Returns:
 *   0
 *   COX_NO_SPACE: no memory, or size exceeds COX_LARGE_PAYLOAD_SIZE_MAX
 *   as cox_exporter_new and cox_exporter_export
 * On failure the payload is empty. */
int cox_large_payload_reserve(struct cox_large_payload_sender *sender, const char *socket_path,
                              uint64_t size, struct cox_large_payload *payload,
                              struct cox_error *err);
/* Exchanges the memory of two payloads that are not in use, so that the one that was used last, and
 * is in a cache, is used again. */
void cox_large_payload_swap(struct cox_large_payload *one, struct cox_large_payload *other);
/* As reserve, with these parts of `size` bytes in it, one after the other, for one message: nobody
 * can write to it afterwards. Larger
 * than COX_LARGE_PAYLOAD_KEEP_SIZE this is cheaper than reserve and a copy, which fault and clear
 * pages. */
int cox_large_payload_fill(struct cox_large_payload_sender *sender, const char *socket_path,
                           const struct iovec *parts, uint64_t size,
                           struct cox_large_payload *payload, struct cox_error *err);
/* As fill, with the first size bytes of memory that is finished. The payload has a reference to it
 * until it is dropped. */
int cox_large_payload_adopt(struct cox_large_payload_sender *sender, const char *socket_path,
                            struct cox_payload_memory *memory, uint64_t size,
                            struct cox_large_payload *payload, struct cox_error *err);
/* A reference to its first size bytes. */
struct cox_large_payload_ref cox_large_payload_refer(const struct cox_large_payload *payload,
                                                     uint64_t size);
/* True: filled, or larger than COX_LARGE_PAYLOAD_KEEP_SIZE, so it is freed after its message. */
bool cox_large_payload_is_transient(const struct cox_large_payload *payload);
/* Frees the memory. Idempotent; a zeroed payload is empty. */
void cox_large_payload_drop(struct cox_large_payload_sender *sender,
                            struct cox_large_payload *payload);

/* The process that must have sent the payload. */
struct cox_large_payload_origin {
    pid_t pid;
    /* start time; 0: that of the process which has the pid now */
    uint64_t start;
    /* control socket to fetch fds from; NULL: none */
    const char *socket_path;
};

/* A reader's mapping; all zero: none. */
struct cox_large_payload_view {
    struct cox_handle handle;
    struct cox_region region;
};

/* Maps the payload for reading, unless the view maps it already. *ret_bytes is lent until release.
 * Returns:
 *   0
 *   COX_CORRUPT: not a valid reference, not from the expected process, or memory that could shrink
 *   COX_NO_SPACE: no memory for the mapping
 *   as cox_handle_open */
int cox_large_payload_view_map(struct cox_large_payload_view *view,
                               const struct cox_large_payload_ref *ref,
                               const struct cox_large_payload_origin *peer,
                               const uint8_t **ret_bytes, struct cox_error *err);
/* Exchanges the view `own` with the one of these that maps the payload already, if there is one: a
 * sender's payloads change their frames. Neither of the two may be in use. */
void cox_large_payload_view_find(struct cox_large_payload_view *views, size_t view_count,
                                 size_t stride, struct cox_large_payload_view *own,
                                 const struct cox_large_payload_ref *ref);
/* Ends the use of the bytes; a small payload stays mapped for the next message. */
void cox_large_payload_view_release(struct cox_large_payload_view *view);
void cox_large_payload_view_drop(struct cox_large_payload_view *view); /* idempotent */

/* A lazy copy (lazy_copy.h) of the first size bytes of the payload that the view maps.
 * Returns as cox_large_payload_view_map. */
int cox_large_payload_view_copy(const struct cox_large_payload_view *view, uint64_t size,
                                const struct cox_large_payload_origin *peer, void **ret_bytes,
                                struct cox_error *err);

#endif
