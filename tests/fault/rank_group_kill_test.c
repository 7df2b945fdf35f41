/*
 * rank_group_kill_test: one rank of a group is killed at each of its steps, in each operation; the
 * others get its death, in whatever operation they are, or no rank can know that it was there.
 */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "worker/group/group_layout.h"
#include "rank_group.h"

#if COX_TESTING

#define VICTIM 1
#define RANK_COUNT 4
#define ROUNDS 6
/* Of a victim that was not struck. */
#define SPARED 9

struct death {
    const char *point;
    /* ends with 0 */
    uint32_t passages[20];
    bool by_sockets;
    /* nor by handles, either */
    bool no_pidfds;
    /* the first to see all ranks passes it: most often the last to join */
    bool by_chance;
    /* Before all have joined; without a name, or late ranks would begin another group. */
    bool by_fd;
    /* after one epoch */
    bool leaves;
};

struct plan {
    const struct death *death;
    uint32_t passage;
    /* of the join */
    uint64_t deadline_ms;
    /* -1: under a name */
    int memory_fd;
};

/* Every operation once; from the second round on the victim ends one. */
static int operations(const struct forks_self *self, struct cox_group *group, struct cox_group *all,
                      uint64_t epoch)
{
    int r = rank_group_operations(self, group, all, TEST_PATIENCE_MS);
    if (r == 0 && self->rank == VICTIM && epoch % 2)
        cox_group_abort(group);
    return r ? r : cox_group_barrier(group, rank_group_patience(), test_err());
}

static void rank_main(const struct forks_self *self)
{
    const struct plan *plan = self->context;
    struct cox_group *group = NULL, *all = NULL;
    struct cox_rank_set members = cox_rank_set_first(RANK_COUNT);
    char text[64];
    if (plan->death->by_sockets)
        rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | EPERM);
    if (plan->death->no_pidfds)
        rank_group_deny(self, SYS_pidfd_open, SECCOMP_RET_ERRNO | EPERM);
    snprintf(text, sizeof text, "%s:kill:%d:%" PRIu32, plan->death->point, VICTIM, plan->passage);
    cox_fault_arm(text);
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .name = plan->memory_fd < 0 ? self->name : NULL,
        .fd = plan->memory_fd,
        .rank = self->rank,
        .rank_count = RANK_COUNT,
        .deadline_ns = cox_deadline_after_ms(plan->deadline_ms),
    };
    int r = cox_group_join(&options, &group, test_err());
    if (plan->deadline_ms < TEST_PATIENCE_MS) {
        FORK_CHECK(r == COX_TIMEOUT || r == COX_PEER_DEAD, "%d %s", r, test_error.text);
        return;
    }
    if (r == 0)
        FORK_CHECK(cox_group_subgroup(group, "all", &members, &all, NULL) == 0, "subgroup");
    if (r == 0 && plan->death->by_chance) {
        r = cox_group_barrier(group, rank_group_patience(), test_err());
        if (r == 0) /* no rank was struck */
            _exit(SPARED);
    }
    uint64_t epoch = 0;
    while (r == 0 && epoch < ROUNDS) {
        r = operations(self, group, all, epoch);
        if (r == COX_ABORTED)
            r = 0;
        if (r == 0 && self->rank == VICTIM && plan->death->leaves)
            cox_group_leave(group);
        if (r == 0)
            FORK_CHECK(cox_group_align(group, ++epoch) == 0, "align");
    }
    if (r == 0)
        _exit(SPARED);
    /* Also for the last rank to notice, from ranks that have left by then because they saw it. */
    RANK_GROUP_DEAD(r, "rank 1 ");
    if (group) {
        r = cox_group_barrier(group, rank_group_patience(), test_err());
        RANK_GROUP_DEAD(r, "rank 1 "); /* from then on */
        FORK_CHECK(cox_group_align(group, 1000) == 0, "align");
        r = cox_group_barrier(group, rank_group_patience(), test_err());
        RANK_GROUP_DEAD(r, "rank 1 "); /* for good */
    }
    cox_group_leave(group);
}

static size_t own_names(void)
{
    return test_count_names(test_name_prefix());
}

