#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/base/tsan.h"
#include "coordinator/executor/core.h"
#include "coordinator/server/group_links.h"
#include "program/cli/console.h"
#include "program/cli/runner.h"
#include "program/metrics/http.h"
#include "program/service/watchdog.h"
#include "engine_command.h"
#include "engine_group.h"
#include "init_options.h"
#include "nodes_options.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Time for the ranks to receive their role. */
#define ROLE_MS 10000
/* For a standard output that is read slowly or not at all. */
#define PRINT_MS 1000

#define LEGACY "legacy workers hold and pull nothing"
/* The --worker that is none: workers are started by hand. */
#define WORKER_NONE "none"

/* Returns 0 or -errno, as a pointer. Frees the text. */
static void *write_main(void *argument)
{
    _cox_cleanup_(cox_free_ptr) char *text = argument;
    intptr_t r = 0;
    for (size_t at = 0, size = strlen(text); r == 0 && at < size;) {
        ssize_t done = write(STDOUT_FILENO, text + at, size - at);
        if (done > 0)
            at += (size_t)done;
        else if (errno != EINTR)
            r = -errno;
    }
    return (void *)r;
}

/* Waits PRINT_MS at most. Returns 0 or an errno. */
static int join_print(pthread_t thread, void **ret_result)
{
#ifdef COX_TSAN /* it knows no pthread_clockjoin_np: the thread would run on for it */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1 + PRINT_MS / 1000;
    return pthread_timedjoin_np(thread, ret_result, &until);
#else
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(PRINT_MS));
    return pthread_clockjoin_np(thread, ret_result, CLOCK_MONOTONIC, &until);
#endif
}

/* A pipe that nobody reads holds nothing up: what is written by a thread of its own arrives when
 * the pipe is read. */
static int print_group(struct cox_executor *executor, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (file) {
        fprintf(file, "name %s\n", cox_executor_name(executor));
        if (cox_executor_socket(executor))
            fprintf(file, "socket %s\n", cox_executor_socket(executor));
        for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++)
            fprintf(file, "rank %u pid %d\n", rank, (int)cox_executor_pid(executor, rank));
    }
    if (!file || fclose(file))
        return cox_fail(err, -ENOMEM, "no memory");
    pthread_t thread;
    int r = cox_thread_start(&thread, write_main, text);
    if (r)
        return cox_fail(err, r, "standard output: no thread: %s", cox_status_text(r));
    text = NULL; /* the thread's */
    void *result;
    if (join_print(thread, &result)) {
        pthread_detach(thread);
        cox_console_log(4, "standard output is not read: coxswain status --name %s tells the pids",
                        cox_executor_name(executor));
        return 0;
    }
    r = (int)(intptr_t)result;
    return r ? cox_fail(err, r, "cannot write to standard output: %s", cox_status_text(r)) : 0;
}

/* Tells the service manager, if there is one, that the group is ready. */
static int announce(const struct cox_notify *notify, struct cox_executor *executor,
                    const struct cox_log *log, struct cox_watchdog **ret_watchdog,
                    struct cox_error *err)
{
    uint32_t rank_count = cox_executor_rank_count(executor);
    cox_log_write(log, 6, "the group '%s' is ready: %" PRIu32 " ranks, socket %s",
                  cox_executor_name(executor), rank_count, cox_executor_socket(executor));
    cox_notify_send(notify, "READY=1\nSTATUS=%" PRIu32 " ranks", rank_count);
    return cox_watchdog_start(notify, cox_executor_socket(executor), log, ret_watchdog, err);
}

static int keep(const struct cox_engine_group_options *options,
                const struct cox_http_address *metrics, const struct cox_notify *notify,
                const struct cox_log *log)
{
    struct cox_error error = {0};
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = NULL;
    _cox_cleanup_(cox_watchdog_freep) struct cox_watchdog *watchdog = NULL;
    _cox_cleanup_(cox_metrics_server_freep) struct cox_metrics_server *server = NULL;
    int number;
    int r = cox_engine_group_start(options, &group, &number, &error);
    if (r == COX_CLOSED)
        return cox_exit_interrupted(number);
    if (!r && metrics->text)
        r = cox_metrics_server_new(
            metrics, NULL, cox_executor_socket(cox_engine_group_executor(group)), &server, &error);
    if (!r && server)
        cox_console_say("metrics at %s", cox_metrics_server_url(server));
    if (!r)
        r = print_group(cox_engine_group_executor(group), &error);
    if (!r)
        r = announce(notify, cox_engine_group_executor(group), log, &watchdog, &error);
    if (r)
        return cox_exit_with(&error);
    r = cox_foreground_wait(cox_engine_group_foreground(group), &error);
    cox_notify_send(notify, "STOPPING=1\nSTATUS=%s", r < 0 ? error.text : "the group ends");
    watchdog = cox_watchdog_free(watchdog);
    if (r > 0)
        cox_fail(&error, COX_CLOSED, "the group is ending");
    cox_engine_group_end_prompts(group, &error);
    if (r < 0) {
        cox_console_log(3, "%s: the group ends", error.text);
        return COX_EXIT_WORKER;
    }
    /* For this command a request to end is no failure. */
    cox_console_say("%s: the group ends", strsignal(r));
    return COX_EXIT_OK;
}

