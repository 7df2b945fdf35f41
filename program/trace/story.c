#include "story.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/operation.h"
#include "proto/recording.pb-c.h"

/* ---- records ---- */

static uint64_t begin_of(const struct cox_record *record)
{
    return record->taken_ns       ? record->taken_ns
           : record->submitted_ns ? record->submitted_ns
                                  : record->published_ns;
}

static int by_sequence(const void *a, const void *b)
{
    const struct cox_record *one = a, *other = b;
    return one->sequence < other->sequence ? -1 : one->sequence > other->sequence;
}

static int by_number(const void *a, const void *b)
{
    const struct cox_record_operation *one = a, *other = b;
    return one->number < other->number ? -1 : one->number > other->number;
}

const struct cox_record *cox_story_find(const struct cox_story_ring *ring, uint64_t sequence)
{
    const struct cox_record key = {.sequence = sequence};
    return ring->count ? bsearch(&key, ring->records, ring->count, sizeof key, by_sequence) : NULL;
}

static int rings_read(struct cox_story_process *process, const void *copy, bool coordinator)
{
    for (int ring = 0; ring < COX_TWO_WAY_COUNT; ring++) {
        struct cox_story_ring *to = &process->rings[ring];
        const uint32_t capacity = cox_recorder_capacity(ring);
        to->records = calloc(capacity, sizeof *to->records);
        if (!to->records)
            return -ENOMEM;
        for (uint32_t i = 0; i < capacity; i++)
            to->count += cox_recorder_read(copy, coordinator, ring, i, &to->records[to->count]);
        qsort(to->records, to->count, sizeof *to->records, by_sequence);
    }
    if (coordinator)
        return 0;
    process->operations = calloc(COX_RECORDER_OPERATION_COUNT, sizeof *process->operations);
    if (!process->operations)
        return -ENOMEM;
    for (uint32_t i = 0; i < COX_RECORDER_OPERATION_COUNT; i++)
        process->operation_count +=
            cox_recorder_read_operation(copy, i, &process->operations[process->operation_count]);
    qsort(process->operations, process->operation_count, sizeof *process->operations, by_number);
    return 0;
}

static void problem_add(struct cox_story *story, const char *who, const char *text)
{
    const size_t used = strlen(story->problems);
    snprintf(story->problems + used, sizeof story->problems - used, "%s%s: %s", used ? "; " : "",
             who, text);
}

void cox_story_rank(const struct cox_story *story, uint32_t rank, char text[COX_STORY_RANK_SIZE])
{
    const char *node = story->recording->ranks[rank]->node;
    snprintf(text, COX_STORY_RANK_SIZE, "rank %" PRIu32 "%s%.48s", rank,
             node && node[0] ? " on node " : "", node ? node : "");
    for (char *c = text; *c; c++) /* a file may have anything */
        if ((unsigned char)*c < ' ' || (unsigned char)*c > '~')
            *c = '?';
}

/* Why a rank's recorder is not there; NULL: it is, or nobody knows. */
static const char *missing_of(const struct cox_story *story, uint32_t rank)
{
    const CoxswainRecording__Rank *told = story->recording->ranks[rank];
    return told->has_recorder ? NULL : told->missing;
}

/* One sentence for the ranks in a row that are missing for the same reason. */
static void missing_add(struct cox_story *story, uint32_t rank)
{
    const char *missing = missing_of(story, rank), *other;
    uint32_t last = rank;
    char who[48];
    if (rank && (other = missing_of(story, rank - 1)) && strcmp(other, missing) == 0)
        return;
    while (last + 1 < story->rank_count && (other = missing_of(story, last + 1)) &&
           strcmp(other, missing) == 0)
        last++;
    if (last == rank)
        snprintf(who, sizeof who, "rank %" PRIu32, rank);
    else
        snprintf(who, sizeof who, "ranks %" PRIu32 " to %" PRIu32, rank, last);
    problem_add(story, who, missing);
}

