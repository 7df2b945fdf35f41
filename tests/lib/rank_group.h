/*
 * rank_group: what tests of worker/group.h share, in forked ranks (forks.h).
 *
 * Processes and threads: in the rank's process, on any thread.
 * Ownership: a joined group is the caller's.
 * Blocks: as the operations do; deadlines are TEST_PATIENCE_MS.
 */
#ifndef COX_TESTS_LIB_RANK_GROUP_H
#define COX_TESTS_LIB_RANK_GROUP_H

#include "forks.h"
#include "testing.h"

#include "worker/group.h"

static inline uint64_t rank_group_patience(void)
{
    return cox_deadline_after_ms(TEST_PATIENCE_MS);
}

static inline struct cox_group *rank_group_join_sized(const struct forks_self *self,
                                                      uint32_t value_size)
{
    struct cox_group *group = NULL;
    struct cox_error err = {0};
    const struct cox_group_options options = {
        .name = self->name,
        .rank = self->rank,
        .rank_count = self->rank_count,
        .value_size = value_size,
        .deadline_ns = rank_group_patience(),
        .spin_ns = self->rank % 2 ? COX_SPIN_AUTO_NS : 0, /* both ways of waiting together */
    };
    int r = cox_group_join(&options, &group, &err);
    FORK_CHECK(r == 0, "join: %d %s", r, err.text);
    return group;
}

static inline struct cox_group *rank_group_join(const struct forks_self *self)
{
    return rank_group_join_sized(self, 0);
}

static inline void rank_group_barrier(const struct forks_self *self, struct cox_group *group)
{
    struct cox_error err = {0};
    int r = cox_group_barrier(group, rank_group_patience(), &err);
    FORK_CHECK(r == 0, "barrier: %d %s", r, err.text);
}

#endif
