/*
 * The model computed by all numbers of processes that it can be shared out to, which exchange their
 * slices: the same bits, with 1/N of the weights each. The reference of every comparison is one
 * process that owns all slices.
 */
#include "crew.h"
#include "tests/unit/model_fixture.h"
#include "engine/model/model_image.h"
#include "engine/rank/tensor_gather.h"
#include "engine/compute/model.h"

#include "channel/base/fault.h"
#include "tests/lib/test.h"

#include <malloc.h>
#include <math.h>

#define SHIPPED COX_TEST_SOURCE_DIR "/models/sums"
#define TOKEN_COUNT 32u
#define BLOCK_SIZE 4u
#define BLOCK_COUNT 64u
#define TABLE_LENGTH (TOKEN_COUNT / BLOCK_SIZE)
#define ROW_COUNT_MAX 4u
/* Two tiles a pass: the longer steps take several. */
#define TILE_COUNT 2u

/* Tokens [position, position + count) of a sequence whose blocks begin at first_block. */
struct row {
    uint32_t sequence, position, count, first_block;
};
struct step {
    uint32_t row_count;
    struct row rows[ROW_COUNT_MAX];
};

/* Sequence 0 in chunks and steps among others, then computed anew elsewhere, then whole and alone.
 */
static const struct step steps[] = {
    {2, {{0, 0, 12, 0}, {1, 0, 5, 16}}},
    {3, {{2, 0, 9, 24}, {0, 12, 1, 0}, {1, 5, 1, 16}}},
    {1, {{0, 13, 1, 0}}},
    {4, {{1, 6, 20, 16}, {0, 14, 5, 0}, {2, 9, 1, 24}, {3, 0, 1, 32}}},
    {2, {{3, 1, 7, 32}, {0, 0, 19, 40}}},
    {2, {{0, 19, 12, 40}, {3, 8, 1, 32}}},
    {1, {{0, 31, 1, 40}}},
    {1, {{0, 0, 32, 52}}},
};
#define STEP_COUNT (sizeof(steps) / sizeof(steps[0]))
/* Steps whose last row of sequence 0 ends with its last token. */
#define LAST_CHUNKED 6u
#define LAST_WHOLE 7u

static const struct cox_sampling greedy = {.top_p = 1, .repetition_penalty = 1};

/* The model of one rank, and of no other. */
struct part {
    struct cox_group *group;
    struct cox_tensor_gather *exchange;
    /* of steps */
    uint64_t deadline_ns;
    struct cox_model *model;
    struct cox_cache *cache;
    /* which of the exchanges to come this rank fails at, counted from 1; 0: none */
    uint32_t fails_at;
    /* and which it gives another number in, in each of its slices */
    uint32_t spoils_at;
    float spoilt;
};

static int gather(void *context, float *slices, size_t stride, size_t slice_length,
                  const float **ret_slices, struct cox_error *err)
{
    struct part *part = context;

    if (part->fails_at && --part->fails_at == 0)
        return cox_fail(err, COX_NO_SPACE, "made up");
    if (part->spoils_at && --part->spoils_at == 0) {
        const uint32_t count = COX_SLICE_COUNT / cox_group_get_info(part->group).rank_count;
        for (uint32_t i = 0; i < count; i++)
            slices[(cox_group_get_info(part->group).rank * count + i) * stride + 1] = part->spoilt;
    }
    return cox_tensor_gather_all(part->exchange, slices, stride, slice_length, ret_slices, err);
}

static int blame(void *context, const float *const *slices, size_t slice_length,
                 struct cox_error *err)
{
    struct part *part = context;

    return cox_tensor_gather_blame(part->exchange, slices, slice_length, err);
}

/* group NULL: alone. */
static int part_open(struct part *part, const char *directory, struct cox_group *group,
                     struct cox_error *err)
{
    struct cox_model_options options = {.tile_count_max = TILE_COUNT};
    int r = 0;

