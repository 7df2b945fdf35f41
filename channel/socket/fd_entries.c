#include "fd_entries.h"

#include "channel/base/base_internal.h"
#include "channel/base/hash.h"
#include "channel/base/idioms.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define BUCKET_COUNT_MIN 16

/* Where the fields are, see the header. */
enum { OP = 0, RESERVED_32 = 4, NUMBER = 8, RESERVED_16 = 16, HANDLE = 64 };
enum { STATUS = 0 };

struct cox_fd_entry {
    uint64_t hash;
    struct cox_handle handle;
    int fd;
    struct cox_fd_owner *owner;
    /* in its bucket */
    struct cox_fd_entry *next;
    /* of the same fd owner */
    struct cox_fd_entry *owner_next, *owner_prev;
};

/* ---- bytes ---- */

void cox_fd_store_request_format(enum cox_fd_store_op op, uint64_t number,
                                 const struct cox_handle *handle,
                                 uint8_t bytes[COX_FD_STORE_REQUEST_SIZE])
{
    memset(bytes, 0, COX_FD_STORE_REQUEST_SIZE);
    cox_le32_put(bytes + OP, (uint32_t)op);
    cox_le64_put(bytes + NUMBER, number);
    memcpy(bytes + HANDLE, handle->bytes, COX_HANDLE_SIZE);
}

void cox_fd_store_reply_format(int status, uint64_t number, uint8_t bytes[COX_FD_STORE_REPLY_SIZE])
{
    memset(bytes, 0, COX_FD_STORE_REPLY_SIZE);
    cox_le32_put(bytes + STATUS, (uint32_t)status);
    cox_le64_put(bytes + NUMBER, number);
}

int cox_fd_store_reply_parse(const uint8_t bytes[COX_FD_STORE_REPLY_SIZE], int *ret_status,
                             uint64_t *ret_number)
{
    const uint32_t status = cox_le32_get(bytes + STATUS);
    if (status >= COX_STATUS_COUNT || cox_le32_get(bytes + RESERVED_32))
        return COX_CORRUPT;
    *ret_status = (int)status;
    *ret_number = cox_le64_get(bytes + NUMBER);
    return 0;
}

/* ---- the table ---- */

void cox_fd_entries_init(struct cox_fd_entries *fd_entries, uint32_t max, struct cox_closer *closer)
{
    *fd_entries = (struct cox_fd_entries){.max = max, .closer = closer};
}

static uint64_t handle_hash(const struct cox_handle *handle)
{
    uint64_t hash = cox_hash_bytes(COX_HASH_START, handle->bytes, COX_HANDLE_SIZE);
    return hash ^ hash >> 32;
}

/* The place of the pointer to the entry, found or not. NULL: there is no table yet. */
static struct cox_fd_entry **fd_entries_find(const struct cox_fd_entries *fd_entries,
                                             const struct cox_handle *handle, uint64_t hash)
{
    if (!fd_entries->buckets)
        return NULL;
    struct cox_fd_entry **place = &fd_entries->buckets[hash & (fd_entries->bucket_count - 1)];
    while (*place &&
           ((*place)->hash != hash || memcmp(&(*place)->handle, handle, sizeof *handle) != 0))
        place = &(*place)->next;
    return place;
}

/* Doubles the buckets. Returns false without memory. */
static bool fd_entries_grow(struct cox_fd_entries *fd_entries)
{
    uint32_t count = fd_entries->buckets ? 2 * fd_entries->bucket_count : BUCKET_COUNT_MIN;
    struct cox_fd_entry **buckets = calloc(count, sizeof *buckets);
    if (!buckets)
        return false;
    for (uint32_t i = 0; fd_entries->buckets && i < fd_entries->bucket_count; i++)
        for (struct cox_fd_entry *d = fd_entries->buckets[i], *next; d; d = next) {
            struct cox_fd_entry **place = &buckets[d->hash & (count - 1)];
            next = d->next;
            d->next = *place;
            *place = d;
        }
    free(fd_entries->buckets);
    fd_entries->buckets = buckets;
    fd_entries->bucket_count = count;
    return true;
}

/* Removes the entry from its bucket and frees it with its fd; its owner's list is the caller's. */
static void fd_entries_free_at(struct cox_fd_entries *fd_entries, struct cox_fd_entry **place)
{
    struct cox_fd_entry *d = *place;
    *place = d->next;
    fd_entries->count--;
    cox_closer_give(fd_entries->closer, &d->fd);
    free(d);
}

void cox_fd_entries_deinit(struct cox_fd_entries *fd_entries)
{
    for (uint32_t i = 0; fd_entries->buckets && i < fd_entries->bucket_count; i++)
        while (fd_entries->buckets[i])
            fd_entries_free_at(fd_entries, &fd_entries->buckets[i]);
    free(fd_entries->buckets);
    cox_fd_entries_init(fd_entries, fd_entries->max, fd_entries->closer);
}

