/*
 * error_channel: any rank of a group can report an error on this channel; one thread of the
 * coordinator reads it.
 *
 * In a sealed group each rank has its own slot, and a counter in its line of what it has reported
 * there (sealed.h). In a named group the channel has one slot for all ranks, guarded by one token.
 * A rank states in its line that it waits for the token (TAKEN) or holds it (REPLYING). If it dies
 * in either state, the token may be anywhere: not yet taken, held, or returned. Two tokens would
 * let two ranks overwrite each other's report, so the coordinator searches for the token first. It
 * is not lost while a living rank holds it, while reports arrive, or while it can be seen. If none
 * of that was observed for one slice, the coordinator posts a new token, and reports what the dead
 * rank had written.
 *
 * Threads: start and stop on one thread; note_death on that of the supervisor's hook. The hook
 *   `report` runs on the thread of the error channel.
 * Ownership: the caller owns struct cox_error_channel; channel and collectors are borrowed.
 * Blocks: stop joins the thread, which waits only for a running hook.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_ERROR_CHANNEL_H
#define COX_COORDINATOR_ERROR_CHANNEL_H

#include "fault_reports.h"
#include "collector.h"

struct cox_error_channel {
    struct cox_channel *channel;
    /* COX_TWO_WAY_COUNT of them; they are woken when a report says that a reply has failed */
    struct cox_collector *collectors;
    /* of the group's ranks */
    const struct cox_rank *ranks;
    struct cox_log log;
    /* A report that belongs to no request. rank is -1 if unknown: the report names none, or none of
     * the group. text is lent. */
    void (*report)(void *context, int rank, const char *text);
    void *context;

    pthread_t thread;
    bool threaded;
    _Atomic bool stopping;
    /* set by the thread; stop waits on it */
    _Atomic uint32_t ended;
    /* tokens posted by note_death or restore, to distinguish them from those of ranks */
    _Atomic uint32_t deaths;
    /* restore waits on it until the thread has restored the slot */
    _Atomic uint32_t restoring;
    /* named: the slot */
    struct cox_fault_reports reports;
    pthread_mutex_t heard_lock;
    /* sealed: reports taken so far from each rank */
    uint64_t heard[COX_RANK_COUNT_MAX];
    /* the thread's: searches for the token that are still to be made; 0: it is not lost */
    uint32_t doubt;
    uint8_t *copy;
    struct cox_arena arena;
};

/* The caller sets channel, collectors, ranks, log, report and context before. Returns 0 or -errno;
 * on failure nothing is left. */
int cox_error_channel_start(struct cox_error_channel *errors);
void cox_error_channel_stop(
    struct cox_error_channel *errors); /* idempotent; a zeroed one is fine */
/* A rank is about to be replaced, and its line was reset: its state counts again. */
void cox_error_channel_reset_rank(struct cox_error_channel *errors, uint32_t rank);
/* For legacy ranks, which do not state which process holds the token, when every rank is dead and
 * that was handled. On return the slot and its token are as at the start, and its content was
 * reported. Returns 0; COX_TIMEOUT: a running hook did not return in time. */
int cox_error_channel_restore(struct cox_error_channel *errors, uint64_t deadline_ns);
/* A rank is dead. If it held the token, the slot is freed within two slices. */
void cox_error_channel_note_death(struct cox_error_channel *errors, uint32_t rank);

#endif
