#include "recorders.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "coordinator/recording/recording.h"
#include "proto/recording.pb-c.h"
#include "core.h"
#include "executor_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef CoxswainRecording__Recording recording;

/* Bytes of a frame in a recording, at most. */
#define CONTENTS_SIZE_MAX ((size_t)1 << 20)
/* How long after the end of a request the death that ended it is reported, at most. */
#define LOST_NS (2 * COX_NSEC_PER_SEC)

/* ---- areas ---- */

/* Makes the rank's file. A failure is logged, and the rank records in memory alone. path: "" then.
 */
static void file_make(struct cox_executor *executor, uint32_t rank,
                      char path[COX_RECORDER_PATH_SIZE])
{
    const struct cox_recorders *recorders = &executor->recorders;
    struct cox_error why = {0};
    _cox_cleanup_(cox_close_fd) int fd = -1;
    path[0] = '\0';
    if (!recorders->folder)
        return;
    int r = cox_recording_ring_path(recorders->folder, executor->name, rank, path, &why);
    if (r == 0)
        r = cox_recorder_file_create(path, rank, executor->control.group_incarnation, &fd, &why);
    if (r == 0)
        return;
    path[0] = '\0';
    cox_log_write(&executor->options.hooks.log, 4, "rank %" PRIu32 " records in memory: %s", rank,
                  why.text);
}

void cox_recorders_renew(struct cox_executor *executor, uint32_t rank)
{
    char path[COX_RECORDER_PATH_SIZE];
    void *area = cox_control_recorder(&executor->control, rank);
    if (!area)
        return;
    file_make(executor, rank, path);
    pthread_mutex_lock(&executor->memory_lock);
    cox_recorder_area_init(area, rank, executor->control.group_incarnation, path,
                           executor->recorders.clock);
    pthread_mutex_unlock(&executor->memory_lock);
}

int cox_recorders_copy(struct cox_executor *executor, uint32_t rank, void *copy)
{
    int r = COX_NOT_FOUND;
    if (rank == COX_RECORDER_COORDINATOR) {
        const struct cox_recorder *own = executor->recorders.own;
        if (own)
            cox_recorder_copy(own->area, own->area, true, copy);
        return own ? 0 : r;
    }
    /* The memory of a rank is replaced under this lock. */
    pthread_mutex_lock(&executor->memory_lock);
    const void *area = cox_control_recorder(&executor->control, rank);
    if (area && cox_recorder_area_pid(area)) {
        cox_recorder_copy(area, area, false, copy);
        r = 0;
    }
    pthread_mutex_unlock(&executor->memory_lock);
    return r;
}

/* ---- recordings ---- */

static const char *crash_name(enum cox_crash kind)
{
    static const char *const names[COX_CRASH_COUNT] = {"death", "timeout", "divergence", "start"};
    return names[kind];
}

/* The copy of a recorder, as a field of a message; none where nothing is recorded. */
static void recorder_put(struct cox_executor *executor, uint32_t rank, protobuf_c_boolean *has,
                         ProtobufCBinaryData *field)
{
    const uint64_t size = cox_recorder_area_size(rank == COX_RECORDER_COORDINATOR);
    uint8_t *copy = malloc(size);
    *has = copy && cox_recorders_copy(executor, rank, copy) == 0;
    if (*has)
        *field = (ProtobufCBinaryData){.len = size, .data = copy};
    else
        free(copy);
}

static char *text_put(const char *text)
{
    return text[0] ? strdup(text) : NULL;
}

static void rank_put(struct cox_executor *executor, const struct cox_rank_status *status,
                     CoxswainRecording__Rank *to)
{
    COX_SET(to, pid, status->serving_pid);
    COX_SET(to, incarnation, status->incarnation);
    COX_SET(to, stopped, status->stopped);
    to->liveness = text_put(cox_rank_liveness_name(status->liveness));
    to->death = text_put(status->death);
    to->last_lines = text_put(status->last_lines);
    to->last_error = text_put(status->last_error);
    to->has_last_error_age_ns = status->last_error_age_ns != 0;
    to->last_error_age_ns = status->last_error_age_ns;
    to->node = text_put(status->node);
    to->trouble = text_put(status->trouble);
    recorder_put(executor, to->rank, &to->has_recorder, &to->recorder);
    /* A node is not asked while a failure is handled. */
    char missing[COX_NODE_NAME_MAX + 96];
    snprintf(missing, sizeof missing,
             "node %s has recorded it: coxswain postmortem on the files of its --crash-dir",
             status->node);
    to->missing = executor->remote.transport && status->node[0] ? strdup(missing) : NULL;
    to->states = calloc(COX_TWO_WAY_COUNT, sizeof(void *));
    for (int c = 0; to->states && c < COX_TWO_WAY_COUNT; c++) {
        CoxswainRecording__State *state = calloc(1, sizeof *state);
        if (!state)
            return;
        coxswain_recording__state__init(state);
        state->has_state = status->channels[c].known;
        state->has_sequence = state->has_age_ns = state->has_state;
        state->state = status->channels[c].state;
        state->sequence = status->channels[c].sequence;
        state->age_ns = status->channels[c].age_ns;
        to->states[to->n_states++] = state;
    }
}

