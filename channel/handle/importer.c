#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "handle_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#define DEADLINE_MS_DEFAULT 1000
#define PEER_COUNT_DEFAULT 64
#define BUCKET_COUNT 256

/* An exporter whose pidfd is kept. */
struct peer_entry {
    /* pid 0: empty */
    struct cox_peer peer;
    /* users at this moment, without the lock */
    uint32_t users;
    /* dead, or its handles are stale: freed with its last user */
    bool stale;
    /* the importer's clock at its last use */
    uint64_t used;
};

struct import {
    /* first: the caller's pointer is this import */
    struct cox_import view;
    /* in its bucket */
    struct import *next;
    struct cox_handle handle;
    enum cox_import_flags flags;
    uint32_t users;
    /* the mapping, from the page in which the view begins; NULL: none */
    void *map;
    size_t map_size;
};

struct cox_importer {
    char *socket_path;
    uint64_t deadline_ms;
    uint32_t peer_count;
    /* protects everything below; not held while a control socket is asked */
    pthread_mutex_t lock;
    /* the process of the next two; 0: not known yet */
    pid_t pid;
    uint64_t system;
    /* 0: not known yet */
    uint64_t start;
    uint64_t clock;
    /* imports in use, by the handle's crc */
    struct import *buckets[BUCKET_COUNT];
    struct peer_entry peers[];
};

/* ---- constructor and destructor ---- */

int cox_importer_new(const struct cox_importer_options *options, struct cox_importer **ret_importer,
                     struct cox_error *err)
{
    struct cox_importer_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_importer_options", err);
    if (r)
        return r;
    options = &known;
    uint32_t count = options->cache_max ? options->cache_max : PEER_COUNT_DEFAULT;
    struct cox_importer *importer = calloc(1, sizeof *importer + count * sizeof importer->peers[0]);
    char *socket_path = importer && options->socket_path ? strdup(options->socket_path) : NULL;
    if (!importer || (options->socket_path && !socket_path)) {
        free(importer);
        return cox_fail(err, -ENOMEM, "no memory for an importer of %" PRIu32 " exporters", count);
    }
    importer->socket_path = socket_path;
    importer->deadline_ms = options->deadline_ms ? options->deadline_ms : DEADLINE_MS_DEFAULT;
    importer->peer_count = count;
    for (uint32_t i = 0; i < count; i++)
        importer->peers[i].peer.pidfd = -1;
    pthread_mutex_init(&importer->lock, NULL);
    *ret_importer = importer;
    return 0;
}

static void import_free(struct import *import)
{
    if (import->map)
        munmap(import->map, import->map_size);
    cox_close_fd(&import->view.fd);
    free(import);
}

struct cox_importer *cox_importer_free(struct cox_importer *importer)
{
    if (!importer)
        return NULL;
    for (size_t i = 0; i < BUCKET_COUNT; i++)
        while (importer->buckets[i]) {
            struct import *import = importer->buckets[i];
            importer->buckets[i] = import->next;
            import_free(import);
        }
    for (uint32_t i = 0; i < importer->peer_count; i++)
        cox_peer_close(&importer->peers[i].peer);
    pthread_mutex_destroy(&importer->lock);
    free(importer->socket_path);
    free(importer);
    return NULL;
}

/* ---- exporters; with the lock ---- */

static void peer_forget(struct peer_entry *entry)
{
    cox_peer_close(&entry->peer);
    *entry = (struct peer_entry){.peer = COX_PEER_NONE};
}

static struct peer_entry *peer_find(struct cox_importer *importer,
                                    const struct cox_handle_info *info)
{
    for (uint32_t i = 0; i < importer->peer_count; i++) {
        struct peer_entry *entry = &importer->peers[i];
        if ((uint32_t)entry->peer.pid == info->pid && entry->peer.start == info->start &&
            !entry->stale)
            return entry;
    }
    return NULL;
}

/* Returns an empty place, or the least recently used one. NULL: all are in use. */
static struct peer_entry *peer_place(struct cox_importer *importer)
{
    struct peer_entry *oldest = NULL;
    for (uint32_t i = 0; i < importer->peer_count; i++) {
        struct peer_entry *entry = &importer->peers[i];
        if (entry->peer.pid == 0)
            return entry;
        if (entry->users == 0 && (!oldest || entry->used < oldest->used))
            oldest = entry;
    }
    if (oldest)
        peer_forget(oldest);
    return oldest;
}

/* ---- exporters ---- */

/* A pidfd to use until peer_release: a cached one, or a private one if no place is free. Returns as
 * cox_handle_open_exporter. */
struct lookout {
    /* NULL: `own` is used */
    struct peer_entry *entry;
    struct cox_peer own;
};

static const struct cox_peer *lookout_peer(const struct lookout *lookout)
{
    /* The peer of an entry with users does not change. */
    return lookout->entry ? &lookout->entry->peer : &lookout->own;
}