    *part = (struct part){.group = group, .deadline_ns = COX_DEADLINE_NEVER};
    if (group) {
        options.share = (struct cox_share){
            .rank = cox_group_get_info(group).rank,
            .rank_count = cox_group_get_info(group).rank_count,
            .gather = gather,
            .context = part,
            .blame = blame,
        };
    }
    if (r == 0)
        r = cox_model_load(directory, &options, &part->model, err);
    if (r == 0)
        r = cox_model_cache_new(part->model, BLOCK_COUNT, BLOCK_SIZE, 0, &part->cache, err);
    if (r == 0 && group)
        r = cox_tensor_gather_new(group, cox_model_slice_count(part->model),
                                  cox_model_slice_length_max(part->model), COX_DEADLINE_NEVER,
                                  &part->exchange, err);
    return r;
}

static void part_close(struct part *part)
{
    cox_tensor_gather_free(part->exchange);
    cox_cache_free(part->cache);
    cox_model_free(part->model);
}

static uint32_t vocabulary(const struct part *part)
{
    return cox_model_config(part->model)->vocab_size;
}

/* Computes a step and keeps the logits of its rows. sequence numbers a step of the group. */
static int part_step(struct part *part, const struct step *step, uint64_t sequence,
                     struct crew *crew, struct crew_rank *self, struct cox_error *err)
{
    static float logits[ROW_COUNT_MAX * 1024];
    int32_t tokens[ROW_COUNT_MAX][TOKEN_COUNT], blocks[ROW_COUNT_MAX][TABLE_LENGTH];
    struct cox_block_table tables[ROW_COUNT_MAX];
    struct cox_batch_output outputs[ROW_COUNT_MAX];
    struct cox_batch_row rows[ROW_COUNT_MAX];
    const struct cox_batch batch = {
        .sequence = sequence,
        .row_count = step->row_count,
        .rows = rows,
        .table_count = 1,
        .void_word = crew ? (const void *)crew->void_through : NULL,
    };
    int r = 0;

    for (uint32_t i = 0; i < step->row_count; i++) {
        uint32_t noise = step->rows[i].sequence + 1;

        for (uint32_t j = 0; j < TOKEN_COUNT; j++)
            tokens[i][j] = (int32_t)((fixture_noise(&noise) + 1) / 2 * (float)vocabulary(part)) %
                           (int32_t)vocabulary(part);
        for (uint32_t j = 0; j < TABLE_LENGTH; j++)
            blocks[i][j] = (int32_t)(step->rows[i].first_block + j);
        tables[i] = (struct cox_block_table){blocks[i], TABLE_LENGTH};
        rows[i] = (struct cox_batch_row){
            .id = i,
            .position = step->rows[i].position,
            .token_count = step->rows[i].count,
            .emit = true,
            .tokens = tokens[i],
            .tables = &tables[i],
            .sampling = &greedy,
        };
    }
    if (part->exchange) {
        /* As engine.c does. */
        const uint64_t void_through = cox_batch_void_through(&batch);

        crew->step = sequence;
        r = void_through >= sequence
                ? COX_ABORTED
                : cox_tensor_gather_begin(part->exchange, void_through + 1, part->deadline_ns, err);
    }
    if (r == 0)
        r = cox_model_step(part->model, part->cache, &batch, outputs, logits, err);
    if (r && part->exchange)
        cox_group_abort(part->group);
    if (r == 0)
        crew_keep(self, logits, (size_t)step->row_count * vocabulary(part));
    return r;
}

static int run_steps(struct part *part, uint64_t first_sequence, struct crew *crew,
                     struct crew_rank *self, struct cox_error *err)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < STEP_COUNT; i++)
        r = part_step(part, &steps[i], first_sequence + i, crew, self, err);
    return r;
}

static int run_rank(struct crew *crew, uint32_t rank, struct crew_rank *self, void *directory)
{
    struct cox_group *group = crew_join(crew, rank);
    struct part part;
    int r = part_open(&part, directory, group, &self->err);

    if (r == 0)
        r = run_steps(&part, 10, crew, self, &self->err);
    part_close(&part);
    cox_group_leave(group);
    return r;
}

/* All ranks of a crew run it, to their ends. */
static void crew_run(struct crew *crew, uint32_t rank_count,
                     int (*fn)(struct crew *crew, uint32_t rank, struct crew_rank *self,
                               void *context),
                     void *context)
{
    crew_open(crew, rank_count);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        crew_start(crew, rank, fn, context);
    crew_wait(crew);
}

