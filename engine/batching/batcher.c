#include "batcher.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"

/* Upper bounds of encoded sizes, in bytes. */
#define STEP_COST 256    /* heads, each column's key and length (148), where the weights are (80) */
#define FINISHED_COST 32 /* a slot, or a request id as text */
#define NUMBER_COST 4    /* in a column */
#define ROW_COST (7 * NUMBER_COST) /* four columns, and a block append of three */
#define ANNOUNCE_COST 160          /* heads, id, slot, sampling */
#define NESTED_ROW_COST 340
#define NESTED_NUMBER_COST 8 /* int64 arrays */

struct list {
    struct cox_sequence *first;
    /* the NULL pointer that the next element replaces */
    struct cox_sequence **end;
    uint32_t count;
};

/* Resources of an ended sequence, kept until the last step with a row of it is over. */
struct retiring {
    /* block table */
    int32_t *blocks;
    uint32_t block_count;
    uint32_t slot;
    int64_t id;
    /* done when the parting is over; NULL: it is done already, or was cancelled */
    struct cox_sequence *sequence;
};

struct planned_step {
    struct cox_step step;
    struct cox_step_row *rows;
    /* at most one per row */
    struct retiring *retirings;
    uint32_t retiring_count;
    /* ended sequences that the step reports */
    uint32_t reported_count;
    /* step number */
    uint64_t sequence;
};

struct cox_batcher {
    struct cox_batcher_options options;
    struct cox_blocks blocks;
    /* oldest first, preempted ones in front */
    struct list waiting;
    struct list done;
    /* oldest first; each has its slot */
    struct list pulling;
    struct cox_kv_leases holds;
    /* in order of admission */
    struct cox_sequence **running;
    uint32_t running_count;
    /* a stack of free slots */
    uint32_t *slots;
    uint32_t slot_count;
    /* Slots of ended sequences that the ranks know. The first reported_count are reported by steps
     * in flight, oldest step first. */
    uint32_t *unreported_slots;
    int64_t *unreported_ids;
    uint32_t unreported_count, reported_count;
    /* a ring of step_count_max: flight_count in flight, the oldest at flight_first */
    struct planned_step *flights;
    uint32_t flight_first, flight_count;
    /* the ring entry behind those, being filled, or filled and not published */
    struct planned_step *next;
    bool given;
    /* encoded size of next */
    size_t step_cost;
    uint32_t token_limit;
    uint64_t base;
    /* number of the first step with the current weights; 0: none */
    uint64_t renewed;
    int64_t last_id;
    struct cox_batcher_stats stats;
};

static void list_init(struct list *list)
{
    *list = (struct list){.end = &list->first};
}

static void list_append(struct list *list, struct cox_sequence *sequence)
{
    sequence->next = NULL;
    *list->end = sequence;
    list->end = &sequence->next;
    list->count++;
}

static void list_prepend(struct list *list, struct cox_sequence *sequence)
{
    sequence->next = list->first;
    if (!list->first)
        list->end = &sequence->next;
    list->first = sequence;
    list->count++;
}

static struct cox_sequence *list_pop(struct list *list)
{
    struct cox_sequence *sequence = list->first;
    if (sequence) {
        list->first = sequence->next;
        if (!list->first)
            list->end = &list->first;
        list->count--;
        sequence->next = NULL;
    }
    return sequence;
}

static uint32_t blocks_for(const struct cox_batcher *batcher, uint32_t positions)
{
    return positions / batcher->options.block_size + (positions % batcher->options.block_size != 0);
}

/* The table is full when the last token but one is computed: the very last token is never computed.
 */
static uint32_t table_size(const struct cox_batcher *batcher, uint32_t token_end)
{
    return blocks_for(batcher, token_end - 1);
}

/* Upper bound of what a row of the sequence adds to the step. */
static size_t row_cost(const struct cox_batcher *batcher, const struct cox_prompt_request *request,
                       uint32_t token_count, uint32_t block_count, bool announce)
{
    const size_t lora_cost =
        request->lora ? strlen(request->lora) : 0; /* the key is counted among the heads */
    if (batcher->options.nested)
        return NESTED_ROW_COST + NESTED_NUMBER_COST * (size_t)block_count + lora_cost +
               (announce ? NESTED_NUMBER_COST * (size_t)token_count : 0);
    if (!announce)
        return ROW_COST;
    return ROW_COST + ANNOUNCE_COST + lora_cost + NUMBER_COST * ((size_t)token_count + block_count);
}

/* Running sequences, leased ones, and ended ones with a row in flight. */
static uint32_t slot_count_max(const struct cox_batcher_options *options)
{
    return options->sequence_count_max + options->hold_count_max + options->retiring_count_max;
}

static size_t empty_cost(const struct cox_batcher_options *options)
{
    return STEP_COST + FINISHED_COST * (size_t)options->sequence_count_max +
           NUMBER_COST * ((size_t)options->hold_count_max + options->retiring_count_max);
}

/* ---- constructor and destructor ---- */

