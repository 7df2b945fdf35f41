/* coxswain status: how a running group is. */
#include "command.h"

#include "console.h"
#include "coordinator/executor/executor.h"
#include "coordinator/server/recovery.h"
#include "coordinator/server/group_links.h"
#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000

enum {
    OPTION_JSON = COX_OPTION_TARGET_COMMAND,
};

typedef CoxswainControl__StatusReply status_reply;

struct choice {
    struct cox_connection target;
    bool json;
};

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain status [--name NAME | --door PATH] [--json]\n"
        "\n"
        "Tells how a running group is: its ranks, whether they live, what each of them does on\n"
        "every channel and since when, how often they died and were started again, and what went\n"
        "wrong last; who owes an answer, what is being completed, and how long requests take. No\n"
        "worker is asked, so that it answers also when all of them are stuck.\n"
        "\n"
        "Times are median and 99th percentile, of everything since the start: queue, until the\n"
        "request is published; ranks, until the last answer is there; handler, until the host is\n"
        "done with it; total, all of them together.\n"
        "\n"
        "Waits: those for answers that slept and were woken, and those for answers or for work that\n"
        "ended by looking (run --spin), without a sleep. cpu: processor time of the process so far.\n"
        "\n"
        "      --name NAME    of the group (default: the only one that is alive)\n"
        "      --door PATH    the same by its door, as `run` prints it\n"
        "      --json         one JSON object\n"
        "      --timeout SEC  the group's coordinator has so long to answer (default 10)\n"
        "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {"json", no_argument, NULL, OPTION_JSON},
    {NULL, 0, NULL, 0},
};

/* ---- for people ---- */

#define COLUMN_COUNT 100
#define TEXT_SIZE 160

/* Prints parts, and begins an indented line before one that would go beyond the last column. A part
 * that is longer than a line goes beyond it. */
struct lines {
    size_t column;
};

static void print_part(struct lines *lines, const char *separator, const char *text)
{
    if (lines->column && lines->column + strlen(separator) + strlen(text) > COLUMN_COUNT) {
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

/* Three digits and a unit, each of which is `step` times the one before. */
static const char *format_scaled(char text[TEXT_SIZE], uint64_t number, double step,
                                 const char *const *units, size_t unit_count)
{
    double scaled = (double)number;
    size_t unit = 0;
    while (scaled >= 999.5 && unit + 1 < unit_count) {
        scaled /= step;
        unit++;
    }
    int digits = unit == 0 || scaled >= 99.95 ? 0 : scaled >= 9.995 ? 1 : 2;
    snprintf(text, TEXT_SIZE, "%.*f%s", digits, scaled, units[unit]);
    return text;
}

/* "12.3us" */
static const char *format_duration(char text[TEXT_SIZE], uint64_t ns)
{
    static const char *const units[] = {"ns", "us", "ms", "s"};
    return format_scaled(text, ns, 1000, units, sizeof units / sizeof *units);
}

/* "4.50KiB" */
static const char *format_bytes(char text[TEXT_SIZE], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    return format_scaled(text, bytes, 1024, units, sizeof units / sizeof *units);
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
           format_bytes(size, weights->size), next);
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

static json_t *limits_json(const status_reply *status)
{
    json_t *limits = json_object();
    for (size_t i = 0; i < status->n_limits; i++) {
        json_t *limit = json_object();
        json_object_set_new(limit, "count", json_integer((json_int_t)status->limits[i]->count));
        json_object_set_new(limit, "max", json_integer((json_int_t)status->limits[i]->max));
        json_object_set_new(limits, text_or(status->limits[i]->name, "?"), limit);
    }
    return limits;
}

static void print_group(const status_reply *status)
{
    char text[2 * TEXT_SIZE], other[TEXT_SIZE];
    struct lines lines = {0};
    printf("group %s (pid %" PRId64 ")%s, up %s:\n", text_or(status->name, "?"), status->pid,
           status->stopping ? " is stopping" : "", format_seconds(text, status->uptime_ns));
    snprintf(text, sizeof text, "  %" PRIu32 " ranks%s, depth %" PRIu32, status->rank_count,
             status->legacy ? " (legacy workers)" : "", status->depth);
    print_part(&lines, "", text);
    snprintf(text, sizeof text, "attach %.32s, epoch %" PRIu32 ", engine %.32s",
             text_or(status->attach, "?"), status->epoch, text_or(status->engine_state, "?"));
    print_part(&lines, ", ", text);
    if (status->has_spin_ns) {
        snprintf(text, sizeof text, "looks for %s before it sleeps",
                 format_duration(other, status->spin_ns));
        print_part(&lines, ", ", status->spin_ns ? text : "sleeps at once");
    }
    if (status->has_cpu_ns) {
        snprintf(text, sizeof text, "cpu %s", format_seconds(other, status->cpu_ns));
        print_part(&lines, ", ", text);
    }
    snprintf(text, sizeof text, "deaths %" PRIu64 ", restarts %" PRIu64, status->deaths,
             status->restarts);
    print_part(&lines, ", ", text);
    putchar('\n');
    if (status->model)
        printf("model %s\n", status->model);
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
    }
}

/* What was moved, and how long it took; channels that were not used are left out. */
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
               format_bytes(text, channel->request_bytes));
        printf(" %9s", format_bytes(text, channel->reply_bytes));
        for (size_t i = 0; i < channel->n_phases && i < COX_PHASE_COUNT; i++) {
            const CoxswainControl__PhaseStatus *phase = channel->phases[i];
            size_t length =
                (size_t)snprintf(other, sizeof other, "%s/", format_duration(text, phase->p50_ns));
            snprintf(other + length, sizeof other - length, "%s",
                     format_duration(text, phase->p99_ns));
            printf("  %13s", phase->count ? other : "-");
        }
        putchar('\n');
    }
}

