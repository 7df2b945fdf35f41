/*
 * error_channel: any rank of a group reports an error on it, one thread of the coordinator listens.
 *
 * In a sealed group every rank has a slot of its own, and its line counts what it has reported
 * there (sealed.h). Elsewhere the channel has one slot for all ranks, guarded by one token. A rank
 * says in its line (of the error channel) that it waits for the token (TAKEN) or has it (REPLYING).
 * When it dies in either state nobody knows where the token is: it may not have got it yet, or have
 * given it back already. One too many would let two ranks write over each other's report, so the
 * token is looked for: while a living rank has it, or reports arrive, or it lies there, it is not
 * lost; when that was so at no look for a slice, the coordinator puts another in its place, and
 * passes on what the dead rank had written.
 *
 * Threads: start and stop from one thread; note_death from the supervisor's hook. The hook `report`
 *   runs on the thread of the error channel.
 * Ownership: the caller owns struct cox_error_channel; channel and collectors are borrowed.
 * Blocks: stop joins the thread, which waits for nobody but a running hook.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_ERROR_CHANNEL_H
#define COX_COORDINATOR_ERROR_CHANNEL_H

#include "collect.h"

struct cox_error_channel {
    struct cox_channel *channel;
    /* COX_TWO_WAY_COUNT of them: who is told that a reply has failed */
    struct cox_collector *collectors;
    /* of the group's ranks */
    const struct cox_rank *ranks;
    struct cox_log log;
    /* A report about no request. rank is -1 where it is unknown: the report names none, or none
     * of the group. text is lent. */
    void (*report)(void *context, int rank, const char *text);
    void *context;

    pthread_t thread;
    bool threaded;
    _Atomic bool stopping;
    /* of the thread; stop sleeps on it */
    _Atomic uint32_t ended;
    /* tokens posted by note_death or restore, to be told from a rank's */
    _Atomic uint32_t deaths;
    /* restore sleeps on it until the thread has done so */
    _Atomic uint32_t restoring;
    pthread_mutex_t heard_lock;
    /* sealed: reports of the rank that were taken */
    uint64_t heard[COX_RANK_COUNT_MAX];
    /* of the thread: looks for the token that are still to be made; 0: it is not lost */
    uint32_t doubt;
    uint8_t *copy;
    struct cox_arena arena;
};

/* Returns 0 or -errno; nothing is left unless 0. channel, collectors, ranks, log, report and
 * context are set by the caller before. */
int cox_error_channel_start(struct cox_error_channel *errors);
void cox_error_channel_stop(
    struct cox_error_channel *errors); /* idempotent; a zeroed one is fine */
/* A rank is about to be started again, its line is as at the start: what it holds counts again. */
void cox_error_channel_reset_rank(struct cox_error_channel *errors, uint32_t rank);
/* Legacy ranks, which do not say who has the token: every rank is dead and told of. On return the
 * slot and its token are as at the start, and what was in it is told. Returns 0; COX_TIMEOUT: the
 * hook that runs did not return in time. */
int cox_error_channel_restore(struct cox_error_channel *errors, uint64_t deadline_ns);
/* A rank is dead: the slot is freed within two slices if it died with it. */
void cox_error_channel_note_death(struct cox_error_channel *errors, uint32_t rank);

#endif