static int flights_init(struct cox_batcher *batcher)
{
    uint32_t row_count = batcher->options.sequence_count_max;
    batcher->flights = calloc(batcher->options.step_count_max, sizeof *batcher->flights);
    if (!batcher->flights)
        return -ENOMEM;
    for (uint32_t i = 0; i < batcher->options.step_count_max; i++) {
        struct planned_step *flight = &batcher->flights[i];
        flight->rows = calloc(row_count, sizeof *flight->rows);
        flight->retirings = calloc(row_count, sizeof *flight->retirings);
        if (!flight->rows || !flight->retirings)
            return -ENOMEM;
    }
    return 0;
}

static void flights_deinit(struct cox_batcher *batcher)
{
    for (uint32_t i = 0; batcher->flights && i < batcher->options.step_count_max; i++) {
        struct planned_step *flight = &batcher->flights[i];
        for (uint32_t p = 0; p < flight->retiring_count; p++) {
            free(flight->retirings[p].blocks);
            cox_sequence_free(flight->retirings[p].sequence);
        }
        free(flight->retirings);
        free(flight->rows);
    }
    free(batcher->flights);
}

int cox_batcher_new(const struct cox_batcher_options *options, struct cox_batcher **ret_batcher,
                    struct cox_error *err)
{
    COX_ASSERT(!options->nested || options->step_count_max <= 1);
    if (!options->sequence_count_max || !options->token_count_max || !options->block_size ||
        !options->position_count_max)
        return cox_fail(err, COX_INVALID,
                        "sequences, tokens per step, block size and positions must not be 0");
    if (!options->block_count)
        return cox_fail(err, COX_INVALID, "the workers have no KV cache blocks");
    if (options->request_size_max &&
        options->request_size_max < empty_cost(options) + NESTED_ROW_COST)
        return cox_fail(err, COX_INVALID,
                        "a frame of %zu bytes is too small for steps of %u sequences",
                        options->request_size_max, options->sequence_count_max);
    struct cox_batcher *batcher = calloc(1, sizeof *batcher);
    if (!batcher)
        return cox_fail(err, -ENOMEM, "no memory for the batcher");
    batcher->options = *options;
    batcher->token_limit = options->token_count_max;
    if (!options->step_count_max)
        batcher->options.step_count_max = 1;
    list_init(&batcher->waiting);
    list_init(&batcher->done);
    list_init(&batcher->pulling);
    batcher->last_id = options->last_id;
    uint32_t count = options->sequence_count_max, slot_count = slot_count_max(options);
    batcher->running = calloc(count, sizeof *batcher->running);
    batcher->slots = calloc(slot_count, sizeof *batcher->slots);
    batcher->unreported_slots = calloc(slot_count, sizeof *batcher->unreported_slots);
    batcher->unreported_ids = calloc(slot_count, sizeof *batcher->unreported_ids);
    if (!batcher->running || !batcher->slots || !batcher->unreported_slots ||
        !batcher->unreported_ids || flights_init(batcher) ||
        cox_blocks_init(&batcher->blocks, options->block_count)) {
        cox_batcher_free(batcher);
        return cox_fail(err, -ENOMEM, "no memory to batch %u sequences and %u blocks", count,
                        options->block_count);
    }
    COX_ASSERT(options->unreported_count <= (options->nested ? slot_count : 0));
    for (uint32_t i = 0; i < options->unreported_count; i++)
        batcher->unreported_ids[batcher->unreported_count++] = options->unreported_ids[i];
    for (; batcher->slot_count < slot_count; batcher->slot_count++)
        batcher->slots[batcher->slot_count] = slot_count - 1 - batcher->slot_count;
    *ret_batcher = batcher;
    return 0;
}

struct cox_batcher *cox_batcher_free(struct cox_batcher *batcher)
{
    if (!batcher)
        return NULL;
    struct cox_sequence *sequence;
    while ((sequence = list_pop(&batcher->waiting)) || (sequence = list_pop(&batcher->done)) ||
           (sequence = list_pop(&batcher->pulling)))
        cox_sequence_free(sequence);
    struct cox_kv_lease *hold;
    while ((hold = cox_kv_leases_take(&batcher->holds, 0, 0, COX_DEADLINE_NEVER)))
        free(hold);
    for (uint32_t i = 0; i < batcher->running_count; i++)
        cox_sequence_free(batcher->running[i]);
    cox_blocks_deinit(&batcher->blocks);
    free(batcher->running);
    free(batcher->slots);
    free(batcher->unreported_slots);
    free(batcher->unreported_ids);
    flights_deinit(batcher);
    free(batcher);
    return NULL;
}

struct cox_sequence *cox_sequence_free(struct cox_sequence *sequence)
{
    if (sequence) {
        free(sequence->tokens);
        free(sequence->blocks);
        free((char *)(uintptr_t)sequence->request.lora);
        free(sequence->source);
        free(sequence->report);
        free(sequence);
    }
    return NULL;
}

/* ---- requests ---- */

