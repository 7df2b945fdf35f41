#include "plan.h"

#include <stdlib.h>
#include <string.h>

/* Upper bounds of what things take on the wire. Packed: varints of at most 5 bytes in columns. */
#define STEP_COST 256     /* message heads, and each column's key and length */
#define FINISHED_COST 32  /* a slot, or a request id as text */
#define ROW_COST 40       /* four columns, and a block append */
#define ANNOUNCE_COST 160 /* heads, id, slot, sampling */
#define NUMBER_COST 5
#define NESTED_ROW_COST 320
#define NESTED_NUMBER_COST 8 /* int64 arrays */

struct list {
    struct cox_sequence *first;
    struct cox_sequence **end; /* the NULL that the next one replaces */
    uint32_t count;
};

struct cox_plan {
    struct cox_plan_options options;
    struct cox_blocks blocks;
    struct list waiting; /* oldest first, those that were preempted in front */
    struct list done;
    struct cox_sequence **running; /* in order of admission */
    uint32_t running_count;
    uint32_t *slots; /* a stack of the free ones */
    uint32_t slot_count;
    uint32_t *untold_slots; /* ended, and known to the ranks */
    int64_t *untold_ids;
    uint32_t untold_count;
    struct cox_step step;
    struct cox_step_row *rows;
    size_t step_cost;
    bool in_flight;
    uint64_t base;
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

/* The table is full when the last token but one is computed: nothing follows the last. */
static uint32_t table_size(const struct cox_plan *plan, uint32_t token_end)
{
    return blocks_for(plan, token_end - 1);
}

/* What a row of the sequence adds to the step, at most. */
static size_t row_cost(const struct cox_plan *plan, const struct cox_request *request,
                       uint32_t token_count, uint32_t block_count, bool announce)
{
    const size_t lora_cost =
        request->lora ? strlen(request->lora) : 0; /* its key is in the heads */
    if (plan->options.nested)
        return NESTED_ROW_COST + NESTED_NUMBER_COST * (size_t)block_count + lora_cost +
               (announce ? NESTED_NUMBER_COST * (size_t)token_count : 0);
    if (!announce)
        return ROW_COST;
    return ROW_COST + ANNOUNCE_COST + lora_cost + NUMBER_COST * ((size_t)token_count + block_count);
}

static size_t empty_cost(const struct cox_plan_options *options)
{
    return STEP_COST + FINISHED_COST * (size_t)options->sequence_count_max;
}

/* ---- constructor and destructor ---- */

int cox_plan_new(const struct cox_plan_options *options, struct cox_plan **ret_plan,
                 struct cox_error *err)
{
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
    list_init(&plan->waiting);
    list_init(&plan->done);
    uint32_t count = options->sequence_count_max;
    plan->running = calloc(count, sizeof *plan->running);
    plan->slots = calloc(count, sizeof *plan->slots);
    plan->untold_slots = calloc(count, sizeof *plan->untold_slots);
    plan->untold_ids = calloc(count, sizeof *plan->untold_ids);
    plan->rows = calloc(count, sizeof *plan->rows);
    if (!plan->running || !plan->slots || !plan->untold_slots || !plan->untold_ids || !plan->rows ||
        cox_blocks_init(&plan->blocks, options->block_count)) {
        cox_plan_free(plan);
        return cox_fail(err, -ENOMEM, "no memory for a schedule of %u sequences and %u blocks",
                        count, options->block_count);
    }
    for (; plan->slot_count < count; plan->slot_count++)
        plan->slots[plan->slot_count] = count - 1 - plan->slot_count;
    *ret_plan = plan;
    return 0;
}

struct cox_plan *cox_plan_free(struct cox_plan *plan)
{
    if (!plan)
        return NULL;
    struct cox_sequence *sequence;
    while ((sequence = list_pop(&plan->waiting)) || (sequence = list_pop(&plan->done)))
        cox_sequence_free(sequence);
    for (uint32_t i = 0; i < plan->running_count; i++)
        cox_sequence_free(plan->running[i]);
    cox_blocks_deinit(&plan->blocks);
    free(plan->running);
    free(plan->slots);
    free(plan->untold_slots);
    free(plan->untold_ids);
    free(plan->rows);
    free(plan);
    return NULL;
}

struct cox_sequence *cox_sequence_free(struct cox_sequence *sequence)
{
    if (sequence) {
        free(sequence->tokens);
        free(sequence->blocks);
        free((char *)(uintptr_t)sequence->request.lora);
        free(sequence);
    }
    return NULL;
}

/* ---- requests ---- */

/* Sets token_end, or the error of a request that can never run. */
static int request_fit(const struct cox_plan *plan, const struct cox_request *request,
                       uint32_t *ret_token_end, struct cox_error *err)
{
    const struct cox_plan_options *options = &plan->options;
    if (request->token_count == 0 || request->new_count_max == 0)
        return cox_fail(err, COX_INVALID, "%s",
                        request->token_count ? "no token is to be generated"
                                             : "the prompt is empty");
    /* The last token of all is not computed, so it needs neither position nor block. */
    uint64_t pool = (uint64_t)options->block_count * options->block_size + 1;
    uint64_t positions = (uint64_t)options->position_count_max + 1;
    uint64_t fits = positions < pool ? positions : pool;
    uint64_t wanted = (uint64_t)request->token_count + request->new_count_max;
    if (request->shorten && wanted > fits && request->token_count < fits)
        wanted = fits;
    if (wanted > positions)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a prompt of %u tokens and %u to generate need %llu positions; the model has "
            "%u",
            request->token_count, request->new_count_max, (unsigned long long)wanted - 1,
            options->position_count_max);
    if (wanted > pool)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a prompt of %u tokens and %u to generate need %llu blocks of KV cache of %u "
            "positions; the workers have %u",
            request->token_count, request->new_count_max,
            (unsigned long long)(wanted - 2) / options->block_size + 1, options->block_size,
            options->block_count);
    uint32_t token_end = (uint32_t)wanted;
    size_t cost =
        empty_cost(options) + row_cost(plan, request, token_end, table_size(plan, token_end), true);
    if (options->request_size_max && cost > options->request_size_max)
        return cox_fail(
            err, COX_TOO_LARGE,
            "a sequence of %u tokens takes up to %zu bytes of a step; a frame of the execute "
            "channel holds %zu: enlarge its request region",
            token_end, cost, options->request_size_max);
    *ret_token_end = token_end;
    return 0;
}