/* What one process computes. */
static struct crew_rank *reference_of(const char *directory, uint32_t *ret_vocab_size)
{
    struct crew_rank *reference = calloc(1, sizeof(*reference));
    struct part part;

    assert_non_null(reference);
    if (part_open(&part, directory, NULL, &reference->err) ||
        run_steps(&part, 1, NULL, reference, &reference->err))
        fail_msg("%s", reference->err.text);
    *ret_vocab_size = vocabulary(&part);
    part_close(&part);
    return reference;
}

static void expect_ended(const struct crew *crew, uint32_t rank, int result)
{
    assert_true(WIFEXITED(crew->statuses[rank]));
    if (crew->ranks[rank].result != result)
        for (uint32_t i = 0; i < crew->rank_count; i++)
            print_error("rank %u: %d: %s\n", i, crew->ranks[i].result, crew->ranks[i].err.text);
    if (crew->ranks[rank].result != result)
        fail_msg("rank %u: expected %d, got %d: %s", rank, result, crew->ranks[rank].result,
                 crew->ranks[rank].err.text);
}

static void expect_numbers(const struct crew *crew, uint32_t rank, const float *numbers,
                           size_t count)
{
    assert_int_equal(crew->ranks[rank].number_count, count);
    assert_memory_equal(crew->ranks[rank].numbers, numbers, count * sizeof(float));
}

static size_t rows_before(size_t step)
{
    size_t count = 0;

    for (size_t i = 0; i < step; i++)
        count += steps[i].row_count;
    return count;
}

static void check_model(char *directory)
{
    struct cox_model_config config;
    uint32_t vocab_size;
    struct crew_rank *reference = reference_of(directory, &vocab_size);

    /* Chunks, company and recomputation change nothing, and the numbers are some. */
    assert_memory_equal(reference->numbers + rows_before(LAST_CHUNKED) * vocab_size,
                        reference->numbers + rows_before(LAST_WHOLE) * vocab_size,
                        vocab_size * sizeof(float));
    assert_memory_not_equal(reference->numbers, reference->numbers + vocab_size,
                            vocab_size * sizeof(float));
    assert_int_equal(cox_model_folder_config(directory, &config, NULL), 0);
    for (uint32_t n = 1; n <= cox_slice_count(&config); n++) {
        const struct cox_share share = {.rank_count = n};
        struct crew crew;

        if (cox_share_check(&config, &share, NULL) != 0)
            continue;
        crew_run(&crew, n, run_rank, directory);
        for (uint32_t rank = 0; rank < n; rank++) {
            expect_ended(&crew, rank, 0);
            expect_numbers(&crew, rank, reference->numbers, reference->number_count);
        }
        crew_close(&crew);
    }
    free(reference);
}

PLAIN_TEST(s5_logits_same_bits_for_any_number_of_processes)
{
    char shipped[] = SHIPPED;

    check_model(shipped);
    for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++) {
        char directory[FIXTURE_PATH_SIZE];

        fixture_directory_create(directory);
        fixture_write_model(directory, &fixture_shapes[c], 5, 1);
        check_model(directory);
        fixture_directory_remove(directory);
    }
}

/* ---- private memory ---- */

/* Bytes that only this process has and that it has written. */
/* Of no file. Not those that are private: a page of the process that forked this one becomes
 * private here when the others that have it end. */
static uint64_t anonymous_bytes(void)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "re");
    char line[256];
    uint64_t kib = 0;

    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "Anonymous: %" SCNu64, &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib * 1024;
}

static int gather_nothing(void *context, float *slices, size_t stride, size_t slice_length,
                          const float **ret_slices, struct cox_error *err)
{
    (void)context, (void)slices, (void)stride, (void)slice_length, (void)ret_slices, (void)err;
    return COX_STATE;
}

