/*
 * fds go by value: each rank gathers a handle of its fd, and copies the others' fds out of their
 * processes with pidfd_getfd, through pidfds that it holds since the join. A second round, in which
 * every rank publishes its result, ends the exchange: no rank closes a consumed fd before it. If
 * any rank was not allowed to copy an fd, all ranks repeat the exchange by sockets
 * (group_sockets.c); each exchange finds this out anew. An error of one rank alone (its fd table is
 * full) is returned there after the last round, so that it stays in step with the others, whose
 * exchange succeeded.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "group_private.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The result that a rank reports. */
enum how {
    HOW_DONE = 0x3c,
    HOW_BY_SOCKET = 0x55, /* it may not take fds by handles */
    HOW_FAILED = 0xa3,    /* on this rank alone */
};

int cox_group_stage(struct cox_group_exchange *exchange, enum cox_group_stage stage,
                    const void *value, uint32_t size, void *values, struct cox_error *err)
{
    return cox_group_round_values(exchange->group, exchange->operation,
                                  (uint32_t)stage << 16 | exchange->source, value, size, values,
                                  size, exchange->deadline_ns, err);
}

static void fds_close(int *fds)
{
    for (uint32_t place = 0; place < COX_RANK_COUNT_MAX; place++)
        cox_close_fd(&fds[place]);
}

/* ---- one fd ---- */

/* Returns 0; COX_INVALID: fd is not open; -errno: no fd can be offered here. */
static int fd_offer(const struct cox_group_exchange *exchange, struct cox_handle *ret_handle,
                    struct cox_error *err)
{
    struct cox_group_base *base = exchange->group->base;
    struct stat st;
    if (exchange->fd < 0 || fstat(exchange->fd, &st) < 0)
        return cox_fail(err, COX_INVALID, "fd %d is none", exchange->fd);
    if (base->no_system)
        return cox_fail(err, base->no_system, "/proc does not tell what a handle of an fd says: %s",
                        cox_status_text(base->no_system));
    /* An empty file cannot be mapped. */
    bool memory = cox_handle_kind_of(&st) == COX_HANDLE_MEMORY && st.st_size > 0;
    const struct cox_handle_info info = {
        .kind = memory ? COX_HANDLE_MEMORY : COX_HANDLE_OTHER,
        .pid = (uint32_t)base->pid,
        .start = base->start,
        .system = base->system,
        .fd = (uint32_t)exchange->fd,
        .dev = cox_handle_device_of(&st),
        .ino = st.st_ino,
        .size = memory ? (uint64_t)st.st_size : 0,
    };
    cox_handle_format(&info, ret_handle);
    return 0;
}

int cox_group_fd_verify(const struct cox_group_exchange *exchange, uint32_t place, int fd,
                        struct cox_error *err)
{
    const struct cox_handle_info *offer = &exchange->offers[place];
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "fstat: %s", cox_status_text(-errno));
    if (cox_handle_device_of(&st) == offer->dev && st.st_ino == offer->ino)
        return 0;
    return cox_fail(err, COX_CORRUPT,
                    "rank %d gave another object than it said (inode %ju, not %" PRIu64 ")",
                    exchange->group->ranks[place], (uintmax_t)st.st_ino, offer->ino);
}

/* Returns 0; an -errno for which cox_handle_way_closed is true, without a text; or what is wrong
 * with this fd. */
static int fd_take(struct cox_group_exchange *exchange, uint32_t place, struct cox_error *err)
{
    const struct cox_handle_info *offer = &exchange->offers[place];
    uint32_t rank = exchange->group->ranks[place];
    const struct cox_group_base *base = exchange->group->base;
    const struct cox_peer *peer = &base->peers[rank];
    if (cox_rank_set_has(&base->by_start, rank))
        return -ENOSYS;
    _cox_cleanup_(cox_close_fd) int fd =
        (int)syscall(SYS_pidfd_getfd, peer->pidfd, (int)offer->fd, 0);
    if (fd < 0) {
        int e = errno;
        if (cox_handle_way_closed(-e))
            return -e;
        /* Linux before 6.9 returns EBADF for a process that is about to be dead. */
        if (e == ESRCH ||
            (e == EBADF && (!cox_group_peer_alive(base, rank) || cox_peer_exiting(peer->pid)))) {
            exchange->dead = rank + 1;
            return cox_fail(err, COX_PEER_DEAD, "rank %" PRIu32 " (pid %jd) is dead", rank,
                            (intmax_t)peer->pid);
        }
        return cox_fail(err, e == EBADF ? COX_CORRUPT : -e, "the fd of rank %" PRIu32 ": %s", rank,
                        cox_status_text(-e));
    }
    int r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "the fd of rank %" PRIu32 ": %s", rank, cox_status_text(r));
    r = cox_group_fd_verify(exchange, place, fd, err);
    if (r == 0)
        exchange->fds[place] = cox_steal_fd(&fd);
    return r;
}

/* ---- all of them ---- */

/* The handles are input from other processes: each must name the rank that sent it. */
static int offers_read(struct cox_group_exchange *exchange, const struct cox_handle *handles,
                       struct cox_error *err)
{
    struct cox_group *group = exchange->group;
    for (uint32_t place = 0; place < group->count; place++) {
        struct cox_handle_info *offer = &exchange->offers[place];
        if (place == group->self || !cox_group_gives(exchange, place))
            continue;
        struct cox_error why = {0};
        int r = cox_handle_parse(&handles[place], offer, &why);
        if (r)
            return cox_fail(err, COX_CORRUPT, "rank %d gave no handle of an fd: %s",
                            group->ranks[place], why.text);
        const struct cox_peer *peer = &group->base->peers[group->ranks[place]];
        if ((pid_t)offer->pid != peer->pid || (uint32_t)offer->start != (uint32_t)peer->start)
            return cox_fail(err, COX_CORRUPT,
                            "rank %d is process %jd, its handle is of process %" PRIu32,
                            group->ranks[place], (intmax_t)peer->pid, offer->pid);
    }
    return 0;
}

