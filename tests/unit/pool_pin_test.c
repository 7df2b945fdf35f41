/* Blocks that messages pin. */
#include "memory/pool/pool_internal.h"
#include "memory/pool/pool_layout.h"
#include "channel_fixture.h"
#include "pool_fixture.h"

#define BLOCK_SIZE 4096
#define BLOCK_COUNT 70

static const struct cox_pool_options fixed = {
    .size = sizeof(struct cox_pool_options), .block_size = BLOCK_SIZE, .block_count = BLOCK_COUNT};

LEAK_TEST(h28_a_message_pins_a_block)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_attached(pool);
    struct cox_block_ref ref = pool_allocated(pool, 100);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 1, NULL), COX_NOT_FOUND);
    assert_int_equal(cox_pool_queue_join(pool, 0, NULL), COX_INVALID);
    assert_int_equal(cox_pool_queue_join(pool, 5, NULL), 0);
    assert_int_equal(cox_pool_queue_join(pool, 5, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 0, 1, NULL), COX_NOT_FOUND);
    assert_int_equal(cox_pool_pin(pool, &ref, 6, 1, NULL), COX_NOT_FOUND);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 0, NULL), COX_INVALID);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, UINT64_C(1) << 48, NULL), COX_INVALID);
    assert_int_equal(cox_pool_pin(other, &ref, 5, 1, NULL), COX_NOT_FOUND); /* has not joined */
    assert_int_equal(cox_pool_queue_join(other, 5, NULL), 0);
    assert_int_equal(cox_pool_pin(other, &ref, 5, 1, NULL), COX_STALE); /* has no reference */
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 1, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 1, NULL), 0);
    assert_int_equal(pool_stats(pool).pin_count, 1);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 2, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 3, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, (UINT64_C(1) << 48) - 1, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 4, NULL), COX_FULL);
    assert_int_equal(cox_pool_pin(pool, &ref, 5, 2, NULL), 0);
    /* Only messages count the block; a subscriber can still reference it. */
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - 1);
    assert_int_equal(cox_pool_ref(other, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(other, &ref, NULL), 0);
    /* Clearing the last pin frees the block, from any process, also twice. */
    for (int round = 0; round < 2; round++) {
        cox_pool_unpin(other, &ref, 5, 1);
        cox_pool_unpin(pool, &ref, 5, 2);
        cox_pool_unpin(other, &ref, 5, (UINT64_C(1) << 48) - 1);
        cox_pool_unpin(pool, &ref, 6, 3); /* another queue's */
        cox_pool_unpin(pool, &ref, 5, 9); /* another message's */
        cox_pool_unpin(pool, &ref, 0, 3);
    }
    assert_int_equal(pool_stats(pool).pin_count, 1);
    cox_pool_unpin(other, &ref, 5, 3);
    assert_int_equal(cox_pool_ref(other, &ref, NULL), COX_STALE);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT);
    /* A stale pin does not match the block of now. */
    struct cox_block_ref again = ref;
    while (again.block != ref.block || again.epoch == ref.epoch)
        again = pool_allocated(pool, 1);
    assert_int_equal(cox_pool_pin(pool, &again, 5, 7, NULL), 0);
    cox_pool_unpin(other, &ref, 5, 3);
    assert_int_equal(pool_stats(pool).pin_count, 1);
}

LEAK_TEST(b37_a_queue_exists_while_a_process_uses_it)
{
    struct cox_pool *a = own_pool(&fixed), *b = own_attached(a), *c = own_attached(a);
    struct cox_block_ref ref = pool_allocated(a, 100), other = pool_allocated(a, 100);
    assert_int_equal(cox_pool_queue_join(a, 5, NULL), 0);
    assert_int_equal(cox_pool_queue_join(b, 5, NULL), 0);
    assert_int_equal(cox_pool_queue_join(a, 77, NULL), 0);
    assert_int_equal(cox_pool_pin(a, &ref, 5, 1, NULL), 0);
    assert_int_equal(cox_pool_pin(a, &other, 77, 1, NULL), 0);
    test_release(a);
    assert_int_equal(pool_stats(c).pin_count, 1); /* queue 77 has no member left */
    assert_int_equal(cox_pool_ref(c, &other, NULL), COX_STALE);
    assert_int_equal(cox_pool_ref(c, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(c, &ref, NULL), 0);
    cox_pool_queue_leave(c, 5); /* it had not joined */
    cox_pool_queue_leave(c, 6);
    assert_int_equal(pool_stats(c).pin_count, 1);
    cox_pool_queue_leave(b, 5);
    cox_pool_queue_leave(b, 5);
    assert_int_equal(pool_stats(c).pin_count, 0);
    assert_int_equal(cox_pool_ref(c, &ref, NULL), COX_STALE);
    pool_is_whole(b);
}

LEAK_TEST(b24_the_place_of_a_queue_is_taken_again)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_block_ref ref = pool_allocated(pool, 100);
    for (uint64_t queue_id = 1; queue_id <= COX_POOL_QUEUE_COUNT_MAX; queue_id++)
        assert_int_equal(cox_pool_queue_join(pool, queue_id, NULL), 0);
    assert_int_equal(cox_pool_queue_join(pool, 1000, NULL), COX_FULL);
    assert_int_equal(cox_pool_pin(pool, &ref, 33, 1, NULL), 0);
    cox_pool_queue_leave(pool, 33);
    assert_int_equal(pool_stats(pool).pin_count, 0);
    assert_int_equal(cox_pool_queue_join(pool, 1000, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 1000, 1, NULL), 0);
    cox_pool_unpin(pool, &ref, 33, 1); /* late, from the queue that was there before */
    assert_int_equal(pool_stats(pool).pin_count, 1);
}