static int alone(const char *name)
{
    struct cox_group *group = NULL;
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .name = name,
                                              .rank_count = 1,
                                              .deadline_ns = rank_group_patience()};
    int r = cox_group_join(&options, &group, NULL);
    cox_group_leave(group);
    return r;
}

/* All but the victim have joined under this name. */
static void others_await(const char *name)
{
    char path[128];
    int fd;
    snprintf(path, sizeof path, "/dev/shm/%s_group", name);
    while ((fd = open(path, O_RDWR | O_CLOEXEC)) < 0)
        sched_yield();
    struct cox_group_layout *layout = rank_group_map(fd, RANK_COUNT);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        AWAIT(!(rank != VICTIM && cox_group_holder_state(atomic_load(
                                      &layout->ranks[rank].identity.holder)) != COX_GROUP_JOINED));
    munmap(layout, cox_group_memory_size(RANK_COUNT, 0));
    cox_close_fd(&fd);
}

/* Returns which of them the victim is. */
static uint32_t ranks_start(struct forks *forks, struct plan *plan)
{
    if (!plan->death->by_chance) {
        forks_start(forks, RANK_COUNT, rank_main, plan);
        return VICTIM;
    }
    forks->count = 0;
    test_unique_name(forks->name);
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        if (rank != VICTIM)
            forks_add(forks, rank, RANK_COUNT, rank_main, plan);
    others_await(forks->name);
    forks_add(forks, VICTIM, RANK_COUNT, rank_main, plan);
    return RANK_COUNT - 1;
}

static void strike(const struct death *death, uint32_t passage)
{
    struct plan plan = {death, passage, TEST_PATIENCE_MS, -1};
    int status = 0;
    /* by_chance: on a busy machine the victim is seldom the first to see all. */
    for (int attempt = 0; status != 128 + SIGKILL && attempt < 500; attempt++) {
        struct forks forks;
        if (death->by_fd)
            plan.memory_fd = rank_group_memory(RANK_COUNT);
        uint32_t victim = ranks_start(&forks, &plan);
        cox_close_fd(&plan.memory_fd);
        status = forks_end(&forks, victim);
        for (uint32_t i = 0; i < RANK_COUNT && status == SPARED; i++)
            if (i != victim) /* told that it left, or at the end of the rounds: no matter */
                forks_end(&forks, i);
        if (status != SPARED)
            forks_wait(&forks);
        assert_true(status == 128 + SIGKILL || (status == SPARED && death->by_chance));
        /* K4, B4: a name that was left is no obstacle. */
        assert_int_equal(alone(forks.name), 0);
        assert_int_equal(own_names(), 0);
    }
    assert_int_equal(status, 128 + SIGKILL);
}

static void strike_all(const struct death *deaths, size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (const uint32_t *passage = deaths[i].passages; *passage; passage++) {
            print_message("%s, passage %" PRIu32 "\n", deaths[i].point, *passage);
            strike(&deaths[i], *passage);
        }
}

TEST(b3_p1_k26_killed_while_it_joins)
{
    static const struct death deaths[] = {
        {"group.claimed", {1}, .by_fd = true},
        {"group.said", {1}, .by_fd = true},
        {"group.said", {2}, .by_fd = true},
        {"group.unlinked", {1}, .by_chance = true},
        {"group.formed", {1}, .by_sockets = false},
        {"group.said", {3}, .leaves = true}, /* the end of it */
    };
    strike_all(deaths, sizeof deaths / sizeof deaths[0]);
}

TEST(b3_p1_b6_killed_in_an_operation)
{
    static const struct death deaths[] = {
        /* Every round of every operation, and two of the next epoch. */
        {"group.value", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12}, .by_sockets = false},
        {"group.arrived", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16}, .by_sockets = false},
        {"group.counted", {1, 3, 5, 6, 9}, .by_sockets = false},
        {"group.wakes", {3, 4, 9}, .by_sockets = false},
        {"group.woken", {3, 4, 9}, .by_sockets = false},
        {"group.sleeps", {1, 2, 4}, .by_fd = true},
        {"group.done", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16}, .by_sockets = false},
        {"group.aborted", {1, 2}, .by_sockets = false},
        {"group.aligned", {1, 2, 3}, .by_sockets = false},
    };
    strike_all(deaths, sizeof deaths / sizeof deaths[0]);
}

