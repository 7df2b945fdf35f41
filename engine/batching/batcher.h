/*
 * batcher: which sequences the next step computes. Continuous batching without any input or output.
 *
 * A sequence waits, runs, and is done; one with a source is pulled before it runs:
 *
 *     add -> WAITING -(admitted: slot and blocks)-> RUNNING -(end token, length, failure)-> DONE
 *             ^ ^ |                                   | ^
 *             | | '-(it has a source)-> PULLING ------|-'
 *             | '-----(not pulled)---------' '--------|-------(pull_only, or it must not be
 *             computed)-> DONE '------(pool dry: youngest first)-------'
 *
 * The blocks of one that was asked to hold them stay taken when it is done, and its slot known to
 * the ranks: a hold, until it is released, its lease ends, the weights are others, or a step is
 * reverted, with which the ranks' tables are emptied. Blocks that a rank may still write to
 * although their pull has ended are nobody's until they are given back.
 *
 * next fills a step, publish says that it is on its way, commit that the oldest one on its way has
 * ended well. Up to step_count_max are on their way at a time:
 *
 *     next -> given -(publish)-> in flight -(commit, oldest first)-> over
 *               '--------------------'-----(revert: all of them)---> over
 *
 * A step is planned as if those in flight went well and ended no sequence: each token that a row
 * will give is pending until commit tells it. A sequence that the token ends all the same may have
 * rows in later steps. They give nothing, and its blocks and its slot are nobody else's before the
 * last of them is over. One that ends by length has none; nor has one that is preempted, which
 * happens only while no step is in flight. After a revert the ranks' tables count for nothing: the
 * next step has base 0, and every running sequence is announced again and recomputed from position
 * 0. A sequence is announced in the first step that has a row of it, so a step stays within its
 * limits then, too.
 *
 * Threads: one at a time.
 * Blocks: nothing; allocates in new and add only.
 * Ownership: the batcher copies requests; a step and its rows are lent until its commit or a
 *   revert, what else it points to until publish; done sequences are given by cox_batcher_done and
 *   freed with cox_sequence_free.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_BATCHER_H
#define COX_ENGINE_BATCHER_H

#include "blocks.h"
#include "kv_leases.h"
#include "coordinator/server/prompt_hooks.h"

struct cox_batcher;

struct cox_batcher_options {
    /* running at a time, and rows of one step */
    uint32_t sequence_count_max;
    /* computed in one step; longer prompts go in chunks */
    uint32_t token_count_max;
    uint32_t block_count;
    /* positions per block */
    uint32_t block_size;
    /* positions 0 to this - 1 exist */
    uint32_t position_count_max;
    /* bytes of one step on the wire, at most; 0: no limit */
    size_t request_size_max;
    /* at a time, besides those that run */
    uint32_t hold_count_max;
    /* Besides those, of sequences that have ended while a row of them was in flight: if there are
     * more, the next ones wait for their slots. */
    uint32_t parting_count_max;
    /* ids begin after it */
    int64_t last_id;
    /* in flight at a time; 0: 1 */
    uint32_t step_count_max;
    /* only one step at a time, in the form of legacy workers: a step is all prefill or all decode,
     * and no prompt is cut */
    bool nested;
};

/* What became of a pull. */
enum cox_pull_end {
    COX_PULL_END_DONE,      /* the keys and values are in its blocks */
    COX_PULL_END_RETRY,     /* it is to be pulled again */
    COX_PULL_END_RECOMPUTE, /* it is to be computed here */
    COX_PULL_END_FAIL,
};

struct cox_sequence {
    /* in the waiting or the done list */
    struct cox_sequence *next;
    /* tokens is NULL: they are below; lora is the sequence's own */
    struct cox_prompt_request request;
    /* from 1 */
    int64_t id;
    /* prompt, then what was generated */
    int32_t *tokens;
    uint32_t prompt_count;
    uint32_t token_count;
    /* the last of these, which steps in flight will give */
    uint32_t pending_count;
    /* in steps in flight */
    uint32_t row_count;
    /* token_count, at most */
    uint32_t token_end;
    /* positions whose keys and values are in the cache, once steps in flight are over */
    uint32_t computed;
    /* its table */
    int32_t *blocks;
    uint32_t block_count;
    /* positions computed by steps that are over, most so far */
    uint32_t reached;
    /* number of the step with its first positions */
    uint64_t since;
    /* blocks the ranks know of */
    uint32_t sent_block_count;
    /* while running */
    uint32_t slot;
    /* the ranks' tables hold it */
    bool known;
    /* NULL: none, or given up */
    struct cox_kv_reference *source;
    /* started so far */
    uint32_t pulls;
    /* to be pulled, and nobody was told */
    bool fresh;
    /* its source was given up */
    bool recomputed;
    /* where it ended so, and is held: lent until it is released */
    struct cox_kv_lease *hold;
    /* of its last pull; the caller's, freed with free */
    void *report;
    /* when done */
    enum cox_finish finish;
    /* COX_FINISH_ERROR */
    struct cox_error error;
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
    /* NULL from when it ends before this step does */
    const struct cox_sequence *sequence;
    /* of the first token to compute */
    uint32_t position;
    /* tokens to compute */
    uint32_t count;
    /* the ranks do not know the sequence */
    bool announce;
    /* its next token is sampled */
    bool emit;
    /* what it computes is a token that was generated */
    bool decode;
};

struct cox_step {
    /* sequence number of the step before, at which the ranks' tables stand then; 0: they are
     * emptied first */
    uint64_t base;
    enum cox_step_kind kind;
    const struct cox_step_row *rows;
    uint32_t row_count;
    /* over all rows */
    uint32_t token_count;
    /* ended since the last step; none when base is 0, or nested */
    const uint32_t *finished_slots;
    uint32_t finished_count;
    uint32_t running_count;
    uint32_t waiting_count;
};

