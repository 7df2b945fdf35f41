#include "sentence.h"

#include "channel/base/idioms.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void cox_sentence_append(char *text, size_t size, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(text + used, size - used, format, args);
    va_end(args);
    if (length >= (int)(size - used))
        cox_text_trim(text);
}

void cox_sentence_append_set(char *text, size_t size, const struct cox_rank_set *ranks)
{
    const char *separator = "";
    for (uint32_t first = 0; first < COX_RANK_COUNT_MAX; first++) {
        if (!cox_rank_set_has(ranks, first))
            continue;
        uint32_t last = first;
        while (last + 1 < COX_RANK_COUNT_MAX && cox_rank_set_has(ranks, last + 1))
            last++;
        cox_sentence_append(text, size, "%s%" PRIu32, separator, first);
        if (last > first)
            cox_sentence_append(text, size, "-%" PRIu32, last);
        separator = ",";
        first = last;
    }
}

void cox_sentence_append_ranks(char *text, size_t size, const struct cox_rank_set *ranks)
{
    cox_sentence_append(text, size, cox_rank_set_count(ranks) == 1 ? "rank " : "ranks ");
    cox_sentence_append_set(text, size, ranks);
}
