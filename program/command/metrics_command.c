/* metrics: a group's status as text for Prometheus. */
#include "channel/base/idioms.h"
#include "program/cli/client_command.h"
#include "program/cli/console.h"
#include "program/metrics/http.h"
#include "program/metrics/metrics.h"
#include "program/weights/weights_client.h"
#include "proto/control.pb-c.h"

#include <signal.h>

#define TIMEOUT_MS 10000
/* For the holder of weights, without which the group's numbers are printed all the same. */
#define WEIGHTS_MS 500

struct metrics_choice {
    struct cox_connection connection;
    /* none: print once */
    struct cox_http_address address;
};

static int check(const void *context, struct cox_error *err)
{
    const struct metrics_choice *choice = context;
    return choice->address.text && (choice->connection.json || choice->connection.timeout_ms)
               ? cox_fail(err, COX_INVALID, "--serve takes neither --json nor --timeout")
               : 0;
}

static void print(const void *choice, const ProtobufCMessage *reply)
{
    (void)choice;
    json_t *weights = NULL;
    cox_weights_list(cox_deadline_after_ms(WEIGHTS_MS), &weights, NULL);
    cox_metrics_write(stdout, (const struct CoxswainControl__StatusReply *)reply, weights);
    json_decref(weights);
}

/* Until SIGINT, SIGTERM or SIGHUP. Those that were ignored at the start stay ignored. */
static int serve(const struct metrics_choice *choice)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    _cox_cleanup_(cox_metrics_server_freep) struct cox_metrics_server *server = NULL;
    struct cox_error err = {0};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction action;
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&set, numbers[i]);
    }
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* the server's threads inherit it */
    if (cox_metrics_server_new(&choice->address, choice->connection.name,
                               choice->connection.control_socket, &server, &err))
        return cox_exit_with(&err);
    cox_console_say("metrics at %s", cox_metrics_server_url(server));
    int number;
    sigwait(&set, &number);
    return COX_EXIT_OK;
}

static int run(void *context)
{
    const struct metrics_choice *choice = context;
    static const struct cox_client_command command = {
        .reply = &coxswain_control__status_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .ask = cox_client_ask_status,
        .print = print,
    };
    return choice->address.text ? serve(choice)
                                : cox_client_command_run(&command, &choice->connection, choice);
}

static const struct cox_option options[] = {
    {"serve", "ADDRESS:PORT",
     "serve them over HTTP until a signal ends it: also PORT alone for 127.0.0.1, or unix:PATH",
     COX_TAKE(struct metrics_choice, address, cox_http_address_take)},
    {0},
};
static const struct cox_option_group metrics_options = {
    .title = "Serving:", .options = options, .check = check};

const struct cox_command cox_command_metrics = {
    .name = "metrics",
    .summary = "print the numbers of a running group for Prometheus",
    .arguments = "[NAME]",
    .text =
        "Prints counters and histograms of a running group in the text format of Prometheus. "
        "No worker is asked, so it also replies when all of them are stuck. With --serve it serves "
        "them over HTTP, for a group of any program, a vLLM too; the group may end and come "
        "back. `coxswain run --metrics ADDRESS:PORT` serves the same from the group itself; "
        "docs/metrics.md explains each.",
    .examples = "  coxswain metrics mine\n"
                "  coxswain metrics mine --serve 127.0.0.1:9400\n"
                "  coxswain run -n 4 --name mine --metrics 127.0.0.1:9400\n",
    .choice_size = sizeof(struct metrics_choice),
    .groups = {{&cox_connection_options, offsetof(struct metrics_choice, connection)},
               {&metrics_options, 0}},
    .words = cox_connection_words,
    .run = run,
};
