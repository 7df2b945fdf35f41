#include "remote.h"

#include "channel/base/idioms.h"
#include "program/cli/connection.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* Prompts of one message; the group reads a message completely before it begins. */
#define CHUNK_COUNT 64
#define CHUNK_TOKENS 65536

typedef CoxswainControl__ControlRequest control_request;
typedef CoxswainControl__ControlReply control_reply;

struct remote {
    struct cox_prompts *prompts;
    struct cox_client *client;
    const struct cox_complete_options *options;
    uint32_t window;
    int stop_fd;
    struct cox_watch watch;
    struct cox_prompts_run run;
    size_t sent_count;
    uint64_t generated_tokens;
    /* reported for a prompt, but not caused by it */
    struct cox_error failure;
};

/* ---- sending ---- */

static void chunk_fill(struct remote *remote, CoxswainControl__Prompt *messages,
                       CoxswainControl__CompleteRequest *complete)
{
    size_t tokens = 0;
    while (remote->sent_count < remote->prompts->count && complete->n_prompts < CHUNK_COUNT &&
           remote->sent_count - remote->run.done_count < remote->window && tokens < CHUNK_TOKENS) {
        const struct cox_prompt *prompt = &remote->prompts->items[remote->sent_count];
        CoxswainControl__Prompt *message = &messages[complete->n_prompts];
        coxswain_control__prompt__init(message);
        COX_SET(message, index, remote->sent_count++);
        message->n_tokens = prompt->token_count;
        message->tokens = prompt->tokens;
        complete->prompts[complete->n_prompts++] = message;
        tokens += prompt->token_count;
    }
}

void cox_remote_fill(const struct cox_complete_options *options,
                     struct CoxswainControl__CompleteRequest *complete, int32_t *stop_tokens)
{
    memcpy(stop_tokens, options->stop_tokens, sizeof options->stop_tokens);
    COX_SET(complete, new_count_max, cox_complete_new_count(options));
    COX_SET(complete, shorten, options->new_count_max == 0);
    complete->has_temperature = complete->has_top_p = complete->has_top_k = complete->has_seed =
        true;
    complete->temperature = options->sampling.temperature;
    complete->top_p = options->sampling.top_p;
    complete->top_k = options->sampling.top_k;
    complete->seed = options->sampling.seed;
    complete->stop_tokens = stop_tokens;
    complete->n_stop_tokens = options->stop_count;
    complete->lora = (char *)(uintptr_t)options->lora;
}

/* Sends the next prompts, as far as the window allows. */
static int chunk_send(struct remote *remote)
{
    const struct cox_complete_options *options = remote->options;
    CoxswainControl__Prompt messages[CHUNK_COUNT], *list[CHUNK_COUNT];
    CoxswainControl__CompleteRequest complete = COXSWAIN_CONTROL__COMPLETE_REQUEST__INIT;
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    int32_t stop_tokens[COX_EOS_COUNT_MAX];
    complete.prompts = list;
    chunk_fill(remote, messages, &complete);
    if (complete.n_prompts == 0)
        return 0;
    cox_remote_fill(options, &complete, stop_tokens);
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_COMPLETE;
    request.complete = &complete;
    return cox_stream_put(&remote->client->stream, &request.base);
}

/* ---- receiving ---- */

static int item_take(struct remote *remote, const CoxswainControl__CompletionItem *item,
                     struct cox_error *err)
{
    struct cox_prompts_run *run = &remote->run;
    uint64_t index = item->index;
    if (!item->has_index || index >= remote->sent_count || remote->prompts->items[index].done)
        return cox_fail(err, COX_CORRUPT,
                        "the group replied to prompt %" PRIu64 ", which is not under way",
                        index + 1);
    struct cox_error cause = {0};
    struct cox_prompt_result result = {.tokens = item->tokens};
    if (item->has_finish && item->finish == COXSWAIN_CONTROL__FINISH__FAILED && item->error) {
        result.finish = COX_FINISH_ERROR;
        result.code = cox_client_error(item->error, &cause);
        result.text = cause.text;
    } else if (item->has_finish &&
               (item->finish == COXSWAIN_CONTROL__FINISH__STOP ||
                item->finish == COXSWAIN_CONTROL__FINISH__LENGTH) &&
               item->n_tokens <= cox_complete_new_count(remote->options)) {
        result.finish =
            item->finish == COXSWAIN_CONTROL__FINISH__STOP ? COX_FINISH_STOP : COX_FINISH_LENGTH;
        result.token_count = (uint32_t)item->n_tokens;
    } else {
        return cox_fail(err, COX_CORRUPT, "the reply to prompt %" PRIu64 " is invalid", index + 1);
    }
    remote->generated_tokens += result.token_count;
    cox_prompts_take(run, &remote->prompts->items[index], &result);
    if (run->failed && !remote->failure.code)
        cox_fail(&remote->failure, result.code, "%s", cause.text);
    return 0;
}

