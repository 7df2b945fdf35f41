/* The operations of the protocol with real workers: what every rank replies, merged, and what each
 * type means. */
#include "coordinator/executor/requests_internal.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "testing.h"

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name

/* What a rank says to `tell`. */
static void expect_told(struct test_group *g, uint32_t rank, const char *what, const char *expected)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call_how(g, &c, &how, "tell %s", what), 0);
    assert_string_equal(c.ranks[rank].bytes, expected);
}

/* ---- init ---- */

GROUPS_TEST(m6_init_takes_the_smallest_of_all_ranks)
{
    const struct cox_config_entry config[] = {{"npu", "2000"},
                                              {"cpu", "300"},
                                              {"start_thinking", "151667"},
                                              {"stop_thinking", "151668"},
                                              {"early", "1,2,3"},
                                              {"unknown", ""}};
    struct cox_init_summary s;
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_INIT);
    assert_ok(cox_executor_init(executor, config, 6, test_patience(), &s, test_err()));
    assert_int_equal(s.npu_block_count, 2000 - (n - 1));
    assert_int_equal(s.cpu_block_count, 300);
    assert_int_equal(s.max_position_embeddings, n == 1 ? 4097 : 4095);
    assert_int_equal(s.start_thinking_id, 151667);
    assert_int_equal(s.stop_thinking_id, 151668);
    assert_string_equal(s.early_stopping_ids, "1,2,3");
    assert_int_equal(s.kv_cache_count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(s.kv_caches[i].block_count, 500 + 100 * i - 10 * (n - 1));
        assert_int_equal(s.kv_caches[i].block_size, 16);
        assert_int_equal(s.kv_caches[i].compression_ratio, i + 1);
        assert_int_equal(s.kv_caches[i].cache_type, i);
    }
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
    /* Without what is optional; a second init is fine. */
    assert_ok(cox_executor_init(executor, NULL, 0, test_patience(), &s, test_err()));
    assert_int_equal(s.start_thinking_id, -1);
    assert_int_equal(s.stop_thinking_id, -1);
    assert_string_equal(s.early_stopping_ids, "");
}

