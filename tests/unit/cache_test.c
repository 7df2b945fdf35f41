#include "worker/model/cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct cox_cache_geometry small = {
    .layer_count = 2,
    .kv_head_count = 3,
    .head_dim = 4,
    .block_size = 5,
    .block_count = 6,
    .swap_block_count = 4,
};

static struct cox_cache *open_cache(void)
{
    struct cox_cache *cache = NULL;

    assert_int_equal(cox_cache_new(&small, NULL, &cache, NULL), 0);
    return cache;
}

/* Every block gets a byte of its own. */
static void mark_blocks(struct cox_cache *cache)
{
    for (int block = 0; block < 6; block++)
        memset(cox_cache_block(cache, block), 'a' + block, (size_t)cox_cache_block_size(&small));
}

static char mark_of(struct cox_cache *cache, int block)
{
    const char *bytes = cox_cache_block(cache, block);

    assert_int_equal(bytes[0], bytes[cox_cache_block_size(&small) - 1]);
    return bytes[0];
}

static void blocks_hold_layers_heads_and_positions_apart(void **state)
{
    const size_t length = (size_t)small.block_size * small.head_dim;
    struct cox_cache *cache = open_cache();
    float number = 0;

    (void)state;
    /* 2 layers, keys and values, 3 heads, 5 positions, 4 floats: 960 bytes, already aligned. */
    assert_int_equal(cox_cache_block_size(&small), 960);
    for (int pass = 0; pass < 2; pass++) {
        number = 0;
        for (uint32_t block = 0; block < small.block_count; block++)
            for (uint32_t layer = 0; layer < small.layer_count; layer++)
                for (uint32_t head = 0; head < small.kv_head_count; head++) {
                    float *keys = cox_cache_keys(cache, block, layer, head);
                    float *values = cox_cache_values(cache, block, layer, head);

                    for (size_t i = 0; i < length; i++, number += 2) {
                        if (pass == 0) {
                            keys[i] = number;
                            values[i] = number + 1;
                        }
                        assert_true(keys[i] >= number && keys[i] <= number);
                        assert_true(values[i] >= number + 1 && values[i] <= number + 1);
                    }
                }
    }
    cox_cache_free(cache);
}

static void lent_memory_is_used_as_it_is(void **state)
{
    const size_t size = (size_t)cox_cache_block_size(&small) * small.block_count;
    char *memory = aligned_alloc(COX_CACHE_ALIGNMENT, size);
    struct cox_cache *cache = NULL;

    (void)state;
    assert_non_null(memory);
    memset(memory, 'x', size);
    assert_int_equal(cox_cache_new(&small, memory, &cache, NULL), 0);
    assert_ptr_equal(cox_cache_block(cache, 0), memory);
    assert_int_equal(mark_of(cache, 5), 'x');
    cox_cache_free(cache);
    free(memory);
}

static void moves_follow_their_pairs(void **state)
{
    const struct cox_block_pair out[] = {{0, 3}, {1, 2}};
    const struct cox_block_pair in[] = {{3, 4}, {2, 0}};
    const struct cox_block_pair copy[] = {{4, 5}, {5, 1}, {2, 2}};
    struct cox_cache *cache = open_cache();

    (void)state;
    mark_blocks(cache);
    assert_int_equal(cox_cache_swap_out(cache, out, 2, NULL), 0);
    assert_int_equal(cox_cache_swap_in(cache, in, 2, NULL), 0);
    assert_int_equal(mark_of(cache, 4), 'a');
    assert_int_equal(mark_of(cache, 0), 'b');
    assert_int_equal(cox_cache_copy(cache, copy, 3, NULL), 0);
    assert_int_equal(mark_of(cache, 5), 'a');
    assert_int_equal(mark_of(cache, 1), 'a');
    assert_int_equal(mark_of(cache, 2), 'c');
    assert_int_equal(mark_of(cache, 3), 'd');
    cox_cache_free(cache);
}