/* Sets token_end, or the error of a request that can never run. */
static int request_fit(const struct cox_batcher *batcher, const struct cox_prompt_request *request,
                       uint32_t *ret_token_end, struct cox_error *err)
{
    const struct cox_batcher_options *options = &batcher->options;
    if (request->source && options->nested)
        return cox_fail(err, COX_UNSUPPORTED, "legacy workers cannot pull KV blocks");
    if (request->pull_only) {
        if (request->source && request->source->block_count <= options->block_count)
            return 0;
        return cox_fail(err, COX_INVALID, "%" PRIu32 " blocks are to be pulled: here are %" PRIu32,
                        request->source ? request->source->block_count : 0, options->block_count);
    }
    if (request->token_count == 0 || request->new_count_max == 0)
        return cox_fail(err, COX_INVALID, "%s",
                        request->token_count ? "the request asks for no new tokens"
                                             : "the prompt is empty");
    /* The very last token is not computed, so it needs neither position nor block. */
    uint64_t pool = (uint64_t)options->block_count * options->block_size + 1;
    uint64_t positions = (uint64_t)options->position_count_max + 1;
    uint64_t fits = positions < pool ? positions : pool;
    uint64_t wanted = (uint64_t)request->token_count + request->new_count_max;
    if (request->source &&
        request->source->block_count != blocks_for(batcher, request->token_count - 1))
        return cox_fail(err, COX_INVALID,
                        "%" PRIu32 " blocks for the first %" PRIu32
                        " positions of a sequence: blocks of %" PRIu32 " make it %" PRIu32,
                        request->source->block_count, request->token_count - 1, options->block_size,
                        blocks_for(batcher, request->token_count - 1));
    /* A sequence that another group has begun may reach the limit. */
    if (request->shorten && wanted > fits &&
        request->token_count < fits + (request->source != NULL))
        wanted = fits;
    if (wanted > positions)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a prompt of %u tokens and %u to generate need %llu positions; the model has %u",
            request->token_count, request->new_count_max, (unsigned long long)wanted - 1,
            options->position_count_max);
    if (wanted > pool)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a prompt of %u tokens and %u to generate need %llu blocks of KV cache of %u positions; the workers have %u",
            request->token_count, request->new_count_max,
            (unsigned long long)(wanted - 2) / options->block_size + 1, options->block_size,
            options->block_count);
    uint32_t token_end = (uint32_t)wanted;
    size_t cost = empty_cost(options) +
                  row_cost(batcher, request, token_end, table_size(batcher, token_end), true);
    if (options->request_size_max && cost > options->request_size_max)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a sequence of %u tokens takes up to %zu bytes of a step; a frame of the execute channel holds %zu: enlarge its request region",
            token_end, cost, options->request_size_max);
    *ret_token_end = token_end;
    return 0;
}

int cox_batcher_add(struct cox_batcher *batcher, const struct cox_prompt_request *request)
{
    struct cox_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence)
        return -ENOMEM;
    sequence->id = ++batcher->last_id;
    sequence->request = *request;
    sequence->request.tokens = NULL;
    sequence->request.lora = request->lora ? strdup(request->lora) : NULL;
    sequence->request.source = NULL;
    sequence->prompt_count = sequence->token_count = request->token_count;
    uint32_t token_end = request->token_count;
    int r = request_fit(batcher, request, &token_end, &sequence->error);
    /* Another group generates the rest, which must fit all the same. */
    if (!r && request->hold_ms)
        token_end = request->token_count + 1;
    sequence->token_end = token_end;
    sequence->tokens = calloc((size_t)token_end + 1, sizeof *sequence->tokens);
    sequence->blocks = calloc(r                    ? 1
                              : request->pull_only ? request->source->block_count
                                                   : table_size(batcher, token_end),
                              sizeof *sequence->blocks);
    sequence->source = request->source ? cox_kv_reference_dup(request->source) : NULL;
    if (!sequence->tokens || !sequence->blocks || (request->source && !sequence->source) ||
        (request->lora && !sequence->request.lora)) {
        cox_sequence_free(sequence);
        return -ENOMEM;
    }
    if (request->token_count && !request->pull_only)
        memcpy(sequence->tokens, request->tokens, request->token_count * sizeof *sequence->tokens);
    if (r) {
        sequence->finish = COX_FINISH_ERROR;
        list_append(&batcher->done, sequence);
    } else if (!request->pull_only && token_end == request->token_count) {
        sequence->finish = COX_FINISH_LENGTH; /* the other group has generated the last token */
        list_append(&batcher->done, sequence);
    } else {
        list_append(&batcher->waiting, sequence);
    }
    return 0;
}

/* ---- the next step ---- */

/* Drops the first count unreported slots: the ranks were informed, or need not be. */
static void unreported_drop(struct cox_batcher *batcher, uint32_t count)
{
    batcher->unreported_count -= count;
    memmove(batcher->unreported_slots, batcher->unreported_slots + count,
            batcher->unreported_count * sizeof *batcher->unreported_slots);
    memmove(batcher->unreported_ids, batcher->unreported_ids + count,
            batcher->unreported_count * sizeof *batcher->unreported_ids);
}

/* Frees the slot and the blocks of a sequence that was in the ranks' tables. The slot is reusable
 * once the end was reported. */
