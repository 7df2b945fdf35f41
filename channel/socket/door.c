#include "door.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include "folder.h"
#include "channel/shm/geometry.h"
#include "channel/base/peer.h"
#include "socket.h"
#include "channel/base/thread.h"
#include "visitor.h"

#define LOGON_MS_DEFAULT 1000
#define VISITOR_MAX_DEFAULT 512
#define BACKLOG 4096 /* the kernel takes net.core.somaxconn if that is less */
/* How long another start or sweep may hold the folder's lock. */
#define OPEN_LOCK_MS 10000
/* A process that was killed is gone in this time, unless the kernel holds it. */
#define ENDING_MS 2000
#define CLOSE_LOCK_MS 1000
/* Connections accepted before those that are there are looked at again. */
#define ACCEPT_COUNT_MAX 64
/* Out of fds or memory: how long nobody is let in. */
#define PAUSE_MS 50

/* The thread's own once it runs, but for stop_fd. */
struct cox_door {
    struct cox_reception reception;
    uint32_t visitor_max;
    char path[COX_DOOR_PATH_SIZE];
    char file[COX_FOLDER_FILE_SIZE];
    int folder_fd, listen_fd, stop_fd;
    /* given up to refuse a visitor when there are no fds left */
    int spare_fd;
    bool named;
    /* of the socket's file */
    dev_t device;
    ino_t inode;
    /* nobody is let in before; 0: everybody is */
    uint64_t resume_ns;
    /* nobody was let in since the last pause */
    bool short_of_fds;
    /* nor is anybody, see door_is_choked */
    bool choked;
    uint64_t next_id;
    /* visitor_count of visitor_max, in order of arrival */
    struct cox_visitor **visitors;
    uint32_t visitor_count;
    /* stop, door, the visitors in their order, and those of their processes that are watched, in
     * the same order */
    struct pollfd *polled;
    /* for counts */
    _Atomic uint32_t shown_visitors, shown_fd_owners, shown_fd_entries;
    pthread_t thread;
};

/* ---- all of them ---- */

/* Those without an fd go. */
static void visitors_remove(struct cox_door *door)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < door->visitor_count; i++) {
        struct cox_visitor *visitor = door->visitors[i];
        if (visitor->fd < 0)
            free(visitor);
        else
            door->visitors[kept++] = visitor;
    }
    door->visitor_count = kept;
}

static void visitors_expire(struct cox_door *door)
{
    uint64_t now_ns = cox_now_ns();
    for (uint32_t i = 0; i < door->visitor_count; i++) {
        struct cox_visitor *visitor = door->visitors[i];
        if (visitor->fd >= 0 && visitor->state == COX_VISITOR_LOGON &&
            visitor->deadline_ns <= now_ns)
            cox_visitor_refuse(&door->reception, visitor, COX_TIMEOUT,
                               "%zu of %d bytes of the logon came within %" PRIu64 " ms",
                               visitor->received, COX_LOGON_SIZE, door->reception.logon_ms);
    }
}

/* The oldest whose logon is not complete is told why, behind "had come when"; false: there is none
 * among those that came up to the visitor `last`. */
static bool visitors_give_up_oldest(struct cox_door *door, uint64_t last, const char *why)
{
    for (uint32_t i = 0; i < door->visitor_count; i++) {
        struct cox_visitor *visitor = door->visitors[i];
        if (visitor->state != COX_VISITOR_LOGON || visitor->who.id > last)
            continue;
        cox_visitor_refuse(&door->reception, visitor, COX_FULL,
                           "%zu of %d bytes of the logon had come when %s", visitor->received,
                           COX_LOGON_SIZE, why);
        visitors_remove(door);
        return true;
    }
    return false;
}

/* For a newer one. False: all are welcomed. */
static bool visitors_make_room(struct cox_door *door)
{
    char why[80];
    if (door->visitor_count < door->visitor_max)
        return true;
    snprintf(why, sizeof why, "a newer visitor needed the place, one of %" PRIu32,
             door->visitor_max);
    return visitors_give_up_oldest(door, door->next_id, why);
}

/* ---- letting in ---- */