GROUP_TEST(m6_init_that_cannot_be_merged_is_refused, 4)
{
    static const struct {
        const char *key, *value;
        int code;
        const char *says[3];
    } cases[] = {
        {"fail", "2", COX_REJECTED, {"rank 2", "no weights on rank 2", "MODEL_INIT"}},
        {"odd_caches", "3", COX_DIVERGED, {"rank 3", "number of KV caches", "3"}},
        {"odd_block_size", "1", COX_DIVERGED, {"rank 1", "block_size = 17", "16"}},
        {"odd_thinking", "3", COX_DIVERGED, {"rank 3", "startThinkingId", "-1"}},
        {"caches", "9", COX_REJECTED, {"rank", "9 KV caches", "at most 8"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct cox_config_entry config[] = {{cases[i].key, cases[i].value}};
        struct cox_init_summary summary;
        memset(&summary, 0x5a, sizeof summary);
        const struct cox_init_summary untouched = summary;
        assert_int_equal(
            cox_executor_init(executor, config, 1, test_patience(), &summary, test_err()),
            cases[i].code);
        assert_int_equal(test_error.code, cases[i].code);
        for (size_t k = 0; k < 3; k++)
            assert_contains(test_error.text, cases[i].says[k]);
        assert_memory_equal(&summary, &untouched, sizeof summary);
        assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_INIT);
    }
    test_init(g);
}

/* ---- types ---- */

/* A request of a type with the body it needs. */
struct any_request {
    Coxswain__ExecuteRequest request;
    Coxswain__PDLinkRequest link;
    Coxswain__PDLinkStatusRequest link_status;
    Coxswain__PullKVRequest pull;
    Coxswain__TGCleanupRequest cleanup;
    Coxswain__LoraOperationRequest lora;
    Coxswain__RecoverCommandRequest recover;
    Coxswain__ExecuteModelRequest model;
    Coxswain__StepDelta step;
};

static const Coxswain__ExecuteRequest *any_request(struct any_request *any, int type)
{
    *any = (struct any_request){
        .request = COXSWAIN__EXECUTE_REQUEST__INIT,
        .link = COXSWAIN__PDLINK_REQUEST__INIT,
        .link_status = COXSWAIN__PDLINK_STATUS_REQUEST__INIT,
        .pull = COXSWAIN__PULL_KVREQUEST__INIT,
        .cleanup = COXSWAIN__TGCLEANUP_REQUEST__INIT,
        .lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT,
        .recover = COXSWAIN__RECOVER_COMMAND_REQUEST__INIT,
        .model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT,
        .step = COXSWAIN__STEP_DELTA__INIT,
    };
    Coxswain__ExecuteRequest *request = &any->request;
    request->has_execute_type = 1;
    request->execute_type = (Coxswain__ExecuteType)type;
#define BODY(name, field, from)                                                                    \
    request->request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_##name;                             \
    request->field = &any->from
    switch (type) {
    case TYPE(MODEL_INFER):
    case TYPE(MODEL_INFER_SECOND):
        any->model.step = &any->step;
        BODY(EXECUTE_MODEL_REQUEST, execute_model_request, model);
        break;
    case TYPE(PD_LINK):
        BODY(PD_LINK_REQUEST, pd_link_request, link);
        break;
    case TYPE(PD_LINK_STATUS_QUERY):
        BODY(PD_LINK_STATUS_REQUEST, pd_link_status_request, link_status);
        break;
    case TYPE(KV_TRANSFER):
        BODY(PULL_KV_REQUEST, pull_kv_request, pull);
        break;
    case TYPE(TEXT_GENERATOR_CLEANUP):
    case TYPE(EOS_CLEANUP):
        BODY(TEXT_GENERATOR_CLEANUP_REQUEST, text_generator_cleanup_request, cleanup);
        break;
    case TYPE(LORA_OPERATION):
        BODY(LORA_OPERATION_REQUEST, lora_operation_request, lora);
        break;
    case TYPE(PAUSE_COMMAND_EXEC):
    case TYPE(PAUSE_COMMAND_EXEC_ROCE):
    case TYPE(CLEAR_COMMAND_EXEC):
    case TYPE(RECOVER_COMMAND_EXEC):
    case TYPE(START_COMMAND_EXEC):
        BODY(RECOVER_COMMAND_REQUEST, recover_command_request, recover);
        break;
    default:
        break;
    }
#undef BODY
    return request;
}

enum meaning { REFUSED, SYNC, ASYNC, NO_REPLY };
/* A row for every ExecuteType, and after them UNKNOWN_COUNT numbers that are none. */
static const struct type_row {
    int type;
    enum meaning meaning;
    enum cox_channel_id channel;
    /* of a call, with a worker that has every callback */
    int status;
    /* the code of each rank, with a worker that has none; 0: it replies by other means */
    int mute;
} types[] = {
    {TYPE(MODEL_INIT), ASYNC, COX_CHANNEL_EXECUTE, 0, 0}, /* it brings no configuration */
    {TYPE(MODEL_INFER), ASYNC, COX_CHANNEL_EXECUTE, 0, COX_UNSUPPORTED},
    {TYPE(MODEL_FINALIZE), REFUSED, COX_CHANNEL_EXECUTE, COX_INVALID, 0},
    {TYPE(MODEL_INFER_SECOND), ASYNC, COX_CHANNEL_EXECUTE, 0, COX_UNSUPPORTED},
    {TYPE(PD_LINK), NO_REPLY, COX_CHANNEL_LINK, 0, 0},
    {TYPE(KV_TRANSFER), ASYNC, COX_CHANNEL_TRANSFER, 0, COX_UNSUPPORTED},
    {TYPE(TEXT_GENERATOR_CLEANUP), NO_REPLY, COX_CHANNEL_EXECUTE, 0, 0},
    {TYPE(LORA_OPERATION), SYNC, COX_CHANNEL_LINK, 0, 0},
    {TYPE(REMOTE_MODEL_INIT), ASYNC, COX_CHANNEL_EXECUTE, COX_REJECTED, COX_UNSUPPORTED},
    {TYPE(EOS_CLEANUP), NO_REPLY, COX_CHANNEL_EXECUTE, 0, 0},
    {TYPE(PAUSE_COMMAND_EXEC), SYNC, COX_CHANNEL_RECOVER, 0, 0},
    {TYPE(CLEAR_COMMAND_EXEC), SYNC, COX_CHANNEL_RECOVER, 0, 0},
    {TYPE(RECOVER_COMMAND_EXEC), SYNC, COX_CHANNEL_RECOVER, 0, 0},
    {TYPE(START_COMMAND_EXEC), SYNC, COX_CHANNEL_RECOVER, 0, 0},
    {TYPE(PD_LINK_STATUS_QUERY), SYNC, COX_CHANNEL_LINK, 0, COX_UNSUPPORTED},
    {TYPE(EXECUTE_ERROR), REFUSED, COX_CHANNEL_ERROR, COX_INVALID, 0},
    {TYPE(PAUSE_COMMAND_EXEC_ROCE), SYNC, COX_CHANNEL_RECOVER, 0, 0},
#define UNKNOWN_COUNT 2
    {17, REFUSED, COX_CHANNEL_EXECUTE, COX_INVALID, 0},
    {99, REFUSED, COX_CHANNEL_EXECUTE, COX_INVALID, 0},
};

#define TYPE_COUNT (sizeof types / sizeof types[0])

struct seen {
    uint32_t type;
    enum cox_channel_id channel;
    int codes, calls;
};

static void see(void *context, const struct cox_completion *completion)
{
    struct seen *seen = context;
    seen->type = completion->type;
    seen->channel = completion->channel;
    seen->calls++;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++)
        if (completion->ranks[rank].outcome == COX_OUTCOME_ERROR)
            seen->codes = completion->ranks[rank].code;
}

