/*
 * Shared by the files of recovery: recovery.c (its thread, and the public calls), recovery_policy.c
 * (what a death does), recovery_orders.c (requested restarts and commands). Private to them.
 *
 * Threads: every function is called with the lock held, on recovery's thread unless it says
 *   otherwise. Calls of the executor release the lock meanwhile.
 */
#ifndef COX_COORDINATOR_RECOVERY_INTERNAL_H
#define COX_COORDINATOR_RECOVERY_INTERNAL_H

#include "coordinator/collector/stats.h"
#include "recovery.h"

#include <pthread.h>

/* Attempts at one thing, and when the next one is due. */
struct cox_backoff {
    /* attempts since it last stayed well for a window */
    uint32_t tries;
    uint64_t tried_ns;
    uint64_t due_ns;
};

struct cox_recovery_rank {
    /* as reported by the death hook; also while a new process is tried */
    bool dead;
    /* it was killed on request, or for being late, and does not count as a death */
    bool expected;
    /* the order to replace it is still in progress, and handles its death */
    bool ordered;
    /* its replacement is to be logged once it is initialized */
    bool replaced;
    uint64_t died_ns;
    struct cox_backoff backoff;
    /* as the hook reported it, with the last lines */
    char death[1024];
    /* without the last lines */
    char how[512];
    /* its process before it was replaced */
    pid_t before;
    /* replaced: by which process */
    char news[768];
};

/* An order, on the stack of its caller. */
struct cox_recovery_order {
    struct cox_recovery_order *next;
    bool is_restart;
    enum cox_recover_command command;
    struct cox_recover_result *results;
    uint32_t rank;
    bool kill;
    /* the process that was killed before the order's turn; 0: none */
    pid_t killed;
    bool replaced;
    uint64_t deadline_ns;
    bool started, done;
    int status;
    struct cox_error error;
};

struct cox_recovery {
    struct cox_executor *executor;
    struct cox_recovery_options options;
    uint32_t rank_count;
    /* all ranks are replaced together */
    bool whole;
    pthread_t thread;
    bool joined;
    /* the thread's */
    struct cox_rank_status *statuses;

    /* protects all fields below; not held over anything that blocks */
    pthread_mutex_t lock;
    /* a field below has changed */
    pthread_cond_t wake;
    bool stopped;
    bool cancelled;
    /* the executor stops */
    bool closing;
    bool failed;
    struct cox_error failure;
    /* of the attempts that failed */
    struct cox_error last;
    /* a death is known that the hook has not reported */
    bool check;
    /* the thread is inside the executor */
    bool busy;
    /* since when a command has paused the engine, or some ranks; 0: it is not */
    uint64_t paused_ns;
    /* only some ranks */
    bool partially_paused;
    /* a rank was replaced, and init not replayed since */
    bool unready;
    /* changes of the group, and how many of them await has returned */
    uint64_t changes, changes_seen;
    char doing[160];
    struct cox_recovery_order *orders;
    struct cox_recovery_rank *ranks;
    struct cox_backoff all, replay;
    /* since when attempts fail for lack of space, memory or fds; 0: they do not */
    uint64_t want_ns;
    /* attempts of the policy in a row that ended at their deadline */
    uint32_t hangs;
    /* times of the last restart_max + 1 deaths, a ring */
    uint64_t *deaths;
    uint64_t death_count;
    struct cox_latency replacements;
};

/* Around a call of the executor: enter releases the lock; leave takes it again and reads the ranks'
 * present state. Returns r. */
void cox_recovery_enter(struct cox_recovery *recovery);
int cox_recovery_leave(struct cox_recovery *recovery, int r);

/* Replaces one rank, or all; replays the init. Return as the executor's functions. */
int cox_recovery_replace(struct cox_recovery *recovery, uint32_t number, uint64_t deadline_ns,
                         struct cox_error *err);
int cox_recovery_replace_all(struct cox_recovery *recovery, uint64_t deadline_ns,
                             struct cox_error *err);
int cox_recovery_replay(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err);

/* From any thread. */
void cox_recovery_died(struct cox_recovery *recovery, struct cox_recovery_rank *rank,
                       const char *text);
/* The first dead rank; NULL: none. Any thread. */
struct cox_recovery_rank *cox_recovery_first_dead(struct cox_recovery *recovery);
/* Deaths within the window; counts up to restart_max + 1. Any thread. */
uint32_t cox_recovery_recent_deaths(const struct cox_recovery *recovery);
/* An attempt has failed, or its process is dead: computes when the next one is due. Any thread. */
void cox_recovery_back_off(const struct cox_recovery *recovery, struct cox_backoff *backoff);

/* When the policy has work: 0: now; COX_DEADLINE_NEVER: none. Any thread. */
uint64_t cox_recovery_turn_due(struct cox_recovery *recovery);
/* Does the policy's work. */
void cox_recovery_turn(struct cox_recovery *recovery);
/* Checks for ranks that have left the group, which no hook reports. */
void cox_recovery_check(struct cox_recovery *recovery);
/* Runs the first order, and wakes its caller. */
void cox_recovery_order_run(struct cox_recovery *recovery, struct cox_recovery_order *order);

#endif
