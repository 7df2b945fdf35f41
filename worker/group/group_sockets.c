/*
 * fds by sockets, where pidfd_getfd is denied or missing. During one exchange every rank listens at
 * an abstract address that the kernel chose, and publishes the address in a round. It connects to
 * each member that must get its fd, sends a tag with the fd, and closes. Any process may connect to
 * an abstract address: the receiver checks the sender's pid and user, which the kernel reports, the
 * tag, and the object.
 *
 * A rank sends to the k-th member after itself only when it has received k - 1 fds. So at most one
 * fd per rank is in flight without a received one to match it, 128 in all, far below the kernel's
 * limit per user. This cannot deadlock: while all ranks wait for their next fd, as many fds are in
 * flight as ranks wait, and each is at the socket of a rank that still waits, since no rank is sent
 * more than it waits for.
 *
 * A rank that cannot send its fd, because it cannot open a socket, enters the last round and
 * publishes the reason there. A rank in the last round sends nothing more, and what it sent is
 * queued by then. So a rank that then finds its own queue empty stops waiting, and fails for the
 * same reason, in step with the others.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/handle/handle_internal.h"
#include "channel/socket/socket.h"
#include "group_private.h"

#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* How long to wait when the peer's queue, or the kernel's count of fds, is full. */
#define RETRY_NS COX_NSEC_PER_MSEC
/* No errno of the kernel is that large. */
#define ERRNO_LIMIT 4096

/* As it is gathered; size 0: this rank could not listen. */
struct address {
    uint32_t size;
    char bytes[28];
};

struct tag {
    /* {epoch, index} of the addresses */
    uint64_t round;
    uint32_t rank;
    uint32_t reserved;
};

struct post {
    struct cox_group_exchange *exchange;
    int listen_fd;
    uint64_t round;
    uint64_t look_ns;
    /* ranks whose fd has not arrived */
    struct cox_rank_set owed;
    uint32_t owed_count;
    /* those of them that have continued without sending it */
    struct cox_rank_set lost;
    /* what went wrong on this rank alone */
    int how;
    /* -errno: why it could not send its own; 0 */
    int unsent;
    struct cox_error *how_err;
    struct address addresses[COX_RANK_COUNT_MAX];
};

static int post_listen(struct post *post, struct address *ret_address)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t size = sizeof address;
    _cox_cleanup_(cox_close_fd) int fd =
        socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int r = cox_fd_raise(&fd);
    if (r)
        return r;
    /* Without a name: the kernel chooses one. */
    if (bind(fd, (const struct sockaddr *)&address, sizeof address.sun_family) < 0 ||
        listen(fd, COX_RANK_COUNT_MAX) < 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) < 0)
        return -errno;
    cox_fault_point(COX_FAULT_GROUP_BOUND);
    size -= (socklen_t)offsetof(struct sockaddr_un, sun_path);
    if (size > sizeof ret_address->bytes)
        return -ENAMETOOLONG;
    ret_address->size = size;
    memcpy(ret_address->bytes, address.sun_path, size);
    post->listen_fd = cox_steal_fd(&fd);
    return 0;
}

static void post_fail(struct post *post, int r)
{
    if (post->how == 0)
        post->how = cox_fail(post->how_err, r, "fds by sockets: %s", cox_status_text(r));
}

/* Once per slice, and when there was no progress: checks for a reason. */
static int post_trouble(struct post *post, const struct cox_rank_set *missing,
                        struct cox_error *err)
{
    struct cox_group *group = post->exchange->group;
    uint64_t now = cox_now_ns();
    bool late = now >= post->exchange->deadline_ns, due = late || now >= post->look_ns;
    int r = cox_group_trouble(group, missing, due, err);
    if (r || !due)
        return r;
    post->look_ns = now + COX_GROUP_SLICE_NS;
    cox_group_say_again(group);
    char list[256];
    return late ? cox_fail(err, COX_TIMEOUT, "%s did not go on with fds",
                           cox_group_list(missing, list, sizeof list))
                : 0;
}

/* ---- receiving ---- */

/* The place that this tag is from; -1: none. */
static int32_t tag_place(const struct post *post, const struct tag *tag, pid_t pid)
{
    const struct cox_group *group = post->exchange->group;
    if (tag->round != post->round || tag->rank >= COX_RANK_COUNT_MAX ||
        !cox_rank_set_has(&post->owed, tag->rank) || group->base->peers[tag->rank].pid != pid)
        return -1;
    for (uint32_t place = 0; place < group->count; place++)
        if (group->ranks[place] == tag->rank)
            return (int32_t)place;
    return -1;
}

