#include "health.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "channel/text/text.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/control.pb-c.h"

#include <coxswain/executor.h>
#include <coxswain/requests.h>

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

__attribute__((format(printf, 2, 3))) static void add(char text[COX_HEALTH_SIZE],
                                                      const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    if (used && used < COX_HEALTH_SIZE - 2) {
        memcpy(text + used, "; ", 3);
        used += 2;
    }
    va_start(args, format);
    vsnprintf(text + used, COX_HEALTH_SIZE - used, format, args);
    va_end(args);
}

static void check_rank(const CoxswainControl__RankStatus *rank, char text[COX_HEALTH_SIZE])
{
    if (rank->liveness == COX_LIVENESS_ABSENT)
        add(text, "rank %" PRIu32 " is absent", rank->rank);
    else if (rank->liveness != COX_LIVENESS_ALIVE && rank->death)
        add(text, "%.200s", rank->death);
    else if (rank->liveness != COX_LIVENESS_ALIVE)
        add(text, "rank %" PRIu32 " is %s", rank->rank, cox_rank_liveness_name(rank->liveness));
    else if (rank->stopped)
        add(text,
            "rank %" PRIu32 " (pid %" PRId64 ") is stopped by a signal (kill -CONT %" PRId64 ")",
            rank->rank, rank->serving_pid, rank->serving_pid);
    else if (rank->trouble)
        add(text, "rank %" PRIu32 ": %.160s", rank->rank, rank->trouble);
}

/* Ranks that compute change their state with every step; a step that takes a third of its time
 * without that will likely take all of it. The text stays the same meanwhile. */
static void check_steps(const CoxswainControl__StatusReply *status, char text[COX_HEALTH_SIZE])
{
    for (size_t i = 0; i < status->n_channels; i++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[i];
        const CoxswainControl__OldestStatus *oldest = channel->oldest;
        if (!oldest || !oldest->limit_ns || oldest->still_ns < oldest->limit_ns / 3 ||
            !channel->name || strcmp(channel->name, cox_channel_name(COX_CHANNEL_EXECUTE)) != 0)
            continue;
        char ranks[64] = "no rank";
        for (size_t k = 0; k < oldest->n_owing_ranks; k++) {
            const size_t used = k ? strlen(ranks) : 0;
            snprintf(ranks + used, sizeof ranks - used, "%s %" PRIu32,
                     k                           ? ","
                     : oldest->n_owing_ranks > 1 ? "ranks"
                                                 : "rank",
                     oldest->owing_ranks[k]);
        }
        add(text,
            "%s %s execute %" PRIu64
            ", and no rank has moved for a third of the %.3g s that it may take",
            ranks, oldest->n_owing_ranks > 1 ? "owe" : "owes", oldest->sequence,
            (double)oldest->limit_ns / 1e9);
    }
}

/* Of a note that is a JSON object: its program says that it cannot serve, and why. */
static void check_note(const char *note, char text[COX_HEALTH_SIZE])
{
    json_t *object = note ? json_loads(note, 0, NULL) : NULL;
    const char *reason = json_string_value(json_object_get(object, "not_ready"));
    _cox_cleanup_(cox_free_ptr) char *safe = cox_text_escape(reason ? reason : "", false, false);
    if (safe && safe[0])
        add(text, "%.200s", safe);
    json_decref(object);
}

static bool is_state(const CoxswainControl__StatusReply *status, enum cox_engine_state state)
{
    return status->engine_state && !strcmp(status->engine_state, cox_engine_state_name(state));
}

bool cox_health_check(const struct CoxswainControl__StatusReply *status, char text[COX_HEALTH_SIZE])
{
    text[0] = '\0';
    if (status->stopping)
        add(text, "it is ending");
    for (size_t i = 0; i < status->n_ranks; i++)
        check_rank(status->ranks[i], text);
    if (is_state(status, COX_ENGINE_PAUSE) || is_state(status, COX_ENGINE_READY))
        add(text, "it is paused (coxswain recover start)");
    if (!status->recovery)
        add(text, "it is being started: its ranks load their model");
    else if (status->recovery->doing)
        add(text, "%.200s", status->recovery->doing);
    /* Dead ranks make it so too, and have been named. */
    if (is_state(status, COX_ENGINE_ABNORMAL) && !text[0])
        add(text, "a rank was replaced, and its model is not loaded yet");
    check_note(status->note, text);
    if (!text[0])
        check_steps(status, text);
    return !text[0];
}
