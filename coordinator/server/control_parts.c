/* control_parts: parts that several replies have. */
#include "channel/base/idioms.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"
#include "control_reply.h"

#include <string.h>

#define TIMEOUT_MS_MAX 3600000

uint64_t cox_control_reply_deadline(bool given, uint64_t timeout_ms, uint64_t default_ms)
{
    const uint64_t ms = given ? timeout_ms : default_ms;
    return cox_deadline_after_ms(ms < TIMEOUT_MS_MAX ? ms : TIMEOUT_MS_MAX);
}

struct CoxswainControl__Error *cox_control_reply_error(struct cox_arena *arena, int code,
                                                       const char *text)
{
    CoxswainControl__Error *error = cox_message_new(arena, &coxswain_control__error__descriptor);
    if (error) {
        COX_SET(error, code, code);
        error->text = cox_message_text(arena, text);
    }
    return error;
}

void cox_control_reply_phase(CoxswainControl__PhaseStatus *message, const char *name,
                             const struct cox_phase_stats *stats, struct cox_arena *arena)
{
    message->name = cox_message_lend(name);
    COX_SET(message, count, stats->count);
    message->below = stats->count ? cox_arena_alloc(arena, sizeof stats->below) : NULL;
    if (!message->below)
        return;
    COX_SET(message, p50_ns, stats->p50_ns);
    COX_SET(message, p99_ns, stats->p99_ns);
    COX_SET(message, sum_ns, stats->sum_ns);
    message->n_below = COX_PHASE_BOUND_COUNT;
    memcpy(message->below, stats->below, sizeof stats->below);
}

CoxswainControl__PhaseStatus *cox_control_reply_phase_new(const char *name,
                                                          const struct cox_phase_stats *stats,
                                                          struct cox_arena *arena)
{
    CoxswainControl__PhaseStatus *message =
        stats->count ? cox_message_new(arena, &coxswain_control__phase_status__descriptor) : NULL;
    if (message)
        cox_control_reply_phase(message, name, stats, arena);
    return message;
}
