/* Requests of another machine that came into memory which is used again (payload_memory.h): not
 * while a rank that was asked may read it. */
#include "channel/memory/payload_memory.h"
#include "coordinator/executor/core.h"
#include "coordinator/transport/transport.h"
#include "large_payload_bytes.h"
#include "testing.h"

#include <sys/stat.h>

#define SIZE ((size_t)9 << 20)
#define RANK_COUNT 2
#define LATE_MS 300

static const char *const worker_command[] = {COX_TEST_BIN_DIR "/large_payload_worker", NULL};

/* One group, and what its executor has told. */
static struct far {
    struct cox_executor *executor;
    struct cox_payload_memory_pool pool;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t holds;
    /* of the last request that is forwarded */
    uint64_t sequence, told;
    int status;
    char replies[RANK_COUNT][32];
    uint64_t digest;
} far;

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context, (void)rank, (void)is_stderr;
    pthread_mutex_lock(&far.lock);
    far.holds += strncmp(text, "holds", 5) == 0;
    pthread_cond_broadcast(&far.changed);
    pthread_mutex_unlock(&far.lock);
}

static void on_forwarded(void *context, const struct cox_completion *completion)
{
    (void)context;
    pthread_mutex_lock(&far.lock);
    if (completion->status != COX_LATE) { /* told once more, of ranks that were late */
        memset(far.replies, 0, sizeof far.replies);
        for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
            size_t size;
            bool failed;
            const uint8_t *bytes = cox_completion_raw(completion, rank, &size, &failed);
            if (bytes && size < sizeof far.replies[0])
                memcpy(far.replies[rank], bytes, size);
        }
        far.status = completion->status;
        far.told = completion->sequence;
    }
    pthread_cond_broadcast(&far.changed);
    pthread_mutex_unlock(&far.lock);
}

