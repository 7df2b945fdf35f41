/* A coordinator whose group `coxswain status`, `recover` and `stop` can reach. Four workers add the
 * numbers 1 to 1000 every 100 ms; one that dies is replaced.
 * Build: cc server.c $(pkg-config --cflags --libs coxswain); run: ./server NAME ./worker */
#include <coxswain/coxswain.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define RANK_COUNT 4
#define NUMBER_COUNT 1000

/* Handler: gets the replies of all ranks. */
static void add_up(void *context, const struct cox_completion *completion)
{
    int64_t *total = context, part;
    for (uint32_t rank = 0; completion->status == 0 && rank < completion->rank_count; rank++) {
        memcpy(&part, completion->ranks[rank].bytes, sizeof part);
        *total += part;
    }
}

static int ask(struct cox_executor *executor, struct cox_error *err)
{
    int64_t numbers[NUMBER_COUNT], total = 0;
    struct cox_submit_options options = COX_SUBMIT_OPTIONS_INIT;
    options.gather = COX_GATHER_ALL;
    options.deadline_ns = cox_deadline_after_ms(5000);
    for (int i = 0; i < NUMBER_COUNT; i++)
        numbers[i] = i + 1;
    int r =
        cox_executor_call_opaque(executor, numbers, sizeof numbers, &options, add_up, &total, err);
    if (r == 0)
        printf("together %" PRId64 "\n", total);
    return r;
}

/* Runs until the group has to end, or has failed. */
static int serve(struct cox_server *server, struct cox_error *err)
{
    int r;
    while ((r = cox_server_wait(server, cox_deadline_after_ms(100), err)) == COX_TIMEOUT) {
        cox_error_clear(err);
        if (ask(cox_server_executor(server), err) == 0)
            continue;
        printf("%s\n", err->text); /* names the rank and what became of it */
        r = cox_server_await_recovery(server, COX_DEADLINE_NEVER, err);
        if (r == COX_STALE)
            printf("recovered\n");
        cox_error_clear(err);
    }
    return r == COX_CLOSED ? 0 : r;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s NAME WORKER [ARGUMENT...]\n", argv[0]);
        return 2;
    }
    struct cox_executor_options executor = COX_EXECUTOR_OPTIONS_INIT;
    executor.name = argv[1];
    executor.rank_count = RANK_COUNT;
    executor.workers.command = (const char *const *)&argv[2];
    executor.socket.use = COX_SOCKET_REQUIRED;
    struct cox_server_options options = COX_SERVER_OPTIONS_INIT;
    options.executor = &executor;
    options.restart.on_death = COX_ON_DEATH_RESTART;
    struct cox_server *server = NULL;
    struct cox_error err = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    int r = cox_server_new(&options, &server, &err);
    if (r == 0)
        r = cox_server_start(server, &err);
    if (r == 0)
        r = serve(server, &err);
    if (r)
        fprintf(stderr, "server: %s\n", err.text);
    cox_server_free(server);
    return r != 0;
}
