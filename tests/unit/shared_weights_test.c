/* shared_weights: one version after the other, with the rank of engine_loop_fixture.h, and offers
 * opened as ranks open them. */
#include "engine/batching/prompt_queue.h"
#include "engine/batching/shared_weights.h"
#include "engine/model/model_image.h"
#include "engine/model/digest.h"
#include "engine_loop_fixture.h"
#include "model_fixture.h"
#include "tests/lib/test.h"

#include <coxswain/handle.h>

#define PATIENCE_MS 60000

static const struct cox_model_config small = {
    .hidden_size = 16,
    .intermediate_size = 16,
    .layer_count = 1,
    .head_count = 8,
    .kv_head_count = 8,
    .head_dim = 2,
    .vocab_size = 17,
    .position_count_max = 64,
    .rms_norm_eps = 1e-5f,
    .rope_theta = 10000,
};

struct fixture {
    /* of two models with the same shapes */
    const char *folders[2];
    struct cox_executor *executor;
    struct cox_shared_weights *weights;
};
static struct fixture f;

static struct cox_weights_announcement told_now(void)
{
    struct cox_weights_announcement announcement;
    f.executor->announce(f.executor->announce_context, &announcement);
    return announcement;
}

TEST_OWNED(cox_shared_weights_free)

static int open_fixture(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        f.folders[i] = test_folder();
        fixture_write_model(f.folders[i], &small, 7 + i, 1);
    }
    f.executor = executor_new();
    assert_ok(cox_shared_weights_load(f.folders[0], NULL, NULL, &f.weights, test_err()));
    test_own(f.weights, cox_shared_weights_free_owned);
    assert_ok(cox_shared_weights_publish(f.weights, f.executor, test_err()));
    return 0;
}

#define TEST(name) TEST_WITH(name, open_fixture, NULL)

static struct cox_weights_status status_now(void)
{
    struct cox_weights_status status;
    cox_shared_weights_status(f.weights, &status);
    return status;
}

static uint64_t digest_of(const char *folder)
{
    uint64_t digest = 0;
    assert_ok(cox_model_digest_folder(folder, &digest, test_err()));
    return digest;
}

/* It is this version, and what it names is this folder's model. */
static void expect_offer(const struct cox_weights_announcement *announcement, uint64_t version,
                         const char *folder)
{
    struct cox_region region = {0};
    struct cox_model_image image;
    int fd = -1;
    assert_int_equal(announcement->version, version);
    assert_ok(cox_handle_open(&announcement->handle, NULL, cox_deadline_after_ms(PATIENCE_MS), &fd,
                              test_err()));
    assert_ok(cox_region_attach_fd(&region, fd, "cox_weights", announcement->size,
                                   COX_REGION_SEALED, test_err()));
    assert_int_equal(region.size, announcement->size);
    assert_ok(cox_model_image_read(region.base, region.size, &image, test_err()));
    assert_true(image.digest == digest_of(folder));
    cox_region_detach(&region);
    close(fd);
}

/* Nothing of it is left in this process, and no process can open it. */
static void expect_gone(const struct cox_weights_announcement *announcement)
{
    int fd = -1;
    assert_int_equal(
        cox_handle_open(&announcement->handle, NULL, cox_deadline_after_ms(PATIENCE_MS), &fd, NULL),
        COX_NOT_FOUND);
}

/* What other groups read: so many changes since the beginning, and the model of the folder. */
static void expect_told(uint64_t changes, const char *folder)
{
    assert_int_equal(f.executor->kv_changes, changes);
    assert_true(f.executor->kv_digest == (changes ? digest_of(folder) : 0));
}

/* The version of a step that offers nothing. */
static uint64_t step_version(uint64_t epoch)
{
    struct cox_weights_announcement announcement;
    assert_false(cox_shared_weights_step(f.weights, epoch, &announcement));
    return announcement.version;
}

/* The step offers this version. */
static struct cox_weights_announcement expect_step_offer(uint64_t epoch, uint64_t version,
                                                         const char *folder)
{
    struct cox_weights_announcement announcement;
    assert_true(cox_shared_weights_step(f.weights, epoch, &announcement));
    expect_offer(&announcement, version, folder);
    return announcement;
}

