#include "coxswain.h"

#include <inttypes.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../coordinator/executor.h"
#include "../../worker/worker.h"
#include "load.h"
#include "measure.h"

#define DEPTH 4
#define ROUND_DEADLINE_MS 10000
/* What a frame and a slot hold without being asked for more. */
#define FRAME_SIZE_DEFAULT ((size_t)1 << 20)
#define SLOT_SIZE_DEFAULT ((size_t)64 << 10)
#define PREFIX_SIZE 4
#define PAGE_SIZE 4096

struct group {
    struct cox_executor *executor;
    pid_t *pids;
    size_t request_size;
    uint64_t rounds; /* numbers requests through all slices */

    /* The slice that runs. Written by the thread that submits: first the caller's, then the
     * response thread. */
    uint8_t *request;
    uint64_t *samples_ns;
    size_t sample_count;
    size_t sampled;
    uint64_t submitted_ns;
    int failure;
    struct cox_error *err;
    sem_t ended;
};

/* ---- workers ---- */

struct worker_context {
    struct load load;
    uint32_t rank;
};

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    struct worker_context *own = context;
    if (request_size != own->load.request_size || reply_capacity < own->load.reply_size)
        return cox_fail(err, COX_INVALID, "a request of %zu bytes, expected %zu", request_size,
                        own->load.request_size);
    load_answer(&own->load, request, own->rank, reply);
    *ret_reply_size = own->load.reply_size;
    return 0;
}

int group_worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.opaque = worker_opaque};
    struct cox_worker_options options = {0};
    struct worker_context own = {0};
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && argc != 4)
        r = cox_fail(&err, COX_INVALID, "expected " WORKER_FLAG " REQUEST_BYTES REPLY_BYTES");
    if (r == 0)
        r = load_init(&own.load, strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
    own.rank = options.rank;
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &own, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank,
                err.text[0] ? err.text : cox_status_text(r));
    cox_worker_free(worker);
    load_deinit(&own.load);
    return r != 0;
}

/* ---- the group ---- */

static void show_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context;
    (void)is_stderr;
    fprintf(stderr, "[rank %" PRIu32 "] %s\n", rank, text);
}

/* Bytes of a region with `count` parts for `size` bytes each; 0: the default is enough. */
static uint64_t region_size(size_t count, size_t size, size_t enough)
{
    size_t part = (size + PREFIX_SIZE + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    return size + PREFIX_SIZE <= enough ? 0 : (uint64_t)count * part;
}

int group_start(uint32_t rank_count, size_t request_size, size_t reply_size, bool sealed,
                struct group **ret_group, struct cox_error *err)
{
    char program[4096], request_text[24], reply_text[24];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0)
        return cox_fail(err, -errno, "/proc/self/exe: %s", cox_status_text(-errno));
    program[length] = '\0';
    snprintf(request_text, sizeof request_text, "%zu", request_size);
    snprintf(reply_text, sizeof reply_text, "%zu", reply_size);
    const char *const command[] = {program, WORKER_FLAG, request_text, reply_text, NULL};
    struct cox_executor_options options = {
        .rank_count = rank_count,
        .command = command,
        .depth = DEPTH,
        .attach = sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED,
        .line = show_line,
    };
    options.request_size[COX_CHANNEL_EXECUTE] =
        region_size(DEPTH, request_size, FRAME_SIZE_DEFAULT);
    options.response_size[COX_CHANNEL_EXECUTE] =
        region_size((size_t)DEPTH * rank_count, reply_size, SLOT_SIZE_DEFAULT);
    struct group *group = calloc(1, sizeof *group);
    if (!group)
        return cox_fail(err, -ENOMEM, "no memory for the group");
    group->request_size = request_size;
    sem_init(&group->ended, 0, 0);
    group->pids = calloc(rank_count, sizeof *group->pids);
    int r = group->pids ? cox_executor_start(&options, &group->executor, err)
                        : cox_fail(err, -ENOMEM, "no memory for the group");
    if (r) {
        group_free(group);
        return r;
    }
    for (uint32_t rank = 0; rank < rank_count; rank++)
        group->pids[rank] = cox_executor_pid(group->executor, rank);
    *ret_group = group;
    return 0;
}

struct group *group_free(struct group *group)
{
    if (!group)
        return NULL;
    cox_executor_free(group->executor);
    sem_destroy(&group->ended);
    free(group->pids);
    free(group);
    return NULL;
}

const pid_t *group_pids(const struct group *group)
{
    return group->pids;
}

/* ---- rounds ---- */

static int check_completion(const struct group *group, const struct cox_completion *completion,
                            struct cox_error *err)
{
    if (completion->status)
        return cox_fail(err, completion->status, "%s", completion->text);
    for (uint32_t rank = 0; rank < completion->rank_count; rank++)
        if (completion->ranks[rank].size < LOAD_SIZE_MIN ||
            !load_matches(completion->ranks[rank].bytes, rank, group->rounds))
            return cox_fail(err, -EBADMSG, "rank %" PRIu32 " answered something else", rank);
    return 0;
}

static int submit_next(struct group *group)
{
    load_number(group->request, ++group->rounds);
    group->submitted_ns = measure_now_ns();
    const struct cox_submit_options options = {
        .gather = COX_GATHER_ALL,
        .deadline_ns = group->submitted_ns + ROUND_DEADLINE_MS * COX_NSEC_PER_MSEC,
    };
    return cox_executor_submit_opaque(group->executor, group->request, group->request_size,
                                      &options, NULL, group->err);
}

static void slice_completed(void *context, const struct cox_completion *completion)
{
    uint64_t now = measure_now_ns();
    struct group *group = context;
    group->samples_ns[group->sampled++] = now - group->submitted_ns;
    group->failure = check_completion(group, completion, group->err);
    if (group->failure == 0 && group->sampled < group->sample_count) {
        group->failure = submit_next(group);
        if (group->failure == 0)
            return;
    }
    sem_post(&group->ended);
}

static void slice_begin(struct group *group, uint8_t *request, uint64_t *samples_ns, size_t count,
                        struct cox_error *err)
{
    group->request = request;
    group->samples_ns = samples_ns;
    group->sample_count = count;
    group->sampled = 0;
    group->err = err;
}

int group_slice(struct group *group, uint8_t *request, uint64_t *samples_ns, size_t count,
                struct cox_error *err)
{
    slice_begin(group, request, samples_ns, count, err);
    int r = cox_executor_replace(group->executor, COX_CHANNEL_EXECUTE, slice_completed, group);
    if (r == 0)
        r = submit_next(group);
    if (r)
        return r;
    while (sem_wait(&group->ended) < 0 && errno == EINTR)
        continue;
    return group->failure;
}

static void call_completed(void *context, const struct cox_completion *completion)
{
    struct group *group = context;
    group->failure = check_completion(group, completion, group->err);
}

int group_slice_calls(struct group *group, uint8_t *request, uint64_t *samples_ns, size_t count,
                      struct cox_error *err)
{
    slice_begin(group, request, samples_ns, count, err);
    while (group->sampled < count) {
        load_number(request, ++group->rounds);
        uint64_t begin_ns = measure_now_ns();
        const struct cox_submit_options options = {
            .gather = COX_GATHER_ALL,
            .deadline_ns = begin_ns + ROUND_DEADLINE_MS * COX_NSEC_PER_MSEC,
        };
        int r = cox_executor_call_opaque(group->executor, request, group->request_size, &options,
                                         call_completed, group, err);
        samples_ns[group->sampled++] = measure_now_ns() - begin_ns;
        if (r || group->failure)
            return r ? r : group->failure;
    }
    return 0;
}