TEST(m7_every_type_is_called_as_it_is_meant)
{
    if (TYPE_COUNT - UNKNOWN_COUNT != coxswain__execute_type__descriptor.n_values)
        fail_msg("`types` has %zu types, ExecuteType %u: add a row for each new operation",
                 TYPE_COUNT - UNKNOWN_COUNT, coxswain__execute_type__descriptor.n_values);
    OWN_GROUP *g = test_group_start(2, NULL);
    struct cox_executor *executor = test_group_executor(g);
    for (size_t row = 0; row < TYPE_COUNT; row++) {
        const struct type_row *type = &types[row];
        struct any_request any;
        const Coxswain__ExecuteRequest *request = any_request(&any, type->type);
        struct cox_submit_options options = {
            .size = sizeof(struct cox_submit_options),
            .gather = type->meaning == NO_REPLY ? COX_GATHER_NONE : COX_GATHER_ALL,
            .deadline_ns = test_patience(),
        };
        struct seen seen = {0};
        assert_int_equal(cox_executor_call(executor, request, &options, see, &seen, NULL),
                         type->status);
        bool replied = type->meaning == SYNC || type->meaning == ASYNC;
        assert_int_equal(seen.calls, replied);
        if (replied) {
            assert_int_equal(seen.type, type->type);
            assert_int_equal(seen.channel, type->channel);
            options.gather = COX_GATHER_NONE;
            assert_int_equal(cox_executor_call(executor, request, &options, see, &seen, NULL),
                             COX_INVALID);
        }
    }
}

GROUP_TEST(m7_every_type_is_submitted_as_it_is_meant, 2)
{
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g), 0);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_TRANSFER, test_handler, g), 0);
    size_t n = 0;
    for (size_t row = 0; row < TYPE_COUNT; row++) {
        const struct type_row *type = &types[row];
        struct any_request any;
        const Coxswain__ExecuteRequest *request = any_request(&any, type->type);
        const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                                   .deadline_ns = test_patience()};
        uint64_t sequence = 0;
        int r;
        do /* a rank may still owe the reply to the type before, which another rank has refused */
            r = cox_executor_submit(executor, request, &options, &sequence, test_err());
        while (r == COX_LATE && cox_now_ns() < options.deadline_ns);
        bool accepted = type->meaning == ASYNC || type->meaning == NO_REPLY;
        assert_int_equal(r, accepted ? 0 : COX_INVALID);
        assert_true(accepted == (sequence > 0));
        if (type->meaning == SYNC)
            assert_contains(test_error.text, "use call");
        if (type->meaning == ASYNC) {
            const struct test_completion *c = test_await(g, n++);
            assert_int_equal(c->type, type->type);
            assert_int_equal(c->sequence, sequence);
            assert_int_equal(c->channel, type->channel);
            assert_int_equal(c->status, type->status);
        }
    }
    /* No-reply requests, more of them than frames: each is done, and nothing is reported. */
    for (int i = 0; i < 50; i++) {
        const int64_t ids[] = {1, 2, 3};
        assert_ok(cox_executor_cleanup(executor, ids, 3, test_patience(), test_err()));
        Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
        assert_ok(cox_executor_link(executor, &link, test_patience(), test_err()));
    }
    test_expect_echo(g, "behind all that");
    assert_int_equal(test_completion_count(g), n);
}

