#include "socket_file.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* How long another start or sweep may hold the runtime directory's lock. */
#define OPEN_LOCK_MS 10000
/* A process that was killed is gone by then, unless the kernel holds it. */
#define ENDING_MS 2000
#define CLOSE_LOCK_MS 1000
/* From the removal of the file to its replacement, for who removes a directory removes its files
 * first; and between attempts. */
#define RENEW_MS 1000

/* ---- the socket ---- */

/* Must not outlive this process in a child. */
static int listen_fd_open(int *ret_fd)
{
    cox_unforked_hold();
    *ret_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return cox_unforked_release(ret_fd);
}

static void listen_fd_end(struct cox_socket_file *file, int *fd)
{
    cox_unforked_remove(*fd);
    cox_closer_give(file->closer, fd);
}

/* ---- its name ---- */

/* Under the lock. Checks that the name is free; dead sockets were swept before.
 * Returns
 *   0
 *   COX_BUSY: its owner is just ending, or has ended since the sweep; worth another sweep
 *   COX_TAKEN, COX_DENIED
 *   -errno
 */
static int check_name(const struct cox_socket_file *file, struct cox_error *err)
{
    pid_t pid = 0;
    int r = cox_runtime_dir_probe(file->runtime_dir_fd, file->file, &pid);
    if (r == COX_NOT_FOUND)
        return 0;
    if (r == COX_CLOSED)
        return cox_fail(err, COX_BUSY, "the process that had the name '%s' has just ended",
                        file->name);
    if (r == 0 && pid && cox_peer_exiting(pid))
        return cox_fail(err, COX_BUSY, "process %d, which has the name '%s', is just ending",
                        (int)pid, file->name);
    char who[48] = "a process that cannot be seen from here";
    if (pid)
        snprintf(who, sizeof who, "process %d", (int)pid);
    if (r == 0)
        return cox_fail(
            err, COX_TAKEN,
            "the name '%s' is taken: %s listens at %s; stop that one or choose another name",
            file->name, who, file->path);
    if (r > 0)
        return cox_fail(
            err, COX_DENIED,
            "%s is in the way: expected nothing there, or the socket of a group of user %u: choose another name",
            file->path, geteuid());
    return cox_fail(err, r, "%s: %s", file->path, cox_status_text(r));
}

/* Under the lock. After a failure cox_socket_file_remove removes the rest.
 * Returns
 *   0
 *   COX_DENIED: something else has the temporary name
 *   -errno
 */
static int bind_file(struct cox_socket_file *file)
{
    struct sockaddr_un address;
    struct stat st;
    cox_runtime_dir_address(file->runtime_dir_fd, COX_RUNTIME_DIR_NEW_FILE, &address);
    if (bind(file->listen_fd, (const struct sockaddr *)&address, sizeof address) < 0)
        return errno == EADDRINUSE ? COX_DENIED : -errno;
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_BOUND);
    int r = 0;
    /* Restores what the umask removed. */
    if (fchmodat(file->runtime_dir_fd, COX_RUNTIME_DIR_NEW_FILE, 0600, 0) < 0 ||
        fstatat(file->runtime_dir_fd, COX_RUNTIME_DIR_NEW_FILE, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
        listen(file->listen_fd, COX_SOCKET_BACKLOG) < 0)
        r = -errno;
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_LISTENS);
    if (r == 0 && renameat(file->runtime_dir_fd, COX_RUNTIME_DIR_NEW_FILE, file->runtime_dir_fd,
                           file->file) < 0)
        r = -errno;
    if (r) {
        unlinkat(file->runtime_dir_fd, COX_RUNTIME_DIR_NEW_FILE, 0);
        cox_fault_point(COX_FAULT_CONTROL_SOCKET_UNNAMED);
        return r;
    }
    file->named = true;
    file->device = st.st_dev;
    file->inode = st.st_ino;
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_NAMED);
    return 0;
}

