/* nodes-bench-coxswain: a group over several machines, one rank on each. The lead is an executor
 * with options.nodes, whose handler takes the replies and wakes the main thread; with variant
 * `collect` the main thread takes them (options.collect). A node becomes `coxswain node`, which
 * starts this program in a third role, `rank`.
 *
 * A step is an opaque request to all ranks, with a reply from each. Variant `step` measures steps
 * of the batcher in their place: 16 sequences, each of which gets a token; its sizes are its own.
 * Bulk is one request of bulk_size to rank 0, which goes by the direct connection. Pull is one pull
 * of bulk_size from the rank of a second group, on node 1, by the rank of the first, on node 0. */
#include "coordinator/executor/core.h"
#include "coordinator/transport/nodes.h"
#include "engine/batching/batcher.h"
#include "engine/batching/message.h"
#include "proto/executor.pb-c.h"
#include "peer.h"
#include "pull.h"

#include <coxswain/executor.h>
#include <coxswain/worker.h>

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GROUP "bench"
#define SOURCE_GROUP "bench-source"
#define PATIENCE_MS 10000
/* A node says where it is, and its rank starts. */
#define START_MS 50000
#define PATH_SIZE 512
#define STEP "step"
#define COLLECT "collect"
#define SEQUENCES 16
#define PROMPT_TOKENS 32
#define NEW_TOKENS 32000
#define BLOCK_SIZE 128
/* A frame holds this much, unless it is bulk. */
#define FRAME_DEFAULT ((size_t)1 << 20)

struct lead {
    struct peer_options options;
    /* owned */
    struct cox_executor *executor;
    uint8_t *bulk;
    /* of mode pull; owned */
    struct cox_executor *source;
    struct pull *pull;
    /* of variant step; owned, but for step */
    struct cox_batcher *batcher;
    struct cox_step_message *message;
    const struct cox_step *step;
    pthread_mutex_t lock;
    int32_t tokens[SEQUENCES];
    struct cox_row_end ends[SEQUENCES];
    /* of its steps but the first */
    uint64_t steps, step_bytes;
    /* Of the request in flight; the handler fills what is not NULL. */
    struct peer_replies *replies;
    int failure;
    sem_t arrived;
};

struct rank {
    size_t reply_size;
    uint64_t index;
};

static int cox_fail_text(const char *what, const struct cox_error *why)
{
    return peer_fail(what, why->text);
}

static bool is_step(const struct peer_options *options)
{
    return strcmp(options->variant, STEP) == 0;
}

static bool is_collected(const struct peer_options *options)
{
    return strcmp(options->variant, COLLECT) == 0;
}

static void on_log(void *context, int level, const char *text)
{
    (void)context;
    if (level <= 4)
        fprintf(stderr, "lead: %s\n", text);
}

/* ---- the rank ---- */

static int rank_reply(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                      size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct rank *rank = context;
    if (request_size < sizeof rank->index || reply_capacity < rank->reply_size)
        return cox_fail(err, COX_INVALID, "a request of %zu bytes, room for a reply of %zu",
                        request_size, reply_capacity);
    memcpy(reply, request, sizeof rank->index);
    memcpy(reply + sizeof rank->index, &rank->index, sizeof rank->index);
    *ret_reply_size = rank->reply_size;
    return 0;
}

/* What every rank samples, and the lead expects. */
static int32_t token_after(int64_t id, uint32_t position)
{
    return (int32_t)(((uint64_t)id * 31 + position) & 0x7fff);
}

static int rank_execute(void *context, const struct cox_batch *batch,
                        struct cox_batch_output *outputs, struct cox_error *err)
{
    (void)context;
    (void)err;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        outputs[i].token = row->emit ? token_after(row->id, row->position + row->token_count) : -1;
        outputs[i].logprob = 0;
    }
    return 0;
}

/* PROGRAM rank REPLY_SIZE */
static int rank_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = rank_reply, .execute = rank_execute};
    struct rank rank = {.reply_size = argc == 3 ? strtoul(argv[2], NULL, 10) : 0};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = rank.reply_size < PEER_HEADER_SIZE
                ? cox_fail(&err, COX_INVALID, "no size of a reply")
                : cox_worker_options_parse(&options, &argc, argv, &err);
    rank.index = options.rank;
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &rank, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        cox_fail_text("a rank", &err);
    cox_worker_free(worker);
    return r != 0;
}

/* ---- the node ---- */

