/* Attaching on one thread while another creates: what has its name is whole. On one mapping
 * ThreadSanitizer sees whether the header's magic orders the rest. */
#include "channel/attach/named/names.h"
#include "channel/shm/control.h"
#include "channel/shm/region.h"
#include "testing.h"

static struct cox_geometry geometry_of(uint32_t rank_count)
{
    const struct cox_geometry_choice choice = {.depth = 2};
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(rank_count, &choice, &geometry, NULL), 0);
    return geometry;
}

static void share(bool on)
{
#if COX_TESTING
    cox_region_share_mappings(on);
#else
    (void)on;
#endif
}

struct attacher {
    const char *name;
    struct cox_control control;
    int result;
};

static void *attacher_main(void *argument)
{
    struct attacher *attacher = argument;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    do {
        attacher->result = cox_control_attach(&attacher->control, attacher->name, NULL);
        sched_yield();
    } while (attacher->result == COX_NOT_FOUND && cox_now_ns() < deadline_ns);
    return NULL;
}

TEST(m16_a_group_with_a_name_is_whole)
{
    share(true);
    for (uint32_t round = 1; round <= 50; round++) {
        char name[64];
        struct attacher attacher = {.name = test_unique_name(name), .control = COX_CONTROL_NONE};
        struct cox_geometry geometry = geometry_of(round);
        struct cox_control own = COX_CONTROL_NONE;
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, attacher_main, &attacher), 0);
        int r = cox_control_create(&own, name, &geometry, NULL);
        pthread_join(thread, NULL);
        assert_int_equal(r, 0);
        assert_int_equal(attacher.result, 0);
        assert_memory_equal(&attacher.control.geometry, &geometry, sizeof geometry);
        assert_int_equal(attacher.control.group_incarnation, own.group_incarnation);
#if COX_TESTING
        assert_ptr_equal(attacher.control.layout, own.layout);
#endif
        cox_control_unlink_names(name, &geometry, 0);
        cox_control_close(&own);
        /* The remaining process still has it. */
        assert_int_equal(attacher.control.layout->header.rank_count, round);
        cox_control_close(&attacher.control);
    }
    share(false);
}
