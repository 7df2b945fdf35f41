/*
 * kinds: what can be measured: how each subject is started. A peer is a program beside this one,
 * and optional.
 *
 * Constant. Nothing blocks.
 */
#ifndef BENCH_KINDS_H
#define BENCH_KINDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kind {
    const char *name;
    /* in the folder of this one; NULL: this one */
    const char *program;
    /* NULL-terminated, before the options that every subject has */
    const char *words[8];
    /* some of its processes are on a processor when nothing is asked */
    bool spins_idle;
    /* its processes take seconds to start: those of one name go through all rows (hosts.h) */
    const char *host;
    /* of those: ranks of a row, at most; 0: as many as the run has */
    uint32_t world;
    /* of a request; 0: any */
    size_t bytes_max;
    /* in place of the cell's; 0: the cell's */
    size_t bytes, reply_bytes;
};

/* NULL: there is none of that name. */
const struct kind *kind_find(const char *name);

/* Lists of names, each ends with NULL. */
/* All that move opaque bytes, and at their end the floors again. */
extern const char *const kinds_of_bytes[];
extern const char
    *const kinds_of_curves[]; /* the floors and our two, for what is drawn against N or size */
extern const char *const kinds_of_one[];   /* N = 1, spinning or not */
extern const char *const kinds_of_loops[]; /* beside busy loops */
extern const char *const kinds_of_ring[];
extern const char *const kinds_of_copies[];
extern const char *const kinds_of_steps[];
extern const char *const kinds_of_depth[];
extern const char *const kinds_of_call[];
extern const char *const kinds_of_allocations[];
extern const char *const kinds_of_python[];
extern const char *const kinds_of_objects[];
extern const char *const kinds_of_arrays[];
extern const char *const kinds_of_columns[];
extern const char *const kinds_of_rate[];
extern const char *const kinds_of_idle[];
extern const char *const peers_that_sleep[];
extern const char *const peers_that_spin[];

#endif
