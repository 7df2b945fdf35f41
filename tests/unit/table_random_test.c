/*
 * table_random: thousands of random steps, valid and broken, against table_model, a naive
 * reference; broken bytes; and one schedule in both forms, which must give the same batches.
 */
#include "table_fixture.h"
#include "table_model.h"

#include "proto/wire.h"

/* Steps of each test. */
#define RANDOM_STEP_COUNT 20000

static uint64_t random_state;

static uint32_t random_below(uint32_t bound)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((random_state >> 33) % bound);
}

static bool chance(uint32_t percent)
{
    return random_below(100) < percent;
}

static int32_t random_numbers_fill(int32_t *items, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        items[i] = (int32_t)random_below(1000);
    return (int32_t)count;
}

static int64_t next_id;
static int64_t random_id(void)
{
    /* Negative and huge ids are ids too; some come again. */
    int64_t id = chance(10) ? next_id - random_below(8) : ++next_id;
    return id * (id % 3 ? 1 : INT64_C(-4611686018427));
}

static SamplingParams *random_sampling(void)
{
    if (chance(30))
        return NULL;
    SamplingParams *params = request_take(sizeof *params);
    coxswain__sampling_params__init(params);
    params->has_temperature = chance(80);
    params->temperature = (float)random_below(4) / 2;
    params->has_top_k = chance(50);
    params->top_k = (int32_t)random_below(9) - 3;
    params->has_top_p = chance(50);
    params->top_p = (float)(random_below(4) + 1) / 4;
    params->has_repetition_penalty = chance(50);
    params->repetition_penalty = (float)random_below(5) / 2;
    params->has_seed = chance(50);
    params->seed = (int32_t)random_below(1u << 30);
    return params;
}

static void random_moves(Request *request)
{
    for (uint32_t i = random_below(3); i; i--) {
        request_swap_in(request, (int32_t)random_below(99), (int32_t)random_below(99));
        if (chance(50))
            request_swap_out(request, (int32_t)random_below(99), (int32_t)random_below(99));
        request_copy(request, (int32_t)random_below(99), (int32_t)random_below(99));
    }
}

/* A packed step that mostly fits the model; g follows what it does to the lengths. */
static Request *random_packed(const struct model *model)
{
    struct model g = *model;
    int32_t items[16];
    bool reset = chance(4) || model->base == 0;
    Request *request =
        packed_new(random_below(5), reset ? 0 : model->base + (chance(3) ? random_below(3) : 0));
    Step *step = request->step;
    step->has_table_count = chance(70);
    step->table_count = 1 + random_below(4);
    uint32_t table_count = step->has_table_count ? step->table_count : 1;
    random_moves(request);
    for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
        struct model_sequence *s = &g.slots[slot];
        if (s->live && (reset || chance(12))) {
            if (!reset || chance(30))
                packed_finish(request, slot);
            s->live = false;
        }
    }
    for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
        struct model_sequence *s = &g.slots[slot];
        if (s->live || !chance(30))
            continue;
        *s = (struct model_sequence){.live = true};
        s->token_count = 1 + random_below(14);
        random_numbers_fill(items, s->token_count);
        StepSequence *announced =
            packed_announce(request, slot, random_id(), items, s->token_count);
        announced->sampling = random_sampling();
        for (uint32_t t = random_below(table_count) + 1; t; t--)
            packed_table(announced, items,
                         (uint32_t)random_numbers_fill(items, 1 + random_below(5)));
    }
    for (uint32_t i = random_below(6); i; i--) {
        uint32_t slot = random_below(MODEL_SLOT_MAX);
        if (g.slots[slot].live)
            packed_append(request, slot, (int32_t)random_below(500), random_below(table_count));
        if (g.slots[slot].live && chance(20) && g.slots[slot].token_count < MODEL_TOKEN_MAX) {
            packed_token(request, slot, (int32_t)random_below(500));
            g.slots[slot].token_count++;
        }
    }
    uint32_t first = random_below(MODEL_SLOT_MAX);
    for (uint32_t i = 0; i < MODEL_SLOT_MAX; i++) {
        uint32_t slot = (first + i) % MODEL_SLOT_MAX;
        const struct model_sequence *s = &g.slots[slot];
        if (!s->live || chance(20))
            continue;
        uint32_t position = chance(60) ? s->token_count - 1 : random_below(s->token_count);
        uint32_t row =
            packed_row(request, slot, position, 1 + random_below(s->token_count - position));
        if (chance(15))
            packed_silent(request, row);
    }
    if (step->n_row_slot == 0 && chance(50))
        request->forward_type = (Coxswain__ForwardType)COX_FORWARD_DUMMY;
    return request;
}