static void far_begin(void)
{
    struct cox_executor_options options = COX_EXECUTOR_OPTIONS_INIT;
    const struct cox_executor_remote remote = {.forwarded = on_forwarded, .rank_here = RANK_COUNT};
    char name[64];
    test_needs_processes();
    far = (struct far){.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_cond_init(&far.changed, NULL);
    cox_payload_memory_pool_init(&far.pool);
    options.name = test_unique_name(name);
    options.rank_count = RANK_COUNT;
    options.workers.command = worker_command;
    options.depth = 2;
    options.hooks.line = on_line;
    assert_ok(cox_executor_start_remote(&options, &remote, &far.executor, test_err()));
}

static void far_end(void)
{
    far.executor = cox_executor_free(far.executor);
    cox_payload_memory_pool_deinit(&far.pool);
}

/* A request of SIZE bytes that begins with this line, in memory that the caller releases. */
static struct cox_payload_memory *request_come(const char *line)
{
    struct cox_payload_memory *memory = NULL;
    uint8_t *bytes = malloc(SIZE);
    assert_non_null(bytes);
    payload_fill(bytes, SIZE, (uint32_t)far.sequence);
    memcpy(bytes, line, strlen(line));
    bytes[strlen(line)] = '\n';
    far.digest = payload_digest(bytes, SIZE);
    assert_ok(cox_payload_memory_take(&far.pool, SIZE, &memory, test_err()));
    uint8_t *kept = cox_payload_memory_bytes(memory);
    if (kept)
        memcpy(kept, bytes, SIZE);
    else
        assert_ok(cox_payload_memory_fill(memory, 0, bytes, SIZE, test_err()));
    assert_ok(cox_payload_memory_finish(memory, test_err()));
    free(bytes);
    return memory;
}

/* Returns what forward returns. */
static int forward(struct cox_payload_memory *memory, uint64_t deadline_ns)
{
    const struct cox_rank_set asked = cox_rank_set_first(RANK_COUNT);
    const struct cox_transport_request request = {.channel = COX_CHANNEL_EXECUTE,
                                                  .type = COX_TYPE_OPAQUE,
                                                  .sequence = far.sequence + 1,
                                                  .deadline_ns = deadline_ns,
                                                  .replies = true,
                                                  .asked = &asked,
                                                  .size = SIZE,
                                                  .memory = memory};
    int r = cox_executor_forward(far.executor, &request, NULL);
    far.sequence += r == 0;
    return r;
}

/* Forwards a request, to which only the executor then refers. Returns its memory. */
static const struct cox_payload_memory *forward_line(const char *line, uint64_t deadline_ns)
{
    struct cox_payload_memory *memory = request_come(line);
    assert_int_equal(forward(memory, deadline_ns), 0);
    cox_payload_memory_unref(memory);
    return memory;
}

/* Rank 1 reads it, and holds it. */
static const struct cox_payload_memory *forward_hold(const struct test_pipe *pipe,
                                                     uint64_t deadline_ns)
{
    char line[300];
    const uint32_t held = far.holds + 1;
    snprintf(line, sizeof line, "only 1 hold %s", test_pipe_path(pipe));
    const struct cox_payload_memory *memory = forward_line(line, deadline_ns);
    pthread_mutex_lock(&far.lock);
    while (far.holds < held)
        pthread_cond_wait(&far.changed, &far.lock);
    pthread_mutex_unlock(&far.lock);
    return memory;
}

static int await_told(void)
{
    pthread_mutex_lock(&far.lock);
    while (far.told < far.sequence)
        pthread_cond_wait(&far.changed, &far.lock);
    const int status = far.status;
    pthread_mutex_unlock(&far.lock);
    return status;
}

static bool is_kept(const struct cox_payload_memory *memory)
{
    pthread_mutex_lock(&far.pool.lock);
    const bool kept = far.pool.kept == memory;
    pthread_mutex_unlock(&far.pool.lock);
    return kept;
}

static void await_kept(const struct cox_payload_memory *memory)
{
    while (!is_kept(memory)) /* the test's own time limit */
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
}

static void expect_whole(const struct cox_payload_memory *expected)
{
    char digest[32];
    assert_ptr_equal(forward_line("sum", COX_DEADLINE_NEVER), expected);
    assert_int_equal(await_told(), 0);
    snprintf(digest, sizeof digest, "%016" PRIx64, far.digest);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        assert_string_equal(far.replies[rank], digest);
    await_kept(expected);
}

TEST(a_late_rank_keeps_the_memory_until_it_has_returned_it)
{
    far_begin();
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_payload_memory *memory = forward_hold(pipe, cox_deadline_after_ms(LATE_MS));
    assert_int_equal(await_told(), COX_TIMEOUT);
    assert_true(is_kept(NULL));
    /* The next request comes elsewhere, and waits at the agent. */
    struct cox_payload_memory *next = request_come("sum");
    assert_ptr_not_equal(next, memory);
    assert_int_equal(forward(next, COX_DEADLINE_NEVER), COX_LATE); /* which releases what it can */
    assert_true(is_kept(NULL));
    test_pipe_release(pipe, 1);
    await_kept(memory);
    while (forward(next, COX_DEADLINE_NEVER) == COX_LATE)
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    assert_int_equal(await_told(), 0);
    cox_payload_memory_unref(next);
    await_kept(next);
    far_end();
}

TEST(a_rank_that_reads_is_not_disturbed)
{
    far_begin();
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_payload_memory *memory = forward_hold(pipe, COX_DEADLINE_NEVER);
    for (int i = 0; i < 3; i++) {
        struct cox_payload_memory *other = request_come("sum");
        assert_ptr_not_equal(other, memory);
        cox_payload_memory_unref(other);
    }
    test_pipe_release(pipe, 1);
    assert_int_equal(await_told(), 0);
    assert_string_equal(far.replies[1], "same");
    await_kept(memory);
    expect_whole(memory);
    far_end();
}

TEST(a_sequence_number_is_passed_on_once_and_in_its_turn)
{
    far_begin();
    struct test_pipe *pipe = test_pipe_new();
    forward_hold(pipe, COX_DEADLINE_NEVER);
    struct cox_payload_memory *other = request_come("sum");
    far.sequence--;
    assert_int_equal(forward(other, COX_DEADLINE_NEVER), COX_STALE);
    far.sequence += 5; /* more than the group has places for, and the first is in flight */
    assert_int_equal(forward(other, COX_DEADLINE_NEVER), COX_FULL);
    far.sequence -= 4;
    cox_payload_memory_unref(other);
    test_pipe_release(pipe, 1);
    assert_int_equal(await_told(), 0);
    far_end();
}

TEST(what_a_dead_rank_held_is_used_again_by_its_replacement)
{
    far_begin();
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_payload_memory *memory = forward_hold(pipe, COX_DEADLINE_NEVER);
    assert_true(is_kept(NULL));
    assert_ok(cox_executor_kill(far.executor, 1, test_err()));
    assert_int_equal(await_told(), COX_PEER_DEAD);
    await_kept(memory);
    assert_ok(
        cox_executor_restart(far.executor, 1, cox_deadline_after_ms(TEST_PATIENCE_MS), test_err()));
    for (int i = 0; i < 3; i++)
        expect_whole(memory);
    far_end();
}

TEST(the_end_of_the_ranks_ends_what_they_held)
{
    far_begin();
    struct test_pipe *pipe = test_pipe_new();
    const struct cox_payload_memory *memory = forward_hold(pipe, COX_DEADLINE_NEVER);
    far.executor = cox_executor_free(far.executor);
    assert_true(is_kept(memory));
    far_end();
}
