#include "paragraph.h"

#include "channel/base/idioms.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ranks whose summaries are equal, but for whether a thread has a processor at the moment: one that
 * waits and looks now and then is where the others are that wait. */
struct place {
    const char *summary;
    /* of it; less than all where the rest differs */
    size_t length;
    struct cox_rank_set ranks;
    uint32_t count;
    uint64_t age_ns;
};

/* Without a state that comes and goes, as thread_facts.c of the program has it. */
static size_t place_length(const char *summary)
{
    static const char *const states[] = {", running", ", runnable, but on no processor"};
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        const char *state = strstr(summary, states[i]);
        if (state && strstr(summary, " in "))
            return (size_t)(state - summary);
    }
    return strlen(summary);
}

static void append(char *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(char *buffer, const char *format, ...)
{
    const size_t used = strlen(buffer);
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(buffer + used, COX_STACKS_PARAGRAPH_SIZE - used, format, args);
    va_end(args);
    if (length >= (int)(COX_STACKS_PARAGRAPH_SIZE - used))
        cox_text_trim(buffer);
}

static void append_ranks(char *buffer, const struct place *place)
{
    const char *separator = place->count == 1 ? "rank " : "ranks ";
    for (uint32_t first = 0; first < COX_RANK_COUNT_MAX; first++) {
        if (!cox_rank_set_has(&place->ranks, first))
            continue;
        uint32_t last = first;
        while (last + 1 < COX_RANK_COUNT_MAX && cox_rank_set_has(&place->ranks, last + 1))
            last++;
        append(buffer, "%s%" PRIu32, separator, first);
        if (last > first)
            append(buffer, "-%" PRIu32, last);
        separator = ",";
        first = last;
    }
}

/* Fewer ranks first; of as many, the lower rank, which came first. */
static void places_sort(struct place *places, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t k = i; k > 0 && places[k].count < places[k - 1].count; k--) {
            const struct place other = places[k];
            places[k] = places[k - 1];
            places[k - 1] = other;
        }
}

int cox_stacks_paragraph(struct cox_stacks *stacks)
{
    struct place *places = calloc(stacks->count + 1, sizeof *places);
    char *text = calloc(1, COX_STACKS_PARAGRAPH_SIZE);
    uint32_t count = 0, shown;
    if (!places || !text) {
        free(places);
        free(text);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < stacks->count; i++) {
        const struct cox_rank_stacks *rank = &stacks->ranks[i];
        const size_t length = place_length(rank->summary);
        uint32_t p = 0;
        while (p < count && (place_length(places[p].summary) != length ||
                             strncmp(places[p].summary, rank->summary, length) != 0))
            p++;
        if (p == count)
            places[count++] =
                (struct place){.summary = rank->summary, .length = strlen(rank->summary)};
        if (strcmp(places[p].summary, rank->summary) != 0)
            places[p].length = length;
        cox_rank_set_add(&places[p].ranks, rank->rank);
        places[p].count++;
        places[p].age_ns = rank->age_ns > places[p].age_ns ? rank->age_ns : places[p].age_ns;
    }
    places_sort(places, count);
    shown = count < COX_STACKS_PLACE_MAX ? count : COX_STACKS_PLACE_MAX;
    for (uint32_t i = 0; i < shown; i++) {
        append(text, "%s", i ? "; " : "");
        append_ranks(text, &places[i]);
        append(text, ": %.*s", (int)places[i].length, places[i].summary);
        if (places[i].age_ns)
            append(text, ", %.1f s", (double)places[i].age_ns / 1e9);
        /* One rank is somewhere else than all the others: they may wait for it. */
        if (i == 1 && count == 2 && places[0].count == 1 && places[1].count > 1)
            append(text, ", and may wait for it");
    }
    if (count > shown)
        append(text, "; the others at %" PRIu32 " more places", count - shown);
    free(places);
    stacks->paragraph = text;
    return 0;
}
