#include "model/share.h"

int cox_share_of_rank(uint32_t rank, uint32_t rank_count, struct cox_share *ret_share,
                      struct cox_error *err)
{
    if (rank_count < 1 || rank_count > COX_SLICE_COUNT || COX_SLICE_COUNT % rank_count)
        return cox_fail(err, COX_INVALID,
                        "-n %u: heads, feed-forward and vocabulary are in %d slices, of which each "
                        "rank owns equally many: use 1, 2, 4 or 8 ranks",
                        rank_count, COX_SLICE_COUNT);
    if (rank >= rank_count)
        return cox_fail(err, COX_INVALID, "rank %u of %u", rank, rank_count);
    *ret_share = (struct cox_share){
        .slice_first = rank * (COX_SLICE_COUNT / rank_count),
        .slice_count = COX_SLICE_COUNT / rank_count,
    };
    return 0;
}

int cox_share_check(const struct cox_share *share, struct cox_error *err)
{
    const bool all = !share->slice_count && !share->slice_first;
    const uint32_t slice_count = all ? COX_SLICE_COUNT : share->slice_count;

    if (slice_count < 1 || share->slice_first >= COX_SLICE_COUNT ||
        slice_count > COX_SLICE_COUNT - share->slice_first)
        return cox_fail(err, COX_INVALID,
                        "%u slices from slice %u; allowed: 1 to %d within 0 to %d", slice_count,
                        share->slice_first, COX_SLICE_COUNT, COX_SLICE_COUNT - 1);
    if (slice_count < COX_SLICE_COUNT && !share->gather)
        return cox_fail(err, COX_INVALID, "%u of %d slices, and no way to the others", slice_count,
                        COX_SLICE_COUNT);
    return 0;
}

struct cox_kv_heads cox_share_kv_heads(const struct cox_model_config *config,
                                       const struct cox_share *share)
{
    const uint32_t slice_heads = config->head_count / COX_SLICE_COUNT;
    const uint32_t group = config->head_count / config->kv_head_count;
    const uint32_t end = share->slice_first + cox_share_slice_count(share);
    const uint32_t first = share->slice_first * slice_heads / group;
    const uint32_t last = (end * slice_heads - 1) / group;

    return (struct cox_kv_heads){.first = first, .count = last - first + 1};
}
