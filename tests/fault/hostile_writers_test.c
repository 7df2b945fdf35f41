/*
 * hostile_test: real groups whose shared memory another process, or a rank, overwrites. What must
 * hold whatever was written: no process crashes, every request ends once and by its deadline, a
 * reply counts only for its own request, stop is bounded, and the next group of the same name
 * works.
 */
#include "channel/base/thread.h"
#include "channel/shm/state.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "checked_worker.h"
#include "meddler.h"
#include "testing.h"

#include <coxswain/requests.h>

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWNESS 5
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOWNESS 5
#endif
#endif
#ifndef SLOWNESS
#define SLOWNESS 1
#endif

/* How much later than its deadline a request may end: most of them, and each. */
#define SLACK_MS (1000 * SLOWNESS)
#define HANG_MS (20000 * SLOWNESS)
#define DEADLINE_MS (100 * SLOWNESS)
#define WORKS_MS (20 * DEADLINE_MS)
#define START_MS (500 * SLOWNESS)
#define FINALIZE_MS (300 * SLOWNESS)
#define TERM_MS (300 * SLOWNESS)
/* Of a stop. */
#define BOUND_MS (FINALIZE_MS + TERM_MS)

#include "punctual.h"

static struct punctual requests = {.what = "requests"}, starts = {.what = "starts"},
                       stops = {.what = "stops"};
/* How long a seed runs, and all flips together. */
#define SEED_MS (400 * SLOWNESS)
#define FLIPS_MS 12000
#define IN_FLIGHT_MAX 65536

/* ---- groups of checked workers ---- */

static char program[4096];
static const char *const command[] = {program, "worker", NULL};

static struct test_group *group_start(uint32_t rank_count, const char *name)
{
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .workers.command = command,
        .memory.keep_names = true,
        .times.finalize_ms = FINALIZE_MS,
        .times.term_ms = TERM_MS,
    };
    return test_group_start(rank_count, &options);
}

/* Stop ends in time, and no process had crashed. */
static void group_end(struct test_group *group)
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

static void request_make(struct checked_request *request, enum checked_order order, uint32_t rank,
                         uint64_t seed)
{
    memset(request, 0, sizeof *request);
    request->number = ++numbers;
    request->order = order;
    request->rank = rank;
    request->seed = seed;
    for (size_t i = 0; i < sizeof request->fill; i++)
        request->fill[i] = (uint8_t)(request->number + 7 * i);
    request->checksum = checked_sum(request, offsetof(struct checked_request, checksum));
}

enum verdict { OWN, SPOILT, FOREIGN };

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

/* Calls with an order. Fails the test when it ends too late, with a system's error, or with the
 * reply of another request. Returns the status; *ret_verdict is of a reply with status 0. */
static int call_checked(struct test_group *group, enum checked_order order, uint32_t rank,
                        uint64_t seed, uint64_t timeout_ms, enum verdict *ret_verdict)
{
    struct checked_request request;
    request_make(&request, order, rank, seed);
    struct judged judged = {.number = request.number, .verdict = OWN};
    struct cox_error err = {0};
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(timeout_ms)};
    int r = cox_executor_call_opaque(test_group_executor(group), &request, sizeof request, &options,
                                     visit_judge, &judged, &err);
    if (!punctual_note(&requests, options.deadline_ns))
        fail_msg("a call ended %" PRIu64 " ms after its deadline: %d %s",
                 (cox_now_ns() - options.deadline_ns) / COX_NSEC_PER_MSEC, r, err.text);
    if (r < 0 || r >= COX_STATUS_COUNT)
        fail_msg("a call ended with %d: %s", r, err.text);
    if (r && !err.text[0])
        fail_msg("a call ended with %d and no words", r);
    if (judged.verdict == FOREIGN)
        fail_msg("a call got the reply of another request");
    if (ret_verdict)
        *ret_verdict = judged.verdict;
    return r;
}

/* Works within WORKS_MS. What is left of before may end the first calls; and where a word of a
 * rank's line is spoilt, each call is COX_CORRUPT at once, until the rank has stored that word
 * again for a request that it has taken. */