TEST(m7_a_worker_without_callbacks_replies_unsupported)
{
    const char *const command[] = {test_worker_program(), "mute", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = command));
    for (size_t row = 0; row < TYPE_COUNT; row++) {
        const struct type_row *type = &types[row];
        struct any_request any;
        const Coxswain__ExecuteRequest *request = any_request(&any, type->type);
        struct seen seen = {0};
        int r = cox_executor_call(
            test_group_executor(g), request,
            SUBMIT_WITH(.gather = type->meaning == NO_REPLY ? COX_GATHER_NONE : COX_GATHER_ALL,
                        .deadline_ns = test_patience()),
            see, &seen, NULL);
        if (type->meaning == REFUSED)
            assert_int_equal(r, COX_INVALID);
        else
            assert_int_equal(r, type->mute ? COX_REJECTED : 0);
        assert_int_equal(seen.codes, type->mute);
    }
    assert_int_equal(test_call(g, NULL, "echo x"), COX_REJECTED);
    assert_contains(test_error_text(g), "opaque");
    int32_t statuses[2];
    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    assert_int_equal(test_lora(test_group_executor(g), &lora, test_patience(), statuses, NULL),
                     COX_REJECTED);
    assert_int_equal(statuses[1], COXSWAIN__LORA_OPERATION_STATUS__UNSUPPORT_CMD);
    struct cox_recover_result results[2];
    assert_int_equal(cox_executor_recover(test_group_executor(g), COX_RECOVER_CLEAR,
                                          test_patience(), results, test_err()),
                     COX_REJECTED);
    assert_int_equal(results[0].result, COX_UNSUPPORTED);
    struct cox_init_summary summary;
    assert_ok(
        cox_executor_init(test_group_executor(g), NULL, 0, test_patience(), &summary, test_err()));
    assert_int_equal(summary.npu_block_count, 0);
    const struct cox_config_entry config[] = {{"model", "/m"}};
    assert_refused(
        cox_executor_init(test_group_executor(g), config, 1, test_patience(), &summary, test_err()),
        COX_REJECTED, "no init callback, and so cannot take 'model'");
}

/* Not only where a legacy worker would die of it. */
GROUP_TEST(m7_strings_that_are_no_utf8_are_refused_in_any_group, 2)
{
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT, *hosts[] = {&host};
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT;
    Coxswain__RemoteInfo *remotes[] = {&remote};
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos[] = {&info};
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    host.cluster_id = (char[]){"cluster-\xc0\xaf"};
    remote.n_host_info = info.n_link_info = link.n_pd_link_info = 1;
    remote.host_info = hosts;
    info.link_info = remotes;
    link.pd_link_info = infos;
    assert_int_equal(cox_executor_link(executor, &link, test_patience(), test_err()), COX_INVALID);
    assert_contains(
        test_error.text,
        "pd_link_request.pd_link_info[0].link_info[0].host_info[0].cluster_id is no UTF-8: the byte 0xc0 at offset 8");
    assert_int_equal(test_call(g, NULL, "echo x"), 0);
}

/* ---- faults ---- */

GROUPS_TEST(m9_a_fault_of_any_rank_arrives_with_its_rank)
{
    /* Alone, and inside a request that still replies. */
    for (uint32_t rank = 0; rank < n; rank++) {
        char expected[64];
        OWN_COMPLETION c = {0};
        assert_int_equal(
            test_call(g, &c, "only %" PRIu32 " fault ECC error in bank %" PRIu32, rank, rank), 0);
        assert_string_equal(c.ranks[rank].bytes, "reported");
        test_await_faults(g, rank + 1);
        snprintf(expected, sizeof expected, "%" PRIu32 " ECC error in bank %" PRIu32, rank, rank);
        assert_string_equal(test_fault(g, rank), expected);
    }
    /* All at once: one slot, no report is lost. */
    assert_int_equal(test_call(g, NULL, "faults 20 storm"), 0);
    test_await_faults(g, n + 20 * n);
    size_t by_rank[8] = {0};
    for (size_t i = n; i < n + 20 * n; i++)
        by_rank[atoi(test_fault(g, i)) & 7]++;
    for (uint32_t rank = 0; rank < n; rank++)
        assert_int_equal(by_rank[rank], 20);
}

GROUP_TEST(m9_a_long_fault_is_cut, 1)
{
    assert_int_equal(test_call(g, NULL, "fault %05000d", 7), 0);
    test_await_faults(g, 1);
    assert_memory_equal(test_fault(g, 0), "0 0000000000", 12);
    assert_true(strlen(test_fault(g, 0)) < 1024);
    test_expect_echo(g, "still here");
}

/* ---- link ---- */

static bool has_text(char **texts, size_t count, const char *text)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(texts[i], text) == 0)
            return true;
    return false;
}

