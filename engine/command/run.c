#include "coordinator/command/command.h"
#include "coordinator/command/console.h"
#include "coordinator/command/init_options.h"
#include "coordinator/server/group_links.h"
#include "engine_command.h"
#include "engine_group.h"

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

static int print_group(struct cox_executor *executor, struct cox_error *err)
{
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

static int keep(const struct cox_engine_group_options *options)
{
    struct cox_error error = {0};
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    int number;
    int r = cox_engine_group_start(options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (!r)
        r = print_group(cox_engine_group_executor(group), &error);
    if (r)
        return cox_exit_with(&error);
    r = cox_foreground_wait(cox_engine_group_foreground(group), &error);
    if (r > 0)
        cox_fail(&error, COX_CLOSED, "the group was told to end");
    cox_engine_group_end_prompts(group, &error);
    if (r < 0) {
        cox_console_say("%s: the group ends", error.text);
        return COX_EXIT_WORKER;
    }
    /* Being told to end is how this command ends. */
    if (!options->foreground.quiet)
        cox_console_say("%s: the group ends", strsignal(r));
    return COX_EXIT_OK;
}

struct run {
    struct cox_group_choice group;
    struct cox_adapter_choice adapters;
    struct cox_init_choice init;
    enum cox_role role;
    struct cox_engine_group_options options;
    /* command line of the reference worker */
    const char *reference[4];
};

static int take_option(struct run *run, int option, char **argv, struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    uint64_t number;
    int r = 0;
    switch (option) {
    case OPTION_ROLE:
        return cox_role_parse(optarg, &run->role, err);
    case OPTION_INIT:
        return cox_init_choice_take(&run->init, optarg, err);
    case OPTION_INIT_FILE:
        return cox_init_choice_read(&run->init, optarg, err);
    case OPTION_NO_INIT:
        options->init = false;
        return 0;
    case OPTION_NO_FLAGS:
        options->no_flags = true;
        return 0;
    case OPTION_EXTERNAL:
        options->external = true;
        return 0;
    case OPTION_ADAPTER:
        return cox_adapter_choice_take(&run->adapters, optarg, err);
    case OPTION_STEP_TOKENS:
        r = cox_parse_number("--step-tokens", optarg, 1, INT32_MAX, &number, err);
        run->options.step_tokens = r ? 0 : (uint32_t)number;
        return r;
    case OPTION_QUIET:
        options->quiet = true;
        return 0;
    default:
        return cox_group_choice_take(&run->group, option, optarg, argv, err);
    }
}

static int choose_external(struct run *run, int argc, char **argv, struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    if (argc)
        return cox_fail(err, COX_INVALID, "--external starts no worker: '%.64s' is not executed",
                        argv[0]);
    if (run->group.worker || options->no_flags)
        return cox_fail(err, COX_INVALID,
                        "--external starts no worker: leave out --worker and --no-flags");
    run->options.share_weights = true;
    return options->init ? cox_model_find(&run->group, &options->model, err) : 0;
}

static int choose_reference(struct run *run, struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    const char *worker;
    int r = cox_worker_find(&run->group, &worker, err);
    if (!r)
        r = cox_model_find(&run->group, &options->model, err);
    if (!r && options->init)
        r = cox_worker_check(&run->group, worker, options->model, err);
    if (r)
        return r;
    run->reference[0] = worker;
    run->reference[1] = "--model";
    run->reference[2] = options->model;
    options->command = run->reference;
    run->options.share_weights = true;
    return 0;
}

/* The workers, and with them whether there are prompts. */
static int choose_workers(struct run *run, int argc, char **argv, struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    int r = 0;
    if (!options->init)
        options->prompts_refusal = NOT_INITIALIZED;
    if (options->external) {
        r = choose_external(run, argc, argv, err);
    } else if (argc) {
        options->command = (const char *const *)argv;
        options->model = run->group.model;
        options->prompts_refusal = "its workers are a command of its own";
    } else {
        r = choose_reference(run, err);
    }
    run->options.serve = options->links = !options->prompts_refusal;
    return r;
}

static int choice_check(const struct run *run, struct cox_error *err)
{
    const struct cox_foreground_options *options = &run->options.foreground;
    if (run->init.count && !options->init)
        return cox_fail(err, COX_INVALID, "--no-init: nobody is told what --init says");
    if (options->model && cox_init_choice_get(&run->init, "model"))
        return cox_fail(err, COX_INVALID, "'model' in --init or --init-file: use --model DIR");
    if (run->role != COX_ROLE_STANDARD && (!run->options.serve || run->group.legacy_workers))
        return cox_fail(err, COX_INVALID, "--role is for groups that take prompts: %s",
                        options->prompts_refusal ? options->prompts_refusal : LEGACY);
    return 0;
}

static int run_group(struct run *run, int argc, char **argv)
{
    struct cox_foreground_options *options = &run->options.foreground;
    struct cox_error error = {0};
    int option, r = 0;
    while (!r && (option = getopt_long(argc, argv, COX_GROUP_CHOICE_SHORT_OPTIONS, long_options,
                                       NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return COX_EXIT_OK;
        }
        r = take_option(run, option, argv, &error);
    }
    if (!r)
        r = cox_group_choice_check(&run->group, &error);
    if (!r)
        r = choose_workers(run, argc - optind, argv + optind, &error);
    if (!r)
        r = choice_check(run, &error);
    if (r)
        return r > 0 ? cox_exit_usage("run", &error) : cox_exit_with(&error);
    options->config = run->init.entries;
    options->config_count = run->init.count;
    options->role = run->role == COX_ROLE_STANDARD ? 0 : run->role;
    return keep(&run->options);
}

int cox_command_run(int argc, char **argv)
{
    struct run run = {.role = COX_ROLE_STANDARD};
    cox_group_choice_init(&run.group);
    run.options.adapters = &run.adapters;
    run.options.foreground = (struct cox_foreground_options){
        .group = &run.group,
        .init = true,
        .need_door = true,
    };
    int exit_status = run_group(&run, argc, argv);
    cox_init_choice_deinit(&run.init);
    cox_adapter_choice_deinit(&run.adapters);
    return cox_exit_flushed(exit_status);
}
