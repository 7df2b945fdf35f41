#include "plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"

/* Upper bounds of encoded sizes, in bytes. Packed: varints of at most 5 bytes in columns. */
#define STEP_COST 256    /* heads, each column's key and length (148), where the weights are (80) */
#define FINISHED_COST 32 /* a slot, or a request id as text */
#define ROW_COST 40      /* four columns, and a block append */
#define ANNOUNCE_COST 160 /* heads, id, slot, sampling */
#define NUMBER_COST 5
#define NESTED_ROW_COST 320
#define NESTED_NUMBER_COST 8 /* int64 arrays */

struct list {
    struct cox_sequence *first;
    /* the NULL pointer that the next element replaces */
    struct cox_sequence **end;
    uint32_t count;
};

/* Resources of an ended sequence, kept until the last step with a row of it is over. */
struct parting {
    /* block table */
    int32_t *blocks;
    uint32_t block_count;
    uint32_t slot;
    int64_t id;
    /* done when the parting is over; NULL: it is done already, or was cancelled */
    struct cox_sequence *sequence;
};

struct flight {
    struct cox_step step;
    struct cox_step_row *rows;
    /* at most one per row */
    struct parting *partings;
    uint32_t parting_count;
    /* ended sequences that the step reports */
    uint32_t reported_count;
    /* step number */
    uint64_t sequence;
};