/* The lock of the collector is held. NULL: no memory. */
static CoxswainRecording__Request *request_make(struct cox_executor *executor,
                                                struct cox_collector *collector,
                                                const struct cox_entry *entry, uint64_t now)
{
    CoxswainRecording__Request *to = calloc(1, sizeof *to);
    if (!to)
        return NULL;
    coxswain_recording__request__init(to);
    COX_SET(to, channel, collector->channel->id);
    COX_SET(to, sequence, entry->sequence);
    COX_SET(to, type, entry->type);
    COX_SET(to, age_ns, now > entry->submitted_ns ? now - entry->submitted_ns : 0);
    size_t length = 0, capacity;
    struct cox_frame_record record;
    const bool held =
        cox_state_read_frame(cox_state_channel(&executor->control, collector->channel->id),
                             executor->geometry.depth, entry->sequence, &record);
    if (held)
        length = record.length;
    to->has_size = held || entry->large_size;
    to->size = entry->large_size ? entry->large_size : length;
    to->asked = calloc(collector->rank_count, sizeof *to->asked);
    to->pending = calloc(collector->rank_count, sizeof *to->pending);
    for (uint32_t rank = 0; to->asked && to->pending && rank < collector->rank_count; rank++) {
        if (!cox_rank_set_has(&entry->asked, rank))
            continue;
        to->asked[to->n_asked++] = rank;
        if (!cox_rank_set_has(&entry->consumed, rank))
            to->pending[to->n_pending++] = rank;
    }
    if (executor->options.recorder.crash_contents && held) {
        const uint8_t *frame = cox_request_frame(collector->channel, entry->sequence, &capacity);
        length = length < CONTENTS_SIZE_MAX ? length : CONTENTS_SIZE_MAX;
        length = length < capacity ? length : capacity;
        to->contents.data = malloc(length + 1);
        to->has_contents = to->contents.data != NULL;
        to->contents.len = to->has_contents ? length : 0;
        if (to->has_contents)
            memcpy(to->contents.data, frame, length);
    }
    return to;
}

static void lost_free(struct cox_recorders *recorders)
{
    while (recorders->lost_count)
        coxswain_recording__request__free_unpacked(recorders->lost[--recorders->lost_count], NULL);
}

/* A request is about to end since a process is dead. */
static void lost_add(struct cox_executor *executor, struct cox_collector *collector,
                     uint64_t sequence)
{
    struct cox_recorders *recorders = &executor->recorders;
    const uint64_t now = cox_now_ns();
    CoxswainRecording__Request *made = NULL;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t i = 0; i < executor->geometry.depth && !made; i++)
        if (collector->entries[i].sequence == sequence)
            made = request_make(executor, collector, &collector->entries[i], now);
    pthread_mutex_unlock(&collector->lock);
    if (!made)
        return;
    pthread_mutex_lock(&recorders->lock);
    if (now - recorders->lost_ns > LOST_NS || recorders->lost_count == COX_LOST_COUNT_MAX)
        lost_free(recorders); /* of another death */
    recorders->lost[recorders->lost_count++] = made;
    recorders->lost_ns = now;
    pthread_mutex_unlock(&recorders->lock);
}

static int by_sequence(const void *a, const void *b)
{
    const CoxswainRecording__Request *const *one = a, *const *other = b;
    return (*one)->channel != (*other)->channel ? ((*one)->channel > (*other)->channel) * 2 - 1
           : (*one)->sequence != (*other)->sequence
               ? ((*one)->sequence > (*other)->sequence) * 2 - 1
               : 0;
}

