/* coxswain status: prints the state of a running group. */
#include "channel/base/idioms.h"
#include "coordinator/collector/stats.h"
#include "coordinator/executor/core.h"
#include "channel/text/text.h"
#include "coordinator/recovery/recovery.h"
#include "coordinator/server/group_links.h"
#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "program/cli/group_options.h"
#include "proto/control.pb-c.h"
#include "units.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TIMEOUT_MS 10000
/* --wait asks so often, and --watch prints so often. */
#define WAIT_PERIOD_MS 200
#define WATCH_PERIOD_MS 1000
#define CLEAR "\033[H\033[J"

struct status_choice {
    struct cox_connection connection;
    /* 0: not given */
    uint64_t wait_ms;
    bool watch;
};

typedef CoxswainControl__StatusReply status_reply;

/* ---- for people ---- */

#define COLUMN_COUNT 100
#define TEXT_SIZE 160

/* Prints parts, and starts an indented line before a part that would pass the last column, or would
 * leave none for the separator after it. A part longer than a line is not broken. */
struct lines {
    size_t column;
};

static void print_part(struct lines *lines, const char *separator, const char *text)
{
    if (lines->column && lines->column + strlen(separator) + strlen(text) >= COLUMN_COUNT) {
        printf("%.1s\n  %s", separator, text);
        lines->column = 2 + strlen(text);
    } else {
        printf("%s%s", lines->column ? separator : "", text);
        lines->column += strlen(lines->column ? separator : "") + strlen(text);
    }
}

static const char *text_or(const char *text, const char *otherwise)
{
    return text ? text : otherwise;
}

static const char *format_seconds(char text[TEXT_SIZE], uint64_t ns)
{
    snprintf(text, TEXT_SIZE, "%.*f s", ns < 10 * COX_NSEC_PER_SEC ? 3 : 0, (double)ns / 1e9);
    return text;
}

static void print_prompts(const status_reply *status)
{
    const CoxswainControl__ServingStatus *serving = status->serving;
    if (!serving) {
        printf("prompts: none are taken: %s\n", text_or(status->refusal, "no reason was given"));
        return;
    }
    char text[TEXT_SIZE];
    struct lines lines = {0};
    snprintf(text, sizeof text,
             "prompts: %" PRIu64 " waiting, %" PRIu64 " running, %" PRIu64
             " done and unread, %" PRIu64 " completed, %" PRIu64 " cancelled",
             serving->waiting, serving->running, serving->unread, serving->completed,
             serving->cancelled);
    print_part(&lines, "", text);
    snprintf(text, sizeof text,
             "%" PRIu32 " clients, %" PRIu64 " tokens generated, %" PRIu32 " of %" PRIu32
             " KV blocks free",
             serving->clients, serving->generated_tokens, serving->free_blocks,
             serving->block_count);
    print_part(&lines, "; ", text);
    putchar('\n');
}

static void print_weights(const status_reply *status)
{
    const CoxswainControl__WeightsStatus *weights = status->weights;
    if (!weights)
        return;
    char size[TEXT_SIZE], next[TEXT_SIZE] = "";
    if (weights->next)
        snprintf(next, sizeof next, ", version %" PRIu64 " is on its way", weights->next);
    printf("weights: version %" PRIu64 " for all ranks, %s%s\n", weights->version,
           cox_units_bytes(size, weights->size), next);
}

static void print_limits(const status_reply *status)
{
    char text[TEXT_SIZE];
    struct lines lines = {0};
    for (size_t i = 0; i < status->n_limits; i++) {
        const CoxswainControl__LimitStatus *limit = status->limits[i];
        snprintf(text, sizeof text, "%s%.32s %" PRIu64 " of %" PRIu64,
                 i ? "" : "clients: ", text_or(limit->name, "?"), limit->count, limit->max);
        print_part(&lines, i ? ", " : "", text);
    }
    if (status->n_limits)
        putchar('\n');
}

static void print_line(const char *key, const char *text)
{
    _cox_cleanup_(cox_free_ptr) char *safe_key = cox_text_escape(key, false, false);
    _cox_cleanup_(cox_free_ptr) char *safe = cox_text_escape(text, false, false);
    if (safe_key && safe)
        printf("%s: %s\n", safe_key, safe);
}

/* What the program of the group says of it: text, or JSON with a line for each key. */
static void print_note(const char *note)
{
    if (!note)
        return;
    json_t *object = json_loads(note, 0, NULL), *value;
    const char *key;
    if (!json_is_object(object))
        print_line("note", note);
    json_object_foreach(object, key, value)
    {
        char *text = json_is_string(value) ? strdup(json_string_value(value))
                                           : json_dumps(value, JSON_ENCODE_ANY);
        print_line(key, text_or(text, "?"));
        free(text);
    }
    json_decref(object);
}

