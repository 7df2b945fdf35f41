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

struct ModelExecuteData__ExecuteResponse;

/* Whose payload a completion carries. The status of every asked rank is always there, and every
 * policy ends at the first error or death of any asked rank. */
enum cox_gather {
    COX_GATHER_RANK0 = 0,   /* payload of the lowest asked rank */
    COX_GATHER_ALL,         /* payload of every asked rank */
    COX_GATHER_FIRST_ERROR, /* no payload */
    COX_GATHER_NONE,        /* not answered: no completion at all */
};

enum cox_outcome {
    COX_OUTCOME_NOT_ASKED = 0,
    COX_OUTCOME_OK,
    COX_OUTCOME_ERROR, /* it answered with an error, or with bytes that make no sense */
    COX_OUTCOME_DEAD,
    COX_OUTCOME_LATE, /* it had not answered when the request ended */
};

struct cox_rank_result {
    enum cox_outcome outcome;
    int32_t code; /* ERROR: the rank's status, or an enum cox_status when its reply was refused */
    const char *text; /* ERROR, DEAD, LATE: in words, never NULL then */
    pid_t pid;       /* of the process that serves it, which may be another than cox_executor_pid */
    int signal;      /* DEAD: the signal that killed it, 0: it exited or nobody knows */
    int exit_status; /* DEAD: -1 when unknown or killed */
    bool taken;      /* it had taken the request (ranks without lines: false) */
    uint64_t
        silent_ns;     /* LATE: since its last sign of life on this channel, or since publication */
    const void *bytes; /* payload where the policy asks for it */
    size_t size;
    const struct ModelExecuteData__ExecuteResponse
        *response; /* the same unpacked; NULL for opaque requests */
};

struct cox_completion {
    uint64_t sequence; /* on its channel */
    enum cox_channel_id channel;
    uint32_t type;    /* ExecuteType or COX_TYPE_OPAQUE */
    int status;       /* 0: every asked rank answered ok; COX_TIMEOUT, COX_PEER_DEAD, COX_REJECTED,
                       * COX_CORRUPT,       COX_STALE, COX_ABORTED, COX_DIVERGED, COX_CLOSED */
    const char *text; /* not 0: who, what, since when */
    uint32_t rank_count;
    const struct cox_rank_result *ranks;   /* rank_count of them */
    const struct cox_rank_result *payload; /* RANK0: the one with the payload; else NULL */
    void *request_context;                 /* as given to submit */
    uint64_t submitted_ns, published_ns, completed_ns; /* CLOCK_MONOTONIC */
};

typedef void (*cox_completion_fn)(void *context, const struct cox_completion *completion);

/* A request's way through a channel. */
enum cox_phase {
    COX_PHASE_QUEUE = 0, /* submit or call called -> published; a call may wait for room */
    COX_PHASE_RANKS,     /* published -> handed over, with every answer copied and unpacked */
    COX_PHASE_HANDLER,   /* handed over -> handler or visit returned */
    COX_PHASE_TOTAL,     /* all of them together */
    COX_PHASE_COUNT,
};

/* Of all completions whose handler has returned, also of those that failed. Each time is told with
 * an error of 6.25 % at most. */
struct cox_phase_stats {
    uint64_t count;
    uint64_t p50_ns, p99_ns; /* 0 when count is */
};

struct cox_channel_stats {
    uint64_t submitted; /* requests published */
    uint64_t completed; /* completions handed over */
    uint64_t failed;    /* of these, with a status other than 0 */
    uint64_t timeouts;
    uint64_t late_replies; /* answers that came after their request had ended, dropped */
    uint64_t rings;        /* wake-ups sent again because a rank had not taken its frame */
    uint64_t wakeups;      /* times a collector woke up */
    uint64_t looks; /* waits of a collector, for answers or work, that ended without a sleep */
    uint64_t request_bytes; /* of requests published: each once, however many ranks read it */
    uint64_t reply_bytes;   /* of answers taken, of all ranks; late ones are dropped unread */
    uint64_t bulk_requests; /* of these, in blocks: they did not fit their frame or slot */
    uint64_t bulk_request_bytes;
    uint64_t bulk_replies;
    uint64_t bulk_reply_bytes;
    uint64_t bulk_held_bytes; /* of blocks whose request some rank may still read */
    struct cox_phase_stats phases[COX_PHASE_COUNT];
};

/* "queue", "ranks", ...; "unknown" outside. Static storage. */
COX_PUBLIC const char *cox_phase_name(uint32_t phase);

#ifdef __cplusplus
}
#endif

#endif
