/*
 * rank_group_hostile_test: a process flips bits anywhere in the memory of a rank group, while its
 * ranks join and operate. Whatever it flips, every operation ends at its deadline at the latest, no
 * process crashes, no fd is lost, and when a barrier reports success all ranks are in it.
 */
#include "worker/group/group_layout.h"
#include "rank_group.h"

#include <linux/futex.h>

#define RANK_COUNT 4
#define ROUNDS 300

struct session {
    uint64_t seed;
    /* or once all have joined */
    bool from_the_start;
    int memory_fd;
    _Atomic uint32_t joined, ended;
    /* where ranks that fell out of step meet */
    _Atomic uint64_t epoch;
    /* barriers begun in the present epoch, {epoch:32, count:32} */
    _Atomic uint64_t at[RANK_COUNT];
    _Atomic uint64_t good, flips;
};

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void meddler_main(const struct forks_self *self)
{
    struct session *session = self->context;
    uint64_t state = session->seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    /* Words, not values: overwriting a value only changes a value. */
    uint64_t size =
        sizeof(struct cox_group_layout) + RANK_COUNT * sizeof(struct cox_group_layout_rank);
    uint64_t pause = next(&state) % 2000;
    uint8_t *bytes = rank_group_map(session->memory_fd, RANK_COUNT);
    while (atomic_load(&session->ended) < RANK_COUNT) {
        if (!session->from_the_start && atomic_load(&session->joined) < RANK_COUNT) {
            sched_yield();
            continue;
        }
        uint64_t offset = next(&state) % size;
        /* Mostly the lines that are in use. */
        if (next(&state) % 4)
            offset = next(&state) % 2
                         ? next(&state) % COX_GROUP_LINE_SIZE
                         : sizeof(struct cox_group_layout) +
                               next(&state) % RANK_COUNT * sizeof(struct cox_group_layout_rank) +
                               next(&state) % 3 * COX_GROUP_LINE_SIZE + next(&state) % 56;
        /* A bit, there and, mostly, back. */
        uint8_t bit = (uint8_t)(1u << next(&state) % 8);
        __atomic_fetch_xor(&bytes[offset], bit, __ATOMIC_RELAXED);
        atomic_fetch_add(&session->flips, 1);
        for (uint64_t i = 0; i < pause; i++)
            __atomic_load_n(&bytes[offset], __ATOMIC_RELAXED);
        if (next(&state) % 8 == 0)
            __atomic_fetch_xor(&bytes[offset], bit, __ATOMIC_RELAXED);
        if (next(&state) % 16 == 0)
            usleep(100);
    }
}

static void epoch_meet(struct session *session, struct cox_group *group, uint64_t *epoch)
{
    uint64_t seen = atomic_load(&session->epoch);
    while (seen <= *epoch && !atomic_compare_exchange_weak(&session->epoch, &seen, *epoch + 1))
        ;
    *epoch = atomic_load(&session->epoch);
    cox_group_align(group, *epoch);
}

static void rank_main(const struct forks_self *self)
{
    struct session *session = self->context;
    struct cox_group *group = NULL, *all = NULL;
    struct cox_rank_set members = cox_rank_set_first(RANK_COUNT);
    uint8_t value[600] = {0}, values[600 * RANK_COUNT];
    size_t fds = test_count_fds();
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .fd = session->memory_fd,
        .rank = self->rank,
        .rank_count = RANK_COUNT,
        .deadline_ns = cox_deadline_after_ms(session->from_the_start ? 300 : TEST_PATIENCE_MS)};
    int r = cox_group_join(&options, &group, NULL);
    FORK_CHECK(r == 0 || session->from_the_start, "join: %d", r);
    atomic_fetch_add(&session->joined, 1);
    if (r == 0 && cox_group_subgroup(group, "all", &members, &all, NULL))
        all = group;
    uint64_t epoch = 0, count = 0;
    for (uint32_t i = 0; r == 0 && i < ROUNDS; i++) {
        uint64_t deadline_ns = cox_deadline_after_ms(60), begun_ns = cox_now_ns();
        atomic_store(&session->at[self->rank], epoch << 32 | ++count);
        r = cox_group_barrier(group, deadline_ns, NULL);
        for (uint32_t rank = 0; r == 0 && rank < RANK_COUNT; rank++) {
            uint64_t at = atomic_load(&session->at[rank]);
            FORK_CHECK(at >= (epoch << 32 | count),
                       "rank %" PRIu32 " is at %" PRIx64 ", not at %" PRIx64, rank, at,
                       epoch << 32 | count);
        }
        if (r == 0)
            r = cox_group_gather(group, value, sizeof value, values, deadline_ns, NULL);
        if (r == 0)
            r = cox_group_barrier(all, deadline_ns, NULL);
        if (r == 0 && i % 8 == 0)
            r = rank_group_fds(self, group, UINT32_MAX, deadline_ns);
        FORK_CHECK(cox_now_ns() < begun_ns + COX_NSEC_PER_MSEC * TEST_PATIENCE_MS, "for ever");
        atomic_fetch_add(&session->good, r == 0);
        if (r && r != COX_PEER_DEAD) { /* that is permanent, whoever wrote it */
            epoch_meet(session, group, &epoch);
            count = 0;
            r = 0;
        }
    }
    cox_group_leave(group);
    FORK_CHECK(test_count_fds() == fds, "%zu fds, now %zu", fds, test_count_fds());
    atomic_fetch_add(&session->ended, 1);
}

