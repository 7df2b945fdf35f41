/*
 * incidents: when the stacks of a group are gathered, and the last ones that were.
 *
 * A request that has spent most of its deadline (cox_incidents_due) is a suspect: a thread gathers
 * the stacks of all ranks, so that they are there when the deadline passes, and the error has them
 * in a sentence. The deadline itself never waits: if they are not there yet, the error leaves
 * without. One incident has one gathering; the next may begin COX_INCIDENT_PAUSE_MS later.
 *
 *   IDLE -> ASKED -> GATHERING -> IDLE
 *
 * What was gathered is for the log, or the crash directory, if the request then fails; if it
 * succeeds, nothing is said.
 *
 * Threads: open and close by the executor; the rest any. The thread is started at the first
 *   suspect: a healthy group has none.
 * Ownership: the executor's. targets is called on the gathering thread, and by gather.
 * Blocks: suspect and failed: nothing but a lock that is never held over a gathering; gather and
 *   await: until their deadlines; close: until the helpers are killed.
 * If the process dies: as in stacks.h.
 */
#ifndef COX_COORDINATOR_INCIDENTS_H
#define COX_COORDINATOR_INCIDENTS_H

#include "stacks.h"

#include <pthread.h>

#define COX_INCIDENT_PAUSE_MS 10000
/* Before a deadline, at most: the stacks have COX_STACKS_MS, and are there before the error. */
#define COX_INCIDENT_LEAD_MS 1500

enum cox_incident_stage { COX_INCIDENT_IDLE, COX_INCIDENT_ASKED, COX_INCIDENT_GATHERING };

/* Fills in a target per rank that is asked; NULL: all. Those of other machines are read until the
 * deadline. Returns how many. */
typedef uint32_t (*cox_incident_targets_fn)(void *context, const struct cox_rank_set *asked,
                                            uint64_t deadline_ns,
                                            struct cox_stacks_target *targets);

struct cox_incidents {
    cox_incident_targets_fn targets;
    void *context;
    const struct cox_log *log;
    uint32_t rank_count;
    /* None begins: COX_STACKS_ON_REQUEST, or another coordinator has the ranks, and asks. */
    bool off;
    /* options.recorder.crash_dir: what is gathered goes there, and not to the log */
    bool filed;
    /* eventfd: close was called; -1: it was not opened */
    int cancel_fd;
    pthread_mutex_t lock;
    /* CLOCK_MONOTONIC; under lock, as all below */
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stopping;
    /* a thread gathers; one at a time, since a rank writes for one reader */
    bool gathers;
    enum cox_incident_stage stage;
    /* the request that is a suspect */
    int channel;
    uint64_t sequence, begun_ns;
    /* it has failed, and the log does not have its stacks yet */
    bool untold;
    /* of the last incident; NULL: there was none */
    struct cox_stacks *last;
    int last_channel;
    uint64_t last_sequence;
};

/* Returns 0; -errno. */
int cox_incidents_open(struct cox_incidents *incidents, struct cox_error *err);
void cox_incidents_close(struct cox_incidents *incidents); /* idempotent; a zeroed one is fine */

/* When a request becomes a suspect: 3/4 of its time, but no sooner than COX_INCIDENT_LEAD_MS before
 * its deadline. COX_DEADLINE_NEVER: it has no deadline. */
static inline uint64_t cox_incidents_due(uint64_t published_ns, uint64_t deadline_ns)
{
    if (deadline_ns == COX_DEADLINE_NEVER || deadline_ns <= published_ns)
        return COX_DEADLINE_NEVER;
    const uint64_t quarter_ns = (deadline_ns - published_ns) / 4;
    const uint64_t most_ns = COX_INCIDENT_LEAD_MS * COX_NSEC_PER_MSEC;
    return deadline_ns - (quarter_ns < most_ns ? quarter_ns : most_ns);
}

/* Has the stacks gathered, unless they are off, or were a moment ago. */
void cox_incidents_suspect(struct cox_incidents *incidents, int channel, uint64_t sequence);
/* The request has failed: its stacks are logged, now or when they are there. Where none were
 * gathered, they are now. */
void cox_incidents_failed(struct cox_incidents *incidents, int channel, uint64_t sequence);
/* Appends "; " and the sentence of this request to a text, if it is there. */
void cox_incidents_append(struct cox_incidents *incidents, int channel, uint64_t sequence,
                          char *text, size_t size);
/* Waits until no gathering is under way. */
void cox_incidents_await(struct cox_incidents *incidents, uint64_t deadline_ns);
/* Calls with the last incident's stacks, NULL: there are none, under the lock. */
void cox_incidents_last(struct cox_incidents *incidents,
                        void (*take)(void *context, const struct cox_stacks *stacks),
                        void *context);
/* Takes stacks, which are the last ones from now on. Only of incidents that are off: their thread
 * reads the last ones without the lock. */
void cox_incidents_keep(struct cox_incidents *incidents, struct cox_stacks *stacks);
/* Gathers now. Returns 0; COX_TIMEOUT: others gathered until the deadline; -ENOMEM. */
int cox_incidents_gather(struct cox_incidents *incidents, const struct cox_rank_set *asked,
                         uint64_t deadline_ns, struct cox_stacks **ret_stacks);

#endif