TEST(b3_p1_killed_with_fds_on_their_way)
{
    static const struct death deaths[] = {
        {"group.bound", {1, 2}, .by_sockets = true},
        {"socket.sent", {1, 2, 3, 4}, .by_sockets = true},
        /* Its fd to 3 others, then as the source to 3; theirs of 3 others, then of the source. */
        {"group.offered", {1, 2, 3, 4, 5, 6}, .by_sockets = true},
        {"group.accepted", {1, 2, 3, 4}, .by_sockets = true},
        {"group.value", {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, .by_sockets = true},
        {"group.arrived", {4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, .by_sockets = true},
        {"group.done", {4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, .by_sockets = true},
    };
    strike_all(deaths, sizeof deaths / sizeof deaths[0]);
}

TEST(b3_p1_killed_where_there_are_no_pidfds)
{
    static const struct death deaths[] = {
        {"group.claimed", {1}, .no_pidfds = true, .by_fd = true},
        {"group.said", {1}, .no_pidfds = true, .by_fd = true},
        {"group.said", {2}, .no_pidfds = true, .by_fd = true},
        {"group.value", {1, 3}, .no_pidfds = true},
        {"group.arrived", {1, 4}, .no_pidfds = true},
        {"group.done", {1, 5}, .no_pidfds = true},
        {"group.aligned", {1}, .no_pidfds = true},
        {"group.offered", {1, 3}, .no_pidfds = true},
    };
    strike_all(deaths, sizeof deaths / sizeof deaths[0]);
}

/* ---- of many ---- */

#define CROWD_VICTIM 37
struct crowd {
    const char *point;
    uint32_t passage;
    bool by_sockets;
};

static void crowd_main(const struct forks_self *self)
{
    const struct crowd *crowd = self->context;
    uint64_t value = self->rank, values[FORKS_MAX];
    int fds[FORKS_MAX], r = 0;
    char text[64];
    if (crowd->by_sockets)
        rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | EPERM);
    snprintf(text, sizeof text, "%s:kill:%d:%" PRIu32, crowd->point, CROWD_VICTIM, crowd->passage);
    cox_fault_arm(text);
    struct cox_group *group = rank_group_join(self);
    for (uint32_t i = 0; i < 3 && r == 0; i++) {
        _cox_cleanup_(cox_close_fd) int fd = memfd_create("own", MFD_CLOEXEC);
        r = cox_group_barrier(group, rank_group_patience(), test_err());
        if (r == 0)
            r = cox_group_gather(group, &value, sizeof value, values, rank_group_patience(),
                                 test_err());
        if (r == 0)
            r = cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, rank_group_patience(),
                                     test_err());
        for (uint32_t rank = 0; r == 0 && rank < self->rank_count; rank++)
            cox_close_fd(&fds[rank]);
    }
    RANK_GROUP_DEAD(r, "rank 37 ");
    cox_group_leave(group);
}

TEST(b3_p1_killed_among_64_and_128)
{
    static const uint32_t worlds[] = {64, COX_RANK_COUNT_MAX};
    struct crowd crowds[] = {
        {"group.arrived", 1, false}, {"group.value", 1, false},   {"group.arrived", 3, false},
        {"group.done", 4, false},    {"group.offered", 20, true}, {"group.accepted", 20, true},
        {"group.bound", 1, true},    {"group.counted", 2, false},
    };
    for (size_t i = 0; i < 2 * sizeof crowds / sizeof crowds[0]; i++) {
        struct forks forks;
        forks_start(&forks, worlds[i % 2], crowd_main, &crowds[i / 2]);
        assert_int_equal(forks_end(&forks, CROWD_VICTIM), 128 + SIGKILL);
        forks_wait(&forks);
        assert_int_equal(own_names(), 0);
    }
}

/* ---- which rank reports it ---- */

/* Rank 2 aligns to the next epoch, arrives there and dies; rank 1 never aligns, but stays; rank 0
 * waits in the next epoch for rank 1, which lives and is the only one that can report the death. */
struct epochs {
    /* rank 2 */
    _Atomic bool is_dead;
    _Atomic uint32_t told;
};

static void epochs_main(const struct forks_self *self)
{
    struct epochs *epochs = self->context;
    struct cox_group *group = rank_group_join(self);
    cox_fault_rank((int)self->rank);
    cox_fault_arm("group.arrived:kill:2:1");
    if (self->rank != 1)
        FORK_CHECK(cox_group_align(group, 1) == 0, "align");
    AWAIT(!(self->rank == 1 && !atomic_load(&epochs->is_dead)));
    int r = cox_group_barrier(group, rank_group_patience(), test_err());
    FORK_CHECK(r == COX_PEER_DEAD, "%d %s", r, test_error.text);
    FORK_CHECK(cox_group_barrier(group, rank_group_patience(), NULL) == COX_PEER_DEAD, "again");
    FORK_CHECK(cox_group_align(group, 5) == 0, "align");
    FORK_CHECK(cox_group_barrier(group, rank_group_patience(), NULL) == COX_PEER_DEAD, "for good");
    for (atomic_fetch_add(&epochs->told, 1);
         atomic_load(&epochs->told) < 2;) /* no rank leaves before all know */
        sched_yield();
    cox_group_leave(group);
}

TEST(b3_a_death_is_one_for_every_epoch)
{
    struct forks forks;
    struct epochs *epochs = forks_share(sizeof *epochs);
    forks_start(&forks, 3, epochs_main, epochs);
    assert_int_equal(forks_end(&forks, 2), 128 + SIGKILL);
    atomic_store(&epochs->is_dead, true);
    assert_int_equal(forks_end(&forks, 1), 0);
    assert_int_equal(forks_end(&forks, 0), 0);
}

/* Rank 3 arrives in epoch 1 and leaves, so that rank 2, still in epoch 0, aborts for good; rank 1
 * is in epoch 2. Rank 0, in epoch 1, gets both reports. */
RANKS_TEST(b3_a_report_of_a_death_is_read_first, 4, forks_share(4096))
{
    _Atomic uint32_t *step = self->context;
    struct cox_group *group = rank_group_join(self);
    static const uint32_t epochs[] = {1, 2, 0, 1};
    while (atomic_load(step) != 3 - self->rank) /* one after the other, the last first */
        sched_yield();
    if (epochs[self->rank])
        FORK_CHECK(cox_group_align(group, epochs[self->rank]) == 0, "align");
    int r = self->rank == 1
                ? 0
                : cox_group_barrier(group, self->rank == 3 ? 1 : rank_group_patience(), test_err());
    if (self->rank == 3) {
        FORK_CHECK(r == COX_TIMEOUT, "%d %s", r, test_error.text);
        cox_group_leave(group);
    } else if (self->rank != 1) { /* rank 0 only from rank 2: rank 3 had arrived */
        RANK_GROUP_DEAD(r, "rank 3 ");
    }
    for (atomic_fetch_add(step, 1); self->rank != 3 && atomic_load(step) < 4;)
        sched_yield();
    if (self->rank != 3)
        cox_group_leave(group);
}

/* Rank 2 leaves; 0 notices and leaves; 1 learns it from 0, 3 from 1. None of them caused it. */
RANKS_TEST(b3_a_rank_that_left_because_of_another_names_it, 4, forks_share(4096))
{
    _Atomic uint32_t *step = self->context;
    static const uint32_t turns[] = {1, 2, 0, 3};
    struct cox_group *group = rank_group_join(self);
    AWAIT(atomic_load(step) == turns[self->rank]);
    if (self->rank != 2) {
        int r = cox_group_barrier(group, rank_group_patience(), test_err());
        RANK_GROUP_DEAD(r, "rank 2 ");
    }
    cox_group_leave(group);
    atomic_fetch_add(step, 1);
}

/* Rank 2 finds rank 0 about to be dead when it takes its fd, when no pidfd says so yet, and goes;
 * the others have what they wanted, and learn of it after that. */
RANKS_TEST(b3_a_death_that_an_fd_reports, 3, forks_share(4096))
{
    _Atomic uint32_t *step = self->context;
    struct cox_group *group = rank_group_join(self);
    int fds[3] = {-1, -1, -1};
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("own", MFD_CLOEXEC);
    if (self->rank == 2)
        rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | ESRCH);
    int r =
        cox_group_gather_fds(group, fd, COX_GROUP_FD_KEEP, fds, rank_group_patience(), test_err());
    for (uint32_t rank = 0; rank < 3; rank++)
        cox_close_fd(&fds[rank]);
    FORK_CHECK(r == (self->rank == 2 ? COX_PEER_DEAD : 0), "%d %s", r, test_error.text);
    if (self->rank == 2) {
        FORK_CHECK(strncmp(test_error.text, "rank 0 (", 8) == 0, "%s", test_error.text);
        r = cox_group_barrier(group, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_PEER_DEAD && strncmp(test_error.text, "rank 0 (", 8) == 0, "%d %s", r,
                   test_error.text);
        cox_group_leave(group);
    }
    for (atomic_fetch_add(step, 1); atomic_load(step) < 3;)
        sched_yield();
    if (self->rank == 2)
        return;
    r = cox_group_barrier(group, rank_group_patience(), test_err());
    FORK_CHECK(r == COX_PEER_DEAD &&
                   strncmp(test_error.text, self->rank == 0 ? "rank 2 (" : "rank 0 (", 8) == 0,
               "%d %s", r, test_error.text);
    cox_group_leave(group);
}

