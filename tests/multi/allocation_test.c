/* No allocation between request and reply, on either side: every allocation of this program is
 * counted, and it is its own worker, which replies with its count. */

#include <coxswain/executor.h>
#include "proto/executor.pb-c.h"
#include "tests/lib/test.h"
#include <coxswain/worker.h>

#define RANK_COUNT 2
#define ROW_COUNT_MAX 256
#define BLOCK_SIZE 16 /* positions */
#define PAYLOAD_SIZE 4096
#define REPLY_SIZE 256
#define WARM_UP 64
#define ROUNDS 2000
#define PATIENCE_MS 20000

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTING 1
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static _Atomic uint64_t allocations;
/* A thread that requests pass through. The supervisor and the control socket may still be busy with
 * the start of the ranks. */
static _Thread_local bool counted;

/* COX_PUBLIC: what the shared libraries allocate is counted as well. */
COX_PUBLIC void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, counted);
    return __libc_malloc(size);
}

COX_PUBLIC void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, counted);
    return __libc_calloc(count, size);
}

COX_PUBLIC void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, counted);
    return __libc_realloc(old, size);
}

COX_PUBLIC void *aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, counted);
    return __libc_memalign(alignment, size);
}

COX_PUBLIC int posix_memalign(void **memory, size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, counted);
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}
#else
#define COUNTING 0
static _Atomic uint64_t allocations;
static _Thread_local bool counted;
#endif

/* ---- the worker ---- */

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context;
    counted = true;
    uint64_t count = atomic_load(&allocations);
    if (request_size < REPLY_SIZE || reply_capacity < REPLY_SIZE)
        return cox_fail(err, COX_INVALID, "a request of %zu bytes", request_size);
    memcpy(reply, request, REPLY_SIZE);
    memcpy(reply, &count, sizeof count);
    *ret_reply_size = REPLY_SIZE;
    return 0;
}

static int worker_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    (void)context, (void)err;
    for (uint32_t i = 0; i < batch->row_count; i++)
        outputs[i].token = (int32_t)(batch->rows[i].position % 100);
    return 0;
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .opaque = worker_opaque,
                                                          .execute = worker_execute};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *worker = NULL;
    int r = cox_worker_options_parse(&options, &argc, argv, test_err());
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &worker, test_err());
    if (r == 0)
        r = cox_worker_run(worker, test_err());
    if (r)
        fprintf(stderr, "worker: %s\n", test_error.text);
    cox_worker_free(worker);
    return r != 0;
}

/* ---- the coordinator ---- */

struct group {
    struct cox_executor *executor;
    /* as the last opaque replies told them */
    uint64_t worker_counts[RANK_COUNT];
    /* of the last step */
    uint64_t base_sequence;
    /* of a step */
    uint32_t row_count;
    struct cox_error err;

    /* The rounds that run by submit and handler. */
    int (*submit)(struct group *group, uint32_t round);
    uint32_t round;
    int failure;
    sem_t ended;

    uint8_t payload[PAYLOAD_SIZE];
    Coxswain__StepSequence sequences[ROW_COUNT_MAX];
    Coxswain__StepSequence *pointers[ROW_COUNT_MAX];
    uint32_t slots[ROW_COUNT_MAX], positions[ROW_COUNT_MAX];
    int32_t blocks[ROW_COUNT_MAX];
};

static void take_replies(void *context, const struct cox_completion *completion)
{
    struct group *group = context;
    counted = true;
    if (completion->status)
        group->failure = cox_fail(&group->err, completion->status, "%s", completion->text);
    else if (completion->type == COX_TYPE_OPAQUE)
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            memcpy(&group->worker_counts[rank], completion->ranks[rank].bytes, sizeof(uint64_t));
    else
        group->base_sequence = completion->sequence;
}

static void take_and_submit(void *context, const struct cox_completion *completion)
{
    struct group *group = context;
    take_replies(group, completion);
    if (group->failure == 0 && ++group->round < ROUNDS)
        group->failure = group->submit(group, group->round);
    if (group->failure || group->round == ROUNDS)
        sem_post(&group->ended);
}

static struct cox_submit_options how(enum cox_gather gather)
{
    return (struct cox_submit_options){.size = sizeof(struct cox_submit_options),
                                       .gather = gather,
                                       .deadline_ns = cox_deadline_after_ms(PATIENCE_MS)};
}

static int call_opaque(struct group *group, uint32_t round)
{
    const struct cox_submit_options options = how(COX_GATHER_ALL);
    (void)round;
    return cox_executor_call_opaque(group->executor, group->payload, PAYLOAD_SIZE, &options,
                                    take_replies, group, &group->err);
}

static int submit_opaque(struct group *group, uint32_t round)
{
    const struct cox_submit_options options = how(COX_GATHER_ALL);
    (void)round;
    return cox_executor_submit_opaque(group->executor, group->payload, PAYLOAD_SIZE, &options, NULL,
                                      &group->err);
}

/* One decode step; the first one, on base 0, announces its sequences, and as they grow they are
 * given blocks. */