static int peer_take(struct cox_importer *importer, const struct cox_handle_info *info,
                     struct lookout *ret_lookout, struct cox_error *err)
{
    struct lookout lookout = {.own = COX_PEER_NONE};
    pthread_mutex_lock(&importer->lock);
    lookout.entry = peer_find(importer, info);
    int r = 0;
    if (!lookout.entry) {
        r = cox_handle_open_exporter(info, &lookout.own, err);
        lookout.entry = r ? NULL : peer_place(importer);
        if (lookout.entry)
            *lookout.entry = (struct peer_entry){.peer = lookout.own};
    }
    if (lookout.entry) {
        lookout.entry->users++;
        lookout.entry->used = ++importer->clock;
    }
    pthread_mutex_unlock(&importer->lock);
    if (r == 0)
        *ret_lookout = lookout;
    return r;
}

/* keep: the entry is still valid. */
static void peer_release(struct cox_importer *importer, struct lookout *lookout, bool keep)
{
    if (!lookout->entry) {
        cox_peer_close(&lookout->own);
        return;
    }
    pthread_mutex_lock(&importer->lock);
    lookout->entry->users--;
    lookout->entry->stale = lookout->entry->stale || !keep;
    if (lookout->entry->stale && lookout->entry->users == 0)
        peer_forget(lookout->entry);
    pthread_mutex_unlock(&importer->lock);
}

/* ---- this process ---- */

/* Checks that the handle was made on this system, and whether by this process. The facts are read
 * once, and again in a forked child. */
static int importer_place(struct cox_importer *importer, const struct cox_handle_info *info,
                          bool *ret_own, struct cox_error *err)
{
    struct cox_handle_self self;
    int r = 0;
    pthread_mutex_lock(&importer->lock);
    if (importer->pid != getpid()) {
        importer->start = 0;
        r = cox_handle_system(&importer->system, err);
        importer->pid = r ? 0 : getpid();
    }
    if (r == 0)
        r = cox_handle_reachable(info, importer->system, err);
    bool pid_is_own = r == 0 && (pid_t)info->pid == importer->pid;
    if (pid_is_own && importer->start == 0) {
        r = cox_handle_self_load(&self, err);
        importer->start = r ? 0 : self.start;
    }
    if (r == 0)
        *ret_own = pid_is_own && info->start == importer->start;
    pthread_mutex_unlock(&importer->lock);
    return r;
}

/* ---- opening ---- */

/* Checks that the exporter of an open import lives. If pidfds are denied its start time shows that;
 * if /proc hides it, the control socket does, which keeps no entries of dead processes. */
static int exporter_check(struct cox_importer *importer, const struct cox_handle *handle,
                          const struct cox_handle_info *info, struct cox_error *err)
{
    struct lookout lookout;
    enum cox_handle_way way;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = peer_take(importer, info, &lookout, err);
    if (cox_handle_way_closed(r)) {
        int alive = cox_handle_check_exporter(info);
        if (alive == COX_PEER_DEAD)
            return cox_handle_fail_dead(info, err);
        return alive == 0 ? 0
                          : cox_handle_open_denied(handle, info, importer->socket_path,
                                                   cox_deadline_after_ms(importer->deadline_ms), r,
                                                   &fd, &way, err);
    }
    if (r)
        return r;
    bool alive = cox_peer_alive(lookout_peer(&lookout));
    peer_release(importer, &lookout, alive);
    return alive ? 0 : cox_handle_fail_dead(info, err);
}

static int fd_open(struct cox_importer *importer, const struct cox_handle *handle,
                   const struct cox_handle_info *info, int *ret_fd, struct cox_error *err)
{
    struct lookout lookout;
    enum cox_handle_way way;
    int r = peer_take(importer, info, &lookout, err);
    if (r == 0) {
        r = cox_handle_open_pidfd(info, lookout_peer(&lookout), ret_fd, err);
        peer_release(importer, &lookout, r != COX_PEER_DEAD && r != COX_NOT_FOUND);
    }
    if (!cox_handle_way_closed(r))
        return r;
    return cox_handle_open_denied(handle, info, importer->socket_path,
                                  cox_deadline_after_ms(importer->deadline_ms), r, ret_fd, &way,
                                  err);
}

/* The unit of offset and size of a mapping: munmap, too, handles huge pages only as a whole. */
static uint64_t mapping_unit(int fd)
{
    struct statfs system;
    bool huge = fstatfs(fd, &system) == 0 && system.f_type == HUGETLBFS_MAGIC;
    return huge ? (uint64_t)system.f_bsize : (uint64_t)sysconf(_SC_PAGESIZE);
}

