/*
 * prompts: a list of texts to complete, in input order, and their results.
 *
 * Threads: one at a time; complete calls `ready` on its caller's thread.
 * Ownership: the list owns everything in it.
 * Blocks: load reads a file; complete, until every prompt is done or the group fails.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_PROMPTS_H
#define COX_PROGRAM_PROMPTS_H

#include "engine_group.h"
#include "engine/model/tokenizer.h"

struct cox_prompt {
    char *text;
    int32_t *tokens;
    uint32_t token_count;
    /* when done */
    int32_t *new_tokens;
    uint32_t new_count;
    /* NULL without a tokenizer */
    char *new_text;
    enum cox_finish finish;
    /* for COX_FINISH_ERROR; code: 0 if it was abandoned */
    char *error;
    int code;
    bool done;
    /* the group ended before it was done; error says why */
    bool abandoned;
};

struct cox_prompts {
    struct cox_prompt *items;
    size_t count;
    size_t capacity;
};

void cox_prompts_deinit(struct cox_prompts *prompts); /* idempotent; a zeroed struct is fine */
/* Dups size bytes of text. Returns 0 or -ENOMEM. */
int cox_prompts_add(struct cox_prompts *prompts, const char *text, size_t size);
/* Reads one prompt per line; path "-" is standard input.
 * Returns
 *   0
 *   COX_INVALID: no line, an empty one, or one with a 0 byte
 *   COX_NOT_FOUND
 *   -errno
 */
int cox_prompts_load(struct cox_prompts *prompts, const char *path, struct cox_error *err);
/* Encodes every text. Without a tokenizer the texts are token ids below vocab_size (0: unknown),
 * separated by blanks or commas. Returns 0, or COX_INVALID: err has the prompt's number. */
int cox_prompts_encode(struct cox_prompts *prompts, const struct cox_tokenizer *tokenizer,
                       uint32_t vocab_size, struct cox_error *err);

struct cox_complete_options {
    /* limits; the rest is set from the ranks' init replies */
    struct cox_engine_loop_options engine_loop;
    struct cox_prompt_sampling sampling;
    /* 0: 256, or what fits */
    uint32_t new_count_max;
    int32_t stop_tokens[COX_EOS_COUNT_MAX];
    uint32_t stop_count;
    /* the adapter of all prompts, on a running group; NULL: none */
    const char *lora;
    /* NULL: no text */
    const struct cox_tokenizer *tokenizer;
    bool progress;
    /* on a running group: give up after so long without a reply; 0: never */
    uint64_t timeout_ms;
    /* Called for the prompts in order, each as soon as it and all before it are done. When the
     * group fails or a signal arrives, it is called once for each of the rest, done or abandoned.
     * Not 0 ends the run with COX_CLOSED. */
    int (*ready)(void *context, size_t index, const struct cox_prompt *prompt);
    void *ready_context;
};

/* Runs all prompts on the group. ret_stats is always filled once the group ran.
 * Returns
 *   0: also when single prompts failed
 *   COX_CLOSED: a signal, or ready returned not 0
 *   as cox_engine_loop_run
 */
int cox_prompts_complete(struct cox_prompts *prompts, struct cox_engine_group *group,
                         const struct cox_complete_options *options,
                         struct cox_engine_loop_stats *ret_stats, struct cox_error *err);

/* ---- for callers that get the replies in other ways ---- */

/* new_count_max, or its default. */
uint32_t cox_complete_new_count(const struct cox_complete_options *options);

struct cox_prompt_result {
    enum cox_finish finish;
    /* the new ones */
    const int32_t *tokens;
    uint32_t token_count;
    /* for COX_FINISH_ERROR */
    int code;
    const char *text;
};

/* Initialise prompts and options, and the rest to zero. */
struct cox_prompts_run {
    struct cox_prompts *prompts;
    const struct cox_complete_options *options;
    size_t done_count;
    /* tokens generated so far */
    uint64_t new_count;
    /* passed to ready */
    size_t ready_count;
    /* cancelled by ready */
    bool cancelled;
    /* the whole run; the result of the run reports it */
    bool failed;
    /* first failure to store a result */
    int status;
};

/* Shows progress, if it is wanted; also once at the beginning, from when its times are. */
void cox_prompts_run_progress(const struct cox_prompts_run *run);
/* Dups the result of a prompt that is not done, and calls ready where possible. */
void cox_prompts_take(struct cox_prompts_run *run, struct cox_prompt *prompt,
                      const struct cox_prompt_result *result);
/* Returns true when no further result is wanted. */
bool cox_prompts_run_ends(const struct cox_prompts_run *run);
/* Ends the run with r and error. Calls ready for the rest, and returns what complete returns. */
int cox_prompts_run_end(struct cox_prompts_run *run, int r, const struct cox_error *error,
                        struct cox_error *err);

#endif
