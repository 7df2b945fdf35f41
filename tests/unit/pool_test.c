/* Fixed pools in one process: two attachments are two owners. */
#include "channel_fixture.h"
#include "pool_fixture.h"

#include "memory/pool/pool_internal.h"

#define BLOCK_SIZE 4096
#define BLOCK_COUNT 100

static const struct cox_pool_options fixed = {
    .size = sizeof(struct cox_pool_options), .block_size = BLOCK_SIZE, .block_count = BLOCK_COUNT};

LEAK_TEST(h18_bad_options_are_refused)
{
    const struct {
        struct cox_pool_options options;
        const char *word;
    } all[] = {
        {{.block_size = 64}, "block_count"},
        {{.block_size = 64, .block_count = COX_POOL_BLOCK_COUNT_MAX + 1}, "block_count"},
        {{.block_size = 0, .block_count = 1}, "block_size"},
        {{.block_size = 32, .block_count = 1}, "block_size"},
        {{.block_size = 100, .block_count = 1}, "block_size"},
        {{.block_size = UINT64_C(1) << 60, .block_count = 1 << 20}, "block_size"},
        {{.block_size = UINT64_MAX - 63, .block_count = 2}, "block_size"},
        {{.block_size = 64, .block_count = 1, .on_demand = true}, "block_size"},
        {{.block_size = 64, .block_count = 1, .slab_size = 4096}, "slab_size"},
        {{.block_size = 64, .block_count = 1, .slabs_size = 4096}, "slab_size"},
        {{.block_size = 64, .block_count = 1, .owner_count_max = 1025}, "owner_count_max"},
        {{.block_size = 64, .block_count = 1, .strategy = 3}, "strategy"},
        {{.block_size = 64, .block_count = 1, .domain = {99, 0}}, "domain"},
        {{.block_size = 64, .block_count = 1, .domain = {COX_DOMAIN_HOST, 1}}, "host"},
        {{.block_size = 64, .block_count = 1, .domain = {COX_DOMAIN_BOUNCE, 0}}, "domain"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64}, "size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 96, .slabs_size = 65536}, "block_size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 1 << 17, .slabs_size = 65536}, "block_size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64, .slabs_size = 65536, .slab_size = 2048},
         "slab_size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64, .slabs_size = 65536, .slab_size = 12288},
         "slab_size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64, .slabs_size = 65536, .block_count = 4},
         "block_count"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64, .slabs_size = UINT64_C(1) << 31}, "size"},
        {{.strategy = COX_POOL_SLAB, .block_size = 64, .slabs_size = UINT64_MAX}, "size"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct cox_pool *pool = (struct cox_pool *)&fixed;
        struct cox_pool_options options = all[i].options;
        options.size = sizeof options;
        assert_refused(cox_pool_create(&options, &pool, test_err()), COX_INVALID, all[i].word);
        assert_ptr_equal(pool, &fixed);
    }
}

LEAK_TEST(h18_h21_h22_allocated_and_given_back)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_block_ref refs[BLOCK_COUNT], none = {.size = 77};
    bool seen[BLOCK_COUNT] = {false};
    assert_int_equal(pool->geometry.block_count, BLOCK_COUNT);
    assert_int_equal(pool->geometry.block_size, BLOCK_SIZE);
    assert_true(cox_pool_id(pool) != 0);
    assert_int_equal(cox_pool_domain(pool).kind, COX_DOMAIN_HOST);
    assert_int_equal(cox_pool_allocate(pool, 0, &none, NULL), COX_INVALID);
    assert_int_equal(cox_pool_allocate(pool, BLOCK_SIZE + 1, &none, NULL), COX_TOO_LARGE);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++) {
        refs[i] = pool_allocated(pool, 1 + i);
        assert_int_equal(refs[i].size, 1 + i);
        assert_int_equal(refs[i].pool, cox_pool_id(pool));
        assert_int_equal(refs[i].reserved, 0);
        assert_false(seen[refs[i].block]);
        seen[refs[i].block] = true;
        block_fill(cox_pool_pointer(pool, &refs[i]), BLOCK_SIZE, refs[i].block, i);
    }
    /* Full is an error, and no block was overwritten. */
    assert_refused(cox_pool_allocate(pool, 1, &none, test_err()), COX_FULL, "free");
    assert_int_equal(none.size, 77);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        assert_true(block_is(cox_pool_pointer(pool, &refs[i]), BLOCK_SIZE, refs[i].block, i));
    assert_int_equal(pool_stats(pool).used_size, BLOCK_SIZE * BLOCK_COUNT);
    /* Freed out of order; the next allocation gets the freed block, with another epoch. */
    for (uint32_t i = 0; i < BLOCK_COUNT; i++) {
        const uint32_t at = (i * 37 + 11) % BLOCK_COUNT;
        assert_int_equal(cox_pool_unref(pool, &refs[at], NULL), 0);
        struct cox_block_ref again = pool_allocated(pool, 5);
        assert_int_equal(again.block, refs[at].block);
        assert_true(again.epoch != refs[at].epoch);
        assert_int_equal(cox_pool_unref(pool, &again, NULL), 0);
        refs[at] = pool_allocated(pool, 6);
    }
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        assert_int_equal(cox_pool_unref(pool, &refs[i], NULL), 0);
    assert_int_equal(pool_stats(pool).allocated, 3 * BLOCK_COUNT);
    assert_int_equal(pool_stats(pool).freed, 3 * BLOCK_COUNT);
    pool_is_whole(pool);
}

