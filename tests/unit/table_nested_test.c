/* table_nested: steps of the nested form become the same batches. */
#include "proto/wire.h"
#include "table_fixture.h"
#include "table_model.h"

/* ---- the nested form ---- */

TEST(s1_nested_groups_of_several_sequences)
{
    Request *request = request_new(COX_FORWARD_PREFILL);
    Metadata *m = nested_prompt(request, "pair", 0, 3, 2);
    m->seqids = nested_ids((int64_t[]){41, 42}, 2);
    m->has_do_sample = true;
    m->do_sample = false;
    SamplingParams sampling = COXSWAIN__SAMPLING_PARAMS__INIT;
    sampling.has_temperature = true;
    sampling.temperature = 2;
    m->sampling_params = &sampling;
    advance(request, 20);
    assert_int_equal(f.table->store.live_count, 2);
    check_tokens(1, (int32_t[]){10, 11, 12, 21}, 4);
    request = request_new(COX_FORWARD_DECODE);
    m = nested_add(request, NULL, 0, false);
    m->seqids = nested_ids((int64_t[]){42, 41}, 2);
    assert_int_equal(apply(request), 0);
    assert_true(f.batch->rows[0].id == 42 && f.batch->rows[1].id == 41);
    assert_true(f.batch->rows[0].sampling->temperature == 0); /* do_sample was false */
    cox_table_commit(f.table);
    request = request_new(COX_FORWARD_DECODE);
    nested_finish(request, "pair");
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->finished_count, 2);
    cox_table_commit(f.table);
    assert_int_equal(f.table->store.live_count, 0);
    table_check_invariants(f.table);

    /* One of a pair goes alone; its request must not be found in the empty slot. */
    for (uint32_t gone = 0; gone < 2; gone++) {
        request = request_new(COX_FORWARD_PREFILL);
        m = nested_prompt(request, "pair", 0, 3, 2);
        m->seqids = nested_ids((int64_t[]){41, 42}, 2);
        advance(request, 20);
        const uint32_t *slots;
        uint32_t count;
        cox_table_cleanup(f.table, (int64_t[]){41 + gone}, 1, &slots, &count);
        assert_int_equal(count, 1);
        table_check_invariants(f.table);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, "pair");
        advance(request, 20);
        assert_int_equal(f.table->store.live_count, 0);
    }
}

/* ---- mixed steps: is_req_prefill marks the sequences that compute their prompt ---- */

static void nested_prefill(Metadata *m, const protobuf_c_boolean *prefill, size_t count)
{
    m->is_req_prefill = request_take(count * sizeof *prefill);
    memcpy(m->is_req_prefill, prefill, count * sizeof *prefill);
    m->n_is_req_prefill = count;
}

/* Tokens [from, from + count) of the numbers, with is_prompt false. */
static Metadata *nested_chunk(Request *request, int64_t id, size_t from, size_t count)
{
    Metadata *m = nested_add(request, "r", id, false);
    m->prompt_token_ids = nested_bytes(numbers + from, count);
    nested_table(m, numbers, 2);
    nested_prefill(m, (protobuf_c_boolean[]){true}, 1);
    return m;
}

static void check_row(uint32_t row, uint32_t position, uint32_t token_count, bool emit)
{
    const struct cox_batch_row *r = &f.batch->rows[row];
    assert_int_equal(r->position, position);
    assert_int_equal(r->token_count, token_count);
    assert_int_equal(r->emit, emit);
    for (uint32_t i = 0; i < position + token_count; i++)
        assert_int_equal(r->tokens[i], numbers[i]);
}

TEST(s1_nested_chunks_have_their_own_tokens_alone)
{
    for (int how = 0; how < 4;
         how++) { /* 1: no split; 2: all tokens so far; 3: a step is cancelled */
        for (int32_t chunk = 0; chunk < 3; chunk++) {
            for (int turn = how == 3 ? 0 : 1; turn < 2; turn++) {
                Request *request = request_new(COX_FORWARD_MIXED);
                Metadata *m = nested_chunk(request, 8, how == 2 ? 0 : 3 * (size_t)chunk,
                                           how == 2 ? 3 * (size_t)chunk + 3 : 3);
                nested_split(m, 3 * chunk, 3 * chunk + 3, chunk == 2);
                if (how == 1)
                    m->n_split_start_pos = m->n_split_end_pos = 0;
                assert_int_equal(apply(request), 0);
                check_row(0, (uint32_t)chunk * 3, 3, chunk == 2);
                if (turn == 0) {
                    cox_table_revert(f.table);
                } else {
                    f.outputs[0].token = chunk == 2 ? 44 : -1;
                    cox_table_commit(f.table);
                }
                table_check_invariants(f.table);
            }
        }
        check_tokens(0, (int32_t[]){10, 11, 12, 13, 14, 15, 16, 17, 18, 44}, 10);
        Request *request = request_new(COX_FORWARD_DECODE);
        Metadata *m = nested_add(request, "r", 8, true); /* is_prompt says nothing */
        nested_prefill(m, (protobuf_c_boolean[]){false}, 1);
        assert_int_equal(apply(request), 0);
        assert_true(f.batch->rows[0].position == 9 && f.batch->rows[0].token_count == 1);
        cox_table_revert(f.table);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, "r");
        advance(request, 0);
    }
}