static uint32_t random_wild(void)
{
    static const uint32_t wild[] = {0, 1, 7, 8, 39, 40, 41, 0x7fffffff, 0x80000000, 0xffffffff};
    return wild[random_below(LENGTH(wild))];
}

#define WILD(column, count)                                                                        \
    do {                                                                                           \
        if (count)                                                                                 \
            (column)[random_below((uint32_t)(count))] = random_wild();                             \
    } while (0)
#define WILD_SIGNED(column, count)                                                                 \
    do {                                                                                           \
        if (count)                                                                                 \
            (column)[random_below((uint32_t)(count))] = (int32_t)random_wild();                    \
    } while (0)
#define SHORTEN(count)                                                                             \
    do {                                                                                           \
        if (count)                                                                                 \
            (count)--;                                                                             \
    } while (0)

static void mutate_packed(Request *request)
{
    Step *step = request->step;
    StepSequence *sequence =
        step->n_announced ? step->announced[random_below((uint32_t)step->n_announced)] : NULL;
    // clang-format off
    switch (random_below(23)) {
    case 0: SHORTEN(step->n_append_slot); break;
    case 1: SHORTEN(step->n_append_table); break;
    case 2: SHORTEN(step->n_token); break;
    case 3: SHORTEN(step->n_row_position); break;
    case 4: SHORTEN(step->n_row_token_count); break;
    case 5: step->n_append_table = 0; break;
    case 6: step->n_row_token_count = 0; break;
    case 7: WILD(step->finished, step->n_finished); break;
    case 8: WILD(step->append_slot, step->n_append_slot); break;
    case 9: WILD_SIGNED(step->append_block, step->n_append_block); break;
    case 10: WILD(step->append_table, step->n_append_table); break;
    case 11: WILD(step->token_slot, step->n_token_slot); break;
    case 12: WILD_SIGNED(step->token, step->n_token); break;
    case 13: WILD(step->row_slot, step->n_row_slot); break;
    case 14: WILD(step->row_position, step->n_row_position); break;
    case 15: WILD(step->row_token_count, step->n_row_token_count); break;
    case 16: WILD(step->row_silent, step->n_row_silent); break;
    case 17: step->has_table_count = true; step->table_count = random_wild(); break;
    case 18: request->forward_type = (Coxswain__ForwardType)random_wild(); break;
    case 19: if (sequence) sequence->slot = random_wild(); break;
    case 20: if (sequence) sequence->seq_id = next_id - random_below(20); break;
    case 21: if (sequence) sequence->n_tokens = 0; break;
    case 22: if (sequence) sequence->tokens[0] = (int32_t)random_wild(); break;
    }
    // clang-format on
}