LEAK_TEST(h22_h23_a27_shared_and_freed_by_the_last_one)
{
    struct cox_pool *a = own_pool(&fixed), *b = own_attached(a), *c = own_attached(a);
    assert_int_equal(cox_pool_id(a), cox_pool_id(b));
    struct cox_block_ref ref = pool_allocated(a, 100);
    block_fill(cox_pool_pointer(a, &ref), BLOCK_SIZE, ref.block, ref.epoch);
    assert_int_equal(cox_pool_ref(b, &ref, NULL), 0);
    assert_int_equal(cox_pool_ref(b, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(a, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(a, &ref, NULL), COX_STALE); /* twice */
    assert_int_equal(cox_pool_unref(c, &ref, NULL), COX_STALE); /* another process's */
    assert_int_equal(pool_stats(a).reference_count, 2);
    assert_int_equal(cox_pool_unref(b, &ref, NULL), 0);
    assert_int_equal(pool_stats(a).free_count, BLOCK_COUNT - 1);
    assert_true(block_is(cox_pool_pointer(b, &ref), BLOCK_SIZE, ref.block, ref.epoch));
    assert_int_equal(cox_pool_ref(c, &ref, NULL), 0); /* a reference from b, which has it */
    assert_int_equal(cox_pool_unref(b, &ref, NULL), 0);
    assert_int_equal(pool_stats(a).free_count, BLOCK_COUNT - 1);
    assert_int_equal(cox_pool_unref(c, &ref, NULL), 0); /* which did not allocate it */
    assert_int_equal(pool_stats(a).free_count, BLOCK_COUNT);
    assert_int_equal(cox_pool_ref(c, &ref, NULL), COX_STALE);
    /* Leaving releases references. */
    ref = pool_allocated(b, 1);
    struct cox_block_ref other = pool_allocated(b, 1);
    assert_int_equal(cox_pool_ref(a, &other, NULL), 0);
    test_release(b);
    assert_int_equal(pool_stats(a).reference_count, 1);
    assert_int_equal(pool_stats(a).owner_count, 2);
    assert_int_equal(pool_stats(a).swept, 0);
    assert_int_equal(cox_pool_unref(a, &other, NULL), 0);
    pool_is_whole(a);
    test_release(a); /* the creator may leave first */
    pool_is_whole(c);
}

LEAK_TEST(p9_invalid_references_are_refused)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_pool(&fixed);
    struct cox_block_ref ref = pool_allocated(pool, 100), foreign = pool_allocated(other, 100);
    struct cox_error err = {0};
    uint64_t offset = 7;
    const struct {
        int expected;
        struct cox_block_ref ref;
    } all[] = {
        {COX_NOT_FOUND, foreign},
        {COX_NOT_FOUND, {0}},
        {COX_NOT_FOUND, {~ref.pool, ref.epoch, 100, ref.block, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, 100, BLOCK_COUNT, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, 100, UINT32_MAX, 0}},
        {COX_INVALID, {ref.pool, 0, 100, ref.block, 0}},
        {COX_INVALID, {ref.pool, UINT64_C(1) << 48, 100, ref.block, 0}},
        {COX_INVALID, {ref.pool, UINT64_MAX, 100, ref.block, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, 0, ref.block, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, BLOCK_SIZE + 1, ref.block, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, UINT64_MAX, ref.block, 0}},
        {COX_INVALID, {ref.pool, ref.epoch, 100, ref.block, 1}},
        {COX_STALE, {ref.pool, ref.epoch + 1, 100, ref.block, 0}},
        {COX_STALE, {ref.pool, 1, 100, ref.block + 1, 0}}, /* never allocated */
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        int r = cox_pool_ref(pool, &all[i].ref, &err);
        if (r != all[i].expected || cox_pool_unref(pool, &all[i].ref, NULL) != r ||
            cox_pool_pin(pool, &all[i].ref, 1, 1, NULL) == 0 ||
            cox_pool_copy_to(pool, &all[i].ref, 0, &all[i], 1, NULL) != r)
            fail_msg("%zu: %d %s", i, r, err.text);
        cox_pool_unpin(pool, &all[i].ref, 1, 1);
        if (all[i].expected != COX_STALE) {
            assert_int_equal(cox_pool_offset(pool, &all[i].ref, &offset), r);
            assert_null(cox_pool_pointer(pool, &all[i].ref));
        }
        err = (struct cox_error){0};
    }
    assert_int_equal(offset, 7);
    /* Freed, and the block reused since. */
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(cox_pool_ref(pool, &ref, NULL), COX_STALE);
    struct cox_block_ref again = ref;
    while (again.block != ref.block || again.epoch == ref.epoch)
        again = pool_allocated(pool, 1);
    assert_int_equal(cox_pool_ref(pool, &ref, NULL), COX_STALE);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), COX_STALE);
    assert_int_equal(cox_pool_unref(pool, &again, NULL), 0);
}