static bool group_works(struct test_group *group)
{
    const uint64_t end_ns = cox_deadline_after_ms(WORKS_MS);
    enum verdict verdict = SPOILT;
    do {
        if (call_checked(group, CHECKED_ECHO, 0, 0, DEADLINE_MS, &verdict) == 0 && verdict == OWN)
            return true;
        usleep(1000);
    } while (cox_now_ns() < end_ns);
    return false;
}

static void expect_own(struct test_group *group)
{
    enum verdict verdict = SPOILT;
    int r = call_checked(group, CHECKED_ECHO, 0, 0, TEST_PATIENCE_MS, &verdict);
    if (r || verdict != OWN)
        fail_msg("a group that nobody disturbs replies %d, verdict %d", r, (int)verdict);
}

/* ---- many requests in flight ---- */

struct flight {
    uint64_t number;
    uint64_t deadline_ns;
    struct load *load;
    unsigned completions;
};

struct load {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct flight flights[IN_FLIGHT_MAX];
    size_t submitted, completed;
    size_t late, foreign, twice, spoilt, good, failed, odd;
    /* of the first odd one */
    char text[512];
};

static void load_init(struct load *load)
{
    memset(load, 0, sizeof *load);
    pthread_mutex_init(&load->lock, NULL);
    cox_condition_init(&load->changed);
}

static void load_deinit(struct load *load)
{
    pthread_cond_destroy(&load->changed);
    pthread_mutex_destroy(&load->lock);
}

/* On the response thread. */
static void on_completion(void *context, const struct cox_completion *completion)
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

/* Until something completed, or a moment has passed. */
static void load_wait(struct load *load, uint64_t until_ns)
{
    const struct timespec until = {(time_t)(until_ns / COX_NSEC_PER_SEC),
                                   (long)(until_ns % COX_NSEC_PER_SEC)};
    pthread_mutex_lock(&load->lock);
    pthread_cond_timedwait(&load->changed, &load->lock, &until);
    pthread_mutex_unlock(&load->lock);
}

/* Until so many have completed. Returns how many have when the time is up. */
static size_t load_await_count(struct load *load, size_t count)
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

/* Returns what submit said. */
static int load_submit(struct test_group *group, struct load *load)
{
    struct checked_request request;
    struct flight *flight = &load->flights[load->submitted];
    request_make(&request, CHECKED_ECHO, 0, 0);
    *flight = (struct flight){
        .number = request.number, .deadline_ns = cox_deadline_after_ms(DEADLINE_MS), .load = load};
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = flight->deadline_ns,
                                               .request_context = flight};
    struct cox_error err = {0};
    int r = cox_executor_submit_opaque(test_group_executor(group), &request, sizeof request,
                                       &options, NULL, &err);
    if (r < 0 || (r && !err.text[0]))
        fail_msg("submit: %d: %s", r, err.text);
    load->submitted += r == 0;
    return r;
}

static void call_typed(struct test_group *group, const Coxswain__ExecuteRequest *request)
{
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = cox_deadline_after_ms(DEADLINE_MS)};
    struct cox_error err = {0};
    int r = cox_executor_call(test_group_executor(group), request, &options, NULL, NULL, &err);
    if (!punctual_note(&requests, options.deadline_ns))
        fail_msg("a call of type %d ended too late: %d %s", (int)request->execute_type, r,
                 err.text);
    if (r < 0 || (r && !err.text[0]))
        fail_msg("a call of type %d ended with %d: %s", (int)request->execute_type, r, err.text);
}

/* Requests that are unpacked on both sides: a step that announces one sequence, an init, and other
 * channels. */
