#include "deposits.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "channel/base/hash.h"

#define BUCKET_COUNT_MIN 16

/* Where the fields are, see the header. */
enum { OP = 0, RESERVED_32 = 4, NUMBER = 8, RESERVED_16 = 16, HANDLE = 64 };
enum { STATUS = 0 };

struct cox_deposit {
    uint64_t hash;
    struct cox_handle handle;
    int fd;
    struct cox_depositor *owner;
    /* in its bucket */
    struct cox_deposit *next;
    /* of the same depositor */
    struct cox_deposit *owner_next, *owner_prev;
};

/* ---- bytes ---- */

static void put(uint8_t *bytes, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *bytes, size_t size)
{
    uint64_t value = 0;
    while (size-- > 0)
        value = value << 8 | bytes[size];
    return value;
}

void cox_depot_request_format(enum cox_depot_op op, uint64_t number,
                              const struct cox_handle *handle,
                              uint8_t bytes[COX_DEPOT_REQUEST_SIZE])
{
    memset(bytes, 0, COX_DEPOT_REQUEST_SIZE);
    put(bytes + OP, 4, (uint64_t)op);
    put(bytes + NUMBER, 8, number);
    memcpy(bytes + HANDLE, handle->bytes, COX_HANDLE_SIZE);
}

void cox_depot_answer_format(int status, uint64_t number, uint8_t bytes[COX_DEPOT_ANSWER_SIZE])
{
    memset(bytes, 0, COX_DEPOT_ANSWER_SIZE);
    put(bytes + STATUS, 4, (uint64_t)status);
    put(bytes + NUMBER, 8, number);
}

int cox_depot_answer_parse(const uint8_t bytes[COX_DEPOT_ANSWER_SIZE], int *ret_status,
                           uint64_t *ret_number)
{
    uint64_t status = get(bytes + STATUS, 4);
    if (status >= COX_STATUS_COUNT || get(bytes + RESERVED_32, 4))
        return COX_CORRUPT;
    *ret_status = (int)status;
    *ret_number = get(bytes + NUMBER, 8);
    return 0;
}

/* ---- the table ---- */

void cox_deposits_init(struct cox_deposits *deposits, uint32_t max, struct cox_closer *closer)
{
    *deposits = (struct cox_deposits){.max = max, .closer = closer};
}

static uint64_t handle_hash(const struct cox_handle *handle)
{
    uint64_t hash = cox_hash_bytes(COX_HASH_START, handle->bytes, COX_HANDLE_SIZE);
    return hash ^ hash >> 32;
}

/* Where the pointer to it is, or would be. NULL: there is no table yet. */
static struct cox_deposit **deposits_find(const struct cox_deposits *deposits,
                                          const struct cox_handle *handle, uint64_t hash)
{
    if (!deposits->buckets)
        return NULL;
    struct cox_deposit **place = &deposits->buckets[hash & (deposits->bucket_count - 1)];
    while (*place &&
           ((*place)->hash != hash || memcmp(&(*place)->handle, handle, sizeof *handle) != 0))
        place = &(*place)->next;
    return place;
}

/* Twice the buckets. False: no memory. */
static bool deposits_grow(struct cox_deposits *deposits)
{
    uint32_t count = deposits->buckets ? 2 * deposits->bucket_count : BUCKET_COUNT_MIN;
    struct cox_deposit **buckets = calloc(count, sizeof *buckets);
    if (!buckets)
        return false;
    for (uint32_t i = 0; deposits->buckets && i < deposits->bucket_count; i++)
        for (struct cox_deposit *d = deposits->buckets[i], *next; d; d = next) {
            struct cox_deposit **place = &buckets[d->hash & (count - 1)];
            next = d->next;
            d->next = *place;
            *place = d;
        }
    free(deposits->buckets);
    deposits->buckets = buckets;
    deposits->bucket_count = count;
    return true;
}

/* Takes it out of its bucket, and frees it with its fd; its owner's list is the caller's. */
static void deposits_free_at(struct cox_deposits *deposits, struct cox_deposit **place)
{
    struct cox_deposit *d = *place;
    *place = d->next;
    deposits->count--;
    cox_closer_give(deposits->closer, &d->fd);
    free(d);
}

void cox_deposits_deinit(struct cox_deposits *deposits)
{
    for (uint32_t i = 0; deposits->buckets && i < deposits->bucket_count; i++)
        while (deposits->buckets[i])
            deposits_free_at(deposits, &deposits->buckets[i]);
    free(deposits->buckets);
    cox_deposits_init(deposits, deposits->max, deposits->closer);
}

