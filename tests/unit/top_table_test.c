/* top_table: rows, rates between two samples, and their order. */
#include "program/command/top_table.h"
#include <coxswain/executor.h>
#include "proto/control.pb-c.h"
#include "tests/lib/test.h"

#define RANK_COUNT 3

/* A group's status. */
struct made {
    CoxswainControl__StatusReply status;
    CoxswainControl__RankStatus ranks[RANK_COUNT], *rank_pointers[RANK_COUNT];
    CoxswainControl__RankChannelStatus lines[RANK_COUNT], *line_pointers[RANK_COUNT];
    CoxswainControl__PhaseStatus execute[RANK_COUNT];
    CoxswainControl__ChannelStatus channel, *channel_pointer;
};

static void make(struct made *m)
{
    memset(m, 0, sizeof *m);
    coxswain_control__status_reply__init(&m->status);
    m->status.rank_count = RANK_COUNT;
    m->status.n_ranks = RANK_COUNT;
    m->status.ranks = m->rank_pointers;
    coxswain_control__channel_status__init(&m->channel);
    m->channel_pointer = &m->channel;
    m->status.n_channels = 1;
    m->status.channels = &m->channel_pointer;
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        coxswain_control__rank_status__init(&m->ranks[rank]);
        coxswain_control__rank_channel_status__init(&m->lines[rank]);
        coxswain_control__phase_status__init(&m->execute[rank]);
        m->rank_pointers[rank] = &m->ranks[rank];
        m->line_pointers[rank] = &m->lines[rank];
        m->ranks[rank].rank = rank;
        m->ranks[rank].incarnation = 1;
        m->ranks[rank].n_channels = 1;
        m->ranks[rank].channels = &m->line_pointers[rank];
        m->lines[rank].has_state = true;
    }
}

static void shows(const struct cox_top_table *table, uint32_t index, const char *line)
{
    assert_string_equal(cox_top_table_rank_line(table, index), line);
}

PLAIN_TEST(m18_rates_are_those_between_two_samples_of_one_process)
{
    struct made m;
    struct cox_top_table *table;
    assert_int_equal(cox_top_table_new(&table), 0);
    make(&m);
    m.lines[0].sequence = 100;
    m.ranks[1].execute = &m.execute[1];
    m.execute[1].count = 7;
    m.execute[1].p50_ns = 1500;
    m.execute[1].p99_ns = 2500000;
    m.ranks[1].group_ns = 1;
    m.ranks[1].cpu_ns = 10;
    m.ranks[1].resident_bytes = 3 << 20;
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, COX_NSEC_PER_SEC), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_int_equal(cox_top_table_rank_count(table), RANK_COUNT);
    shows(table, 0,
          "   0 idle          -       100       -      -      -     -     -        -      0  mine");
    shows(table, 1,
          "   1 idle          -         0       - 1.50us 2.50ms     -     -  3.00MiB      0  mine");
    /* Half a second later. */
    m.lines[0].sequence = 150;
    m.lines[0].state = 2;
    m.lines[0].has_age_ns = true;
    m.lines[0].age_ns = 12000;
    m.ranks[1].cpu_ns = 10 + COX_NSEC_PER_SEC / 4;
    m.ranks[1].group_wait_ns = COX_NSEC_PER_SEC / 8;
    m.ranks[2].incarnation = 2;
    m.ranks[2].deaths = 1;
    m.channel.ended = 30;
    assert_int_equal(
        cox_top_table_put(table, "mine", &m.status, COX_NSEC_PER_SEC + COX_NSEC_PER_SEC / 2), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    shows(table, 0,
          "   0 running  12.0us       150   100.0      -      -     -    0%        -      0  mine");
    shows(table, 1,
          "   1 idle          -         0     0.0 1.50us 2.50ms   25%   50%  3.00MiB      0  mine");
    shows(table, 2,
          "   2 idle          -         0       -      -      -     -     -        -      1  mine");
    assert_contains(cox_top_table_group_line(table, 0),
                    "mine: 3 ranks, ?, degraded, up 0ns, 60.0/s");
    assert_null(cox_top_table_free(table));
}