static void call_messages(struct test_group *group, unsigned which)
{
    static const Coxswain__ExecuteType types[] = {
        COXSWAIN__EXECUTE_TYPE__MODEL_INFER,          COXSWAIN__EXECUTE_TYPE__MODEL_INIT,
        COXSWAIN__EXECUTE_TYPE__PD_LINK_STATUS_QUERY, COXSWAIN__EXECUTE_TYPE__PAUSE_COMMAND_EXEC,
        COXSWAIN__EXECUTE_TYPE__KV_TRANSFER,
    };
    int32_t tokens[] = {1, 2, 3}, blocks[] = {0};
    uint32_t row_slot[] = {0}, row_position[] = {0}, row_token_count[] = {3};
    Coxswain__StepBlockTable table = COXSWAIN__STEP_BLOCK_TABLE__INIT;
    Coxswain__StepBlockTable *tables[] = {&table};
    Coxswain__StepSequence sequence = COXSWAIN__STEP_SEQUENCE__INIT;
    Coxswain__StepSequence *sequences[] = {&sequence};
    Coxswain__StepDelta delta = COXSWAIN__STEP_DELTA__INIT;
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = types[which % (sizeof types / sizeof types[0])];
    if (request.execute_type == COXSWAIN__EXECUTE_TYPE__MODEL_INFER) {
        table.n_blocks = 1, table.blocks = blocks;
        sequence.has_seq_id = 1, sequence.seq_id = 7;
        sequence.n_tokens = 3, sequence.tokens = tokens;
        sequence.n_tables = 1, sequence.tables = tables;
        delta.n_announced = 1, delta.announced = sequences;
        delta.n_row_slot = delta.n_row_position = delta.n_row_token_count = 1;
        delta.row_slot = row_slot, delta.row_position = row_position;
        delta.row_token_count = row_token_count;
        model.step = &delta;
        request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
        request.execute_model_request = &model;
    }
    call_typed(group, &request);
}

/* Requests until the time is up or a rank is dead; then every one has ended, once, and was judged.
 */
static void load_run(struct test_group *group, struct load *load, uint64_t time_ms)
{
    uint64_t end_ns = cox_deadline_after_ms(time_ms);
    assert_int_equal(cox_executor_set_handler(test_group_executor(group), COX_CHANNEL_EXECUTE,
                                              on_completion, NULL),
                     0);
    for (unsigned i = 0; cox_now_ns() < end_ns && load->submitted < IN_FLIGHT_MAX; i++) {
        if (i % 16 == 15)
            call_messages(group, i / 16);
        int r = load_submit(group, load);
        if (r == COX_PEER_DEAD)
            break;
        if (r)
            load_wait(load, cox_deadline_after_ms(2));
    }
    load_await_count(load, load->submitted);
    pthread_mutex_lock(&load->lock);
    size_t completed = load->completed, late = load->late, twice = load->twice;
    size_t foreign = load->foreign, odd = load->odd;
    pthread_mutex_unlock(&load->lock);
    if (completed != load->submitted || late || twice || foreign || odd)
        fail_msg(
            "of %zu requests %zu completed, %zu too late, %zu more than once, %zu with the reply of another, %zu with an odd status (%s)",
            load->submitted, completed, late, twice, foreign, odd, load->text);
}

/* ---- seeds ---- */

static void next_group_works(uint32_t rank_count, const char *name)
{
    struct test_group *group = group_start(rank_count, name);
    expect_own(group);
    expect_own(group);
    group_end(group);
}

static void print_load(const char *who, uint32_t rank_count, uint64_t seed, const struct load *load)
{
    print_message("%s, %" PRIu32 " ranks, seed %" PRIu64
                  ": %zu requests: %zu good, %zu failed, %zu with bytes written over\n",
                  who, rank_count, seed, load->submitted, load->good, load->failed, load->spoilt);
}