GROUPS_TEST(m10_link_status_merges_the_lists_of_every_rank)
{
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos[] = {&info};
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT;
    Coxswain__RemoteInfo *remotes[] = {&remote};
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    link.n_pd_link_info = 1;
    link.pd_link_info = infos;
    info.has_pd_role = info.has_change_role = 1;
    info.pd_role = COXSWAIN__PDROLE__PREFILL_ROLE;
    info.n_link_info = 1;
    info.link_info = remotes;
    assert_ok(cox_executor_link(executor, &link, test_patience(), test_err())); /* link */
    info.n_link_info = 0;
    info.n_unlink_info = 1;
    info.unlink_info = remotes;
    assert_ok(cox_executor_link(executor, &link, test_patience(), test_err())); /* unlink */
    info.n_unlink_info = 0;
    info.change_role = 1;
    info.pd_role = COXSWAIN__PDROLE__DECODE_ROLE;
    assert_ok(cox_executor_link(executor, &link, test_patience(), test_err())); /* another role */
    struct cox_link_status s;
    assert_ok(cox_executor_link_status(executor, test_patience(), &s, test_err()));
    assert_int_equal(s.failed_count, 1);
    assert_string_equal(s.failed[0].cluster_id, "broken");
    assert_int_equal(s.failed[0].code, 2001);
    assert_int_equal(s.success_count, 1);
    assert_string_equal(s.success[0], "linked 3");
    assert_int_equal(s.running_count, 1);
    assert_string_equal(s.running[0], "slow");
    assert_int_equal(s.waiting_count, n == 1 ? 1 : 2);
    assert_true(has_text(s.waiting, s.waiting_count, "waits"));
    assert_true(n == 1 || has_text(s.waiting, s.waiting_count, "unknown to the last"));
    cox_link_status_deinit(&s);
    cox_link_status_deinit(&s);
    for (uint32_t rank = 0; rank < n; rank++)
        expect_told(
            g, rank, "links",
            "role=1 change=0 link=1 unlink=0;role=1 change=0 link=0 unlink=1;role=2 change=1 link=0 unlink=0;");
}

/* ---- pull ---- */

#define PULL_COUNT_MAX 8
struct pull {
    Coxswain__PullKVRequest request;
    Coxswain__PullKVRequest__PullKVInfo infos[PULL_COUNT_MAX], *pointers[PULL_COUNT_MAX];
    Coxswain__SequenceGroupMetadata metadata[PULL_COUNT_MAX];
    ProtobufCBinaryData tables[PULL_COUNT_MAX][2];
    uint8_t numbers[PULL_COUNT_MAX][16];
};

/* Each pull moves blocks i and i + 10, of two managers, to the other one's. */
static void pull_fill(struct pull *pull, const char *const *ids, size_t count)
{
    coxswain__pull_kvrequest__init(&pull->request);
    pull->request.n_pull_kv_infos = count;
    pull->request.pull_kv_infos = pull->pointers;
    for (size_t i = 0; i < count; i++) {
        Coxswain__PullKVRequest__PullKVInfo *info = &pull->infos[i];
        coxswain__pull_kvrequest__pull_kvinfo__init(info);
        coxswain__sequence_group_metadata__init(&pull->metadata[i]);
        pull->pointers[i] = info;
        pull->metadata[i].request_id = (char *)(uintptr_t)ids[i];
        info->seq_group_metadata = &pull->metadata[i];
        info->cluster_id = (char *)(uintptr_t) "p0";
        cox_wire_int64_set(pull->numbers[i], 0, (int64_t)i);
        cox_wire_int64_set(pull->numbers[i], 1, (int64_t)i + 10);
        pull->tables[i][0] = (ProtobufCBinaryData){16, pull->numbers[i]};
        pull->tables[i][1] = (ProtobufCBinaryData){8, pull->numbers[i] + 8};
        info->n_src_block_tables = info->n_dst_block_tables = 2;
        info->src_block_tables = info->dst_block_tables = pull->tables[i];
    }
}

GROUPS_TEST(m11_pull_has_a_result_per_request)
{
    char bad_last[16], mute_last[16];
    snprintf(bad_last, sizeof bad_last, "bad@%" PRIu32, n - 1);
    snprintf(mute_last, sizeof mute_last, "mute@%" PRIu32, n - 1);
    const char *const ids[] = {"a",       "bad b",    bad_last,    "c",
                               mute_last, "mute all", "bad@0 too", "d"};
    const int32_t codes[] = {0, 2003, 2003, 0, 2004, 2004, 2003, 0};
    struct pull pull;
    struct cox_pull_result *results = NULL;
    size_t count = 0;
    pull_fill(&pull, ids, 8);
    assert_ok(cox_executor_pull_kv(executor, &pull.request, test_patience(), &results, &count,
                                   test_err()));
    assert_int_equal(count, 8);
    for (size_t i = 0; i < 8; i++) {
        assert_string_equal(results[i].request_id, ids[i]);
        assert_int_equal(results[i].code, codes[i]);
    }
    free(results);
    pull_fill(&pull, ids, 2);
    assert_ok(cox_executor_pull_kv(executor, &pull.request, test_patience(), &results, &count,
                                   test_err()));
    free(results);
    for (uint32_t rank = 0; rank < n; rank++)
        expect_told(g, rank, "pulls",
                    "from p0: [0,10] [10] to [0,10] [10];from p0: [1,11] [11] to [1,11] [11];");
}

