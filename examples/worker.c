/* A worker: replies to each request with the sum of those of its numbers that this rank adds.
 * Build: cc worker.c $(pkg-config --cflags --libs coxswain) */
#include <coxswain/coxswain.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The request is an array of int64; rank r of n adds the elements r, r + n, r + 2n, ... */
static int add(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
               size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct cox_worker_options *me = context;
    int64_t number, sum = 0;
    if (request_size % sizeof number || reply_capacity < sizeof sum)
        return cox_fail(err, COX_INVALID, "%zu bytes are no array of int64", request_size);
    for (size_t i = me->rank; i < request_size / sizeof number; i += me->rank_count) {
        memcpy(&number, request + i * sizeof number, sizeof number);
        sum += number;
    }
    memcpy(reply, &sum, sizeof sum);
    *ret_reply_size = sizeof sum;
    return 0;
}

int main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = add};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    /* Rank, world size and group come from the coordinator: in the environment, and as flags. */
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &options, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err); /* until the coordinator ends the group, or dies */
    if (r)
        fprintf(stderr, "worker: rank %" PRIu32 ": %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
}
