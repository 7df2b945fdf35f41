/*
 * The named form. A locked file belongs to a live process: the creator locks it before it has the
 * name, a joining process locks it before it reads it, all with shared locks, and the kernel drops
 * the locks of the dead. So a process that gets the exclusive lock has found a leftover, and
 * removes it.
 *
 * A name is removed only by a process that holds a lock on the file and sees that the name still
 * means that file, while it holds a second lock, which one process can have at a time. No other
 * process can remove the name in between: processes with a lock on the file are excluded by the
 * second lock, all others by the first. So the name of the next group is never removed. (The second
 * lock is an open file description lock on the first byte: the kernel drops it with the process,
 * too.)
 *
 * A file that can be locked may belong to an earlier group: its name is removed, or about to be
 * since all ranks have joined, or some ranks have failed and the others are about to notice. Or it
 * is of another incarnation, which its creator writes into it before it has the name, so that a
 * process never becomes a rank of a wrong incarnation. In these cases the joining process polls,
 * each millisecond, until the name is free or means another file.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "channel/shm/region.h"
#include "group_memory.h"
#include "group_private.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define SHM_FOLDER "/dev/shm"
#define RETRY_NS COX_NSEC_PER_MSEC

uint64_t cox_group_memory_size(uint32_t rank_count, uint32_t value_size)
{
    if (value_size == 0)
        value_size = COX_GROUP_VALUE_SIZE_MIN;
    return cox_group_values_offset(rank_count) + rank_count * cox_group_values_stride(value_size);
}

/* ---- names ---- */

/* Returns true if the path still refers to the file. */
static bool name_is(const struct cox_group_name *name)
{
    struct stat st;
    return fstatat(AT_FDCWD, name->path, &st, 0) == 0 && st.st_dev == name->device &&
           st.st_ino == name->inode;
}

/* Also the guarantee that the name is gone: waits for another process that is removing it, and
 * removes it itself if that one dies. Until the deadline, because that one may be stopped. */
