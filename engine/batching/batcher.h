/*
 * batcher: decides which sequences the next step computes. Continuous batching, without any I/O.
 *
 * States of a sequence; one with a KV reference is pulled before it runs:
 *
 *     add -> WAITING -(admitted: slot and blocks)-> RUNNING -(end token, length, failure)-> DONE
 *            ^ ^ |                                   | ^
 *            | | '-(has a KV reference)-> PULLING ---|-'
 *            | '-------(pull failed)------'  '-------|-(pull_only, or must not be computed)-> DONE
 *            '----(no free block: youngest first)----'
 *
 * A request may ask for a KV lease: when its sequence is done, the blocks stay taken and the ranks
 * keep its slot. The lease ends when it is released or expires, when the weights change, or when a
 * step is reverted, which empties the ranks' tables. Blocks that a rank may still write to after
 * their pull has ended belong to no sequence until they are given back.
 *
 * next fills a step; publish marks it as sent; commit marks the oldest sent one as successful. At
 * most step_count_max are in flight:
 *
 *     next -> filled -(publish)-> in flight -(commit, oldest first)-> over
 *                '--------------------'-----(revert: all of them)---> over
 *
 * A step assumes that those in flight succeed and end no sequence. Each token that a row will emit
 * is pending until commit delivers it. If that token ends the sequence after all, later steps may
 * contain rows of it. These rows emit nothing, and its blocks and slot are not reused before the
 * last of them is over. A sequence that ends by length has no such rows. A preempted one has none
 * either: preemption happens only while no step is in flight.
 *
 * After a revert the ranks' tables are void. The next step has base 0, and every running sequence
 * is announced again and recomputed from position 0. A sequence is announced in the first step that
 * has a row of it, so that this step keeps within its limits too.
 *
 * Threads: one at a time.
 * Blocks: nothing; allocates in new and add only.
 * Ownership: the batcher copies requests. A step and its rows are lent until its commit or a
 *   revert, what else it points to until publish. cox_batcher_done passes finished sequences to the
 *   caller, which frees them with cox_sequence_free.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_BATCHER_H
#define COX_ENGINE_BATCHER_H

#include "blocks.h"
#include "kv_leases.h"

#include <coxswain/server.h>

struct cox_batcher;

struct cox_batcher_options {
    /* running at a time; also the rows of one step */
    uint32_t sequence_count_max;
    /* tokens computed in one step; longer prompts are chunked */
    uint32_t token_count_max;
    uint32_t block_count;
    /* positions per block */
    uint32_t block_size;
    /* valid positions are 0 to this - 1 */
    uint32_t position_count_max;
    /* bytes of one encoded step; 0: no limit */
    size_t request_size_max;
    /* KV leases at a time, in addition to the running sequences */
    uint32_t hold_count_max;
    /* Slots, in addition to those, for sequences that ended while a row of them was in flight. When
     * these are used up, admission waits. */
    uint32_t retiring_count_max;
    /* ids start after this one */
    int64_t last_id;
    /* Nested: cox_batcher_take_unreported of a batcher that failed, of the same options: the ranks
     * still hold these sequences. Copied. Otherwise none: a base of 0 clears the ranks' tables. */
    const int64_t *unreported_ids;
    uint32_t unreported_count;
    /* steps in flight at a time; 0: 1 */
    uint32_t step_count_max;
    /* The form for legacy workers: one step at a time, which is all prefill or all decode, and no
     * prompt is chunked. */
    bool nested;
};

/* Outcome of a pull. */
enum cox_pull_end {
    COX_PULL_END_DONE,      /* keys and values are in its blocks */
    COX_PULL_END_RETRY,     /* pull again */
    COX_PULL_END_RECOMPUTE, /* compute here */
    COX_PULL_END_FAIL,
};