/* ---- replace, on a thread ---- */

struct replacement {
    pthread_t thread;
    const char *folder;
    uint64_t timeout_ms;
    uint64_t version;
    struct cox_error error;
    int r;
};

static void *replace_main(void *context)
{
    struct replacement *replacement = context;
    replacement->r = cox_shared_weights_replace(f.weights, replacement->folder,
                                                cox_deadline_after_ms(replacement->timeout_ms),
                                                &replacement->version, &replacement->error);
    return NULL;
}

/* On return it is NEXT. */
static void replace_start(struct replacement *replacement, const char *folder)
{
    *replacement = (struct replacement){.folder = folder, .timeout_ms = PATIENCE_MS};
    assert_int_equal(pthread_create(&replacement->thread, NULL, replace_main, replacement), 0);
    AWAIT(cox_shared_weights_pending(f.weights));
}

static int replace_join(struct replacement *replacement)
{
    assert_int_equal(pthread_join(replacement->thread, NULL), 0);
    return replacement->r;
}

/* ---- tests ---- */

TEST(weights_an_init_names_the_newest_version)
{
    struct replacement replacement;
    const struct cox_weights_announcement first = told_now();
    expect_offer(&first, 1, f.folders[0]);
    replace_start(&replacement, f.folders[1]);
    const struct cox_weights_announcement next = told_now();
    expect_offer(&next, 2, f.folders[1]);
    expect_offer(&first, 1, f.folders[0]); /* for ranks whose init is under way */
    cox_shared_weights_used(f.weights, 2, 1);
    assert_int_equal(replace_join(&replacement), 0);
    assert_int_equal(replacement.version, 2);
    const struct cox_weights_announcement announcement = told_now();
    expect_offer(&announcement, 2, f.folders[1]);
    expect_gone(&first);
    assert_true(status_now().digest == digest_of(f.folders[1]));
}

/* Until a step with it has succeeded, in every epoch of the ranks: one of them may be new. */
TEST(weights_are_offered_by_steps_until_one_has_succeeded)
{
    struct replacement replacement;
    expect_step_offer(1, 1, f.folders[0]);
    cox_shared_weights_failed(f.weights, 1, COX_REJECTED, "a rank has no memory");
    expect_step_offer(1, 1, f.folders[0]);
    cox_shared_weights_used(f.weights, 1, 1);
    assert_int_equal(step_version(1), 1);
    expect_step_offer(2, 1, f.folders[0]);
    cox_shared_weights_used(f.weights, 1, 1); /* a step of the epoch before */
    expect_step_offer(2, 1, f.folders[0]);
    cox_shared_weights_used(f.weights, 1, 2);
    assert_int_equal(step_version(2), 1);
    replace_start(&replacement, f.folders[1]);
    expect_step_offer(2, 2, f.folders[1]);
    cox_shared_weights_used(f.weights, 1, 2); /* submitted before */
    expect_step_offer(2, 2, f.folders[1]);
    cox_shared_weights_used(f.weights, 2, 2);
    assert_int_equal(replace_join(&replacement), 0);
    assert_int_equal(step_version(2), 2);
}

TEST(weights_stay_until_a_step_has_used_the_next)
{
    struct replacement replacement;
    const struct cox_weights_announcement first = told_now();
    replace_start(&replacement, f.folders[1]);
    expect_step_offer(1, 2, f.folders[1]);
    /* A step that was submitted before, or failed for another reason, says nothing. */
    cox_shared_weights_used(f.weights, 1, 1);
    cox_shared_weights_failed(f.weights, 1, COX_REJECTED, "before");
    cox_shared_weights_failed(f.weights, 2, COX_PEER_DEAD, "rank 1 died");
    cox_shared_weights_failed(f.weights, 2, COX_TIMEOUT, "late");
    assert_true(cox_shared_weights_pending(f.weights));
    expect_offer(&first, 1, f.folders[0]);
    expect_told(0, NULL);
    cox_shared_weights_used(f.weights, 2, 1);
    expect_told(1, f.folders[1]);
    expect_gone(&first);
    assert_int_equal(replace_join(&replacement), 0);
    assert_int_equal(step_version(1), 2);
    cox_shared_weights_used(f.weights, 2, 1);
    expect_told(1, f.folders[1]);
}

