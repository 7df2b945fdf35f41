/* kv_blocks: the owner's side. The numbers (1) to (5) refer to kv_blocks_layout.h, which justifies
 * each memory order. */
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/memory/host_memory.h"
#include "channel/shm/region.h"
#include "kv_blocks_layout.h"
#include "kv_internal.h"

#include <coxswain/kv.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#define LABEL "cox_payload_kv"
#define USER_PLAIN_MAX (UINT64_C(1) << 47)
#define USER_MAX ((UINT64_C(1) << 48) - 2)

struct cox_kv_blocks {
    struct cox_region region;
    /* open for reading only; the writable fd is closed */
    int fd;
    uint32_t count;
    uint64_t size;
    struct cox_kv_words *words;
    uint8_t *memory;
};

/* Size of the memory; block 0 starts at *ret_offset. */
static int blocks_measure(uint32_t count, uint64_t size, uint64_t *ret_offset, uint64_t *ret_size,
                          struct cox_error *err)
{
    if (count == 0 || count > COX_KV_BLOCK_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " KV blocks; allowed: 1 to %" PRIu32, count,
                        COX_KV_BLOCK_COUNT_MAX);
    if (size == 0 || size % COX_KV_BLOCK_ALIGNMENT)
        return cox_fail(err, COX_INVALID,
                        "KV blocks of %" PRIu64 " bytes: expected a multiple of %d", size,
                        COX_KV_BLOCK_ALIGNMENT);
    const uint64_t words = COX_KV_WORDS_OFFSET + count * sizeof(struct cox_kv_words);
    const uint64_t offset = (words + COX_KV_PAGE_SIZE - 1) / COX_KV_PAGE_SIZE * COX_KV_PAGE_SIZE;
    if (size > (INT64_MAX - offset) / count)
        return cox_fail(err, COX_NO_SPACE, "more bytes than there can be");
    *ret_offset = offset;
    *ret_size = offset + count * size;
    return 0;
}

/* Fills the header. Other processes get the memory only afterwards, so its constants never change
 * for them. */
static void blocks_fill(struct cox_kv_blocks *blocks, uint64_t offset)
{
    struct cox_kv_header *header = blocks->region.base;
    header->version = COX_KV_VERSION;
    header->block_count = blocks->count;
    header->block_size = blocks->size;
    header->blocks_offset = offset;
    atomic_store_explicit(&header->kv_magic, COX_KV_MAGIC, memory_order_release);
    cox_fault_point(COX_FAULT_KV_MADE);
}

/* Mapped before it is sealed, so no other mapping can write. Not on huge pages, which readers
 * refuse (cox_host_memory_check_fd). */
static int blocks_map(struct cox_kv_blocks *blocks, uint64_t size, bool sparse, int *ret_fd,
                      struct cox_error *err)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
    if (!sparse)
        return cox_region_create_unnamed(&blocks->region, LABEL, size, seals, false, ret_fd, err);
    int r = cox_region_create_unnamed_sparse(LABEL, size, 0, ret_fd, err);
    if (r == 0)
        r = cox_region_map(&blocks->region, *ret_fd, size, COX_REGION_WRITE, LABEL, err);
    if (r == 0 && fcntl(*ret_fd, F_ADD_SEALS, (int)(seals | F_SEAL_SEAL)) < 0)
        r = cox_fail(err, -errno, "KV blocks: sealing: %s", cox_status_text(-errno));
    return r;
}

