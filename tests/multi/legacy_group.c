#include "legacy_group.h"

#include "coordinator/executor/requests_internal.h"

#define NATIVE COX_TEST_BIN_DIR "/legacy_native"

/* ---- groups ---- */

const char *const all_legacy[] = {"/bin/sh", "-c", "exec " LEGACY_WORKER " \"$@\"", "sh", NULL};
const char *const even_native[] = {"/bin/sh", "-c",
                                   "case $COXSWAIN_RANK in *[02468]) exec " NATIVE
                                   " \"$@\";; *) exec " LEGACY_WORKER " \"$@\";; esac",
                                   "sh", NULL};
const char *const odd_native[] = {"/bin/sh", "-c",
                                  "case $COXSWAIN_RANK in *[13579]) exec " NATIVE
                                  " \"$@\";; *) exec " LEGACY_WORKER " \"$@\";; esac",
                                  "sh", NULL};
const char *const all_native[] = {NATIVE, NULL};
const char *const slow_legacy[] = {
    "/bin/sh", "-c",
    "[ $COXSWAIN_RANK = 1 ] || unset COX_LEGACY_DELAY_MS; exec " LEGACY_WORKER " \"$@\"", "sh",
    NULL};

struct test_group *group_start(uint32_t rank_count, const char *const *command)
{
    return test_group_start(rank_count, SMALL(.workers.command = command));
}

struct test_group *group_start_with(uint32_t rank_count, const char *const *command,
                                    const char *variable, const char *value)
{
    if (variable)
        assert_int_equal(setenv(variable, value, 1), 0);
    struct test_group *group = group_start(rank_count, command);
    if (variable)
        assert_int_equal(unsetenv(variable), 0);
    return group;
}

/* Finalize makes every worker leave with 0 and without a signal. */
void group_end(struct test_group *group)
{
    struct cox_executor *executor = test_group_executor(group);
    assert_int_equal(cox_executor_stop(executor), 0);
    for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++) {
        struct cox_exit how = {0};
        assert_true(cox_supervisor_dead(executor->supervisor, rank, &how));
        assert_true(how.known);
        assert_int_equal(how.signal, 0);
        assert_int_equal(how.exit_status, 0);
    }
    test_group_free(group);
}

uint64_t soon(void)
{
    return cox_deadline_after_ms(TEST_PATIENCE_MS);
}

/* The rank has its request, but does nothing until it is continued. */
void rank_halt(struct test_group *group, uint32_t rank)
{
    pid_t pid = cox_executor_pid(test_group_executor(group), rank);
    siginfo_t info;
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOWAIT), 0);
}

void rank_resume(struct test_group *group, uint32_t rank)
{
    assert_int_equal(kill(cox_executor_pid(test_group_executor(group), rank), SIGCONT), 0);
}

/* ---- init ---- */

const struct cox_config_entry legacy_config[LEGACY_CONFIG_COUNT] = {LEGACY_CONFIG};

void group_init(struct test_group *group)
{
    struct cox_executor *executor = test_group_executor(group);
    uint32_t rank_count = cox_executor_rank_count(executor);
    struct cox_init_summary summary;
    assert_ok(cox_executor_init(executor, legacy_config, LEGACY_CONFIG_COUNT, soon(), &summary,
                                test_err()));
    /* Rank r has 100 + r blocks and 4096 - r positions: the first and the last rank have the
     * smallest. */
    assert_int_equal(summary.cpu_block_count, 100);
    assert_int_equal(summary.npu_block_count, 100);
    assert_int_equal(summary.max_position_embeddings, 4096 - (int64_t)rank_count + 1);
    assert_int_equal(summary.start_thinking_id, -1);
    assert_int_equal(summary.kv_cache_count, 1);
    assert_int_equal(summary.kv_caches[0].block_count, 100);
    assert_int_equal(summary.kv_caches[0].block_size, 128);
    assert_int_equal(summary.kv_caches[0].compression_ratio, 1);
}

/* ---- steps ---- */

static ProtobufCBinaryData int64_bytes(uint8_t bytes[8], int64_t value)
{
    cox_wire_int64_set(bytes, 0, value);
    return (ProtobufCBinaryData){.len = 8, .data = bytes};
}

