#include "transfers.h"

#include "channel/base/idioms.h"
#include "pull_message.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pulls of one request, which end together. */
#define BATCH_COUNT_MAX 16
/* Ranks that keep the deadline report it themselves, a little later. */
#define SLACK_NS (500 * COX_NSEC_PER_MSEC)
/* Largest distance between the deadlines of pulls in one request. */
#define SPREAD_NS COX_NSEC_PER_SEC
/* Interval of checks while a rank owes a reply. */
#define SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* The median of the copy speeds is over this many samples. */
#define SPEED_COUNT 256
#define MESSAGE_ARENA_MAX ((size_t)256 << 20)

struct pull {
    struct pull *next;
    int64_t sequence;
    char id[COX_PULL_ID_SIZE];
    struct cox_kv_reference *source;
    int32_t *blocks;
    uint64_t not_before_ns, deadline_ns, epoch;
    enum cox_pull_state state;
    /* number of its request; 0: not sent */
    uint64_t flight;
    /* the request has completed */
    bool flown;
    /* and had completed before the current check */
    bool looked;
    /* no rank writes to the blocks */
    bool drained;
    /* its outcome was taken, or was cancelled */
    bool reported;
    /* ranks were asked to cancel it */
    bool leave_asked;
    bool own_death;
    struct cox_pull_report *report;
};

struct drained {
    struct drained *next;
    int32_t *blocks;
    uint32_t count;
};

struct cox_transfers {
    struct cox_executor *executor;
    struct cox_transfers_options options;
    uint32_t rank_count;
    /* number of the last request */
    uint64_t flight;

    /* protects everything below; not held across a call of the executor */
    pthread_mutex_t lock;
    /* oldest first */
    struct pull *pulls;
    struct drained *quiets;
    /* when to retry what could not be sent */
    uint64_t retry_ns;
    struct cox_transfers_status status;
    /* Of the last SPEED_COUNT copies by a rank, bytes per second. The next one goes to speed_count
     * % SPEED_COUNT. */
    uint64_t speeds[SPEED_COUNT];
    uint64_t speed_count;
};

bool cox_pull_may_move(enum cox_pull_state from, enum cox_pull_state to)
{
#define TO(state) (1u << COX_PULL_##state)
    static const unsigned moves[COX_PULL_STATE_COUNT] = {
        [COX_PULL_QUEUED] = TO(SENT) | TO(FAILED) | TO(TIMEOUT) | TO(PEER_DEAD) | TO(CANCELLED),
        [COX_PULL_SENT] =
            TO(QUEUED) | TO(SUCCESS) | TO(FAILED) | TO(TIMEOUT) | TO(PEER_DEAD) | TO(CANCELLED),
    };
#undef TO
    return (size_t)from < COX_PULL_STATE_COUNT && (size_t)to < COX_PULL_STATE_COUNT &&
           moves[from] & (1u << to);
}

/* ---- one pull, with the lock held ---- */

static void pull_check(const struct pull *pull)
{
    COX_ASSERT(pull->state != COX_PULL_QUEUED || pull->flight == 0);
    COX_ASSERT(pull->state != COX_PULL_SENT || (pull->flight && !pull->drained));
    COX_ASSERT(pull->state != COX_PULL_SUCCESS || pull->drained);
    COX_ASSERT(!pull->reported || cox_pull_has_ended(pull->state));
}

static void pull_move(struct cox_transfers *transfer, struct pull *pull, enum cox_pull_state to)
{
    COX_ASSERT(cox_pull_may_move(pull->state, to));
    pull->state = to;
    if (!cox_pull_has_ended(to)) {
        pull_check(pull);
        return;
    }
    transfer->status.running--;
    if (to == COX_PULL_SUCCESS)
        transfer->status.succeeded++;
    else if (to == COX_PULL_CANCELLED)
        transfer->status.cancelled++;
    else
        transfer->status.failed++;
    pull->report->state = to;
    /* While its request is under way, a rank may write. */
    pull->drained = pull->drained || !pull->flight;
    if (!pull->drained)
        transfer->status.quarantined_blocks += pull->source->block_count;
    pull_check(pull);
}

