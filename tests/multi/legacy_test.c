/* The executor with legacy workers: tests/legacy/legacy_worker.py, which was written from the wire
 * contract alone, at 1 to 8 ranks, and groups in which some ranks are that worker and others one on
 * our library with the same replies (tests/legacy/native_worker.c). */
#include "coordinator/executor/requests_internal.h"
#include "legacy_group.h"

#include <sys/statvfs.h>

TEST(m7_legacy_ranks_serve_every_operation)
{
    for (uint32_t rank_count = 1; rank_count <= RANK_COUNT_MAX; rank_count *= 2)
        group_live(group_start(rank_count, all_legacy));
}

TEST(m7_mixed_ranks_serve_every_operation)
{
    for (uint32_t rank_count = 1; rank_count <= RANK_COUNT_MAX; rank_count *= 2) {
        group_live(group_start(rank_count, even_native));
        group_live(group_start(rank_count, odd_native));
    }
    group_live(group_start(2, all_native));
}

TEST(m7_the_sizes_of_the_contract)
{
    struct statvfs space;
    assert_int_equal(statvfs("/dev/shm", &space), 0);
    if ((uint64_t)space.f_bavail * space.f_frsize < 1024 * MIB)
        skip();
    struct test_group *group =
        test_group_start(2, START_WITH(.workers.command = all_legacy, .workers.legacy = true,
                                       .times.finalize_ms = TEST_PATIENCE_MS));
    assert_int_equal(test_request_size_max(test_group_executor(group), COX_CHANNEL_EXECUTE),
                     256 * MIB - 4);
    group_live(group);
}

/* ---- many requests ---- */

struct stepper {
    struct test_group *group;
    int64_t id;
    int r;
    struct cox_error err;
};

static void *stepper_main(void *context)
{
    struct stepper *stepper = context;
    for (int64_t count = 0; stepper->r == 0 && count < 100; count++) {
        const struct row row = {stepper->id, count ? 0 : 3};
        OWN_COMPLETION c = {0};
        stepper->r = step_call(stepper->group, &row, 1, soon(), &c, &stepper->err);
        if (stepper->r == 0 && (c.token_count != 1 || c.ids[0] != stepper->id ||
                                c.tokens[0] != (3 + count) % TOKEN_MODULUS))
            stepper->r = cox_fail(&stepper->err, COX_CORRUPT, "the reply of another request");
    }
    return NULL;
}

/* Three threads share the one frame of the execute channel while the other channels are used too.
 */
LEGACY_TEST(m1_channels_run_beside_each_other, 2, all_legacy, odd_native)
{
    struct stepper steppers[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        steppers[i] = (struct stepper){.group = group, .id = 40 + i};
        threads[i] = test_thread(stepper_main, &steppers[i]);
    }
    for (int i = 0; i < 20; i++) {
        link_expect(group, 0, NULL);
        group_pull(group);
        struct cox_recover_result results[2];
        assert_ok(cox_executor_recover(executor, COX_RECOVER_CLEAR, soon(), results, test_err()));
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        if (steppers[i].r)
            fail_msg("stepper %d: %d: %s", i, steppers[i].r, steppers[i].err.text);
    }
}

/* ---- submit ---- */

static void handler_set(struct test_group *group)
{
    assert_ok(cox_executor_set_handler(test_group_executor(group), COX_CHANNEL_EXECUTE,
                                       test_handler, group));
}

static int step_submit(struct test_group *group, const struct row *row, uint64_t deadline_ns,
                       struct cox_error *err)
{
    struct step step;
    step_fill(&step, row, 1);
    return cox_executor_submit(test_group_executor(group), &step.request,
                               SUBMIT_WITH(.deadline_ns = deadline_ns), NULL, err);
}

LEGACY_TEST_WITH(m1_pause_passes_a_stuck_inference, 2, "COX_LEGACY_DELAY_MS", "1500", all_legacy)
{
    struct cox_recover_result results[2];
    handler_set(group);
    assert_ok(step_submit(group, &(struct row){1, 5}, soon(), test_err()));
    assert_ok(cox_executor_recover(executor, COX_RECOVER_PAUSE, soon(), results, test_err()));
    assert_int_equal(test_completion_count(group), 0);
    const struct test_completion *c = test_await(group, 0);
    assert_int_equal(c->status, 0);
    assert_int_equal(c->tokens[0], 5);
    assert_int_equal(cox_executor_stop(executor), 0);
    assert_int_equal(test_completion_count(group), 1);
}