struct cox_sequence {
    /* link of the waiting or the done list */
    struct cox_sequence *next;
    /* request.tokens is NULL: see tokens. request.lora is a copy that the sequence owns. */
    struct cox_prompt_request request;
    /* from 1 */
    int64_t id;
    /* prompt, then generated tokens */
    int32_t *tokens;
    uint32_t prompt_count;
    uint32_t token_count;
    /* how many of the last ones are pending: steps in flight will emit them */
    uint32_t pending_count;
    /* rows in steps in flight */
    uint32_t row_count;
    /* limit of token_count */
    uint32_t token_end;
    /* positions whose keys and values are cached once all steps in flight are over */
    uint32_t computed;
    /* block table */
    int32_t *blocks;
    uint32_t block_count;
    /* highest count of positions computed by completed steps */
    uint32_t reached;
    /* number of the step with its first positions */
    uint64_t since;
    /* blocks that the ranks' tables have */
    uint32_t sent_block_count;
    /* while running */
    uint32_t slot;
    /* it is in the ranks' tables, as far as steps build on them */
    bool known;
    /* The ranks hold it until its end is reported. Nested ranks do after a revert, too. */
    bool held;
    /* NULL: none, or dropped */
    struct cox_kv_reference *source;
    /* pulls started so far */
    uint32_t pulls;
    /* to be pulled, and not yet returned by cox_batcher_pull */
    bool fresh;
    /* its KV reference was dropped, and it was computed here */
    bool recomputed;
    /* set when it ended with a KV lease; lent until the lease ends */
    struct cox_kv_lease *hold;
    /* of its last pull; the caller's, freed with free */
    void *report;
    /* when done */
    enum cox_finish finish;
    /* for COX_FINISH_ERROR */
    struct cox_error error;
};
struct cox_sequence *cox_sequence_free(struct cox_sequence *sequence); /* NULL-safe */

/* What a worker says of the sequence of a row. */
struct cox_row_end {
    /* the sequence goes on if not */
    bool ended;
    enum cox_finish finish;
    /* its number on the wire */
    int32_t reason;
    /* with COX_FINISH_ERROR, which concerns this prompt alone; words: static storage */
    int code;
    const char *words;
};

/* Values of ForwardType. */
enum cox_step_kind {
    COX_STEP_PREFILL = 0,
    COX_STEP_DECODE = 1,
    COX_STEP_MIXED = 3,
    COX_STEP_DUMMY = 5, /* no rows */
};

struct cox_step_row {
    /* NULL once the sequence has ended before this step is over */
    const struct cox_sequence *sequence;
    /* of the first token to compute */
    uint32_t position;
    /* tokens to compute */
    uint32_t count;
    /* the sequence is new to the ranks */
    bool announce;
    /* the next token is sampled */
    bool emit;
    /* the token to compute is a generated one */
    bool decode;
};

struct cox_step {
    /* Number of the previous step, whose result the ranks' tables must hold. 0: the ranks empty
     * their tables first. */
    uint64_t base;
    enum cox_step_kind kind;
    const struct cox_step_row *rows;
    uint32_t row_count;
    /* sum over all rows */
    uint32_t token_count;
    /* sequences that ended since the last step; none when base is 0, or nested */
    const uint32_t *finished_slots;
    uint32_t finished_count;
    uint32_t running_count;
    uint32_t waiting_count;
};

struct cox_batcher_stats {
    /* computed, including recomputed ones */
    uint64_t prompt_tokens;
    uint64_t generated_tokens;
    /* computed for the first time */
    uint64_t positions;
    uint64_t preemptions;
    /* sequences whose KV reference was dropped */
    uint64_t recomputed;
};

/* Returns
 *   0
 *   COX_INVALID: a limit of 0, or a frame too small for any step
 *   -ENOMEM
 */
int cox_batcher_new(const struct cox_batcher_options *options, struct cox_batcher **ret_batcher,
                    struct cox_error *err);
struct cox_batcher *cox_batcher_free(
    struct cox_batcher *batcher); /* NULL-safe; frees all its sequences */

/* Queues a request. One that can never run is done at once, with an error. Returns 0 or -ENOMEM. */
int cox_batcher_add(struct cox_batcher *batcher, const struct cox_prompt_request *request);

/* Fills the next step. The caller ensures that fewer than step_count_max are in flight. Also when
 * no step is returned, there may be sequences to pull (cox_batcher_pull).
 * Returns
 *   0
 *   COX_EMPTY: no sequence waits, runs or is pulled, and no step is in flight
 *   COX_BUSY: nothing to compute until the oldest step in flight is over; or, with none in flight,
 *     until a pull ends or blocks are given back
 */
int cox_batcher_next(struct cox_batcher *batcher, const struct cox_step **ret_step);
/* Fills a step without rows, which carries only the other fields to the ranks. */
void cox_batcher_next_empty(struct cox_batcher *batcher, const struct cox_step **ret_step);
/* Marks the filled step as sent under the number `sequence`, which is the base of the next one. */
void cox_batcher_publish(struct cox_batcher *batcher, uint64_t sequence);
/* Marks the oldest step in flight as successful. tokens: one per row, read only where the row
 * emits. ends: one per row, how the worker ended the sequence, if it did; NULL: it ended none.
 * text: what it says of its errors; NULL or "": nothing.
 * Returns
 *   0
 *   COX_CORRUPT: a token below 0; nothing was changed
 */