static void pull_fail(struct cox_transfers *transfer, struct pull *pull, enum cox_pull_state to,
                      int code, const char *text)
{
    cox_fail(&pull->report->error, code, "%s", text);
    pull_move(transfer, pull, to);
}

static void pull_free(struct pull *pull)
{
    free(pull->source);
    free(pull->blocks);
    free(pull->report);
    free(pull);
}

static void pull_remove(struct cox_transfers *transfer, struct pull *pull)
{
    struct pull **link = &transfer->pulls;
    while (*link != pull)
        link = &(*link)->next;
    *link = pull->next;
    pull_free(pull);
}

/* No rank writes to the blocks any more. If the caller left them in quarantine, take_quiet returns
 * them. */
static void pull_drained(struct cox_transfers *transfer, struct pull *pull)
{
    if (pull->drained)
        return;
    pull->drained = true;
    if (cox_pull_has_ended(pull->state))
        transfer->status.quarantined_blocks -= pull->source->block_count;
    if (!pull->reported)
        return;
    struct drained *drained = malloc(sizeof *drained);
    if (!drained) { /* later, when it is drained */
        pull->drained = false;
        transfer->status.quarantined_blocks += pull->source->block_count;
        return;
    }
    *drained = (struct drained){.next = transfer->quiets,
                                .blocks = cox_steal_ptr(&pull->blocks),
                                .count = pull->source->block_count};
    transfer->quiets = drained;
    pull_remove(transfer, pull);
}

/* For a caller with a new block allocator, drained blocks have no meaning. */
static void quiets_forget(struct cox_transfers *transfer)
{
    while (transfer->quiets) {
        struct drained *drained = transfer->quiets;
        transfer->quiets = drained->next;
        free(drained->blocks);
        free(drained);
    }
}

/* ---- the handler, on the response thread ---- */

static bool is_drained(const struct cox_completion *completion)
{
    bool drained = true;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++)
        drained = drained && completion->ranks[rank].outcome != COX_OUTCOME_LATE;
    return drained;
}

/* Numbers reported by a rank are input: they are checked. */
static void speed_add(struct cox_transfers *transfer, const struct cox_pull_rank *rank)
{
    transfer->status.bytes += rank->copied_bytes;
    transfer->status.copy_ns += rank->copy_ns;
    if (!rank->replied || rank->code || !rank->copied_bytes || !rank->copy_ns)
        return;
    const double speed =
        (double)rank->copied_bytes * (double)COX_NSEC_PER_SEC / (double)rank->copy_ns;
    transfer->speeds[transfer->speed_count++ % SPEED_COUNT] =
        speed < 1e18 ? (uint64_t)speed : UINT64_C(1000000000000000000);
}

static int compare_speeds(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t speed_median(const struct cox_transfers *transfer)
{
    const size_t count =
        transfer->speed_count < SPEED_COUNT ? (size_t)transfer->speed_count : SPEED_COUNT;
    uint64_t sorted[SPEED_COUNT];
    memcpy(sorted, transfer->speeds, count * sizeof sorted[0]);
    qsort(sorted, count, sizeof sorted[0], compare_speeds);
    return count ? sorted[(count - 1) / 2] : 0;
}

static void pull_complete(struct cox_transfers *transfer, struct pull *pull,
                          const struct cox_completion *completion)
{
    bool drained = is_drained(completion);
    pull->flown = true;
    if (pull->state == COX_PULL_SENT) {
        cox_pull_read(completion, pull->id, pull->report);
        for (uint32_t rank = 0; rank < pull->report->rank_count; rank++)
            speed_add(transfer, &pull->report->ranks[rank]);
        pull->own_death = completion->status == COX_PEER_DEAD;
        pull->drained = drained;
        pull_move(transfer, pull, pull->report->state);
    } else {
        transfer->status.late_results++;
        if (drained)
            pull_drained(transfer, pull);
    }
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    struct cox_transfers *transfer = context;
    uint64_t flight = (uintptr_t)completion->request_context;
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls, *next; pull; pull = next) {
        next = pull->next;
        if (pull->flight == flight && !pull->flown)
            pull_complete(transfer, pull, completion);
    }
    transfer->retry_ns = 0; /* there is room now */
    pthread_mutex_unlock(&transfer->lock);
    if (transfer->options.wake)
        transfer->options.wake(transfer->options.wake_context);
}

