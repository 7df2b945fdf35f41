#include "paragraph.h"

#include "collectives.h"
#include "sentence.h"

#include <errno.h>
#include <inttypes.h>
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
    if (!places || !text || cox_collectives_append(stacks, text, COX_STACKS_PARAGRAPH_SIZE)) {
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
        cox_sentence_append(text, COX_STACKS_PARAGRAPH_SIZE, "%s", i ? "; " : "");
        cox_sentence_append_ranks(text, COX_STACKS_PARAGRAPH_SIZE, &places[i].ranks);
        cox_sentence_append(text, COX_STACKS_PARAGRAPH_SIZE, ": %.*s", (int)places[i].length,
                            places[i].summary);
        if (places[i].age_ns)
            cox_sentence_append(text, COX_STACKS_PARAGRAPH_SIZE, ", %.1f s",
                                (double)places[i].age_ns / 1e9);
        /* One rank is somewhere else than all the others: they may wait for it. */
        if (i == 1 && count == 2 && places[0].count == 1 && places[1].count > 1)
            cox_sentence_append(text, COX_STACKS_PARAGRAPH_SIZE, ", and may wait for it");
    }
    if (count > shown)
        cox_sentence_append(text, COX_STACKS_PARAGRAPH_SIZE,
                            "; the others at %" PRIu32 " more places", count - shown);
    free(places);
    stacks->paragraph = text;
    return 0;
}
