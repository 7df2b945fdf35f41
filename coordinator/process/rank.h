/*
 * rank: one record for each rank of a group: its stage, and the facts that go with it.
 *
 * The stage says what the process of the rank does, as far as the coordinator knows:
 *
 *                 registered
 *      .-------------------------------.
 *      |  launch            executed   v   attached
 *   VACANT ----> LAUNCHING -----> STARTING ---------> RUNNING
 *      |           ^   |             |  \              |  |  ^
 *      |  relaunch |   | not         |   '- leaves -.   |  |  | takes
 *      |           |   v executed    |              v   v  |  | it back
 *      '------> REPORTED             | ends        LEAVING-|--'
 *       cancelled  ^                 v                |    | ends
 *                  |              EXITING <-----------+----'
 *     hook returned|                 | reaped
 *                  '-------- DEAD <--'
 *
 * To VACANT go: STARTING, RUNNING and LEAVING, when the slot of an external process is released;
 * REPORTED, when another process may have the slot; LAUNCHING, when the first one was not executed.
 *
 * Facts that are independent of the stage are fields: whether channels ask the rank (detached),
 * whether a thread replaces its process (restarting), whether a client may become it
 * (open_for_attach), whether the end of its process is waited for (awaited).
 *
 * Threads: cox_rank_move is called with the supervisor's lock held. All threads may read. Each
 * field
 *   says which thread writes it, and under what.
 * Ownership: the executor owns the records of its group; supervisor, collectors and error channel
 *   borrow them.
 * Blocks: nothing.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_RANK_H
#define COX_COORDINATOR_RANK_H

#include <coxswain/base.h>

#include <stdatomic.h>
#include <sys/types.h>

/* The order matters: from DEAD on the previous process is dead, and there is no other. */
enum cox_rank_stage {
    /* there is no process, and the end of none is awaited */
    COX_STAGE_VACANT,
    /* its process runs and has not attached */
    COX_STAGE_STARTING,
    /* it has attached, and its identity was checked */
    COX_STAGE_RUNNING,
    /* it has left the group, its process lives */
    COX_STAGE_LEAVING,
    /* one of its processes was seen to end; they are not reaped */
    COX_STAGE_EXITING,
    /* it is reaped; its last lines and its death hook are being handled */
    COX_STAGE_DEAD,
    /* the death hook has returned */
    COX_STAGE_REPORTED,
    /* another process is being started */
    COX_STAGE_LAUNCHING,
    COX_STAGE_COUNT
};

/* The client that is the rank, as the control socket sees it. Written by that socket's thread only;
 * relaxed. */
struct cox_slot_holder {
    /* cox_control_client.id; 0: none */
    _Atomic uint64_t connection;
    /* as the kernel reports it; 0: unknown */
    _Atomic pid_t pid;
    /* that of the rank at the hello; if the rank has another by now, the slot is free */
    _Atomic uint32_t incarnation;
};

struct cox_rank {
    /* enum cox_rank_stage. Written by cox_rank_move, with release. */
    _Atomic uint32_t stage;
    /* The process that was started, 0: none; and the process that serves in its place, 0: the same
     * one. Written under the supervisor's lock; relaxed. */
    _Atomic pid_t pid;
    _Atomic pid_t adopted_pid;
    /* Counts its processes, from 1. Written by the thread that has `restarting`; relaxed. */
    _Atomic uint32_t incarnation;
    /* Replacements that succeeded. Written by the thread that has `restarting`, with release. */
    _Atomic uint32_t restarts;
    /* The incarnation whose death was reported to the host, 0: none. Exchanged by the supervisor
     * thread or by start, whichever comes first. */
    _Atomic uint32_t announced;
    /* No channel may ask it. Written by the thread that has `restarting`: true under the locks of
     * a collector, which its begin holds when it reads this. */
    _Atomic bool detached;
    /* A thread replaces its process. Taken by an exchange with acquire, given back with release. */
    _Atomic bool restarting;
    /* external: a client may become this rank now. Under the executor's memory_lock. */
    bool open_for_attach;
    /* Its process counts in the supervisor's `alive`: it was started or registered, has not left
     * for good, and its death hook has not returned. Under the supervisor's lock. */
    bool awaited;
    /* When its process was first seen to end, CLOCK_MONOTONIC; 0: never. Written by cox_rank_move
     * before the stage. */
    _Atomic uint64_t exiting_ns;
    /* When it was seen to have left, CLOCK_MONOTONIC. Under the supervisor's lock. */
    uint64_t left_ns;
    struct cox_slot_holder holder;
    /* The previous process of the rank, for the log; pid 0: there was none. Written by the thread
     * that has `restarting`. */
    struct {
        pid_t pid;
        uint32_t incarnation;
    } previous;
};

/* Vacant, in their first incarnation. */
void cox_ranks_init(struct cox_rank *ranks, uint32_t rank_count);

/* The one place where the stage changes. The fields that go with the new stage are set before. The
 * testing build asserts that the table has this move, and the invariant. */
void cox_rank_move(struct cox_rank *rank, enum cox_rank_stage to);
bool cox_rank_may_move(enum cox_rank_stage from, enum cox_rank_stage to);
/* A violated invariant as text; NULL: none. With the supervisor's lock held. */
const char *cox_rank_invariant(const struct cox_rank *rank);

/* Acquire: what was written before the move, such as how it died, may be read now. */
static inline enum cox_rank_stage cox_rank_stage_of(const struct cox_rank *rank)
{
    return (enum cox_rank_stage)atomic_load_explicit(&rank->stage, memory_order_acquire);
}

/* True if its process is reaped and no other was executed. The only test for a dead rank;
 * cox_supervisor_ended and cox_supervisor_exiting ask the kernel whether a death is about to be
 * noticed. */
static inline bool cox_rank_is_dead(const struct cox_rank *rank)
{
    return cox_rank_stage_of(rank) >= COX_STAGE_DEAD;
}

/* True if there is a process that is not reaped. */
static inline bool cox_rank_stage_lives(enum cox_rank_stage stage)
{
    return stage >= COX_STAGE_STARTING && stage <= COX_STAGE_EXITING;
}

/* True if there is a process, and no end of it was seen. */
static inline bool cox_rank_stage_serves(enum cox_rank_stage stage)
{
    return stage >= COX_STAGE_STARTING && stage <= COX_STAGE_LEAVING;
}

/* With the supervisor's lock held; relaxed: a number, which the move that follows publishes. */
static inline void cox_rank_set_pid(struct cox_rank *rank, pid_t pid)
{
    atomic_store_explicit(&rank->pid, pid, memory_order_relaxed);
}

static inline pid_t cox_rank_pid(const struct cox_rank *rank)
{
    return atomic_load_explicit(&rank->pid, memory_order_relaxed);
}

/* The process that serves. */
static inline pid_t cox_rank_serving_pid(const struct cox_rank *rank)
{
    const pid_t adopted = atomic_load_explicit(&rank->adopted_pid, memory_order_relaxed);
    return adopted ? adopted : cox_rank_pid(rank);
}

static inline uint32_t cox_rank_incarnation(const struct cox_rank *rank)
{
    return atomic_load_explicit(&rank->incarnation, memory_order_relaxed);
}

static inline bool cox_rank_is_detached(const struct cox_rank *rank)
{
    /* acquire: partner is the release where it is stored. */
    return atomic_load_explicit(&rank->detached, memory_order_acquire);
}

#endif
