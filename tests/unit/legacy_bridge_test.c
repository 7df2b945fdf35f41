/* The legacy bridge: which tokens of a legacy rank become which state words. The tokens are posted
 * by this process; multi/legacy has real legacy workers. */
#include "channel/attach/legacy/legacy_bridge.h"

#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "coordinator/collector/fault_reports.h"
#include "proto/executor.pb-c.h"
#include "proto/legacy/legacy_reply.h"
#include "group_fixture.h"

#include <endian.h>

static const struct cox_rank_set all = {{3}};

static struct group *group_new(uint32_t depth)
{
    const struct cox_geometry_choice choice = {
        .mode = &cox_attach_legacy,
        .depth = depth,
        .request_size = {4096, 4096, 4096, 4096, 0},
        .response_size = {1 << 20, 1 << 20, 1 << 20, 1 << 20, 0},
    };
    struct group *group = group_create(&choice, 2);
    assert_int_equal(cox_legacy_bridge_new(&group->channel, &group->channel.tokens), 0);
    return group;
}

static void publish(struct group *group, uint64_t sequence)
{
    cox_tokens_publish(group->channel.tokens, &all, sequence, false);
}

static void reply_write(struct group *group, uint32_t rank)
{
    size_t capacity;
    uint8_t *slot = cox_reply_slot(&group->channel, rank, 1, false, &capacity);
    const uint32_t length = htole32(3);
    memcpy(slot - COX_PREFIX_SIZE, &length, sizeof length);
}

/* rank 0 writes its reply first */
static void post(struct group *group, uint32_t rank, enum cox_wakeup wakeup)
{
    if (rank == 0 && wakeup == COX_WAKEUP_RESPONSE_CONSUME)
        reply_write(group, rank);
    cox_gate_post(&group->channel.gate, rank, wakeup);
    cox_tokens_update(group->channel.tokens, rank);
}

static void expect_words(const struct group *group, uint32_t rank, uint64_t returned, uint64_t done)
{
    const struct cox_layout_rank_line *line =
        cox_state_line(&group->control, rank, COX_CHANNEL_EXECUTE);
    assert_int_equal(cox_state_returned(line), returned);
    assert_int_equal(cox_state_taken(line), returned);
    assert_int_equal(cox_state_done(line), done);
}

GROUP_TEST(tokens_become_state_words, 1)
{
    publish(group, 5);
    cox_tokens_update(group->channel.tokens, 0);
    expect_words(group, 0, 0, 0); /* the initial token of request_produce means nothing */
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    expect_words(group, 0, 5, 0);
    const struct cox_layout_rank_line *line =
        cox_state_line(&group->control, 0, COX_CHANNEL_EXECUTE);
    assert_int_equal(cox_state_of_rank(line).word, cox_state_word(COX_RANK_RUNNING, 5));
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 5, 5);
    assert_int_equal(cox_state_of_rank(line).word, cox_state_word(COX_RANK_IDLE, 5));
    assert_int_equal(cox_state_tag(line, 1, 5), 5);
    assert_int_equal(cox_state_line_group_incarnation(line), group->control.group_incarnation);
    assert_int_equal(cox_state_line_incarnation(line), 1);
    expect_words(group, 1, 0, 0);
}

GROUP_TEST(a_reply_counts_once_the_frame_is_returned, 1)
{
    publish(group, 5);
    post(group, 1, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 1, 0, 0);
    post(group, 1, COX_WAKEUP_REQUEST_PRODUCE);
    expect_words(group, 1, 5, 5);
}

GROUP_TEST(a_token_of_this_process_is_no_reply, 1)
{
    publish(group, 5);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    cox_tokens_expect_wake(group->channel.tokens, 0);
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 5, 0);
    /* The same, with the token taken by a wait. */
    cox_tokens_expect_wake(group->channel.tokens, 0);
    cox_tokens_waited(group->channel.tokens, 0);
    expect_words(group, 0, 5, 0);
    reply_write(group, 0);
    cox_tokens_waited(group->channel.tokens, 0);
    expect_words(group, 0, 5, 5);
}

/* A MindIE-LLM worker that gets SIGTERM posts its semaphores: the previous reply was taken for the
 * next one. */
GROUP_TEST(a_token_without_a_reply_is_dropped, 1)
{
    publish(group, 5);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 5, 5);
    publish(group, 6);
    for (uint32_t rank = 0; rank < 2; rank++) {
        cox_gate_post(&group->channel.gate, rank, COX_WAKEUP_REQUEST_PRODUCE);
        cox_gate_post(&group->channel.gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
        cox_tokens_update(group->channel.tokens, rank);
    }
    expect_words(group, 0, 6, 5);
    expect_words(group, 1, 6, 6); /* it writes nothing */
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 6, 6);
    /* where every rank writes */
    cox_tokens_publish(group->channel.tokens, &all, 7, true);
    post(group, 1, COX_WAKEUP_REQUEST_PRODUCE);
    post(group, 1, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 1, 7, 6);
    reply_write(group, 1);
    post(group, 1, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 1, 7, 7);
}

GROUP_TEST(surplus_tokens_do_not_count_for_the_next_request, 1)
{
    publish(group, 5);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    for (int i = 0; i < 3; i++)
        post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    cox_gate_post(&group->channel.gate, 0, COX_WAKEUP_REQUEST_PRODUCE);
    publish(group, 6);
    cox_tokens_update(group->channel.tokens, 0);
    expect_words(group, 0, 5, 5);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 6, 6);
}