static void slot_leave(struct cox_batcher *batcher, uint32_t slot, int64_t id)
{
    if (batcher->unreported_count == slot_count_max(&batcher->options)) {
        /* A slot can be listed twice: a step reported it, a new owner used it, and the step was
         * reverted. The base of the next step reports the oldest ones. */
        COX_ASSERT(!batcher->reported_count);
        unreported_drop(batcher, 1);
    }
    batcher->slots[batcher->slot_count++] = slot;
    batcher->unreported_slots[batcher->unreported_count] = slot;
    batcher->unreported_ids[batcher->unreported_count++] = id;
}

/* The i-th step in flight, oldest first. */
static struct planned_step *flight_at(const struct cox_batcher *batcher, uint32_t i)
{
    return &batcher->flights[(batcher->flight_first + i) % batcher->options.step_count_max];
}

/* The sequence ends while steps have rows of it. These emit nothing any more, but the last of them
 * may still write to its blocks. */
static void sequence_part(struct cox_batcher *batcher, struct cox_sequence *sequence)
{
    struct planned_step *last = NULL;
    for (uint32_t i = 0; i < batcher->flight_count; i++) {
        struct planned_step *flight = flight_at(batcher, i);
        for (uint32_t row = 0; row < flight->step.row_count; row++)
            if (flight->rows[row].sequence == sequence) {
                flight->rows[row].sequence = NULL;
                last = flight;
            }
    }
    last->retirings[last->retiring_count++] = (struct retiring){
        .blocks = sequence->blocks,
        .block_count = sequence->block_count,
        .slot = sequence->slot,
        .id = sequence->id,
    };
    sequence->blocks = NULL;
    sequence->token_count -= sequence->pending_count;
    sequence->row_count = sequence->pending_count = 0;
}

/* Removes a running sequence. Its blocks are free, and its slot once the ranks were informed.
 * Otherwise both belong to its lease, or wait for the last step that has a row of it. */
static void running_remove(struct cox_batcher *batcher, uint32_t index)
{
    struct cox_sequence *sequence = batcher->running[index];
    memmove(&batcher->running[index], &batcher->running[index + 1],
            (batcher->running_count - index - 1) * sizeof(struct cox_sequence *));
    batcher->running_count--;
    /* leased blocks are not written any more */
    COX_ASSERT(!sequence->hold || !sequence->row_count);
    if (sequence->hold)
        sequence->hold->slot = sequence->slot;
    else if (sequence->row_count)
        sequence_part(batcher, sequence);
    else if (sequence->held)
        slot_leave(batcher, sequence->slot, sequence->id);
    else
        batcher->slots[batcher->slot_count++] = sequence->slot;
    if (!sequence->hold && sequence->blocks)
        cox_blocks_give(&batcher->blocks, sequence->blocks, sequence->block_count);
    sequence->block_count = sequence->sent_block_count = sequence->computed = 0;
    sequence->known = sequence->held = false;
}

static void preempt_youngest(struct cox_batcher *batcher)
{
    struct cox_sequence *sequence = batcher->running[batcher->running_count - 1];
    running_remove(batcher, batcher->running_count - 1);
    list_prepend(&batcher->waiting, sequence);
    batcher->stats.preemptions++;
}

/* Takes blocks for the first `positions` positions. False: too few are free. */
static bool table_grow(struct cox_batcher *batcher, struct cox_sequence *sequence,
                       uint32_t positions)
{
    uint32_t count = blocks_for(batcher, positions);
    if (count <= sequence->block_count)
        return true;
    if (!cox_blocks_take(&batcher->blocks, count - sequence->block_count,
                         sequence->blocks + sequence->block_count))
        return false;
    sequence->block_count = count;
    return true;
}

/* How many tokens of the sequence fit into the step; 0: no row fits. */
static uint32_t row_room(const struct cox_batcher *batcher, const struct cox_sequence *sequence,
                         uint32_t block_count)
{
    const struct cox_batcher_options *options = &batcher->options;
    const struct cox_step *step = &batcher->next->step;
    const bool again = sequence->computed < sequence->reached;
    const uint32_t most = again ? options->token_count_max : batcher->token_limit;
    uint32_t left = most > step->token_count ? most - step->token_count : 0;
    uint32_t wanted = sequence->token_count - sequence->computed;
    if (again && batcher->token_limit < most && !options->nested &&
        left > sequence->reached - sequence->computed)
        left = sequence->reached - sequence->computed;
    size_t cost =
        row_cost(batcher, &sequence->request, sequence->token_count, block_count, !sequence->known);
    if (step->row_count == options->sequence_count_max ||
        (options->request_size_max && batcher->step_cost + cost > options->request_size_max))
        return 0;
    if (wanted <= left)
        return wanted;
    /* A prompt that may not be chunked gets a step of its own when no step has room for it. */
    if (options->nested)
        return step->row_count == 0 ? wanted : 0;
    return left;
}

static bool is_decode(const struct cox_sequence *sequence)
{
    return sequence->known && sequence->token_count - sequence->computed == 1 &&
           sequence->token_count > sequence->prompt_count;
}