TEST(p10_b14_b23_bits_flipped_under_a_group)
{
    uint64_t good = 0, flips = 0;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct session *session = forks_share(sizeof *session);
        struct forks forks;
        session->seed = seed;
        session->from_the_start = seed % 3 == 0;
        session->memory_fd = rank_group_memory(RANK_COUNT);
        forks_start(&forks, RANK_COUNT, rank_main, session);
        forks_add(&forks, RANK_COUNT, RANK_COUNT + 1, meddler_main, session);
        forks_wait(&forks);
        close(session->memory_fd);
        good += session->good;
        flips += session->flips;
        munmap(session, sizeof *session);
    }
    print_message("%" PRIu64 " rounds in spite of %" PRIu64 " flipped bits\n", good, flips);
    assert_true(flips > 0);
}

/* Every bit of the line that a waiting rank reads is flipped, one after the other, while it waits:
 * the wait continues, and nothing comes of it. */
struct victim {
    int memory_fd;
    _Atomic uint32_t waiting, released;
};

static void waits_main(const struct forks_self *self)
{
    struct victim *victim = self->context;
    struct cox_group *group = rank_group_join_fd(self, victim->memory_fd, 2);
    rank_group_barrier(self, group);
    if (self->rank == 0) {
        atomic_store(&victim->waiting, 1);
        int r = cox_group_barrier(group, rank_group_patience(), NULL);
        FORK_CHECK(r == 0, "a flipped bit ended the wait: %d", r);
        FORK_CHECK(atomic_load(&victim->released), "a flipped bit was an arrival");
    } else {
        AWAIT(atomic_load(&victim->released));
        rank_group_barrier(self, group);
    }
    cox_group_leave(group);
}

static void flips_main(const struct forks_self *self)
{
    struct victim *victim = self->context;
    uint64_t size = sizeof(struct cox_group_layout) + 2 * sizeof(struct cox_group_layout_rank);
    uint8_t *bytes = rank_group_map(victim->memory_fd, 2);
    struct cox_group_layout *layout = (struct cox_group_layout *)bytes;
    AWAIT(atomic_load(&victim->waiting));
    /* The part and identity of rank 1, which has not arrived. */
    uint64_t line = sizeof(struct cox_group_layout) + sizeof(struct cox_group_layout_rank) +
                    COX_GROUP_LINE_SIZE;
    FORK_CHECK(line + COX_GROUP_LINE_SIZE < size, "lines");
    for (uint64_t bit = 0; bit < UINT64_C(8) * 56; bit++) {
        uint8_t mask = (uint8_t)(1u << bit % 8);
        __atomic_fetch_xor(&bytes[line + bit / 8], mask, __ATOMIC_RELAXED);
        atomic_fetch_add(&layout->wakeup.news, 1); /* so that rank 0 looks at everything */
        atomic_fetch_add(&layout->wakeup.word, COX_GROUP_WAKEUP_STEP);
        syscall(SYS_futex, &layout->wakeup.word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        usleep(200);
        __atomic_fetch_xor(&bytes[line + bit / 8], mask, __ATOMIC_RELAXED);
    }
    atomic_store(&victim->released, 1);
}

TEST(p10_no_flipped_bit_is_an_arrival)
{
    struct victim *victim = forks_share(sizeof *victim);
    struct forks forks;
    victim->memory_fd = rank_group_memory(2);
    forks_start(&forks, 2, waits_main, victim);
    forks_add(&forks, 2, 3, flips_main, victim);
    forks_wait(&forks);
    close(victim->memory_fd);
}
