/*
 * Checks whether the processes of the ranks live. Their pidfds show that. If pidfd_open is missing
 * (Linux before 5.3, valgrind) or denied, /proc does: a pid with another start time is another
 * process. /proc is read as often, so that a death is seen as soon, but costs a few files per
 * missing rank.
 */
#include "channel/base/peer.h"
#include "channel/handle/handle_internal.h"
#include "group_private.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

/* A death that one process has seen becomes visible to all within this time. */
#define DEATH_SHOWS_MS 20

uint64_t cox_group_holder_of(const struct cox_group_base *base, uint32_t rank)
{
    const struct cox_group_layout_identity *identity = &base->ranks[rank]->identity;
    /* acquire: partner is cox_group_say; what it did before is done. */
    uint64_t holder = atomic_load_explicit(&identity->holder, memory_order_acquire), again;
    if (!base->memory)
        return holder;
    /* A rank uses the same words in one incarnation after the other. It stores that in `holder`
     * before it changes the incarnation. So the two belong together if `holder` is the same before
     * and after: acquire keeps the second load behind that of the incarnation. A rank that changes
     * it all the time is in no incarnation. */
    for (int tries = 0; tries < 8; tries++, holder = again) {
        uint64_t incarnation = atomic_load_explicit(&identity->incarnation, memory_order_acquire);
        again = atomic_load_explicit(&identity->holder, memory_order_acquire);
        if (again == holder)
            return incarnation == base->incarnation ? holder : 0;
    }
    return 0;
}

bool cox_group_has_left(const struct cox_group_base *base, uint32_t rank)
{
    enum cox_group_state state = cox_group_holder_state(cox_group_holder_of(base, rank));
    if (base->memory)
        return state != COX_GROUP_JOINED && state != COX_GROUP_WHOLE;
    return state == COX_GROUP_LEFT || state == COX_GROUP_FAILED;
}

/* Checks in /proc. Returns 0: it lives; COX_PEER_DEAD; -errno. */
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
               r == -ENOENT) { /* a thread instead of a process: the pid was reused */
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

bool cox_group_known_pid_is_dead(const struct cox_group_base *base, uint32_t rank)
{
    const pid_t pid = base->known_pids[rank];
    /* Cheap, because every rank may check every other one; a rank that is gone is gone for all. The
     * coordinator's pids are valid if this process has its own pid there. */
    return pid > 0 && base->known_pids[base->rank] == base->pid && kill(pid, 0) < 0 &&
           errno == ESRCH;
}

/* Returns true if the rank has ended, by its own words, in any way. */
static bool has_ended(const struct cox_group_base *base, uint32_t rank)
{
    enum cox_group_state state = cox_group_holder_state(cox_group_holder_of(base, rank));
    bool ended = state == COX_GROUP_LEFT || state == COX_GROUP_FAILED ||
                 (state == COX_GROUP_EMPTY && cox_group_peer_known(base, rank));
    for (uint32_t slot = 0; slot < COX_GROUP_PART_COUNT && !ended; slot++)
        /* acquire: partner is part_say_gone. */
        ended =
            atomic_load_explicit(&base->ranks[rank]->parts[slot].aborted, memory_order_acquire) ==
            cox_group_aborted(COX_GROUP_EPOCH_NONE);
    return ended;
}

/* Returns true if this rank sees it dead. A rank that another one has just seen dead gets some time
 * for that to show here as well. */
static bool is_seen_dead(const struct cox_group_base *base, uint32_t rank)
{
    struct cox_peer met = COX_PEER_NONE;
    uint64_t holder = cox_group_holder_of(base, rank);
    if (cox_group_peer_known(base, rank)) {
        struct pollfd polled = {.fd = base->peers[rank].pidfd, .events = POLLIN};
        if (polled.fd >= 0)
            poll(&polled, 1, DEATH_SHOWS_MS);
        return !cox_group_peer_alive(base, rank);
    }
    if (base->peers[rank].pid > 0) /* it died before this rank could open it */
        return true;
    if (!holder)
        return cox_group_known_pid_is_dead(base, rank);
    int r = cox_group_process_meet(holder, &met);
    cox_peer_close(&met);
    return r == COX_PEER_DEAD;
}

int32_t cox_group_said_cause(const struct cox_group_base *base, uint32_t rank)
{
    /* relaxed: stored before the words that made this rank check, which were loaded with acquire;
     * or by a dead process. Partners are cox_group_say and cox_group_give_up. */
    int32_t cause = cox_group_said_rank(
        base, atomic_load_explicit(&base->ranks[rank]->identity.said_dead, memory_order_relaxed));
    /* A rank that another one reports dead and that runs this lives, and no rank dies of itself. */
    return cause == (int32_t)rank || cause == (int32_t)base->rank ? -1 : cause;
}

int32_t cox_group_cause(const struct cox_group_base *base, uint32_t rank)
{
    int32_t cause = cox_group_said_cause(base, rank);
    if (cause < 0)
        return -1;
    if (base->memory && !has_ended(base, (uint32_t)cause) && !is_seen_dead(base, (uint32_t)cause))
        return -1;
    return cause;
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
