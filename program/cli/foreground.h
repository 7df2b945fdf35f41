/*
 * foreground: a group that a command starts and serves. Prints the output of its workers on
 * standard error, and ends it at a signal.
 *
 * Standard error gets every line of a worker as "[rank 2] text". SIGINT, SIGTERM and SIGHUP, those
 * of them that were not ignored at the start, are blocked in every thread and taken by one thread:
 * the first one starts an orderly stop (as coxswain stop does), the second one kills the workers,
 * removes the names and kills this process at once.
 *
 * Threads: new, start and free from the main thread, new before any other thread exists; the rest
 *   from any.
 * Ownership: options are borrowed until start returns, hooks until free.
 * Blocks: start and free as cox_server_start and cox_server_free.
 * If the process dies: as server.h.
 */
#ifndef COX_PROGRAM_FOREGROUND_H
#define COX_PROGRAM_FOREGROUND_H

#include "channel/base/idioms.h"

#include <coxswain/server.h>
#include "group_options.h"

struct cox_foreground;

struct cox_foreground_options {
    const struct cox_group_choice *group;
    /* argv of every worker, NULL-terminated */
    const char *const *command;
    /* no worker is started: they connect to the control socket */
    bool external;
    /* the command is useless without a control socket */
    bool need_socket;
    /* sent with the init; NULL: not sent */
    const char *model;
    /* sent with the init, beside the model */
    const struct cox_config_entry *config;
    size_t config_count;
    /* the engine keeps the model's weights in memory that all ranks share, which needs fds */
    bool shared_weights;
    /* Called with the context of hooks before anything of the group is made. Not 0: start returns
     * it. NULL: there is nothing to prepare. */
    int (*prepare)(void *context, struct cox_error *err);
    /* links to other groups, and the role; 0: standard */
    bool links;
    uint32_t role;
    /* the workers' output is dropped */
    bool quiet;
    /* why clients' prompts are refused; lent until free */
    const char *prompts_refusal;
    const struct cox_server_hooks *hooks;
    /* the ranks are on these; NULL: on this machine */
    const struct cox_executor_nodes *nodes;
};

/* Blocks the signals, starts the thread that takes them, and the console. Returns 0; -ENOMEM;
 * -errno. */
int cox_foreground_new(struct cox_foreground **ret_foreground, struct cox_error *err);
/* Starts the group, and serves it at its control socket. Returns 0; what cox_server_new and
 * cox_server_start return; COX_CLOSED: a signal has ended it. On failure only free may follow. */
int cox_foreground_start(struct cox_foreground *foreground,
                         const struct cox_foreground_options *options, struct cox_error *err);
/* Ends the workers and unblocks the signals. NULL-safe, returns NULL. */
struct cox_foreground *cox_foreground_free(struct cox_foreground *foreground);
COX_DEFINE_FREEP(struct cox_foreground, cox_foreground_free);

/* Fds that a coordinator and its ranks use, including those that are open only while a rank starts
 * or attaches, and those for shared weights. multi/commands_doctor starts groups with exactly this
 * many. */
#define COX_FOREGROUND_FDS_OF_WEIGHTS 9
uint64_t cox_foreground_fd_count(uint32_t rank_count, bool sealed, bool weights);

/* Prints warnings and errors on standard error; the full log prints recoveries, too, unless
 * quiet.
 */
struct cox_log cox_foreground_log(void);
struct cox_log cox_foreground_full_log(struct cox_foreground *foreground);

/* fn is called once, from another thread, when a signal asks for the end; at once if it already
 * has. NULL: none. On return the previous function runs no more. */
void cox_foreground_on_stop(struct cox_foreground *foreground, void (*fn)(void *context),
                            void *context);
/* The signal that ended the command; 0: none did. coxswain stop counts as SIGTERM. */
int cox_foreground_signal(struct cox_foreground *foreground);
/* Waits for a signal, or until the group has failed: by a worker's death without a recovery.
 * Returns the signal, or COX_PEER_DEAD as a negative number with its text. */
int cox_foreground_wait(struct cox_foreground *foreground, struct cox_error *err);

#endif
