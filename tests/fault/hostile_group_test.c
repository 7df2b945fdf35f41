/*
 * hostile_group_test: a rank of a sealed group overwrites its own words of the rank group, its
 * values and the hints, with garbage and with content that would be valid for another rank, while
 * the ranks work together and while they form their group anew. What must hold: it can write
 * nothing else; every operation ends; the other ranks get a correct result, or an error that names
 * the hostile rank; once it is replaced, everything works again.
 */
#include "channel/shm/geometry.h"
#include "worker/group/group_layout.h"
#include "testing.h"

#include <coxswain/worker.h>

#define RANK_COUNT 3
#define HOSTILE 1 /* the rank that writes */
#define NAMED "rank 1"
#define ROUNDS 40
#define ROUND_MS 400
#define OPERATION_MS 20
#define JOIN_MS 1000
#define REPLY_MS 30000

/* ---- the worker ---- */

enum order { WORK, MEDDLE };

enum temper {
    ZEROES,
    ONES,
    RANDOM,
    RANDOM_IDENTITY,
    RANDOM_PARTS,
    ANOTHER_S_PID, /* in whatever state */
    LEAVES,        /* and fails, and is whole, and claims */
    SAYS_DEAD,     /* that rank 0 is dead, and that it aborts because of it */
    GIVES_UP,      /* every epoch, because of rank 2 */
    JUMPS,         /* to other epochs, and back */
    WRONG_ROUND,   /* a state that it cannot have, in an operation that no rank is in */
    OTHER_LIFE,
    WORDS_COUNT,
    HINTS_ZEROES = WORDS_COUNT,
    HINTS_ONES,
    HINTS_RANDOM,
    TEMPER_COUNT,
};

struct request {
    /* and epoch */
    uint64_t number;
    uint32_t order;
    uint32_t temper;
};

struct hostile {
    struct cox_worker_options options;
    struct cox_group *group;
    const struct cox_init_request *init;
    struct cox_worker *worker;
    _Atomic uint32_t temper;
    _Atomic bool meddles;
    pid_t pid;
};

struct range {
    uint8_t *base;
    uint64_t size;
};

/* What this process can write and shares, by its name. */
static struct range range_find(const char *name)
{
    struct range range = {0};
    char line[512], rights[8];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        uint64_t begin, end;
        /* Of the wake memory the part that the rank group has is mapped again. */
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s", &begin, &end, rights) == 3 &&
            rights[1] == 'w' && rights[3] == 's' && strstr(line, name) && end - begin > range.size)
            range = (struct range){(uint8_t *)(uintptr_t)begin, end - begin};
    }
    if (maps)
        fclose(maps);
    COX_ASSERT(range.base);
    return range;
}

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void fill(uint8_t *bytes, uint64_t size, enum temper temper, uint64_t *state)
{
    for (uint64_t i = 0; i + 8 <= size; i += 8) {
        uint64_t word = temper == ZEROES ? 0 : temper == ONES ? UINT64_MAX : next(state);
        atomic_store_explicit((_Atomic uint64_t *)(void *)(bytes + i), word, memory_order_relaxed);
    }
}

static void arrive(struct cox_group_layout_part *part, uint64_t incarnation, uint64_t epoch,
                   uint32_t index)
{
    uint64_t word = cox_group_arrived(epoch, index);
    atomic_store(&part->mirror, cox_group_mirror(incarnation, word));
    atomic_store(&part->arrived, word);
}

static void meddle_once(const struct hostile *hostile, struct cox_group_layout_rank *own,
                        struct range hints, enum temper temper, uint64_t *state)
{
    struct cox_group_layout_identity *identity = &own->identity;
    struct cox_group_layout_part *part = &own->parts[0];
    const uint64_t incarnation = atomic_load(&identity->incarnation), random = next(state);
    static const uint8_t states[] = {
        0,   COX_GROUP_CLAIMED, COX_GROUP_JOINED, COX_GROUP_WHOLE, COX_GROUP_LEFT, COX_GROUP_FAILED,
        0x77};
    uint64_t holder = atomic_load(&identity->holder);
    switch (temper) {
    case ZEROES:
    case ONES:
    case RANDOM:
        fill((uint8_t *)own, sizeof *own, temper, state);
        break;
    case RANDOM_IDENTITY:
        fill((uint8_t *)identity, 64, RANDOM, state);
        break;
    case RANDOM_PARTS:
        fill((uint8_t *)own->parts, sizeof own->parts, RANDOM, state);
        break;
    case ANOTHER_S_PID:
        atomic_store(&identity->holder,
                     cox_group_holder(COX_GROUP_JOINED, random % 2 ? getppid() : 1, random));
        break;
    case LEAVES:
        atomic_store(&identity->holder,
                     (holder & (UINT64_MAX >> 8)) | (uint64_t)states[random % sizeof states] << 56);
        break;
    case SAYS_DEAD:
        atomic_store(&identity->said_dead, cox_group_said_dead(0));
        atomic_store(&part->because, cox_group_said_dead(0));
        atomic_store(&part->aborted, cox_group_aborted(COX_GROUP_EPOCH_NONE));
        break;
    case GIVES_UP:
        atomic_store(&part->because, cox_group_said_dead(2));
        atomic_store(&part->aborted,
                     cox_group_aborted(atomic_load(&part->arrived) >> COX_GROUP_INDEX_BITS));
        break;
    case JUMPS:
        arrive(part, incarnation, random % 4 ? random % 1000 : COX_GROUP_EPOCH_MAX,
               (uint32_t)random % 8);
        break;
    case WRONG_ROUND:
        atomic_store(&part->what[0], random);
        atomic_store(&part->what[1], random);
        arrive(part, incarnation, atomic_load(&part->arrived) >> COX_GROUP_INDEX_BITS,
               (uint32_t)(random >> 8) % 64);
        break;
    case OTHER_LIFE:
        atomic_store(&identity->incarnation, incarnation + random % 3 - 1);
        break;
    case HINTS_ZEROES:
        memset(hints.base, 0, hints.size);
        break;
    case HINTS_ONES:
        memset(hints.base, 0xff, hints.size);
        break;
    case HINTS_RANDOM:
        fill(hints.base, hints.size, RANDOM, state);
        break;
    default:
        break;
    }
    (void)hostile;
}