static void on_completion_dropped(void *context, const struct cox_completion *completion)
{
    (void)context;
    (void)completion;
}

/* ---- constructor and destructor ---- */

int cox_transfers_new(struct cox_executor *executor, const struct cox_transfers_options *options,
                      struct cox_transfers **ret_transfer, struct cox_error *err)
{
    struct cox_transfers *transfer = calloc(1, sizeof *transfer);
    if (!transfer)
        return cox_fail(err, -ENOMEM, "no memory for transfers");
    transfer->executor = executor;
    transfer->options = *options;
    struct cox_executor_status status;
    cox_executor_read_status(executor, &status, NULL);
    transfer->rank_count = status.rank_count;
    pthread_mutex_init(&transfer->lock, NULL);
    int r = cox_executor_set_handler(executor, COX_CHANNEL_TRANSFER, on_completion, transfer);
    if (r) {
        pthread_mutex_destroy(&transfer->lock);
        free(transfer);
        return cox_fail(err, r, "cannot become the handler of the transfer channel: %s",
                        cox_status_text(r));
    }
    *ret_transfer = transfer;
    return 0;
}

struct cox_transfers *cox_transfers_free(struct cox_transfers *transfer)
{
    if (!transfer)
        return NULL;
    /* On return the old handler is not running. */
    cox_executor_set_handler(transfer->executor, COX_CHANNEL_TRANSFER, on_completion_dropped, NULL);
    while (transfer->pulls)
        pull_remove(transfer, transfer->pulls);
    quiets_forget(transfer);
    pthread_mutex_destroy(&transfer->lock);
    free(transfer);
    return NULL;
}

/* ---- begin and end ---- */

int cox_transfers_start(struct cox_transfers *transfer, const struct cox_pull_request *request)
{
    uint32_t count = request->source->block_count;
    struct pull *pull = calloc(1, sizeof *pull);
    if (!pull)
        return -ENOMEM;
    *pull = (struct pull){
        .sequence = request->sequence,
        .source = cox_kv_reference_dup(request->source),
        .blocks = calloc(count, sizeof *pull->blocks),
        .not_before_ns = request->not_before_ns,
        .deadline_ns = request->deadline_ns,
        .epoch = request->epoch,
        .report =
            calloc(1, sizeof *pull->report + transfer->rank_count * sizeof pull->report->ranks[0]),
    };
    if (!pull->source || !pull->blocks || !pull->report) {
        pull_free(pull);
        return -ENOMEM;
    }
    memcpy(pull->blocks, request->blocks, count * sizeof *pull->blocks);
    pull->report->rank_count = transfer->rank_count;
    pull->report->ranks = (struct cox_pull_rank *)(pull->report + 1);
    snprintf(pull->id, sizeof pull->id, "%.128s.%" PRId64 ".%" PRIu32, request->source->cluster_id,
             request->sequence, request->attempt);
    pthread_mutex_lock(&transfer->lock);
    struct pull **end = &transfer->pulls;
    while (*end)
        end = &(*end)->next;
    *end = pull;
    transfer->status.running++;
    transfer->status.retries += request->attempt > 1;
    pthread_mutex_unlock(&transfer->lock);
    return 0;
}

/* Returns whether it is drained; it may be freed then. */
static bool pull_cancel(struct cox_transfers *transfer, struct pull *pull)
{
    if (!cox_pull_has_ended(pull->state))
        pull_fail(transfer, pull, COX_PULL_CANCELLED, COX_CLOSED, "cancelled");
    bool drained = pull->drained;
    pull->reported = true;
    if (drained)
        pull_remove(transfer, pull);
    return drained;
}