/* Removes the file if it is this socket's. */
static void unlink_file(const struct cox_socket_file *file)
{
    struct stat st;
    if (fstatat(file->runtime_dir_fd, file->file, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        st.st_dev == file->device && st.st_ino == file->inode)
        unlinkat(file->runtime_dir_fd, file->file, 0);
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_UNNAMED);
}

/* The file's links and its place, and the place of the directory. */
static void watch_start(struct cox_socket_file *file)
{
    char path[64 + COX_RUNTIME_DIR_FILE_SIZE];
    cox_close_fd(&file->watch_fd);
    file->watch_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (file->watch_fd < 0)
        return;
    cox_fd_raise(&file->watch_fd);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file->runtime_dir_fd);
    inotify_add_watch(file->watch_fd, path, IN_MOVE_SELF);
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", file->runtime_dir_fd, file->file);
    inotify_add_watch(file->watch_fd, path, IN_ATTRIB | IN_MOVE_SELF);
}

static int listen_once(struct cox_socket_file *file, uint64_t lock_ms, struct cox_error *err)
{
    uint32_t swept = 0;
    int r = cox_runtime_dir_lock(file->runtime_dir_fd, cox_deadline_after_ms(lock_ms), err);
    if (r)
        return r;
    r = cox_runtime_dir_sweep(file->runtime_dir_fd, &swept, err);
    if (r == 0)
        r = check_name(file, err);
    if (r == 0) {
        r = bind_file(file);
        if (r == COX_DENIED)
            cox_fail(err, r,
                     "%.*s/%s is in the way: expected nothing there; move it away if it is yours, "
                     "or set COXSWAIN_RUNTIME_DIR to another folder",
                     (int)(strrchr(file->path, '/') - file->path), file->path,
                     COX_RUNTIME_DIR_NEW_FILE);
        else if (r)
            cox_fail(err, r, "%s: %s", file->path, cox_status_text(r));
    }
    cox_runtime_dir_unlock(file->runtime_dir_fd);
    if (swept)
        cox_log_write(file->log, 6,
                      "control socket: %" PRIu32 " sockets of dead coordinators are removed",
                      swept);
    return r;
}