static void row_add(struct cox_batcher *batcher, struct cox_sequence *sequence, uint32_t count)
{
    struct planned_step *next = batcher->next;
    /* announcing sends all tokens, so none is pending */
    COX_ASSERT(sequence->known || !sequence->pending_count);
    next->rows[next->step.row_count++] = (struct cox_step_row){
        .sequence = sequence,
        .position = sequence->computed,
        .count = count,
        .announce = !sequence->known,
        .emit = sequence->computed + count == sequence->token_count,
        .decode = is_decode(sequence),
    };
    next->step.token_count += count;
    batcher->step_cost += row_cost(batcher, &sequence->request, sequence->token_count,
                                   sequence->block_count, !sequence->known);
}

/* Adds rows for the running sequences, oldest first, so that the oldest always advances. False:
 * blocks ran out while steps are in flight. Preemption then waits until none is: a step may end a
 * sequence, and a preempted one must have no rows. */
static bool rows_of_running(struct cox_batcher *batcher, bool prefills, bool decodes)
{
    for (uint32_t i = 0; i < batcher->running_count; i++) {
        struct cox_sequence *sequence = batcher->running[i];
        /* Its last token is pending. */
        if (sequence->token_count == sequence->token_end)
            continue;
        if (is_decode(sequence) ? !decodes : !prefills)
            continue;
        uint32_t count = row_room(batcher, sequence, table_size(batcher, sequence->token_end));
        if (count == 0)
            continue;
        /* Sequences younger than this one have no row yet, so any of them can be preempted. */
        while (!table_grow(batcher, sequence, sequence->computed + count)) {
            if (batcher->flight_count)
                return false;
            preempt_youngest(batcher);
            if (i >= batcher->running_count)
                return true; /* the preempted one was the youngest, which is this one */
        }
        row_add(batcher, sequence, count);
    }
    return true;
}

/* Admits from the waiting list strictly in order, so that a large request is not overtaken for
 * ever. */
static void rows_of_waiting(struct cox_batcher *batcher)
{
    while (batcher->waiting.first && batcher->slot_count &&
           batcher->running_count + batcher->pulling.count < batcher->options.sequence_count_max) {
        struct cox_sequence *sequence = batcher->waiting.first;
        uint32_t blocks = sequence->request.pull_only ? sequence->source->block_count
                                                      : blocks_for(batcher, sequence->token_count);
        uint32_t count = sequence->source ? 1 : row_room(batcher, sequence, blocks);
        /* One spare block per running sequence: else the next step would have to preempt what this
         * one admits. */
        uint32_t spare = batcher->running_count + batcher->pulling.count;
        /* request_fit ensured that it fits alone, but leased and quarantined blocks are missing
         * here. */
        if (count == 0 || blocks + spare > batcher->blocks.free_count)
            return;
        COX_ASSERT(cox_blocks_take(&batcher->blocks, blocks, sequence->blocks));
        sequence->block_count = blocks;
        list_pop(&batcher->waiting);
        sequence->slot = batcher->slots[--batcher->slot_count];
        if (sequence->source) {
            sequence->fresh = true;
            sequence->pulls++;
            list_append(&batcher->pulling, sequence);
            continue;
        }
        batcher->running[batcher->running_count++] = sequence;
        row_add(batcher, sequence, count);
    }
}

static void step_begin(struct cox_batcher *batcher)
{
    COX_ASSERT(!batcher->given && batcher->flight_count < batcher->options.step_count_max);
    batcher->next = flight_at(batcher, batcher->flight_count);
    batcher->next->step = (struct cox_step){.base = batcher->base, .rows = batcher->next->rows};
    batcher->step_cost = empty_cost(&batcher->options);
}

/* Completes the step from its rows and lends it. */
static void step_give(struct cox_batcher *batcher, const struct cox_step **ret_step)
{
    struct cox_step *step = &batcher->next->step;
    step->finished_slots = batcher->unreported_slots + batcher->reported_count;
    /* The nested form has no field for them: cox_batcher_unreported. */
    step->finished_count = batcher->options.nested || !batcher->base
                               ? 0
                               : batcher->unreported_count - batcher->reported_count;
    step->running_count = batcher->running_count;
    step->waiting_count = batcher->waiting.count;
    batcher->given = true;
    *ret_step = step;
}

/* Returns false as rows_of_running does. */
static bool step_fill(struct cox_batcher *batcher)
{
    uint64_t preemptions = batcher->stats.preemptions;
    if (batcher->options.nested) {
        rows_of_running(batcher, true, false);
        rows_of_waiting(batcher);
        return batcher->next->step.row_count || rows_of_running(batcher, false, true);
    }
    if (!rows_of_running(batcher, true, true))
        return false;
    if (batcher->stats.preemptions == preemptions)
        rows_of_waiting(batcher);
    return true;
}