/* Of this program, and of the command beside it. */
static int find_programs(char ret_self[PATH_SIZE], char ret_coxswain[PATH_SIZE + 16])
{
    const ssize_t length = readlink("/proc/self/exe", ret_self, PATH_SIZE - 1);
    if (length < 0)
        return peer_fail_errno("/proc/self/exe", errno);
    ret_self[length] = '\0';
    const int folder = (int)(strrchr(ret_self, '/') - ret_self);
    snprintf(ret_coxswain, PATH_SIZE + 16, "%.*s/coxswain", folder, ret_self);
    return 0;
}

/* The file of --cluster, beside the certificates, for this node alone. */
static int cluster_write(const struct peer_options *options, const char *path)
{
    FILE *file = fopen(path, "we");
    if (!file)
        return peer_fail_errno(path, errno);
    fprintf(file,
            "{\"servers\": [\"tls://%s:4222\"], \"certificates\": \".\", \"nodes\": [{\"name\": "
            "\"%" PRIu32 "\", \"ranks\": 1}]}\n",
            options->server, options->index);
    return fclose(file) ? peer_fail_errno(path, errno) : 0;
}

static int node_main(const struct peer_options *options)
{
    char coxswain[PATH_SIZE + 16], self[PATH_SIZE], index[16], number[32];
    char cluster[PATH_SIZE], runtime[PATH_SIZE];
    int r = find_programs(self, coxswain);
    if (r)
        return r;
    snprintf(index, sizeof index, "%" PRIu32, options->index);
    peer_path(options, false, ".json", cluster, sizeof cluster);
    peer_path(options, false, ".run", runtime, sizeof runtime);
    r = cluster_write(options, cluster);
    if (r)
        return r;
    snprintf(number, sizeof number, "%zu",
             options->pull ? options->bulk_size / PULL_BLOCK_SIZE : options->reply_size);
    setenv("COXSWAIN_RUNTIME_DIR", runtime, 1);
    signal(SIGPIPE, SIG_DFL);
    execl(coxswain, coxswain, "node", "--name",
          options->pull && options->index ? SOURCE_GROUP : GROUP, "--node", index, "--cluster",
          cluster, "--", self, options->pull ? "kv" : "rank", number, (char *)NULL);
    return peer_fail_errno(coxswain, errno);
}

/* ---- the lead ---- */

static int take_tokens(struct lead *lead, const struct cox_completion *completion)
{
    struct cox_error err = {0};
    int r = cox_step_message_read(lead->message, lead->step, completion->sequence,
                                  completion->payload ? completion->payload->response : NULL,
                                  lead->tokens, lead->ends, &err);
    for (uint32_t i = 0; r == 0 && i < lead->step->row_count; i++) {
        const struct cox_step_row *row = &lead->step->rows[i];
        if (row->emit &&
            lead->tokens[i] != token_after(row->sequence->id, row->position + row->count))
            r = cox_fail(&err, -EBADMSG, "row %" PRIu32 " got another token", i);
    }
    if (r == 0)
        r = cox_batcher_commit(lead->batcher, lead->tokens, lead->ends, NULL, &err);
    return r ? cox_fail_text("tokens", &err) : 0;
}

static int take_replies(struct lead *lead, const struct cox_completion *completion)
{
    int r = 0;
    if (is_step(&lead->options)) {
        pthread_mutex_lock(&lead->lock);
        r = take_tokens(lead, completion);
        pthread_mutex_unlock(&lead->lock);
        return r;
    }
    for (uint32_t i = 0; r == 0 && lead->replies && i < completion->rank_count; i++)
        r = peer_replies_take(lead->replies, completion->ranks[i].bytes, completion->ranks[i].size);
    return r;
}

/* On the response thread. */
static void on_completion(void *context, const struct cox_completion *completion)
{
    struct lead *lead = context;
    lead->failure = completion->status ? peer_fail("a request", completion->text)
                                       : take_replies(lead, completion);
    sem_post(&lead->arrived);
}

/* Variant collect: on this thread. */
static int await(struct lead *lead)
{
    struct cox_completion completion;
    struct cox_error err = {0};
    uint32_t count;
    if (is_collected(&lead->options)) {
        if (cox_executor_completions(lead->executor, COX_CHANNEL_EXECUTE, &completion, 1,
                                     COX_DEADLINE_NEVER, &count, &err))
            return cox_fail_text("collecting", &err);
        on_completion(lead, &completion);
    }
    while (sem_wait(&lead->arrived) < 0)
        continue;
    return lead->failure;
}

static void lead_stop(void *peer)
{
    struct lead *lead = peer;
    pull_free(lead->pull);
    cox_executor_free(lead->executor);
    cox_executor_free(lead->source);
    cox_batcher_free(lead->batcher);
    cox_step_message_free(lead->message);
    pthread_mutex_destroy(&lead->lock);
    sem_destroy(&lead->arrived);
    free(lead->bulk);
    free(lead);
}