static void *meddle(void *argument)
{
    struct hostile *hostile = argument;
    const struct range words = range_find("memfd:cox_group"), hints = range_find("memfd:cox_wake");
    uint64_t state = UINT64_C(0x9e3779b97f4a7c15);
    for (;;) { /* until the process ends */
        enum temper temper = atomic_load(&hostile->temper);
        if (temper < TEMPER_COUNT)
            meddle_once(hostile, (struct cox_group_layout_rank *)(void *)words.base, hints, temper,
                        &state);
        nanosleep(&(struct timespec){.tv_nsec = 20000 + (long)(next(&state) % 400000)}, NULL);
    }
    return NULL;
}

static bool aborted(void *context)
{
    const struct hostile *hostile = context;
    return hostile->init &&
           cox_worker_cancelled(hostile->worker, COX_CHANNEL_EXECUTE, hostile->init->sequence);
}

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    struct hostile *hostile = context;
    struct cox_group_options options = *request->group;
    options.deadline_ns = cox_deadline_after_ms(JOIN_MS);
    options.cancelled = aborted;
    options.context = hostile;
    hostile->group = cox_group_leave(hostile->group);
    hostile->init = request;
    int r = cox_group_join(&options, &hostile->group, err);
    hostile->init = NULL;
    result->npu_block_count = 16;
    result->max_position_embeddings = 64;
    result->start_thinking_id = result->stop_thinking_id = -1;
    return r;
}

/* Later for each operation. A rank that waits for the hostile one is to say so before the deadline
 * of one that is a step ahead, which misses both of them and names whom it heard of. */
static uint64_t operation_deadline(uint64_t operation)
{
    return cox_deadline_after_ms(ROUND_MS + OPERATION_MS * operation);
}

/* Rounds of it; the values of the ranks that write none but their own are right. */
static int work(struct hostile *hostile, uint64_t number, struct cox_error *err)
{
    uint64_t value[8], values[RANK_COUNT][8];
    if (!hostile->group)
        return cox_fail(err, COX_STATE, NAMED " has kept this one out");
    int r = cox_group_align(hostile->group, number);
    if (r)
        return cox_fail(err, r, "the epoch cannot begin, " NAMED " has ended it");
    for (uint64_t round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 8; i++)
            value[i] = number << 32 | round << 8 | hostile->options.rank;
        r = cox_group_barrier(hostile->group, operation_deadline(2 * round), err);
        if (r == 0)
            r = cox_group_gather(hostile->group, value, sizeof value, values,
                                 operation_deadline(2 * round + 1), err);
        if (r)
            return r;
        for (uint64_t rank = 0; rank < RANK_COUNT; rank++)
            for (int i = 0; i < 8; i++)
                if (rank != HOSTILE && values[rank][i] != (number << 32 | round << 8 | rank))
                    return cox_fail(err, COX_CORRUPT, "wrong value of rank %" PRIu64, rank);
    }
    return 0;
}

static int on_opaque(void *context, const uint8_t *bytes, size_t size, uint8_t *reply,
                     size_t capacity, size_t *ret_size, struct cox_error *err)
{
    struct hostile *hostile = context;
    struct request request;
    pthread_t thread;
    (void)reply, (void)capacity;
    *ret_size = 0;
    if (size != sizeof request)
        return cox_fail(err, COX_CORRUPT, "a request of %zu bytes", size);
    memcpy(&request, bytes, sizeof request);
    if (request.order == WORK)
        return work(hostile, request.number, err);
    if (hostile->options.rank != HOSTILE)
        return 0;
    atomic_store(&hostile->temper, request.temper);
    if (atomic_exchange(&hostile->meddles, true))
        return 0;
    int r = -pthread_create(&thread, NULL, meddle, hostile);
    return r ? r : -pthread_detach(thread);
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .init = on_init, .opaque = on_opaque};
    /* the meddling thread uses it until the process ends */
    static struct hostile hostile = {.options = COX_WORKER_OPTIONS_INIT};
    atomic_store(&hostile.temper, TEMPER_COUNT);
    const int status =
        test_worker_main(argc, argv, &hostile.options, &callbacks, &hostile, &hostile.worker);
    if (!atomic_load(&hostile.meddles))
        cox_group_leave(hostile.group);
    return status;
}

