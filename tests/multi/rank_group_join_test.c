/* Joining and leaving: names, memory, ranks; every rank a process. */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "tests/lib/rights.h"
#include "worker/group/group_private.h"
#include "rank_group.h"

#include <grp.h>
#include <sys/file.h>

/* A deadline long ago; 0 would be none. */
#define PASSED_NS 1

static int join(struct cox_group_options options, struct cox_group **ret_group,
                struct cox_error *err)
{
    options.size = sizeof options;
    if (!options.deadline_ns)
        options.deadline_ns = rank_group_patience();
    return cox_group_join(&options, ret_group, err);
}

#define JOIN(ret_group, err, ...) join((struct cox_group_options){__VA_ARGS__}, ret_group, err)

static void path_of(char path[128], const char *name)
{
    snprintf(path, 128, "/dev/shm/%s_group", name);
}

/* ---- arguments ---- */

TEST(k1_k19_k26_arguments_are_checked)
{
    char name[64], longer[COX_GROUP_NAME_MAX + 2];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    test_unique_name(name);
    const struct cox_group_options wrong[] = {
        {.name = name, .rank = 0, .rank_count = 0},
        {.name = name, .rank = 0, .rank_count = COX_RANK_COUNT_MAX + 1},
        {.name = name, .rank = 2, .rank_count = 2},
        {.name = name, .rank = UINT32_MAX, .rank_count = 2},
        {.name = name, .rank_count = 1, .value_size = COX_GROUP_VALUE_SIZE_MIN - 1},
        {.name = name, .rank_count = 1, .value_size = COX_GROUP_VALUE_SIZE_MAX + 1},
        {.name = longer, .rank_count = 1},
        {.name = "", .rank_count = 1},
        {.name = "a/b", .rank_count = 1},
        {.name = "..", .rank_count = 1},
        {.fd = -1, .rank_count = 1},
        {.name = name, .rank_count = 1, .fd_offset = 65536},
        {.fd = 0, .rank_count = 1, .fd_offset = 1},
        {.fd = 0, .rank_count = 1, .fd_offset = UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct cox_group *group = NULL;
        assert_refused(join(wrong[i], &group, test_err()), COX_INVALID, "");
        assert_null(group);
    }
    longer[COX_GROUP_NAME_MAX] = '\0';
    memcpy(longer, name, strlen(name));
    struct cox_group *group = NULL;
    assert_int_equal(JOIN(&group, NULL, .name = longer, .rank_count = 1), 0);
    cox_group_leave(group);
}

/* ---- what is in the way ---- */

static int join_alone(const char *name, struct cox_error *err)
{
    struct cox_group *group = NULL;
    int r = JOIN(&group, err, .name = name, .rank_count = 1);
    cox_group_leave(group);
    return r;
}

TEST(b9_b10_b44_what_is_in_the_way_is_left_alone)
{
    char name[64], path[128];
    struct stat st;
    path_of(path, test_unique_name(name));
    assert_int_equal(symlink("/dev/shm/nowhere", path), 0);
    assert_int_equal(join_alone(name, test_err()), COX_DENIED);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(join_alone(name, NULL), COX_DENIED);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(join_alone(name, NULL), COX_DENIED);
    assert_int_equal(unlink(path), 0);
    /* A foreign file, which no process has locked. */
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 65536), 0);
    assert_int_equal(join_alone(name, NULL), COX_DENIED);
    /* Another mode. */
    assert_int_equal(fchmod(fd, 0666), 0);
    assert_refused(join_alone(name, test_err()), COX_DENIED, "0666");
    /* Locked, and of another size. */
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(flock(fd, LOCK_SH), 0);
    assert_int_equal(join_alone(name, NULL), COX_INVALID);
    assert_int_equal(ftruncate(fd, 10), 0);
    assert_int_equal(join_alone(name, NULL), COX_CORRUPT);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(join_alone(name, NULL), COX_CORRUPT);
    assert_int_equal(stat(path, &st), 0); /* it was not removed */
    assert_int_equal(unlink(path), 0);
    close(fd);
    assert_int_equal(join_alone(name, NULL), 0);
}