void cox_deposits_forget(struct cox_deposits *deposits, struct cox_depositor *depositor)
{
    while (depositor->first) {
        struct cox_deposit *d = depositor->first;
        depositor->first = d->owner_next;
        deposits_free_at(deposits, deposits_find(deposits, &d->handle, d->hash));
    }
    depositor->count = 0;
}

/* ---- what is asked ---- */

/* A handle that is left has to be the depositor's own and mean this very fd. */
static bool handle_is_of(const struct cox_handle *handle, pid_t pid, int fd)
{
    struct statx st;
    uint8_t kind = handle->bytes[COX_HANDLE_AT_KIND];
    /* Whoever serves the file (FUSE) is not asked: it may never answer. */
    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &st) < 0 ||
        (kind != COX_HANDLE_MEMORY && kind != COX_HANDLE_OTHER))
        return false;
    return (pid == 0 || get(handle->bytes + COX_HANDLE_AT_PID, 4) == (uint64_t)pid) &&
           (kind == COX_HANDLE_OTHER || S_ISREG(st.stx_mode)) &&
           get(handle->bytes + COX_HANDLE_AT_DEV, 4) ==
               (uint32_t)makedev(st.stx_dev_major, st.stx_dev_minor) &&
           get(handle->bytes + COX_HANDLE_AT_INO, 8) == (uint64_t)st.stx_ino;
}

static int deposits_put(struct cox_deposits *deposits, struct cox_depositor *depositor,
                        const struct cox_handle *handle, int *fd)
{
    uint64_t hash = handle_hash(handle);
    if (*fd < 0)
        return COX_INVALID;
    if (!handle_is_of(handle, depositor->pid, *fd))
        return COX_DENIED;
    struct cox_deposit **place = deposits_find(deposits, handle, hash);
    if (place && *place)
        return COX_TAKEN;
    if (deposits->count >= deposits->max || depositor->count >= deposits->max - deposits->max / 8)
        return COX_FULL;
    if ((!deposits->buckets || deposits->count >= deposits->bucket_count) &&
        !deposits_grow(deposits) && !deposits->buckets)
        return COX_FULL; /* an existing table may well be crowded */
    struct cox_deposit *d = malloc(sizeof *d);
    if (!d)
        return COX_FULL;
    place = deposits_find(deposits, handle, hash);
    *d = (struct cox_deposit){.hash = hash,
                              .handle = *handle,
                              .fd = cox_steal_fd(fd),
                              .owner = depositor,
                              .next = *place,
                              .owner_next = depositor->first};
    if (depositor->first)
        depositor->first->owner_prev = d;
    depositor->first = d;
    *place = d;
    deposits->count++;
    depositor->count++;
    return 0;
}

static int deposits_withdraw(struct cox_deposits *deposits, struct cox_depositor *depositor,
                             const struct cox_handle *handle)
{
    struct cox_deposit **place = deposits_find(deposits, handle, handle_hash(handle));
    if (!place || !*place || (*place)->owner != depositor)
        return COX_NOT_FOUND;
    struct cox_deposit *d = *place;
    if (d->owner_prev)
        d->owner_prev->owner_next = d->owner_next;
    else
        depositor->first = d->owner_next;
    if (d->owner_next)
        d->owner_next->owner_prev = d->owner_prev;
    depositor->count--;
    deposits_free_at(deposits, place);
    return 0;
}

static int deposits_fetch(const struct cox_deposits *deposits, const struct cox_handle *handle,
                          int *ret_fd)
{
    struct cox_deposit **place = deposits_find(deposits, handle, handle_hash(handle));
    if (!place || !*place)
        return COX_NOT_FOUND;
    *ret_fd = (*place)->fd;
    return 0;
}

int cox_deposits_serve(struct cox_deposits *deposits, struct cox_depositor *depositor,
                       const uint8_t bytes[COX_DEPOT_REQUEST_SIZE], int *fd, int *ret_fd,
                       uint64_t *ret_number)
{
    struct cox_handle handle;
    uint64_t op = get(bytes + OP, 4);
    memcpy(handle.bytes, bytes + HANDLE, COX_HANDLE_SIZE);
    *ret_fd = -1;
    *ret_number = get(bytes + NUMBER, 8);
    if (get(bytes + RESERVED_32, 4))
        return COX_INVALID;
    for (size_t i = RESERVED_16; i < HANDLE; i++)
        if (bytes[i])
            return COX_INVALID;
    if (op == COX_DEPOT_PUT)
        return deposits_put(deposits, depositor, &handle, fd);
    if (*fd >= 0)
        return COX_INVALID;
    if (op == COX_DEPOT_WITHDRAW)
        return deposits_withdraw(deposits, depositor, &handle);
    if (op == COX_DEPOT_FETCH)
        return deposits_fetch(deposits, &handle, ret_fd);
    return COX_INVALID;
}
