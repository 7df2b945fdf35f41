/* coxswain node: the ranks of one machine, for a lead on this or another one. */
#include "program/cli/command.h"
#include "program/cli/console.h"
#include "program/cli/group_options.h"
#include "program/cli/signals.h"
#include "nodes_options.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

struct node_command {
    const char *cluster;
    struct cox_nodes_choice nodes;
    struct cox_group_choice group;
    const char *node;
    const char *const *command;
    /* the model of the reference worker; NULL: the workers are a command of the user's */
    const char *model;
    enum cox_log_format log_format;
    bool stay;
    _Atomic int signal_number;
};

/* Before a lead comes, whose whole start it would fail. One of PATH is not looked for. */
static int program_check(const char *program, struct cox_error *err)
{
    return !strchr(program, '/') || access(program, X_OK) == 0
               ? 0
               : cox_fail(err, COX_INVALID, "cannot execute the worker's program '%s': %s", program,
                          cox_status_text(-errno));
}

static int take_command(void *choice, int count, char *const *words, struct cox_error *err)
{
    struct node_command *node = choice;
    const char *worker;
    if (!node->group.name)
        return cox_fail(err, COX_INVALID, "--name is missing: the name of the group");
    if (!node->node)
        return cox_fail(err, COX_INVALID,
                        "--node is missing: the name of this machine in the group");
    if (!node->cluster)
        return cox_fail(err, COX_INVALID,
                        "--cluster is missing: the file of the cluster, which the lead has, too");
    int r = cox_nodes_choice_read(&node->nodes, node->cluster, node->node, err);
    if (r)
        return r;
    if (count) {
        node->command = (const char *const *)words;
        return program_check(words[0], err);
    }
    r = cox_worker_find(&node->group, &worker, err);
    if (r == 0)
        r = program_check(worker, err);
    if (r == 0)
        r = cox_model_find(&node->group, &node->model, err);
    return r ? r : cox_worker_command(&node->group, worker, node->model, &node->command, err);
}

static void init(void *choice)
{
    struct node_command *node = choice;
    cox_group_choice_init(&node->group);
    node->log_format = COX_LOG_PLAIN;
    cox_console_set_format(node->log_format); /* before options: their errors are events too */
}

static void deinit(void *choice)
{
    struct node_command *node = choice;
    cox_nodes_choice_deinit(&node->nodes);
}

static bool on_signal(void *context, int number)
{
    struct node_command *node = context;
    int none = 0;
    /* The first one ends the agent in order, the second at once. */
    return atomic_compare_exchange_strong(&node->signal_number, &none, number);
}

static bool is_cancelled(void *context)
{
    struct node_command *node = context;
    return atomic_load(&node->signal_number) != 0;
}

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context, (void)is_stderr;
    cox_console_worker(rank, text);
}

static void on_state(void *context, const char *text)
{
    (void)context;
    cox_console_say("%s", text);
}

static void on_log(void *context, int level, const char *text)
{
    const struct node_command *node = context;
    if (level <= 5 || node->log_format != COX_LOG_PLAIN)
        cox_console_log(level, "%s", text);
}

static int run(void *choice)
{
    struct node_command *node = choice;
    struct cox_error error = {0};
    struct cox_node_facts facts = {0};
    const struct cox_nodes_library *library;
    struct cox_signals signals = COX_SIGNALS_NONE;
    int r = cox_nodes_library_open(&library, &error);
    if (r == 0 && node->model)
        r = cox_node_facts_read(node->model, &facts, &error);
    if (r == 0)
        r = cox_signals_start(&signals, on_signal, NULL, node, &error);
    if (r)
        return cox_exit_with(&error);
    cox_console_start();
    const struct cox_node_agent_options options = {
        .access = node->nodes.access,
        .group = node->group.name,
        .node = node->node,
        .listen = node->nodes.listen,
        .facts = facts.facts,
        .fact_count = node->model ? COX_NODE_FACT_COUNT : 0,
        .command = node->command,
        .model = node->model,
        .stay = node->stay,
        .crash_dir = cox_group_choice_crash_dir(&node->group),
        .log = {.fn = on_log, .context = node},
        .context = node,
        .line = on_line,
        .state = on_state,
        .cancelled = is_cancelled,
    };
    r = library->agent_run(&options, &error);
    cox_signals_end(&signals);
    if (r == COX_CLOSED && is_cancelled(node)) /* before it was there */
        return cox_exit_interrupted(atomic_load(&node->signal_number));
    if (r)
        return cox_exit_with(&error);
    cox_console_say("node %s: %s", node->node,
                    is_cancelled(node) ? "stopped by a signal" : "the group has ended");
    return COX_EXIT_OK;
}