void step_fill(struct step *step, const struct row *rows, size_t count)
{
    coxswain__execute_request__init(&step->request);
    coxswain__execute_model_request__init(&step->model);
    step->request.has_execute_type = 1;
    step->request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    step->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    step->request.execute_model_request = &step->model;
    step->model.has_forward_type = 1;
    step->model.forward_type =
        rows[0].prompt ? COXSWAIN__FORWARD_TYPE__PREFILL : COXSWAIN__FORWARD_TYPE__DECODE;
    step->model.n_seq_group_metadata_list = count;
    step->model.seq_group_metadata_list = step->list;
    for (size_t i = 0; i < count; i++) {
        Coxswain__SequenceGroupMetadata *group = step->list[i] = &step->groups[i];
        coxswain__sequence_group_metadata__init(group);
        snprintf(step->names[i], sizeof step->names[i], "request-%" PRId64, rows[i].id);
        group->request_id = step->names[i];
        group->has_is_prompt = group->has_seqids = group->has_computed_block_lens = 1;
        group->is_prompt = rows[i].prompt != 0;
        group->seqids = int64_bytes(step->ids[i], rows[i].id);
        group->computed_block_lens = int64_bytes(step->computed[i], 0);
        step->tables[i] = int64_bytes(step->blocks[i], rows[i].id);
        group->n_block_tables = 1;
        group->block_tables = &step->tables[i];
        if (rows[i].prompt) {
            group->has_prompt_lens = group->has_prompt_token_ids = 1;
            group->prompt_lens = int64_bytes(step->lengths[i], 1);
            group->prompt_token_ids = int64_bytes(step->prompts[i], rows[i].prompt);
        }
    }
}

static void copy(void *context, const struct cox_completion *completion)
{
    test_completion_copy(context, completion);
}

int step_call(struct test_group *group, const struct row *rows, size_t count, uint64_t deadline_ns,
              struct test_completion *ret_completion, struct cox_error *err)
{
    struct step step;
    step_fill(&step, rows, count);
    test_completion_deinit(ret_completion);
    return cox_executor_call(test_group_executor(group), &step.request,
                             SUBMIT_WITH(.deadline_ns = deadline_ns), copy, ret_completion, err);
}

/* One step of one row, and the token that has to come of it. */
void step_expect(struct test_group *group, int64_t id, int64_t prompt, int64_t token)
{
    const struct row row = {id, prompt};
    OWN_COMPLETION c = {0};
    assert_ok(step_call(group, &row, 1, soon(), &c, test_err()));
    assert_int_equal(c.token_count, 1);
    assert_int_equal(c.ids[0], id);
    assert_int_equal(c.tokens[0], token % TOKEN_MODULUS);
}

void group_infer(struct test_group *group)
{
    struct row rows[3] = {{7, 11}, {8, 200}, {9, 96}};
    for (int64_t count = 0; count < 5; count++) {
        OWN_COMPLETION c = {0};
        assert_ok(step_call(group, rows, 3, soon(), &c, test_err()));
        assert_int_equal(c.token_count, 3);
        for (size_t i = 0; i < 3; i++) {
            assert_int_equal(c.ids[i], rows[i].id);
            assert_int_equal(c.tokens[i], ((int64_t[]){11, 200, 96}[i] + count) % TOKEN_MODULUS);
            rows[i].prompt = 0;
        }
        for (uint32_t rank = 0; rank < c.rank_count; rank++)
            assert_int_equal(c.ranks[rank].outcome, COX_OUTCOME_OK);
    }
}

static void group_cleanup(struct test_group *group)
{
    const int64_t ids[] = {7, 9};
    assert_ok(cox_executor_cleanup(test_group_executor(group), ids, 2, soon(), test_err()));
    step_expect(group, 7, 30, 30); /* it starts anew */
    step_expect(group, 8, 0, 205); /* not named: it continues */
}

/* ---- the other channels ---- */

void link_one(struct test_group *group, const char *cluster, bool unlink_it)
{
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT, *hosts[] = {&host};
    Coxswain__DeviceInfo device = COXSWAIN__DEVICE_INFO__INIT, *devices[] = {&device};
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT, *remotes[] = {&remote};
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT,
                                        *infos[] = {&info};
    Coxswain__PDLinkRequest request = COXSWAIN__PDLINK_REQUEST__INIT;
    host.host_ip = (char[]){"192.0.2.1"};
    host.cluster_id = (char *)(uintptr_t)cluster;
    device.device_ip = (char[]){"192.0.2.2"};
    remote.n_host_info = remote.n_device_info = 1;
    remote.host_info = hosts;
    remote.device_info = devices;
    info.n_link_info = !unlink_it;
    info.n_unlink_info = unlink_it;
    info.link_info = info.unlink_info = remotes;
    request.n_pd_link_info = 1;
    request.pd_link_info = infos;
    assert_ok(cox_executor_link(test_group_executor(group), &request, soon(), test_err()));
}

void link_expect(struct test_group *group, size_t count, const char *cluster)
{
    struct cox_link_status status;
    assert_ok(cox_executor_link_status(test_group_executor(group), soon(), &status, test_err()));
    assert_int_equal(status.success_count, count);
    if (count)
        assert_string_equal(status.success[count - 1], cluster);
    assert_int_equal(status.failed_count + status.running_count + status.waiting_count, 0);
    cox_link_status_deinit(&status);
}