/* ---- faults ---- */

LEGACY_TEST_WITH(m9_fault_is_reported_beside_the_reply, 2, "COX_LEGACY_FAULT", "1:device lost",
                 all_legacy, odd_native, even_native)
{
    group_infer(group);
    test_await_faults(group, 1);
    const bool says_rank = command == odd_native;
    assert_string_equal(test_fault(group, 0), says_rank ? "1 device lost" : "-1 device lost");
    /* Legacy workers do not say which rank they are: it is no rank's. */
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    cox_executor_read_status(executor, &status, ranks);
    assert_string_equal(status.unknown_error, says_rank ? "" : "it reported: device lost");
    assert_true(says_rank == (status.unknown_error_age_ns == 0));
    assert_string_equal(ranks[0].last_error, "");
    assert_string_equal(ranks[1].last_error, says_rank ? "it reported: device lost" : "");
}

LEGACY_TEST_WITH(m9_failure_of_a_rank_without_payload_is_reported_as_fault, 2, "COX_NATIVE_FAIL",
                 "1:out of coffee", odd_native)
{
    step_expect(group, 1, 5, 5); /* legacy: the first rank's reply is the reply */
    test_await_faults(group, 1);
    assert_string_equal(test_fault(group, 0), "1 out of coffee");
}

/* It must not be replied to: the token of that reply would be taken for the next one's. */
LEGACY_TEST_WITH(m9_refused_request_without_reply_is_reported_as_fault, 2, "COX_NATIVE_REQUEST_MAX",
                 "262144", even_native, odd_native)
{
    int64_t ids[100000];
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        ids[i] = (int64_t)i + 1000;
    for (int64_t i = 0; i < 5; i++) {
        assert_ok(
            cox_executor_cleanup(executor, ids, sizeof ids / sizeof *ids, soon(), test_err()));
        step_expect(group, 10 + i, 5 + i, 5 + i);
        test_await_faults(group, (size_t)i + 1);
        assert_contains(test_fault(group, (size_t)i), "that is no ExecuteRequest");
    }
}

static void expect_rejected(struct test_group *group, const char *text)
{
    OWN_COMPLETION c = {0};
    assert_refused(step_call(group, &(struct row){1, 5}, 1, soon(), &c, test_err()), COX_REJECTED,
                   text);
}

LEGACY_TEST_WITH(p1_failure_of_the_rank_with_the_payload, 2, "COX_NATIVE_FAIL", "0:out of coffee",
                 even_native)
{
    expect_rejected(group, "rank 0 failed: out of coffee");
    for (int64_t i = 0; i < 20; i++) /* its tokens still match */
        step_expect(group, 100 + i, 5 + i, 5 + i);
}

/* As theirs do: status 0, no outputs, and words. */
LEGACY_TEST_WITH(p1_failure_with_status_0_of_a_legacy_rank, 2, "COX_LEGACY_FAIL", "0:no device",
                 all_legacy)
{
    expect_rejected(group, "rank 0 failed: no device");
    test_await_faults(group, 1);
    assert_string_equal(test_fault(group, 0), "-1 no device");
    step_expect(group, 100, 5, 5);
}

/* MindIE-LLM's numbers are not ours, and it sends no text with them. */
LEGACY_TEST_WITH(p1_a_status_that_is_not_ours_is_shown_as_it_is, 2, "COX_LEGACY_LINK_ERROR", "2005",
                 all_legacy)
{
    struct cox_link_status status = {0};
    assert_refused(cox_executor_link_status(executor, soon(), &status, test_err()), COX_REJECTED,
                   "rank 0 failed: its reply has the status 2005 and no text");
}

/* ---- init ---- */