GROUP_TEST(m11_pulls_of_one_id_or_of_none_are_refused_before_they_are_sent, 2)
{
    static const struct {
        const char *ids[3], *text;
    } cases[] = {{{"a", "b", "a"}, "pull 2 has the request id 'a', which one before it has"},
                 {{"a", "a", "b"}, "pull 1 has the request id 'a', which one before it has"},
                 {{"a", "b", ""}, "pull 2 has no request id"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct pull pull;
        struct cox_pull_result *results = NULL;
        size_t count = 0;
        pull_fill(&pull, cases[i].ids, 3);
        assert_int_equal(cox_executor_pull_kv(executor, &pull.request, test_patience(), &results,
                                              &count, test_err()),
                         COX_INVALID);
        assert_string_equal(test_error.text, cases[i].text);
        assert_null(results);
    }
    assert_int_equal(test_stats(executor, COX_CHANNEL_TRANSFER).submitted, 0);
}

/* ---- recovery ---- */

GROUP_TEST(m12_the_state_gate, 4)
{
    struct cox_recover_result results[4];
    /* How a state is reached from INIT, and what is legal there. */
    static const struct {
        enum cox_engine_state state;
        /* commands after init; -1: end */
        int path[3];
        bool legal[5];
    } rows[] = {
        {COX_ENGINE_INIT, {-1}, {false, false, true, false, false}},
        {COX_ENGINE_NORMAL, {-1}, {true, true, true, false, false}},
        {COX_ENGINE_PAUSE, {COX_RECOVER_PAUSE, -1}, {false, false, true, true, true}},
        {COX_ENGINE_READY,
         {COX_RECOVER_PAUSE_NET, COX_RECOVER_REINIT, -1},
         {false, false, true, false, true}},
    };
    static const enum cox_engine_state to[] = {COX_ENGINE_PAUSE, COX_ENGINE_PAUSE, COX_ENGINE_INIT,
                                               COX_ENGINE_READY, COX_ENGINE_NORMAL};
    for (size_t row = 0; row < 4; row++)
        for (int command = 0; command < 5; command++) {
            if (row > 0)
                test_init(g);
            for (int i = 0; rows[row].path[i] >= 0; i++)
                assert_ok(test_recover(g, (enum cox_recover_command)rows[row].path[i], results,
                                       test_err()));
            assert_int_equal(cox_executor_engine_state(executor), rows[row].state);
            int r = test_recover(g, (enum cox_recover_command)command, results, test_err());
            assert_int_equal(r, rows[row].legal[command] ? 0 : COX_STATE);
            enum cox_engine_state after =
                r || command == COX_RECOVER_CLEAR ? rows[row].state : to[command];
            assert_int_equal(cox_executor_engine_state(executor), after);
            if (r == COX_STATE) {
                assert_contains(test_error.text, cox_engine_state_name(rows[row].state));
                assert_contains(test_error.text,
                                cox_recover_command_name((enum cox_recover_command)command));
            }
            for (uint32_t rank = 0; rank < 4; rank++) {
                assert_int_equal(results[rank].result, r ? -1 : 0);
                assert_int_equal(results[rank].device, r ? -1 : (int)rank);
            }
        }
}

GROUPS_TEST(m12_every_command_reaches_every_rank_in_order)
{
    struct cox_recover_result results[8];
    test_init(g);
    static const enum cox_recover_command all[] = {COX_RECOVER_PAUSE,     COX_RECOVER_CLEAR,
                                                   COX_RECOVER_REINIT,    COX_RECOVER_START,
                                                   COX_RECOVER_PAUSE_NET, COX_RECOVER_START};
    for (size_t i = 0; i < 6; i++)
        assert_ok(test_recover(g, all[i], results, test_err()));
    for (uint32_t rank = 0; rank < n; rank++)
        expect_told(g, rank, "log", "pause;clear;reinit;start;pause_net;start;");
}

GROUP_TEST(m12_a_rank_that_fails_or_is_silent_is_a_failure, 4)
{
    struct test_pipe *pipe = test_pipe_new();
    struct cox_recover_result results[4];
    test_init(g);
    /* A result other than 0: told per rank, the others' kept, the state stays. */
    assert_int_equal(test_call(g, NULL, "only 2 recover pause 507 HCCL is stuck"), 0);
    assert_refused(test_recover(g, COX_RECOVER_PAUSE, results, test_err()), COX_REJECTED,
                   "rank 2 replied 507: HCCL is stuck");
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_int_equal(results[rank].result, rank == 2 ? 507 : 0);
    assert_string_equal(results[2].text, "HCCL is stuck");
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
    /* No reply in time. */
    assert_int_equal(test_call(g, NULL, "only 1 recover pause block %s", test_pipe_path(pipe)), 0);
    assert_int_equal(cox_executor_recover(executor, COX_RECOVER_PAUSE, cox_deadline_after_ms(50),
                                          results, test_err()),
                     COX_TIMEOUT);
    assert_int_equal(results[1].result, -1);
    assert_contains(results[1].text, "had not replied");
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
    test_pipe_release(pipe, 1);
    assert_ok(test_recover(g, COX_RECOVER_PAUSE, results, test_err()));
    /* A death. */
    assert_int_equal(test_call(g, NULL, "only 3 recover reinit block %s", test_pipe_path(pipe)), 0);
    assert_int_equal(kill(cox_executor_pid(executor, 3), SIGKILL), 0);
    assert_int_equal(test_recover(g, COX_RECOVER_REINIT, results, test_err()), COX_PEER_DEAD);
    assert_int_equal(results[3].result, -1);
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_PAUSE);
}

