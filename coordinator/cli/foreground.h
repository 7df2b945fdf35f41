/*
 * foreground: a group that a command starts and serves: its workers' output on standard error, the
 * end by signals.
 *
 * Standard error gets every line of a worker as "[rank 2] text". SIGINT, SIGTERM and SIGHUP, those
 * of them that were not ignored at the start, are blocked in every thread and taken by one thread:
 * the first one asks for an orderly stop (so does coxswain stop), the second one kills the workers,
 * removes the names and kills this process, at once.
 *
 * Threads: new, start and free from the main thread, new before any other thread exists; the rest
 *   from any.
 * Ownership: options are borrowed until start returns, hooks until free.
 * Blocks: start and free as cox_server_start and cox_server_free.
 * If the process dies: as server.h.
 */
#ifndef COX_COORDINATOR_FOREGROUND_H
#define COX_COORDINATOR_FOREGROUND_H

#include "coordinator/server/server.h"
#include "options.h"

struct cox_foreground;

struct cox_foreground_options {
    const struct cox_group_choice *group;
    /* argv of every worker, NULL-terminated */
    const char *const *command;
    /* none is started: they log on at the control socket */
    bool external;
    /* it is there to be talked to */
    bool need_socket;
    /* append none to command */
    bool no_flags;
    /* told at init; NULL: not told */
    const char *model;
    /* send MODEL_INIT */
    bool init;
    /* told at init beside the model */
    const struct cox_config_entry *config;
    size_t config_count;
    /* the engine has the model's weights in memory that all ranks share, which takes fds */
    bool shared_weights;
    /* Called with the context of hooks before anything of the group is made. Not 0: start returns
     * it. NULL: there is nothing to prepare. */
    int (*prepare)(void *context, struct cox_error *err);
    /* links to other groups, and the role; 0: standard */
    bool links;
    uint32_t role;
    /* what workers write is not shown */
    bool quiet;
    /* of prompts of clients: why; static storage */
    const char *prompts_refusal;
    const struct cox_server_hooks *hooks;
};

/* Takes the signals, and starts the console. Returns 0; -ENOMEM; -errno. */
int cox_foreground_new(struct cox_foreground **ret_foreground, struct cox_error *err);
/* Starts the group, and serves it at its control socket. Returns 0; what cox_server_new and
 * cox_server_start return; COX_CLOSED: a signal came. Unless 0, free is all that may follow. */
int cox_foreground_start(struct cox_foreground *foreground,
                         const struct cox_foreground_options *options, struct cox_error *err);
/* Ends the workers and gives the signals back. NULL-safe, returns NULL. */
struct cox_foreground *cox_foreground_free(struct cox_foreground *foreground);
void cox_foreground_freep(struct cox_foreground **foreground); /* for _cox_cleanup_ */

/* Fds that a coordinator and its ranks take, those that are open only while a rank starts or
 * attaches included, and those for a model's weights that all ranks share; multi/commands starts
 * groups with exactly so many. */
#define COX_FOREGROUND_FDS_OF_WEIGHTS 9
uint64_t cox_foreground_fd_count(uint32_t rank_count, bool sealed, bool weights);

/* Says warnings and errors on standard error; the other one what was made good, too, unless quiet.
 */
struct cox_log cox_foreground_log(void);
struct cox_log cox_foreground_full_log(struct cox_foreground *foreground);
/* From a start that returned 0 to free. */
struct cox_server *cox_foreground_server(struct cox_foreground *foreground);

/* fn is called once, from another thread, when a signal asks for the end; at once if it already
 * has. NULL: none. On return the previous function runs no more. */
void cox_foreground_on_stop(struct cox_foreground *foreground, void (*fn)(void *context),
                            void *context);
/* The signal that asked for the end, 0: none did. coxswain stop counts as SIGTERM. */
int cox_foreground_signal(struct cox_foreground *foreground);
/* Waits for a signal, or until the group has failed: by a worker's death that is not made good.
 * Returns the signal, or COX_PEER_DEAD as a negative number with its text. */
int cox_foreground_wait(struct cox_foreground *foreground, struct cox_error *err);

#endif
