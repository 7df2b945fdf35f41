/* Links and pulls of a group, and what it remembers of its ranks' KV caches, with each of their
 * calls failing in turn. */
#include "countdown.h"
#include "testing.h"

#include "coordinator/executor/executor_internal.h"
#include "coordinator/server/group_links.h"
#include "engine/batching/transfers.h"
#include "proto/executor.pb-c.h"

#define RANK_COUNT 2
#define PULL 5

static struct test_group *group;
static struct cox_transfers *transfers;

/* ---- the pulls of a group ---- */

static int transfers_new(void *object, struct cox_error *err)
{
    static const struct cox_transfers_options options;
    return cox_transfers_new(test_group_executor(group), &options, object, err);
}

DESTROY(transfers_free, cox_transfers_free(*(struct cox_transfers **)object))

/* ---- one pull ---- */

static uint64_t running(void)
{
    struct cox_transfers_status status;
    cox_transfers_status(transfers, &status);
    return status.running;
}

static void transfers_make(void)
{
    struct cox_error error = {0};
    assert_int_equal(transfers_new(&transfers, &error), 0);
}

static void transfers_end(void)
{
    assert_int_equal(running(), 0); /* of one that failed nothing is queued */
    transfers = cox_transfers_free(transfers);
}

static int pull_start(void *object, struct cox_error *err)
{
    static const int32_t theirs[] = {7, 8, 9}, ours[] = {1, 2, 3};
    static const struct cox_kv_reference source = {
        .cluster_id = "other",
        .epoch = 3,
        .sequence = 70,
        .lease_ns = COX_DEADLINE_NEVER,
        .blocks = theirs,
        .block_count = 3,
    };
    const struct cox_pull_request request = {
        .sequence = PULL,
        .attempt = 1,
        .source = &source,
        .blocks = ours,
        .deadline_ns = COX_DEADLINE_NEVER,
    };
    (void)object, (void)err;
    return cox_transfers_start(transfers, &request);
}

static void pull_end(void *object)
{
    (void)object;
    assert_int_equal(running(), 1);
    assert_true(cox_transfers_cancel(transfers, PULL)); /* never sent, so never written */
}

/* ---- links to other groups ---- */

static int links_new(void *object, struct cox_error *err)
{
    static const struct cox_log log;
    return cox_group_links_new(test_group_executor(group), &log, object, err);
}

DESTROY(links_free, cox_group_links_freep(object))

/* ---- what the ranks say of their caches ---- */

static int caches_new(void *object, struct cox_error *err)
{
    Coxswain__KvPool pool = COXSWAIN__KV_POOL__INIT;
    Coxswain__ExecuteResponse__InitResults init = COXSWAIN__EXECUTE_RESPONSE__INIT_RESULTS__INIT;
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    const struct cox_rank_result ranks[RANK_COUNT] = {{.response = &response},
                                                      {.response = &response}};
    const struct cox_completion completion = {.rank_count = RANK_COUNT, .ranks = ranks};
    struct cox_kv_caches *caches;
    (void)err;
    pool.has_block_count = true;
    pool.block_count = 9;
    init.kv_pool = &pool;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_INIT_RESULTS;
    response.init_results = &init;
    caches = cox_kv_caches_new(&completion);
    if (!caches)
        return -ENOMEM;
    *(struct cox_kv_caches **)object = caches;
    return 0;
}

DESTROY(caches_free, cox_kv_caches_free(*(struct cox_kv_caches **)object))

GROUP_TEST(m11_every_call_of_transfers_may_fail, RANK_COUNT)
{
    group = g;
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(transfers_new, MAKES(struct cox_transfers *, transfers_free)),
              SUBJECT(pull_start, AROUND(transfers_make, transfers_end), .destroy = pull_end,
                      .wordless = true),
              SUBJECT(links_new, MAKES(struct cox_group_links *, links_free)),
              SUBJECT(caches_new, MAKES(struct cox_kv_caches *, caches_free), .wordless = true));
}