/* Keeps what loading has added, and what the model says of itself, in KiB. */
static int load_and_measure(struct crew *crew, uint32_t rank, struct crew_rank *self,
                            void *directory)
{
    struct cox_model_options options = {.tile_count_max = 1};
    struct cox_model *model = NULL;
    uint64_t before;
    float kib[2];
    int r = 0;

    options.share = (struct cox_share){
        .rank = rank, .rank_count = crew->rank_count, .gather = gather_nothing, .context = NULL};
    /* BLAS has buffers of its own from the first product on. */
    if (r == 0)
        r = cox_model_load(directory, &options, &model, &self->err);
    cox_model_free(model);
    model = NULL;
    malloc_trim(0); /* what is free would be used again, and be counted as no growth */
    before = anonymous_bytes();
    if (r == 0)
        r = cox_model_load(directory, &options, &model, &self->err);
    if (r)
        return r;
    kib[0] = (float)((anonymous_bytes() - before) / 1024);
    kib[1] = (float)(cox_model_weights_size(model) / 1024);
    crew_keep(self, kib, 2);
    cox_model_free(model);
    return before ? 0 : COX_UNSUPPORTED;
}

PLAIN_TEST(s5_each_of_n_processes_has_one_nth_of_the_weights)
{
    /* 27 MiB, of which almost nothing is norms. */
    static const struct cox_model_config config = {.hidden_size = 512,
                                                   .intermediate_size = 2048,
                                                   .layer_count = 2,
                                                   .head_count = 8,
                                                   .kv_head_count = 8,
                                                   .head_dim = 32,
                                                   .vocab_size = 1024,
                                                   .position_count_max = 64};
    char directory[FIXTURE_PATH_SIZE];
    float whole = 0;

    fixture_directory_create(directory);
    fixture_write_model(directory, &config, 5, 1);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        struct crew crew;

        crew_run(&crew, n, load_and_measure, directory);
        for (uint32_t rank = 0; rank < n; rank++) {
            const float *kib = crew.ranks[rank].numbers;

            expect_ended(&crew, rank, 0);
            if (n == 1)
                whole = kib[1];
            /* Norms, and the scratch of one tile beside what is measured. */
            assert_true(kib[1] >= whole / (float)n && kib[1] < whole / (float)n + 64);
#if !TEST_SANITIZED /* which have memory for themselves, and keep what was freed */
            if (kib[0] < kib[1] - 64 || kib[0] >= kib[1] + 1536)
                fail_msg("rank %" PRIu32 " of %" PRIu32 " has %.0f KiB more, of weights %.0f", rank,
                         n, (double)kib[0], (double)kib[1]);
#endif
        }
        crew_close(&crew);
    }
    fixture_directory_remove(directory);
}

/* ---- ranks that fail ---- */

struct plan {
    char *directory;
    /* exchange of the step, 1 is the embedding's */
    uint32_t fails_at;
    /* a fault in the last rank */
    const char *arm;
    /* the last rank does not come, the others wait until they abort */
    bool wait;
    /* of the step that fails; 0: never */
    uint64_t timeout_ms;
};

/* A rank in three steps, of which the second fails; the third shows that all are in step again. */
static int run_around_a_failure(struct crew *crew, uint32_t rank, struct crew_rank *self,
                                void *context)
{
    const struct plan *plan = context;
    const bool last = rank == crew->rank_count - 1;
    struct cox_group *group = crew_join(crew, rank);
    struct part part;
    int failed = COX_NO_SPACE;
    int r = part_open(&part, plan->directory, group, &self->err);

    if (r == 0)
        r = part_step(&part, &steps[0], 5, crew, self, &self->err);
    /* No step is cancelled while the one before it is under way. */
    crew_meet(crew, crew->rank_count);
    if (r == 0 && last && plan->wait) {
        crew_await_asked(crew);
        if (plan->timeout_ms)
            crew_await_void(crew, 6);
    } else if (r == 0) {
        part.fails_at = last ? plan->fails_at : 0;
        if (plan->timeout_ms)
            part.deadline_ns = cox_deadline_after_ms(plan->timeout_ms);
        failed = part_step(&part, &steps[2], 6, crew, self, test_err());
        part.deadline_ns = COX_DEADLINE_NEVER;
    }
    if (r == 0 && failed != (last ? COX_NO_SPACE : plan->timeout_ms ? COX_TIMEOUT : COX_ABORTED))
        /* Of those that time out the first says so, and the others hear of it. */
        if (last || !plan->timeout_ms || failed != COX_ABORTED)
            r = cox_fail(&self->err, COX_STATE, "the step that fails ended with %d: %s", failed,
                         test_error.text);
    if (r == 0 && failed == COX_TIMEOUT && !strstr(test_error.text, "rank 3"))
        r = cox_fail(&self->err, COX_STATE, "who is missing? %s", test_error.text);
    /* All get it from the one that fails. The coordinator cancels the step when it notices. */
    if (plan->fails_at)
        crew_meet(crew, 2 * crew->rank_count);
    crew_set_void(crew, 6);
    if (r == 0)
        r = part_step(&part, &steps[7], 7, crew, self, &self->err);
    part_close(&part);
    cox_group_leave(group);
    return r;
}