static int add_sequences(struct lead *lead)
{
    int32_t prompt[PROMPT_TOKENS];
    for (int i = 0; i < PROMPT_TOKENS; i++)
        prompt[i] = i * 37;
    const struct cox_prompt_request request = {
        .tokens = prompt,
        .token_count = PROMPT_TOKENS,
        .new_count_max = NEW_TOKENS,
        .sampling = {.top_p = 1},
    };
    int r = 0;
    for (int i = 0; r == 0 && i < SEQUENCES; i++)
        r = cox_batcher_add(lead->batcher, &request);
    return r;
}

static int start_steps(struct lead *lead, struct cox_error *err)
{
    const struct cox_batcher_options options = {
        .sequence_count_max = SEQUENCES,
        .token_count_max = SEQUENCES * PROMPT_TOKENS,
        .block_count = SEQUENCES * ((PROMPT_TOKENS + NEW_TOKENS) / BLOCK_SIZE + 2),
        .block_size = BLOCK_SIZE,
        .position_count_max = PROMPT_TOKENS + NEW_TOKENS,
    };
    int r = cox_batcher_new(&options, &lead->batcher, err);
    if (r)
        return r;
    return cox_step_message_new(SEQUENCES, false, &lead->message) || add_sequences(lead)
               ? cox_fail(err, -ENOMEM, "no memory for %d sequences", SEQUENCES)
               : 0;
}

/* "0:1,1:1,2:1" */
static void list_nodes(uint32_t first, uint32_t count, char *ret_list, size_t size)
{
    size_t length = 0;
    for (uint32_t i = 0; i < count; i++)
        length += (size_t)snprintf(ret_list + length, size - length, "%s%" PRIu32 ":1",
                                   i ? "," : "", first + i);
}

/* One rank on each of these nodes. */
static int start_group(struct lead *lead, const char *name, uint32_t first, uint32_t count,
                       struct cox_executor **ret_executor, struct cox_error *err)
{
    const struct peer_options *options = &lead->options;
    char list[PEER_NODES_MAX * 8], url[64], ca[PATH_SIZE], certificate[PATH_SIZE], key[PATH_SIZE];
    char runtime[PATH_SIZE];
    list_nodes(first, count, list, sizeof list);
    snprintf(url, sizeof url, "tls://%s:4222", options->server);
    snprintf(ca, sizeof ca, "%s/ca.pem", options->folder);
    peer_path(options, true, ".pem", certificate, sizeof certificate);
    peer_path(options, true, "-key.pem", key, sizeof key);
    peer_path(options, true, ".run", runtime, sizeof runtime);
    struct cox_executor_nodes nodes = COX_EXECUTOR_NODES_INIT;
    nodes.nodes = list;
    nodes.access =
        (struct cox_cluster_access){.url = url, .ca = ca, .certificate = certificate, .key = key};
    struct cox_executor_options group = COX_EXECUTOR_OPTIONS_INIT;
    group.name = name;
    group.nodes = &nodes;
    group.socket.runtime_dir = runtime;
    group.times.start_timeout_ms = START_MS;
    group.hooks.log.fn = on_log;
    if (options->reply_size + 4096 > FRAME_DEFAULT / PEER_NODES_MAX)
        group.memory.response_size[COX_CHANNEL_EXECUTE] =
            UINT64_C(4) * options->node_count * (options->reply_size + 4096);
    group.collect = is_collected(options);
    return cox_executor_start(&group, ret_executor, err);
}

static int start_pull(struct lead *lead, struct cox_error *err)
{
    int r = lead->options.node_count == 2
                ? start_group(lead, GROUP, 0, 1, &lead->executor, err)
                : cox_fail(err, COX_INVALID, "a pull is between two nodes");
    if (r == 0)
        r = start_group(lead, SOURCE_GROUP, 1, 1, &lead->source, err);
    return r ? r
             : pull_new(lead->executor, lead->source, lead->options.bulk_size, &lead->pull, err);
}

static int start_requests(struct lead *lead, struct cox_error *err)
{
    int r = start_group(lead, GROUP, 0, lead->options.node_count, &lead->executor, err);
    return r || is_collected(&lead->options)
               ? r
               : cox_executor_set_handler(lead->executor, COX_CHANNEL_EXECUTE, on_completion, lead);
}