/* The report of rank 2, in the memory of a group of 4 of which rank 1 lives, and what rank 0
 * concludes from it. */
struct saying {
    uint32_t said_dead;
    /* or aborts for good */
    bool leaves;
    const char *named;
};
struct sayings {
    const struct saying *saying;
    int memory_fd;
    _Atomic bool is_said, is_heard;
};

static void saying_main(const struct forks_self *self)
{
    struct sayings *sayings = self->context;
    const struct saying *saying = sayings->saying;
    struct cox_group_layout *layout = rank_group_map(sayings->memory_fd, RANK_COUNT);
    struct cox_group_layout_rank *rank = &layout->ranks[self->rank];
    struct cox_group *group = rank_group_join_fd(self, sayings->memory_fd, RANK_COUNT);
    if (self->rank == 2) {
        atomic_store(&rank->identity.said_dead, saying->said_dead);
        if (saying->leaves)
            atomic_store(&rank->identity.holder,
                         cox_group_holder(COX_GROUP_LEFT, getpid(), rank->identity.holder));
        else
            atomic_store(&rank->parts[0].aborted, cox_group_aborted(COX_GROUP_EPOCH_NONE));
        atomic_store(&sayings->is_said, true);
    }
    AWAIT(atomic_load(self->rank == 0 ? &sayings->is_said : &sayings->is_heard));
    if (self->rank == 0) {
        int r = cox_group_barrier(group, rank_group_patience(), test_err());
        int again = cox_group_barrier(group, rank_group_patience(), NULL);
        atomic_store(&sayings->is_heard, true);
        FORK_CHECK(r == COX_PEER_DEAD &&
                       strncmp(test_error.text, saying->named, strlen(saying->named)) == 0,
                   "%" PRIx32 ": %d %s", saying->said_dead, r, test_error.text);
        FORK_CHECK(again == COX_PEER_DEAD, "again: %d", again);
    }
    cox_group_leave(group);
}