static void name_remove(const struct cox_group_name *name, uint64_t deadline_ns)
{
    struct flock only = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    while (fcntl(name->fd, F_OFD_SETLK, &only) < 0 && (errno == EAGAIN || errno == EACCES)) {
        if (!name_is(name) || cox_now_ns() >= deadline_ns)
            return;
        cox_fault_point(COX_FAULT_GROUP_UNLINK_WAITS);
        nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
    if (name_is(name))
        unlink(name->path);
    cox_fault_point(COX_FAULT_GROUP_UNLINKED);
}

void cox_group_name_end(struct cox_group_name *name, bool only_if_last, uint64_t deadline_ns)
{
    if (name->fd < 0)
        return;
    /* The shared lock is lost if this fails, and a process that ends after this one finds that it
     * is the last. */
    if (!only_if_last || flock(name->fd, LOCK_EX | LOCK_NB) == 0)
        name_remove(name, deadline_ns);
    cox_close_fd(&name->fd);
}

/* Creates a file without a name, locked. */
static int name_fill(const struct cox_group_base *base, struct cox_group_name *name, uint64_t size,
                     struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = open(SHM_FOLDER, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return cox_fail(err, -errno, "%s: cannot create in " SHM_FOLDER ": %s", name->path,
                        cox_status_text(-errno));
    int r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "%s: dup: %s", name->path, cox_status_text(r));
    if (fchmod(fd, 0600) < 0) /* against an odd umask */
        return cox_fail(err, -errno, "%s: fchmod: %s", name->path, cox_status_text(-errno));
    r = cox_region_reserve(fd, size, name->path, err);
    if (r)
        return r;
    const struct cox_group_layout_wakeup wakeup = {.made = {.magic = COX_GROUP_MAGIC,
                                                            .incarnation = base->incarnation,
                                                            .rank_count = base->rank_count,
                                                            .value_size = base->value_size,
                                                            .rank = base->rank}};
    if (write(fd, &wakeup, sizeof wakeup) != (ssize_t)sizeof wakeup)
        return cox_fail(err, -errno, "%s: %s", name->path, cox_status_text(-errno));
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: fstat: %s", name->path, cox_status_text(-errno));
    if (flock(fd, LOCK_SH | LOCK_NB) < 0)
        return cox_fail(err, -errno, "%s: flock: %s", name->path, cox_status_text(-errno));
    name->device = st.st_dev;
    name->inode = st.st_ino;
    name->fd = cox_steal_fd(&fd);
    cox_fault_point(COX_FAULT_GROUP_FILLED);
    return 0;
}

/* Creates, maps and names it, in this order: what can fail fails before there is a name. Returns 0;
 * COX_BUSY: another process was faster. */
static int name_make(struct cox_group_base *base, struct cox_group_name *name,
                     struct cox_error *err)
{
    char self[64];
    uint64_t size = cox_group_memory_size(base->rank_count, base->value_size);
    int r = name_fill(base, name, size, err);
    if (r)
        return r;
    r = cox_region_map(&base->region, name->fd, size, COX_REGION_WRITE, name->path, err);
    snprintf(self, sizeof self, "/proc/self/fd/%d", name->fd);
    if (r == 0 && linkat(AT_FDCWD, self, AT_FDCWD, name->path, AT_SYMLINK_FOLLOW) < 0)
        r = errno == EEXIST ? COX_BUSY
                            : cox_fail(err, -errno, "%s: %s", name->path, cox_status_text(-errno));
    cox_fault_point(COX_FAULT_GROUP_LINKED);
    if (r) {
        cox_region_detach(&base->region);
        cox_close_fd(&name->fd);
    }
    return r;
}

/* For a file that only this process has locked. */
static int name_sweep(const struct cox_group_name *name, struct cox_error *err)
{
    uint64_t magic = 0;
    if (pread(name->fd, &magic, sizeof magic,
              offsetof(struct cox_group_layout, wakeup.made.magic)) < 0)
        return cox_fail(err, -errno, "%s: %s", name->path, cox_status_text(-errno));
    if (magic != COX_GROUP_MAGIC)
        return cox_fail(err, COX_DENIED, "%s is in the way: a file that is none of ours",
                        name->path);
    name_remove(name, 0); /* no other process removes it: it would have it locked */
    cox_fault_point(COX_FAULT_GROUP_SWEPT);
    return COX_BUSY;
}

/* Returns 0: locked, and the name refers to it; COX_BUSY: try again; COX_NOT_FOUND; otherwise as
 * join. */
static int name_open(struct cox_group_name *name, struct cox_error *err)
{
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd =
        open(name->path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int e = errno;
        bool foreign = e == ELOOP || e == EACCES || e == EISDIR || e == ENXIO;
        return e == ENOENT ? COX_NOT_FOUND
                           : cox_fail(err, foreign ? COX_DENIED : -e, "%s is in the way: %s",
                                      name->path, cox_status_text(-e));
    }
    int r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "%s: dup: %s", name->path, cox_status_text(r));
    r = cox_region_check_fd(fd, name->path, err);
    if (r)
        return r;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: fstat: %s", name->path, cox_status_text(-errno));
    name->device = st.st_dev;
    name->inode = st.st_ino;
    struct cox_group_name opened = *name;
    opened.fd = fd;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        return name_sweep(&opened, err);
    if (errno != EWOULDBLOCK || flock(fd, LOCK_SH | LOCK_NB) < 0) {
        r = errno; /* EWOULDBLOCK: it is being removed */
        return r == EWOULDBLOCK
                   ? COX_BUSY
                   : cox_fail(err, -r, "%s: flock: %s", name->path, cox_status_text(-r));
    }
    cox_fault_point(COX_FAULT_GROUP_LOCKED);
    if (!name_is(name))
        return COX_BUSY;
    name->fd = cox_steal_fd(&fd);
    return 0;
}

/* ---- identities ---- */

static struct cox_group_layout_identity *identity_of(const struct cox_group_base *base,
                                                     uint32_t rank)
{
    return &base->ranks[rank]->identity;
}

static void identity_say(struct cox_group_base *base, enum cox_group_state state)
{
    struct cox_group_layout_identity *identity = identity_of(base, base->rank);
    /* relaxed, all: before the release below; dead, of one number: see say_dead. */
    uint32_t dead = atomic_load_explicit(&base->dead, memory_order_relaxed);
    atomic_store_explicit(&identity->incarnation, base->incarnation, memory_order_relaxed);
    atomic_store_explicit(&identity->said_count, base->rank_count, memory_order_relaxed);
    atomic_store_explicit(&identity->said_size, base->value_size, memory_order_relaxed);
    atomic_store_explicit(&identity->said_dead, dead ? cox_group_said_dead(dead - 1) : 0,
                          memory_order_relaxed);
    /* release: partner is cox_group_holder_of. */
    atomic_store_explicit(&identity->holder, cox_group_holder(state, base->pid, base->start),
                          memory_order_release);
    cox_group_tell_mirror(base);
    cox_fault_point(COX_FAULT_GROUP_SAID);
}