static int init_of(struct test_group *group, struct cox_init_summary *ret_summary,
                   struct cox_error *err)
{
    return cox_executor_init(test_group_executor(group), legacy_config, LEGACY_CONFIG_COUNT, soon(),
                             ret_summary, err);
}

/* Their regions have a serial number behind the name. */
TEST(m7_a_name_without_room_for_the_serial_is_refused)
{
    struct cox_executor_options options = COX_EXECUTOR_OPTIONS_INIT;
    struct cox_executor *executor = NULL;
    char name[COX_NAME_SIZE_MAX + 1] = "";
    memset(name, 'x', COX_NAME_SIZE_MAX - COX_NAME_SERIAL_SIZE + 1);
    options.name = name;
    options.rank_count = 1;
    options.workers.command = (const char *const[]){"/nowhere", NULL};
    options.workers.legacy = true;
    assert_refused(cox_executor_start(&options, &executor, test_err()), COX_INVALID,
                   "at most 119 are allowed");
    options.workers.legacy = false;
    assert_refused(cox_executor_start(&options, &executor, test_err()), COX_EXEC_FAILED,
                   "/nowhere");
}

/* Before March 2026 the device blocks are in the map, since then in the KV cache's description;
 * and ranks of both in one group. */
TEST(m3_init_replies_of_every_release_are_taken)
{
    static const char *const forms[] = {"old", "new", "mixed"};
    for (size_t i = 0; i < 3; i++) {
        struct test_group *group = group_start_with(3, all_legacy, "COX_LEGACY_INIT", forms[i]);
        struct cox_init_summary summary;
        assert_ok(init_of(group, &summary, test_err()));
        assert_int_equal(summary.npu_block_count, 100);
        assert_int_equal(summary.cpu_block_count, 100);
        assert_int_equal(summary.kv_cache_count, i == 0 ? 0 : 1);
        /* Mixed: the only description is that of rank 1, which has 101 blocks, and rank 0 has
         * 100. */
        assert_int_equal(summary.kv_caches[0].block_count, i == 0 ? 0 : 100);
        assert_int_equal(summary.kv_caches[0].block_size, i == 0 ? 0 : 128);
        assert_ok(cox_executor_replay_init(test_group_executor(group), soon(), test_err()));
        group_end(group);
    }
}

TEST(m3_an_init_reply_without_blocks_is_reported)
{
    struct test_group *group = group_start_with(2, all_legacy, "COX_LEGACY_INIT", "neither");
    struct cox_init_summary summary;
    assert_refused(init_of(group, &summary, test_err()), COX_CORRUPT, "rank 1:");
    assert_contains(test_error.text, "npuBlockNum");
    assert_contains(test_error.text, "kv_cache_descs[0].npu_block_num");
    group_end(group);
}

/* ---- strings ---- */

/* Bytes that are no UTF-8 kill a Python worker: none is sent. */
LEGACY_TEST(m3_strings_that_are_no_utf8_are_refused, 2, all_legacy)
{
    struct step step;
    step_fill(&step, (const struct row[]){{1, 5}, {2, 6}}, 2);
    step.groups[1].request_id = (char[]){"request-\xe9"};
    assert_refused(cox_executor_call(executor, &step.request, SUBMIT_WITH(.deadline_ns = soon()),
                                     NULL, NULL, test_err()),
                   COX_INVALID, "execute_model_request.seq_group_metadata_list[1].request_id");
    assert_contains(test_error.text, "0xe9 at offset 8");

    static const struct {
        const char *key, *value, *where;
    } configs[] = {
        {"model", "/models/\xc3", "config[1].value"},
        {"m\xff", "x", "config[1].key"},
    };
    for (size_t i = 0; i < 2; i++) {
        const struct cox_config_entry config[] = {{"world_size", "2"},
                                                  {configs[i].key, configs[i].value}};
        struct cox_init_summary summary;
        assert_refused(cox_executor_init(executor, config, 2, soon(), &summary, test_err()),
                       COX_INVALID, configs[i].where);
    }

    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    int32_t statuses[2];
    lora.lora_name = (char[]){"adapter"};
    lora.lora_path = (char[]){"\xed\xa0\x80"}; /* a surrogate */
    assert_refused(test_lora(executor, &lora, soon(), statuses, test_err()), COX_INVALID,
                   "lora_operation_request.lora_path");
    assert_int_equal(statuses[0], -1);

    step_expect(group, 1, 5, 5);
}

