#include "stats.h"

COX_HOT void cox_stats_publish(struct cox_stats *stats, uint64_t request_size, bool in_block)
{
    stats->counts.submitted++;
    stats->counts.request_bytes += request_size;
    stats->counts.large_requests += in_block;
    stats->counts.large_request_bytes += in_block ? request_size : 0;
}

COX_HOT void cox_stats_end(struct cox_stats *stats, int status, const struct cox_stats_taken *taken)
{
    stats->counts.completed++;
    stats->counts.failed += status != 0;
    stats->counts.timeouts += status == COX_TIMEOUT;
    stats->counts.reply_bytes += taken->bytes;
    stats->counts.large_replies += taken->block_count;
    stats->counts.large_reply_bytes += taken->block_bytes;
}

COX_HOT void cox_stats_return(struct cox_stats *stats, const struct cox_completion *completion,
                              uint64_t returned_ns)
{
    const uint64_t times[] = {completion->submitted_ns, completion->published_ns,
                              completion->completed_ns, returned_ns};
    cox_latency_add(&stats->phases[COX_PHASE_QUEUE], times[1] - times[0]);
    cox_latency_add(&stats->phases[COX_PHASE_RANKS], times[2] - times[1]);
    cox_latency_add(&stats->phases[COX_PHASE_HANDLER], times[3] - times[2]);
    cox_latency_add(&stats->phases[COX_PHASE_TOTAL], times[3] - times[0]);
}

void cox_stats_read(const struct cox_stats *stats, struct cox_channel_stats *ret_stats)
{
    *ret_stats = stats->counts;
    for (int phase = 0; phase < COX_PHASE_COUNT; phase++)
        ret_stats->phases[phase] = (struct cox_phase_stats){
            .count = stats->phases[phase].count,
            .p50_ns = cox_latency_percentile(&stats->phases[phase], 500),
            .p99_ns = cox_latency_percentile(&stats->phases[phase], 990),
        };
}

const char *cox_phase_name(uint32_t phase)
{
    static const char *const names[COX_PHASE_COUNT] = {"queue", "ranks", "handler", "total"};
    return phase < COX_PHASE_COUNT ? names[phase] : "unknown";
}