TEST(s1_nested_chunks_that_follow_nothing_are_refused)
{
    Request *request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, false);
    refuse(request, COX_STALE); /* the tokens before are unknown */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 0, 3), 0, 3, false);
    advance(request, 0);
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 6, 3), 6, 9, true);
    refuse(request, COX_STALE); /* one is missing */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 2), 3, 6, true);
    refuse(request, COX_CORRUPT); /* neither the chunk nor all of it */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, true);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, true);
    refuse(request, COX_CORRUPT); /* two rows of one sequence */
    /* Said again, and from an earlier position: what the coordinator says last counts. */
    for (int32_t start = 3; start > 0; start -= 2) {
        request = request_new(COX_FORWARD_MIXED);
        nested_split(nested_chunk(request, 8, (size_t)start, 3), start, start + 3, false);
        assert_int_equal(apply(request), 0);
        check_row(0, (uint32_t)start, 3, false);
        cox_table_commit(f.table);
        table_check_invariants(f.table);
    }
    assert_int_equal(cox_sequence_store_get(&f.table->store, 0)->tokens.count, 4);
}

TEST(s1_nested_prefill_is_given_per_sequence)
{
    Request *request = request_new(COX_FORWARD_PREFILL);
    nested_prompt(request, "a", 1, 2, 1);
    advance(request, 70);
    /* One group: a sequence that decodes and two that begin, with tokens of their own. */
    request = request_new(COX_FORWARD_MIXED);
    Metadata *m = nested_add(request, "g", 0, false);
    m->seqids = nested_ids((int64_t[]){2, 1, 3}, 3);
    nested_prefill(m, (protobuf_c_boolean[]){true, false, true}, 3);
    m->prompt_token_ids = nested_bytes((int32_t[]){10, 11, 12, 10, 11}, 5);
    m->has_prompt_lens = true;
    m->prompt_lens = nested_bytes((int32_t[]){3, 0, 2}, 3);
    nested_table(m, numbers, 1);
    m->is_req_last_chunk = request_take(3 * sizeof(protobuf_c_boolean));
    m->is_req_last_chunk[0] = m->is_req_last_chunk[1] = true; /* and the third is not */
    m->n_is_req_last_chunk = 3;
    request->last_sampled_token_ids = (int32_t[]){600}; /* of the one row that decodes */
    request->n_last_sampled_token_ids = 1;
    assert_int_equal(apply(request), 0);
    check_row(0, 0, 3, true);
    assert_true(f.batch->rows[1].position == 2 && f.batch->rows[1].token_count == 1);
    assert_int_equal(f.batch->rows[1].tokens[2], 600);
    check_row(2, 0, 2, false);
    cox_table_revert(f.table);
}

TEST(s1_nested_groups_have_128_sequences_at_most)
{
    table_teardown(NULL);
    table_start(200, 64);
    int64_t ids[129];
    for (size_t i = 0; i < LENGTH(ids); i++)
        ids[i] = (int64_t)i;
    for (size_t count = 128; count <= 129; count++) {
        Request *request = request_new(COX_FORWARD_PREFILL);
        Metadata *m = nested_prompt(request, "many", 0, 3, 2);
        m->seqids = nested_ids(ids, count);
        if (count == 128)
            advance(request, 1);
        else
            refuse(request, COX_TOO_LARGE);
    }
}

TEST(s1_equal_hashes_are_distinguished)
{
    /* Pairs with one hash each, found by search: ids and request ids. */
    static const int64_t ids[] = {85078, 177926};
    static const char *const names[] = {"da67e4", "edadf9"};
    for (int first = 0; first < 2; first++) {
        int second = !first;
        Request *request = request_new(COX_FORWARD_PREFILL);
        nested_prompt(request, names[first], ids[first], 2, 1);
        advance(request, 1);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_add(request, NULL, ids[second], false);
        refuse(request, COX_STALE);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_prompt(request, names[second], ids[second], 2, 1);
        advance(request, 1);
        assert_int_equal(f.table->store.live_count, 2);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_add(request, NULL, ids[first], false);
        advance(request, 1);
        assert_int_equal(f.table->store.live_count, 1);
        cox_table_clear(f.table);
    }
}