/* rank: COX_RECORDER_COORDINATOR, or the one that the recorder should be of. */
static int process_read(struct cox_story *story, struct cox_story_process *process, uint32_t rank,
                        protobuf_c_boolean has, const ProtobufCBinaryData *copy)
{
    char who[COX_STORY_RANK_SIZE] = "the coordinator";
    struct cox_error why = {0};
    bool coordinator = false;
    if (rank != COX_RECORDER_COORDINATOR) {
        cox_story_rank(story, rank, who);
        if (missing_of(story, rank)) {
            missing_add(story, rank);
            return 0;
        }
    }
    if (!has) {
        problem_add(story, who, "it has no recorder");
        return 0;
    }
    int r = cox_recorder_check(copy->data, copy->len, &coordinator, &process->head, &why);
    if (r == 0 && (coordinator != (rank == COX_RECORDER_COORDINATOR) || process->head.rank != rank))
        r = cox_fail(&why, COX_CORRUPT, "its recorder is that of another process");
    if (r) {
        problem_add(story, who, why.text);
        return 0;
    }
    process->is_known = true;
    return rings_read(process, copy->data, coordinator);
}

/* ---- the range ---- */

static uint64_t range_begin(const struct cox_story *story, const struct cox_story_range *range)
{
    const uint64_t now = story->recording->monotonic_ns;
    const struct cox_story_ring *execute = &story->coordinator.rings[COX_CHANNEL_EXECUTE];
    uint64_t begin = range->seconds_ns && range->seconds_ns < now ? now - range->seconds_ns : 0;
    for (uint32_t rank = 0; execute->count == 0 && rank < story->rank_count; rank++)
        execute = &story->ranks[rank].rings[COX_CHANNEL_EXECUTE];
    if (range->last && range->last < execute->count) {
        const uint64_t first = begin_of(&execute->records[execute->count - range->last]);
        begin = first > begin ? first : begin;
    }
    return begin;
}

static void process_cut(struct cox_story_process *process, uint64_t begin)
{
    for (int ring = 0; ring < COX_TWO_WAY_COUNT; ring++) {
        struct cox_story_ring *of = &process->rings[ring];
        uint32_t kept = 0;
        for (uint32_t i = 0; i < of->count; i++)
            if (begin_of(&of->records[i]) >= begin)
                of->records[kept++] = of->records[i];
        of->count = kept;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < process->operation_count; i++)
        if (process->operations[i].begin_ns >= begin)
            process->operations[kept++] = process->operations[i];
    process->operation_count = kept;
}

/* ---- constructor and destructor ---- */

int cox_story_new(const struct CoxswainRecording__Recording *recording,
                  const struct cox_story_range *range, struct cox_story **ret_story,
                  struct cox_error *err)
{
    if (recording->n_ranks > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_CORRUPT, "a recording of %zu ranks: expected at most %d",
                        recording->n_ranks, COX_RANK_COUNT_MAX);
    struct cox_story *story = calloc(1, sizeof *story);
    if (story) {
        story->recording = recording;
        story->ranks = calloc(recording->n_ranks ? recording->n_ranks : 1, sizeof *story->ranks);
    }
    int r = story && story->ranks ? 0 : -ENOMEM;
    if (r == 0) {
        story->rank_count = (uint32_t)recording->n_ranks;
        r = process_read(story, &story->coordinator, COX_RECORDER_COORDINATOR,
                         recording->has_recorder, &recording->recorder);
    }
    for (uint32_t rank = 0; r == 0 && rank < story->rank_count; rank++)
        r = process_read(story, &story->ranks[rank], rank, recording->ranks[rank]->has_recorder,
                         &recording->ranks[rank]->recorder);
    if (r) {
        cox_story_free(story);
        return cox_fail(err, r, "no memory for a recording of %zu ranks", recording->n_ranks);
    }
    const uint64_t begin = range_begin(story, range);
    process_cut(&story->coordinator, begin);
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        process_cut(&story->ranks[rank], begin);
    *ret_story = story;
    return 0;
}

static void process_free(struct cox_story_process *process)
{
    for (int ring = 0; ring < COX_TWO_WAY_COUNT; ring++)
        free(process->rings[ring].records);
    free(process->operations);
}

