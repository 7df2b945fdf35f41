/* Groups of legacy workers are started again as a whole: requirement P8. */
#include "legacy_group.h"

static void restart_all(struct test_group *group)
{
    assert_ok(cox_executor_restart(test_group_executor(group), COX_RANK_ALL, soon(), test_err()));
}

static const char *const *const commands[] = {all_legacy, odd_native, all_native};
#define COMMAND_COUNT (sizeof commands / sizeof commands[0])

TEST(p8_a_group_of_legacy_workers_starts_again)
{
    for (size_t c = 0; c < COMMAND_COUNT; c++) {
        for (uint32_t rank_count = 1; rank_count <= RANK_COUNT_MAX;
             rank_count *= rank_count == 1 ? 4 : 2) {
            struct test_group *group = group_start(rank_count, commands[c]);
            group_init(group);
            group_infer(group);
            restart_all(group);
            group_live(group);
        }
    }
}

static void keep_status(void *context, const struct cox_completion *completion)
{
    atomic_store((atomic_int *)context, completion->status);
}

/* In flight, replied late, never replied, stopped, dead; and tokens that no process has any more.
 */
TEST(p8_a24_whatever_its_workers_were_in)
{
    for (size_t c = 0; c < COMMAND_COUNT; c++) {
        struct test_group *group = group_start(3, commands[c]);
        struct cox_executor *executor = test_group_executor(group);
        atomic_int status = -1;
        assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, keep_status, &status));
        for (int round = 0; round < 4; round++) {
            struct step step;
            const struct row row = {1, 5};
            group_init(group);
            group_infer(group);
            rank_halt(group, 1);
            atomic_store(&status, -1);
            step_fill(&step, &row, 1);
            /* The reply is late in the first round, in flight in the others. */
            assert_ok(cox_executor_submit(
                executor, &step.request,
                SUBMIT_WITH(.deadline_ns = round == 0 ? cox_deadline_after_ms(50) : soon()), NULL,
                test_err()));
            if (round == 2)
                assert_ok(cox_executor_kill(executor, 2, test_err()));
            /* A stray one, too. */
            if (round == 3)
                cox_gate_post(&executor->channels[COX_CHANNEL_EXECUTE].gate, 0,
                              COX_WAKEUP_REQUEST_CONSUME);
            restart_all(group);
            int ended = atomic_load(&status);
            if (round > 0 || ended != COX_TIMEOUT)
                assert_int_equal(ended, COX_PEER_DEAD);
        }
        group_live(group);
    }
}

/* A worker that ends in order removes the names of the regions that it had opened. */
TEST(p8_the_names_are_made_again)
{
    static const char *const regions[] = {
        "execute_request",         "execute_response",         "transfer_request",
        "transfer_response",       "shared_sync_link_request", "shared_sync_link_response",
        "recover_command_request", "recover_command_response", "execute_error_response",
    };
    for (size_t c = 0; c < COMMAND_COUNT; c++) {
        char name[64];
        struct test_group *group = test_group_start(
            2, SMALL(.workers.command = commands[c], .name = test_unique_name(name)));
        group_init(group);
        size_t before = test_count_names(name);
        for (int round = 0; round < 2; round++) {
            for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++) {
                char path[192];
                snprintf(path, sizeof path, "/dev/shm/%s_%s", test_group_executor(group)->objects,
                         regions[i]);
                if (round == 0 || i % 2)
                    assert_int_equal(unlink(path), 0);
            }
            restart_all(group);
            assert_int_equal(test_count_names(name), before);
            group_init(group);
        }
        group_live(group);
        assert_int_equal(test_count_names(name), 0);
    }
}

/* The token of the error channel died with a rank; its report is delivered, and the next rank can
 * report. */
TEST(p8_m9_the_error_channel_is_free_again)
{
    for (size_t c = 0; c < COMMAND_COUNT - 1; c++) {
        struct test_group *group = group_start_with(2, commands[c], "COX_LEGACY_FAULT",
                                                    c == 0 ? "1:device lost" : "0:device lost");
        struct cox_gate *gate = &test_group_executor(group)->channels[COX_CHANNEL_ERROR].gate;
        group_init(group);
        assert_true(cox_gate_take(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE));
        restart_all(group);
        group_init(group);
        group_infer(group);
        test_await_faults(group, 1);
        assert_string_equal(test_fault(group, 0), "-1 device lost");
        /* There is one token, not two. */
        assert_true(cox_gate_take(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE));
        assert_false(cox_gate_take(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE));
        cox_gate_post(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE);
        group_end(group);
    }
}

LEGACY_TEST(p8_one_legacy_rank_alone_cannot_be_started, 2, all_native)
{
    assert_refused(cox_executor_restart(executor, 1, soon(), test_err()), COX_UNSUPPORTED,
                   "COX_RANK_ALL");
}

TEST(p8_p7_nothing_grows_in_legacy_groups)
{
    char name[64];
    struct test_group *group =
        test_group_start(2, SMALL(.workers.command = all_native, .name = test_unique_name(name)));
    size_t names = test_count_names(name), fds = 0;
    for (int k = 0; k < 20; k++) {
        restart_all(group);
        assert_int_equal(test_count_names(name), names);
        if (k == 2)
            fds = test_count_fds();
        group_init(group);
    }
    assert_true(test_count_fds() <= fds);
    group_live(group);
}
