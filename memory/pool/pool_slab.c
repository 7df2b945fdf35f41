/*
 * pool_slab: slabs, each cut into blocks of one power of two, and runs of whole slabs.
 *
 * Claiming a block changes the block's word, then checks the slab's. Emptying a slab changes the
 * slab's word, then checks all its blocks. Both are seq_cst, so at least one side sees the other.
 * An empty slab stays cut until another size needs it; on demand it is emptied at once, to release
 * its pages.
 *
 * The number of used blocks in a slab is a hint; when the hints give nothing, the words are
 * scanned.
 */
#include "channel/base/fault.h"
#include "pool_internal.h"

#define SLAB_NONE UINT32_MAX

static struct cox_pool_slab_word slab_load(const struct cox_pool *pool, uint32_t slab)
{
    return cox_pool_slab_word_split(atomic_load(&pool->slabs[slab].slab_word));
}

static uint32_t first_unit(const struct cox_pool *pool, uint32_t slab)
{
    return slab * pool->geometry.slab_units;
}

/* Units of a block; class is input. */
static uint32_t class_units(const struct cox_pool *pool, uint32_t class)
{
    const uint32_t units = pool->geometry.slab_units;
    return class < 25 && UINT32_C(1) << class <= units ? UINT32_C(1) << class : units;
}

/* Changes a word that only this owner changes; includes the fault point. */
static bool slab_change(struct cox_pool *pool, uint32_t slab, struct cox_pool_slab_word from,
                        uint32_t turn, uint32_t value, enum cox_pool_slab_phase phase,
                        uint32_t owner)
{
    uint64_t word =
        cox_pool_slab_word(from.turn, from.value, (enum cox_pool_slab_phase)from.phase, from.owner);
    bool changed = atomic_compare_exchange_strong(&pool->slabs[slab].slab_word, &word,
                                                  cox_pool_slab_word(turn, value, phase, owner));
    cox_fault_point(COX_FAULT_POOL_SLAB);
    return changed;
}

static bool slab_empty(struct cox_pool *pool, uint32_t slab, struct cox_pool_slab_word from)
{
    return slab_change(pool, slab, from, from.turn, 0, COX_POOL_SLAB_EMPTY, 0);
}

/* ---- lookup ---- */

uint64_t cox_pool_slab_block_size(const struct cox_pool *pool, uint32_t block)
{
    const uint32_t slab = block / pool->geometry.slab_units;
    const struct cox_pool_slab_word word = slab_load(pool, slab);
    const uint32_t unit = block - first_unit(pool, slab);
    if (word.phase == COX_POOL_SLAB_CUT || word.phase == COX_POOL_SLAB_LEAVING) {
        const uint32_t units = class_units(pool, word.value);
        return unit % units == 0 ? units * pool->geometry.block_size : 0;
    }
    if (word.phase == COX_POOL_SLAB_RUN && unit == 0 &&
        word.value <= pool->geometry.slab_count - slab)
        return word.value * pool->geometry.slab_size;
    return 0;
}

uint32_t cox_pool_slab_block_of(const struct cox_pool *pool, uint32_t unit)
{
    uint32_t slab = unit / pool->geometry.slab_units;
    struct cox_pool_slab_word word = slab_load(pool, slab);
    if (word.phase == COX_POOL_SLAB_CUT || word.phase == COX_POOL_SLAB_LEAVING)
        return unit - (unit - first_unit(pool, slab)) % class_units(pool, word.value);
    const uint32_t at = slab;
    if (word.phase == COX_POOL_SLAB_TAIL && word.value < slab) {
        slab = word.value;
        word = slab_load(pool, slab);
    }
    return word.phase == COX_POOL_SLAB_RUN && at - slab < word.value ? first_unit(pool, slab)
                                                                     : SLAB_NONE;
}

/* ---- one slab ---- */

/* length: number of slabs, this one included, that may become its run; recorded while it is
 * CLAIMED, for sweep. */
static bool slab_claim(struct cox_pool *pool, uint32_t slab, uint32_t length, uint32_t as)
{
    const struct cox_pool_slab_word word = slab_load(pool, slab);
    return word.phase == COX_POOL_SLAB_EMPTY &&
           slab_change(pool, slab, word, word.turn + 1, length, COX_POOL_SLAB_CLAIMED, as);
}

