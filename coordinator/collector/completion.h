/*
 * completion: the result of a request (the outcome on every rank it asked, the payload, the times)
 * and the counters of a channel. The types that the executor gives its caller.
 *
 * Threads: plain values. A completion is lent to the handler that gets it (executor.h).
 */
#ifndef COX_COORDINATOR_COMPLETION_H
#define COX_COORDINATOR_COMPLETION_H

#include <coxswain/base.h>

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct Coxswain__ExecuteResponse;

/* Selects the ranks whose payload a completion carries. With every policy the completion has the
 * status of every asked rank, and the request ends at the first error or death of an asked rank. */
enum cox_gather {
    COX_GATHER_RANK0 = 0,   /* payload of the lowest asked rank */
    COX_GATHER_ALL,         /* payload of every asked rank */
    COX_GATHER_FIRST_ERROR, /* no payload */
    COX_GATHER_NONE,        /* for requests without a reply: no completion */
};

enum cox_outcome {
    COX_OUTCOME_NOT_ASKED = 0,
    COX_OUTCOME_OK,
    COX_OUTCOME_ERROR, /* the rank replied with an error, or with invalid bytes */
    COX_OUTCOME_DEAD,
    COX_OUTCOME_LATE, /* the rank had not replied when the request ended */
};

struct cox_rank_result {
    enum cox_outcome outcome;
    /* ERROR: the rank's status, or an enum cox_status if its reply was refused */
    int32_t code;
    /* ERROR, DEAD, LATE: the reason, never NULL */
    const char *text;
    /* the process that serves the rank, which may be a child of the one that was started */
    pid_t pid;
    /* DEAD: the signal that killed it; 0: it exited, or unknown */
    int signal;
    /* DEAD: -1 when unknown or killed */
    int exit_status;
    /* the rank had taken the request (a legacy rank: had returned the frame) */
    bool taken;
    /* LATE: time since the rank last stored a state on this channel, or since publication */
    uint64_t silent_ns;
    /* payload, if the policy asks for it; ERROR: what the rank has added to its text
     * (cox_worker_reply_error), NULL: nothing */
    const void *bytes;
    size_t size;
    /* the same unpacked; NULL for opaque requests */
    const struct Coxswain__ExecuteResponse *response;
};

struct cox_completion {
    /* number of the request on its channel */
    uint64_t sequence;
    enum cox_channel_id channel;
    /* ExecuteType or COX_TYPE_OPAQUE */
    uint32_t type;
    /* 0: every asked rank replied ok; COX_TIMEOUT, COX_PEER_DEAD, COX_REJECTED, COX_CORRUPT,
     * COX_STALE, COX_ABORTED, COX_DIVERGED, COX_CLOSED. COX_LATE: the second completion of a
     * request (options.report_late). A rank that was late then is OK (its reply was dropped) or
     * DEAD; all others are NOT_ASKED. */
    int status;
    /* if status is not 0: the rank, the reason and the time */
    const char *text;
    uint32_t rank_count;
    /* rank_count of them */
    const struct cox_rank_result *ranks;
    /* RANK0: the result with the payload; else NULL */
    const struct cox_rank_result *payload;
    /* as given to submit */
    void *request_context;
    /* CLOCK_MONOTONIC */
    uint64_t submitted_ns, published_ns, completed_ns;
};

typedef void (*cox_completion_fn)(void *context, const struct cox_completion *completion);

/* The phases of a request. */
enum cox_phase {
    COX_PHASE_QUEUE = 0, /* submit or call entered -> published; a call may wait for a frame */
    COX_PHASE_RANKS,     /* published -> handed over, with every reply copied and unpacked */
    COX_PHASE_HANDLER,   /* handed over -> handler returned */
    COX_PHASE_TOTAL,     /* the three together */
    COX_PHASE_COUNT,
};

/* The bounds of cox_phase_stats.below: bound i is 2^(10 + i) ns, from 1 us to 69 s. */
#define COX_PHASE_BOUND_COUNT 27
#define COX_PHASE_BOUND_NS(i) (UINT64_C(1024) << (i))

/* Times of all completions whose handler has returned, also of those that failed. The error of each
 * value is at most 6.25 %, and that of the sum less. */
struct cox_phase_stats {
    uint64_t count;
    /* 0 when count is */
    uint64_t p50_ns, p99_ns, sum_ns;
    /* how many were shorter than each bound; exact */
    uint64_t below[COX_PHASE_BOUND_COUNT];
};

struct cox_channel_stats {
    /* requests published */
    uint64_t submitted;
    /* completions handed over */
    uint64_t completed;
    /* of these, with a status other than 0 */
    uint64_t failed;
    uint64_t timeouts;
    /* steps whose ranks disagreed (COX_DIVERGED) */
    uint64_t divergences;
    /* replies that came after their request had ended; dropped */
    uint64_t late_replies;
    /* wakeups sent again because a rank had not taken its frame */
    uint64_t rewakes;
    /* times a collector woke up */
    uint64_t wakeups;
    /* waits of a collector, for replies or work, that ended while spinning */
    uint64_t spins;
    /* bytes of published requests; each counts once, however many ranks read it */
    uint64_t request_bytes;
    /* bytes of copied replies, of all ranks; late ones are dropped without being read */
    uint64_t reply_bytes;
    /* those of them that were sent out of line: they did not fit their frame or slot */
    uint64_t large_requests;
    uint64_t large_request_bytes;
    uint64_t large_replies;
    uint64_t large_reply_bytes;
    /* bytes of large requests that a rank may still read */
    uint64_t large_held_bytes;
    struct cox_phase_stats phases[COX_PHASE_COUNT];
    /* Of requests that ended with COX_PEER_DEAD: since the kernel reported the end of the process,
     * or since the request was published, if that was later. Of those that ended with COX_TIMEOUT:
     * how long the rank that was silent longest had been silent. */
    struct cox_phase_stats death_detection, hang_detection;
};

#ifdef COX_INTERNAL
/* "queue", "ranks", ...; "unknown" outside. Static storage. */
const char *cox_phase_name(uint32_t phase);
#endif

#ifdef __cplusplus
}
#endif

#endif