void cox_group_say(struct cox_group_base *base, enum cox_group_state state)
{
    identity_say(base, state);
    cox_group_wake(base->wakeup);
}

/* Returns true if the process that the word names is dead; false also if that is unknown. */
static bool holder_is_dead(uint64_t holder)
{
    struct cox_peer peer = COX_PEER_NONE;
    int r = cox_group_process_meet(holder, &peer);
    cox_peer_close(&peer);
    return r == COX_PEER_DEAD;
}

static int fail_mismatch(const struct cox_group_base *base, uint32_t rank, uint32_t rank_count,
                         uint32_t value_size, uint64_t incarnation, struct cox_error *err)
{
    return cox_fail(err, COX_INVALID,
                    "rank %" PRIu32 " has %" PRIu32 " ranks, values of %" PRIu32
                    " bytes, incarnation %" PRIu64 "; this one, rank %" PRIu32 ": %" PRIu32
                    ", %" PRIu32 ", %" PRIu64 ": give all ranks the same",
                    rank, rank_count, value_size, incarnation, base->rank, base->rank_count,
                    base->value_size, base->incarnation);
}

/* Returns true if that rank was given the same parameters as this one. */
static bool identity_agrees(const struct cox_group_base *base, uint32_t rank)
{
    const struct cox_group_layout_identity *identity = identity_of(base, rank);
    /* relaxed, all: behind the acquire of cox_group_holder_of. */
    return atomic_load_explicit(&identity->said_count, memory_order_relaxed) == base->rank_count &&
           atomic_load_explicit(&identity->said_size, memory_order_relaxed) == base->value_size &&
           atomic_load_explicit(&identity->incarnation, memory_order_relaxed) == base->incarnation;
}

/* Returns true if this is a group under a name that is about to be gone. For a rank with other
 * parameters than `made`, a rank that failed with the same parameters does not count: it found what
 * this one finds now. */
static bool group_is_over(const struct cox_group_base *base,
                          const struct cox_group_layout_made *made)
{
    bool agrees = made->rank_count == base->rank_count && made->value_size == base->value_size;
    for (uint32_t rank = 0; rank < made->rank_count; rank++) {
        enum cox_group_state state = cox_group_holder_state(cox_group_holder_of(base, rank));
        if (state == COX_GROUP_WHOLE || state == COX_GROUP_LEFT ||
            (state == COX_GROUP_FAILED && (agrees || !identity_agrees(base, rank))))
            return true;
    }
    return false;
}

/* Returns 0; COX_PEER_DEAD: the process that was this rank is dead or has left; COX_TAKEN. */
static int identity_claim(struct cox_group_base *base, struct cox_error *err)
{
    uint64_t seen = 0;
    /* acq_rel: one process wins; partner is this exchange. */
    if (atomic_compare_exchange_strong_explicit(
            &identity_of(base, base->rank)->holder, &seen,
            cox_group_holder(COX_GROUP_CLAIMED, base->pid, base->start), memory_order_acq_rel,
            memory_order_acquire)) {
        cox_fault_point(COX_FAULT_GROUP_CLAIMED);
        return 0;
    }
    enum cox_group_state state = cox_group_holder_state(seen);
    if (state == COX_GROUP_LEFT || state == COX_GROUP_FAILED || holder_is_dead(seen))
        return cox_fail(err, COX_PEER_DEAD,
                        "rank %" PRIu32
                        " was process %d, which is dead or has left: form a new group",
                        base->rank, cox_group_holder_pid(seen));
    return cox_fail(err, COX_TAKEN, "rank %" PRIu32 " is process %d", base->rank,
                    cox_group_holder_pid(seen));
}

