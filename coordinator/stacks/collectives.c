#include "collectives.h"

#include "sentence.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE "torch: group "
#define NAME_SIZE 64

/* What a rank says of a process group. */
struct line {
    char group[NAME_SIZE], what[NAME_SIZE], operation[NAME_SIZE];
    uint64_t entered;
    /* 0: in none */
    uint64_t waits;
    uint32_t rank;
};

/* Of a group: the first collective that a rank waits in. */
struct verdict {
    const struct line *first;
    /* They have not entered it; wait in it, or in another one of its number; have completed it. */
    struct cox_rank_set missing, waiting, other, past;
    const char *other_operation;
};

static bool line_parse(const char *text, struct line *ret_line)
{
    static const char format[] =
        LINE "%63[^ ] (%63[^)]): entered %" SCNu64 ", waits in %63[^ \n]%n";
    int end = 0;
    if (sscanf(text, format, ret_line->group, ret_line->what, &ret_line->entered,
               ret_line->operation, &end) != 4 ||
        !end)
        return false;
    ret_line->waits = text[end] == ' ' ? strtoull(text + end + 1, NULL, 10) : 0;
    return true;
}

/* Returns how many there are, at most max. */
static uint32_t lines_parse(const struct cox_rank_stacks *rank, struct line *lines, uint32_t max)
{
    uint32_t count = 0;
    for (const char *at = rank->text; count < max && at && *at;) {
        if (strncmp(at, LINE, strlen(LINE)) == 0 && line_parse(at, &lines[count]))
            lines[count++].rank = rank->rank;
        at += strcspn(at, "\n");
        at += *at == '\n';
    }
    return count;
}

static void verdict_make(const struct line *lines, uint32_t count, const char *group,
                         struct verdict *ret_verdict)
{
    struct verdict verdict = {0};
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(lines[i].group, group) == 0 && lines[i].waits &&
            (!verdict.first || lines[i].waits < verdict.first->waits))
            verdict.first = &lines[i];
    for (uint32_t i = 0; verdict.first && i < count; i++) {
        const struct line *line = &lines[i];
        if (strcmp(line->group, group) != 0)
            continue;
        if (line->entered < verdict.first->waits) {
            cox_rank_set_add(&verdict.missing, line->rank);
        } else if (line->waits != verdict.first->waits) {
            cox_rank_set_add(&verdict.past, line->rank);
        } else if (strcmp(line->operation, verdict.first->operation) != 0) {
            cox_rank_set_add(&verdict.other, line->rank);
            verdict.other_operation = line->operation;
        } else {
            cox_rank_set_add(&verdict.waiting, line->rank);
        }
    }
    *ret_verdict = verdict;
}

static void verdict_append(const struct verdict *verdict, char *text, size_t size)
{
    const struct line *first = verdict->first;
    const uint32_t missing_count = cox_rank_set_count(&verdict->missing);
    const uint32_t other_count = cox_rank_set_count(&verdict->other);
    const uint32_t past_count = cox_rank_set_count(&verdict->past);
    char name[2 * NAME_SIZE] = "", what[4 * NAME_SIZE];
    /* The default group has a name that says nothing, and new_group gives no better one unasked. */
    if (strcmp(first->what, "default_pg") != 0)
        snprintf(name, sizeof name, " of process group %s",
                 strcmp(first->what, "undefined") == 0 || strcmp(first->what, "-") == 0
                     ? first->group
                     : first->what);
    snprintf(what, sizeof what, "%s %" PRIu64 "%s", first->operation, first->waits, name);
    cox_sentence_append(text, size, "PyTorch: ");
    if (missing_count) {
        cox_sentence_append_ranks(text, size, &verdict->missing);
        cox_sentence_append(text, size, " never entered %s; ", what);
    }
    if (other_count) {
        cox_sentence_append_ranks(text, size, &verdict->other);
        if (other_count == 1)
            cox_sentence_append(text, size, " waits in %s %" PRIu64 "; ", verdict->other_operation,
                                first->waits);
        else
            cox_sentence_append(text, size, " wait in others of number %" PRIu64 "; ",
                                first->waits);
    }
    if (past_count) {
        cox_sentence_append_ranks(text, size, &verdict->past);
        cox_sentence_append(text, size, "%s completed %s; ", past_count == 1 ? " has" : " have",
                            what);
    }
    cox_sentence_append_ranks(text, size, &verdict->waiting);
    cox_sentence_append(text, size, " wait%s in %s; ",
                        cox_rank_set_count(&verdict->waiting) == 1 ? "s" : "",
                        missing_count + past_count ? "it" : what);
}

int cox_collectives_append(const struct cox_stacks *stacks, char *text, size_t size)
{
    struct line *lines =
        calloc((size_t)stacks->count * COX_COLLECTIVES_GROUP_MAX + 1, sizeof *lines);
    uint32_t count = 0, told = 0;
    if (!lines)
        return -ENOMEM;
    for (uint32_t i = 0; i < stacks->count; i++)
        count += lines_parse(&stacks->ranks[i], lines + count, COX_COLLECTIVES_GROUP_MAX);
    for (int missing = 1; missing >= 0; missing--)
        for (uint32_t i = 0; i < count && told < COX_COLLECTIVES_TOLD_MAX; i++) {
            struct verdict verdict;
            uint32_t earlier = 0;
            while (strcmp(lines[earlier].group, lines[i].group) != 0)
                earlier++;
            if (earlier < i)
                continue;
            verdict_make(lines, count, lines[i].group, &verdict);
            if (!verdict.first || (cox_rank_set_count(&verdict.missing) > 0) != missing)
                continue;
            verdict_append(&verdict, text, size);
            told++;
        }
    free(lines);
    return 0;
}