/* Rank 0 of 2, which waits for the other one; its file is there. */
static pid_t waiter_start(const char *name, char path[128])
{
    struct stat st;
    struct cox_group *group = NULL;
    path_of(path, name);
    pid_t pid = fork();
    if (pid == 0) {
        int r = JOIN(&group, test_err(), .name = name, .rank_count = 2);
        if (r == 0)
            r = cox_group_barrier(group, rank_group_patience(), test_err());
        _exit(r);
    }
    AWAIT(stat(path, &st) >= 0);
    return pid;
}

static void waiter_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

TEST(b45_mode_is_0600_under_any_umask)
{
    char name[64], path[128];
    struct stat st = {0};
    mode_t old = umask(0777);
    pid_t pid = waiter_start(test_unique_name(name), path);
    umask(old);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode, S_IFREG | 0600);
    assert_int_equal(st.st_size, cox_group_memory_size(2, 0));
    assert_true((uint64_t)st.st_blocks * 512 >= cox_group_memory_size(2, 0));
    waiter_kill(pid);
    /* K2, B4: what it left is no obstacle, for a group of another size neither. */
    assert_int_equal(join_alone(name, NULL), 0);
}

static void wait_main(const struct forks_self *self)
{
    struct cox_group *group = NULL;
    JOIN(&group, NULL, .name = self->name, .rank = self->rank, .rank_count = 3);
    FORK_CHECK(false, "the third never comes");
}

