#include "coordinator/command/command.h"
#include "engine_command.h"
#include "coordinator/command/console.h"
#include "prompts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MISMATCH_SHOWN_MAX 5

enum {
    OPTION_MIN_ACCURACY = COX_OPTION_COMMAND,
    OPTION_QUIET,
};

struct eval {
    struct cox_group_choice group;
    /* percent */
    double min_accuracy;
    bool quiet;
    struct cox_prompts prompts;
    /* by prompt, into lines */
    const char **answers;
    struct cox_prompts lines;
    struct cox_tokenizer *tokenizer;
};

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain eval [OPTION]... FILE\n"
        "\n"
        "Starts worker processes, completes the part up to the = of every line of FILE, such as\n"
        "27+58=85, and prints how many completions are exactly what follows it. - is standard input.\n"
        "\n"
        "      --min-accuracy P      fail (status 1) below so many percent (default 0)\n"
        "      --quiet               nothing of what the workers write, and no progress\n");
    cox_async_options_help(file);
    cox_recovery_options_help(file);
    cox_group_choice_help(file);
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_GROUP_CHOICE_LONG_OPTIONS,
    COX_RECOVERY_LONG_OPTIONS,
    COX_ASYNC_LONG_OPTIONS,
    {"min-accuracy", required_argument, NULL, OPTION_MIN_ACCURACY},
    {"quiet", no_argument, NULL, OPTION_QUIET},
    {NULL, 0, NULL, 0},
};

/* Cuts every line behind its first '='. */
static int split(struct eval *e, const char *file, struct cox_error *err)
{
    int r = cox_prompts_load(&e->lines, file, err);
    if (r)
        return r;
    e->answers = calloc(e->lines.count, sizeof *e->answers);
    if (!e->answers)
        return cox_fail(err, -ENOMEM, "no memory");
    for (size_t i = 0; i < e->lines.count; i++) {
        const char *line = e->lines.items[i].text;
        const char *equals = strchr(line, '=');
        if (!equals || equals == line || !equals[1])
            return cox_fail(err, COX_INVALID, "line %zu is '%.64s': expected PROMPT=ANSWER", i + 1,
                            line);
        e->answers[i] = equals + 1;
        r = cox_prompts_add(&e->prompts, line, (size_t)(equals + 1 - line));
        if (r)
            return cox_fail(err, r, "no memory");
    }
    return 0;
}

static int report(const struct eval *e)
{
    size_t right = 0, shown = 0;
    for (size_t i = 0; i < e->prompts.count; i++)
        right +=
            e->prompts.items[i].new_text && !strcmp(e->prompts.items[i].new_text, e->answers[i]);
    double accuracy = 100.0 * (double)right / (double)e->prompts.count;
    printf("%zu of %zu right (%.2f %%)\n", right, e->prompts.count, accuracy);
    for (size_t i = 0; i < e->prompts.count && shown < MISMATCH_SHOWN_MAX; i++) {
        const struct cox_prompt *prompt = &e->prompts.items[i];
        if (prompt->new_text && !strcmp(prompt->new_text, e->answers[i]))
            continue;
        printf("line %zu: %s expected %s, got %s\n", i + 1, prompt->text, e->answers[i],
               prompt->new_text ? prompt->new_text
               : prompt->error  ? prompt->error
                                : "nothing");
        shown++;
    }
    if (accuracy >= e->min_accuracy)
        return COX_EXIT_OK;
    cox_console_say("%.2f %% are right, less than %g %%", accuracy, e->min_accuracy);
    return COX_EXIT_FAILED;
}

static int evaluate(struct eval *e)
{
    struct cox_error error = {0};
    const char *model = NULL, *worker = NULL;
    struct cox_complete_options complete = {.sampling = {.top_p = 1}};
    int r = cox_group_choice_check(&e->group, &error);
    if (!r)
        r = cox_model_find(&e->group, &model, &error);
    if (!r)
        r = cox_tokenizer_load(model, &e->tokenizer, &error);
    if (!r)
        r = cox_eos_load(model, complete.stop_tokens, &complete.stop_count, &error);
    if (!r)
        r = cox_prompts_encode(&e->prompts, e->tokenizer, 0, &error);
    if (r)
        return r > 0 ? cox_exit_usage("eval", &error) : cox_exit_with(&error);
    r = cox_worker_find(&e->group, &worker, &error);
    if (!r)
        r = cox_worker_check(&e->group, worker, model, &error);
    if (r)
        return r == COX_INVALID ? cox_exit_usage("eval", &error) : cox_exit_with(&error);
    const char *const command[] = {worker, "--model", model, NULL};
    const struct cox_engine_group_options options = {
        .foreground =
            {
                .group = &e->group,
                .command = command,
                .model = model,
                .init = true,
                .quiet = e->quiet,
                .prompts_refusal = "it was started by coxswain eval, for its own prompts",
            },
        .share_weights = true,
    };
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    int number;
    r = cox_engine_group_start(&options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (r)
        return cox_exit_with(&error);
    struct cox_scheduler_stats stats = {0};
    complete.scheduler.step_ms = e->group.step_ms;
    complete.scheduler.steps_in_flight = e->group.steps_in_flight;
    complete.tokenizer = e->tokenizer;
    complete.progress = !e->quiet;
    r = cox_prompts_complete(&e->prompts, group, &complete, &stats, &error);
    if (r && cox_foreground_signal(cox_engine_group_foreground(group)))
        return cox_exit_interrupted(cox_foreground_signal(cox_engine_group_foreground(group)));
    return r ? cox_exit_with(&error) : report(e);
}

static int take_option(struct eval *e, int option, char **argv, struct cox_error *err)
{
    switch (option) {
    case OPTION_MIN_ACCURACY:
        return cox_parse_real("--min-accuracy", optarg, 0, 100, &e->min_accuracy, err);
    case OPTION_QUIET:
        e->quiet = true;
        return 0;
    default:
        return cox_group_choice_take(&e->group, option, optarg, argv, err);
    }
}

int cox_command_eval(int argc, char **argv)
{
    struct eval e = {0};
    struct cox_error error = {0};
    cox_group_choice_init(&e.group);
    int option, r = 0;
    while (!r && (option = getopt_long(argc, argv, COX_GROUP_CHOICE_SHORT_OPTIONS, long_options,
                                       NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = take_option(&e, option, argv, &error);
    }
    if (!r && argc - optind != 1)
        r = cox_fail(&error, COX_INVALID, "expected one FILE");
    if (!r)
        r = split(&e, argv[optind], &error);
    int exit_status;
    if (r > 0)
        exit_status = cox_exit_usage("eval", &error);
    else if (r)
        exit_status = cox_exit_with(&error);
    else
        exit_status = evaluate(&e);
    cox_prompts_deinit(&e.prompts);
    cox_prompts_deinit(&e.lines);
    cox_tokenizer_free(e.tokenizer);
    free(e.answers);
    return cox_exit_flushed(exit_status);
}
