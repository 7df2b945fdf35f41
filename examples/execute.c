/* A worker of an engine: serves the init and the steps of `coxswain generate`. It has no model and
 * counts: after a digit comes the next one, in the tokens of models/sums, where 3 to 12 are 0 to 9.
 * Build: cc execute.c $(pkg-config --cflags --libs coxswain)
 * Run: coxswain generate -n 3 --worker ./execute --max-tokens 4 "1234" */
#include <coxswain/coxswain.h>

#include <inttypes.h>
#include <stdio.h>

#define POSITION_COUNT_MAX 64
#define BLOCK_SIZE 16
#define BLOCK_COUNT 64
#define DIGIT_0 3
#define DIGIT_COUNT 10

/* Loads the model; here there is none. The coordinator plans steps within what this reports. */
static int init(void *context, const struct cox_init_request *request,
                struct cox_init_result *result, struct cox_error *err)
{
    const struct cox_worker_options *me = context;
    const char *model = cox_init_request_get(request, "model");
    if (!model)
        return cox_fail(err, COX_INVALID, "no model is named");
    printf("rank %" PRIu32 " of %" PRIu32 ": a real one would load its part of %s\n", me->rank,
           me->rank_count, model);
    fflush(stdout);
    result->max_position_embeddings = POSITION_COUNT_MAX;
    result->npu_block_count = BLOCK_COUNT;
    result->kv_caches[0] =
        (struct cox_kv_cache_desc){.block_count = BLOCK_COUNT, .block_size = BLOCK_SIZE};
    result->kv_cache_count = 1;
    return 0;
}

/* A step: each row is a sequence with all its tokens; those from row->position on are new. */
static int execute(void *context, const struct cox_batch *batch, struct cox_batch_output *outputs,
                   struct cox_error *err)
{
    (void)context, (void)err;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        const int32_t last = row->tokens[row->position + row->token_count - 1];
        const int32_t next = DIGIT_0 + (last - DIGIT_0 + 1) % DIGIT_COUNT;
        outputs[i] = (struct cox_batch_output){.token = row->emit ? next : -1};
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .init = init, .execute = execute};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &options, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err); /* until the coordinator ends the group, or dies */
    if (r)
        fprintf(stderr, "execute: rank %" PRIu32 ": %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
}