/* Its pages are there, and stay. */
static int memory_reserve(void *begin, uint64_t size)
{
    if (madvise(begin, size, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno == ENOMEM || errno == EFAULT)
        return COX_NO_SPACE;
    /* Linux before 5.14, or a filter: each page comes with its first use. */
    return errno == EINVAL || errno == EPERM || errno == ENOSYS ? 0 : -errno;
}

static int blocks_new(uint32_t block_count, uint64_t block_size, bool sparse,
                      struct cox_kv_blocks **ret_blocks, struct cox_error *err)
{
    _cox_cleanup_(cox_kv_blocks_freep) struct cox_kv_blocks *blocks = NULL;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    uint64_t offset = 0, size = 0;
    int r = blocks_measure(block_count, block_size, &offset, &size, err);
    if (r == 0)
        r = cox_host_memory_check_size(size, false, err);
    if (r)
        return r;
    blocks = calloc(1, sizeof *blocks);
    if (!blocks)
        return cox_fail(err, -ENOMEM, "no memory for KV blocks");
    blocks->fd = -1;
    r = blocks_map(blocks, size, sparse, &fd, err);
    if (r == 0)
        r = cox_region_open_reader(fd, LABEL, &blocks->fd, err);
    if (r)
        return r;
    if (sparse && memory_reserve(blocks->region.base, offset))
        return cox_fail(err, COX_NO_SPACE, "no memory for the words of KV blocks");
    blocks->count = block_count;
    blocks->size = block_size;
    blocks->words = (void *)((uint8_t *)blocks->region.base + COX_KV_WORDS_OFFSET);
    blocks->memory = (uint8_t *)blocks->region.base + offset;
    blocks_fill(blocks, offset);
    *ret_blocks = cox_steal_ptr(&blocks);
    return 0;
}

int cox_kv_blocks_new(uint32_t block_count, uint64_t block_size, struct cox_kv_blocks **ret_blocks,
                      struct cox_error *err)
{
    return blocks_new(block_count, block_size, false, ret_blocks, err);
}

int cox_kv_blocks_new_sparse(uint32_t block_count, uint64_t block_size,
                             struct cox_kv_blocks **ret_blocks, struct cox_error *err)
{
    return blocks_new(block_count, block_size, true, ret_blocks, err);
}

int cox_kv_blocks_reserve(struct cox_kv_blocks *blocks, uint32_t block)
{
    if (block >= blocks->count)
        return COX_INVALID;
    /* Whole pages: the first block begins one. */
    const uint64_t begin = block * blocks->size / COX_KV_PAGE_SIZE * COX_KV_PAGE_SIZE;
    return memory_reserve(blocks->memory + begin, (block + UINT64_C(1)) * blocks->size - begin);
}

struct cox_kv_blocks *cox_kv_blocks_free(struct cox_kv_blocks *blocks)
{
    if (!blocks)
        return NULL;
    cox_region_detach(&blocks->region);
    cox_close_fd(&blocks->fd);
    free(blocks);
    return NULL;
}

struct cox_kv_info cox_kv_blocks_info(const struct cox_kv_blocks *blocks)
{
    return (struct cox_kv_info){.block_count = blocks->count,
                                .block_size = blocks->size,
                                .memory = blocks->memory,
                                .fd = blocks->fd};
}

uint64_t cox_kv_user_of(int64_t sequence)
{
    uint64_t mixed = (uint64_t)sequence;
    if (sequence >= 1 && mixed <= USER_PLAIN_MAX)
        return mixed;
    /* The finaliser of MurmurHash3, as of splitmix64: it separates neighbouring ids. */
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return USER_PLAIN_MAX + 1 + mixed % (USER_MAX - USER_PLAIN_MAX);
}

/* Without a user, and no longer awaited. */
static void block_take(struct cox_kv_words *words, uint64_t user)
{
    /* relaxed: the owner's own value. */
    const uint64_t before = atomic_load_explicit(&words->kv_user, memory_order_relaxed);
    /* (1) relaxed: ordered by (2). */
    atomic_store_explicit(&words->kv_user, user, memory_order_relaxed);
    /* (2) release; partner: (a) in cox_kv_view_copy. */
    atomic_fetch_add_explicit(&words->kv_change, 1, memory_order_release);
    /* (3) Orders (2) before all writes of the content; partner: (d). */
    cox_kv_fence(memory_order_release);
    cox_fault_point(COX_FAULT_KV_TAKEN);
    if (before == COX_KV_EXPECTED)
        cox_futex_wake(cox_kv_futex(words));
}

int cox_kv_blocks_take(struct cox_kv_blocks *blocks, uint32_t block)
{
    if (block >= blocks->count)
        return COX_INVALID;
    block_take(&blocks->words[block], COX_KV_UNUSED);
    return 0;
}

int cox_kv_blocks_expect(struct cox_kv_blocks *blocks, uint32_t block)
{
    if (block >= blocks->count)
        return COX_INVALID;
    block_take(&blocks->words[block], COX_KV_EXPECTED);
    return 0;
}

/* Returns whether the user was `from`. */
static bool block_give(struct cox_kv_words *words, uint64_t from, uint64_t user)
{
    /* (5) release; partner: (b) in cox_kv_view_copy, which then sees the content. relaxed on
     * failure: nothing depends on it. */
    if (!atomic_compare_exchange_strong_explicit(&words->kv_user, &from, user, memory_order_release,
                                                 memory_order_relaxed))
        return false;
    cox_fault_point(COX_FAULT_KV_GIVEN);
    return true;
}

int cox_kv_blocks_give(struct cox_kv_blocks *blocks, uint32_t block, uint64_t user)
{
    if (block >= blocks->count || user == COX_KV_UNUSED || user == COX_KV_EXPECTED)
        return COX_INVALID;
    struct cox_kv_words *words = &blocks->words[block];
    if (block_give(words, COX_KV_EXPECTED, user))
        cox_futex_wake(cox_kv_futex(words));
    else if (!block_give(words, COX_KV_UNUSED, user))
        return COX_STATE;
    return 0;
}

uint64_t cox_kv_blocks_user(const struct cox_kv_blocks *blocks, uint32_t block)
{
    /* relaxed: the owner's own value; for others it orders nothing */
    return block < blocks->count
               ? atomic_load_explicit(&blocks->words[block].kv_user, memory_order_relaxed)
               : COX_KV_UNUSED;
}
