/*
 * engine_loop_fixture: an executor whose one rank is a thread of this process. Its sequence table
 * is the workers' own; its model is a hash of all tokens of a sequence, read through a KV cache
 * that remembers what was written where, so that a wrong block, a position left out or a sequence
 * taken for another one changes the text or stops the test.
 */
#ifndef COX_TESTS_UNIT_ENGINE_LOOP_FIXTURE_H
#define COX_TESTS_UNIT_ENGINE_LOOP_FIXTURE_H

#include "engine/batching/engine_loop.h"
#include "worker/sequences/table.h"

#include <pthread.h>
#include <stdatomic.h>

#define BLOCK_SIZE 4
#define BLOCK_COUNT_MAX 512
#define STOP 0
#define FRAME_SIZE 65536
#define FIXTURE_DEPTH 4
#define FIXTURE_SENT_MAX 32

struct cell {
    int64_t id;
    uint32_t position;
    int32_t token;
};

/* What the rank, or the executor, does with the n-th submit. */
struct script {
    /* what submit returns; NULL: 0 */
    int (*submit)(uint64_t number);
    /* how the step ends; NULL: 0 */
    int (*status)(uint64_t number);
    /* what a cleanup returns, which is not done unless 0; NULL: 0 */
    int (*cleanup)(void);
    /* the rank is about to run it; may await executor_published */
    void (*taken)(struct cox_executor *executor, uint64_t number);
    /* a step that failed was applied by this rank all the same */
    bool loses_table;
    bool bad_reply;
    /* never completes */
    bool silent;
    /* what the n-th submit of pulls returns; NULL: 0 */
    int (*pull_submit)(uint64_t number);
    /* PDErrorCode of all of it; NULL: 0 */
    int32_t (*pull_code)(uint64_t number);
    /* the test completes them (executor_await_pull) */
    bool pulls_held;
};

/* A submit of pulls that is under way. */
#define FIXTURE_PULLS_MAX 32
struct fixture_pull {
    void *context;
    uint32_t count;
    char ids[16][192];
};
struct Coxswain__PullKVRequest__PullKVInfo;

struct fixture_request {
    uint8_t frame[FRAME_SIZE];
    size_t frame_size;
    void *request_context;
};

/* The executor of these tests. */
struct cox_executor {
    bool legacy;
    size_t request_size_max;
    struct script script;
    /* What the other group had at a position of a pull. */
    int32_t (*remote_token)(const struct Coxswain__PullKVRequest__PullKVInfo *info,
                            uint32_t position);
    struct cox_table *table;
    struct cell cells[BLOCK_COUNT_MAX][BLOCK_SIZE];

    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    cox_completion_fn handler;
    void *handler_context;
    cox_completion_fn pull_handler;
    void *pull_context;
    struct fixture_pull held[FIXTURE_PULLS_MAX];
    uint32_t held_count;
    uint64_t pull_count;
    /* pulls that the rank was told to cancel */
    uint32_t leave_count;
    /* the rank owes a reply on the transfer channel */
    bool late;
    bool stop;
    /* at their number modulo this */
    struct fixture_request requests[FIXTURE_DEPTH];
    uint64_t published;
    /* the last one taken */
    uint64_t sequence;
    uint64_t void_through;
    /* since a step failed; until everything is announced again */
    bool lost;

    /* Only the test's thread touches these while the rank is idle. */
    uint64_t submit_count;
    uint64_t row_count;
    /* with an adapter */
    uint64_t lora_row_count;
    uint64_t row_count_max;
    uint64_t token_count_max;
    uint64_t cleanup_count;
    /* steps without rows */
    uint64_t empty_count;
    /* by submits that were taken, at their numbers */
    uint64_t weights_sent[FIXTURE_SENT_MAX];
    /* the same */
    uint64_t deadlines_ns[FIXTURE_SENT_MAX];
    /* requests that were published and not taken */
    uint64_t waiting_max;

    /* what cox_executor_epoch says; starts at 1 */
    _Atomic uint64_t epoch;
    /* of cox_executor_renew_kv: the last one, and how many */
    _Atomic uint64_t kv_digest, kv_changes;
    /* of the last step */
    _Atomic uint64_t weights_version;
    /* of the last step that offered any; under lock */
    struct cox_weights_announcement offered;
    /* what an init would call */
    void (*announce)(void *context, struct cox_weights_announcement *ret_announcement);
    void *announce_context;
};

/* What follows tokens; 0 is STOP. */
int32_t model(const int32_t *tokens, uint32_t count);
/* The oldest held submit of pulls, waited for; and its completion, on the caller's thread. */
struct fixture_pull executor_await_pull(struct cox_executor *executor);
void executor_complete_pull(struct cox_executor *executor, const struct fixture_pull *pull,
                            int status, enum cox_outcome outcome, int32_t code,
                            int32_t pull_status);
/* For script.taken: returns when this step was submitted, too. */
void executor_await_published(struct cox_executor *executor, uint64_t number);
/* Owned by the test (test_own). */
struct cox_executor *executor_new(void);

#endif