static int send_step(struct group *group, uint32_t position, bool call)
{
    int32_t prompt[1] = {1}, block[1] = {0};
    Coxswain__StepBlockTable table = COXSWAIN__STEP_BLOCK_TABLE__INIT;
    Coxswain__StepBlockTable *tables[1] = {&table};
    table.n_blocks = 1;
    table.blocks = block;
    for (uint32_t i = 0; i < group->row_count; i++) {
        coxswain__step_sequence__init(&group->sequences[i]);
        group->sequences[i].has_seq_id = group->sequences[i].has_slot = 1;
        group->sequences[i].seq_id = 100 + i;
        group->sequences[i].slot = i;
        group->sequences[i].n_tokens = group->sequences[i].n_tables = 1;
        group->sequences[i].tokens = prompt;
        group->sequences[i].tables = tables;
        group->pointers[i] = &group->sequences[i];
        group->slots[i] = i;
        group->positions[i] = position;
        group->blocks[i] = (int32_t)(position / BLOCK_SIZE);
    }
    Coxswain__StepDelta delta = COXSWAIN__STEP_DELTA__INIT;
    delta.has_base_sequence = 1;
    delta.base_sequence = position == 0 ? 0 : group->base_sequence;
    delta.n_announced = position == 0 ? group->row_count : 0;
    delta.announced = group->pointers;
    if (position > 0 && position % BLOCK_SIZE == 0)
        delta.n_append_slot = delta.n_append_block = group->row_count;
    delta.append_slot = group->slots;
    delta.append_block = group->blocks;
    delta.n_row_slot = delta.n_row_position = group->row_count;
    delta.row_slot = group->slots;
    delta.row_position = group->positions;
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    model.has_forward_type = 1;
    model.forward_type = COXSWAIN__FORWARD_TYPE__DECODE;
    model.step = &delta;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    request.execute_model_request = &model;
    const struct cox_submit_options options = how(COX_GATHER_RANK0);
    return call ? cox_executor_call(group->executor, &request, &options, take_replies, group,
                                    &group->err)
                : cox_executor_submit(group->executor, &request, &options, NULL, &group->err);
}

static int call_step(struct group *group, uint32_t round)
{
    return send_step(group, round, true);
}

static int submit_step(struct group *group, uint32_t round)
{
    return send_step(group, round, false);
}

static void must(const struct group *group, int r)
{
    if (r || group->failure)
        fail_msg("%s", group->err.text[0] ? group->err.text : cox_status_text(r));
}

static void run_calls(struct group *group, int (*call)(struct group *, uint32_t), uint32_t rounds)
{
    for (uint32_t round = 0; round < rounds; round++)
        must(group, call(group, round));
}

static void run_submits(struct group *group, int (*submit)(struct group *, uint32_t))
{
    group->submit = submit;
    group->round = 0;
    must(group, submit(group, 0));
    while (sem_wait(&group->ended) < 0 && errno == EINTR)
        continue;
    must(group, 0);
}

/* ROUNDS of either way, after the warm-up. */
static void expect_none(struct group *group, int (*call)(struct group *, uint32_t),
                        int (*submit)(struct group *, uint32_t))
{
    uint64_t before[RANK_COUNT], own;
    counted = true;
    run_calls(group, call_opaque, WARM_UP);
    memcpy(before, group->worker_counts, sizeof before);
    own = atomic_load(&allocations);
    run_calls(group, call, ROUNDS);
    assert_int_equal(atomic_load(&allocations) - own, 0);
    run_submits(group, submit);
    assert_int_equal(atomic_load(&allocations) - own, 0);
    run_calls(group, call_opaque, 1);
    for (int rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(group->worker_counts[rank], before[rank]);
}

static struct group *start(enum cox_attach attach)
{
    static struct group group;
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = '\0';
    const char *command[] = {self, NULL};
    const struct cox_executor_options options = {.size = sizeof(struct cox_executor_options),
                                                 .rank_count = RANK_COUNT,
                                                 .workers.command = command,
                                                 .memory.attach = attach};
    group = (struct group){0};
    sem_init(&group.ended, 0, 0);
    must(&group, cox_executor_start(&options, &group.executor, &group.err));
    must(&group,
         cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, take_and_submit, &group));
    return &group;
}

static void opaque_requests(enum cox_attach attach)
{
    struct group *group = start(attach);
    run_calls(group, call_opaque, WARM_UP);
    expect_none(group, call_opaque, submit_opaque);
    cox_executor_free(group->executor);
}

static void steps(enum cox_attach attach)
{
    static const uint32_t row_counts[] = {16, ROW_COUNT_MAX};
    struct group *group = start(attach);
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        group->row_count = row_counts[i];
        /* The table's memory doubles as sequences grow, and a reset keeps the old rows until it has
         * succeeded: two whole runs first, then the same again. */
        for (int life = 0; life < 2; life++)
            run_calls(group, call_step, ROUNDS);
        expect_none(group, call_step, submit_step);
    }
    cox_executor_free(group->executor);
}

PLAIN_TEST(opaque_requests_allocate_nothing)
{
    opaque_requests(COX_ATTACH_NAMED);
}

PLAIN_TEST(sealed_opaque_requests_allocate_nothing)
{
    opaque_requests(COX_ATTACH_SEALED);
}

PLAIN_TEST(steps_allocate_nothing)
{
    steps(COX_ATTACH_NAMED);
}

PLAIN_TEST(sealed_steps_allocate_nothing)
{
    steps(COX_ATTACH_SEALED);
}

int main(int argc, char **argv)
{
    if (getenv("COXSWAIN_PREFIX"))
        return worker_main(argc, argv);
    if (!COUNTING)
        return 77; /* a sanitizer's malloc cannot be counted this way */
    return test_run(NULL, NULL);
}