static Request *random_nested(const struct model *model)
{
    int32_t items[16];
    struct model g = *model;
    Request *request = request_new(random_below(5));
    random_moves(request);
    for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
        struct model_sequence *s = &g.slots[slot];
        if (s->live && s->request_id[0] && chance(12)) {
            nested_finish(request, s->request_id);
            for (uint32_t other = 0; other < MODEL_SLOT_MAX; other++)
                if (!strcmp(g.slots[other].request_id, s->request_id))
                    g.slots[other].live = false;
        }
    }
    int32_t *last = request_take(sizeof *last * MODEL_SLOT_MAX);
    uint32_t last_count = 0;
    uint32_t new_count = random_below(3);
    for (uint32_t i = 0; i < MODEL_SLOT_MAX + new_count; i++) {
        const struct model_sequence *s = i < MODEL_SLOT_MAX ? &g.slots[i] : NULL;
        if (s && (!s->live || chance(20)))
            continue;
        bool prompt = !s || chance(10);
        char name[16];
        int64_t id = s ? s->id : random_id();
        snprintf(name, sizeof name, "r%d", (int)(id % 100 / 2));
        Metadata *m = nested_add(request, chance(90) ? name : NULL, id, prompt);
        uint32_t table_count = prompt || chance(80) ? 1 + random_below(4) : 0;
        if (!prompt && chance(70))
            table_count = s->table_count;
        for (uint32_t t = 0; t < table_count; t++) {
            uint32_t count = 1 + random_below(6);
            random_numbers_fill(items, count);
            if (s && chance(85)) { /* what is there, and some */
                uint32_t keep = s->block_counts[t] < 10 ? s->block_counts[t] : 10;
                memcpy(items, s->blocks[t], keep * sizeof *items);
                count = keep + random_below(3);
                if (count == 0)
                    count = 1;
            }
            nested_table(m, items, count);
        }
        if (!prompt) {
            last[last_count++] = (int32_t)random_below(500) - 30;
            continue;
        }
        uint32_t count = 1 + random_below(14);
        random_numbers_fill(items, count);
        m->prompt_token_ids = nested_bytes(items, count);
        m->sampling_params = random_sampling();
        m->has_do_sample = chance(40);
        m->do_sample = chance(50);
        if (chance(40)) {
            int32_t start = (int32_t)random_below(count);
            nested_split(m, start, start + 1 + (int32_t)random_below(count - (uint32_t)start),
                         chance(50));
        }
    }
    if (chance(50)) {
        request->last_sampled_token_ids = last;
        request->n_last_sampled_token_ids = last_count - (last_count && chance(20));
    }
    return request;
}

static void mutate_nested(Request *request)
{
    if (request->n_seq_group_metadata_list == 0)
        return;
    Metadata *m =
        request
            ->seq_group_metadata_list[random_below((uint32_t)request->n_seq_group_metadata_list)];
    ProtobufCBinaryData *table =
        m->n_block_tables ? &m->block_tables[random_below((uint32_t)m->n_block_tables)] : NULL;
    // clang-format off
    switch (random_below(10)) {
    case 0: m->seqids.len -= 1 + random_below(8); break;
    case 1: m->is_prompt = !m->is_prompt; break;
    case 2: cox_wire_int64_set(m->seqids.data, 0, next_id - random_below(20)); break;
    case 3: if (m->prompt_token_ids.len) m->prompt_token_ids.len--; break;
    case 4: if (table) table->len--; break;
    case 5: if (table) table->len = 0; break;
    case 6: if (table) cox_wire_int64_set(table->data, 0, (int64_t)random_wild() - 1); break;
    case 7: WILD_SIGNED(m->split_start_pos, m->n_split_start_pos); break;
    case 8: WILD_SIGNED(m->split_end_pos, m->n_split_end_pos); break;
    case 9: m->n_split_end_pos = 0; break;
    }
    // clang-format on
}

/* The bytes a worker would get, read again. */
static Request *over_the_wire(const Request *request, unsigned flips)
{
    size_t size = coxswain__execute_model_request__get_packed_size(request);
    uint8_t *bytes = malloc(size + 1);
    assert_non_null(bytes);
    coxswain__execute_model_request__pack(request, bytes);
    for (unsigned i = 0; i < flips && size; i++)
        bytes[random_below((uint32_t)size)] ^= (uint8_t)(1u << random_below(8));
    Request *read = coxswain__execute_model_request__unpack(NULL, size, bytes);
    free(bytes);
    return read;
}

/* Takes the step, whose batch the model has in `after`, or leaves every byte as it was. */
static void step_end(int r, bool commit, size_t size, struct model *model,
                     const struct model *after)
{
    if (commit) {
        cox_table_commit(f.table);
        *model = *after;
        return;
    }
    if (r == 0)
        cox_table_revert(f.table);
    assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
    assert_memory_equal(dump_before, dump_after, size);
}

