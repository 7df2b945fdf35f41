/* What a story says, as JSON and in words. */
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "proto/operation.h"
#include "proto/recording.pb-c.h"
#include "story.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define EVENT_COUNT_MAX 4096

/* A request in flight a moment ago may have ended since its rank's recorder was copied. */
static bool has_ended(const struct cox_record *own)
{
    const struct cox_operation *operation = cox_operation_find(own->type);
    /* A request without replies has ended when it is published. */
    return own->gathered_ns != 0 || (operation && operation->name && !operation->replies);
}

/* ---- what a rank is doing ---- */

/* The newest request that the rank has taken and not replied to; NULL: it has none. */
static const struct cox_record *unfinished(const struct cox_story_process *process,
                                           int *ret_channel)
{
    const struct cox_record *found = NULL;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_story_ring *ring = &process->rings[c];
        const struct cox_record *last = ring->count ? &ring->records[ring->count - 1] : NULL;
        if (last && !last->reply_ns && (!found || last->taken_ns > found->taken_ns)) {
            found = last;
            *ret_channel = c;
        }
    }
    return found;
}

/* The operation of the rank group in which the rank waits; NULL: it does not wait. */
static const struct cox_record_operation *waits_in(const struct cox_story_process *process)
{
    const struct cox_record_operation *last =
        process->operation_count ? &process->operations[process->operation_count - 1] : NULL;
    return last && !last->arrived_ns ? last : NULL;
}

static uint64_t age_of(const struct cox_story *story, uint64_t ns)
{
    return story->recording->monotonic_ns > ns ? story->recording->monotonic_ns - ns : 0;
}

/* "execute of MODEL_INFER 1042 since 2.104 s". */
static void doing_text(const struct cox_story *story, const struct cox_story_process *process,
                       char *text, size_t size)
{
    int channel = 0;
    char buffer[24];
    const struct cox_record *record = unfinished(process, &channel);
    const struct cox_record_operation *operation = waits_in(process);
    if (!process->is_known) {
        snprintf(text, size, "unknown: no recorder can be read");
        return;
    }
    if (!record) {
        uint64_t last_ns = 0;
        const struct cox_record *last = NULL;
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
            const struct cox_story_ring *ring = &process->rings[c];
            if (ring->count && ring->records[ring->count - 1].reply_ns >= last_ns) {
                last = &ring->records[ring->count - 1];
                last_ns = last->reply_ns;
                channel = c;
            }
        }
        if (last)
            snprintf(text, size, "waits for a request since %.6f s: it replied to %s %" PRIu64,
                     (double)age_of(story, last_ns) / 1e9, cox_story_type(last->type, buffer),
                     last->sequence);
        else
            snprintf(text, size, "waits for a request, and had none in what is shown");
        return;
    }
    const char *phase = !record->begin_ns ? "unpacks" : !record->end_ns ? "executes" : "replies to";
    const uint64_t since = !record->begin_ns ? record->taken_ns
                           : !record->end_ns ? record->begin_ns
                                             : record->end_ns;
    int used = snprintf(text, size, "%s %s %" PRIu64 " of %s since %.6f s", phase,
                        cox_story_type(record->type, buffer), record->sequence,
                        cox_channel_name((enum cox_channel_id)channel),
                        (double)age_of(story, since) / 1e9);
    if (operation && operation->begin_ns >= record->taken_ns && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, ", and waits for other ranks in it since %.6f s",
                 (double)age_of(story, operation->begin_ns) / 1e9);
}

/* ---- JSON ---- */

static json_t *micros(uint64_t from, uint64_t to)
{
    return from && to >= from ? json_real((double)(to - from) / 1e3) : json_null();
}

