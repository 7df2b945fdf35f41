#include "prefill_decode.h"

#include "channel/base/idioms.h"
#include "coordinator/server/kv_reference.h"
#include "program/cli/connection.h"
#include "program/client/link_client.h"
#include "proto/control.pb-c.h"
#include "remote.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* Prompts of one message; a group reads a message completely before it begins. */
#define CHUNK_COUNT 64
#define CHUNK_TOKENS 65536
/* No message is queued while a group has this many unread bytes. */
#define PENDING_MAX ((size_t)64 << 10)
/* Of a KV lease: time for the decode group to pull the blocks of a prompt. */
#define LEASE_MS 60000
/* Pause between attempts to link groups while a rank is being replaced. */
#define LINK_PAUSE_MS 50
/* A group closes a connection without a request for 10 s. The decode group's would be idle until
 * the prefill group has computed something. */
#define STAY_MS 3000

typedef CoxswainControl__ControlRequest control_request;
typedef CoxswainControl__ControlReply control_reply;
typedef CoxswainControl__CompletionItem item_message;

/* States of a prompt: UNSENT -> PREFILL -> DECODE -> DONE. */
enum place { PLACE_UNSENT = 0, PLACE_PREFILL, PLACE_DECODE, PLACE_DONE };

struct part {
    enum place place;
    /* in DECODE: the prefill group is done with it, and it was not sent to the decode group */
    bool ready;
    /* the token that the prefill group generated */
    int32_t first;
    /* NULL: no KV lease */
    struct cox_kv_reference *source;
    /* the decode group has the KV reference, and continues from `first` */
    bool pulls;
};

struct pair {
    struct cox_prompts *prompts;
    /* prefill, decode */
    struct cox_client *clients[2];
    const struct cox_prefill_decode_options *how;
    const struct cox_complete_options *options;
    int stop_fd;
    struct cox_watch watches[2];
    struct cox_prompts_run run;
    /* by prompt */
    struct part *parts;
    size_t unsent_count, flight_count;
    /* epoch of the prefill group that is linked; 0: none */
    uint64_t epoch;
    /* when to send the next keepalive */
    uint64_t stay_ns;
    uint64_t generated_tokens;
    struct cox_prefill_decode_stats stats;
    struct cox_error failure;
};

/* ---- keepalive ---- */

static int both_flush(struct pair *pair)
{
    int r = cox_stream_flush(&pair->clients[0]->stream);
    return r && r != COX_CLOSED ? r : cox_stream_flush(&pair->clients[1]->stream);
}

/* Sends both groups a release of nothing, which has no reply, to keep the connections open. */
static int stay(struct pair *pair)
{
    CoxswainControl__ReleaseRequest release = COXSWAIN_CONTROL__RELEASE_REQUEST__INIT;
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    int r = 0;
    if (cox_now_ns() < pair->stay_ns)
        return 0;
    pair->stay_ns = cox_deadline_after_ms(STAY_MS);
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RELEASE;
    request.release = &release;
    for (int side = 0; !r && side < 2; side++)
        if (cox_stream_pending(&pair->clients[side]->stream) == 0)
            r = cox_stream_put(&pair->clients[side]->stream, &request.base);
    return r;
}

/* ---- links ---- */

/* Uses separate connections, because replies to prompts arrive on the others. */
static int link_try(struct pair *pair, uint64_t deadline_ns, struct cox_error *err)
{
    _cox_cleanup_(cox_client_close) struct cox_client owner = COX_CLIENT_NONE;
    _cox_cleanup_(cox_client_close) struct cox_client reader = COX_CLIENT_NONE;
    int r = cox_client_open(&owner, pair->how->prefill, deadline_ns, err);
    if (!r)
        r = cox_client_open(&reader, pair->how->decode, deadline_ns, err);
    if (!r)
        r = cox_link_groups(&reader, &owner, pair->how->prefill, true, deadline_ns, &pair->epoch,
                            err);
    pair->stats.links += r == 0;
    return r;
}

/* A rank of one of the groups is dead, and may be about to be replaced. */
static bool may_pass(int r)
{
    return r == COX_REJECTED || r == COX_PEER_DEAD || r == COX_STATE || r == COX_STALE ||
           r == COX_ABORTED;
}

