#include "large_payload.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "channel/shm/region.h"
#include "lazy_copy.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define SEALS_SIZE ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))
/* Rounding lets a kept payload fit the next message of a slightly larger size. */
#define SIZE_MIN (UINT64_C(64) << 10)
#define SIZE_UNIT (UINT64_C(4) << 10)
/* Limit for fetching an fd from the control socket. */
#define SOCKET_MS 1000

/* ---- sender ---- */

void cox_large_payload_sender_init(struct cox_large_payload_sender *sender)
{
    memset(sender, 0, sizeof *sender);
    pthread_mutex_init(&sender->lock, NULL);
}

void cox_large_payload_sender_deinit(struct cox_large_payload_sender *sender)
{
    sender->exporter = cox_exporter_free(sender->exporter);
    sender->plain = cox_exporter_free(sender->plain);
    pthread_mutex_destroy(&sender->lock);
}

/* A control socket that fails once is not tried again: each try can cost a second. */
static int sender_open(struct cox_large_payload_sender *sender, const char *socket_path,
                       struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = socket_path};
    int r = 0;
    pthread_mutex_lock(&sender->lock);
    if (!sender->exporter && !sender->plain && socket_path)
        cox_exporter_new(&options, &sender->exporter, NULL);
    if (!sender->exporter && !sender->plain)
        r = cox_exporter_new(NULL, &sender->plain, err);
    pthread_mutex_unlock(&sender->lock);
    return r;
}

/* The control socket may be full or gone; readers with pidfd_getfd do not need it. */
static int sender_export(struct cox_large_payload_sender *sender, int fd,
                         struct cox_large_payload *payload, struct cox_error *err)
{
    const uint64_t size = payload->region.size; /* adopted memory may be larger */
    int r = -EINVAL;
    pthread_mutex_lock(&sender->lock);
    payload->exporter = sender->exporter;
    if (payload->exporter)
        r = cox_exporter_export(payload->exporter, fd, 0, size, &payload->handle, NULL);
    if (r) {
        r = sender->plain ? 0 : cox_exporter_new(NULL, &sender->plain, err);
        payload->exporter = sender->plain;
        if (r == 0)
            r = cox_exporter_export(payload->exporter, fd, 0, size, &payload->handle, err);
    }
    pthread_mutex_unlock(&sender->lock);
    return r;
}

static uint64_t memory_size_for(uint64_t size)
{
    uint64_t rounded = SIZE_MIN;
    while (rounded < size && rounded < COX_LARGE_PAYLOAD_KEEP_SIZE)
        rounded *= 2;
    return rounded >= size ? rounded : (size + SIZE_UNIT - 1) / SIZE_UNIT * SIZE_UNIT;
}

bool cox_large_payload_is_transient(const struct cox_large_payload *payload)
{
    return payload->is_filled || payload->region.size > COX_LARGE_PAYLOAD_KEEP_SIZE;
}

/* F_SEAL_FUTURE_WRITE: only this process can write, through the mapping that exists already. */
static int memory_make(uint64_t size, struct cox_region *region, int *ret_reader,
                       struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    struct cox_error why = {0};
    int r = cox_region_create_unnamed(region, "cox_large_payload", size,
                                      SEALS_SIZE | F_SEAL_FUTURE_WRITE, false, &fd, &why);
    if (r)
        return cox_fail(err, r == -ENOMEM ? COX_NO_SPACE : r, "%s", why.text);
    return cox_region_open_reader(fd, "cox_large_payload", ret_reader, err);
}

/* What a payload is made of; neither: it is written later. */
struct content {
    const struct iovec *parts;
    /* memory that has the bytes */
    struct cox_payload_memory *memory;
};

static int memory_fill(const struct content *content, uint64_t size, struct cox_region *region,
                       int *ret_reader, struct cox_error *err)
{
    struct cox_error why = {0};
    int r = 0;
    if (content->parts)
        r = cox_region_create_unnamed_filled("cox_large_payload", content->parts, size, ret_reader,
                                             &why);
    else if ((*ret_reader = fcntl(cox_payload_memory_fd(content->memory), F_DUPFD_CLOEXEC,
                                  STDERR_FILENO + 1)) < 0)
        r = cox_fail(&why, -errno, "dup: %s", cox_status_text(-errno));
    if (r == 0)
        r = cox_region_map(region, *ret_reader, size, COX_REGION_READ, "cox_large_payload", &why);
    return r ? cox_fail(err, r == -ENOMEM ? COX_NO_SPACE : r, "%s", why.text) : 0;
}