struct cox_story *cox_story_free(struct cox_story *story)
{
    if (!story)
        return NULL;
    process_free(&story->coordinator);
    for (uint32_t rank = 0; rank < story->rank_count; rank++)
        process_free(&story->ranks[rank]);
    free(story->ranks);
    free(story);
    return NULL;
}

/* ---- who a request waited for ---- */

const char *cox_story_phase_name(enum cox_story_phase phase)
{
    static const char *const names[COX_STORY_PHASE_COUNT] = {"wake", "unpack", "execute", "group",
                                                             "reply"};
    return names[phase];
}

static uint64_t span(uint64_t from, uint64_t to)
{
    return from && to > from ? to - from : 0;
}

/* Of a rank; a phase that has not ended ends now. */
static void phases_of(const struct cox_story *story, const struct cox_record *own,
                      const struct cox_record *record, uint64_t phases[COX_STORY_PHASE_COUNT])
{
    const uint64_t now = story->recording->monotonic_ns;
    const uint64_t taken = record ? record->taken_ns : 0, begin = record ? record->begin_ns : 0,
                   reply = record ? record->reply_ns : 0;
    const uint64_t end = record && record->end_ns ? record->end_ns : reply;
    memset(phases, 0, COX_STORY_PHASE_COUNT * sizeof phases[0]);
    phases[COX_STORY_WAKE] = span(own->published_ns, taken ? taken : now);
    if (!taken)
        return;
    phases[COX_STORY_UNPACK] = span(taken, begin ? begin : reply ? reply : now);
    const uint64_t execute = span(begin, end ? end : now);
    const uint64_t waited = record->group_wait_ns < execute ? record->group_wait_ns : execute;
    phases[COX_STORY_GROUP] = waited;
    phases[COX_STORY_EXECUTE] = execute - waited;
    phases[COX_STORY_REPLY] = end ? span(end, reply ? reply : now) : 0;
}

static bool was_asked(const struct cox_record *own, uint32_t rank)
{
    return own->asked[rank / 64] >> rank % 64 & 1;
}

static int by_value(const void *a, const void *b)
{
    const uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return one < other ? -1 : one > other;
}

/* The phase in which this rank was longest beyond the median of all. */
static void choose_phase(uint64_t (*phases)[COX_STORY_PHASE_COUNT], const uint32_t *ranks,
                         uint32_t count, uint32_t rank, struct cox_story_path *path)
{
    uint64_t best = 0;
    path->phase = COX_STORY_EXECUTE;
    for (int phase = 0; phase < COX_STORY_PHASE_COUNT; phase++) {
        uint64_t values[COX_RANK_COUNT_MAX];
        for (uint32_t i = 0; i < count; i++)
            values[i] = phases[ranks[i]][phase];
        qsort(values, count, sizeof values[0], by_value);
        const uint64_t median = count > 1 ? values[(count - 1) / 2] : 0;
        const uint64_t own = phases[rank][phase];
        if (own > median && own - median > best) {
            best = own - median;
            path->phase = (enum cox_story_phase)phase;
        }
    }
    path->phase_ns = phases[rank][path->phase];
}

/* The operation of the rank group in which a rank waits within a request; NULL: none. */
static const struct cox_record_operation *waits_within(const struct cox_story_process *process,
                                                       const struct cox_record *record)
{
    const struct cox_record_operation *last =
        process->operation_count ? &process->operations[process->operation_count - 1] : NULL;
    return record && last && last->begin_ns >= record->taken_ns && !last->arrived_ns ? last : NULL;
}

/* Of a rank without a reply: the phase that it is in, since when. */
static void path_set_present(const struct cox_story *story, uint32_t rank,
                             const struct cox_record *own, const struct cox_record *record,
                             struct cox_story_path *path)
{
    const struct cox_record_operation *waits = waits_within(&story->ranks[rank], record);
    uint64_t since_ns;
    if (!record || !record->taken_ns) {
        path->phase = COX_STORY_WAKE;
        since_ns = own->published_ns;
    } else if (!record->begin_ns) {
        path->phase = COX_STORY_UNPACK;
        since_ns = record->taken_ns;
    } else if (record->end_ns) {
        path->phase = COX_STORY_REPLY;
        since_ns = record->end_ns;
    } else {
        path->phase = waits ? COX_STORY_GROUP : COX_STORY_EXECUTE;
        since_ns = waits ? waits->begin_ns : record->begin_ns;
    }
    path->phase_ns = span(since_ns, story->recording->monotonic_ns);
}

