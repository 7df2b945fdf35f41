/* Memory that large payloads are received into: written here alone, kept for the next one, and not
 * while somebody has a reference. */
#include "testing.h"

#include "channel/memory/payload_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SIZE 100000
#define MIB (UINT64_C(1) << 20)

static struct cox_payload_memory_pool pool;

static struct cox_payload_memory *taken(uint64_t size)
{
    struct cox_payload_memory *memory = NULL;
    struct cox_error err = {0};
    if (cox_payload_memory_take(&pool, size, &memory, &err))
        fail_msg("%ju bytes: %s", (uintmax_t)size, err.text);
    return memory;
}

/* Finished, with this byte everywhere. */
static struct cox_payload_memory *written(uint64_t size, uint8_t byte)
{
    uint8_t bytes[SIZE];
    struct cox_payload_memory *memory = taken(size);
    uint8_t *kept = cox_payload_memory_bytes(memory);
    memset(bytes, byte, sizeof bytes);
    assert_true(size <= sizeof bytes);
    if (kept)
        memcpy(kept, bytes, size);
    else
        assert_int_equal(cox_payload_memory_fill(memory, 0, bytes, size, NULL), 0);
    assert_int_equal(cox_payload_memory_finish(memory, NULL), 0);
    return memory;
}

/* Finished, without pages. */
static struct cox_payload_memory *sparse(uint64_t size)
{
    struct cox_payload_memory *memory = taken(size);
    assert_int_equal(cox_payload_memory_finish(memory, NULL), 0);
    return memory;
}

static ino_t inode(const struct cox_payload_memory *memory)
{
    struct stat st;
    assert_int_equal(fstat(cox_payload_memory_fd(memory), &st), 0);
    return st.st_ino;
}

static const uint8_t *mapped(const struct cox_payload_memory *memory)
{
    void *bytes = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, cox_payload_memory_fd(memory), 0);
    assert_true(bytes != MAP_FAILED);
    return bytes;
}

TEST(others_read_it_and_cannot_write)
{
    cox_payload_memory_pool_init(&pool);
    struct cox_payload_memory *memory = written(SIZE, 1);
    const int fd = cox_payload_memory_fd(memory);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int writable = open(path, O_RDWR | O_CLOEXEC);
    assert_true(writable >= 0);
    assert_int_equal(pwrite(writable, "x", 1, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_ptr_equal(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0), MAP_FAILED);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(writable, 1), -1);
    close(writable);
    const uint8_t *bytes = mapped(memory);
    assert_int_equal(bytes[0], 1);
    assert_int_equal(bytes[SIZE - 1], 1);
    munmap((void *)(uintptr_t)bytes, SIZE);
    assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    assert_null(cox_payload_memory_unref(memory));
    cox_payload_memory_pool_deinit(&pool);
}

TEST(the_next_payload_comes_into_what_was_released)
{
    cox_payload_memory_pool_init(&pool);
    struct cox_payload_memory *first = written(SIZE, 1);
    const ino_t number = inode(first);
    const uint8_t *bytes = mapped(first);
    cox_payload_memory_unref(first);
    struct cox_payload_memory *second = written(SIZE - 5000, 2);
    assert_int_equal(inode(second), number);
    assert_int_equal(bytes[0], 2); /* so nobody may read it any more */
    assert_int_equal(bytes[SIZE - 1], 1);
    munmap((void *)(uintptr_t)bytes, SIZE);
    struct cox_payload_memory *larger = written(SIZE - 4999, 3);
    assert_int_not_equal(inode(larger), number);
    cox_payload_memory_unref(second);
    cox_payload_memory_unref(larger);
    cox_payload_memory_pool_deinit(&pool);
}

