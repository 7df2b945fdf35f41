/*
 * group_private: what the files of the rank group share. Private to the library.
 *
 * group.c: joining is put together there, leaving, epochs, subgroups. group_join.c: the memory and
 * its name, identities. group_memory.c: the memory of a sealed group. group_peer.c: whether the
 * ranks live. group_round.c: one round, which is what every operation is made of, barrier and
 * gather. group_fd_exchange.c: fds, by handles. group_sockets.c: fds, by sockets.
 */
#ifndef COX_WORKER_GROUP_PRIVATE_H
#define COX_WORKER_GROUP_PRIVATE_H

#include "group_layout.h"

#include "channel/handle/handle.h"
#include "channel/base/peer.h"
#include "channel/shm/region.h"
#include "channel/base/spin.h"

#include <sys/stat.h>

/* The longest wait of a thread that waits for others. */
#define COX_GROUP_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* How often a waiter in a round checks whether the others live, and whether the round was aborted:
 * nothing wakes it for that, and it decides how soon a group continues after a death. */
#define COX_GROUP_LOOK_NS (4 * COX_NSEC_PER_MSEC)

enum cox_group_operation {
    COX_GROUP_BARRIER = 1,
    COX_GROUP_GATHER,
    COX_GROUP_GATHER_FDS,
    COX_GROUP_BROADCAST_FD,
    COX_GROUP_OPERATION_COUNT,
};

/* What the group and its subgroups share. */
struct cox_group_base {
    /* of the named form */
    struct cox_region region;
    /* the same; NULL in the sealed form */
    struct cox_group_layout *layout;
    /* of the sealed form; NULL in the named one */
    struct cox_group_memory *memory;
    /* the ranks' pids in the coordinator's pid namespace; 0: unknown */
    pid_t known_pids[COX_RANK_COUNT_MAX];
    /* By rank; in the sealed form all but its own are mapped read-only. */
    struct cox_group_layout_rank *ranks[COX_RANK_COUNT_MAX];
    uint8_t *values[COX_RANK_COUNT_MAX];
    /* of the group; of subgroups, 8 a rank */
    struct cox_group_layout_wakeup *wakeup, *wakeups;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t value_size;
    uint64_t generation;
    /* of this process */
    uint64_t start;
    /* the process that joined; a forked child is another one */
    pid_t pid;
    /* epoch; written by align, read by an abort on any thread */
    _Atomic uint64_t present;
    /* For handles; 0: /proc does not show it here; the reason follows. Determined before all have
     * joined, because it takes an fd, which an operation may not have. */
    uint64_t system;
    int no_system;
    bool (*cancelled)(void *context);
    void *context;
    /* without a pidfd and not in by_start: it died before this rank could open it */
    struct cox_peer peers[COX_RANK_COUNT_MAX];
    /* ranks without a pidfd because pidfds are not available */
    struct cox_rank_set by_start;
    /* 1 + the rank whose end was the first to end the join or an operation; 0: none. Also reported
     * to the others. Set once, by the thread that operates in the group or a subgroup. */
    _Atomic uint32_t dead;
    /* release, after the pointer; partner: abort */
    _Atomic uint32_t subgroup_count;
    struct cox_group *subgroups[COX_SUBGROUP_COUNT_MAX];
};

/* The group, or a subgroup. */
struct cox_group {
    struct cox_group_base *base;
    /* of this rank's parts; 0: the group */
    uint32_t slot;
    /* members */
    uint32_t count;
    /* place of this rank among them */
    uint32_t self;
    /* of the last operation begun */
    uint32_t index;
    /* 1 + a rank whose death has ended an operation; 0: none */
    uint32_t dead;
    /* size of a value per round */
    uint32_t slot_size;
    /* 0: the group */
    uint64_t name_hash;
    uint64_t members_hash;
    /* of the last operation */
    uint64_t said_what;
    /* of the thread that operates here; another thread may operate in a subgroup */
    struct cox_spinner spinner;
    /* of the wakeup, before the last check that found no trouble */
    uint32_t news;
    bool news_known;
    /* cox_group_aborted of the last epoch that has ended; any thread raises it */
    _Atomic uint64_t gone;
    /* 1 + the rank that the last error of an operation is about; 0: none, or several. */
    _Atomic uint32_t blamed;
    /* by place */
    uint8_t ranks[COX_RANK_COUNT_MAX];
    /* by place, of that rank's parts; 0: not known yet */
    _Atomic uint8_t slots[COX_RANK_COUNT_MAX];
    char name[COX_SUBGROUP_NAME_MAX + 1];
};