static const struct cox_option options[] = {
    {"name", "NAME", "name of the group, as the lead has it",
     COX_NAME(struct node_command, group.name)},
    {"node", "NAME",
     "name of this machine among the nodes of the cluster's file; its certificate is "
     "node-NAME.pem",
     COX_TEXT(struct node_command, node)},
    {"cluster", "FILE",
     "the cluster: a JSON object, the same for the lead and all nodes (see below)",
     COX_TEXT(struct node_command, cluster)},
    {"model", "DIR",
     "model folder on this machine; its content must be that of the lead's (default: the model that "
     "came with the program)",
     COX_TEXT(struct node_command, group.model)},
    {"worker", "PATH", "worker program (default: coxswain-worker)",
     COX_TEXT(struct node_command, group.worker)},
    {"crash-dir", "DIR",
     "what the ranks of this machine did when something failed (see coxswain run)",
     COX_TEXT(struct node_command, group.crash_dir)},
    {"stay", NULL, "when the group has ended, or its lead is lost for good, wait for another lead",
     COX_FLAG(struct node_command, stay)},
    {"log-format", "text|json",
     "lines of standard error with time and level, as text or as JSON objects, one for each event",
     COX_TAKE(struct node_command, log_format, cox_console_take_format)},
    {0},
};
static const struct cox_option_group node_options = {.options = options};

const struct cox_command cox_command_node = {
    .name = "node",
    .summary = "run the ranks of this machine for a group over several",
    .arguments = "[NAME] [-- COMMAND [ARGUMENT]...]",
    .text =
        "Waits for the lead of a group (coxswain run --cluster), starts the ranks that the lead "
        "gives to this machine, and serves it until the group ends. The two meet at a NATS "
        "server.\n"
        "A worker process that dies is reported to the lead and replaced at its order. When the "
        "lead is lost the ranks stay, with what they have loaded, for the cluster's lead_grace: a "
        "lead that comes back under the same name takes them over. Exit status 0: the group was ended in "
        "order; 3: it failed, or no lead came.\v"
        "Members of FILE: \"servers\", the NATS servers, as in [\"tls://nats1:4222\"]; \"nodes\", in "
        "the order of their ranks, as in [{\"name\": \"a\", \"ranks\": 4}, {\"name\": \"b\", "
        "\"ranks\": 4}], where a node may have a \"listen\": \"HOST:PORT\" at which the others "
        "connect to it, and \"lead_listen\" is that of the lead (default: the address from which the "
        "servers are reached, any port); \"certificates\", the directory that coxswain-certificates "
        "has made, relative to FILE, with ca.pem and the two files of this process, lead or "
        "node-NAME; or on one machine, for trying, \"insecure_loopback\": true, with loopback "
        "addresses only.\n"
        "Optional are times in seconds: \"lead_grace\", how long the ranks wait for another lead "
        "when the lead is lost (default 30); \"suspect_after\": a node that was not heard so long "
        "gets no requests (0.3); \"dead_after\": it is dead (0.8).",
    .examples = "  coxswain node big --node b --cluster cluster.json\n",
    .choice_size = sizeof(struct node_command),
    .init = init,
    .groups = {{&node_options, 0}},
    .words = take_command,
    .name_in_front = true,
    .run = run,
    .deinit = deinit,
};
