/*
 * last_errors: the last failure of each rank: a reply that was an error or invalid, or a fault it
 * reported. Kept until the next one, also over a restart of the rank.
 *
 * Threads: any; the lock is held while one text is copied.
 * Ownership: all memory is inside; texts have a fixed size.
 * Blocks: nothing, and allocates nothing.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_LAST_ERRORS_H
#define COX_COORDINATOR_LAST_ERRORS_H

#include <coxswain/base.h>

#include <pthread.h>

#define COX_LAST_ERROR_SIZE 512
/* In place of a rank: the report did not name one. */
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

/* Records a failure. A text that does not fit is cut off between characters. */
void cox_last_errors_add(struct cox_last_errors *last_errors, uint32_t rank, const char *format,
                         ...) __attribute__((format(printf, 3, 4)));
/* Copies the last failure of a rank to buffer (possibly cut off). Returns its time; 0: there is
 * none, and buffer is empty. */
uint64_t cox_last_errors_get(struct cox_last_errors *last_errors, uint32_t rank, char *buffer,
                             size_t buffer_size);

#endif