TEST(s1_random_steps_follow_the_model)
{
    static struct model model, after;
    static int statuses[COX_STATUS_COUNT];
    memset(&model, 0, sizeof model);
    memset(statuses, 0, sizeof statuses);
    random_state = 20261120;
    next_id = 1000;
    for (int i = 0; i < RANDOM_STEP_COUNT; i++) {
        request_reset();
        bool nested = chance(35);
        Request *request = nested ? random_nested(&model) : random_packed(&model);
        if (chance(35))
            nested ? mutate_nested(request) : mutate_packed(request);
        /* Writers of proto3 leave 0 out. */
        request->has_forward_type = request->forward_type != 0;
        Request *read = over_the_wire(request, 0);
        assert_non_null(read);

        size_t size = table_dump(f.table, dump_before, sizeof dump_before);
        int r = apply(read);
        int expected = model_apply(&model, f.sequence, read, &after);
        if (r != expected)
            fail_msg("step %d: %d instead of %d: %s", i, r, expected, f.err.text);
        statuses[r]++;
        if (r == 0) {
            model_check_batch(&after, read, f.batch);
            for (uint32_t row = 0; row < f.batch->row_count; row++)
                f.outputs[row].token = chance(90) ? (int32_t)random_below(1000) : -1;
        }
        bool commit = r == 0 && chance(75);
        if (commit)
            model_commit(&after, f.outputs);
        step_end(r, commit, size, &model, &after);
        model_check_table(&model, f.table);
        table_check_invariants(f.table);
        coxswain__execute_model_request__free_unpacked(read, NULL);

        if (chance(2)) {
            const uint32_t *slots;
            uint32_t count;
            int64_t ids[2] = {next_id - random_below(10), 1};
            for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++)
                if (model.slots[slot].live && (chance(20) || model.slots[slot].id == ids[0])) {
                    ids[1] = chance(50) ? model.slots[slot].id : ids[1];
                }
            for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++)
                if (model.slots[slot].id == ids[0] || model.slots[slot].id == ids[1])
                    model.slots[slot].live = false;
            cox_table_cleanup(f.table, ids, 2, &slots, &count);
            model_check_table(&model, f.table);
            table_check_invariants(f.table);
        }
    }
    print_message("%d ok, %d stale, %d corrupt, %d too large\n", statuses[COX_OK],
                  statuses[COX_STALE], statuses[COX_CORRUPT], statuses[COX_TOO_LARGE]);
    assert_true(statuses[COX_OK] > RANDOM_STEP_COUNT / 4);
    assert_true(statuses[COX_STALE] > RANDOM_STEP_COUNT / 100);
    assert_true(statuses[COX_CORRUPT] > RANDOM_STEP_COUNT / 20);
    assert_true(statuses[COX_TOO_LARGE] > RANDOM_STEP_COUNT / 100);
}

TEST(s1_flipped_bits_never_hurt)
{
    static struct model model, after;
    memset(&model, 0, sizeof model);
    random_state = 7;
    for (int i = 0; i < RANDOM_STEP_COUNT; i++) {
        request_reset();
        Request *request = chance(50) ? random_nested(&model) : random_packed(&model);
        Request *read = over_the_wire(request, random_below(4));
        if (!read)
            continue;
        size_t size = table_dump(f.table, dump_before, sizeof dump_before);
        int r = apply(read);
        assert_true(r == 0 || r == COX_CORRUPT || r == COX_STALE || r == COX_TOO_LARGE);
        /* The model cannot say what broken parameters mean, but it can say where tokens and blocks
         * are. */
        bool commit = r == 0 && chance(50) && model_apply(&model, f.sequence, read, &after) == 0;
        if (commit) {
            for (uint32_t row = 0; row < f.batch->row_count; row++)
                f.outputs[row].token = (int32_t)random_below(1000);
            model_commit(&after, f.outputs);
        }
        step_end(r, commit, size, &model, &after);
        table_check_invariants(f.table);
        coxswain__execute_model_request__free_unpacked(read, NULL);
    }
}

/* A schedule told in both forms. */
struct scheduled {
    bool live;
    int64_t id;
    char request_id[16];
    int32_t prompt[16];
    uint32_t prompt_count;
    uint32_t computed;
    uint32_t known;
    int32_t blocks[2][64];
    uint32_t block_counts[2];
    SamplingParams sampling;
};

