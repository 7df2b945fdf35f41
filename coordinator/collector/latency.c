#include "latency.h"

#define PART_BITS 3 /* a power of two has 2^PART_BITS buckets */
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
