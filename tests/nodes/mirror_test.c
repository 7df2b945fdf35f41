/* A rank group over two machines (worker/group/group_mirror.h), which are two memories here: ranks
 * are forked, and so is the mirror of each machine. Mirrors are joined by a socket. */
#include "channel/base/base_internal.h"
#include "worker/group/group_layout.h"
#include "worker/group/group_mirror.h"
#include "rank_group.h"

#define INCARNATION 5
#define LOOK_MS 10

/* What all processes share. Ranks below `split` are on machine 0. Fds are the same in all. */
struct cluster {
    uint32_t world, split, value_size;
    forks_fn rank_main;
    int memory_fds[2], sockets[2];
    /* a mirror waits so long before it collects, at random up to that */
    uint32_t slow_us;
    _Atomic uint32_t finished;
    _Atomic uint64_t counter, epoch;
    uint64_t of[FORKS_MAX];
};

/* ---- machines ---- */

static bool cluster_is_over(const struct cluster *cluster)
{
    return atomic_load(&cluster->finished) == cluster->world;
}

static bool write_all(int fd, const void *bytes, size_t size)
{
    for (const uint8_t *at = bytes; size > 0;) {
        ssize_t r = send(fd, at, size, MSG_NOSIGNAL);
        if (r <= 0)
            return false;
        at += r;
        size -= (size_t)r;
    }
    return true;
}

static bool read_all(int fd, void *bytes, size_t size)
{
    for (uint8_t *at = bytes; size > 0;) {
        ssize_t r = recv(fd, at, size, 0);
        if (r <= 0)
            return false;
        at += r;
        size -= (size_t)r;
    }
    return true;
}

struct collector {
    struct cox_group_mirror *mirror;
    struct cluster *cluster;
    int fd;
};

static void *collector_main(void *context)
{
    const struct collector *collector = context;
    unsigned seed = (unsigned)getpid();
    uint8_t *buffer = malloc(cox_group_mirror_size_max(collector->mirror));
    COX_ASSERT(buffer);
    while (!cluster_is_over(collector->cluster)) {
        if (collector->cluster->slow_us)
            nanosleep(&(struct timespec){.tv_nsec =
                                             rand_r(&seed) % (1000L * collector->cluster->slow_us)},
                      NULL);
        const uint32_t size = (uint32_t)cox_group_mirror_collect(collector->mirror, buffer);
        COX_ASSERT(size <= cox_group_mirror_size_max(collector->mirror));
        if (!size)
            cox_group_mirror_wait(collector->mirror, cox_deadline_after_ms(LOOK_MS));
        else if (!write_all(collector->fd, &size, sizeof size) ||
                 !write_all(collector->fd, buffer, size))
            break;
    }
    free(buffer);
    return NULL;
}

static void mirror_main(const struct forks_self *self, uint32_t machine)
{
    struct cluster *cluster = self->context;
    struct cox_error err = {0};
    const uint32_t firsts[2] = {0, cluster->split};
    const uint32_t counts[2] = {cluster->split, cluster->world - cluster->split};
    const struct cox_group_mirror_options options = {.fd = cluster->memory_fds[machine],
                                                     .rank_count = cluster->world,
                                                     .value_size = cluster->value_size,
                                                     .incarnation = INCARNATION,
                                                     .rank_first = firsts[machine],
                                                     .rank_here = counts[machine]};
    struct collector collector = {.cluster = cluster, .fd = cluster->sockets[machine]};
    pthread_t thread;
    FORK_CHECK(cox_group_mirror_open(&options, &collector.mirror, &err) == 0, "%s", err.text);
    FORK_CHECK(pthread_create(&thread, NULL, collector_main, &collector) == 0, "thread");
    uint8_t *bytes = malloc(cox_group_mirror_size_max(collector.mirror) * cluster->world);
    while (!cluster_is_over(cluster)) {
        struct pollfd polled = {.fd = collector.fd, .events = POLLIN};
        uint32_t size;
        if (poll(&polled, 1, LOOK_MS) <= 0)
            continue;
        if (!read_all(collector.fd, &size, sizeof size) || !read_all(collector.fd, bytes, size))
            break;
        int r = cox_group_mirror_apply(collector.mirror, firsts[!machine], counts[!machine], bytes,
                                       size, &err);
        FORK_CHECK(r == 0, "%s", err.text);
    }
    shutdown(collector.fd, SHUT_RDWR);
    pthread_join(thread, NULL);
    free(bytes);
    cox_group_mirror_close(collector.mirror);
}