static void print_group(const status_reply *status)
{
    char text[2 * TEXT_SIZE], other[TEXT_SIZE], trouble[COX_HEALTH_SIZE];
    struct lines lines = {0};
    printf("group %s (pid %" PRId64 ")%s, up %s:\n", text_or(status->name, "?"), status->pid,
           status->stopping ? " is stopping" : "", format_seconds(text, status->uptime_ns));
    snprintf(text, sizeof text, "  %" PRIu32 " ranks%s, depth %" PRIu32, status->rank_count,
             status->legacy ? " (legacy workers)" : "", status->depth);
    print_part(&lines, "", text);
    snprintf(text, sizeof text, "attach %.32s, incarnation %" PRIu32 ", engine %.32s",
             text_or(status->attach, "?"), status->incarnation, text_or(status->engine_state, "?"));
    print_part(&lines, ", ", text);
    if (status->has_spin_ns) {
        snprintf(text, sizeof text, "spins for %s, then blocks",
                 cox_units_duration(other, status->spin_ns));
        print_part(&lines, ", ", status->spin_ns ? text : "blocks at once");
    }
    if (status->has_cpu_ns) {
        snprintf(text, sizeof text, "cpu %s", format_seconds(other, status->cpu_ns));
        print_part(&lines, ", ", text);
    }
    snprintf(text, sizeof text, "deaths %" PRIu64 ", restarts %" PRIu64, status->deaths,
             status->restarts);
    print_part(&lines, ", ", text);
    putchar('\n');
    if (!cox_health_check(status, trouble))
        printf("degraded: %s\n", trouble);
    if (status->model)
        printf("model %s\n", status->model);
    print_note(status->note);
    print_prompts(status);
    print_weights(status);
    print_limits(status);
}

static void print_recovery(const CoxswainControl__RecoveryStatus *recovery)
{
    if (!recovery)
        return;
    printf("on death: %s, %" PRIu32 " recent deaths", cox_on_death_name(recovery->on_death),
           recovery->recent_deaths);
    if (recovery->on_death >= COX_ON_DEATH_RESTART)
        printf(" of at most %" PRIu32, recovery->restart_max);
    printf("%s%s\n", recovery->doing ? "; " : "", text_or(recovery->doing, ""));
}

static void print_channels(const status_reply *status)
{
    printf("\n%-16s %10s %10s %9s %8s %8s %8s  %s\n", "channel", "published", "ended", "in flight",
           "failed", "timeouts", "late", "late ranks");
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        printf("%-16s %10" PRIu64 " %10" PRIu64 " %9" PRIu32 " %8" PRIu64 " %8" PRIu64 " %8" PRIu64
               "  ",
               text_or(channel->name, "?"), channel->published, channel->ended, channel->in_flight,
               channel->failed, channel->timeouts, channel->late_replies);
        for (size_t i = 0; i < channel->n_late_ranks; i++)
            printf("%s%" PRIu32, i ? "," : "", channel->late_ranks[i]);
        printf("%s\n", channel->n_late_ranks ? "" : "-");
        if (channel->divergences)
            printf("%-16s ranks disagreed on %" PRIu64
                   " step%s: last errors of ranks say in what\n",
                   "", channel->divergences, channel->divergences == 1 ? "" : "s");
    }
}

/* Amounts and times per channel, without unused channels. */
static void print_times(const status_reply *status)
{
    char text[TEXT_SIZE], other[2 * TEXT_SIZE];
    bool any = false;
    for (size_t c = 0; c < status->n_channels; c++)
        any = any || status->channels[c]->published > 0;
    if (!any)
        return;
    printf("\n%-16s %9s %9s", "p50/p99", "sent", "received");
    for (uint32_t phase = 0; phase < COX_PHASE_COUNT; phase++)
        printf("  %13s", cox_phase_name(phase));
    putchar('\n');
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        if (channel->published == 0)
            continue;
        printf("%-16s %9s", text_or(channel->name, "?"),
               cox_units_bytes(text, channel->request_bytes));
        printf(" %9s", cox_units_bytes(text, channel->reply_bytes));
        for (size_t i = 0; i < channel->n_phases && i < COX_PHASE_COUNT; i++) {
            const CoxswainControl__PhaseStatus *phase = channel->phases[i];
            size_t length = (size_t)snprintf(other, sizeof other, "%s/",
                                             cox_units_duration(text, phase->p50_ns));
            snprintf(other + length, sizeof other - length, "%s",
                     cox_units_duration(text, phase->p99_ns));
            printf("  %13s", phase->count ? other : "-");
        }
        putchar('\n');
    }
}