static int payload_make(struct cox_large_payload_sender *sender, const struct content *content,
                        uint64_t size, struct cox_large_payload *payload, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int reader = -1;
    struct cox_large_payload made = {0};
    made.is_filled = content->parts || content->memory;
    int r = made.is_filled ? memory_fill(content, size, &made.region, &reader, err)
                           : memory_make(memory_size_for(size), &made.region, &reader, err);
    if (r == 0)
        r = sender_export(sender, reader, &made, err);
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_EXPORTED);
    if (r) {
        cox_region_detach(&made.region);
        return r;
    }
    /* relaxed: for display. */
    atomic_fetch_add_explicit(&sender->payload_count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&sender->payload_bytes, made.region.size, memory_order_relaxed);
    if (content->memory)
        made.memory = cox_payload_memory_ref(content->memory);
    *payload = made;
    return 0;
}

static int payload_renew(struct cox_large_payload_sender *sender, const char *socket_path,
                         const struct content *content, uint64_t size,
                         struct cox_large_payload *payload, struct cox_error *err)
{
    cox_large_payload_drop(sender, payload); /* before the new one: they never exist at once */
    if (size > COX_LARGE_PAYLOAD_SIZE_MAX)
        return cox_fail(err, COX_NO_SPACE, "a payload of %" PRIu64 " bytes: at most %" PRIu64, size,
                        COX_LARGE_PAYLOAD_SIZE_MAX);
    int r = sender_open(sender, socket_path, err);
    return r ? r : payload_make(sender, content, size, payload, err);
}

int cox_large_payload_reserve(struct cox_large_payload_sender *sender, const char *socket_path,
                              uint64_t size, struct cox_large_payload *payload,
                              struct cox_error *err)
{
    /* What was filled cannot be written to, and is not kept. */
    if (payload->region.base && payload->region.size >= size && !payload->is_filled)
        return 0;
    return payload_renew(sender, socket_path, &(struct content){0}, size, payload, err);
}

int cox_large_payload_fill(struct cox_large_payload_sender *sender, const char *socket_path,
                           const struct iovec *parts, uint64_t size,
                           struct cox_large_payload *payload, struct cox_error *err)
{
    return payload_renew(sender, socket_path, &(struct content){.parts = parts}, size, payload,
                         err);
}

int cox_large_payload_adopt(struct cox_large_payload_sender *sender, const char *socket_path,
                            struct cox_payload_memory *memory, uint64_t size,
                            struct cox_large_payload *payload, struct cox_error *err)
{
    return payload_renew(sender, socket_path, &(struct content){.memory = memory}, size, payload,
                         err);
}

void cox_large_payload_swap(struct cox_large_payload *one, struct cox_large_payload *other)
{
    const struct cox_large_payload payload = *one;
    *one = *other;
    *other = payload;
}

struct cox_large_payload_ref cox_large_payload_refer(const struct cox_large_payload *payload,
                                                     uint64_t size)
{
    COX_ASSERT(size <= payload->region.size);
    return (struct cox_large_payload_ref){.handle = payload->handle, .size = size};
}

void cox_large_payload_drop(struct cox_large_payload_sender *sender,
                            struct cox_large_payload *payload)
{
    if (!payload->region.base)
        return;
    /* relaxed: for display. */
    atomic_fetch_sub_explicit(&sender->payload_count, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&sender->payload_bytes, payload->region.size, memory_order_relaxed);
    cox_exporter_put(payload->exporter, &payload->handle);
    cox_region_detach(&payload->region);
    cox_payload_memory_unref(payload->memory);
    memset(payload, 0, sizeof *payload);
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_DROPPED);
}

/* ---- reader ---- */

/* The seals guarantee that the owner cannot truncate the file under a reader. They also prove that
 * it is a memfd: reading any other file could block. */
static int check_seals(int fd, uint64_t size, struct cox_error *err)
{
    struct stat st;
    struct statfs fs;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return cox_fail(err, errno == EINVAL ? COX_CORRUPT : -errno,
                        "the payload is not in sealed memory: %s", cox_status_text(-errno));
    if (((unsigned)seals & SEALS_SIZE) != SEALS_SIZE)
        return cox_fail(err, COX_CORRUPT,
                        "the payload's memory has seals %#x: it could shrink or grow",
                        (unsigned)seals);
    /* Filling a hole in huge pages can fail with SIGBUS: there may be none left. */
    if (fstatfs(fd, &fs) == 0 && fs.f_type != TMPFS_MAGIC)
        return cox_fail(err, COX_CORRUPT, "the payload is on pages of %ju bytes",
                        (uintmax_t)fs.f_bsize);
    /* After the seals: before them the file could still be truncated. */
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "the payload's size: %s", cox_status_text(-errno));
    if ((uint64_t)st.st_size < size)
        return cox_fail(err, COX_CORRUPT, "the payload's memory has %jd bytes, its handle %" PRIu64,
                        (intmax_t)st.st_size, size);
    return 0;
}

