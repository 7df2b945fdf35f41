#include "pool_geometry.h"

#include <inttypes.h>

#include "channel/handle/handle_internal.h"

#define SLAB_SIZE_DEFAULT (UINT64_C(64) << 10)
#define OWNER_COUNT_DEFAULT 16
/* A slab's word has 24 bits for its value, which can be a length in slabs. */
#define SLAB_COUNT_MAX ((UINT32_C(1) << 24) - 1)
/* Larger than any memory, and sums of a few do not overflow. */
#define SIZE_MAX_SANE (UINT64_C(1) << 56)

static bool is_power_of_two(uint64_t value)
{
    return value && (value & (value - 1)) == 0;
}

static uint64_t to_line(uint64_t offset)
{
    return (offset + COX_POOL_LINE_SIZE - 1) / COX_POOL_LINE_SIZE * COX_POOL_LINE_SIZE;
}

/* Computes offsets and sizes from the counts. No overflow: at most 2^24 blocks, 1024 owners. */
static void geometry_place(struct cox_pool_geometry *geometry)
{
    const uint64_t count = geometry->block_count;
    geometry->page_count = !geometry->on_demand   ? 0
                           : geometry->slab_count ? geometry->slab_count
                                                  : geometry->block_count;
    geometry->owners = COX_POOL_PAGE_SIZE;
    geometry->blocks =
        geometry->owners + geometry->owner_count * sizeof(struct cox_pool_layout_owner);
    geometry->pins = to_line(geometry->blocks + count * sizeof(struct cox_pool_layout_block));
    geometry->hints = to_line(geometry->pins + count * sizeof(struct cox_pool_layout_pins));
    geometry->slabs =
        to_line(geometry->hints + (count + 63) / 64 * sizeof(struct cox_pool_layout_hints));
    geometry->pages =
        to_line(geometry->slabs + geometry->slab_count * sizeof(struct cox_pool_layout_slab));
    geometry->reference_rows =
        to_line(geometry->pages + geometry->page_count * sizeof(struct cox_pool_layout_pages));
    geometry->row_stride = to_line(count * sizeof(struct cox_pool_layout_count));
    const uint64_t end = geometry->reference_rows + geometry->owner_count * geometry->row_stride;
    geometry->words_size = (end + COX_POOL_PAGE_SIZE - 1) / COX_POOL_PAGE_SIZE * COX_POOL_PAGE_SIZE;
}

static int resolve_fixed(const struct cox_pool_options *options, struct cox_pool_geometry *geometry,
                         struct cox_error *err)
{
    if (options->block_count == 0 || options->block_count > COX_POOL_BLOCK_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "block_count %" PRIu32 ": 1 to %" PRIu32,
                        options->block_count, COX_POOL_BLOCK_COUNT_MAX);
    if (options->block_size < COX_POOL_BLOCK_SIZE_MIN ||
        options->block_size % COX_POOL_BLOCK_SIZE_MIN ||
        options->block_size > SIZE_MAX_SANE / options->block_count)
        return cox_fail(err, COX_INVALID,
                        "block_size %" PRIu64 " of %" PRIu32 " blocks: a multiple of %d expected",
                        options->block_size, options->block_count, COX_POOL_BLOCK_SIZE_MIN);
    if (options->on_demand && options->block_size % COX_POOL_PAGE_SIZE)
        return cox_fail(err, COX_INVALID,
                        "block_size %" PRIu64 ": on demand, blocks are whole pages of %d bytes",
                        options->block_size, COX_POOL_PAGE_SIZE);
    if (options->slab_size || options->slabs_size)
        return cox_fail(err, COX_INVALID,
                        "slab_size and slabs_size are of slabs; blocks are fixed");
    geometry->block_size = options->block_size;
    geometry->block_count = options->block_count;
    geometry->slab_units = 1;
    geometry->memory_size = options->block_size * options->block_count;
    return 0;
}

static int resolve_slab(const struct cox_pool_options *options, struct cox_pool_geometry *geometry,
                        struct cox_error *err)
{
    const uint64_t slab_size = options->slab_size ? options->slab_size : SLAB_SIZE_DEFAULT;
    if (!is_power_of_two(slab_size) || slab_size < COX_POOL_PAGE_SIZE || slab_size > SIZE_MAX_SANE)
        return cox_fail(err, COX_INVALID,
                        "slab_size %" PRIu64 ": a power of two, at least %d, expected", slab_size,
                        COX_POOL_PAGE_SIZE);
    if (!is_power_of_two(options->block_size) || options->block_size < COX_POOL_BLOCK_SIZE_MIN ||
        options->block_size > slab_size)
        return cox_fail(err, COX_INVALID,
                        "block_size %" PRIu64 ": a power of two from %d to slab_size (%" PRIu64
                        ") expected",
                        options->block_size, COX_POOL_BLOCK_SIZE_MIN, slab_size);
    if (options->block_count)
        return cox_fail(err, COX_INVALID, "block_count is of fixed blocks; slabs have slabs_size");
    if (options->slabs_size == 0 || options->slabs_size > SIZE_MAX_SANE)
        return cox_fail(err, COX_INVALID, "slabs_size %" PRIu64, options->slabs_size);
    const uint64_t slab_count = (options->slabs_size + slab_size - 1) / slab_size;
    const uint64_t slab_units = slab_size / options->block_size;
    if (slab_units > COX_POOL_BLOCK_COUNT_MAX || slab_count > SLAB_COUNT_MAX ||
        slab_count > COX_POOL_BLOCK_COUNT_MAX / slab_units)
        return cox_fail(err, COX_INVALID,
                        "slabs_size %" PRIu64 ": more than %" PRIu32 " blocks of %" PRIu64 " bytes",
                        options->slabs_size, COX_POOL_BLOCK_COUNT_MAX, options->block_size);
    geometry->block_size = options->block_size;
    geometry->slab_size = slab_size;
    geometry->slab_count = (uint32_t)slab_count;
    geometry->slab_units = (uint32_t)slab_units;
    geometry->block_count = (uint32_t)(slab_count * slab_units);
    geometry->memory_size = slab_count * slab_size;
    return 0;
}