static enum how fds_take(struct cox_group_exchange *exchange, const struct cox_handle *handles,
                         int *ret_r, struct cox_error *err)
{
    struct cox_group *group = exchange->group;
    *ret_r = offers_read(exchange, handles, err);
    /* Each begins with the member after itself: the kernel locks a process while an fd is copied
     * out of it. */
    for (uint32_t step = 1; *ret_r == 0 && step < group->count; step++) {
        const uint32_t place = (group->self + step) % group->count;
        if (!cox_group_gives(exchange, place))
            continue;
        int r = fd_take(exchange, place, err);
        if (cox_handle_way_closed(r))
            return HOW_BY_SOCKET;
        *ret_r = r;
    }
    return *ret_r ? HOW_FAILED : HOW_DONE;
}

/* Returns true if a member has reported this. */
static bool any_is(const struct cox_group *group, const uint32_t *hows, enum how how)
{
    for (uint32_t place = 0; place < group->count; place++)
        if (hows[place] == (uint32_t)how)
            return true;
    return false;
}

/* All have reported, and on this rank it failed. */
static int exchange_fail(struct cox_group_exchange *exchange, int how_r, const char *text,
                         struct cox_error *err)
{
    /* Members that took that rank's fd before it died learn of the death in their next operation
     * from this rank, which may have seen it before a pidfd shows it. */
    if (how_r == COX_PEER_DEAD) {
        exchange->group->dead = exchange->dead;
        cox_group_give_up(exchange->group, true);
    }
    return cox_fail(err, how_r, "%s", text);
}

/* Fills in exchange->fds, or leaves it empty. */
static int exchange_run(struct cox_group_exchange *exchange, struct cox_error *err)
{
    struct cox_handle own = {{0}}, handles[COX_RANK_COUNT_MAX];
    uint32_t hows[COX_RANK_COUNT_MAX];
    struct cox_error how_err = {0};
    int how_r = 0, r = 0;
    if (cox_group_gives(exchange, exchange->group->self))
        r = fd_offer(exchange, &own, err);
    if (r == 0)
        r = cox_group_stage(exchange, COX_GROUP_STAGE_HANDLES, &own, sizeof own, handles, err);
    if (r)
        return r;
    uint32_t how = fds_take(exchange, handles, &how_r, &how_err);
    r = cox_group_stage(exchange, COX_GROUP_STAGE_OPENED, &how, sizeof how, hows, err);
    if (r == 0 && any_is(exchange->group, hows, HOW_BY_SOCKET)) {
        fds_close(exchange->fds);
        how_err = (struct cox_error){0};
        how_r = offers_read(exchange, handles, &how_err);
        r = cox_group_exchange_sockets(exchange, &how_r, &how_err, err);
    }
    if (r == 0 && how_r)
        r = exchange_fail(exchange, how_r, how_err.text, err);
    if (r)
        fds_close(exchange->fds);
    return r;
}

static void exchange_init(struct cox_group_exchange *exchange, struct cox_group *group,
                          enum cox_group_operation operation, uint32_t source, int fd,
                          uint64_t deadline_ns)
{
    memset(exchange, 0, sizeof *exchange);
    exchange->group = group;
    exchange->operation = operation;
    exchange->source = source;
    exchange->fd = fd;
    exchange->deadline_ns = deadline_ns;
    for (uint32_t place = 0; place < COX_RANK_COUNT_MAX; place++)
        exchange->fds[place] = -1;
}

int cox_group_gather_fds(struct cox_group *group, int fd, enum cox_group_fd mode, int *fds,
                         uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_group_exchange exchange;
    if (!fds)
        return cox_fail(err, COX_INVALID, "no place for the fds of all");
    exchange_init(&exchange, group, COX_GROUP_GATHER_FDS, COX_GROUP_ALL, fd, deadline_ns);
    int r = exchange_run(&exchange, err);
    if (r)
        return r;
    memcpy(fds, exchange.fds, group->count * sizeof *fds);
    if (mode == COX_GROUP_FD_CONSUME)
        cox_close_fd(&fd);
    return 0;
}

int cox_group_broadcast_fd(struct cox_group *group, uint32_t source, int fd, enum cox_group_fd mode,
                           int *ret_fd, uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_group_exchange exchange;
    bool gives = source == group->self;
    if (source >= group->count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": expected 0 to %" PRIu32,
                        source, group->count - 1);
    if (!gives && !ret_fd)
        return cox_fail(err, COX_INVALID, "no place for the fd of rank %" PRIu32, source);
    if (!gives && fd >= 0)
        return cox_fail(err, COX_INVALID, "rank %" PRIu32 " gives an fd, this one none", source);
    exchange_init(&exchange, group, COX_GROUP_BROADCAST_FD, source, fd, deadline_ns);
    int r = exchange_run(&exchange, err);
    if (r)
        return r;
    if (ret_fd)
        *ret_fd = gives ? -1 : exchange.fds[source];
    if (gives && mode == COX_GROUP_FD_CONSUME)
        cox_close_fd(&fd);
    return 0;
}