/* Steps 0 and 7 of the reference. */
static void check_around_a_failure(struct plan *plan)
{
    char shipped[] = SHIPPED;
    uint32_t vocab_size;
    struct crew_rank *reference = reference_of(shipped, &vocab_size);
    float expected[3 * 512];
    struct crew crew;

    memcpy(expected, reference->numbers, 2 * vocab_size * sizeof(float));
    memcpy(expected + 2 * vocab_size, reference->numbers + rows_before(7) * vocab_size,
           vocab_size * sizeof(float));
    plan->directory = shipped;
    crew_run(&crew, 4, run_around_a_failure, plan);
    for (uint32_t rank = 0; rank < 4; rank++) {
        expect_ended(&crew, rank, 0);
        expect_numbers(&crew, rank, expected, 3 * vocab_size);
    }
    crew_close(&crew);
    free(reference);
}

/* The shipped model has 4 layers: the embedding, 2 exchanges a layer, the output. */
PLAIN_TEST(s2_a_rank_that_fails_at_any_exchange_ends_the_step_for_all)
{
    for (uint32_t at = 1; at <= 10; at++)
        check_around_a_failure(&(struct plan){.fails_at = at});
}

PLAIN_TEST(s2_a_step_that_was_given_up_ends_while_ranks_wait_for_each_other)
{
    check_around_a_failure(&(struct plan){.wait = true});
}

PLAIN_TEST(p3_a_rank_that_does_not_come_is_named_at_the_deadline)
{
    check_around_a_failure(&(struct plan){.wait = true, .timeout_ms = 300});
}

/* Steps until one fails, and one more. */
static int run_until_a_death(struct crew *crew, uint32_t rank, struct crew_rank *self,
                             void *context)
{
    const struct plan *plan = context;
    struct cox_error later = {0};
    struct cox_group *group;
    struct part part;
    int r;

#if COX_TESTING
    if (rank == crew->rank_count - 1) {
        cox_fault_rank((int)rank);
        cox_fault_arm(plan->arm);
    }
#endif
    group = crew_join(crew, rank);
    r = part_open(&part, plan->directory, group, &self->err);
    if (r) {
        crew_meet(crew, crew->rank_count - 1);
        return r;
    }
    for (uint64_t sequence = 1; r == 0 && sequence < 20; sequence++)
        r = part_step(&part, &steps[0], sequence, crew, self, &self->err);
    if (r && part_step(&part, &steps[0], 20, crew, self, &later) != COX_PEER_DEAD)
        r = cox_fail(&later, COX_STATE, "the step after it does not know");
    /* A rank that leaves counts as dead for those that have not noticed yet. */
    crew_meet(crew, crew->rank_count - 1);
    part_close(&part);
    cox_group_leave(group);
    return r;
}

PLAIN_TEST(b3_a_rank_killed_at_any_step_of_an_exchange_is_named_by_the_others)
{
    static const char *const arms[] = {
        "exchange.made:kill:3:1",     "exchange.written:kill:3:1", "exchange.written:kill:3:4",
        "exchange.written:kill:3:10", "exchange.read:kill:3:1",    "exchange.read:kill:3:7",
        "exchange.read:kill:3:10",    "exchange.read:kill:3:21",
    };

#if !COX_TESTING
    skip();
#endif
    for (size_t i = 0; i < sizeof(arms) / sizeof(arms[0]); i++) {
        char shipped[] = SHIPPED;
        struct plan plan = {.directory = shipped, .arm = arms[i]};
        struct crew crew;

        crew_run(&crew, 4, run_until_a_death, &plan);
        assert_true(WIFSIGNALED(crew.statuses[3]));
        assert_int_equal(WTERMSIG(crew.statuses[3]), SIGKILL);
        for (uint32_t rank = 0; rank < 3; rank++) {
            expect_ended(&crew, rank, COX_PEER_DEAD);
            if (!strstr(crew.ranks[rank].err.text, "rank 3"))
                fail_msg("%s: \"%s\" does not name rank 3", arms[i], crew.ranks[rank].err.text);
        }
        crew_close(&crew);
    }
}