/* Epochs have 48 bits: after the last one comes 1, never 0, and references to the last one
 * stay stale. */
LEAK_TEST(b24_p9_epochs_go_round)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_attached(pool);
    for (uint32_t block = 0; block < BLOCK_COUNT; block++)
        atomic_store(&pool->blocks[block].block_word,
                     cox_pool_word(COX_POOL_EPOCH_MAX, COX_POOL_FREE, 0));
    struct cox_block_ref last = pool_allocated(pool, 1), next = {0};
    assert_true(last.epoch == COX_POOL_EPOCH_MAX);
    assert_int_equal(cox_pool_ref(other, &last, NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &last, NULL), 0);
    assert_int_equal(cox_pool_unref(other, &last, NULL), 0);
    assert_int_equal(cox_pool_ref(other, &last, NULL), COX_STALE);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++) {
        struct cox_block_ref ref = pool_allocated(pool, 1);
        if (ref.block == last.block)
            next = ref;
    }
    assert_int_equal(next.epoch, 1);
    assert_int_equal(cox_pool_ref(other, &last, NULL), COX_STALE);
    assert_int_equal(cox_pool_unref(pool, &last, NULL), COX_STALE);
    assert_int_equal(cox_pool_ref(other, &next, NULL), 0);
}

LEAK_TEST(b24_b37_counts_neither_overflow_nor_underflow)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_block_ref ref = pool_allocated(pool, 1);
    uint32_t count = 1;
    while (cox_pool_ref(pool, &ref, NULL) == 0)
        count++;
    assert_int_equal(count, 65535);
    assert_int_equal(cox_pool_ref(pool, &ref, NULL), COX_FULL);
    assert_int_equal(pool_stats(pool).reference_count, 65535);
    for (; count > 0; count--)
        assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), COX_STALE);
    pool_is_whole(pool);
}

