#include "top_table.h"

#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "program/client/health.h"
#include "proto/control.pb-c.h"
#include "units.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LINE_SIZE 512
#define GROUP_SIZE 160
#define NODE_SIZE 48
/* "NODE" and two spaces */
#define NODE_HEADING 6

typedef CoxswainControl__StatusReply status_reply;
typedef CoxswainControl__RankStatus rank_message;

/* What a rank's rates are made of. */
struct counters {
    uint64_t when_ns;
    uint32_t incarnation;
    uint64_t sequence, cpu_ns, group_wait_ns;
};

struct row {
    /* of its group in the table */
    uint32_t group;
    uint32_t rank;
    /* "": the coordinator's machine */
    char node[NODE_SIZE];
    /* "running"; static storage */
    const char *state;
    enum cox_top_health health;
    struct counters now;
    uint64_t age_ns, resident_bytes, execute_count, p50_ns, p99_ns;
    uint32_t deaths;
    /* per second; negative: unknown */
    double steps, cpu, wait;
    char line[LINE_SIZE];
};

struct group {
    char name[GROUP_SIZE];
    char line[LINE_SIZE];
    enum cox_top_health health;
    /* of the last sample */
    uint64_t steps_ended, when_ns;
    uint32_t rank_count;
    struct row *ranks;
};

struct cox_top_table {
    struct group *groups;
    uint32_t group_count;
    /* all ranks, as they are shown */
    struct row **rows;
    uint32_t row_count;
    size_t row_capacity;
    /* of the column of nodes, with two spaces; 0: no rank is on a node, and there is none */
    int node_width;
    char heading[LINE_SIZE];
    enum cox_top_column sort;
    bool reverse;
};

const struct cox_top_column_name cox_top_columns[COX_TOP_COLUMN_COUNT] = {
    [COX_TOP_RANK] = {"rank", 'r'},     [COX_TOP_STATE] = {"state", 's'},
    [COX_TOP_STEPS] = {"steps", 'n'},   [COX_TOP_P99] = {"p99", 'p'},
    [COX_TOP_WAIT] = {"wait", 'w'},     [COX_TOP_CPU] = {"cpu", 'c'},
    [COX_TOP_MEMORY] = {"memory", 'm'}, [COX_TOP_DEATHS] = {"deaths", 'd'},
};

int cox_top_table_new(struct cox_top_table **ret_table)
{
    struct cox_top_table *table = calloc(1, sizeof *table);
    if (!table)
        return -ENOMEM;
    *ret_table = table;
    return 0;
}

struct cox_top_table *cox_top_table_free(struct cox_top_table *table)
{
    if (table) {
        for (uint32_t i = 0; i < table->group_count; i++)
            free(table->groups[i].ranks);
        free(table->groups);
        free(table->rows);
        free(table);
    }
    return NULL;
}