TEST(what_is_referred_to_is_not_used_again)
{
    cox_payload_memory_pool_init(&pool);
    struct cox_payload_memory *first = written(SIZE, 1);
    const uint8_t *bytes = mapped(first);
    assert_ptr_equal(cox_payload_memory_ref(first), first);
    cox_payload_memory_unref(first);
    for (uint8_t i = 2; i < 9; i++) {
        struct cox_payload_memory *other = written(SIZE, i);
        assert_int_not_equal(inode(other), inode(first));
        cox_payload_memory_unref(other);
    }
    assert_int_equal(bytes[0], 1);
    assert_int_equal(bytes[SIZE - 1], 1);
    munmap((void *)(uintptr_t)bytes, SIZE);
    cox_payload_memory_unref(first);
    assert_null(cox_payload_memory_unref(NULL));
    cox_payload_memory_pool_deinit(&pool);
}

/* It is not sealed, and some of its pages do not exist. */
TEST(what_is_not_finished_is_not_kept)
{
    cox_payload_memory_pool_init(&pool);
    struct cox_payload_memory *memory = taken(SIZE);
    assert_int_equal(cox_payload_memory_fill(memory, 1000, "x", 1, NULL), 0);
    cox_payload_memory_unref(memory);
    assert_null(pool.kept);
    cox_payload_memory_pool_deinit(&pool);
}

TEST(a_pool_keeps_what_was_released_last_up_to_a_limit)
{
    cox_payload_memory_pool_init(&pool);
    struct cox_payload_memory *all[] = {sparse(COX_PAYLOAD_MEMORY_KEEP_SIZE - MIB), sparse(MIB),
                                        sparse(MIB), sparse(COX_PAYLOAD_MEMORY_KEEP_SIZE + 1)};
    const ino_t numbers[] = {inode(all[0]), inode(all[1]), inode(all[2])};
    cox_payload_memory_unref(all[0]);
    cox_payload_memory_unref(all[1]);
    cox_payload_memory_unref(all[2]); /* the oldest one is the largest */
    struct cox_payload_memory *again = sparse(COX_PAYLOAD_MEMORY_KEEP_SIZE - MIB);
    assert_int_not_equal(inode(again), numbers[0]);
    cox_payload_memory_unref(again);
    again = sparse(MIB); /* the one before the last had no room beside it */
    assert_int_equal(inode(again), numbers[2]);
    cox_payload_memory_unref(again);
    cox_payload_memory_unref(all[3]);
    again = sparse(MIB);
    assert_int_equal(inode(again), numbers[2]);
    cox_payload_memory_unref(again);
    cox_payload_memory_pool_deinit(&pool);
}

TEST(a_payload_comes_into_the_smallest_that_fits_and_none_much_too_large)
{
    cox_payload_memory_pool_init(&pool);
    const uint64_t sizes[] = {16 * MIB, 4 * MIB, 8 * MIB};
    struct cox_payload_memory *all[3];
    ino_t numbers[3];
    for (size_t i = 0; i < 3; i++) {
        all[i] = sparse(sizes[i]);
        numbers[i] = inode(all[i]);
    }
    for (size_t i = 0; i < 3; i++)
        cox_payload_memory_unref(all[i]);
    static const struct {
        uint64_t size;
        int which;
    } takes[] = {{8 * MIB, 2}, {4 * MIB, 1}, {2 * MIB, 1}, {8 * MIB + 1, 0}, {2 * MIB - 1, -1}};
    for (size_t i = 0; i < 5; i++) {
        struct cox_payload_memory *memory = sparse(takes[i].size);
        for (int k = 0; k < 3; k++)
            assert_int_equal(inode(memory) == numbers[k], k == takes[i].which);
        cox_payload_memory_unref(memory);
    }
    cox_payload_memory_pool_deinit(&pool);
}

TEST(an_idle_pool_keeps_nothing)
{
    cox_payload_memory_pool_init(&pool);
    cox_payload_memory_pool_expire(&pool, cox_now_ns());
    cox_payload_memory_unref(sparse(SIZE));
    cox_payload_memory_pool_expire(&pool, 0);
    cox_payload_memory_pool_expire(&pool, pool.used_ns + COX_PAYLOAD_MEMORY_KEEP_NS - 1);
    assert_non_null(pool.kept);
    cox_payload_memory_pool_expire(&pool, pool.used_ns + COX_PAYLOAD_MEMORY_KEEP_NS);
    assert_null(pool.kept);
    cox_payload_memory_pool_deinit(&pool);
}