struct run_command {
    struct cox_group_choice group;
    struct cox_adapter_choice adapters;
    struct cox_init_choice init;
    /* the file of --cluster; NULL: the group is on this machine */
    const char *cluster;
    struct cox_nodes_choice nodes;
    struct cox_node_facts facts;
    struct cox_executor_nodes executor_nodes;
    enum cox_role role;
    /* of --metrics */
    struct cox_http_address metrics;
    enum cox_log_format log_format;
    struct cox_engine_group_options options;
};

static int take_role(void *member, const char *value, struct cox_error *err)
{
    return cox_role_parse(value, member, err);
}

static int choose_external(struct run_command *run, int count, char *const *words,
                           struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    if (count)
        return cox_fail(err, COX_INVALID, "--worker none starts no worker: '%.64s' is not executed",
                        words[0]);
    options->external = true;
    return cox_model_find(&run->group, &options->model, err);
}

/* The ranks are started on their nodes, which have the model, too. */
static int choose_nodes(struct run_command *run, int count, char *const *words,
                        struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    if (count)
        return cox_fail(err, COX_INVALID,
                        "--cluster: workers are started by coxswain node: give '%.64s' to it",
                        words[0]);
    if (!cox_group_choice_limits(&run->group)->extensions || run->group.worker)
        return cox_fail(err, COX_INVALID,
                        "--cluster: workers are started by coxswain node: leave out "
                        "--legacy-workers and --worker");
    if (!run->group.name)
        return cox_fail(err, COX_INVALID,
                        "--cluster: --name is missing, by which nodes find the group");
    int r = cox_nodes_choice_read(&run->nodes, run->cluster, NULL, err);
    if (r == 0 && run->group.rank_count_given && run->group.rank_count != run->nodes.rank_count)
        r = cox_fail(err, COX_INVALID, "%s has %" PRIu32 " ranks, -n says %" PRIu32, run->cluster,
                     run->nodes.rank_count, run->group.rank_count);
    if (r == 0)
        run->group.rank_count = run->nodes.rank_count;
    if (r == 0)
        r = cox_model_find(&run->group, &options->model, err);
    if (r == 0)
        r = cox_node_facts_read(options->model, &run->facts, err);
    run->executor_nodes = (struct cox_executor_nodes){
        .size = sizeof run->executor_nodes,
        .nodes = run->nodes.nodes,
        .access = run->nodes.access,
        .listen = run->nodes.listen,
        .times = run->nodes.times,
        .facts = run->facts.facts,
        .fact_count = COX_NODE_FACT_COUNT,
        .attach = run->group.attach,
    };
    options->nodes = &run->executor_nodes;
    run->options.share_weights = true;
    return r;
}

static int choose_reference(struct run_command *run, struct cox_error *err)
{
    struct cox_foreground_options *options = &run->options.foreground;
    const char *worker;
    int r = cox_worker_find(&run->group, &worker, err);
    if (!r)
        r = cox_model_find(&run->group, &options->model, err);
    if (!r)
        r = cox_worker_check(&run->group, worker, options->model, err);
    if (!r)
        r = cox_worker_command(&run->group, worker, options->model, &options->command, err);
    run->options.share_weights = !r && cox_worker_is_reference(worker);
    return r;
}

/* COMMAND, or without one the reference worker. This also decides whether the group accepts
 * prompts. */
static int take_command(void *choice, int count, char *const *words, struct cox_error *err)
{
    struct run_command *run = choice;
    struct cox_foreground_options *options = &run->options.foreground;
    int r = cox_group_choice_check(&run->group, err);
    if (r)
        return r;
    if (run->cluster) {
        r = choose_nodes(run, count, words, err);
    } else if (run->group.worker && strcmp(run->group.worker, WORKER_NONE) == 0) {
        r = choose_external(run, count, words, err);
    } else if (count) {
        options->command = (const char *const *)words;
        options->model = run->group.model;
        options->prompts_refusal = "its workers are a command of its own";
    } else {
        r = choose_reference(run, err);
    }
    run->options.serve = options->links = !options->prompts_refusal;
    return r;
}

static int check(const void *choice, struct cox_error *err)
{
    const struct run_command *run = choice;
    const struct cox_foreground_options *options = &run->options.foreground;
    if (options->model && cox_init_choice_get(&run->init, "model"))
        return cox_fail(err, COX_INVALID, "'model' in --init: use --model DIR");
    if (run->role != COX_ROLE_STANDARD &&
        (!run->options.serve || !cox_group_choice_limits(&run->group)->extensions))
        return cox_fail(err, COX_INVALID, "--role is for groups that take prompts: %s",
                        options->prompts_refusal ? options->prompts_refusal : LEGACY);
    return 0;
}