/* How the coordinator's waits ended, per channel, without unused channels. */
static void print_waits(const status_reply *status)
{
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        if (channel->published)
            printf("waits, %s: %" PRIu64 " woken, %" PRIu64 " ended by spinning\n",
                   text_or(channel->name, "?"), channel->wakeups, channel->spins);
    }
}

/* Payloads that did not fit their frame or slot; prints nothing if there were none. */
static void print_large_payloads(const status_reply *status)
{
    char sent[TEXT_SIZE], received[TEXT_SIZE], held[TEXT_SIZE];
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        if (channel->large_requests == 0 && channel->large_replies == 0)
            continue;
        printf("large payloads, %s: %" PRIu64 " requests of %s, %" PRIu64
               " replies of %s; %s held\n",
               text_or(channel->name, "?"), channel->large_requests,
               cox_units_bytes(sent, channel->large_request_bytes), channel->large_replies,
               cox_units_bytes(received, channel->large_reply_bytes),
               cox_units_bytes(held, channel->large_held_bytes));
    }
}

/* "execute running 17 for 3.214 s" */
static const char *format_state(char text[2 * TEXT_SIZE], const char *channel,
                                const CoxswainControl__RankChannelStatus *state)
{
    char sequence[32] = "", seconds[TEXT_SIZE], age[TEXT_SIZE + 8] = "";
    if (state->has_state && state->sequence)
        snprintf(sequence, sizeof sequence, " %" PRIu64, state->sequence);
    if (state->has_state && state->age_ns)
        snprintf(age, sizeof age, " for %s", format_seconds(seconds, state->age_ns));
    snprintf(text, 2 * TEXT_SIZE, "%.64s %s%s%s", channel,
             state->has_state ? cox_rank_state_name(state->state) : "unknown", sequence, age);
    return text;
}

static void print_troubles(const CoxswainControl__RankStatus *rank)
{
    char text[TEXT_SIZE];
    if (rank->death)
        printf("  %s\n", rank->death);
    if (rank->last_error && (!rank->death || strcmp(rank->last_error, rank->death) != 0))
        printf("  last error, %s ago: %s\n", format_seconds(text, rank->last_error_age_ns),
               rank->last_error);
    if (rank->last_lines && *rank->last_lines)
        printf("  %s wrote last:\n",
               rank->liveness == COX_LIVENESS_DEAD ? "it" : "the process before it");
    for (const char *line = rank->last_lines; line && *line;) {
        int length = (int)strcspn(line, "\n");
        printf("  | %.*s\n", length, line);
        line += length + (line[length] == '\n');
    }
}

static void print_rank(const status_reply *status, const CoxswainControl__RankStatus *rank)
{
    char text[4 * TEXT_SIZE], state[2 * TEXT_SIZE];
    char node[TEXT_SIZE] = "", process[TEXT_SIZE] = "", serving[TEXT_SIZE] = "";
    struct lines lines = {0};
    if (rank->node)
        snprintf(node, sizeof node, " on node %.48s", rank->node);
    if (rank->pid)
        snprintf(process, sizeof process, " pid %" PRId64, rank->pid);
    if (rank->serving_pid != rank->pid)
        snprintf(serving, sizeof serving, " (serving %" PRId64 ")", rank->serving_pid);
    snprintf(text, sizeof text, "rank %" PRIu32 "%s%.32s%.40s incarnation %" PRIu32 " %s%s%s%.120s",
             rank->rank, node, process, serving, rank->incarnation,
             cox_rank_liveness_name(rank->liveness), rank->stopped ? ", stopped by a signal" : "",
             rank->trouble ? ", " : "", text_or(rank->trouble, ""));
    print_part(&lines, "", text);
    for (size_t c = 0; c < rank->n_channels && c < status->n_channels; c++) {
        /* Unused channels are left out. */
        if (c == 0 || status->channels[c]->published)
            print_part(
                &lines, "; ",
                format_state(state, text_or(status->channels[c]->name, "?"), rank->channels[c]));
    }
    if (rank->has_cpu_ns) {
        snprintf(state, sizeof state, "cpu %.40s", format_seconds(text, rank->cpu_ns));
        print_part(&lines, "; ", state);
    }
    if (rank->deaths || rank->restarts) {
        snprintf(text, sizeof text, "deaths %" PRIu32 ", restarts %" PRIu32, rank->deaths,
                 rank->restarts);
        print_part(&lines, "; ", text);
    }
    putchar('\n');
    print_troubles(rank);
}

