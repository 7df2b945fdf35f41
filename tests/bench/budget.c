#include "budget.h"

#include <string.h>

#include "cells.h"
#include "measure.h"

/* In the order in which the sections are measured; "ranks" twice. Most of it is what starting the
 * processes takes, some thousand in all. */
static const struct {
    const char *section;
    unsigned weight;
} shares[] = {
    {"bytes", 30}, {"packed", 8},      {"call", 2},    {"curves", 12},   {"one", 1},
    {"steps", 7},  {"depth", 3},       {"python", 26}, {"rate", 6},      {"idle", 2},
    {"start", 4},  {"allocations", 2}, {"deaths", 3},  {"deadlines", 6}, {"replace", 4},
    {"ranks", 5},  {"pull", 2},        {"model", 7},
};
#define SHARE_COUNT (sizeof shares / sizeof *shares)

static uint64_t share_of(uint64_t now_ns, uint64_t end_ns, uint64_t part, uint64_t whole)
{
    if (end_ns == UINT64_MAX)
        return UINT64_MAX;
    return end_ns > now_ns ? now_ns + (end_ns - now_ns) / whole * part : now_ns;
}

struct budget budget_new(size_t seconds)
{
    const uint64_t end_ns =
        seconds ? measure_now_ns() + seconds * UINT64_C(1000000000) : UINT64_MAX;
    return (struct budget){.run_ns = end_ns, .section_ns = end_ns, .cell_ns = end_ns};
}

void budget_section(struct budget *budget, const char *section, const char *chosen)
{
    uint64_t part = 1, whole = 0;
    bool found = false;
    for (size_t i = 0; i < SHARE_COUNT; i++) {
        if (strcmp(shares[i].section, section) == 0) {
            found = true;
            part = shares[i].weight;
        }
        if (found && name_chosen(chosen, shares[i].section))
            whole += shares[i].weight;
    }
    budget->section_ns = share_of(measure_now_ns(), budget->run_ns, part, whole ? whole : 1);
    budget_cell(budget, 1);
}

void budget_cell(struct budget *budget, size_t left)
{
    budget->cell_begin_ns = measure_now_ns();
    budget->cell_ns = share_of(budget->cell_begin_ns, budget->section_ns, 1, left ? left : 1);
}

bool budget_is_over(const struct budget *budget)
{
    return budget->cell_ns != UINT64_MAX && measure_now_ns() >= budget->cell_ns;
}

bool budget_may_start(const struct budget *budget)
{
    return budget->cell_ns == UINT64_MAX || measure_now_ns() - budget->cell_begin_ns <
                                                (budget->cell_ns - budget->cell_begin_ns) / 4 * 3;
}