/* ---- group_join.c ---- */

/* The memory under a name. */
struct cox_group_name {
    /* locked with flock while others may join; -1: an fd without a name */
    int fd;
    /* of the file */
    dev_t device;
    ino_t inode;
    char path[256];
};
#define COX_GROUP_NAME_NONE                                                                        \
    {                                                                                              \
        .fd = -1                                                                                   \
    }

/* Fills in the memory of base, and claims the identity. Returns as cox_group_join. */
int cox_group_take_memory(struct cox_group_base *base, const struct cox_group_options *options,
                          struct cox_group_name *name, struct cox_error *err);
/* Waits until every rank has joined and opens their processes. */
int cox_group_meet(struct cox_group_base *base, const struct cox_group_options *options,
                   struct cox_error *err);
/* Removes the name if it still refers to this file, with only_if_last: if no other process has it
 * locked. Closes. */
void cox_group_name_end(struct cox_group_name *name, bool only_if_last, uint64_t deadline_ns);
/* Stores a new state of this rank; and the rank whose death is the reason, if there is one. */
void cox_group_say(struct cox_group_base *base, enum cox_group_state state);

/* ---- group_peer.c ---- */

/* Opens the process that the word names, with a pidfd if possible. Returns 0; COX_PEER_DEAD;
 * -errno. */
int cox_group_process_meet(uint64_t holder, struct cox_peer *ret_peer);
/* The same, as the process of this rank; its pid is kept in any case. */
int cox_group_peer_meet(struct cox_group_base *base, uint32_t rank, uint64_t holder);
/* Returns true if it was seen alive. */
bool cox_group_peer_known(const struct cox_group_base *base, uint32_t rank);
/* Returns false if its process is dead or was never seen alive. */
bool cox_group_peer_alive(const struct cox_group_base *base, uint32_t rank);
/* Returns {state, pid, start} of the rank in this generation; 0: it is not, or no longer, in this
 * generation. */
uint64_t cox_group_holder_of(const struct cox_group_base *base, uint32_t rank);
/* Returns true if the process that the init names as this rank is gone and reaped. False if the
 * init names none, or in another pid namespace. */
bool cox_group_known_pid_is_dead(const struct cox_group_base *base, uint32_t rank);
/* Returns true if the rank has left, could not join, or is in a state that is impossible once all
 * have joined. */
bool cox_group_has_left(const struct cox_group_base *base, uint32_t rank);
/* Returns the rank whose end is, by its own words, the reason why `rank` has ended or aborted for
 * good; never `rank` or this rank. -1: none, or an invalid value; or, in the sealed form, this rank
 * sees that one live: then one rank's word stands against the other's. */
int32_t cox_group_cause(const struct cox_group_base *base, uint32_t rank);
/* The same, without this rank's own view. */
int32_t cox_group_said_cause(const struct cox_group_base *base, uint32_t rank);
/* The first dead rank of the set, except ranks that left before: they may have left because of the
 * death. -1: none. */
int32_t cox_group_dead_among(const struct cox_group_base *base, const struct cox_rank_set *set);

/* ---- group_round.c ---- */

static inline uint64_t cox_group_present(const struct cox_group_base *base)
{
    /* relaxed: partner is align on the thread that operates; for abort any moment is right. */
    return atomic_load_explicit(&base->present, memory_order_relaxed);
}

static inline struct cox_group_layout_part *cox_group_own_part(const struct cox_group *group)
{
    return &group->base->ranks[group->base->rank]->parts[group->slot];
}

/* The rank in `said_dead` or `because`. -1: none, or an invalid value. */
static inline int32_t cox_group_said_rank(const struct cox_group_base *base, uint32_t said)
{
    uint32_t rank = (said & 0xffff) - 1;
    return rank < base->rank_count && said == cox_group_said_dead(rank) ? (int32_t)rank : -1;
}