LEAK_TEST(h21_find_by_offset_and_pointer)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_attached(pool);
    struct cox_block_ref ref = pool_allocated(pool, 100), found;
    uint64_t offset = 0;
    assert_int_equal(cox_pool_offset(pool, &ref, &offset), 0);
    assert_int_equal(offset % BLOCK_SIZE, 0);
    uint8_t *bytes = cox_pool_pointer(pool, &ref);
    assert_ptr_equal(bytes, (uint8_t *)cox_pool_memory(pool)->address + offset);
    assert_int_equal(cox_pool_find(other, offset + 99, &found), 0);
    assert_int_equal(found.block, ref.block);
    assert_int_equal(found.epoch, ref.epoch);
    assert_int_equal(found.size, BLOCK_SIZE);
    assert_int_equal(cox_pool_find_pointer(pool, bytes + BLOCK_SIZE - 1, &found), 0);
    assert_int_equal(found.block, ref.block);
    bytes[3] = 42;
    assert_int_equal(((uint8_t *)cox_pool_pointer(other, &ref))[3], 42);
    assert_int_equal(cox_pool_find_pointer(pool, &offset, &found), COX_NOT_FOUND);
    assert_int_equal(cox_pool_find_pointer(pool, NULL, &found), COX_NOT_FOUND);
    assert_int_equal(cox_pool_find(pool, BLOCK_SIZE * BLOCK_COUNT, &found), COX_NOT_FOUND);
    assert_int_equal(cox_pool_find(pool, UINT64_MAX, &found), COX_NOT_FOUND);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(cox_pool_find(pool, offset, &found), COX_NOT_FOUND);
}

TEST_OWNED(cox_domains_free)

LEAK_TEST(h24_h25_h26_bytes_go_in_out_and_across)
{
    struct cox_domains *domains = NULL;
    assert_int_equal(cox_domains_new(&domains), 0);
    test_own(domains, cox_domains_free_owned);
    struct cox_pool_options options = fixed;
    struct cox_pool *host = own_pool(&options);
    options.domains = domains;
    options.domain = (struct cox_domain_id){COX_DOMAIN_BOUNCE, 0};
    struct cox_pool *bounce = own_pool(&options);
    uint8_t pattern[1000], seen[1000] = {0};
    for (size_t i = 0; i < sizeof pattern; i++)
        pattern[i] = (uint8_t)(i * 7 + 1);
    struct cox_block_ref a = pool_allocated(host, 1000), b = pool_allocated(bounce, 1000);
    struct cox_block_ref c = pool_allocated(host, 1000);
    assert_null(cox_pool_pointer(bounce, &b)); /* that domain has no addresses */
    assert_int_equal(cox_pool_copy_to(host, &a, 0, pattern, 1000, NULL), 0);
    assert_int_equal(cox_pool_copy(bounce, &b, host, &a, 1000, NULL), 0);
    assert_int_equal(cox_pool_copy(host, &c, bounce, &b, 1000, NULL), 0);
    assert_int_equal(cox_pool_copy_from(bounce, &b, 500, seen, 500, NULL), 0);
    assert_memory_equal(seen, pattern + 500, 500);
    assert_int_equal(cox_pool_copy_from(host, &c, 0, seen, 1000, NULL), 0);
    assert_memory_equal(seen, pattern, 1000);
    /* Ranges, and references that this process no longer holds. */
    assert_int_equal(cox_pool_copy_from(host, &a, 1, seen, 1000, NULL), COX_INVALID);
    assert_int_equal(cox_pool_copy_from(host, &a, UINT64_MAX, seen, 2, NULL), COX_INVALID);
    assert_int_equal(cox_pool_copy_to(host, &a, 1001, seen, 0, NULL), COX_INVALID);
    assert_int_equal(cox_pool_copy(bounce, &b, host, &a, 1001, NULL), COX_INVALID);
    assert_int_equal(cox_pool_copy(bounce, &a, host, &b, 1, NULL), COX_NOT_FOUND);
    assert_int_equal(cox_pool_unref(host, &a, NULL), 0);
    assert_int_equal(cox_pool_copy_from(host, &a, 0, seen, 1, NULL), COX_STALE);
    assert_int_equal(cox_pool_copy(bounce, &b, host, &a, 1, NULL), COX_STALE);
}

