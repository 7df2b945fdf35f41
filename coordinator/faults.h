/*
 * faults: the error channel of a group: any rank reports, one thread of the coordinator listens.
 *
 * The channel has one slot for all ranks, guarded by one token. A rank that dies with the token in
 * its hand has said so in its line (REPLYING on the error channel) before it waited for it; the
 * coordinator then puts a token in place. That may be one too many, when the dead rank was still
 * waiting: before the slot is freed again, whatever tokens lie there are taken. While ranks compete for the
 * slot a surplus may go from hand to hand for a while; the worst that it does is that two write
 * at once, and a torn report is dropped.
 *
 * Threads: start and stop from one thread; buried from the supervisor's hook. The hook `report`
 *   runs on the fault thread.
 * Ownership: the caller owns struct cox_faults; channel and collectors are borrowed.
 * Blocks: stop joins the thread, which waits for nobody but a running hook.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_FAULTS_H
#define COX_COORDINATOR_FAULTS_H

#include "collect.h"

struct cox_faults {
    struct cox_channel *channel;
    struct cox_collector
        *collectors; /* COX_TWO_WAY_COUNT of them: who is told that an answer has failed */
    struct cox_log log;
    /* A report about no request. rank is -1 when the report names none of the group. text is lent. */
    void (*report)(void *context, int rank, const char *text);
    void *context;

    pthread_t thread;
    bool threaded;
    _Atomic bool stopping;
    uint8_t *copy;
    struct cox_arena arena;
};

/* Returns 0 or -errno; nothing is left unless 0. channel, collectors, log, report and context are
 * set by the caller before. */
int cox_faults_start(struct cox_faults *faults);
void cox_faults_stop(struct cox_faults *faults); /* idempotent; a zeroed one is fine */
/* A rank is dead: frees the slot if it may have held it. */
void cox_faults_bury(struct cox_faults *faults, uint32_t rank);

#endif