struct cox_plan {
    struct cox_plan_options options;
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
    struct flight *flights;
    uint32_t flight_first, flight_count;
    /* the ring entry behind those, being filled, or filled and not published */
    struct flight *next;
    bool given;
    /* encoded size of next */
    size_t step_cost;
    uint32_t token_limit;
    uint64_t base;
    /* number of the first step with the current weights; 0: none */
    uint64_t renewed;
    int64_t last_id;
    struct cox_plan_stats stats;
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

static uint32_t blocks_for(const struct cox_plan *plan, uint32_t positions)
{
    return positions / plan->options.block_size + (positions % plan->options.block_size != 0);
}

/* The table is full when the last token but one is computed: the very last token is never computed.
 */
static uint32_t table_size(const struct cox_plan *plan, uint32_t token_end)
{
    return blocks_for(plan, token_end - 1);
}

/* Upper bound of what a row of the sequence adds to the step. */
static size_t row_cost(const struct cox_plan *plan, const struct cox_prompt_request *request,
                       uint32_t token_count, uint32_t block_count, bool announce)
{
    const size_t lora_cost =
        request->lora ? strlen(request->lora) : 0; /* the key is counted among the heads */
    if (plan->options.nested)
        return NESTED_ROW_COST + NESTED_NUMBER_COST * (size_t)block_count + lora_cost +
               (announce ? NESTED_NUMBER_COST * (size_t)token_count : 0);
    if (!announce)
        return ROW_COST;
    return ROW_COST + ANNOUNCE_COST + lora_cost + NUMBER_COST * ((size_t)token_count + block_count);
}

/* Running sequences, leased ones, and ended ones with a row in flight. */
static uint32_t slot_count_max(const struct cox_plan_options *options)
{
    return options->sequence_count_max + options->hold_count_max + options->parting_count_max;
}

static size_t empty_cost(const struct cox_plan_options *options)
{
    return STEP_COST + FINISHED_COST * (size_t)options->sequence_count_max +
           NUMBER_COST * ((size_t)options->hold_count_max + options->parting_count_max);
}

/* ---- constructor and destructor ---- */

static int flights_init(struct cox_plan *plan)
{
    uint32_t row_count = plan->options.sequence_count_max;
    plan->flights = calloc(plan->options.step_count_max, sizeof *plan->flights);
    if (!plan->flights)
        return -ENOMEM;
    for (uint32_t i = 0; i < plan->options.step_count_max; i++) {
        struct flight *flight = &plan->flights[i];
        flight->rows = calloc(row_count, sizeof *flight->rows);
        flight->partings = calloc(row_count, sizeof *flight->partings);
        if (!flight->rows || !flight->partings)
            return -ENOMEM;
    }
    return 0;
}

static void flights_deinit(struct cox_plan *plan)
{
    for (uint32_t i = 0; plan->flights && i < plan->options.step_count_max; i++) {
        struct flight *flight = &plan->flights[i];
        for (uint32_t p = 0; p < flight->parting_count; p++) {
            free(flight->partings[p].blocks);
            cox_sequence_free(flight->partings[p].sequence);
        }
        free(flight->partings);
        free(flight->rows);
    }
    free(plan->flights);
}

int cox_plan_new(const struct cox_plan_options *options, struct cox_plan **ret_plan,
                 struct cox_error *err)
{
    COX_ASSERT(!options->nested || options->step_count_max <= 1);
    if (!options->sequence_count_max || !options->token_count_max || !options->block_size ||
        !options->position_count_max)
        return cox_fail(err, COX_INVALID,
                        "sequences, tokens per step, block size and positions must not be 0");
    if (!options->block_count)
        return cox_fail(err, COX_INVALID, "the workers offer no block of KV cache");
    if (options->request_size_max &&
        options->request_size_max < empty_cost(options) + NESTED_ROW_COST)
        return cox_fail(err, COX_INVALID,
                        "a frame of %zu bytes is too small for steps of %u sequences",
                        options->request_size_max, options->sequence_count_max);
    struct cox_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return cox_fail(err, -ENOMEM, "no memory for the schedule");
    plan->options = *options;
    plan->token_limit = options->token_count_max;
    if (!options->step_count_max)
        plan->options.step_count_max = 1;
    list_init(&plan->waiting);
    list_init(&plan->done);
    list_init(&plan->pulling);
    plan->last_id = options->last_id;
    uint32_t count = options->sequence_count_max, slot_count = slot_count_max(options);
    plan->running = calloc(count, sizeof *plan->running);
    plan->slots = calloc(slot_count, sizeof *plan->slots);
    plan->unreported_slots = calloc(slot_count, sizeof *plan->unreported_slots);
    plan->unreported_ids = calloc(slot_count, sizeof *plan->unreported_ids);
    if (!plan->running || !plan->slots || !plan->unreported_slots || !plan->unreported_ids ||
        flights_init(plan) || cox_blocks_init(&plan->blocks, options->block_count)) {
        cox_plan_free(plan);
        return cox_fail(err, -ENOMEM, "no memory for a schedule of %u sequences and %u blocks",
                        count, options->block_count);
    }
    for (; plan->slot_count < slot_count; plan->slot_count++)
        plan->slots[plan->slot_count] = slot_count - 1 - plan->slot_count;
    *ret_plan = plan;
    return 0;
}

struct cox_plan *cox_plan_free(struct cox_plan *plan)
{
    if (!plan)
        return NULL;
    struct cox_sequence *sequence;
    while ((sequence = list_pop(&plan->waiting)) || (sequence = list_pop(&plan->done)) ||
           (sequence = list_pop(&plan->pulling)))
        cox_sequence_free(sequence);
    struct cox_kv_lease *hold;
    while ((hold = cox_kv_leases_take(&plan->holds, 0, 0, COX_DEADLINE_NEVER)))
        free(hold);
    for (uint32_t i = 0; i < plan->running_count; i++)
        cox_sequence_free(plan->running[i]);
    cox_blocks_deinit(&plan->blocks);
    free(plan->running);
    free(plan->slots);
    free(plan->unreported_slots);
    free(plan->unreported_ids);
    flights_deinit(plan);
    free(plan);
    return NULL;
}

struct cox_sequence *cox_sequence_free(struct cox_sequence *sequence)
{
    if (sequence) {
        free(sequence->tokens);
        free(sequence->blocks);
        free((char *)(uintptr_t)sequence->request.lora);
        cox_kv_reference_free(sequence->source);
        free(sequence->report);
        free(sequence);
    }
    return NULL;
}

/* ---- requests ---- */

/* Sets token_end, or the error of a request that can never run. */
static int request_fit(const struct cox_plan *plan, const struct cox_prompt_request *request,
                       uint32_t *ret_token_end, struct cox_error *err)
{
    const struct cox_plan_options *options = &plan->options;
    if (request->source && options->nested)
        return cox_fail(err, COX_UNSUPPORTED, "legacy workers pull nothing");
    if (request->pull_only) {
        if (request->source && request->source->block_count <= options->block_count)
            return 0;
        return cox_fail(err, COX_INVALID, "%" PRIu32 " blocks are to be pulled: here are %" PRIu32,
                        request->source ? request->source->block_count : 0, options->block_count);
    }
    if (request->token_count == 0 || request->new_count_max == 0)
        return cox_fail(err, COX_INVALID, "%s",
                        request->token_count ? "no token is to be generated"
                                             : "the prompt is empty");
    /* The very last token is not computed, so it needs neither position nor block. */
    uint64_t pool = (uint64_t)options->block_count * options->block_size + 1;
    uint64_t positions = (uint64_t)options->position_count_max + 1;
    uint64_t fits = positions < pool ? positions : pool;
    uint64_t wanted = (uint64_t)request->token_count + request->new_count_max;
    if (request->source &&
        request->source->block_count != blocks_for(plan, request->token_count - 1))
        return cox_fail(err, COX_INVALID,
                        "%" PRIu32 " blocks for the first %" PRIu32
                        " positions of a sequence: blocks of %" PRIu32 " make it %" PRIu32,
                        request->source->block_count, request->token_count - 1, options->block_size,
                        blocks_for(plan, request->token_count - 1));
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
    size_t cost =
        empty_cost(options) + row_cost(plan, request, token_end, table_size(plan, token_end), true);
    if (options->request_size_max && cost > options->request_size_max)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a sequence of %u tokens takes up to %zu bytes of a step; a frame of the execute channel holds %zu: enlarge its request region",
            token_end, cost, options->request_size_max);
    *ret_token_end = token_end;
    return 0;
}

