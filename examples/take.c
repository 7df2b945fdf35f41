/* The same worker as worker.c, but without callbacks: its main thread takes requests and replies.
 * Build: cc take.c $(pkg-config --cflags --libs coxswain); run: ./coordinator ./take */
#include <coxswain/coxswain.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The request is an array of int64; rank r of n adds the elements r, r + n, r + 2n, ... */
static int64_t add(const struct cox_worker_options *me, const struct cox_worker_request *request)
{
    int64_t number, sum = 0;
    for (size_t i = me->rank; (i + 1) * sizeof number <= request->size; i += me->rank_count) {
        memcpy(&number, request->bytes + i * sizeof number, sizeof number);
        sum += number;
    }
    return sum;
}

int main(int argc, char **argv)
{
    static const struct cox_worker_callbacks none = COX_WORKER_CALLBACKS_INIT;
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker_request request;
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&options, &none, NULL, &worker, &err);
    if (r == 0)
        r = cox_worker_start(worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), &err);
    while (r == 0 && (r = cox_worker_next(worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request,
                                          &err)) == 0) {
        const int64_t sum = add(&options, &request);
        /* Another thread may reply too, even after later requests were taken. */
        r = cox_worker_reply(worker, request.sequence, &sum, sizeof sum, &err);
    }
    if (r == COX_CLOSED) /* the coordinator has ended the group */
        r = cox_worker_join(worker, &err);
    if (r)
        fprintf(stderr, "take: rank %" PRIu32 ": %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
}
