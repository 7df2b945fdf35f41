#include "hostile_fixture.h"

#include "channel/base/thread.h"

struct punctual requests = {.what = "requests"}, starts = {.what = "starts"},
                stops = {.what = "stops"};

/* ---- groups of checked workers ---- */

struct test_group *group_start(uint32_t rank_count, const char *name)
{
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .workers.command = test_own_command,
        .memory.keep_names = true,
        .times.finalize_ms = FINALIZE_MS,
        .times.term_ms = TERM_MS,
    };
    return test_group_start(rank_count, &options);
}

void group_end(struct test_group *group)
{
    uint64_t begin_ns = cox_now_ns();
    uint32_t rank_count = cox_executor_rank_count(test_group_executor(group));
    cox_executor_stop(test_group_executor(group));
    if (!punctual_note(&stops, begin_ns + BOUND_MS * COX_NSEC_PER_MSEC))
        fail_msg("stop took %" PRIu64 " ms", (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC);
    if (test_count_lines(group, -1, CHECKED_CRASH))
        fail_msg("a worker crashed");
    for (uint32_t rank = 0; rank < rank_count; rank++)
        if (strstr(test_death_text(group, rank), "signal"))
            fail_msg("%s", test_death_text(group, rank));
    test_group_free(group);
}

/* ---- requests that check their replies ---- */

static uint64_t numbers; /* of requests: never the same twice */

static void request_make(struct checked_request *request)
{
    memset(request, 0, sizeof *request);
    request->number = ++numbers;
    for (size_t i = 0; i < sizeof request->fill; i++)
        request->fill[i] = (uint8_t)(request->number + 7 * i);
    request->checksum = checked_sum(request, offsetof(struct checked_request, checksum));
}

/* SPOILT: its very bytes were written over. */
static enum verdict reply_judge(uint64_t number, uint32_t rank, const void *bytes, size_t size)
{
    struct checked_reply reply;
    if (!bytes || size != sizeof reply)
        return SPOILT;
    memcpy(&reply, bytes, sizeof reply);
    if (reply.checksum != checked_sum(&reply, offsetof(struct checked_reply, checksum)))
        return SPOILT;
    return reply.number == number && reply.rank == rank ? OWN : FOREIGN;
}

static enum verdict completion_judge(uint64_t number, const struct cox_completion *completion)
{
    enum verdict worst = OWN;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        enum verdict verdict = reply_judge(number, rank, result->bytes, result->size);
        worst = verdict > worst ? verdict : worst;
    }
    return worst;
}

struct judged {
    uint64_t number;
    enum verdict verdict;
};

static void visit_judge(void *context, const struct cox_completion *completion)
{
    struct judged *judged = context;
    if (completion->status == 0)
        judged->verdict = completion_judge(judged->number, completion);
}

int call_checked(struct test_group *group, uint64_t timeout_ms, enum verdict *ret_verdict)
{
    struct checked_request request;
    request_make(&request);
    struct judged judged = {.number = request.number, .verdict = OWN};
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(timeout_ms)};
    int r = cox_executor_call_opaque(test_group_executor(group), &request, sizeof request, &options,
                                     visit_judge, &judged, test_err());
    if (!punctual_note(&requests, options.deadline_ns))
        fail_msg("a call ended %" PRIu64 " ms after its deadline: %d %s",
                 (cox_now_ns() - options.deadline_ns) / COX_NSEC_PER_MSEC, r, test_error.text);
    if (r < 0 || r >= COX_STATUS_COUNT)
        fail_msg("a call ended with %d: %s", r, test_error.text);
    if (r && !test_error.text[0])
        fail_msg("a call ended with %d and no words", r);
    if (judged.verdict == FOREIGN)
        fail_msg("a call got the reply of another request");
    *ret_verdict = judged.verdict;
    return r;
}

bool group_works(struct test_group *group)
{
    const uint64_t end_ns = cox_deadline_after_ms(WORKS_MS);
    enum verdict verdict = SPOILT;
    do {
        if (call_checked(group, DEADLINE_MS, &verdict) == 0 && verdict == OWN)
            return true;
        usleep(1000);
    } while (cox_now_ns() < end_ns);
    return false;
}

void expect_own(struct test_group *group)
{
    enum verdict verdict = SPOILT;
    int r = call_checked(group, TEST_PATIENCE_MS, &verdict);
    if (r || verdict != OWN)
        fail_msg("a group that nobody disturbs replies %d, verdict %d", r, (int)verdict);
}

/* ---- many requests in flight ---- */

void load_init(struct load *load)
{
    memset(load, 0, sizeof *load);
    pthread_mutex_init(&load->lock, NULL);
    cox_condition_init(&load->changed);
}

void load_deinit(struct load *load)
{
    pthread_cond_destroy(&load->changed);
    pthread_mutex_destroy(&load->lock);
}

void on_completion(void *context, const struct cox_completion *completion)
{
    (void)context;
    struct flight *flight = completion->request_context;
    struct load *load = flight->load;
    const bool hung = !punctual_note(&requests, flight->deadline_ns);
    pthread_mutex_lock(&load->lock);
    load->late += hung;
    load->twice += ++flight->completions > 1;
    if (completion->status == 0) {
        enum verdict verdict = completion_judge(flight->number, completion);
        load->good += verdict == OWN;
        load->spoilt += verdict == SPOILT;
        load->foreign += verdict == FOREIGN;
    } else {
        load->failed++;
        if (completion->status < 0 || completion->status >= COX_STATUS_COUNT || !completion->text ||
            !completion->text[0]) {
            snprintf(load->text, sizeof load->text, "%d: %s", completion->status,
                     completion->text ? completion->text : "no words");
            load->odd++;
        }
    }
    load->completed++;
    pthread_cond_broadcast(&load->changed);
    pthread_mutex_unlock(&load->lock);
}

size_t load_await_count(struct load *load, size_t count)
{
    const struct timespec until =
        cox_deadline_timespec(cox_deadline_after_ms(DEADLINE_MS + HANG_MS));
    int e = 0;
    pthread_mutex_lock(&load->lock);
    while (load->completed < count && e != ETIMEDOUT)
        e = pthread_cond_timedwait(&load->changed, &load->lock, &until);
    size_t completed = load->completed;
    pthread_mutex_unlock(&load->lock);
    return completed;
}

int load_submit(struct test_group *group, struct load *load)
{
    struct checked_request request;
    struct flight *flight = &load->flights[load->submitted];
    request_make(&request);
    *flight = (struct flight){
        .number = request.number, .deadline_ns = cox_deadline_after_ms(DEADLINE_MS), .load = load};
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = flight->deadline_ns,
                                               .request_context = flight};
    int r = cox_executor_submit_opaque(test_group_executor(group), &request, sizeof request,
                                       &options, NULL, test_err());
    if (r < 0 || (r && !test_error.text[0]))
        fail_msg("submit: %d: %s", r, test_error.text);
    load->submitted += r == 0;
    return r;
}
