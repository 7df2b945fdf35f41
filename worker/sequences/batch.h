/*
 * batch: one step of inference, as the execute callback of a worker sees it.
 *
 * The view does not depend on the wire format (packed columns that refer to the sequence table, or
 * the nested SequenceGroupMetadata of legacy coordinators). Every row is complete: it has all
 * tokens and the whole block table of its sequence.
 *
 * Threads: a view belongs to the thread whose callback got it, until that callback returns.
 * Ownership: every pointer is lent by the worker library until the callback returns.
 * Blocks: nothing here blocks.
 * If the process dies: the view is private memory; nothing is left.
 */
#ifndef COX_WORKER_BATCH_H
#define COX_WORKER_BATCH_H

#include <coxswain/base.h>
#include <coxswain/handle.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Block tables of one sequence, at most: one per KV-cache manager. */
#define COX_BLOCK_TABLE_COUNT_MAX 4
/* Bytes of a LoRA adapter's name, at most. */
#define COX_LORA_NAME_LENGTH_MAX 128
/* Stop tokens of one sequence, at most. */
#define COX_STOP_TOKEN_COUNT_MAX 8

enum cox_forward_type { /* values of ForwardType in executor.proto */
                        COX_FORWARD_PREFILL = 0,
                        COX_FORWARD_DECODE = 1,
                        COX_FORWARD_EXTEND = 2,
                        COX_FORWARD_MIXED = 3,
                        COX_FORWARD_CLEAR = 4,
                        COX_FORWARD_DUMMY = 5, /* no rows; keeps ranks synchronized */
};

struct cox_sampling {
    /* 0: greedy */
    float temperature;
    /* 1: off */
    float top_p;
    /* 0: off */
    int32_t top_k;
    /* 1: off */
    float repetition_penalty;
    /* the draw at position p is a function of (seed, p) alone, so a recomputation repeats it */
    uint64_t seed;
};

struct cox_block_table {
    /* ids of KV blocks, in order of position */
    const int32_t *blocks;
    uint32_t count;
};

/* One sequence of the step. */
struct cox_batch_row {
    /* the coordinator's sequence id */
    int64_t id;
    /* index in the sequence table, stable while the sequence lives */
    uint32_t slot;
    /* of the first token to compute; 0-based */
    uint32_t position;
    /* tokens to compute: positions [position, position + token_count) */
    uint32_t token_count;
    /* sample the token that follows the last one computed */
    bool emit;
    /* all tokens of the sequence from position 0; position + token_count of them */
    const int32_t *tokens;
    /* cox_batch.table_count of them; [0] is the main one */
    const struct cox_block_table *tables;
    const struct cox_sampling *sampling;
    /* the adapter it is computed with; NULL: none */
    const char *lora_id;
};

/* A version of the model's weights that the coordinator shares. It is in an image: memory that no
 * process can write any more (cox_region_attach_image). */
struct cox_weights_candidate {
    /* from 1; only grows */
    uint64_t version;
    /* bytes of the image */
    uint64_t size;
    /* of the request that named it; COX_DEADLINE_NEVER: it has none */
    uint64_t deadline_ns;
    /* of the image (cox_handle_open) */
    struct cox_handle handle;
};

struct cox_block_pair {
    int32_t from;
    int32_t to;
};

struct cox_batch {
    /* sequence number of the request on its channel */
    uint64_t sequence;
    enum cox_forward_type forward_type;
    uint32_t row_count;
    const struct cox_batch_row *rows;
    /* block tables per row, 1 to COX_BLOCK_TABLE_COUNT_MAX */
    uint32_t table_count;
    /* Block moves to do before the rows, in this order: swap_out (device to host), swap_in (host to
     * device), copy (device to device). */
    const struct cox_block_pair *swap_in;
    uint32_t swap_in_count;
    const struct cox_block_pair *swap_out;
    uint32_t swap_out_count;
    const struct cox_block_pair *copy;
    uint32_t copy_count;
    /* Sequences that ended since the last step: forget what is kept for these slots. */
    const uint32_t *finished_slots;
    uint32_t finished_count;
    /* Version of the model's weights with which all ranks compute this step; 0: the coordinator
     * shares no weights. */
    uint64_t weights_version;
    /* That version's memory, as long as some rank may not have attached it; then NULL. */
    const struct cox_weights_candidate *weights;
    /* private to the worker library */
    const void *void_word;
    /* the same; NULL: never paused */
    const void *cancel_word;
};

/* What the callback fills, one per row. */
struct cox_batch_output {
    /* the sampled token; -1 where emit is false */
    int32_t token;
    /* of that token under the unscaled distribution, 0 where not computed */
    float logprob;
};

/* True once the coordinator has cancelled this step (timeout, another rank's failure), or the
 * worker is pausing (cox_worker_pause). A long callback may poll it between layers and return
 * COX_ABORTED early. Lock-free; on the callback's thread. */
COX_PUBLIC bool cox_batch_cancelled(const struct cox_batch *batch);

/* Sequence number up to which steps have been cancelled; 0: none. During a step that is not
 * cancelled, all ranks read the same number, and it has grown if an earlier step failed on any
 * rank. So ranks that wait for each other can resynchronize at the same step (cox_group_align).
 * Lock-free; on the callback's thread. */
COX_PUBLIC uint64_t cox_batch_void_through(const struct cox_batch *batch);

#ifdef __cplusplus
}
#endif

#endif
