/* Replies in blocks, as they are taken. */
#include <malloc.h>
#include <sys/sysinfo.h>

#include "channel/memory/reply_memory.h"
#include "coordinator/collector/replies.h"
#include "tests/lib/test.h"

/* A block without a page costs the rank that claims it nothing; copying it would take all memory.
 */
PLAIN_TEST(m4_b33_an_reply_larger_than_what_is_free_is_refused)
{
    struct sysinfo info;
    assert_int_equal(sysinfo(&info), 0);
    const uint64_t size = (((uint64_t)info.totalram + info.totalswap) * info.mem_unit | 0xffff) + 1;
    struct cox_exporter *exporter;
    struct cox_rank_result result = {.outcome = COX_OUTCOME_LATE, .pid = getpid()};
    char text[COX_RANK_TEXT_SIZE];
    struct cox_replies_rank rank = {.ref = {.size = size}, .text = text};
    struct cox_replies replies = {.rank_count = 1, .results = &result, .ranks = &rank};
    const struct cox_reply_limits reply_limits = {.size_max = UINT64_MAX};
    struct cox_large_payload_view view = {0};
    int fd = test_own_fd(memfd_create("answer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &rank.ref.handle, NULL), 0);
    assert_int_equal(cox_replies_take_large(&replies, &reply_limits, &view, 0, COX_TYPE_OPAQUE), 0);
    assert_null(view.region.base);
    assert_int_equal(result.outcome, COX_OUTCOME_ERROR);
    assert_int_equal(result.code, COX_NO_SPACE);
    assert_contains(result.text, "available");
    assert_null(rank.large);
    cox_exporter_free(exporter);
}

static size_t bytes_in_use(void)
{
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

/* While the process has a group. */
PLAIN_TEST(m3_the_memory_of_a_reply_is_used_again)
{
    enum { COUNT = COX_REPLY_MEMORY_COUNT + 1 };
    const size_t size = (size_t)3 << 20;
    uint8_t *blocks[COUNT], *first = NULL;
    const size_t used = bytes_in_use();
    cox_reply_memory_begin();
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = cox_reply_memory_alloc(size);
        assert_non_null(blocks[i]);
        memset(blocks[i], i, size);
    }
    for (int i = 0; i < COUNT; i++)
        cox_reply_memory_free(blocks[i]);
    /* The last one first, and none of another size. */
    uint8_t *small = cox_reply_memory_alloc(100), *larger = cox_reply_memory_alloc(size + size);
    for (int i = COUNT - 1; i > 0; i--) {
        first = cox_reply_memory_alloc(size - 1);
        assert_ptr_equal(first, blocks[i]);
        assert_int_equal(first[size - 1], i);
        assert_ptr_not_equal(first, larger);
    }
    for (int i = 1; i < COUNT; i++)
        free(blocks[i]); /* is allowed */
    cox_reply_memory_free(small);
    cox_reply_memory_free(larger);
    assert_ptr_equal(cox_reply_memory_alloc(size + size), larger);
    uint8_t *kept = cox_reply_memory_alloc(size);
    cox_reply_memory_free(kept);
    cox_reply_memory_end();
    cox_reply_memory_free(larger);
    cox_reply_memory_free(NULL);
    assert_true(bytes_in_use() < used + size); /* nothing is kept without a group */
}

/* Below a huge page, where malloc would map new pages for each. */
PLAIN_TEST(m3_the_memory_of_a_smaller_reply_is_used_again)
{
    static const size_t sizes[] = {COX_REPLY_MEMORY_SIZE_MIN, COX_REPLY_MEMORY_SIZE_MIN + 1,
                                   (size_t)1 << 20, ((size_t)1 << 20) + 300};
    cox_reply_memory_begin();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t *first = cox_reply_memory_alloc(sizes[i]);
        uint8_t *other = cox_reply_memory_alloc(4 * sizes[i]);
        memset(first, 1, sizes[i]);
        memset(other, 2, 4 * sizes[i]);
        cox_reply_memory_free(first);
        cox_reply_memory_free(other);
        assert_ptr_equal(cox_reply_memory_alloc(4 * sizes[i] - 1), other);
        assert_ptr_equal(cox_reply_memory_alloc(sizes[i]), first);
        assert_int_equal(first[sizes[i] - 1], 1);
        cox_reply_memory_free(other);
        cox_reply_memory_free(first);
    }
    cox_reply_memory_end();
}

/* Nor is one of malloc's own among them, which malloc aligned to 16. */
PLAIN_TEST(m3_many_smaller_replies_do_not_push_out_a_large_one)
{
    const size_t large_size = (size_t)4 << 20, small_size = (size_t)200 << 10;
    uint8_t *small[2 * COX_REPLY_MEMORY_COUNT];
    cox_reply_memory_begin();
    uint8_t *large = cox_reply_memory_alloc(large_size);
    cox_reply_memory_free(large);
    for (int i = 0; i < 2 * COX_REPLY_MEMORY_COUNT; i++) {
        small[i] = cox_reply_memory_alloc(i % 2 ? small_size : COX_REPLY_MEMORY_SIZE_MIN - 1);
        memset(small[i], 1, COX_REPLY_MEMORY_SIZE_MIN - 1);
    }
    for (int i = 0; i < 2 * COX_REPLY_MEMORY_COUNT; i++)
        cox_reply_memory_free(small[i]);
    for (int i = 0; i < 2 * COX_REPLY_MEMORY_COUNT; i++) {
        small[i] = cox_reply_memory_alloc(i % 2 ? small_size : COX_REPLY_MEMORY_SIZE_MIN);
        assert_int_equal((uintptr_t)small[i] % COX_REPLY_MEMORY_ALIGNMENT, 0);
    }
    assert_ptr_equal(cox_reply_memory_alloc(large_size), large);
    for (int i = 0; i < 2 * COX_REPLY_MEMORY_COUNT; i++)
        cox_reply_memory_free(small[i]);
    cox_reply_memory_free(large);
    cox_reply_memory_end();
}

static int huge_count;
int __real_madvise(void *at, size_t size, int advice);
int __wrap_madvise(void *at, size_t size, int advice);
int __wrap_madvise(void *at, size_t size, int advice)
{
    huge_count += advice == MADV_HUGEPAGE;
    return __real_madvise(at, size, advice);
}

/* Which would have 2 MiB of memory for it. */
PLAIN_TEST(m3_a_reply_below_a_huge_page_takes_none)
{
    huge_count = 0;
    cox_reply_memory_free(cox_reply_memory_alloc(((size_t)1 << 20) + 300));
    assert_int_equal(huge_count, 0);
    cox_reply_memory_free(cox_reply_memory_alloc((size_t)2 << 20));
    assert_int_equal(huge_count, 1);
}