static void stranger_seed(uint32_t rank_count, uint64_t seed)
{
    static struct load load;
    char name[64], argument[96];
    struct test_group *group = group_start(rank_count, test_unique_name(name));
    expect_own(group);
    snprintf(argument, sizeof argument, "%" PRIu64 ":%s", seed, name);
    struct test_helper meddler = test_helper_start("meddle", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    load_init(&load);
    load_run(group, &load, SEED_MS);
    assert_int_equal(test_helper_wait(&meddler), 0);
    print_load("a stranger", rank_count, seed, &load);
    /* A meddler that overwrote only payloads has harmed only requests in flight. */
    if (!(meddler_temper(seed).targets & MEDDLE_CONTROL) && !group_works(group))
        fail_msg("payloads were written over, and the group does not work any more");
    group_end(group);
    load_deinit(&load);
    next_group_works(rank_count, name);
}

static void goodbye_completed(void *context, const struct cox_completion *completion)
{
    atomic_store((_Atomic int *)context, completion->status);
}

/* The workers are halted while the frame of a step is written over with a finalize of its length.
 */
static void p10_a_frame_turned_into_a_goodbye_ends_no_process(void **state)
{
    (void)state;
    char name[64], path[128];
    struct test_group *group = group_start(2, test_unique_name(name));
    struct cox_executor *executor = test_group_executor(group);
    for (uint32_t rank = 0; rank < 2; rank++)
        test_stop_process(cox_executor_pid(executor, rank));
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = request.has_trace_id = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.trace_id = UINT64_MAX;
    const struct cox_submit_options options = {
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_ALL,
        .deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS),
    };
    uint64_t sequence;
    _Atomic int status = -1;
    assert_int_equal(
        cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, goodbye_completed, &status), 0);
    assert_int_equal(cox_executor_submit(executor, &request, &options, &sequence, NULL), 0);

    /* execute_type 2, then an unknown field up to the same length. */
    uint8_t goodbye[64] = {0x08, 0x02, 0x7a};
    size_t length = cox_wire_request_size(&request);
    assert_in_range(length, 5, sizeof goodbye);
    goodbye[3] = (uint8_t)(length - 4);
    size_t frame_size = cox_executor_request_size_max(executor, COX_CHANNEL_EXECUTE) + 4;
    snprintf(path, sizeof path, "/dev/shm/%s_execute_request", name);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    off_t offset = (off_t)(frame_size * (sequence % 4) + 4);
    assert_int_equal(pwrite(fd, goodbye, length, offset), length);
    close(fd);

    for (uint32_t rank = 0; rank < 2; rank++)
        kill(cox_executor_pid(executor, rank), SIGCONT);
    while (atomic_load(&status) == -1) /* ends with the deadline at the latest */
        sched_yield();
    assert_int_equal(atomic_load(&status), COX_CORRUPT);
    expect_own(group);
    group_end(group);
}

static void rank_seed(uint32_t rank_count, uint64_t seed)
{
    static struct load load;
    char name[64];
    struct test_group *group = group_start(rank_count, test_unique_name(name));
    expect_own(group);
    call_checked(group, CHECKED_MEDDLE, (uint32_t)(seed / 2 % rank_count), seed, DEADLINE_MS, NULL);
    load_init(&load);
    load_run(group, &load, SEED_MS);
    print_load("a rank", rank_count, seed, &load);
    group_end(group);
    load_deinit(&load);
    next_group_works(rank_count, name);
}

/* Every temper meets both sizes. */
static uint32_t seed_ranks(uint64_t seed)
{
    return (seed + seed / 8) % 2 ? 2 : 4;
}

static void p10_a_process_that_overwrites_everything_harms_no_group(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 16; seed++)
        stranger_seed(seed_ranks(seed), seed);
}

static void p10_a_rank_that_writes_over_everything_harms_no_other(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 16; seed++)
        rank_seed(seed_ranks(seed), seed);
}

/* The stranger is there before the group is, and begins while ranks attach. */
static void early_seed(uint32_t rank_count, uint64_t seed)
{
    char name[64], argument[96];
    struct test_group *group = NULL;
    struct cox_error err = {0};
    snprintf(argument, sizeof argument, "%" PRIu64 ":%s", seed, test_unique_name(name));
    struct test_helper meddler = test_helper_start("meddle_early", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .rank_count = rank_count,
        .workers.command = command,
        .memory.keep_names = true,
        .times.start_timeout_ms = START_MS,
        .times.finalize_ms = FINALIZE_MS,
        .times.term_ms = TERM_MS,
    };
    uint64_t begin_ns = cox_now_ns();
    int r = test_group_try(&options, &group, &err);
    if (!punctual_note(&starts, begin_ns + START_MS * COX_NSEC_PER_MSEC))
        fail_msg("start took %" PRIu64 " ms", (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC);
    print_message("a stranger at the start, %" PRIu32 " ranks, seed %" PRIu64 ": %s\n", rank_count,
                  seed, r ? err.text : "started");
    if (r < 0 || r >= COX_STATUS_COUNT || strstr(err.text, CHECKED_CRASH) ||
        strstr(err.text, "signal"))
        fail_msg("start: %d: %s", r, err.text);
    if (r == 0) {
        group_works(group); /* or not; it ends in time */
        group_end(group);
    }
    assert_int_equal(test_helper_wait(&meddler), 0);
    next_group_works(rank_count, name);
}

static void p10_a_process_that_writes_while_ranks_attach_harms_no_group(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 16; seed++)
        early_seed(seed_ranks(seed), seed);
}