static int identity_verify(const struct cox_group_base *base, uint32_t rank, struct cox_error *err)
{
    if (identity_agrees(base, rank))
        return 0;
    /* Unless it has moved on to another incarnation, its parameters are everyone's. */
    if (base->memory)
        return cox_group_holder_of(base, rank)
                   ? cox_fail(err, COX_CORRUPT,
                              "rank %" PRIu32 " states another group in its memory than its own",
                              rank)
                   : 0;
    const struct cox_group_layout_identity *identity = identity_of(base, rank);
    /* relaxed, all: behind the acquire of cox_group_holder_of. */
    return fail_mismatch(base, rank,
                         atomic_load_explicit(&identity->said_count, memory_order_relaxed),
                         atomic_load_explicit(&identity->said_size, memory_order_relaxed),
                         atomic_load_explicit(&identity->incarnation, memory_order_relaxed), err);
}

/* ---- the memory ---- */

/* The group under this name has other parameters: reports that to its members, if this rank would
 * be one of them. */
static int parameters_differ(struct cox_group_base *base, const struct cox_group_layout_made *made,
                             struct cox_error *err)
{
    uint64_t empty = 0;
    /* acq_rel: as in identity_claim. FAILED at once: the others see the parameters it was given. */
    if (base->rank < made->rank_count &&
        atomic_compare_exchange_strong_explicit(
            &identity_of(base, base->rank)->holder, &empty,
            cox_group_holder(COX_GROUP_CLAIMED, base->pid, base->start), memory_order_acq_rel,
            memory_order_relaxed)) {
        cox_fault_point(COX_FAULT_GROUP_CLAIMED);
        cox_group_say(base, COX_GROUP_FAILED);
    }
    return fail_mismatch(base, made->rank, made->rank_count, made->value_size, made->incarnation,
                         err);
}

static void memory_drop(struct cox_group_base *base)
{
    cox_region_detach(&base->region);
    base->layout = NULL;
}

/* The named form: one region. The offset of rank r's words does not depend on the number of ranks.
 */
static void memory_place(struct cox_group_base *base)
{
    uint8_t *bytes = base->region.base;
    base->layout = base->region.base;
    base->wakeup = &base->layout->wakeup;
    base->wakeups = (struct cox_group_layout_wakeup *)(void *)(bytes + cox_group_wakeups_offset(
                                                                           base->rank_count));
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
        base->ranks[rank] = &base->layout->ranks[rank];
    for (uint32_t rank = 0; rank < base->rank_count; rank++)
        base->values[rank] = bytes + cox_group_values_offset(base->rank_count) +
                             rank * cox_group_values_stride(base->value_size);
}

static int memory_of_fd(struct cox_group_base *base, int fd, uint64_t offset, struct cox_error *err)
{
    static const char what[] = "the group's memory";
    struct stat st;
    uint64_t size = cox_group_memory_size(base->rank_count, base->value_size);
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s, fd %d: %s", what, fd, cox_status_text(-errno));
    if (!S_ISREG(st.st_mode))
        return cox_fail(err, COX_DENIED, "%s, fd %d, is no memory", what, fd);
    if (st.st_size < 0 || offset > (uint64_t)st.st_size || (uint64_t)st.st_size - offset < size)
        return cox_fail(err, COX_INVALID,
                        "%s has %jd bytes, %" PRIu32 " ranks with values of %" PRIu32
                        " need %" PRIu64 " from %" PRIu64 " on",
                        what, (intmax_t)st.st_size, base->rank_count, base->value_size, size,
                        offset);
    /* Its creator should have reserved it; for a part of an object that cannot be checked. */
    int r = cox_region_reserve_part(fd, offset, size, what, err);
    if (r == 0)
        r = cox_region_map_part(&base->region, fd, offset, size, COX_REGION_WRITE, what, err);
    if (r)
        return r;
    memory_place(base);
    r = identity_claim(base, err);
    if (r)
        memory_drop(base);
    return r;
}

/* Maps a file that has the name already. */
static int memory_map(struct cox_group_base *base, const struct cox_group_name *name,
                      struct cox_error *err)
{
    struct stat st;
    if (fstat(name->fd, &st) < 0)
        return cox_fail(err, -errno, "%s: %s", name->path, cox_status_text(-errno));
    if (st.st_size <= 0)
        return cox_fail(err, COX_CORRUPT, "%s is empty", name->path);
    return cox_region_map(&base->region, name->fd, (uint64_t)st.st_size, COX_REGION_WRITE,
                          name->path, err);
}

