#include "options.h"

#include <ctype.h>
#include <string.h>

/* No options struct is nearly as large. A larger size means that it was not initialized, and it
 * must not be read to its end. */
#define SIZE_MAX_SANE 65536

static int fail_uninitialized(const char *type, size_t size, struct cox_error *err)
{
    char initializer[64] = "";
    for (size_t i = 0; type[i] && i + 1 < sizeof initializer; i++)
        initializer[i] = (char)toupper((unsigned char)type[i]);
    return cox_fail(
        err, COX_INVALID,
        "struct %s: size is %zu: not initialized with %s_INIT; start from that, then set fields",
        type, size, initializer);
}

int cox_options_convert(void *known, size_t known_size, const void *options, const char *type,
                        struct cox_error *err)
{
    size_t size = known_size;
    if (options)
        memcpy(&size, options, sizeof size);
    if (size < sizeof size || size > SIZE_MAX_SANE)
        return fail_uninitialized(type, size, err);
    const unsigned char *bytes = options;
    for (size_t i = known_size; i < size; i++)
        if (bytes[i])
            return cox_fail(
                err, COX_INVALID,
                "struct %s: built against a newer header than libcoxswain %s: fields beyond byte %zu are set; leave them at zero, or run with the newer library",
                type, cox_version(), known_size);
    const size_t copied = size < known_size ? size : known_size;
    memset(known, 0, known_size);
    if (options)
        memcpy(known, options, copied);
    memcpy(known, &known_size, sizeof known_size);
    return 0;
}

int cox_deadline_check(uint64_t deadline_ns, struct cox_error *err)
{
    return deadline_ns ? 0
                       : cox_fail(err, COX_INVALID,
                                  "deadline_ns is 0, and no deadline was meant by that: it is an "
                                  "absolute time of CLOCK_MONOTONIC, such as "
                                  "cox_deadline_after_ms(1000), or COX_DEADLINE_NEVER");
}