int cox_batcher_next(struct cox_batcher *batcher, const struct cox_step **ret_step)
{
    step_begin(batcher);
    if (!batcher->running_count && !batcher->waiting.first && !batcher->pulling.first &&
        !batcher->flight_count)
        return COX_EMPTY;
    struct cox_step *step = &batcher->next->step;
    if (!step_fill(batcher))
        return COX_BUSY;
    if (step->row_count == 0) {
        /* Otherwise the oldest would have a row. */
        COX_ASSERT(batcher->flight_count || batcher->pulling.first ||
                   batcher->blocks.free_count < batcher->blocks.count);
        return COX_BUSY;
    }

    uint32_t decode_count = 0;
    for (uint32_t i = 0; i < step->row_count; i++)
        decode_count += step->rows[i].decode;
    step->kind = decode_count == step->row_count ? COX_STEP_DECODE
                 : decode_count == 0             ? COX_STEP_PREFILL
                                                 : COX_STEP_MIXED;
    step_give(batcher, ret_step);
    return 0;
}

void cox_batcher_next_empty(struct cox_batcher *batcher, const struct cox_step **ret_step)
{
    step_begin(batcher);
    batcher->next->step.kind = COX_STEP_DUMMY;
    step_give(batcher, ret_step);
}

void cox_batcher_publish(struct cox_batcher *batcher, uint64_t sequence)
{
    COX_ASSERT(batcher->given);
    struct planned_step *flight = batcher->next;
    batcher->given = false;
    batcher->flight_count++;
    flight->sequence = batcher->base = sequence;
    /* The step reports them, by base 0 if not by its list. */
    flight->reported_count =
        batcher->options.nested ? 0 : batcher->unreported_count - batcher->reported_count;
    batcher->reported_count += flight->reported_count;
    for (uint32_t i = 0; i < flight->step.row_count; i++) {
        const struct cox_step_row *row = &flight->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence; /* the batcher's own */
        s->known = s->held = true;
        s->sent_block_count = s->block_count;
        if (!s->computed)
            s->since = sequence;
        s->computed += row->count;
        s->row_count++;
        if (!row->emit)
            continue;
        s->tokens[s->token_count++] = -1;
        s->pending_count++;
    }
}

/* ---- outcome of a step ---- */

static bool is_stop(const struct cox_sequence *sequence, int32_t token)
{
    for (uint32_t i = 0; i < sequence->request.stop_count; i++)
        if (sequence->request.stop_tokens[i] == token)
            return true;
    return false;
}

/* Frees what ended sequences kept for rows of this step, if it is the last with any. */
static void flight_part(struct cox_batcher *batcher, struct planned_step *flight)
{
    for (uint32_t i = 0; i < flight->retiring_count; i++) {
        struct retiring *retiring = &flight->retirings[i];
        cox_blocks_give(&batcher->blocks, retiring->blocks, retiring->block_count);
        slot_leave(batcher, retiring->slot, retiring->id);
        free(retiring->blocks);
        if (retiring->sequence)
            list_append(&batcher->done, retiring->sequence);
    }
    flight->retiring_count = 0;
}

/* The token of a row is known; it may end the sequence. */
static void sequence_take(struct cox_batcher *batcher, struct cox_sequence *s, int32_t token,
                          const struct cox_row_end *end, const char *text)
{
    const bool ended = end && end->ended;
    const bool stop = ended ? end->finish == COX_FINISH_STOP : is_stop(s, token);
    if (!ended && !stop && s->token_count - s->pending_count < s->token_end)
        return;
    s->finish = ended ? end->finish : stop ? COX_FINISH_STOP : COX_FINISH_LENGTH;
    if (s->finish == COX_FINISH_ERROR)
        cox_fail(&s->error, end->code,
                 "the workers ended the prompt: %s (finish reason %" PRId32 ")%s%.800s", end->words,
                 end->reason, text && *text ? ": " : "", text ? text : "");
    if (s->finish == COX_FINISH_LENGTH && s->request.hold_ms && s->since >= batcher->renewed &&
        batcher->holds.count < batcher->options.hold_count_max)
        s->hold =
            cox_kv_leases_add(&batcher->holds, s->id, s->request.owner,
                              cox_deadline_after_ms(s->request.hold_ms), s->blocks, s->block_count);
    uint32_t index = 0;
    while (batcher->running[index] != s)
        index++;
    running_remove(batcher, index);
    list_append(&batcher->done, s);
}

int cox_batcher_commit(struct cox_batcher *batcher, const int32_t *tokens,
                       const struct cox_row_end *ends, const char *text, struct cox_error *err)
{
    COX_ASSERT(batcher->flight_count);
    struct planned_step *flight = flight_at(batcher, 0);
    for (uint32_t i = 0; i < flight->step.row_count; i++)
        if (flight->rows[i].emit && tokens[i] < 0)
            return cox_fail(err, COX_CORRUPT,
                            "row %u of step %llu should emit a token and emitted %d", i,
                            (unsigned long long)flight->sequence, tokens[i]);
    batcher->flight_first = (batcher->flight_first + 1) % batcher->options.step_count_max;
    batcher->flight_count--;
    batcher->reported_count -= flight->reported_count;
    unreported_drop(batcher, flight->reported_count);
    flight_part(batcher, flight);
    for (uint32_t i = 0; i < flight->step.row_count; i++) {
        const struct cox_step_row *row = &flight->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence;
        if (!s)
            continue; /* it has ended before */
        batcher->stats.prompt_tokens += row->decode ? 0 : row->count;
        s->row_count--;
        const uint32_t end = row->position + row->count;
        if (end > s->reached) {
            batcher->stats.positions += end - s->reached;
            s->reached = end;
        }
        if (!row->emit)
            continue;
        s->tokens[s->token_count - s->pending_count--] = tokens[i];
        batcher->stats.generated_tokens++;
        sequence_take(batcher, s, tokens[i], ends ? &ends[i] : NULL, text);
    }
    return 0;
}

