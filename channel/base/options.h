/*
 * options: structs that begin with their size (base.h), as a caller of another release gives them.
 *
 * Threads: any. Blocks: nothing. If the process dies: nothing is left.
 *
 * A field that is added goes to the end, and its zero means what was so before. The struct before
 * must end without padding: otherwise the field would lie in bytes that callers of that release
 * count, and leave as they are. tests/unit/sized_options_test.c checks the ends.
 */
#ifndef COX_CHANNEL_OPTIONS_H
#define COX_CHANNEL_OPTIONS_H

#include "base.h"

#include <string.h>

/* cox_options_copy for callers of other releases, and for none. */
int cox_options_convert(void *known, size_t known_size, const void *options, const char *type,
                        struct cox_error *err);

/* Copies options to known, which has the known_size bytes that this library knows. Fields beyond
 * options->size become zero. options NULL: all are zero. type: "cox_pool_options", for err.
 * Returns
 *   0
 *   COX_INVALID: the size is 0 or makes no sense, or fields beyond known_size are not zero */
static inline int cox_options_copy(void *known, size_t known_size, const void *options,
                                   const char *type, struct cox_error *err)
{
    size_t size = 0;
    if (options)
        memcpy(&size, options, sizeof size);
    if (size != known_size)
        return cox_options_convert(known, known_size, options, type, err);
    memcpy(known, options, known_size); /* of most callers, also in every submit */
    return 0;
}

#endif