/* ---- flips ---- */

static void shuffle(uint32_t *items, uint32_t count, uint64_t state)
{
    for (uint32_t i = count; i > 1; i--) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        uint32_t j = (uint32_t)(state % i), item = items[i - 1];
        items[i - 1] = items[j];
        items[j] = item;
    }
}

static void control_attach(struct cox_control *control, const char *name)
{
    struct cox_error err = {0};
    if (cox_control_attach(control, name, &err))
        fail_msg("%s", err.text);
}

/* Every byte, in an order of its own, as far as the time goes; all of its bits at once, so that it
 * is another one. */
static void p10_b14_a_flipped_byte_gives_an_error_at_most(void **state)
{
    enum { RANK_COUNT = 2 };
    static uint32_t
        offsets[sizeof(struct cox_layout_control) + RANK_COUNT * sizeof(struct cox_layout_rank)];
    const uint32_t count = sizeof offsets / sizeof offsets[0];
    uint32_t statuses[COX_STATUS_COUNT] = {0}, done = 0, restarts = 0;
    uint64_t end_ns = cox_deadline_after_ms(FLIPS_MS);
    char name[64];
    (void)state;
    for (uint32_t i = 0; i < count; i++)
        offsets[i] = i;
    shuffle(offsets, count, 4711);
    test_unique_name(name);
    struct test_group *group = group_start(RANK_COUNT, name);
    struct cox_control control = COX_CONTROL_NONE;
    control_attach(&control, name);
    expect_own(group);
    for (; done < count && cox_now_ns() < end_ns; done++) {
        enum verdict verdict = OWN;
        _Atomic uint8_t *byte = (_Atomic uint8_t *)control.region.base + offsets[done];
        uint8_t bits = (uint8_t)(done % 2 ? 0xff : 1u << done / 2 % 8);
        /* relaxed: a meddler's byte has no partner. */
        atomic_fetch_xor_explicit(byte, bits, memory_order_relaxed);
        int r = call_checked(group, CHECKED_ECHO, 0, 0, DEADLINE_MS, &verdict);
        statuses[r]++;
        if (verdict != OWN)
            fail_msg("byte %" PRIu32 " flipped by %02x: a reply that is none", offsets[done], bits);
        if (group_works(group))
            continue;
        group_end(group);
        cox_control_close(&control);
        group = group_start(RANK_COUNT, name);
        control_attach(&control, name);
        expect_own(group);
        restarts++;
    }
    group_end(group);
    cox_control_close(&control);
    print_message("%" PRIu32 " of %" PRIu32 " bytes flipped, %" PRIu32 " groups given up;", done,
                  count, restarts);
    /* There is no byte that a group does not get over; a machine that is too busy for that is
     * not the group's fault. */
    assert_true(restarts < 4);
    for (int s = 0; s < COX_STATUS_COUNT; s++)
        if (statuses[s])
            print_message(" %" PRIu32 " %s;", statuses[s], cox_status_text(s));
    print_message("\n");
    assert_true(done > 100);
}

/* Flipping any bit of the abort line ends no group, on no channel; only the coordinator's store
 * does. */
static void p10_a_bit_of_the_abort_line_ends_no_process(void **state)
{
    char name[64];
    (void)state;
    test_unique_name(name);
    struct test_group *group = group_start(2, name);
    struct cox_control control = COX_CONTROL_NONE;
    control_attach(&control, name);
    _Atomic uint8_t *line = (_Atomic uint8_t *)&control.layout->abort;
    for (uint32_t bit = 0; bit < 8 * sizeof control.layout->abort; bit++) {
        /* relaxed: a meddler's byte has no partner. */
        atomic_fetch_xor_explicit(&line[bit / 8], (uint8_t)(1u << bit % 8), memory_order_relaxed);
        expect_own(group);
        struct cox_link_status links;
        struct cox_error err = {0};
        int r = cox_executor_link_status(test_group_executor(group),
                                         cox_deadline_after_ms(TEST_PATIENCE_MS), &links, &err);
        if (r != COX_REJECTED) /* these workers know no links, and say so */
            fail_msg("link status: %d: %s", r, err.text);
        atomic_fetch_xor_explicit(&line[bit / 8], (uint8_t)(1u << bit % 8), memory_order_relaxed);
    }
    cox_state_abort(&control);
    enum verdict verdict;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    int r = 0;
    while ((r == 0 || r == COX_TIMEOUT) && cox_now_ns() < deadline_ns)
        r = call_checked(group, CHECKED_ECHO, 0, 0, DEADLINE_MS, &verdict);
    assert_int_equal(r, COX_PEER_DEAD);
    group_end(group);
    cox_control_close(&control);
}

