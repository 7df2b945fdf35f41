/*
 * async_worker: the worker of async_test.c, with the model of async_model.h. With the arguments
 * `await COUNT MS` the first COUNT steps with rows do not end before another request was published
 * behind them; a step without one within MS fails. With the arguments `slow COUNT` a step of more
 * than COUNT tokens takes until it is cancelled; each step with rows is printed on standard output,
 * as `step of COUNT tokens`.
 */
#include "async_model.h"

#include "worker/loop/worker_internal.h"
#include "tests/lib/posix.h"

struct cell {
    int64_t id;
    uint32_t position;
    int32_t token;
};

static struct cox_worker *worker;
static struct cell cells[ASYNC_BLOCK_COUNT][ASYNC_BLOCK_SIZE];
static uint64_t await_count, await_ms;
static uint64_t slow_above = UINT64_MAX;

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    (void)context, (void)request, (void)err;
    result->npu_block_count = ASYNC_BLOCK_COUNT;
    result->max_position_embeddings = 128;
    return 0;
}

static int32_t row_compute(const struct cox_batch_row *row)
{
    uint32_t end = row->position + row->token_count;
    if (row->tables[0].count * ASYNC_BLOCK_SIZE < end)
        return ASYNC_WRONG;
    for (uint32_t p = 0; p < end; p++) {
        int32_t block = row->tables[0].blocks[p / ASYNC_BLOCK_SIZE];
        if (block < 0 || block >= ASYNC_BLOCK_COUNT)
            return ASYNC_WRONG;
        struct cell *cell = &cells[block][p % ASYNC_BLOCK_SIZE];
        if (p >= row->position)
            *cell = (struct cell){.id = row->id, .position = p, .token = row->tokens[p]};
        if (cell->id != row->id || cell->position != p || cell->token != row->tokens[p])
            return ASYNC_WRONG;
    }
    return async_model(row->tokens, end);
}

/* Until there is a request behind this one. */
static int await_next(const struct cox_batch *batch, struct cox_error *err)
{
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, COX_CHANNEL_EXECUTE);
    uint64_t deadline_ns = cox_deadline_after_ms(await_ms);
    while (cox_state_published(shared) <= batch->sequence) {
        if (cox_batch_cancelled(batch))
            return cox_fail(err, COX_ABORTED, "given up");
        if (cox_now_ns() > deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "nothing was published behind step %" PRIu64,
                            batch->sequence);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return 0;
}

static int await_given_up(const struct cox_batch *batch, struct cox_error *err)
{
    while (!cox_batch_cancelled(batch))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    return cox_fail(err, COX_ABORTED, "given up");
}

static int on_execute(void *context, const struct cox_batch *batch,
                      struct cox_batch_output *outputs, struct cox_error *err)
{
    uint64_t token_count = 0;
    (void)context;
    for (uint32_t i = 0; i < batch->row_count; i++)
        token_count += batch->rows[i].token_count;
    if (slow_above != UINT64_MAX && batch->row_count) {
        printf("step of %" PRIu64 " tokens\n", token_count);
        fflush(stdout);
    }
    if (token_count > slow_above)
        return await_given_up(batch, err);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        int32_t token = row_compute(&batch->rows[i]);
        if (batch->rows[i].emit || token == ASYNC_WRONG)
            outputs[i].token = token;
    }
    if (!await_count || !batch->row_count)
        return 0;
    int r = await_next(batch, err);
    await_count -= r == 0;
    return r;
}

int main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .init = on_init, .execute = on_execute};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && argc == 4 && strcmp(argv[1], "await") == 0) {
        await_count = strtoull(argv[2], NULL, 10);
        await_ms = strtoull(argv[3], NULL, 10);
    }
    if (r == 0 && argc == 3 && strcmp(argv[1], "slow") == 0)
        slow_above = strtoull(argv[2], NULL, 10);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, NULL, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    cox_worker_free(worker);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank, err.text);
    return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
