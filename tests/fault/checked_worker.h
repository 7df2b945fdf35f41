/*
 * checked_worker: a worker whose requests and replies have a number and a checksum, so that a reply
 * to another request, or one that was overwritten, is noticed. Processes and threads:
 * cox_worker_run's. If the process crashes: the line CHECKED_CRASH is its last.
 */
#ifndef COX_TESTS_FAULT_CHECKED_WORKER_H
#define COX_TESTS_FAULT_CHECKED_WORKER_H

#include <coxswain/base.h>

#define CHECKED_CRASH "CRASHED"
#define CHECKED_FILL_SIZE 200

struct checked_request {
    /* of the request: another one for each */
    uint64_t number;
    uint8_t fill[CHECKED_FILL_SIZE];
    /* over all before it */
    uint64_t checksum;
};

struct checked_reply {
    uint64_t number;
    uint64_t rank;
    uint8_t fill[CHECKED_FILL_SIZE];
    uint64_t checksum;
};

uint64_t checked_sum(const void *bytes, size_t size);

int checked_worker_main(int argc, char **argv);

#endif
