/* KV blocks (coxswain/kv.h): which process may write, what a view accepts, and
 * the order of take, give and copy. */
#include "channel/base/fault.h"
#include "channel/kv/kv_blocks_layout.h"
#include "channel/kv/kv_internal.h"
#include "tests/lib/test.h"

#include <coxswain/kv.h>

#ifndef F_SEAL_FUTURE_WRITE /* Linux 5.1 */
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define COUNT 4u
#define SIZE 4096u

struct both {
    struct cox_kv_blocks *blocks;
    struct cox_kv_view *view;
    uint8_t bytes[SIZE];
};

TEST_OWNED(cox_kv_blocks_free)
TEST_OWNED(cox_kv_view_free)

/* They are the test's own. */
static void both_open(struct both *both)
{
    assert_ok(cox_kv_blocks_new(COUNT, SIZE, &both->blocks, test_err()));
    test_own(both->blocks, cox_kv_blocks_free_owned);
    assert_ok(cox_kv_view_attach(cox_kv_blocks_info(both->blocks).fd, &both->view, test_err()));
    test_own(both->view, cox_kv_view_free_owned);
}

static void fill(struct both *both, uint32_t block, int byte)
{
    memset((uint8_t *)cox_kv_blocks_info(both->blocks).memory + block * SIZE, byte, SIZE);
}

static void give(struct both *both, uint32_t block, uint64_t user, int byte)
{
    assert_int_equal(cox_kv_blocks_take(both->blocks, block), 0);
    fill(both, block, byte);
    assert_int_equal(cox_kv_blocks_give(both->blocks, block, user), 0);
}

static int copy(struct both *both, uint32_t block, uint64_t user, struct cox_error *err)
{
    memset(both->bytes, 0, SIZE);
    return cox_kv_view_copy(both->view, block, user, 0, both->bytes, err);
}

PLAIN_TEST(p9_a_block_is_copied_under_its_user_alone)
{
    struct both both;
    both_open(&both);
    assert_int_equal(cox_kv_view_info(both.view).block_count, COUNT);
    assert_int_equal(cox_kv_view_info(both.view).block_size, SIZE);
    assert_refused(copy(&both, 1, COX_KV_UNUSED, test_err()), COX_STALE,
                   "block 1 belongs to no sequence");
    give(&both, 1, 7, 'a');
    assert_int_equal(copy(&both, 1, 7, NULL), 0);
    assert_int_equal(both.bytes[0], 'a');
    assert_int_equal(both.bytes[SIZE - 1], 'a');
    assert_int_equal(copy(&both, 1, COX_KV_UNUSED, NULL), 0);
    assert_int_equal(copy(&both, 1, 8, NULL), COX_STALE);
    assert_int_equal(copy(&both, 0, 7, NULL), COX_STALE);
    assert_int_equal(copy(&both, COUNT, 7, NULL), COX_INVALID);
    assert_int_equal(copy(&both, UINT32_MAX, 7, NULL), COX_INVALID);
}

PLAIN_TEST(users_are_sequence_ids_where_they_can_be)
{
    static const int64_t odd[] = {0, -1, INT64_MIN, INT64_MAX, (INT64_C(1) << 47) + 1};

    assert_int_equal(cox_kv_user_of(1), 1);
    assert_int_equal(cox_kv_user_of(INT64_C(1) << 47), UINT64_C(1) << 47);
    for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
        assert_in_range(cox_kv_user_of(odd[i]), (UINT64_C(1) << 47) + 1, (UINT64_C(1) << 48) - 2);
        for (size_t k = 0; k < i; k++)
            assert_int_not_equal(cox_kv_user_of(odd[i]), cox_kv_user_of(odd[k]));
    }
}

PLAIN_TEST(what_cannot_be_taken_or_given_is_refused)
{
    struct both both;
    both_open(&both);
    assert_int_equal(cox_kv_blocks_take(both.blocks, COUNT), COX_INVALID);
    assert_int_equal(cox_kv_blocks_give(both.blocks, COUNT, 7), COX_INVALID);
    assert_int_equal(cox_kv_blocks_give(both.blocks, 0, COX_KV_UNUSED), COX_INVALID);
    assert_int_equal(cox_kv_blocks_give(both.blocks, 0, COX_KV_EXPECTED), COX_INVALID);
    assert_int_equal(cox_kv_blocks_expect(both.blocks, COUNT), COX_INVALID);
    assert_int_equal(cox_kv_blocks_give(both.blocks, 0, 7), 0);
    /* Without a take readers of 7 would not notice. */
    assert_int_equal(cox_kv_blocks_give(both.blocks, 0, 8), COX_STATE);
    assert_int_equal(cox_kv_blocks_user(both.blocks, 0), 7);
}

