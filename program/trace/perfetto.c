/* Writes a story as a trace in Perfetto's format: a process per rank, and one for the coordinator;
 * a thread per channel. */
#include "story.h"

#include "channel/base/idioms.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "channel/shm/geometry.h"
#include "proto/perfetto.pb-c.h"
#include "proto/recording.pb-c.h"

#define CLOCK_ID_REALTIME 1
#define CLOCK_ID_MONOTONIC 3
#define CLOCK_ID_BOOTTIME 6
#define SEQUENCE_ID 1
/* Tracks of a process: itself, one per channel, one of the rank group, and one per channel for the
 * coordinator's handlers. */
#define TRACKS_PER_PROCESS 16
#define TRACK_GROUP (1 + COX_TWO_WAY_COUNT)
#define TRACK_HANDLER (2 + COX_TWO_WAY_COUNT)
/* For a process whose pid is not known. */
#define PID_UNKNOWN 4194304 /* no pid of Linux is greater */

typedef Perfetto__Protos__TracePacket packet;

struct writer {
    FILE *file;
    int r;
};

static void packet_write(struct writer *writer, packet *made)
{
    Perfetto__Protos__Trace trace = PERFETTO__PROTOS__TRACE__INIT;
    packet *packets[1] = {made};
    COX_SET(made, trusted_packet_sequence_id, SEQUENCE_ID);
    trace.n_packet = 1;
    trace.packet = packets;
    /* A trace is a repeated field: one message after the other is a trace again. */
    const size_t size = perfetto__protos__trace__get_packed_size(&trace);
    uint8_t *bytes = malloc(size);
    if (!bytes) {
        writer->r = -ENOMEM;
        return;
    }
    perfetto__protos__trace__pack(&trace, bytes);
    errno = 0;
    if (fwrite(bytes, 1, size, writer->file) != size && !writer->r)
        writer->r = errno ? -errno : -EIO;
    free(bytes);
}

static uint64_t track_of(uint32_t process, uint32_t track)
{
    return (uint64_t)(process + 1) * TRACKS_PER_PROCESS + track;
}

static void clock_write(struct writer *writer, const struct cox_story *story)
{
    /* Perfetto's own clock is the boot time. Without a suspend it is the monotonic one. */
    const uint32_t ids[] = {CLOCK_ID_REALTIME, CLOCK_ID_MONOTONIC, CLOCK_ID_BOOTTIME};
    const uint64_t times[] = {story->recording->realtime_ns, story->recording->monotonic_ns,
                              story->recording->monotonic_ns};
    Perfetto__Protos__ClockSnapshot snapshot = PERFETTO__PROTOS__CLOCK_SNAPSHOT__INIT;
    Perfetto__Protos__ClockSnapshot__Clock clocks[3], *pointers[3];
    packet made = PERFETTO__PROTOS__TRACE_PACKET__INIT;
    for (int i = 0; i < 3; i++) {
        perfetto__protos__clock_snapshot__clock__init(&clocks[i]);
        COX_SET(&clocks[i], clock_id, ids[i]);
        COX_SET(&clocks[i], timestamp, times[i]);
        pointers[i] = &clocks[i];
    }
    snapshot.n_clocks = 3;
    snapshot.clocks = pointers;
    made.clock_snapshot = &snapshot;
    packet_write(writer, &made);
}

static void process_write(struct writer *writer, uint32_t process, int32_t pid, const char *name)
{
    Perfetto__Protos__ProcessDescriptor descriptor = PERFETTO__PROTOS__PROCESS_DESCRIPTOR__INIT;
    Perfetto__Protos__TrackDescriptor track = PERFETTO__PROTOS__TRACK_DESCRIPTOR__INIT;
    packet made = PERFETTO__PROTOS__TRACE_PACKET__INIT;
    COX_SET(&descriptor, pid, pid);
    descriptor.process_name = (char *)(uintptr_t)name;
    COX_SET(&track, uuid, track_of(process, 0));
    COX_SET(&track, sibling_order_rank, (int32_t)process);
    track.process = &descriptor;
    made.track_descriptor = &track;
    packet_write(writer, &made);
}

