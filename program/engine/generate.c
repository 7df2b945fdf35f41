#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "coordinator/server/group_links.h"
#include "engine/batching/lora.h"
#include "engine/model/tokenizer.h"
#include "program/cli/adapter_options.h"
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "program/cli/init_options.h"
#include "program/cli/signals.h"
#include "proto/control.pb-c.h"
#include "dialog.h"
#include "engine_command.h"
#include "prefill_decode.h"
#include "remote.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdatomic.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Time for a running group to reply with its status. */
#define CONNECT_MS 10000

enum {
    OPTION_MAX_TOKENS = COX_OPTION_KEY(0),
    OPTION_TEMPERATURE,
    OPTION_TOP_K,
    OPTION_TOP_P,
    OPTION_SEED,
    OPTION_FILE,
    OPTION_TOKENS,
    OPTION_JSON,
    OPTION_QUIET,
    OPTION_SEQUENCES,
    OPTION_START,
    OPTION_LORA,
    OPTION_ADAPTER,
    OPTION_INIT,
    OPTION_PREFILL,
    OPTION_DECODE,
};

struct generate {
    struct cox_group_choice group;
    struct cox_complete_options complete;
    const char *file;
    bool tokens;
    bool json;
    bool quiet;
    /* starts a group of that name if none runs */
    bool start;
    struct cox_adapter_choice adapters;
    struct cox_init_choice init;
    struct cox_prefill_decode_options prefill_decode;
    struct cox_prompts prompts;
    /* prompts are typed at the terminal */
    bool dialog;
    struct cox_tokenizer *tokenizer;
    /* of the model */
    uint32_t vocab_size;
    /* as reported by a running group */
    char *model;
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
    struct cox_prompt_sampling *sampling = &g->complete.sampling;
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
    struct cox_engine_loop_options *engine_loop = &g->complete.engine_loop;
    switch (option) {
    case OPTION_TEMPERATURE:
    case OPTION_TOP_K:
    case OPTION_TOP_P:
    case OPTION_SEED:
        return sampling_option(g, option, value, err);
    case OPTION_MAX_TOKENS:
        return parse_count("--max-tokens", value, INT32_MAX, &g->complete.new_count_max, err);
    case OPTION_SEQUENCES:
        return parse_count("--sequences", value, 4096, &engine_loop->sequence_count_max, err);
    case OPTION_FILE:
        g->file = value;
        return 0;
    case OPTION_TOKENS:
        g->tokens = true;
        return 0;
    case OPTION_JSON:
        g->json = true;
        return 0;
    case OPTION_QUIET:
        g->quiet = true;
        return 0;
    case OPTION_LORA:
        g->complete.lora = value;
        return *value ? 0 : cox_fail(err, COX_INVALID, "--lora: expected an adapter name");
    case OPTION_ADAPTER:
        return cox_adapter_choice_take(&g->adapters, value, err);
    case OPTION_INIT:
        return cox_init_choice_take(&g->init, value, err);
    case OPTION_START:
        g->start = true;
        return 0;
    case OPTION_PREFILL:
        g->prefill_decode.prefill = value;
        return cox_name_check(value, err);
    default: /* OPTION_DECODE */
        g->prefill_decode.decode = value;
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
        g->dialog = true;
        return 0;
    }
    if (g->file || count == 0 || (count == 1 && !strcmp(texts[0], "-")))
        return cox_prompts_load(&g->prompts, g->file ? g->file : "-", err);
    for (int i = 0; i < count; i++) {
        int r = cox_prompts_add(&g->prompts, texts[i], strlen(texts[i]));
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
    if (g->complete.progress)
        cox_console_make_room();
    if (g->json) {
        print_json(prompt);
    } else if (g->tokens) {
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

static void summarize(const struct generate *g, const struct cox_engine_loop_stats *stats)
{
    double seconds = (double)stats->run_ns / 1e9;
    char channel[96] = "not reported";
    if (stats->channel_p50_ns || stats->channel_p99_ns)
        snprintf(channel, sizeof channel, "p50 %.1f us, p99 %.1f us",
                 (double)stats->channel_p50_ns / 1e3, (double)stats->channel_p99_ns / 1e3);
    cox_console_say("%zu prompt%s on %" PRIu32 " rank%s: %" PRIu64
                    " tokens in %.3f s, %.0f tokens/s",
                    g->prompts.count, g->prompts.count == 1 ? "" : "s", g->group.rank_count,
                    g->group.rank_count == 1 ? "" : "s", stats->batcher.generated_tokens, seconds,
                    tokens_per_second(stats));
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

/* All checks that need no process to be started. */
static int prepare(struct generate *g, const char **ret_model, struct cox_error *err)
{
    int r = cox_group_choice_check(&g->group, err);
    if (!r)
        r = cox_model_find(&g->group, ret_model, err);
    if (!r && !g->tokens)
        r = cox_tokenizer_load(*ret_model, &g->tokenizer, err);
    if (!r)
        r = cox_eos_load(*ret_model, g->complete.stop_tokens, &g->complete.stop_count, err);
    if (!r)
        r = cox_vocab_size_load(*ret_model, &g->vocab_size, err);
    if (!r)
        r = cox_prompts_encode(&g->prompts, g->tokenizer, g->vocab_size, err);
    return r;
}

static void complete_prepare(struct generate *g)
{
    g->complete.engine_loop.step_ms = g->group.step_ms;
    /* With a single sequence, the one row too many at each end costs more than the overlap gains:
     * measured 0.7 of the tokens/s with replies of four tokens. */
    if (g->complete.engine_loop.sequence_count_max == 1)
        g->complete.engine_loop.steps_in_flight = 1;
    g->complete.tokenizer = g->tokenizer;
    g->complete.timeout_ms = g->group.step_ms;
    g->complete.progress = !g->quiet && g->prompts.count > 1;
    g->complete.ready = on_ready;
    g->complete.ready_context = g;
}

/* r is the result of the run. Returns the exit status. */
static int finish(const struct generate *g, int r, int signal_number,
                  const struct cox_engine_loop_stats *stats, const struct cox_error *error)
{
    if (g->write_error) {
        cox_console_say("cannot write to standard output: %s", cox_status_text(-g->write_error));
        return COX_EXIT_FAILED;
    }
    if (r && signal_number)
        return cox_exit_interrupted(signal_number);
    if (!g->quiet && !g->dialog)
        summarize(g, stats);
    if (r)
        return cox_exit_with(error);
    if (!g->failed_count || g->dialog)
        return COX_EXIT_OK;
    /* Nothing was computed: it is the input that is wrong, such as the name of an adapter. */
    return g->refused_count == g->prompts.count ? COX_EXIT_USAGE : COX_EXIT_FAILED;
}

/* ---- prompts that are typed ---- */

struct interrupt {
    /* an eventfd: the run must end */
    int fd;
    _Atomic int number;
};

static void interrupt_run(struct interrupt *interrupt)
{
    const uint64_t one = 1;
    while (write(interrupt->fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static int interrupt_open(struct interrupt *interrupt, struct cox_error *err)
{
    interrupt->fd = eventfd(0, EFD_CLOEXEC);
    return interrupt->fd < 0 ? cox_fail(err, -errno, "eventfd: %s", cox_status_text(-errno)) : 0;
}

/* One prompt; one that cannot be encoded spoils no other. */
static int dialog_turn(struct generate *g, const char *line,
                       int (*complete)(void *context, struct cox_error *err), void *context,
                       struct cox_error *err)
{
    struct cox_error error = {0};
    cox_prompts_deinit(&g->prompts);
    int r = cox_prompts_add(&g->prompts, line, strlen(line));
    if (r)
        return cox_fail(err, r, "no memory");
    if (cox_prompts_encode(&g->prompts, g->tokenizer, g->vocab_size, &error)) {
        cox_console_say("%s", error.text);
        return 0;
    }
    return complete(context, err);
}

/* Calls complete for every line. Returns 0 when the input has ended, or its failure. */
static int dialog_run(struct generate *g, int stop_fd,
                      int (*complete)(void *context, struct cox_error *err), void *context,
                      struct cox_error *err)
{
    int r = 0;
    if (!g->quiet)
        cox_console_say("type a prompt; Ctrl-D ends");
    while (r == 0) {
        _cox_cleanup_(cox_free_ptr) char *line = NULL;
        r = cox_dialog_read(stop_fd, &line, err);
        if (r == 0 && line[0])
            r = dialog_turn(g, line, complete, context, err);
    }
    return r == COX_EMPTY ? 0 : r;
}

/* ---- a running group ---- */

static bool on_signal(void *context, int number)
{
    struct interrupt *interrupt = context;
    int none = 0;
    if (!atomic_compare_exchange_strong(&interrupt->number, &none, number))
        return false;
    interrupt_run(interrupt);
    return true;
}

static int conflict(const struct generate *g, const char *what, struct cox_error *err)
{
    return cox_fail(
        err, COX_INVALID,
        "the group '%s' runs already, with what it was started with: leave out %s, or take another --name",
        g->group.name, what);
}

/* The first option given that is for starting a group, and is not refused with more details; NULL:
 * none. */
static const char *start_option(const struct generate *g)
{
    const struct cox_group_choice *group = &g->group;
    bool size = group->no_large_payloads || group->large_payload_size;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        size = size || group->request_size[c] || group->response_size[c];
    const struct {
        bool given;
        const char *option;
    } options[] = {
        {group->spin_given, "--spin"},
        {size, "--size"},
        {group->recovery_given, "--on-death"},
        {group->worker != NULL, "--worker"},
        {group->start_timeout_ms != 0, "--start-timeout"},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (options[i].given)
            return options[i].option;
    return NULL;
}

/* Refuses options that contradict the group's status. */
static int check_conflicts(struct generate *g, const CoxswainControl__StatusReply *status,
                           struct cox_error *err)
{
    const struct cox_group_choice *group = &g->group;
    if (!status->serving)
        return cox_fail(err, COX_UNSUPPORTED, "the group '%s' accepts no prompts: %s", group->name,
                        status->refusal ? status->refusal : "it gives no reason");
    if (group->rank_count_given && group->rank_count != status->rank_count)
        return cox_fail(err, COX_INVALID,
                        "the group '%s' runs already, with %" PRIu32
                        " rank%s: leave out -n %" PRIu32 ", or take another --name",
                        group->name, status->rank_count, status->rank_count == 1 ? "" : "s",
                        group->rank_count);
    if (group->depth && group->depth != status->depth)
        return conflict(g, "--depth", err);
    if (group->legacy_workers && !status->legacy)
        return conflict(g, "--legacy-workers", err);
    if (group->attach_given && strcmp(status->attach ? status->attach : "",
                                      group->attach == COX_ATTACH_SEALED ? "sealed" : "named") != 0)
        return conflict(g, "--attach", err);
    if (start_option(g))
        return conflict(g, start_option(g), err);
    if (g->init.count)
        return conflict(g, "--init", err);
    if (g->adapters.count)
        return cox_fail(
            err, COX_INVALID,
            "the group '%s' runs already: load an adapter with coxswain lora load, and leave out --adapter",
            group->name);
    g->group.rank_count = status->rank_count;
    return 0;
}

/* The model of the group, or another folder with the same tokenizer and config. */
static int choose_model(struct generate *g, const CoxswainControl__StatusReply *status,
                        struct cox_error *err)
{
    if (!g->group.model && !status->model)
        return cox_fail(err, COX_INVALID,
                        "the group '%s' reports no model: give it with --model DIR", g->group.name);
    if (g->group.model && status->model) {
        _cox_cleanup_(cox_free_ptr) char *asked = realpath(g->group.model, NULL);
        if (asked && strcmp(asked, status->model))
            return cox_fail(
                err, COX_INVALID,
                "the group '%s' runs already, with the model %s: leave out --model, or take another --name",
                g->group.name, status->model);
    }
    if (!g->group.model) {
        g->model = strdup(status->model);
        if (!g->model)
            return cox_fail(err, -ENOMEM, "no memory");
        g->group.model = g->model;
    }
    return 0;
}

/* Texts are made tokens here, and the other way round, by files that the group has read before. */
static int check_files(const struct generate *g, const CoxswainControl__StatusReply *status,
                       struct cox_error *err)
{
    uint64_t digest;
    if (!status->serving->text_digest)
        return 0;
    int r = cox_text_digest_load(g->group.model, &digest, err);
    if (!r && digest != status->serving->text_digest)
        r = cox_fail(
            err, COX_STATE,
            "tokenizer.json or config.json in %s has changed since the group '%s' was started: texts would be wrong; put the files back, or start the group again",
            g->group.model, g->group.name);
    return r;
}

struct remote_run {
    struct generate *g;
    struct cox_client *client;
    /* the prefill group; NULL: there is only one group */
    struct cox_client *prefill;
    uint32_t window;
    struct interrupt interrupt;
    struct cox_engine_loop_stats stats;
    struct cox_prefill_decode_stats prefill_decode;
};

static int remote_complete(void *context, struct cox_error *err)
{
    struct remote_run *run = context;
    struct generate *g = run->g;
    if (run->prefill)
        return cox_prefill_decode_complete(&g->prompts, run->prefill, run->client,
                                           &g->prefill_decode, run->interrupt.fd, &g->complete,
                                           &run->stats, &run->prefill_decode, err);
    return cox_remote_complete(&g->prompts, run->client, g->group.name, run->window,
                               run->interrupt.fd, &g->complete, &run->stats, err);
}

static int remote_run(struct remote_run *run, struct cox_error *err)
{
    struct generate *g = run->g;
    struct cox_signals signals = COX_SIGNALS_NONE;
    run->window = run->window ? run->window : 1;
    g->prefill_decode.window = run->window;
    complete_prepare(g);
    int r = interrupt_open(&run->interrupt, err);
    if (!r)
        r = cox_signals_start(&signals, on_signal, NULL, &run->interrupt, err);
    if (!r)
        r = g->dialog ? dialog_run(g, run->interrupt.fd, remote_complete, run, err)
                      : remote_complete(run, err);
    cox_signals_end(&signals);
    cox_close_fd(&run->interrupt.fd);
    return r;
}

/* Runs on the group of this connection. Returns the exit status. */
static int generate_remote(struct generate *g, struct cox_client *client)
{
    struct cox_error error = {0};
    CoxswainControl__StatusReply *status;
    const char *model = NULL;
    uint32_t window = 0;
    int r = cox_client_status(client, cox_deadline_after_ms(CONNECT_MS), &status, &error);
    if (r)
        return cox_exit_with(&error);
    if (status->refusal)
        cox_client_clean_text(status->refusal);
    r = check_conflicts(g, status, &error);
    if (!r)
        r = choose_model(g, status, &error);
    if (!r)
        r = check_files(g, status, &error);
    if (!r) {
        window = status->serving->prompt_count_max;
        uint32_t wanted = g->complete.engine_loop.sequence_count_max;
        window = wanted && wanted < window ? wanted : window;
        r = prepare(g, &model, &error); /* frees status */
    }
    if (r)
        return r == COX_INVALID || r == COX_NOT_FOUND ? cox_exit_usage("generate", &error)
                                                      : cox_exit_with(&error);
    struct remote_run run = {.g = g, .client = client, .window = window, .interrupt = {.fd = -1}};
    r = remote_run(&run, &error);
    return finish(g, r, run.interrupt.number, &run.stats, &error);
}

/* ---- two running groups ---- */

/* Reads the status of one of the groups, and frees it. *ret_window is lowered to the prompts that
 * the group accepts at a time. */
static int prefill_decode_side(struct generate *g, struct cox_client *client, const char *name,
                               uint64_t deadline_ns, uint32_t refused_role, uint32_t *window,
                               struct cox_error *err)
{
    CoxswainControl__StatusReply *status;
    g->group.name = name; /* for messages */
    int r = cox_client_open(client, name, deadline_ns, err);
    if (!r)
        r = cox_client_status(client, deadline_ns, &status, err);
    if (r)
        return r;
    if (status->refusal)
        cox_client_clean_text(status->refusal);
    r = check_conflicts(g, status, err);
    if (!r && !status->transfer)
        r = cox_fail(err, COX_UNSUPPORTED,
                     "the group '%s' takes no part in transfers: it has legacy workers", name);
    if (!r && status->transfer->role == refused_role)
        r = cox_fail(
            err, COX_UNSUPPORTED,
            "the role of the group '%s' is %s: give it another one (coxswain role --name %s %s), or swap --prefill and --decode",
            name, cox_role_name(refused_role), name,
            cox_role_name(refused_role == COX_ROLE_DECODE ? COX_ROLE_PREFILL : COX_ROLE_DECODE));
    if (!r && !g->group.model)
        r = choose_model(g, status, err);
    if (!r)
        r = check_files(g, status, err);
    uint32_t count_max = r ? 0 : status->serving->prompt_count_max;
    *window = !*window || count_max < *window ? count_max : *window;
    return r;
}

static void prefill_decode_summarize(const struct generate *g,
                                     const struct cox_prefill_decode_stats *stats)
{
    cox_console_say("'%s' pulled %" PRIu64 " prompts from '%s' and computed %" PRIu64
                    " itself; linked %" PRIu64 " time%s",
                    g->prefill_decode.decode, stats->pulled, g->prefill_decode.prefill,
                    stats->recomputed, stats->links, stats->links == 1 ? "" : "s");
}

static int generate_prefill_decode(struct generate *g)
{
    _cox_cleanup_(cox_client_close) struct cox_client prefill = COX_CLIENT_NONE;
    _cox_cleanup_(cox_client_close) struct cox_client decode = COX_CLIENT_NONE;
    struct cox_error error = {0};
    const char *model = NULL;
    uint64_t deadline_ns = cox_deadline_after_ms(CONNECT_MS);
    uint32_t window = g->complete.engine_loop.sequence_count_max;
    int r = prefill_decode_side(g, &prefill, g->prefill_decode.prefill, deadline_ns,
                                COX_ROLE_DECODE, &window, &error);
    if (!r)
        r = prefill_decode_side(g, &decode, g->prefill_decode.decode, deadline_ns, COX_ROLE_PREFILL,
                                &window, &error);
    if (!r)
        r = prepare(g, &model, &error);
    if (r)
        return r == COX_INVALID || r == COX_NOT_FOUND ? cox_exit_usage("generate", &error)
                                                      : cox_exit_with(&error);
    struct remote_run run = {
        .g = g, .client = &decode, .prefill = &prefill, .window = window, .interrupt = {.fd = -1}};
    g->prefill_decode.connect_ms = CONNECT_MS;
    r = remote_run(&run, &error);
    if (!g->quiet && !g->dialog && !r)
        prefill_decode_summarize(g, &run.prefill_decode);
    return finish(g, r, run.interrupt.number, &run.stats, &error);
}

static int check(const void *choice, struct cox_error *err)
{
    const struct generate *g = choice;
    const struct cox_prefill_decode_options *prefill_decode = &g->prefill_decode;
    if (cox_init_choice_get(&g->init, "model"))
        return cox_fail(err, COX_INVALID, "'model' in --init: use --model DIR");
    if (g->start && !g->group.name)
        return cox_fail(
            err, COX_INVALID,
            "--start needs the --name of the group (without --name one is always started)");
    if (!prefill_decode->prefill && !prefill_decode->decode)
        return 0;
    if (!prefill_decode->prefill || !prefill_decode->decode)
        return cox_fail(err, COX_INVALID, "--prefill and --decode go together");
    if (strcmp(prefill_decode->prefill, prefill_decode->decode) == 0)
        return cox_fail(err, COX_INVALID,
                        "--prefill and --decode are the same group: use --name %s instead",
                        prefill_decode->prefill);
    if (g->group.name)
        return cox_fail(err, COX_INVALID,
                        "--prefill and --decode name the groups: leave out --name");
    return 0;
}

/* ---- a group of its own ---- */

struct own_run {
    struct generate *g;
    struct cox_engine_group *group;
    struct interrupt interrupt;
    struct cox_engine_loop_stats stats;
};

static int own_complete(void *context, struct cox_error *err)
{
    struct own_run *run = context;
    struct generate *g = run->g;
    return cox_prompts_complete(&g->prompts, run->group, &g->complete, &run->stats, err);
}

static void on_stop(void *context)
{
    interrupt_run(context);
}

/* While a prompt is completed, a signal ends the engine loop. */
static int own_turn(void *context, struct cox_error *err)
{
    struct own_run *run = context;
    struct cox_foreground *foreground = cox_engine_group_foreground(run->group);
    int r = own_complete(run, err);
    cox_foreground_on_stop(foreground, on_stop, &run->interrupt);
    return r;
}

static int own_dialog(struct own_run *run, struct cox_error *err)
{
    struct cox_foreground *foreground = cox_engine_group_foreground(run->group);
    int r = interrupt_open(&run->interrupt, err);
    if (r)
        return r;
    cox_foreground_on_stop(foreground, on_stop, &run->interrupt);
    r = dialog_run(run->g, run->interrupt.fd, own_turn, run, err);
    cox_foreground_on_stop(foreground, NULL, NULL);
    cox_close_fd(&run->interrupt.fd);
    return r;
}

static int generate_own(struct generate *g)
{
    struct cox_error error = {0};
    const char *model = NULL, *worker = NULL;
    const char *const *command = NULL;
    int r = prepare(g, &model, &error);
    if (!r && g->complete.lora && !cox_adapter_choice_has(&g->adapters, g->complete.lora))
        r = cox_fail(
            &error, COX_INVALID,
            "--lora %.128s: name its folder with --adapter %.128s=DIR, or a running group that has it with --name",
            g->complete.lora, g->complete.lora);
    if (r)
        return r > 0 ? cox_exit_usage("generate", &error) : cox_exit_with(&error);
    r = cox_worker_find(&g->group, &worker, &error);
    if (!r)
        r = cox_worker_check(&g->group, worker, model, &error);
    if (!r)
        r = cox_worker_command(&g->group, worker, model, &command, &error);
    if (r)
        return r == COX_INVALID ? cox_exit_usage("generate", &error) : cox_exit_with(&error);
    const struct cox_engine_group_options options = {
        .foreground =
            {
                .group = &g->group,
                .command = command,
                .model = model,
                .config = g->init.entries,
                .config_count = g->init.count,
                .quiet = g->quiet,
                .prompts_refusal = "it was started by coxswain generate, for its own prompts",
            },
        .share_weights = cox_worker_is_reference(worker),
        .adapters = &g->adapters,
    };
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    int number;
    r = cox_engine_group_start(&options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (r)
        return cox_exit_with(&error);

    struct own_run run = {.g = g, .group = group, .interrupt = {.fd = -1}};
    complete_prepare(g);
    if (g->complete.lora) /* so that no other client unloads it */
        r = cox_lora_take(cox_engine_group_lora(group), g->complete.lora, &error);
    if (r)
        return cox_foreground_signal(cox_engine_group_foreground(group))
                   ? cox_exit_interrupted(cox_foreground_signal(cox_engine_group_foreground(group)))
                   : cox_exit_with(&error);
    r = g->dialog ? own_dialog(&run, &error) : own_complete(&run, &error);
    return finish(g, r, cox_foreground_signal(cox_engine_group_foreground(group)), &run.stats,
                  &error);
}

/* With a name: on the live group of that name; without one, on a group of its own. */
static int generate(struct generate *g)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    if (g->prefill_decode.decode)
        return generate_prefill_decode(g);
    if (!g->group.name)
        return generate_own(g);
    int r = cox_client_open(&client, g->group.name, cox_deadline_after_ms(CONNECT_MS), &error);
    if (r == COX_NOT_FOUND && g->start)
        return generate_own(g);
    if (r == COX_NOT_FOUND) {
        cox_console_say("%s (start one with coxswain run --name %s, or with --start for these "
                        "prompts alone)",
                        error.text, g->group.name);
        return COX_EXIT_USAGE;
    }
    return r ? cox_exit_with(&error) : generate_remote(g, &client);
}

static int run(void *choice)
{
    struct generate *g = choice;
    int exit_status = generate(g);
    if (g->write_error) { /* it was reported before */
        __fpurge(stdout);
        clearerr(stdout);
    }
    return exit_status;
}

static void init(void *choice)
{
    struct generate *g = choice;
    g->complete.sampling.top_p = 1;
    cox_group_choice_init(&g->group);
}

static void deinit(void *choice)
{
    struct generate *g = choice;
    cox_prompts_deinit(&g->prompts);
    cox_adapter_choice_deinit(&g->adapters);
    cox_init_choice_deinit(&g->init);
    cox_tokenizer_free(g->tokenizer);
    free(g->model);
}

static const struct argp_option options[] = {
    {"start", OPTION_START, NULL, 0,
     "start a group of that --name, for these prompts alone, if none runs", 0},
    /* What --name means without --start; it once started a group. */
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
    {"quiet", OPTION_QUIET, NULL, 0,
     "neither the workers' output nor progress nor a summary on standard error", 0},
    {"sequences", OPTION_SEQUENCES, "N", 0,
     "run so many prompts at a time, 1 to 4096 (default 64); 1: one after the other", 0},
    {"lora", OPTION_LORA, "ADAPTER", 0,
     "compute with this LoRA adapter: of the running group (coxswain lora load), or one of "
     "--adapter",
     0},
    {"adapter", OPTION_ADAPTER, "NAME=DIR", 0,
     "load this adapter first; with a group of its own only", 0},
    {"init", OPTION_INIT, "KEY=VALUE|@FILE", 0,
     "configuration that every worker gets at init, as of coxswain run; with a group of its own only",
     0},
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
    .summary = "start workers, complete prompts, print the text",
    .arguments = "[PROMPT]...",
    .text =
        "Starts worker processes, completes every PROMPT and prints prompt and completion, one "
        "line each, in order. Without a PROMPT (or with the only PROMPT -) prompts are the "
        "lines of standard input; at a terminal they are typed, and Ctrl-D ends. With the --name of a group that `coxswain run` keeps, that "
        "group completes them, together with those of others; its model is used, and options "
        "for starting a group are refused.",
    .examples = "  coxswain generate -n 4 \"27+58=\" \"999+1=\"\n"
                "  coxswain generate -n 2 --json --file prompts.txt\n"
                "  coxswain generate --name mine \"27+58=\"       on the group that run keeps\n"
                "  coxswain generate --name mine               type prompts\n"
                "  coxswain generate --prefill A --decode B \"27+58=\"\n",
    .choice_size = sizeof(struct generate),
    .init = init,
    .groups = {{&generate_options, 0},
               {&split_group, 0},
               {&cox_death_option_group, offsetof(struct generate, group)},
               {&cox_start_option_group, offsetof(struct generate, group)},
               {&cox_layout_option_group, offsetof(struct generate, group)}},
    .words = take_prompts,
    .run = run,
    .deinit = deinit,
};