int cox_plan_add(struct cox_plan *plan, const struct cox_request *request)
{
    struct cox_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence)
        return -ENOMEM;
    sequence->id = ++plan->last_id;
    sequence->request = *request;
    sequence->request.tokens = NULL;
    sequence->request.lora = request->lora ? strdup(request->lora) : NULL;
    sequence->prompt_count = sequence->token_count = request->token_count;
    uint32_t token_end = request->token_count;
    int r = request_fit(plan, request, &token_end, &sequence->error);
    sequence->token_end = token_end;
    sequence->tokens = calloc((size_t)token_end + 1, sizeof *sequence->tokens);
    sequence->blocks = calloc(r ? 1 : table_size(plan, token_end), sizeof *sequence->blocks);
    if (!sequence->tokens || !sequence->blocks || (request->lora && !sequence->request.lora)) {
        cox_sequence_free(sequence);
        return -ENOMEM;
    }
    if (request->token_count)
        memcpy(sequence->tokens, request->tokens, request->token_count * sizeof *sequence->tokens);
    if (r) {
        sequence->finish = COX_FINISH_ERROR;
        list_append(&plan->done, sequence);
    } else {
        list_append(&plan->waiting, sequence);
    }
    return 0;
}

/* ---- the next step ---- */

/* Takes the sequence out of the running ones: its blocks are free, and its slot is as soon as the
 * ranks were told. */
static void running_remove(struct cox_plan *plan, uint32_t index)
{
    struct cox_sequence *sequence = plan->running[index];
    memmove(&plan->running[index], &plan->running[index + 1],
            (plan->running_count - index - 1) * sizeof(struct cox_sequence *));
    plan->running_count--;
    cox_blocks_give(&plan->blocks, sequence->blocks, sequence->block_count);
    plan->slots[plan->slot_count++] = sequence->slot;
    if (sequence->known) {
        COX_ASSERT(plan->untold_count < plan->options.sequence_count_max);
        plan->untold_slots[plan->untold_count] = sequence->slot;
        plan->untold_ids[plan->untold_count++] = sequence->id;
    }
    sequence->block_count = sequence->told_count = sequence->computed = 0;
    sequence->known = false;
}

static void preempt_youngest(struct cox_plan *plan)
{
    struct cox_sequence *sequence = plan->running[plan->running_count - 1];
    running_remove(plan, plan->running_count - 1);
    list_prepend(&plan->waiting, sequence);
    plan->stats.preemptions++;
}

/* Blocks for the first `positions` positions. False: too few are free. */
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

