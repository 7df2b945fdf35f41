/* Pools and KV blocks: create, attach, open by handle, export, and memory on demand, with each of
 * their calls failing in turn. */
#include "countdown.h"
#include "testing.h"

#include <coxswain/kv.h>
#include <coxswain/memory/pool.h>

static const struct cox_pool_options fixed = {
    .size = sizeof(struct cox_pool_options), .block_size = 4096, .block_count = 16};
static const struct cox_pool_options slabs = {.size = sizeof(struct cox_pool_options),
                                              .strategy = COX_POOL_SLAB,
                                              .block_size = 1024,
                                              .slab_size = 4096,
                                              .slabs_size = 16 * 4096,
                                              .on_demand = true};

static struct cox_pool *pool;
static struct cox_exporter *exporter;
static struct cox_pool_handle handle;
static const struct cox_pool_options *options;

/* ---- constructors ---- */

CONSTRUCT(create_fixed, cox_pool_create(&fixed, object, err))
CONSTRUCT(create_slabs, cox_pool_create(&slabs, object, err))

static int attach(void *object, struct cox_error *err)
{
    int fds[2];
    cox_pool_fds(pool, fds);
    return cox_pool_attach(fds, NULL, object, err);
}

CONSTRUCT(open_handle, cox_pool_open(&handle, NULL, 0, NULL, object, err))
DESTROY(destroy, cox_pool_free(*(struct cox_pool **)object))
CONSTRUCT(export_to_read, cox_pool_export(pool, exporter, true, object, err))
DESTROY(unexport, cox_pool_unexport(exporter, object))

/* A run of slabs, with pages. */
CONSTRUCT(allocate, cox_pool_allocate(pool, 3 * 4096, object, err))
DESTROY(unref, assert_int_equal(cox_pool_unref(pool, object, NULL), 0))

/* ---- around them ---- */

static void pool_prepare(void)
{
    assert_int_equal(cox_pool_create(options, &pool, NULL), 0);
}

/* A failure leaves nothing behind. */
static void pool_restore(void)
{
    struct cox_pool_stats stats;
    cox_pool_read_stats(pool, &stats);
    assert_int_equal(stats.free_count, stats.block_count);
    assert_int_equal(stats.owner_count, 1);
    pool = cox_pool_free(pool);
}

static void handle_prepare(void)
{
    pool_prepare();
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_pool_export(pool, exporter, false, &handle, NULL), 0);
}

static void handle_restore(void)
{
    cox_pool_unexport(exporter, &handle);
    exporter = cox_exporter_free(exporter);
    pool_restore();
}

/* ---- KV blocks ---- */

static struct cox_kv_blocks *kv;

CONSTRUCT(kv_make, cox_kv_blocks_new(4, 4096, object, err))
DESTROY(kv_destroy, cox_kv_blocks_free(*(struct cox_kv_blocks **)object))
CONSTRUCT(view_attach, cox_kv_view_attach(cox_kv_blocks_info(kv).fd, object, err))
DESTROY(view_free, cox_kv_view_free(*(struct cox_kv_view **)object))

static void kv_prepare(void)
{
    assert_int_equal(cox_kv_blocks_new(4, 4096, &kv, NULL), 0);
}

static void kv_restore(void)
{
    kv = cox_kv_blocks_free(kv);
}

static const int codes[] = {COX_NO_SPACE,  COX_DENIED, COX_NOT_FOUND, COX_UNSUPPORTED, COX_CORRUPT,
                            COX_PEER_DEAD, 0};

#define CODES .codes = codes, .lenient = true

TEST(b15_b19_h28_a_pool_is_made_whole_or_not_at_all)
{
    options = &fixed;
    COUNTDOWN(
        EACH_MODE,
        NAMED_SUBJECT("pool_create, fixed", create_fixed, MAKES(struct cox_pool *, destroy), CODES),
        NAMED_SUBJECT("pool_create, slabs on demand", create_slabs,
                      MAKES(struct cox_pool *, destroy), CODES),
        NAMED_SUBJECT("pool_attach", attach, MAKES(struct cox_pool *, destroy),
                      AROUND(pool_prepare, pool_restore), CODES),
        NAMED_SUBJECT("pool_open", open_handle, MAKES(struct cox_pool *, destroy),
                      AROUND(handle_prepare, handle_restore), CODES),
        NAMED_SUBJECT("pool_export", export_to_read, MAKES(struct cox_pool_handle, unexport),
                      AROUND(handle_prepare, handle_restore), CODES),
        NAMED_SUBJECT("kv_blocks_new", kv_make, MAKES(struct cox_kv_blocks *, kv_destroy), CODES),
        NAMED_SUBJECT("kv_view_attach", view_attach, MAKES(struct cox_kv_view *, view_free),
                      AROUND(kv_prepare, kv_restore), CODES));
    options = &slabs;
    COUNTDOWN(EACH_MODE,
              NAMED_SUBJECT("pool_allocate", allocate, MAKES(struct cox_block_ref, unref),
                            AROUND(pool_prepare, pool_restore), .codes = codes));
}
