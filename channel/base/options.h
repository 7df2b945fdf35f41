/*
 * options: what callers pass: structs that begin with their size (base.h), also of other releases,
 *   and deadlines.
 *
 * Threads: any. Blocks: nothing. If the process dies: nothing is left.
 *
 * New fields are added at the end, and zero must mean the previous behaviour. The struct must end
 * without padding: otherwise a new field could lie in bytes that older callers count in the size
 * but leave uninitialized. tests/unit/sized_options_test.c checks that.
 */
#ifndef COX_CHANNEL_OPTIONS_H
#define COX_CHANNEL_OPTIONS_H

#include <coxswain/base.h>

#include <string.h>

/* The slow path of cox_options_copy: callers of other releases, and NULL. */
int cox_options_convert(void *known, size_t known_size, const void *options, const char *type,
                        struct cox_error *err);

/* For functions that need a deadline: 0 is one that the caller has forgotten.
 * Returns
 *   0
 *   COX_INVALID: it is 0
 */
int cox_deadline_check(uint64_t deadline_ns, struct cox_error *err);

/* Copies options to known, which has the known_size bytes that this library knows. Fields beyond
 * options->size become zero. options NULL: all are zero. type: "cox_pool_options", for err.
 * Returns
 *   0
 *   COX_INVALID: the size is 0 or impossible, or fields beyond known_size are not zero
 */
static inline int cox_options_copy(void *known, size_t known_size, const void *options,
                                   const char *type, struct cox_error *err)
{
    size_t size = 0;
    if (options)
        memcpy(&size, options, sizeof size);
    if (size != known_size)
        return cox_options_convert(known, known_size, options, type, err);
    memcpy(known, options, known_size); /* the usual case, once per submit */
    return 0;
}

#endif