bool cox_transfers_cancel(struct cox_transfers *transfer, int64_t sequence)
{
    bool drained = true;
    pthread_mutex_lock(&transfer->lock);
    struct pull *pull = transfer->pulls;
    while (pull && (pull->sequence != sequence || pull->reported))
        pull = pull->next;
    if (pull)
        drained = pull_cancel(transfer, pull);
    pthread_mutex_unlock(&transfer->lock);
    return drained;
}

void cox_transfers_abandon(struct cox_transfers *transfer)
{
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls, *next; pull; pull = next) {
        next = pull->next;
        if (!pull->reported)
            pull_cancel(transfer, pull);
    }
    quiets_forget(transfer);
    pthread_mutex_unlock(&transfer->lock);
}

/* ---- sending ---- */

/* A request ends with its last pull, and until then the blocks of all its pulls wait. So a short
 * pull does not share a request with one that may take an hour. */
static bool deadlines_near(uint64_t a, uint64_t b)
{
    return (a > b ? a - b : b - a) <= SPREAD_NS;
}

/* Collects the next pulls that fit into one request. They become SENT here, because the reply may
 * arrive before submit returns. */
static size_t batch_take(struct cox_transfers *transfer, size_t count_max, uint64_t now,
                         struct pull **batch)
{
    size_t count = 0;
    for (struct pull *pull = transfer->pulls; pull && count < count_max; pull = pull->next) {
        if (pull->state != COX_PULL_QUEUED || pull->not_before_ns > now ||
            (count && (pull->epoch != batch[0]->epoch ||
                       !deadlines_near(pull->deadline_ns, batch[0]->deadline_ns))))
            continue;
        pull->flight = transfer->flight;
        pull_move(transfer, pull, COX_PULL_SENT);
        batch[count++] = pull;
    }
    return count;
}

static int batch_submit(struct cox_transfers *transfer, struct pull *const *batch, size_t count,
                        uint64_t flight, struct cox_error *err)
{
    _cox_cleanup_(cox_arena_deinit) struct cox_arena arena = {0};
    struct cox_pull_item items[BATCH_COUNT_MAX];
    struct Coxswain__ExecuteRequest *request;
    struct cox_submit_options options = {
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_ALL,
        .request_context = (void *)(uintptr_t)flight,
        .epoch = batch[0]->epoch,
    };
    for (size_t i = 0; i < count; i++) {
        items[i] = (struct cox_pull_item){
            .id = batch[i]->id,
            .source = batch[i]->source,
            .blocks = batch[i]->blocks,
            .sequence = batch[i]->sequence,
            .deadline_ns = batch[i]->deadline_ns,
        };
        if (options.deadline_ns < batch[i]->deadline_ns)
            options.deadline_ns = batch[i]->deadline_ns;
    }
    options.deadline_ns = options.deadline_ns > COX_DEADLINE_NEVER - SLACK_NS
                              ? COX_DEADLINE_NEVER
                              : options.deadline_ns + SLACK_NS;
    int r = cox_arena_init(&arena, 0, MESSAGE_ARENA_MAX);
    if (!r)
        r = cox_pull_message(&arena, items, count, &request);
    if (r)
        return cox_fail(err, r, "no memory for a pull");
    uint64_t sequence;
    return cox_executor_submit(transfer->executor, request, &options, &sequence, err);
}

/* A batch was refused: nothing of it is under way, and the handler will not be called for it. */
static void batch_refused(struct cox_transfers *transfer, struct pull *const *batch, size_t count,
                          int r, const struct cox_error *error)
{
    bool again = r == COX_FULL || r == COX_LATE || (r == COX_TOO_LARGE && count > 1);
    for (size_t i = 0; i < count; i++) {
        struct pull *pull = batch[i];
        pull->flight = 0;
        pull_move(transfer, pull, COX_PULL_QUEUED); /* not sent after all */
        if (again)
            continue;
        pull->own_death = r == COX_PEER_DEAD || r == COX_STATE || r == COX_STALE;
        pull_fail(transfer, pull, r == COX_PEER_DEAD ? COX_PULL_PEER_DEAD : COX_PULL_FAILED, r,
                  error->text[0] ? error->text : cox_status_text(r));
    }
}