/* Out, then in, then copy: each list needs what the one before it left. */
static void batch_moves_have_their_order(void **state)
{
    const struct cox_block_pair out = {0, 0}, in = {0, 1}, copy = {1, 2};
    const struct cox_batch batch = {
        .swap_out = &out,
        .swap_out_count = 1,
        .swap_in = &in,
        .swap_in_count = 1,
        .copy = &copy,
        .copy_count = 1,
    };
    struct cox_cache *cache = open_cache();

    (void)state;
    mark_blocks(cache);
    assert_int_equal(cox_cache_move(cache, &batch, NULL), 0);
    assert_int_equal(mark_of(cache, 2), 'a');
    cox_cache_free(cache);
}

static void bad_block_ids_move_nothing(void **state)
{
    static const struct cox_block_pair bad[] = {{-1, 0},        {0, -1},        {6, 0}, {0, 6},
                                                {INT32_MIN, 0}, {0, INT32_MAX}, {4, 6}, {6, 4}};
    struct cox_cache *cache = open_cache();

    (void)state;
    mark_blocks(cache);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const struct cox_block_pair pairs[] = {{0, 1}, bad[i]};
        const struct cox_batch batch = {
            .swap_out = pairs, .swap_out_count = 1, .copy = pairs, .copy_count = 2};
        struct cox_error err = {0};

        assert_int_equal(cox_cache_swap_out(cache, pairs, 2, &err), COX_INVALID);
        assert_non_null(strstr(err.text, "swap-out 1"));
        assert_int_equal(cox_cache_swap_in(cache, pairs, 2, NULL), COX_INVALID);
        assert_int_equal(cox_cache_copy(cache, pairs, 2, NULL), COX_INVALID);
        assert_int_equal(cox_cache_move(cache, &batch, NULL), COX_INVALID);
        for (int block = 0; block < 6; block++)
            assert_int_equal(mark_of(cache, block), 'a' + block);
    }
    assert_null(cox_cache_block(cache, -1));
    assert_null(cox_cache_block(cache, 6));
    cox_cache_free(cache);
}

static void host_blocks_have_their_own_count(void **state)
{
    const struct cox_block_pair out = {0, 4}, in = {4, 0}, fine = {5, 3};
    struct cox_cache_geometry none = small;
    struct cox_cache *cache = open_cache();

    (void)state;
    assert_int_equal(cox_cache_swap_out(cache, &out, 1, NULL), COX_INVALID);
    assert_int_equal(cox_cache_swap_in(cache, &in, 1, NULL), COX_INVALID);
    assert_int_equal(cox_cache_swap_out(cache, &fine, 1, NULL), 0);
    cox_cache_free(cache);
    none.swap_block_count = 0;
    assert_int_equal(cox_cache_new(&none, NULL, &cache, NULL), 0);
    assert_int_equal(cox_cache_swap_out(cache, &(struct cox_block_pair){0, 0}, 1, NULL),
                     COX_INVALID);
    cox_cache_free(cache);
}

static void new_refuses_absurd_geometry(void **state)
{
    struct cox_cache_geometry bad[6] = {small, small, small, small, small, small};
    struct cox_cache_geometry huge = {1024, 1024, 1024, 4096, 1 << 24, 0};
    struct cox_cache *cache = NULL;
    struct cox_error err = {0};

    (void)state;
    bad[0].block_size = 0;
    bad[1].block_size = 4097;
    bad[2].block_count = 0;
    bad[3].block_count = (1u << 24) + 1;
    bad[4].swap_block_count = UINT32_MAX;
    bad[5].layer_count = 0;
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(cox_cache_new(&bad[i], NULL, &cache, NULL), COX_INVALID);
    assert_int_equal(cox_cache_new(&huge, NULL, &cache, &err), COX_NO_SPACE);
    assert_non_null(strstr(err.text, "16777216 KV blocks"));
    assert_null(cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_hold_layers_heads_and_positions_apart),
        cmocka_unit_test(lent_memory_is_used_as_it_is),
        cmocka_unit_test(moves_follow_their_pairs),
        cmocka_unit_test(batch_moves_have_their_order),
        cmocka_unit_test(bad_block_ids_move_nothing),
        cmocka_unit_test(host_blocks_have_their_own_count),
        cmocka_unit_test(new_refuses_absurd_geometry),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