PLAIN_TEST(what_is_expected_is_awaited)
{
    struct both both;
    both_open(&both);
    give(&both, 1, 7, 'a');
    assert_int_equal(cox_kv_blocks_expect(both.blocks, 1), 0);
    assert_int_equal(cox_kv_blocks_user(both.blocks, 1), COX_KV_EXPECTED);
    assert_refused(copy(&both, 1, 7, test_err()), COX_EMPTY, "block 1 is on its way");
    assert_int_equal(copy(&both, 1, COX_KV_UNUSED, NULL), COX_EMPTY);
    const uint64_t deadline_ns = cox_deadline_after_ms(25);
    assert_int_equal(cox_kv_view_copy(both.view, 1, 7, deadline_ns, both.bytes, NULL), COX_EMPTY);
    assert_true(cox_now_ns() >= deadline_ns);
    fill(&both, 1, 'b');
    assert_int_equal(cox_kv_blocks_give(both.blocks, 1, 7), 0);
    assert_int_equal(copy(&both, 1, 7, NULL), 0);
    assert_int_equal(both.bytes[9], 'b');
    /* What does not come after all. */
    assert_int_equal(cox_kv_blocks_expect(both.blocks, 1), 0);
    assert_int_equal(cox_kv_blocks_take(both.blocks, 1), 0);
    assert_int_equal(copy(&both, 1, 7, NULL), COX_STALE);
}

static void *awaiting_main(void *argument)
{
    const struct both *both = argument;
    uint8_t bytes[SIZE];

    return (void *)(intptr_t)cox_kv_view_copy(both->view, 1, UINT32_MAX,
                                              cox_deadline_after_ms(60000), bytes, NULL);
}

PLAIN_TEST(a_give_and_a_take_end_the_wait)
{
    struct both both;
    both_open(&both);
    for (int i = 0; i < 200; i++) {
        pthread_t threads[2];
        void *result;

        assert_int_equal(cox_kv_blocks_expect(both.blocks, 1), 0);
        for (int k = 0; k < 2; k++)
            assert_int_equal(pthread_create(&threads[k], NULL, awaiting_main, &both), 0);
        if (i % 2)
            sched_yield();
        /* The kernel compares the lower half, which is that of COX_KV_EXPECTED. */
        if (i % 4 < 2)
            assert_int_equal(cox_kv_blocks_give(both.blocks, 1, UINT32_MAX), 0);
        else
            assert_int_equal(cox_kv_blocks_take(both.blocks, 1), 0);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(pthread_join(threads[k], &result), 0);
            assert_int_equal((intptr_t)result, i % 4 < 2 ? 0 : COX_STALE);
        }
    }
}

/* The memory exists as long as its last view. */
PLAIN_TEST(a_view_outlives_the_owner)
{
    struct both both;
    both_open(&both);
    give(&both, 3, 9, 'z');
    test_release(both.blocks);
    assert_int_equal(copy(&both, 3, 9, NULL), 0);
    assert_int_equal(both.bytes[17], 'z');
}

PLAIN_TEST(new_refuses_numbers_that_cannot_be)
{
    static const struct {
        uint32_t count;
        uint64_t size;
        int code;
    } bad[] = {{0, 64, COX_INVALID},
               {COX_KV_BLOCK_COUNT_MAX + 1, 64, COX_INVALID},
               {1, 0, COX_INVALID},
               {1, 65, COX_INVALID},
               {2, UINT64_C(1) << 62, COX_NO_SPACE},
               {COX_KV_BLOCK_COUNT_MAX, UINT64_C(1) << 32, COX_NO_SPACE}};
    struct cox_kv_blocks *blocks = NULL;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(cox_kv_blocks_new(bad[i].count, bad[i].size, &blocks, NULL), bad[i].code);
    assert_null(blocks);
}

/* ---- one writer ---- */

