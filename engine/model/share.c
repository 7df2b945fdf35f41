#include "share.h"

#include <stdio.h>

uint32_t cox_slice_count(const struct cox_model_config *config)
{
    uint32_t count =
        config->kv_head_count < COX_SLICE_COUNT_MAX ? config->kv_head_count : COX_SLICE_COUNT_MAX;

    if (config->head_count % COX_SLICE_COUNT == 0)
        return COX_SLICE_COUNT;
    while (config->kv_head_count % count)
        count--;
    return count;
}

/* "1, 2, 4 or 8 ranks" */
static void list_rank_counts(uint32_t slice_count, char *text, size_t size)
{
    size_t used = 0;

    text[0] = '\0';
    for (uint32_t n = 1; n <= slice_count && used < size; n++)
        if (slice_count % n == 0)
            used += (size_t)snprintf(text + used, size - used, "%s%u",
                                     n == 1             ? ""
                                     : n == slice_count ? " or "
                                                        : ", ",
                                     n);
    if (used < size)
        snprintf(text + used, size - used, slice_count == 1 ? " rank" : " ranks");
}

int cox_share_check(const struct cox_model_config *config, const struct cox_share *share,
                    struct cox_error *err)
{
    const uint32_t slice_count = cox_slice_count(config);
    const uint32_t rank_count = share->rank_count ? share->rank_count : 1;
    char allowed[96];

    if (slice_count % rank_count) {
        list_rank_counts(slice_count, allowed, sizeof(allowed));
        return cox_fail(
            err, COX_INVALID,
            "-n %u: heads, feed-forward and vocabulary are in %u slices, of which each rank owns equally many: use %s",
            rank_count, slice_count, allowed);
    }
    if (share->rank >= rank_count)
        return cox_fail(err, COX_INVALID, "rank %u of %u", share->rank, rank_count);
    return 0;
}

struct cox_slices cox_share_slices(const struct cox_model_config *config,
                                   const struct cox_share *share)
{
    const uint32_t count = cox_slice_count(config) / (share->rank_count ? share->rank_count : 1);

    return (struct cox_slices){.first = share->rank * count, .count = count};
}

struct cox_kv_heads cox_share_kv_heads(const struct cox_model_config *config,
                                       const struct cox_share *share)
{
    const struct cox_slices own = cox_share_slices(config, share);
    const uint32_t slice_heads = config->head_count / cox_slice_count(config);
    const uint32_t group = config->head_count / config->kv_head_count;
    const uint32_t first = own.first * slice_heads / group;
    const uint32_t last = ((own.first + own.count) * slice_heads - 1) / group;

    return (struct cox_kv_heads){.first = first, .count = last - first + 1};
}
