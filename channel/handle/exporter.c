#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "fd_store.h"
#include "handle_internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEADLINE_MS_DEFAULT 1000
#define BUCKET_COUNT 256
/* Exported fds get ascending numbers from FD_FIRST on, so that the number of a removed one is not
 * reused soon. Devices, anonymous inodes and some file systems share or reuse inode numbers, so
 * only the fd number distinguishes two objects. They stay below 1024, the limit of select(2) and
 * often of the process. */
#define FD_FIRST 256
#define FD_TURN 512

struct export
{
    /* in its bucket */
    struct export *next;
    struct cox_handle handle;
    uint32_t serial;
    /* puts that are outstanding */
    uint32_t users;
    int fd;
    bool stored;
};

struct cox_exporter {
    /* the identity in handles; in a forked child it is another process's */
    struct cox_handle_self self;
    uint64_t deadline_ms;
    /* a control socket was given; fd_store shows whether it still replies */
    bool has_socket;
    /* protects the table and the two counts */
    pthread_mutex_t lock;
    /* by serial */
    struct export *buckets[BUCKET_COUNT];
    uint32_t serial;
    uint32_t turn;
    /* protects the connection; never taken with the other one */
    pthread_mutex_t socket_lock;
    struct cox_fd_store fd_store;
};

/* ---- constructor and destructor ---- */

static int exporter_set_ptrace_policy(const struct cox_exporter_options *options,
                                      struct cox_error *err)
{
    int r = cox_ptrace_policy_set(options->ptrace_policy, options->ptrace_pid);
    if (r == COX_UNSUPPORTED) /* without Yama none is needed */
        return 0;
    if (r)
        return cox_fail(err, r, "ptrace policy %d for process %" PRId32 " (PR_SET_PTRACER): %s",
                        (int)options->ptrace_policy, options->ptrace_pid, cox_status_text(r));
    return 0;
}

int cox_exporter_new(const struct cox_exporter_options *options, struct cox_exporter **ret_exporter,
                     struct cox_error *err)
{
    struct cox_exporter_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_exporter_options", err);
    if (r)
        return r;
    options = &known;
    struct cox_exporter *exporter = calloc(1, sizeof *exporter);
    if (!exporter)
        return cox_fail(err, -ENOMEM, "no memory for an exporter");
    exporter->fd_store.fd = -1;
    exporter->deadline_ms = options->deadline_ms ? options->deadline_ms : DEADLINE_MS_DEFAULT;
    /* Not from 0: the next exporter of this process may get the same fd numbers. */
    exporter->serial = (uint32_t)cox_now_ns();
    pthread_mutex_init(&exporter->lock, NULL);
    pthread_mutex_init(&exporter->socket_lock, NULL);
    exporter->has_socket = options->socket_path != NULL;
    r = cox_handle_self_load(&exporter->self, err);
    if (r == 0 && exporter->has_socket)
        r = cox_fd_store_connect(&exporter->fd_store, options->socket_path,
                                 cox_deadline_after_ms(exporter->deadline_ms), err);
    if (r == 0) /* last: it cannot be taken back */
        r = exporter_set_ptrace_policy(options, err);
    if (r) {
        cox_exporter_free(exporter);
        return r;
    }
    *ret_exporter = exporter;
    return 0;
}

static void export_free(struct export *export)
{
    cox_close_fd(&export->fd);
    free(export);
}

struct cox_exporter *cox_exporter_free(struct cox_exporter *exporter)
{
    if (!exporter)
        return NULL;
    /* The end of the connection removes its entries, unless a parent process has the connection
     * too. */
    cox_fd_store_close(&exporter->fd_store);
    for (size_t i = 0; i < BUCKET_COUNT; i++)
        while (exporter->buckets[i]) {
            struct export *export = exporter->buckets[i];
            exporter->buckets[i] = export->next;
            export_free(export);
        }
    pthread_mutex_destroy(&exporter->lock);
    pthread_mutex_destroy(&exporter->socket_lock);
    free(exporter);
    return NULL;
}

/* ---- the table; with the lock ---- */

static struct export **exporter_slot(struct cox_exporter *exporter, uint32_t serial,
                                     const struct cox_handle *handle)
{
    struct export **slot = &exporter->buckets[serial % BUCKET_COUNT];
    while (*slot && memcmp(&(*slot)->handle, handle, sizeof *handle) != 0)
        slot = &(*slot)->next;
    return slot;
}

/* Adds delta to the users of the export. An export without users is removed from the table and
 * given to the caller. */
static int exporter_count(struct cox_exporter *exporter, const struct cox_handle *handle, bool more,
                          struct export **ret_last)
{
    struct cox_handle_info info;
    if (getpid() != exporter->self.pid)
        return COX_STATE;
    if (cox_handle_parse(handle, &info, NULL))
        return COX_NOT_FOUND;
    pthread_mutex_lock(&exporter->lock);
    struct export **slot = exporter_slot(exporter, info.serial, handle), *found = *slot;
    int r = !found ? COX_NOT_FOUND : more && found->users == UINT32_MAX ? -EOVERFLOW : 0;
    if (r == 0)
        found->users += more ? 1 : UINT32_MAX;
    if (r == 0 && found->users == 0) {
        *slot = found->next;
        *ret_last = found;
    }
    pthread_mutex_unlock(&exporter->lock);
    return r;
}

/* ---- the control socket ---- */