static int groups_link(struct pair *pair, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(pair->how->connect_ms);
    for (;;) {
        struct cox_error error = {0};
        struct pollfd fd = {.fd = pair->stop_fd, .events = POLLIN};
        int r = stay(pair);
        if (!r)
            r = both_flush(pair);
        /* a failed link may be the effect of a group's end, which is the better error */
        if (!r || r == COX_CLOSED)
            r = link_try(pair, deadline_ns, &error);
        else
            cox_fail(&error, r, "the connection to a group: %s", cox_status_text(r));
        if (r && (!may_pass(r) || cox_now_ns() >= deadline_ns))
            return cox_fail(err, r, "%s", error.text);
        if (r == 0)
            return 0;
        if (poll(&fd, 1, LINK_PAUSE_MS) > 0)
            return cox_fail(err, COX_CLOSED, "stopped");
    }
}

/* ---- sending ---- */

static int release_put(struct pair *pair, struct part *part)
{
    CoxswainControl__ReleaseRequest release = COXSWAIN_CONTROL__RELEASE_REQUEST__INIT;
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    if (!part->source)
        return 0;
    int64_t hold = part->source->sequence;
    free(part->source);
    part->source = NULL;
    release.holds = &hold;
    release.n_holds = 1;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RELEASE;
    request.release = &release;
    return cox_stream_put(&pair->clients[0]->stream, &request.base);
}

struct chunk {
    CoxswainControl__Prompt messages[CHUNK_COUNT], *list[CHUNK_COUNT];
    CoxswainControl__KvReference sources[CHUNK_COUNT];
    /* of the decode group's prompts */
    int32_t *tokens[CHUNK_COUNT];
    CoxswainControl__CompleteRequest complete;
    int32_t stop_tokens[COX_EOS_COUNT_MAX];
    size_t token_count;
};

static void chunk_init(struct chunk *chunk, const struct pair *pair)
{
    coxswain_control__complete_request__init(&chunk->complete);
    chunk->complete.prompts = chunk->list;
    chunk->token_count = 0;
    cox_remote_fill(pair->options, &chunk->complete, chunk->stop_tokens);
}

static CoxswainControl__Prompt *chunk_add(struct chunk *chunk, size_t index, int32_t *tokens,
                                          uint32_t count)
{
    CoxswainControl__Prompt *message = &chunk->messages[chunk->complete.n_prompts];
    coxswain_control__prompt__init(message);
    COX_SET(message, index, index);
    message->tokens = tokens;
    message->n_tokens = count;
    chunk->list[chunk->complete.n_prompts++] = message;
    chunk->token_count += count;
    return message;
}

static bool chunk_has_room(const struct chunk *chunk)
{
    return chunk->complete.n_prompts < CHUNK_COUNT && chunk->token_count < CHUNK_TOKENS;
}

static int chunk_put(struct chunk *chunk, struct cox_client *client)
{
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_COMPLETE;
    request.complete = &chunk->complete;
    return chunk->complete.n_prompts ? cox_stream_put(&client->stream, &request.base) : 0;
}

/* Sends the next prompts to the prefill group, as far as the window allows. */
static int prefill_send(struct pair *pair)
{
    struct chunk chunk;
    chunk_init(&chunk, pair);
    COX_SET(&chunk.complete, hold_ms, LEASE_MS);
    for (size_t i = 0; i < pair->prompts->count && pair->unsent_count && chunk_has_room(&chunk) &&
                       pair->flight_count < pair->how->window;
         i++) {
        struct part *part = &pair->parts[i];
        struct cox_prompt *prompt = &pair->prompts->items[i];
        if (part->place != PLACE_UNSENT)
            continue;
        chunk_add(&chunk, i, prompt->tokens, prompt->token_count);
        part->place = PLACE_PREFILL;
        pair->unsent_count--;
        pair->flight_count++;
    }
    return chunk_put(&chunk, pair->clients[0]);
}

/* Sends what the prefill group has computed to the decode group: the KV reference together with the
 * first token. A prompt without a lease is computed completely in the decode group. Its first token
 * may result from other weights, which only linking would have compared. */
