/* control_reply_weights: switches the weights of a group by request, and reports which it has. */
#include "control_reply.h"

#include "proto/wire.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>

#define TIMEOUT_MS_DEFAULT 60000
#define TIMEOUT_MS_MAX 3600000

#define SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

int cox_control_reply_weights_status(const struct cox_control_source *source,
                                     struct cox_arena *arena,
                                     struct CoxswainControl__WeightsStatus **ret_status)
{
    struct cox_weights_status status = {0};
    int r = source->hooks.weights->status(source->hooks.context, &status);
    if (r)
        return r;
    CoxswainControl__WeightsStatus *message = cox_arena_alloc(arena, sizeof *message);
    if (!message)
        return -ENOMEM;
    coxswain_control__weights_status__init(message);
    SET(message, version, status.version);
    SET(message, next, status.next);
    SET(message, digest, status.digest);
    SET(message, size, status.size);
    *ret_status = message;
    return 0;
}

static int error_add(CoxswainControl__WeightsReply *reply, struct cox_arena *arena,
                     const struct cox_error *error)
{
    CoxswainControl__Error *message = cox_arena_alloc(arena, sizeof *message);
    if (!message)
        return -ENOMEM;
    coxswain_control__error__init(message);
    SET(message, code, error->code);
    message->text = cox_arena_strdup(arena, error->text);
    reply->error = message;
    return message->text ? 0 : -ENOMEM;
}

int cox_control_reply_weights(const struct cox_control_source *source,
                              const struct CoxswainControl__WeightsRequest *request,
                              struct cox_arena *arena,
                              struct CoxswainControl__WeightsReply **ret_reply,
                              struct cox_error *err)
{
    struct cox_error error = {0};
    const uint64_t timeout_ms = request->has_timeout_ms ? request->timeout_ms : TIMEOUT_MS_DEFAULT;
    uint64_t version = 0;
    if (!request->directory || request->directory[0] != '/')
        return cox_fail(err, COX_INVALID,
                        "the folder of the weights is '%.64s': expected an absolute path",
                        request->directory ? request->directory : "");
    if (timeout_ms == 0 || timeout_ms > TIMEOUT_MS_MAX)
        return cox_fail(err, COX_INVALID, "a timeout of %" PRIu64 " ms: expected 1 to %d",
                        timeout_ms, TIMEOUT_MS_MAX);
    CoxswainControl__WeightsReply *reply = cox_arena_alloc(arena, sizeof *reply);
    if (!reply)
        return -ENOMEM;
    coxswain_control__weights_reply__init(reply);
    int r = source->hooks.weights->replace(source->hooks.context, request->directory,
                                           cox_deadline_after_ms(timeout_ms), &version, &error);
    if (!r)
        SET(reply, version, version);
    *ret_reply = reply;
    return r ? error_add(reply, arena, &error) : 0;
}
