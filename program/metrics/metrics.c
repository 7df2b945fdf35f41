#include "metrics.h"

#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/recovery/recovery.h"
#include "coordinator/server/group_links.h"
#include "proto/control.pb-c.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <string.h>

typedef CoxswainControl__StatusReply status_reply;
typedef CoxswainControl__ChannelStatus channel_status;
typedef CoxswainControl__RankStatus rank_status;

#define NS_PER_SECOND 1e9
#define LABELS_SIZE 128
/* Bytes of a text in a label, at most. */
#define NOTE_SIZE 256

/* ---- samples ---- */

static void begin(FILE *file, const char *name, const char *type, const char *help)
{
    fprintf(file, "# HELP coxswain_%s %s\n# TYPE coxswain_%s %s\n", name, help, name, type);
}

/* A label, with its value escaped. separator: what is in front. */
static void label(FILE *file, const char *separator, const char *name, const char *value)
{
    fprintf(file, "%s%s=\"", separator, name);
    for (; value && *value; value++)
        if (*value == '\\' || *value == '"')
            fprintf(file, "\\%c", *value);
        else if (*value == '\n')
            fputs("\\n", file);
        else
            fputc(*value, file);
    fputc('"', file);
}

static void whole(FILE *file, const char *name, const char *type, uint64_t value, const char *help)
{
    begin(file, name, type, help);
    fprintf(file, "coxswain_%s %" PRIu64 "\n", name, value);
}

static void seconds(FILE *file, const char *name, const char *type, uint64_t ns, const char *help)
{
    begin(file, name, type, help);
    fprintf(file, "coxswain_%s %.9g\n", name, (double)ns / NS_PER_SECOND);
}

/* ---- the group ---- */

static void write_group(FILE *file, const status_reply *status)
{
    begin(file, "build_info", "gauge", "The version of this program.");
    fputs("coxswain_build_info", file);
    label(file, "{", "version", cox_version());
    fputs("} 1\n", file);
    begin(file, "group_info", "gauge", "The group.");
    fputs("coxswain_group_info", file);
    label(file, "{", "name", status->name);
    label(file, ",", "attach", status->attach);
    label(file, ",", "model", status->model);
    fputs("} 1\n", file);
    begin(file, "engine_state", "gauge", "1: the state that the group is in.");
    fputs("coxswain_engine_state", file);
    label(file, "{", "state", status->engine_state);
    fputs("} 1\n", file);
    seconds(file, "uptime_seconds", "gauge", status->uptime_ns, "Since the start of the group.");
    whole(file, "stopping", "gauge", status->stopping != 0, "1: the group is ending.");
    whole(file, "ranks", "gauge", status->rank_count, "Ranks of the group.");
    whole(file, "depth", "gauge", status->depth, "Requests that can be in flight on a channel.");
    seconds(file, "coordinator_cpu_seconds_total", "counter", status->cpu_ns,
            "Processor time of the coordinator's process.");
    whole(file, "deaths_total", "counter", status->deaths, "Deaths of ranks.");
    whole(file, "restarts_total", "counter", status->restarts,
          "Deaths that were followed by a process that attached.");
}

/* ---- channels ---- */

/* X(field, metric, type, help) */
#define CHANNEL_METRICS(X)                                                                         \
    X(submitted, "requests_total", "counter", "Requests that were published.")                     \
    X(completed, "completions_total", "counter", "Requests that have ended.")                      \
    X(failed, "failures_total", "counter", "Requests that have ended with an error.")              \
    X(timeouts, "timeouts_total", "counter", "Requests whose deadline passed.")                    \
    X(divergences, "divergences_total", "counter", "Steps whose ranks disagreed.")                 \
    X(late_replies, "late_replies_total", "counter", "Replies to requests that had ended.")        \
    X(in_flight, "in_flight", "gauge", "Requests that have not ended.")                            \
    X(n_late_ranks, "late_ranks", "gauge", "Ranks that owe replies to requests that have ended.")  \
    X(request_bytes, "request_bytes_total", "counter", "Bytes of requests, each counted once.")    \
    X(reply_bytes, "reply_bytes_total", "counter", "Bytes of replies of all ranks.")               \
    X(large_requests, "large_requests_total", "counter", "Requests out of line.")                  \
    X(large_request_bytes, "large_request_bytes_total", "counter", "Bytes of these.")              \
    X(large_replies, "large_replies_total", "counter", "Replies out of line.")                     \
    X(large_reply_bytes, "large_reply_bytes_total", "counter", "Bytes of these.")                  \
    X(large_held_bytes, "large_held_bytes", "gauge", "Bytes that a rank may still read.")          \
    X(wakeups, "sleeps_total", "counter", "Waits for replies that slept.")                         \
    X(spins, "spins_total", "counter", "Waits that ended while spinning.")                         \
    X(rewakes, "rewakes_total", "counter", "Wakeups that were repeated.")