/* Processes the replies received. */
static int replies_take(struct remote *remote, struct cox_error *err)
{
    control_reply *reply;
    int r;
    while ((r = cox_client_next(remote->client, &reply, err)) == 0) {
        if (reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR)
            return cox_client_error(reply->error, err);
        if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ITEM)
            return cox_fail(err, COX_CORRUPT, "the group sent an unexpected reply");
        r = item_take(remote, reply->item, err);
        if (r)
            return r;
        if (remote->run.failed)
            return cox_fail(err, remote->failure.code, "%s", remote->failure.text);
        if (cox_prompts_run_ends(&remote->run))
            return cox_fail(err, COX_CLOSED, "stopped");
    }
    return r == COX_EMPTY ? 0 : r;
}

/* Blocks until there is something to do, and reads. *ret_end: the other side has closed the
 * connection. */
static int wait(struct remote *remote, bool *ret_end, struct cox_error *err)
{
    struct cox_stream *stream = &remote->client->stream;
    bool pending = cox_stream_pending(stream) > 0;
    struct pollfd fds[2] = {
        {.fd = stream->fd, .events = (short)(POLLIN | (pending ? POLLOUT : 0))},
        {.fd = remote->stop_fd, .events = POLLIN},
    };
    *ret_end = false;
    int count = poll(fds, 2, cox_client_watch_ms(&remote->watch));
    if (count < 0)
        return errno == EINTR ? 0 : cox_fail(err, -errno, "poll: %s", cox_status_text(-errno));
    if (count == 0)
        return cox_connection_watch(&remote->watch, err);
    if (fds[1].revents)
        return cox_fail(err, COX_CLOSED, "stopped");
    cox_client_watch_heard(&remote->watch);
    int r = fds[0].revents & ~POLLOUT ? cox_stream_fill(stream) : 0;
    *ret_end = r == COX_CLOSED;
    return r == 0 || *ret_end
               ? 0
               : cox_fail(err, r, "the connection to the group: %s", cox_status_text(r));
}

static int turn(struct remote *remote, struct cox_error *err)
{
    struct cox_stream *stream = &remote->client->stream;
    int r = cox_stream_pending(stream) ? 0 : chunk_send(remote);
    if (!r)
        r = cox_stream_flush(stream);
    /* A group that has stopped reading may still have sent the reason. */
    if (r && r != COX_CLOSED)
        return cox_fail(err, r, "the connection to the group: %s", cox_status_text(r));
    bool end;
    r = wait(remote, &end, err);
    if (!r)
        r = replies_take(remote, err);
    if (!r && end && remote->run.done_count < remote->prompts->count)
        r = cox_fail(
            err, COX_CLOSED,
            "the group '%s' has ended, its coordinator is gone: %zu of %zu prompts were completed, and what was printed is right; run it again once the group runs",
            remote->client->group, remote->run.done_count, remote->prompts->count);
    return r;
}

int cox_remote_complete(struct cox_prompts *prompts, struct cox_client *client, const char *name,
                        uint32_t window, int stop_fd, const struct cox_complete_options *options,
                        struct cox_engine_loop_stats *ret_stats, struct cox_error *err)
{
    struct remote remote = {
        .prompts = prompts,
        .client = client,
        .watch = {.name = name, .timeout_ms = options->timeout_ms, .heard_ns = cox_now_ns()},
        .options = options,
        .window = window,
        .stop_fd = stop_fd,
        .run = {.prompts = prompts, .options = options},
    };
    struct cox_error error = {0};
    uint64_t started_ns = cox_now_ns();
    cox_prompts_run_progress(&remote.run);
    int r = 0;
    while (!r && remote.run.done_count < prompts->count)
        r = turn(&remote, &error);
    ret_stats->run_ns = cox_now_ns() - started_ns;
    ret_stats->batcher.generated_tokens = remote.generated_tokens;
    return cox_prompts_run_end(&remote.run, r, &error, err);
}
