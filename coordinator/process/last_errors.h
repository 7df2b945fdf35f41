/*
 * last_errors: what each rank said last that went wrong: a reply that was an error or made no
 * sense, or a fault it reported. Kept until the next one, also over a restart of the rank.
 *
 * Threads: any; the lock is held for the copy of one text.
 * Ownership: all of it is inside, the texts of fixed size.
 * Blocks: nothing, and allocates nothing.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_LAST_ERRORS_H
#define COX_COORDINATOR_LAST_ERRORS_H

#include "channel/base/base.h"

#include <pthread.h>

#define COX_LAST_ERROR_SIZE 512
/* In place of a rank: some rank said it, and did not say which it is. */
#define COX_LAST_ERROR_UNKNOWN COX_RANK_COUNT_MAX

struct cox_last_errors {
    pthread_mutex_t lock;
    struct {
        /* 0: none */
        uint64_t when_ns;
        char text[COX_LAST_ERROR_SIZE];
    } ranks[COX_RANK_COUNT_MAX + 1]; /* the last: COX_LAST_ERROR_UNKNOWN */
};

void cox_last_errors_init(struct cox_last_errors *last_errors);
void cox_last_errors_deinit(struct cox_last_errors *last_errors);

/* What does not fit is cut off, at a character. */
void cox_last_errors_add(struct cox_last_errors *last_errors, uint32_t rank, const char *format,
                         ...) __attribute__((format(printf, 3, 4)));
/* The last one of a rank, into buffer (may be cut off). Returns when it came; 0: there is none, and
 * buffer is empty. */
uint64_t cox_last_errors_get(struct cox_last_errors *last_errors, uint32_t rank, char *buffer,
                             size_t buffer_size);

#endif