/* Errors that belong to no known rank. */
static void print_unknown(const status_reply *status)
{
    char text[TEXT_SIZE];
    if (status->unknown_error)
        printf("rank unknown\n  last error, %s ago: %s\n",
               format_seconds(text, status->unknown_error_age_ns), status->unknown_error);
}

/* "role decode, linked with A, B; holds 3 (12 blocks); pulls: ..." Prints nothing for a group
 * without links, leases or pulls. */
static void print_transfer(const CoxswainControl__TransferStatus *transfer)
{
    char text[TEXT_SIZE];
    if (!transfer)
        return;
    uint64_t pulls =
        transfer->running + transfer->succeeded + transfer->failed + transfer->cancelled;
    if (transfer->role == COX_ROLE_STANDARD && !transfer->n_links && !transfer->holds && !pulls)
        return;
    printf("role %s", cox_role_name(transfer->role));
    for (size_t i = 0; i < transfer->n_links; i++)
        printf("%s%s", i ? ", " : ", linked with ", text_or(transfer->links[i]->cluster_id, "?"));
    printf("; holds %" PRIu64 " (%" PRIu64 " blocks)\n", transfer->holds, transfer->held_blocks);
    if (pulls)
        printf("pulls: %" PRIu64 " run, %" PRIu64 " succeeded, %" PRIu64 " failed, %" PRIu64
               " cancelled, %" PRIu64 " tried again; %" PRIu64 " computed instead; %" PRIu64
               " late results, %" PRIu64 " blocks in quarantine\n",
               transfer->running, transfer->succeeded, transfer->failed, transfer->cancelled,
               transfer->retries, transfer->recomputed, transfer->late_results,
               transfer->quarantined_blocks);
    if (transfer->bytes)
        printf("pulled %s", cox_units_bytes(text, transfer->bytes));
    if (transfer->bytes && transfer->bytes_per_s)
        printf(", median %s/s per rank", cox_units_bytes(text, transfer->bytes_per_s));
    if (transfer->bytes)
        putchar('\n');
}

static void print(const void *choice, const ProtobufCMessage *message)
{
    const status_reply *status = (const status_reply *)message;
    (void)choice;
    print_group(status);
    print_transfer(status->transfer);
    print_recovery(status->recovery);
    print_channels(status);
    print_times(status);
    print_waits(status);
    print_large_payloads(status);
    putchar('\n');
    for (size_t i = 0; i < status->n_ranks; i++)
        print_rank(status, status->ranks[i]);
    print_unknown(status);
}

/* ---- for programs ---- */

/* Of ranks: their channels, in the order of the group's, become an object by name. */
static json_t *rank_channels_json(json_t *group_channels, json_t *list)
{
    json_t *channels = json_object(), *channel;
    size_t c;
    json_array_foreach(list, c, channel)
    {
        const char *name =
            json_string_value(json_object_get(json_array_get(group_channels, c), "name"));
        if (json_is_null(json_object_get(channel, "state")))
            json_object_set_new(channel, "state", json_string("unknown"));
        json_object_set(channels, name ? name : "?", channel);
    }
    return channels;
}

/* A note that is a JSON object becomes one. */
static void note_json(json_t *root)
{
    const char *note = json_string_value(json_object_get(root, "note"));
    json_t *object = note ? json_loads(note, 0, NULL) : NULL;
    if (json_is_object(object))
        json_object_set(root, "note", object);
    json_decref(object);
}

/* The last error without a known rank; null: there was none. */
static json_t *unknown_rank_json(json_t *root)
{
    json_t *error = json_object_get(root, "unknown_error");
    return json_is_null(error) ? json_null()
                               : json_pack("{s:O, s:O}", "last_error", error, "last_error_age_s",
                                           json_object_get(root, "unknown_error_age_s"));
}

static json_t *link_names_json(json_t *links)
{
    json_t *names = json_array(), *link;
    size_t i;
    json_array_foreach(links, i, link)
        json_array_append(names, json_object_get(link, "cluster_id"));
    return names;
}