static bool is_owing(const struct post *post, const struct cox_socket_peer *from)
{
    const struct cox_group_base *base = post->exchange->group->base;
    for (uint32_t rank = 0; from->uid == geteuid() && rank < base->rank_count; rank++)
        if (cox_rank_set_has(&post->owed, rank) && base->peers[rank].pid == from->pid)
            return true;
    return false;
}

/* Waits until a member that has connected sends, which it does at once. */
static int post_hear(struct post *post, int fd, struct cox_error *err)
{
    for (;;) {
        int r = cox_socket_wait(fd, POLLIN,
                                cox_deadline_min(post->look_ns, post->exchange->deadline_ns));
        if (r < 0)
            return cox_fail(err, r, "waiting for an fd: %s", cox_status_text(r));
        if (r == 0)
            return 0;
        r = post_trouble(post, &post->owed, err);
        if (r)
            return r;
    }
}

/* Serves one connection. Strangers are dropped without a reply, and so is a member that died before
 * it sent anything. */
static int post_receive(struct post *post, int fd, struct cox_error *err)
{
    struct cox_group_exchange *exchange = post->exchange;
    struct cox_socket_peer from;
    struct tag tag;
    uint32_t count = 0;
    int got = -1;
    if (cox_socket_read_peer(fd, &from) || !is_owing(post, &from))
        return 0;
    int r = post_hear(post, fd, err);
    if (r)
        return r;
    r = cox_socket_receive(fd, &tag, sizeof tag, &got, 1, &count, exchange->deadline_ns);
    _cox_cleanup_(cox_close_fd) int owned = r == 0 && count == 1 ? got : -1;
    if (r < 0) /* the fd is lost: this rank cannot succeed any more, but the others can */
        post_fail(post, r);
    int32_t place = r || count != 1 ? -1 : tag_place(post, &tag, from.pid);
    if (place < 0)
        return 0;
    post->owed.words[tag.rank / 64] &= ~(UINT64_C(1) << tag.rank % 64);
    post->owed_count--;
    cox_fault_point(COX_FAULT_GROUP_ACCEPTED);
    struct cox_error why = {0};
    r = cox_group_fd_verify(exchange, (uint32_t)place, owned, &why);
    if (r == 0)
        exchange->fds[place] = cox_steal_fd(&owned);
    else if (post->how == 0)
        post->how = cox_fail(post->how_err, r, "%s", why.text);
    return 0;
}

/* Returns 0, with *ret_fd -1 if no connection is pending; -errno. */
static int post_accept(struct post *post, int *ret_fd)
{
    do
        *ret_fd = accept4(post->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (*ret_fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (*ret_fd < 0)
        return errno == EAGAIN ? 0 : -errno;
    int r = cox_fd_raise(ret_fd);
    if (r)
        cox_close_fd(ret_fd);
    return r;
}

/* Receives what has arrived. A member that is sent to may wait for a place in this rank's queue,
 * which strangers may have filled: a rank that only sends could wait for ever. */
static int post_clear(struct post *post, struct cox_error *err)
{
    for (int i = 0; i <= COX_RANK_COUNT_MAX && post->listen_fd >= 0; i++) {
        _cox_cleanup_(cox_close_fd) int fd = -1;
        int r = post_accept(post, &fd);
        if (r)
            post_fail(post, r);
        if (r || fd < 0)
            return 0;
        r = post_receive(post, fd, err);
        if (r)
            return r;
    }
    return 0;
}

/* Finds pending ranks that have continued. Returns whether there are any. */
static bool post_gone_on(const struct post *post, struct cox_rank_set *ret_ranks)
{
    struct cox_group *group = post->exchange->group;
    bool any = false;
    memset(ret_ranks, 0, sizeof *ret_ranks);
    for (uint32_t place = 0; place < group->count; place++) {
        if (!cox_rank_set_has(&post->owed, group->ranks[place]) || !cox_group_went_on(group, place))
            continue;
        cox_rank_set_add(ret_ranks, group->ranks[place]);
        any = true;
    }
    return any;
}

/* Waits until at most `left` ranks are pending, or this rank cannot succeed. */
static int post_await(struct post *post, uint32_t left, struct cox_error *err)
{
    bool is_lost = false;
    while (post->owed_count > left && post->how == 0 && !is_lost) {
        _cox_cleanup_(cox_close_fd) int fd = -1;
        struct cox_rank_set gone_on;
        /* Before the queue is checked: what they sent is in it. */
        bool any = post_gone_on(post, &gone_on);
        int r = post_accept(post, &fd);
        if (r) {
            post_fail(post, r);
            break;
        }
        if (fd >= 0) {
            r = post_receive(post, fd, err);
            if (r)
                return r;
            continue;
        }
        if (any) {
            post->lost = gone_on;
            is_lost = true;
            continue;
        }
        r = post_trouble(post, &post->owed, err);
        if (r)
            return r;
        r = cox_socket_wait(post->listen_fd, POLLIN,
                            cox_deadline_min(post->look_ns, post->exchange->deadline_ns));
        if (r < 0)
            return cox_fail(err, r, "waiting for fds: %s", cox_status_text(r));
    }
    return 0;
}

/* ---- sending ---- */

/* Tries once. Returns 0; COX_BUSY: try again soon; -errno: this rank failed. */
static int post_try(struct post *post, uint32_t place)
{
    const struct cox_group_base *base = post->exchange->group->base;
    const struct address *to = &post->addresses[place];
    const struct tag tag = {.round = post->round, .rank = base->rank};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, to->bytes, to->size);
    _cox_cleanup_(cox_close_fd) int fd =
        socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (const struct sockaddr *)&address,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + to->size)) < 0)
        return errno == EAGAIN || errno == ECONNREFUSED || errno == EINTR ? COX_BUSY : -errno;
    int r = cox_socket_send(fd, &tag, sizeof tag, &post->exchange->fd, 1, 0);
    cox_fault_point(COX_FAULT_GROUP_OFFERED);
    return r > 0 ? COX_BUSY : r;
}

