/*
 * step_digest: what a rank ran, as four numbers that are the same on all ranks that ran the same.
 *
 * Each is a hash over the rows of a step, which continues that of the step before: a chain. A chain
 * begins anew with a step that builds on none (base 0, or the nested form), so that ranks which
 * were replaced or have recovered are equal again. It moves only when the step succeeded on the
 * rank, as the sequence table does.
 *
 * Positions and tokens count for all rows. A step of one token for each sequence, in the packed
 * form with one block table, reads sequence id, number of blocks and last block of ROW_COUNT rows
 * alone, in turn, and of one row two other blocks, in turn too. All other steps read everything. So
 * what changes in a rank's table is found after at most rows / ROW_COUNT steps, of a block that is
 * not the last one after rows * blocks / 2 steps. More would cost more than a step can afford
 * (tests/counts).
 *
 * Within a step words are added up, and the sums as well. So two steps that differ in one or two
 * words always differ. A step goes into the chain through a bijection: chains that have differed
 * once differ for good, but by chance, 1 in 2^64. Not for input that an attacker chooses to
 * collide.
 *
 * Threads: one; no state of its own.
 * Blocks: nothing; allocates nothing.
 */
#ifndef COX_WORKER_STEP_DIGEST_H
#define COX_WORKER_STEP_DIGEST_H

#include <coxswain/worker.h>

/* The step that the chain began with, then the digests in the order of enum cox_digest; 0: the rank
 * is not compared. */
#define COX_STEP_CHAIN_SIZE (1 + COX_DIGEST_COUNT)

#define COX_STEP_DIGEST_ROW_COUNT 4

#define COX_STEP_DIGEST_FACTOR UINT64_C(0x9e3779b97f4a7c15)
#define COX_STEP_DIGEST_START UINT64_C(0xcbf29ce484222325)

/* Continues a hash by a word. */
static inline uint64_t cox_step_digest_mix(uint64_t digest, uint64_t word)
{
    return (digest ^ word) * COX_STEP_DIGEST_FACTOR;
}

/* Continues a chain by a step that has run: batch->row_count rows and outputs. single: each row has
 * one token and one block table, which has a block. */
void cox_step_digest_add(uint64_t *chain, const struct cox_batch *batch,
                         const struct cox_batch_output *outputs, bool single);

/* A chain that begins with this step. */
void cox_step_digest_restart(uint64_t *chain, uint64_t sequence);

#endif