static void slab_unclaim(struct cox_pool *pool, uint32_t slab, uint32_t as)
{
    const struct cox_pool_slab_word word = slab_load(pool, slab);
    if (word.phase == COX_POOL_SLAB_CLAIMED && word.owner == as)
        slab_empty(pool, slab, word);
}

/* ---- retained pages: of free blocks, or of empty slabs ---- */

void cox_pool_pages_trim(struct cox_pool *pool, uint32_t page, uint32_t as)
{
    uint64_t epoch = 0;
    if (!pool->geometry.on_demand || pool->read_only ||
        atomic_load(&pool->header->retained) <= (int64_t)pool->geometry.retain_size ||
        !cox_pool_pages_are_there(pool, page))
        return;
    if (pool->geometry.slab_count ? !slab_claim(pool, page, 1, as)
                                  : !cox_pool_block_claim(pool, page, as, &epoch))
        return;
    cox_pool_pages_release(pool, page);
    cox_pool_pages_decommit(pool, page);
    if (pool->geometry.slab_count)
        slab_unclaim(pool, page, as);
    else
        cox_pool_block_unclaim(pool, page, epoch, as);
}

/* A snapshot: no owner has the block. */
static bool page_is_free(const struct cox_pool *pool, uint32_t page)
{
    if (pool->geometry.slab_count)
        return cox_pool_slab_word_split(atomic_load(&pool->slabs[page].slab_word)).phase ==
               COX_POOL_SLAB_EMPTY;
    return cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, page))).phase ==
           COX_POOL_FREE;
}

void cox_pool_pages_sweep(struct cox_pool *pool, uint32_t as)
{
    int64_t retained = 0;
    for (uint32_t page = 0; page < pool->geometry.page_count; page++)
        if (cox_pool_pages_are_there(pool, page) && page_is_free(pool, page))
            retained += (int64_t)cox_pool_page_size(pool);
    atomic_store(&pool->header->retained, retained);
    cox_fault_point(COX_FAULT_POOL_RETAINED);
    for (uint32_t page = 0; page < pool->geometry.page_count; page++)
        cox_pool_pages_trim(pool, page, as);
}

/* Counts the slab as empty; releases its pages if too many are retained. */
static void slab_emptied(struct cox_pool *pool, uint32_t slab, uint32_t as)
{
    cox_pool_pages_retain(pool, slab);
    cox_pool_pages_trim(pool, slab, as);
}

/* Number of used blocks in a CUT slab; stops counting at `enough`. */
static uint32_t count_used(const struct cox_pool *pool, uint32_t slab, uint32_t class,
                           uint32_t enough)
{
    const uint32_t first = first_unit(pool, slab), units = class_units(pool, class);
    uint32_t used = 0;
    for (uint32_t unit = 0; unit < pool->geometry.slab_units && used < enough; unit += units)
        used +=
            cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, first + unit))).phase !=
            COX_POOL_FREE;
    return used;
}

/* CUT -> EMPTY if all blocks are free. */
static void slab_leave(struct cox_pool *pool, uint32_t slab, uint32_t as)
{
    struct cox_pool_slab_word word = slab_load(pool, slab);
    if (word.phase != COX_POOL_SLAB_CUT || count_used(pool, slab, word.value, 1) ||
        !slab_change(pool, slab, word, word.turn, word.value, COX_POOL_SLAB_LEAVING, as))
        return;
    word.phase = COX_POOL_SLAB_LEAVING;
    word.owner = as;
    if (count_used(pool, slab, word.value, 1)) {
        slab_change(pool, slab, word, word.turn, word.value, COX_POOL_SLAB_CUT, 0);
        return;
    }
    slab_empty(pool, slab, word);
    slab_emptied(pool, slab, as);
}

/* ---- runs ---- */

/* End of the run of a CLAIMED slab. The word is input. */
static uint32_t run_end(const struct cox_pool *pool, uint32_t first)
{
    const uint32_t length = slab_load(pool, first).value, count = pool->geometry.slab_count;
    return length < count - first ? first + length : count;
}

/* The first slab is CLAIMED by `as`: empties the run's tails, then the first slab. */
static void run_dissolve(struct cox_pool *pool, uint32_t first, uint32_t as)
{
    const uint32_t end = run_end(pool, first);
    for (uint32_t slab = first + 1; slab < end; slab++) {
        const struct cox_pool_slab_word word = slab_load(pool, slab);
        if (word.phase != COX_POOL_SLAB_TAIL || word.value != first)
            continue; /* not part of the run yet, or no longer */
        slab_empty(pool, slab, word);
        slab_emptied(pool, slab, as);
    }
    slab_unclaim(pool, first, as);
    slab_emptied(pool, first, as);
}