/* ---- ranks that do not fit ---- */

/* Two slices of up to 100 numbers each; the last rank has 200. */
static int run_with_another_length(struct crew *crew, uint32_t rank, struct crew_rank *self,
                                   void *context)
{
    struct cox_group *group = crew_join(crew, rank);
    struct cox_tensor_gather *exchange = NULL;
    int r = cox_tensor_gather_new(group, 2, rank == crew->rank_count - 1 ? 200 : 100,
                                  COX_DEADLINE_NEVER, &exchange, &self->err);

    (void)context;
    cox_tensor_gather_free(exchange);
    cox_group_leave(group);
    return r;
}

PLAIN_TEST(b13_ranks_that_loaded_different_models_get_an_error)
{
    struct crew crew;

    crew_run(&crew, 4, run_with_another_length, NULL);
    for (uint32_t rank = 0; rank < 4; rank++) {
        expect_ended(&crew, rank, COX_INVALID);
        assert_contains(crew.ranks[rank].err.text, rank == 3 ? "rank 0" : "rank 3");
        assert_contains(crew.ranks[rank].err.text, "200");
    }
    crew_close(&crew);
}

enum gift {
    GIFT_UNSEALED,
    GIFT_WRITABLE, /* by its receiver */
    GIFT_SHORT,
    GIFT_DEVICE,
    GIFT_OPEN_UNSEALED, /* another mode */
    GIFT_OPEN,          /* of sealed memory, with any mode */
    GIFT_COUNT,
};

static int make_gift(enum gift gift)
{
    /* 2 slices of 100 numbers, to a multiple of 64 bytes, three times. */
    const off_t size = gift == GIFT_SHORT ? 64 : 2 * 832;
    const bool sealed = gift != GIFT_UNSEALED && gift != GIFT_OPEN_UNSEALED;
    const mode_t mode = gift == GIFT_OPEN || gift == GIFT_OPEN_UNSEALED ? 0666 : 0600;
    int fd;

    if (gift == GIFT_DEVICE)
        return open("/dev/null", O_RDWR | O_CLOEXEC);
    fd = memfd_create("gift", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || fchmod(fd, mode) || ftruncate(fd, size) ||
        (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) ||
        (gift == GIFT_OPEN && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)))
        return -1;
    return fd;
}

/* The last rank takes part in all that an exchange is made of, gives what it wants, and sees what
 * it can do to the memory of rank 0. */
static int run_with_a_gift(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    const enum gift *gift = context;
    const uint64_t facts[2] = {2, 100};
    struct cox_group *group = crew_join(crew, rank);
    struct cox_tensor_gather *exchange = NULL;
    uint64_t all[4];
    int fd, fds[2], r;

    if (rank == 0) {
        r = cox_tensor_gather_new(group, 2, 100, COX_DEADLINE_NEVER, &exchange, &self->err);
        cox_tensor_gather_free(exchange);
        cox_group_leave(group);
        return r;
    }
    fd = make_gift(*gift);
    r = fd < 0 ? -errno
               : cox_group_gather(group, facts, sizeof(facts), all, COX_DEADLINE_NEVER, &self->err);
    if (r == 0)
        r = cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, COX_DEADLINE_NEVER, &self->err);
    if (r)
        return r;
    if (mmap(NULL, 64, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0) != MAP_FAILED)
        return cox_fail(&self->err, COX_STATE, "the memory of rank 0 can be mapped for writing");
    if (pwrite(fds[0], &r, 1, 0) >= 0 || ftruncate(fds[0], 0) == 0 ||
        fcntl(fds[0], F_ADD_SEALS, F_SEAL_WRITE) == 0)
        return cox_fail(&self->err, COX_STATE, "the memory of rank 0 can be changed");
    if (mmap(NULL, 64, PROT_READ, MAP_SHARED, fds[0], 0) == MAP_FAILED)
        return cox_fail(&self->err, -errno, "and not even read");
    cox_group_leave(group);
    return 0;
}

