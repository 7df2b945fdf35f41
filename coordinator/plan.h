/*
 * plan: which sequences the next step computes. Continuous batching without any input or output.
 *
 * A sequence waits, runs, and is done:
 *
 *     add -> WAITING -(admitted: slot and blocks)-> RUNNING -(end token, length, failure)-> DONE
 *               ^                                      |
 *               '------(pool dry: youngest first)------'
 *
 * next fills a step; exactly one of commit or revert follows before the next one. After a revert
 * the ranks' tables count for nothing: the next step has base 0, and every running sequence is
 * announced again and recomputed from position 0. A sequence is announced in the first step that
 * has a row of it, so a step stays within its limits then, too.
 *
 * Threads: one at a time.
 * Blocks: nothing; allocates in new and add only.
 * Ownership: the plan copies requests; a step and all it points to is lent until commit or revert;
 *   done sequences are given by cox_plan_done and freed with cox_sequence_free.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_PLAN_H
#define COX_COORDINATOR_PLAN_H

#include "blocks.h"

#define COX_STOP_COUNT_MAX 8

struct cox_plan;

struct cox_plan_options {
    uint32_t sequence_count_max; /* running at a time, and rows of one step */
    uint32_t token_count_max;    /* computed in one step; longer prompts go in chunks */
    uint32_t block_count;
    uint32_t block_size;         /* positions per block */
    uint32_t position_count_max; /* positions 0 to this - 1 exist */
    size_t request_size_max;     /* bytes of one step on the wire, at most; 0: no limit */
    bool nested; /* the form of legacy workers: a step is all prefill or all decode, and no prompt
                    is cut */
};

struct cox_sampling_choice {
    float temperature; /* 0: greedy */
    float top_p;       /* 1: off */
    int32_t top_k;     /* 0: off */
    int32_t seed;
};

struct cox_request {
    const int32_t *tokens; /* the prompt */
    uint32_t token_count;
    uint32_t new_count_max; /* tokens to generate, at most; at least 1 */
    bool shorten; /* generate fewer when the cache or the positions end earlier, instead of a
                     refusal */
    struct cox_sampling_choice sampling;
    int32_t stop_tokens[COX_STOP_COUNT_MAX];
    uint32_t stop_count;
    const char *lora; /* the adapter that computes it; NULL: none. Copied */
    void *context;    /* handed back with the result */
};

enum cox_finish {
    COX_FINISH_STOP,   /* a stop token, which is the last of the tokens, or the worker said so */
    COX_FINISH_LENGTH, /* new_count_max */
    COX_FINISH_ERROR,  /* error tells why */
};

struct cox_sequence {
    struct cox_sequence *next;  /* in the waiting or the done list */
    struct cox_request request; /* tokens is NULL: they are below; lora is the sequence's own */
    int64_t id;                 /* from 1 */
    int32_t *tokens;            /* prompt, then what was generated */
    uint32_t prompt_count;
    uint32_t token_count;
    uint32_t token_end; /* token_count, at most */
    uint32_t computed;  /* positions whose keys and values are in the cache */
    int32_t *blocks;    /* its table */
    uint32_t block_count;
    uint32_t told_count;    /* blocks the ranks know of */
    uint32_t slot;          /* while running */
    bool known;             /* the ranks' tables hold it */
    enum cox_finish finish; /* when done */
    struct cox_error error; /* COX_FINISH_ERROR */
};
struct cox_sequence *cox_sequence_free(struct cox_sequence *sequence); /* NULL-safe */

/* Values of ForwardType. */
enum cox_step_kind {
    COX_STEP_PREFILL = 0,
    COX_STEP_DECODE = 1,
    COX_STEP_MIXED = 3,
    COX_STEP_DUMMY = 5, /* no rows */
};

struct cox_step_row {
    const struct cox_sequence *sequence;
    uint32_t position; /* of the first token to compute */
    uint32_t count;    /* tokens to compute */
    bool announce;     /* the ranks do not know the sequence */
    bool emit;         /* its next token is sampled */
};

struct cox_step {
    uint64_t base; /* sequence number of the step the ranks' tables stand at; 0: they are emptied
                      first */
    enum cox_step_kind kind;
    const struct cox_step_row *rows;
    uint32_t row_count;
    uint32_t token_count;           /* over all rows */
    const uint32_t *finished_slots; /* ended since the last step; none when base is 0, or nested */
    uint32_t finished_count;
    uint32_t running_count;
    uint32_t waiting_count;
};

struct cox_plan_stats {
    uint64_t prompt_tokens; /* computed, recomputed ones included */
    uint64_t generated_tokens;
    uint64_t preemptions;
};

/* Returns 0; COX_INVALID: a limit of 0, or a frame too small for any step; -ENOMEM. */
int cox_plan_new(const struct cox_plan_options *options, struct cox_plan **ret_plan,
                 struct cox_error *err);
struct cox_plan *cox_plan_free(struct cox_plan *plan); /* NULL-safe; frees every sequence in it */

/* Queues a request. One that can never run is done at once, with an error. Returns 0 or -ENOMEM. */
int cox_plan_add(struct cox_plan *plan, const struct cox_request *request);

/* Gives the next step. Returns 0, or COX_EMPTY: nothing waits or runs. */
int cox_plan_next(struct cox_plan *plan, const struct cox_step **ret_step);
/* Gives a step without rows, which tells the ranks what a step tells beside them. */
void cox_plan_next_empty(struct cox_plan *plan, const struct cox_step **ret_step);
/* The step ran as number `sequence`. tokens: one per row, looked at where the row emits; ended: not
 * 0 where the worker ended the sequence (NULL: nowhere). Returns 0, or COX_CORRUPT: a token below
 * 0; nothing is done then. */
int cox_plan_commit(struct cox_plan *plan, uint64_t sequence, const int32_t *tokens,
                    const uint8_t *ended, struct cox_error *err);
/* The step had no effect, or nobody knows what it had. */
void cox_plan_revert(struct cox_plan *plan);

/* Takes the oldest sequence that is done, NULL: none. */
struct cox_sequence *cox_plan_done(struct cox_plan *plan);
/* Ends everything that waits or runs with an error; a step in flight counts as reverted. */
void cox_plan_fail(struct cox_plan *plan, int code, const char *text);

/* Ends what waits or runs for this context, if there is any, with COX_CLOSED; it is done then. Not
 * between next and commit or revert. */
void cox_plan_cancel(struct cox_plan *plan, const void *context);

/* Sequences that ended and of which no step has told (nested: none ever does); *ret_ids is lent
 * until the next call. told forgets them, when the ranks have heard otherwise. With the nested form
 * that has to be before every next. */
uint32_t cox_plan_untold(const struct cox_plan *plan, const int64_t **ret_ids);
void cox_plan_told(struct cox_plan *plan);

void cox_plan_stats(const struct cox_plan *plan, struct cox_plan_stats *ret_stats);
/* Blocks not taken; for tests of leaks. */
uint32_t cox_plan_free_blocks(const struct cox_plan *plan);

#endif