/* What the death of a process has ended already was under way, too. */
static void lost_put(struct cox_recorders *recorders, recording *message)
{
    pthread_mutex_lock(&recorders->lock);
    if (cox_now_ns() - recorders->lost_ns > LOST_NS)
        lost_free(recorders);
    for (uint32_t l = 0; message->requests && l < recorders->lost_count; l++) {
        CoxswainRecording__Request *lost = recorders->lost[l];
        bool known = false;
        for (size_t i = 0; i < message->n_requests; i++)
            known |= message->requests[i]->channel == lost->channel &&
                     message->requests[i]->sequence == lost->sequence;
        if (known)
            coxswain_recording__request__free_unpacked(lost, NULL);
        else
            message->requests[message->n_requests++] = lost;
        recorders->lost[l] = NULL;
    }
    if (message->requests)
        recorders->lost_count = 0;
    pthread_mutex_unlock(&recorders->lock);
    if (message->requests)
        qsort(message->requests, message->n_requests, sizeof(void *), by_sequence);
}

static void requests_put(struct cox_executor *executor, recording *message)
{
    const uint64_t now = cox_now_ns();
    message->requests =
        calloc(COX_TWO_WAY_COUNT * COX_DEPTH_MAX + COX_LOST_COUNT_MAX, sizeof(void *));
    for (int c = 0; message->requests && c < COX_TWO_WAY_COUNT; c++) {
        struct cox_collector *collector = &executor->collectors[c];
        if (!collector->channel)
            continue;
        pthread_mutex_lock(&collector->lock);
        for (uint32_t i = 0; i < executor->geometry.depth; i++) {
            const struct cox_entry *entry = &collector->entries[i];
            CoxswainRecording__Request *made = entry->sequence && !entry->ended
                                                   ? request_make(executor, collector, entry, now)
                                                   : NULL;
            if (made)
                message->requests[message->n_requests++] = made;
        }
        pthread_mutex_unlock(&collector->lock);
    }
}

static recording *recording_make(struct cox_executor *executor, enum cox_crash kind,
                                 const char *text)
{
    const uint32_t rank_count = executor->geometry.rank_count;
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks = calloc(rank_count, sizeof *ranks);
    recording *message = cox_recording_new(executor->name, crash_name(kind), text, rank_count);
    struct cox_executor_status status = {0};
    if (!message || !ranks)
        return cox_recording_free(message);
    /* Without a supervisor no worker was started. */
    if (executor->supervisor)
        cox_executor_read_status(executor, &status, ranks);
    COX_SET(message, pid, getpid());
    COX_SET(message, depth, executor->geometry.depth);
    message->attach = strdup(executor->attach);
    message->engine_state = text_put(status.engine_state ? status.engine_state : "");
    recorder_put(executor, COX_RECORDER_COORDINATOR, &message->has_recorder, &message->recorder);
    for (uint32_t rank = 0; executor->supervisor && rank < rank_count; rank++)
        rank_put(executor, &ranks[rank], message->ranks[rank]);
    requests_put(executor, message);
    if (kind == COX_CRASH_DEATH)
        lost_put(&executor->recorders, message);
    return message;
}

/* Returns false if this failure is only counted. */
static bool crash_enter(struct cox_recorders *recorders, enum cox_crash kind, uint32_t *ret_skipped)
{
    const uint64_t now = cox_now_ns();
    pthread_mutex_lock(&recorders->lock);
    const bool soon = recorders->last_ns[kind] &&
                      now - recorders->last_ns[kind] < COX_CRASH_PAUSE_MS * COX_NSEC_PER_MSEC;
    const bool may = recorders->started && !recorders->busy && !soon;
    if (may) {
        recorders->busy = true;
        recorders->last_ns[kind] = now;
        *ret_skipped = recorders->skipped;
        recorders->skipped = 0;
    } else {
        recorders->skipped++;
    }
    pthread_mutex_unlock(&recorders->lock);
    return may;
}

static void crash_lost(struct cox_executor *executor, enum cox_crash kind, int r)
{
    cox_log_write(&executor->options.hooks.log, 4, "no recording of a %s was made: %s",
                  crash_name(kind), cox_status_text(r));
}

void cox_recorders_crash(struct cox_executor *executor, enum cox_crash kind, const char *text)
{
    struct cox_recorders *recorders = &executor->recorders;
    uint32_t skipped;
    if (!recorders->folder || !crash_enter(recorders, kind, &skipped))
        return;
    recording *message = recording_make(executor, kind, text ? text : "");
    if (message) {
        COX_SET(message, skipped, skipped);
    } else {
        crash_lost(executor, kind, -ENOMEM);
    }
    pthread_mutex_lock(&recorders->lock);
    recorders->pending = message;
    recorders->pending_kind = kind;
    recorders->busy = message != NULL;
    pthread_cond_broadcast(&recorders->changed);
    pthread_mutex_unlock(&recorders->lock);
}