PLAIN_TEST(b16_b23_memory_of_another_rank_is_checked_and_can_only_be_read)
{
    static const struct {
        int result;
        const char *word;
    } expected[GIFT_COUNT] = {
        [GIFT_UNSEALED] = {COX_DENIED, "not sealed"},
        [GIFT_WRITABLE] = {COX_DENIED, "other processes could write it"},
        [GIFT_SHORT] = {COX_CORRUPT, "64 bytes, expected 1664"},
        [GIFT_DEVICE] = {COX_DENIED, "not a regular file"},
        [GIFT_OPEN_UNSEALED] = {COX_DENIED, "mode 0666"},
        [GIFT_OPEN] = {0, ""},
    };

    for (enum gift gift = 0; gift < GIFT_COUNT; gift++) {
        struct crew crew;

        crew_run(&crew, 2, run_with_a_gift, &gift);
        expect_ended(&crew, 0, expected[gift].result);
        expect_ended(&crew, 1, 0);
        assert_contains(crew.ranks[0].err.text, expected[gift].word);
        assert_int_equal(strstr(crew.ranks[0].err.text, "rank 1") != NULL,
                         expected[gift].result != 0);
        crew_close(&crew);
    }
}

/* ---- numbers that cannot be ---- */

struct spoil {
    char *directory;
    /* as fails_at */
    uint32_t rank, at;
    float number;
};

/* Two steps, in the second of which one rank gives what no rank computes. */
static int run_with_a_spoilt_number(struct crew *crew, uint32_t rank, struct crew_rank *self,
                                    void *context)
{
    const struct spoil *spoil = context;
    struct cox_group *group = crew_join(crew, rank);
    struct part part;
    int r = part_open(&part, spoil->directory, group, &self->err);

    if (r == 0)
        r = part_step(&part, &steps[0], 5, crew, self, &self->err);
    if (r == 0 && rank == spoil->rank) {
        part.spoils_at = spoil->at;
        part.spoilt = spoil->number;
    }
    if (r == 0)
        r = part_step(&part, &steps[2], 6, crew, self, &self->err);
    /* No rank leaves before all have seen it. */
    crew_meet(crew, crew->rank_count);
    part_close(&part);
    cox_group_leave(group);
    return r;
}

/* The rank itself says so, too. */
static void expect_blamed(struct spoil *spoil, const char *what)
{
    char text[64];
    struct crew crew;

    snprintf(text, sizeof text, "rank %u gave %s", spoil->rank, what);
    crew_run(&crew, 4, run_with_a_spoilt_number, spoil);
    for (uint32_t rank = 0; rank < 4; rank++) {
        expect_ended(&crew, rank, COX_INVALID);
        if (!strstr(crew.ranks[rank].err.text, text))
            fail_msg("at %u: rank %u says: %s", spoil->at, rank, crew.ranks[rank].err.text);
    }
    crew_close(&crew);
}

#define NOT_FINITE "a number that is not finite"

/* In a sum of any layer, and in the logits. Whichever rank adds it up, and whatever it would
 * compute with it, names the rank that gave it. */
PLAIN_TEST(p10_b14_a_number_that_is_not_finite_names_the_rank_that_gave_it)
{
    char shipped[] = SHIPPED;
    const float numbers[] = {NAN, INFINITY, -INFINITY, 3e38f};

    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t at = 2; at <= 10; at += 4) {
            struct spoil spoil = {shipped, i, at, numbers[i]};

            /* One logit of that size is one, and no sum. */
            if (at == 10 && isfinite(spoil.number))
                continue;
            expect_blamed(&spoil, isfinite(spoil.number) ? "the number 3e+38" : NOT_FINITE);
        }
}

#define BLAMED_LENGTH 16

