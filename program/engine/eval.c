#include "channel/base/idioms.h"
#include "engine_command.h"
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "prompt_job.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MISMATCH_SHOWN_MAX 5

struct eval {
    struct cox_prompt_job job;
    /* percent */
    double min_accuracy;
    /* by prompt, into lines */
    const char **answers;
    struct cox_prompts lines;
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
        r = cox_prompts_add(&e->job.prompts, line, (size_t)(equals + 1 - line));
        if (r)
            return cox_fail(err, r, "no memory");
    }
    return 0;
}

static int report(const struct eval *e)
{
    size_t right = 0, shown = 0;
    for (size_t i = 0; i < e->job.prompts.count; i++)
        right += e->job.prompts.items[i].new_text &&
                 !strcmp(e->job.prompts.items[i].new_text, e->answers[i]);
    double accuracy = 100.0 * (double)right / (double)e->job.prompts.count;
    printf("%zu of %zu right (%.2f %%)\n", right, e->job.prompts.count, accuracy);
    for (size_t i = 0; i < e->job.prompts.count && shown < MISMATCH_SHOWN_MAX; i++) {
        const struct cox_prompt *prompt = &e->job.prompts.items[i];
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

static int finish(void *context, int r, const struct cox_error *error)
{
    const struct eval *e = context;
    if (r && e->job.signal_number)
        return cox_exit_interrupted(e->job.signal_number);
    return r ? cox_exit_with(error) : report(e);
}

static int take_accuracy(void *member, const char *value, struct cox_error *err)
{
    return cox_parse_real("--min-accuracy", value, 0, 100, member, err);
}

static int take_file(void *choice, int count, char *const *words, struct cox_error *err)
{
    return count == 1 ? split_file(choice, words[0], err)
                      : cox_fail(err, COX_INVALID, "expected one FILE");
}

static void init(void *choice)
{
    struct eval *e = choice;
    cox_prompt_job_init(&e->job, "eval");
}

static int run(void *choice)
{
    struct eval *e = choice;
    return cox_prompt_job_run(&e->job, finish, e);
}

static void deinit(void *choice)
{
    struct eval *e = choice;
    cox_prompt_job_deinit(&e->job);
    cox_prompts_deinit(&e->lines);
    free(e->answers);
}

static const struct cox_option options[] = {
    {"min-accuracy", "P", "fail (status 1) below so many percent (default 0)",
     COX_TAKE(struct eval, min_accuracy, take_accuracy)},
    {0},
};
static const struct cox_option_group eval_options = {.options = options};

const struct cox_command cox_command_eval = {
    .name = "eval",
    .summary = "count how many known answers the workers give",
    .arguments = "FILE",
    .text = "Completes the part up to the = of every line of FILE, such as 27+58=85, and prints "
            "how many completions are exactly what follows it. - is standard input. The group is "
            "one that `coxswain run` keeps, or one with defaults that is started for it.",
    .examples = "  coxswain eval -n 2 models/sums/heldout.txt\n"
                "  echo 27+58=85 | coxswain eval --min-accuracy 100 -\n",
    .choice_size = sizeof(struct eval),
    .init = init,
    .groups = {{&eval_options, 0}, {&cox_prompt_job_option_group, offsetof(struct eval, job)}},
    .words = take_file,
    .run = run,
    .deinit = deinit,
};