TEST(weights_refused_by_a_rank_are_withdrawn)
{
    struct replacement replacement;
    const struct cox_weights_announcement first = told_now();
    cox_shared_weights_used(f.weights, 1, 1);
    replace_start(&replacement, f.folders[1]);
    const struct cox_weights_announcement next = expect_step_offer(1, 2, f.folders[1]);
    cox_shared_weights_failed(f.weights, 2, COX_REJECTED, "rank 3: no memory");
    assert_int_equal(replace_join(&replacement), COX_REJECTED);
    assert_contains(replacement.error.text, "rank 3: no memory");
    assert_false(cox_shared_weights_pending(f.weights));
    expect_told(1, f.folders[0]);
    expect_gone(&next);
    /* Ranks that have switched do not have it any more; the others know it by its handle. */
    const struct cox_weights_announcement again = expect_step_offer(1, 3, f.folders[0]);
    assert_memory_equal(&again.handle, &first.handle, sizeof first.handle);
    assert_int_equal(told_now().version, 3);
    cox_shared_weights_used(f.weights, 3, 1);
    assert_int_equal(step_version(1), 3);
    /* And again, with a number that was never there. */
    replace_start(&replacement, f.folders[1]);
    expect_step_offer(1, 4, f.folders[1]);
    cox_shared_weights_used(f.weights, 4, 1);
    assert_int_equal(replace_join(&replacement), 0);
    assert_int_equal(replacement.version, 4);
    expect_told(2, f.folders[1]);
}

static int replace_now(const char *folder, uint64_t deadline_ns, struct cox_error *err)
{
    uint64_t version;
    return cox_shared_weights_replace(f.weights, folder, deadline_ns, &version, err);
}

TEST(weights_one_at_a_time_until_a_deadline_or_the_end)
{
    struct replacement replacement;
    assert_int_equal(replace_now(f.folders[1], cox_deadline_after_ms(1), NULL), COX_TIMEOUT);
    assert_int_equal(status_now().next, 2);
    assert_int_equal(replace_now(f.folders[1], cox_deadline_after_ms(1), NULL), COX_BUSY);
    cox_shared_weights_used(f.weights, 2, 1);
    replace_start(&replacement, f.folders[0]);
    cox_shared_weights_stop(f.weights);
    assert_int_equal(replace_join(&replacement), COX_CLOSED);
    assert_int_equal(replace_now(f.folders[1], cox_deadline_after_ms(1), NULL), COX_CLOSED);
}

TEST(weights_that_cannot_be_leave_nothing)
{
    struct cox_model_config other = small;
    assert_int_equal(replace_now("/nowhere", COX_DEADLINE_NEVER, NULL), COX_NOT_FOUND);
    other.vocab_size = 18;
    fixture_write_model(f.folders[1], &other, 1, 1);
    const char *const words[] = {"vocab_size is 18", f.folders[1]};
    for (int i = 0; i < 2; i++)
        assert_refused(replace_now(f.folders[1], COX_DEADLINE_NEVER, test_err()), COX_INVALID,
                       words[i]);
    assert_int_equal(status_now().next, 0);
    expect_step_offer(1, 1, f.folders[0]);
}

/* ---- with an engine loop ---- */

static struct cox_prompt_queue *prompt_queue_new(void)
{
    const struct cox_prompt_queue_options options = {
        .engine_loop = {.block_count = BLOCK_COUNT_MAX,
                        .block_size = BLOCK_SIZE,
                        .position_count_max = 128,
                        .sequence_count_max = 8,
                        .weights = f.weights},
    };
    struct cox_prompt_queue *queue = NULL;
    assert_ok(cox_prompt_queue_start(f.executor, &options, &queue, test_err()));
    return queue;
}

