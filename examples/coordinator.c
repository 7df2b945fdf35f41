/* A coordinator: starts four workers, which add the numbers 1 to 1000 together.
 * Build: cc coordinator.c $(pkg-config --cflags --libs coxswain); run: ./coordinator ./worker */
#include <coxswain/coxswain.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define RANK_COUNT 4
#define NUMBER_COUNT 1000

/* Handler: gets the replies of all ranks; called exactly once per request. */
static void collect(void *context, const struct cox_completion *completion)
{
    int64_t *total = context, part;
    if (completion->status)
        return; /* cox_executor_call_opaque returns the status, and its text in err */
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        if (completion->ranks[rank].size != sizeof part)
            continue;
        memcpy(&part, completion->ranks[rank].bytes, sizeof part);
        printf("rank %" PRIu32 " adds %" PRId64 "\n", rank, part);
        *total += part;
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s WORKER [ARGUMENT...]\n", argv[0]);
        return 2;
    }
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = RANK_COUNT,
        .workers.command = (const char *const *)&argv[1],
    };
    struct cox_executor *executor = NULL;
    struct cox_error err = {0};
    int r = cox_executor_start(&options, &executor, &err);
    if (r == 0) {
        int64_t numbers[NUMBER_COUNT], total = 0;
        for (int i = 0; i < NUMBER_COUNT; i++)
            numbers[i] = i + 1;
        const struct cox_submit_options submit = {
            .size = sizeof(struct cox_submit_options),
            .gather = COX_GATHER_ALL,
            .deadline_ns = cox_deadline_after_ms(5000),
        };
        r = cox_executor_call_opaque(executor, numbers, sizeof numbers, &submit, collect, &total,
                                     &err);
        if (r == 0)
            printf("together %" PRId64 "\n", total);
    }
    if (r)
        fprintf(stderr, "coordinator: %s\n", err.text); /* names the rank and the reason */
    cox_executor_free(executor);
    return r != 0;
}