/* RUN -> EMPTY if its block is free. Reads the slab first: the block was also free before the run
 * existed, but in another turn. */
static void run_leave(struct cox_pool *pool, uint32_t first, uint32_t as)
{
    const struct cox_pool_slab_word word = slab_load(pool, first);
    if (word.phase != COX_POOL_SLAB_RUN ||
        cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, first_unit(pool, first))))
                .phase != COX_POOL_FREE)
        return;
    if (slab_change(pool, first, word, word.turn, word.value, COX_POOL_SLAB_CLAIMED, as))
        run_dissolve(pool, first, as);
}

static bool run_seems_empty(const struct cox_pool *pool, uint32_t first, uint32_t length,
                            uint32_t *ret_next)
{
    for (uint32_t slab = first; slab < first + length; slab++)
        if (slab_load(pool, slab).phase != COX_POOL_SLAB_EMPTY) {
            *ret_next = slab + 1;
            return false;
        }
    return true;
}

/* Claims all slabs, and allocates their pages. Returns 0; COX_FULL: another process was faster; the
 * domain's code. */
static int run_claim(struct cox_pool *pool, uint32_t first, uint32_t length, struct cox_error *err)
{
    if (!slab_claim(pool, first, length, pool->owner))
        return COX_FULL;
    int r = 0;
    cox_pool_pages_release(pool, first);
    for (uint32_t slab = first + 1; r == 0 && slab < first + length; slab++) {
        const struct cox_pool_slab_word word = slab_load(pool, slab);
        if (word.phase != COX_POOL_SLAB_EMPTY ||
            !slab_change(pool, slab, word, word.turn + 1, first, COX_POOL_SLAB_TAIL, 0))
            r = COX_FULL;
        else
            cox_pool_pages_release(pool, slab);
    }
    for (uint32_t slab = first; pool->geometry.on_demand && r == 0 && slab < first + length; slab++)
        r = cox_pool_pages_commit(pool, slab, err);
    if (r)
        run_dissolve(pool, first, pool->owner);
    return r;
}

static int run_find(struct cox_pool *pool, uint32_t length, uint32_t *ret_block,
                    uint64_t *ret_epoch, struct cox_error *err)
{
    uint32_t first = 0;
    int r;
    while (length <= pool->geometry.slab_count && first <= pool->geometry.slab_count - length) {
        if (!run_seems_empty(pool, first, length, &first))
            continue;
        r = run_claim(pool, first, length, err);
        if (r && r != COX_FULL)
            return r;
        const uint32_t block = first_unit(pool, first);
        if (r == 0 && cox_pool_block_claim(pool, block, pool->owner, ret_epoch)) {
            struct cox_pool_slab_word word = slab_load(pool, first);
            slab_change(pool, first, word, word.turn, length, COX_POOL_SLAB_RUN, 0);
            *ret_block = block;
            return 0;
        }
        if (r == 0) /* a process that read an old slab word has the block for a moment */
            run_dissolve(pool, first, pool->owner);
        first++;
    }
    return COX_FULL;
}

/* ---- blocks of a cut slab ---- */

/* Claims a block, if the slab is unchanged. */
static bool cut_take(struct cox_pool *pool, uint32_t slab, uint64_t slab_word, uint32_t block,
                     uint64_t *ret_epoch)
{
    if (!cox_pool_block_claim(pool, block, pool->owner, ret_epoch))
        return false;
    if (atomic_load(&pool->slabs[slab].slab_word) != slab_word) {
        cox_pool_block_unclaim(pool, block, *ret_epoch, pool->owner);
        return false;
    }
    /* relaxed: a hint */
    atomic_fetch_add_explicit(&pool->slabs[slab].slab_used, 1, memory_order_relaxed);
    cox_fault_point(COX_FAULT_POOL_HINTED);
    return true;
}

/* Mask of the hint bits in word `index` for blocks in [first, end). */
static uint64_t cut_mask(uint32_t first, uint32_t end, uint32_t index)
{
    uint64_t mask = UINT64_MAX;
    if (first > index * 64)
        mask &= UINT64_MAX << (first - index * 64);
    if (end < index * 64 + 64)
        mask &= (UINT64_C(1) << (end - index * 64)) - 1;
    return mask;
}