static int exporter_store(struct cox_exporter *exporter, struct export *export,
                          struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(exporter->deadline_ms);
    pthread_mutex_lock(&exporter->socket_lock);
    int r =
        exporter->fd_store.fd < 0
            ? cox_fail(err, COX_CLOSED, "the connection to the control socket is lost")
            : cox_fd_store_put(&exporter->fd_store, &export->handle, export->fd, deadline_ns, err);
    /* It may be stored or not: only closing the connection makes sure that it is not. */
    if (r == COX_TIMEOUT || r == COX_CLOSED || r < 0)
        cox_fd_store_close(&exporter->fd_store);
    pthread_mutex_unlock(&exporter->socket_lock);
    cox_fault_point(COX_FAULT_HANDLE_STORED);
    export->stored = r == 0;
    return r;
}

static void exporter_withdraw(struct cox_exporter *exporter, const struct export *export)
{
    uint64_t deadline_ns = cox_deadline_after_ms(exporter->deadline_ms);
    pthread_mutex_lock(&exporter->socket_lock);
    int r = exporter->fd_store.fd < 0
                ? 0
                : cox_fd_store_remove(&exporter->fd_store, &export->handle, deadline_ns, NULL);
    /* After the put the handle must not be opened any more, so the connection is closed if need be,
     * whatever else is removed with it. */
    if (r && r != COX_NOT_FOUND)
        cox_fd_store_close(&exporter->fd_store);
    pthread_mutex_unlock(&exporter->socket_lock);
    cox_fault_point(COX_FAULT_HANDLE_WITHDRAWN);
}

/* ---- exporting ---- */

static int exporter_dup(struct cox_exporter *exporter, int fd)
{
    pthread_mutex_lock(&exporter->lock);
    int first = FD_FIRST + (int)(exporter->turn++ % FD_TURN);
    pthread_mutex_unlock(&exporter->lock);
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, first);
    if (copy < 0 &&
        (errno == EINVAL || errno == EMFILE)) /* the process's limit is lower, or reached */
        copy = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    return copy < 0 ? -errno : copy;
}

/* Checks and resolves the range. size 0: to the end. */
static int range_resolve(const struct stat *st, uint64_t offset, uint64_t *size,
                         struct cox_error *err)
{
    if (cox_handle_kind_of(st) != COX_HANDLE_MEMORY)
        return offset == 0 && *size == 0
                   ? 0
                   : cox_fail(err, COX_INVALID,
                              "%" PRIu64 " bytes from %" PRIu64
                              " on of what is no file and no memory: expected 0 from 0 on",
                              *size, offset);
    uint64_t object = (uint64_t)st->st_size;
    if (offset >= object || *size > object - offset)
        return cox_fail(err, COX_INVALID,
                        "%" PRIu64 " bytes from %" PRIu64 " on are not in an object of %" PRIu64
                        " bytes",
                        *size, offset, object);
    *size = *size ? *size : object - offset;
    return 0;
}

static int export_fill(struct cox_exporter *exporter, struct export *export, int fd,
                       uint64_t offset, uint64_t size, struct cox_error *err)
{
    struct stat st;
    export->fd = exporter_dup(exporter, fd);
    /* From the duplicate: the caller's fd number may be reused meanwhile. */
    int r = export->fd < 0 ? export->fd : fstat(export->fd, &st) < 0 ? -errno : 0;
    if (r)
        return cox_fail(err, r == -EBADF ? COX_INVALID : r, "a duplicate of fd %d: %s", fd,
                        cox_status_text(r));
    r = range_resolve(&st, offset, &size, err);
    if (r)
        return r;
    pthread_mutex_lock(&exporter->lock);
    export->serial = exporter->serial++;
    pthread_mutex_unlock(&exporter->lock);
    const struct cox_handle_info info = {
        .kind = cox_handle_kind_of(&st),
        .pid = (uint32_t)exporter->self.pid,
        .start = exporter->self.start,
        .system = exporter->self.system,
        .fd = (uint32_t) export->fd,
        .dev = cox_handle_device_of(&st),
        .ino = st.st_ino,
        .size = size,
        .offset = offset,
        .serial = export->serial,
    };
    cox_handle_format(&info, &export->handle);
    cox_fault_point(COX_FAULT_HANDLE_EXPORTED);
    return 0;
}

int cox_exporter_export(struct cox_exporter *exporter, int fd, uint64_t offset, uint64_t size,
                        struct cox_handle *ret_handle, struct cox_error *err)
{
    if (getpid() != exporter->self.pid)
        return cox_fail(err, COX_STATE,
                        "the exporter is of process %jd, which forked this one: make one here",
                        (intmax_t)exporter->self.pid);
    struct export *export = calloc(1, sizeof *export);
    if (!export)
        return cox_fail(err, -ENOMEM, "no memory for an export");
    export->fd = -1;
    export->users = 1;
    int r = export_fill(exporter, export, fd, offset, size, err);
    if (r == 0 && exporter->has_socket)
        r = exporter_store(exporter, export, err);
    if (r) {
        export_free(export);
        return r;
    }
    *ret_handle = export->handle;
    pthread_mutex_lock(&exporter->lock);
    struct export **bucket = &exporter->buckets[export->serial % BUCKET_COUNT];
    export->next = *bucket;
    *bucket = export;
    pthread_mutex_unlock(&exporter->lock);
    return 0;
}

int cox_exporter_share(struct cox_exporter *exporter, const struct cox_handle *handle)
{
    return exporter_count(exporter, handle, true, NULL);
}

int cox_exporter_put(struct cox_exporter *exporter, const struct cox_handle *handle)
{
    struct export *last = NULL;
    int r = exporter_count(exporter, handle, false, &last);
    if (r || !last)
        return r;
    if (last->stored)
        exporter_withdraw(exporter, last);
    export_free(last);
    cox_fault_point(COX_FAULT_HANDLE_PUT);
    return 0;
}
