/*
 * The reference worker's callbacks in several processes: init forms the share of a rank and joins
 * the group, steps exchange. The worker library is played here, so that no coordinator is needed:
 * what it says of rank, group and requests is this file's.
 */
#include "channel/base/fault.h"
#include "crew.h"
#include "engine/rank/engine.h"
#include "worker/loop/pause.h"
#include "engine/rank/weights_subscriber.h"
#include "tests/lib/test.h"

#define SHIPPED COX_TEST_SOURCE_DIR "/models/sums"
#define PROMPT_LENGTH 6u
#define STEP_COUNT 8u

/* ---- the worker library, as the engine sees it ---- */

struct cox_worker {
    uint32_t rank, rank_count;
    int group_fd;
    uint64_t group_incarnation, group_window;
    bool paused, busy;
    struct crew *crew;
};

/* A callback that a pause may not leave now. */
static int held;

/* As large as a window of an executor is at least, and with a page boundary at its end. */
static uint64_t window_size(uint32_t rank_count)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (cox_group_memory_size(rank_count, COX_GROUP_VALUE_SIZE_MIN) + page - 1) / page * page;
}

/* An init, as the library lends it. */
struct lent_init {
    struct cox_init_request request;
    struct cox_group_options group;
    struct cox_init_entry entries[2];
};

static void lent_init_fill(struct lent_init *init, uint64_t sequence, const char *model,
                           const char *block_count, const struct cox_worker *worker)
{
    *init = (struct lent_init){
        .request = {.sequence = sequence, .entries = init->entries, .group = &init->group},
        .group = {.size = sizeof init->group,
                  .fd = worker->group_fd,
                  .fd_offset = window_size(worker->rank_count) * worker->group_window,
                  .rank = worker->rank,
                  .rank_count = worker->rank_count,
                  .incarnation = worker->group_incarnation},
    };
    if (model)
        init->entries[init->request.entry_count++] = (struct cox_init_entry){"model", model};
    if (block_count)
        init->entries[init->request.entry_count++] =
            (struct cox_init_entry){"block_count", block_count};
}

uint32_t cox_worker_rank(const struct cox_worker *worker)
{
    return worker->rank;
}

int cox_worker_pause(struct cox_worker *worker, uint64_t grace_ms, struct cox_error *err)
{
    (void)grace_ms;
    worker->paused = true;
    return worker->busy ? cox_fail(err, COX_TIMEOUT, "stuck for 1000 ms, made up") : 0;
}

void cox_worker_resume(struct cox_worker *worker)
{
    worker->paused = false;
}

/* No adapters are used here. */
int cox_worker_lora_retire(struct cox_worker *worker, const char *lora_id, struct cox_error *err)
{
    (void)worker, (void)lora_id, (void)err;
    return 0;
}

void cox_worker_tell_group_time(struct cox_worker *worker, uint64_t group_ns, uint64_t wait_ns)
{
    (void)worker, (void)group_ns, (void)wait_ns;
}

bool cox_worker_busy(const struct cox_worker *worker)
{
    return worker->busy;
}

/* The same word as for steps; there are no pulls here. */
bool cox_worker_cancelled(const struct cox_worker *worker, enum cox_channel_id channel,
                          uint64_t sequence)
{
    (void)channel;
    crew_ask(worker->crew);
    return atomic_load(worker->crew->void_through) >= sequence;
}

void cox_worker_allow_leave(bool allow)
{
    held += allow ? -1 : 1;
}

/* ---- one rank ---- */

struct plan {
    /* that the worker gets; 0: the crew's */
    uint32_t rank_count;
    /* there is memory for a group */
    bool grouped;
    /* whose second init names a model that is not there, or whose batch in the second step cannot
     * be; UINT32_MAX: none */
    uint32_t bad_rank;
    /* a fault in rank 3 */
    const char *arm;
};

struct seat {
    struct cox_engine *engine;
    struct cox_worker worker;
    struct crew *crew;
    struct crew_rank *self;
    int32_t tokens[PROMPT_LENGTH + STEP_COUNT];
};