static void process_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    if (self->rank >= cluster->world) {
        mirror_main(self, self->rank - cluster->world);
        return;
    }
    const struct forks_self rank = {self->rank, cluster->world, self->context, self->name};
    cluster->rank_main(&rank);
    atomic_fetch_add(&cluster->finished, 1);
}

static struct cluster *cluster_new(uint32_t world, uint32_t split, uint32_t value_size,
                                   forks_fn rank_main)
{
    struct cluster *cluster = forks_share(sizeof *cluster);
    memset(cluster, 0, sizeof *cluster);
    cluster->world = world;
    cluster->split = split;
    cluster->value_size = value_size;
    cluster->rank_main = rank_main;
    for (int i = 0; i < 2; i++) {
        cluster->memory_fds[i] = memfd_create("machine", MFD_CLOEXEC);
        assert_true(cluster->memory_fds[i] >= 0);
        const off_t size = (off_t)cox_group_memory_size(world, value_size);
        assert_int_equal(ftruncate(cluster->memory_fds[i], size), 0);
    }
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, cluster->sockets), 0);
    return cluster;
}

static void cluster_free(struct cluster *cluster)
{
    for (int i = 0; i < 2; i++) {
        close(cluster->memory_fds[i]);
        close(cluster->sockets[i]);
    }
    munmap(cluster, sizeof *cluster);
}

static void cluster_run(uint32_t world, uint32_t split, uint32_t value_size, uint32_t slow_us,
                        forks_fn rank_main)
{
    struct cluster *cluster = cluster_new(world, split, value_size, rank_main);
    struct forks forks;
    bool failed = false;
    cluster->slow_us = slow_us;
    forks_start(&forks, world + 2, process_main, cluster);
    for (uint32_t i = 0; i < world + 2; i++) {
        failed = forks_end(&forks, i) != 0 || failed;
        if (i + 1 == world)
            atomic_store(&cluster->finished, world); /* mirrors end, whatever became of the ranks */
    }
    cluster_free(cluster);
    if (failed)
        fail_msg("not every process was content");
}

static struct cox_group *join(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = NULL;
    struct cox_error err = {0};
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .fd = cluster->memory_fds[self->rank >= cluster->split],
        .rank = self->rank,
        .rank_count = cluster->world,
        .value_size = cluster->value_size,
        .incarnation = INCARNATION,
        .deadline_ns = rank_group_patience(),
        .spin_ns = self->rank % 2 ? COX_SPIN_AUTO_NS : 0,
        .mirrored = true,
    };
    int r = cox_group_join(&options, &group, &err);
    FORK_CHECK(r == 0, "join: %d %s", r, err.text);
    FORK_CHECK(cox_group_get_info(group).mirrored, "mirrored");
    return group;
}

/* Beside the group. */
static void await_count(_Atomic uint64_t *counter, uint64_t count)
{
    atomic_fetch_add(counter, 1);
    while (atomic_load(counter) < count)
        sched_yield();
}

static void leave(const struct forks_self *self, struct cox_group *group)
{
    rank_group_barrier(self, group);
    cox_group_leave(group);
}

/* ---- operations ---- */

static uint8_t byte_of(uint64_t round, uint32_t rank, size_t i)
{
    uint64_t x = (round << 20 ^ (uint64_t)rank << 12 ^ i) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint8_t)(x >> 56);
}

