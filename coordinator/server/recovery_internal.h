/*
 * What the files of recovery share: recovery.c (its thread, and what others ask), recovery_policy.c
 * (what a death does), recovery_orders.c (what somebody has ordered). For no one else.
 *
 * Threads: everything here is called with the lock held, by recovery's thread unless it says
 *   otherwise. What goes into the executor gives the lock up meanwhile.
 */
#ifndef COX_COORDINATOR_RECOVERY_INTERNAL_H
#define COX_COORDINATOR_RECOVERY_INTERNAL_H

#include "recovery.h"

#include <pthread.h>

/* Tries of one thing, and when the next one is due. */
struct cox_backoff {
    /* since it last went well for a window */
    uint32_t tries;
    uint64_t tried_ns;
    uint64_t due_ns;
};

struct cox_recovery_rank {
    /* by its hook; during a try of a new one, too */
    bool dead;
    /* it was killed by order, or for being late, which counts by itself */
    bool expected;
    /* whoever ordered it replaced is still there, and sees to its death */
    bool ordered;
    /* and that is to be said once it is initialized */
    bool replaced;
    uint64_t died_ns;
    struct cox_backoff backoff;
    /* as the hook told it, with its last lines */
    char death[1024];
    /* without */
    char how[512];
    /* replaced: by what */
    char news[768];
};

/* On its caller's stack. */
struct cox_recovery_order {
    struct cox_recovery_order *next;
    bool is_restart;
    enum cox_recover_command command;
    struct cox_recover_result *results;
    uint32_t rank;
    bool kill;
    /* before its turn; 0: not */
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
    /* a rank is not replaced alone */
    bool whole;
    pthread_t thread;
    bool joined;
    /* the thread's */
    struct cox_rank_status *statuses;

    /* everything below; not held over anything that waits */
    pthread_mutex_t lock;
    /* anything below has changed */
    pthread_cond_t wake;
    bool stopped;
    bool cancelled;
    /* the executor stops */
    bool closing;
    bool failed;
    struct cox_error failure;
    /* of the tries that came to nothing */
    struct cox_error last;
    /* somebody knows of a death that was not told */
    bool look;
    /* the thread is inside the executor */
    bool busy;
    /* the engine is, by a command; or some ranks are */
    bool paused;
    /* and only some */
    bool partially_paused;
    /* a rank was replaced, and init not replayed since */
    bool unready;
    /* times that the group was not as before, and of those await has told */
    uint64_t changes, changes_seen;
    char doing[160];
    struct cox_recovery_order *orders;
    struct cox_recovery_rank *ranks;
    struct cox_backoff all, replay;
    /* since when tries fail for want of space, memory or fds; 0: they do not */
    uint64_t want_ns;
    /* tries of the policy in a row that ended at their deadline */
    uint32_t hangs;
    /* when: the last restart_max + 1 of them, a ring */
    uint64_t *deaths;
    uint64_t death_count;
};

/* Around a call of the executor: enter gives the lock up, leave takes it again, and knows the ranks
 * as they are then. Returns r. */
void cox_recovery_enter(struct cox_recovery *recovery);
int cox_recovery_leave(struct cox_recovery *recovery, int r);

/* A new process for one rank, or for all; and the init said again. Return as the executor's. */
int cox_recovery_replace(struct cox_recovery *recovery, uint32_t number, uint64_t deadline_ns,
                         struct cox_error *err);
int cox_recovery_replace_all(struct cox_recovery *recovery, uint64_t deadline_ns,
                             struct cox_error *err);
int cox_recovery_replay(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err);

/* From any thread. */
void cox_recovery_died(struct cox_recovery *recovery, struct cox_recovery_rank *rank,
                       const char *text);
/* NULL: none is dead. From any thread. */
struct cox_recovery_rank *cox_recovery_first_dead(struct cox_recovery *recovery);
/* Within the window; more than restart_max are one more. From any thread. */
uint32_t cox_recovery_recent_deaths(const struct cox_recovery *recovery);
/* It has failed, or what it made is dead: when may it be tried again? From any thread. */
void cox_recovery_back_off(const struct cox_recovery *recovery, struct cox_backoff *backoff);

/* When the policy has something to do: 0: now; COX_DEADLINE_NEVER: nothing. From any thread. */
uint64_t cox_recovery_turn_due(struct cox_recovery *recovery);
/* Does it. */
void cox_recovery_turn(struct cox_recovery *recovery);
/* Looks for ranks that have left the group, of which nobody tells. */
void cox_recovery_look(struct cox_recovery *recovery);
/* Carries out the first order, and tells its caller. */
void cox_recovery_order_run(struct cox_recovery *recovery, struct cox_recovery_order *order);

#endif
