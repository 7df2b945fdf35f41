/*
 * hostile_sealed_test: sealed groups in which one rank overwrites every byte that it can reach: its
 * own memory (identity, lines, tags, slots) and the wake memory. What must hold whatever it writes:
 * no process crashes, every request ends by its deadline, stop is bounded; and the replies of the
 * other ranks, to requests with and without it, are correct and arrive. Its own replies may be
 * anything.
 */
#include "punctual.h"
#include "testing.h"

#include "channel/attach/sealed/futex_gate.h"
#include "channel/shm/layout.h"
#include "channel/shm/state.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include <coxswain/worker.h>

#define RANK_COUNT 3
#define HOSTILE 1 /* the rank that writes */
#define CRASH "CRASHED"
#define HOLES 8 /* tempers from here on */

static struct punctual requests = {.what = "requests"}, stops = {.what = "stops"};

/* ---- the worker: echoes its number and rank; one of them writes when told to ---- */

enum order { ECHO, FLIP, MEDDLE, IMPOSTOR };

struct request {
    uint64_t number;
    uint32_t order;
    uint32_t bits;
    /* FLIP: in its memory, then in the wake memory; MEDDLE: a seed */
    uint64_t offset;
};

struct reply {
    uint64_t number, rank;
};

struct hostile {
    struct cox_worker_options options;
    uint8_t *own, *wake;
    uint64_t own_size, wake_size;
    uint64_t random;
    unsigned temper;
    /* from then on, to its end */
    _Atomic bool meddles;
};

static void on_signal(int number)
{
    static const char text[] = "\n" CRASH "\n";
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    signal(number, SIG_DFL);
    raise(number);
}

/* Where the library has mapped them; a rank can find that out by itself. A part of the wake memory,
 * the hints of the rank group, is mapped a second time, at any address. */
static int find_memory(struct hostile *hostile)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        uint64_t begin, end, offset;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64, &begin, &end, &offset) != 3 ||
            offset)
            continue;
        if (strstr(line, "memfd:cox_rank")) {
            hostile->own = (uint8_t *)(uintptr_t)begin;
            hostile->own_size = end - begin;
        } else if (strstr(line, "memfd:cox_wake")) {
            hostile->wake = (uint8_t *)(uintptr_t)begin;
            hostile->wake_size = end - begin;
        }
    }
    if (maps)
        fclose(maps);
    return hostile->own && hostile->wake ? 0 : COX_NOT_FOUND;
}

static void flip(uint8_t *bytes, uint64_t offset, uint32_t bits)
{
    /* relaxed: a meddler's byte has no partner. */
    atomic_fetch_xor_explicit((_Atomic uint8_t *)bytes + offset, (uint8_t)bits,
                              memory_order_relaxed);
}