TEST(k2_b4_a_name_of_the_dead_is_no_obstacle)
{
    char path[128];
    struct stat st;
    for (int i = 0; i < 10; i++) {
        struct forks dead;
        forks_start(&dead, 2, wait_main, NULL);
        path_of(path, dead.name);
        AWAIT(stat(path, &st) >= 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            kill(dead.pids[rank], SIGSTOP);
        for (uint32_t rank = 0; rank < 2; rank++) /* or the second would see the first one dead */
            AWAIT(cox_peer_stopped(dead.pids[rank]));
        for (uint32_t rank = 0; rank < 2; rank++)
            kill(dead.pids[rank], SIGKILL);
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_int_equal(forks_end(&dead, rank), 128 + SIGKILL);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(join_alone(dead.name, NULL), 0);
    }
}

/* ---- disagreement ---- */

struct told {
    uint32_t rank, rank_count, value_size;
    uint64_t incarnation;
};

static void told_main(const struct forks_self *self)
{
    const struct told *told = (const struct told *)self->context + self->rank;
    struct cox_group *group = NULL;
    int r = JOIN(&group, test_err(), .name = self->name, .rank = told->rank,
                 .rank_count = told->rank_count, .value_size = told->value_size,
                 .incarnation = told->incarnation);
    FORK_CHECK(r == COX_INVALID && !group, "%d %s", r, test_error.text);
    char who[32], own[32];
    const struct told *other = (const struct told *)self->context + 1 - self->rank;
    snprintf(who, sizeof who, "rank %" PRIu32, other->rank);
    snprintf(own, sizeof own, "rank %" PRIu32, told->rank);
    FORK_CHECK(strstr(test_error.text, who) && strstr(test_error.text, own), "%s", test_error.text);
}

TEST(b13_k1_ranks_with_different_options)
{
    static struct told pairs[][2] = {
        {{0, 2, 0, 0}, {1, 3, 0, 0}},
        {{0, 3, 0, 0}, {1, 2, 0, 0}},
        {{0, 2, 4096, 0}, {1, 2, 8192, 0}},
    };
    for (size_t i = 0; i < 3; i++) {
        forks_run(2, told_main, pairs[i]);
    }
}

/* Rank 0 of 2 waits; a process with a larger world is no rank of it, and writes nowhere. */
TEST(b13_b23_a_rank_that_is_none_writes_nowhere)
{
    char name[64], path[128];
    struct cox_group *group = NULL;
    const uint64_t size = cox_group_memory_size(2, 0);
    pid_t pid = waiter_start(test_unique_name(name), path);
    for (uint32_t rank = 2; rank < COX_RANK_COUNT_MAX; rank++) {
        assert_refused(
            JOIN(&group, test_err(), .name = name, .rank = rank, .rank_count = COX_RANK_COUNT_MAX),
            COX_INVALID, "rank 0 has 2 ranks");
    }
    int fd = open(path, O_RDWR | O_CLOEXEC);
    const uint8_t *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(bytes != MAP_FAILED);
    const uint64_t end = sizeof(struct cox_group_layout) + 2 * sizeof(struct cox_group_layout_rank);
    for (uint64_t i = end; i < size; i++)
        if (bytes[i])
            fail_msg("byte %" PRIu64 " behind the ranks was written", i - end);
    munmap((void *)(uintptr_t)bytes, size);
    close(fd);
    waiter_kill(pid);
    assert_int_equal(join_alone(name, NULL), 0);
}

/* A process that opens a file with a wrong bit gets an error by its deadline, and leaves the file
 * as it was. */
TEST(p10_b14_b23_any_bit_of_what_a_file_is_for)
{
    char name[64], path[128];
    struct cox_group *group = NULL;
    const uint64_t size = cox_group_memory_size(2, 0);
    pid_t pid = waiter_start(test_unique_name(name), path);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct cox_group_layout *layout = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(layout != MAP_FAILED);
    AWAIT(cox_group_holder_state(atomic_load(&layout->ranks[0].identity.holder)) ==
          COX_GROUP_JOINED);
    uint8_t *made = (uint8_t *)&layout->wakeup.made;
    const struct cox_group_options options = {
        .name = name, .rank = 1, .rank_count = 2, .deadline_ns = PASSED_NS};
    for (size_t bit = 0; bit < 8 * offsetof(struct cox_group_layout_made, rank); bit++) {
        size_t byte = bit / 8;
        int expected = byte < offsetof(struct cox_group_layout_made, incarnation)  ? COX_DENIED
                       : byte < offsetof(struct cox_group_layout_made, rank_count) ? COX_TIMEOUT
                                                                                   : COX_CORRUPT;
        made[byte] ^= (uint8_t)(1u << bit % 8);
        int r = join(options, &group, NULL);
        made[byte] ^= (uint8_t)(1u << bit % 8);
        if (r != expected)
            fail_msg("bit %zu: %d, not %d", bit, r, expected);
    }
    layout->wakeup.made.rank = 2; /* there is no such rank */
    assert_int_equal(join(options, &group, NULL), COX_CORRUPT);
    layout->wakeup.made.rank = 0;
    munmap(layout, size);
    close(fd);
    int status = -1;
    assert_int_equal(join(options, &group, NULL), 0);
    assert_int_equal(cox_group_barrier(group, rank_group_patience(), NULL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    cox_group_leave(group);
}

/* A deadline that has passed: a single rank, or the last to come, joins; one that has to wait fails
 * at once. */
TEST(k3_b2_a_deadline_that_has_passed)
{
    char name[64];
    struct cox_group *group = NULL;
    struct cox_group_options options = {
        .name = test_unique_name(name), .rank_count = 1, .deadline_ns = PASSED_NS};
    size_t fds = test_count_fds();
    assert_int_equal(join(options, &group, NULL), 0);
    assert_int_equal(cox_group_barrier(group, PASSED_NS, NULL), 0);
    group = cox_group_leave(group);
    options.rank_count = 4;
    options.rank = 1;
    assert_int_equal(join(options, &group, test_err()), COX_TIMEOUT);
    assert_string_equal(test_error.text, "ranks 0, 2-3 did not join");
    assert_null(group);
    assert_int_equal(test_count_fds(), fds);
}

static void twice_main(const struct forks_self *self)
{
    _Atomic uint32_t *refused = self->context;
    struct cox_group *group = NULL;
    int r = JOIN(&group, test_err(), .name = self->name, .rank = 0, .rank_count = 2,
                 .deadline_ns = self->rank == 2 ? rank_group_patience() : 0);
    if (r == COX_TAKEN) {
        FORK_CHECK(strstr(test_error.text, "rank 0 is process"), "%s", test_error.text);
        atomic_store(refused, 1);
        return;
    }
    FORK_CHECK(r == 0, "%d %s", r, test_error.text);
    rank_group_leave(self, group);
}

static void partner_main(const struct forks_self *self)
{
    _Atomic uint32_t *refused = self->context;
    AWAIT(atomic_load(refused));
    struct cox_group *group = rank_group_join(self);
    rank_group_leave(self, group);
}

TEST(k26_a_rank_is_one_process)
{
    struct forks forks;
    _Atomic uint32_t *refused = forks_share(4096);
    forks_start(&forks, 2, twice_main, refused);
    forks_add(&forks, 1, 2, partner_main, refused);
    forks_wait(&forks);
}

static void life_main(const struct forks_self *self)
{
    const uint32_t *sizes = self->context; /* of values, in each incarnation */
    /* Rank 0 of the first incarnation waits for one that never comes; those of the second come
     * meanwhile.
     */
    struct cox_group *group = NULL;
    bool first = self->rank == 0;
    struct cox_group_options options = {
        .name = self->name,
        .rank = first ? 0 : self->rank - 1,
        .rank_count = 2,
        .value_size = sizes[first ? 0 : 1],
        .incarnation = first ? 1 : 2,
        .deadline_ns = first ? cox_deadline_after_ms(300) : 0,
    };
    int r = join(options, &group, test_err());
    FORK_CHECK(r == (first ? COX_TIMEOUT : 0), "%d %s", r, test_error.text);
    if (group)
        rank_group_barrier(self, group);
    cox_group_leave(group);
}

TEST(b25_a_pid_that_another_process_has_now_is_a_dead_rank)
{
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t start = 0;
    assert_int_equal(cox_peer_start_time(getpid(), &start), 0);
    assert_int_equal(
        cox_group_process_meet(cox_group_holder(COX_GROUP_JOINED, getpid(), start), &peer), 0);
    cox_peer_close(&peer);
    const int free_fd = dup(STDERR_FILENO); /* the lowest number that is free */
    close(free_fd);
    assert_int_equal(
        cox_group_process_meet(cox_group_holder(COX_GROUP_JOINED, getpid(), start + 1), &peer),
        COX_PEER_DEAD);
    assert_int_equal(dup(STDERR_FILENO), free_fd);
    close(free_fd);
}

TEST(k3_b1_incarnations_do_not_mix)
{
    static uint32_t sizes[][2] = {{0, 0}, {4096, 8192}, {8192, 4096}};
    for (int i = 0; i < 6; i++) {
        forks_run(3, life_main, sizes[i % 3]);
    }
}

/* Ranks 0 to 3 are of one incarnation, 4 to 7 of the next one, all at once, under one name. */
static void jobs_main(const struct forks_self *self)
{
    const uint32_t rank = self->rank % 4;
    const uint64_t incarnation = 1 + self->rank / 4;
    struct cox_group *group = NULL;
    int r = join(
        (struct cox_group_options){
            .name = self->name, .rank = rank, .rank_count = 4, .incarnation = incarnation},
        &group, test_err());
    FORK_CHECK(r == 0, "incarnation %" PRIu64 ": %d %s", incarnation, r, test_error.text);
    const uint64_t own[2] = {incarnation, rank};
    uint64_t all[4][2];
    FORK_OK(cox_group_gather(group, own, sizeof own, all, rank_group_patience(), test_err()));
    for (uint32_t i = 0; i < 4; i++)
        FORK_CHECK(all[i][0] == incarnation && all[i][1] == i,
                   "rank %" PRIu64 " of incarnation %" PRIu64, all[i][1], all[i][0]);
    rank_group_leave(self, group);
}

TEST(b1_k23_two_jobs_of_one_name_at_once)
{
    for (int i = 0; i < 20; i++) {
        forks_run(8, jobs_main, NULL);
    }
}

/* ---- while it is there ---- */

static void there_main(const struct forks_self *self)
{
    char path[128];
    struct stat st;
    bool before[256];
    for (int fd = 0; fd < 256; fd++)
        before[fd] = fcntl(fd, F_GETFD) >= 0;
    struct cox_group *group = rank_group_join(self);
    path_of(path, self->name);
    FORK_CHECK(stat(path, &st) < 0 && errno == ENOENT, "who has joined sees the name");
    rank_group_barrier(self, group);
    FORK_CHECK(stat(path, &st) < 0 && errno == ENOENT, "a name while all are there");
    size_t count = 0;
    for (int fd = 0; fd < 256; fd++) {
        int flags = fcntl(fd, F_GETFD);
        if (before[fd] || flags < 0)
            continue;
        count++;
        FORK_CHECK(flags == FD_CLOEXEC, "fd %d goes on over exec", fd);
    }
    /* A pidfd of each other rank: of the memory and of the name nothing is kept. */
    FORK_CHECK(count == self->rank_count - 1, "%zu fds", count);
    rank_group_leave(self, group);
}

TEST(k4_b15_a_group_has_no_name_and_no_fd_goes_on_over_exec)
{
    test_needs_processes();
    forks_run(5, there_main, NULL);
}

static void removed_main(const struct forks_self *self)
{
    char path[128], plan[64];
    struct stat st;
    if (self->context) /* or this process would have it locked as well */
        close(*(const int *)self->context);
    snprintf(plan, sizeof plan, "group.unlink_waits:stop:%" PRIu32, self->rank);
    cox_fault_rank((int)self->rank);
    cox_fault_arm(plan);
    struct cox_group *group = rank_group_join(self);
    path_of(path, self->name);
    FORK_CHECK(stat(path, &st) < 0 && errno == ENOENT, "who has joined sees the name");
    rank_group_leave(self, group);
}

/* Another process is about to remove it, and then does not: this test. */
TEST(k4_a_joined_rank_waits_for_the_one_that_removes_the_name)
{
    test_needs_processes();
#if !COX_TESTING /* no fault points */
    skip();
#endif
    char path[128];
    struct flock only = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    struct forks forks = {.count = 0};
    const uint64_t deadline_ns = rank_group_patience();
    int fd = -1;
    test_unique_name(forks.name);
    path_of(path, forks.name);
    forks_add(&forks, 0, 2, removed_main, NULL);
    while ((fd = open(path, O_RDWR | O_CLOEXEC)) < 0 && cox_now_ns() < deadline_ns)
        sched_yield();
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_OFD_SETLK, &only), 0);
    forks_add(&forks, 1, 2, removed_main, &fd);
    for (int i = 0; i < 2; i++) {
        siginfo_t info = {0};
        assert_int_equal(waitid(P_PID, (id_t)forks.pids[i], &info, WSTOPPED | WEXITED | WNOWAIT),
                         0);
        assert_int_equal(info.si_code, CLD_STOPPED);
    }
    close(fd);
    for (int i = 0; i < 2; i++)
        assert_int_equal(kill(forks.pids[i], SIGCONT), 0);
    forks_wait(&forks);
}

/* ---- again and again ---- */

static size_t resident_kib(void)
{
    unsigned long total, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    COX_ASSERT(file && fscanf(file, "%lu %lu", &total, &resident) == 2);
    fclose(file);
    return resident * 4;
}

static void again_main(const struct forks_self *self)
{
    struct cox_rank_set both = cox_rank_set_first(self->rank_count);
    size_t fds = 0, kib = 0, count = *(const size_t *)self->context;
    for (size_t i = 0; i < count; i++) {
        struct cox_group *group = rank_group_join(self), *subgroup = NULL;
        FORK_CHECK(cox_group_subgroup(group, "both", &both, &subgroup, NULL) == 0, "subgroup");
        if (i % 3 == 0)
            rank_group_barrier(self, subgroup);
        cox_group_leave(group);
        if (i == 100) {
            fds = test_count_fds();
            kib = resident_kib();
        }
    }
    FORK_CHECK(test_count_fds() == fds, "%zu fds, now %zu", fds, test_count_fds());
#if !TEST_SANITIZED /* which keeps what was freed */
    FORK_CHECK(resident_kib() < kib + 1024, "%zu KiB, now %zu", kib, resident_kib());
#else
    (void)kib;
#endif
}

TEST(k4_k21_b15_b53_ten_thousand_joins_leave_nothing)
{
    size_t count = 10000;
    forks_run(2, again_main, &count);
}

TEST(k3_k4_joins_of_more_ranks_again_and_again)
{
    size_t count = 300;
    forks_run(5, again_main, &count);
}

/* ---- memory that came another way ---- */

struct memory {
    int fd;
    uint64_t offset;
};

static void memory_main(const struct forks_self *self)
{
    const struct memory *memory = self->context;
    const int fd = memory->fd;
    const struct cox_group_options options = {
        .fd = fd, .fd_offset = memory->offset, .rank = self->rank, .rank_count = self->rank_count};
    struct cox_group *group = NULL;
    size_t fds = test_count_fds();
    FORK_OK(join(options, &group, test_err()));
    for (int i = 0; i < 100; i++)
        rank_group_barrier(self, group);
    cox_group_leave(group);
    FORK_CHECK(test_count_fds() == fds && fcntl(fd, F_GETFD) >= 0, "the fd is lent");
    /* It was used, and serves no group again. */
    group = NULL;
    int r = join(options, &group, test_err());
    FORK_CHECK(r == COX_PEER_DEAD && !group, "%d %s", r, test_error.text);
}

TEST(b16_k28_memory_by_fd)
{
    uint64_t size = cox_group_memory_size(4, 0);
    int fd = memfd_create("group", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    struct memory memory = {.fd = fd};
    forks_run(4, memory_main, &memory);
    close(fd);

    struct cox_group *group = NULL;
    fd = memfd_create("group", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)size - 1), 0);
    assert_refused(JOIN(&group, test_err(), .fd = fd, .rank_count = 4), COX_INVALID, "need");
    close(fd);
    int pipes[2];
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    assert_int_equal(JOIN(&group, NULL, .fd = pipes[0], .rank_count = 4), COX_DENIED);
    close(pipes[0]);
    assert_int_equal(JOIN(&group, NULL, .fd = pipes[0], .rank_count = 4), -EBADF);
    close(pipes[1]);
}

