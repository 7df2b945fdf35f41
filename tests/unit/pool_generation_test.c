/* Blocks that one process manages by number, and blocks that messages pin. */
#include "memory/pool/pool_internal.h"
#include "memory/pool/pool_layout.h"
#include "channel_fixture.h"
#include "pool_fixture.h"

#define BLOCK_SIZE 4096
#define BLOCK_COUNT 70

static const struct cox_pool_options fixed = {
    .size = sizeof(struct cox_pool_options), .block_size = BLOCK_SIZE, .block_count = BLOCK_COUNT};

static struct cox_block_ref told(const struct cox_pool *pool, uint32_t block, uint64_t generation)
{
    return (struct cox_block_ref){cox_pool_id(pool), generation, BLOCK_SIZE, block, 0};
}

LEAK_TEST(p9_all_blocks_are_taken_by_one)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_attached(pool);
    struct cox_block_ref ref;
    assert_int_equal(cox_pool_generation(pool, 0), 0);
    assert_int_equal(cox_pool_bump_generation(pool, 0, 7), COX_STATE);
    assert_int_equal(cox_pool_adopt_all(pool, 0, NULL), COX_INVALID);
    assert_int_equal(cox_pool_adopt_all(pool, UINT64_C(1) << 48, NULL), COX_INVALID);
    assert_int_equal(cox_pool_adopt_all(pool, 1000, NULL), 0);
    assert_int_equal(cox_pool_adopt_all(pool, 1000, NULL), COX_STATE);
    assert_int_equal(cox_pool_adopt_all(other, 1000, NULL), COX_STATE);
    assert_int_equal(cox_pool_allocate(pool, 1, &ref, NULL), COX_FULL);
    assert_int_equal(pool_stats(pool).reference_count, BLOCK_COUNT);
    for (uint32_t block = 0; block < BLOCK_COUNT; block++)
        assert_int_equal(cox_pool_generation(pool, block), 1000);
    assert_int_equal(cox_pool_generation(pool, BLOCK_COUNT), 0);
    assert_int_equal(cox_pool_generation(other, 0), 0); /* not adopted by it */
    assert_int_equal(cox_pool_bump_generation(other, 0, 7), COX_STATE);
    /* It may also copy them while it has them. */
    ref = told(pool, 3, 1000);
    assert_int_equal(cox_pool_copy_to(pool, &ref, 0, "abc", 3, NULL), 0);
    assert_int_equal(cox_pool_copy_to(other, &ref, 0, "abc", 3, NULL), COX_STALE);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), COX_STALE);
    assert_int_equal(cox_pool_ref(other, &ref, NULL), 0);
    test_release(pool);
    assert_int_equal(pool_stats(other).reference_count, 1);
    assert_int_equal(cox_pool_unref(other, &ref, NULL), 0);
    pool_is_whole(other);
    /* A pool with an allocated block is not fresh. */
    assert_int_equal(cox_pool_adopt_all(other, 5, NULL), COX_STATE);
}

LEAK_TEST(p9_a30_only_a_fresh_fixed_pool_is_taken)
{
    const struct cox_pool_options slab = {.size = sizeof(struct cox_pool_options),
                                          .strategy = COX_POOL_SLAB,
                                          .block_size = 64,
                                          .slabs_size = 1 << 20};
    struct cox_pool *pool = own_pool(&slab);
    assert_int_equal(cox_pool_adopt_all(pool, 5, NULL), COX_STATE);
    test_release(pool);
    pool = own_pool(&fixed);
    struct cox_block_ref ref = pool_allocated(pool, 1);
    assert_int_equal(cox_pool_adopt_all(pool, 5, NULL), COX_STATE);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - 1);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    pool_is_whole(pool);
}

LEAK_TEST(p9_a_block_of_a_bumped_generation_has_no_new_readers)
{
    struct cox_pool *pool = own_pool(&fixed), *reader = own_attached(pool);
    const struct cox_block_ref old = told(pool, 5, 1000), next = told(pool, 5, 2000);
    assert_int_equal(cox_pool_adopt_all(pool, 1000, NULL), 0);
    assert_int_equal(cox_pool_ref(reader, &old, NULL), 0);
    assert_int_equal(cox_pool_bump_generation(pool, BLOCK_COUNT, 2000), COX_INVALID);
    assert_int_equal(cox_pool_bump_generation(pool, 5, 0), COX_INVALID);
    assert_int_equal(cox_pool_bump_generation(pool, 5, UINT64_C(1) << 48), COX_INVALID);
    assert_int_equal(cox_pool_bump_generation(pool, 5, 2000), 0);
    assert_int_equal(cox_pool_bump_generation(pool, 5, 2000), 0);
    assert_int_equal(cox_pool_generation(pool, 5), 2000);
    assert_int_equal(cox_pool_ref(reader, &old, NULL), COX_STALE);
    /* The reader of the old generation still reads. */
    char text[64];
    snprintf(text, sizeof text, "process %d", (int)getpid());
    assert_refused(
        cox_pool_wait_unpinned(pool, 5, cox_deadline_after_ms(1), NULL, NULL, test_err()),
        COX_TIMEOUT, text);
    assert_int_equal(cox_pool_wait_unpinned(pool, 6, 0, NULL, NULL, NULL), 0);
    assert_int_equal(cox_pool_wait_unpinned(pool, BLOCK_COUNT, 0, NULL, NULL, NULL), COX_INVALID);
    /* A reader of both generations releases each once. */
    assert_int_equal(cox_pool_ref(reader, &next, NULL), 0);
    assert_int_equal(cox_pool_ref(reader, &next, NULL), 0);
    assert_int_equal(cox_pool_unref(reader, &old, NULL), 0);
    assert_int_equal(cox_pool_unref(reader, &old, NULL), COX_STALE);
    assert_int_equal(cox_pool_wait_unpinned(pool, 5, 0, NULL, NULL, NULL), COX_TIMEOUT);
    assert_int_equal(cox_pool_unref(reader, &next, NULL), 0);
    assert_int_equal(cox_pool_unref(reader, &next, NULL), 0);
    assert_int_equal(cox_pool_unref(reader, &next, NULL), COX_STALE);
    assert_int_equal(cox_pool_wait_unpinned(pool, 5, 0, NULL, NULL, NULL), 0);
    /* References of this process do not delay it. */
    assert_int_equal(cox_pool_ref(pool, &next, NULL), 0);
    assert_int_equal(cox_pool_wait_unpinned(pool, 5, 0, NULL, NULL, NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &next, NULL), 0);
}

static bool third_time(void *context)
{
    return ++*(int *)context == 3;
}

LEAK_TEST(m13_wait_unpinned_can_be_cancelled)
{
    struct cox_pool *pool = own_pool(&fixed), *reader = own_attached(pool);
    const struct cox_block_ref ref = told(pool, 0, 9);
    int asked = 0;
    assert_int_equal(cox_pool_adopt_all(pool, 9, NULL), 0);
    assert_int_equal(cox_pool_ref(reader, &ref, NULL), 0);
    assert_int_equal(cox_pool_bump_generation(pool, 0, 10), 0);
    assert_int_equal(cox_pool_wait_unpinned(pool, 0, COX_DEADLINE_NEVER, third_time, &asked, NULL),
                     COX_ABORTED);
    assert_int_equal(asked, 3);
    test_release(reader);
    assert_int_equal(cox_pool_wait_unpinned(pool, 0, 0, third_time, &asked, NULL), 0);
}

/* ---- pins ---- */

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
    while (again.block != ref.block || again.generation == ref.generation)
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