/* Room in the step for a row of the sequence: how many tokens of it, 0: none. */
static uint32_t row_room(const struct cox_plan *plan, const struct cox_sequence *sequence,
                         uint32_t block_count)
{
    const struct cox_plan_options *options = &plan->options;
    uint32_t left = options->token_count_max > plan->step.token_count
                        ? options->token_count_max - plan->step.token_count
                        : 0;
    uint32_t wanted = sequence->token_count - sequence->computed;
    size_t cost =
        row_cost(plan, &sequence->request, sequence->token_count, block_count, !sequence->known);
    if (plan->step.row_count == options->sequence_count_max ||
        (options->request_size_max && plan->step_cost + cost > options->request_size_max))
        return 0;
    if (wanted <= left)
        return wanted;
    /* A prompt that may not be cut gets a step of its own when no step has room for it. */
    if (options->nested)
        return plan->step.row_count == 0 ? wanted : 0;
    return left;
}

static void row_add(struct cox_plan *plan, struct cox_sequence *sequence, uint32_t count)
{
    plan->rows[plan->step.row_count++] = (struct cox_step_row){
        .sequence = sequence,
        .position = sequence->computed,
        .count = count,
        .announce = !sequence->known,
        .emit = sequence->computed + count == sequence->token_count,
    };
    plan->step.token_count += count;
    plan->step_cost += row_cost(plan, &sequence->request, sequence->token_count,
                                sequence->block_count, !sequence->known);
}

static bool is_decode(const struct cox_sequence *sequence)
{
    return sequence->known && sequence->token_count - sequence->computed == 1 &&
           sequence->token_count > sequence->prompt_count;
}

/* Rows for the running sequences, oldest first, so that the oldest always moves. */
static void rows_of_running(struct cox_plan *plan, bool prefills, bool decodes)
{
    for (uint32_t i = 0; i < plan->running_count; i++) {
        struct cox_sequence *sequence = plan->running[i];
        if (is_decode(sequence) ? !decodes : !prefills)
            continue;
        uint32_t count = row_room(plan, sequence, table_size(plan, sequence->token_end));
        if (count == 0)
            continue;
        /* Sequences younger than this one have no row yet, so any of them may go. */
        while (!table_grow(plan, sequence, sequence->computed + count)) {
            preempt_youngest(plan);
            if (i >= plan->running_count)
                return; /* it was the youngest itself */
        }
        row_add(plan, sequence, count);
    }
}

/* Admits from the waiting list, strictly in its order, so that a large request is never overtaken
 * for ever. */
static void rows_of_waiting(struct cox_plan *plan)
{
    while (plan->waiting.first && plan->slot_count) {
        struct cox_sequence *sequence = plan->waiting.first;
        uint32_t blocks = blocks_for(plan, sequence->token_count);
        uint32_t count = row_room(plan, sequence, blocks);
        /* One block to spare for each that runs: else the next step would take back what this one
         * gives. */
        uint32_t spare = plan->running_count;
        if (count == 0 || (plan->running_count && blocks + spare > plan->blocks.free_count))
            return;
        /* Alone it fits: request_fit saw to that. */
        COX_ASSERT(cox_blocks_take(&plan->blocks, blocks, sequence->blocks));
        sequence->block_count = blocks;
        list_pop(&plan->waiting);
        sequence->slot = plan->slots[--plan->slot_count];
        plan->running[plan->running_count++] = sequence;
        row_add(plan, sequence, count);
    }
}

/* The step has its rows; the rest of it, and out. */
static void step_give(struct cox_plan *plan, const struct cox_step **ret_step)
{
    plan->step.finished_slots = plan->untold_slots;
    /* The nested form has no place for them: cox_plan_untold. */
    plan->step.finished_count = plan->options.nested ? 0 : plan->untold_count;
    plan->step.running_count = plan->running_count;
    plan->step.waiting_count = plan->waiting.count;
    plan->in_flight = true;
    *ret_step = &plan->step;
}

int cox_plan_next(struct cox_plan *plan, const struct cox_step **ret_step)
{
    COX_ASSERT(!plan->in_flight);
    if (!plan->running_count && !plan->waiting.first)
        return COX_EMPTY;
    uint64_t preemptions = plan->stats.preemptions;
    plan->step = (struct cox_step){.base = plan->base, .rows = plan->rows};
    plan->step_cost = empty_cost(&plan->options);
    if (plan->options.nested) {
        rows_of_running(plan, true, false);
        rows_of_waiting(plan);
        if (!plan->step.row_count)
            rows_of_running(plan, false, true);
    } else {
        rows_of_running(plan, true, true);
        if (plan->stats.preemptions == preemptions)
            rows_of_waiting(plan);
    }
    COX_ASSERT(plan->step.row_count > 0);

    uint32_t decode_count = 0;
    for (uint32_t i = 0; i < plan->step.row_count; i++)
        decode_count += is_decode(plan->rows[i].sequence);
    plan->step.kind = decode_count == plan->step.row_count ? COX_STEP_DECODE
                      : decode_count == 0                  ? COX_STEP_PREFILL
                                                           : COX_STEP_MIXED;
    step_give(plan, ret_step);
    return 0;
}

