#include "recording_command.h"

#include "channel/base/idioms.h"
#include "coordinator/recording/recording.h"
#include "proto/control.pb-c.h"
#include "proto/recording.pb-c.h"

#include <stdlib.h>
#include <string.h>

typedef CoxswainRecording__Recording recording;

static char *text_copy(const char *text)
{
    return text && text[0] ? strdup(text) : NULL;
}

/* One rank, or the coordinator, at a time: a reply of all might be too large for a message.
 * ret_missing, ret_code: why its node has not sent it; unchanged: it has. */
static int recorder_ask(struct cox_client *client, bool is_rank, uint32_t rank,
                        uint64_t deadline_ns, protobuf_c_boolean *has, ProtobufCBinaryData *field,
                        char **ret_missing, int *ret_code, struct cox_error *err)
{
    CoxswainControl__RecorderRequest recorder = COXSWAIN_CONTROL__RECORDER_REQUEST__INIT;
    const ProtobufCMessage *body = NULL;
    recorder.has_rank = is_rank;
    recorder.rank = rank;
    int r = cox_client_expect(client, COX_REQUEST(RECORDER), &recorder.base, COX_REPLY(RECORDER),
                              deadline_ns, &body, err);
    if (r)
        return r;
    const CoxswainControl__RecorderReply *reply = (const CoxswainControl__RecorderReply *)body;
    if (reply->error) {
        *ret_missing = text_copy(reply->error->text);
        *ret_code = reply->error->code;
    }
    if (!reply->has_copy)
        return 0;
    field->len = reply->copy.len;
    field->data = malloc(field->len + 1);
    if (!field->data)
        return cox_fail(err, -ENOMEM, "no memory for a recorder of %zu bytes", field->len);
    memcpy(field->data, reply->copy.data, field->len);
    *has = 1;
    return 0;
}

/* From the status, which is lent until the next request. */
static recording *recording_begin(const CoxswainControl__StatusReply *status)
{
    static const char *const liveness[] = {"alive", "dead", "left", "absent"};
    const size_t count =
        status->n_ranks < COX_RANK_COUNT_MAX ? status->n_ranks : COX_RANK_COUNT_MAX;
    recording *made =
        cox_recording_new(status->name ? status->name : "", "trace", "", (uint32_t)count);
    if (!made)
        return NULL;
    COX_SET(made, pid, status->pid);
    COX_SET(made, depth, status->depth);
    made->attach = text_copy(status->attach);
    made->engine_state = text_copy(status->engine_state);
    for (size_t i = 0; i < count; i++) {
        const CoxswainControl__RankStatus *from = status->ranks[i];
        CoxswainRecording__Rank *to = made->ranks[i];
        COX_SET(to, pid, from->serving_pid);
        COX_SET(to, incarnation, from->incarnation);
        COX_SET(to, stopped, from->stopped);
        to->liveness = text_copy(from->liveness < 4 ? liveness[from->liveness] : "unknown");
        to->death = text_copy(from->death);
        to->last_lines = text_copy(from->last_lines);
        to->last_error = text_copy(from->last_error);
        to->node = text_copy(from->node);
        to->trouble = text_copy(from->trouble);
    }
    return made;
}

/* A node that does not answer is waited for once: the first of its ranks that has found out; NULL:
 * none has. */
static const CoxswainRecording__Rank *silent_before(const recording *made, const int *codes,
                                                    uint32_t rank)
{
    const char *node = made->ranks[rank]->node;
    for (uint32_t i = 0; node && i < rank; i++)
        if ((codes[i] == COX_PEER_DEAD || codes[i] == COX_TIMEOUT) && made->ranks[i]->node &&
            strcmp(made->ranks[i]->node, node) == 0)
            return made->ranks[i];
    return NULL;
}

int cox_recording_ask(const struct cox_connection *connection, uint64_t deadline_ns,
                      recording **ret_recording, struct cox_error *err)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    _cox_cleanup_(cox_recording_freep) recording *made = NULL;
    CoxswainControl__StatusReply *status;
    int r = cox_connection_open(connection, &client, deadline_ns, err);
    if (r == 0)
        r = cox_client_status(&client, deadline_ns, &status, err);
    if (r)
        return r;
    made = recording_begin(status);
    if (!made)
        return cox_fail(err, -ENOMEM, "no memory for a recording");
    bool any = false;
    char *ignored = NULL;
    int codes[COX_RANK_COUNT_MAX] = {0};
    /* The coordinator first: what the ranks do to a request that it has is in theirs then. */
    r = recorder_ask(&client, false, 0, deadline_ns, &made->has_recorder, &made->recorder, &ignored,
                     &codes[0], err);
    free(ignored);
    any = made->has_recorder;
    for (uint32_t rank = 0; r == 0 && rank < made->n_ranks; rank++) {
        CoxswainRecording__Rank *to = made->ranks[rank];
        const CoxswainRecording__Rank *silent = silent_before(made, codes, rank);
        codes[rank] = 0;
        if (silent)
            to->missing = text_copy(silent->missing);
        else
            r = recorder_ask(&client, true, rank, deadline_ns, &to->has_recorder, &to->recorder,
                             &to->missing, &codes[rank], err);
        any = any || to->has_recorder;
    }
    if (r)
        return r;
    if (!any)
        return cox_fail(
            err, COX_UNSUPPORTED,
            "the group '%s' records nothing: it was started without recorders (COX_RECORDER_NONE)",
            made->name);
    made->monotonic_ns = cox_now_ns(); /* after all that is in it */
    *ret_recording = cox_steal_ptr(&made);
    return 0;
}