static void gather(const struct forks_self *self, struct cox_group *group, size_t size,
                   uint64_t round)
{
    const uint32_t count = cox_group_get_info(group).rank_count,
                   own = cox_group_get_info(group).rank;
    uint8_t *value = malloc(size), *values = malloc(size * count + 1);
    struct cox_error err = {0};
    FORK_CHECK(value && values, "memory");
    for (size_t i = 0; i < size; i++)
        value[i] = byte_of(round, own, i);
    memset(values, 0xee, size * count + 1);
    int r = cox_group_gather(group, value, size, values, rank_group_patience(), &err);
    FORK_CHECK(r == 0, "gather of %zu: %d %s", size, r, err.text);
    for (uint32_t rank = 0; rank < count; rank++)
        for (size_t i = 0; i < size; i++)
            FORK_CHECK(values[rank * size + i] == byte_of(round, rank, i),
                       "round %" PRIu64 " of %zu bytes: byte %zu of rank %" PRIu32, round, size, i,
                       rank);
    FORK_CHECK(values[size * count] == 0xee, "a byte behind the values was written");
    free(value);
    free(values);
}

static void barriers_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = join(self);
    for (uint64_t i = 1; i <= 100; i++) {
        cluster->of[self->rank] = i;
        rank_group_barrier(self, group);
        for (uint32_t rank = 0; rank < self->rank_count; rank++)
            FORK_CHECK(cluster->of[rank] == i, "rank %" PRIu32 " is at %" PRIu64 ", not %" PRIu64,
                       rank, cluster->of[rank], i);
        rank_group_barrier(self, group);
    }
    leave(self, group);
}

TEST(barriers)
{
    cluster_run(2, 1, 4096, 0, barriers_main);
    cluster_run(4, 2, 4096, 0, barriers_main);
    cluster_run(5, 1, 4096, 300, barriers_main);
}

/* No barrier between: a rank is at the next gather before its mirror has copied this one. */
static void gathers_main(const struct forks_self *self)
{
    const struct cluster *cluster = self->context;
    const size_t sizes[] = {1, 7, 64, 1024, 4095, 4096, cluster->value_size};
    struct cox_group *group = join(self);
    for (uint64_t i = 0; i < 140; i++)
        gather(self, group, sizes[i % 7], i);
    leave(self, group);
}

TEST(values_of_all_sizes)
{
    cluster_run(2, 1, 4096, 0, gathers_main);
    cluster_run(4, 2, 4096, 0, gathers_main);
    cluster_run(3, 2, 1 << 17, 0, gathers_main);
}

TEST(values_through_slow_mirrors)
{
    cluster_run(2, 1, 4096, 3000, gathers_main);
    cluster_run(4, 1, 4096, 2000, gathers_main);
}

static void sizes_main(const struct forks_self *self)
{
    static const size_t wrong[][4] = {{8, 8, 16, 8}, {8, 0, 8, 8}, {8, 8, 8, 4097}};
    uint8_t value[8192] = {0}, values[4 * 4096];
    struct cox_group *group = join(self);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct cox_error err = {0};
        int r = cox_group_gather(group, value, wrong[i][self->rank], values, rank_group_patience(),
                                 &err);
        FORK_CHECK(r == COX_INVALID && strstr(err.text, "bytes"), "%zu: %d %s", i, r, err.text);
        gather(self, group, 64, i);
    }
    leave(self, group);
}

TEST(sizes_that_differ_are_refused_on_all)
{
    cluster_run(4, 2, 4096, 0, sizes_main);
}

/* ---- subgroups ---- */

static struct cox_group *subgroup(const struct forks_self *self, struct cox_group *group,
                                  const char *name, uint32_t a, uint32_t b)
{
    struct cox_rank_set members = {{0}};
    struct cox_group *made = NULL;
    struct cox_error err = {0};
    cox_rank_set_add(&members, a);
    cox_rank_set_add(&members, b);
    int r = cox_group_subgroup(group, name, &members, &made, &err);
    FORK_CHECK(r == 0, "subgroup %s: %d %s", name, r, err.text);
    return made;
}

static void subgroups_main(const struct forks_self *self)
{
    const uint32_t rank = self->rank;
    struct cox_group *group = join(self);
    struct cox_group *local = subgroup(self, group, "local", rank & ~1u, rank | 1);
    struct cox_group *across = subgroup(self, group, "across", rank & 1, (rank & 1) + 2);
    for (uint64_t i = 0; i < 60; i++) {
        gather(self, local, 64 + i, i);
        gather(self, across, 1000 + i, i); /* one piece, then two */
        if (i % 8 == 0)
            gather(self, across, 4000, i);
        if (i % 3 == 0)
            gather(self, group, 32, i);
    }
    leave(self, group);
}

