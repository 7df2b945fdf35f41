/*
 * The adapters of a rank, by name: found by the thread that computes steps while another one loads
 * and removes.
 */
#include "engine/rank/adapter_cache.h"
#include "model_fixture.h"
#include "tests/lib/test.h"

#include <coxswain/worker.h>

#define ROUND_COUNT 8000
/* Names that begin alike take longest to tell apart. */
#define ALIKE                                                                                      \
    "a name that is as long as it may be, so that a look at it takes time, and another one that "  \
    "begins as it does: "

static const struct cox_model_config config = {
    .hidden_size = 64,
    .intermediate_size = 176,
    .layer_count = 1,
    .head_count = 8,
    .kv_head_count = 4,
    .head_dim = 8,
    .vocab_size = 61,
    .position_count_max = 64,
};
static const struct cox_share whole;

/* The worker library's function; no batch is cancelled here. */
bool cox_batch_cancelled(const struct cox_batch *batch)
{
    (void)batch;
    return false;
}

struct finder {
    struct cox_adapter_cache *adapters;
    const struct cox_adapter *kept;
    _Atomic bool ends;
    _Atomic uint64_t count, wrong;
};

/* The thread of the steps: looks up an adapter that sequences have, and a name that was never
 * loaded, so that all are compared. */
static void *find_main(void *context)
{
    struct finder *finder = context;
    while (!atomic_load(&finder->ends)) {
        bool right = cox_adapter_cache_find(finder->adapters, ALIKE "kept") == finder->kept &&
                     !cox_adapter_cache_find(finder->adapters, ALIKE "nobody's");
        atomic_fetch_add(&finder->wrong, !right);
        atomic_fetch_add(&finder->count, 1);
    }
    return NULL;
}

static void load(struct cox_adapter_cache *adapters, const char *name, const char *directory)
{
    uint64_t digest;
    assert_ok(cox_adapter_cache_load(adapters, name, directory, 0, &digest, test_err()));
}

/* The name of a removed adapter is compared in a lookup of another one (a sanitizer sees it if it
 * was freed too early). */
PLAIN_TEST(m13_adapters_go_while_others_are_looked_for)
{
    const char *directory = test_folder();
    const struct fixture_adapter kind = {.rank = 1, .modules = "q"};
    struct finder finder = {0};
    fixture_write_adapter(directory, &config, &kind);
    assert_int_equal(cox_adapter_cache_new(0, &finder.adapters), 0);
    cox_adapter_cache_set_model(finder.adapters, &config, &whole);
    /* The one that goes is in front of the one that stays. */
    load(finder.adapters, ALIKE "goes", directory);
    load(finder.adapters, ALIKE "kept", directory);
    finder.kept = cox_adapter_cache_find(finder.adapters, ALIKE "kept");
    assert_non_null(finder.kept);
    pthread_t thread = test_thread(find_main, &finder);
    AWAIT(atomic_load(&finder.count));
    for (int i = 0; i < ROUND_COUNT; i++) {
        assert_ok(cox_adapter_cache_remove(finder.adapters, ALIKE "goes", test_err()));
        assert_int_equal(cox_adapter_cache_remove(finder.adapters, ALIKE "goes", NULL),
                         COX_NOT_FOUND);
        load(finder.adapters, ALIKE "goes", directory);
    }
    atomic_store(&finder.ends, true);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&finder.wrong), 0);
    cox_adapter_cache_free(finder.adapters);
}