/* The process in the handle decides which file is opened, so it must be the sender. */
static int check_peer(const struct cox_handle_info *info,
                      const struct cox_large_payload_origin *peer, struct cox_error *err)
{
    uint64_t start = peer->start;
    if (info->pid != (uint32_t)peer->pid)
        return cox_fail(err, COX_CORRUPT,
                        "the payload belongs to process %" PRIu32 ", its sender is process %jd",
                        info->pid, (intmax_t)peer->pid);
    int r = start ? 0 : cox_peer_start_time(peer->pid, &start);
    if (r == COX_PEER_DEAD || r == -ENOENT || r == -ESRCH)
        return cox_handle_fail_dead(info, err);
    if (r)
        return cox_fail(err, r, "start time of process %jd: %s", (intmax_t)peer->pid,
                        cox_status_text(r));
    if (info->start != start)
        return cox_fail(err, COX_CORRUPT,
                        "the payload belongs to a process %" PRIu32 " started at %" PRIu64
                        ", its sender was at %" PRIu64,
                        info->pid, info->start, start);
    return 0;
}

static int payload_open(const struct cox_large_payload_ref *ref,
                        const struct cox_large_payload_origin *peer, int *ret_fd,
                        struct cox_handle_info *ret_info, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_handle_parse(&ref->handle, ret_info, err);
    if (r == COX_VERSION)
        return cox_fail(err, COX_CORRUPT, "a payload's handle of another version");
    if (r == 0)
        r = check_peer(ret_info, peer, err);
    if (r)
        return r;
    if (ret_info->kind != COX_HANDLE_MEMORY || ret_info->offset != 0 || ref->size == 0 ||
        ref->size > ret_info->size)
        return cox_fail(err, COX_CORRUPT,
                        "%" PRIu64 " bytes of a payload of %" PRIu64 " at offset %" PRIu64,
                        ref->size, ret_info->size, ret_info->offset);
    r = cox_handle_open(&ref->handle, peer->socket_path, cox_deadline_after_ms(SOCKET_MS), &fd,
                        err);
    if (r == 0)
        r = check_seals(fd, ret_info->size, err);
    if (r)
        return r;
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_OPENED);
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_large_payload_view_map(struct cox_large_payload_view *view,
                               const struct cox_large_payload_ref *ref,
                               const struct cox_large_payload_origin *peer,
                               const uint8_t **ret_bytes, struct cox_error *err)
{
    struct cox_handle_info info;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    bool mapped =
        view->region.base && memcmp(&view->handle, &ref->handle, sizeof view->handle) == 0;
    if (mapped && (ref->size == 0 || ref->size > view->region.size))
        return cox_fail(err, COX_CORRUPT, "%" PRIu64 " bytes of a payload of %zu", ref->size,
                        (size_t)view->region.size);
    if (!mapped) {
        struct cox_error why = {0};
        cox_large_payload_view_drop(view);
        int r = payload_open(ref, peer, &fd, &info, &why);
        if (r == 0)
            r = cox_region_map(&view->region, fd, info.size, COX_REGION_READ, "cox_large_payload",
                               &why);
        if (r)
            return cox_fail(err, r == -ENOMEM ? COX_NO_SPACE : r, "%s", why.text);
        view->handle = ref->handle;
    }
    *ret_bytes = view->region.base;
    return 0;
}

void cox_large_payload_view_find(struct cox_large_payload_view *views, size_t view_count,
                                 size_t stride, struct cox_large_payload_view *own,
                                 const struct cox_large_payload_ref *ref)
{
    for (size_t i = 0; i < view_count; i++) {
        struct cox_large_payload_view *view = &views[i * stride];
        if (!view->region.base || memcmp(&view->handle, &ref->handle, sizeof view->handle) != 0)
            continue;
        const struct cox_large_payload_view found = *view;
        *view = *own;
        *own = found;
        return;
    }
}

void cox_large_payload_view_release(struct cox_large_payload_view *view)
{
    if (view->region.size > COX_LARGE_PAYLOAD_KEEP_SIZE)
        cox_large_payload_view_drop(view);
}

void cox_large_payload_view_drop(struct cox_large_payload_view *view)
{
    if (view->region.base) {
        cox_lazy_copy_forget(view->region.base);
        cox_region_detach(&view->region);
    }
    memset(view, 0, sizeof *view);
}

/* Opens it again: a view that kept its fd would be an open fd for every frame and every rank. */
int cox_large_payload_view_copy(const struct cox_large_payload_view *view, uint64_t size,
                                const struct cox_large_payload_origin *peer, void **ret_bytes,
                                struct cox_error *err)
{
    const struct cox_large_payload_ref ref = {.handle = view->handle, .size = size};
    struct cox_handle_info info;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    void *bytes = cox_lazy_copy_again(size, view->region.base);
    int r = bytes ? 0 : payload_open(&ref, peer, &fd, &info, err);
    if (r)
        return r;
    if (!bytes)
        r = cox_lazy_copy_new(fd, view->region.size, size, view->region.base, &bytes);
    if (r)
        return cox_fail(err, r, "memory for a copy of %" PRIu64 " bytes: %s", size,
                        cox_status_text(r));
    *ret_bytes = bytes;
    return 0;
}
