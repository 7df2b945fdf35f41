#include "prompt_job.h"

#include "channel/base/idioms.h"
#include "coordinator/server/group_links.h"
#include "dialog.h"
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "program/cli/signals.h"
#include "proto/control.pb-c.h"
#include "remote.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Time for a running group to reply with its status. */
#define CONNECT_MS 10000

struct finish {
    int (*fn)(void *context, int r, const struct cox_error *error);
    void *context;
};

/* ---- options ---- */

/* The first option given that is for a group to start; NULL: none. */
static const char *start_option(const struct cox_prompt_job *job)
{
    const struct cox_group_choice *group = &job->group;
    return group->rank_count_given                       ? "-n"
           : group->worker                               ? "--worker"
           : !cox_group_choice_limits(group)->extensions ? "--legacy-workers"
           : job->init.count                             ? "--init"
                                                         : NULL;
}

static int check(const void *choice, struct cox_error *err)
{
    const struct cox_prompt_job *job = choice;
    const char *running = job->group.name ? job->group.name : job->decode;
    if (running && start_option(job))
        return cox_fail(err, COX_INVALID,
                        "the group '%s' keeps what it was started with: leave out %s, which is for "
                        "a group that this command starts, or for coxswain run",
                        running, start_option(job));
    if (cox_init_choice_get(&job->init, "model"))
        return cox_fail(err, COX_INVALID, "'model' in --init: use --model DIR");
    return 0;
}

static const struct cox_option options[] = {
    {"name", "NAME",
     "a group that coxswain run keeps (default: one with the other options here is started, and "
     "ended)",
     COX_NAME(struct cox_prompt_job, group.name)},
    {"ranks", "N", "its worker processes, 1 to 128 (default 2)", .letter = 'n',
     COX_COUNT(struct cox_prompt_job, group.rank_count, 1, COX_RANK_COUNT_MAX),
     COX_GIVEN(struct cox_prompt_job, group.rank_count_given)},
    {"model", "DIR",
     "folder of its model: config.json, model.safetensors and, for prompts that are text, "
     "tokenizer.json (default: the model that came with the program)",
     COX_TEXT(struct cox_prompt_job, group.model)},
    {"worker", "PATH",
     "its worker program, or \"PROGRAM ARGUMENT...\" (default: $COXSWAIN_WORKER, coxswain-worker "
     "beside this program, or in PATH)",
     COX_TEXT(struct cox_prompt_job, group.worker)},
    {"legacy-workers", NULL, "its workers have the names, sizes and rules of MindIE-LLM workers",
     COX_FLAG(struct cox_prompt_job, group.legacy_workers)},
    {"init", "KEY=VALUE",
     "configuration that its workers get at init; may be repeated. --init @FILE: a JSON object",
     COX_TAKE(struct cox_prompt_job, init, cox_init_choice_take)},
    {"timeout", "SEC",
     "time that a step may take (default 30); on a running group: give up after so long without a "
     "reply (default: never)",
     COX_SECONDS(struct cox_prompt_job, group.step_ms)},
    {"quiet", NULL, "neither the workers' output nor progress nor a summary on standard error",
     COX_FLAG(struct cox_prompt_job, quiet)},
    {0},
};
const struct cox_option_group cox_prompt_job_option_group = {
    .title = "The group:", .options = options, .check = check};

void cox_prompt_job_init(struct cox_prompt_job *job, const char *command)
{
    job->command = command;
    job->complete.sampling.top_p = 1;
    cox_group_choice_init(&job->group);
}

void cox_prompt_job_deinit(struct cox_prompt_job *job)
{
    cox_init_choice_deinit(&job->init);
    cox_prompts_deinit(&job->prompts);
    cox_tokenizer_free(job->tokenizer);
    free(job->model);
}

/* ---- before the run ---- */

/* All checks that need no process to be started. */
static int prepare(struct cox_prompt_job *job, const char **ret_model, struct cox_error *err)
{
    struct cox_complete_options *complete = &job->complete;
    int r = cox_group_choice_check(&job->group, err);
    if (!r)
        r = cox_model_find(&job->group, ret_model, err);
    if (!r && !job->tokens)
        r = cox_tokenizer_load(*ret_model, &job->tokenizer, err);
    if (!r)
        r = cox_eos_load(*ret_model, complete->stop_tokens, &complete->stop_count, err);
    if (!r)
        r = cox_vocab_size_load(*ret_model, &job->vocab_size, err);
    return r ? r : cox_prompts_encode(&job->prompts, job->tokenizer, job->vocab_size, err);
}