static int post_send(struct post *post, uint32_t place, struct cox_error *err)
{
    struct cox_group *group = post->exchange->group;
    struct cox_rank_set receiver = {{0}};
    cox_rank_set_add(&receiver, group->ranks[place]);
    for (;;) {
        struct address *to = &post->addresses[place];
        if (to->size == 0 || to->size > sizeof to->bytes)
            return 0;
        int r = post_try(post, place);
        if (r == 0)
            return 0;
        if (r < 0) {
            post_fail(post, r);
            if (post->unsent == 0)
                post->unsent = r;
            return 0;
        }
        if (cox_group_went_on(group, place)) /* it cannot succeed, and receives nothing more */
            return 0;
        r = post_clear(post, err);
        if (r == 0)
            r = post_trouble(post, &receiver, err);
        if (r)
            return r;
        nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
}

static int post_run(struct post *post, struct cox_error *err)
{
    struct cox_group_exchange *exchange = post->exchange;
    struct cox_group *group = exchange->group;
    bool gives = cox_group_gives(exchange, group->self);
    int r = 0;
    for (uint32_t step = 1; gives && r == 0 && step < group->count; step++) {
        uint32_t left = post->owed_count > 0 ? group->count - 1 - step : 0;
        r = post_send(post, (group->self + step) % group->count, err);
        if (r == 0 && exchange->source == COX_GROUP_ALL)
            r = post_await(post, left, err);
    }
    return r ? r : post_await(post, 0, err);
}

/* All have reported why they could not send theirs. */
static void post_explain(struct post *post, const int32_t *unsent)
{
    const struct cox_group *group = post->exchange->group;
    for (uint32_t place = 0; place < group->count && post->how == 0; place++) {
        if (!cox_rank_set_has(&post->lost, group->ranks[place]))
            continue;
        int r = unsent[place] < 0 && unsent[place] > -ERRNO_LIMIT ? unsent[place] : COX_CORRUPT;
        post->how = cox_fail(post->how_err, r, "rank %d has not given its fd: %s",
                             group->ranks[place], cox_status_text(r));
    }
}

int cox_group_exchange_sockets(struct cox_group_exchange *exchange, int *ret_how,
                               struct cox_error *how_err, struct cox_error *err)
{
    struct cox_group *group = exchange->group;
    struct post post = {.exchange = exchange, .listen_fd = -1, .how = *ret_how, .how_err = how_err};
    struct address own = {0};
    int r = post_listen(&post, &own);
    if (r)
        post_fail(&post, r);
    for (uint32_t place = 0; place < group->count; place++) {
        if (place == group->self || !cox_group_gives(exchange, place))
            continue;
        cox_rank_set_add(&post.owed, group->ranks[place]);
        post.owed_count++;
    }
    r = cox_group_stage(exchange, COX_GROUP_STAGE_ADDRESSES, &own, sizeof own, post.addresses, err);
    if (r == 0) {
        post.round = cox_group_arrived(cox_group_present(group->base), group->index);
        post.look_ns = cox_now_ns() + COX_GROUP_SLICE_NS;
        r = post_run(&post, err);
        if (r)
            cox_group_give_up(group, r == COX_PEER_DEAD);
    }
    if (r == 0) { /* no member leaves before all have received theirs */
        const int32_t own_unsent = post.unsent;
        int32_t unsent[COX_RANK_COUNT_MAX];
        r = cox_group_stage(exchange, COX_GROUP_STAGE_RECEIVED, &own_unsent, sizeof own_unsent,
                            unsent, err);
        if (r == 0)
            post_explain(&post, unsent);
    }
    cox_close_fd(&post.listen_fd);
    *ret_how = post.how;
    return r;
}