/* Wakes all waiters of this wakeup; they check everything again. */
void cox_group_wake(struct cox_group_layout_wakeup *wakeup);
/* The value of the wakeup. Read before a check: an event that is stored, and then woken for, later
 * ends the wait. */
uint32_t cox_group_listen(struct cox_group_layout_wakeup *wakeup);
/* Blocks until the wakeup is woken after `seen` was read, or until_ns. Returns 0 or -errno. */
int cox_group_sleep(struct cox_group_layout_wakeup *wakeup, uint32_t seen, uint64_t until_ns);
/* The wakeup of the group or subgroup; NULL: its first member has not formed it yet. */
struct cox_group_layout_wakeup *cox_group_wakeup(struct cox_group *group);
/* Stores all words of this rank in the group or subgroup again. */
void cox_group_say_again(struct cox_group *group);
/* Ends the present epoch for this rank, stores that and wakes the others; any thread. With
 * for_good, on the thread that operates: ends every epoch, because of a death, and stores whose, if
 * known. */
void cox_group_give_up(struct cox_group *group, bool for_good);
/* Returns true if it was ended: no operation of this rank succeeds until it aligns. */
bool cox_group_is_over(const struct cox_group *group);
/* Returns true if the member has arrived at the round after this rank's last one: everything it did
 * before is done. */
bool cox_group_went_on(struct cox_group *group, uint32_t place);
/* The next operation: arrives, waits for all, and checks that all are at the same one. Returns 0;
 * COX_INVALID: another detail (size); otherwise as the operations, and the epoch is over. */
int cox_group_round(struct cox_group *group, enum cox_group_operation operation, uint32_t detail,
                    uint64_t deadline_ns, struct cox_error *err);
/* A round in which every member contributes size bytes, at most a slot. */
int cox_group_round_values(struct cox_group *group, enum cox_group_operation operation,
                           uint32_t detail, const void *value, uint32_t size, uint8_t *values,
                           size_t stride, uint64_t deadline_ns, struct cox_error *err);
/* For an operation that waits elsewhere: checks whether a missing member is dead, has aborted or is
 * in another operation, and whether the caller has cancelled. Returns 0, COX_PEER_DEAD,
 * COX_ABORTED, COX_CORRUPT. */
int cox_group_trouble(struct cox_group *group, const struct cox_rank_set *missing, bool due,
                      struct cox_error *err);

/* ---- group_fd_exchange.c, group_sockets.c ---- */

/* One gather or broadcast of fds. Everything is by place. */
struct cox_group_exchange {
    struct cox_group *group;
    enum cox_group_operation operation;
    /* COX_GROUP_ALL, or the place of the rank whose fd it is */
    uint32_t source;
    /* the fd of this rank; -1: none */
    int fd;
    uint64_t deadline_ns;
    struct cox_handle_info offers[COX_RANK_COUNT_MAX];
    /* received; -1 */
    int fds[COX_RANK_COUNT_MAX];
    /* 1 + a rank that was found dead when its fd was taken; 0: none */
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
/* A round of the exchange: every member contributes size bytes. */
int cox_group_stage(struct cox_group_exchange *exchange, enum cox_group_stage stage,
                    const void *value, uint32_t size, void *values, struct cox_error *err);
/* Checks that it is the object that was offered. Returns 0; COX_CORRUPT; -errno. */
int cox_group_fd_verify(const struct cox_group_exchange *exchange, uint32_t place, int fd,
                        struct cox_error *err);
/* Sends and receives all fds over sockets. Returns as the operations; *ret_how: 0, or what failed
 * on this rank alone, with how_err. */
int cox_group_exchange_sockets(struct cox_group_exchange *exchange, int *ret_how,
                               struct cox_error *how_err, struct cox_error *err);

/* "rank 3", "ranks 1, 4-6"; of a subgroup's places: their ranks in the group. Returns text. */
const char *cox_group_list(const struct cox_rank_set *ranks, char *text, size_t size);

#endif
