/*
 * Whether the processes of the ranks live. Their pidfds say so; where pidfd_open is missing (Linux before 5.3,
 * valgrind) or denied, /proc does: a pid with another start time is another process. That is looked up as
 * often, so that a death is seen as soon, but costs a few files for each rank that is missing.
 */
#include "group_private.h"

#include <poll.h>
#include <unistd.h>

#include "../channel/handle_internal.h"

bool cox_group_has_left(const struct cox_group_base *base, uint32_t rank)
{
    /* acquire: partner is cox_group_say; what it did before it left is done. */
    uint64_t holder =
        atomic_load_explicit(&base->layout->ranks[rank].identity.holder, memory_order_acquire);
    return cox_group_holder_state(holder) == COX_GROUP_LEFT ||
           cox_group_holder_state(holder) == COX_GROUP_FAILED;
}

/* As /proc tells. Returns 0: it lives; COX_PEER_DEAD; -errno. */
static int process_look(pid_t pid, uint32_t start, uint64_t *ret_start)
{
    uint64_t thread_count;
    int r = cox_peer_start_time(pid, ret_start);
    if (r == 0 && (uint32_t)*ret_start != start)
        return COX_PEER_DEAD;
    if (r || !cox_peer_exiting(pid))
        return r;
    /* The first thread has ended; that does not end the others. */
    r = cox_peer_thread_count(pid, &thread_count);
    return r == 0 && thread_count <= 1 ? COX_PEER_DEAD : r;
}

int cox_group_process_meet(uint64_t holder, struct cox_peer *ret_peer)
{
    pid_t pid = cox_group_holder_pid(holder);
    uint32_t start = (uint32_t)holder;
    struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, 0, &peer);
    if (cox_handle_way_closed(r)) {
        peer.pid = pid;
        r = process_look(pid, start, &peer.start);
    } else if (r == -EINVAL ||
               r == -ENOENT) { /* no process but a thread of one: the pid was reused */
        r = COX_PEER_DEAD;
    } else if (r == 0 && (uint32_t)peer.start != start) {
        cox_peer_close(&peer);
        r = COX_PEER_DEAD;
    }
    if (r == 0)
        *ret_peer = peer;
    return r;
}

int cox_group_peer_meet(struct cox_group_base *base, uint32_t rank, uint64_t holder)
{
    struct cox_peer *peer = &base->peers[rank];
    int r = cox_group_process_meet(holder, peer);
    peer->pid = cox_group_holder_pid(holder);
    if (r == 0 && peer->pidfd < 0)
        cox_rank_set_add(&base->by_start, rank);
    return r;
}

bool cox_group_peer_known(const struct cox_group_base *base, uint32_t rank)
{
    return base->peers[rank].pidfd >= 0 || cox_rank_set_has(&base->by_start, rank);
}

bool cox_group_peer_alive(const struct cox_group_base *base, uint32_t rank)
{
    const struct cox_peer *peer = &base->peers[rank];
    uint64_t start;
    if (cox_rank_set_has(&base->by_start, rank))
        return process_look(peer->pid, (uint32_t)peer->start, &start) != COX_PEER_DEAD;
    return cox_peer_alive(peer);
}

int32_t cox_group_cause(const struct cox_group_base *base, uint32_t rank)
{
    /* relaxed: stored before what made this rank ask, which was seen by acquire; or by a dead process.
     * Partners are cox_group_say and cox_group_give_up. */
    uint32_t said =
        atomic_load_explicit(&base->layout->ranks[rank].identity.said_dead, memory_order_relaxed);
    uint32_t cause = (said & 0xffff) - 1;
    /* Who is said dead by another and asks lives, and nobody dies of itself. */
    if (cause >= base->rank_count || said != cox_group_said_dead(cause) || cause == rank ||
        cause == base->rank)
        return -1;
    return (int32_t)cause;
}

int32_t cox_group_dead_among(const struct cox_group_base *base, const struct cox_rank_set *set)
{
    struct pollfd fds[COX_RANK_COUNT_MAX];
    uint32_t ranks[COX_RANK_COUNT_MAX];
    nfds_t count = 0;
    for (uint32_t rank = 0; rank < base->rank_count; rank++) {
        if (!cox_rank_set_has(set, rank) || cox_group_has_left(base, rank))
            continue;
        if (base->peers[rank].pidfd < 0) {
            if (!cox_group_peer_alive(base, rank))
                return (int32_t)rank;
            continue;
        }
        fds[count] = (struct pollfd){.fd = base->peers[rank].pidfd, .events = POLLIN};
        ranks[count++] = rank;
    }
    int r;
    do
        r = poll(fds, count, 0);
    while (r < 0 && errno == EINTR);
    for (nfds_t i = 0; r > 0 && i < count; i++)
        if (fds[i].revents & POLLIN)
            return (int32_t)ranks[i];
    return -1;
}
