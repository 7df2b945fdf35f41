/*
 * legacy_group: groups of legacy workers and of both kinds, and every operation of the protocol
 * with the replies that tests/legacy/legacy_worker.py and tests/legacy/native_worker.c give. Fails
 * the test when a reply is another one.
 *
 * Threads: step_call and step_fill from any; the rest on the test's. Ownership,
 *   blocking, death: as testing.h.
 */
#ifndef COX_TESTS_MULTI_LEGACY_GROUP_H
#define COX_TESTS_MULTI_LEGACY_GROUP_H

#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "testing.h"

#define LEGACY_WORKER "/usr/bin/python3 " COX_TEST_SOURCE_DIR "/tests/legacy/legacy_worker.py"
#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define ROW_COUNT_MAX 8
#define RANK_COUNT_MAX 8
#define TOKEN_MODULUS 97

/* Which worker each rank runs: commands, for group_start. The shells among them end in exec: the
 * rank's pid is the worker's. */
extern const char *const all_legacy[];
extern const char *const even_native[];
extern const char *const odd_native[];
extern const char *const all_native[];
extern const char *const slow_legacy[]; /* COX_LEGACY_DELAY_MS is rank 1's alone */

/* What a legacy worker requires in an init. */
#define LEGACY_CONFIG                                                                              \
    {"model_id", "none"}, {"distributed_enable", "false"}, {"npu_device_ids", "0,1"},              \
        {"cpu_mem", "0"}, {"npu_mem", "-1"}, {"max_seq_len", "2560"}, {"max_iter_times", "512"},   \
        {"max_prefill_tokens", "8192"},                                                            \
    {                                                                                              \
        "block_size", "128"                                                                        \
    }
extern const struct cox_config_entry legacy_config[];
#define LEGACY_CONFIG_COUNT 9

/* Options of a legacy group, by the members that are not 0: small regions; nothing but finalize
 * ends the workers: that they leave by themselves is what is to be seen, on a busy machine too. */
#define SMALL(...)                                                                                 \
    &(const struct cox_executor_options)                                                           \
    {                                                                                              \
        .size = sizeof(struct cox_executor_options), .workers.legacy = true,                       \
        .memory.request_size = {[COX_CHANNEL_EXECUTE] = 4 * MIB,                                   \
                                [COX_CHANNEL_LINK] = 64 * KIB,                                     \
                                [COX_CHANNEL_TRANSFER] = 1 * MIB,                                  \
                                [COX_CHANNEL_RECOVER] = 64 * KIB},                                 \
        .memory.response_size = {[COX_CHANNEL_EXECUTE] = 16 * MIB,                                 \
                                 [COX_CHANNEL_LINK] = 64 * KIB,                                    \
                                 [COX_CHANNEL_TRANSFER] = 4 * MIB,                                 \
                                 [COX_CHANNEL_RECOVER] = 8 * MIB},                                 \
        .times.finalize_ms = TEST_PATIENCE_MS, __VA_ARGS__                                         \
    }
struct test_group *group_start(uint32_t rank_count, const char *const *command);
struct test_group *group_start_with(uint32_t rank_count, const char *const *command,
                                    const char *variable, const char *value);
/* Finalize makes every worker leave with 0 and without a signal. */
void group_end(struct test_group *group);
/* init, steps, clean-up, links, LoRA, pulls, recovery, end: everything the protocol has, in one
 * run. */
void group_live(struct test_group *group);

/* A test over an initialised group of these commands, one after the other; it ends in order. The
 * variable (may be NULL) is set while it starts. */
#define LEGACY_TEST_WITH(name, rank_count, variable, value, ...)                                   \
    static void name##_in(struct test_group *group, struct cox_executor *executor,                 \
                          const char *const *command);                                             \
    TEST(name)                                                                                     \
    {                                                                                              \
        legacy_run(rank_count, variable, value, (const char *const *const[]){__VA_ARGS__, NULL},   \
                   name##_in);                                                                     \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct test_group *group,                        \
                          __attribute__((unused)) struct cox_executor *executor,                   \
                          __attribute__((unused)) const char *const *command)
#define LEGACY_TEST(name, rank_count, ...)                                                         \
    LEGACY_TEST_WITH(name, rank_count, NULL, NULL, __VA_ARGS__)
void legacy_run(uint32_t rank_count, const char *variable, const char *value,
                const char *const *const *commands,
                void (*fn)(struct test_group *group, struct cox_executor *executor,
                           const char *const *command));

uint64_t soon(void); /* a deadline that only a broken test reaches */
void rank_halt(struct test_group *group, uint32_t rank);
void rank_resume(struct test_group *group, uint32_t rank);

struct row {
    int64_t id;
    /* one token; 0: a decode step */
    int64_t prompt;
};

struct step {
    Coxswain__ExecuteRequest request;
    Coxswain__ExecuteModelRequest model;
    Coxswain__SequenceGroupMetadata groups[ROW_COUNT_MAX], *list[ROW_COUNT_MAX];
    ProtobufCBinaryData tables[ROW_COUNT_MAX];
    uint8_t ids[ROW_COUNT_MAX][8], prompts[ROW_COUNT_MAX][8], lengths[ROW_COUNT_MAX][8];
    uint8_t blocks[ROW_COUNT_MAX][8], computed[ROW_COUNT_MAX][8];
    char names[ROW_COUNT_MAX][24];
};

/* The request lies in step, which must stay where it is. */
void step_fill(struct step *step, const struct row *rows, size_t count);

/* What call returns; *ret_completion is valid before, or zero, and has ids and tokens after. */
int step_call(struct test_group *group, const struct row *rows, size_t count, uint64_t deadline_ns,
              struct test_completion *ret_completion, struct cox_error *err);
/* One step of one row, and the token that has to come of it. */
void step_expect(struct test_group *group, int64_t id, int64_t prompt, int64_t token);

void group_init(struct test_group *group);
void group_infer(struct test_group *group); /* sequences 7, 8 and 9 */
void group_pull(struct test_group *group);
void link_one(struct test_group *group, const char *cluster, bool unlink_it);
/* So many clusters are linked, the last of them is this one. */
void link_expect(struct test_group *group, size_t count, const char *cluster);

#endif
