#include "stats.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"

#define PART_BITS 3 /* a power of two has 2^PART_BITS buckets */
/* A month. */
#define EXECUTE_MS_MAX 2.6e9f
#define PART_COUNT (1u << PART_BITS)

_Static_assert(COX_LATENCY_BUCKET_COUNT == (64 - PART_BITS + 1) * PART_COUNT,
               "the highest bit has its buckets");

COX_HOT static uint32_t bucket_of(uint64_t ns)
{
    if (ns < PART_COUNT)
        return (uint32_t)ns;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(ns);
    uint32_t part = (uint32_t)(ns >> (exponent - PART_BITS)) & (PART_COUNT - 1);
    return (exponent - PART_BITS + 1) * PART_COUNT + part;
}

static uint64_t bucket_middle(uint32_t bucket)
{
    if (bucket < 2 * PART_COUNT)
        return bucket;
    uint32_t shift = bucket / PART_COUNT - 1;
    uint64_t begin = (uint64_t)(PART_COUNT + bucket % PART_COUNT) << shift;
    return begin + (UINT64_C(1) << shift) / 2;
}

COX_HOT void cox_latency_add(struct cox_latency *latency, uint64_t ns)
{
    latency->count++;
    latency->buckets[bucket_of(ns)]++;
}

uint64_t cox_latency_percentile(const struct cox_latency *latency, uint32_t permille)
{
    COX_ASSERT(permille >= 1 && permille <= 1000);
    /* ceil(count * permille / 1000), which as one product would overflow one day. */
    uint64_t wanted = latency->count / 1000 * permille;
    wanted += (latency->count % 1000 * permille + 999) / 1000;
    if (wanted == 0)
        return 0;
    uint32_t bucket = 0;
    for (uint64_t seen = latency->buckets[0]; seen < wanted; seen += latency->buckets[bucket])
        bucket++;
    return bucket_middle(bucket);
}

uint64_t cox_latency_sum(const struct cox_latency *latency, uint64_t below[COX_PHASE_BOUND_COUNT])
{
    uint64_t sum = 0, seen = 0;
    uint32_t bound = 0;
    for (uint32_t bucket = 0; bucket < COX_LATENCY_BUCKET_COUNT; bucket++) {
        while (bound < COX_PHASE_BOUND_COUNT && bucket == bucket_of(COX_PHASE_BOUND_NS(bound)))
            below[bound++] = seen;
        seen += latency->buckets[bucket];
        sum += latency->buckets[bucket] * bucket_middle(bucket);
    }
    return sum;
}

COX_HOT void cox_stats_publish(struct cox_stats *stats, uint64_t request_size, bool out_of_line)
{
    stats->counts.submitted++;
    stats->counts.request_bytes += request_size;
    stats->counts.large_requests += out_of_line;
    stats->counts.large_request_bytes += out_of_line ? request_size : 0;
}

COX_HOT void cox_stats_end(struct cox_stats *stats, int status, const struct cox_stats_taken *taken)
{
    stats->counts.completed++;
    stats->counts.failed += status != 0;
    stats->counts.timeouts += status == COX_TIMEOUT;
    stats->counts.divergences += status == COX_DIVERGED;
    stats->counts.reply_bytes += taken->bytes;
    stats->counts.large_replies += taken->large_count;
    stats->counts.large_reply_bytes += taken->large_bytes;
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
        cox_latency_read(&stats->phases[phase], &ret_stats->phases[phase]);
    cox_latency_read(&stats->death_detection, &ret_stats->death_detection);
    cox_latency_read(&stats->hang_detection, &ret_stats->hang_detection);
}

void cox_latency_read(const struct cox_latency *latency, struct cox_phase_stats *ret_stats)
{
    ret_stats->count = latency->count;
    ret_stats->p50_ns = cox_latency_percentile(latency, 500);
    ret_stats->p99_ns = cox_latency_percentile(latency, 990);
    ret_stats->sum_ns = cox_latency_sum(latency, ret_stats->below);
}

void cox_rank_stats_fail(struct cox_rank_stats *stats, int32_t code)
{
    stats->errors++;
    stats->stale_replies += code == COX_STALE;
}

COX_HOT void cox_rank_stats_reply(struct cox_rank_stats *stats,
                                  const struct Coxswain__ExecuteResponse *response)
{
    if (response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE)
        return;
    const Coxswain__ExecuteModelResponse *step = response->execute_model_response;
    if (!step || !step->has_model_execute_time || !(step->model_execute_time >= 0) ||
        !(step->model_execute_time < EXECUTE_MS_MAX))
        return;
    const uint64_t ns = (uint64_t)((double)step->model_execute_time * 1e6);
    cox_latency_add(&stats->execute, ns);
    if (step->has_group_ns && step->group_ns <= ns && step->group_wait_ns <= step->group_ns) {
        stats->group_ns += step->group_ns;
        stats->group_wait_ns += step->group_wait_ns;
    }
}

const char *cox_phase_name(uint32_t phase)
{
    static const char *const names[COX_PHASE_COUNT] = {"queue", "ranks", "handler", "total"};
    return phase < COX_PHASE_COUNT ? names[phase] : "unknown";
}
