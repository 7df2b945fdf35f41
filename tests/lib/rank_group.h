/*
 * rank_group: what tests of coxswain/group.h share, in forked ranks (forks.h).
 *
 * Processes and threads: in the rank's process, on any thread.
 * Ownership: a joined group is the caller's.
 * Blocks: as the operations do; deadlines are TEST_PATIENCE_MS.
 */
#ifndef COX_TESTS_LIB_RANK_GROUP_H
#define COX_TESTS_LIB_RANK_GROUP_H

#include "channel/base/spin.h"
#include "forks.h"
#include "testing.h"

#include <coxswain/group.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

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
        .size = sizeof(struct cox_group_options),
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

/* From now on this call of the rank's process ends so: SECCOMP_RET_ERRNO | EPERM,
 * SECCOMP_RET_KILL_PROCESS. */
static inline void rank_group_deny(const struct forks_self *self, uint32_t call, uint32_t action)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof code / sizeof code[0], code};
    FORK_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                   prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
               "seccomp");
}

/* Of the memory that an fd has. */
static inline struct cox_group *rank_group_join_fd(const struct forks_self *self, int fd,
                                                   uint32_t rank_count)
{
    struct cox_group *group = NULL;
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .fd = fd,
                                              .rank = self->rank,
                                              .rank_count = rank_count,
                                              .deadline_ns = rank_group_patience()};
    FORK_OK(cox_group_join(&options, &group, test_err()));
    return group;
}

static inline int rank_group_memory(uint32_t rank_count)
{
    int fd = memfd_create("group", MFD_CLOEXEC);
    COX_ASSERT(fd >= 0 && ftruncate(fd, (off_t)cox_group_memory_size(rank_count, 0)) == 0);
    return fd;
}

static inline void *rank_group_map(int fd, uint32_t rank_count)
{
    void *map =
        mmap(NULL, cox_group_memory_size(rank_count, 0), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    COX_ASSERT(map != MAP_FAILED);
    return map;
}

static inline void rank_group_barrier(const struct forks_self *self, struct cox_group *group)
{
    struct cox_error err = {0};
    int r = cox_group_barrier(group, rank_group_patience(), &err);
    FORK_CHECK(r == 0, "barrier: %d %s", r, err.text);
}

/* A member has died: the error begins with it, or names it. */
#define RANK_GROUP_DEAD(r, name)                                                                   \
    FORK_CHECK((r) == COX_PEER_DEAD && strstr(test_error.text, name), "%d %s", r, test_error.text)

/* An fd of each rank, or of rank `source` alone, goes to all, and is closed there. */
static inline int rank_group_fds(const struct forks_self *self, struct cox_group *group,
                                 uint32_t source, uint64_t deadline_ns)
{
    int fds[FORKS_MAX], got = -1, r;
    memset(fds, 0xff, sizeof fds);
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("own", MFD_CLOEXEC);
    if (source == UINT32_MAX)
        r = cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, deadline_ns, test_err());
    else
        r = cox_group_broadcast_fd(group, source, self->rank == source ? fd : -1, COX_GROUP_FD_KEEP,
                                   &got, deadline_ns, test_err());
    for (uint32_t rank = 0; rank < FORKS_MAX; rank++)
        cox_close_fd(&fds[rank]);
    cox_close_fd(&got);
    return r;
}

/* Every operation once, each within so long, in a group of at most 4 and in its subgroup of all.
 * Returns what the first that failed did, with test_error. */
static inline int rank_group_operations(const struct forks_self *self, struct cox_group *group,
                                        struct cox_group *all, uint64_t ms)
{
    uint8_t value[1500] = {1}, values[4 * 1500];
    int r = cox_group_barrier(group, cox_deadline_after_ms(ms), test_err());
    if (r == 0)
        r = cox_group_gather(group, value, 100, values, cox_deadline_after_ms(ms), test_err());
    if (r == 0)
        r = cox_group_barrier(all, cox_deadline_after_ms(ms), test_err());
    if (r == 0)
        r = rank_group_fds(self, group, UINT32_MAX, cox_deadline_after_ms(ms));
    if (r == 0)
        r = rank_group_fds(self, all, 1, cox_deadline_after_ms(ms));
    if (r == 0)
        r = rank_group_fds(self, group, 0, cox_deadline_after_ms(ms));
    if (r == 0) /* in two pieces */
        r = cox_group_gather(all, value, sizeof value, values, cox_deadline_after_ms(ms),
                             test_err());
    return r;
}

/* The last barrier: no rank leaves while others are in the one before. */
static inline void rank_group_leave(const struct forks_self *self, struct cox_group *group)
{
    rank_group_barrier(self, group);
    cox_group_leave(group);
}

/* A test that `rank_count` forked ranks run; the memory is of forks_share, or NULL. */
#define RANKS_TEST(name, rank_count, memory)                                                       \
    static void name##_main(const struct forks_self *self);                                        \
    TEST(name)                                                                                     \
    {                                                                                              \
        forks_run(rank_count, name##_main, memory);                                                \
    }                                                                                              \
    static void name##_main(const struct forks_self *self)

#endif