TEST(b3_b14_what_a_rank_reports_of_the_dead)
{
    static const char left[] = "rank 2 (", told[] = "rank 2 has seen a member die",
                      cause[] = "rank 1 (";
    const struct saying all[] = {
        {cox_group_said_dead(1), true, cause},
        {cox_group_said_dead(1), false, cause},
        {0, true, left},
        {0, false, told},
        {2, true, left}, /* without its complement */
        {cox_group_said_dead(1) ^ 1, false, told},
        {cox_group_said_dead(1) ^ 0x10000, true, left},
        {cox_group_said_dead(0), true, left}, /* the reading rank */
        {cox_group_said_dead(2), true, left}, /* itself */
        {cox_group_said_dead(2), false, told},
        {cox_group_said_dead(RANK_COUNT), true, left},
        {cox_group_said_dead(0xfffe), false, told},
        {UINT32_MAX, true, left},
    };
    struct sayings *sayings = forks_share(sizeof *sayings);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct forks forks;
        _cox_cleanup_(cox_close_fd) int fd = rank_group_memory(RANK_COUNT);
        *sayings = (struct sayings){.saying = &all[i], .memory_fd = fd};
        forks_start(&forks, RANK_COUNT, saying_main, sayings);
        forks_wait(&forks);
    }
}