static int decode_send(struct pair *pair, bool held)
{
    struct chunk chunk;
    int r = 0;
    chunk_init(&chunk, pair);
    chunk.complete.new_count_max = cox_complete_new_count(pair->options) - held;
    for (size_t i = 0; !r && i < pair->prompts->count && chunk_has_room(&chunk); i++) {
        struct part *part = &pair->parts[i];
        const struct cox_prompt *prompt = &pair->prompts->items[i];
        if (part->place != PLACE_DECODE || !part->ready || (part->source != NULL) != held)
            continue;
        int32_t *tokens = calloc((size_t)prompt->token_count + 1, sizeof *tokens);
        if (!tokens) {
            r = -ENOMEM;
            break;
        }
        memcpy(tokens, prompt->tokens, prompt->token_count * sizeof *tokens);
        tokens[prompt->token_count] = part->first;
        size_t at = chunk.complete.n_prompts;
        CoxswainControl__Prompt *message = chunk_add(&chunk, i, tokens, prompt->token_count + held);
        chunk.tokens[at] = tokens;
        part->ready = false;
        part->pulls = held;
        if (held) {
            cox_kv_reference_write(part->source, &chunk.sources[at]);
            message->source = &chunk.sources[at];
        }
    }
    if (!r)
        r = chunk_put(&chunk, pair->clients[1]);
    for (size_t i = 0; i < chunk.complete.n_prompts; i++)
        free(chunk.tokens[i]);
    return r;
}

/* ---- receiving ---- */

static int prompt_done(struct pair *pair, size_t index, const struct cox_prompt_result *result)
{
    struct part *part = &pair->parts[index];
    int r = release_put(pair, part);
    part->place = PLACE_DONE;
    pair->flight_count--;
    pair->generated_tokens += result->token_count;
    cox_prompts_take(&pair->run, &pair->prompts->items[index], result);
    if (pair->run.failed && !pair->failure.code)
        cox_fail(&pair->failure, result->code, "%s", result->text);
    return r;
}

/* Names the group, because the error itself does not, and only one of the groups may lack
 * something. */
static int prompt_fail(struct pair *pair, size_t index, int side, const struct cox_error *cause)
{
    struct cox_error error = {0};
    cox_fail(&error, cause->code, "the group '%s': %.900s",
             side ? pair->how->decode : pair->how->prefill, cause->text);
    const struct cox_prompt_result result = {
        .finish = COX_FINISH_ERROR, .code = error.code, .text = error.text};
    return prompt_done(pair, index, &result);
}

static bool is_failure(const item_message *item)
{
    return item->has_finish && item->finish == COXSWAIN_CONTROL__FINISH__FAILED && item->error;
}

static int prefill_item(struct pair *pair, size_t index, const item_message *item,
                        struct cox_error *err)
{
    struct part *part = &pair->parts[index];
    struct cox_error cause = {0};
    if (is_failure(item)) {
        cox_client_error(item->error, &cause);
        return prompt_fail(pair, index, 0, &cause);
    }
    bool stop = item->finish == COXSWAIN_CONTROL__FINISH__STOP;
    struct cox_kv_reference source;
    if (!item->has_finish || item->n_tokens != 1 ||
        (item->hold && cox_kv_reference_read(item->hold, &source, &cause)))
        return cox_fail(err, COX_CORRUPT, "the reply to prompt %zu is invalid%s%.300s", index + 1,
                        cause.text[0] ? ": " : "", cause.text);
    part->first = item->tokens[0];
    if (item->hold && !(part->source = cox_kv_reference_dup(&source)))
        return cox_fail(err, -ENOMEM, "no memory for the replies");
    if (stop || cox_complete_new_count(pair->options) == 1) {
        const struct cox_prompt_result result = {
            .finish = stop ? COX_FINISH_STOP : COX_FINISH_LENGTH,
            .tokens = &part->first,
            .token_count = 1,
        };
        return prompt_done(pair, index, &result);
    }
    part->place = PLACE_DECODE;
    part->ready = true;
    /* Ranks of the prefill group were replaced since, and the decode group still reads from the old
     * ones. */
    return part->source && part->source->epoch != pair->epoch ? groups_link(pair, err) : 0;
}