static bool cut_find_hinted(struct cox_pool *pool, uint32_t slab, uint64_t slab_word,
                            uint32_t *ret_block, uint64_t *ret_epoch)
{
    const uint32_t first = first_unit(pool, slab), end = first + pool->geometry.slab_units;
    const uint32_t units = class_units(pool, cox_pool_slab_word_split(slab_word).value);
    for (uint32_t index = first / 64; index * 64 < end; index++) {
        _Atomic uint64_t *hint_bits = &pool->hints[index].hint_bits;
        uint64_t bits = atomic_load(hint_bits) & cut_mask(first, end, index);
        while (bits) {
            const uint32_t block = index * 64 + (uint32_t)__builtin_ctzll(bits);
            const uint64_t mask = UINT64_C(1) << (block % 64);
            bits &= ~mask;
            if ((atomic_fetch_and(hint_bits, ~mask) & mask) == 0)
                continue;
            cox_fault_point(COX_FAULT_POOL_HINTED);
            /* The hint may be stale, from when the slab was cut into smaller blocks. */
            if ((block - first) % units == 0 && cut_take(pool, slab, slab_word, block, ret_epoch)) {
                *ret_block = block;
                return true;
            }
        }
    }
    return false;
}

static bool cut_find_scanning(struct cox_pool *pool, uint32_t slab, uint64_t slab_word,
                              uint32_t *ret_block, uint64_t *ret_epoch)
{
    const uint32_t first = first_unit(pool, slab);
    const uint32_t units = class_units(pool, cox_pool_slab_word_split(slab_word).value);
    for (uint32_t unit = 0; unit < pool->geometry.slab_units; unit += units)
        if (cut_take(pool, slab, slab_word, first + unit, ret_epoch)) {
            *ret_block = first + unit;
            return true;
        }
    return false;
}

static bool class_find(struct cox_pool *pool, uint32_t class, bool by_hints, uint32_t *ret_block,
                       uint64_t *ret_epoch)
{
    const uint32_t count = pool->geometry.slab_count;
    const uint32_t capacity = pool->geometry.slab_units / class_units(pool, class);
    /* relaxed, both: any value is valid */
    const uint32_t from = atomic_load_explicit(&pool->cursors[class], memory_order_relaxed) % count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t slab = from + i < count ? from + i : from + i - count;
        const uint64_t word = atomic_load(&pool->slabs[slab].slab_word);
        const struct cox_pool_slab_word seen = cox_pool_slab_word_split(word);
        if (seen.phase != COX_POOL_SLAB_CUT || seen.value != class)
            continue;
        if (by_hints ? atomic_load_explicit(&pool->slabs[slab].slab_used, memory_order_relaxed) <
                               capacity &&
                           cut_find_hinted(pool, slab, word, ret_block, ret_epoch)
                     : cut_find_scanning(pool, slab, word, ret_block, ret_epoch)) {
            atomic_store_explicit(&pool->cursors[class], slab, memory_order_relaxed);
            return true;
        }
    }
    return false;
}

/* Cuts an EMPTY slab into blocks of this class. Returns 0; COX_FULL: none; the domain's code. */
static int class_cut(struct cox_pool *pool, uint32_t class, bool only_pages, struct cox_error *err)
{
    for (uint32_t slab = 0; slab < pool->geometry.slab_count; slab++) {
        if ((only_pages && !cox_pool_pages_are_there(pool, slab)) ||
            !slab_claim(pool, slab, 1, pool->owner))
            continue;
        int r = 0;
        cox_pool_pages_release(pool, slab);
        if (pool->geometry.on_demand && (r = cox_pool_pages_commit(pool, slab, err))) {
            slab_unclaim(pool, slab, pool->owner);
            return r;
        }
        atomic_store(&pool->slabs[slab].slab_used, 0);
        for (uint32_t unit = 0; unit < pool->geometry.slab_units; unit += class_units(pool, class))
            cox_pool_hint(pool, first_unit(pool, slab) + unit);
        const struct cox_pool_slab_word word = slab_load(pool, slab);
        slab_change(pool, slab, word, word.turn, class, COX_POOL_SLAB_CUT, 0);
        /* relaxed: any value is valid */
        atomic_store_explicit(&pool->cursors[class], slab, memory_order_relaxed);
        return 0;
    }
    return COX_FULL;
}