static void write_channels(FILE *file, const status_reply *status)
{
#define WRITE(field, metric, type, help)                                                           \
    begin(file, metric, type, help);                                                               \
    for (size_t i = 0; i < status->n_channels; i++) {                                              \
        fputs("coxswain_" metric, file);                                                           \
        label(file, "{", "channel", status->channels[i]->name);                                    \
        fprintf(file, "} %" PRIu64 "\n", (uint64_t)status->channels[i]->field);                    \
    }
    CHANNEL_METRICS(WRITE)
#undef WRITE
}

/* The samples of a histogram. labels: without the braces, as `label` writes them; empty: none. */
static void write_histogram(FILE *file, const char *name, const char *labels,
                            const CoxswainControl__PhaseStatus *times)
{
    const char *const separator = labels[0] ? "," : "", *const begin = labels[0] ? "{" : "",
                      *const end = labels[0] ? "}" : "";
    for (size_t i = 0; i < times->n_below; i++)
        fprintf(file, "coxswain_%s_bucket{%s%sle=\"%.9g\"} %" PRIu64 "\n", name, labels, separator,
                (double)COX_PHASE_BOUND_NS(i) / NS_PER_SECOND, times->below[i]);
    fprintf(file, "coxswain_%s_bucket{%s%sle=\"+Inf\"} %" PRIu64 "\n", name, labels, separator,
            times->count);
    fprintf(file, "coxswain_%s_sum%s%s%s %.9g\n", name, begin, labels, end,
            (double)times->sum_ns / NS_PER_SECOND);
    fprintf(file, "coxswain_%s_count%s%s%s %" PRIu64 "\n", name, begin, labels, end, times->count);
}

static void write_phases(FILE *file, const status_reply *status)
{
    begin(file, "phase_seconds", "histogram",
          "Time of a request: queue, until it is published; ranks, until the last reply is there; "
          "handler, until the host is done with it; total.");
    for (size_t i = 0; i < status->n_channels; i++)
        for (size_t k = 0; k < status->channels[i]->n_phases; k++) {
            const CoxswainControl__PhaseStatus *phase = status->channels[i]->phases[k];
            char labels[LABELS_SIZE];
            /* Names of this program, which need no escape. */
            snprintf(labels, sizeof labels, "channel=\"%s\",phase=\"%s\"",
                     status->channels[i]->name, phase->name);
            if (phase->count)
                write_histogram(file, "phase_seconds", labels, phase);
        }
}

static void write_detections(FILE *file, const status_reply *status)
{
    begin(file, "detect_seconds", "histogram",
          "Time to find out that a rank is dead, since the kernel reported its end; or that it "
          "hangs: how long it had been silent when a deadline passed.");
    for (size_t i = 0; i < status->n_channels; i++)
        for (size_t k = 0; k < status->channels[i]->n_detections; k++) {
            char labels[LABELS_SIZE];
            snprintf(labels, sizeof labels, "channel=\"%s\",cause=\"%s\"",
                     status->channels[i]->name, status->channels[i]->detections[k]->name);
            write_histogram(file, "detect_seconds", labels, status->channels[i]->detections[k]);
        }
}

/* ---- ranks ---- */