/* fd is taken over. */
static void door_let_in(struct cox_door *door, int fd)
{
    struct cox_socket_peer peer;
    struct cox_visitor *visitor = NULL;
    char reason[128] = "";
    int r = cox_socket_peer(fd, &peer), code = COX_REJECTED;
    if (r == 0 && peer.uid != geteuid() && peer.uid != 0) {
        code = COX_DENIED;
        snprintf(reason, sizeof reason, "user %u may not come in: expected %u or 0", peer.uid,
                 geteuid());
    } else if (r == 0 && !visitors_make_room(door)) {
        code = COX_FULL;
        snprintf(reason, sizeof reason, "%" PRIu32 " connections are open: there may be no more",
                 door->visitor_max);
    } else if (r == 0) {
        visitor = calloc(1, sizeof *visitor);
        r = visitor ? 0 : -ENOMEM;
    }
    if (!visitor) {
        if (r)
            snprintf(reason, sizeof reason, "the visitor: %s", cox_status_text(r));
        cox_log_limit_write(&door->reception.log, 4, NULL, code, "door: refused: %s", reason);
        cox_visitor_turn_away(fd, code, reason);
        cox_closer_hang_up(door->reception.closer, &fd);
        return;
    }
    visitor->state = COX_VISITOR_LOGON;
    visitor->fd = fd;
    visitor->brought_fd = -1;
    visitor->pidfd = -1;
    visitor->deadline_ns = cox_deadline_after_ms(door->reception.logon_ms);
    visitor->who =
        (struct cox_door_visitor){.id = ++door->next_id, .pid = peer.pid, .uid = peer.uid};
    door->visitors[door->visitor_count++] = visitor;
}

static void spare_open(struct cox_door *door)
{
    if (door->spare_fd >= 0)
        return;
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && cox_fd_raise(&fd) < 0)
        cox_close_fd(&fd);
    door->spare_fd = fd;
}

/* No fd, or no memory. A connection that is not accepted makes poll return at once, again and
 * again: the spare fd is for telling it; and for a while nobody is let in. */