static int recording_write(struct cox_executor *executor, const char *name, const char *cause,
                           const uint8_t *bytes, size_t size)
{
    char path[COX_RECORDER_PATH_SIZE];
    struct cox_error why = {0};
    int r = cox_recording_write(executor->recorders.folder, name, cause, bytes, size, path, &why);
    if (r)
        cox_log_write(&executor->options.hooks.log, 3, "%s", why.text);
    else
        cox_log_write(&executor->options.hooks.log, 4,
                      "what the group did is in %s: coxswain postmortem %s", path, path);
    return r;
}

static void stacks_put(void *context, const struct cox_stacks *stacks)
{
    recording *message = context;
    /* Older ones are of another failure. */
    if (!stacks || cox_now_ns() - stacks->taken_ns > COX_INCIDENT_PAUSE_MS * COX_NSEC_PER_MSEC)
        return;
    message->stacks = text_put(stacks->paragraph);
    for (uint32_t i = 0; i < stacks->count; i++)
        if (stacks->ranks[i].rank < message->n_ranks)
            message->ranks[stacks->ranks[i].rank]->stacks = text_put(stacks->ranks[i].text);
}

/* The stacks of a hang may still be under way. */
static void pending_write(struct cox_executor *executor, recording *message, enum cox_crash kind)
{
    uint8_t *bytes = NULL;
    size_t size = 0;
    if (kind == COX_CRASH_TIMEOUT || kind == COX_CRASH_DIVERGENCE) {
        cox_incidents_await(&executor->incidents, cox_deadline_after_ms(2 * COX_STACKS_MS));
        cox_incidents_last(&executor->incidents, stacks_put, message);
    }
    int r = cox_recording_pack(message, &bytes, &size);
    if (r)
        crash_lost(executor, kind, r);
    else
        recording_write(executor, executor->name, crash_name(kind), bytes, size);
    free(bytes);
    cox_recording_free(message);
}

static void *writer_main(void *argument)
{
    struct cox_executor *executor = argument;
    struct cox_recorders *recorders = &executor->recorders;
    pthread_mutex_lock(&recorders->lock);
    for (;;) {
        while (!recorders->pending && !(recorders->stopping && !recorders->busy))
            pthread_cond_wait(&recorders->changed, &recorders->lock);
        if (!recorders->pending)
            break;
        recording *message = recorders->pending;
        const enum cox_crash kind = recorders->pending_kind;
        recorders->pending = NULL;
        pthread_mutex_unlock(&recorders->lock);
        pending_write(executor, message, kind);
        pthread_mutex_lock(&recorders->lock);
        recorders->busy = recorders->pending != NULL;
    }
    pthread_mutex_unlock(&recorders->lock);
    return NULL;
}

/* ---- open and close ---- */

/* The rings of a coordinator that has died become a recording. The caller has the lock of the name.
 */
static void rescue(struct cox_executor *executor, const char *name)
{
    const char *folder = executor->recorders.folder;
    recording *message = NULL;
    uint8_t *bytes = NULL;
    size_t size;
    struct cox_error why = {0};
    int r = cox_recording_of_rings(folder, name, &message, &why);
    if (r == 0)
        r = cox_recording_pack(message, &bytes, &size);
    if (r && r != COX_NOT_FOUND)
        cox_log_write(&executor->options.hooks.log, 4,
                      "what a dead coordinator recorded is lost: %s",
                      why.code ? why.text : cox_status_text(r));
    const bool written =
        r == 0 && recording_write(executor, name, message->cause, bytes, size) == 0;
    cox_recording_rings_remove(folder, name);
    if (r == 0 && !written) /* now there is the space of the rings */
        recording_write(executor, name, message->cause, bytes, size);
    free(bytes);
    cox_recording_free(message);
}

/* Of any name: one that was made for a single group never comes back for its rings. */
static void rescue_other(void *context, const char *name)
{
    struct cox_executor *executor = context;
    const char *folder = executor->recorders.folder;
    int fd = -1;
    if (strcmp(name, executor->name) == 0 || cox_name_check(name, NULL) ||
        cox_recording_lock(folder, name, &fd, NULL))
        return;
    rescue(executor, name);
    cox_recording_unlock(folder, name, &fd);
}

static void on_failed(const void *owner, const struct cox_collector *collector, uint64_t sequence,
                      int status, const char *text)
{
    struct cox_executor *executor = (struct cox_executor *)(uintptr_t)owner;
    if (status == COX_TIMEOUT || status == COX_DIVERGED)
        cox_incidents_failed(&executor->incidents, (int)collector->channel->id, sequence);
    if (status == COX_TIMEOUT || status == COX_DIVERGED)
        cox_recorders_crash(executor,
                            status == COX_TIMEOUT ? COX_CRASH_TIMEOUT : COX_CRASH_DIVERGENCE, text);
    else if (status == COX_PEER_DEAD &&
             executor->recorders.folder) /* the supervisor reports the death, with its last lines */
        lost_add(executor, &executor->collectors[collector->channel->id], sequence);
}

