/*
 * group_private: declarations that the files of the rank group share. Private to the library.
 *
 *   group.c              join as a whole, leave, epochs, subgroups
 *   group_join.c         the memory, its name, and the ranks' identities
 *   group_memory.c       the memory of a sealed group
 *   group_peer.c         whether the other ranks live
 *   group_round.c        one round, of which every operation consists; barrier and gather
 *   group_fd_exchange.c  exchange of fds by handles
 *   group_sockets.c      exchange of fds by sockets
 *   group_mirror.c       ranks of other machines
 *
 * Threads: one thread at a time operates in the group, and one in each subgroup; abort is called on
 *   any thread. Fields that several threads use are atomic.
 * Ownership: a group owns its memory, its pidfds and its subgroups.
 * If the process dies: group.h.
 */
#ifndef COX_WORKER_GROUP_PRIVATE_H
#define COX_WORKER_GROUP_PRIVATE_H

#include "group_layout.h"

#include <coxswain/handle.h>
#include "channel/base/peer.h"
#include "channel/shm/region.h"
#include "channel/base/futex.h"
#include "channel/base/spin.h"

#include <sys/stat.h>

/* The longest interval between the checks of a waiter in join and in an exchange over sockets. In a
 * round: the interval at which a waiter stores its words again. */
#define COX_GROUP_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* The interval at which a waiter in a round checks whether the other ranks live, and whether the
 * round was aborted. No wakeup announces a death, so this bounds how late a group notices one. */
#define COX_GROUP_LOOK_NS (4 * COX_NSEC_PER_MSEC)

enum cox_group_operation {
    COX_GROUP_BARRIER = 1,
    COX_GROUP_GATHER,
    COX_GROUP_GATHER_FDS,
    COX_GROUP_BROADCAST_FD,
    COX_GROUP_OPERATION_COUNT,
};

/* State that the group and its subgroups share. */
struct cox_group_base {
    /* named form only */
    struct cox_region region;
    /* region.base in the named form; NULL in the sealed form */
    struct cox_group_layout *layout;
    /* NULL in the named form */
    struct cox_group_memory *memory;
    /* the ranks' pids in the coordinator's pid namespace; 0: unknown */
    pid_t known_pids[COX_RANK_COUNT_MAX];
    /* Indexed by rank. In the sealed form all but this rank's own are mapped read-only. */
    struct cox_group_layout_rank *ranks[COX_RANK_COUNT_MAX];
    uint8_t *values[COX_RANK_COUNT_MAX];
    /* of the group; and of the subgroups, 8 per rank */
    struct cox_group_layout_wakeup *wakeup, *wakeups;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t value_size;
    uint64_t incarnation;
    /* start time of this process */
    uint64_t start;
    /* of the process that joined; a forked child has another one */
    pid_t pid;
    /* epoch; written by align, read by an abort on any thread */
    _Atomic uint64_t present;
    /* The id of this system, for handles. 0: /proc does not show it, and no_system is the error.
     * Determined by join, because it needs an fd, and an operation may find none free. */
    uint64_t system;
    int no_system;
    bool (*cancelled)(void *context);
    void *context;
    /* Ranks of other machines: a mirror is woken after each change. */
    bool mirrored;
    /* NULL: operations are not recorded */
    struct cox_recorder *recorder;
    /* A peer without a pidfd that is not in by_start died before this rank could open it. */
    struct cox_peer peers[COX_RANK_COUNT_MAX];
    /* ranks identified by pid and start time, because pidfds are not available */
    struct cox_rank_set by_start;
    /* 1 + the first rank whose death ended the join or an operation; 0: none. Also reported to the
     * other ranks. Set once, by a thread that operates in the group or a subgroup. */
    _Atomic uint32_t dead;
    /* Stored with release, after the pointer in subgroups; partner: the acquire in abort. */
    _Atomic uint32_t subgroup_count;
    struct cox_group *subgroups[COX_SUBGROUP_COUNT_MAX];
};

/* The group, or a subgroup. */
struct cox_group {
    struct cox_group_base *base;
    /* index of this rank's part (group_layout.h); 0: the group */
    uint32_t slot;
    /* number of members */
    uint32_t count;
    /* place of this rank among the members */
    uint32_t self;
    /* number of the last round begun, in this epoch */
    uint32_t index;
    /* 1 + a rank whose death has ended an operation; 0: none */
    uint32_t dead;
    /* largest value per round */
    uint32_t slot_size;
    /* 0: the group */
    uint64_t name_hash;
    uint64_t members_hash;
    /* the last value stored in part.what */
    uint64_t said_what;
    /* Used by the thread that operates here; another thread may operate in a subgroup. */
    struct cox_spinner spinner;
    /* wakeup.news, loaded before the last check that found no trouble */
    uint32_t news;
    bool news_known;
    /* cox_group_aborted of the last epoch that has ended; only grows, on any thread */
    _Atomic uint64_t gone;
    /* 1 + the rank that caused the last error of an operation; 0: none, or several */
    _Atomic uint32_t blamed;
    /* rank of each member, indexed by place */
    uint8_t ranks[COX_RANK_COUNT_MAX];
    /* index of that rank's part, indexed by place; 0: not known yet */
    _Atomic uint8_t slots[COX_RANK_COUNT_MAX];
    char name[COX_SUBGROUP_NAME_MAX + 1];
};

