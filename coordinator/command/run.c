#include "adapter_options.h"
#include "runner.h"
#include "console.h"
#include "crew.h"
#include "init_options.h"
#include "coordinator/server/group_links.h"
#include "coordinator/server/service.h"
#include "engine/model/tokenizer.h"

#include <signal.h>
#include <stdio_ext.h>
#include <string.h>

enum {
    OPTION_NO_INIT = COX_OPTION_KEY(0),
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

struct run {
    struct cox_group_choice group;
    struct cox_crew_options options;
    struct cox_adapter_choice adapters;
    struct cox_init_choice init;
    enum cox_role role;
    /* 0: the default */
    uint32_t step_tokens;
    /* the reference worker's command */
    const char *reference[4];
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
        cox_service_link_with(cox_crew_service(crew), cox_crew_links(crew));
    else if (!r)
        cox_service_refuse(cox_crew_service(crew), LEGACY);
    if (!r)
        cox_service_serve_with(cox_crew_service(crew), *ret_serving);
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

static int take_option(void *choice, int option, const char *value, struct cox_error *err)
{
    struct run *run = choice;
    uint64_t number;
    int r;
    switch (option) {
    case OPTION_ROLE:
        return cox_role_parse(value, &run->role, err);
    case OPTION_INIT:
        return cox_init_choice_take(&run->init, value, err);
    case OPTION_INIT_FILE:
        return cox_init_choice_read(&run->init, value, err);
    case OPTION_NO_INIT:
        run->options.init = false;
        return 0;
    case OPTION_NO_FLAGS:
        run->options.no_flags = true;
        return 0;
    case OPTION_EXTERNAL:
        run->options.external = true;
        return 0;
    case OPTION_ADAPTER:
        return cox_adapter_choice_take(&run->adapters, value, err);
    case OPTION_STEP_TOKENS:
        r = cox_parse_number("--step-tokens", value, 1, INT32_MAX, &number, err);
        run->step_tokens = r ? 0 : (uint32_t)number;
        return r;
    default: /* OPTION_QUIET */
        run->options.quiet = true;
        return 0;
    }
}

static int choose_external(struct run *run, int count, char *const *words, struct cox_error *err)
{
    if (count)
        return cox_fail(err, COX_INVALID, "--external starts no worker: '%.64s' is not executed",
                        words[0]);
    if (run->group.worker || run->options.no_flags)
        return cox_fail(err, COX_INVALID,
                        "--external starts no worker: leave out --worker and --no-flags");
    run->options.share_weights = true;
    if (run->options.init)
        return cox_model_find(&run->group, &run->options.model, err);
    run->options.refusal = NOT_INITIALIZED;
    return 0;
}

static int choose_reference(struct run *run, struct cox_error *err)
{
    const char *worker = NULL, *model = NULL;
    int r = cox_worker_find(&run->group, &worker, err);
    if (!r)
        r = cox_model_find(&run->group, &model, err);
    if (!r && run->options.init)
        r = cox_worker_check(&run->group, worker, model, err);
    if (r)
        return r;
    run->reference[0] = worker;
    run->reference[1] = "--model";
    run->reference[2] = model;
    run->options.command = run->reference;
    run->options.model = model;
    run->options.share_weights = true;
    run->options.refusal = run->options.init ? NULL : NOT_INITIALIZED;
    return 0;
}

/* COMMAND; without one, the reference worker. */
static int take_command(void *choice, int count, char *const *words, struct cox_error *err)
{
    struct run *run = choice;
    int r = cox_group_choice_check(&run->group, err);
    if (r)
        return r;
    if (run->options.external)
        return choose_external(run, count, words, err);
    if (count == 0)
        return choose_reference(run, err);
    run->options.command = (const char *const *)words;
    run->options.model = run->group.model;
    run->options.refusal = "its workers are a command of its own";
    return 0;
}

static int check(const void *choice, struct cox_error *err)
{
    const struct run *run = choice;
    if (run->init.count && !run->options.init)
        return cox_fail(err, COX_INVALID, "--no-init: no worker is told what --init says");
    if (run->options.model && cox_init_choice_get(&run->init, "model"))
        return cox_fail(err, COX_INVALID, "'model' in --init or --init-file: use --model DIR");
    if (run->role != COX_ROLE_STANDARD && (run->options.refusal || run->group.legacy_workers))
        return cox_fail(err, COX_INVALID, "--role is for groups that take prompts: %s",
                        run->options.refusal ? run->options.refusal : LEGACY);
    return 0;
}

static void init(void *choice)
{
    struct run *run = choice;
    cox_group_choice_init(&run->group);
    run->options.group = &run->group;
    run->options.init = run->options.need_door = true;
    run->role = COX_ROLE_STANDARD;
}

static int run_group(void *choice)
{
    struct run *run = choice;
    run->options.config = run->init.entries;
    run->options.config_count = run->init.count;
    return keep(&run->options, run->role, run->step_tokens, &run->adapters);
}

static void deinit(void *choice)
{
    struct run *run = choice;
    cox_adapter_choice_deinit(&run->adapters);
    cox_init_choice_deinit(&run->init);
}

static const struct argp_option options[] = {
    {"init", OPTION_INIT, "KEY=VALUE", 0,
     "configuration that every worker gets at init; may be repeated", 0},
    {"init-file", OPTION_INIT_FILE, "FILE", 0,
     "the same: a JSON object of strings, numbers, true and false; --init takes precedence", 0},
    {"no-init", OPTION_NO_INIT, NULL, 0, "start the workers only", 0},
    {"no-flags", OPTION_NO_FLAGS, NULL, 0,
     "nothing is appended to COMMAND; the environment has it all", 0},
    {"external", OPTION_EXTERNAL, NULL, 0,
     "start no worker: wait for workers that are started by hand, as long as that takes; standard "
     "error reports each (coxswain-worker --door NAME)",
     0},
    {"adapter", OPTION_ADAPTER, "NAME=DIR", 0,
     "load this LoRA adapter at the start (see coxswain lora)", 0},
    {"role", OPTION_ROLE, "ROLE", 0,
     "prefill: computes prompts, and holds their keys and values for a group that decodes; decode: "
     "continues them; standard, the default: both (coxswain role changes it)",
     0},
    {"step-tokens", OPTION_STEP_TOKENS, "N", 0, "compute so many tokens in one step (default 512)",
     0},
    {"quiet", OPTION_QUIET, NULL, 0, "drop what the workers write", 0},
    {0},
};
static const struct cox_option_group run_options = {
    .options = options, .take = take_option, .check = check};

const struct cox_command cox_command_run = {
    .name = "run",
    .summary = "start workers and keep them until told to end",
    .arguments = "[-- COMMAND [ARGUMENT]...]",
    .text = "Starts a group of worker processes, COMMAND or the reference worker, tells them to "
            "initialize, and keeps them until SIGINT, SIGTERM, SIGHUP or `coxswain stop` comes or "
            "one of them dies (--on-death; before the group is complete, any death ends it). "
            "COMMAND gets rank, world size and name of the group in its environment (COXSWAIN_*) "
            "and as flags (--local_rank, ...).\n"
            "When all is ready it prints `name NAME`, `door PATH` and a line `rank R pid P` for "
            "each. With the reference worker, `coxswain generate --name NAME` then completes "
            "prompts on the group, for any number of callers at once.",
    .choice_size = sizeof(struct run),
    .init = init,
    .groups = {{&run_options, 0},
               {&cox_scheduling_option_group, offsetof(struct run, group)},
               {&cox_death_option_group, offsetof(struct run, group)},
               {&cox_start_option_group, offsetof(struct run, group)},
               {&cox_layout_option_group, offsetof(struct run, group)}},
    .words = take_command,
    .run = run_group,
    .deinit = deinit,
};
