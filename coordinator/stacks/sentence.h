/*
 * sentence: parts of a text of fixed size.
 *
 * Threads: any. Blocks: nothing. Ownership: the text is the caller's.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_SENTENCE_H
#define COX_COORDINATOR_SENTENCE_H

#include <coxswain/base.h>

#include <stddef.h>

/* To a text of size bytes, with its zero; what does not fit is cut. */
void cox_sentence_append(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* "1", "0,2-3". */
void cox_sentence_append_set(char *text, size_t size, const struct cox_rank_set *ranks);
/* "rank 1", "ranks 0,2-3". */
void cox_sentence_append_ranks(char *text, size_t size, const struct cox_rank_set *ranks);

/* A turn per rank of the set: without an instruction of the machine for it, a builtin is a call. */
static inline uint32_t cox_rank_set_count(const struct cox_rank_set *ranks)
{
    uint32_t count = 0;
    for (int i = 0; i < COX_RANK_COUNT_MAX / 64; i++)
        for (uint64_t word = ranks->words[i]; word; word &= word - 1)
            count++;
    return count;
}

#endif