/* Blocks of two tokens: enough for the tokens up to end. */
static uint32_t schedule_blocks(struct scheduled *s, uint32_t end)
{
    uint32_t old_count = s->block_counts[0];
    while (s->block_counts[0] * 2 < end) {
        s->blocks[0][s->block_counts[0]++] = (int32_t)random_below(300);
        s->blocks[1][s->block_counts[1]++] = (int32_t)random_below(300);
    }
    return old_count;
}

static void schedule_prefill(Request *columns, Request *nested, struct scheduled *s, uint32_t slot,
                             bool is_new)
{
    uint32_t left = s->prompt_count - s->computed;
    uint32_t count = 1 + random_below(left);
    bool last = count == left;
    uint32_t old_block_count = schedule_blocks(s, s->computed + count);
    if (is_new) {
        const SamplingParams *sampling = random_sampling();
        coxswain__sampling_params__init(&s->sampling);
        if (sampling)
            s->sampling = *sampling;
        StepSequence *announced = packed_announce(columns, slot, s->id, s->prompt, s->prompt_count);
        announced->sampling = &s->sampling;
        for (int t = 0; t < 2; t++)
            packed_table(announced, s->blocks[t], s->block_counts[t]);
    } else {
        for (uint32_t b = old_block_count; b < s->block_counts[0]; b++)
            for (uint32_t t = 0; t < 2; t++)
                packed_append(columns, slot, s->blocks[t][b], t);
    }
    uint32_t row = packed_row(columns, slot, s->computed, count);
    if (!last)
        packed_silent(columns, row);

    Metadata *m = nested_add(nested, s->request_id, s->id, true);
    m->prompt_token_ids = nested_bytes(s->prompt, s->prompt_count);
    m->sampling_params = &s->sampling;
    for (int t = 0; t < 2; t++)
        nested_table(m, s->blocks[t], s->block_counts[t]);
    if (count != s->prompt_count || chance(50))
        nested_split(m, (int32_t)s->computed, (int32_t)(s->computed + count), last);
    s->computed += count;
    s->known = s->prompt_count + last;
}

static void schedule_decode(Request *columns, Request *nested, struct scheduled *s, uint32_t slot)
{
    uint32_t old_block_count = schedule_blocks(s, s->known);
    Metadata *m = nested_add(nested, s->request_id, s->id, false);
    if (s->block_counts[0] != old_block_count || chance(50))
        for (int t = 0; t < 2; t++)
            nested_table(m, s->blocks[t], s->block_counts[t]);
    for (uint32_t b = old_block_count; b < s->block_counts[0]; b++)
        for (uint32_t t = 0; t < 2; t++)
            packed_append(columns, slot, s->blocks[t][b], t);
    packed_row(columns, slot, s->known - 1, 1);
    s->known++;
}