static json_t *step_json(const struct cox_story *story, int channel, const struct cox_record *own)
{
    struct cox_story_path path;
    char buffer[24];
    cox_story_path(story, (enum cox_channel_id)channel, own, &path);
    json_t *pending = json_array();
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        if (cox_rank_set_has(&path.pending, rank))
            json_array_append_new(pending, json_integer(rank));
    json_t *step = json_object();
    json_object_set_new(step, "channel",
                        json_string(cox_channel_name((enum cox_channel_id)channel)));
    json_object_set_new(step, "sequence", json_integer((json_int_t)own->sequence));
    json_object_set_new(step, "type", json_string(cox_story_type(own->type, buffer)));
    json_object_set_new(step, "bytes", json_integer((json_int_t)own->size));
    json_object_set_new(step, "ended", json_boolean(has_ended(own)));
    json_object_set_new(step, "status",
                        !own->gathered_ns ? json_null()
                        : own->status     ? json_string(cox_status_text(own->status))
                                          : json_string("ok"));
    json_object_set_new(step, "begin_s", json_real((double)(own->published_ns) / 1e9));
    json_object_set_new(step, "pack_us",
                        micros(own->packing_ns, own->packing_ns ? own->published_ns : 0));
    json_object_set_new(step, "wake_us", micros(own->published_ns, own->woken_ns));
    json_object_set_new(step, "ranks_us", micros(own->published_ns, own->gathered_ns));
    json_object_set_new(step, "handler_us", micros(own->gathered_ns, own->handled_ns));
    json_object_set_new(step, "last_rank", path.last >= 0 ? json_integer(path.last) : json_null());
    json_object_set_new(step, "critical_rank",
                        path.critical >= 0 ? json_integer(path.critical) : json_null());
    json_object_set_new(step, "critical_phase",
                        path.critical >= 0 ? json_string(cox_story_phase_name(path.phase))
                                           : json_null());
    json_object_set_new(step, "critical_us",
                        path.critical >= 0 ? json_real((double)path.phase_ns / 1e3) : json_null());
    json_object_set_new(step, "pending_ranks", pending);
    return step;
}

static json_t *rank_json(const struct cox_story *story, uint32_t rank)
{
    const struct cox_story_process *process = &story->ranks[rank];
    const CoxswainRecording__Rank *told = story->recording->ranks[rank];
    char text[256];
    uint32_t count = 0;
    doing_text(story, process, text, sizeof text);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        count += process->rings[c].count;
    json_t *made = json_object();
    json_object_set_new(made, "rank", json_integer(rank));
    json_object_set_new(made, "node", told->node ? json_string(told->node) : json_null());
    json_object_set_new(made, "pid",
                        told->has_pid ? json_integer((json_int_t)told->pid) : json_null());
    json_object_set_new(made, "incarnation",
                        told->has_incarnation ? json_integer(told->incarnation) : json_null());
    json_object_set_new(made, "recorded", json_boolean(process->is_known));
    json_object_set_new(made, "requests", json_integer(count));
    json_object_set_new(made, "operations", json_integer(process->operation_count));
    json_object_set_new(made, "doing", json_string(text));
    return made;
}

json_t *cox_story_json(const struct cox_story *story)
{
    const CoxswainRecording__Recording *recording = story->recording;
    json_t *root = json_object(), *steps = json_array(), *ranks = json_array();
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < story->coordinator.rings[c].count; i++)
            json_array_append_new(steps,
                                  step_json(story, c, &story->coordinator.rings[c].records[i]));
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        json_array_append_new(ranks, rank_json(story, rank));
    json_object_set_new(root, "name", json_string(recording->name ? recording->name : ""));
    json_object_set_new(root, "cause", json_string(recording->cause ? recording->cause : ""));
    json_object_set_new(root, "text", json_string(recording->text ? recording->text : ""));
    json_object_set_new(root, "time_s", json_real((double)recording->realtime_ns / 1e9));
    json_object_set_new(root, "monotonic_s", json_real((double)recording->monotonic_ns / 1e9));
    json_object_set_new(root, "ranks", ranks);
    json_object_set_new(root, "steps", steps);
    json_object_set_new(root, "problems",
                        story->problems[0] ? json_string(story->problems) : json_null());
    return root;
}

/* ---- words ---- */

struct event {
    uint64_t ns;
    /* -1: the coordinator */
    int rank;
    char text[96];
};

struct events {
    struct event list[EVENT_COUNT_MAX];
    size_t count;
    /* there was no room for so many */
    size_t left_out;
};

__attribute__((format(printf, 4, 5))) static void event_add(struct events *events, uint64_t ns,
                                                            int rank, const char *format, ...)
{
    if (!ns)
        return;
    if (events->count == EVENT_COUNT_MAX) {
        events->left_out++;
        return;
    }
    struct event *event = &events->list[events->count++];
    va_list arguments;
    event->ns = ns;
    event->rank = rank;
    va_start(arguments, format);
    vsnprintf(event->text, sizeof event->text, format, arguments);
    va_end(arguments);
}

static int by_time(const void *a, const void *b)
{
    const struct event *one = a, *other = b;
    if (one->ns != other->ns)
        return one->ns < other->ns ? -1 : 1;
    return one < other ? -1 : one > other; /* as they were added */
}