/* Rank 1 has joined and lives, rank 2 could not join: what a third one reports. */
TEST(b3_k26_the_report_of_a_rank_that_could_not_join)
{
    const struct {
        uint32_t said_dead;
        const char *named;
    } all[] = {{cox_group_said_dead(1), "rank 1 (pid "},
               {0, "rank 2 has given up"},
               {1, "rank 2 has given up"},
               {cox_group_said_dead(3), "rank 2 has given up"}};
    uint64_t start;
    assert_int_equal(cox_peer_start_time(getpid(), &start), 0);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        _cox_cleanup_(cox_close_fd) int fd = rank_group_memory(RANK_COUNT);
        struct cox_group_layout *layout = rank_group_map(fd, RANK_COUNT);
        for (uint32_t rank = 1; rank <= 2; rank++) {
            struct cox_group_layout_identity *identity = &layout->ranks[rank].identity;
            identity->said_count = RANK_COUNT - 1;
            identity->said_size = COX_GROUP_VALUE_SIZE_MIN;
            identity->said_dead = rank == 2 ? all[i].said_dead : 0;
            identity->holder =
                cox_group_holder(rank == 2 ? COX_GROUP_FAILED : COX_GROUP_JOINED, getpid(), start);
        }
        struct cox_group *group = NULL;
        const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                                  .fd = fd,
                                                  .rank_count = RANK_COUNT - 1,
                                                  .deadline_ns = rank_group_patience()};
        assert_int_equal(cox_group_join(&options, &group, test_err()), COX_PEER_DEAD);
        if (strncmp(test_error.text, all[i].named, strlen(all[i].named)) != 0)
            fail_msg("%s", test_error.text);
        /* It says the same. */
        assert_int_equal(layout->ranks[0].identity.said_dead, cox_group_said_dead(i == 0 ? 1 : 2));
        munmap(layout, cox_group_memory_size(RANK_COUNT, 0));
    }
}

/* Before it has claimed its rank, no process can know of it: the others name the missing rank. */
TEST(b4_k3_killed_before_it_is_there)
{
    static const struct death deaths[] = {
        {"group.filled", {1}, .by_sockets = false},   {"group.linked", {1}, .by_sockets = false},
        {"group.unlinked", {1}, .by_sockets = false}, /* of a leftover */
        {"group.swept", {1}, .by_sockets = false},    {"group.locked", {1}, .by_sockets = false},
    };
    for (size_t i = 0; i < sizeof deaths / sizeof deaths[0]; i++) {
        struct plan plan = {&deaths[i], 1, 200, -1}, linked = {&deaths[1], 1, 200, -1};
        struct forks forks = {.count = 0};
        test_unique_name(forks.name);
        if (i == 2 || i == 3) { /* there is a leftover */
            forks_add(&forks, VICTIM, RANK_COUNT, rank_main, &linked);
            assert_int_equal(forks_end(&forks, 0), 128 + SIGKILL);
        }
        if (i == 4) { /* a rank is there */
            struct plan patient = {&deaths[4], 1, 2000, -1};
            char path[128];
            snprintf(path, sizeof path, "/dev/shm/%s_group", forks.name);
            forks_add(&forks, 0, RANK_COUNT, rank_main, &patient);
            AWAIT(access(path, F_OK) >= 0);
        }
        forks_add(&forks, VICTIM, RANK_COUNT, rank_main, &plan);
        assert_int_equal(forks_end(&forks, forks.count - 1), 128 + SIGKILL);
        forks_add(&forks, 2, RANK_COUNT, rank_main, &plan);
        forks_add(&forks, 3, RANK_COUNT, rank_main, &plan);
        forks_wait(&forks);
        assert_int_equal(alone(forks.name), 0);
        assert_int_equal(own_names(), 0);
    }
}

#endif
