/*
 * meddler: writes seeded random bytes over the regions of a named group, as any process of the same
 * user can.
 *
 * What it leaves alone is what P10 leaves out: the semaphores, and the size of files. Of the reply
 * tags it leaves the lowest byte: with the right byte there, and the right `done`, an old reply is
 * forged, which no check can see.
 *
 * Threads: one per struct; run may be on a thread of a worker.
 * Ownership: the caller owns the struct; detach unmaps.
 * Blocks: run until its stop.
 * If the process dies: nothing is left; what it wrote stays written.
 */
#ifndef COX_TESTS_FAULT_MEDDLER_H
#define COX_TESTS_FAULT_MEDDLER_H

#include "channel/shm/control.h"

#include <stdatomic.h>

enum meddler_target {
    MEDDLE_CONTROL = 1,
    MEDDLE_RESPONSES = 2,
    MEDDLE_REQUESTS = 4,
    MEDDLE_PAYLOADS = MEDDLE_RESPONSES | MEDDLE_REQUESTS,
    MEDDLE_ALL = 7,
};

/* How a seed behaves: what it writes over, how much at a time, how often. */
struct meddler_temper {
    unsigned targets;
    /* writes in a row */
    uint32_t burst;
    /* between bursts; 0: none */
    uint64_t pause_ns;
    /* bytes of one write; 1: single bytes */
    uint32_t length_max;
    /* leaves the abort word alone, which would end everything at once */
    bool spares_abort;
};

struct meddler {
    /* of the random numbers */
    uint64_t state;
    struct meddler_temper temper;
    struct cox_geometry geometry;
    struct cox_region control;
    struct cox_region requests[COX_TWO_WAY_COUNT];
    struct cox_region responses[COX_CHANNEL_COUNT];
};

struct meddler_temper meddler_temper(uint64_t seed);
/* Maps everything of the group before any write: the geometry is read here. Returns 0 or the error
 * of the attach. */
int meddler_attach(struct meddler *meddler, const char *name, uint64_t seed, struct cox_error *err);
void meddler_detach(struct meddler *meddler);
/* Writes until fd is readable or at its end. */
void meddler_run(struct meddler *meddler, int fd);

#endif