/* So many have ended in time, each once. */
static void load_await(struct load *load, size_t count)
{
    assert_int_equal(load_await_count(load, count), count);
    assert_int_equal(load->late + load->twice + load->foreign + load->odd, 0);
}

/* Every word in which a side publishes its progress, changed by one bit or more, while ranks are
 * idle and while they owe a reply: its writer stores it again. */
static void p10_overwritten_words_are_stored_again(void **state)
{
    static struct load load;
    char name[64];
    (void)state;
    test_unique_name(name);
    struct test_group *group = group_start(2, name);
    struct cox_control control = COX_CONTROL_NONE;
    control_attach(&control, name);
    struct cox_layout_rank_line *line = cox_state_line(&control, 1, COX_CHANNEL_EXECUTE);
    struct cox_layout_channel_state *shared = cox_state_channel(&control, COX_CHANNEL_EXECUTE);
    _Atomic uint64_t *const words[][2] = {{&shared->published, NULL},
                                          {&line->taken, NULL},
                                          {&line->returned, NULL},
                                          {&line->done, NULL},
                                          {&line->returned, &line->done}};
    pid_t pid = cox_executor_pid(test_group_executor(group), 1);
    assert_int_equal(cox_executor_set_handler(test_group_executor(group), COX_CHANNEL_EXECUTE,
                                              on_completion, NULL),
                     0);
    for (size_t w = 0; w < sizeof words / sizeof words[0]; w++)
        for (uint64_t mask = 1; mask < 256; mask = mask == 128 ? 0xff : mask * 2)
            for (int busy = 0; busy < 2; busy++) {
                expect_own(group);
                load_init(&load);
                if (busy) {
                    test_stop_process(pid);
                    assert_int_equal(load_submit(group, &load), 0);
                    assert_int_equal(load_submit(group, &load), 0);
                }
                /* relaxed: a meddler's word has no partner. Downwards, where the bits are set. */
                for (size_t i = 0; i < 2 && words[w][i]; i++)
                    atomic_fetch_and_explicit(words[w][i], ~mask, memory_order_relaxed);
                if (busy)
                    assert_int_equal(kill(pid, SIGCONT), 0);
                if (!group_works(group))
                    fail_msg("word %zu without bits %02x, %s: the group does not work any more", w,
                             (unsigned)mask, busy ? "busy" : "idle");
                load_await(&load, load.submitted);
                load_deinit(&load);
            }
    group_end(group);
    cox_control_close(&control);
}

/* A rank that replied sleeps; before its reply is read, `done` is reset. */
static void p10_a_reply_that_was_reset_is_stored_again(void **state)
{
    char name[64];
    static struct load load;
    (void)state;
    test_unique_name(name);
    struct test_group *group = group_start(2, name);
    struct cox_control control = COX_CONTROL_NONE;
    control_attach(&control, name);
    struct cox_layout_rank_line *line = cox_state_line(&control, 0, COX_CHANNEL_EXECUTE);
    struct cox_executor *executor = test_group_executor(group);
    _Atomic uint32_t *sleeping = &executor->collectors[COX_CHANNEL_EXECUTE].sleeping;
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, on_completion, NULL),
                     0);
    for (int round = 0; round < 10; round++) {
        expect_own(group);
        load_init(&load);
        uint64_t before = atomic_load(&line->done);
        for (uint32_t rank = 0; rank < 2; rank++)
            test_stop_process(cox_executor_pid(executor, rank));
        assert_int_equal(load_submit(group, &load), 0);
        /* The collector sleeps on rank 1, and looks at rank 0 once a slice only. */
        while (atomic_load(sleeping) != 2)
            sched_yield();
        assert_int_equal(kill(cox_executor_pid(executor, 0), SIGCONT), 0);
        while (atomic_load(&line->done) == before)
            sched_yield();
        atomic_store(&line->done, before);
        assert_int_equal(kill(cox_executor_pid(executor, 1), SIGCONT), 0);
        load_await(&load, 1); /* in vain; the next request shows that a rank owes a reply */
        if (!group_works(group))
            fail_msg("round %d: the group does not work any more", round);
        load_deinit(&load);
    }
    group_end(group);
    cox_control_close(&control);
}