/* ---- late ranks ---- */

static void expect_late(struct test_group *group, uint32_t late, const struct row *row,
                        uint64_t timeout_ms)
{
    OWN_COMPLETION c = {0};
    char text[64];
    snprintf(text, sizeof text, "; rank %" PRIu32 " (pid ", late);
    assert_refused(step_call(group, row, 1, cox_deadline_after_ms(timeout_ms), &c, test_err()),
                   COX_TIMEOUT, text);
    for (uint32_t rank = 0; rank < c.rank_count; rank++)
        assert_int_equal(c.ranks[rank].outcome, rank == late ? COX_OUTCOME_LATE : COX_OUTCOME_OK);
}

static void expect_refusal(struct test_group *group, uint32_t late)
{
    char text[64];
    snprintf(text, sizeof text, "rank %" PRIu32 " still owes", late);
    assert_refused(step_submit(group, &(struct row){1, 1}, soon(), test_err()), COX_LATE, text);
}

/* Whichever process posted it: no rank owed a reply then. */
LEGACY_TEST(p4_b50_a_stray_token_is_no_reply, 2, all_native, all_legacy)
{
    for (int64_t i = 0; i < 20; i++) {
        cox_gate_post(&executor->channels[COX_CHANNEL_EXECUTE].gate, (uint32_t)i % 2,
                      COX_WAKEUP_RESPONSE_CONSUME);
        step_expect(group, 3000 + i, 50 + i, 50 + i);
    }
}

LEGACY_TEST(p4_late_reply_is_never_the_next_one, 3, all_legacy, even_native, odd_native)
{
    const int64_t count = command == all_legacy ? 20 : 6;
    handler_set(group);
    for (int64_t i = 0; i < count; i++) {
        uint32_t late = (uint32_t)i % 3;
        rank_halt(group, late);
        /* The others get their turn first: only the halted one may be late. */
        expect_late(group, late, &(struct row){1000 + i, 10 + i}, 300);
        expect_refusal(group, late);
        rank_resume(group, late);
        step_expect(group, 2000 + i, 50 + i, 50 + i);
        if (command == all_legacy) /* it does not know that it was cancelled: it was served */
            step_expect(group, 1000 + i, 0, 11 + i);
    }
    const struct cox_channel_stats stats = test_stats(executor, COX_CHANNEL_EXECUTE);
    assert_int_equal(stats.timeouts, count);
    assert_int_equal(stats.late_replies, count);
}

LEGACY_TEST(p4_late_recovery_result_is_never_the_next_one, 2, odd_native)
{
    for (int i = 0; i < 6; i++) {
        uint32_t late = (uint32_t)i % 2;
        struct cox_recover_result results[2];
        rank_halt(group, late);
        assert_int_equal(cox_executor_recover(executor, COX_RECOVER_CLEAR,
                                              cox_deadline_after_ms(300), results, test_err()),
                         COX_TIMEOUT);
        assert_int_equal(results[late].result, -1);
        assert_int_equal(results[!late].result, 0);
        rank_resume(group, late);
        assert_ok(cox_executor_recover(executor, COX_RECOVER_CLEAR, soon(), results, test_err()));
    }
}

LEGACY_TEST_WITH(p4_slow_rank, 2, "COX_LEGACY_DELAY_MS", "1000", slow_legacy)
{
    handler_set(group);
    for (int64_t i = 0; i < 3; i++) {
        expect_late(group, 1, &(struct row){1000 + i, 10 + i}, 300);
        expect_refusal(group, 1);
        step_expect(group, 2000 + i, 50 + i, 50 + i);
    }
}

/* ---- death ---- */