/* What one rank sees of the slices of a gather. */
struct sight {
    /* the rank that sees it, and the rank that gave it */
    uint32_t rank, of;
    /* in place of the first one */
    float number;
};

static int blame_what_is_seen(struct part *part, const struct sight *sight, const float **slices,
                              struct cox_error *err)
{
    float seen[BLAMED_LENGTH] = {sight->number};
    slices[sight->of] = seen;
    int r = cox_tensor_gather_blame(part->exchange, slices, BLAMED_LENGTH, err);
    cox_group_abort(part->group);
    return r;
}

/* One after the other: the rank that has seen it, the one that gave it, and those that learn of
 * both. */
static int run_with_a_sight(struct crew *crew, uint32_t rank, struct crew_rank *self, void *context)
{
    static const uint32_t turns[] = {1, 2, 0, 3};
    const struct sight *sight = context;
    struct part part = {.group = crew_join(crew, rank)};
    float own[4 * BLAMED_LENGTH] = {0};
    const float *slices[4];
    int r = cox_tensor_gather_new(part.group, 1, BLAMED_LENGTH, COX_DEADLINE_NEVER, &part.exchange,
                                  &self->err);

    if (r == 0)
        r = cox_tensor_gather_begin(part.exchange, 1, COX_DEADLINE_NEVER, &self->err);
    if (r == 0)
        r = gather(&part, own, BLAMED_LENGTH, BLAMED_LENGTH, slices, &self->err);
    for (uint32_t turn = 0; turn < 4; turn++) {
        crew_meet(crew, 4 * (turn + 1));
        if (r || turns[turn] != rank)
            continue;
        r = rank == sight->rank
                ? blame_what_is_seen(&part, sight, slices, &self->err)
                : gather(&part, own, BLAMED_LENGTH, BLAMED_LENGTH, slices, &self->err);
    }
    crew_meet(crew, 20);
    cox_tensor_gather_free(part.exchange);
    cox_group_leave(part.group);
    return r;
}

static void run_sight(struct crew *crew, struct sight *sight)
{
    crew_run(crew, 4, run_with_a_sight, sight);
    for (uint32_t rank = 0; rank < 4; rank++)
        expect_ended(crew, rank, rank == sight->rank ? COX_INVALID : COX_ABORTED);
}

/* A rank that has not seen the number itself learns of one that ended because of it, or of one that
 * followed that one, or of both, each of which names the other; and names the rank that gave it. */
PLAIN_TEST(p10_b14_a_rank_that_ends_a_step_because_of_a_number_names_its_rank)
{
    const float numbers[] = {NAN, 3e38f};

    for (uint32_t i = 0; i < 2; i++) {
        struct sight sight = {1, 2, numbers[i]};
        struct crew crew;

        run_sight(&crew, &sight);
        for (uint32_t rank = 0; rank < 4; rank++)
            if (!strstr(crew.ranks[rank].err.text,
                        rank == sight.rank ? "rank 2 gave " : "because of rank 2"))
                fail_msg("rank %u says: %s", rank, crew.ranks[rank].err.text);
        crew_close(&crew);
    }
}

/* Numbers that another rank has corrected since they were added up: the largest of those that are
 * left is no rank's fault. */
PLAIN_TEST(p10_b14_numbers_that_explain_nothing_name_no_rank)
{
    struct sight sight = {1, 2, 7};
    struct crew crew;

    run_sight(&crew, &sight);
    if (strstr(crew.ranks[1].err.text, "rank ") ||
        !strstr(crew.ranks[1].err.text, "none of its inputs"))
        fail_msg("rank 1 says: %s", crew.ranks[1].err.text);
    crew_close(&crew);
}

/* Of a model so large that not all tokens are the first rank's. */
PLAIN_TEST(p10_b14_a_row_of_a_token_that_is_not_finite_names_the_rank_that_gave_it)
{
    char directory[FIXTURE_PATH_SIZE];
    struct spoil spoil = {directory, 1, 1, INFINITY}; /* whose the token of the second step is */

    fixture_directory_create(directory);
    fixture_write_model(directory, &fixture_shapes[9], 5, 1);
    expect_blamed(&spoil, NOT_FINITE);
    fixture_directory_remove(directory);
}
