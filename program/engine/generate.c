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

enum {
    OPTION_MAX_TOKENS = COX_OPTION_KEY(0),
    OPTION_TEMPERATURE,
    OPTION_TOP_K,
    OPTION_TOP_P,
    OPTION_SEED,
    OPTION_FILE,
    OPTION_TOKENS,
    OPTION_JSON,
    OPTION_SEQUENCES,
    OPTION_LORA,
    OPTION_PREFILL,
    OPTION_DECODE,
};

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

static int parse_count(const char *what, const char *text, uint64_t max, uint32_t *ret_count,
                       struct cox_error *err)
{
    uint64_t number;
    int r = cox_parse_number(what, text, 1, max, &number, err);
    if (!r)
        *ret_count = (uint32_t)number;
    return r;
}

static int sampling_option(struct generate *g, int option, const char *value, struct cox_error *err)
{
    struct cox_prompt_sampling *sampling = &g->job.complete.sampling;
    double real = 0;
    uint64_t number = 0;
    int r;
    switch (option) {
    case OPTION_TEMPERATURE:
        r = cox_parse_real("--temperature", value, 0, 100, &real, err);
        sampling->temperature = (float)real;
        return r;
    case OPTION_TOP_P:
        r = cox_parse_real("--top-p", value, 1e-6, 1, &real, err);
        sampling->top_p = (float)real;
        return r;
    case OPTION_TOP_K:
        r = cox_parse_number("--top-k", value, 0, INT32_MAX, &number, err);
        sampling->top_k = (int32_t)number;
        return r;
    default:
        r = cox_parse_number("--seed", value, 0, INT32_MAX, &number, err);
        sampling->seed = (int32_t)number;
        return r;
    }
}

static int take_option(void *choice, int option, const char *value, struct cox_error *err)
{
    struct generate *g = choice;
    struct cox_complete_options *complete = &g->job.complete;
    switch (option) {
    case OPTION_TEMPERATURE:
    case OPTION_TOP_K:
    case OPTION_TOP_P:
    case OPTION_SEED:
        return sampling_option(g, option, value, err);
    case OPTION_MAX_TOKENS:
        return parse_count("--max-tokens", value, INT32_MAX, &complete->new_count_max, err);
    case OPTION_SEQUENCES:
        return parse_count("--sequences", value, 4096, &complete->engine_loop.sequence_count_max,
                           err);
    case OPTION_FILE:
        g->file = value;
        return 0;
    case OPTION_TOKENS:
        g->job.tokens = true;
        return 0;
    case OPTION_JSON:
        g->json = true;
        return 0;
    case OPTION_LORA:
        complete->lora = value;
        return *value ? 0 : cox_fail(err, COX_INVALID, "--lora: expected an adapter name");
    case OPTION_PREFILL:
        g->job.prefill = value;
        return cox_name_check(value, err);
    default: /* OPTION_DECODE */
        g->job.decode = value;
        return cox_name_check(value, err);
    }
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

static double share_of(uint64_t part_ns, uint64_t whole_ns)
{
    return whole_ns ? (double)part_ns / (double)whole_ns : 0;
}

static double tokens_per_second(const struct cox_engine_loop_stats *stats)
{
    return stats->run_ns ? (double)stats->batcher.generated_tokens * 1e9 / (double)stats->run_ns
                         : 0;
}

/* "channel 3.1 %, rank group 20.4 % (18.0 % waiting for other ranks)" */
static void summarize_shares(const struct cox_engine_loop_times *times)
{
    char group[96] = "";
    if (times->has_group)
        snprintf(group, sizeof group, ", rank group %.1f %% (%.1f %% waiting for other ranks)",
                 100 * share_of(times->group_ns, times->step_ns),
                 100 * share_of(times->group_wait_ns, times->step_ns));
    cox_console_say("of the time of steps: channel %.1f %%%s",
                    100 * share_of(times->channel_ns, times->step_ns), group);
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

static const struct argp_option options[] = {
    {"file", OPTION_FILE, "FILE", 0, "prompts are the lines of FILE; - is standard input", 0},
    {"max-tokens", OPTION_MAX_TOKENS, "N", 0,
     "generate so many tokens at most, from 1 (default 256, or what fits)", 0},
    {"temperature", OPTION_TEMPERATURE, "T", 0,
     "0 to 100; 0, the default, always takes the likeliest token", 0},
    {"top-k", OPTION_TOP_K, "K", 0, "draw from the K likeliest tokens only (0: all)", 0},
    {"top-p", OPTION_TOP_P, "P", 0,
     "draw from the likeliest tokens of total probability P, up to 1, the default: all", 0},
    {"seed", OPTION_SEED, "S", 0, "the same seed draws the same tokens; 0 (default) to 2147483647",
     0},
    {"tokens", OPTION_TOKENS, NULL, 0,
     "prompts are token ids with blanks between; so is the output", 0},
    {"json", OPTION_JSON, NULL, 0, "one JSON object a line: prompt, text, tokens, finish", 0},
    {"sequences", OPTION_SEQUENCES, "N", 0,
     "run so many prompts at a time, 1 to 4096 (default 64); 1: one after the other", 0},
    {"lora", OPTION_LORA, "ADAPTER", 0,
     "compute with this LoRA adapter of the running group (coxswain lora load)", 0},
    {0},
};
static const struct cox_option_group generate_options = {
    .options = options, .take = take_option, .check = check};

static const struct argp_option split_options[] = {
    {"prefill", OPTION_PREFILL, "A", 0, "the group that computes the prompts", 0},
    {"decode", OPTION_DECODE, "B", 0, "the group that pulls their keys and values, and generates",
     0},
    {0},
};
static const struct cox_option_group split_group = {
    .title = "Two running groups (coxswain run --role), linked where they are not yet:",
    .options = split_options,
    .take = take_option,
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