LEAK_TEST(h19_a_reader_reads_only)
{
    struct cox_pool *pool = own_pool(&fixed), *reader = NULL;
    struct cox_block_ref ref = pool_allocated(pool, 8), none;
    const struct cox_pool_attach_options options = {.size = sizeof(struct cox_pool_attach_options),
                                                    .read_only = true};
    char byte = 1;
    int fds[2];
    cox_pool_fds(pool, fds);
    const int given[2] = {fds[0], test_own_fd(test_reopen(fds[1], O_RDONLY))};
    /* That fd is not writable, so attaching to write fails. */
    assert_refused(cox_pool_attach(given, NULL, &reader, test_err()), COX_DENIED, "");
    assert_ok(cox_pool_attach(given, &options, &reader, test_err()));
    assert_int_equal(cox_pool_ref(reader, &ref, NULL), 0);
    assert_int_equal(cox_pool_allocate(reader, 1, &none, NULL), COX_DENIED);
    assert_int_equal(cox_pool_copy_to(reader, &ref, 0, &byte, 1, NULL), COX_DENIED);
    assert_int_equal(cox_pool_copy_from(reader, &ref, 0, &byte, 1, NULL), 0);
    assert_int_equal(byte, 0);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(reader, &ref, NULL), 0); /* the last one */
    pool_is_whole(pool);
    cox_pool_free(reader);
}

/* ---- attach ---- */

static int attach_result(int words, int blocks, const char *word)
{
    struct cox_pool *pool = NULL;
    const int fds[2] = {words, blocks};
    int r = cox_pool_attach(fds, NULL, &pool, test_err());
    if (r == 0)
        cox_pool_free(pool);
    else
        assert_contains(test_error.text, word);
    return r;
}

