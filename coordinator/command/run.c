#include "adapter_options.h"
#include "command.h"
#include "console.h"
#include "crew.h"
#include "init_options.h"
#include "coordinator/server/group_links.h"
#include "coordinator/server/control_server.h"
#include "engine/model/tokenizer.h"

#include <signal.h>
#include <stdio_ext.h>
#include <string.h>

enum {
    OPTION_NO_INIT = COX_OPTION_COMMAND,
    OPTION_INIT,
    OPTION_INIT_FILE,
    OPTION_NO_FLAGS,
    OPTION_QUIET,
    OPTION_ADAPTER,
    OPTION_EXTERNAL,
    OPTION_ROLE,
    OPTION_STEP_TOKENS,
};

/* The ranks hear of their role. */
#define ROLE_MS 10000

#define LEGACY "legacy workers hold and pull nothing"
#define NOT_INITIALIZED "its workers were not told to initialize (--no-init)"

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain run [OPTION]... [-- COMMAND [ARGUMENT]...]\n"
        "\n"
        "Starts a group of worker processes, COMMAND or the reference worker, tells them to\n"
        "initialize, and keeps them until SIGINT, SIGTERM, SIGHUP or `coxswain stop` comes or\n"
        "one of them dies (--on-death; before the group is complete, any death ends it). COMMAND\n"
        "gets rank, world size and name of the group in its environment (COXSWAIN_*) and as flags\n"
        "(--local_rank, ...).\n"
        "When all is ready it prints `name NAME`, `door PATH` and a line `rank R pid P` for each.\n"
        "With the reference worker, `coxswain generate --name NAME` then completes prompts on\n"
        "the group, for any number of callers at once.\n"
        "\n"
        "      --init KEY=VALUE      configuration that every worker gets at init; may be repeated\n"
        "      --init-file FILE      the same: a JSON object of strings, numbers, true and false;\n"
        "                            what --init says comes before it\n"
        "      --no-init             start them only\n"
        "      --no-flags            nothing is appended to COMMAND; the environment has it all\n"
        "      --external            start none: wait for workers that somebody starts by hand,\n"
        "                            as long as that takes; standard error tells how they come\n"
        "                            (coxswain-worker --door NAME)\n"
        "      --adapter NAME=DIR    load this LoRA adapter at the start (see coxswain lora)\n"
        "      --role ROLE           prefill: computes prompts, and holds their keys and values for a\n"
        "                            group that decodes; decode: goes on with them; standard, the\n"
        "                            default: both (coxswain role changes it)\n"
        "      --step-tokens N       compute so many tokens in one step (default 512)\n"
        "      --quiet               nothing of what the workers write\n");
    cox_async_options_help(file);
    cox_recovery_options_help(file);
    cox_group_choice_help(file);
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_GROUP_CHOICE_LONG_OPTIONS,
    COX_RECOVERY_LONG_OPTIONS,
    COX_ASYNC_LONG_OPTIONS,
    {"init", required_argument, NULL, OPTION_INIT},
    {"init-file", required_argument, NULL, OPTION_INIT_FILE},
    {"no-init", no_argument, NULL, OPTION_NO_INIT},
    {"no-flags", no_argument, NULL, OPTION_NO_FLAGS},
    {"quiet", no_argument, NULL, OPTION_QUIET},
    {"external", no_argument, NULL, OPTION_EXTERNAL},
    {"adapter", required_argument, NULL, OPTION_ADAPTER},
    {"role", required_argument, NULL, OPTION_ROLE},
    {"step-tokens", required_argument, NULL, OPTION_STEP_TOKENS},
    {NULL, 0, NULL, 0},
};

static int print_group(struct cox_crew *crew, struct cox_error *err)
{
    struct cox_executor *executor = cox_crew_executor(crew);
    printf("name %s\n", cox_executor_name(executor));
    if (cox_executor_door(executor))
        printf("door %s\n", cox_executor_door(executor));
    for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++)
        printf("rank %u pid %d\n", rank, (int)cox_executor_pid(executor, rank));
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return 0;
    int r = errno ? -errno : -EIO;
    __fpurge(stdout); /* it is said once, here */
    clearerr(stdout);
    return cox_fail(err, r, "cannot write to standard output: %s", cox_status_text(r));
}

/* Clients' prompts, on a group of reference workers. */
static int serve(struct cox_crew *crew, const struct cox_crew_options *options, enum cox_role role,
                 uint32_t step_tokens, struct cox_serving **ret_serving, struct cox_error *err)
{
    struct cox_executor *executor = cox_crew_executor(crew);
    bool legacy = cox_executor_legacy(executor);
    struct cox_serving_options serving = {
        .name = legacy ? NULL : cox_executor_name(executor),
        .scheduler = {.token_count_max = step_tokens,
                      .step_ms = options->group->step_ms,
                      .steps_in_flight = options->group->steps_in_flight,
                      .log = cox_crew_log()},
    };
    serving.lora = cox_crew_lora(crew);
    int r = cox_vocab_size_load(options->model, &serving.vocab_size, err);
    if (!r)
        r = cox_scheduler_fit(&serving.scheduler, cox_crew_summary(crew), err);
    cox_crew_recovers(crew, &serving.scheduler);
    if (!r)
        r = cox_serving_start(executor, &serving, ret_serving, err);
    if (!r && role != COX_ROLE_STANDARD)
        r = cox_group_links_set_role(cox_crew_links(crew), role, cox_deadline_after_ms(ROLE_MS),
                                     err);
    if (!r && !legacy)
        cox_control_server_link_with(cox_crew_service(crew), cox_crew_links(crew));
    else if (!r)
        cox_control_server_refuse(cox_crew_service(crew), LEGACY);
    if (!r)
        cox_control_server_serve_with(cox_crew_service(crew), *ret_serving);
    return r;
}

