/* metrics: a group's status as text for Prometheus. */
#include "coordinator/cli/client_command.h"
#include "coordinator/metrics/metrics.h"
#include "proto/control.pb-c.h"

#define TIMEOUT_MS 10000

static int ask(const void *choice, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    struct CoxswainControl__StatusReply *status;
    (void)choice, (void)timeout_ms;
    int r = cox_client_status(client, deadline_ns, &status, err);
    if (!r)
        *ret_reply = &status->base;
    return r;
}

static void print(const void *choice, const ProtobufCMessage *reply)
{
    (void)choice;
    cox_metrics_write(stdout, (const struct CoxswainControl__StatusReply *)reply);
}

static int run(void *choice)
{
    static const struct cox_client_command command = {
        .reply = &coxswain_control__status_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .ask = ask,
        .print = print,
    };
    return cox_client_command_run(&command, choice, choice);
}

const struct cox_command cox_command_metrics = {
    .name = "metrics",
    .summary = "print the numbers of a running group for Prometheus",
    .text = "Prints counters and histograms of a running group in the text format of Prometheus. "
            "No worker is asked, so it also replies when all of them are stuck. `coxswain run "
            "--metrics ADDRESS:PORT` serves the same over HTTP; docs/metrics.md explains each.",
    .examples = "  coxswain metrics --name mine\n"
                "  coxswain run -n 4 --name mine --metrics 127.0.0.1:9090\n",
    .choice_size = sizeof(struct cox_connection),
    .groups = {{&cox_connection_options, 0}},
    .run = run,
};