int cox_plan_add(struct cox_plan *plan, const struct cox_prompt_request *request)
{
    struct cox_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence)
        return -ENOMEM;
    sequence->id = ++plan->last_id;
    sequence->request = *request;
    sequence->request.tokens = NULL;
    sequence->request.lora = request->lora ? strdup(request->lora) : NULL;
    sequence->request.source = NULL;
    sequence->prompt_count = sequence->token_count = request->token_count;
    uint32_t token_end = request->token_count;
    int r = request_fit(plan, request, &token_end, &sequence->error);
    /* Another group generates the rest, which must fit all the same. */
    if (!r && request->hold_ms)
        token_end = request->token_count + 1;
    sequence->token_end = token_end;
    sequence->tokens = calloc((size_t)token_end + 1, sizeof *sequence->tokens);
    sequence->blocks = calloc(r                    ? 1
                              : request->pull_only ? request->source->block_count
                                                   : table_size(plan, token_end),
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
        list_append(&plan->done, sequence);
    } else if (!request->pull_only && token_end == request->token_count) {
        sequence->finish = COX_FINISH_LENGTH; /* the other group has generated the last token */
        list_append(&plan->done, sequence);
    } else {
        list_append(&plan->waiting, sequence);
    }
    return 0;
}

/* ---- the next step ---- */

/* Drops the first count unreported slots: the ranks were informed, or need not be. */
static void unreported_drop(struct cox_plan *plan, uint32_t count)
{
    plan->unreported_count -= count;
    memmove(plan->unreported_slots, plan->unreported_slots + count,
            plan->unreported_count * sizeof *plan->unreported_slots);
    memmove(plan->unreported_ids, plan->unreported_ids + count,
            plan->unreported_count * sizeof *plan->unreported_ids);
}

/* Frees the slot and the blocks of a sequence that was in the ranks' tables. The slot is reusable
 * once the end was reported. */
static void slot_leave(struct cox_plan *plan, uint32_t slot, int64_t id)
{
    if (plan->unreported_count == slot_count_max(&plan->options)) {
        /* A slot can be listed twice: a step reported it, a new owner used it, and the step was
         * reverted. The base of the next step reports the oldest ones. */
        COX_ASSERT(!plan->reported_count);
        unreported_drop(plan, 1);
    }
    plan->slots[plan->slot_count++] = slot;
    plan->unreported_slots[plan->unreported_count] = slot;
    plan->unreported_ids[plan->unreported_count++] = id;
}

/* The i-th step in flight, oldest first. */
static struct flight *flight_at(const struct cox_plan *plan, uint32_t i)
{
    return &plan->flights[(plan->flight_first + i) % plan->options.step_count_max];
}