static int seat_open(struct seat *seat, struct crew *crew, uint32_t rank, struct crew_rank *self,
                     const struct plan *plan)
{
    const struct cox_engine_options options = {
        .model_dir = SHIPPED, .block_size = 4, .block_count = 16, .swap_block_count = 0};
    const int32_t prompt[PROMPT_LENGTH] = {1, 5, 10, 13, 8, 11};

    *seat = (struct seat){
        .worker = {.crew = crew,
                   .rank = rank,
                   .rank_count = plan->rank_count ? plan->rank_count : crew->rank_count,
                   .group_fd = plan->grouped ? crew->group_fd : -1,
                   .group_incarnation = 3},
        .crew = crew,
        .self = self,
    };
    memcpy(seat->tokens, prompt, sizeof(prompt));
    if (cox_engine_new(&options, &seat->engine))
        return -ENOMEM;
    cox_engine_serve(seat->engine, &seat->worker);
    return 0;
}

static int seat_init(struct seat *seat, const char *model, uint64_t sequence, struct cox_error *err)
{
    struct lent_init init;
    struct cox_init_result result = {0};

    lent_init_fill(&init, sequence, model, NULL, &seat->worker);
    return cox_engine_callbacks.init(seat->engine, &init.request, &result, err);
}

/* Computes tokens from position on and samples the next; keeps its probability, and the token. */
static int seat_step(struct seat *seat, uint64_t sequence, uint32_t position, uint32_t count,
                     struct cox_error *err)
{
    static const struct cox_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    static const int32_t blocks[] = {3, 5, 7, 9};
    const struct cox_block_table table = {blocks, 4};
    const struct cox_batch_row row = {
        .id = 1,
        .position = position,
        .token_count = count,
        .emit = true,
        .tokens = seat->tokens,
        .tables = &table,
        .sampling = &greedy,
    };
    const struct cox_batch batch = {
        .sequence = sequence,
        .forward_type = COX_FORWARD_MIXED,
        .row_count = 1,
        .rows = &row,
        .table_count = 1,
        .void_word = seat->crew->void_through,
    };
    struct cox_batch_output output;
    int r = cox_engine_callbacks.execute(seat->engine, &batch, &output, err);

    if (r)
        return r;
    seat->tokens[position + count] = output.token;
    crew_keep(seat->self, &output.logprob, 1);
    crew_keep(seat->self, &(float){(float)output.token}, 1);
    return 0;
}

/* The prompt, then token by token. */
static int seat_generate(struct seat *seat, uint64_t sequence, struct cox_error *err)
{
    int r = seat_step(seat, sequence, 0, PROMPT_LENGTH, err);

    for (uint32_t i = 1; r == 0 && i < STEP_COUNT; i++)
        r = seat_step(seat, sequence + i, PROMPT_LENGTH + i - 1, 1, err);
    return r;
}

/* The first init, and so many texts. */
static int seat_begin(struct seat *seat, struct crew *crew, uint32_t rank, struct crew_rank *self,
                      const struct plan *plan, uint32_t text_count)
{
    int r = seat_open(seat, crew, rank, self, plan);

    if (r == 0)
        r = seat_init(seat, NULL, 1, &self->err);
    if (r == 0 && text_count)
        r = seat_generate(seat, 2, &self->err);
    return r;
}

static int generate(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const struct plan *plan = context;
    struct seat seat;
    int r = seat_begin(&seat, crew, rank, self, plan, 1);

    /* A rank that leaves counts as dead for those that have not noticed yet that rank 3 is. */
    if (plan->arm)
        crew_meet(crew, crew->rank_count - 1);
    cox_engine_free(seat.engine);
    return r;
}

typedef int (*rank_fn)(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context);

static void run_all(struct crew *crew, uint32_t rank_count, rank_fn fn, const struct plan *plan)
{
    crew_open(crew, rank_count);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        crew_start(crew, rank, fn, (void *)(uintptr_t)plan);
    crew_wait(crew);
}

static void expect_ended(const struct crew *crew, uint32_t rank, int result)
{
    assert_true(WIFEXITED(crew->statuses[rank]));
    if (crew->ranks[rank].result == result)
        return;
    for (uint32_t i = 0; i < crew->rank_count; i++)
        print_error("rank %u: %d: %s\n", i, crew->ranks[i].result, crew->ranks[i].err.text);
    fail_msg("rank %u: expected %d, got %d", rank, result, crew->ranks[rank].result);
}

/* Every rank ends with 0, and has generated so many texts, each as one rank alone does. */
static void expect_texts(uint32_t rank_count, rank_fn fn, const struct plan *plan, size_t times)
{
    const size_t size = 2 * STEP_COUNT;
    const struct plan none = {0};
    struct crew reference, crew;

    run_all(&reference, 1, generate, &none);
    expect_ended(&reference, 0, 0);
    assert_int_equal(reference.ranks[0].number_count, size);
    run_all(&crew, rank_count, fn, plan);
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        expect_ended(&crew, rank, 0);
        assert_int_equal(crew.ranks[rank].number_count, times * size);
        for (size_t i = 0; i < times; i++)
            assert_memory_equal(crew.ranks[rank].numbers + i * size, reference.ranks[0].numbers,
                                size * sizeof(float));
    }
    crew_close(&crew);
    crew_close(&reference);
}

