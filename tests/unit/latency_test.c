/* A histogram against the sorted values. */
#include "coordinator/collector/stats.h"
#include "tests/lib/test.h"

#define ROUND_COUNT 400
#define VALUE_COUNT_MAX 3000

static struct cox_latency latency;
static uint64_t values[VALUE_COUNT_MAX];

static uint64_t random_state;

/* splitmix64 */
static uint64_t random_next(void)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int compare(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

static void assert_close(uint64_t got, uint64_t exact)
{
    uint64_t off = got > exact ? got - exact : exact - got;
    if (off > exact / 16)
        fail_msg("%llu is told for %llu", (unsigned long long)got, (unsigned long long)exact);
}

static uint64_t told_alone(uint64_t value)
{
    memset(&latency, 0, sizeof latency);
    cox_latency_add(&latency, value);
    return cox_latency_percentile(&latency, 500);
}

PLAIN_TEST(p3_without_failures_there_is_no_report)
{
    memset(&latency, 0, sizeof latency);
    assert_int_equal(latency.count, 0);
    for (uint32_t permille = 1; permille <= 1000; permille++)
        assert_int_equal(cox_latency_percentile(&latency, permille), 0);
}

PLAIN_TEST(p3_every_value_of_64_bits_has_a_bucket)
{
    for (uint64_t value = 0; value < 16; value++)
        assert_int_equal(told_alone(value), value);
    for (uint64_t value = 16; value < 100000; value++)
        assert_close(told_alone(value), value);
    for (uint32_t bit = 5; bit < 64; bit++)
        for (uint64_t part = 0; part < 16; part++)
            for (int beside = -1; beside <= 1; beside++) {
                uint64_t value = ((UINT64_C(1) << bit) | (part << (bit - 4))) + (uint64_t)beside;
                assert_close(told_alone(value), value);
            }
    assert_close(told_alone(UINT64_MAX), UINT64_MAX);
}

/* Values of one bucket are reported as one value, and a larger value never as a smaller one. */
PLAIN_TEST(p3_buckets_are_in_order)
{
    uint64_t last = 0, changes = 0;
    for (uint64_t value = 0; value < 1 << 17; value++) {
        uint64_t told = told_alone(value);
        assert_true(told >= last);
        changes += told != last;
        last = told;
    }
    assert_int_equal(changes, 15 + 13 * 8); /* 16 exact ones, then 8 for each of 13 powers of two */
}

/* Of one of these kinds: all alike, even, spread over all magnitudes, two heaps far apart. */
static uint64_t random_value(uint64_t kind, uint64_t scale)
{
    switch (kind) {
    case 0:
        return scale;
    case 1:
        return random_next() % scale;
    case 2:
        return random_next() >> (random_next() % 64);
    default:
        return random_next() % 100 < 97 ? 5000 + random_next() % 900 : scale + random_next() % 77;
    }
}

PLAIN_TEST(p3_percentiles_are_those_of_the_sorted_values)
{
    random_state = 20261121;
    for (int round = 0; round < ROUND_COUNT; round++) {
        uint64_t kind = (uint64_t)round % 4,
                 scale = 1 + (random_next() >> (10 + random_next() % 50));
        size_t count = 1 + random_next() % (round % 8 < 4 ? VALUE_COUNT_MAX : 12);
        memset(&latency, 0, sizeof latency);
        for (size_t i = 0; i < count; i++) {
            values[i] = random_value(kind, scale);
            cox_latency_add(&latency, values[i]);
        }
        assert_int_equal(latency.count, count);
        qsort(values, count, sizeof *values, compare);
        uint64_t last = 0;
        for (uint32_t permille = 1; permille <= 1000; permille++) {
            uint64_t told = cox_latency_percentile(&latency, permille);
            assert_close(told, values[(count * permille + 999) / 1000 - 1]);
            assert_true(told >= last);
            last = told;
        }
    }
}

/* A count that times 1,000 would not fit. */
PLAIN_TEST(p3_a_percentile_of_very_many_values)
{
    memset(&latency, 0, sizeof latency);
    const uint64_t many = UINT64_C(1) << 58;
    latency.count = 10 * many;
    latency.buckets[3] = 9 * many;
    latency.buckets[7] = many;
    assert_int_equal(cox_latency_percentile(&latency, 500), 3);
    assert_int_equal(cox_latency_percentile(&latency, 899), 3);
    assert_int_equal(cox_latency_percentile(&latency, 901), 7);
    assert_int_equal(cox_latency_percentile(&latency, 1000), 7);
}

PLAIN_TEST(m18_counts_below_a_bound_are_exact_and_the_sum_is_close)
{
    random_state = 7;
    for (int round = 0; round < ROUND_COUNT; round++) {
        uint64_t below[COX_PHASE_BOUND_COUNT], exact[COX_PHASE_BOUND_COUNT] = {0};
        double sum = 0;
        memset(&latency, 0, sizeof latency);
        for (size_t i = 0; i < VALUE_COUNT_MAX; i++) {
            /* Values at a bound, just below it, and anything up to some minutes. */
            const uint64_t bound = COX_PHASE_BOUND_NS(random_next() % COX_PHASE_BOUND_COUNT),
                           kind = random_next() % 3,
                           value = kind == 0   ? bound
                                   : kind == 1 ? bound - 1
                                               : random_next() >> (26 + random_next() % 38);
            cox_latency_add(&latency, value);
            sum += (double)value;
            for (uint32_t b = 0; b < COX_PHASE_BOUND_COUNT; b++)
                exact[b] += value < COX_PHASE_BOUND_NS(b);
        }
        const double told = (double)cox_latency_sum(&latency, below);
        assert_memory_equal(below, exact, sizeof exact);
        assert_true(told > sum * 0.9375 && told < sum * 1.0625);
    }
}