TEST(subgroups_here_and_across)
{
    cluster_run(4, 2, 4096, 0, subgroups_main);
    cluster_run(4, 2, 4096, 1000, subgroups_main);
}

/* ---- epochs ---- */

static void epochs_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = join(self);
    struct cox_group *across =
        subgroup(self, group, "across", self->rank & 1, (self->rank & 1) + 2);
    uint64_t met = 0;
    for (uint64_t epoch = 1; epoch <= 40; epoch++) {
        struct cox_error err = {0};
        uint8_t value = 1, values[4];
        FORK_CHECK(cox_group_align(group, epoch) == 0, "align");
        gather(self, group, 100, epoch);
        gather(self, across, 10, epoch);
        await_count(&cluster->counter, met += self->rank_count);
        /* One rank gives up instead of the next operation; all others are told. */
        if (self->rank == epoch % 4) {
            cox_group_abort(group);
        } else {
            int r = cox_group_gather(group, &value, 1, values, rank_group_patience(), &err);
            char name[16];
            snprintf(name, sizeof name, "rank %u", (unsigned)(epoch % 4));
            FORK_CHECK(r == COX_ABORTED, "epoch %" PRIu64 ": %d %s", epoch, r, err.text);
            FORK_CHECK(strstr(err.text, name), "%s", err.text);
        }
        await_count(&cluster->counter, met += self->rank_count);
        FORK_CHECK(cox_group_barrier(group, rank_group_patience(), &err) == COX_ABORTED, "over");
    }
    FORK_CHECK(cox_group_align(group, 100) == 0, "align");
    leave(self, group);
}

TEST(an_abort_here_ends_operations_there)
{
    cluster_run(4, 2, 4096, 0, epochs_main);
    cluster_run(4, 2, 4096, 500, epochs_main);
}

/* Rank 0 gives up its operations at once and goes on to the next epoch. What rank 1 gets is of its
 * own epoch, and whole. */
#define TORN_SIZE (UINT32_C(1) << 19)
#define TORN_EPOCHS 150

static void torn_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = join(self);
    uint8_t *value = malloc(TORN_SIZE), *values = malloc(2 * TORN_SIZE);
    FORK_CHECK(value && values, "memory");
    unsigned seed = self->rank;
    for (uint64_t epoch = 1; epoch <= TORN_EPOCHS; epoch++) {
        struct cox_error err = {0};
        if (self->rank == 0) {
            atomic_store(&cluster->epoch, epoch);
        } else {
            epoch = atomic_load(&cluster->epoch);
            epoch = epoch ? epoch : 1;
        }
        int r = cox_group_align(group, epoch);
        FORK_CHECK(r == 0 || self->rank == 1, "align");
        if (r) {
            if (epoch == TORN_EPOCHS)
                break;
            sched_yield();
            continue;
        }
        memset(value, (int)(epoch & 0xff), TORN_SIZE);
        r = cox_group_gather(group, value, TORN_SIZE, values,
                             cox_deadline_after_ns((uint64_t)rand_r(&seed) % 2000 * 1000), &err);
        for (size_t i = 0; r == 0 && i < TORN_SIZE; i += 64)
            FORK_CHECK(values[(1 - self->rank) * (size_t)TORN_SIZE + i] == (uint8_t)epoch,
                       "epoch %" PRIu64 ": byte %zu is of epoch %u", epoch, i,
                       values[(1 - self->rank) * (size_t)TORN_SIZE + i]);
    }
    free(value);
    free(values);
    cox_group_leave(group);
}

TEST(values_of_epochs_that_were_given_up)
{
    for (int i = 0; i < 3; i++)
        cluster_run(2, 1, TORN_SIZE, 0, torn_main);
}

/* ---- ends ---- */

/* A rank that leaves after the last barrier was not missing in it. */
static void short_main(const struct forks_self *self)
{
    struct cox_group *group = join(self);
    gather(self, group, 8, 1);
    leave(self, group);
}

TEST(the_last_barrier_and_leaving)
{
    for (int i = 0; i < 40; i++)
        cluster_run(2, 1, 4096, i % 2 ? 1000 : 0, short_main);
}

