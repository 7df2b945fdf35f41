/*
 * machine: on what a run was made: the machine, the commit, and how much of the machine something
 * else had meanwhile.
 *
 * One thread. Blocks while git runs. If the process dies: nothing is left.
 */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include <jansson.h>

/* As a run begins. Orphans of what it starts become children of this process, so that their time is
 * known. folder: of this program, inside the checkout, or not: then there is no commit. */
json_t *machine_begin(const char *folder);
/* As it ends: adds seconds, the load averages, and the shares of all processors' time that went to
 * other programs ("elsewhere") and to other guests of the host ("steal"). Reaps what has ended. */
void machine_end(json_t *machine);
/* Prints what both have added. */
void machine_print(const json_t *machine);

#endif