TEST(p2_killed_rank_is_named)
{
    static const char *const *const commands[] = {all_legacy, odd_native};
    for (size_t c = 0; c < 2; c++) {
        for (uint32_t victim = 0; victim < 2; victim++) {
            OWN_GROUP *group = group_start(2, commands[c]);
            struct cox_executor *executor = test_group_executor(group);
            group_init(group);
            handler_set(group);
            rank_halt(group, victim); /* so that it cannot have replied */
            assert_ok(step_submit(group, &(struct row){1, 5}, soon(), test_err()));
            assert_int_equal(kill(cox_executor_pid(executor, victim), SIGKILL), 0);
            const struct test_completion *completion = test_await(group, 0);
            assert_int_equal(completion->status, COX_PEER_DEAD);
            assert_int_equal(completion->ranks[victim].outcome, COX_OUTCOME_DEAD);
            assert_int_equal(completion->ranks[victim].signal, SIGKILL);
            char text[96];
            snprintf(text, sizeof text, "rank %" PRIu32 " (pid %d) was killed by signal 9", victim,
                     (int)cox_executor_pid(executor, victim));
            assert_contains(completion->text, text);
            test_await_death(group, victim);
            assert_contains(test_death_text(group, victim), text);
            /* From now on every channel refuses at once; the survivor still gets the goodbye. */
            assert_int_equal(step_submit(group, &(struct row){2, 5}, soon(), test_err()),
                             COX_PEER_DEAD);
            struct cox_recover_result results[2];
            assert_int_equal(
                cox_executor_recover(executor, COX_RECOVER_CLEAR, soon(), results, test_err()),
                COX_PEER_DEAD);
            assert_int_equal(cox_executor_stop(executor), 0);
            struct cox_exit how = {0};
            assert_true(cox_supervisor_dead(executor->supervisor, !victim, &how));
            assert_int_equal(how.signal, 0);
            assert_int_equal(how.exit_status, 0);
            assert_int_equal(test_completion_count(group), 1);
        }
    }
}

TEST(p2_rank_that_ends_before_its_first_request)
{
    static const char *const command[] = {
        "/bin/sh", "-c",
        "[ $COXSWAIN_RANK = 1 ] && echo no accelerator && exit 7; exec " LEGACY_WORKER " \"$@\"",
        "sh", NULL};
    OWN_GROUP *group = group_start(2, command);
    struct cox_init_summary summary;
    assert_refused(init_of(group, &summary, test_err()), COX_PEER_DEAD, "exited with status 7");
    assert_contains(test_error.text, "no accelerator");
    assert_int_equal(cox_executor_stop(test_group_executor(group)), 0);
}

/* A request without a reply, with an impossible length: a reply to it would be taken for that of
 * the next request, and so on for ever. */
LEGACY_TEST(p4_p10_a_spoilt_request_without_reply_is_not_replied, 2, all_native)
{
    char path[192];
    for (uint32_t rank = 0; rank < 2; rank++)
        rank_halt(group, rank);
    const int64_t id = 7;
    assert_ok(cox_executor_cleanup(executor, &id, 1, soon(), test_err()));
    snprintf(path, sizeof path, "/dev/shm/%s_execute_request", executor->objects);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t low = 0;
    assert_int_equal(pread(fd, &low, 1, 0), 1);
    low ^= 1;
    assert_int_equal(pwrite(fd, &low, 1, 0), 1);
    close(fd);
    for (uint32_t rank = 0; rank < 2; rank++)
        rank_resume(group, rank);
    test_await_faults(group, 1);
    assert_contains(test_fault(group, 0), "impossible length");
    group_infer(group);
}

/* ---- the end ---- */

LEGACY_TEST(m15_goodbye_right_behind_a_request_without_reply, 2, all_legacy, all_legacy, all_legacy,
            all_legacy, all_legacy)
{
    const int64_t id = 7;
    link_one(group, "cluster-1", false);
    /* The one frame may still be read when stop says goodbye. */
    assert_ok(cox_executor_cleanup(executor, &id, 1, soon(), test_err()));
}