/* Copies the parameters of the file. Returns 0, COX_INVALID, COX_DENIED or COX_CORRUPT. */
static int memory_read_made(const struct cox_group_base *base, const struct cox_group_name *name,
                            struct cox_group_layout_made *ret_made, struct cox_error *err)
{
    uint64_t present = base->region.size,
             size = cox_group_memory_size(base->rank_count, base->value_size);
    if (present < sizeof(struct cox_group_layout) + sizeof(struct cox_group_layout_rank))
        return cox_fail(err, COX_CORRUPT, "%s has %" PRIu64 " bytes, expected %" PRIu64, name->path,
                        present, size);
    const struct cox_group_layout_made made = base->layout->wakeup.made;
    if (made.magic != COX_GROUP_MAGIC)
        return present == size
                   ? cox_fail(err, COX_DENIED, "%s is in the way: a file that is none of ours",
                              name->path)
                   : cox_fail(err, COX_INVALID,
                              "%s has %" PRIu64 " bytes, this rank's group needs %" PRIu64,
                              name->path, present, size);
    if (made.rank_count < 1 || made.rank_count > COX_RANK_COUNT_MAX ||
        made.rank >= made.rank_count || made.value_size < COX_GROUP_VALUE_SIZE_MIN ||
        made.value_size > COX_GROUP_VALUE_SIZE_MAX ||
        cox_group_memory_size(made.rank_count, made.value_size) != present)
        return cox_fail(err, COX_CORRUPT,
                        "%s has %" PRIu64 " bytes for %" PRIu32 " ranks with values of %" PRIu32,
                        name->path, present, made.rank_count, made.value_size);
    *ret_made = made;
    return 0;
}

/* Returns COX_BUSY if the name will be free, or another file's, soon. */
static int memory_enter(struct cox_group_base *base, const struct cox_group_name *name,
                        struct cox_error *err)
{
    struct cox_group_layout_made made = {.magic = 0};
    memory_place(base);
    int r = memory_read_made(base, name, &made, err);
    if (r)
        return r;
    if (made.incarnation != base->incarnation || group_is_over(base, &made))
        return cox_fail(err, COX_BUSY,
                        "another group, or another incarnation of it, is not gone yet");
    if (made.rank_count != base->rank_count || made.value_size != base->value_size)
        return parameters_differ(base, &made, err);
    r = identity_claim(base, err);
    return r == COX_PEER_DEAD ? COX_BUSY : r;
}

static int memory_try(struct cox_group_base *base, struct cox_group_name *name,
                      struct cox_error *err)
{
    int r = name_open(name, err);
    if (r == 0)
        r = memory_map(base, name, err);
    else if (r == COX_NOT_FOUND)
        r = name_make(base, name, err);
    if (r == 0)
        r = memory_enter(base, name, err);
    if (r) {
        memory_drop(base);
        cox_group_name_end(name, true, 0);
    }
    return r;
}