static void thread_write(struct writer *writer, uint32_t process, int32_t pid, uint32_t number,
                         const char *name)
{
    Perfetto__Protos__ThreadDescriptor descriptor = PERFETTO__PROTOS__THREAD_DESCRIPTOR__INIT;
    Perfetto__Protos__TrackDescriptor track = PERFETTO__PROTOS__TRACK_DESCRIPTOR__INIT;
    packet made = PERFETTO__PROTOS__TRACE_PACKET__INIT;
    COX_SET(&descriptor, pid, pid);
    /* The ids of threads are not recorded: these are unique, and no others. */
    COX_SET(&descriptor, tid, pid * TRACKS_PER_PROCESS + (int32_t)number);
    descriptor.thread_name = (char *)(uintptr_t)name;
    COX_SET(&track, uuid, track_of(process, number));
    COX_SET(&track, parent_uuid, track_of(process, 0));
    COX_SET(&track, sibling_order_rank, (int32_t)number);
    track.thread = &descriptor;
    made.track_descriptor = &track;
    packet_write(writer, &made);
}

/* ---- slices ---- */

#define NUMBER_COUNT_MAX 6
struct slice {
    uint64_t track;
    const char *category, *name;
    /* names and values; a NULL name ends them */
    struct {
        const char *name;
        uint64_t value;
    } numbers[NUMBER_COUNT_MAX];
    int status;
    bool has_status;
    /* the flows that it is part of, or the end of */
    const uint64_t *flows;
    size_t flow_count;
    bool ends_flows;
};

static void event_write(struct writer *writer, const struct slice *slice, uint64_t ns, bool begin)
{
    Perfetto__Protos__TrackEvent event = PERFETTO__PROTOS__TRACK_EVENT__INIT;
    Perfetto__Protos__DebugAnnotation annotations[NUMBER_COUNT_MAX + 1],
        *pointers[NUMBER_COUNT_MAX + 1];
    packet made = PERFETTO__PROTOS__TRACE_PACKET__INIT;
    char *categories[1] = {(char *)(uintptr_t)slice->category};
    size_t count = 0;
    COX_SET(&event, type,
            begin ? PERFETTO__PROTOS__TRACK_EVENT__TYPE__TYPE_SLICE_BEGIN
                  : PERFETTO__PROTOS__TRACK_EVENT__TYPE__TYPE_SLICE_END);
    COX_SET(&event, track_uuid, slice->track);
    for (; begin && count < NUMBER_COUNT_MAX && slice->numbers[count].name; count++) {
        perfetto__protos__debug_annotation__init(&annotations[count]);
        annotations[count].name = (char *)(uintptr_t)slice->numbers[count].name;
        COX_SET(&annotations[count], uint_value, slice->numbers[count].value);
    }
    if (begin && slice->has_status) {
        perfetto__protos__debug_annotation__init(&annotations[count]);
        annotations[count].name = (char *)(uintptr_t) "status";
        annotations[count].string_value = (char *)(uintptr_t)cox_status_text(slice->status);
        count++;
    }
    for (size_t i = 0; i < count; i++)
        pointers[i] = &annotations[i];
    if (begin) {
        event.name = (char *)(uintptr_t)slice->name;
        event.n_categories = 1;
        event.categories = categories;
        event.n_debug_annotations = count;
        event.debug_annotations = pointers;
        if (slice->ends_flows) {
            event.n_terminating_flow_ids = slice->flow_count;
            event.terminating_flow_ids = (uint64_t *)(uintptr_t)slice->flows;
        } else {
            event.n_flow_ids = slice->flow_count;
            event.flow_ids = (uint64_t *)(uintptr_t)slice->flows;
        }
    }
    COX_SET(&made, timestamp, ns);
    COX_SET(&made, timestamp_clock_id, CLOCK_ID_MONOTONIC);
    made.track_event = &event;
    packet_write(writer, &made);
}

static void slice_begin(struct writer *writer, const struct slice *slice, uint64_t ns)
{
    event_write(writer, slice, ns, true);
}

static void slice_end(struct writer *writer, uint64_t track, uint64_t ns)
{
    const struct slice slice = {.track = track};
    event_write(writer, &slice, ns, false);
}

/* A part of a slice: from `from`, or *end if that is later, to `to`; moves *end there. A part whose
 * end is 0 has not ended, and nor has what is around it: returns false. */
static bool part_write(struct writer *writer, uint64_t track, const char *name, uint64_t from,
                       uint64_t to, uint64_t *end)
{
    const struct slice slice = {.track = track, .category = "coxswain", .name = name};
    const uint64_t begin = from > *end ? from : *end;
    slice_begin(writer, &slice, begin);
    if (!to)
        return false;
    *end = to > begin ? to : begin;
    slice_end(writer, track, *end);
    return true;
}

