/* control_reply_weights: switches the weights of a group by request, and reports which it has. */
#include "control_reply.h"

#include "proto/control.pb-c.h"
#include "proto/message.h"

#include <inttypes.h>

#define TIMEOUT_MS_DEFAULT 60000
#define TIMEOUT_MS_MAX 3600000

#define NO_WEIGHTS "every rank has loaded its own weights: the group shares none"

CoxswainControl__WeightsStatus *cox_control_reply_weights_status(
    const struct cox_control_source *source, struct cox_arena *arena)
{
    struct cox_weights_status status = {0};
    if (source->hooks.weights->status(source->hooks.context, &status))
        return NULL;
    CoxswainControl__WeightsStatus *message =
        cox_message_new(arena, &coxswain_control__weights_status__descriptor);
    if (!message)
        return NULL;
    COX_SET(message, version, status.version);
    COX_SET(message, next, status.next);
    COX_SET(message, digest, status.digest);
    COX_SET(message, size, status.size);
    return message;
}

int cox_control_reply_weights(const struct cox_control_source *source,
                              const struct CoxswainControl__WeightsRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__WeightsReply **ret_reply,
                              struct cox_error *err)
{
    struct cox_error error = {0};
    const uint64_t timeout_ms = request->has_timeout_ms ? request->timeout_ms : TIMEOUT_MS_DEFAULT;
    struct cox_weights_status status;
    uint64_t version = 0;
    if (!source->hooks.weights ||
        source->hooks.weights->status(source->hooks.context, &status) == COX_UNSUPPORTED)
        return cox_fail(err, COX_UNSUPPORTED, NO_WEIGHTS);
    if (!request->directory || request->directory[0] != '/')
        return cox_fail(err, COX_INVALID,
                        "the folder of the weights is '%.64s': expected an absolute path",
                        request->directory ? request->directory : "");
    if (timeout_ms == 0 || timeout_ms > TIMEOUT_MS_MAX)
        return cox_fail(err, COX_INVALID, "a timeout of %" PRIu64 " ms: expected 1 to %d",
                        timeout_ms, TIMEOUT_MS_MAX);
    CoxswainControl__WeightsReply *reply =
        cox_message_new(arena, &coxswain_control__weights_reply__descriptor);
    if (!reply)
        return -ENOMEM;
    int r = source->hooks.weights->replace(source->hooks.context, request->directory,
                                           cox_deadline_after_ms(timeout_ms), &version, &error);
    if (!r)
        COX_SET(reply, version, version);
    else
        reply->error = cox_control_reply_error(arena, error.code, error.text);
    *ret_reply = reply;
    return 0;
}