PLAIN_TEST(s5_tokens_and_probabilities_same_bits_for_1_2_4_8_workers)
{
    for (uint32_t n = 1; n <= 8; n *= 2)
        expect_texts(n, generate, &(struct plan){.grouped = true}, 1);
}

/* As with a legacy coordinator: any number of ranks, each for itself. */
PLAIN_TEST(workers_without_a_group_compute_the_whole_model)
{
    for (uint32_t n = 2; n <= 3; n++)
        expect_texts(n, generate, &(struct plan){0}, 1);
}

PLAIN_TEST(ranks_that_do_not_divide_the_slices_are_refused_at_init)
{
    static const uint32_t counts[] = {3, 5, 6, 7, 16};

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        const struct plan plan = {.grouped = true, .rank_count = counts[i]};
        struct crew crew;
        char words[16];

        /* One of them is enough: it waits for no other. */
        run_all(&crew, 1, generate, &plan);
        expect_ended(&crew, 0, COX_INVALID);
        snprintf(words, sizeof(words), "-n %u: heads", counts[i]);
        assert_contains(crew.ranks[0].err.text, words);
        assert_contains(crew.ranks[0].err.text, "8 slices");
        assert_contains(crew.ranks[0].err.text, "use 1, 2, 4 or 8");
        crew_close(&crew);
    }
}

