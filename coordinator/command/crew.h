/*
 * crew: the group that a command runs: started, initialized, its workers' output shown, ended by a
 * signal.
 *
 * Standard error gets every line of a worker as "[rank 2] text". SIGINT, SIGTERM and SIGHUP,
 * those of them that were not ignored at the start, are blocked in every thread and taken by one
 * thread of the crew: the first one asks for an orderly stop (so does coxswain stop), the second
 * one kills the workers, removes the names and kills this process, at once.
 *
 * Threads: start and free from the main thread, before any other thread exists; the rest from any.
 * Ownership: options are borrowed until start returns.
 * Blocks: start until every rank attached and answered, or the start timeout; free until the
 *   workers have ended.
 * If the process dies: as executor.h.
 */
#ifndef COX_COORDINATOR_CREW_H
#define COX_COORDINATOR_CREW_H

#include "coordinator/executor/operations.h"
#include "options.h"

struct cox_crew;
struct cox_lora;
struct cox_group_links;
struct cox_control_server;

struct cox_crew_options {
    const struct cox_group_choice *group;
    /* argv of every worker, NULL-terminated */
    const char *const *command;
    /* none is started: they log on at the door */
    bool external;
    /* it is there to be talked to */
    bool need_door;
    /* append none to command */
    bool no_flags;
    /* told at init; NULL: not told */
    const char *model;
    /* send MODEL_INIT */
    bool init;
    /* told at init beside the model */
    const struct cox_config_entry *config;
    size_t config_count;
    /* load model here, once, for all ranks (shared_weights.h) */
    bool share_weights;
    /* what workers write is not shown */
    bool quiet;
    /* of prompts of others: why; static storage */
    const char *refusal;
};

/* Commands at the group's door are served from the start of its workers on, until they have ended;
 * prompts are refused unless the service is told otherwise. Returns 0; what cox_executor_start and
 * cox_executor_init return; COX_CLOSED: a signal came, and *ret_signal is its number. Nothing is
 * left unless 0. */
int cox_crew_start(const struct cox_crew_options *options, struct cox_crew **ret_crew,
                   int *ret_signal, struct cox_error *err);
/* Ends the workers and gives the signals back. NULL-safe, returns NULL. */
struct cox_crew *cox_crew_free(struct cox_crew *crew);
void cox_crew_freep(struct cox_crew **crew); /* for _cox_cleanup_ */

/* Fds that a coordinator and its ranks take, those that are open only while a rank starts or
 * attaches included, and those for a model's weights that all ranks share; multi/commands starts
 * groups with exactly so many. */
#define COX_CREW_FDS_OF_WEIGHTS 9
uint64_t cox_crew_fd_count(uint32_t rank_count, bool sealed, bool weights);

/* Says warnings and errors on standard error. */
struct cox_log cox_crew_log(void);
struct cox_control_server *cox_crew_service(struct cox_crew *crew);
struct cox_executor *cox_crew_executor(struct cox_crew *crew);
/* Of the group's ranks, from start to free; what it does with a death is in the group's choice. */
struct cox_recovery *cox_crew_recovery(struct cox_crew *crew);
/* The adapters of the ranks, likewise. */
struct cox_lora *cox_crew_lora(struct cox_crew *crew);
/* Of the group with others; told again to ranks that were replaced. */
struct cox_group_links *cox_crew_links(struct cox_crew *crew);
struct cox_scheduler_options;
/* A scheduler with these goes on when the group was recovered, and tells of other weights. */
void cox_crew_recovers(struct cox_crew *crew, struct cox_scheduler_options *options);
/* All zero without init. */
const struct cox_init_summary *cox_crew_summary(const struct cox_crew *crew);

/* fn is called once, from another thread, when a signal asks for the end; at once if it already
 * has. NULL: nobody. On return the function before runs no more. */
void cox_crew_on_stop(struct cox_crew *crew, void (*fn)(void *context), void *context);
/* The signal that asked for the end, 0: none did. coxswain stop counts as SIGTERM. */
int cox_crew_signal(struct cox_crew *crew);
/* Waits for a signal, or until the group has failed: by a worker's death that is not made good.
 * Returns the signal, or COX_PEER_DEAD as a negative number with its text. */
int cox_crew_wait(struct cox_crew *crew, struct cox_error *err);

#endif