static void leaves_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = join(self);
    struct cox_error err = {0};
    gather(self, group, 8, 1);
    await_count(&cluster->counter, self->rank_count);
    if (self->rank == 3) {
        cox_group_leave(group);
        return;
    }
    int r = cox_group_barrier(group, rank_group_patience(), &err);
    FORK_CHECK(r == COX_PEER_DEAD && strstr(err.text, "rank 3"), "%d %s", r, err.text);
    cox_group_leave(group);
}

TEST(a_rank_that_leaves_is_dead_to_the_others)
{
    cluster_run(4, 2, 4096, 0, leaves_main);
}

/* Its process stands for the ranks elsewhere. */
static void orphans_main(const struct forks_self *self)
{
    struct cluster *cluster = self->context;
    struct cox_group *group = join(self);
    struct cox_error err = {0};
    gather(self, group, 8, 1);
    atomic_fetch_add(&cluster->counter, 1);
    if (self->rank == 1) {
        while (!atomic_load(&cluster->epoch))
            sched_yield();
    } else {
        int r = cox_group_barrier(group, rank_group_patience(), &err);
        FORK_CHECK(r == COX_PEER_DEAD && strstr(err.text, "rank 1"), "%d %s", r, err.text);
    }
    cox_group_leave(group);
}

TEST(ranks_see_the_death_of_their_mirror)
{
    struct cluster *cluster = cluster_new(2, 1, 4096, orphans_main);
    struct forks forks;
    forks_start(&forks, 4, process_main, cluster);
    while (atomic_load(&cluster->counter) < 2)
        sched_yield();
    kill(forks.pids[2], SIGKILL); /* the mirror of machine 0 */
    const int mirror = forks_end(&forks, 2), orphan = forks_end(&forks, 0);
    atomic_store(&cluster->epoch, 1);
    const int other = forks_end(&forks, 1);
    atomic_store(&cluster->finished, 2);
    /* The other mirror may be amid a message that does not end. */
    shutdown(cluster->sockets[0], SHUT_RDWR);
    forks_end(&forks, 3);
    cluster_free(cluster);
    assert_int_equal(mirror, 128 + SIGKILL);
    assert_int_equal(orphan, 0);
    assert_int_equal(other, 0);
}

/* ---- messages ---- */

#define HERE 2u /* ranks 0 and 1 are here, 2 and 3 on another machine */

struct pair {
    uint8_t *memory[2];
    struct cox_group_mirror *mirrors[2];
    uint8_t *buffer;
};

static void memory_unmap(void *memory)
{
    munmap(memory, cox_group_memory_size(4, 4096));
}
TEST_OWNED(cox_group_mirror_close)

/* The test's own. */
static void pair_open(struct pair *pair)
{
    const size_t size = cox_group_memory_size(4, 4096);
    for (int i = 0; i < 2; i++) {
        const int fd = test_own_fd(memfd_create("pair", MFD_CLOEXEC));
        assert_int_equal(ftruncate(fd, (off_t)size), 0);
        pair->memory[i] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        assert_true(pair->memory[i] != MAP_FAILED);
        test_own(pair->memory[i], memory_unmap);
        const struct cox_group_mirror_options options = {.fd = fd,
                                                         .rank_count = 4,
                                                         .value_size = 4096,
                                                         .incarnation = INCARNATION,
                                                         .rank_first = i ? HERE : 0,
                                                         .rank_here = HERE};
        assert_ok(cox_group_mirror_open(&options, &pair->mirrors[i], test_err()));
        test_own(pair->mirrors[i], cox_group_mirror_close_owned);
    }
    pair->buffer = test_own(malloc(cox_group_mirror_size_max(pair->mirrors[0])), free);
}

static struct cox_group_layout_rank *rank_at(const struct pair *pair, int machine, uint32_t rank)
{
    struct cox_group_layout *layout = (void *)pair->memory[machine];
    return &layout->ranks[rank];
}

static uint8_t *value_at(const struct pair *pair, int machine, uint32_t rank, uint32_t index)
{
    return pair->memory[machine] + cox_group_values_offset(4) +
           rank * cox_group_values_stride(4096) + (index & 1) * 4096;
}