/* X(expression of rank, metric, type, help) */
#define RANK_METRICS(X)                                                                            \
    X(rank->liveness == COX_LIVENESS_ALIVE, "rank_up", "gauge", "1: the rank is alive.")           \
    X(rank->stopped, "rank_stopped", "gauge", "1: stopped by a signal or a debugger.")             \
    X(rank->trouble != NULL, "rank_suspect", "gauge",                                              \
      "1: its node is not heard, or was given up.")                                                \
    X(rank->incarnation, "rank_incarnation", "gauge",                                              \
      "1 for its first process; each that is started counts, also one that does not attach.")      \
    X(rank->deaths, "rank_deaths_total", "counter", "Deaths of its processes.")                    \
    X(rank->restarts, "rank_restarts_total", "counter", "Processes that replaced a dead one.")     \
    X((double)rank->cpu_ns / NS_PER_SECOND, "rank_cpu_seconds_total", "counter",                   \
      "Processor time of its process.")                                                            \
    X(rank->resident_bytes, "rank_resident_bytes", "gauge",                                        \
      "Memory of its process that is resident, shared pages included.")                            \
    X(rank->errors, "rank_errors_total", "counter", "Replies that were errors or invalid.")        \
    X(rank->stale_replies, "rank_stale_replies_total", "counter",                                  \
      "Of these, refusals of a step that builds on another one than the rank.")                    \
    X(rank->late_replies, "rank_late_replies_total", "counter",                                    \
      "Replies to requests that had ended.")                                                       \
    X((double)rank->group_ns / NS_PER_SECOND, "rank_group_seconds_total", "counter",               \
      "Time in steps that it spent with other ranks.")                                             \
    X((double)rank->group_wait_ns / NS_PER_SECOND, "rank_group_wait_seconds_total", "counter",     \
      "Of this, time that it waited for them.")

static void write_rank_channels(FILE *file, const status_reply *status)
{
    begin(file, "rank_state", "gauge", "1: what the rank does on a channel.");
    for (size_t i = 0; i < status->n_ranks; i++) {
        const rank_status *rank = status->ranks[i];
        for (size_t c = 0; c < rank->n_channels && c < status->n_channels; c++) {
            if (!rank->channels[c]->has_state)
                continue;
            fprintf(file, "coxswain_rank_state{rank=\"%" PRIu32 "\"", rank->rank);
            label(file, ",", "channel", status->channels[c]->name);
            label(file, ",", "state", cox_rank_state_name(rank->channels[c]->state));
            fputs("} 1\n", file);
        }
    }
    begin(file, "rank_state_age_seconds", "gauge", "Since that state began.");
    for (size_t i = 0; i < status->n_ranks; i++) {
        const rank_status *rank = status->ranks[i];
        for (size_t c = 0; c < rank->n_channels && c < status->n_channels; c++) {
            if (!rank->channels[c]->has_age_ns)
                continue;
            fprintf(file, "coxswain_rank_state_age_seconds{rank=\"%" PRIu32 "\"", rank->rank);
            label(file, ",", "channel", status->channels[c]->name);
            fprintf(file, "} %.9g\n", (double)rank->channels[c]->age_ns / NS_PER_SECOND);
        }
    }
}

static void write_ranks(FILE *file, const status_reply *status)
{
#define WRITE(expression, metric, type, help)                                                      \
    begin(file, metric, type, help);                                                               \
    for (size_t i = 0; i < status->n_ranks; i++) {                                                 \
        const rank_status *rank = status->ranks[i];                                                \
        fprintf(file, "coxswain_" metric "{rank=\"%" PRIu32 "\"} %.17g\n", rank->rank,             \
                (double)(expression));                                                             \
    }
    RANK_METRICS(WRITE)
#undef WRITE
    write_rank_channels(file, status);
    begin(file, "rank_node_info", "gauge",
          "1: the node where the rank runs, in a group of several.");
    for (size_t i = 0; i < status->n_ranks; i++)
        if (status->ranks[i]->node) {
            fprintf(file, "coxswain_rank_node_info{rank=\"%" PRIu32 "\"", status->ranks[i]->rank);
            label(file, ",", "node", status->ranks[i]->node);
            fputs("} 1\n", file);
        }
    begin(file, "rank_execute_seconds", "histogram",
          "Time of a step in the rank, as it reports it; of opaque requests there is none.");
    for (size_t i = 0; i < status->n_ranks; i++) {
        char labels[LABELS_SIZE];
        snprintf(labels, sizeof labels, "rank=\"%" PRIu32 "\"", status->ranks[i]->rank);
        if (status->ranks[i]->execute)
            write_histogram(file, "rank_execute_seconds", labels, status->ranks[i]->execute);
    }
}

