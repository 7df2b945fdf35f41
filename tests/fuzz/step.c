/* Steps of any bytes against one sequence table: refused without effect, or a view that is whole.
 */
#include "fuzz.h"

#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "worker/sequences/table_private.h"

#define SEQUENCE_COUNT_MAX 8
#define TOKEN_COUNT_MAX 64
#define ARENA_SIZE_MAX (256u << 10)

/* What the first byte of a record asks for. */
enum { COMMIT = 1, BASE = 2, CLEANUP = 4, CLEAR = 8, BARE = 16 };

static void view_check(const struct cox_batch *batch, struct cox_batch_output *outputs,
                       const struct cox_table *table)
{
    FUZZ_CHECK(batch->row_count <= SEQUENCE_COUNT_MAX);
    FUZZ_CHECK(batch->table_count >= 1 && batch->table_count <= COX_BLOCK_TABLE_COUNT_MAX);
    FUZZ_CHECK(batch->finished_count <= SEQUENCE_COUNT_MAX);
    FUZZ_CHECK(!cox_batch_cancelled(batch));
    fuzz_touch(batch->swap_in, batch->swap_in_count * sizeof *batch->swap_in);
    fuzz_touch(batch->swap_out, batch->swap_out_count * sizeof *batch->swap_out);
    fuzz_touch(batch->copy, batch->copy_count * sizeof *batch->copy);
    for (uint32_t i = 0; i < batch->finished_count; i++)
        FUZZ_CHECK(batch->finished_slots[i] < SEQUENCE_COUNT_MAX);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        FUZZ_CHECK(row->slot < SEQUENCE_COUNT_MAX && row->token_count > 0);
        FUZZ_CHECK((uint64_t)row->position + row->token_count <= TOKEN_COUNT_MAX);
        for (uint32_t t = 0; t < row->position + row->token_count; t++)
            FUZZ_CHECK(row->tokens[t] >= 0);
        FUZZ_CHECK(row->tables[0].count > 0);
        for (uint32_t t = 0; t < batch->table_count; t++)
            for (uint32_t b = 0; b < row->tables[t].count; b++)
                FUZZ_CHECK(row->tables[t].blocks[b] >= 0);
        FUZZ_CHECK(row->sampling->temperature >= 0 && row->sampling->top_p > 0);
        for (uint32_t other = 0; other < i; other++)
            FUZZ_CHECK(batch->rows[other].slot != row->slot && batch->rows[other].id != row->id);
        FUZZ_CHECK(outputs[i].token == -1);
        outputs[i].token = row->emit ? (int32_t)(7 * i + row->position) : -1;
    }
    FUZZ_CHECK(batch->row_count <= table->store.live_count);
}

static uint64_t numbers_add(uint64_t hash, const struct cox_numbers *numbers)
{
    hash = cox_hash_bytes(hash, &numbers->count, sizeof numbers->count);
    return cox_hash_bytes(hash, numbers->items, numbers->count * sizeof *numbers->items);
}

/* All that a later step can see. */
static uint64_t table_hash(const struct cox_table *table)
{
    uint64_t hash = cox_hash_bytes(COX_HASH_START, &table->base, sizeof table->base);
    for (uint32_t slot = 0; slot < SEQUENCE_COUNT_MAX; slot++) {
        const struct cox_stored_sequence *sequence = table->store.slots[slot].now;
        hash = cox_hash_bytes(hash, &slot, sizeof slot);
        if (!sequence)
            continue;
        hash = cox_hash_bytes(hash, &sequence->id, sizeof sequence->id);
        hash = cox_hash_bytes(hash, sequence->request_id, strlen(sequence->request_id));
        hash = cox_hash_bytes(hash, &sequence->table_count, sizeof sequence->table_count);
        hash = cox_hash_bytes(hash, &sequence->announced_count, sizeof sequence->announced_count);
        hash = numbers_add(hash, &sequence->tokens);
        for (int t = 0; t < COX_BLOCK_TABLE_COUNT_MAX; t++)
            hash = numbers_add(hash, &sequence->tables[t]);
    }
    return hash;
}

static void step_run(struct cox_table *table, uint64_t sequence, unsigned how,
                     Coxswain__ExecuteModelRequest *step)
{
    const struct cox_batch *batch = NULL;
    struct cox_batch_output *outputs = NULL;
    struct cox_error err = {0};
    uint64_t base = cox_table_base(table), before = table_hash(table);
    uint32_t count = table->store.live_count;
    /* No random byte is the right base. */
    if ((how & BASE) && step->step && base) {
        step->step->base_sequence = base;
        step->step->has_base_sequence = 1;
    }
    int r = cox_table_apply(table, sequence, step, &batch, &outputs, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_STALE || r == COX_CORRUPT || r == COX_TOO_LARGE);
        FUZZ_CHECK(!batch && !outputs);
    } else {
        view_check(batch, outputs, table);
        if (how & COMMIT) {
            cox_table_commit(table);
            FUZZ_CHECK(cox_table_base(table) == sequence);
            FUZZ_CHECK(table->store.live_count <= SEQUENCE_COUNT_MAX);
            return;
        }
        cox_table_revert(table);
    }
    FUZZ_CHECK(cox_table_base(table) == base && table->store.live_count == count);
    FUZZ_CHECK(table_hash(table) == before);
}

static void record_run(struct cox_table *table, uint64_t sequence, unsigned how,
                       const uint8_t *bytes, size_t size)
{
    struct cox_arena arena;
    Coxswain__ExecuteRequest *request = NULL;
    FUZZ_CHECK(cox_arena_init(&arena, 0, ARENA_SIZE_MAX) == 0);
    if (how & BARE) { /* the step without its envelope */
        ProtobufCMessage *step = protobuf_c_message_unpack(
            &coxswain__execute_model_request__descriptor, NULL, size, bytes);
        if (step) {
            step_run(table, sequence, how, (Coxswain__ExecuteModelRequest *)step);
            protobuf_c_message_free_unpacked(step, NULL);
        }
    } else if (cox_wire_request_unpack(&arena, bytes, size, &request) == 0) {
        if (request->request_case == COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST &&
            request->execute_model_request)
            step_run(table, sequence, how, request->execute_model_request);
    }
    cox_arena_deinit(&arena);
}

/* Records of: how (1), length (2), bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    struct cox_table *table = NULL;
    FUZZ_CHECK(cox_table_new(SEQUENCE_COUNT_MAX, TOKEN_COUNT_MAX, &table) == 0);
    for (uint64_t sequence = 1; input.size > 0; sequence++) {
        uint8_t how = fuzz_eat_byte(&input);
        uint16_t length;
        fuzz_eat(&input, &length, sizeof length);
        size_t count = length < input.size ? length : input.size;
        if (how & CLEANUP) {
            int64_t ids[8];
            const uint32_t *slots;
            uint32_t slot_count, before = table->store.live_count;
            fuzz_eat(&input, ids, count < sizeof ids ? count : sizeof ids);
            cox_table_cleanup(table, ids, (count < sizeof ids ? count : sizeof ids) / 8, &slots,
                              &slot_count);
            FUZZ_CHECK(table->store.live_count + slot_count == before);
            fuzz_touch(slots, slot_count * sizeof *slots);
            continue;
        }
        if (how & CLEAR) {
            cox_table_clear(table);
            FUZZ_CHECK(table->store.live_count == 0 && cox_table_base(table) == 0);
        }
        record_run(table, sequence, how, input.bytes, count);
        input.bytes += count;
        input.size -= count;
    }
    cox_table_free(table);
    return 0;
}