GROUP_TEST(m12_a_pause_that_came_to_some_ranks_only_is_undone_by_start, 4)
{
    struct cox_recover_result results[4];
    test_init(g);
    assert_int_equal(test_recover(g, COX_RECOVER_START, results, test_err()), COX_STATE);
    assert_string_equal(results[0].text, "not asked");
    assert_int_equal(test_call(g, NULL, "only 2 recover pause 507 HCCL is stuck"), 0);
    assert_int_equal(test_recover(g, COX_RECOVER_PAUSE, results, test_err()), COX_REJECTED);
    assert_true(cox_executor_partially_paused(executor));
    assert_refused(test_recover(g, COX_RECOVER_REINIT, results, test_err()), COX_STATE,
                   "legal are pause, pause-net, clear, start");
    assert_ok(test_recover(g, COX_RECOVER_START, results, test_err()));
    assert_false(cox_executor_partially_paused(executor));
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
    assert_int_equal(test_recover(g, COX_RECOVER_START, results, test_err()), COX_STATE);
    /* None of them is, if none has taken it. */
    assert_int_equal(test_call(g, NULL, "recover pause 5 no"), 0);
    assert_int_equal(test_recover(g, COX_RECOVER_PAUSE, results, test_err()), COX_REJECTED);
    assert_false(cox_executor_partially_paused(executor));
}

struct other_thread {
    struct test_group *group;
    int result;
};

static void *pause_main(void *argument)
{
    struct other_thread *other = argument;
    struct cox_recover_result results[2];
    other->result = test_recover(other->group, COX_RECOVER_PAUSE, results, test_err());
    return NULL;
}

/* A caller's deadline holds, whatever other threads call; and the state can be read meanwhile. */
GROUP_TEST(b2_a_call_behind_another_ends_at_its_deadline, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    struct other_thread other = {.group = g};
    struct cox_recover_result results[2];
    test_init(g);
    assert_int_equal(test_call(g, NULL, "recover pause block %s", test_pipe_path(pipe)), 0);
    pthread_t thread = test_thread(pause_main, &other);
    test_await_lines(g, -1, "blocked", 2);
    uint64_t begin_ns = cox_now_ns();
    assert_int_equal(cox_executor_engine_state(executor), COX_ENGINE_NORMAL);
    int cleared = cox_executor_recover(executor, COX_RECOVER_CLEAR, cox_deadline_after_ms(30),
                                       results, test_err());
    struct any_request any;
    int called = cox_executor_call(
        executor, any_request(&any, TYPE(CLEAR_COMMAND_EXEC)),
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = cox_deadline_after_ms(30)), NULL, NULL,
        NULL);
    uint64_t took_ns = cox_now_ns() - begin_ns;
    test_pipe_release(pipe, 2);
    pthread_join(thread, NULL);
    assert_int_equal(other.result, 0);
    assert_int_equal(cleared, COX_TIMEOUT);
    assert_int_equal(called, COX_TIMEOUT);
    assert_true(took_ns < 10 * COX_NSEC_PER_SEC);
}

