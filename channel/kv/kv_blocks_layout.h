/*
 * kv_blocks_layout: the shared memory of KV blocks (kv.h): a header, two words per block,
 * the blocks.
 *
 *   0               header        one line; constants, kv_magic stored last
 *   128             words         16 bytes per block: {kv_change, kv_user}
 *   blocks_offset   blocks        block b at blocks_offset + b * block_size; a multiple of a page
 *
 * A reader waits on the lower half of kv_user, a futex, while that is EXPECTED.
 *
 * Only the owner writes, all of it. Readers map it read-only, and the seals allow no more. What
 * they read is input: they copy the header once and check the copy; the words may be any numbers.
 *
 * The words of a block are a seqlock. Why each memory order is enough, where E is the number of
 * takes so far:
 *
 *   take   (1) kv_user = UNUSED        relaxed     copy   (a) change = kv_change          acquire
 *          (2) kv_change += 1 (to E)   release            (b) user = kv_user              acquire
 *          (3) fence                   release            (c) the block's bytes
 *          (4) the block's bytes                          (d) fence                       acquire
 *   give   (5) kv_user = G             release            (e) kv_change == change?        relaxed
 *
 * Expect is a take with EXPECTED in (1), which no copy accepts either.
 *
 * A copy is valid when (b) read the requested user and (e) holds. Let change be C and the
 * user G, which a give (5) stored after take E.
 *   - Its bytes are those of take E or a later one: (b) is acquire and pairs with release (5),
 *   which follows the bytes (4).
 *   - E >= C: (a) is acquire and pairs with release (2); so (1) of take C is before (b), which
 *   reads UNUSED, EXPECTED or what a give after that take stored.
 *   - E <= C: (b) is acquire; so (2) of take E is before (e), which reads E or more.
 *   - No byte is of a take above C: had (c) read what (4) of take C + 1 wrote, the fences (3) and
 *   (d) would order (2) of that take before (e), which would have read C + 1.
 * (4) may be another thread's, which a mutex orders behind (3): processors make stores visible to
 * all others at once, so (2) is visible before (4) is.
 * So all bytes belong to take C = E. What the block's sequence writes behind the positions it had
 * filled belongs to the same take, and disturbs no copy.
 *
 * (c) and (4) are concurrent plain copies: formally a C11 data race, for which the bytes would have
 * to be atomic. It is harmless: the bytes go to private memory of the reader, decide nothing, and
 * are dropped unless (e) holds. That needs the two fences, which no order on an operation can
 * replace: (d) must keep plain loads before a load, and a reader has no word to exchange instead
 * (Boehm, Can seqlocks get along with programming language memory models?, 2012). On x86-64 they
 * emit no instruction and only restrain the compiler.
 */
#ifndef COX_CHANNEL_KV_BLOCKS_LAYOUT_H
#define COX_CHANNEL_KV_BLOCKS_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "channel/base/tsan.h"

#define COX_KV_MAGIC UINT64_C(0x31304b4c42564b43) /* "CKVBLK01" */
#define COX_KV_VERSION 1
#define COX_KV_WORDS_OFFSET 128
#define COX_KV_PAGE_SIZE UINT64_C(4096)

struct cox_kv_header {
    /* release, last; partner: kv_view_load */
    _Atomic uint64_t kv_magic;
    uint32_t version;
    uint32_t block_count;
    uint64_t block_size;
    uint64_t blocks_offset;
    uint8_t reserved[96];
};
static_assert(sizeof(struct cox_kv_header) == COX_KV_WORDS_OFFSET, "one line");
static_assert(offsetof(struct cox_kv_header, block_count) == 12, "layout");
static_assert(offsetof(struct cox_kv_header, block_size) == 16, "layout");
static_assert(offsetof(struct cox_kv_header, blocks_offset) == 24, "layout");

struct cox_kv_words {
    /* takes so far; 64 bits never wrap */
    _Atomic uint64_t kv_change;
    _Atomic uint64_t kv_user;
};
static_assert(sizeof(struct cox_kv_words) == 16, "layout");

static inline _Atomic uint32_t *cox_kv_futex(const struct cox_kv_words *words)
{
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half comes first");
    return (_Atomic uint32_t *)(uintptr_t)&words->kv_user;
}

/* (3) and (d). gcc rejects thread fences under ThreadSanitizer, which does not model them. That
 * build runs on x86-64 only, where loads are not reordered with loads, nor stores with stores. */
static inline void cox_kv_fence(memory_order order)
{
#ifdef COX_TSAN
    atomic_signal_fence(order);
#else
    atomic_thread_fence(order);
#endif
}

#endif