/* Another process of the user can write the lines of a legacy rank; the tokens decide. */
GROUP_TEST(words_that_are_overwritten_are_stored_again, 1)
{
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 0, COX_CHANNEL_EXECUTE);
    publish(group, 5);
    atomic_store(&line->returned, 9);
    atomic_store(&line->done, 9); /* a reply that was never given */
    cox_tokens_update(group->channel.tokens, 0);
    expect_words(group, 0, 0, 0);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    atomic_store(&line->taken, 0);
    atomic_store(&line->returned, 0);
    atomic_store(&line->done, 0);
    atomic_store(&line->tags[0], 0);
    cox_tokens_update(group->channel.tokens, 0);
    expect_words(group, 0, 5, 5);
    assert_int_equal(cox_state_tag(line, 1, 5), 5);
    assert_int_equal(cox_state_of_rank(line).word, cox_state_word(COX_RANK_IDLE, 5));
}

GROUP_TEST(tokens_of_a_dead_rank_are_dropped, 1)
{
    publish(group, 5);
    cox_gate_post(&group->channel.gate, 0, COX_WAKEUP_REQUEST_PRODUCE);
    cox_gate_post(&group->channel.gate, 0, COX_WAKEUP_RESPONSE_CONSUME);
    cox_tokens_reset(group->channel.tokens, 0, 7, 2); /* 6 and 7 asked others */
    cox_state_reset_line(cox_state_line(&group->control, 0, COX_CHANNEL_EXECUTE), 7);
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE); /* the first token of the next process */
    expect_words(group, 0, 7, 7);
    publish(group, 8);
    cox_tokens_update(group->channel.tokens, 0);
    expect_words(group, 0, 7, 7); /* no token of the dead process counts */
    post(group, 0, COX_WAKEUP_REQUEST_PRODUCE);
    post(group, 0, COX_WAKEUP_RESPONSE_CONSUME);
    expect_words(group, 0, 8, 8);
    assert_int_equal(
        cox_state_line_incarnation(cox_state_line(&group->control, 0, COX_CHANNEL_EXECUTE)), 2);
}

LEAK_TEST(replies_are_brought_into_our_form)
{
    Coxswain__ExecuteModelResponse step = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__ExecuteResponse reply = COXSWAIN__EXECUTE_RESPONSE__INIT;
    Coxswain__LargePayloadRef large_payload = COXSWAIN__LARGE_PAYLOAD_REF__INIT;
    reply.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    reply.execute_model_response = &step;
    reply.large_payload = &large_payload;
    cox_legacy_reply_read(&reply, 3);
    assert_int_equal(reply.rank, 3);
    assert_int_equal(reply.status, 0);
    assert_null(reply.large_payload);
    step.err_msg = (char *)(uintptr_t) "out of memory";
    cox_legacy_reply_read(&reply, 3);
    assert_int_equal(reply.status, COX_REJECTED);
}

/* As a rank does that has the slot's token. */
static void report_write(struct cox_channel *errors, const char *text)
{
    Coxswain__ExecuteModelResponse step = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__ExecuteResponse report = COXSWAIN__EXECUTE_RESPONSE__INIT;
    report.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    report.execute_model_response = &step;
    step.err_msg = (char *)(uintptr_t)text;
    uint8_t *slot = errors->response.base;
    const uint32_t length =
        htole32((uint32_t)coxswain__execute_response__pack(&report, slot + COX_PREFIX_SIZE));
    memcpy(slot, &length, sizeof length);
}

GROUP_TEST(a_report_during_a_step_is_in_its_reply, 1)
{
    struct cox_channel errors;
    struct cox_fault_reports reports;
    Coxswain__ExecuteModelResponse step = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__ExecuteResponse reply = COXSWAIN__EXECUTE_RESPONSE__INIT;
    char text[16];
    uint8_t bytes[256];
    size_t over;
    assert_int_equal(cox_channel_create(&errors, GROUP, &group->control, COX_CHANNEL_ERROR, NULL),
                     0);
    cox_fault_reports_init(&reports, &errors);
    reply.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    reply.execute_model_response = &step;
    report_write(&errors, "before");
    uint64_t before = cox_fault_reports_count(&reports, NULL, 0);
    publish(group, 5);
    step.err_msg = NULL;
    cox_fault_reports_read(&reports, before, &reply, text, sizeof text);
    assert_null(step.err_msg); /* of an earlier time */
    assert_true(cox_fault_reports_take(&reports, bytes, sizeof bytes, &over) > 0);
    report_write(&errors, "no device, and so on");
    /* The error channel's thread may be first, or last. */
    for (int taken = 0; taken < 2; taken++) {
        step.err_msg = NULL;
        cox_fault_reports_read(&reports, before, &reply, text, sizeof text);
        assert_string_equal(step.err_msg, "no device, and ");
        assert_int_equal(cox_fault_reports_count(&reports, NULL, 0), 2);
        assert_true((cox_fault_reports_take(&reports, bytes, sizeof bytes, &over) > 0) == !taken);
    }
    before = cox_fault_reports_count(&reports, NULL, 0);
    publish(group, 6);
    step.err_msg = NULL;
    cox_fault_reports_read(&reports, before, &reply, text, sizeof text);
    assert_null(step.err_msg);
    cox_channel_close(&errors);
}

LEAK_TEST(a_channel_whose_ranks_store_words_has_none)
{
    cox_tokens_update(NULL, 0);
    cox_tokens_publish(NULL, NULL, 1, false);
    cox_tokens_waited(NULL, 0);
    cox_tokens_expect_wake(NULL, 0);
    cox_tokens_reset(NULL, 0, 1, 1);
}