static int open_folder(struct cox_executor *executor, struct cox_error *err)
{
    struct cox_recorders *recorders = &executor->recorders;
    recorders->folder = strdup(executor->options.recorder.crash_dir);
    if (!recorders->folder)
        return cox_fail(err, -ENOMEM, "no memory for the recorders");
    char path[COX_RECORDER_PATH_SIZE];
    int r = cox_recording_folder_make(recorders->folder, err);
    /* A rank may have another working directory. */
    char *absolute = r == 0 ? realpath(recorders->folder, NULL) : NULL;
    if (absolute) {
        free(recorders->folder);
        recorders->folder = absolute;
    }
    if (r == 0)
        r = cox_recording_ring_path(recorders->folder, executor->name, COX_RANK_COUNT_MAX, path,
                                    err);
    if (r == 0)
        r = cox_recording_lock(recorders->folder, executor->name, &recorders->lock_fd, err);
    if (r)
        return r;
    rescue(executor, executor->name);
    cox_recording_each_name(recorders->folder, rescue_other, executor);
    r = cox_thread_start(&recorders->thread, writer_main, executor);
    recorders->started = r == 0;
    return r ? cox_fail(err, r, "starting a thread: %s", cox_status_text(r)) : 0;
}

static int open_own(struct cox_executor *executor, struct cox_error *err)
{
    struct cox_recorders *recorders = &executor->recorders;
    char path[COX_RECORDER_PATH_SIZE];
    struct cox_error why = {0};
    int r = COX_NO_SPACE;
    if (recorders->folder) {
        cox_recording_ring_path(recorders->folder, executor->name, COX_RECORDER_COORDINATOR, path,
                                NULL);
        r = cox_recorder_new_coordinator(path, executor->control.group_incarnation,
                                         recorders->clock, &recorders->own, &why);
        if (r && r != COX_NO_SPACE)
            return cox_fail(err, r, "%s", why.text);
        if (r)
            cox_log_write(&executor->options.hooks.log, 4, "the coordinator records in memory: %s",
                          why.text);
    }
    return r ? cox_recorder_new_coordinator(NULL, executor->control.group_incarnation,
                                            recorders->clock, &recorders->own, err)
             : 0;
}

int cox_recorders_open(struct cox_executor *executor, struct cox_error *err)
{
    struct cox_recorders *recorders = &executor->recorders;
    pthread_mutex_init(&recorders->lock, NULL);
    cox_condition_init(&recorders->changed);
    recorders->initialized = true;
    recorders->lock_fd = -1;
    for (int c = 0;
         c < COX_TWO_WAY_COUNT && executor->options.recorder.stacks != COX_STACKS_ON_REQUEST; c++)
        executor->collectors[c].failed = on_failed;
    if (executor->options.recorder.use == COX_RECORDER_NONE)
        return 0;
    /* What is also written to files has ns everywhere. */
    recorders->clock =
        executor->options.recorder.crash_dir ? COX_RECORDER_NS : cox_recorder_clock_find();
    int r = executor->options.recorder.crash_dir ? open_folder(executor, err) : 0;
    if (r == 0)
        r = open_own(executor, err);
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++)
        cox_recorders_renew(executor, rank);
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        executor->collectors[c].recorder =
            cox_recorder_submits(recorders->own, (enum cox_channel_id)c);
        if (recorders->folder)
            executor->collectors[c].failed = on_failed;
    }
    return r;
}

void cox_recorders_close(struct cox_executor *executor)
{
    struct cox_recorders *recorders = &executor->recorders;
    if (!recorders->initialized)
        return;
    pthread_mutex_lock(&recorders->lock);
    const bool started = recorders->started;
    recorders->stopping = true;
    recorders->started = false;
    pthread_cond_broadcast(&recorders->changed);
    pthread_mutex_unlock(&recorders->lock);
    if (started) {
        pthread_join(recorders->thread, NULL);
        cox_recording_rings_remove(recorders->folder, executor->name);
    }
    cox_recording_unlock(recorders->folder, executor->name, &recorders->lock_fd);
    lost_free(recorders);
    recorders->own = cox_recorder_unref(recorders->own);
    free(recorders->folder);
    pthread_cond_destroy(&recorders->changed);
    pthread_mutex_destroy(&recorders->lock);
    memset(recorders, 0, sizeof *recorders);
}