static void own_events(struct events *events, const struct cox_record *own)
{
    char buffer[24];
    const char *type = cox_story_type(own->type, buffer);
    event_add(events, own->submitted_ns, -1, "submit %s %" PRIu64 ", %" PRIu64 " bytes", type,
              own->sequence, own->size);
    event_add(events, own->packing_ns, -1, "pack %" PRIu64, own->sequence);
    event_add(events, own->published_ns, -1, "publish %" PRIu64, own->sequence);
    event_add(events, own->woken_ns, -1, "woke the ranks for %" PRIu64, own->sequence);
    event_add(events, own->gathered_ns, -1, "gathered %" PRIu64 ": %s; handler begins",
              own->sequence, own->status ? cox_status_text(own->status) : "ok");
    event_add(events, own->handled_ns, -1, "handler of %" PRIu64 " ends", own->sequence);
}

static void rank_events(struct events *events, int rank, const struct cox_record *record)
{
    char buffer[24];
    event_add(events, record->taken_ns, rank, "takes %s %" PRIu64,
              cox_story_type(record->type, buffer), record->sequence);
    event_add(events, record->begin_ns, rank, "executes %" PRIu64, record->sequence);
    event_add(events, record->end_ns, rank, "has executed %" PRIu64, record->sequence);
    event_add(events, record->reply_ns, rank, "replies to %" PRIu64 ": %s, %" PRIu64 " bytes",
              record->sequence, record->status ? cox_status_text(record->status) : "ok",
              record->reply_size);
}

/* Of the last requests, and of what each rank does now. */
static void events_collect(const struct cox_story *story, uint64_t last, struct events *events)
{
    for (uint32_t rank = 0; rank < story->rank_count; rank++) {
        const struct cox_record_operation *waits = waits_in(&story->ranks[rank]);
        if (waits)
            event_add(events, waits->begin_ns, (int)rank,
                      "waits for other ranks: round %" PRIu64 " of epoch %" PRIu64, waits->round,
                      waits->epoch);
    }
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_story_ring *ring = &story->coordinator.rings[c];
        const uint32_t from = ring->count > last ? ring->count - (uint32_t)last : 0;
        for (uint32_t i = from; i < ring->count; i++)
            own_events(events, &ring->records[i]);
        for (uint32_t rank = 0; rank < story->rank_count; rank++) {
            const struct cox_story_ring *of = &story->ranks[rank].rings[c];
            const uint32_t begin = of->count > last ? of->count - (uint32_t)last : 0;
            for (uint32_t i = begin; i < of->count; i++)
                rank_events(events, (int)rank, &of->records[i]);
        }
    }
    qsort(events->list, events->count, sizeof events->list[0], by_time);
}

/* Texts of a file may be anything. */
static void print_text(FILE *file, const char *indent, const char *text)
{
    fputs(indent, file);
    for (; *text; text++) {
        const unsigned char byte = (unsigned char)*text;
        if (byte == '\n' && text[1])
            fprintf(file, "\n%s", indent);
        else if (byte >= ' ' && byte != 127)
            fputc(byte, file);
    }
    fputc('\n', file);
}

static void print_ranks_of(FILE *file, const uint32_t *ranks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        fprintf(file, "%s%" PRIu32, i ? ", " : "", ranks[i]);
}

static void print_request(const CoxswainRecording__Request *request, FILE *file)
{
    char buffer[24];
    fprintf(file, "  %s %" PRIu64 " (%s), ",
            request->channel < COX_TWO_WAY_COUNT
                ? cox_channel_name((enum cox_channel_id)request->channel)
                : "a channel",
            request->sequence, cox_story_type(request->type, buffer));
    if (request->has_size)
        fprintf(file, "%" PRIu64 " bytes, ", request->size);
    fprintf(file, "since %.6f s; asked: ", (double)request->age_ns / 1e9);
    print_ranks_of(file, request->asked, request->n_asked);
    fputs(request->n_pending ? "; no reply of: " : "; all have replied", file);
    print_ranks_of(file, request->pending, request->n_pending);
    fputc('\n', file);
    for (size_t i = 0; request->has_contents && i < request->contents.len; i++)
        fprintf(file, "%s%02x%s", i % 32 ? "" : "    ", request->contents.data[i],
                i % 32 == 31 || i + 1 == request->contents.len ? "\n" : " ");
}

/* The cause of a recording may be a rank's death, and its last error may be that as well. */
static bool is_new(const char *text, const char *printed)
{
    return text && text[0] && !(printed && strstr(printed, text));
}