PLAIN_TEST(nodes_are_a_column_where_there_are_some)
{
    struct made m;
    struct cox_top_table *table;
    assert_int_equal(cox_top_table_new(&table), 0);
    make(&m);
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, COX_NSEC_PER_SEC), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_null(strstr(cox_top_table_heading(table), "NODE"));
    m.ranks[0].node = "a";
    m.ranks[1].node = "machine-b";
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, 2 * COX_NSEC_PER_SEC), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_contains(cox_top_table_heading(table), " DEATHS  NODE       GROUP");
    assert_contains(cox_top_table_rank_line(table, 0), "      0  a          mine");
    assert_contains(cox_top_table_rank_line(table, 1), "      0  machine-b  mine");
    assert_contains(cox_top_table_rank_line(table, 2), "      0  -          mine");
    m.ranks[1].node = NULL;
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, 3 * COX_NSEC_PER_SEC), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_contains(cox_top_table_heading(table), " DEATHS  NODE  GROUP");
    assert_contains(cox_top_table_rank_line(table, 0), "      0  a     mine");
    assert_null(cox_top_table_free(table));
}

PLAIN_TEST(m18_rows_are_sorted)
{
    struct made m;
    struct cox_top_table *table;
    assert_int_equal(cox_top_table_new(&table), 0);
    make(&m);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) {
        m.lines[rank].has_age_ns = true;
        m.lines[rank].age_ns = 1000 * (rank + 1);
        m.ranks[rank].resident_bytes = (rank + 1) % RANK_COUNT + 1;
        m.ranks[rank].deaths = rank == 1;
    }
    m.ranks[0].liveness = COX_LIVENESS_DEAD;
    assert_int_equal(cox_top_table_put(table, "b", &m.status, 5), 0);
    assert_int_equal(cox_top_table_put(table, "a", &m.status, 5), 0);
    static const struct {
        enum cox_top_column sort;
        bool reverse;
        /* group and rank of the first and of the last row */
        char first[4], last[4];
    } orders[] = {
        {COX_TOP_RANK, false, "b0", "a2"},   {COX_TOP_RANK, true, "a2", "b0"},
        {COX_TOP_STATE, false, "b0", "a1"},  {COX_TOP_MEMORY, false, "b1", "a2"},
        {COX_TOP_DEATHS, false, "b1", "a2"}, {COX_TOP_DEATHS, true, "a2", "b1"},
        {COX_TOP_CPU, false, "b0", "a2"},
    };
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        cox_top_table_format(table, orders[i].sort, orders[i].reverse);
        const uint32_t count = cox_top_table_rank_count(table);
        assert_int_equal(count, 2 * RANK_COUNT);
        for (int end = 0; end < 2; end++) {
            const char *line = cox_top_table_rank_line(table, end ? count - 1 : 0);
            const char *expected = end ? orders[i].last : orders[i].first;
            if (line[strlen(line) - 1] != expected[0] || line[3] != expected[1])
                fail_msg("%s: row %d is %s, not of %s", cox_top_columns[orders[i].sort].name, end,
                         line, expected);
        }
    }
    assert_null(cox_top_table_free(table));
}

PLAIN_TEST(m18_groups_go_and_come_and_tell_little)
{
    struct made m;
    struct cox_top_table *table;
    assert_int_equal(cox_top_table_new(&table), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_int_equal(cox_top_table_rank_count(table), 0);
    make(&m);
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, 5), 0);
    assert_int_equal(cox_top_table_fail(table, "mine", "the group\nis \xc3\xa4 gone"), 0);
    cox_top_table_format(table, COX_TOP_RANK, false);
    assert_int_equal(cox_top_table_rank_count(table), 0);
    assert_int_equal(cox_top_table_group_count(table), 1);
    assert_string_equal(cox_top_table_group_line(table, 0), "mine: the group is    gone");
    /* Another one of that name, of another size, that says nothing of its channels. */
    m.status.n_ranks = 1;
    m.status.n_channels = 0;
    m.ranks[0].n_channels = 0;
    m.ranks[0].liveness = COX_LIVENESS_ABSENT;
    m.ranks[0].deaths = UINT32_MAX;
    m.ranks[0].resident_bytes = UINT64_MAX;
    char name[400];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    assert_int_equal(cox_top_table_put(table, "mine", &m.status, 9), 0);
    assert_int_equal(cox_top_table_put(table, name, &m.status, 9), 0);
    cox_top_table_format(table, COX_TOP_STATE, false);
    assert_int_equal(cox_top_table_rank_count(table), 2);
    assert_contains(cox_top_table_rank_line(table, 0), "starting");
    assert_null(cox_top_table_free(table));
    assert_null(cox_top_table_free(NULL));
}