TEST(m15_end_is_bounded_whatever_a_rank_does)
{
    struct cox_executor_options options = *SMALL(.workers.command = all_legacy);
    options.times.finalize_ms = options.times.term_ms = 500;
    OWN_GROUP *group = test_group_start(2, &options);
    struct cox_executor *executor = test_group_executor(group);
    group_init(group);
    handler_set(group);
    rank_halt(group, 1);
    assert_ok(step_submit(group, &(struct row){1, 5}, soon(), test_err()));
    uint64_t begin = cox_now_ns();
    assert_in_range(cox_executor_stop(executor), 1, 2);
    assert_true(cox_now_ns() - begin < 10000 * COX_NSEC_PER_MSEC);
    assert_int_equal(test_completion_count(group), 1);
    assert_int_equal(test_await(group, 0)->status, COX_CLOSED);
    assert_int_equal(test_await(group, 0)->ranks[1].outcome, COX_OUTCOME_LATE);
}

TEST(p7_names_that_the_workers_removed_are_no_error)
{
    char name[64], regions[160];
    assert_int_equal(setenv("COX_LEGACY_UNLINK", "1", 1), 0);
    struct test_group *group =
        test_group_start(2, SMALL(.workers.command = all_legacy, .name = test_unique_name(name)));
    assert_int_equal(unsetenv("COX_LEGACY_UNLINK"), 0);
    /* A legacy group keeps its names while it lives: a worker may open them at any time. */
    group_init(group);
    struct cox_executor *executor = test_group_executor(group);
    snprintf(regions, sizeof regions, "%s_execute_request", executor->objects);
    assert_int_equal(test_count_names(regions),
                     1 + 2 * 2); /* the region, and two semaphores per rank */
    assert_int_equal(cox_executor_stop(executor), 0);
    assert_int_equal(test_count_names(regions), 2 * 2);
    test_group_free(group);
    assert_int_equal(test_count_names(name), 0);
}

/* ---- refusals ---- */

/* They know of no group and of nothing said again: the init comes to them as it did. */
TEST(m3_p8_an_init_is_sent_again_to_legacy_workers)
{
    static const char *const *const commands[] = {all_legacy, odd_native};
    for (size_t c = 0; c < 2; c++) {
        struct test_group *group = group_start(2, commands[c]);
        struct cox_executor *executor = test_group_executor(group);
        const struct cox_config_entry config[] = {{"model_weight_path", "/w"}, LEGACY_CONFIG};
        struct cox_init_summary summary;
        assert_int_equal(cox_executor_replay_init(executor, soon(), test_err()), COX_STATE);
        assert_ok(cox_executor_init(executor, config, 1 + LEGACY_CONFIG_COUNT, soon(), &summary,
                                    test_err()));
        for (int i = 0; i < 3; i++)
            assert_ok(cox_executor_replay_init(executor, soon(), test_err()));
        assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
        group_end(group);
    }
}

TEST(m3_what_legacy_workers_cannot_do_is_refused)
{
    struct cox_executor_options options = *SMALL(.rank_count = 17, .workers.command = all_legacy);
    struct test_group *group = NULL;
    options.depth = 2;
    assert_refused(test_group_try(&options, &group, test_err()), COX_INVALID, "depth 2");

    options.depth = 0;
    options.memory.response_size[COX_CHANNEL_TRANSFER] = 16 * MIB;
    assert_refused(test_group_try(&options, &group, test_err()), COX_INVALID, "recover_command");
    assert_contains(test_error.text, "8388608 bytes");
    assert_contains(test_error.text, "holds 16 slots of 524288 bytes, 17 ranks");

    group = group_start(2, all_legacy);
    struct cox_executor *executor = test_group_executor(group);
    assert_true(!cox_executor_limits(executor)->extensions);
    struct cox_submit_options how = {.size = sizeof(struct cox_submit_options),
                                     .deadline_ns = soon()};
    assert_int_equal(cox_executor_call_opaque(executor, "x", 1, &how, NULL, NULL, test_err()),
                     COX_UNSUPPORTED);
    struct cox_rank_set first = cox_rank_set_first(1);
    how.asked = &first;
    struct step step;
    step_fill(&step, &(struct row){1, 5}, 1);
    assert_int_equal(cox_executor_call(executor, &step.request, &how, NULL, NULL, test_err()),
                     COX_UNSUPPORTED);
    /* Nothing of that has disturbed the group. */
    group_init(group);
    group_end(group);
}
