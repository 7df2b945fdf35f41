/* Where the ranks of a group stand, in one sentence. */
#include "coordinator/stacks/incidents.h"
#include "coordinator/stacks/paragraph.h"
#include "tests/lib/test.h"

/* One letter per rank: those with the same are at the same place. '-': its rank is not asked. */
static void expect(const char *places, const char *text)
{
    struct cox_rank_stacks ranks[COX_RANK_COUNT_MAX];
    char summaries[COX_RANK_COUNT_MAX][8];
    struct cox_stacks stacks = {.ranks = ranks};
    for (uint32_t rank = 0; places[rank]; rank++) {
        if (places[rank] == '-')
            continue;
        snprintf(summaries[rank], sizeof summaries[rank], "in %c", places[rank]);
        ranks[stacks.count++] = (struct cox_rank_stacks){.rank = rank, .summary = summaries[rank]};
    }
    assert_int_equal(cox_stacks_paragraph(&stacks), 0);
    assert_string_equal(stacks.paragraph, text);
    free((char *)(uintptr_t)stacks.paragraph);
}

PLAIN_TEST(ranks_at_one_place_are_one_part)
{
    expect("aaaa", "ranks 0-3: in a");
    expect("a", "rank 0: in a");
    expect("", "");
}

PLAIN_TEST(a_rank_that_is_alone_comes_first)
{
    expect("abaa", "rank 1: in b; ranks 0,2-3: in a, and may wait for it");
    expect("ab", "rank 0: in a; rank 1: in b");
    expect("aabb", "ranks 0-1: in a; ranks 2-3: in b");
    expect("aabc", "rank 2: in b; rank 3: in c; ranks 0-1: in a");
    expect("--ab-bb", "rank 2: in a; ranks 3,5-6: in b, and may wait for it");
}

PLAIN_TEST(a_thread_that_looks_now_and_then_is_where_the_others_wait)
{
    struct cox_rank_stacks ranks[] = {
        {.rank = 0, .summary = "main thread in wait (a.c:1), running"},
        {.rank = 1, .summary = "main thread in wait (a.c:1)"},
        {.rank = 2, .summary = "main thread in loop (b.c:2), running"},
        {.rank = 3, .summary = "main thread, running"},
        {.rank = 4, .summary = "main thread, asleep"}};
    struct cox_stacks stacks = {.ranks = ranks, .count = sizeof ranks / sizeof ranks[0]};
    assert_int_equal(cox_stacks_paragraph(&stacks), 0);
    assert_string_equal(stacks.paragraph,
                        "rank 2: main thread in loop (b.c:2), running; rank 3: main thread, "
                        "running; rank 4: main thread, asleep; ranks 0-1: main thread in wait "
                        "(a.c:1)");
    free((char *)(uintptr_t)stacks.paragraph);
}

PLAIN_TEST(many_places_are_counted)
{
    expect("abcdefg", "rank 0: in a; rank 1: in b; rank 2: in c; rank 3: in d; the others at 3 "
                      "more places");
}

PLAIN_TEST(a_request_is_a_suspect_for_its_last_second_and_a_half_at_most)
{
    const uint64_t s = COX_NSEC_PER_SEC;
    assert_int_equal(cox_incidents_due(10 * s, 40 * s), 38 * s + s / 2);
    assert_int_equal(cox_incidents_due(10 * s, 12 * s), 12 * s - s / 2);
    assert_true(cox_incidents_due(10 * s, COX_DEADLINE_NEVER) == COX_DEADLINE_NEVER);
    assert_true(cox_incidents_due(10 * s, 9 * s) == COX_DEADLINE_NEVER);
}