/* ---- the rest ---- */

static void write_recovery(FILE *file, const CoxswainControl__RecoveryStatus *recovery)
{
    whole(file, "recovering", "gauge", recovery->doing != NULL, "1: ranks are being replaced.");
    whole(file, "recent_deaths", "gauge", recovery->recent_deaths,
          "Deaths within the SEC of --on-death restart,N/SEC.");
    whole(file, "recent_deaths_max", "gauge", recovery->restart_max,
          "More recent deaths than this are the end of the group.");
    begin(file, "replace_seconds", "histogram",
          "Time from the death of a rank until its successor runs, its init replayed.");
    if (recovery->replacements)
        write_histogram(file, "replace_seconds", "", recovery->replacements);
}

static void write_serving(FILE *file, const CoxswainControl__ServingStatus *serving)
{
    const double used =
        serving->block_count
            ? (double)(serving->block_count - serving->free_blocks) / serving->block_count
            : 0;
    whole(file, "clients", "gauge", serving->clients, "Clients with prompts.");
    whole(file, "prompts_waiting", "gauge", serving->waiting, "Prompts that have not begun.");
    whole(file, "prompts_running", "gauge", serving->running, "Prompts that are being completed.");
    whole(file, "prompts_unread", "gauge", serving->unread,
          "Outputs that their clients have not taken.");
    whole(file, "prompts_completed_total", "counter", serving->completed,
          "Prompts that have ended, failed ones included.");
    whole(file, "prompts_cancelled_total", "counter", serving->cancelled,
          "Prompts of clients that left.");
    whole(file, "generated_tokens_total", "counter", serving->generated_tokens,
          "Tokens that were generated.");
    whole(file, "kv_blocks", "gauge", serving->block_count, "Blocks of the KV cache.");
    whole(file, "kv_blocks_free", "gauge", serving->free_blocks, "Blocks that nobody uses.");
    begin(file, "kv_cache_usage_ratio", "gauge", "The part of the KV cache that is in use.");
    fprintf(file, "coxswain_kv_cache_usage_ratio %.6g\n", used);
}

static void write_transfer(FILE *file, const CoxswainControl__TransferStatus *transfer)
{
    begin(file, "role", "gauge", "1: the role of the group.");
    fputs("coxswain_role", file);
    label(file, "{", "role", cox_role_name(transfer->role));
    fputs("} 1\n", file);
    whole(file, "links", "gauge", transfer->n_links, "Groups that this one reads from.");
    whole(file, "holds", "gauge", transfer->holds, "Prompts whose KV cache is held for others.");
    whole(file, "held_blocks", "gauge", transfer->held_blocks, "Blocks of these.");
    whole(file, "pulls_running", "gauge", transfer->running, "Pulls that have not ended.");
    whole(file, "pulls_succeeded_total", "counter", transfer->succeeded, "Pulls that succeeded.");
    whole(file, "pulls_failed_total", "counter", transfer->failed, "Tries that failed.");
    whole(file, "pulls_recomputed_total", "counter", transfer->recomputed,
          "Prompts that could not be pulled.");
    whole(file, "pulled_bytes_total", "counter", transfer->bytes, "Bytes that ranks have copied.");
    seconds(file, "pull_copy_seconds_total", "counter", transfer->copy_ns,
            "Time that this took, of all ranks together.");
}