static int compare_slots(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void check_same_batch(const struct cox_batch *a, const struct cox_batch *b)
{
    assert_true(a->sequence == b->sequence);
    assert_int_equal(a->forward_type, b->forward_type);
    assert_int_equal(a->row_count, b->row_count);
    if (a->row_count) /* without rows the nested form cannot say */
        assert_int_equal(a->table_count, b->table_count);
    assert_int_equal(a->swap_in_count, b->swap_in_count);
    assert_int_equal(a->copy_count, b->copy_count);
    for (uint32_t i = 0; i < a->copy_count; i++)
        assert_true(a->copy[i].from == b->copy[i].from && a->copy[i].to == b->copy[i].to);
    for (uint32_t i = 0; i < a->row_count; i++) {
        const struct cox_batch_row *x = &a->rows[i];
        const struct cox_batch_row *y = &b->rows[i];
        assert_true(x->id == y->id);
        assert_int_equal(x->slot, y->slot);
        assert_int_equal(x->position, y->position);
        assert_int_equal(x->token_count, y->token_count);
        assert_int_equal(x->emit, y->emit);
        assert_memory_equal(x->tokens, y->tokens,
                            (x->position + x->token_count) * sizeof *x->tokens);
        for (uint32_t t = 0; t < a->table_count; t++) {
            assert_int_equal(x->tables[t].count, y->tables[t].count);
            assert_memory_equal(x->tables[t].blocks, y->tables[t].blocks,
                                x->tables[t].count * sizeof(int32_t));
        }
        assert_memory_equal(x->sampling, y->sampling, sizeof *x->sampling);
    }
    uint32_t finished_a[MODEL_SLOT_MAX];
    uint32_t finished_b[MODEL_SLOT_MAX];
    assert_int_equal(a->finished_count, b->finished_count);
    memcpy(finished_a, a->finished_slots, a->finished_count * sizeof *finished_a);
    memcpy(finished_b, b->finished_slots, b->finished_count * sizeof *finished_b);
    qsort(finished_a, a->finished_count, sizeof *finished_a, compare_slots);
    qsort(finished_b, b->finished_count, sizeof *finished_b, compare_slots);
    for (uint32_t i = 0; i < a->finished_count; i++)
        assert_int_equal(finished_a[i], finished_b[i]);
}

TEST(s1_both_forms_of_a_schedule_give_the_same_batches)
{
    static struct scheduled now[MODEL_SLOT_MAX], next[MODEL_SLOT_MAX];
    struct cox_table *other;
    assert_int_equal(cox_table_new(MODEL_SLOT_MAX, MODEL_TOKEN_MAX, &other), 0);
    random_state = 99;
    next_id = 0;
    memset(now, 0, sizeof now);
    uint64_t row_count = 0;
    for (uint64_t sequence = 1; sequence < RANDOM_STEP_COUNT / 2; sequence++) {
        request_reset();
        memcpy(next, now, sizeof now);
        Request *columns = packed_new(COX_FORWARD_MIXED, cox_table_base(f.table));
        columns->step->has_table_count = true;
        columns->step->table_count = 2;
        Request *nested = request_new(COX_FORWARD_MIXED);
        for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
            struct scheduled *s = &next[slot];
            if (s->live && (chance(5) || s->known >= MODEL_TOKEN_MAX - 1)) {
                packed_finish(columns, slot);
                nested_finish(nested, s->request_id);
                s->live = false;
            }
        }
        for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
            struct scheduled *s = &next[slot];
            bool is_new = !s->live;
            if (is_new && chance(60))
                break; /* a hole would not be the lowest free slot of a later one */
            if (is_new) {
                *s = (struct scheduled){.live = true, .id = ++next_id};
                snprintf(s->request_id, sizeof s->request_id, "r%d", (int)s->id);
                s->prompt_count = 1 + random_below(16);
                random_numbers_fill(s->prompt, s->prompt_count);
            } else if (chance(15)) {
                continue;
            }
            if (s->computed < s->prompt_count)
                schedule_prefill(columns, nested, s, slot, is_new);
            else
                schedule_decode(columns, nested, s, slot);
        }
        if (chance(30)) {
            request_copy(columns, (int32_t)sequence, 2);
            request_copy(nested, (int32_t)sequence, 2);
        }

        const struct cox_batch *batches[2];
        struct cox_batch_output *outputs[2];
        struct cox_error err = {0};
        if (cox_table_apply(f.table, sequence, columns, &batches[0], &outputs[0], &err) ||
            cox_table_apply(other, sequence, nested, &batches[1], &outputs[1], &err))
            fail_msg("step %d: %s", (int)sequence, err.text);
        check_same_batch(batches[0], batches[1]);
        row_count += batches[0]->row_count;
        if (chance(20)) {
            cox_table_revert(f.table);
            cox_table_revert(other);
            continue;
        }
        for (uint32_t i = 0; i < batches[0]->row_count; i++)
            outputs[0][i].token = outputs[1][i].token = (int32_t)random_below(1000);
        cox_table_commit(f.table);
        cox_table_commit(other);
        memcpy(now, next, sizeof now);
    }
    assert_true(row_count > RANDOM_STEP_COUNT);
    table_check_invariants(f.table);
    table_check_invariants(other);
    cox_table_free(other);
}
