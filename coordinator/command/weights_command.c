/* coxswain weights: gives a running group other weights, between two steps. */
#include "command.h"

#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#define TIMEOUT_MS 60000
/* The group gives up at the timeout, and then says so; and first it reads the files, which no
 * timeout cuts short. */
#define ANSWER_MS (10 * UINT64_C(60) * 1000)

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain weights [--name NAME | --door PATH] [--timeout SEC] DIR\n"
        "\n"
        "Loads the model in DIR, which has the shapes and the eos_token_id of the one in use, in\n"
        "the coordinator of a running group, and lets all its workers compute with it from one\n"
        "step on. Prompts under way go on with it; keys and values that were computed before\n"
        "stay, and so does the tokenizer. When every worker has switched it prints `version V`;\n"
        "what was in use before is then out of memory. If a worker cannot, all go on with what\n"
        "they had.\n"
        "\n"
        "      --name NAME    of the group (default: the only one that is alive)\n"
        "      --door PATH    the same by its door, as `run` prints it\n"
        "      --timeout SEC  wait so long for the workers (default 60); after that they switch\n"
        "                     with the next step that comes to an end\n"
        "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {NULL, 0, NULL, 0},
};

static int ask(const struct cox_connection *target, const char *directory,
               struct cox_client *client, uint64_t *ret_version, struct cox_error *err)
{
    CoxswainControl__WeightsRequest weights = COXSWAIN_CONTROL__WEIGHTS_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__ControlReply *reply;
    uint64_t deadline_ns = cox_deadline_after_ms(target->timeout_ms + ANSWER_MS);
    weights.directory = (char *)(uintptr_t)directory;
    weights.has_timeout_ms = true;
    weights.timeout_ms = target->timeout_ms;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_WEIGHTS;
    request.weights = &weights;
    int r = cox_connection_open(target, client, deadline_ns, err);
    if (!r)
        r = cox_client_ask(client, &request, deadline_ns, &reply, err);
    if (r)
        return r;
    if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_WEIGHTS)
        return cox_fail(err, COX_CORRUPT, "the group answered something else than how it went");
    if (reply->weights->error)
        return cox_client_error(reply->weights->error, err);
    *ret_version = reply->weights->version;
    return 0;
}

static int replace(const struct cox_connection *target, const char *directory)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    _cox_cleanup_(cox_free_ptr) char *absolute = realpath(directory, NULL);
    struct cox_error error = {0};
    uint64_t version = 0;
    if (!absolute) {
        cox_fail(&error, errno == ENOENT ? COX_NOT_FOUND : -errno, "the model folder '%.900s': %s",
                 directory, cox_status_text(-errno));
        return cox_exit_usage("weights", &error);
    }
    if (ask(target, absolute, &client, &version, &error)) {
        cox_client_clean_text(error.text);
        return cox_exit_with(&error);
    }
    printf("version %" PRIu64 "\n", version);
    return COX_EXIT_OK;
}

int cox_command_weights(int argc, char **argv)
{
    struct cox_connection target = {.timeout_ms = TIMEOUT_MS};
    struct cox_error error = {0};
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_TARGET_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = cox_connection_take(&target, option, argv, &error);
    }
    if (!r && argc - optind != 1)
        r = cox_fail(&error, COX_INVALID, "expected one DIR: the folder of a model");
    if (!r)
        r = cox_connection_check(&target, &error);
    return r ? cox_exit_usage("weights", &error) : cox_exit_flushed(replace(&target, argv[optind]));
}