/* The second init fails on one rank, and on all because of it; the third is fine. */
static int init_again(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const struct plan *plan = context;
    const bool bad = plan->bad_rank == rank;
    struct seat seat;
    int second = 0;
    int r = seat_begin(&seat, crew, rank, self, plan, 1);

    /* The coordinator waits for all steps before it sends another init, and for that in turn. */
    crew_meet(crew, crew->rank_count);
    if (r == 0)
        second = seat_init(&seat, bad ? "/nowhere" : NULL, 20, test_err());
    if (plan->bad_rank != UINT32_MAX && second != (bad ? COX_NOT_FOUND : COX_ABORTED))
        r = cox_fail(&self->err, COX_STATE, "the second init ended with %d: %s", second,
                     test_error.text);
    /* Nothing is left to step with. */
    if (r == 0 && second && seat_step(&seat, 21, 0, PROMPT_LENGTH, test_err()) != COX_STATE)
        r = cox_fail(&self->err, COX_STATE, "a step after an init that failed");
    crew_meet(crew, 2 * crew->rank_count);
    if (r == 0 && second)
        r = seat_init(&seat, NULL, 22, &self->err);
    if (r == 0)
        r = seat_generate(&seat, 30, &self->err);
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(a_second_init_uses_the_group_that_was_joined)
{
    expect_texts(4, init_again, &(struct plan){.grouped = true, .bad_rank = UINT32_MAX}, 2);
}

PLAIN_TEST(an_init_that_fails_on_one_rank_fails_on_all_and_the_next_is_fine)
{
    for (uint32_t bad = 0; bad < 4; bad++)
        expect_texts(4, init_again, &(struct plan){.grouped = true, .bad_rank = bad}, 2);
}

/* One rank's second step cannot be: the others are in it, or come to it later. Then all is computed
 * anew. */
static int step_badly(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const struct plan *plan = context;
    const bool bad = plan->bad_rank == rank;
    struct seat seat;
    int failed = 0;
    int r = seat_begin(&seat, crew, rank, self, plan, 1);

    crew_meet(crew, crew->rank_count);
    if (r == 0)
        failed = seat_step(&seat, 20, 0, bad ? 1000 : PROMPT_LENGTH, test_err());
    if (r == 0 && failed != (bad ? COX_INVALID : COX_ABORTED))
        r = cox_fail(&self->err, COX_STATE, "the bad step ended with %d: %s", failed,
                     test_error.text);
    /* All of them got it from the one that failed; and the coordinator cancelled the step. */
    crew_meet(crew, 2 * crew->rank_count);
    crew_set_void(crew, 20);
    if (r == 0)
        r = seat_generate(&seat, 21, &self->err);
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(s2_a_step_that_fails_on_one_rank_fails_on_all_and_is_computed_anew)
{
    for (uint32_t bad = 0; bad < 4; bad++)
        expect_texts(4, step_badly, &(struct plan){.grouped = true, .bad_rank = bad}, 2);
}

/* Rank 1 does not come to an init, the first or (grouped already) the second; it ends for rank 0
 * when the coordinator waits for it no longer. Where there is a group, the next one is for all. */
static int init_given_up(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const struct plan *plan = context;
    const bool first = plan->bad_rank == 1;
    struct seat seat;
    int r = seat_open(&seat, crew, rank, self, context), ended = COX_ABORTED;

    if (r == 0 && !first)
        r = seat_init(&seat, NULL, 1, &self->err);
    crew_meet(crew, 2);
    if (rank == 1)
        atomic_store(crew->asked, 0);
    crew_meet(crew, 4);
    if (rank == 0) {
        ended = seat_init(&seat, NULL, 2, test_err());
    } else {
        crew_await_asked(crew);
        crew_set_void(crew, 2);
    }
    if (r == 0 && ended != COX_ABORTED)
        r = cox_fail(&self->err, COX_STATE, "it ended with %d: %s", ended, test_error.text);
    crew_meet(crew, 6);
    if (r == 0 && !first)
        r = seat_init(&seat, NULL, 3, &self->err);
    if (r == 0 && !first)
        r = seat_generate(&seat, 4, &self->err);
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(s2_an_init_that_was_given_up_ends_while_ranks_wait_for_each_other)
{
    for (uint32_t variant = 0; variant < 2; variant++)
        expect_texts(2, init_given_up, &(struct plan){.grouped = true, .bad_rank = variant},
                     variant == 0);
}

static struct seat *_Atomic stopped_seat;

static void on_alarm(int number)
{
    (void)number;
    cox_engine_stop(stopped_seat->engine);
}

/* Rank 0 waits for rank 1, which never comes, until it is stopped. */
static int wait_and_be_stopped(struct crew *crew, uint32_t rank, struct crew_rank *self,
                               void *context)
{
    static struct seat seat;
    const struct sigaction action = {.sa_handler = on_alarm};
    int r = seat_begin(&seat, crew, rank, self, context, 0);

    stopped_seat = &seat;
    if (r == 0 && rank == 0) {
        /* Whether the signal comes before the wait or in it: the reply is the same. */
        sigaction(SIGALRM, &action, NULL);
        ualarm(100000, 0);
        r = seat_step(&seat, 2, 0, PROMPT_LENGTH, &self->err);
    }
    crew_meet(crew, crew->rank_count);
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(p1_a_rank_that_is_stopped_waits_no_longer)
{
    struct crew crew;

    run_all(&crew, 2, wait_and_be_stopped, &(struct plan){.grouped = true});
    expect_ended(&crew, 0, COX_ABORTED);
    expect_ended(&crew, 1, 0);
    crew_close(&crew);
}

static int generate_with_a_fault(struct crew *crew, uint32_t rank, struct crew_rank *self,
                                 void *context)
{
#if COX_TESTING
    const struct plan *plan = context;

    if (rank == 3) {
        cox_fault_rank(3);
        cox_fault_arm(plan->arm);
    }
#endif
    return generate(crew, rank, self, context);
}

PLAIN_TEST(b3_a_rank_killed_in_init_or_a_step_is_named_by_the_others)
{
    static const char *const arms[] = {
        "exchange.made:kill:3:1",
        "exchange.written:kill:3:1",
        "exchange.written:kill:3:15",
        "exchange.read:kill:3:33",
    };

#if !COX_TESTING
    skip();
#endif
    for (size_t i = 0; i < sizeof(arms) / sizeof(arms[0]); i++) {
        struct crew crew;

        run_all(&crew, 4, generate_with_a_fault, &(struct plan){.grouped = true, .arm = arms[i]});
        assert_true(WIFSIGNALED(crew.statuses[3]));
        for (uint32_t rank = 0; rank < 3; rank++) {
            expect_ended(&crew, rank, COX_PEER_DEAD);
            assert_contains(crew.ranks[rank].err.text, "rank 3");
        }
        crew_close(&crew);
    }
}

/* A recovery command; 0: it says what is expected. */
static int command(struct seat *seat, int (*callback)(void *, struct cox_error *), int expected,
                   struct cox_error *err)
{
    struct cox_error own = {0};
    const int r = callback(seat->engine, &own);

    return r == expected ? 0
                         : cox_fail(err, COX_STATE, "expected %d: %d: %s", expected, r, own.text);
}

/* The last step once more: is its number the one that was kept before? */
static int compute_again(struct seat *seat, uint64_t sequence, bool same, struct cox_error *err)
{
    const size_t kept = seat->self->number_count;
    int r = seat_step(seat, sequence, PROMPT_LENGTH + STEP_COUNT - 2, 1, err);

    if (r)
        return r;
    seat->self->number_count = kept;
    if ((seat->self->numbers[kept] == seat->self->numbers[kept - 2]) != same)
        return cox_fail(err, COX_STATE, "the KV cache is %s", same ? "another one" : "as it was");
    return 0;
}

/* On a rank without state, with a callback running, and as usual; each of them twice. */
static int recover(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const struct cox_worker_callbacks *does = &cox_engine_callbacks;
    int (*const commands[])(void *, struct cox_error *) = {
        does->pause,  does->pause,  does->pause_net, does->clear, does->clear,
        does->reinit, does->reinit, does->start,     does->start};
    struct seat seat;
    int r = seat_open(&seat, crew, rank, self, context);

    for (size_t i = 0; r == 0 && i < sizeof(commands) / sizeof(commands[0]); i++)
        r = command(&seat, commands[i], 0, &self->err);
    if (r == 0)
        r = seat_init(&seat, NULL, 1, &self->err);
    if (r == 0)
        r = seat_generate(&seat, 2, &self->err);
    seat.worker.busy = true;
    if (r == 0)
        r = command(&seat, does->pause, COX_TIMEOUT, &self->err);
    if (r == 0)
        r = command(&seat, does->reinit, COX_STATE, &self->err);
    seat.worker.busy = false;
    if (r == 0)
        r = compute_again(&seat, 17, true, &self->err);
    for (size_t i = 0; r == 0 && i < sizeof(commands) / sizeof(commands[0]); i++) {
        const bool paused = i < 7;
        r = command(&seat, commands[i], 0, &self->err);
        if (r == 0 && seat.worker.paused != paused)
            r = cox_fail(&self->err, COX_STATE, "after command %zu", i);
    }
    if (r == 0)
        r = compute_again(&seat, 18, false, &self->err);
    if (r == 0)
        r = seat_generate(&seat, 20, &self->err);
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(m12_reinit_makes_the_cache_anew_and_the_same_is_computed)
{
    for (uint32_t n = 1; n <= 4; n *= 4)
        expect_texts(n, recover, &(struct plan){.grouped = true}, 2);
}

/* An init after others, of which some failed, is to this rank what it is to one that was replaced
 * and knows of none. */
static int init_after_others(struct crew *crew, uint32_t rank, struct crew_rank *self,
                             void *context)
{
    static const struct {
        const char *model, *block_count;
        int expected;
        uint32_t blocks;
        bool replayed;
    } rows[] = {
        {NULL, NULL, 0, 16, false}, {NULL, "32", 0, 32, false},
        {NULL, NULL, 0, 16, false}, {NULL, "32", 0, 32, false},
        {NULL, "32", 0, 32, true},  {"/nowhere", "8", COX_NOT_FOUND, 0, false},
        {NULL, NULL, 0, 16, true},
    };
    struct seat seat;
    int r = seat_open(&seat, crew, rank, self, context);

    for (size_t i = 0; r == 0 && i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct lent_init init;
        struct cox_init_result result = {0};
        int got;

        /* A replacement is not paused, and a paused one must not stay so if no start would follow.
         */
        seat.worker.paused = true;
        lent_init_fill(&init, 1 + i, rows[i].model, rows[i].block_count, &seat.worker);
        init.request.replayed = rows[i].replayed;
        got = cox_engine_callbacks.init(seat.engine, &init.request, &result, &self->err);
        if (got != rows[i].expected || (got == 0 && result.npu_block_count != rows[i].blocks))
            r = cox_fail(&self->err, COX_STATE, "init %zu: %d, %d blocks", i, got,
                         (int)result.npu_block_count);
        else if (seat.worker.paused != rows[i].replayed)
            r = cox_fail(&self->err, COX_STATE, "init %zu: paused or not", i);
    }
    cox_engine_free(seat.engine);
    return r;
}

PLAIN_TEST(m12_p8_an_init_does_not_depend_on_those_before)
{
    struct crew crew;

    run_all(&crew, 1, init_after_others, &(struct plan){0});
    expect_ended(&crew, 0, 0);
    crew_close(&crew);
}