static int listen_patiently(struct cox_socket_file *file, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(ENDING_MS);
    int r;
    /* The owner of the name was killed a moment ago; when it has ended the name is free. */
    while ((r = listen_once(file, OPEN_LOCK_MS, err)) == COX_BUSY && cox_now_ns() < deadline_ns) {
        if (err)
            cox_error_clear(err); /* the last attempt is the one to report */
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
    return r;
}

/* ---- the file is gone: a logout removes directories, and so do cleaners of /tmp ---- */

static void fds_exchange(int *a, int *b)
{
    const int kept = *a;
    *a = *b;
    *b = kept;
}

/* A socket has one address for life, so this takes another one. The lock is held. Returns as
 * cox_socket_file_open; then nothing has changed. */
static int renew(struct cox_socket_file *file, struct cox_error *err)
{
    char runtime_dir[COX_SOCKET_PATH_SIZE];
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1;
    int listen_fd = -1;
    snprintf(runtime_dir, sizeof runtime_dir, "%.*s", (int)(strrchr(file->path, '/') - file->path),
             file->path);
    int r = cox_runtime_dir_open(runtime_dir, true, &runtime_dir_fd, err);
    if (r)
        return r;
    r = listen_fd_open(&listen_fd);
    if (r)
        return cox_fail(err, r, "socket: %s", cox_status_text(r));
    fds_exchange(&file->runtime_dir_fd, &runtime_dir_fd);
    fds_exchange(&file->listen_fd, &listen_fd);
    r = listen_once(file, 0, err);
    if (r) {
        unlink_file(file);
        fds_exchange(&file->runtime_dir_fd, &runtime_dir_fd);
        fds_exchange(&file->listen_fd, &listen_fd);
    } else {
        watch_start(file);
    }
    listen_fd_end(file, &listen_fd);
    return r;
}

static bool is_there(const struct cox_socket_file *file)
{
    struct stat st;
    return stat(file->path, &st) == 0 && st.st_dev == file->device && st.st_ino == file->inode;
}

uint64_t cox_socket_file_turn(struct cox_socket_file *file)
{
    struct cox_error err = {0};
    bool renewed = false;
    if (!file->check_ns)
        return COX_DEADLINE_NEVER;
    if (cox_now_ns() < file->check_ns)
        return file->check_ns;
    pthread_mutex_lock(&file->lock);
    if (file->named && !is_there(file))
        renewed = renew(file, &err) == 0;
    pthread_mutex_unlock(&file->lock);
    if (renewed)
        cox_log_write(file->log, 4,
                      "control socket: %s was removed by another process, and is made anew",
                      file->path);
    else if (err.code && !file->lost)
        cox_log_write(file->log, 4,
                      "control socket: %s was removed by another process, and no command reaches "
                      "the group until it can be made anew: %s",
                      file->path, err.text);
    file->lost = err.code != 0;
    file->check_ns = file->lost ? cox_deadline_after_ms(RENEW_MS) : 0;
    return file->lost ? file->check_ns : COX_DEADLINE_NEVER;
}

/* Events do not say all that matters, such as a directory above: so it is checked what is there. */
void cox_socket_file_changed(struct cox_socket_file *file)
{
    char events[4096];
    while (read(file->watch_fd, events, sizeof events) > 0)
        continue;
    file->check_ns = cox_deadline_after_ms(RENEW_MS);
}

/* ---- open and close ---- */

void cox_socket_file_init(struct cox_socket_file *file, struct cox_closer *closer,
                          const struct cox_log *log)
{
    *file = (struct cox_socket_file){
        .closer = closer,
        .log = log,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .listen_fd = -1,
        .watch_fd = -1,
        .runtime_dir_fd = -1,
    };
}

int cox_socket_file_open(struct cox_socket_file *file, const char *name, const char *runtime_dir,
                         struct cox_error *err)
{
    snprintf(file->name, sizeof file->name, "%s", name);
    cox_runtime_dir_file(name, file->file);
    int length = snprintf(file->path, sizeof file->path, "%s/%s", runtime_dir, file->file);
    if (length < 0 || length >= COX_SOCKET_PATH_SIZE)
        return cox_fail(err, COX_TOO_LARGE,
                        "the path of the control socket has %d bytes: expected less than %d",
                        length, COX_SOCKET_PATH_SIZE);
    int r = cox_runtime_dir_open(runtime_dir, true, &file->runtime_dir_fd, err);
    if (r)
        return r;
    r = listen_fd_open(&file->listen_fd);
    if (r)
        return cox_fail(err, r, "fds of the control socket: %s", cox_status_text(r));
    r = listen_patiently(file, err);
    if (r == 0)
        watch_start(file);
    return r;
}

/* If the lock cannot be had the file is removed without it; only a process that was ordered to
 * remove the name of a live control socket could interfere. */
void cox_socket_file_remove(struct cox_socket_file *file)
{
    pthread_mutex_lock(&file->lock);
    if (file->named) {
        bool locked = cox_runtime_dir_lock(file->runtime_dir_fd,
                                           cox_deadline_after_ms(CLOSE_LOCK_MS), NULL) == 0;
        unlink_file(file);
        if (locked)
            cox_runtime_dir_unlock(file->runtime_dir_fd);
        file->named = false;
    }
    pthread_mutex_unlock(&file->lock);
}

void cox_socket_file_close(struct cox_socket_file *file)
{
    cox_socket_file_remove(file);
    if (file->listen_fd >= 0)
        listen_fd_end(file, &file->listen_fd);
    cox_close_fd(&file->watch_fd);
    cox_close_fd(&file->runtime_dir_fd);
    pthread_mutex_destroy(&file->lock);
}
