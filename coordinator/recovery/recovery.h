/*
 * recovery: keeps a group able to run steps. It replaces dead ranks, by a policy or on request, and
 * runs recovery commands, one at a time, on its own thread.
 *
 * A replacement starts the dead ranks again (or waits for them, if workers are external), then
 * replays the last init on all ranks. Ranks that die meanwhile are replaced in the next turn. The
 * pause between two attempts for the same rank doubles, from backoff_min_ms to backoff_max_ms. More
 * than restart_max deaths within window_ms are a crash loop: the group has failed. An attempt that
 * fails for lack of space in /dev/shm, memory, fds or processes does not count as a death: it is
 * repeated after such pauses until the lack has lasted for window_ms. The group has also failed if
 * a replacement fails for a permanent reason, or if more than restart_max attempts in a row end at
 * their deadline. Ranks that live and do not reply to the init in time are killed, the new ones
 * first.
 *
 * Threads: start, stop and free on one thread; the rest: any, but inside the executor's hooks only
 *   death, cancel and status.
 * Ownership: the executor is borrowed until stop.
 * Blocks: await and the commands as described there. stop until a restart in progress has been
 *   cancelled: at once if the executor was stopped before; otherwise after restart_ms at most, or,
 *   with external workers, without a limit.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_RECOVERY_H
#define COX_COORDINATOR_RECOVERY_H

#include <coxswain/requests.h>
#include <coxswain/server.h>

/* 0 means the default. */
struct cox_recovery_options {
    struct cox_restart_policy policy;
    /* time of one attempt: start, attach, init; default 60,000; no limit on the wait for external
     * workers */
    uint64_t restart_ms;
    /* workers are external */
    bool external;
    /* level 4: a failure; 5: a recovery */
    struct cox_log log;
    /* The group has failed, with the reason. Called once, on recovery's thread. */
    void (*failed)(void *context, const struct cox_error *error);
    /* Called on recovery's thread after an init was replayed: restores the ranks' other state.
     * Another result than 0: the group cannot run steps yet, as after an init that failed this way.
     * NULL: there is no other state. */
    int (*replayed)(void *context, uint64_t deadline_ns, struct cox_error *err);
    void *context;
};

struct cox_recovery;

/* Returns 0; -ENOMEM; -errno. */
int cox_recovery_start(struct cox_executor *executor, const struct cox_recovery_options *options,
                       struct cox_recovery **ret_recovery, struct cox_error *err);
/* Cancels the work in progress, and wakes waiters with COX_CLOSED. Idempotent. */
void cox_recovery_stop(struct cox_recovery *recovery);
struct cox_recovery *cox_recovery_free(struct cox_recovery *recovery); /* NULL-safe */

/* A rank has died; called by the executor's death hook. Never blocks. */
void cox_recovery_death(struct cox_recovery *recovery, uint32_t rank, const char *text);

/* For cox_engine_loop_options.recover: blocks while a rank is dead or being replaced, a recovery
 * command runs, or the group is paused. err, on entry: the failure that made the caller ask; after
 * COX_PEER_DEAD it waits for the report of that death. For one caller at a time.
 * Returns
 *   0: there was no failure
 *   COX_STALE: there was one since the last call, and it is recovered
 *   COX_PEER_DEAD: the group has failed, err says why
 *   COX_CLOSED: stopped, or cancel was called
 *   COX_TIMEOUT: the group was not able to run steps until deadline_ns
 */
int cox_recovery_await(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err);
/* From now on await returns COX_CLOSED at once, because no caller needs the group any more. Never
 * blocks. */
void cox_recovery_cancel(struct cox_recovery *recovery);

/* Runs one recovery command, like cox_executor_recover, with two differences: it waits for its
 * turn; and a command whose state is reached already (pause in PAUSE, reinit in READY, start in
 * NORMAL) returns 0 without asking a rank (results: 0, "already"). COX_TIMEOUT: also if its turn
 * did not come; COX_CLOSED: stopped meanwhile. */
int cox_recovery_command(struct cox_recovery *recovery, enum cox_recover_command command,
                         uint64_t deadline_ns, struct cox_recover_result *ret_results,
                         struct cox_error *err);
/* Replaces a dead rank now, regardless of policy, limit and back-off. kill: also a living one. Init
 * is replayed once no rank is dead. Legacy groups: all ranks.
 * Returns
 *   0: also when it lives and nothing was done (*ret_replaced: false)
 *   COX_PEER_DEAD: also when the group had failed before
 *   what cox_executor_restart and cox_executor_replay_init return
 */
int cox_recovery_restart(struct cox_recovery *recovery, uint32_t rank, bool kill,
                         uint64_t deadline_ns, bool *ret_replaced, struct cox_error *err);

struct cox_recovery_status {
    enum cox_on_death on_death;
    /* "", "replacing rank 2", "waiting for rank 2 to attach: ...", "pausing 400 ms before the next
     * try", "waiting for what a replacement needs: ..." */
    char doing[160];
    /* deaths within window_ms */
    uint32_t recent_deaths;
    uint32_t restart_max;
    /* a rank was replaced, and init was not replayed since: restarting a dead rank does not change
     * that */
    bool unready;
    /* of ranks that were replaced: from their death to the end of the replay of init */
    struct cox_phase_stats replacements;
};
void cox_recovery_status(struct cox_recovery *recovery, struct cox_recovery_status *ret_status);

/* "fail", "wait", "restart", "restart-all"; "unknown" outside. Static storage. */
const char *cox_on_death_name(uint32_t on_death);

#endif