/* The sequence ends while steps have rows of it. These emit nothing any more, but the last of them
 * may still write to its blocks. */
static void sequence_part(struct cox_plan *plan, struct cox_sequence *sequence)
{
    struct flight *last = NULL;
    for (uint32_t i = 0; i < plan->flight_count; i++) {
        struct flight *flight = flight_at(plan, i);
        for (uint32_t row = 0; row < flight->step.row_count; row++)
            if (flight->rows[row].sequence == sequence) {
                flight->rows[row].sequence = NULL;
                last = flight;
            }
    }
    last->partings[last->parting_count++] = (struct parting){
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
static void running_remove(struct cox_plan *plan, uint32_t index)
{
    struct cox_sequence *sequence = plan->running[index];
    memmove(&plan->running[index], &plan->running[index + 1],
            (plan->running_count - index - 1) * sizeof(struct cox_sequence *));
    plan->running_count--;
    /* leased blocks are not written any more */
    COX_ASSERT(!sequence->hold || !sequence->row_count);
    if (sequence->hold)
        sequence->hold->slot = sequence->slot;
    else if (sequence->row_count)
        sequence_part(plan, sequence);
    else if (sequence->known)
        slot_leave(plan, sequence->slot, sequence->id);
    else
        plan->slots[plan->slot_count++] = sequence->slot;
    if (!sequence->hold && sequence->blocks)
        cox_blocks_give(&plan->blocks, sequence->blocks, sequence->block_count);
    sequence->block_count = sequence->sent_block_count = sequence->computed = 0;
    sequence->known = false;
}

static void preempt_youngest(struct cox_plan *plan)
{
    struct cox_sequence *sequence = plan->running[plan->running_count - 1];
    running_remove(plan, plan->running_count - 1);
    list_prepend(&plan->waiting, sequence);
    plan->stats.preemptions++;
}

/* Takes blocks for the first `positions` positions. False: too few are free. */
static bool table_grow(struct cox_plan *plan, struct cox_sequence *sequence, uint32_t positions)
{
    uint32_t count = blocks_for(plan, positions);
    if (count <= sequence->block_count)
        return true;
    if (!cox_blocks_take(&plan->blocks, count - sequence->block_count,
                         sequence->blocks + sequence->block_count))
        return false;
    sequence->block_count = count;
    return true;
}

/* How many tokens of the sequence fit into the step; 0: no row fits. */
static uint32_t row_room(const struct cox_plan *plan, const struct cox_sequence *sequence,
                         uint32_t block_count)
{
    const struct cox_plan_options *options = &plan->options;
    const struct cox_step *step = &plan->next->step;
    const bool again = sequence->computed < sequence->reached;
    const uint32_t most = again ? options->token_count_max : plan->token_limit;
    uint32_t left = most > step->token_count ? most - step->token_count : 0;
    uint32_t wanted = sequence->token_count - sequence->computed;
    if (again && plan->token_limit < most && !options->nested &&
        left > sequence->reached - sequence->computed)
        left = sequence->reached - sequence->computed;
    size_t cost =
        row_cost(plan, &sequence->request, sequence->token_count, block_count, !sequence->known);
    if (step->row_count == options->sequence_count_max ||
        (options->request_size_max && plan->step_cost + cost > options->request_size_max))
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

static void row_add(struct cox_plan *plan, struct cox_sequence *sequence, uint32_t count)
{
    struct flight *next = plan->next;
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
    plan->step_cost += row_cost(plan, &sequence->request, sequence->token_count,
                                sequence->block_count, !sequence->known);
}

/* Adds rows for the running sequences, oldest first, so that the oldest always advances. False:
 * blocks ran out while steps are in flight. Preemption then waits until none is: a step may end a
 * sequence, and a preempted one must have no rows. */
static bool rows_of_running(struct cox_plan *plan, bool prefills, bool decodes)
{
    for (uint32_t i = 0; i < plan->running_count; i++) {
        struct cox_sequence *sequence = plan->running[i];
        /* Its last token is pending. */
        if (sequence->token_count == sequence->token_end)
            continue;
        if (is_decode(sequence) ? !decodes : !prefills)
            continue;
        uint32_t count = row_room(plan, sequence, table_size(plan, sequence->token_end));
        if (count == 0)
            continue;
        /* Sequences younger than this one have no row yet, so any of them can be preempted. */
        while (!table_grow(plan, sequence, sequence->computed + count)) {
            if (plan->flight_count)
                return false;
            preempt_youngest(plan);
            if (i >= plan->running_count)
                return true; /* the preempted one was the youngest, which is this one */
        }
        row_add(plan, sequence, count);
    }
    return true;
}

/* Admits from the waiting list strictly in order, so that a large request is not overtaken for
 * ever. */
static void rows_of_waiting(struct cox_plan *plan)
{
    while (plan->waiting.first && plan->slot_count &&
           plan->running_count + plan->pulling.count < plan->options.sequence_count_max) {
        struct cox_sequence *sequence = plan->waiting.first;
        uint32_t blocks = sequence->request.pull_only ? sequence->source->block_count
                                                      : blocks_for(plan, sequence->token_count);
        uint32_t count = sequence->source ? 1 : row_room(plan, sequence, blocks);
        /* One spare block per running sequence: else the next step would have to preempt what this
         * one admits. */
        uint32_t spare = plan->running_count + plan->pulling.count;
        /* request_fit ensured that it fits alone, but leased and quarantined blocks are missing
         * here. */
        if (count == 0 || blocks + spare > plan->blocks.free_count)
            return;
        COX_ASSERT(cox_blocks_take(&plan->blocks, blocks, sequence->blocks));
        sequence->block_count = blocks;
        list_pop(&plan->waiting);
        sequence->slot = plan->slots[--plan->slot_count];
        if (sequence->source) {
            sequence->fresh = true;
            sequence->pulls++;
            list_append(&plan->pulling, sequence);
            continue;
        }
        plan->running[plan->running_count++] = sequence;
        row_add(plan, sequence, count);
    }
}

static void step_begin(struct cox_plan *plan)
{
    COX_ASSERT(!plan->given && plan->flight_count < plan->options.step_count_max);
    plan->next = flight_at(plan, plan->flight_count);
    plan->next->step = (struct cox_step){.base = plan->base, .rows = plan->next->rows};
    plan->step_cost = empty_cost(&plan->options);
}

/* Completes the step from its rows and lends it. */
static void step_give(struct cox_plan *plan, const struct cox_step **ret_step)
{
    struct cox_step *step = &plan->next->step;
    step->finished_slots = plan->unreported_slots + plan->reported_count;
    /* The nested form has no field for them: cox_plan_unreported. */
    step->finished_count =
        plan->options.nested || !plan->base ? 0 : plan->unreported_count - plan->reported_count;
    step->running_count = plan->running_count;
    step->waiting_count = plan->waiting.count;
    plan->given = true;
    *ret_step = step;
}

/* Returns false as rows_of_running does. */
static bool step_fill(struct cox_plan *plan)
{
    uint64_t preemptions = plan->stats.preemptions;
    if (plan->options.nested) {
        rows_of_running(plan, true, false);
        rows_of_waiting(plan);
        return plan->next->step.row_count || rows_of_running(plan, false, true);
    }
    if (!rows_of_running(plan, true, true))
        return false;
    if (plan->stats.preemptions == preemptions)
        rows_of_waiting(plan);
    return true;
}

int cox_plan_next(struct cox_plan *plan, const struct cox_step **ret_step)
{
    step_begin(plan);
    if (!plan->running_count && !plan->waiting.first && !plan->pulling.first && !plan->flight_count)
        return COX_EMPTY;
    struct cox_step *step = &plan->next->step;
    if (!step_fill(plan))
        return COX_BUSY;
    if (step->row_count == 0) {
        /* Otherwise the oldest would have a row. */
        COX_ASSERT(plan->flight_count || plan->pulling.first ||
                   plan->blocks.free_count < plan->blocks.count);
        return COX_BUSY;
    }

    uint32_t decode_count = 0;
    for (uint32_t i = 0; i < step->row_count; i++)
        decode_count += step->rows[i].decode;
    step->kind = decode_count == step->row_count ? COX_STEP_DECODE
                 : decode_count == 0             ? COX_STEP_PREFILL
                                                 : COX_STEP_MIXED;
    step_give(plan, ret_step);
    return 0;
}

void cox_plan_next_empty(struct cox_plan *plan, const struct cox_step **ret_step)
{
    step_begin(plan);
    plan->next->step.kind = COX_STEP_DUMMY;
    step_give(plan, ret_step);
}

void cox_plan_publish(struct cox_plan *plan, uint64_t sequence)
{
    COX_ASSERT(plan->given);
    struct flight *flight = plan->next;
    plan->given = false;
    plan->flight_count++;
    flight->sequence = plan->base = sequence;
    /* The step reports them, by base 0 if not by its list. */
    flight->reported_count =
        plan->options.nested ? 0 : plan->unreported_count - plan->reported_count;
    plan->reported_count += flight->reported_count;
    for (uint32_t i = 0; i < flight->step.row_count; i++) {
        const struct cox_step_row *row = &flight->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence; /* the batcher's own */
        s->known = true;
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
static void flight_part(struct cox_plan *plan, struct flight *flight)
{
    for (uint32_t i = 0; i < flight->parting_count; i++) {
        struct parting *parting = &flight->partings[i];
        cox_blocks_give(&plan->blocks, parting->blocks, parting->block_count);
        slot_leave(plan, parting->slot, parting->id);
        free(parting->blocks);
        if (parting->sequence)
            list_append(&plan->done, parting->sequence);
    }
    flight->parting_count = 0;
}

/* The token of a row is known; it may end the sequence. */
static void sequence_take(struct cox_plan *plan, struct cox_sequence *s, int32_t token, bool ended)
{
    bool stop = ended || is_stop(s, token);
    if (!stop && s->token_count - s->pending_count < s->token_end)
        return;
    s->finish = stop ? COX_FINISH_STOP : COX_FINISH_LENGTH;
    if (!stop && s->request.hold_ms && s->since >= plan->renewed &&
        plan->holds.count < plan->options.hold_count_max)
        s->hold =
            cox_kv_leases_add(&plan->holds, s->id, s->request.owner,
                              cox_deadline_after_ms(s->request.hold_ms), s->blocks, s->block_count);
    uint32_t index = 0;
    while (plan->running[index] != s)
        index++;
    running_remove(plan, index);
    list_append(&plan->done, s);
}

int cox_plan_commit(struct cox_plan *plan, const int32_t *tokens, const uint8_t *ended,
                    struct cox_error *err)
{
    COX_ASSERT(plan->flight_count);
    struct flight *flight = flight_at(plan, 0);
    for (uint32_t i = 0; i < flight->step.row_count; i++)
        if (flight->rows[i].emit && tokens[i] < 0)
            return cox_fail(err, COX_CORRUPT, "row %u of step %llu should give a token and gave %d",
                            i, (unsigned long long)flight->sequence, tokens[i]);
    plan->flight_first = (plan->flight_first + 1) % plan->options.step_count_max;
    plan->flight_count--;
    plan->reported_count -= flight->reported_count;
    unreported_drop(plan, flight->reported_count);
    flight_part(plan, flight);
    for (uint32_t i = 0; i < flight->step.row_count; i++) {
        const struct cox_step_row *row = &flight->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence;
        if (!s)
            continue; /* it has ended before */
        plan->stats.prompt_tokens += row->decode ? 0 : row->count;
        s->row_count--;
        const uint32_t end = row->position + row->count;
        if (end > s->reached) {
            plan->stats.positions += end - s->reached;
            s->reached = end;
        }
        if (!row->emit)
            continue;
        s->tokens[s->token_count - s->pending_count--] = tokens[i];
        plan->stats.generated_tokens++;
        sequence_take(plan, s, tokens[i], ended && ended[i]);
    }
    return 0;
}

static void holds_end(struct cox_plan *plan, uint64_t owner, int64_t id, uint64_t now_ns)
{
    struct cox_kv_lease *hold;
    while ((hold = cox_kv_leases_take(&plan->holds, owner, id, now_ns))) {
        for (struct cox_sequence *s = plan->done.first; s; s = s->next)
            if (s->hold == hold)
                s->hold = NULL;
        cox_blocks_give(&plan->blocks, hold->blocks, hold->block_count);
        slot_leave(plan, hold->slot, hold->id);
        free(hold);
    }
}

void cox_plan_renew(struct cox_plan *plan)
{
    COX_ASSERT(plan->flight_count);
    plan->renewed = flight_at(plan, 0)->sequence;
    holds_end(plan, 0, 0, COX_DEADLINE_NEVER);
}

/* Voids the ranks' tables and all steps in flight. */
static void flights_drop(struct cox_plan *plan)
{
    plan->given = false;
    plan->base = plan->renewed = 0;
    plan->reported_count = 0;
    while (plan->flight_count)
        flight_part(plan, flight_at(plan, --plan->flight_count));
    for (uint32_t i = 0; i < plan->running_count; i++) {
        struct cox_sequence *s = plan->running[i];
        s->token_count -= s->pending_count;
        s->known = false;
        s->computed = s->sent_block_count = s->row_count = s->pending_count = 0;
    }
}

void cox_plan_revert(struct cox_plan *plan)
{
    flights_drop(plan);
    holds_end(plan, 0, 0, COX_DEADLINE_NEVER);
}

void cox_plan_limit(struct cox_plan *plan, uint32_t token_count)
{
    const uint32_t most = plan->options.token_count_max;
    plan->token_limit = token_count > most ? most : token_count ? token_count : 1;
}

struct cox_sequence *cox_plan_done(struct cox_plan *plan)
{
    return list_pop(&plan->done);
}

void cox_plan_fail(struct cox_plan *plan, int code, const char *text)
{
    struct cox_sequence *sequence;
    flights_drop(plan);
    while (plan->running_count) {
        sequence = plan->running[plan->running_count - 1];
        running_remove(plan, plan->running_count - 1);
        list_prepend(&plan->waiting, sequence);
    }
    while ((sequence = list_pop(&plan->pulling)))
        list_prepend(&plan->waiting, sequence); /* their blocks stay out of use */
    while ((sequence = list_pop(&plan->waiting))) {
        sequence->finish = COX_FINISH_ERROR;
        cox_fail(&sequence->error, code, "%s", text);
        list_append(&plan->done, sequence);
    }
}

/* Removes the sequence of this context from the list. NULL: none. */
static struct cox_sequence *list_take(struct list *list, const void *context)
{
    struct cox_sequence **link = &list->first;
    while (*link && (*link)->request.context != context)
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
static void pulling_leave(struct cox_plan *plan, struct cox_sequence *sequence, bool quiet)
{
    plan->slots[plan->slot_count++] = sequence->slot;
    if (quiet)
        cox_blocks_give(&plan->blocks, sequence->blocks, sequence->block_count);
    sequence->block_count = 0;
}

/* What an ended sequence still keeps. NULL: no step in flight has a row of it. */
static struct parting *parting_find(const struct cox_plan *plan, int64_t id)
{
    for (uint32_t i = 0; i < plan->flight_count; i++)
        for (uint32_t p = 0; p < flight_at(plan, i)->parting_count; p++)
            if (flight_at(plan, i)->partings[p].id == id)
                return &flight_at(plan, i)->partings[p];
    return NULL;
}

void cox_plan_cancel(struct cox_plan *plan, const void *context)
{
    COX_ASSERT(!plan->given);
    struct cox_sequence *sequence = list_take(&plan->waiting, context);
    /* cox_plan_pull has not returned it, so no pull is under way (cox_plan_pulling). */
    if (!sequence && (sequence = list_take(&plan->pulling, context)))
        pulling_leave(plan, sequence, true);
    for (uint32_t i = 0; !sequence && i < plan->running_count; i++)
        if (plan->running[i]->request.context == context) {
            sequence = plan->running[i];
            running_remove(plan, i);
        }
    if (!sequence)
        return;
    sequence->finish = COX_FINISH_ERROR;
    cox_fail(&sequence->error, COX_CLOSED, "cancelled");
    /* When it is reported as done, its adapter may be unloaded. So it is not done before the ranks
     * have learned that it ended. */
    struct parting *parting = sequence->request.lora ? parting_find(plan, sequence->id) : NULL;
    if (parting)
        parting->sequence = sequence;
    else
        list_append(&plan->done, sequence);
}

/* ---- pulls ---- */

const struct cox_sequence *cox_plan_pull(struct cox_plan *plan)
{
    struct cox_sequence *sequence = plan->pulling.first;
    while (sequence && !sequence->fresh)
        sequence = sequence->next;
    if (sequence)
        sequence->fresh = false;
    return sequence;
}

/* Removes a sequence from those being pulled. NULL: no such sequence. */
static struct cox_sequence *pulling_take(struct cox_plan *plan, int64_t id)
{
    struct cox_sequence **link = &plan->pulling.first;
    while (*link && (*link)->id != id)
        link = &(*link)->next;
    struct cox_sequence *sequence = *link;
    if (!sequence)
        return NULL;
    *link = sequence->next;
    if (!*link)
        plan->pulling.end = link;
    plan->pulling.count--;
    return sequence;
}

int cox_plan_pulled(struct cox_plan *plan, int64_t id, enum cox_pull_end end, bool quiet,
                    void *report, const struct cox_error *err)
{
    COX_ASSERT(!plan->given);
    struct cox_sequence *sequence = pulling_take(plan, id);
    if (!sequence)
        return COX_NOT_FOUND;
    free(sequence->report);
    sequence->report = report;
    bool runs = end == COX_PULL_END_DONE && !sequence->request.pull_only;
    COX_ASSERT(quiet || end != COX_PULL_END_DONE);
    if (!runs)
        pulling_leave(plan, sequence, quiet);
    if (end == COX_PULL_END_RECOMPUTE) {
        sequence->recomputed = true;
        plan->stats.recomputed++;
    }
    if (end != COX_PULL_END_RETRY)
        sequence->source = cox_kv_reference_free(sequence->source);
    if (runs) {
        sequence->computed = sequence->token_count - 1;
        sequence->since = plan->base;
        plan->running[plan->running_count++] = sequence;
    } else if (end == COX_PULL_END_RETRY || end == COX_PULL_END_RECOMPUTE) {
        list_prepend(&plan->waiting, sequence);
    } else {
        sequence->finish = end == COX_PULL_END_DONE ? COX_FINISH_LENGTH : COX_FINISH_ERROR;
        if (end == COX_PULL_END_FAIL)
            sequence->error = *err;
        list_append(&plan->done, sequence);
    }
    return 0;
}

const struct cox_sequence *cox_plan_pulling(const struct cox_plan *plan, int64_t id,
                                            const void *context)
{
    const struct cox_sequence *sequence = plan->pulling.first;
    while (sequence &&
           (sequence->fresh || (id ? sequence->id != id : sequence->request.context != context)))
        sequence = sequence->next;
    return sequence;
}

void cox_plan_reserve(struct cox_plan *plan, const int32_t *blocks, uint32_t count)
{
    cox_blocks_reserve(&plan->blocks, blocks, count);
}

void cox_plan_give(struct cox_plan *plan, const int32_t *blocks, uint32_t count)
{
    cox_blocks_give(&plan->blocks, blocks, count);
}

/* ---- leases ---- */

void cox_plan_release(struct cox_plan *plan, uint64_t owner, int64_t id)
{
    COX_ASSERT(!plan->given);
    holds_end(plan, owner, id, COX_DEADLINE_NEVER);
}

void cox_plan_expire(struct cox_plan *plan, uint64_t now_ns)
{
    COX_ASSERT(!plan->given);
    holds_end(plan, 0, 0, now_ns);
}

const struct cox_kv_leases *cox_plan_kv_leases(const struct cox_plan *plan)
{
    return &plan->holds;
}

int64_t cox_plan_last_id(const struct cox_plan *plan)
{
    return plan->last_id;
}

/* ---- unreported sequences ---- */

uint32_t cox_plan_unreported(const struct cox_plan *plan, const int64_t **ret_ids)
{
    *ret_ids = plan->unreported_ids + plan->reported_count;
    return plan->unreported_count - plan->reported_count;
}

void cox_plan_reported(struct cox_plan *plan)
{
    plan->unreported_count = plan->reported_count;
}

void cox_plan_stats(const struct cox_plan *plan, struct cox_plan_stats *ret_stats)
{
    *ret_stats = plan->stats;
}

uint32_t cox_plan_free_blocks(const struct cox_plan *plan)
{
    return plan->blocks.free_count;
}