/* One flow per request and rank: submit, execute, reply, handler. */
static uint64_t flow_of(int channel, uint64_t sequence, uint32_t rank)
{
    return (sequence << 16 | (uint64_t)channel << 8 | rank) + 1;
}

static size_t flows_of(const struct cox_story *story, int channel, const struct cox_record *own,
                       uint64_t flows[COX_RANK_COUNT_MAX])
{
    size_t count = 0;
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        if (own->asked[rank / 64] >> rank % 64 & 1)
            flows[count++] = flow_of(channel, own->sequence, rank);
    return count;
}

static void name_of(char text[64], const struct cox_record *record)
{
    char buffer[24];
    snprintf(text, 64, "%s %" PRIu64, cox_story_type(record->type, buffer), record->sequence);
}

/* ---- processes ---- */

static void submit_write(struct writer *writer, const struct cox_story *story, int channel,
                         const struct cox_record *own, uint64_t *end)
{
    const uint64_t track = track_of(0, 1 + (uint32_t)channel);
    uint64_t flows[COX_RANK_COUNT_MAX];
    char name[64];
    name_of(name, own);
    const struct slice slice = {
        .track = track,
        .category = "submit",
        .name = name,
        .numbers = {{"sequence", own->sequence}, {"type", own->type}, {"bytes", own->size}},
        .flows = flows,
        .flow_count = flows_of(story, channel, own, flows),
    };
    const uint64_t from = own->submitted_ns ? own->submitted_ns : own->published_ns;
    *end = from > *end ? from : *end;
    slice_begin(writer, &slice, *end);
    if (own->packing_ns) {
        part_write(writer, track, "queue", *end, own->packing_ns, end);
        part_write(writer, track, "pack", own->packing_ns, own->published_ns, end);
    }
    if (part_write(writer, track, "publish and wake", own->published_ns, own->woken_ns, end))
        slice_end(writer, track, *end);
}

static void handler_write(struct writer *writer, const struct cox_story *story, int channel,
                          const struct cox_record *own, uint64_t *end)
{
    const uint64_t track = track_of(0, TRACK_HANDLER + (uint32_t)channel);
    uint64_t flows[COX_RANK_COUNT_MAX];
    char name[64];
    if (!own->gathered_ns)
        return;
    name_of(name, own);
    const struct slice slice = {
        .track = track,
        .category = "handler",
        .name = name,
        .numbers = {{"sequence", own->sequence}, {"reply bytes", own->reply_size}},
        .status = own->status,
        .has_status = true,
        .flows = flows,
        .flow_count = flows_of(story, channel, own, flows),
        .ends_flows = true,
    };
    *end = own->gathered_ns > *end ? own->gathered_ns : *end;
    slice_begin(writer, &slice, *end);
    if (!own->handled_ns)
        return;
    *end = own->handled_ns > *end ? own->handled_ns : *end;
    slice_end(writer, track, *end);
}

static void request_write(struct writer *writer, uint32_t rank, int channel,
                          const struct cox_record *record, uint64_t *end)
{
    const uint64_t track = track_of(1 + rank, 1 + (uint32_t)channel);
    const uint64_t flow = flow_of(channel, record->sequence, rank);
    char name[64];
    name_of(name, record);
    const struct slice slice = {
        .track = track,
        .category = "request",
        .name = name,
        .numbers = {{"sequence", record->sequence},
                    {"type", record->type},
                    {"bytes", record->size},
                    {"reply bytes", record->reply_size},
                    {"group operations", record->group_count},
                    {"group wait ns", record->group_wait_ns}},
        .status = record->status,
        .has_status = record->reply_ns != 0,
    };
    const struct slice execute = {
        .track = track, .category = "request", .name = "execute", .flows = &flow, .flow_count = 1};
    const struct slice reply = {
        .track = track, .category = "request", .name = "reply", .flows = &flow, .flow_count = 1};
    *end = record->taken_ns > *end ? record->taken_ns : *end;
    slice_begin(writer, &slice, *end);
    /* The times of the phases that have ended, in order. */
    const uint64_t ended = record->end_ns ? record->end_ns : record->reply_ns;
    if (record->begin_ns) {
        if (record->begin_ns > *end)
            part_write(writer, track, "unpack", *end, record->begin_ns, end);
        slice_begin(writer, &execute, *end);
        if (!ended)
            return;
        *end = ended > *end ? ended : *end;
        slice_end(writer, track, *end);
    }
    if (!record->reply_ns)
        return;
    slice_begin(writer, &reply, *end);
    *end = record->reply_ns > *end ? record->reply_ns : *end;
    slice_end(writer, track, *end);
    slice_end(writer, track, *end);
}