/* ---- the group ---- */

static uint64_t numbers = 100;

static struct test_group *group_start(void)
{
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .workers.command = test_own_command,
        .memory.attach = COX_ATTACH_SEALED,
        .times.finalize_ms = 300,
        .times.term_ms = 300,
    };
    struct cox_init_summary summary;
    struct test_group *group = test_group_start(RANK_COUNT, &options);
    assert_ok(cox_executor_init(test_group_executor(group), NULL, 0,
                                cox_deadline_after_ms(REPLY_MS), &summary, test_err()));
    return group;
}

struct judged {
    /* all that was asked succeeded, in every rank but the hostile one */
    bool whole;
    uint32_t honest;
    const char *when;
};

static void judge(void *context, const struct cox_completion *completion)
{
    struct judged *judged = context;
    judged->whole = true;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        if (rank == HOSTILE)
            continue;
        judged->whole = judged->whole && result->outcome == COX_OUTCOME_OK;
        if (result->outcome == COX_OUTCOME_ERROR && !strstr(result->text, NAMED)) {
            print_error("%s: rank %" PRIu32 " says: %s\n", judged->when, rank, result->text);
            judged->honest++;
        }
    }
}

/* Returns whether the others succeeded. */
static bool call(struct test_group *group, enum order order, uint32_t temper, const char *when)
{
    struct request request = {++numbers, order, temper};
    struct judged judged = {.when = when};
    int r = cox_executor_call_opaque(
        test_group_executor(group), &request, sizeof request,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = cox_deadline_after_ms(REPLY_MS)),
        judge, &judged, test_err());
    if (r == COX_TIMEOUT || r < 0)
        fail_msg("%s: %d: %s", when, r, test_error.text);
    if (judged.honest)
        fail_msg("%s: an error names others than " NAMED ": %s", when, test_error.text);
    return judged.whole;
}

static void replaced(struct test_group *group, const char *when)
{
    struct cox_executor *executor = test_group_executor(group);
    const uint64_t deadline_ns = cox_deadline_after_ms(REPLY_MS);
    const pid_t pid = cox_executor_pid(executor, HOSTILE);
    assert_ok(cox_executor_kill(executor, HOSTILE, test_err()));
    /* Nothing is done to a rank that is not seen dead yet. */
    while (cox_executor_pid(executor, HOSTILE) == pid && cox_now_ns() < deadline_ns)
        if (cox_executor_restart(executor, HOSTILE, deadline_ns, test_err()))
            fail_msg("%s: restart: %s", when, test_error.text);
    if (cox_executor_replay_init(executor, cox_deadline_after_ms(REPLY_MS), test_err()))
        fail_msg("%s: the ranks cannot form their group again: %s", when, test_error.text);
    for (int i = 0; i < 3; i++)
        if (!call(group, WORK, 0, when))
            fail_msg("%s: the ranks cannot work together again", when);
}

TEST(p10_b14_a_rank_that_spoils_its_own_words_is_named)
{
    static const char *const names[WORDS_COUNT] = {
        "zeroes", "ones",      "random",   "random identity", "random parts", "another's pid",
        "leaves", "says dead", "gives up", "jumps",           "wrong round",  "another incarnation",
    };
    OWN_GROUP *group = group_start();
    for (uint32_t temper = 0; temper < WORDS_COUNT; temper++) {
        uint32_t failed = 0;
        assert_true(call(group, WORK, 0, names[temper]));
        call(group, MEDDLE, temper, names[temper]);
        for (int i = 0; i < 3; i++)
            failed += !call(group, WORK, 0, names[temper]);
        /* While they form their group anew. */
        int r = cox_executor_replay_init(test_group_executor(group),
                                         cox_deadline_after_ms(REPLY_MS), test_err());
        if (r && !strstr(test_error.text, NAMED))
            fail_msg("%s: init: %d: %s", names[temper], r, test_error.text);
        print_message("%s: %" PRIu32 " of 3 failed, init: %s\n", names[temper], failed,
                      r ? test_error.text : "succeeded");
        replaced(group, names[temper]);
    }
}

TEST(p10_b14_spoilt_hints_change_no_result)
{
    OWN_GROUP *group = group_start();
    for (uint32_t temper = HINTS_ZEROES; temper < TEMPER_COUNT; temper++) {
        call(group, MEDDLE, temper, "hints");
        for (int i = 0; i < 3; i++)
            if (!call(group, WORK, 0, "hints"))
                fail_msg("spoilt hints, %" PRIu32 ": the ranks cannot work together", temper);
        if (cox_executor_replay_init(test_group_executor(group), cox_deadline_after_ms(REPLY_MS),
                                     test_err()))
            fail_msg("spoilt hints, %" PRIu32 ": %s", temper, test_error.text);
    }
    replaced(group, "hints");
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc - 1, argv + 1);
    return test_run(NULL, NULL);
}
