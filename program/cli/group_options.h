/*
 * group_options: the options shared by commands that start a group: number of ranks, worker, sizes.
 *
 * Threads: one.
 * Blocks: nothing.
 * Ownership: strings are argv's, or static storage, or in the struct.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_GROUP_OPTIONS_H
#define COX_PROGRAM_GROUP_OPTIONS_H

#include "channel/attach/attach.h"
#include "runner.h"

#include <coxswain/executor.h>
#include <coxswain/server.h>

#include <limits.h>
#include <stdio.h>

#define COX_GROUP_CHOICE_RANK_COUNT_DEFAULT 2
/* The default worker. */
#define COX_REFERENCE_WORKER "coxswain-worker"
/* Words of a --worker that has arguments, at most. */
#define COX_WORKER_WORD_COUNT_MAX 30

struct cox_group_choice {
    uint32_t rank_count;
    bool rank_count_given;
    /* NULL: made of the process id */
    const char *name;
    /* 0: default */
    uint32_t depth;
    enum cox_spin spin;
    bool legacy_workers;
    enum cox_attach attach;
    bool no_large_payloads;
    /* NULL: $COXSWAIN_CRASH_DIR, or none */
    const char *crash_dir;
    bool crash_contents;
    /* for requests and for replies; 0: default */
    uint64_t large_payload_size;
    uint64_t request_size[COX_CHANNEL_COUNT];
    uint64_t response_size[COX_CHANNEL_COUNT];
    /* 0: default */
    uint64_t start_timeout_ms;
    /* 0: default */
    uint64_t step_ms;
    /* --on-death and its parameters; 0: default. Only for commands with cox_death_option_group. */
    struct cox_restart_policy recovery;
    /* NULL: looked up */
    const char *worker;
    /* NULL: looked up */
    const char *model;
    /* the results of the look-ups */
    char crash_path[PATH_MAX];
    char worker_path[PATH_MAX];
    char worker_text[PATH_MAX];
    const char *worker_command[COX_WORKER_WORD_COUNT_MAX + 3];
    char model_path[PATH_MAX];
};

/* Options of a struct cox_group_choice: its layout; its workers; the policy for deaths. */
extern const struct cox_option_group cox_layout_option_group;
extern const struct cox_option_group cox_start_option_group;
extern const struct cox_option_group cox_death_option_group;

void cox_group_choice_init(struct cox_group_choice *options);
/* --crash-dir, $COXSWAIN_CRASH_DIR; NULL: none. */
const char *cox_group_choice_crash_dir(const struct cox_group_choice *options);
/* $COXSWAIN_STACKS: "off" is on request. */
enum cox_stacks_use cox_group_choice_stacks(void);
/* What a group of these options can do (channel/attach/attach.h). */
const struct cox_attach_limits *cox_group_choice_limits(const struct cox_group_choice *options);
/* Returns 0 or COX_INVALID. */
struct cox_geometry;
int cox_group_choice_geometry(const struct cox_group_choice *options,
                              struct cox_geometry *ret_geometry, struct cox_error *err);
/* Checks name, sizes, depth and combinations before anything is created. Returns 0 or COX_INVALID.
 */
int cox_group_choice_check(const struct cox_group_choice *options, struct cox_error *err);
/* Whether a worker found by cox_worker_find is the reference worker, by the name of its file. */
bool cox_worker_is_reference(const char *worker);
/* --worker, $COXSWAIN_WORKER, coxswain-worker beside this program, or in PATH. Returns 0;
 * COX_EXEC_FAILED. */
int cox_worker_find(struct cox_group_choice *options, const char **ret_path, struct cox_error *err);
/* The command that starts a worker found by cox_worker_find: the worker, --model and the model, and
 * NULL. A worker with blanks that is no file is a program and its arguments. The result is part of
 * options. Returns 0 or COX_INVALID. */
int cox_worker_command(struct cox_group_choice *options, const char *worker, const char *model,
                       const char *const **ret_command, struct cox_error *err);
/* --model; ../share/coxswain/models/sums, from this program; models/sums in a folder above it.
 * Returns 0; COX_NOT_FOUND: no such folder; -errno. */
int cox_model_find(struct cox_group_choice *options, const char **ret_path, struct cox_error *err);

#endif
