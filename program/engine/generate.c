#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "engine_command.h"
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "prompt_job.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct generate {
    struct cox_prompt_job job;
    const char *file;
    bool json;
    size_t failed_count;
    /* of them, wrong input */
    size_t refused_count;
    /* of standard output */
    int write_error;
};

static int take_temperature(void *member, const char *value, struct cox_error *err)
{
    double real = 0;
    int r = cox_parse_real("--temperature", value, 0, 100, &real, err);
    *(float *)member = (float)real;
    return r;
}

static int take_top_p(void *member, const char *value, struct cox_error *err)
{
    double real = 0;
    int r = cox_parse_real("--top-p", value, 1e-6, 1, &real, err);
    *(float *)member = (float)real;
    return r;
}

static int take_lora(void *member, const char *value, struct cox_error *err)
{
    *(const char **)member = value;
    return *value ? 0 : cox_fail(err, COX_INVALID, "--lora: expected an adapter name");
}

static int take_prompts(void *choice, int count, char *const *texts, struct cox_error *err)
{
    struct generate *g = choice;
    if (g->file && count)
        return cox_fail(err, COX_INVALID,
                        "prompts come from --file or from the command line, not both");
    if (!g->file && count == 0 && isatty(STDIN_FILENO)) {
        g->job.dialog = true;
        return 0;
    }
    if (g->file || count == 0 || (count == 1 && !strcmp(texts[0], "-")))
        return cox_prompts_load(&g->job.prompts, g->file ? g->file : "-", err);
    for (int i = 0; i < count; i++) {
        int r = cox_prompts_add(&g->job.prompts, texts[i], strlen(texts[i]));
        if (r)
            return cox_fail(err, r, "no memory");
    }
    return 0;
}

/* ---- output, on the engine loop's thread ---- */

static void print_ids(const int32_t *tokens, uint32_t count, const char **separator)
{
    for (uint32_t i = 0; i < count; i++) {
        printf("%s%" PRId32, *separator, tokens[i]);
        *separator = " ";
    }
}

