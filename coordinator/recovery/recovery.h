/*
 * recovery: keeps a group able to run steps: replaces ranks that died, by a policy or by order, and
 * carries out recovery commands, one thing at a time on a thread of its own.
 *
 * A replacement: the dead ranks are started again (or waited for, where workers are started by
 * hand), then the last init is replayed on all. Whatever dies meanwhile is replaced in the next
 * turn. Between two tries of the same rank lies a pause that doubles, from backoff_min_ms to
 * backoff_max_ms; more than restart_max deaths within window_ms are a crash loop: the group has
 * failed. A try that fails for want of space in /dev/shm, memory, fds or processes is no death: it
 * is made again, after such pauses, until such wants have lasted for window_ms. The group has
 * failed as well when a replacement fails for a reason that will not go away, or when more than
 * restart_max tries in a row end at their deadline. Ranks that live and do not reply the init in
 * time are killed, the new ones first.
 *
 * Threads: start, stop and free from one thread; the rest from any, but inside the executor's hooks
 *   only death, cancel and status.
 * Ownership: the executor is borrowed until stop.
 * Blocks: await and the commands as they say; stop until a restart under way has been given up,
 *   which is at once where the executor was stopped before, and otherwise after restart_ms at most;
 *   where somebody has to log on by hand, it is only then.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_RECOVERY_H
#define COX_COORDINATOR_RECOVERY_H

#include "coordinator/executor/operations.h"
#include "restart_policy.h"

/* 0: default. */
struct cox_recovery_options {
    struct cox_restart_policy policy;
    /* one try: start, attach, init; default 60,000; hand-started: no limit on who logs on */
    uint64_t restart_ms;
    /* workers are started by hand */
    bool external;
    /* 4: something went wrong; 5: something was made good */
    struct cox_log log;
    /* The group has failed, and why; once, on recovery's thread. */
    void (*failed)(void *context, const struct cox_error *error);
    /* On recovery's thread, after an init was replayed: gives the ranks what else they had. Not 0:
     * the group is not able to run steps yet, as when the init had failed so. NULL: they had
     * nothing else. */
    int (*replayed)(void *context, uint64_t deadline_ns, struct cox_error *err);
    void *context;
};

struct cox_recovery;

/* Returns 0; -ENOMEM; -errno. */
int cox_recovery_start(struct cox_executor *executor, const struct cox_recovery_options *options,
                       struct cox_recovery **ret_recovery, struct cox_error *err);
/* Gives up what is under way, wakes who waits with COX_CLOSED. Idempotent. */
void cox_recovery_stop(struct cox_recovery *recovery);
struct cox_recovery *cox_recovery_free(struct cox_recovery *recovery); /* NULL-safe */

/* A rank has died: from the executor's death hook. Never blocks. */
void cox_recovery_death(struct cox_recovery *recovery, uint32_t rank, const char *text);

/* For cox_engine_loop_options.recover: sleeps while a rank is dead or being replaced, a recovery
 * command runs, or the group is paused. err, on entry: what made the caller ask; a COX_PEER_DEAD is
 * believed, and its death waited for. Returns 0: nothing was wrong; 1: it was since the last call,
 * and is no more; COX_PEER_DEAD: the group has failed, err tells; COX_CLOSED: stopped, or cancel
 * was called. For one caller. */
int cox_recovery_await(struct cox_recovery *recovery, struct cox_error *err);
/* From now on await returns COX_CLOSED at once: nobody needs the group any more. Never blocks. */
void cox_recovery_cancel(struct cox_recovery *recovery);

/* One recovery command, as cox_executor_recover, except that it waits for its turn, and that a
 * command which has been carried out already (pause in PAUSE, reinit in READY, start in NORMAL) is
 * 0 and asks nobody (results: 0, "already"). COX_TIMEOUT: its turn did not come either; COX_CLOSED:
 * stopped meanwhile. */
int cox_recovery_command(struct cox_recovery *recovery, enum cox_recover_command command,
                         uint64_t deadline_ns, struct cox_recover_result *ret_results,
                         struct cox_error *err);
/* Replaces a dead rank now, whatever the policy, limit and back-off. kill: a living one as well.
 * Returns 0, also when it lives and nothing is to be done (*ret_replaced: false); COX_PEER_DEAD:
 * also when the group has failed before; what cox_executor_restart and cox_executor_replay_init
 * return. Init is replayed once no rank is dead any more. Legacy groups: all ranks. */
int cox_recovery_restart(struct cox_recovery *recovery, uint32_t rank, bool kill,
                         uint64_t deadline_ns, bool *ret_replaced, struct cox_error *err);

struct cox_recovery_status {
    enum cox_on_death on_death;
    /* "", "replacing rank 2", "waiting for rank 2 to log on: ...", "pausing 400 ms before the next
     * try", "waiting for what a replacement needs: ..." */
    char doing[160];
    /* within window_ms */
    uint32_t recent_deaths;
    uint32_t restart_max;
    /* a rank was replaced, and init not replayed since: no order for a dead rank makes that good */
    bool unready;
};
void cox_recovery_status(struct cox_recovery *recovery, struct cox_recovery_status *ret_status);

#endif