static void batches_send(struct cox_transfers *transfer)
{
    size_t count_max = BATCH_COUNT_MAX;
    for (;;) {
        struct pull *batch[BATCH_COUNT_MAX];
        struct cox_error error = {0};
        uint64_t now = cox_now_ns();
        pthread_mutex_lock(&transfer->lock);
        uint64_t flight = ++transfer->flight;
        size_t count = transfer->retry_ns > now ? 0 : batch_take(transfer, count_max, now, batch);
        pthread_mutex_unlock(&transfer->lock);
        if (count == 0)
            return;
        /* Only this thread removes pulls, except cancelled ones, which the handler removes. */
        int r = batch_submit(transfer, batch, count, flight, &error);
        if (r == 0)
            continue;
        pthread_mutex_lock(&transfer->lock);
        batch_refused(transfer, batch, count, r, &error);
        if (r == COX_FULL || r == COX_LATE)
            transfer->retry_ns = now + SLICE_NS;
        pthread_mutex_unlock(&transfer->lock);
        count_max = r == COX_TOO_LARGE ? count / 2 + (count == 1) : BATCH_COUNT_MAX;
    }
}

/* Asks the ranks to cancel pulls that have ended without them. */
static void leave_send(struct cox_transfers *transfer)
{
    _cox_cleanup_(cox_arena_deinit) struct cox_arena arena = {0};
    const char *ids[BATCH_COUNT_MAX];
    struct pull *pulls[BATCH_COUNT_MAX];
    struct Coxswain__ExecuteRequest *request;
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_NONE,
                                               .deadline_ns = COX_DEADLINE_NEVER};
    struct cox_error error = {0};
    uint64_t sequence;
    size_t count = 0;
    /* The ids are copied, since the handler may free a pull meanwhile. */
    if (cox_arena_init(&arena, 0, MESSAGE_ARENA_MAX))
        return;
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls; pull && count < BATCH_COUNT_MAX; pull = pull->next)
        if (cox_pull_has_ended(pull->state) && !pull->drained && !pull->leave_asked &&
            (ids[count] = cox_arena_strdup(&arena, pull->id))) {
            pull->leave_asked = true;
            pulls[count++] = pull;
        }
    pthread_mutex_unlock(&transfer->lock);
    if (count == 0 || cox_pull_cancel_message(&arena, ids, count, &request) ||
        cox_executor_submit(transfer->executor, request, &options, &sequence, &error) == 0)
        return;
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls; pull; pull = pull->next)
        for (size_t i = 0; i < count; i++)
            if (pull == pulls[i]) /* skips pulls freed meanwhile */
                pull->leave_asked = false;
    pthread_mutex_unlock(&transfer->lock);
}

/* ---- the clock ---- */

static void deadlines_check(struct cox_transfers *transfer)
{
    uint64_t now = cox_now_ns();
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls; pull; pull = pull->next) {
        if (pull->state == COX_PULL_QUEUED && pull->deadline_ns <= now)
            pull_fail(transfer, pull, COX_PULL_TIMEOUT, COX_TIMEOUT,
                      "its deadline passed before it could be sent");
        else if (pull->state == COX_PULL_SENT &&
                 pull->deadline_ns < COX_DEADLINE_NEVER - SLACK_NS &&
                 pull->deadline_ns + SLACK_NS <= now)
            pull_fail(transfer, pull, COX_PULL_TIMEOUT, COX_TIMEOUT,
                      "its deadline passed, and ranks have not replied");
    }
    pthread_mutex_unlock(&transfer->lock);
}

/* A pull whose request has completed while a rank was late. */
static bool is_owed(const struct pull *pull)
{
    return pull->flown && !pull->drained;
}