static int decode_item(struct pair *pair, size_t index, const item_message *item,
                       struct cox_error *err)
{
    struct part *part = &pair->parts[index];
    struct cox_error cause = {0};
    if (is_failure(item)) {
        cox_client_error(item->error, &cause);
        return prompt_fail(pair, index, 1, &cause);
    }
    bool stop = item->finish == COXSWAIN_CONTROL__FINISH__STOP;
    size_t count = item->n_tokens + part->pulls;
    if (!item->has_finish || (!stop && item->finish != COXSWAIN_CONTROL__FINISH__LENGTH) ||
        count > cox_complete_new_count(pair->options))
        return cox_fail(err, COX_CORRUPT, "the reply to prompt %zu is invalid", index + 1);
    _cox_cleanup_(cox_free_ptr) int32_t *tokens = calloc(count + 1, sizeof *tokens);
    if (!tokens)
        return cox_fail(err, -ENOMEM, "no memory for the replies");
    tokens[0] = part->first;
    if (item->n_tokens)
        memcpy(tokens + part->pulls, item->tokens, item->n_tokens * sizeof *tokens);
    const bool pulled = part->pulls && !item->recomputed;
    pair->stats.pulled += pulled;
    pair->stats.recomputed += !pulled;
    const struct cox_prompt_result result = {
        .finish = stop ? COX_FINISH_STOP : COX_FINISH_LENGTH,
        .tokens = tokens,
        .token_count = (uint32_t)count,
    };
    return prompt_done(pair, index, &result);
}

/* The decode group has pulled, or has failed to. */
static int pulled_take(struct pair *pair, const CoxswainControl__PulledReply *pulled,
                       struct cox_error *err)
{
    struct cox_error cause = {0};
    if (!pulled->has_index || pulled->index >= pair->prompts->count ||
        pair->parts[pulled->index].place != PLACE_DECODE)
        return cox_fail(err, COX_CORRUPT, "a group reported a pull that was not requested");
    struct part *part = &pair->parts[pulled->index];
    uint64_t epoch = part->source ? part->source->epoch : 0;
    int r = release_put(pair, part);
    if (r || !pulled->error)
        return r;
    cox_client_error(pulled->error, &cause);
    /* The groups were unlinked, or linked in another epoch, or have different models, which linking
     * reports. Links once for all prompts that failed with it. */
    bool links =
        cause.code == COX_NOT_FOUND || cause.code == COX_STALE || cause.code == COX_INVALID;
    return links && epoch == pair->epoch ? groups_link(pair, err) : 0;
}

static int reply_take(struct pair *pair, int side, const control_reply *reply,
                      struct cox_error *err)
{
    if (reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR)
        return cox_client_error(reply->error, err);
    if (side == 1 && reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_PULLED)
        return pulled_take(pair, reply->pulled, err);
    if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ITEM)
        return cox_fail(err, COX_CORRUPT, "a group sent an unexpected reply");
    const item_message *item = reply->item;
    if (!item->has_index || item->index >= pair->prompts->count ||
        pair->parts[item->index].place != (side ? PLACE_DECODE : PLACE_PREFILL) ||
        pair->parts[item->index].ready)
        return cox_fail(err, COX_CORRUPT,
                        "a group replied to prompt %" PRIu64 ", which is not under way there",
                        item->index + 1);
    return side ? decode_item(pair, item->index, item, err)
                : prefill_item(pair, item->index, item, err);
}

static int replies_take(struct pair *pair, int side, struct cox_error *err)
{
    control_reply *reply;
    int r;
    while ((r = cox_client_next(pair->clients[side], &reply, err)) == 0) {
        r = reply_take(pair, side, reply, err);
        if (r)
            return r;
        if (pair->run.failed)
            return cox_fail(err, pair->failure.code, "%s", pair->failure.text);
        if (cox_prompts_run_ends(&pair->run))
            return cox_fail(err, COX_CLOSED, "stopped");
    }
    return r == COX_EMPTY ? 0 : r;
}

/* ---- main loop ---- */

/* Blocks until there is something to do, and reads. ret_ends: that side has closed the connection.
 */