static int import_map(struct import *import, const struct cox_handle_info *info,
                      struct cox_error *err)
{
    bool write = import->flags & COX_IMPORT_WRITE;
    if (import->flags == COX_IMPORT_FD)
        return 0;
    uint64_t unit = mapping_unit(import->view.fd);
    uint64_t begin = info->offset - info->offset % unit;
    uint64_t end = info->offset + info->size; /* at most INT64_MAX */
    size_t size = (size_t)(end + (unit - end % unit) % unit - begin);
    void *map = mmap(NULL, size, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                     import->view.fd, (off_t)begin);
    if (map == MAP_FAILED) {
        int e = errno;
        bool denied = e == EACCES || e == EPERM;
        return cox_fail(err, denied ? COX_DENIED : -e,
                        "%" PRIu64 " bytes from %" PRIu64 " on cannot be mapped for %s: %s%s",
                        info->size, info->offset, write ? "writing" : "reading",
                        cox_status_text(-e),
                        denied ? " (how the exporter opened it, or a seal, forbids it)" : "");
    }
    import->map = map;
    import->map_size = size;
    import->view.base = (const uint8_t *)map + (info->offset - begin);
    import->view.writable = write;
    return 0;
}

static struct import **import_slot(struct cox_importer *importer, const struct cox_handle *handle,
                                   enum cox_import_flags flags)
{
    /* The crc is in the last bytes, and serves as a hash. */
    struct import **slot = &importer->buckets[handle->bytes[COX_HANDLE_SIZE - 1]];
    while (*slot &&
           ((*slot)->flags != flags || memcmp(&(*slot)->handle, handle, sizeof *handle) != 0))
        slot = &(*slot)->next;
    return slot;
}

static const struct cox_import *import_use(struct cox_importer *importer,
                                           const struct cox_handle *handle,
                                           enum cox_import_flags flags)
{
    pthread_mutex_lock(&importer->lock);
    struct import *found = *import_slot(importer, handle, flags);
    if (found)
        found->users++;
    pthread_mutex_unlock(&importer->lock);
    return found ? &found->view : NULL;
}

/* Adds it to the table, or frees it and uses the present one if another thread was faster. */
static const struct cox_import *import_share(struct cox_importer *importer, struct import *import)
{
    pthread_mutex_lock(&importer->lock);
    struct import **slot = import_slot(importer, &import->handle, import->flags), *shared = *slot;
    if (!shared)
        *slot = shared = import;
    shared->users++;
    pthread_mutex_unlock(&importer->lock);
    if (shared != import)
        import_free(import);
    return &shared->view;
}

static int import_new(struct cox_importer *importer, const struct cox_handle *handle,
                      const struct cox_handle_info *info, enum cox_import_flags flags, bool own,
                      struct import **ret_import, struct cox_error *err)
{
    struct import *import = calloc(1, sizeof *import);
    if (!import)
        return cox_fail(err, -ENOMEM, "no memory for an import");
    import->view = (struct cox_import){.fd = -1, .size = info->size};
    import->handle = *handle;
    import->flags = flags;
    int r = own ? cox_handle_open_own(info, &import->view.fd, err)
                : fd_open(importer, handle, info, &import->view.fd, err);
    if (r == 0)
        r = import_map(import, info, err);
    if (r)
        import_free(import);
    else
        *ret_import = import;
    return r;
}

int cox_importer_open(struct cox_importer *importer, const struct cox_handle *handle,
                      enum cox_import_flags flags, const struct cox_import **ret_import,
                      struct cox_error *err)
{
    const struct cox_handle copy = *handle; /* the source may change meanwhile */
    struct cox_handle_info info;
    struct import *import = NULL;
    bool own;
    int r = cox_handle_parse(&copy, &info, err);
    if (r == 0 && ((unsigned)flags & ~(unsigned)(COX_IMPORT_READ | COX_IMPORT_WRITE)))
        r = cox_fail(err, COX_INVALID, "import flags %d: expected 0 to 3", (int)flags);
    if (r == 0 && flags != COX_IMPORT_FD && info.kind != COX_HANDLE_MEMORY)
        r = cox_fail(err, COX_INVALID, "a handle of something else than memory cannot be mapped");
    if (r == 0)
        r = importer_place(importer, &info, &own, err);
    if (r)
        return r;
    const struct cox_import *found = import_use(importer, &copy, flags);
    if (found) {
        r = own ? 0 : exporter_check(importer, &copy, &info, err);
        if (r)
            cox_importer_close(importer, found);
        else
            *ret_import = found;
        return r;
    }
    r = import_new(importer, &copy, &info, flags, own, &import, err);
    if (r == 0)
        *ret_import = import_share(importer, import);
    return r;
}

void cox_importer_close(struct cox_importer *importer, const struct cox_import *lent)
{
    struct import *import = (struct import *)(uintptr_t)lent; /* its first member */
    pthread_mutex_lock(&importer->lock);
    COX_ASSERT(import->users > 0);
    bool last = --import->users == 0;
    if (last)
        *import_slot(importer, &import->handle, import->flags) = import->next;
    pthread_mutex_unlock(&importer->lock);
    if (last)
        import_free(import);
}