/* ---- cost ---- */

static uint64_t cpu_ns(pid_t pid)
{
    clockid_t clock;
    struct timespec used;
    assert_int_equal(clock_getcpuclockid(pid, &clock), 0);
    assert_int_equal(clock_gettime(clock, &used), 0);
    return (uint64_t)used.tv_sec * COX_NSEC_PER_SEC + (uint64_t)used.tv_nsec;
}

/* This measures a span of time: it must not wait for a rank. */
static void p10_p5_a_wild_sequence_number_costs_neither_cpu_nor_hearing(void **state)
{
    enum { STRETCH_MS = 300 };
    char name[64];
    (void)state;
    struct test_group *group = group_start(2, test_unique_name(name));
    expect_own(group);
    call_checked(group, CHECKED_OVERCOUNT, 1, 0, DEADLINE_MS, NULL);
    uint64_t before[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        before[rank] = cpu_ns(cox_executor_pid(test_group_executor(group), rank));
    uint64_t end_ns = cox_deadline_after_ms(STRETCH_MS);
    const struct timespec until = {(time_t)(end_ns / COX_NSEC_PER_SEC),
                                   (long)(end_ns % COX_NSEC_PER_SEC)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
    for (uint32_t rank = 0; rank < 2; rank++) {
        uint64_t used_ms =
            (cpu_ns(cox_executor_pid(test_group_executor(group), rank)) - before[rank]) /
            COX_NSEC_PER_MSEC;
        if (used_ms > STRETCH_MS / 4)
            fail_msg("rank %" PRIu32 " used %" PRIu64 " ms of CPU in %d ms", rank, used_ms,
                     STRETCH_MS);
    }
    /* Nor did a rank follow the number to a request that never comes. */
    if (!group_works(group))
        fail_msg("the group is deaf");
    group_end(group);
}

/* ---- semaphores ---- */

/* Requests under deadlines while another process writes all kinds of garbage over all semaphores of
 * the group; kind: see semaphores_main. */
static void semaphores_seed(uint32_t rank_count, unsigned kind)
{
    static struct load load;
    char name[64], argument[96];
    struct test_group *group = group_start(rank_count, test_unique_name(name));
    expect_own(group);
    snprintf(argument, sizeof argument, "%u:%s", kind, name);
    struct test_helper meddler = test_helper_start("semaphores", argument);
    char ready;
    assert_int_equal(read(meddler.out, &ready, 1), 1);
    load_init(&load);
    load_run(group, &load, SEED_MS);
    print_load("garbage in semaphores", rank_count, kind, &load);
    if (kind % 2)
        assert_int_equal(test_helper_wait(&meddler), 0);
    /* What it left there does no harm. */
    if (kind % 2 && !group_works(group))
        fail_msg("semaphores were written over, and the group does not work any more");
    group_end(group); /* with the even ones while it still writes */
    if (kind % 2 == 0)
        assert_int_equal(test_helper_wait(&meddler), 0);
    load_deinit(&load);
    next_group_works(rank_count, name);
}

static void g2a_garbage_in_semaphores_ends_no_process(void **state)
{
    (void)state;
    for (unsigned kind = 0; kind < 10; kind++)
        semaphores_seed(kind % 4 < 2 ? 2 : 4, kind);
}

/* ---- programs ---- */

#define SEMAPHORE_COUNT_MAX 256

static bool input_ended(void)
{
    struct pollfd end = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&end, 1, 0) != 0;
}

struct semaphores {
    uint8_t *bytes[SEMAPHORE_COUNT_MAX];
    size_t count;
};

static int semaphores_map(struct semaphores *semaphores, const char *name)
{
    char prefix[128], path[600];
    snprintf(prefix, sizeof prefix, "sem.%s_", name);
    DIR *folder = opendir("/dev/shm");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 ||
            semaphores->count == SEMAPHORE_COUNT_MAX)
            continue;
        snprintf(path, sizeof path, "/dev/shm/%s", entry->d_name);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *map = fd < 0 ? MAP_FAILED
                           : mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED)
            semaphores->bytes[semaphores->count++] = map;
        close(fd);
    }
    if (folder)
        closedir(folder);
    return semaphores->count > 0 ? 0 : -1;
}