/* One more thing wrong with a nested request that is fine; returns the status. */
static int break_nested(Request *request, int what)
{
    Metadata *prompt = request->seq_group_metadata_list[0];
    Metadata *decode = request->seq_group_metadata_list[1];
    static const int32_t negative[] = {-1};
    static const int64_t huge[] = {INT64_C(1) << 32};
    char name[130] = "";
    // clang-format off
    switch (what) {
    case 0: prompt->seqids.len = 0; return COX_CORRUPT;
    case 1: prompt->seqids.len = 7; return COX_CORRUPT;
    case 2: prompt->prompt_token_ids.len = 0; return COX_CORRUPT;
    case 3: prompt->prompt_token_ids.len = 9; return COX_CORRUPT;
    case 4: prompt->prompt_token_ids = nested_bytes(negative, 1); return COX_CORRUPT;
    case 5: prompt->prompt_token_ids = nested_ids(huge, 1); return COX_CORRUPT;
    case 6: prompt->block_tables[0].len = 1; return COX_CORRUPT;
    case 7: prompt->block_tables[0] = nested_ids(huge, 1); return COX_CORRUPT;
    case 8: prompt->n_block_tables = 0; return COX_CORRUPT;
    case 9: prompt->n_split_start_pos = 0; return COX_CORRUPT;
    case 10: prompt->n_split_end_pos = 0; return COX_CORRUPT;
    case 11: prompt->split_start_pos[0] = -1; return COX_CORRUPT;
    case 12: prompt->split_end_pos[0] = 0; return COX_CORRUPT;
    case 13: prompt->split_end_pos[0] = 4; return COX_CORRUPT;
    case 14: prompt->split_end_pos[0] = INT32_MIN; return COX_CORRUPT;
    case 15: decode->seqids = prompt->seqids; return COX_CORRUPT;
    case 16: decode->block_tables[0].len = 15; return COX_CORRUPT;
    case 17: decode->block_tables[0] = nested_bytes(negative, 1); return COX_CORRUPT;
    case 18: decode->block_tables[0].len = 0; return COX_CORRUPT;
    case 19: decode->block_tables[0] = nested_ids(huge, 1); return COX_CORRUPT;
    case 20: decode->seqids = nested_ids(huge, 1); return COX_STALE;
    case 21: decode->seqids = nested_ids((int64_t[]){100, 100}, 2); return COX_CORRUPT;
    case 22:
        memset(name, 'x', 129);
        prompt->request_id = strcpy(request_take(130), name);
        return COX_TOO_LARGE;
    case 23:
        for (int i = 0; i < 4; i++)
            nested_table(prompt, numbers, 1);
        return COX_TOO_LARGE;
    case 24:
        for (int i = 0; i < 4; i++)
            nested_table(decode, numbers, 1);
        return COX_TOO_LARGE;
    case 25:
        prompt->prompt_token_ids = (ProtobufCBinaryData){
            .len = 8 * (MODEL_TOKEN_MAX + 1), .data = request_take(8 * (MODEL_TOKEN_MAX + 1))};
        return COX_TOO_LARGE;
    case 26:
        decode->block_tables[0] = (ProtobufCBinaryData){
            .len = 8 * (MODEL_TOKEN_MAX + 1), .data = request_take(8 * (MODEL_TOKEN_MAX + 1))};
        return COX_TOO_LARGE;
    case 27: request_copy(request, 1, -1); return COX_CORRUPT;
    case 29: prompt->split_start_pos[0] = INT32_MIN; return COX_CORRUPT;
    case 28: /* slots 0 and 3 live, 1 gets the prompt above */
        for (int64_t id = 500; id < 506; id++)
            nested_prompt(request, NULL, id, 1, 1);
        return COX_TOO_LARGE;
    default: fail();
    }
    // clang-format on
    return 0;
}

TEST(s1_every_malformed_nested_field_is_refused)
{
    two_sequences();
    for (int what = -1; what <= 29; what++) {
        Request *request = request_new(COX_FORWARD_MIXED);
        nested_split(nested_prompt(request, "p", 400, 3, 2), 0, 3, true);
        Metadata *decode = nested_add(request, NULL, 100, false);
        nested_table(decode, (int32_t[]){7, 8, 30}, 3);
        if (what < 0) {
            assert_int_equal(apply(request), 0);
            cox_table_revert(f.table);
            continue;
        }
        int status = break_nested(request, what);
        print_message("%d: ", what);
        refuse(request, status);
        print_message("%s\n", f.err.text);
    }
}