static void init(void *choice)
{
    struct run_command *run = choice;
    cox_group_choice_init(&run->group);
    run->role = COX_ROLE_STANDARD;
    run->log_format = COX_LOG_PLAIN;
    cox_console_set_format(run->log_format); /* before options: their errors are events too */
    run->options.adapters = &run->adapters;
    run->options.foreground = (struct cox_foreground_options){
        .group = &run->group,
        .need_socket = true,
    };
}

/* Lines for programs to read have more than those for people. */
static void on_log(void *context, int level, const char *text)
{
    const struct run_command *run = context;
    if (level <= 5 || run->log_format != COX_LOG_PLAIN)
        cox_console_log(level, "%s", text);
}

static int run_group(void *choice)
{
    struct run_command *run = choice;
    struct cox_foreground_options *options = &run->options.foreground;
    options->config = run->init.entries;
    options->config_count = run->init.count;
    options->role = run->role == COX_ROLE_STANDARD ? 0 : run->role;
    const struct cox_log log = {.fn = on_log, .context = run};
    _cox_cleanup_(cox_notify_deinit) struct cox_notify notify = COX_NOTIFY_NONE;
    struct cox_error error = {0};
    if (cox_notify_take(&notify, &error))
        cox_console_log(4, "the service manager is told nothing: %s", error.text);
    return keep(&run->options, &run->metrics, &notify, &log);
}

static void deinit(void *choice)
{
    struct run_command *run = choice;
    cox_adapter_choice_deinit(&run->adapters);
    cox_init_choice_deinit(&run->init);
    cox_nodes_choice_deinit(&run->nodes);
}

static const struct cox_option options[] = {
    {"init", "KEY=VALUE",
     "configuration that every worker gets at init; may be repeated. --init @FILE: a JSON object of "
     "strings, numbers, true and false; KEY=VALUE takes precedence",
     COX_TAKE(struct run_command, init, cox_init_choice_take)},
    {"cluster", "FILE",
     "the ranks are on several machines, where coxswain node runs with the same FILE: a JSON object "
     "of servers, certificates and nodes (coxswain node --help)",
     COX_TEXT(struct run_command, cluster)},
    {"adapter", "NAME=DIR", "load this LoRA adapter at the start (see coxswain lora)",
     COX_TAKE(struct run_command, adapters, cox_adapter_choice_take)},
    {"role", "prefill|decode|standard",
     "prefill: computes prompts, and keeps their KV blocks for a decode group; decode: continues "
     "them; standard, the default: both (coxswain role changes it)",
     COX_TAKE(struct run_command, role, take_role)},
    {"metrics", "ADDRESS",
     "serve /metrics for Prometheus, /healthz and /readyz at ADDRESS:PORT, at PORT of 127.0.0.1, "
     "or at unix:PATH",
     COX_TAKE(struct run_command, metrics, cox_http_address_take)},
    {"step-tokens", "N", "compute so many tokens in one step (default 512)",
     COX_COUNT(struct run_command, options.step_tokens, 1, INT32_MAX)},
    {"log-format", "text|json",
     "lines of standard error with time and level, as text or as JSON objects, one for each event",
     COX_TAKE(struct run_command, log_format, cox_console_take_format)},
    {0},
};
static const struct cox_option_group run_options = {.options = options, .check = check};

const struct cox_command cox_command_run = {
    .name = "run",
    .summary = "start workers and keep them until stopped",
    .arguments = "[NAME] [-- COMMAND [ARGUMENT]...]",
    .text = "Starts a group of worker processes, COMMAND or the reference worker, initializes "
            "them, and keeps them until SIGINT, SIGTERM, SIGHUP, `coxswain stop`, or the death of "
            "one of them (--on-death; before the group is complete, any death ends it). "
            "COMMAND gets rank, world size and name of the group in its environment (COXSWAIN_*) "
            "and as flags (--local_rank, ...).\n"
            "When all is ready it prints `name NAME`, `socket PATH` and a line `rank R pid P` for "
            "each. With the reference worker, `coxswain generate --name NAME` then completes "
            "prompts on the group, for any number of callers at once.\n"
            "Started by systemd (Type=notify), it says when it is ready and feeds the watchdog "
            "while the group answers; lines in the journal have their priority.",
    .examples = "  coxswain run -n 4 mine\n"
                "  coxswain run -n 4 mine --on-death restart\n"
                "  coxswain run -n 2 -- ./worker --flag        workers of your own\n"
                "  coxswain run -n 2 --worker none hand        workers that are started by hand\n",
    .choice_size = sizeof(struct run_command),
    .init = init,
    .groups = {{&run_options, 0},
               {&cox_death_option_group, offsetof(struct run_command, group)},
               {&cox_start_option_group, offsetof(struct run_command, group)},
               {&cox_layout_option_group, offsetof(struct run_command, group)}},
    .words = take_command,
    .name_in_front = true,
    .run = run_group,
    .deinit = deinit,
};