/* Also before the first prompt, and after the last; and a prompt's steps tell of it. */
TEST(weights_of_a_group_with_nothing_to_do_come_with_a_step_without_rows)
{
    const int32_t tokens[] = {3, 1, 4};
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = 5};
    struct cox_prompt_queue_client *client;
    struct cox_prompt_output result;
    uint64_t version = 0, count;
    int wake_fd = eventfd(0, EFD_CLOEXEC);
    struct cox_weights_announcement before = told_now();
    struct cox_prompt_queue *queue = prompt_queue_new();
    for (uint64_t turn = 0; turn < 3; turn++) {
        assert_ok(cox_shared_weights_replace(f.weights, f.folders[(turn + 1) % 2],
                                             cox_deadline_after_ms(PATIENCE_MS), &version,
                                             test_err()));
        assert_int_equal(version, 2 + turn);
        expect_offer(&f.executor->offered, 2 + turn, f.folders[(turn + 1) % 2]);
        expect_gone(&before);
        before = told_now();
        assert_int_equal(f.executor->weights_version, 2 + turn);
        assert_int_equal(cox_prompt_queue_client_new(queue, wake_fd, &client), 0);
        assert_int_equal(cox_prompt_queue_submit(client, &request, turn), 0);
        assert_int_equal(read(wake_fd, &count, sizeof count), sizeof count);
        assert_int_equal(cox_prompt_queue_take(client, &result), 0);
        assert_int_equal(result.finish, COX_FINISH_LENGTH);
        assert_int_equal(result.token_count, 5);
        cox_prompt_output_deinit(&result);
        cox_prompt_queue_client_free(client);
        assert_int_equal(f.executor->weights_version, 2 + turn);
    }
    cox_prompt_queue_stop(queue, NULL);
    assert_int_equal(f.executor->empty_count, 3);
    cox_prompt_queue_free(queue);
    close(wake_fd);
}

/* The end of a step that never works: the engine loop ends, and waiting callers get the error. */
static int diverged(uint64_t number)
{
    (void)number;
    return COX_DIVERGED;
}

static int rejected_first(uint64_t number)
{
    return number == 1 ? COX_REJECTED : 0;
}

TEST(weights_that_no_step_comes_to_an_end_with_are_given_up)
{
    static const struct {
        int (*status)(uint64_t number);
        int expected;
    } rows[] = {{diverged, COX_DIVERGED}, {rejected_first, COX_REJECTED}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        pthread_mutex_lock(&f.executor->lock);
        f.executor->script.status = rows[i].status;
        f.executor->script.loses_table = true;
        f.executor->sequence = f.executor->published = f.executor->void_through = 0;
        pthread_mutex_unlock(&f.executor->lock);
        struct cox_prompt_queue *queue = prompt_queue_new();
        assert_refused(replace_now(f.folders[1], cox_deadline_after_ms(PATIENCE_MS), test_err()),
                       rows[i].expected, "rank 1 says no");
        assert_false(cox_shared_weights_pending(f.weights));
        cox_prompt_queue_stop(queue, NULL);
        cox_prompt_queue_free(queue);
        expect_gone(&f.executor->offered);
        expect_step_offer(1, 3 + 2 * i, f.folders[0]);
    }
}

/* ---- with the engine loop alone, which the test feeds ---- */

struct prompt {
    uint32_t token_count, new_count;
    bool held;
};

struct schedule {
    struct cox_engine_loop *engine_loop;
    /* times that there was something to run */
    uint32_t looks;
    /* comes with the next weights */
    struct prompt behind;
    uint32_t done_count;
    /* when it was done, by its id */
    bool held[4];
    uint32_t hold_count;
    /* in the end, of one */
    int64_t hold_id;
};

static void prompt_add(const struct schedule *schedule, const struct prompt *prompt)
{
    static const int32_t tokens[64] = {3, 1, 4, 1, 5};
    const struct cox_prompt_request request = {.tokens = tokens,
                                               .token_count = prompt->token_count,
                                               .new_count_max = prompt->new_count,
                                               .hold_ms = prompt->held ? PATIENCE_MS : 0};
    assert_int_equal(cox_engine_loop_add(schedule->engine_loop, &request), 0);
}

