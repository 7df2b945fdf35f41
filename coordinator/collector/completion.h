/*
 * completion: what becomes of a request: the outcome on every rank it asked, the payload, and the
 * times; and the counters of a channel. The types that the executor hands to its caller.
 *
 * Threads: plain values. A completion is lent to the handler that gets it (executor.h).
 */
#ifndef COX_COORDINATOR_COMPLETION_H
#define COX_COORDINATOR_COMPLETION_H

#include "../../channel/base/base.h"

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct Coxswain__ExecuteResponse;

/* Whose payload a completion carries. The status of every asked rank is always there, and every
 * policy ends at the first error or death of any asked rank. */
enum cox_gather {
    COX_GATHER_RANK0 = 0,   /* payload of the lowest asked rank */
    COX_GATHER_ALL,         /* payload of every asked rank */
    COX_GATHER_FIRST_ERROR, /* no payload */
    COX_GATHER_NONE,        /* not replied to: no completion at all */
};

enum cox_outcome {
    COX_OUTCOME_NOT_ASKED = 0,
    COX_OUTCOME_OK,
    COX_OUTCOME_ERROR, /* it replied with an error, or with bytes that make no sense */
    COX_OUTCOME_DEAD,
    COX_OUTCOME_LATE, /* it had not replied when the request ended */
};

struct cox_rank_result {
    enum cox_outcome outcome;
    /* ERROR: the rank's status, or an enum cox_status when its reply was refused */
    int32_t code;
    /* ERROR, DEAD, LATE: in words, never NULL then */
    const char *text;
    /* of the process that serves it, which may be another than cox_executor_pid */
    pid_t pid;
    /* DEAD: the signal that killed it, 0: it exited or nobody knows */
    int signal;
    /* DEAD: -1 when unknown or killed */
    int exit_status;
    /* it had taken the request (ranks without lines: false) */
    bool taken;
    /* LATE: since its last sign of life on this channel, or since publication */
    uint64_t silent_ns;
    /* payload where the policy asks for it */
    const void *bytes;
    size_t size;
    /* the same unpacked; NULL for opaque requests */
    const struct Coxswain__ExecuteResponse *response;
};

struct cox_completion {
    /* on its channel */
    uint64_t sequence;
    enum cox_channel_id channel;
    /* ExecuteType or COX_TYPE_OPAQUE */
    uint32_t type;
    /* 0: every asked rank replied ok; COX_TIMEOUT, COX_PEER_DEAD, COX_REJECTED, COX_CORRUPT,
     * COX_STALE, COX_ABORTED, COX_DIVERGED, COX_CLOSED */
    int status;
    /* not 0: who, what, since when */
    const char *text;
    uint32_t rank_count;
    /* rank_count of them */
    const struct cox_rank_result *ranks;
    /* RANK0: the one with the payload; else NULL */
    const struct cox_rank_result *payload;
    /* as given to submit */
    void *request_context;
    /* CLOCK_MONOTONIC */
    uint64_t submitted_ns, published_ns, completed_ns;
};

typedef void (*cox_completion_fn)(void *context, const struct cox_completion *completion);

/* A request's way through a channel. */
enum cox_phase {
    COX_PHASE_QUEUE = 0, /* submit or call called -> published; a call may wait for room */
    COX_PHASE_RANKS,     /* published -> handed over, with every reply copied and unpacked */
    COX_PHASE_HANDLER,   /* handed over -> handler returned */
    COX_PHASE_TOTAL,     /* all of them together */
    COX_PHASE_COUNT,
};

/* Of all completions whose handler has returned, also of those that failed. Each time is told with
 * an error of 6.25 % at most. */
struct cox_phase_stats {
    uint64_t count;
    /* 0 when count is */
    uint64_t p50_ns, p99_ns;
};

struct cox_channel_stats {
    /* requests published */
    uint64_t submitted;
    /* completions handed over */
    uint64_t completed;
    /* of these, with a status other than 0 */
    uint64_t failed;
    uint64_t timeouts;
    /* replies that came after their request had ended, dropped */
    uint64_t late_replies;
    /* wake-ups sent again because a rank had not taken its frame */
    uint64_t rings;
    /* times a collector woke up */
    uint64_t wakeups;
    /* waits of a collector, for replies or work, that ended without a sleep */
    uint64_t looks;
    /* of requests published: each once, however many ranks read it */
    uint64_t request_bytes;
    /* of replies taken, of all ranks; late ones are dropped unread */
    uint64_t reply_bytes;
    /* of these, in blocks: they did not fit their frame or slot */
    uint64_t large_requests;
    uint64_t large_request_bytes;
    uint64_t large_replies;
    uint64_t large_reply_bytes;
    /* of blocks whose request some rank may still read */
    uint64_t large_held_bytes;
    struct cox_phase_stats phases[COX_PHASE_COUNT];
};

#ifdef COX_INTERNAL
/* "queue", "ranks", ...; "unknown" outside. Static storage. */
const char *cox_phase_name(uint32_t phase);
#endif

#ifdef __cplusplus
}
#endif

#endif