static void group_link(struct test_group *group)
{
    link_expect(group, 0, NULL);
    link_one(group, "cluster-1", false);
    link_expect(group, 1, "cluster-1");
    link_one(group, "cluster-2", false);
    link_expect(group, 2, "cluster-2");
    link_one(group, "cluster-2", true);
    link_expect(group, 1, "cluster-1");
}

static void group_lora(struct test_group *group)
{
    static const struct {
        Coxswain__LoraOperationType type;
        int r;
        int32_t status;
    } operations[] = {
        {COXSWAIN__LORA_OPERATION_TYPE__LOAD, 0, 0},
        {COXSWAIN__LORA_OPERATION_TYPE__LOAD, COX_REJECTED,
         COXSWAIN__LORA_OPERATION_STATUS__DUPLICATED_LORA_ID},
        {COXSWAIN__LORA_OPERATION_TYPE__UNLOAD, 0, 0},
        {COXSWAIN__LORA_OPERATION_TYPE__UNLOAD, COX_REJECTED,
         COXSWAIN__LORA_OPERATION_STATUS__INVALID_LORA_ID},
    };
    struct cox_executor *executor = test_group_executor(group);
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        Coxswain__LoraOperationRequest request = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
        request.master_model = (char[]){"base"};
        request.lora_name = (char[]){"adapter"};
        request.lora_path = (char[]){"/adapters/adapter"};
        request.has_lora_op_type = 1;
        request.lora_op_type = operations[i].type;
        int32_t statuses[RANK_COUNT_MAX];
        int r = test_lora(executor, &request, soon(), statuses, test_err());
        assert_int_equal(r, operations[i].r);
        for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++)
            assert_int_equal(statuses[rank], operations[i].status);
    }
}

void group_pull(struct test_group *group)
{
    struct step step;
    const struct row rows[] = {{21, 5}, {22, 6}};
    step_fill(&step, rows, 2);
    Coxswain__PullKVRequest__PullKVInfo infos[2], *list[2];
    char cluster[] = "cluster-1";
    Coxswain__PullKVRequest request = COXSWAIN__PULL_KVREQUEST__INIT;
    for (size_t i = 0; i < 2; i++) {
        coxswain__pull_kvrequest__pull_kvinfo__init(list[i] = &infos[i]);
        infos[i].n_src_block_tables = infos[i].n_dst_block_tables = 1;
        infos[i].src_block_tables = infos[i].dst_block_tables = &step.tables[i];
        infos[i].cluster_id = cluster;
        infos[i].seq_group_metadata = &step.groups[i];
    }
    request.n_pull_kv_infos = 2;
    request.pull_kv_infos = list;
    struct cox_pull_result *results;
    size_t count;
    assert_ok(cox_executor_pull_kv(test_group_executor(group), &request, soon(), &results, &count,
                                   test_err()));
    assert_int_equal(count, 2);
    assert_string_equal(results[0].request_id, "request-21");
    assert_string_equal(results[1].request_id, "request-22");
    assert_int_equal(results[0].code, 0);
    assert_int_equal(results[1].code, 0);
    free(results);
}

static void group_recover(struct test_group *group)
{
    static const enum cox_recover_command commands[] = {
        COX_RECOVER_PAUSE, COX_RECOVER_CLEAR,     COX_RECOVER_REINIT, COX_RECOVER_START,
        COX_RECOVER_CLEAR, COX_RECOVER_PAUSE_NET, COX_RECOVER_START,
    };
    struct cox_executor *executor = test_group_executor(group);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        struct cox_recover_result results[RANK_COUNT_MAX];
        int r = cox_executor_recover(executor, commands[i], soon(), results, test_err());
        if (r)
            fail_msg("%s: %d: %s", cox_recover_command_name(commands[i]), r, test_error.text);
        for (uint32_t rank = 0; rank < cox_executor_rank_count(executor); rank++) {
            assert_int_equal(results[rank].device, rank); /* its own slot */
            assert_int_equal(results[rank].result, 0);
        }
    }
    struct cox_recover_result results[RANK_COUNT_MAX];
    assert_int_equal(
        cox_executor_recover(executor, COX_RECOVER_REINIT, soon(), results, test_err()), COX_STATE);
}

/* Everything the protocol has, in one run. */
void group_live(struct test_group *group)
{
    group_init(group);
    group_infer(group);
    group_cleanup(group);
    group_link(group);
    group_lora(group);
    group_pull(group);
    group_recover(group);
    step_expect(group, 30, 31, 31); /* a rank of ours has forgotten its sequences with the reinit */
    group_end(group);
}

void legacy_run(uint32_t rank_count, const char *variable, const char *value,
                const char *const *const *commands,
                void (*fn)(struct test_group *group, struct cox_executor *executor,
                           const char *const *command))
{
    for (; *commands; commands++) {
        struct test_group *group = group_start_with(rank_count, *commands, variable, value);
        group_init(group);
        fn(group, test_group_executor(group), *commands);
        group_end(group);
    }
}
