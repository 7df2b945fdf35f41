/*
 * recorders: the flight recorders of a group (channel/recorder/recorder.h), and the recordings that
 * the coordinator writes to its crash directory when something fails.
 *
 * A recording is copied on the thread that finds the failure, before anything is replaced; a thread
 * of its own writes it, so that a slow disk delays nothing. It has room for one: while that is
 * written, and for COX_CRASH_PAUSE_MS after another failure of the same kind, failures are only
 * counted.
 *
 * Threads: open, start, renew, close by the executor as said there; the rest any.
 * Ownership: the executor's.
 * Blocks: crash: for the copy, some milliseconds; close: until a recording is written.
 * If the process dies: rings that are files stay, and the next group that records in that directory
 *   makes a recording of them.
 */
#ifndef COX_COORDINATOR_RECORDERS_H
#define COX_COORDINATOR_RECORDERS_H

#include "channel/recorder/recorder.h"
#include "channel/shm/layout.h"
#include "coordinator/process/rank.h"

#include <pthread.h>

struct cox_executor;
struct cox_collector;
struct CoxswainRecording__Request;

#define COX_CRASH_PAUSE_MS 10000
/* As many requests as can be in flight. */
#define COX_LOST_COUNT_MAX (COX_TWO_WAY_COUNT * COX_DEPTH_MAX)

enum cox_crash {
    COX_CRASH_DEATH,
    COX_CRASH_TIMEOUT,
    COX_CRASH_DIVERGENCE,
    COX_CRASH_START,
    COX_CRASH_COUNT,
};

struct cox_recorders {
    /* of this process; NULL: none */
    struct cox_recorder *own;
    /* of all areas of the group */
    enum cox_recorder_clock clock;
    /* copy of options.recorder.crash_dir; NULL: none */
    char *folder;
    /* holds the lock of this group's files there; -1: none */
    int lock_fd;
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; under lock, as all below */
    pthread_cond_t changed;
    bool initialized, started, stopping;
    pthread_t thread;
    /* the recording that waits to be packed and written; NULL: none */
    struct CoxswainRecording__Recording *pending;
    enum cox_crash pending_kind;
    /* it is being written, or packed */
    bool busy;
    /* when a recording of this kind was made last, and how many were skipped since the last one */
    uint64_t last_ns[COX_CRASH_COUNT];
    uint32_t skipped;
    /* Requests that ended since a process they had asked is dead: the supervisor may report the
     * death later. When the last one ended. */
    struct CoxswainRecording__Request *lost[COX_LOST_COUNT_MAX];
    uint32_t lost_count;
    uint64_t lost_ns;
};

/* With the memory made, before the first worker: makes the recorders, unless there are to be none.
 * Returns 0; COX_TOO_LARGE, COX_TAKEN, COX_DENIED, -errno: of the crash directory; -ENOMEM. A crash
 * directory without space is logged, and memory used. */
int cox_recorders_open(struct cox_executor *executor, struct cox_error *err);
/* Before the next process of a rank gets its memory: an area in which no process records. */
void cox_recorders_renew(struct cox_executor *executor, uint32_t rank);
/* Writes what is pending, removes the rings, closes. Idempotent. */
void cox_recorders_close(struct cox_executor *executor);

/* Copies the recorder of a rank, or COX_RECORDER_COORDINATOR, into cox_recorder_area_size bytes.
 * Returns 0; COX_NOT_FOUND: nothing is recorded there. */
int cox_recorders_copy(struct cox_executor *executor, uint32_t rank, void *copy);

/* Something has failed: makes a recording, if there is a crash directory. text is the error, or how
 * the rank died. No lock of a collector is held. */
void cox_recorders_crash(struct cox_executor *executor, enum cox_crash kind, const char *text);

#endif