/* ---- group_join.c ---- */

/* The memory under a name. */
struct cox_group_name {
    /* locked with flock while other ranks may join; -1: the memory is an fd without a name */
    int fd;
    /* identity of the file */
    dev_t device;
    ino_t inode;
    char path[256];
};
#define COX_GROUP_NAME_NONE                                                                        \
    {                                                                                              \
        .fd = -1                                                                                   \
    }

/* Attaches the memory of base and claims this rank's identity in it. Returns as cox_group_join. */
int cox_group_take_memory(struct cox_group_base *base, const struct cox_group_options *options,
                          struct cox_group_name *name, struct cox_error *err);
/* Waits until every rank has joined, and opens their processes. Returns as cox_group_join. */
int cox_group_meet(struct cox_group_base *base, const struct cox_group_options *options,
                   struct cox_error *err);
/* Removes the name if it still refers to this file, and closes the file. only_if_last: removes it
 * only if no other process has the file locked. */
void cox_group_name_end(struct cox_group_name *name, bool only_if_last, uint64_t deadline_ns);
/* Stores a new state of this rank, and the rank whose death is the reason, if any. */
void cox_group_say(struct cox_group_base *base, enum cox_group_state state);

/* ---- group_peer.c ---- */

/* Opens the process that the identity word names, with a pidfd if possible. Returns 0;
 * COX_PEER_DEAD; -errno. */
int cox_group_process_meet(uint64_t holder, struct cox_peer *ret_peer);
/* The same, for base->peers[rank]. The pid is stored even on failure. */
int cox_group_peer_meet(struct cox_group_base *base, uint32_t rank, uint64_t holder);
/* Returns true if this rank has seen the process of `rank` alive. */
bool cox_group_peer_known(const struct cox_group_base *base, uint32_t rank);
/* Returns false if the process of `rank` is dead, or was never seen alive. */
bool cox_group_peer_alive(const struct cox_group_base *base, uint32_t rank);
/* Returns {state, pid, start} of the rank; 0: the rank is not, or no longer, in this incarnation.
 */
uint64_t cox_group_holder_of(const struct cox_group_base *base, uint32_t rank);
/* Returns true if the process that the init names as this rank is dead and reaped. Returns false if
 * the init names none, or if this process is in another pid namespace than the coordinator. */
bool cox_group_known_pid_is_dead(const struct cox_group_base *base, uint32_t rank);
/* Returns true if the rank has left, could not join, or is in a state that no rank has once all
 * ranks have joined. */
bool cox_group_has_left(const struct cox_group_base *base, uint32_t rank);
/* Returns the rank whose end `rank` reports as the reason why it ended or aborted for good; never
 * `rank` or this rank. -1: none, or an invalid value. In the sealed form also -1 if the reported
 * rank lives as far as this rank sees, because the two ranks then contradict each other. */
int32_t cox_group_cause(const struct cox_group_base *base, uint32_t rank);
/* The same, without that check. */
int32_t cox_group_said_cause(const struct cox_group_base *base, uint32_t rank);
/* Returns the first dead rank of the set; -1: none. Skips ranks that have left: they may have left
 * because of the death. */
int32_t cox_group_dead_among(const struct cox_group_base *base, const struct cox_rank_set *set);

/* ---- group_round.c ---- */

static inline uint64_t cox_group_present(const struct cox_group_base *base)
{
    /* relaxed: partner is align, on the thread that operates. For abort any value is right. */
    return atomic_load_explicit(&base->present, memory_order_relaxed);
}

/* A word of this rank has changed. seq_cst, both: see cox_group_mirror_wait. */
static inline void cox_group_tell_mirror(const struct cox_group_base *base)
{
    if (!base->mirrored)
        return;
    atomic_fetch_add_explicit(&base->wakeup->mirror, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&base->wakeup->mirror_sleeps, memory_order_seq_cst))
        cox_futex_wake(&base->wakeup->mirror);
}

static inline struct cox_group_layout_part *cox_group_own_part(const struct cox_group *group)
{
    return &group->base->ranks[group->base->rank]->parts[group->slot];
}