static void holds_end(struct cox_batcher *batcher, uint64_t owner, int64_t id, uint64_t now_ns)
{
    struct cox_kv_lease *hold;
    while ((hold = cox_kv_leases_take(&batcher->holds, owner, id, now_ns))) {
        for (struct cox_sequence *s = batcher->done.first; s; s = s->next)
            if (s->hold == hold)
                s->hold = NULL;
        cox_blocks_give(&batcher->blocks, hold->blocks, hold->block_count);
        slot_leave(batcher, hold->slot, hold->id);
        free(hold);
    }
}

void cox_batcher_renew(struct cox_batcher *batcher)
{
    COX_ASSERT(batcher->flight_count);
    batcher->renewed = flight_at(batcher, 0)->sequence;
    holds_end(batcher, 0, 0, COX_DEADLINE_NEVER);
}

/* Voids the ranks' tables and all steps in flight. */
static void flights_drop(struct cox_batcher *batcher)
{
    batcher->given = false;
    batcher->base = batcher->renewed = 0;
    batcher->reported_count = 0;
    while (batcher->flight_count)
        flight_part(batcher, flight_at(batcher, --batcher->flight_count));
    for (uint32_t i = 0; i < batcher->running_count; i++) {
        struct cox_sequence *s = batcher->running[i];
        s->token_count -= s->pending_count;
        s->known = false;
        s->held = s->held && batcher->options.nested;
        s->computed = s->sent_block_count = s->row_count = s->pending_count = 0;
    }
}

void cox_batcher_revert(struct cox_batcher *batcher)
{
    flights_drop(batcher);
    holds_end(batcher, 0, 0, COX_DEADLINE_NEVER);
}

void cox_batcher_limit(struct cox_batcher *batcher, uint32_t token_count)
{
    const uint32_t most = batcher->options.token_count_max;
    batcher->token_limit = token_count > most ? most : token_count ? token_count : 1;
}

struct cox_sequence *cox_batcher_done(struct cox_batcher *batcher)
{
    return list_pop(&batcher->done);
}

void cox_batcher_fail(struct cox_batcher *batcher, int code, const char *text)
{
    struct cox_sequence *sequence;
    flights_drop(batcher);
    while (batcher->running_count) {
        sequence = batcher->running[batcher->running_count - 1];
        running_remove(batcher, batcher->running_count - 1);
        list_prepend(&batcher->waiting, sequence);
    }
    while ((sequence = list_pop(&batcher->pulling)))
        list_prepend(&batcher->waiting, sequence); /* their blocks stay out of use */
    while ((sequence = list_pop(&batcher->waiting))) {
        sequence->finish = COX_FINISH_ERROR;
        cox_fail(&sequence->error, code, "%s", text);
        list_append(&batcher->done, sequence);
    }
}

/* Removes the sequence of this id, or, if id is NULL, of this context. NULL: none. */
static struct cox_sequence *list_take(struct list *list, const int64_t *id, const void *context)
{
    struct cox_sequence **link = &list->first;
    while (*link && (id ? (*link)->id != *id : (*link)->request.context != context))
        link = &(*link)->next;
    struct cox_sequence *sequence = *link;
    if (!sequence)
        return NULL;
    *link = sequence->next;
    if (!*link)
        list->end = link;
    list->count--;
    return sequence;
}

/* The sequence does not run, so it keeps neither slot nor blocks. Blocks that are not drained stay
 * out of use. */
static void pulling_leave(struct cox_batcher *batcher, struct cox_sequence *sequence, bool drained)
{
    batcher->slots[batcher->slot_count++] = sequence->slot;
    if (drained)
        cox_blocks_give(&batcher->blocks, sequence->blocks, sequence->block_count);
    sequence->block_count = 0;
}

/* What an ended sequence still keeps. NULL: no step in flight has a row of it. */
static struct retiring *retiring_find(const struct cox_batcher *batcher, int64_t id)
{
    for (uint32_t i = 0; i < batcher->flight_count; i++)
        for (uint32_t p = 0; p < flight_at(batcher, i)->retiring_count; p++)
            if (flight_at(batcher, i)->retirings[p].id == id)
                return &flight_at(batcher, i)->retirings[p];
    return NULL;
}