static int join_at(int fd, uint64_t offset, struct cox_error *err)
{
    struct cox_group *group = NULL;
    int r = JOIN(&group, err, .fd = fd, .fd_offset = offset, .rank_count = 1);
    cox_group_leave(group);
    return r;
}

/* A group has its part of an object and nothing beyond it, at the object's very end, too. */
TEST(b16_k28_memory_is_a_part_of_an_object)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), size = cox_group_memory_size(4, 0),
                   part = (size + page - 1) / page * page;
    struct memory memory = {.fd = memfd_create("parts", MFD_CLOEXEC)};
    assert_int_equal(ftruncate(memory.fd, (off_t)(2 * part + size)), 0);
    char *bytes = mmap(NULL, 2 * part + size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
    assert_true(bytes != MAP_FAILED);
    for (uint64_t i = 0; i < 3; i++) {
        memory.offset = (2 - i) * part;
        forks_run(4, memory_main, &memory);
        for (uint64_t before = 0; before < memory.offset; before += page)
            assert_int_equal(bytes[before], 0);
    }
    munmap(bytes, 2 * part + size);
    const uint64_t one = cox_group_memory_size(1, 0);
    assert_int_equal(ftruncate(memory.fd, (off_t)(page + one)), 0);
    assert_int_equal(join_at(memory.fd, 2 * page, test_err()), COX_INVALID);
    char expected[64];
    snprintf(expected, sizeof expected, "need %" PRIu64 " from %" PRIu64 " on", one, 2 * page);
    assert_contains(test_error.text, expected);
    const uint64_t beyond[] = {page + page * (one / page + 1), UINT64_MAX / page * page,
                               (uint64_t)INT64_MAX / page * page, UINT64_C(1) << 63};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++)
        assert_int_equal(join_at(memory.fd, beyond[i], NULL), COX_INVALID);
    assert_int_equal(ftruncate(memory.fd, 0), 0);
    assert_int_equal(join_at(memory.fd, page, NULL), COX_INVALID);
    assert_int_equal(ftruncate(memory.fd, (off_t)(page + one)), 0);
    assert_int_equal(join_at(memory.fd, page, NULL), 0);
    close(memory.fd);
}

TEST(b51_k26_no_space_is_reported_with_numbers)
{
    struct rlimit old, small;
    struct cox_group *group = NULL;
    char name[64];
    test_unique_name(name);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 1 << 20;
    setrlimit(RLIMIT_FSIZE, &small);
    int r = JOIN(&group, test_err(), .name = name, .rank_count = 2, .value_size = 8 << 20);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_refused(r, COX_NO_SPACE, "1048576");
    r = JOIN(&group, test_err(), .name = name, .rank_count = COX_RANK_COUNT_MAX,
             .value_size = COX_GROUP_VALUE_SIZE_MAX);
    assert_int_equal(r, COX_NO_SPACE);
}

/* ---- with few rights ---- */

RANKS_TEST(k25_any_user_with_the_usual_limits, COX_RANK_COUNT_MAX, NULL)
{
    const struct rlimit limit = {1024, 1024};
    FORK_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "limit");
    if (test_can_switch_user())
        FORK_CHECK(setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0, "user");
    struct cox_group *group = rank_group_join(self);
    for (int i = 0; i < 20; i++)
        rank_group_barrier(self, group);
    cox_group_leave(group);
}

/* ---- alone ---- */