static void json(const void *choice, const ProtobufCMessage *reply, json_t *root)
{
    json_t *rank, *transfer = json_object_get(root, "transfer");
    size_t i;
    char trouble[COX_HEALTH_SIZE] = "";
    (void)choice;
    bool healthy = reply && cox_health_check((const status_reply *)reply, trouble);
    json_object_set_new(root, "healthy", json_boolean(healthy));
    json_object_set_new(root, "degraded", trouble[0] ? json_string(trouble) : json_null());
    note_json(root);
    json_array_foreach(json_object_get(root, "ranks"), i, rank)
    {
        json_t *channels = json_object_get(rank, "channels");
        json_object_set_new(rank, "channels",
                            rank_channels_json(json_object_get(root, "channels"), channels));
    }
    json_object_set_new(root, "unknown_rank", unknown_rank_json(root));
    json_object_del(root, "unknown_error");
    json_object_del(root, "unknown_error_age_s");
    if (json_is_object(transfer))
        json_object_set_new(transfer, "links", link_names_json(json_object_get(transfer, "links")));
}

/* ---- the command ---- */

static int exit_status(const void *choice, const ProtobufCMessage *reply)
{
    char trouble[COX_HEALTH_SIZE];
    (void)choice;
    return cox_health_check((const status_reply *)reply, trouble) ? COX_EXIT_OK : COX_EXIT_DEGRADED;
}

static bool is_healthy(const struct status_choice *status, uint64_t deadline_ns)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    char trouble[COX_HEALTH_SIZE];
    status_reply *reply;
    return cox_connection_open(&status->connection, &client, deadline_ns, NULL) == 0 &&
           cox_client_status(&client, deadline_ns, &reply, NULL) == 0 &&
           cox_health_check(reply, trouble);
}

static void await_health(const struct status_choice *status)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(status->wait_ms);
    while (!is_healthy(status, deadline_ns) && cox_now_ns() < deadline_ns)
        cox_client_pause_ms(WAIT_PERIOD_MS);
}

static int run(void *choice)
{
    static const struct cox_client_command command = {
        .reply = &coxswain_control__status_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .ask = cox_client_ask_status,
        .print = print,
        .json = json,
        .exit_status = exit_status,
        .failed = COX_EXIT_FAILED,
    };
    const struct status_choice *status = choice;
    const bool clears = status->watch && isatty(STDOUT_FILENO);
    if (status->wait_ms)
        await_health(status);
    for (;;) {
        if (clears)
            fputs(CLEAR, stdout);
        int result = cox_client_command_run(&command, &status->connection, choice);
        /* A watch ends with the group, or with its reader. */
        if (!status->watch || (result != COX_EXIT_OK && result != COX_EXIT_DEGRADED) ||
            fflush(stdout) || ferror(stdout))
            return result;
        cox_client_pause_ms(WATCH_PERIOD_MS);
        if (!clears && !status->connection.json)
            putchar('\n');
    }
}

static const struct cox_option options[] = {
    {"wait", "SEC",
     "wait until the group is healthy, for so long at most; also for one that is not there yet",
     COX_SECONDS(struct status_choice, wait_ms)},
    {"watch", NULL,
     "print it again every second, until the group is not reachable any more; Ctrl-C ends it",
     COX_FLAG(struct status_choice, watch)},
    {0},
};
static const struct cox_option_group status_options = {.options = options};

const struct cox_command cox_command_status = {
    .name = "status",
    .summary = "tell how a running group is",
    .arguments = "[NAME]",
    .text =
        "Tells how a running group is: its ranks, whether they live, what each of them does on "
        "every channel and since when, how often they died and were replaced, and what went "
        "wrong last; which ranks have not replied, what is being completed, and how long "
        "requests take. No worker is asked, so it also replies when all of them are stuck, "
        "within 10 s by default.\n"
        "\n"
        "Times are median and 99th percentile, of everything since the start: queue, until the "
        "request is published; ranks, until the last reply is there; handler, until the host "
        "is done with it; total, all of them together.\n"
        "\n"
        "Waits: those for replies that slept and were woken, and those for replies or for work "
        "that ended while spinning (run --spin). cpu: processor time of the process so far.\n"
        "\n"
        "The exit status is 0 when the group is healthy; 4 when it is degraded: a rank is dead, "
        "stopped or absent, or the group is paused, being started or ending; 1 when no group "
        "replies; 2 for wrong usage.",
    .examples = "  coxswain status                     of the only group that runs\n"
                "  coxswain status mine --watch\n"
                "  coxswain status mine --wait 60 && echo ready\n"
                "  coxswain status mine --json\n",
    .choice_size = sizeof(struct status_choice),
    .groups = {{&status_options, 0},
               {&cox_connection_options, offsetof(struct status_choice, connection)}},
    .words = cox_connection_words,
    .run = run,
};