void cox_plan_next_empty(struct cox_plan *plan, const struct cox_step **ret_step)
{
    COX_ASSERT(!plan->in_flight);
    plan->step = (struct cox_step){.base = plan->base, .rows = plan->rows, .kind = COX_STEP_DUMMY};
    step_give(plan, ret_step);
}

/* ---- what became of it ---- */

static bool is_stop(const struct cox_sequence *sequence, int32_t token)
{
    for (uint32_t i = 0; i < sequence->request.stop_count; i++)
        if (sequence->request.stop_tokens[i] == token)
            return true;
    return false;
}

int cox_plan_commit(struct cox_plan *plan, uint64_t sequence, const int32_t *tokens,
                    const uint8_t *ended, struct cox_error *err)
{
    COX_ASSERT(plan->in_flight);
    for (uint32_t i = 0; i < plan->step.row_count; i++)
        if (plan->rows[i].emit && tokens[i] < 0)
            return cox_fail(err, COX_CORRUPT, "row %u of step %llu should give a token and gave %d",
                            i, (unsigned long long)sequence, tokens[i]);
    plan->in_flight = false;
    plan->base = sequence;
    if (!plan->options.nested)
        plan->untold_count = 0; /* the step told */
    for (uint32_t i = 0; i < plan->step.row_count; i++) {
        const struct cox_step_row *row = &plan->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence; /* the plan's own */
        plan->stats.prompt_tokens += is_decode(s) ? 0 : row->count;
        s->known = true;
        s->told_count = s->block_count;
        s->computed += row->count;
        if (!row->emit)
            continue;
        s->tokens[s->token_count++] = tokens[i];
        plan->stats.generated_tokens++;
    }
    for (uint32_t i = 0; i < plan->step.row_count; i++) {
        const struct cox_step_row *row = &plan->rows[i];
        struct cox_sequence *s = (struct cox_sequence *)row->sequence;
        bool stop = row->emit && (is_stop(s, tokens[i]) || (ended && ended[i]));
        if (!stop && (!row->emit || s->token_count < s->token_end))
            continue;
        s->finish = stop ? COX_FINISH_STOP : COX_FINISH_LENGTH;
        uint32_t index = 0;
        while (plan->running[index] != s)
            index++;
        running_remove(plan, index);
        list_append(&plan->done, s);
    }
    return 0;
}

void cox_plan_revert(struct cox_plan *plan)
{
    plan->in_flight = false;
    plan->base = 0;
    if (!plan->options.nested)
        plan->untold_count = 0; /* base 0 empties the ranks' tables */
    for (uint32_t i = 0; i < plan->running_count; i++) {
        plan->running[i]->known = false;
        plan->running[i]->computed = 0;
        plan->running[i]->told_count = 0;
    }
}

struct cox_sequence *cox_plan_done(struct cox_plan *plan)
{
    return list_pop(&plan->done);
}

void cox_plan_fail(struct cox_plan *plan, int code, const char *text)
{
    plan->in_flight = false;
    struct cox_sequence *sequence;
    while (plan->running_count) {
        sequence = plan->running[plan->running_count - 1];
        running_remove(plan, plan->running_count - 1);
        list_prepend(&plan->waiting, sequence);
    }
    while ((sequence = list_pop(&plan->waiting))) {
        sequence->finish = COX_FINISH_ERROR;
        cox_fail(&sequence->error, code, "%s", text);
        list_append(&plan->done, sequence);
    }
}

/* Takes the sequence out of the list. NULL: it is not there. */
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

void cox_plan_cancel(struct cox_plan *plan, const void *context)
{
    COX_ASSERT(!plan->in_flight);
    struct cox_sequence *sequence = list_take(&plan->waiting, context);
    for (uint32_t i = 0; !sequence && i < plan->running_count; i++)
        if (plan->running[i]->request.context == context) {
            sequence = plan->running[i];
            running_remove(plan, i);
        }
    if (!sequence)
        return;
    sequence->finish = COX_FINISH_ERROR;
    cox_fail(&sequence->error, COX_CLOSED, "cancelled");
    list_append(&plan->done, sequence);
}

uint32_t cox_plan_untold(const struct cox_plan *plan, const int64_t **ret_ids)
{
    *ret_ids = plan->untold_ids;
    return plan->untold_count;
}

void cox_plan_told(struct cox_plan *plan)
{
    plan->untold_count = 0;
}

void cox_plan_stats(const struct cox_plan *plan, struct cox_plan_stats *ret_stats)
{
    *ret_stats = plan->stats;
}

uint32_t cox_plan_free_blocks(const struct cox_plan *plan)
{
    return plan->blocks.free_count;
}
