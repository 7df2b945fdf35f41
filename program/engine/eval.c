#include "channel/base/idioms.h"
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "engine_command.h"
#include "prompts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MISMATCH_SHOWN_MAX 5

enum {
    OPTION_MIN_ACCURACY = COX_OPTION_KEY(0),
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

/* Splits every line after its first '='. */
static int split_file(struct eval *e, const char *file, struct cox_error *err)
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
    const char *const *command = NULL;
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
    if (!r)
        r = cox_worker_command(&e->group, worker, model, &command, &error);
    if (r)
        return r == COX_INVALID ? cox_exit_usage("eval", &error) : cox_exit_with(&error);
    const struct cox_engine_group_options options = {
        .foreground =
            {
                .group = &e->group,
                .command = command,
                .model = model,
                .quiet = e->quiet,
                .prompts_refusal = "it was started by coxswain eval, for its own prompts",
            },
        .share_weights = cox_worker_is_reference(worker),
    };
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    int number;
    r = cox_engine_group_start(&options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (r)
        return cox_exit_with(&error);
    struct cox_engine_loop_stats stats = {0};
    complete.engine_loop.step_ms = e->group.step_ms;
    complete.tokenizer = e->tokenizer;
    complete.progress = !e->quiet;
    r = cox_prompts_complete(&e->prompts, group, &complete, &stats, &error);
    if (r && cox_foreground_signal(cox_engine_group_foreground(group)))
        return cox_exit_interrupted(cox_foreground_signal(cox_engine_group_foreground(group)));
    return r ? cox_exit_with(&error) : report(e);
}

static int take_option(void *choice, int option, const char *value, struct cox_error *err)
{
    struct eval *e = choice;
    if (option == OPTION_MIN_ACCURACY)
        return cox_parse_real("--min-accuracy", value, 0, 100, &e->min_accuracy, err);
    e->quiet = true;
    return 0;
}

static int take_file(void *choice, int count, char *const *words, struct cox_error *err)
{
    return count == 1 ? split_file(choice, words[0], err)
                      : cox_fail(err, COX_INVALID, "expected one FILE");
}

static void init(void *choice)
{
    struct eval *e = choice;
    cox_group_choice_init(&e->group);
}

static int run(void *choice)
{
    return evaluate(choice);
}

static void deinit(void *choice)
{
    struct eval *e = choice;
    cox_prompts_deinit(&e->prompts);
    cox_prompts_deinit(&e->lines);
    cox_tokenizer_free(e->tokenizer);
    free(e->answers);
}

static const struct argp_option options[] = {
    {"min-accuracy", OPTION_MIN_ACCURACY, "P", 0,
     "fail (status 1) below so many percent (default 0)", 0},
    {"quiet", OPTION_QUIET, NULL, 0, "neither the workers' output nor progress", 0},
    {0},
};
static const struct cox_option_group eval_options = {.options = options, .take = take_option};

const struct cox_command cox_command_eval = {
    .name = "eval",
    .summary = "start workers, count how many known answers they give",
    .arguments = "FILE",
    .text = "Starts worker processes, completes the part up to the = of every line of FILE, such "
            "as 27+58=85, and prints how many completions are exactly what follows it. - is "
            "standard input.",
    .examples = "  coxswain eval -n 2 models/sums/heldout.txt\n"
                "  echo 27+58=85 | coxswain eval --min-accuracy 100 -\n",
    .choice_size = sizeof(struct eval),
    .init = init,
    .groups = {{&eval_options, 0},
               {&cox_death_option_group, offsetof(struct eval, group)},
               {&cox_start_option_group, offsetof(struct eval, group)},
               {&cox_layout_option_group, offsetof(struct eval, group)}},
    .words = take_file,
    .run = run,
    .deinit = deinit,
};