/* Returns the rank that `said_dead` or `because` contains. -1: none, or an invalid value. */
static inline int32_t cox_group_said_rank(const struct cox_group_base *base, uint32_t said)
{
    uint32_t rank = (said & 0xffff) - 1;
    return rank < base->rank_count && said == cox_group_said_dead(rank) ? (int32_t)rank : -1;
}

/* Wakes all waiters; each then checks everything again. */
void cox_group_wake(struct cox_group_layout_wakeup *wakeup);
/* Returns the value of the wakeup. Call it before a check: then an event that is stored after the
 * check ends the wait. */
uint32_t cox_group_listen(struct cox_group_layout_wakeup *wakeup);
/* Blocks until a wake that follows the read of `seen`, or until_ns. Returns 0 or -errno. */
int cox_group_sleep(struct cox_group_layout_wakeup *wakeup, uint32_t seen, uint64_t until_ns);
/* Returns the wakeup of the group or subgroup; NULL: the first member has not formed it yet. */
struct cox_group_layout_wakeup *cox_group_wakeup(struct cox_group *group);
/* Stores all words of this rank in the group or subgroup again, in case a process has overwritten
 * them. */
void cox_group_say_again(struct cox_group *group);
/* Ends the present epoch for this rank, stores that, and wakes the other ranks; any thread.
 * for_good: ends every epoch, because of a death, and stores whose, if known; only on the thread
 * that operates. */
void cox_group_give_up(struct cox_group *group, bool for_good);
/* Returns true if the epoch was ended: operations of this rank fail until it aligns. */
bool cox_group_is_over(const struct cox_group *group);
/* Returns true if the member has arrived at the round after this rank's last one: then the member
 * has completed everything it did before. */
bool cox_group_went_on(struct cox_group *group, uint32_t place);
/* Runs the next round: arrives, waits for all members, and checks that all run the same operation.
 * Every member contributes size bytes, at most slot_size; 0: none. Returns 0; COX_INVALID: a member
 * passed another detail (size); otherwise as the operations, and the epoch is over. */
int cox_group_round_values(struct cox_group *group, enum cox_group_operation operation,
                           uint32_t detail, const void *value, uint32_t size, uint8_t *values,
                           size_t stride, uint64_t deadline_ns, struct cox_error *err);
/* For operations that also wait outside a round. Checks whether a missing member is dead, has
 * aborted or is in another operation, and whether the caller has cancelled. due: also makes the
 * checks that need system calls. Returns 0; COX_PEER_DEAD; COX_ABORTED; COX_CORRUPT. */
int cox_group_trouble(struct cox_group *group, const struct cox_rank_set *missing, bool due,
                      struct cox_error *err);

/* ---- group_fd_exchange.c, group_sockets.c ---- */

/* One gather or broadcast of fds. All arrays are indexed by place. */
struct cox_group_exchange {
    struct cox_group *group;
    enum cox_group_operation operation;
    /* COX_GROUP_ALL: every member gives an fd; else the place of the one that does */
    uint32_t source;
    /* the fd that this rank gives; -1: none */
    int fd;
    uint64_t deadline_ns;
    struct cox_handle_info offers[COX_RANK_COUNT_MAX];
    /* received; -1: none yet */
    int fds[COX_RANK_COUNT_MAX];
    /* 1 + a rank that was found dead when this rank took its fd; 0: none */
    uint32_t dead;
};
#define COX_GROUP_ALL UINT32_C(0xffff)

/* Rounds of an exchange. */
enum cox_group_stage {
    COX_GROUP_STAGE_HANDLES,
    COX_GROUP_STAGE_OPENED,
    COX_GROUP_STAGE_ADDRESSES,
    COX_GROUP_STAGE_RECEIVED,
};

static inline bool cox_group_gives(const struct cox_group_exchange *exchange, uint32_t place)
{
    return exchange->source == COX_GROUP_ALL || exchange->source == place;
}
/* Runs a round of the exchange: every member contributes size bytes. */
int cox_group_stage(struct cox_group_exchange *exchange, enum cox_group_stage stage,
                    const void *value, uint32_t size, void *values, struct cox_error *err);
/* Checks that fd is the object that the member offered. Returns 0; COX_CORRUPT; -errno. */
int cox_group_fd_verify(const struct cox_group_exchange *exchange, uint32_t place, int fd,
                        struct cox_error *err);
/* Sends and receives all fds over sockets. Returns as the operations. *ret_how: 0, or the error of
 * this rank alone, with how_err. */
int cox_group_exchange_sockets(struct cox_group_exchange *exchange, int *ret_how,
                               struct cox_error *how_err, struct cox_error *err);

/* Writes "rank 3" or "ranks 1, 4-6". ranks: numbers in the group, not places. Returns text. */
const char *cox_group_list(const struct cox_rank_set *ranks, char *text, size_t size);

#endif