static uint64_t next(struct hostile *hostile)
{
    uint64_t *state = &hostile->random;
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* Tempers: the wake memory alone; its lines; its slots; everything; and with a pause or without.
 * Then the same with holes instead of bits, where others read zeroes, and calls that meet one fail:
 * the wake memory alone, and its own as well. */
static void *meddle(void *argument)
{
    struct hostile *hostile = argument;
    const struct timespec pause = {0, 100000}, answered = {0, 5000000};
    while (hostile->meddles) {
        unsigned target =
            hostile->temper % 4 == 3 ? (unsigned)(next(hostile) % 3) : hostile->temper % 4;
        uint64_t random = next(hostile), bits = next(hostile);
        if (hostile->temper >= HOLES) {
            madvise(hostile->wake, hostile->wake_size, MADV_REMOVE);
            if (target) {
                madvise(hostile->own, hostile->own_size, MADV_REMOVE);
                /* A reply of it is waited for now and then: one that never comes is a case of the
                 * others' tests. */
                nanosleep(&answered, NULL);
            }
        } else if (target == 0)
            flip(hostile->wake, random % sizeof(struct cox_layout_wake), (uint32_t)bits);
        else if (target == 1)
            flip(hostile->own, random % sizeof(struct cox_layout_rank), (uint32_t)bits);
        else
            flip(hostile->own, 4096 + random % (hostile->own_size - 4096), (uint32_t)bits);
        if (hostile->temper / 4 % 2)
            nanosleep(&pause, NULL);
    }
    return NULL;
}

/* A report in its own slot that says to be rank 0's. */
static int impostor(struct hostile *hostile, const struct cox_geometry *geometry)
{
    Coxswain__ExecuteResponse report = COXSWAIN__EXECUTE_RESPONSE__INIT;
    uint8_t *slot =
        hostile->own + cox_geometry_slot_offset(geometry, COX_CHANNEL_ERROR, HOSTILE, 0);
    struct cox_layout_rank *block = (struct cox_layout_rank *)(void *)hostile->own;
    struct cox_layout_wake *wake = (struct cox_layout_wake *)(void *)hostile->wake;
    size_t length;
    report.has_rank = report.has_status = 1;
    report.rank = 0;
    report.status = 1;
    report.error_text = (char *)(uintptr_t) "it was not me";
    int r = cox_wire_response_pack(&report, slot + COX_PREFIX_SIZE, 512, &length);
    uint32_t prefix = (uint32_t)length;
    memcpy(slot, &prefix, sizeof prefix);
    atomic_fetch_add(&block->lines[COX_CHANNEL_ERROR].done, 1);
    struct cox_gate gate;
    cox_gate_bind(&gate, NULL, &wake->channels[COX_CHANNEL_ERROR], geometry->depth, false);
    cox_gate_post(&gate, HOSTILE, COX_WAKEUP_RESPONSE_CONSUME);
    return r;
}

static struct cox_geometry own_geometry(void)
{
    const struct cox_geometry_choice choice = {.mode = &cox_attach_sealed};
    struct cox_geometry geometry;
    if (cox_geometry_resolve(RANK_COUNT, &choice, &geometry, NULL))
        abort();
    return geometry;
}

static int obey(struct hostile *hostile, const struct request *request)
{
    pthread_t thread;
    int r = find_memory(hostile);
    if (r || request->order == ECHO)
        return r;
    const struct cox_geometry geometry = own_geometry();
    if (request->order == IMPOSTOR)
        return impostor(hostile, &geometry);
    if (request->order == FLIP) {
        bool own = request->offset < hostile->own_size;
        flip(own ? hostile->own : hostile->wake,
             own ? request->offset : request->offset - hostile->own_size, request->bits);
        return 0;
    }
    if (hostile->meddles)
        return 0;
    hostile->temper = (unsigned)request->offset;
    hostile->random = request->offset * UINT64_C(0x9e3779b97f4a7c15) | 1;
    hostile->meddles = true;
    r = -pthread_create(&thread, NULL, meddle, hostile);
    return r ? r : -pthread_detach(thread);
}

static int on_opaque(void *context, const uint8_t *bytes, size_t size, uint8_t *reply,
                     size_t capacity, size_t *ret_size, struct cox_error *err)
{
    struct hostile *hostile = context;
    struct request request;
    if (size != sizeof request || capacity < sizeof(struct reply))
        return cox_fail(err, COX_CORRUPT, "a request of %zu bytes", size);
    memcpy(&request, bytes, sizeof request);
    int r = hostile->options.rank == HOSTILE && request.order ? obey(hostile, &request) : 0;
    if (r)
        return cox_fail(err, r, "cannot do harm: %s", cox_status_text(r));
    const struct reply answer = {request.number, hostile->options.rank};
    memcpy(reply, &answer, sizeof answer);
    *ret_size = sizeof answer;
    return 0;
}

static int worker_main(int argc, char **argv)
{
    static const int numbers[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = on_opaque};
    /* the meddling thread uses it until the process ends */
    static struct hostile hostile = {.options = COX_WORKER_OPTIONS_INIT};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        signal(numbers[i], on_signal);
    return test_worker_main(argc, argv, &hostile.options, &callbacks, &hostile, NULL);
}

/* ---- the group ---- */

static struct test_group *group_start(void)
{
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .workers.command = test_own_command,
        .memory.attach = COX_ATTACH_SEALED,
        .times.finalize_ms = 300 * SLOWNESS,
        .times.term_ms = 300 * SLOWNESS,
    };
    return test_group_start(RANK_COUNT, &options);
}

