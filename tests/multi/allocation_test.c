/* No allocation between request and answer, on either side: every malloc of this program is
 * counted, and it is its own worker, which answers with its count. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "coordinator/executor.h"
#include "proto/executor.pb-c.h"
#include "worker/worker.h"

#define RANK_COUNT 2
#define ROW_COUNT 16
#define WARM_UP 64
#define ROUNDS 2000

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTING 1
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);

static _Atomic uint64_t allocations;

void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}
#else
#define COUNTING 0
static _Atomic uint64_t allocations;
#endif

/* ---- the worker ---- */

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context, (void)request, (void)request_size, (void)reply_capacity, (void)err;
    uint64_t count = atomic_load(&allocations);
    memcpy(reply, &count, sizeof count);
    *ret_reply_size = sizeof count;
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
    static const struct cox_worker_callbacks callbacks = {.opaque = worker_opaque,
                                                          .execute = worker_execute};
    struct cox_worker_options options = {0};
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "worker: %s\n", err.text);
    cox_worker_free(worker);
    return r != 0;
}

/* ---- the coordinator ---- */

struct answers {
    uint64_t worker_counts[RANK_COUNT];
    uint64_t base_sequence;
    int status;
};

static void take_answers(void *context, const struct cox_completion *completion)
{
    struct answers *answers = context;
    answers->status = completion->status;
    if (completion->status == 0 && completion->type == COX_TYPE_OPAQUE)
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            memcpy(&answers->worker_counts[rank], completion->ranks[rank].bytes, sizeof(uint64_t));
    if (completion->status == 0 && completion->type != COX_TYPE_OPAQUE)
        answers->base_sequence = completion->sequence;
}

static void call_opaque(struct cox_executor *executor, struct answers *answers)
{
    const struct cox_submit_options options = {.gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(20000)};
    struct cox_error err = {0};
    if (cox_executor_call_opaque(executor, "x", 1, &options, take_answers, answers, &err))
        fail_msg("%s", err.text);
}

/* One decode step of ROW_COUNT sequences; the first one, on base 0, announces them. */
static void call_step(struct cox_executor *executor, struct answers *answers, uint32_t position)
{
    int32_t prompt[1] = {1}, block[1] = {0};
    ModelExecuteData__StepBlockTable table = MODEL_EXECUTE_DATA__STEP_BLOCK_TABLE__INIT;
    ModelExecuteData__StepBlockTable *tables[1] = {&table};
    table.n_blocks = 1;
    table.blocks = block;
    ModelExecuteData__StepSequence sequences[ROW_COUNT];
    ModelExecuteData__StepSequence *pointers[ROW_COUNT];
    uint32_t slots[ROW_COUNT], positions[ROW_COUNT];
    for (uint32_t i = 0; i < ROW_COUNT; i++) {
        model_execute_data__step_sequence__init(&sequences[i]);
        sequences[i].has_seq_id = sequences[i].has_slot = 1;
        sequences[i].seq_id = 100 + i;
        sequences[i].slot = i;
        sequences[i].n_tokens = 1;
        sequences[i].tokens = prompt;
        sequences[i].n_tables = 1;
        sequences[i].tables = tables;
        pointers[i] = &sequences[i];
        slots[i] = i;
        positions[i] = position;
    }
    ModelExecuteData__StepDelta delta = MODEL_EXECUTE_DATA__STEP_DELTA__INIT;
    delta.has_base_sequence = 1;
    delta.base_sequence = position == 0 ? 0 : answers->base_sequence;
    delta.n_announced = position == 0 ? ROW_COUNT : 0;
    delta.announced = pointers;
    delta.n_row_slot = delta.n_row_position = ROW_COUNT;
    delta.row_slot = slots;
    delta.row_position = positions;
    ModelExecuteData__ExecuteModelRequest model = MODEL_EXECUTE_DATA__EXECUTE_MODEL_REQUEST__INIT;
    model.has_forward_type = 1;
    model.forward_type = MODEL_EXECUTE_DATA__FORWARD_TYPE__DECODE;
    model.step = &delta;
    ModelExecuteData__ExecuteRequest request = MODEL_EXECUTE_DATA__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = MODEL_EXECUTE_DATA__EXECUTE_TYPE__MODEL_INFER;
    request.request_case = MODEL_EXECUTE_DATA__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    request.execute_model_request = &model;
    const struct cox_submit_options options = {.gather = COX_GATHER_RANK0,
                                               .deadline_ns = cox_deadline_after_ms(20000)};
    struct cox_error err = {0};
    if (cox_executor_call(executor, &request, &options, take_answers, answers, &err))
        fail_msg("%s", err.text);
}

static struct cox_executor *start(void)
{
    const char *command[] = {"/proc/self/exe", NULL};
    char self[4096];
    ssize_t length = readlink(command[0], self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = '\0';
    command[0] = self;
    const struct cox_executor_options options = {.rank_count = RANK_COUNT, .command = command};
    struct cox_executor *executor = NULL;
    struct cox_error err = {0};
    if (cox_executor_start(&options, &executor, &err))
        fail_msg("%s", err.text);
    return executor;
}

static void opaque_requests_allocate_nothing(void **state)
{
    (void)state;
    struct cox_executor *executor = start();
    struct answers before, after;
    for (int i = 0; i < WARM_UP; i++)
        call_opaque(executor, &before);
    uint64_t own = atomic_load(&allocations);
    for (int i = 0; i < ROUNDS; i++)
        call_opaque(executor, &after);
    assert_int_equal(atomic_load(&allocations) - own, 0);
    for (int rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(after.worker_counts[rank], before.worker_counts[rank]);
    cox_executor_free(executor);
}

static void steps_allocate_nothing(void **state)
{
    (void)state;
    struct cox_executor *executor = start();
    struct answers answers = {0}, before, after;
    uint32_t position = 0;
    /* The table's memory doubles as sequences grow, and a reset keeps the old rows until it has
     * succeeded: two whole lives first, then the same again. */
    for (int life = 0; life < 2; life++)
        for (position = 0; position < ROUNDS; position++)
            call_step(executor, &answers, position);
    call_opaque(executor, &before);
    uint64_t own = atomic_load(&allocations);
    for (position = 0; position < ROUNDS; position++)
        call_step(executor, &answers, position);
    assert_int_equal(atomic_load(&allocations) - own, 0);
    call_opaque(executor, &after);
    for (int rank = 0; rank < RANK_COUNT; rank++)
        assert_int_equal(after.worker_counts[rank], before.worker_counts[rank]);
    cox_executor_free(executor);
}

int main(int argc, char **argv)
{
    if (getenv("COXSWAIN_PREFIX"))
        return worker_main(argc, argv);
    if (!COUNTING)
        return 77; /* a sanitizer's malloc cannot be counted this way */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opaque_requests_allocate_nothing),
        cmocka_unit_test(steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
