/* The model's weights for all ranks: loaded by the coordinator, and taken by a rank, with each of their calls failing in
 * turn. */
#include "countdown.h"
#include "testing.h"

#include "channel/memory/queue.h"
#include "coordinator/serving/shared_weights.h"
#include "worker/rank_weights.h"

#define MODEL COX_TEST_SOURCE_DIR "/models/sums"
#define BLOCK_SIZE 4096

static const int codes[] = {COX_NO_SPACE, COX_UNSUPPORTED, 0};

/* ---- the coordinator's ---- */

static int weights_load(void *object, struct cox_error *err)
{
    return cox_shared_weights_load(MODEL, NULL, NULL, object, err);
}

static void weights_free(void *object)
{
    cox_shared_weights_freep(object);
}

/* ---- a rank's ---- */

static struct cox_pool *pool;
static struct cox_queue *queue;
static struct cox_exporter *exporter;
static struct cox_weights_offer offer;

static void offer_make(void)
{
    const struct cox_pool_options options = {.block_size = BLOCK_SIZE, .block_count = 2};
    offer = (struct cox_weights_offer){.version = 1};
    assert_int_equal(cox_pool_create(&options, &pool, NULL), 0);
    assert_int_equal(cox_pool_allocate(pool, BLOCK_SIZE, &offer.ref, NULL), 0);
    assert_int_equal(cox_queue_create(NULL, &queue, NULL), 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_pool_export(pool, exporter, true, &offer.pool, NULL), 0);
    assert_int_equal(cox_queue_export(queue, exporter, &offer.queue, NULL), 0);
}

static void offer_end(void)
{
    struct cox_pool_stats stats;
    cox_pool_stats(pool, &stats);
    /* Of a rank that is gone nothing is left. */
    assert_int_equal(stats.reference_count, 1);
    assert_int_equal(stats.owner_count, 1);
    exporter = cox_exporter_free(exporter);
    queue = cox_queue_free(queue);
    pool = cox_pool_free(pool);
}

static int rank_open(void *object, struct cox_error *err)
{
    return cox_rank_weights_open(&offer, cox_deadline_after_ms(10000), object, err);
}

static void rank_free(void *object)
{
    cox_rank_weights_free(*(struct cox_rank_weights **)object);
}

static const struct countdown_subject subjects[] = {
    {.name = "shared_weights_load",
     .size = sizeof(struct cox_shared_weights *),
     .construct = weights_load,
     .destroy = weights_free,
     .codes = codes,
     .word = "memory",
     .costly = true,
     .lenient = true},
    {.name = "rank_weights_open",
     .size = sizeof(struct cox_rank_weights *),
     .construct = rank_open,
     .destroy = rank_free,
     .prepare = offer_make,
     .restore = offer_end,
     .codes = codes,
     .word = "memory",
     .lenient = true},
};

static void once(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof subjects / sizeof subjects[0]; i++)
        countdown_once(&subjects[i]);
}

static void sticky(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof subjects / sizeof subjects[0]; i++)
        countdown_sticky(&subjects[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(once),
        cmocka_unit_test(sticky),
    };
    return cmocka_run_group_tests_name("countdown_weights", tests, NULL, NULL);
}