static void group_end(struct test_group *group)
{
    uint64_t begin_ns = cox_now_ns();
    cox_executor_stop(test_group_executor(group));
    if (!punctual_note(&stops, begin_ns + 600 * SLOWNESS * COX_NSEC_PER_MSEC))
        fail_msg("stop took %" PRIu64 " ms", (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        if (rank != HOSTILE && test_count_lines(group, (int)rank, CRASH))
            fail_msg("rank %" PRIu32 " crashed", rank);
    test_group_free(group);
}

/* What each of the others said. */
struct judged {
    uint64_t number;
    /* every rank that was asked, except the hostile one, replied as it should */
    bool whole;
    /* one of them did otherwise */
    bool harmed;
    char text[256];
};

static void judge(void *context, const struct cox_completion *completion)
{
    struct judged *judged = context;
    judged->whole = true;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        struct reply reply = {0};
        if (rank == HOSTILE || result->outcome == COX_OUTCOME_NOT_ASKED)
            continue;
        if (result->bytes && result->size == sizeof reply)
            memcpy(&reply, result->bytes, sizeof reply);
        bool own = reply.number == judged->number && reply.rank == rank;
        judged->whole &= result->outcome == COX_OUTCOME_OK && own;
        if (result->outcome == COX_OUTCOME_ERROR || result->outcome == COX_OUTCOME_DEAD ||
            (result->outcome == COX_OUTCOME_OK && !own)) {
            judged->harmed = true;
            snprintf(judged->text, sizeof judged->text,
                     "rank %" PRIu32 ", outcome %d, number %" PRIu64 " for %" PRIu64 ": %s", rank,
                     (int)result->outcome, reply.number, judged->number,
                     result->text ? result->text : "");
        }
    }
}

static char call_error[1024]; /* of the last call */

/* Returns the status; *ret_whole: the others all answered. Fails the test when it ends too late, or
 * when another rank than the hostile one is said to have failed. */
static int call(struct test_group *group, enum order order, uint64_t offset, uint32_t bits,
                bool without, uint64_t timeout_ms, bool *ret_whole)
{
    static uint64_t numbers;
    struct request request = {++numbers, order, bits, offset};
    struct judged judged = {.number = request.number};
    struct cox_rank_set asked = {{((UINT64_C(1) << RANK_COUNT) - 1) & ~(UINT64_C(1) << HOSTILE)}};
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .asked = without ? &asked : NULL,
                                               .deadline_ns = cox_deadline_after_ms(timeout_ms)};
    int r = cox_executor_call_opaque(test_group_executor(group), &request, sizeof request, &options,
                                     judge, &judged, test_err());
    if (!punctual_note(&requests, options.deadline_ns))
        fail_msg("a call ended too late: %d %s", r, test_error.text);
    if (r < 0 || r >= COX_STATUS_COUNT || (r && !test_error.text[0]))
        fail_msg("a call ended with %d: %s", r, test_error.text);
    if (judged.harmed)
        fail_msg("another rank was harmed: %s", judged.text);
    if (ret_whole)
        *ret_whole = r == 0 && judged.whole;
    snprintf(call_error, sizeof call_error, "%s", test_error.text);
    return r;
}

/* The others reply, whatever the hostile one still owes: late ranks are waited for. */
static void expect_others(struct test_group *group)
{
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    bool whole = false;
    int r;
    do {
        r = call(group, ECHO, 0, 0, true, TEST_PATIENCE_MS, &whole);
        if (r)
            sched_yield();
    } while ((r == COX_LATE || r == COX_FULL) && cox_now_ns() < deadline_ns);
    if (r || !whole)
        fail_msg("the others: %d, %s: %s", r, whole ? "whole" : "not whole", call_error);
}

/* All answer, at the third try at the latest. */
static bool group_works(struct test_group *group)
{
    bool whole = false;
    for (int i = 0; i < 3; i++)
        if (call(group, ECHO, 0, 0, false, DEADLINE_MS, &whole) == 0 && whole)
            return true;
    return false;
}