int cox_pool_geometry_resolve(const struct cox_pool_options *options,
                              struct cox_pool_geometry *ret_geometry, struct cox_error *err)
{
    struct cox_pool_geometry geometry = {
        .domain = options->domain,
        .strategy = options->strategy ? options->strategy : COX_POOL_FIXED,
        .on_demand = options->on_demand,
        .owner_count = options->owner_count_max ? options->owner_count_max : OWNER_COUNT_DEFAULT,
        .retain_size = options->on_demand ? options->retain_size : 0,
    };
    if (geometry.domain.kind == 0 && geometry.domain.device == 0)
        geometry.domain.kind = COX_DOMAIN_HOST;
    if (geometry.owner_count > COX_POOL_OWNER_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "owner_count_max %" PRIu32 ": at most %d",
                        geometry.owner_count, COX_POOL_OWNER_COUNT_MAX);
    if (geometry.retain_size > SIZE_MAX_SANE)
        return cox_fail(err, COX_INVALID, "retain_size %" PRIu64, geometry.retain_size);
    int r = geometry.strategy == COX_POOL_FIXED ? resolve_fixed(options, &geometry, err)
            : geometry.strategy == COX_POOL_SLAB
                ? resolve_slab(options, &geometry, err)
                : cox_fail(err, COX_INVALID, "strategy %d", (int)geometry.strategy);
    if (r)
        return r;
    geometry_place(&geometry);
    *ret_geometry = geometry;
    return 0;
}

uint32_t cox_pool_geometry_crc(const struct cox_pool_layout_header *header)
{
    const size_t from = offsetof(struct cox_pool_layout_header, version);
    return cox_handle_crc((const uint8_t *)header + from,
                          offsetof(struct cox_pool_layout_header, constants_crc) - from);
}

int cox_pool_geometry_load(const struct cox_pool_layout_header *header, uint64_t size,
                           struct cox_pool_geometry *ret_geometry, struct cox_error *err)
{
    struct cox_pool_geometry geometry;
    struct cox_error reason = {0};
    if (header->version != COX_POOL_VERSION)
        return cox_fail(err, COX_VERSION, "the pool is of version %" PRIu32 ", expected %d",
                        header->version, COX_POOL_VERSION);
    const struct cox_pool_options options = {
        .size = sizeof(struct cox_pool_options),
        .domain = {header->domain_kind, header->domain_device},
        .strategy = (enum cox_pool_strategy)header->strategy,
        .block_size = header->block_size,
        .block_count = header->strategy == COX_POOL_FIXED ? header->block_count : 0,
        .slab_size = header->slab_size,
        .slabs_size = header->strategy == COX_POOL_SLAB ? header->memory_size : 0,
        .owner_count_max = header->owner_count,
        .on_demand = header->flags & COX_POOL_ON_DEMAND,
        .retain_size = header->retain_size,
    };
    /* Otherwise different constants with the same number of pages would pass. */
    if (header->constants_crc != cox_pool_geometry_crc(header) || header->strategy == 0 ||
        header->owner_count == 0 || header->domain_kind == 0)
        return cox_fail(err, COX_CORRUPT, "the pool's words make no sense");
    if (cox_pool_geometry_resolve(&options, &geometry, &reason))
        return cox_fail(err, COX_CORRUPT, "the pool's words make no sense: %s", reason.text);
    if (geometry.block_count != header->block_count || geometry.slab_count != header->slab_count ||
        geometry.memory_size != header->memory_size || geometry.words_size != header->words_size ||
        geometry.words_size != size)
        return cox_fail(err, COX_CORRUPT,
                        "the pool's words say %" PRIu64 " bytes and %" PRIu32
                        " blocks, and have %" PRIu64 " bytes",
                        header->words_size, header->block_count, size);
    *ret_geometry = geometry;
    return 0;
}

void cox_pool_geometry_store(const struct cox_pool_geometry *geometry,
                             struct cox_pool_layout_header *ret_header)
{
    ret_header->version = COX_POOL_VERSION;
    ret_header->strategy = (uint32_t)geometry->strategy;
    ret_header->domain_kind = geometry->domain.kind;
    ret_header->domain_device = geometry->domain.device;
    ret_header->block_size = geometry->block_size;
    ret_header->block_count = geometry->block_count;
    ret_header->owner_count = geometry->owner_count;
    ret_header->slab_size = geometry->slab_size;
    ret_header->slab_count = geometry->slab_count;
    ret_header->flags = geometry->on_demand ? COX_POOL_ON_DEMAND : 0;
    ret_header->retain_size = geometry->retain_size;
    ret_header->memory_size = geometry->memory_size;
    ret_header->words_size = geometry->words_size;
}