static int wait(struct pair *pair, bool ret_ends[2], struct cox_error *err)
{
    struct pollfd fds[3] = {{.fd = pair->stop_fd, .events = POLLIN}};
    for (int side = 0; side < 2; side++) {
        const struct cox_stream *stream = &pair->clients[side]->stream;
        fds[side + 1].fd = stream->fd;
        fds[side + 1].events = (short)(POLLIN | (cox_stream_pending(stream) ? POLLOUT : 0));
        ret_ends[side] = false;
    }
    const int watch_ms = cox_client_watch_ms(&pair->watches[0]);
    int count = poll(fds, 3, watch_ms < STAY_MS ? watch_ms : STAY_MS);
    if (count < 0)
        return errno == EINTR ? 0 : cox_fail(err, -errno, "poll: %s", cox_status_text(-errno));
    if (fds[0].revents)
        return cox_fail(err, COX_CLOSED, "stopped");
    for (int side = 0; side < 2; side++) {
        /* A reply of one side answers for both: the other may have nothing to do. */
        int r = 0;
        if (count)
            cox_client_watch_heard(&pair->watches[side]);
        else
            r = cox_connection_watch(&pair->watches[side], err);
        if (r)
            return r;
    }
    for (int side = 0; side < 2; side++) {
        int r =
            fds[side + 1].revents & ~POLLOUT ? cox_stream_fill(&pair->clients[side]->stream) : 0;
        ret_ends[side] = r == COX_CLOSED;
        if (r && !ret_ends[side])
            return cox_fail(err, r, "the connection to the group '%s': %s",
                            pair->clients[side]->group, cox_status_text(r));
    }
    return 0;
}

static bool has_room(const struct cox_client *client)
{
    return cox_stream_pending(&client->stream) < PENDING_MAX;
}

static int turn(struct pair *pair, struct cox_error *err)
{
    bool ends[2];
    /* Queued bytes first; if some remain, poll waits for room. */
    int r = both_flush(pair);
    if ((!r || r == COX_CLOSED) && has_room(pair->clients[0]))
        r = prefill_send(pair);
    if ((!r || r == COX_CLOSED) && has_room(pair->clients[1]))
        r = decode_send(pair, true);
    if ((!r || r == COX_CLOSED) && has_room(pair->clients[1]))
        r = decode_send(pair, false);
    if (!r || r == COX_CLOSED)
        r = stay(pair);
    if (!r)
        r = both_flush(pair);
    /* A group that has stopped reading may still have sent the reason. */
    if (r && r != COX_CLOSED)
        return cox_fail(err, r, "the connection to a group: %s", cox_status_text(r));
    r = wait(pair, ends, err);
    for (int side = 0; !r && side < 2; side++)
        r = replies_take(pair, side, err);
    for (int side = 0; !r && side < 2; side++)
        if (ends[side] && pair->run.done_count < pair->prompts->count)
            r = cox_fail(
                err, COX_CLOSED,
                "the group '%s' has ended, its coordinator is gone: %zu of %zu prompts were completed, and what was printed is right; run it again once the group runs",
                side ? pair->how->decode : pair->how->prefill, pair->run.done_count,
                pair->prompts->count);
    return r;
}

int cox_prefill_decode_complete(struct cox_prompts *prompts, struct cox_client *prefill,
                                struct cox_client *decode,
                                const struct cox_prefill_decode_options *how, int stop_fd,
                                const struct cox_complete_options *options,
                                struct cox_engine_loop_stats *ret_stats,
                                struct cox_prefill_decode_stats *ret_pair_stats,
                                struct cox_error *err)
{
    struct pair pair = {
        .prompts = prompts,
        .clients = {prefill, decode},
        .how = how,
        .options = options,
        .stop_fd = stop_fd,
        .watches = {{.name = how->prefill, .timeout_ms = options->timeout_ms},
                    {.name = how->decode, .timeout_ms = options->timeout_ms}},
        .run = {.prompts = prompts, .options = options},
        .parts = calloc(prompts->count + 1, sizeof *pair.parts),
        .unsent_count = prompts->count,
    };
    struct cox_error error = {0};
    uint64_t started_ns = cox_now_ns();
    cox_prompts_run_progress(&pair.run);
    int r = pair.parts ? groups_link(&pair, &error) : cox_fail(&error, -ENOMEM, "no memory");
    while (!r && pair.run.done_count < prompts->count)
        r = turn(&pair, &error);
    for (size_t i = 0; pair.parts && i < prompts->count; i++)
        free(pair.parts[i].source);
    free(pair.parts);
    ret_stats->run_ns = cox_now_ns() - started_ns;
    ret_stats->batcher.generated_tokens = pair.generated_tokens;
    *ret_pair_stats = pair.stats;
    return cox_prompts_run_end(&pair.run, r, &error, err);
}
