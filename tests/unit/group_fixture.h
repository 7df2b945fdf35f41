/*
 * group_fixture: the control region and the execute channel of a named group of 4 ranks, for tests
 * of what goes through it.
 *
 * Ownership: a group is the test's (test_own); in a child, nobody's.
 */
#ifndef COX_TESTS_UNIT_GROUP_FIXTURE_H
#define COX_TESTS_UNIT_GROUP_FIXTURE_H

#include "channel/attach/named/named_channel.h"
#include "channel/attach/named/names.h"
#include "channel_fixture.h"

#define GROUP test_name("g")

struct group {
    struct cox_control control;
    struct cox_channel channel;
};

static inline void group_gone(void *object)
{
    struct group *group = object;
    cox_channel_close(&group->channel);
    cox_channel_close(&group->channel);
    cox_control_unlink_names(GROUP, &group->control.geometry, COX_CONTROL_PART_COUNT);
    cox_control_close(&group->control);
    free(group);
}

static inline struct group *group_create(const struct cox_geometry_choice *choice,
                                         uint32_t rank_count)
{
    struct group *group = calloc(1, sizeof *group);
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(rank_count, choice, &geometry, NULL), 0);
    group->control = (struct cox_control)COX_CONTROL_NONE;
    assert_ok(cox_control_create(&group->control, GROUP, &geometry, test_err()));
    assert_ok(cox_channel_create(&group->channel, GROUP, &group->control, COX_CHANNEL_EXECUTE,
                                 test_err()));
    group->channel.gate.credits = true; /* what is waited with here */
    return test_own(group, group_gone);
}

/* In a child. */
static inline struct group *group_attach(uint32_t rank)
{
    struct group *group = calloc(1, sizeof *group);
    group->control = (struct cox_control)COX_CONTROL_NONE;
    CHECK(cox_control_attach(&group->control, GROUP, NULL) == 0);
    CHECK(cox_channel_attach(&group->channel, GROUP, &group->control, COX_CHANNEL_EXECUTE, rank,
                             NULL) == 0);
    group->channel.gate.credits = true;
    return group;
}

/* A test over group_new(depth), which its file has. */
#define GROUP_TEST(name, depth)                                                                    \
    static void name##_in(struct group *group);                                                    \
    LEAK_TEST(name)                                                                                \
    {                                                                                              \
        name##_in(group_new(depth));                                                               \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct group *group)

#endif