void cox_batcher_cancel(struct cox_batcher *batcher, const void *context)
{
    COX_ASSERT(!batcher->given);
    struct cox_sequence *sequence = list_take(&batcher->waiting, NULL, context);
    /* cox_batcher_pull has not returned it, so no pull is under way (cox_batcher_pulling). */
    if (!sequence && (sequence = list_take(&batcher->pulling, NULL, context)))
        pulling_leave(batcher, sequence, true);
    for (uint32_t i = 0; !sequence && i < batcher->running_count; i++)
        if (batcher->running[i]->request.context == context) {
            sequence = batcher->running[i];
            running_remove(batcher, i);
        }
    if (!sequence)
        return;
    sequence->finish = COX_FINISH_ERROR;
    cox_fail(&sequence->error, COX_CLOSED, "cancelled");
    /* When it is reported as done, its adapter may be unloaded. So it is not done before the ranks
     * have learned that it ended. */
    struct retiring *retiring =
        sequence->request.lora ? retiring_find(batcher, sequence->id) : NULL;
    if (retiring)
        retiring->sequence = sequence;
    else
        list_append(&batcher->done, sequence);
}

/* ---- pulls ---- */

const struct cox_sequence *cox_batcher_pull(struct cox_batcher *batcher)
{
    struct cox_sequence *sequence = batcher->pulling.first;
    while (sequence && !sequence->fresh)
        sequence = sequence->next;
    if (sequence)
        sequence->fresh = false;
    return sequence;
}

int cox_batcher_pulled(struct cox_batcher *batcher, int64_t id, enum cox_pull_end end, bool drained,
                       void *report, const struct cox_error *err)
{
    COX_ASSERT(!batcher->given);
    struct cox_sequence *sequence = list_take(&batcher->pulling, &id, NULL);
    if (!sequence)
        return COX_NOT_FOUND;
    free(sequence->report);
    sequence->report = report;
    bool runs = end == COX_PULL_END_DONE && !sequence->request.pull_only;
    COX_ASSERT(drained || end != COX_PULL_END_DONE);
    if (!runs)
        pulling_leave(batcher, sequence, drained);
    if (end == COX_PULL_END_RECOMPUTE) {
        sequence->recomputed = true;
        batcher->stats.recomputed++;
    }
    if (end != COX_PULL_END_RETRY) {
        free(sequence->source);
        sequence->source = NULL;
    }
    if (runs) {
        sequence->computed = sequence->token_count - 1;
        sequence->since = batcher->base;
        batcher->running[batcher->running_count++] = sequence;
    } else if (end == COX_PULL_END_RETRY || end == COX_PULL_END_RECOMPUTE) {
        list_prepend(&batcher->waiting, sequence);
    } else {
        sequence->finish = end == COX_PULL_END_DONE ? COX_FINISH_LENGTH : COX_FINISH_ERROR;
        if (end == COX_PULL_END_FAIL)
            sequence->error = *err;
        list_append(&batcher->done, sequence);
    }
    return 0;
}

const struct cox_sequence *cox_batcher_pulling(const struct cox_batcher *batcher, int64_t id,
                                               const void *context)
{
    const struct cox_sequence *sequence = batcher->pulling.first;
    while (sequence &&
           (sequence->fresh || (id ? sequence->id != id : sequence->request.context != context)))
        sequence = sequence->next;
    return sequence;
}

void cox_batcher_reserve(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count)
{
    cox_blocks_reserve(&batcher->blocks, blocks, count);
}

void cox_batcher_give(struct cox_batcher *batcher, const int32_t *blocks, uint32_t count)
{
    cox_blocks_give(&batcher->blocks, blocks, count);
}

/* ---- leases ---- */

void cox_batcher_release(struct cox_batcher *batcher, uint64_t owner, int64_t id)
{
    COX_ASSERT(!batcher->given);
    holds_end(batcher, owner, id, COX_DEADLINE_NEVER);
}

void cox_batcher_expire(struct cox_batcher *batcher, uint64_t now_ns)
{
    COX_ASSERT(!batcher->given);
    holds_end(batcher, 0, 0, now_ns);
}

const struct cox_kv_leases *cox_batcher_kv_leases(const struct cox_batcher *batcher)
{
    return &batcher->holds;
}

int64_t cox_batcher_last_id(const struct cox_batcher *batcher)
{
    return batcher->last_id;
}

/* ---- unreported sequences ---- */

uint32_t cox_batcher_unreported(const struct cox_batcher *batcher, const int64_t **ret_ids)
{
    *ret_ids = batcher->unreported_ids + batcher->reported_count;
    return batcher->unreported_count - batcher->reported_count;
}

void cox_batcher_reported(struct cox_batcher *batcher)
{
    batcher->unreported_count = batcher->reported_count;
}

int64_t *cox_batcher_take_unreported(struct cox_batcher *batcher, uint32_t *ret_count)
{
    int64_t *ids = batcher->unreported_ids;
    *ret_count = batcher->unreported_count;
    batcher->unreported_ids = NULL;
    return ids;
}

void cox_batcher_stats(const struct cox_batcher *batcher, struct cox_batcher_stats *ret_stats)
{
    *ret_stats = batcher->stats;
}

uint32_t cox_batcher_free_blocks(const struct cox_batcher *batcher)
{
    return batcher->blocks.free_count;
}