static int lead_start(const struct peer_options *options, void **ret_lead)
{
    struct lead *lead = calloc(1, sizeof *lead);
    struct cox_error err = {0};
    if (!lead)
        return peer_fail_errno("the lead", ENOMEM);
    lead->options = *options;
    sem_init(&lead->arrived, 0, 0);
    pthread_mutex_init(&lead->lock, NULL);
    if (options->bulk && !options->pull)
        lead->bulk = calloc(1, options->bulk_size);
    int r = options->bulk && !options->pull && !lead->bulk
                ? cox_fail(&err, -ENOMEM, "no memory for bulk")
                : 0;
    if (r == 0 && is_step(options))
        r = start_steps(lead, &err);
    if (r == 0)
        r = options->pull ? start_pull(lead, &err) : start_requests(lead, &err);
    if (r) {
        lead_stop(lead);
        return cox_fail_text("the lead", &err);
    }
    *ret_lead = lead;
    return 0;
}

static struct cox_submit_options submit_options(enum cox_gather gather)
{
    struct cox_submit_options options = COX_SUBMIT_OPTIONS_INIT;
    options.gather = gather;
    options.deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    return options;
}

static int submit_bytes(struct lead *lead, const uint8_t *request, size_t size,
                        struct peer_replies *replies)
{
    const struct cox_submit_options options = submit_options(COX_GATHER_ALL);
    struct cox_error err = {0};
    lead->replies = replies;
    if (cox_executor_submit_opaque(lead->executor, request, size, &options, NULL, &err))
        return cox_fail_text("submitting", &err);
    return await(lead);
}

static int plan_step(struct lead *lead)
{
    int r = cox_batcher_next(lead->batcher, &lead->step);
    if (r != COX_EMPTY)
        return r;
    for (struct cox_sequence *done; (done = cox_batcher_done(lead->batcher)) != NULL;)
        cox_sequence_free(done);
    r = add_sequences(lead);
    return r ? r : cox_batcher_next(lead->batcher, &lead->step);
}

/* Planning and taking the tokens are part of the step: the next one begins with what it gave. */
static int lead_batch(struct lead *lead, struct peer_replies *replies)
{
    const struct cox_submit_options options = submit_options(COX_GATHER_RANK0);
    const struct Coxswain__ExecuteRequest *request;
    struct cox_error err = {0};
    uint64_t sequence;
    int r = plan_step(lead);
    if (r == 0)
        r = cox_step_message_fill(lead->message, lead->step, &request);
    if (r)
        return peer_fail("planning a step", cox_status_text(r));
    if (replies->step > 1) {
        lead->steps++;
        lead->step_bytes += coxswain__execute_request__get_packed_size(request);
    }
    /* The tokens may come before the batcher knows that the step is on its way. */
    pthread_mutex_lock(&lead->lock);
    r = cox_executor_submit(lead->executor, request, &options, &sequence, &err);
    if (r == 0)
        cox_batcher_publish(lead->batcher, sequence);
    pthread_mutex_unlock(&lead->lock);
    return r ? cox_fail_text("submitting", &err) : await(lead);
}

static int lead_step(void *peer, const uint8_t *request, struct peer_replies *replies)
{
    struct lead *lead = peer;
    return is_step(&lead->options)
               ? lead_batch(lead, replies)
               : submit_bytes(lead, request, lead->options.request_size, replies);
}

static int lead_bulk(void *peer, const uint8_t *chunk)
{
    struct lead *lead = peer;
    struct cox_error err = {0};
    if (lead->pull)
        return pull_run(lead->pull, &err) ? cox_fail_text("a pull", &err) : 0;
    memcpy(lead->bulk, chunk, PEER_HEADER_SIZE);
    return submit_bytes(lead, lead->bulk, lead->options.bulk_size, NULL);
}

/* The agents are known to the driver, their ranks to the executor. */
static uint32_t lead_processes(void *peer, pid_t ret_pids[PEER_NODES_MAX])
{
    struct lead *lead = peer;
    uint32_t count = 0;
    for (uint32_t i = 0; i < cox_executor_rank_count(lead->executor); i++)
        ret_pids[count++] = cox_executor_pid(lead->executor, i);
    if (lead->source)
        ret_pids[count++] = cox_executor_pid(lead->source, 0);
    return count;
}

static size_t lead_request_size(void *peer)
{
    const struct lead *lead = peer;
    return lead->steps ? (size_t)(lead->step_bytes / lead->steps) : lead->options.request_size;
}

int main(int argc, char **argv)
{
    static const struct peer_ops ops = {.transport = "coxswain",
                                        .start = lead_start,
                                        .step = lead_step,
                                        .bulk = lead_bulk,
                                        .processes = lead_processes,
                                        .request_size = lead_request_size,
                                        .stop = lead_stop,
                                        .node = node_main};
    if (argc > 1 && strcmp(argv[1], "rank") == 0)
        return rank_main(argc, argv);
    if (argc > 1 && strcmp(argv[1], "kv") == 0)
        return pull_rank_main(argc - 1, argv + 1);
    return peer_main(argc, argv, &ops);
}