int cox_batcher_commit(struct cox_batcher *batcher, const int32_t *tokens,
                       const struct cox_row_end *ends, const char *text, struct cox_error *err);
/* To be called before the commit of the oldest step in flight, when it is the first with new
 * weights. Ends all KV leases; a sequence that was partly computed before will get none. */
void cox_batcher_renew(struct cox_batcher *batcher);
/* To be called when the oldest step had no effect, or an unknown one. Discards all steps in flight,
 * and the filled one. */
void cox_batcher_revert(struct cox_batcher *batcher);

/* Limits the tokens per step from now on, at positions not computed by an earlier step. At least 1;
 * token_count_max still holds. */
void cox_batcher_limit(struct cox_batcher *batcher, uint32_t token_count);

/* Takes the oldest finished sequence. Returns NULL when there is none. */
struct cox_sequence *cox_batcher_done(struct cox_batcher *batcher);
/* Ends all waiting and running sequences with an error. Steps in flight count as reverted. Those
 * that nested ranks hold are unreported then, for the next batcher. */
void cox_batcher_fail(struct cox_batcher *batcher, int code, const char *text);

/* Ends the waiting or running sequence of this context, if any, with COX_CLOSED. It is done at
 * once, or, if it has an adapter and rows in flight, when the last of these is over. One that is
 * being pulled is ended by cox_batcher_pulled instead. Not to be called between next and publish or
 * revert. */
void cox_batcher_cancel(struct cox_batcher *batcher, const void *context);

/* ---- pulls and leases; not to be called between next and publish or revert, except pull ---- */

/* The next admitted sequence to pull that was not returned before; NULL: none. Pull into the first
 * source->block_count of its blocks. Lent until pulled. */
const struct cox_sequence *cox_batcher_pull(struct cox_batcher *batcher);
/* Ends the pull of a sequence. quiet: no rank writes to its blocks any more; otherwise the blocks
 * belong to no sequence until cox_batcher_give. Takes report, which may be NULL. err: the reason of
 * FAIL.
 * Returns
 *   0
 *   COX_NOT_FOUND: no sequence of this id is being pulled; report is not taken
 */
int cox_batcher_pulled(struct cox_batcher *batcher, int64_t id, enum cox_pull_end end, bool drained,
                       void *report, const struct cox_error *err);
/* The sequence of this id (0: of this context) that cox_batcher_pull has returned and whose pull
 * has not ended. Returns NULL when there is none. */
const struct cox_sequence *cox_batcher_pulling(const struct cox_batcher *batcher, int64_t id,
                                               const void *context);
/* Takes blocks out of use before the first step; gives them back when they are drained. */
void cox_batcher_reserve(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count);
void cox_batcher_give(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count);

/* Releases the lease of this id and owner (id 0: all of that owner). Idempotent. */
void cox_batcher_release(struct cox_batcher *batcher, uint64_t owner, int64_t id);
/* Ends the leases that have expired by now_ns; COX_DEADLINE_NEVER: all. */
void cox_batcher_expire(struct cox_batcher *batcher, uint64_t now_ns);
const struct cox_kv_leases *cox_batcher_kv_leases(const struct cox_batcher *batcher); /* lent */
int64_t cox_batcher_last_id(const struct cox_batcher *batcher);

/* Sequences that ended and that no step has reported to the ranks. The nested form never reports
 * any; otherwise the next step does, by its list, or by base 0. *ret_ids is lent until the next
 * call. reported clears the list, for a caller that informs the ranks by other means. With the
 * nested form that is required before every next. */
uint32_t cox_batcher_unreported(const struct cox_batcher *batcher, const int64_t **ret_ids);
void cox_batcher_reported(struct cox_batcher *batcher);
/* Gives the list, for free; the batcher may only be freed after that. */
int64_t *cox_batcher_take_unreported(struct cox_batcher *batcher, uint32_t *ret_count);

void cox_batcher_stats(const struct cox_batcher *batcher, struct cox_batcher_stats *ret_stats);
/* Number of free blocks; for leak tests. */
uint32_t cox_batcher_free_blocks(const struct cox_batcher *batcher);

#endif