static int keep(const struct cox_crew_options *options, enum cox_role role, uint32_t step_tokens,
                const struct cox_adapter_choice *adapters)
{
    struct cox_error error = {0};
    /* The crew's connections end before the serving. */
    _cox_cleanup_(cox_serving_freep) struct cox_serving *serving = NULL;
    _cox_cleanup_(cox_crew_freep) struct cox_crew *crew = NULL;
    int number;
    int r = cox_crew_start(options, &crew, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (!r)
        r = cox_adapter_choice_load(adapters, cox_crew_lora(crew), options->group->rank_count,
                                    options->group->start_timeout_ms, &error);
    if (!r && !options->refusal)
        r = serve(crew, options, role, step_tokens, &serving, &error);
    if (!r)
        r = print_group(crew, &error);
    if (r) {
        if (serving)
            cox_serving_stop(serving, &error);
        return cox_exit_with(&error);
    }
    r = cox_crew_wait(crew, &error);
    if (r > 0)
        cox_fail(&error, COX_CLOSED, "the group was told to end");
    if (serving)
        cox_serving_stop(serving, &error);
    if (r < 0) {
        cox_console_say("%s: the group ends", error.text);
        return COX_EXIT_WORKER;
    }
    /* Being told to end is how this command ends. */
    if (!options->quiet)
        cox_console_say("%s: the group ends", strsignal(r));
    return COX_EXIT_OK;
}

int cox_command_run(int argc, char **argv)
{
    struct cox_group_choice group;
    struct cox_crew_options options = {.group = &group, .init = true, .need_door = true};
    _cox_cleanup_(cox_adapter_choice_deinit) struct cox_adapter_choice adapters = {0};
    _cox_cleanup_(cox_init_choice_deinit) struct cox_init_choice init = {0};
    enum cox_role role = COX_ROLE_STANDARD;
    uint64_t number;
    uint32_t step_tokens = 0; /* the default */
    struct cox_error error = {0};
    cox_group_choice_init(&group);
    int option, r = 0;
    while (!r && (option = getopt_long(argc, argv, COX_GROUP_CHOICE_SHORT_OPTIONS, long_options,
                                       NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        if (option == OPTION_ROLE)
            r = cox_role_parse(optarg, &role, &error);
        else if (option == OPTION_INIT)
            r = cox_init_choice_take(&init, optarg, &error);
        else if (option == OPTION_INIT_FILE)
            r = cox_init_choice_read(&init, optarg, &error);
        else if (option == OPTION_NO_INIT)
            options.init = false;
        else if (option == OPTION_NO_FLAGS)
            options.no_flags = true;
        else if (option == OPTION_EXTERNAL)
            options.external = true;
        else if (option == OPTION_ADAPTER)
            r = cox_adapter_choice_take(&adapters, optarg, &error);
        else if (option == OPTION_STEP_TOKENS) {
            r = cox_parse_number("--step-tokens", optarg, 1, INT32_MAX, &number, &error);
            step_tokens = r ? 0 : (uint32_t)number;
        } else if (option == OPTION_QUIET)
            options.quiet = true;
        else
            r = cox_group_choice_take(&group, option, optarg, argv, &error);
    }
    if (!r)
        r = cox_group_choice_check(&group, &error);
    const char *worker = NULL, *model = NULL;
    const char *reference[4] = {NULL};
    if (!r && options.external && optind < argc)
        r = cox_fail(&error, COX_INVALID, "--external starts no worker: '%.64s' is not executed",
                     argv[optind]);
    if (!r && options.external && (group.worker || options.no_flags))
        r = cox_fail(&error, COX_INVALID,
                     "--external starts no worker: leave out --worker and --no-flags");
    if (!r && options.external) {
        if (options.init)
            r = cox_model_find(&group, &model, &error);
        else
            options.refusal = NOT_INITIALIZED;
        options.model = model;
        options.share_weights = true;
    } else if (!r && optind < argc) {
        options.command = (const char *const *)(argv + optind);
        options.model = group.model;
        options.refusal = "its workers are a command of its own";
    } else if (!r) {
        r = cox_worker_find(&group, &worker, &error);
        if (!r)
            r = cox_model_find(&group, &model, &error);
        if (!r && options.init)
            r = cox_worker_check(&group, worker, model, &error);
        reference[0] = worker;
        reference[1] = "--model";
        reference[2] = model;
        options.command = reference;
        options.model = model;
        options.share_weights = true;
        if (!options.init)
            options.refusal = NOT_INITIALIZED;
    }
    options.config = init.entries;
    options.config_count = init.count;
    if (!r && init.count && !options.init)
        r = cox_fail(&error, COX_INVALID, "--no-init: nobody is told what --init says");
    if (!r && options.model && cox_init_choice_get(&init, "model"))
        r = cox_fail(&error, COX_INVALID, "'model' in --init or --init-file: use --model DIR");
    if (!r && role != COX_ROLE_STANDARD && (options.refusal || group.legacy_workers))
        r = cox_fail(&error, COX_INVALID, "--role is for groups that take prompts: %s",
                     options.refusal ? options.refusal : LEGACY);
    if (r)
        return r > 0 ? cox_exit_usage("run", &error) : cox_exit_with(&error);
    return cox_exit_flushed(keep(&options, role, step_tokens, &adapters));
}