static void print_rank(const struct cox_story *story, uint32_t rank, FILE *file)
{
    const CoxswainRecording__Rank *told = story->recording->ranks[rank];
    char text[256], name[COX_STORY_RANK_SIZE];
    doing_text(story, &story->ranks[rank], text, sizeof text);
    cox_story_rank(story, rank, name);
    fprintf(file, "  %s", name);
    if (told->has_pid && told->pid)
        fprintf(file, " (pid %" PRId64 ")", told->pid);
    if (told->liveness)
        fprintf(file, ", %s%s%s%s", told->liveness, told->stopped ? ", stopped by a signal" : "",
                told->trouble ? ", " : "", told->trouble ? told->trouble : "");
    fprintf(file, ": %s\n", text);
    const char *cause = story->recording->text;
    if (is_new(told->death, cause))
        print_text(file, "    ", told->death);
    if (is_new(told->last_error, cause) && is_new(told->last_error, told->death))
        print_text(file, "    last error: ", told->last_error);
    if (told->last_lines && told->last_lines[0])
        print_text(file, "    | ", told->last_lines);
}

static void print_stacks(const struct cox_story *story, FILE *file)
{
    for (uint32_t rank = 0; rank < story->rank_count; rank++) {
        const char *stacks = story->recording->ranks[rank]->stacks;
        char name[COX_STORY_RANK_SIZE];
        if (!stacks || !stacks[0])
            continue;
        cox_story_rank(story, rank, name);
        fprintf(file, "\nStacks of %s:\n", name);
        print_text(file, "  ", stacks);
    }
}

/* The last request that has not ended, of the coordinator's. */
static void print_path(const struct cox_story *story, FILE *file)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_story_ring *ring = &story->coordinator.rings[c];
        for (uint32_t i = ring->count; i-- > 0;) {
            const struct cox_record *own = &ring->records[i];
            struct cox_story_path path;
            char buffer[24], name[COX_STORY_RANK_SIZE];
            if (has_ended(own))
                break;
            cox_story_path(story, (enum cox_channel_id)c, own, &path);
            if (!path.pending_count || path.critical < 0)
                continue;
            cox_story_rank(story, (uint32_t)path.critical, name);
            fprintf(file,
                    "%s %" PRIu64 " has not ended: it waits for %s, which is in phase %s since "
                    "%.6f s\n",
                    cox_story_type(own->type, buffer), own->sequence, name,
                    cox_story_phase_name(path.phase), (double)path.phase_ns / 1e9);
        }
    }
}

void cox_story_print(const struct cox_story *story, uint64_t last, FILE *file)
{
    const CoxswainRecording__Recording *recording = story->recording;
    char date[64] = "";
    struct tm utc;
    const time_t seconds = (time_t)(recording->realtime_ns / COX_NSEC_PER_SEC);
    if (gmtime_r(&seconds, &utc))
        strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S UTC", &utc);
    fprintf(file, "The group '%.128s' of %" PRIu32 " ranks, process %" PRId64 ", on %s\n",
            recording->name ? recording->name : "", story->rank_count, recording->pid, date);
    fprintf(file, "Recorded because of: %.64s\n", recording->cause ? recording->cause : "unknown");
    if (recording->text && recording->text[0])
        print_text(file, "  ", recording->text);
    if (recording->stacks && recording->stacks[0])
        print_text(file, "  where the ranks stood: ", recording->stacks);
    if (recording->skipped)
        fprintf(file, "%" PRIu32 " failures shortly before were not recorded\n",
                recording->skipped);
    print_path(story, file);
    fputs("\nWhat each rank was doing:\n", file);
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        print_rank(story, rank, file);
    if (recording->n_requests)
        fputs("\nUnder way:\n", file);
    for (size_t i = 0; i < recording->n_requests; i++)
        print_request(recording->requests[i], file);
    _cox_cleanup_(cox_free_ptr) struct events *events = calloc(1, sizeof *events);
    if (events)
        events_collect(story, last, events);
    fprintf(file,
            "\nThe last %" PRIu64 " requests of each channel, in seconds before the recording:\n",
            last);
    for (size_t i = 0; events && i < events->count; i++) {
        const struct event *event = &events->list[i];
        char who[24] = "coordinator";
        if (event->rank >= 0)
            snprintf(who, sizeof who, "rank %d", event->rank);
        fprintf(file, "  %12.6f  %-11s  %s\n", -(double)age_of(story, event->ns) / 1e9, who,
                event->text);
    }
    if (events && events->left_out)
        fprintf(file, "  %zu more events are left out: ask for fewer requests (--last)\n",
                events->left_out);
    print_stacks(story, file);
    if (story->problems[0])
        print_text(file, "\nNot all could be read: ", story->problems);
}