static void door_pause(struct cox_door *door, int e)
{
    if (!door->short_of_fds) /* it may last for hours */
        cox_log_limit_write(&door->reception.log, 4, NULL, 0,
                            "door: nobody is let in, but for a try every %d ms: %s", PAUSE_MS,
                            cox_status_text(-e));
    door->short_of_fds = true;
    if (door->spare_fd >= 0) {
        cox_close_fd(&door->spare_fd);
        int fd = accept4(door->listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            cox_visitor_turn_away(fd, COX_FULL, "the coordinator may not open more fds");
        cox_closer_hang_up(door->reception.closer, &fd);
        spare_open(door);
    }
    door->resume_ns = cox_deadline_after_ms(PAUSE_MS);
}

static void door_accept(struct cox_door *door)
{
    const uint64_t last_read = door->next_id;
    for (int i = 0; i < ACCEPT_COUNT_MAX; i++) {
        int fd = accept4(door->listen_fd, NULL, NULL, SOCK_CLOEXEC);
        int e = fd < 0 ? errno : -cox_fd_raise(&fd); /* whose failure is want of fds, too */
        if (e == 0) {
            door->short_of_fds = false;
            door_let_in(door, fd);
            continue;
        }
        cox_close_fd(&fd);
        if (e == EAGAIN || e == EWOULDBLOCK)
            return;
        if (e == EINTR || e == ECONNABORTED)
            continue;
        /* The kernel looks for an fd before it looks whether anybody has come. */
        if (cox_socket_wait(door->listen_fd, POLLIN, 0) == COX_TIMEOUT)
            return;
        if (visitors_give_up_oldest(door, last_read, "a newer visitor needed its fd"))
            continue;
        /* Nobody has read yet what those have to say who were let in just now. */
        if (door->next_id > last_read)
            return;
        door_pause(door, e);
        return;
    }
}

/* ---- the thread ---- */

/* So many closes hang that what else comes with fds could not be got rid of. */
static bool door_is_choked(const struct cox_door *door)
{
    return cox_closer_counts(door->reception.closer).waiting >= COX_CLOSER_WAITING_MAX;
}

/* Until when to sleep: the first logon that is late, or the end of a pause. */
static uint64_t door_deadline(struct cox_door *door)
{
    uint64_t deadline_ns = cox_closer_turn(door->reception.closer);
    if (door->resume_ns)
        deadline_ns = cox_deadline_min(deadline_ns, door->resume_ns);
    deadline_ns = cox_deadline_min(deadline_ns, cox_log_limit_turn(&door->reception.log, false));
    if (door_is_choked(door))
        deadline_ns = cox_deadline_min(deadline_ns, cox_deadline_after_ms(PAUSE_MS));
    for (uint32_t i = 0; i < door->visitor_count; i++)
        if (door->visitors[i]->state == COX_VISITOR_LOGON)
            deadline_ns = cox_deadline_min(deadline_ns, door->visitors[i]->deadline_ns);
    return deadline_ns;
}

static int timeout_until(uint64_t deadline_ns)
{
    if (deadline_ns == COX_DEADLINE_NEVER)
        return -1;
    uint64_t now_ns = cox_now_ns();
    /* Rounded up, or the last millisecond would be spent in a loop. */
    uint64_t left_ms =
        now_ns < deadline_ns ? (deadline_ns - now_ns - 1) / COX_NSEC_PER_MSEC + 1 : 0;
    return left_ms < INT_MAX ? (int)left_ms : INT_MAX;
}

static void door_poll(struct cox_door *door)
{
    struct pollfd *polled = door->polled;
    polled[0] = (struct pollfd){.fd = door->stop_fd, .events = POLLIN};
    const bool choked = door_is_choked(door);
    if (choked && !door->choked)
        cox_log_limit_write(
            &door->reception.log, 4, NULL, 0,
            "door: nobody is let in, and no fd is taken: %d fds that were sent here wait to be closed, and their closes hang (SO_LINGER, FUSE)",
            COX_CLOSER_WAITING_MAX);
    door->choked = choked;
    polled[1] =
        (struct pollfd){.fd = door->resume_ns || choked ? -1 : door->listen_fd, .events = POLLIN};
    for (uint32_t i = 0; i < door->visitor_count; i++)
        polled[2 + i] = (struct pollfd){
            .fd = choked && door->visitors[i]->state != COX_VISITOR_WORKER ? -1
                                                                           : door->visitors[i]->fd,
            .events = POLLIN};
    nfds_t count = 2 + door->visitor_count;
    for (uint32_t i = 0; i < door->visitor_count; i++)
        if (door->visitors[i]->pidfd >= 0)
            polled[count++] = (struct pollfd){.fd = door->visitors[i]->pidfd, .events = POLLIN};
    int r = poll(polled, count, timeout_until(door_deadline(door)));
    if (r >= 0)
        return;
    for (nfds_t i = 0; i < count; i++)
        polled[i].revents = 0;
    /* No memory in the kernel, or more fds than a limit that was lowered: later, perhaps; but the
     * door can be closed. */
    if (errno != EINTR && poll(polled, 1, PAUSE_MS) < 0) {
        polled[0].revents = 0;
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_MS * (long)COX_NSEC_PER_MSEC}, NULL);
    }
}

/* As door_poll has seen them. */
static void visitors_serve(struct cox_door *door)
{
    const struct pollfd *process = door->polled + 2 + door->visitor_count;
    for (uint32_t i = 0; i < door->visitor_count; i++) {
        struct cox_visitor *visitor = door->visitors[i];
        if (visitor->pidfd >= 0 && (process++)->revents)
            cox_visitor_died(&door->reception, visitor);
        else if (door->polled[2 + i].revents)
            cox_visitor_read(&door->reception, visitor);
    }
}

/* relaxed: they are told, and nothing else. */
static void door_show(struct cox_door *door)
{
    atomic_store_explicit(&door->shown_visitors, door->visitor_count, memory_order_relaxed);
    atomic_store_explicit(&door->shown_fd_owners, door->reception.fd_owner_count,
                          memory_order_relaxed);
    atomic_store_explicit(&door->shown_fd_entries, door->reception.fd_entries.count,
                          memory_order_relaxed);
}

