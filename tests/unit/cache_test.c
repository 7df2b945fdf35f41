#include "engine/compute/cache.h"

#include "channel/kv/kv_blocks_layout.h"
#include "tests/lib/test.h"

static const struct cox_cache_geometry small = {
    .layer_count = 2,
    .kv_head_count = 3,
    .head_dim = 4,
    .block_size = 5,
    .block_count = 6,
    .swap_block_count = 4,
};

TEST_OWNED(cox_cache_free)

/* The test's own. */
static struct cox_cache *cache_of(const struct cox_cache_geometry *geometry)
{
    struct cox_cache *cache = NULL;
    assert_ok(cox_cache_new(geometry, &cache, test_err()));
    return test_own(cache, cox_cache_free_owned);
}

static struct cox_cache *open_cache(void)
{
    return cache_of(&small);
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

/* One list of a batch: swap_out, swap_in or copy. */
#define MOVE(cache, list, pairs, count, err)                                                       \
    cox_cache_move(cache, &(struct cox_batch){.list = (pairs), .list##_count = (count)}, err)

PLAIN_TEST(blocks_hold_layers_heads_and_positions_apart)
{
    const size_t length = (size_t)small.block_size * small.head_dim;
    struct cox_cache *cache = open_cache();
    float number = 0;
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
}

PLAIN_TEST(moves_follow_their_pairs)
{
    const struct cox_block_pair out[] = {{0, 3}, {1, 2}};
    const struct cox_block_pair in[] = {{3, 4}, {2, 0}};
    const struct cox_block_pair copy[] = {{4, 5}, {5, 1}, {2, 2}};
    struct cox_cache *cache = open_cache();
    mark_blocks(cache);
    assert_int_equal(MOVE(cache, swap_out, out, 2, NULL), 0);
    assert_int_equal(MOVE(cache, swap_in, in, 2, NULL), 0);
    assert_int_equal(mark_of(cache, 4), 'a');
    assert_int_equal(mark_of(cache, 0), 'b');
    assert_int_equal(MOVE(cache, copy, copy, 3, NULL), 0);
    assert_int_equal(mark_of(cache, 5), 'a');
    assert_int_equal(mark_of(cache, 1), 'a');
    assert_int_equal(mark_of(cache, 2), 'c');
    assert_int_equal(mark_of(cache, 3), 'd');
}

/* Out, then in, then copy: each list needs what the one before it left. */
PLAIN_TEST(batch_moves_have_their_order)
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
    mark_blocks(cache);
    assert_int_equal(cox_cache_move(cache, &batch, NULL), 0);
    assert_int_equal(mark_of(cache, 2), 'a');
}

PLAIN_TEST(bad_block_ids_move_nothing)
{
    static const struct cox_block_pair bad[] = {{-1, 0},        {0, -1},        {6, 0}, {0, 6},
                                                {INT32_MIN, 0}, {0, INT32_MAX}, {4, 6}, {6, 4}};
    struct cox_cache *cache = open_cache();
    mark_blocks(cache);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const struct cox_block_pair pairs[] = {{0, 1}, bad[i]};
        const struct cox_batch batch = {
            .swap_out = pairs, .swap_out_count = 1, .copy = pairs, .copy_count = 2};

        assert_refused(MOVE(cache, swap_out, pairs, 2, test_err()), COX_INVALID, "swap-out 1");
        assert_int_equal(MOVE(cache, swap_in, pairs, 2, NULL), COX_INVALID);
        assert_int_equal(MOVE(cache, copy, pairs, 2, NULL), COX_INVALID);
        assert_int_equal(cox_cache_move(cache, &batch, NULL), COX_INVALID);
        for (int block = 0; block < 6; block++)
            assert_int_equal(mark_of(cache, block), 'a' + block);
    }
    assert_null(cox_cache_block(cache, -1));
    assert_null(cox_cache_block(cache, 6));
}

PLAIN_TEST(host_blocks_have_their_own_count)
{
    const struct cox_block_pair out = {0, 4}, in = {4, 0}, fine = {5, 3};
    struct cox_cache_geometry none = small;
    struct cox_cache *cache = open_cache();
    assert_int_equal(MOVE(cache, swap_out, &out, 1, NULL), COX_INVALID);
    assert_int_equal(MOVE(cache, swap_in, &in, 1, NULL), COX_INVALID);
    assert_int_equal(MOVE(cache, swap_out, &fine, 1, NULL), 0);
    none.swap_block_count = 0;
    cache = cache_of(&none);
    assert_int_equal(MOVE(cache, swap_out, (&(struct cox_block_pair){0, 0}), 1, NULL), COX_INVALID);
}

PLAIN_TEST(new_refuses_absurd_geometry)
{
    struct cox_cache_geometry bad[6] = {small, small, small, small, small, small};
    struct cox_cache_geometry huge = {1024, 1024, 1024, 4096, 1 << 24, 0};
    struct cox_cache *cache = NULL;
    bad[0].block_size = 0;
    bad[1].block_size = 4097;
    bad[2].block_count = 0;
    bad[3].block_count = (1u << 24) + 1;
    bad[4].swap_block_count = UINT32_MAX;
    bad[5].layer_count = 0;
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(cox_cache_new(&bad[i], &cache, NULL), COX_INVALID);
    assert_refused(cox_cache_new(&huge, &cache, test_err()), COX_NO_SPACE, "16777216 KV blocks");
    assert_null(cache);
}

/* ---- whose blocks they are ---- */

TEST_OWNED(cox_kv_view_free)

/* As another group's rank has it. */
static struct cox_kv_view *open_reader(struct cox_cache *cache)
{
    struct cox_kv_view *reader = NULL;
    assert_ok(
        cox_kv_view_attach(cox_kv_blocks_info(cox_cache_kv_blocks(cache)).fd, &reader, test_err()));
    return test_own(reader, cox_kv_view_free_owned);
}

static uint64_t owner_of(struct cox_cache *cache, uint32_t block)
{
    return cox_kv_blocks_user(cox_cache_kv_blocks(cache), block);
}

static int copy_of(struct cox_kv_view *reader, uint32_t block, uint64_t user, char *ret_mark)
{
    char bytes[1024];
    const int r = cox_kv_view_copy(reader, block, user, 0, bytes, NULL);

    assert_true(cox_kv_view_info(reader).block_size <= sizeof(bytes));
    *ret_mark = bytes[0];
    return r;
}

/* A step of one row, with blocks 0, 1, 2, ... from first on. */
struct one_row {
    int32_t blocks[4];
    struct cox_block_table table;
    struct cox_batch_row row;
    struct cox_batch batch;
};

static struct cox_batch *row_of(struct one_row *one, int64_t id, uint32_t slot, int32_t first,
                                uint32_t position, uint32_t count)
{
    *one = (struct one_row){.blocks = {first, first + 1, first + 2, first + 3}};
    one->table = (struct cox_block_table){one->blocks, 4};
    one->row = (struct cox_batch_row){
        .id = id, .slot = slot, .position = position, .token_count = count, .tables = &one->table};
    one->batch = (struct cox_batch){.row_count = 1, .rows = &one->row, .table_count = 1};
    return &one->batch;
}

static void step(struct cox_cache *cache, const struct cox_batch *batch)
{
    assert_ok(cox_cache_begin(cache, batch, test_err()));
    cox_cache_end(cache, batch);
}

PLAIN_TEST(p9_blocks_belong_to_a_sequence_once_its_step_has_succeeded)
{
    struct cox_cache *cache = open_cache();
    struct one_row one;
    for (uint32_t block = 0; block < small.block_count; block++)
        assert_int_equal(owner_of(cache, block), COX_CACHE_UNUSED);
    /* 7 positions of 5 to a block. */
    assert_int_equal(cox_cache_begin(cache, row_of(&one, 7, 0, 1, 0, 7), NULL), 0);
    assert_int_equal(owner_of(cache, 1), COX_CACHE_UNUSED);
    cox_cache_end(cache, &one.batch);
    assert_int_equal(owner_of(cache, 0), COX_CACHE_UNUSED);
    assert_int_equal(owner_of(cache, 1), 7);
    assert_int_equal(owner_of(cache, 2), 7);
    assert_int_equal(owner_of(cache, 3), COX_CACHE_UNUSED);
    step(cache, row_of(&one, 7, 0, 1, 7, 4));
    assert_int_equal(owner_of(cache, 3), 7);
    assert_int_equal(owner_of(cache, 4), COX_CACHE_UNUSED);

    /* Its slot ends, in the step in which another sequence gets it. */
    const uint32_t slot = 0;
    row_of(&one, 8, 0, 2, 0, 1)->finished_slots = &slot;
    one.batch.finished_count = 1;
    step(cache, &one.batch);
    assert_int_equal(owner_of(cache, 1), COX_CACHE_UNUSED);
    assert_int_equal(owner_of(cache, 2), 8);
    assert_int_equal(owner_of(cache, 3), COX_CACHE_UNUSED);
    cox_cache_forget(cache, &slot, 1);
    assert_int_equal(owner_of(cache, 2), COX_CACHE_UNUSED);
    /* Again, and of slots that never were. */
    cox_cache_forget(cache, (const uint32_t[]){0, 1, UINT32_MAX}, 3);
}

PLAIN_TEST(p9_more_sequences_end_at_once_than_are_looked_for_at_a_time)
{
    struct cox_cache_geometry many = small;
    uint32_t slots[200];
    struct one_row one;
    many.block_count = 204;
    struct cox_cache *cache = cache_of(&many);
    for (uint32_t i = 0; i < 200; i++) {
        slots[i] = i * 100; /* beyond what there are places for at first */
        step(cache, row_of(&one, 1000 + i, slots[i], (int32_t)i, 0, 1));
        assert_int_equal(owner_of(cache, i), 1000 + i);
    }
    cox_cache_forget(cache, slots, 199);
    for (uint32_t i = 0; i < 199; i++)
        assert_int_equal(owner_of(cache, i), COX_CACHE_UNUSED);
    assert_int_equal(owner_of(cache, 199), 1199);
}

PLAIN_TEST(p9_a_sequence_that_begins_anew_has_no_blocks_of_before)
{
    struct cox_cache *cache = open_cache();
    struct one_row one;
    step(cache, row_of(&one, 7, 0, 0, 0, 10));
    assert_int_equal(cox_cache_begin(cache, row_of(&one, 7, 0, 1, 0, 5), NULL), 0);
    assert_int_equal(owner_of(cache, 0), COX_CACHE_UNUSED);
    assert_int_equal(owner_of(cache, 1), COX_CACHE_UNUSED);
    cox_cache_end(cache, &one.batch);
    assert_int_equal(owner_of(cache, 0), COX_CACHE_UNUSED);
    assert_int_equal(owner_of(cache, 1), 7);
}

PLAIN_TEST(p9_moved_blocks_are_their_sequences)
{
    const struct cox_block_pair out = {0, 0}, in = {0, 3}, copy = {3, 5};
    struct cox_cache *cache = open_cache();
    struct one_row one;
    step(cache, row_of(&one, 7, 0, 0, 0, 1));
    /* To block 3, which is in the table of the row, and to block 5, which is in no table. */
    row_of(&one, 7, 0, 1, 9, 1);
    one.batch.swap_out = &out;
    one.batch.swap_in = &in;
    one.batch.copy = &copy;
    one.batch.swap_out_count = one.batch.swap_in_count = one.batch.copy_count = 1;
    step(cache, &one.batch);
    assert_int_equal(owner_of(cache, 2), 7);
    assert_int_equal(owner_of(cache, 3), 7);
    assert_int_equal(owner_of(cache, 5), COX_CACHE_UNUSED);
}

/* All ways to write a block run at once, whichever process reads it, and it cannot be copied under
 * its former user any more. */
PLAIN_TEST(p9_a_block_that_is_written_has_no_user_whatever_reads_it)
{
    const struct cox_block_pair in = {0, 0}, copy = {5, 0};
    struct cox_cache *cache = open_cache();
    struct cox_kv_view *reader = open_reader(cache);
    struct one_row one;
    char mark;
    for (int way = 0; way < 5; way++) {
        const int64_t id = 10 + way;

        step(cache, row_of(&one, id, 0, 0, 0, 1));
        mark_blocks(cache);
        assert_int_equal(copy_of(reader, 0, (uint64_t)id, &mark), 0);
        assert_int_equal(mark, 'a');
        assert_int_equal(copy_of(reader, 0, (uint64_t)id + 1, &mark), COX_STALE);
        row_of(&one, 99, 1, way == 0 ? 0 : 2, way == 0 ? 1 : 0, 1);
        one.batch.swap_in = &in;
        one.batch.swap_in_count = way == 1;
        one.batch.copy = &copy;
        one.batch.copy_count = way == 2;
        if (way < 3)
            assert_int_equal(cox_cache_begin(cache, &one.batch, NULL), 0);
        else if (way == 3)
            cox_cache_take(cache, 0);
        else
            cox_cache_clear(cache);
        assert_int_equal(owner_of(cache, 0), COX_CACHE_UNUSED);
        assert_int_equal(copy_of(reader, 0, (uint64_t)id, &mark), COX_STALE);
        assert_int_equal(copy_of(reader, 0, COX_KV_UNUSED, &mark), COX_STALE);
    }
}

/* Takes of a block so far, as a reader's own word shows them: what a copy that has begun is stale
 * by. */
static uint64_t changes_of(struct cox_cache *cache, uint32_t block)
{
    const struct cox_kv_words *words = (const void *)((const char *)cox_cache_block(cache, 0) -
                                                      COX_KV_PAGE_SIZE + COX_KV_WORDS_OFFSET);

    return atomic_load(&words[block].kv_change);
}

/* The sequence itself writes on: what is being copied of it stays good. */
PLAIN_TEST(p9_the_owner_writes_on_behind_what_is_read)
{
    struct cox_cache *cache = open_cache();
    struct one_row one;
    uint64_t changes;
    step(cache, row_of(&one, 7, 0, 0, 0, 2));
    changes = changes_of(cache, 0);
    step(cache, row_of(&one, 7, 0, 0, 2, 1));
    step(cache, row_of(&one, 7, 0, 0, 1, 2)); /* and the same again */
    assert_int_equal(owner_of(cache, 0), 7);
    assert_int_equal(changes_of(cache, 0), changes);
    /* Anew it is the same user, and other content. */
    step(cache, row_of(&one, 7, 0, 0, 0, 2));
    assert_int_equal(owner_of(cache, 0), 7);
    assert_true(changes_of(cache, 0) > changes);
}

/* A pull that has failed elsewhere and is tried again with other blocks leaves its first ones the
 * sequence's, and unused: the sequence may get one of them later, for other positions. What is
 * copied of it then is stale. */
PLAIN_TEST(p9_a_former_block_of_the_sequence_is_begun_by_a_take)
{
    struct cox_cache *cache = open_cache();
    struct one_row one;
    uint64_t changes;
    for (int32_t block = 1; block < 3;
         block++) { /* first 2, which is the second attempt's no more */
        cox_cache_take(cache, (uint32_t)(3 - block));
        cox_cache_give(cache, (uint32_t)(3 - block), 7);
    }
    changes = changes_of(cache, 2);
    /* Pulled: the 5 positions of block 1. */
    assert_int_equal(cox_cache_begin(cache, row_of(&one, 7, 0, 1, 5, 1), NULL), 0);
    assert_int_equal(owner_of(cache, 2), COX_CACHE_UNUSED);
    assert_true(changes_of(cache, 2) > changes);
    assert_int_equal(owner_of(cache, 1), 7);
    cox_cache_end(cache, &one.batch);
    assert_int_equal(owner_of(cache, 2), 7);
    changes = changes_of(cache, 2);
    step(cache, row_of(&one, 7, 0, 1, 6, 1));
    assert_int_equal(changes_of(cache, 2), changes);
    /* In the middle of a step's positions as well: from the fourth of block 2 into block 3. */
    cox_cache_take(cache, 3);
    cox_cache_give(cache, 3, 7);
    assert_int_equal(cox_cache_begin(cache, row_of(&one, 7, 0, 1, 8, 3), NULL), 0);
    assert_int_equal(owner_of(cache, 2), 7);
    assert_int_equal(owner_of(cache, 3), COX_CACHE_UNUSED);
    cox_cache_end(cache, &one.batch);
    assert_int_equal(owner_of(cache, 3), 7);
}

PLAIN_TEST(a_cleared_cache_is_as_a_new_one)
{
    struct cox_cache *cache = open_cache();
    struct one_row one;
    mark_blocks(cache);
    assert_int_equal(MOVE(cache, swap_out, (&(struct cox_block_pair){0, 3}), 1, NULL), 0);
    step(cache, row_of(&one, 7, 0, 0, 0, 1));
    cox_cache_clear(cache);
    assert_int_equal(MOVE(cache, swap_in, (&(struct cox_block_pair){3, 5}), 1, NULL), 0);
    for (uint32_t block = 0; block < small.block_count; block++) {
        assert_int_equal(mark_of(cache, (int)block), 0);
        assert_int_equal(owner_of(cache, block), COX_CACHE_UNUSED);
    }
}
