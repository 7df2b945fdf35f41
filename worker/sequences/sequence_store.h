/*
 * sequence_store: the live sequences of a rank by slot, with one tentative step on top of them.
 *
 * A step either lengthens a sequence in place or puts another object into its slot. The first touch
 * of a slot notes which object it held and how long its arrays were; nothing below those lengths is
 * ever written. So a commit only gives the replaced objects back, and a revert only puts objects
 * and lengths back.
 *
 * Threads: one; no locks.
 * Ownership: the sequence store owns every sequence. A pointer to one is lent until the next call
 *   that changes its slot. Objects out of use are kept with their arrays, so that a steady load
 *   allocates nothing.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_SEQUENCE_STORE_H
#define COX_WORKER_SEQUENCE_STORE_H

#include "adapter_references.h"

#include <coxswain/worker.h>

/* Bytes of a request id, at most. */
#define COX_REQUEST_ID_LENGTH_MAX 128

/* An array that grows and keeps its memory. */
struct cox_numbers {
    int32_t *items;
    uint32_t count;
    uint32_t capacity;
};

/* Makes room for count items in all. Returns 0; COX_TOO_LARGE: more than limit; -ENOMEM. */
int cox_numbers_reserve(struct cox_numbers *numbers, size_t count, uint32_t limit);

struct cox_stored_sequence {
    int64_t id;
    struct cox_numbers tokens;
    struct cox_numbers tables[COX_BLOCK_TABLE_COUNT_MAX];
    /* tables it was announced with */
    uint32_t table_count;
    /* tokens it was announced with; those that follow were generated or forced */
    uint32_t announced_count;
    struct cox_sampling sampling;
    /* the adapter it is computed with; NULL: none */
    struct cox_adapter_reference *lora;
    struct cox_stored_sequence *next_spare;
    /* "": has none, the packed form knows no requests */
    char request_id[COX_REQUEST_ID_LENGTH_MAX + 1];
};

struct cox_slot {
    struct cox_stored_sequence *now;
    /* what it held when the step touched it first */
    struct cox_stored_sequence *before;
    /* the fields called before are of this step */
    uint64_t touched_step;
    /* the last step with a row of this slot */
    uint64_t row_step;
    uint32_t token_count_before;
    uint32_t block_counts_before[COX_BLOCK_TABLE_COUNT_MAX];
};

struct cox_sequence_store_cell {
    uint32_t hash;
    /* 0: empty */
    uint32_t slot_plus_one;
};

struct cox_sequence_store {
    uint32_t sequence_count_max;
    uint32_t token_count_max;
    uint32_t live_count;
    /* counts the calls of begin, so that no stamp needs clearing */
    uint64_t step;
    /* sequence_count_max of them */
    struct cox_slot *slots;
    /* one bit per slot: now is not NULL */
    uint64_t *live_words;
    /* slots touched in this step, each once */
    uint32_t *touched;
    uint32_t touched_count;
    /* open addressing; two cells per live slot: by id and by request id */
    struct cox_sequence_store_cell *cells;
    uint32_t cell_mask;
    struct cox_stored_sequence *spares;
    struct cox_adapter_references *adapter_references;
};

/* Returns 0 or -ENOMEM. */
int cox_sequence_store_init(struct cox_sequence_store *store, uint32_t sequence_count_max,
                            uint32_t token_count_max);
void cox_sequence_store_deinit(struct cox_sequence_store *store); /* a zeroed store is fine */

/* The sequence in a slot; NULL where there is none or no such slot. */
static inline struct cox_stored_sequence *cox_sequence_store_get(
    const struct cox_sequence_store *store, uint32_t slot)
{
    return slot < store->sequence_count_max ? store->slots[slot].now : NULL;
}

bool cox_sequence_store_find_id(const struct cox_sequence_store *store, int64_t id,
                                uint32_t *ret_slot);
/* Any one sequence of the request. */
bool cox_sequence_store_find_request(const struct cox_sequence_store *store, const char *request_id,
                                     uint32_t *ret_slot);
/* The lowest slot with a sequence. */
bool cox_sequence_store_lowest_live(const struct cox_sequence_store *store, uint32_t *ret_slot);
/* The lowest slot without a sequence. */
bool cox_sequence_store_lowest_free(const struct cox_sequence_store *store, uint32_t *ret_slot);

/* A step: begin, any number of the changes below, then commit or revert. */
void cox_sequence_store_begin(struct cox_sequence_store *store);
/* Call before the arrays of a sequence grow. */
void cox_sequence_store_touch(struct cox_sequence_store *store, uint32_t slot);
/* Puts an empty sequence into the slot, replacing its content. request_id is NULL or at most
 * COX_REQUEST_ID_LENGTH_MAX long. Returns 0 or -ENOMEM. */
int cox_sequence_store_announce(struct cox_sequence_store *store, uint32_t slot, int64_t id,
                                const char *request_id, struct cox_stored_sequence **ret_sequence);
/* Sets the adapter of the sequence that was announced into the slot in this step. If the slot held
 * a sequence with the same adapter before, this is not a new use, also if the adapter is closed.
 * Returns as cox_adapter_references_take. */
int cox_sequence_store_set_lora(struct cox_sequence_store *store, uint32_t slot, const char *name);
/* Returns the sequence of a live slot so that this step may overwrite it: itself if it is new in
 * this step, else a copy in its place. Returns 0 or -ENOMEM. */
int cox_sequence_store_own(struct cox_sequence_store *store, uint32_t slot,
                           struct cox_stored_sequence **ret_sequence);
void cox_sequence_store_drop(struct cox_sequence_store *store, uint32_t slot); /* a live one */
void cox_sequence_store_commit(struct cox_sequence_store *store);
void cox_sequence_store_revert(struct cox_sequence_store *store);

#endif