/* Rank 2 gathers 10 bytes. */
static void rank_arrives(const struct pair *pair, uint32_t index, char byte)
{
    struct cox_group_layout_part *part = &rank_at(pair, 1, 2)->parts[0];
    const uint64_t word = cox_group_arrived(0, index);
    memset(value_at(pair, 1, 2, index), byte, 10);
    atomic_store(&part->what[index & 1], cox_group_what(index, 10, 2));
    atomic_store(&part->mirror, cox_group_mirror(INCARNATION, word));
    atomic_store(&part->arrived, word);
}

static void rank_joins(const struct pair *pair)
{
    struct cox_group_layout_identity *identity = &rank_at(pair, 1, 2)->identity;
    atomic_store(&identity->incarnation, INCARNATION);
    atomic_store(&identity->said_count, 4);
    atomic_store(&identity->said_size, 4096);
    atomic_store(&identity->holder, cox_group_holder(COX_GROUP_WHOLE, 1, 1));
}

TEST(what_is_collected_once)
{
    struct pair pair;
    pair_open(&pair);
    assert_int_equal(cox_group_mirror_collect(pair.mirrors[1], pair.buffer), 0);
    rank_joins(&pair);
    rank_arrives(&pair, 1, 'a');
    size_t size = cox_group_mirror_collect(pair.mirrors[1], pair.buffer);
    assert_int_equal(size, 5 * 8 + 8 * 8 + 16);
    assert_int_equal(cox_group_mirror_collect(pair.mirrors[1], pair.buffer + size), 0);
    assert_ok(cox_group_mirror_apply(pair.mirrors[0], 2, 2, pair.buffer, size, test_err()));
    const struct cox_group_layout_rank *there = rank_at(&pair, 0, 2);
    assert_int_equal(cox_group_holder_state(there->identity.holder), COX_GROUP_WHOLE);
    assert_int_equal(cox_group_holder_pid(there->identity.holder), getpid());
    assert_true(there->identity.said_count == 4 && there->identity.said_size == 4096);
    assert_memory_equal(there->parts, rank_at(&pair, 1, 2)->parts, sizeof there->parts);
    assert_memory_equal(value_at(&pair, 0, 2, 1), "aaaaaaaaaa", 11);
    /* Two arrivals, seen as one: both values come. */
    rank_arrives(&pair, 2, 'b');
    rank_arrives(&pair, 3, 'c');
    size = cox_group_mirror_collect(pair.mirrors[1], pair.buffer);
    assert_ok(cox_group_mirror_apply(pair.mirrors[0], 2, 2, pair.buffer, size, test_err()));
    assert_memory_equal(value_at(&pair, 0, 2, 2), "bbbbbbbbbb", 11);
    assert_memory_equal(value_at(&pair, 0, 2, 3), "cccccccccc", 11);
    /* A word that is not stored twice is no arrival. */
    struct cox_group_layout_part *part = &rank_at(&pair, 1, 2)->parts[0];
    atomic_store(&part->mirror, 0);
    atomic_store(&part->arrived, cox_group_arrived(0, 4));
    assert_int_equal(cox_group_mirror_collect(pair.mirrors[1], pair.buffer), 0);
    rank_arrives(&pair, 4, 'd');
    assert_true(cox_group_mirror_collect(pair.mirrors[1], pair.buffer) > 0);
    /* All of it once more. */
    cox_group_mirror_forget(pair.mirrors[1]);
    assert_true(cox_group_mirror_collect(pair.mirrors[1], pair.buffer) > size);
}

TEST(a_wait_ends_by_news_and_by_a_wake)
{
    struct pair pair;
    pair_open(&pair);
    cox_group_mirror_wait(pair.mirrors[1], cox_deadline_after_ms(1));
    rank_joins(&pair);
    cox_group_mirror_wait(pair.mirrors[1], COX_DEADLINE_NEVER);
    cox_group_mirror_collect(pair.mirrors[1], pair.buffer);
    rank_arrives(&pair, 1, 'a');
    cox_group_mirror_wait(pair.mirrors[1], COX_DEADLINE_NEVER);
    cox_group_mirror_collect(pair.mirrors[1], pair.buffer);
    atomic_store(&rank_at(&pair, 1, 3)->parts[8].aborted, 1);
    cox_group_mirror_wait(pair.mirrors[1], COX_DEADLINE_NEVER);
}