/* One semaphore: 0 and 1 zeros, 2 and 3 all ones, 4 and 5 random, 6 and 7 one random byte, 8 and 9
 * only the word in which glibc stores whether it is shared. */
static void semaphore_spoil(uint8_t *bytes, unsigned kind, uint64_t *random)
{
    uint8_t garbage[sizeof(sem_t)];
    for (size_t i = 0; i < sizeof garbage; i++) {
        *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407;
        garbage[i] = kind / 2 == 0 ? 0 : kind / 2 == 1 ? 0xff : (uint8_t)(*random >> 56);
    }
    if (kind / 2 == 3)
        bytes[garbage[0] % sizeof garbage] = garbage[1];
    else if (kind / 2 == 4)
        memcpy(bytes + 8, garbage, 4);
    else
        memcpy(bytes, garbage, sizeof garbage);
}

/* Writes until its standard input ends. argument: "KIND:NAME". */
static int semaphores_main(const char *argument)
{
    static struct semaphores semaphores;
    char *name;
    unsigned kind = (unsigned)strtoul(argument, &name, 10);
    uint64_t random = kind + 1;
    if (semaphores_map(&semaphores, name + 1) || write(STDOUT_FILENO, "", 1) != 1)
        return 1;
    while (!input_ended())
        for (size_t i = 0; i < semaphores.count; i++)
            semaphore_spoil(semaphores.bytes[i], kind, &random);
    return 0;
}

/* Writes until its standard input ends. argument: "SEED:NAME". early: the group is still to come.
 */
static int meddle_main(const char *argument, bool early)
{
    struct meddler meddler;
    char *name;
    uint64_t seed = strtoull(argument, &name, 10);
    if (early && write(STDOUT_FILENO, "", 1) != 1)
        return 1;
    int r;
    do {
        struct cox_error err = {0};
        r = meddler_attach(&meddler, name + 1, seed, &err);
        if (r && early && input_ended())
            return 0;
        if (r && !early)
            fprintf(stderr, "meddler: %s\n", err.text);
    } while (r && early);
    if (r || (!early && write(STDOUT_FILENO, "", 1) != 1))
        return 1;
    meddler_run(&meddler, STDIN_FILENO, NULL);
    meddler_detach(&meddler);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return checked_worker_main(argc, argv);
    if (argc > 2 && strcmp(argv[1], "semaphores") == 0)
        return semaphores_main(argv[2]);
    if (argc > 2 && strncmp(argv[1], "meddle", 6) == 0)
        return meddle_main(argv[2], strcmp(argv[1], "meddle_early") == 0);
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        return 1;
    const struct CMUnitTest tests[] = {
        TEST(p10_a_frame_turned_into_a_goodbye_ends_no_process),
        TEST(p10_b14_a_flipped_byte_gives_an_error_at_most),
        TEST(p10_a_process_that_overwrites_everything_harms_no_group),
        TEST(p10_a_rank_that_writes_over_everything_harms_no_other),
        TEST(p10_a_process_that_writes_while_ranks_attach_harms_no_group),
        TEST(p10_a_bit_of_the_abort_line_ends_no_process),
        TEST(p10_overwritten_words_are_stored_again),
        TEST(p10_a_reply_that_was_reset_is_stored_again),
        TEST(g2a_garbage_in_semaphores_ends_no_process),
        TEST(p10_p5_a_wild_sequence_number_costs_neither_cpu_nor_hearing),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    const int late = punctual_check(&requests) + punctual_check(&starts) + punctual_check(&stops);
    return failed ? failed : late;
}
