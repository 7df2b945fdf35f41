/*
 * batch_builder: collects the parts of one step and makes the batch view of them.
 *
 * Rows are collected as numbers and get their pointers last, in seal: until then sequences may grow
 * and move.
 *
 * Threads: one.
 * Ownership: the batch builder owns the memory of the view, kept from step to step; the view points
 *   into it and into the sequence store's sequences, until the next change of either.
 * Codes: those of cox_table_apply, err says why.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_BATCH_BUILDER_H
#define COX_WORKER_BATCH_BUILDER_H

#include "sequence_store.h"

#include <coxswain/worker.h>

struct Coxswain__ExecuteModelRequest;

struct cox_batch_builder {
    /* the view, complete after seal */
    struct cox_batch batch;
    struct cox_batch_row *rows;
    size_t row_capacity;
    struct cox_batch_output *outputs;
    size_t output_capacity;
    /* table_count for every row */
    struct cox_block_table *views;
    size_t view_capacity;
    /* swap_in, swap_out, copy, one behind the other */
    struct cox_block_pair *pairs;
    size_t pair_capacity;
    /* room for every slot: each can end once in a step */
    uint32_t *finished;
};

/* Returns 0 or -ENOMEM. */
int cox_batch_builder_init(struct cox_batch_builder *builder, uint32_t sequence_count_max);
void cox_batch_builder_deinit(struct cox_batch_builder *builder);

/* Empties the view. table_count is 1 until the form says more. */
void cox_batch_builder_begin(struct cox_batch_builder *builder, uint64_t sequence,
                             const void *void_word);

/* Forward type and block moves: the part that both forms share. */
int cox_batch_builder_moves(struct cox_batch_builder *builder,
                            const struct Coxswain__ExecuteModelRequest *request,
                            struct cox_error *err);

/* Drops the sequence of a live slot and notes the slot. */
void cox_batch_builder_finish(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                              uint32_t slot);

/* A row that computes token_count tokens from position. The slot's sequence must know them all and
 * have a block. */
int cox_batch_builder_row(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                          uint32_t slot, uint32_t position, uint32_t token_count, bool emit,
                          struct cox_error *err);

/* The same for a row each of so many slots, of one token where token_counts is NULL; all of them
 * emit. */
int cox_batch_builder_rows(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                           const uint32_t *slots, const uint32_t *positions,
                           const uint32_t *token_counts, size_t count, struct cox_error *err);

/* Makes the view complete, with room in each emitting sequence for the token that commit will
 * append. */
int cox_batch_builder_seal(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                           struct cox_error *err);

#endif