LEAK_TEST(h19_b23_what_is_no_pool_is_refused)
{
    struct cox_pool *pool = own_pool(&fixed), *other = own_pool(&fixed);
    int fds[2], others[2];
    cox_pool_fds(pool, fds);
    cox_pool_fds(other, others);
    assert_int_equal(attach_result(fds[0], others[1], "blocks of this pool"), COX_CORRUPT);
    assert_int_equal(attach_result(fds[1], fds[0], "no pool"), COX_CORRUPT);
    assert_int_equal(attach_result(-1, fds[1], ""), -EBADF);
    assert_int_equal(attach_result(fds[0], -1, ""), COX_CORRUPT);
    assert_int_equal(attach_result(fds[0], 1 << 20, ""), -EBADF);
    /* Memory that can shrink while it is mapped. */
    int loose = test_own_fd(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    assert_int_equal(ftruncate(loose, 1 << 20), 0);
    assert_int_equal(attach_result(loose, fds[1], "seal"), COX_DENIED);
    assert_int_equal(fcntl(loose, F_ADD_SEALS, F_SEAL_GROW), 0);
    assert_int_equal(attach_result(loose, fds[1], "seal"), COX_DENIED);
    assert_int_equal(fcntl(loose, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(attach_result(loose, fds[1], "no pool"), COX_CORRUPT);
    loose = test_own_fd(memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    assert_int_equal(ftruncate(loose, 100), 0);
    assert_int_equal(fcntl(loose, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
    assert_int_equal(attach_result(loose, fds[1], "100"), COX_CORRUPT);
    int pipes[2];
    test_pipe(pipes);
    assert_int_equal(attach_result(pipes[0], fds[1], "memory"), COX_DENIED);
}

LEAK_TEST(h19_b23_words_that_contradict_themselves_are_refused)
{
    static const struct {
        size_t offset, size;
        /* also possible */
        int other;
    } fields[] = {
        {offsetof(struct cox_pool_layout_header, strategy), 4, 0},
        {offsetof(struct cox_pool_layout_header, system), 8, COX_DENIED},
        {offsetof(struct cox_pool_layout_header, domain_kind), 4, COX_INVALID},
        {offsetof(struct cox_pool_layout_header, domain_device), 4, COX_INVALID},
        {offsetof(struct cox_pool_layout_header, block_size), 8, 0},
        {offsetof(struct cox_pool_layout_header, block_count), 4, 0},
        {offsetof(struct cox_pool_layout_header, slab_size), 8, 0},
        {offsetof(struct cox_pool_layout_header, slab_count), 4, 0},
        {offsetof(struct cox_pool_layout_header, memory_size), 8, 0},
        {offsetof(struct cox_pool_layout_header, words_size), 8, 0},
        {offsetof(struct cox_pool_layout_header, blocks_ino), 8, 0},
        {offsetof(struct cox_pool_layout_header, blocks_dev), 8, 0},
    };
    struct cox_pool *pool = own_pool(&fixed);
    int fds[2];
    cox_pool_fds(pool, fds);
    uint8_t *bytes = mmap(NULL, COX_POOL_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    assert_ptr_not_equal(bytes, MAP_FAILED);
    struct cox_pool_layout_header *header = (struct cox_pool_layout_header *)bytes;
    assert_int_equal(attach_result(fds[0], fds[1], ""), 0);
    header->version++;
    assert_int_equal(attach_result(fds[0], fds[1], "version"), COX_VERSION);
    header->version--;
    /* Flips every bit of the header; and, with a valid crc, those of the sizes. */
    for (size_t bit = 0; bit < offsetof(struct cox_pool_layout_header, padding) * 8; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        int r = attach_result(fds[0], fds[1], "");
        if (r != (bit / 32 == offsetof(struct cox_pool_layout_header, version) / 4 ? COX_VERSION
                                                                                   : COX_CORRUPT))
            fail_msg("byte %zu, bit %zu: %d", bit / 8, bit % 8, r);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    const uint32_t crc = header->constants_crc;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        for (size_t bit = 0; bit < fields[i].size * 8; bit++) {
            bytes[fields[i].offset + bit / 8] ^= (uint8_t)(1 << bit % 8);
            header->constants_crc = cox_pool_geometry_crc(header);
            int r = attach_result(fds[0], fds[1], "");
            if (r != COX_CORRUPT && (r == 0 || r != fields[i].other))
                fail_msg("byte %zu, bit %zu: %d", fields[i].offset, bit, r);
            bytes[fields[i].offset + bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    header->constants_crc = crc;
    munmap(bytes, COX_POOL_PAGE_SIZE);
    assert_int_equal(attach_result(fds[0], fds[1], ""), 0);
}

LEAK_TEST(b23_b32_overwritten_words_crash_no_process)
{
    static const struct cox_pool_options both[] = {
        {.size = sizeof(struct cox_pool_options),
         .block_size = BLOCK_SIZE,
         .block_count = BLOCK_COUNT,
         .on_demand = true},
        {.size = sizeof(struct cox_pool_options),
         .strategy = COX_POOL_SLAB,
         .block_size = 1024,
         .slabs_size = 1 << 20,
         .on_demand = true},
    };
    uint64_t random = 4711;
    for (size_t kind = 0; kind < 2; kind++)
        for (int round = 0; round < 60; round++) {
            struct cox_pool *pool = own_pool(&both[kind]), *other = own_attached(pool);
            struct cox_block_ref refs[20] = {{0}}, found;
            struct stat st;
            int fds[2];
            cox_pool_fds(pool, fds);
            assert_int_equal(fstat(fds[0], &st), 0);
            uint64_t *words =
                mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
            const uint64_t count = (uint64_t)st.st_size / 8;
            assert_int_equal(cox_pool_queue_join(pool, 9, NULL), 0);
            for (int i = 0; i < 200; i++) {
                struct cox_block_ref *ref = &refs[random_next(&random) % 20];
                /* After the constants; a lock with a live owner would be waited for. */
                for (int n = 0; n < 30; n++) {
                    const uint64_t at = 16 + random_next(&random) % (count - 16);
                    if (at != offsetof(struct cox_pool_layout_header, queues_lock) / 8)
                        words[at] = random_next(&random) % 3 ? random_next(&random)
                                                             : random_next(&random) & 0xf00f;
                }
                cox_pool_allocate(pool, 1 + random_next(&random) % 4096, ref, NULL);
                cox_pool_ref(other, ref, NULL);
                cox_pool_find(pool, random_next(&random) % (1 << 20), &found);
                cox_pool_ref(pool, &found, NULL);
                cox_pool_pin(pool, ref, 9, 1 + random_next(&random) % 100, NULL);
                cox_pool_unpin(other, ref, 9, 1 + random_next(&random) % 100);
                cox_pool_unref(other, ref, NULL);
                cox_pool_unref(pool, ref, NULL);
                if (i % 50 == 0)
                    cox_pool_sweep(pool);
            }
            munmap(words, (size_t)st.st_size);
            test_release(other);
            test_release(pool);
        }
}

/* ---- owners ---- */

LEAK_TEST(h20_rows_are_taken_and_given_back)
{
    struct cox_pool_options options = fixed;
    options.owner_count_max = 3;
    struct cox_pool *pools[3] = {own_pool(&options)}, *more = NULL;
    int fds[2];
    pools[1] = own_attached(pools[0]);
    pools[2] = own_attached(pools[0]);
    cox_pool_fds(pools[0], fds);
    assert_refused(cox_pool_attach(fds, NULL, &more, test_err()), COX_FULL, "3 owners");
    struct cox_block_ref ref = pool_allocated(pools[1], 1);
    test_release(pools[1]);
    more = own_attached(pools[0]);
    assert_int_equal(cox_pool_unref(more, &ref, NULL), COX_STALE); /* of the last owner */
    test_release(more);
    test_release(pools[0]);
    pool_is_whole(pools[2]);
}

static void child_of_a_fork(void *context)
{
    struct cox_pool *pool = context;
    struct cox_block_ref ref;
    CHECK(cox_pool_find(pool, 0, &ref) == 0);
    CHECK(cox_pool_unref(pool, &ref, NULL) == COX_STATE);
    CHECK(cox_pool_ref(pool, &ref, NULL) == COX_STATE);
    CHECK(cox_pool_allocate(pool, 1, &ref, NULL) == COX_STATE);
    CHECK(cox_pool_sweep(pool) == 0);
    CHECK(cox_pool_free(pool) == NULL);
}

LEAK_TEST(h20_the_child_of_a_fork_changes_nothing)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_block_ref refs[BLOCK_COUNT];
    for (int i = 0; i < BLOCK_COUNT; i++)
        refs[i] = pool_allocated(pool, 1);
    child_run(child_of_a_fork, pool);
    assert_int_equal(pool_stats(pool).reference_count, BLOCK_COUNT);
    assert_int_equal(pool_stats(pool).owner_count, 1);
    for (int i = 0; i < BLOCK_COUNT; i++)
        assert_int_equal(cox_pool_unref(pool, &refs[i], NULL), 0);
    pool_is_whole(pool);
}

static void count_line(void *context, const char *text)
{
    (*(uint32_t *)context)++;
    assert_true(strlen(text) > 0 && !strchr(text, '\n'));
}

LEAK_TEST(h16_dump_and_stats)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_block_ref ref = pool_allocated(pool, 1);
    uint32_t lines = 0;
    assert_int_equal(cox_pool_queue_join(pool, 1234, NULL), 0);
    assert_int_equal(cox_pool_pin(pool, &ref, 1234, 1, NULL), 0);
    cox_pool_dump(pool, count_line, &lines);
    assert_int_equal(lines, 4); /* pool, owner, queue, block */
    struct cox_pool_stats stats = pool_stats(pool);
    assert_int_equal(stats.block_count, BLOCK_COUNT);
    assert_int_equal(stats.free_count, BLOCK_COUNT - 1);
    assert_int_equal(stats.size, BLOCK_SIZE * BLOCK_COUNT);
    assert_int_equal(stats.used_size, BLOCK_SIZE);
    assert_int_equal(stats.owner_count, 1);
    assert_int_equal(stats.reference_count, 1);
    assert_int_equal(stats.pin_count, 1);
    assert_int_equal(stats.allocated, 1);
    assert_int_equal(stats.freed, 0);
}

/* Reopening a device's fd gives the device, not the memory. */
LEAK_TEST(h24_what_is_no_file_is_not_shared_for_reading_only)
{
    struct cox_pool *pool = own_pool(&fixed);
    struct cox_pool_handle handle;
    struct cox_exporter *exporter = NULL;
    const int kept = pool->memory->fd, device = open("/dev/zero", O_RDWR | O_CLOEXEC);
    assert_true(device >= 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    pool->memory->fd = device;
    assert_refused(cox_pool_export(pool, exporter, true, &handle, test_err()), COX_UNSUPPORTED,
                   "for reading only"); /* and not the error of the exporter */
    pool->memory->fd = kept;
    assert_int_equal(cox_pool_export(pool, exporter, true, &handle, NULL), 0);
    cox_pool_unexport(exporter, &handle);
    cox_exporter_free(exporter);
    close(device);
}