void cox_fd_entries_forget(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner)
{
    while (fd_owner->first) {
        struct cox_fd_entry *d = fd_owner->first;
        fd_owner->first = d->owner_next;
        fd_entries_free_at(fd_entries, fd_entries_find(fd_entries, &d->handle, d->hash));
    }
    fd_owner->count = 0;
}

/* ---- what is asked ---- */

/* A stored handle must be the owner's own and name this fd. */
static bool handle_is_of(const struct cox_handle *handle, pid_t pid, int fd)
{
    struct statx st;
    uint8_t kind = handle->bytes[COX_HANDLE_AT_KIND];
    /* The server of the file (FUSE) is not asked: it may never reply. */
    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &st) < 0 ||
        (kind != COX_HANDLE_MEMORY && kind != COX_HANDLE_OTHER))
        return false;
    return (pid == 0 || cox_le32_get(handle->bytes + COX_HANDLE_AT_PID) == (uint32_t)pid) &&
           (kind == COX_HANDLE_OTHER || S_ISREG(st.stx_mode)) &&
           cox_le32_get(handle->bytes + COX_HANDLE_AT_DEV) ==
               (uint32_t)makedev(st.stx_dev_major, st.stx_dev_minor) &&
           cox_le64_get(handle->bytes + COX_HANDLE_AT_INO) == (uint64_t)st.stx_ino;
}

static int fd_entries_put(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner,
                          const struct cox_handle *handle, int *fd)
{
    uint64_t hash = handle_hash(handle);
    if (*fd < 0)
        return COX_INVALID;
    if (!handle_is_of(handle, fd_owner->pid, *fd))
        return COX_DENIED;
    struct cox_fd_entry **place = fd_entries_find(fd_entries, handle, hash);
    if (place && *place)
        return COX_TAKEN;
    if (fd_entries->count >= fd_entries->max ||
        fd_owner->count >= fd_entries->max - fd_entries->max / 8)
        return COX_FULL;
    if ((!fd_entries->buckets || fd_entries->count >= fd_entries->bucket_count) &&
        !fd_entries_grow(fd_entries) && !fd_entries->buckets)
        return COX_FULL; /* an existing table works even if it is overfull */
    struct cox_fd_entry *d = malloc(sizeof *d);
    if (!d)
        return COX_FULL;
    place = fd_entries_find(fd_entries, handle, hash);
    *d = (struct cox_fd_entry){.hash = hash,
                               .handle = *handle,
                               .fd = cox_steal_fd(fd),
                               .owner = fd_owner,
                               .next = *place,
                               .owner_next = fd_owner->first};
    if (fd_owner->first)
        fd_owner->first->owner_prev = d;
    fd_owner->first = d;
    *place = d;
    fd_entries->count++;
    fd_owner->count++;
    return 0;
}

static int fd_entries_remove(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner,
                             const struct cox_handle *handle)
{
    struct cox_fd_entry **place = fd_entries_find(fd_entries, handle, handle_hash(handle));
    if (!place || !*place || (*place)->owner != fd_owner)
        return COX_NOT_FOUND;
    struct cox_fd_entry *d = *place;
    if (d->owner_prev)
        d->owner_prev->owner_next = d->owner_next;
    else
        fd_owner->first = d->owner_next;
    if (d->owner_next)
        d->owner_next->owner_prev = d->owner_prev;
    fd_owner->count--;
    fd_entries_free_at(fd_entries, place);
    return 0;
}

static int fd_entries_get(const struct cox_fd_entries *fd_entries, const struct cox_handle *handle,
                          int *ret_fd)
{
    struct cox_fd_entry **place = fd_entries_find(fd_entries, handle, handle_hash(handle));
    if (!place || !*place)
        return COX_NOT_FOUND;
    *ret_fd = (*place)->fd;
    return 0;
}

int cox_fd_entries_serve(struct cox_fd_entries *fd_entries, struct cox_fd_owner *fd_owner,
                         const uint8_t bytes[COX_FD_STORE_REQUEST_SIZE], int *fd, int *ret_fd,
                         uint64_t *ret_number)
{
    struct cox_handle handle;
    const uint32_t op = cox_le32_get(bytes + OP);
    memcpy(handle.bytes, bytes + HANDLE, COX_HANDLE_SIZE);
    *ret_fd = -1;
    *ret_number = cox_le64_get(bytes + NUMBER);
    if (cox_le32_get(bytes + RESERVED_32))
        return COX_INVALID;
    for (size_t i = RESERVED_16; i < HANDLE; i++)
        if (bytes[i])
            return COX_INVALID;
    if (op == COX_FD_STORE_PUT)
        return fd_entries_put(fd_entries, fd_owner, &handle, fd);
    if (*fd >= 0)
        return COX_INVALID;
    if (op == COX_FD_STORE_REMOVE)
        return fd_entries_remove(fd_entries, fd_owner, &handle);
    if (op == COX_FD_STORE_GET)
        return fd_entries_get(fd_entries, &handle, ret_fd);
    return COX_INVALID;
}