/* Sets every slab without used blocks EMPTY. */
static void slabs_leave(struct cox_pool *pool, uint32_t as)
{
    for (uint32_t slab = 0; slab < pool->geometry.slab_count; slab++) {
        slab_leave(pool, slab, as);
        run_leave(pool, slab, as);
    }
}

static int class_find_or_cut(struct cox_pool *pool, uint32_t class, uint32_t *ret_block,
                             uint64_t *ret_epoch, struct cox_error *err)
{
    int r = 0;
    /* Loops, since other processes may use up a slab as soon as it is cut. */
    while (r == 0) {
        if (class_find(pool, class, true, ret_block, ret_epoch))
            return 0;
        r = pool->geometry.on_demand ? class_cut(pool, class, true, NULL) : COX_FULL;
        if (r)
            r = class_cut(pool, class, false, err);
    }
    return r;
}

int cox_pool_slab_find(struct cox_pool *pool, uint64_t size, uint32_t *ret_block,
                       uint64_t *ret_epoch, struct cox_error *err)
{
    const uint64_t slab_size = pool->geometry.slab_size;
    uint32_t class = 0;
    if (size > slab_size) {
        const uint32_t length = (uint32_t)((size + slab_size - 1) / slab_size);
        int r = run_find(pool, length, ret_block, ret_epoch, err);
        if (r != COX_FULL)
            return r;
        slabs_leave(pool, pool->owner);
        return run_find(pool, length, ret_block, ret_epoch, err);
    }
    while (pool->geometry.block_size << class < size)
        class ++;
    int r = class_find_or_cut(pool, class, ret_block, ret_epoch, err);
    if (r != COX_FULL)
        return r;
    if (class_find(pool, class, false, ret_block, ret_epoch))
        return 0;
    slabs_leave(pool, pool->owner);
    return class_find_or_cut(pool, class, ret_block, ret_epoch, err);
}

/* ---- free and sweep ---- */

void cox_pool_slab_freed(struct cox_pool *pool, uint32_t block, uint32_t as)
{
    const uint32_t slab = block / pool->geometry.slab_units;
    const struct cox_pool_slab_word word = slab_load(pool, slab);
    if (word.phase == COX_POOL_SLAB_RUN) {
        run_leave(pool, slab, as);
        return;
    }
    /* relaxed: a hint; too high after a death */
    const uint32_t used =
        atomic_fetch_sub_explicit(&pool->slabs[slab].slab_used, 1, memory_order_relaxed);
    cox_fault_point(COX_FAULT_POOL_HINTED);
    if (used == 1 && pool->geometry.on_demand)
        slab_leave(pool, slab, as);
}

/* Reverts a slab that a dead owner had CLAIMED. */
static void sweep_claimed(struct cox_pool *pool, uint32_t slab, uint32_t as)
{
    const uint32_t end = run_end(pool, slab);
    for (uint32_t page = slab; pool->geometry.on_demand && page < end; page++) {
        const struct cox_pool_slab_word word = slab_load(pool, page);
        if (page > slab && (word.phase != COX_POOL_SLAB_TAIL || word.value != slab))
            continue;
        if (!cox_pool_pages_are_there(pool, page))
            cox_pool_pages_decommit(pool, page);
    }
    run_dissolve(pool, slab, as);
}

void cox_pool_slab_sweep(struct cox_pool *pool, uint32_t as)
{
    for (uint32_t slab = 0; slab < pool->geometry.slab_count; slab++) {
        struct cox_pool_slab_word word = slab_load(pool, slab);
        if (word.phase == COX_POOL_SLAB_CLAIMED && word.owner == as)
            sweep_claimed(pool, slab, as);
        else if (word.phase == COX_POOL_SLAB_LEAVING && word.owner == as)
            slab_change(pool, slab, word, word.turn, word.value, COX_POOL_SLAB_CUT, 0);
        word = slab_load(pool, slab);
        if (word.phase == COX_POOL_SLAB_CUT) {
            atomic_store_explicit(&pool->slabs[slab].slab_used,
                                  count_used(pool, slab, word.value, UINT32_MAX),
                                  memory_order_relaxed);
            cox_fault_point(COX_FAULT_POOL_HINTED);
            if (pool->geometry.on_demand)
                slab_leave(pool, slab, as);
        } else {
            run_leave(pool, slab, as);
        }
    }
}
