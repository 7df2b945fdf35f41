/* kv_view: the reader's side of kv.h. All data read here is input from the owner, and is
 * checked. */
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
#include <string.h>
#include <sys/stat.h>

#define LABEL "cox_payload_kv"
/* Of one wait: the kernel compares half of the word, and a hostile owner wakes nobody. */
#define WAIT_MS 10

struct cox_kv_view {
    /* read-only */
    struct cox_region region;
    uint32_t count;
    uint64_t size;
    const struct cox_kv_words *words;
    const uint8_t *memory;
};

/* Checks the header against the size of the mapping. */
static int view_load(struct cox_kv_view *view, struct cox_error *err)
{
    const struct cox_kv_header *header = view->region.base;
    /* acquire; partner: the release in blocks_fill, which follows the constants. */
    const uint64_t magic = atomic_load_explicit(&header->kv_magic, memory_order_acquire);
    if (magic != COX_KV_MAGIC)
        return cox_fail(err, COX_CORRUPT, "no KV blocks are in this memory");
    const uint32_t version = header->version, count = header->block_count;
    const uint64_t size = header->block_size, offset = header->blocks_offset;
    if (version != COX_KV_VERSION)
        return cox_fail(err, COX_VERSION, "KV blocks of version %" PRIu32 ": this one reads %d",
                        version, COX_KV_VERSION);
    const uint64_t words_end = COX_KV_WORDS_OFFSET + count * sizeof(struct cox_kv_words);
    if (count == 0 || count > COX_KV_BLOCK_COUNT_MAX || size == 0 ||
        size % COX_KV_BLOCK_ALIGNMENT || offset % COX_KV_PAGE_SIZE || offset < words_end ||
        offset > view->region.size || size > (view->region.size - offset) / count)
        return cox_fail(err, COX_CORRUPT,
                        "%" PRIu32 " KV blocks of %" PRIu64 " bytes from %" PRIu64
                        " on: there cannot be such in %" PRIu64 " bytes",
                        count, size, offset, view->region.size);
    view->count = count;
    view->size = size;
    view->words = (const void *)((const uint8_t *)view->region.base + COX_KV_WORDS_OFFSET);
    view->memory = (const uint8_t *)view->region.base + offset;
    return 0;
}

/* Checks that only the owner, through the mapping it had before the seals, can change the
 * memory. */
static int view_check_fd(int fd, uint64_t *ret_size, struct cox_error *err)
{
    struct stat st;
    int r = cox_host_memory_check_fd(fd, COX_KV_PAGE_SIZE, false, err);
    if (r)
        return r;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return cox_fail(err, -errno, "KV blocks: their seals: %s", cox_status_text(-errno));
    if (!(seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)))
        return cox_fail(
            err, COX_DENIED,
            "KV blocks that a process other than their owner could write: their memory has seals %#x, expected at least %#x",
            (unsigned)seals, (unsigned)F_SEAL_FUTURE_WRITE);
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "KV blocks: fstat: %s", cox_status_text(-errno));
    *ret_size = (uint64_t)st.st_size;
    return 0;
}

int cox_kv_view_attach(int fd, struct cox_kv_view **ret_view, struct cox_error *err)
{
    _cox_cleanup_(cox_kv_view_freep) struct cox_kv_view *view = NULL;
    uint64_t size = 0;
    int r = view_check_fd(fd, &size, err);
    if (r)
        return r;
    view = calloc(1, sizeof *view);
    if (!view)
        return cox_fail(err, -ENOMEM, "no memory for a view of KV blocks");
    r = cox_region_map(&view->region, fd, size, COX_REGION_READ, LABEL, err);
    if (r == 0)
        r = view_load(view, err);
    if (r)
        return r;
    *ret_view = cox_steal_ptr(&view);
    return 0;
}

struct cox_kv_view *cox_kv_view_free(struct cox_kv_view *view)
{
    if (!view)
        return NULL;
    cox_region_detach(&view->region);
    free(view);
    return NULL;
}

struct cox_kv_info cox_kv_view_info(const struct cox_kv_view *view)
{
    return (struct cox_kv_info){.block_count = view->count, .block_size = view->size, .fd = -1};
}

static void words_await(const struct cox_kv_words *words, uint64_t deadline_ns)
{
    /* relaxed: a copy orders what it reads. */
    while (atomic_load_explicit(&words->kv_user, memory_order_relaxed) == COX_KV_EXPECTED &&
           cox_now_ns() < deadline_ns)
        cox_futex_wait(cox_kv_futex(words), (uint32_t)COX_KV_EXPECTED,
                       cox_deadline_min(deadline_ns, cox_deadline_after_ms(WAIT_MS)));
}

int cox_kv_view_copy(const struct cox_kv_view *view, uint32_t block, uint64_t user,
                     uint64_t deadline_ns, void *to, struct cox_error *err)
{
    if (block >= view->count)
        return cox_fail(err, COX_INVALID, "block %" PRIu32 " does not exist; there are %" PRIu32,
                        block, view->count);
    const struct cox_kv_words *words = &view->words[block];
    words_await(words, deadline_ns);
    /* (a) acquire; partner: (2) in cox_kv_blocks_take. */
    const uint64_t change = atomic_load_explicit(&words->kv_change, memory_order_acquire);
    /* (b) acquire; partner: (5) in cox_kv_blocks_give. */
    const uint64_t now = atomic_load_explicit(&words->kv_user, memory_order_acquire);
    if (now == COX_KV_EXPECTED)
        return cox_fail(err, COX_EMPTY, "the content of block %" PRIu32 " is on its way", block);
    if (now == COX_KV_UNUSED && user == COX_KV_UNUSED)
        return cox_fail(err, COX_STALE, "block %" PRIu32 " belongs to no sequence", block);
    if (now == COX_KV_UNUSED || (user != COX_KV_UNUSED && now != user))
        return cox_fail(err, COX_STALE,
                        "block %" PRIu32 " belongs to another sequence, or to none, by now", block);
    cox_fault_point(COX_FAULT_KV_LOOKED);
    memcpy(to, view->memory + block * view->size, view->size); /* (c) */
    cox_fault_point(COX_FAULT_KV_COPIED);
    /* (d) Orders the copy before (e); partner: (3). */
    cox_kv_fence(memory_order_acquire);
    /* (e) relaxed: ordered by (d). */
    if (atomic_load_explicit(&words->kv_change, memory_order_relaxed) != change)
        return cox_fail(err, COX_STALE, "block %" PRIu32 " was taken while it was copied", block);
    return 0;
}