/* ---- passing each other ---- */

GROUPS_TEST(m1_recovery_and_faults_pass_a_blocked_execute_and_pull)
{
    struct test_pipe *pipe = test_pipe_new();
    struct cox_recover_result results[8];
    test_init(g);
    assert_int_equal(test_call(g, NULL, "pull block %s", test_pipe_path(pipe)), 0);
    struct any_request any;
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_TRANSFER, test_handler, g), 0);
    assert_ok(cox_executor_submit(executor, any_request(&any, TYPE(KV_TRANSFER)),
                                  SUBMIT_WITH(.deadline_ns = test_patience()), NULL, NULL));
    /* Full to the last frame. */
    for (int i = 0; i < 4; i++)
        assert_int_equal(
            test_submit(g, &test_all, i == 0 ? "block %s" : "echo %s", test_pipe_path(pipe)), 0);
    assert_int_equal(test_submit(g, &test_all, "echo"), COX_FULL);
    test_await_lines(g, -1, "blocked", 2 * n);
    assert_ok(test_recover(g, COX_RECOVER_PAUSE, results, test_err()));
    assert_ok(test_recover(g, COX_RECOVER_CLEAR, results, test_err()));
    assert_ok(test_recover(g, COX_RECOVER_REINIT, results, test_err()));
    assert_ok(test_recover(g, COX_RECOVER_START, results, test_err()));
    struct cox_link_status links;
    assert_ok(cox_executor_link_status(executor, test_patience(), &links, test_err()));
    cox_link_status_deinit(&links);
    assert_int_equal(test_completion_count(g), 0);
    test_pipe_release(pipe, 2 * n);
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(test_await(g, i)->status, 0);
}

/* ---- LoRA ---- */

GROUPS_TEST(m13_every_rank_status_is_seen)
{
    static const char *const names[] = {
        "LORA_CMD_SUCCESS",  "SLOTS_FULL",        "DUPLICATED_LORA_ID", "INVALID_LORA_ID",
        "INVALID_LORA_PATH", "INVALID_LORA_RANK", "UNSUPPORT_CMD"};
    for (int status = 0; status < 7; status++)
        for (int one = 0; one < 2; one++) {
            char name[64], said[64];
            uint32_t bad = n - 1;
            if (one)
                snprintf(name, sizeof name, "rank %" PRIu32 " status %d", bad, status);
            else
                snprintf(name, sizeof name, "status %d", status);
            Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
            lora.lora_name = name;
            lora.has_lora_op_type = 1;
            lora.lora_op_type =
                one ? COXSWAIN__LORA_OPERATION_TYPE__UNLOAD : COXSWAIN__LORA_OPERATION_TYPE__LOAD;
            int32_t statuses[8];
            int r = test_lora(executor, &lora, test_patience(), statuses, test_err());
            assert_int_equal(r, status ? COX_REJECTED : 0);
            for (uint32_t rank = 0; rank < n; rank++)
                assert_int_equal(statuses[rank], one && rank != bad ? 0 : status);
            snprintf(said, sizeof said, "rank %" PRIu32 " says %s", bad, names[status]);
            if (status)
                assert_contains(test_error.text, said);
            if (status && one && n > 1)
                assert_null(strstr(test_error.text, "rank 0 says"));
        }
    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    lora.lora_name = (char *)(uintptr_t) "fail";
    int32_t statuses[8];
    assert_refused(test_lora(executor, &lora, test_patience(), statuses, test_err()), COX_REJECTED,
                   "no room for the adapter");
}

/* No status of a rank is left for success. */
GROUP_TEST(m13_without_an_reply_there_is_no_status, 4)
{
    enum { FAILED, TOO_LATE, DEAD, CASE_COUNT };
    static const int codes[] = {COX_REJECTED, COX_TIMEOUT, COX_PEER_DEAD};
    for (int k = 0; k < CASE_COUNT; k++) {
        Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
        lora.lora_name = (char *)(uintptr_t)(k == FAILED ? "fail" : "status 0");
        int32_t statuses[5] = {0, 0, 0, 0, 77};
        if (k == DEAD) {
            assert_int_equal(kill(cox_executor_pid(executor, 2), SIGKILL), 0);
            test_await_death(g, 2);
        }
        assert_int_equal(test_lora(executor, &lora, k == TOO_LATE ? cox_now_ns() : test_patience(),
                                   statuses, test_err()),
                         codes[k]);
        for (uint32_t rank = 0; rank < 4; rank++)
            assert_int_equal(statuses[rank], -1);
        assert_int_equal(statuses[4], 77);
    }
}