static void expect_no_writing(int fd)
{
    struct stat st;
    char byte = 1;

    assert_int_equal(fstat(fd, &st), 0);
    const size_t size = (size_t)st.st_size;
    assert_ptr_equal(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mprotect(map, size, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(madvise(map, size, MADV_REMOVE), -1);
    munmap(map, size);
    assert_int_equal(pwrite(fd, &byte, 1, 0), -1);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_int_equal(fallocate(fd, 0, (off_t)size, 4096), -1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
}

/* A process that reopens the memory cannot write either; only the owner can, through its one
 * mapping. */
PLAIN_TEST(g1d_only_the_owner_can_ever_write)
{
    struct both both;

    both_open(&both);
    give(&both, 2, 5, 'm');
    const int fd = cox_kv_blocks_info(both.blocks).fd;
    expect_no_writing(fd);
    const int again = test_own_fd(test_reopen(fd, O_RDWR));
    expect_no_writing(again);
    assert_int_equal(test_reopen(fd, O_RDWR | O_TRUNC), -1);
    assert_int_equal(copy(&both, 2, 5, NULL), 0);
    assert_int_equal(both.bytes[1], 'm');
    give(&both, 2, 6, 'n');
    assert_int_equal(copy(&both, 2, 6, NULL), 0);
    assert_int_equal(both.bytes[1], 'n');
}

static long pages_of(const struct cox_kv_blocks *blocks)
{
    struct stat st;

    assert_int_equal(fstat(cox_kv_blocks_info(blocks).fd, &st), 0);
    return st.st_blocks / 8;
}

PLAIN_TEST(sparse_blocks_have_the_pages_that_are_reserved)
{
    enum { MANY = 1 << 18 };
    struct both both;

    assert_ok(cox_kv_blocks_new_sparse(MANY, 6400, &both.blocks, test_err()));
    test_own(both.blocks, cox_kv_blocks_free_owned);
    assert_ok(cox_kv_view_attach(cox_kv_blocks_info(both.blocks).fd, &both.view, test_err()));
    test_own(both.view, cox_kv_view_free_owned);
    const long words = pages_of(both.blocks);
    assert_int_equal(words, (128 + 16L * MANY + 4095) / 4096);
    assert_int_equal(cox_kv_blocks_reserve(both.blocks, MANY), COX_INVALID);
    assert_int_equal(cox_kv_blocks_reserve(both.blocks, MANY - 1), 0);
    const long one = pages_of(both.blocks) - words;
    assert_in_range(one, 2, 3);
    assert_int_equal(cox_kv_blocks_take(both.blocks, MANY - 1), 0);
    memset((uint8_t *)cox_kv_blocks_info(both.blocks).memory + (MANY - 1) * UINT64_C(6400), 'q',
           6400);
    assert_int_equal(cox_kv_blocks_give(both.blocks, MANY - 1, 7), 0);
    assert_int_equal(pages_of(both.blocks), words + one);
    uint8_t bytes[6400];
    assert_int_equal(cox_kv_view_copy(both.view, MANY - 1, 7, 0, bytes, NULL), 0);
    assert_int_equal(bytes[6399], 'q');
    const int fd = cox_kv_blocks_info(both.blocks).fd;
    expect_no_writing(fd);
}

/* ---- a hostile owner ---- */

/* Arbitrary memory with these seals. */
static int forge(const void *header, size_t header_size, uint64_t size, int seals)
{
    const int fd = memfd_create("cox_payload_kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(fd >= 0);
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(pwrite(fd, header, header_size, 0), header_size);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void expect_refused(const void *header, uint64_t size, int seals, int code)
{
    struct cox_kv_view *view = NULL;
    const int fd = forge(header, sizeof(struct cox_kv_header), size, seals);

    assert_int_equal(cox_kv_view_attach(fd, &view, NULL), code);
    assert_null(view);
    close(fd);
}

PLAIN_TEST(g1d_a_view_checks_all_that_an_owner_writes)
{
    enum { SIZES = F_SEAL_SHRINK | F_SEAL_GROW, ALL = SIZES | F_SEAL_FUTURE_WRITE };
    const struct cox_kv_header good = {
        .kv_magic = COX_KV_MAGIC,
        .version = COX_KV_VERSION,
        .block_count = 3,
        .block_size = 4096,
        .blocks_offset = 4096,
    };
    struct cox_kv_header bad[12];
    struct cox_kv_view *view = NULL;
    uint8_t bytes[4096];
    int fd;

    expect_refused(&good, 16384, SIZES, COX_DENIED);
    expect_refused(&good, 16384, F_SEAL_FUTURE_WRITE | F_SEAL_GROW, COX_DENIED);
    expect_refused(&good, 64 + sizeof(good), ALL, COX_CORRUPT);
    expect_refused(&good, 16383, ALL, COX_CORRUPT);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        memcpy((void *)&bad[i], (const void *)&good, sizeof(good));
    atomic_store(&bad[0].kv_magic, 0);
    bad[1].block_count = 0;
    bad[2].block_count = 4;
    bad[3].block_count = UINT32_MAX;
    bad[4].block_size = 0;
    bad[5].block_size = UINT64_MAX - 63;
    bad[6].block_size = 4096 + 64;
    bad[7].blocks_offset = 0;
    bad[8].blocks_offset = 8192;
    bad[9].blocks_offset = UINT64_MAX - 4095;
    bad[10].blocks_offset = 4097;
    bad[11].block_size = 100;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        expect_refused(&bad[i], 16384, ALL, COX_CORRUPT);
    memcpy((void *)&bad[0], (const void *)&good, sizeof(good));
    bad[0].version = COX_KV_VERSION + 1;
    expect_refused(&bad[0], 16384, ALL, COX_VERSION);

    /* Any numbers in the words are valid users, nothing else. */
    struct {
        struct cox_kv_header header;
        uint64_t words[6];
    } odd = {.words = {UINT64_MAX, UINT64_MAX - 1, 0, COX_KV_EXPECTED, UINT64_MAX, 0}};
    memcpy((void *)&odd.header, (const void *)&good, sizeof(good));
    fd = forge(&odd, sizeof(odd), 16384, ALL);
    assert_int_equal(cox_kv_view_attach(fd, &view, NULL), 0);
    close(fd);
    assert_int_equal(cox_kv_view_copy(view, 0, UINT64_MAX - 1, 0, bytes, NULL), 0);
    assert_int_equal(
        cox_kv_view_copy(view, 1, COX_KV_EXPECTED, cox_deadline_after_ms(25), bytes, NULL),
        COX_EMPTY);
    assert_int_equal(cox_kv_view_copy(view, 2, UINT64_MAX, 0, bytes, NULL), COX_STALE);
    cox_kv_view_free(view);
    assert_int_equal(cox_kv_view_attach(STDIN_FILENO, &view, NULL), COX_DENIED);
}

/* ---- concurrent copy ---- */

#if COX_TESTING

struct copying {
    struct both *both;
    int result;
};

/* Counts fault points that were passed: a plan that has struck stops its thread. */
static struct cox_fault_counts *counts_open(void)
{
    char path[64];
    const int fd = memfd_create("counts", MFD_CLOEXEC);
    struct cox_fault_counts *counts;

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, sizeof(*counts)), 0);
    counts = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(counts, MAP_FAILED);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    assert_int_equal(setenv("COXSWAIN_FAULT_COUNTS", path, 1), 0);
    return counts;
}
static struct cox_fault_counts *counts;

static void *copying_main(void *argument)
{
    struct copying *copying = argument;

    copying->result = copy(copying->both, 1, 7, NULL);
    return NULL;
}

/* What the owner does while a reader is stopped before its copy, and after. */
PLAIN_TEST(g1d_whatever_is_taken_during_a_copy_is_stale)
{
    static const char *const plans[] = {"kv.looked:hold", "kv.copied:hold"};

    for (int way = 0; way < 8; way++) {
        const int what = way / 2;
        struct both both;
        struct copying copying = {.both = &both};

        both_open(&both);
        give(&both, 1, 7, 'a');
        atomic_store(&counts->struck, 0);
        cox_fault_arm(plans[way % 2]);
        pthread_t thread = test_thread(copying_main, &copying);
        AWAIT(atomic_load(&counts->struck));
        if (what == 0) /* other blocks, and positions behind the filled ones: disturbs no copy */
            give(&both, 2, 7, 'c');
        else if (what == 1)
            cox_kv_blocks_take(both.blocks, 1);
        else
            give(&both, 1, what == 2 ? 8 : 7, 'b'); /* for another sequence, or the same one */
        cox_fault_arm(NULL);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(copying.result, what == 0 ? 0 : COX_STALE);
        if (what == 0)
            assert_int_equal(both.bytes[0], 'a');
    }
}

#endif

int main(void)
{
#if COX_TESTING
    counts = counts_open(); /* before the first point is passed */
#endif

    return test_run(NULL, NULL);
}