static void operation_write(struct writer *writer, uint32_t rank,
                            const struct cox_record_operation *operation, uint64_t *end)
{
    static const char *const names[] = {"nothing", "barrier", "gather", "gather of fds",
                                        "broadcast of an fd"};
    const uint64_t track = track_of(1 + rank, TRACK_GROUP);
    const struct slice slice = {
        .track = track,
        .category = "group",
        .name =
            operation->kind < sizeof names / sizeof names[0] ? names[operation->kind] : "operation",
        .numbers = {{"round", operation->round},
                    {"epoch", operation->epoch},
                    {"bytes", operation->size},
                    {"subgroup", operation->slot}},
        .status = operation->status,
        .has_status = operation->end_ns != 0,
    };
    *end = operation->begin_ns > *end ? operation->begin_ns : *end;
    slice_begin(writer, &slice, *end);
    if (!part_write(writer, track, "wait", *end, operation->arrived_ns, end) || !operation->end_ns)
        return;
    *end = operation->end_ns > *end ? operation->end_ns : *end;
    slice_end(writer, track, *end);
}

static int32_t pid_of(uint64_t recorded, int64_t told, uint32_t process)
{
    if (recorded > 0 && recorded < PID_UNKNOWN)
        return (int32_t)recorded;
    return told > 0 && told < PID_UNKNOWN ? (int32_t)told : PID_UNKNOWN + (int32_t)process;
}

static void coordinator_write(struct writer *writer, const struct cox_story *story)
{
    const struct cox_story_process *process = &story->coordinator;
    const int32_t pid = pid_of(process->head.pid, story->recording->pid, 0);
    char name[192];
    snprintf(name, sizeof name, "coordinator of %.128s",
             story->recording->name ? story->recording->name : "a group");
    process_write(writer, 0, pid, name);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_story_ring *ring = &process->rings[c];
        uint64_t submit_end = 0, handler_end = 0;
        if (!ring->count)
            continue;
        snprintf(name, sizeof name, "%s: submit", cox_channel_name((enum cox_channel_id)c));
        thread_write(writer, 0, pid, 1 + (uint32_t)c, name);
        snprintf(name, sizeof name, "%s: handler", cox_channel_name((enum cox_channel_id)c));
        thread_write(writer, 0, pid, TRACK_HANDLER + (uint32_t)c, name);
        for (uint32_t i = 0; i < ring->count; i++)
            submit_write(writer, story, c, &ring->records[i], &submit_end);
        for (uint32_t i = 0; i < ring->count; i++)
            handler_write(writer, story, c, &ring->records[i], &handler_end);
    }
}

static void rank_write(struct writer *writer, const struct cox_story *story, uint32_t rank)
{
    const struct cox_story_process *process = &story->ranks[rank];
    const int32_t pid = pid_of(process->head.pid, story->recording->ranks[rank]->pid, 1 + rank);
    char name[COX_STORY_RANK_SIZE];
    cox_story_rank(story, rank, name);
    process_write(writer, 1 + rank, pid, name);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_story_ring *ring = &process->rings[c];
        uint64_t end = 0;
        if (!ring->count)
            continue;
        thread_write(writer, 1 + rank, pid, 1 + (uint32_t)c,
                     cox_channel_name((enum cox_channel_id)c));
        for (uint32_t i = 0; i < ring->count; i++)
            request_write(writer, rank, c, &ring->records[i], &end);
    }
    uint64_t end = 0;
    if (process->operation_count)
        thread_write(writer, 1 + rank, pid, TRACK_GROUP, "rank group");
    for (uint32_t i = 0; i < process->operation_count; i++)
        operation_write(writer, rank, &process->operations[i], &end);
}

int cox_story_write_trace(const struct cox_story *story, FILE *file)
{
    struct writer writer = {.file = file};
    clock_write(&writer, story);
    coordinator_write(&writer, story);
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        rank_write(&writer, story, rank);
    errno = 0;
    if (!writer.r && fflush(file) != 0)
        writer.r = errno ? -errno : -EIO;
    return writer.r;
}