static void on_schedule_done(void *context, const struct cox_sequence *sequence)
{
    struct schedule *schedule = context;
    assert_int_equal(sequence->error.code, 0);
    schedule->held[sequence->id] = sequence->hold != NULL;
    schedule->done_count++;
}

/* The third step is the first with other weights; the second one is in flight then. */
static bool on_schedule_feed(void *context, bool idle, uint64_t until_ns)
{
    struct schedule *schedule = context;
    (void)until_ns;
    if (idle) {
        const struct cox_kv_leases *holds = cox_engine_loop_kv_leases(schedule->engine_loop);
        schedule->hold_count = holds->count;
        schedule->hold_id = holds->first ? holds->first->id : 0;
        return false;
    }
    if (++schedule->looks == 3) {
        assert_int_equal(replace_now(f.folders[1], cox_now_ns(), NULL), COX_TIMEOUT);
        if (schedule->behind.token_count)
            prompt_add(schedule, &schedule->behind);
    }
    return true;
}

static void schedule_run(struct schedule *schedule, const struct prompt *prompts, uint32_t count)
{
    const struct cox_engine_loop_options options = {.block_count = BLOCK_COUNT_MAX,
                                                    .block_size = BLOCK_SIZE,
                                                    .position_count_max = 128,
                                                    .token_count_max = 16,
                                                    .hold_count_max = 4,
                                                    .weights = f.weights,
                                                    .steps_in_flight = 2,
                                                    .done = on_schedule_done,
                                                    .done_context = schedule,
                                                    .feed = on_schedule_feed,
                                                    .feed_context = schedule};
    assert_ok(cox_engine_loop_new(f.executor, &options, &schedule->engine_loop, test_err()));
    for (uint32_t i = 0; i < count; i++)
        prompt_add(schedule, &prompts[i]);
    assert_ok(cox_engine_loop_run(schedule->engine_loop, test_err()));
    assert_int_equal(schedule->done_count, count + (schedule->behind.token_count != 0));
    cox_engine_loop_free(schedule->engine_loop);
}

static int second_in_vain(uint64_t number)
{
    return number == 2 ? COX_TIMEOUT : 0;
}

static void second_awaits_the_third(struct cox_executor *executor, uint64_t number)
{
    if (number == 2)
        executor_await_published(executor, 3);
}

TEST(weights_sent_with_a_step_that_is_void_are_sent_again)
{
    static const struct prompt prompts[] = {{3, 9, false}, {3, 1, true}};
    struct schedule schedule = {0};
    f.executor->script.status = second_in_vain;
    f.executor->script.taken = second_awaits_the_third;
    schedule_run(&schedule, prompts, 2);
    assert_int_equal(f.executor->weights_sent[1], 1);
    assert_int_equal(f.executor->weights_sent[2], 1);
    assert_int_equal(f.executor->weights_sent[3], 2);
    for (uint64_t number = 4; number <= f.executor->sequence; number++)
        assert_int_equal(f.executor->weights_sent[number], 2);
    assert_int_equal(f.executor->weights_version, 2);
    assert_int_equal(status_now().version, 2);
    assert_int_equal(status_now().next, 0);
    expect_told(1, f.folders[1]);
    expect_offer(&f.executor->offered, 2, f.folders[1]);
    /* Of the former weights nothing is held. */
    assert_true(schedule.held[2]);
    assert_int_equal(schedule.hold_count, 0);
}

/* Others pull what is held as if it were of the present weights. */
TEST(m10_weights_of_a_step_are_those_of_all_that_is_held_since)
{
    static const struct prompt prompts[] = {{3, 1, true}, {40, 1, true}};
    struct schedule schedule = {.behind = {3, 1, true}};
    f.executor->script.taken = second_awaits_the_third;
    schedule_run(&schedule, prompts, 2);
    assert_int_equal(f.executor->weights_sent[2], 1);
    assert_int_equal(f.executor->weights_sent[3], 2);
    assert_int_equal(f.executor->sequence, 3);
    assert_true(schedule.held[1]);
    assert_false(schedule.held[2]); /* 29 of its positions are of the weights before */
    assert_true(schedule.held[3]);
    assert_int_equal(schedule.hold_count, 1);
    assert_int_equal(schedule.hold_id, 3);
}