struct cox_batcher_stats {
    /* computed, recomputed ones included */
    uint64_t prompt_tokens;
    uint64_t generated_tokens;
    /* computed for the first time */
    uint64_t positions;
    uint64_t preemptions;
    /* sequences whose source was given up */
    uint64_t recomputed;
};

/* Returns 0; COX_INVALID: a limit of 0, or a frame too small for any step; -ENOMEM. */
int cox_batcher_new(const struct cox_batcher_options *options, struct cox_batcher **ret_batcher,
                    struct cox_error *err);
struct cox_batcher *cox_batcher_free(
    struct cox_batcher *batcher); /* NULL-safe; frees every sequence in it */

/* Queues a request. One that can never run is done at once, with an error. Returns 0 or -ENOMEM. */
int cox_batcher_add(struct cox_batcher *batcher, const struct cox_prompt_request *request);

/* Gives the next step; fewer than step_count_max are in flight. Returns 0; COX_EMPTY: nothing
 * waits, runs or is pulled, and no step is in flight; COX_BUSY: nothing can be computed before the
 * oldest step in flight is over, or, where there is none, a pull ends or blocks are given back.
 * Also then sequences may be to be pulled (cox_batcher_pull). */
int cox_batcher_next(struct cox_batcher *batcher, const struct cox_step **ret_step);
/* Gives a step without rows, which tells the ranks what a step tells beside them. */
void cox_batcher_next_empty(struct cox_batcher *batcher, const struct cox_step **ret_step);
/* The step that was given is on its way, as number `sequence`: the base of the next one. */
void cox_batcher_publish(struct cox_batcher *batcher, uint64_t sequence);
/* The oldest step in flight went well. tokens: one per row, looked at where the row emits; ended:
 * not 0 where the worker ended the sequence (NULL: nowhere). Returns 0, or COX_CORRUPT: a token
 * below 0; nothing is done then. */
int cox_batcher_commit(struct cox_batcher *batcher, const int32_t *tokens, const uint8_t *ended,
                       struct cox_error *err);
/* The oldest step in flight went well, and is the first with other weights; before its commit. Ends
 * what is held; and who was computed in part before will not be held. */
void cox_batcher_renew(struct cox_batcher *batcher);
/* The oldest step had no effect, or nobody knows what it had: so it is with all of them, and with
 * what was given. */
void cox_batcher_revert(struct cox_batcher *batcher);

/* Steps planned from now on compute so many tokens at most, and not more than token_count_max, at
 * positions that no step before has computed in time; at least 1. */
void cox_batcher_limit(struct cox_batcher *batcher, uint32_t token_count);

/* Takes the oldest sequence that is done, NULL: none. */
struct cox_sequence *cox_batcher_done(struct cox_batcher *batcher);
/* Ends everything that waits or runs with an error; steps in flight count as reverted. */
void cox_batcher_fail(struct cox_batcher *batcher, int code, const char *text);

/* Ends what waits or runs for this context, if there is any, with COX_CLOSED; it is done then, or,
 * where it has an adapter and rows in flight, with the last of these. One that is being pulled is
 * ended by cox_batcher_pulled instead. Not between next and publish or revert. */
void cox_batcher_cancel(struct cox_batcher *batcher, const void *context);

/* ---- pulls and holds; not between next and publish or revert, but for pull ---- */

/* The next admitted sequence that nobody was told is to be pulled, NULL: none. The first
 * source->block_count of its blocks are for what is pulled. Lent until pulled. */
const struct cox_sequence *cox_batcher_pull(struct cox_batcher *batcher);
/* Its pull has ended. quiet: nobody writes to its blocks any more; otherwise they are nobody's
 * until given back by cox_batcher_give. report (may be NULL) is taken. err: why, of FAIL. Returns
 * 0; COX_NOT_FOUND: no such sequence is being pulled, and report is not taken. */
int cox_batcher_pulled(struct cox_batcher *batcher, int64_t id, enum cox_pull_end end, bool quiet,
                       void *report, const struct cox_error *err);
/* The sequence of this id (0: of this context) that is being pulled, and somebody was told; NULL:
 * there is none. */
const struct cox_sequence *cox_batcher_pulling(const struct cox_batcher *batcher, int64_t id,
                                               const void *context);
/* Blocks that are nobody's, before the first step or given back when they are quiet. */
void cox_batcher_reserve(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count);
void cox_batcher_give(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count);

/* Releases the hold of this id and owner (id 0: all of that owner). Idempotent. */
void cox_batcher_release(struct cox_batcher *batcher, uint64_t owner, int64_t id);
/* Ends those whose leases are over by now_ns; COX_DEADLINE_NEVER: all. */
void cox_batcher_expire(struct cox_batcher *batcher, uint64_t now_ns);
const struct cox_kv_leases *cox_batcher_kv_leases(const struct cox_batcher *batcher); /* lent */
int64_t cox_batcher_last_id(const struct cox_batcher *batcher);

/* Sequences that ended and of which no step has told (nested: none ever does; otherwise the next
 * one does, by its base where that is 0); *ret_ids is lent until the next call. told forgets them,
 * when the ranks have heard otherwise. With the nested form that has to be before every next. */
uint32_t cox_batcher_unreported(const struct cox_batcher *batcher, const int64_t **ret_ids);
void cox_batcher_reported(struct cox_batcher *batcher);

void cox_batcher_stats(const struct cox_batcher *batcher, struct cox_batcher_stats *ret_stats);
/* Blocks not taken; for tests of leaks. */
uint32_t cox_batcher_free_blocks(const struct cox_batcher *batcher);

#endif