static int memory_of_name(struct cox_group_base *base, const struct cox_group_options *options,
                          struct cox_group_name *name, struct cox_error *err)
{
    snprintf(name->path, sizeof name->path, SHM_FOLDER "/%s_group", options->name);
    for (uint64_t look_ns = cox_now_ns() + COX_GROUP_SLICE_NS;;) {
        struct cox_error why = {0};
        int r = memory_try(base, name, &why);
        if (r != COX_BUSY)
            return r ? cox_fail(err, r, "%s", why.text) : 0;
        uint64_t now = cox_now_ns();
        if (now >= options->deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "%s is in the way%s%s", name->path,
                            why.text[0] ? ": " : "", why.text);
        if (now >= look_ns) {
            look_ns = now + COX_GROUP_SLICE_NS;
            if (options->cancelled && options->cancelled(options->context))
                return cox_fail(err, COX_ABORTED, "given up by the caller");
        }
        nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
}

int cox_group_take_memory(struct cox_group_base *base, const struct cox_group_options *options,
                          struct cox_group_name *name, struct cox_error *err)
{
    if (options->sealed)
        return cox_group_memory_take(options->sealed, base, err);
    return options->name ? memory_of_name(base, options, name, err)
                         : memory_of_fd(base, options->fd, options->fd_offset, err);
}

/* ---- all of them ---- */

struct meeting {
    struct cox_rank_set missing;
    bool any_missing;
    /* 1 + a rank that has failed, preferably one that names the cause; 0: none */
    uint32_t failed;
};

static int joining_died(struct cox_group_base *base, uint32_t rank, uint64_t holder,
                        struct cox_error *err)
{
    const pid_t pid = holder ? cox_group_holder_pid(holder) : base->known_pids[rank];
    /* relaxed: no other thread has this group yet. */
    atomic_store_explicit(&base->dead, rank + 1, memory_order_relaxed);
    return cox_fail(err, COX_PEER_DEAD, "rank %" PRIu32 " (pid %jd) died before all had joined",
                    rank, (intmax_t)pid);
}

/* A rank has failed and no death is visible: because of another rank, if it names one. */
static int joining_failed(struct cox_group_base *base, uint32_t rank, struct cox_error *err)
{
    int32_t cause = cox_group_cause(base, rank);
    if (cause >= 0)
        rank = (uint32_t)cause;
    uint64_t holder = cox_group_holder_of(base, rank);
    if (cause >= 0 && cox_group_holder_state(holder) != COX_GROUP_FAILED)
        return joining_died(base, rank, holder, err);
    /* relaxed: see joining_died. */
    atomic_store_explicit(&base->dead, rank + 1, memory_order_relaxed);
    int32_t said = cause >= 0 ? -1 : cox_group_said_cause(base, rank);
    char text[64] = "";
    /* One of the two is at fault, and no other rank can tell which. */
    if (base->memory && said >= 0)
        snprintf(text, sizeof text, "; it says because of rank %" PRId32, said);
    return cox_fail(err, COX_PEER_DEAD, "rank %" PRIu32 " has given up%s", rank, text);
}

/* Stores, with FAILED, the rank whose words or absence ended this join. */
static void joining_blame(struct cox_group_base *base, uint32_t rank)
{
    uint32_t none = 0;
    /* relaxed: see joining_died. */
    if (base->memory)
        atomic_compare_exchange_strong_explicit(&base->dead, &none, rank + 1, memory_order_relaxed,
                                                memory_order_relaxed);
}

/* Returns true if some rank has seen all ranks JOINED. */
static bool group_is_whole(const struct cox_group_base *base)
{
    for (uint32_t rank = 0; rank < base->rank_count; rank++) {
        enum cox_group_state state = cox_group_holder_state(cox_group_holder_of(base, rank));
        if (state == COX_GROUP_WHOLE || state == COX_GROUP_LEFT)
            return true;
    }
    return false;
}

static int rank_failed(const struct cox_group_base *base, uint32_t rank, struct meeting *meeting,
                       struct cox_error *err)
{
    if (!meeting->failed || cox_group_cause(base, meeting->failed - 1) < 0)
        meeting->failed = rank + 1;
    return identity_verify(base, rank, err);
}

/* Returns 0; COX_PEER_DEAD; -errno. A rank that dies in a complete group is found dead by the
 * operations. */
static int peer_meet(struct cox_group_base *base, uint32_t rank, uint64_t holder,
                     struct meeting *meeting, struct cox_error *err)
{
    if (cox_group_peer_known(base, rank))
        return 0;
    /* The pids are known, and valid in this pid namespace, as this process's own shows. */
    if (base->known_pids[base->rank] == base->pid && base->known_pids[rank] &&
        base->known_pids[rank] != cox_group_holder_pid(holder))
        return cox_fail(err, COX_CORRUPT,
                        "rank %" PRIu32 " is process %jd, in its memory it says process %jd", rank,
                        (intmax_t)base->known_pids[rank], (intmax_t)cox_group_holder_pid(holder));
    int r = cox_group_peer_meet(base, rank, holder);
    /* Checked after the death: it may have been the last to join, and the first to have seen all.
     */
    if (r == 0 || (r == COX_PEER_DEAD && group_is_whole(base)))
        return 0;
    /* Checked after the death as well: it may have failed, and ended, since its word was read. */
    if (r == COX_PEER_DEAD &&
        cox_group_holder_state(cox_group_holder_of(base, rank)) == COX_GROUP_FAILED)
        return rank_failed(base, rank, meeting, err);
    if (r == COX_PEER_DEAD)
        return joining_died(base, rank, holder, err);
    return cox_fail(err, r, "rank %" PRIu32 " (pid %jd): %s", rank,
                    (intmax_t)cox_group_holder_pid(holder), cox_status_text(r));
}

/* The dead ranks, except those that failed before, which may have failed because of a death, and
 * those that have seen all ranks: their death is not about joining. */
static int meeting_deaths(struct cox_group_base *base, struct cox_error *err)
{
    for (uint32_t rank = 0; rank < base->rank_count; rank++) {
        if (!cox_group_peer_known(base, rank) || cox_group_peer_alive(base, rank))
            continue;
        uint64_t holder = cox_group_holder_of(base, rank);
        enum cox_group_state state = cox_group_holder_state(holder);
        if (state != COX_GROUP_FAILED && state != COX_GROUP_WHOLE && state != COX_GROUP_LEFT)
            return joining_died(base, rank, holder, err);
    }
    return 0;
}

/* A process that dies in a sealed group before it enters this incarnation has left no identity. */
static int missing_deaths(struct cox_group_base *base, const struct meeting *meeting,
                          struct cox_error *err)
{
    for (uint32_t rank = 0; rank < base->rank_count; rank++)
        /* Checked after the death: if it has joined since, its own words tell. */
        if (cox_rank_set_has(&meeting->missing, rank) && !cox_group_peer_known(base, rank) &&
            cox_group_known_pid_is_dead(base, rank) && !cox_group_holder_of(base, rank))
            return joining_died(base, rank, 0, err);
    return 0;
}

/* Checks one other rank. */
static int rank_look(struct cox_group_base *base, uint32_t rank, struct meeting *meeting,
                     struct cox_error *err)
{
    uint64_t holder = cox_group_holder_of(base, rank);
    int r = 0;
    switch (cox_group_holder_state(holder)) {
    case COX_GROUP_JOINED:
    case COX_GROUP_WHOLE:
    case COX_GROUP_LEFT:
        r = identity_verify(base, rank, err);
        break;
    case COX_GROUP_FAILED:
        return rank_failed(base, rank, meeting, err);
    case COX_GROUP_CLAIMED:
        cox_rank_set_add(&meeting->missing, rank);
        meeting->any_missing = true;
        break;
    case COX_GROUP_EMPTY:
    default:
        cox_rank_set_add(&meeting->missing, rank);
        meeting->any_missing = true;
        return 0;
    }
    return r ? r : peer_meet(base, rank, holder, meeting, err);
}

static int meeting_look(struct cox_group_base *base, struct meeting *meeting, struct cox_error *err)
{
    memset(meeting, 0, sizeof *meeting);
    int r = 0;
    for (uint32_t rank = 0; r == 0 && rank < base->rank_count; rank++)
        if (rank != base->rank && (r = rank_look(base, rank, meeting, err)) > 0)
            joining_blame(base, rank);
    if (r || !meeting->failed)
        return r;
    r = meeting_deaths(base, err);
    return r ? r : joining_failed(base, meeting->failed - 1, err);
}

/* Every 50 ms. */
static int meeting_due(struct cox_group_base *base, const struct cox_group_options *options,
                       const struct meeting *meeting, struct cox_error *err)
{
    int r = meeting_deaths(base, err);
    if (r == 0)
        r = missing_deaths(base, meeting, err);
    if (r)
        return r;
    if (options->cancelled && options->cancelled(options->context))
        return cox_fail(err, COX_ABORTED, "given up by the caller");
    /* Unless it was overwritten it is stored already. */
    identity_say(base, COX_GROUP_JOINED);
    return 0;
}

int cox_group_meet(struct cox_group_base *base, const struct cox_group_options *options,
                   struct cox_error *err)
{
    cox_group_say(base, COX_GROUP_JOINED);
    for (uint64_t look_ns = cox_now_ns() + COX_GROUP_SLICE_NS;;) {
        struct meeting meeting;
        uint32_t seen = cox_group_listen(base->wakeup);
        int r = meeting_look(base, &meeting, err);
        if (r || !meeting.any_missing)
            return r;
        uint64_t now = cox_now_ns();
        bool late = now >= options->deadline_ns;
        if (late || now >= look_ns) {
            r = meeting_due(base, options, &meeting, err);
            if (r)
                return r;
            look_ns = now + COX_GROUP_SLICE_NS;
        }
        if (late) {
            char list[256];
            for (uint32_t rank = 0; rank < base->rank_count; rank++)
                if (cox_rank_set_has(&meeting.missing, rank))
                    joining_blame(base, rank);
            return cox_fail(err, COX_TIMEOUT, "%s did not join",
                            cox_group_list(&meeting.missing, list, sizeof list));
        }
        r = cox_group_sleep(base->wakeup, seen, cox_deadline_min(look_ns, options->deadline_ns));
        if (r)
            return cox_fail(err, r, "waiting for the others: %s", cox_status_text(r));
    }
}