/* Every byte of its block and of the wake memory, and the first of its slots, in an order of its
 * own: all bits of it, and one. */
TEST(p10_b14_a_rank_s_flipped_byte_harms_no_other)
{
    enum {
        BLOCK = sizeof(struct cox_layout_rank),
        WAKE = sizeof(struct cox_layout_wake),
        SLOT_BYTES = 64,
        SLOTS = COX_TWO_WAY_COUNT + 1,
        COUNT = BLOCK + WAKE + SLOTS * SLOT_BYTES,
    };
    static uint64_t places[COUNT];
    static uint32_t order[COUNT];
    uint32_t statuses[COX_STATUS_COUNT] = {0}, done = 0, restarts = 0;
    const struct cox_geometry geometry = own_geometry();
    const uint64_t own_size = cox_geometry_rank_memory_size(&geometry);
    for (uint32_t i = 0; i < COUNT; i++) {
        order[i] = i;
        uint32_t s = i - BLOCK - WAKE;
        places[i] = i < BLOCK ? i
                    : i < BLOCK + WAKE
                        ? own_size + i - BLOCK
                        : cox_geometry_slot_offset(&geometry, (enum cox_channel_id)(s / SLOT_BYTES),
                                                   HOSTILE, 0) +
                              s % SLOT_BYTES;
    }
    shuffle(order, COUNT);
    struct test_group *group = group_start();
    expect_others(group);
    for (; done < 2 * COUNT; done++) {
        uint32_t bits = (done < COUNT) == done % 2 ? 0xff : 1u << done / 2 % 8;
        int r = call(group, FLIP, places[order[done % COUNT]], bits, false, DEADLINE_MS, NULL);
        statuses[r]++;
        expect_others(group);
        if (group_works(group))
            continue;
        expect_others(group);
        group_end(group);
        group = group_start();
        restarts++;
    }
    group_end(group);
    print_message("%d bytes flipped, %" PRIu32 " groups given up;", COUNT, restarts);
    for (int s = 0; s < COX_STATUS_COUNT; s++)
        if (statuses[s])
            print_message(" %" PRIu32 " %s;", statuses[s], cox_status_text(s));
    print_message("\n");
}

TEST(p10_a_rank_that_never_stops_writing_harms_no_other)
{
    for (uint64_t seed = 0; seed < HOLES + 2; seed++) {
        struct test_group *group = group_start();
        size_t with = 0, without = 0, whole_count = 0;
        /* Hints alone never change what is so. */
        const bool hints_alone = seed % 4 == 0;
        const uint64_t timeout_ms = hints_alone ? TEST_PATIENCE_MS : DEADLINE_MS;
        int r = call(group, MEDDLE, seed, 0, false, timeout_ms, NULL);
        if (r && hints_alone)
            fail_msg("seed %" PRIu64 " does not begin: %d: %s", seed, r, call_error);
        uint64_t end_ns = cox_deadline_after_ms(SEED_MS);
        while (cox_now_ns() < end_ns || without == 0) {
            bool whole = false;
            expect_others(group);
            without++;
            r = call(group, ECHO, 0, 0, false, timeout_ms, &whole);
            with += r == 0;
            whole_count += whole;
            if (hints_alone && !whole)
                fail_msg("seed %" PRIu64 ": %d: %s", seed, r, call_error);
        }
        print_message("seed %" PRIu64 ": %zu without it, %zu of %zu with it\n", seed, without,
                      whole_count, with);
        group_end(group);
    }
}

TEST(p10_a_rank_cannot_report_in_the_name_of_another)
{
    struct test_group *group = group_start();
    assert_int_equal(call(group, IMPOSTOR, 0, 0, false, TEST_PATIENCE_MS, NULL), 0);
    test_await_faults(group, 1);
    assert_string_equal(test_fault(group, 0), "1 it was not me");
    group_end(group);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc, argv);
    const int failed = test_run(NULL, NULL);
    const int late = punctual_check(&requests) + punctual_check(&stops);
    return failed ? failed : late;
}
