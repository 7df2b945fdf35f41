/*
 * scripted_worker: the worker of the tests, see script.h. With COX_TEST_RANKS=threads it is only
 * the relay of a rank whose threads are the test's.
 *
 * Without a command of its own, an argument: `quit N` leaves before it attaches, `never` never
 * attaches, `world` attaches with a world that is too large, `group` attaches to no such group,
 * `mute` has no callbacks, `dies G...` and `sleeps G...` do so before they attach in the lives
 * (incarnations) listed, `returns` outlives its coordinator, `pauses` and `leaves` really pause,
 * the latter also out of callbacks that are stuck, `takes` takes its requests.
 */
#include "ranks.h"
#include "script.h"
#include "script_take.h"
#include "tests/lib/posix.h"

/* The test is gone. */
#define RELAY_EXIT_STATUS 70

static void park_process(void *context)
{
    (void)context;
    for (;;)
        pause();
}

static int run_rank(const struct cox_worker_options *options, const char *mode,
                    struct cox_error *err)
{
    const struct script_host host = {
        .pid = getpid(), .out_fd = STDOUT_FILENO, .relay_fd = -1, .park = park_process};
    struct script *script = script_new(options, &host);
    struct cox_worker *worker = NULL;
    int r = cox_worker_new(options, script_callbacks(mode), script, &worker, err);
    if (r == 0) {
        script_set_worker(script, worker);
        r = script_run(script, mode, worker, STDOUT_FILENO, err);
    }
    cox_worker_free(worker);
    script_free(script);
    return r;
}

/* Obeys until it ends, by an order or a signal. */
static int relay(const struct cox_worker_options *options, const char *mode, struct cox_error *err)
{
    struct ranks_hello hello = {.pid = getpid(), .options = *options};
    snprintf(hello.mode, sizeof hello.mode, "%s", mode);
    int fd = ranks_connect(options->parent_pid, &hello);
    if (fd < 0)
        return cox_fail(err, fd, "no test to be a rank of: %s", cox_status_text(fd));
    for (;;) {
        struct script_order order;
        ssize_t got = recv(fd, &order, sizeof order, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got != (ssize_t)sizeof order)
            _exit(RELAY_EXIT_STATUS);
        script_perform(&order);
        if (send(fd, "", 1, MSG_NOSIGNAL) < 0)
            _exit(RELAY_EXIT_STATUS);
    }
}

/* Is the mode the one meant, and this incarnation among its arguments? */
static bool is_listed(uint32_t incarnation, const char *mode, const char *meant, char **arguments)
{
    bool listed = false;
    for (char **argument = arguments; strcmp(mode, meant) == 0 && *argument; argument++)
        listed = listed || (uint32_t)atoi(*argument) == incarnation;
    return listed;
}

int main(int argc, char **argv)
{
    struct cox_error err = {0};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "quit") == 0 && argc > 2) {
        fprintf(stderr, "quits as told\n");
        return atoi(argv[2]);
    }
    if (is_listed(options.incarnation, mode, "dies", argv + 2))
        raise(SIGKILL);
    bool sleeps = is_listed(options.incarnation, mode, "sleeps", argv + 2);
    if (sleeps)
        fprintf(stderr, "sleeps as told\n");
    if (strcmp(mode, "never") == 0 || sleeps)
        for (;;)
            pause();
    if (strcmp(mode, "world") == 0)
        options.rank_count++;
    if (strcmp(mode, "group") == 0)
        strcat(options.prefix, "x");
    options.leave_stuck = strcmp(mode, "leaves") == 0;
    if (strcmp(mode, "returns") == 0) {
        options.on_orphan = COX_ORPHAN_RETURN;
        signal(SIGPIPE, SIG_IGN);
    }
    if (r == 0)
        r = ranks_are_threads() ? relay(&options, mode, &err) : run_rank(&options, mode, &err);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank, err.text);
    return r != 0;
}
