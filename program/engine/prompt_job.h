/*
 * prompt_job: the prompts of a command, and the group that completes them: a running one, a prefill
 * and a decode group that run, or one that is started for them with defaults.
 *
 * Threads: one.
 * Ownership: the job owns what it loads; strings of options are argv's.
 * Blocks: run, until every prompt is done, the group has failed, or a signal arrives.
 * If the process dies: a running group cancels the prompts; a started one ends.
 */
#ifndef COX_PROGRAM_PROMPT_JOB_H
#define COX_PROGRAM_PROMPT_JOB_H

#include "init_options.h"
#include "prefill_decode.h"
#include "program/cli/group_options.h"
#include "prompts.h"

struct cox_prompt_job {
    /* of the command, for errors; static storage */
    const char *command;
    /* of a started group; its name is that of a running one, NULL: a group is started */
    struct cox_group_choice group;
    struct cox_init_choice init;
    /* running groups; NULL: one group completes the prompts */
    const char *prefill, *decode;
    /* neither the workers' output nor progress nor a summary */
    bool quiet;
    /* prompts are token ids */
    bool tokens;
    /* prompts are typed at the terminal, and added by run */
    bool dialog;
    struct cox_prompts prompts;
    /* run sets what the group and its model decide */
    struct cox_complete_options complete;

    /* results, when finish is called */
    struct cox_engine_loop_stats stats;
    struct cox_prefill_decode_stats prefill_decode;
    /* the signal that ended the run; 0: none did */
    int signal_number;

    /* private */
    struct cox_tokenizer *tokenizer;
    uint32_t vocab_size;
    char *model;
};

/* -n, --name, --model, --worker, --legacy-workers, --init, --timeout and --quiet, of a struct
 * cox_prompt_job. */
extern const struct cox_option_group cox_prompt_job_option_group;

void cox_prompt_job_init(struct cox_prompt_job *job, const char *command);
void cox_prompt_job_deinit(struct cox_prompt_job *job);
/* Completes all prompts. finish is called once they were passed to a group, with the result of the
 * run: 0; COX_CLOSED; as cox_engine_loop_run. Returns the exit status: that of finish, or of what
 * went wrong before. */
int cox_prompt_job_run(struct cox_prompt_job *job,
                       int (*finish)(void *context, int r, const struct cox_error *error),
                       void *context);

#endif