static void *door_main(void *argument)
{
    struct cox_door *door = argument;
    for (;;) {
        door_show(door);
        door_poll(door);
        if (door->polled[0].revents)
            return NULL;
        visitors_serve(door);
        visitors_expire(door);
        visitors_remove(door);
        if (door->polled[1].revents)
            door_accept(door);
        if (door->resume_ns && door->resume_ns <= cox_now_ns()) {
            spare_open(door);
            door->resume_ns = 0;
        }
    }
}

/* ---- its name ---- */

/* Under the lock. Whether the name is free; dead sockets were swept before. */
static int door_check_name(const struct cox_door *door, const char *name, struct cox_error *err)
{
    pid_t pid = 0;
    int r = cox_folder_probe(door->folder_fd, door->file, &pid);
    if (r == COX_NOT_FOUND)
        return 0;
    if (r == 0 && pid && cox_peer_exiting(pid))
        return cox_fail(err, COX_BUSY, "process %d, which has the name '%s', is just ending",
                        (int)pid, name);
    if (r == 0)
        return cox_fail(
            err, COX_TAKEN,
            "the name '%s' is taken: process %d listens at %s; stop that one or choose another name",
            name, (int)pid, door->path);
    if (r > 0)
        return cox_fail(
            err, COX_DENIED,
            "%s is in the way: expected nothing there, or the socket of a door of user %u; remove it",
            door->path, geteuid());
    return cox_fail(err, r, "%s: %s", door->path, cox_status_text(r));
}

/* Under the lock. After a failure cox_door_unname removes what there is. Returns 0; COX_DENIED:
 * something that is no door's has the temporary name; -errno. */
