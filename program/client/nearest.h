/*
 * nearest: what a word with a slip may have been meant to be.
 *
 * Threads: any. Blocks: nothing. If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_NEAREST_H
#define COX_PROGRAM_NEAREST_H

#include <stddef.h>

/* The words of a list that differ least from one that a user typed. */
struct cox_nearest {
    const char *typed;
    /* the best one so far, lent by its list; NULL: none is near enough */
    const char *best;
    size_t distance;
};

/* Compares one word of the list. Two letters may be wrong, missing or surplus, or change places;
 * one of a word of at most three letters; or the word begins with what was typed, as if one were
 * wrong. */
void cox_nearest_try(struct cox_nearest *nearest, const char *word);

#endif