TEST(bad_messages_are_refused)
{
    struct pair pair;
    pair_open(&pair);
    rank_joins(&pair);
    rank_arrives(&pair, 1, 'a');
    rank_arrives(&pair, 2, 'b');
    const size_t size = cox_group_mirror_collect(pair.mirrors[1], pair.buffer);
    uint8_t *before = test_own(malloc(cox_group_memory_size(4, 4096)), free);
    /* Cut off at each place but between entries. */
    uint32_t whole = 0;
    for (size_t cut = 1; cut < size; cut++) {
        uint8_t *exact = test_own(malloc(cut), free);
        memcpy(exact, pair.buffer, cut);
        int r = cox_group_mirror_apply(pair.mirrors[0], 2, 2, exact, cut, NULL);
        assert_true(r == 0 || r == COX_CORRUPT);
        whole += r == 0;
    }
    assert_int_equal(whole, 2); /* behind the identity, and behind the value */
    /* Said of ranks that are not the sender's: 1 is here, 3 is another machine's, 200 is none. */
    static const struct {
        uint32_t offset, value;
        uint32_t rank_first, rank_count;
        const char *text;
    } bad[] = {
        {1, 2, 3, 1, "rank 2"},    {1, 1, 2, 2, "rank 1"},     {1, 0, 0, 4, "rank 0"},
        {1, 3, 2, 1, "rank 3"},    {1, 1, 0, 4, "rank 1"},     {1, 200, 2, 255, "rank 200"},
        {1, 4, 2, 10, "rank 4"},   {0, 0, 2, 2, "not its"},    {0, 4, 2, 2, "not its"},
        {0, 255, 2, 2, "not its"}, {2, 9, 2, 2, "cut off"},    {2, 255, 2, 2, "cut off"},
        {7, 1, 2, 2, "cut off"},   {5, 0x20, 2, 2, "cut off"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t *broken = test_own(malloc(size), free);
        memcpy(broken, pair.buffer, size);
        broken[bad[i].offset] = (uint8_t)bad[i].value;
        memcpy(before, pair.memory[0], cox_group_memory_size(4, 4096));
        assert_refused(cox_group_mirror_apply(pair.mirrors[0], bad[i].rank_first, bad[i].rank_count,
                                              broken, size, test_err()),
                       COX_CORRUPT, bad[i].text);
        assert_memory_equal(before, pair.memory[0], cox_group_memory_size(4, 4096));
    }
    /* A value that is larger than its slot: a part of the group, and of a subgroup. */
    for (uint32_t slot = 0; slot < 2; slot++) {
        const uint32_t max = slot ? COX_SUBGROUP_SLOT_SIZE : 4096;
        for (uint32_t kind = 2; kind <= 3; kind++)
            for (uint32_t over = 0; over < 2; over++) {
                uint8_t *large = test_own(calloc(1, 8192), free);
                const uint64_t head = kind | 2 << 8 | slot << 16 | (uint64_t)(max + 8 * over) << 32;
                memcpy(large, &head, sizeof head);
                const size_t fixed = kind == 2 ? 64 : 16;
                assert_int_equal(cox_group_mirror_apply(pair.mirrors[0], 2, 2, large,
                                                        fixed + max + 8 * over, NULL),
                                 over ? COX_CORRUPT : 0);
            }
    }
}

TEST(mirrors_that_cannot_be)
{
    static const uint32_t bad[][3] = {{0, 0, 1}, {129, 0, 1}, {4, 4, 1}, {4, 0, 0}, {4, 3, 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const struct cox_group_mirror_options options = {.fd = -1,
                                                         .rank_count = bad[i][0],
                                                         .rank_first = bad[i][1],
                                                         .rank_here = bad[i][2],
                                                         .value_size = 4096};
        struct cox_group_mirror *mirror = NULL;
        assert_int_equal(cox_group_mirror_open(&options, &mirror, NULL), COX_INVALID);
        assert_null(mirror);
    }
    assert_null(cox_group_mirror_close(NULL));
}
