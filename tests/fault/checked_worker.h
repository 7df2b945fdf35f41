/*
 * checked_worker: a worker whose requests and replies have a number and a checksum, so that a reply
 * to another request, or one that was overwritten, is noticed. Processes and threads:
 * cox_worker_run's; the first request with `meddle` set starts one more thread, which overwrites
 * all memory it can reach until the process ends. If the process crashes: the line CHECKED_CRASH is
 * its last.
 */
#ifndef COX_TESTS_FAULT_CHECKED_WORKER_H
#define COX_TESTS_FAULT_CHECKED_WORKER_H

#include <coxswain/base.h>

#define CHECKED_CRASH "CRASHED"
#define CHECKED_FILL_SIZE 200

enum checked_order {
    CHECKED_ECHO = 0,
    CHECKED_MEDDLE,    /* and the rank named by `rank` begins to meddle, with `seed` */
    CHECKED_OVERCOUNT, /* and the rank named says that the highest possible sequence is published on
                          this channel */
};

struct checked_request {
    /* of the request: another one for each */
    uint64_t number;
    uint32_t order;
    uint32_t rank;
    uint64_t seed;
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