static void print_json(const struct cox_prompt *prompt)
{
    static const char *const finishes[] = {
        [COX_FINISH_STOP] = "stop",
        [COX_FINISH_LENGTH] = "length",
        [COX_FINISH_ERROR] = "error",
    };
    json_t *root = json_object();
    json_t *tokens = json_array();
    for (uint32_t i = 0; i < prompt->new_count; i++)
        json_array_append_new(tokens, json_integer(prompt->new_tokens[i]));
    json_object_set_new(root, "prompt", json_string(prompt->text));
    json_object_set_new(root, "text",
                        prompt->new_text ? json_string(prompt->new_text) : json_null());
    json_object_set_new(root, "tokens", tokens);
    json_object_set_new(root, "finish", json_string(finishes[prompt->finish]));
    if (prompt->error)
        json_object_set_new(root, "error", json_string(prompt->error));
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

static int on_ready(void *context, size_t index, const struct cox_prompt *prompt)
{
    struct generate *g = context;
    if (prompt->abandoned) {
        g->failed_count++;
        if (!g->json)
            /* a line of text has no field for it; the cause is printed once, on standard error */
            return 0;
    } else if (prompt->error) {
        g->failed_count++;
        g->refused_count += prompt->code == COX_INVALID;
        cox_console_say("prompt %zu: %s", index + 1, prompt->error);
    }
    if (g->job.complete.progress)
        cox_console_make_room();
    if (g->json) {
        print_json(prompt);
    } else if (g->job.tokens) {
        const char *separator = "";
        print_ids(prompt->tokens, prompt->token_count, &separator);
        print_ids(prompt->new_tokens, prompt->new_count, &separator);
        putchar('\n');
    } else {
        printf("%s%s\n", prompt->text, prompt->new_text ? prompt->new_text : "");
    }
    /* Flushes each line, so that a reader gets it at once, and a closed pipe is noticed. */
    errno = 0;
    if (fflush(stdout) || ferror(stdout)) {
        g->write_error = errno ? errno : EIO;
        return -1;
    }
    return 0;
}

static double tokens_per_second(const struct cox_engine_loop_stats *stats)
{
    return stats->run_ns ? (double)stats->batcher.generated_tokens * 1e9 / (double)stats->run_ns
                         : 0;
}

/* "channel 3.1 %, rank group 20.4 % (18.0 % waiting for other ranks)" */
static void summarize_shares(const struct cox_engine_loop_times *times)
{
    const double whole = (double)times->step_ns;
    char group[96] = "";
    if (times->has_group)
        snprintf(group, sizeof group, ", rank group %.1f %% (%.1f %% waiting for other ranks)",
                 100 * ((double)times->group_ns / whole),
                 100 * ((double)times->group_wait_ns / whole));
    cox_console_say("of the time of steps: channel %.1f %%%s",
                    100 * ((double)times->channel_ns / whole), group);
}

static void summarize(const struct generate *g)
{
    const struct cox_engine_loop_stats *stats = &g->job.stats;
    double seconds = (double)stats->run_ns / 1e9;
    char channel[96] = "not reported";
    if (stats->channel_p50_ns || stats->channel_p99_ns)
        snprintf(channel, sizeof channel, "p50 %.1f us, p99 %.1f us",
                 (double)stats->channel_p50_ns / 1e3, (double)stats->channel_p99_ns / 1e3);
    cox_console_say("%zu prompt%s on %" PRIu32 " rank%s: %" PRIu64
                    " tokens in %.3f s, %.0f tokens/s",
                    g->job.prompts.count, g->job.prompts.count == 1 ? "" : "s",
                    g->job.group.rank_count, g->job.group.rank_count == 1 ? "" : "s",
                    stats->batcher.generated_tokens, seconds, tokens_per_second(stats));
    if (stats->steps == 0)
        return;
    cox_console_say("%" PRIu64 " steps: p50 %.1f us, p99 %.1f us; channel time per step: %s",
                    stats->steps, (double)stats->step_p50_ns / 1e3,
                    (double)stats->step_p99_ns / 1e3, channel);
    if (stats->times.step_ns)
        summarize_shares(&stats->times);
    if (stats->retries || stats->batcher.preemptions)
        cox_console_say("%" PRIu64 " steps were run again, %" PRIu64 " sequences were preempted",
                        stats->retries, stats->batcher.preemptions);
}

/* ---- the command ---- */

static void summarize_pair(const struct generate *g)
{
    const struct cox_prefill_decode_stats *stats = &g->job.prefill_decode;
    cox_console_say("'%s' pulled %" PRIu64 " prompts from '%s' and computed %" PRIu64
                    " itself; linked %" PRIu64 " time%s",
                    g->job.decode, stats->pulled, g->job.prefill, stats->recomputed, stats->links,
                    stats->links == 1 ? "" : "s");
}

/* r is the result of the run. Returns the exit status. */
static int finish(void *context, int r, const struct cox_error *error)
{
    const struct generate *g = context;
    const struct cox_prompt_job *job = &g->job;
    const bool says = !job->quiet && !job->dialog;
    if (says && !r && job->decode)
        summarize_pair(g);
    if (g->write_error) {
        cox_console_say("cannot write to standard output: %s", cox_status_text(-g->write_error));
        return COX_EXIT_FAILED;
    }
    if (r && job->signal_number)
        return cox_exit_interrupted(job->signal_number);
    if (says)
        summarize(g);
    if (r)
        return cox_exit_with(error);
    if (!g->failed_count || job->dialog)
        return COX_EXIT_OK;
    /* Nothing was computed: it is the input that is wrong, such as the name of an adapter. */
    return g->refused_count == job->prompts.count ? COX_EXIT_USAGE : COX_EXIT_FAILED;
}

static int check(const void *choice, struct cox_error *err)
{
    const struct cox_prompt_job *job = &((const struct generate *)choice)->job;
    if (!job->prefill && !job->decode)
        return 0;
    if (!job->prefill || !job->decode)
        return cox_fail(err, COX_INVALID, "--prefill and --decode go together");
    if (strcmp(job->prefill, job->decode) == 0)
        return cox_fail(err, COX_INVALID,
                        "--prefill and --decode are the same group: use --name %s instead",
                        job->prefill);
    if (job->group.name)
        return cox_fail(err, COX_INVALID,
                        "--prefill and --decode name the groups: leave out --name");
    return 0;
}

static int run(void *choice)
{
    struct generate *g = choice;
    g->job.complete.ready = on_ready;
    g->job.complete.ready_context = g;
    int exit_status = cox_prompt_job_run(&g->job, finish, g);
    if (g->write_error) { /* it was reported before */
        __fpurge(stdout);
        clearerr(stdout);
    }
    return exit_status;
}

static void init(void *choice)
{
    struct generate *g = choice;
    cox_prompt_job_init(&g->job, "generate");
}

static void deinit(void *choice)
{
    struct generate *g = choice;
    cox_prompt_job_deinit(&g->job);
}

static const struct cox_option options[] = {
    {"file", "FILE", "prompts are the lines of FILE; - is standard input",
     COX_TEXT(struct generate, file)},
    {"max-tokens", "N", "generate so many tokens at most, from 1 (default 256, or what fits)",
     COX_COUNT(struct generate, job.complete.new_count_max, 1, INT32_MAX)},
    {"temperature", "T", "0 to 100; 0, the default, always takes the likeliest token",
     COX_TAKE(struct generate, job.complete.sampling.temperature, take_temperature)},
    {"top-k", "K", "draw from the K likeliest tokens only (0: all)",
     COX_COUNT(struct generate, job.complete.sampling.top_k, 0, INT32_MAX)},
    {"top-p", "P",
     "draw from the likeliest tokens of total probability P, up to 1, the default: all",
     COX_TAKE(struct generate, job.complete.sampling.top_p, take_top_p)},
    {"seed", "S", "the same seed draws the same tokens; 0 (default) to 2147483647",
     COX_COUNT(struct generate, job.complete.sampling.seed, 0, INT32_MAX)},
    {"tokens", NULL, "prompts are token ids with blanks between; so is the output",
     COX_FLAG(struct generate, job.tokens)},
    {"json", NULL, "one JSON object a line: prompt, text, tokens, finish",
     COX_FLAG(struct generate, json)},
    {"sequences", "N",
     "run so many prompts at a time, 1 to 4096 (default 64); 1: one after the other",
     COX_COUNT(struct generate, job.complete.engine_loop.sequence_count_max, 1, 4096)},
    {"lora", "ADAPTER", "compute with this LoRA adapter of the running group (coxswain lora load)",
     COX_TAKE(struct generate, job.complete.lora, take_lora)},
    {0},
};
static const struct cox_option_group generate_options = {.options = options, .check = check};

static const struct cox_option split_options[] = {
    {"prefill", "A", "the group that computes the prompts", COX_NAME(struct generate, job.prefill)},
    {"decode", "B", "the group that pulls their keys and values, and generates",
     COX_NAME(struct generate, job.decode)},
    {0},
};
static const struct cox_option_group split_group = {
    .title = "Two running groups (coxswain run --role), linked where they are not yet:",
    .options = split_options,
};

const struct cox_command cox_command_generate = {
    .name = "generate",
    .summary = "complete prompts, on a running group or on one for them alone",
    .arguments = "[PROMPT]...",
    .text =
        "Completes every PROMPT and prints prompt and completion, one line each, in order. "
        "Without a PROMPT (or with the only PROMPT -) prompts are the lines of standard input; at "
        "a terminal they are typed, and Ctrl-D ends. With the --name of a group that `coxswain "
        "run` keeps, that group completes them, together with those of others. Without it a group "
        "with defaults is started, and ended; coxswain run has all options of groups.",
    .examples = "  coxswain generate -n 4 \"27+58=\" \"999+1=\"\n"
                "  coxswain generate -n 2 --json --file prompts.txt\n"
                "  coxswain generate --name mine \"27+58=\"       on the group that run keeps\n"
                "  coxswain generate --name mine               type prompts\n"
                "  coxswain generate --prefill A --decode B \"27+58=\"\n",
    .choice_size = sizeof(struct generate),
    .init = init,
    .groups = {{&generate_options, 0},
               {&cox_prompt_job_option_group, offsetof(struct generate, job)},
               {&split_group, 0}},
    .words = take_prompts,
    .run = run,
    .deinit = deinit,
};