/* NULL: no memory. */
static struct group *group_find(struct cox_top_table *table, const char *name)
{
    for (uint32_t i = 0; i < table->group_count; i++)
        if (strcmp(table->groups[i].name, name) == 0)
            return &table->groups[i];
    struct group *grown = realloc(table->groups, (table->group_count + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    table->groups = grown;
    struct group *group = &grown[table->group_count++];
    memset(group, 0, sizeof *group);
    snprintf(group->name, sizeof group->name, "%s", name);
    return group;
}

/* A rank's number of something in the time between two samples, as a rate of seconds. */
static double rate(uint64_t before, uint64_t now, uint64_t before_ns, uint64_t now_ns)
{
    return before_ns && now >= before && now_ns > before_ns
               ? (double)(now - before) * 1e9 / (double)(now_ns - before_ns)
               : -1;
}

static const char *state_of(const rank_message *rank)
{
    const CoxswainControl__RankChannelStatus *channel =
        rank->n_channels ? rank->channels[COX_CHANNEL_EXECUTE] : NULL;
    if (rank->liveness != COX_LIVENESS_ALIVE)
        return rank->liveness == COX_LIVENESS_ABSENT ? "starting"
                                                     : cox_rank_liveness_name(rank->liveness);
    if (rank->stopped)
        return "stopped";
    if (rank->trouble)
        return "suspect";
    return channel && channel->has_state ? cox_rank_state_name(channel->state) : "alive";
}

static void row_fill(struct row *row, const rank_message *rank, uint64_t now_ns)
{
    const CoxswainControl__RankChannelStatus *channel =
        rank->n_channels ? rank->channels[COX_CHANNEL_EXECUTE] : NULL;
    const struct counters before = row->now;
    row->rank = rank->rank;
    snprintf(row->node, sizeof row->node, "%s", rank->node ? rank->node : "");
    row->state = state_of(rank);
    if (rank->liveness != COX_LIVENESS_ALIVE && rank->liveness != COX_LIVENESS_ABSENT)
        row->health = COX_TOP_DEAD;
    else if (rank->liveness == COX_LIVENESS_ABSENT || rank->stopped || rank->trouble)
        row->health = COX_TOP_HELD;
    else
        row->health = COX_TOP_WELL;
    row->age_ns = channel && channel->has_age_ns ? channel->age_ns : 0;
    row->resident_bytes = rank->resident_bytes;
    row->deaths = rank->deaths;
    row->execute_count = rank->execute ? rank->execute->count : 0;
    row->p50_ns = rank->execute ? rank->execute->p50_ns : 0;
    row->p99_ns = rank->execute ? rank->execute->p99_ns : 0;
    row->now = (struct counters){
        .when_ns = now_ns,
        .incarnation = rank->incarnation,
        .sequence = channel ? channel->sequence : 0,
        .cpu_ns = rank->cpu_ns,
        .group_wait_ns = rank->group_wait_ns,
    };
    const uint64_t since_ns = before.incarnation == rank->incarnation ? before.when_ns : 0;
    row->steps = rate(before.sequence, row->now.sequence, since_ns, now_ns);
    row->cpu = rate(before.cpu_ns, row->now.cpu_ns, since_ns, now_ns) / 1e9;
    /* Counted when a step ends, so that a long one may count more than its interval. */
    row->wait = rank->group_ns
                    ? rate(before.group_wait_ns, row->now.group_wait_ns, since_ns, now_ns) / 1e9
                    : -1;
    row->wait = row->wait > 1 ? 1 : row->wait;
}

static void group_line(struct group *group, const status_reply *status, uint64_t now_ns)
{
    char part[4][COX_UNITS_SIZE], trouble[COX_HEALTH_SIZE];
    const CoxswainControl__ChannelStatus *channel =
        status->n_channels ? status->channels[COX_CHANNEL_EXECUTE] : NULL;
    group->health = cox_health_check(status, trouble) ? COX_TOP_WELL : COX_TOP_HELD;
    int used = snprintf(group->line, sizeof group->line, "%s: %" PRIu32 " rank%s, %s, %s, up %s",
                        group->name, status->rank_count, status->rank_count == 1 ? "" : "s",
                        status->engine_state ? status->engine_state : "?",
                        trouble[0] ? "degraded" : "healthy",
                        cox_units_duration(part[0], status->uptime_ns));
    if (channel && used < LINE_SIZE) {
        const double steps = rate(group->steps_ended, channel->ended, group->when_ns, now_ns);
        const CoxswainControl__PhaseStatus *phase =
            channel->n_phases > COX_PHASE_RANKS ? channel->phases[COX_PHASE_RANKS] : NULL;
        if (steps >= 0)
            used += snprintf(group->line + used, (size_t)(LINE_SIZE - used), ", %.1f/s", steps);
        if (used < LINE_SIZE && phase && phase->count)
            used += snprintf(group->line + used, (size_t)(LINE_SIZE - used), ", p50 %s p99 %s",
                             cox_units_duration(part[1], phase->p50_ns),
                             cox_units_duration(part[2], phase->p99_ns));
        if (used < LINE_SIZE)
            used += snprintf(group->line + used, (size_t)(LINE_SIZE - used),
                             ", %" PRIu32 " in flight", channel->in_flight);
        group->steps_ended = channel->ended;
    }
    if (status->serving && used < LINE_SIZE)
        used += snprintf(group->line + used, (size_t)(LINE_SIZE - used),
                         "; %" PRIu64 " prompts wait, %" PRIu64 " run", status->serving->waiting,
                         status->serving->running);
    if (trouble[0] && used < LINE_SIZE)
        snprintf(group->line + used, (size_t)(LINE_SIZE - used), "; %s", trouble);
    group->when_ns = now_ns;
}

int cox_top_table_put(struct cox_top_table *table, const char *name, const status_reply *status,
                      uint64_t now_ns)
{
    struct group *group = group_find(table, name);
    if (!group)
        return -ENOMEM;
    if (group->rank_count != status->n_ranks) {
        struct row *ranks = calloc(status->n_ranks + 1, sizeof *ranks);
        if (!ranks)
            return -ENOMEM;
        free(group->ranks);
        group->ranks = ranks;
        group->rank_count = (uint32_t)status->n_ranks;
    }
    for (uint32_t i = 0; i < group->rank_count; i++) {
        row_fill(&group->ranks[i], status->ranks[i], now_ns);
        group->ranks[i].group = (uint32_t)(group - table->groups);
    }
    group_line(group, status, now_ns);
    return 0;
}

int cox_top_table_fail(struct cox_top_table *table, const char *name, const char *reason)
{
    struct group *group = group_find(table, name);
    if (!group)
        return -ENOMEM;
    free(group->ranks);
    group->ranks = NULL;
    group->rank_count = 0;
    group->when_ns = 0;
    group->health = COX_TOP_DEAD;
    snprintf(group->line, sizeof group->line, "%s: %s", name, reason);
    for (char *c = group->line; *c; c++)
        if ((unsigned char)*c < ' ' || (unsigned char)*c > '~')
            *c = ' ';
    return 0;
}

/* ---- order ---- */

static double key_of(const struct row *row, enum cox_top_column sort)
{
    switch (sort) {
    case COX_TOP_STATE:
        return row->health == COX_TOP_WELL ? (double)row->age_ns : 1e30;
    case COX_TOP_STEPS:
        return -row->steps;
    case COX_TOP_P99:
        return (double)row->p99_ns;
    case COX_TOP_WAIT:
        return row->wait;
    case COX_TOP_CPU:
        return row->cpu;
    case COX_TOP_MEMORY:
        return (double)row->resident_bytes;
    case COX_TOP_DEATHS:
        return row->deaths;
    default:
        return 0;
    }
}

static int row_compare(const void *a, const void *b, void *context)
{
    const struct row *x = *(struct row *const *)a, *y = *(struct row *const *)b;
    const struct cox_top_table *table = context;
    const double kx = key_of(x, table->sort), ky = key_of(y, table->sort);
    int order = (kx < ky) - (kx > ky);
    if (order == 0)
        order = x->group != y->group ? (x->group < y->group ? -1 : 1)
                                     : (x->rank > y->rank) - (x->rank < y->rank);
    return table->reverse ? -order : order;
}

/* ---- text ---- */

static const char *percent(char *text, double share)
{
    if (share < 0)
        return "-";
    snprintf(text, COX_UNITS_SIZE, "%.0f%%", 100 * share);
    return text;
}

static void row_format(const struct cox_top_table *table, struct row *row)
{
    char part[7][COX_UNITS_SIZE];
    snprintf(part[0], sizeof part[0], "%.1f", row->steps);
    snprintf(row->line, sizeof row->line,
             "%4" PRIu32 " %-8s %6s %9" PRIu64 " %7s %6s %6s %5s %5s %8s %6" PRIu32 "  %-*s%s",
             row->rank, row->state, row->age_ns ? cox_units_duration(part[1], row->age_ns) : "-",
             row->now.sequence, row->steps < 0 ? "-" : part[0],
             row->execute_count ? cox_units_duration(part[2], row->p50_ns) : "-",
             row->execute_count ? cox_units_duration(part[3], row->p99_ns) : "-",
             percent(part[4], row->wait), percent(part[5], row->cpu),
             row->resident_bytes ? cox_units_bytes(part[6], row->resident_bytes) : "-", row->deaths,
             table->node_width, table->node_width && !row->node[0] ? "-" : row->node,
             table->groups[row->group].name);
}

void cox_top_table_format(struct cox_top_table *table, enum cox_top_column sort, bool reverse)
{
    table->sort = sort;
    table->reverse = reverse;
    table->row_count = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < table->group_count; i++)
        count += table->groups[i].rank_count;
    if (cox_reserve((void **)&table->rows, &table->row_capacity, count, sizeof *table->rows))
        return; /* without memory no rows are shown */
    table->node_width = 0;
    for (uint32_t i = 0; i < table->group_count; i++)
        for (uint32_t k = 0; k < table->groups[i].rank_count; k++) {
            struct row *row = &table->groups[i].ranks[k];
            const int width = row->node[0] ? (int)strlen(row->node) + 2 : 0;
            table->rows[table->row_count++] = row;
            table->node_width = width > table->node_width ? width : table->node_width;
        }
    if (table->node_width && table->node_width < NODE_HEADING)
        table->node_width = NODE_HEADING;
    if (table->row_count) /* there may be no memory for none */
        qsort_r(table->rows, table->row_count, sizeof *table->rows, row_compare, table);
    for (uint32_t i = 0; i < table->row_count; i++)
        row_format(table, table->rows[i]);
    snprintf(table->heading, sizeof table->heading,
             "%4s %-8s %6s %9s %7s %6s %6s %5s %5s %8s %6s  %-*s%s", "RANK", "STATE", "AGE",
             "SEQUENCE", "STEPS/S", "P50", "P99", "WAIT", "CPU", "MEMORY", "DEATHS",
             table->node_width, table->node_width ? "NODE" : "", "GROUP");
}

uint32_t cox_top_table_group_count(const struct cox_top_table *table)
{
    return table->group_count;
}

uint32_t cox_top_table_rank_count(const struct cox_top_table *table)
{
    return table->row_count;
}

const char *cox_top_table_group_line(const struct cox_top_table *table, uint32_t index)
{
    return table->groups[index].line;
}

const char *cox_top_table_heading(const struct cox_top_table *table)
{
    return table->heading;
}

const char *cox_top_table_rank_line(const struct cox_top_table *table, uint32_t index)
{
    return table->rows[index]->line;
}

enum cox_top_health cox_top_table_group_health(const struct cox_top_table *table, uint32_t index)
{
    return table->groups[index].health;
}

enum cox_top_health cox_top_table_rank_health(const struct cox_top_table *table, uint32_t index)
{
    return table->rows[index]->health;
}