/* Why a rank has not replied: the one that the others wait for is stopped, held or dead; else it
 * does not itself wait for others; else it is behind them in the rank group. */
struct delay {
    bool is_out, is_free;
    uint64_t epoch, round;
};

static struct delay delay_of(const struct cox_story *story, uint32_t rank,
                             const struct cox_record *record)
{
    const CoxswainRecording__Rank *told = story->recording->ranks[rank];
    const struct cox_record_operation *waits = waits_within(&story->ranks[rank], record);
    return (struct delay){
        .is_out = told->stopped || told->trouble ||
                  (told->liveness && strcmp(told->liveness, "dead") == 0),
        .is_free = !waits,
        .epoch = waits ? waits->epoch : 0,
        .round = waits ? waits->round : 0,
    };
}

static bool delays_more(const struct delay *one, const struct delay *other)
{
    if (one->is_out != other->is_out)
        return one->is_out;
    if (one->is_free != other->is_free)
        return one->is_free;
    return one->epoch != other->epoch ? one->epoch < other->epoch : one->round < other->round;
}

void cox_story_path(const struct cox_story *story, enum cox_channel_id channel,
                    const struct cox_record *own, struct cox_story_path *ret_path)
{
    const uint64_t sequence = own->sequence;
    uint64_t phases[COX_RANK_COUNT_MAX][COX_STORY_PHASE_COUNT];
    uint32_t ranks[COX_RANK_COUNT_MAX], count = 0;
    uint64_t last_ns = 0, least = UINT64_MAX, most = 0;
    int waited_least = -1, stuck = -1;
    struct delay longest = {0};
    *ret_path = (struct cox_story_path){.last = -1, .critical = -1};
    for (uint32_t rank = 0; rank < story->rank_count; rank++) {
        const struct cox_record *record =
            cox_story_find(&story->ranks[rank].rings[channel], sequence);
        if (!was_asked(own, rank) || !story->ranks[rank].is_known)
            continue;
        /* It has replied, so its record was overwritten, or was that of a process which has been
         * replaced since. */
        if (!record && own->gathered_ns && own->status == 0)
            continue;
        phases_of(story, own, record, phases[rank]);
        ranks[count++] = rank;
        if (!record || !record->reply_ns) {
            const struct delay delay = delay_of(story, rank, record);
            cox_rank_set_add(&ret_path->pending, rank);
            ret_path->pending_count++;
            if (stuck < 0 || delays_more(&delay, &longest)) {
                stuck = (int)rank;
                longest = delay;
            }
            continue;
        }
        if (record->reply_ns >= last_ns) {
            last_ns = record->reply_ns;
            ret_path->last = (int)rank;
        }
    }
    if (stuck >= 0) {
        ret_path->critical = stuck;
        path_set_present(story, (uint32_t)stuck, own,
                         cox_story_find(&story->ranks[stuck].rings[channel], sequence), ret_path);
    } else {
        for (uint32_t i = 0; i < count; i++) {
            const struct cox_record *record =
                cox_story_find(&story->ranks[ranks[i]].rings[channel], sequence);
            const uint64_t waited = record ? record->group_wait_ns : 0;
            most = waited > most ? waited : most;
            if (record && record->group_count && waited < least) {
                least = waited;
                waited_least = (int)ranks[i];
            }
        }
        ret_path->critical = most && waited_least >= 0 ? waited_least : ret_path->last;
        if (ret_path->critical >= 0)
            choose_phase(phases, ranks, count, (uint32_t)ret_path->critical, ret_path);
    }
}

const char *cox_story_type(uint32_t type, char buffer[24])
{
    const struct cox_operation *operation =
        cox_operation_find(type == COX_TYPE_OPAQUE_LARGE ? COX_TYPE_OPAQUE : type);
    if (operation && operation->name)
        return operation->name;
    snprintf(buffer, 24, "type %" PRIu32, type);
    return buffer;
}