static void complete_prepare(struct cox_prompt_job *job)
{
    struct cox_complete_options *complete = &job->complete;
    complete->engine_loop.step_ms = job->group.step_ms;
    /* With a single sequence, the one row too many at each end costs more than the overlap gains:
     * measured 0.7 of the tokens/s with replies of four tokens. */
    if (complete->engine_loop.sequence_count_max == 1)
        complete->engine_loop.steps_in_flight = 1;
    complete->tokenizer = job->tokenizer;
    complete->timeout_ms = job->group.step_ms;
    complete->progress = !job->quiet && job->prompts.count > 1;
}

static int fail_before(const struct cox_prompt_job *job, int r, const struct cox_error *error)
{
    return r == COX_INVALID || r == COX_NOT_FOUND ? cox_exit_usage(job->command, error)
                                                  : cox_exit_with(error);
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
static int dialog_turn(struct cox_prompt_job *job, const char *line,
                       int (*complete)(void *context, struct cox_error *err), void *context,
                       struct cox_error *err)
{
    struct cox_error error = {0};
    cox_prompts_deinit(&job->prompts);
    int r = cox_prompts_add(&job->prompts, line, strlen(line));
    if (r)
        return cox_fail(err, r, "no memory");
    if (cox_prompts_encode(&job->prompts, job->tokenizer, job->vocab_size, &error)) {
        cox_console_say("%s", error.text);
        return 0;
    }
    return complete(context, err);
}

/* Calls complete for every line. Returns 0 when the input has ended, or its failure. */
static int dialog_run(struct cox_prompt_job *job, int stop_fd,
                      int (*complete)(void *context, struct cox_error *err), void *context,
                      struct cox_error *err)
{
    int r = 0;
    if (!job->quiet)
        cox_console_say("type a prompt; Ctrl-D ends");
    while (r == 0) {
        _cox_cleanup_(cox_free_ptr) char *line = NULL;
        r = cox_dialog_read(stop_fd, &line, err);
        if (r == 0 && line[0])
            r = dialog_turn(job, line, complete, context, err);
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

/* Whether it takes prompts. */
static int check_status(struct cox_prompt_job *job, const CoxswainControl__StatusReply *status,
                        struct cox_error *err)
{
    if (!status->serving)
        return cox_fail(err, COX_UNSUPPORTED, "the group '%s' accepts no prompts: %s",
                        job->group.name, status->refusal ? status->refusal : "it gives no reason");
    job->group.rank_count = status->rank_count;
    return 0;
}

/* The model of the group, or another folder with the same tokenizer and config. */
static int choose_model(struct cox_prompt_job *job, const CoxswainControl__StatusReply *status,
                        struct cox_error *err)
{
    if (!job->group.model && !status->model)
        return cox_fail(err, COX_INVALID,
                        "the group '%s' reports no model: give it with --model DIR",
                        job->group.name);
    if (job->group.model && status->model) {
        _cox_cleanup_(cox_free_ptr) char *asked = realpath(job->group.model, NULL);
        if (asked && strcmp(asked, status->model))
            return cox_fail(
                err, COX_INVALID,
                "the group '%s' runs already, with the model %s: leave out --model, or take another --name",
                job->group.name, status->model);
    }
    if (!job->group.model) {
        job->model = strdup(status->model);
        if (!job->model)
            return cox_fail(err, -ENOMEM, "no memory");
        job->group.model = job->model;
    }
    return 0;
}

/* Texts are made tokens here, and the other way round, by files that the group has read before. */
static int check_files(const struct cox_prompt_job *job, const CoxswainControl__StatusReply *status,
                       struct cox_error *err)
{
    uint64_t digest;
    if (!status->serving->text_digest)
        return 0;
    int r = cox_text_digest_load(job->group.model, &digest, err);
    if (!r && digest != status->serving->text_digest)
        r = cox_fail(
            err, COX_STATE,
            "tokenizer.json or config.json in %s has changed since the group '%s' was started: texts would be wrong; put the files back, or start the group again",
            job->group.model, job->group.name);
    return r;
}

struct remote_run {
    struct cox_prompt_job *job;
    struct cox_client *client;
    /* the prefill group; NULL: there is only one group */
    struct cox_client *prefill;
    uint32_t window;
    struct interrupt interrupt;
};

static int remote_complete(void *context, struct cox_error *err)
{
    struct remote_run *run = context;
    struct cox_prompt_job *job = run->job;
    const struct cox_prefill_decode_options how = {
        .prefill = job->prefill,
        .decode = job->decode,
        .window = run->window,
        .connect_ms = CONNECT_MS,
    };
    if (run->prefill)
        return cox_prefill_decode_complete(&job->prompts, run->prefill, run->client, &how,
                                           run->interrupt.fd, &job->complete, &job->stats,
                                           &job->prefill_decode, err);
    return cox_remote_complete(&job->prompts, run->client, job->group.name, run->window,
                               run->interrupt.fd, &job->complete, &job->stats, err);
}

/* Returns the exit status. */
static int remote_run(struct remote_run *run, const struct finish *finish)
{
    struct cox_prompt_job *job = run->job;
    struct cox_signals signals = COX_SIGNALS_NONE;
    struct cox_error error = {0};
    run->window = run->window ? run->window : 1;
    complete_prepare(job);
    int r = interrupt_open(&run->interrupt, &error);
    if (!r)
        r = cox_signals_start(&signals, on_signal, NULL, &run->interrupt, &error);
    if (!r)
        r = job->dialog ? dialog_run(job, run->interrupt.fd, remote_complete, run, &error)
                        : remote_complete(run, &error);
    cox_signals_end(&signals);
    cox_close_fd(&run->interrupt.fd);
    job->signal_number = run->interrupt.number;
    return finish->fn(finish->context, r, &error);
}

/* Runs on the group of this connection. Returns the exit status. */
static int run_remote(struct cox_prompt_job *job, struct cox_client *client,
                      const struct finish *finish)
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
    r = check_status(job, status, &error);
    if (!r)
        r = choose_model(job, status, &error);
    if (!r)
        r = check_files(job, status, &error);
    if (!r) {
        window = status->serving->prompt_count_max;
        uint32_t wanted = job->complete.engine_loop.sequence_count_max;
        window = wanted && wanted < window ? wanted : window;
        r = prepare(job, &model, &error); /* frees status */
    }
    if (r)
        return fail_before(job, r, &error);
    struct remote_run run = {
        .job = job, .client = client, .window = window, .interrupt = {.fd = -1}};
    return remote_run(&run, finish);
}

/* ---- two running groups ---- */

/* Reads the status of one of the groups, and frees it. *ret_window is lowered to the prompts that
 * the group accepts at a time. */
static int prefill_decode_side(struct cox_prompt_job *job, struct cox_client *client,
                               const char *name, uint64_t deadline_ns, uint32_t refused_role,
                               uint32_t *window, struct cox_error *err)
{
    CoxswainControl__StatusReply *status;
    job->group.name = name; /* for messages */
    int r = cox_client_open(client, name, deadline_ns, err);
    if (!r)
        r = cox_client_status(client, deadline_ns, &status, err);
    if (r)
        return r;
    if (status->refusal)
        cox_client_clean_text(status->refusal);
    r = check_status(job, status, err);
    if (!r && !status->transfer)
        r = cox_fail(err, COX_UNSUPPORTED,
                     "the group '%s' takes no part in transfers: it has legacy workers", name);
    if (!r && status->transfer->role == refused_role)
        r = cox_fail(
            err, COX_UNSUPPORTED,
            "the role of the group '%s' is %s: give it another one (coxswain role --name %s %s), or swap --prefill and --decode",
            name, cox_role_name(refused_role), name,
            cox_role_name(refused_role == COX_ROLE_DECODE ? COX_ROLE_PREFILL : COX_ROLE_DECODE));
    if (!r && !job->group.model)
        r = choose_model(job, status, err);
    if (!r)
        r = check_files(job, status, err);
    uint32_t count_max = r ? 0 : status->serving->prompt_count_max;
    *window = !*window || count_max < *window ? count_max : *window;
    return r;
}

static int run_prefill_decode(struct cox_prompt_job *job, const struct finish *finish)
{
    _cox_cleanup_(cox_client_close) struct cox_client prefill = COX_CLIENT_NONE;
    _cox_cleanup_(cox_client_close) struct cox_client decode = COX_CLIENT_NONE;
    struct cox_error error = {0};
    const char *model = NULL;
    uint64_t deadline_ns = cox_deadline_after_ms(CONNECT_MS);
    uint32_t window = job->complete.engine_loop.sequence_count_max;
    int r = prefill_decode_side(job, &prefill, job->prefill, deadline_ns, COX_ROLE_DECODE, &window,
                                &error);
    if (!r)
        r = prefill_decode_side(job, &decode, job->decode, deadline_ns, COX_ROLE_PREFILL, &window,
                                &error);
    if (!r)
        r = prepare(job, &model, &error);
    if (r)
        return fail_before(job, r, &error);
    struct remote_run run = {.job = job,
                             .client = &decode,
                             .prefill = &prefill,
                             .window = window,
                             .interrupt = {.fd = -1}};
    return remote_run(&run, finish);
}

/* ---- a group of its own ---- */

struct own_run {
    struct cox_prompt_job *job;
    struct cox_engine_group *group;
    struct interrupt interrupt;
};

static int own_complete(void *context, struct cox_error *err)
{
    struct own_run *run = context;
    struct cox_prompt_job *job = run->job;
    return cox_prompts_complete(&job->prompts, run->group, &job->complete, &job->stats, err);
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
    r = dialog_run(run->job, run->interrupt.fd, own_turn, run, err);
    cox_foreground_on_stop(foreground, NULL, NULL);
    cox_close_fd(&run->interrupt.fd);
    return r;
}

/* Returns 0, COX_INVALID, COX_NOT_FOUND or COX_EXEC_FAILED. */
static int own_worker(struct cox_prompt_job *job, struct cox_foreground_options *how,
                      bool *ret_reference, struct cox_error *err)
{
    const char *worker;
    int r = cox_worker_find(&job->group, &worker, err);
    if (!r)
        r = cox_worker_check(&job->group, worker, how->model, err);
    if (!r)
        r = cox_worker_command(&job->group, worker, how->model, &how->command, err);
    *ret_reference = !r && cox_worker_is_reference(worker);
    return r;
}

static int run_own(struct cox_prompt_job *job, const struct finish *finish)
{
    struct cox_error error = {0};
    char refusal[96];
    snprintf(refusal, sizeof refusal, "it was started by coxswain %s, for its own prompts",
             job->command);
    struct cox_engine_group_options group_options = {
        .foreground =
            {
                .group = &job->group,
                .config = job->init.entries,
                .config_count = job->init.count,
                .quiet = job->quiet,
                .prompts_refusal = refusal,
            },
    };
    int r = prepare(job, &group_options.foreground.model, &error);
    if (!r && job->complete.lora)
        r = cox_fail(&error, COX_INVALID,
                     "--lora %.128s: name a running group that has the adapter with --name "
                     "(coxswain run --adapter %.128s=DIR)",
                     job->complete.lora, job->complete.lora);
    if (r)
        return r > 0 ? cox_exit_usage(job->command, &error) : cox_exit_with(&error);
    r = own_worker(job, &group_options.foreground, &group_options.share_weights, &error);
    if (r)
        return fail_before(job, r, &error);
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    int number;
    r = cox_engine_group_start(&group_options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (r)
        return cox_exit_with(&error);
    struct own_run run = {.job = job, .group = group, .interrupt = {.fd = -1}};
    complete_prepare(job);
    r = job->dialog ? own_dialog(&run, &error) : own_complete(&run, &error);
    job->signal_number = cox_foreground_signal(cox_engine_group_foreground(group));
    return finish->fn(finish->context, r, &error);
}

int cox_prompt_job_run(struct cox_prompt_job *job,
                       int (*fn)(void *context, int r, const struct cox_error *error),
                       void *context)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    const struct finish finish = {fn, context};
    struct cox_error error = {0};
    if (job->decode)
        return run_prefill_decode(job, &finish);
    if (!job->group.name)
        return run_own(job, &finish);
    int r = cox_client_open(&client, job->group.name, cox_deadline_after_ms(CONNECT_MS), &error);
    if (r == COX_NOT_FOUND) {
        cox_console_say("%s (coxswain run %s starts one; without --name a group is started for "
                        "these prompts alone)",
                        error.text, job->group.name);
        return COX_EXIT_USAGE;
    }
    return r ? cox_exit_with(&error) : run_remote(job, &client, &finish);
}