/* How the coordinator's waits ended; channels that were not used are left out. */
static void print_waits(const status_reply *status)
{
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        if (channel->published)
            printf("waits, %s: %" PRIu64 " woken, %" PRIu64 " ended by looking\n",
                   text_or(channel->name, "?"), channel->wakeups, channel->looks);
    }
}

/* What did not fit its frame or slot; nothing where that was never so. */
static void print_large_payloads(const status_reply *status)
{
    char sent[TEXT_SIZE], received[TEXT_SIZE], held[TEXT_SIZE];
    for (size_t c = 0; c < status->n_channels; c++) {
        const CoxswainControl__ChannelStatus *channel = status->channels[c];
        if (channel->bulk_requests == 0 && channel->bulk_replies == 0)
            continue;
        printf("large payloads, %s: %" PRIu64 " requests of %s, %" PRIu64
               " answers of %s; %s held\n",
               text_or(channel->name, "?"), channel->bulk_requests,
               format_bytes(sent, channel->bulk_request_bytes), channel->bulk_replies,
               format_bytes(received, channel->bulk_reply_bytes),
               format_bytes(held, channel->bulk_held_bytes));
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
        printf("  %s wrote last:\n", rank->life == COX_LIFE_DEAD ? "it" : "the process before it");
    for (const char *line = rank->last_lines; line && *line;) {
        int length = (int)strcspn(line, "\n");
        printf("  | %.*s\n", length, line);
        line += length + (line[length] == '\n');
    }
}

static void print_rank(const status_reply *status, const CoxswainControl__RankStatus *rank)
{
    char text[TEXT_SIZE], state[2 * TEXT_SIZE], serving[TEXT_SIZE] = "";
    struct lines lines = {0};
    if (rank->serving_pid != rank->pid)
        snprintf(serving, sizeof serving, " (serving %" PRId64 ")", rank->serving_pid);
    snprintf(text, sizeof text, "rank %" PRIu32 " pid %" PRId64 "%.40s generation %" PRIu32 " %s%s",
             rank->rank, rank->pid, serving, rank->generation, cox_rank_life_name(rank->life),
             rank->stopped ? ", stopped by a signal" : "");
    print_part(&lines, "", text);
    for (size_t c = 0; c < rank->n_channels && c < status->n_channels; c++) {
        /* A channel that was never used has nothing to tell. */
        if (c == 0 || status->channels[c]->published)
            print_part(
                &lines, "; ",
                format_state(state, text_or(status->channels[c]->name, "?"), rank->channels[c]));
    }
    if (rank->has_cpu_ns) {
        snprintf(state, sizeof state, "cpu %s", format_seconds(text, rank->cpu_ns));
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

/* What no rank can be blamed for. */
static void print_unknown(const status_reply *status)
{
    char text[TEXT_SIZE];
    if (status->unknown_error)
        printf("rank unknown\n  last error, %s ago: %s\n",
               format_seconds(text, status->unknown_error_age_ns), status->unknown_error);
}

/* "role decode, linked with A, B; holds 3 (12 blocks); pulls: ..." Nothing of a group that has
 * taken no part so far. */
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
        printf("pulled %s", format_bytes(text, transfer->bytes));
    if (transfer->bytes && transfer->bytes_per_s)
        printf(", median %s/s per rank", format_bytes(text, transfer->bytes_per_s));
    if (transfer->bytes)
        putchar('\n');
}

static void print_status(const status_reply *status)
{
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

static json_t *text_json(const char *text)
{
    return text ? json_string(text) : json_null();
}

static json_t *number_json(uint64_t number)
{
    return json_integer((json_int_t)number);
}

/* Nanoseconds as seconds. */
static json_t *seconds_json(bool known, uint64_t ns)
{
    return known ? json_real((double)ns / 1e9) : json_null();
}

static json_t *rank_json(const status_reply *status, const CoxswainControl__RankStatus *rank)
{
    json_t *root = json_object(), *channels = json_object();
    json_object_set_new(root, "rank", number_json(rank->rank));
    json_object_set_new(root, "pid", json_integer(rank->pid));
    json_object_set_new(root, "serving_pid", json_integer(rank->serving_pid));
    json_object_set_new(root, "generation", number_json(rank->generation));
    json_object_set_new(root, "life", json_string(cox_rank_life_name(rank->life)));
    json_object_set_new(root, "stopped", json_boolean(rank->stopped));
    json_object_set_new(root, "cpu_s", seconds_json(rank->has_cpu_ns, rank->cpu_ns));
    json_object_set_new(root, "death", text_json(rank->death));
    json_object_set_new(root, "last_lines", text_json(rank->last_lines));
    json_object_set_new(root, "deaths", number_json(rank->deaths));
    json_object_set_new(root, "restarts", number_json(rank->restarts));
    json_object_set_new(root, "last_error", text_json(rank->last_error));
    json_object_set_new(root, "last_error_age_s",
                        rank->last_error ? json_real((double)rank->last_error_age_ns / 1e9)
                                         : json_null());
    for (size_t c = 0; c < rank->n_channels && c < status->n_channels; c++) {
        const CoxswainControl__RankChannelStatus *state = rank->channels[c];
        json_t *channel = json_object();
        const char *name = state->has_state ? cox_rank_state_name(state->state) : "unknown";
        json_object_set_new(channel, "state", json_string(name));
        json_object_set_new(channel, "sequence", number_json(state->sequence));
        json_object_set_new(channel, "age_s",
                            state->age_ns ? json_real((double)state->age_ns / 1e9) : json_null());
        json_object_set_new(channels, text_or(status->channels[c]->name, "?"), channel);
    }
    json_object_set_new(root, "channels", channels);
    return root;
}

static json_t *phases_json(const CoxswainControl__ChannelStatus *channel)
{
    json_t *root = json_object();
    for (size_t i = 0; i < channel->n_phases; i++) {
        const CoxswainControl__PhaseStatus *phase = channel->phases[i];
        json_t *times = json_object();
        bool any = phase->count > 0;
        json_object_set_new(times, "count", number_json(phase->count));
        json_object_set_new(times, "p50_s",
                            any ? json_real((double)phase->p50_ns / 1e9) : json_null());
        json_object_set_new(times, "p99_s",
                            any ? json_real((double)phase->p99_ns / 1e9) : json_null());
        json_object_set_new(root, text_or(phase->name, "?"), times);
    }
    return root;
}

static json_t *channel_json(const CoxswainControl__ChannelStatus *channel)
{
    json_t *root = json_object(), *late = json_array();
    for (size_t i = 0; i < channel->n_late_ranks; i++)
        json_array_append_new(late, number_json(channel->late_ranks[i]));
    json_object_set_new(root, "name", text_json(channel->name));
    json_object_set_new(root, "published", number_json(channel->published));
    json_object_set_new(root, "ended", number_json(channel->ended));
    json_object_set_new(root, "in_flight", number_json(channel->in_flight));
    json_object_set_new(root, "late_ranks", late);
    json_object_set_new(root, "submitted", number_json(channel->submitted));
    json_object_set_new(root, "completed", number_json(channel->completed));
    json_object_set_new(root, "failed", number_json(channel->failed));
    json_object_set_new(root, "timeouts", number_json(channel->timeouts));
    json_object_set_new(root, "late_replies", number_json(channel->late_replies));
    json_object_set_new(root, "rings", number_json(channel->rings));
    json_object_set_new(root, "wakeups", number_json(channel->wakeups));
    json_object_set_new(root, "looks", number_json(channel->looks));
    json_object_set_new(root, "request_bytes", number_json(channel->request_bytes));
    json_object_set_new(root, "reply_bytes", number_json(channel->reply_bytes));
    json_object_set_new(root, "bulk_requests", number_json(channel->bulk_requests));
    json_object_set_new(root, "bulk_request_bytes", number_json(channel->bulk_request_bytes));
    json_object_set_new(root, "bulk_replies", number_json(channel->bulk_replies));
    json_object_set_new(root, "bulk_reply_bytes", number_json(channel->bulk_reply_bytes));
    json_object_set_new(root, "bulk_held_bytes", number_json(channel->bulk_held_bytes));
    json_object_set_new(root, "phases", phases_json(channel));
    return root;
}

static json_t *serving_json(const CoxswainControl__ServingStatus *serving)
{
    if (!serving)
        return json_null();
    json_t *root = json_object();
    json_object_set_new(root, "clients", number_json(serving->clients));
    json_object_set_new(root, "waiting", number_json(serving->waiting));
    json_object_set_new(root, "running", number_json(serving->running));
    json_object_set_new(root, "unread", number_json(serving->unread));
    json_object_set_new(root, "completed", number_json(serving->completed));
    json_object_set_new(root, "cancelled", number_json(serving->cancelled));
    json_object_set_new(root, "generated_tokens", number_json(serving->generated_tokens));
    json_object_set_new(root, "free_blocks", number_json(serving->free_blocks));
    json_object_set_new(root, "block_count", number_json(serving->block_count));
    return root;
}

static json_t *transfer_json(const CoxswainControl__TransferStatus *transfer)
{
    if (!transfer)
        return json_null();
    json_t *root = json_object(), *links = json_array();
    for (size_t i = 0; i < transfer->n_links; i++)
        json_array_append_new(links, text_json(transfer->links[i]->cluster_id));
    json_object_set_new(root, "role", json_string(cox_role_name(transfer->role)));
    json_object_set_new(root, "links", links);
    json_object_set_new(root, "holds", number_json(transfer->holds));
    json_object_set_new(root, "held_blocks", number_json(transfer->held_blocks));
    json_object_set_new(root, "running", number_json(transfer->running));
    json_object_set_new(root, "succeeded", number_json(transfer->succeeded));
    json_object_set_new(root, "failed", number_json(transfer->failed));
    json_object_set_new(root, "cancelled", number_json(transfer->cancelled));
    json_object_set_new(root, "retries", number_json(transfer->retries));
    json_object_set_new(root, "recomputed", number_json(transfer->recomputed));
    json_object_set_new(root, "late_results", number_json(transfer->late_results));
    json_object_set_new(root, "bytes", number_json(transfer->bytes));
    json_object_set_new(root, "copy_ns", number_json(transfer->copy_ns));
    json_object_set_new(root, "bytes_per_s", number_json(transfer->bytes_per_s));
    json_object_set_new(root, "quarantined_blocks", number_json(transfer->quarantined_blocks));
    return root;
}

static json_t *recovery_json(const CoxswainControl__RecoveryStatus *recovery)
{
    if (!recovery)
        return json_null();
    json_t *root = json_object();
    json_object_set_new(root, "on_death", json_string(cox_on_death_name(recovery->on_death)));
    json_object_set_new(root, "doing", text_json(recovery->doing));
    json_object_set_new(root, "recent_deaths", number_json(recovery->recent_deaths));
    json_object_set_new(root, "restart_max", number_json(recovery->restart_max));
    return root;
}

static json_t *weights_json(const CoxswainControl__WeightsStatus *weights)
{
    char digest[TEXT_SIZE];
    if (!weights)
        return json_null();
    json_t *root = json_object();
    snprintf(digest, sizeof digest, "%016" PRIx64, weights->digest);
    json_object_set_new(root, "version", number_json(weights->version));
    json_object_set_new(root, "next", number_json(weights->next));
    json_object_set_new(root, "digest", json_string(digest));
    json_object_set_new(root, "size", number_json(weights->size));
    return root;
}

/* A rank that did not say which it is; null: there was none. */
static json_t *unknown_json(const status_reply *status)
{
    if (!status->unknown_error)
        return json_null();
    json_t *root = json_object();
    json_object_set_new(root, "last_error", json_string(status->unknown_error));
    json_object_set_new(root, "last_error_age_s",
                        json_real((double)status->unknown_error_age_ns / 1e9));
    return root;
}

static void print_json(const status_reply *status)
{
    json_t *root = json_object(), *channels = json_array(), *ranks = json_array();
    for (size_t c = 0; c < status->n_channels; c++)
        json_array_append_new(channels, channel_json(status->channels[c]));
    for (size_t i = 0; i < status->n_ranks; i++)
        json_array_append_new(ranks, rank_json(status, status->ranks[i]));
    json_object_set_new(root, "name", text_json(status->name));
    json_object_set_new(root, "pid", json_integer(status->pid));
    json_object_set_new(root, "attach", text_json(status->attach));
    json_object_set_new(root, "rank_count", number_json(status->rank_count));
    json_object_set_new(root, "depth", number_json(status->depth));
    json_object_set_new(root, "epoch", number_json(status->epoch));
    json_object_set_new(root, "uptime_s", json_real((double)status->uptime_ns / 1e9));
    json_object_set_new(root, "cpu_s", seconds_json(status->has_cpu_ns, status->cpu_ns));
    json_object_set_new(root, "spin_ns", number_json(status->spin_ns));
    json_object_set_new(root, "engine_state", text_json(status->engine_state));
    json_object_set_new(root, "stopping", json_boolean(status->stopping));
    json_object_set_new(root, "legacy", json_boolean(status->legacy));
    json_object_set_new(root, "deaths", number_json(status->deaths));
    json_object_set_new(root, "restarts", number_json(status->restarts));
    json_object_set_new(root, "model", text_json(status->model));
    json_object_set_new(root, "ranks", ranks);
    json_object_set_new(root, "unknown_rank", unknown_json(status));
    json_object_set_new(root, "channels", channels);
    json_object_set_new(root, "serving", serving_json(status->serving));
    json_object_set_new(root, "refusal", text_json(status->refusal));
    json_object_set_new(root, "weights", weights_json(status->weights));
    json_object_set_new(root, "recovery", recovery_json(status->recovery));
    json_object_set_new(root, "limits", limits_json(status));
    json_object_set_new(root, "transfer", transfer_json(status->transfer));
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

/* ---- the command ---- */

static void clean(char *text)
{
    if (text)
        cox_client_clean_text(text);
}

/* All of it is another process's writing, and on its way to a terminal or a parser. */
static void clean_texts(status_reply *status)
{
    clean(status->name);
    clean(status->attach);
    clean(status->engine_state);
    clean(status->model);
    clean(status->refusal);
    clean(status->unknown_error);
    for (size_t i = 0; i < status->n_limits; i++)
        clean(status->limits[i]->name);
    if (status->recovery)
        clean(status->recovery->doing);
    for (size_t i = 0; status->transfer && i < status->transfer->n_links; i++)
        clean(status->transfer->links[i]->cluster_id);
    for (size_t c = 0; c < status->n_channels; c++) {
        clean(status->channels[c]->name);
        for (size_t i = 0; i < status->channels[c]->n_phases; i++)
            clean(status->channels[c]->phases[i]->name);
    }
    for (size_t i = 0; i < status->n_ranks; i++) {
        clean(status->ranks[i]->death);
        clean(status->ranks[i]->last_lines);
        clean(status->ranks[i]->last_error);
    }
}

static int status(const struct choice *choice)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    uint64_t deadline_ns = cox_deadline_after_ms(choice->target.timeout_ms);
    int r = cox_connection_open(&choice->target, &client, deadline_ns, &error);
    status_reply *reply;
    if (!r)
        r = cox_client_status(&client, deadline_ns, &reply, &error);
    if (r)
        return cox_exit_with(&error);
    clean_texts(reply);
    if (choice->json)
        print_json(reply);
    else
        print_status(reply);
    return COX_EXIT_OK;
}

int cox_command_status(int argc, char **argv)
{
    struct choice choice = {.target = {.timeout_ms = TIMEOUT_MS}};
    struct cox_error error = {0};
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_TARGET_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        if (option == OPTION_JSON)
            choice.json = true;
        else
            r = cox_connection_take(&choice.target, option, argv, &error);
    }
    if (!r && optind < argc)
        r = cox_fail(&error, COX_INVALID, "'%.64s' is not expected here", argv[optind]);
    if (!r)
        r = cox_connection_check(&choice.target, &error);
    return r ? cox_exit_usage("status", &error) : cox_exit_flushed(status(&choice));
}