static void write_limits(FILE *file, const status_reply *status)
{
    begin(file, "limit_used", "gauge", "How much there is of something that has a limit.");
    for (size_t i = 0; i < status->n_limits; i++) {
        fputs("coxswain_limit_used", file);
        label(file, "{", "limit", status->limits[i]->name);
        fprintf(file, "} %" PRIu64 "\n", status->limits[i]->count);
    }
    begin(file, "limit_max", "gauge", "The limit.");
    for (size_t i = 0; i < status->n_limits; i++) {
        fputs("coxswain_limit_max", file);
        label(file, "{", "limit", status->limits[i]->name);
        fprintf(file, "} %" PRIu64 "\n", status->limits[i]->max);
    }
}

/* What the program says of itself (cox_server_set_note): numbers of a JSON object, and texts. */
static void write_note_values(FILE *file, const json_t *object, const char *prefix, bool numbers)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        char path[NOTE_SIZE];
        snprintf(path, sizeof path, "%s%s%s", prefix, prefix[0] ? "." : "", key);
        cox_text_trim(path);
        if (json_is_object(value) && prefix[0] == '\0') {
            write_note_values(file, value, path, numbers);
        } else if (numbers && json_is_number(value)) {
            fputs("coxswain_note", file);
            label(file, "{", "key", path);
            fprintf(file, "} %.17g\n", json_number_value(value));
        } else if (!numbers && json_is_string(value)) {
            char text[NOTE_SIZE];
            snprintf(text, sizeof text, "%s", json_string_value(value));
            cox_text_trim(text);
            fputs("coxswain_note_info", file);
            label(file, "{", "key", path);
            label(file, ",", "value", text);
            fputs("} 1\n", file);
        }
    }
}

static void write_note(FILE *file, const char *note)
{
    json_t *object = json_loads(note, 0, NULL);
    if (!json_is_object(object)) {
        json_decref(object);
        object = json_pack("{s:s}", "note", note); /* NULL: no UTF-8 */
    }
    begin(file, "note", "gauge", "Numbers that the group's program tells, by their names.");
    write_note_values(file, object, "", true);
    begin(file, "note_info", "gauge", "1: texts that it tells.");
    write_note_values(file, object, "", false);
    json_decref(object);
}

/* ---- weights that outlive their rank, of all groups of the user ---- */

static void write_held(FILE *file, const json_t *weights, const char *field, const char *name,
                       const char *help)
{
    const json_t *row;
    size_t i;
    begin(file, name, "gauge", help);
    json_array_foreach(weights, i, row)
    {
        if (json_is_true(json_object_get(row, "loading")))
            continue;
        fprintf(file, "coxswain_%s", name);
        label(file, "{", "key", json_string_value(json_object_get(row, "key")));
        label(file, ",", "memory", json_string_value(json_object_get(row, "memory")));
        fprintf(file, "} %" PRIu64 "\n", (uint64_t)json_integer_value(json_object_get(row, field)));
    }
}

void cox_metrics_write(FILE *file, const status_reply *status, const json_t *weights)
{
    write_group(file, status);
    write_channels(file, status);
    write_phases(file, status);
    write_detections(file, status);
    write_ranks(file, status);
    if (status->recovery)
        write_recovery(file, status->recovery);
    if (status->serving)
        write_serving(file, status->serving);
    if (status->transfer)
        write_transfer(file, status->transfer);
    if (status->weights)
        whole(file, "weights_version", "gauge", status->weights->version,
              "The version of the weights that ranks compute with.");
    write_held(file, weights, "bytes", "held_weights_bytes",
               "Weights that are kept on this machine for later processes of this user.");
    write_held(file, weights, "users", "held_weights_users", "Processes that use these.");
    write_limits(file, status);
    whole(file, "refused_connections_total", "counter", status->refused_connections,
          "Connections to lead and agents that ended before they had shown a certificate.");
    if (status->note)
        write_note(file, status->note);
}

bool cox_metrics_ready(const status_reply *status, char reason[COX_HEALTH_SIZE])
{
    if (!cox_health_check(status, reason))
        return false;
    for (size_t i = 0; i < status->n_channels; i++)
        if (status->channels[i]->n_late_ranks) {
            snprintf(reason, COX_HEALTH_SIZE, "rank %" PRIu32 " owes a reply on channel %s",
                     status->channels[i]->late_ranks[0], status->channels[i]->name);
            return false;
        }
    return true;
}