/* The channel is in order: a rank that owes no reply works on no earlier pull. */
static void late_check(struct cox_transfers *transfer)
{
    bool owed = false;
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls; pull; pull = pull->next) {
        pull->looked = is_owed(pull);
        owed = owed || pull->looked;
    }
    pthread_mutex_unlock(&transfer->lock);
    if (!owed)
        return;
    struct cox_executor_status status;
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks =
        calloc(transfer->rank_count, sizeof *ranks);
    if (!ranks)
        return;
    cox_executor_read_status(transfer->executor, &status, ranks);
    const struct cox_rank_set *late = &status.channels[COX_CHANNEL_TRANSFER].late;
    for (uint32_t rank = 0; rank < transfer->rank_count; rank++)
        if (cox_rank_set_has(late, rank))
            return;
    pthread_mutex_lock(&transfer->lock);
    for (struct pull *pull = transfer->pulls, *next; pull; pull = next) {
        next = pull->next;
        if (pull->looked)
            pull_drained(transfer, pull);
    }
    pthread_mutex_unlock(&transfer->lock);
}

void cox_transfers_turn(struct cox_transfers *transfer)
{
    deadlines_check(transfer);
    late_check(transfer);
    batches_send(transfer);
    leave_send(transfer);
}

uint64_t cox_transfers_due_ns(struct cox_transfers *transfer)
{
    uint64_t due_ns = COX_DEADLINE_NEVER, now = cox_now_ns();
    pthread_mutex_lock(&transfer->lock);
    for (const struct pull *pull = transfer->pulls; pull; pull = pull->next) {
        uint64_t mine = COX_DEADLINE_NEVER;
        if (pull->state == COX_PULL_QUEUED)
            mine = cox_deadline_min(pull->deadline_ns, transfer->retry_ns > pull->not_before_ns
                                                           ? transfer->retry_ns
                                                           : pull->not_before_ns);
        else if (pull->state == COX_PULL_SENT)
            mine = pull->deadline_ns < COX_DEADLINE_NEVER - SLACK_NS ? pull->deadline_ns + SLACK_NS
                                                                     : COX_DEADLINE_NEVER;
        else if (is_owed(pull) || !pull->leave_asked)
            mine = now + SLICE_NS;
        due_ns = cox_deadline_min(due_ns, mine);
    }
    pthread_mutex_unlock(&transfer->lock);
    return due_ns;
}

/* ---- outcomes ---- */

int cox_transfers_take(struct cox_transfers *transfer, struct cox_pull_outcome *ret_result)
{
    pthread_mutex_lock(&transfer->lock);
    struct pull *pull = transfer->pulls;
    while (pull && (pull->reported || !cox_pull_has_ended(pull->state)))
        pull = pull->next;
    if (pull) {
        pull->reported = true;
        *ret_result = (struct cox_pull_outcome){
            .sequence = pull->sequence,
            .drained = pull->drained,
            .epoch = pull->epoch,
            .own_death = pull->own_death,
            .report = cox_steal_ptr(&pull->report),
        };
        if (pull->drained)
            pull_remove(transfer, pull);
    }
    pthread_mutex_unlock(&transfer->lock);
    return pull ? 0 : COX_EMPTY;
}

int cox_transfers_take_drained(struct cox_transfers *transfer, int32_t **ret_blocks,
                               uint32_t *ret_count)
{
    pthread_mutex_lock(&transfer->lock);
    struct drained *drained = transfer->quiets;
    if (drained) {
        transfer->quiets = drained->next;
        *ret_blocks = drained->blocks;
        *ret_count = drained->count;
        free(drained);
    }
    pthread_mutex_unlock(&transfer->lock);
    return drained ? 0 : COX_EMPTY;
}

void cox_transfers_quarantine(struct cox_transfers *transfer,
                              void (*fn)(void *context, const int32_t *blocks, uint32_t count),
                              void *context)
{
    pthread_mutex_lock(&transfer->lock);
    /* Blocks that were drained before this call are not passed to fn, so they must not be given
     * back. */
    quiets_forget(transfer);
    for (const struct pull *pull = transfer->pulls; pull; pull = pull->next)
        fn(context, pull->blocks, pull->source->block_count);
    pthread_mutex_unlock(&transfer->lock);
}

void cox_transfers_status(struct cox_transfers *transfer, struct cox_transfers_status *ret_status)
{
    pthread_mutex_lock(&transfer->lock);
    *ret_status = transfer->status;
    ret_status->bytes_per_s = speed_median(transfer);
    pthread_mutex_unlock(&transfer->lock);
}