static int door_bind(struct cox_door *door)
{
    struct sockaddr_un address;
    struct stat st;
    cox_folder_address(door->folder_fd, COX_FOLDER_NEW_FILE, &address);
    if (bind(door->listen_fd, (const struct sockaddr *)&address, sizeof address) < 0)
        return errno == EADDRINUSE ? COX_DENIED : -errno;
    cox_fault_point(COX_FAULT_DOOR_BOUND);
    int r = 0;
    /* What the umask took from its mode. */
    if (fchmodat(door->folder_fd, COX_FOLDER_NEW_FILE, 0600, 0) < 0 ||
        fstatat(door->folder_fd, COX_FOLDER_NEW_FILE, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
        listen(door->listen_fd, BACKLOG) < 0)
        r = -errno;
    cox_fault_point(COX_FAULT_DOOR_LISTENS);
    if (r == 0 && renameat(door->folder_fd, COX_FOLDER_NEW_FILE, door->folder_fd, door->file) < 0)
        r = -errno;
    if (r) {
        unlinkat(door->folder_fd, COX_FOLDER_NEW_FILE, 0);
        cox_fault_point(COX_FAULT_DOOR_UNNAMED);
        return r;
    }
    door->named = true;
    door->device = st.st_dev;
    door->inode = st.st_ino;
    cox_fault_point(COX_FAULT_DOOR_NAMED);
    return 0;
}

/* While it still listens: once it does not, somebody else may take the name. Without the lock, if
 * it cannot be had, somebody may only do so who was told to remove a living door's socket. */
void cox_door_unname(struct cox_door *door)
{
    struct stat st;
    if (!door->named)
        return;
    bool locked = cox_folder_lock(door->folder_fd, cox_deadline_after_ms(CLOSE_LOCK_MS), NULL) == 0;
    if (fstatat(door->folder_fd, door->file, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        st.st_dev == door->device && st.st_ino == door->inode)
        unlinkat(door->folder_fd, door->file, 0);
    cox_fault_point(COX_FAULT_DOOR_UNNAMED);
    if (locked)
        cox_folder_unlock(door->folder_fd);
    door->named = false;
}

static int door_listen_once(struct cox_door *door, const char *name, struct cox_error *err)
{
    uint32_t swept = 0;
    int r = cox_folder_lock(door->folder_fd, cox_deadline_after_ms(OPEN_LOCK_MS), err);
    if (r)
        return r;
    r = cox_folder_sweep(door->folder_fd, &swept, err);
    if (r == 0)
        r = door_check_name(door, name, err);
    if (r == 0) {
        r = door_bind(door);
        if (r == COX_DENIED)
            cox_fail(err, r, "%.*s/%s is in the way: expected nothing there; remove it",
                     (int)(strrchr(door->path, '/') - door->path), door->path, COX_FOLDER_NEW_FILE);
        else if (r)
            cox_fail(err, r, "%s: %s", door->path, cox_status_text(r));
    }
    cox_folder_unlock(door->folder_fd);
    if (swept)
        cox_log_write(&door->reception.log.log, 6,
                      "door: %" PRIu32 " sockets of dead coordinators are removed", swept);
    return r;
}

static int door_listen(struct cox_door *door, const char *name, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(ENDING_MS);
    int r;
    /* Who has the name was killed a moment ago: it ends, and then the name is free. */
    while ((r = door_listen_once(door, name, err)) == COX_BUSY && cox_now_ns() < deadline_ns) {
        if (err)
            cox_error_clear(err); /* the last try is the one to tell of */
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
    return r;
}

/* ---- open and close ---- */

static uint32_t fd_entry_max_default(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur / 4 > UINT32_MAX / 2)
        return UINT32_MAX / 2;
    return limit.rlim_cur < 4 ? 1 : (uint32_t)(limit.rlim_cur / 4);
}

/* The door has its options, nothing is open. */
static struct cox_door *door_new(const struct cox_door_options *options,
                                 const struct cox_door_hooks *hooks)
{
    struct cox_door *door = calloc(1, sizeof *door);
    if (!door)
        return NULL;
    *door = (struct cox_door){
        .reception = {.hooks = *hooks,
                      .logon_ms = options->logon_ms ? options->logon_ms : LOGON_MS_DEFAULT},
        .visitor_max = options->visitor_max ? options->visitor_max : VISITOR_MAX_DEFAULT,
        .folder_fd = -1,
        .listen_fd = -1,
        .stop_fd = -1,
        .spare_fd = -1,
    };
    /* The rest is for workers, of whom there can be COX_RANK_COUNT_MAX, and commands. */
    door->reception.fd_owner_max = door->visitor_max - door->visitor_max * 3 / 8;
    cox_log_limit_init(&door->reception.log, &options->log);
    door->visitors = calloc(door->visitor_max, sizeof(struct cox_visitor *));
    door->polled = calloc(2 * (size_t)door->visitor_max + 2, sizeof *door->polled);
    if (!door->visitors || !door->polled || cox_closer_new(&door->reception.closer)) {
        free(door->visitors);
        free(door->polled);
        free(door);
        return NULL;
    }
    cox_fd_entries_init(&door->reception.fd_entries,
                        options->fd_entry_max ? options->fd_entry_max : fd_entry_max_default(),
                        door->reception.closer);
    return door;
}

/* Those that were not let in yet: what they have sent would be closed with the socket. */
static void door_end_waiting(struct cox_door *door)
{
    for (int i = 0; door->listen_fd >= 0 && i < BACKLOG; i++) {
        int fd = accept4(door->listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            return;
        cox_closer_hang_up(door->reception.closer, &fd);
    }
}

/* Whatever of it there is; no thread runs. */
static void door_free(struct cox_door *door)
{
    cox_door_unname(door);
    for (uint32_t i = 0; i < door->visitor_count; i++) {
        cox_visitor_drop(&door->reception, door->visitors[i]);
        free(door->visitors[i]);
    }
    cox_fd_entries_deinit(&door->reception.fd_entries);
    door_end_waiting(door);
    cox_closer_give(door->reception.closer, &door->listen_fd);
    cox_closer_free(door->reception.closer);
    cox_log_limit_turn(&door->reception.log, true);
    cox_close_fd(&door->stop_fd);
    cox_close_fd(&door->spare_fd);
    cox_close_fd(&door->folder_fd);
    free(door->visitors);
    free(door->polled);
    free(door);
}

static int door_open_fds(struct cox_door *door, struct cox_error *err)
{
    int r = 0;
    door->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (door->stop_fd >= 0)
        door->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (door->listen_fd >= 0)
        door->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (door->spare_fd < 0)
        r = -errno;
    if (r == 0)
        r = cox_fd_raise(&door->stop_fd);
    if (r == 0)
        r = cox_fd_raise(&door->listen_fd);
    if (r == 0)
        r = cox_fd_raise(&door->spare_fd);
    return r ? cox_fail(err, r, "fds of the door: %s", cox_status_text(r)) : 0;
}

static int door_find_path(struct cox_door *door, const char *name, const char *folder,
                          struct cox_error *err)
{
    cox_folder_file(name, door->file);
    int length = snprintf(door->path, sizeof door->path, "%s/%s", folder, door->file);
    if (length < 0 || length >= COX_DOOR_PATH_SIZE)
        return cox_fail(err, COX_TOO_LARGE,
                        "the path of the door has %d bytes: expected less than %d", length,
                        COX_DOOR_PATH_SIZE);
    return 0;
}

int cox_door_open(const struct cox_door_options *options, const struct cox_door_hooks *hooks,
                  struct cox_door **ret_door, struct cox_error *err)
{
    char folder[COX_DOOR_PATH_SIZE];
    int r = cox_name_check(options->name, err);
    if (r == 0 && !options->folder)
        r = cox_folder_default(folder, err);
    if (r)
        return r;
    const char *where = options->folder ? options->folder : folder;
    struct cox_door *door = door_new(options, hooks);
    if (!door)
        return cox_fail(err, -ENOMEM, "the door: %s", cox_status_text(-ENOMEM));
    r = door_find_path(door, options->name, where, err);
    if (r == 0)
        r = cox_folder_open(where, true, &door->folder_fd, err);
    if (r == 0)
        r = door_open_fds(door, err);
    if (r == 0)
        r = door_listen(door, options->name, err);
    if (r == 0) {
        r = cox_thread_start(&door->thread, door_main, door);
        if (r)
            cox_fail(err, r, "the thread of the door: %s", cox_status_text(r));
    }
    if (r) {
        door_free(door);
        return r;
    }
    *ret_door = door;
    return 0;
}

void cox_door_counts(const struct cox_door *door, struct cox_door_counts *ret_counts)
{
    const struct cox_closer_counts closes = cox_closer_counts(door->reception.closer);
    *ret_counts = (struct cox_door_counts){
        .visitors = atomic_load_explicit(&door->shown_visitors, memory_order_relaxed),
        .visitor_max = door->visitor_max,
        .fd_owners = atomic_load_explicit(&door->shown_fd_owners, memory_order_relaxed),
        .fd_owner_max = door->reception.fd_owner_max,
        .fd_entries = atomic_load_explicit(&door->shown_fd_entries, memory_order_relaxed),
        .fd_entry_max = door->reception.fd_entries.max,
        .closing = closes.waiting,
        .closing_max = COX_CLOSER_WAITING_MAX,
        .hanging = closes.hanging,
    };
}

struct cox_door *cox_door_close(struct cox_door *door)
{
    if (!door)
        return NULL;
    COX_ASSERT(!pthread_equal(pthread_self(), door->thread)); /* a hook cannot end its own thread */
    uint64_t one = 1;
    ssize_t r;
    do
        r = write(door->stop_fd, &one, sizeof one);
    while (r < 0 && errno == EINTR);
    pthread_join(door->thread, NULL);
    door_free(door);
    return NULL;
}

const char *cox_door_path(const struct cox_door *door)
{
    return door->path;
}

int cox_door_sweep(const char *folder, uint32_t *ret_count, struct cox_error *err)
{
    char buffer[COX_DOOR_PATH_SIZE];
    struct cox_error why = {0};
    _cox_cleanup_(cox_close_fd) int folder_fd = -1;
    uint32_t count = 0;
    int r = folder ? 0 : cox_folder_default(buffer, err);
    if (r)
        return r;
    r = cox_folder_open(folder ? folder : buffer, false, &folder_fd, &why);
    if (r == 0)
        r = cox_folder_lock(folder_fd, cox_deadline_after_ms(OPEN_LOCK_MS), &why);
    if (r == 0) {
        r = cox_folder_sweep(folder_fd, &count, &why);
        cox_folder_unlock(folder_fd);
    }
    if (r && r != COX_NOT_FOUND)
        return cox_fail(err, r, "%s", why.text);
    *ret_count = count;
    return 0;
}
