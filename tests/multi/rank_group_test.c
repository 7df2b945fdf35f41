/* The rank group: barrier, values, epochs, subgroups; every rank a process. */
#include "rank_group.h"

#include "channel/shm/geometry.h"
#include "worker/group/group_private.h"

static const uint32_t worlds[] = {1, 2, 4, 8, 64};
#define WORLD_COUNT (sizeof worlds / sizeof worlds[0])

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A rank that continues in another epoch ends operations whose end others have not seen: not
 * through the group. */
static void await_count(_Atomic uint64_t *counter, uint64_t count)
{
    atomic_fetch_add(counter, 1);
    AWAIT(atomic_load(counter) >= count);
}

/* ---- barriers ---- */

/* Plain memory: only the barrier orders it. */
struct counters {
    uint64_t of[FORKS_MAX];
};

static void barriers_main(const struct forks_self *self)
{
    struct counters *counters = self->context;
    struct cox_group *group = rank_group_join(self);
    uint64_t rounds = self->rank_count > 8 ? 50 : 1000;
    FORK_CHECK(cox_group_get_info(group).rank == self->rank, "rank");
    FORK_CHECK(cox_group_get_info(group).rank_count == self->rank_count, "rank_count");
    FORK_CHECK(cox_group_get_info(group).value_size == COX_GROUP_VALUE_SIZE_MIN, "value_size");
    for (uint64_t i = 1; i <= rounds; i++) {
        counters->of[self->rank] = i;
        rank_group_barrier(self, group);
        for (uint32_t rank = 0; rank < self->rank_count; rank++)
            FORK_CHECK(counters->of[rank] == i, "rank %" PRIu32 " is at %" PRIu64 ", not %" PRIu64,
                       rank, counters->of[rank], i);
        rank_group_barrier(self, group);
    }
    rank_group_barrier(self, group); /* no rank leaves while others are in the last one */
    cox_group_leave(group);
}

TEST(k5_k7_k24_b41_barriers_order_memory_in_worlds_of_any_size)
{
    for (size_t i = 0; i < WORLD_COUNT; i++)
        forks_run(worlds[i], barriers_main, forks_share(sizeof(struct counters)));
}

TEST(k25_the_largest_world)
{
    forks_run(COX_RANK_COUNT_MAX, barriers_main, forks_share(sizeof(struct counters)));
}

/* A deadline that was forgotten is no death or timeout: the group stays in step. */
RANKS_TEST(k7_a_deadline_of_0_is_refused, 2, NULL)
{
    struct cox_group *group = rank_group_join(self), *none = NULL;
    int fds[FORKS_MAX];
    uint64_t value = 1, values[FORKS_MAX];
    for (int call = 0; call < 4; call++) {
        int r = call == 0   ? cox_group_barrier(group, 0, test_err())
                : call == 1 ? cox_group_gather(group, &value, sizeof value, values, 0, test_err())
                : call == 2
                    ? cox_group_gather_fds(group, 0, COX_GROUP_FD_KEEP, fds, 0, test_err())
                    : cox_group_join(
                          &(struct cox_group_options){.size = sizeof(struct cox_group_options),
                                                      .name = "no_deadline",
                                                      .fd = -1,
                                                      .rank_count = 1},
                          &none, test_err());
        FORK_CHECK(r == COX_INVALID && strstr(test_error.text, "deadline_ns is 0"),
                   "call %d: %d %s", call, r, test_error.text);
    }
    rank_group_leave(self, group);
}

/* ---- values ---- */

static void gather_once(const struct forks_self *self, struct cox_group *group, size_t size,
                        uint64_t round)
{
    uint32_t count = cox_group_get_info(group).rank_count, own = cox_group_get_info(group).rank;
    uint8_t *value = malloc(size), *values = malloc(size * count + 1);
    FORK_CHECK(value && values, "memory");
    for (size_t i = 0; i < size; i++)
        value[i] = (uint8_t)mix(round << 32 ^ own << 24 ^ i);
    memset(values, 0xee, size * count + 1);
    int r = cox_group_gather(group, value, size, values, rank_group_patience(), test_err());
    FORK_CHECK(r == 0, "gather of %zu: %d %s", size, r, test_error.text);
    for (uint32_t rank = 0; rank < count; rank++)
        for (size_t i = 0; i < size; i++)
            FORK_CHECK(values[rank * size + i] == (uint8_t)mix(round << 32 ^ rank << 24 ^ i),
                       "round %" PRIu64 ", size %zu: byte %zu of rank %" PRIu32, round, size, i,
                       rank);
    FORK_CHECK(values[size * count] == 0xee, "a byte behind the values was written");
    free(value);
    free(values);
}

static void gathers_main(const struct forks_self *self)
{
    static const size_t sizes[] = {1, 7, 64, 4095, 4096};
    struct cox_group *group = rank_group_join(self);
    uint64_t rounds = self->rank_count > 8 ? 8 : 300;
    for (uint64_t i = 0; i < rounds; i++)
        gather_once(self, group, sizes[i % 5], i);
    rank_group_leave(self, group);
}

TEST(k8_values_of_all_in_order)
{
    for (size_t i = 0; i < WORLD_COUNT; i++)
        forks_run(worlds[i], gathers_main, NULL);
}

/* channel/shm/geometry.c reserves it without knowing the layout. */
TEST(k25_the_memory_that_an_executor_reserves_is_enough)
{
    static const struct cox_geometry_choice defaults;
    for (uint32_t count = 1; count <= COX_RANK_COUNT_MAX; count++) {
        struct cox_geometry geometry;
        assert_int_equal(cox_geometry_resolve(count, &defaults, &geometry, NULL), 0);
        assert_in_range(cox_group_memory_size(count, 0), 1, cox_geometry_group_size(&geometry));
    }
}

static void large_main(const struct forks_self *self)
{
    struct cox_group *group = rank_group_join_sized(self, 1 << 20);
    for (uint64_t i = 0; i < 6; i++)
        gather_once(self, group, (size_t)(1 << 20) - i, i);
    rank_group_leave(self, group);
}

TEST(k8_large_values)
{
    forks_run(4, large_main, NULL);
    assert_true(cox_group_memory_size(128, COX_GROUP_VALUE_SIZE_MAX) > UINT64_C(256) << 30);
    assert_true(cox_group_memory_size(8, 0) < 1 << 20);
}

RANKS_TEST(k8_in_place, 4, NULL)
{
    struct cox_group *group = rank_group_join(self);
    uint32_t values[4] = {9, 9, 9, 9};
    values[self->rank] = 100 + self->rank;
    int r = cox_group_gather(group, &values[self->rank], sizeof values[0], values,
                             rank_group_patience(), test_err());
    FORK_CHECK(r == 0, "%s", test_error.text);
    for (uint32_t rank = 0; rank < 4; rank++)
        FORK_CHECK(values[rank] == 100 + rank, "%" PRIu32, values[rank]);
    rank_group_leave(self, group);
}

RANKS_TEST(k9_sizes_that_cannot_be_are_refused_on_all, 4, NULL)
{
    static const size_t wrong[][4] = {
        {0, 0, 0, 0}, {4097, 4097, 4097, 4097}, {8, 8, 16, 8}, {8, 0, 8, 8}, {SIZE_MAX, 8, 8, 8}};
    uint8_t value[4096] = {0}, values[4 * 4096];
    struct cox_group *group = rank_group_join(self);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        int r = cox_group_gather(group, value, wrong[i][self->rank], values, rank_group_patience(),
                                 test_err());
        FORK_CHECK(r == COX_INVALID && test_error.code == r && strstr(test_error.text, "bytes"),
                   "%zu: %d %s", i, r, test_error.text);
        FORK_CHECK(cox_group_gather(group, NULL, 8, values, 0, NULL) == COX_INVALID, "no value");
        FORK_CHECK(cox_group_gather(group, value, 8, NULL, 0, NULL) == COX_INVALID, "no values");
        gather_once(self, group, 64, i); /* they are in step all the same */
    }
    rank_group_leave(self, group);
}

RANKS_TEST(b13_another_operation_is_reported, 4, NULL)
{
    uint8_t value[8] = {0}, values[4 * 8];
    struct cox_group *group = rank_group_join(self);
    int r = self->rank == 2
                ? cox_group_barrier(group, rank_group_patience(), test_err())
                : cox_group_gather(group, value, 8, values, rank_group_patience(), test_err());
    FORK_CHECK(r == COX_CORRUPT || r == COX_ABORTED, "%d %s", r, test_error.text);
    FORK_CHECK(r != COX_CORRUPT ||
                   (strstr(test_error.text, "a barrier") && strstr(test_error.text, "a gather")),
               "%s", test_error.text);
    FORK_CHECK(cox_group_barrier(group, rank_group_patience(), NULL) == COX_ABORTED, "afterwards");
    FORK_CHECK(cox_group_align(group, 1) == 0, "align");
    rank_group_barrier(self, group);
    rank_group_leave(self, group);
}

/* ---- epochs ---- */

RANKS_TEST(b2_b18_a_timeout_names_the_missing_rank_and_align_helps, 4, forks_share(4096))
{
    _Atomic uint32_t *gate = self->context;
    struct cox_group *group = rank_group_join(self);
    if (self->rank == 2) {
        while (atomic_load(gate) < 3) /* the others have aborted */
            sched_yield();
        int r = cox_group_barrier(group, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_ABORTED, "who comes late: %d %s", r, test_error.text);
    } else {
        int r = cox_group_barrier(group, cox_deadline_after_ms(20), test_err());
        FORK_CHECK(r == COX_TIMEOUT || r == COX_ABORTED, "%d %s", r, test_error.text);
        FORK_CHECK(r == COX_ABORTED || strstr(test_error.text, "rank 2 "), "%s", test_error.text);
        atomic_fetch_add(gate, 1);
    }
    FORK_CHECK(cox_group_barrier(group, rank_group_patience(), NULL) == COX_ABORTED, "out of step");
    FORK_CHECK(cox_group_align(group, 0) == COX_INVALID, "epoch 0");
    FORK_CHECK(cox_group_align(group, 7) == 0, "align");
    FORK_CHECK(cox_group_align(group, 7) == 0, "the same");
    FORK_CHECK(cox_group_align(group, 6) == COX_INVALID, "back");
    FORK_CHECK(cox_group_align(group, COX_GROUP_EPOCH_MAX + 1) == COX_INVALID, "too far");
    for (uint64_t i = 0; i < 20; i++)
        gather_once(self, group, 64, i);
    rank_group_leave(self, group);
}

static void *abort_main(void *group)
{
    cox_group_abort(group);
    return NULL;
}

RANKS_TEST(k26_an_abort_ends_it_on_all, 4, forks_share(4096))
{
    _Atomic uint64_t *passed = self->context;
    struct cox_group *group = rank_group_join(self);
    for (uint64_t epoch = 1; epoch <= 20; epoch++) {
        if (self->rank == epoch % 4) {
            /* Whether the others are in the barrier, or not yet. */
            pthread_t thread;
            FORK_CHECK(pthread_create(&thread, NULL, abort_main, group) == 0, "thread");
            pthread_join(thread, NULL);
            FORK_CHECK(cox_group_align(group, epoch - 1) == COX_INVALID, "over is over");
        }
        int r = cox_group_barrier(group, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_ABORTED, "%d %s", r, test_error.text);
        FORK_CHECK(cox_group_align(group, epoch) == 0, "align");
        rank_group_barrier(self, group);
        await_count(passed, 4 * epoch);
    }
    rank_group_leave(self, group);
}

static bool asked(void *context)
{
    return ++*(int *)context == 2;
}

static void asks_main(const struct forks_self *self)
{
    int count = 0;
    struct cox_group *group = NULL;
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .name = self->name,
                                              .rank = self->rank,
                                              .rank_count = 2,
                                              .deadline_ns = rank_group_patience(),
                                              .cancelled = asked,
                                              .context = &count};
    if (self->rank_count == 1) { /* the other never comes */
        int r = cox_group_join(&options, &group, test_err());
        FORK_CHECK(r == COX_ABORTED && !group, "%d %s", r, test_error.text);
        return;
    }
    struct cox_group *joined = rank_group_join(self);
    if (self->rank == 0) {
        cox_group_leave(joined);
        return;
    }
    int r = cox_group_barrier(joined, rank_group_patience(), test_err());
    FORK_CHECK(r == COX_PEER_DEAD && strstr(test_error.text, "rank 0") &&
                   strstr(test_error.text, "left"),
               "%d %s", r, test_error.text);
    FORK_CHECK(cox_group_align(joined, 1) == 0, "align");
    r = cox_group_barrier(joined, rank_group_patience(), NULL);
    FORK_CHECK(r == COX_PEER_DEAD, "for good: %d", r);
    cox_group_leave(joined);
}

TEST(b2_a_callers_callback_ends_a_join)
{
    forks_run(1, asks_main, NULL);
}

TEST(b3_a_leaving_rank_is_reported)
{
    forks_run(2, asks_main, NULL);
}

/* Round 3 of epoch 1 under way on rank 0, rank 1 in epoch 2 already. */
RANKS_TEST(k7_epochs_do_not_mix, 2, forks_share(4096))
{
    struct cox_group *group = rank_group_join(self);
    FORK_CHECK(cox_group_align(group, 1) == 0, "align");
    rank_group_barrier(self, group);
    rank_group_barrier(self, group);
    await_count(self->context, 2);
    if (self->rank == 1) {
        FORK_CHECK(cox_group_align(group, 2) == 0, "align");
        rank_group_barrier(self, group);
    } else {
        int r = cox_group_barrier(group, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_ABORTED && strstr(test_error.text, "rank 1"), "%d %s", r,
                   test_error.text);
        FORK_CHECK(cox_group_align(group, 2) == 0, "align");
        rank_group_barrier(self, group);
    }
    gather_once(self, group, 8, 0);
    rank_group_leave(self, group);
}

/* As if so many operations had been before. */
static void near_the_end_of_indices(struct cox_group *group)
{
    group->index = COX_GROUP_INDEX_MASK - 20;
    cox_group_say_again(group);
}

static void index_main(const struct forks_self *self)
{
    struct cox_group *group = rank_group_join_sized(self, 8192), *all = NULL;
    const struct cox_rank_set members = cox_rank_set_first(self->rank_count);
    FORK_CHECK(cox_group_subgroup(group, "all", &members, &all, NULL) == 0, "subgroup");
    near_the_end_of_indices(group);
    near_the_end_of_indices(all);
    await_count(self->context, self->rank_count);
    for (uint64_t i = 0; i < 60; i++) {
        gather_once(self, group, 1 + i % 100, i);
        gather_once(self, all, i % 5 ? 64 : 8192, i);
        if (i % 3 == 0) /* so that both parities come first */
            rank_group_barrier(self, group);
    }
    FORK_CHECK(group->index < 100 && all->index < 200, "they went round");
    rank_group_leave(self, group);
}

TEST(k7_an_index_goes_round_among_many)
{
    static const uint32_t counts[] = {2, 3, 8};
    for (size_t i = 0; i < 3; i++)
        forks_run(counts[i], index_main, forks_share(4096));
}

/* Where the numbers of epochs outgrow a part of a word, and the last of them. */
RANKS_TEST(k7_epochs_up_to_the_last, 4, forks_share(4096))
{
    static const uint64_t epochs[] = {
        1,
        (UINT64_C(1) << 24) - 1,
        UINT64_C(1) << 24,
        (UINT64_C(1) << 31) - 1,
        UINT64_C(1) << 31,
        (UINT64_C(1) << 32) - 1,
        UINT64_C(1) << 32,
        (UINT64_C(1) << 32) + 1,
        UINT64_C(3) << 38,
        COX_GROUP_EPOCH_MAX - 1,
        COX_GROUP_EPOCH_MAX,
    };
    _Atomic uint64_t *met = self->context;
    struct cox_group *group = rank_group_join(self), *all = NULL;
    const struct cox_rank_set members = cox_rank_set_first(self->rank_count);
    FORK_CHECK(cox_group_subgroup(group, "all", &members, &all, NULL) == 0, "subgroup");
    uint64_t meeting = 0;
    for (size_t i = 0; i < sizeof epochs / sizeof epochs[0]; i++) {
        FORK_CHECK(cox_group_align(group, epochs[i]) == 0, "align %" PRIu64, epochs[i]);
        for (uint64_t n = 0; n < 10; n++) {
            gather_once(self, group, 64, n);
            gather_once(self, all, 64, n);
        }
        await_count(met, meeting += self->rank_count);
        if (self->rank == i % self->rank_count)
            cox_group_abort(group);
        int r = cox_group_barrier(group, rank_group_patience(), NULL);
        FORK_CHECK(r == COX_ABORTED, "epoch %" PRIu64 ": %d", epochs[i], r);
        r = cox_group_barrier(all, rank_group_patience(), NULL);
        FORK_CHECK(r == COX_ABORTED, "epoch %" PRIu64 ": %d", epochs[i], r);
        await_count(met, meeting += self->rank_count);
    }
    FORK_CHECK(cox_group_align(group, COX_GROUP_EPOCH_MAX) == COX_INVALID, "there is no more");
    cox_group_leave(group);
}

/* ---- subgroups ---- */

static struct cox_group *subgroup_of(const struct forks_self *self, struct cox_group *group,
                                     const char *name, struct cox_rank_set members)
{
    struct cox_group *subgroup = NULL;
    int r = cox_group_subgroup(group, name, &members, &subgroup, test_err());
    FORK_CHECK(r == 0, "subgroup %s: %d %s", name, r, test_error.text);
    return subgroup;
}

/* A grid of 4 x 2; rows and columns have the same names, and other members. */
RANKS_TEST(k6_b6_subgroups_beside_the_group, 8, NULL)
{
    struct cox_group *group = rank_group_join_sized(self, 20000);
    struct cox_rank_set row = {{0}}, column = {{0}};
    uint32_t x = self->rank % 4, y = self->rank / 4;
    for (uint32_t i = 0; i < 4; i++)
        cox_rank_set_add(&row, y * 4 + i);
    for (uint32_t i = 0; i < 2; i++)
        cox_rank_set_add(&column, i * 4 + x);
    /* Not in the same order everywhere, and by some while others wait in them already. */
    struct cox_group *columns = x % 2 ? subgroup_of(self, group, "column", column) : NULL;
    struct cox_group *rows = subgroup_of(self, group, "row", row);
    if (y == 1)
        gather_once(self, rows, 300, 1);
    if (!columns)
        columns = subgroup_of(self, group, "column", column);
    if (y == 0)
        gather_once(self, rows, 300, 1);
    FORK_CHECK(cox_group_get_info(rows).rank == x && cox_group_get_info(rows).rank_count == 4,
               "row");
    FORK_CHECK(cox_group_get_info(columns).rank == y && cox_group_get_info(columns).rank_count == 2,
               "column");
    FORK_CHECK(subgroup_of(self, group, "row", row) == rows, "the same one");
    uint64_t seed = self->rank;
    for (uint64_t i = 0; i < 200; i++) {
        for (uint64_t n = 0; n < 1 + y * 3; n++) /* rows are at different operations */
            gather_once(self, rows, 1 + (i * 37 + n) % 4096, i << 8 | n);
        seed = mix(seed + 1);
        if (seed % 4 == 0)
            sched_yield();
        gather_once(self, columns, 16, i);
        if (i % 10 == 0)
            gather_once(self, group, 1000 + i, i);
        if (i % 50 == 0)
            gather_once(self, columns, 20000, i); /* in pieces */
    }
    rank_group_leave(self, group);
}

/* The odd ranks wait in the group's barrier while the even ones work. */
RANKS_TEST(k6_b6_a_barrier_under_way_is_not_touched, 8, forks_share(4096))
{
    uint64_t *done = self->context;
    struct cox_group *group = rank_group_join(self);
    struct cox_rank_set even = {{0x55}};
    if (self->rank % 2 == 0) {
        struct cox_group *evens = subgroup_of(self, group, "even", even);
        for (uint64_t i = 0; i < 500; i++) {
            done[self->rank * 16] = i;
            rank_group_barrier(self, evens);
            for (uint32_t rank = 0; rank < 8; rank += 2)
                FORK_CHECK(done[rank * 16] == i, "%" PRIu64, done[rank * 16]);
            rank_group_barrier(self, evens);
        }
    }
    rank_group_barrier(self, group);
    for (uint32_t rank = 0; rank < 8; rank += 2)
        FORK_CHECK(done[rank * 16] == 499, "the group's barrier ended too soon");
    rank_group_leave(self, group);
}

RANKS_TEST(k6_k26_subgroups_that_cannot_be, 2, NULL)
{
    struct cox_group *group = rank_group_join(self), *subgroup = NULL;
    struct cox_rank_set all = cox_rank_set_first(2), own = {{0}}, other = {{0}}, beyond = all;
    cox_rank_set_add(&own, self->rank);
    cox_rank_set_add(&other, 1 - self->rank);
    cox_rank_set_add(&beyond, 100);
    FORK_CHECK(cox_group_subgroup(group, "a", &other, &subgroup, NULL) == COX_INVALID, "member");
    FORK_CHECK(cox_group_subgroup(group, "a", &beyond, &subgroup, NULL) == COX_INVALID, "beyond");
    FORK_CHECK(cox_group_subgroup(group, "", &all, &subgroup, NULL) == COX_INVALID, "no name");
    FORK_CHECK(cox_group_subgroup(group, "a/b", &all, &subgroup, NULL) == COX_INVALID, "slash");
    FORK_CHECK(cox_group_subgroup(group, "12345678901234567890123456789012", &all, &subgroup,
                                  NULL) == COX_INVALID,
               "long");
    subgroup_of(self, group, "own", own);
    FORK_CHECK(cox_group_subgroup(group, "own", &all, &subgroup, NULL) == COX_TAKEN, "members");
    if (self->rank == 0)
        subgroup_of(self, group, "both", all);
    rank_group_barrier(self, group);
    if (self->rank == 1)
        FORK_CHECK(cox_group_subgroup(group, "both", &own, &subgroup, test_err()) == 0, "disjoint");
    for (int i = 2; i < COX_SUBGROUP_COUNT_MAX; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        subgroup_of(self, group, name, all);
    }
    FORK_CHECK(cox_group_subgroup(group, "more", &all, &subgroup, NULL) == COX_FULL, "full");
    if (self->rank == 0) {
        struct cox_group *both = subgroup_of(self, group, "both", all);
        int r = cox_group_barrier(both, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_CORRUPT && strstr(test_error.text, "other members"), "%d %s", r,
                   test_error.text);
    }
    rank_group_barrier(self, group); /* the subgroup's failure is its own */
    rank_group_leave(self, group);
}

/* Worlds of any size, with subgroups of ranks far apart: every third, and the two halves. */
static void worlds_main(const struct forks_self *self)
{
    struct cox_group *group = rank_group_join(self);
    struct cox_rank_set third = {{0}}, half = {{0}};
    uint32_t third_count = 0, half_count = 0, middle = (self->rank_count + 1) / 2;
    for (uint32_t rank = 0; rank < self->rank_count; rank++) {
        if (rank % 3 == self->rank % 3) {
            cox_rank_set_add(&third, rank);
            third_count++;
        }
        if (rank / middle == self->rank / middle) {
            cox_rank_set_add(&half, rank);
            half_count++;
        }
    }
    struct cox_group *thirds = subgroup_of(self, group, "third", third),
                     *halves = subgroup_of(self, group, "half", half);
    FORK_CHECK(cox_group_get_info(thirds).rank_count == third_count &&
                   cox_group_get_info(thirds).rank == self->rank / 3,
               "third");
    FORK_CHECK(cox_group_get_info(halves).rank_count == half_count &&
                   cox_group_get_info(halves).rank == self->rank % middle,
               "half");
    for (uint64_t i = 0; i < 4; i++) {
        gather_once(self, thirds, 100, i);
        gather_once(self, group, 9, i);
        gather_once(self, halves, 1500, i);
    }
    rank_group_leave(self, group);
}

TEST(k6_k25_worlds_of_odd_sizes_and_subgroups_of_them)
{
    static const uint32_t counts[] = {1, 3, 5, 7, 31, 63, 64, 65, 100, 127, 128};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        forks_run(counts[i], worlds_main, NULL);
}

/* Each rank has a thread in the group and one in each of two subgroups that overlap, at once. */
struct beside {
    const struct forks_self *self;
    struct cox_group *group;
    uint64_t rounds;
    pthread_t thread;
};

static void *beside_main(void *context)
{
    struct beside *beside = context;
    const struct forks_self *self = beside->self;
    for (uint64_t i = 0; i < beside->rounds; i++) {
        gather_once(self, beside->group, 1 + i % 1000, i);
        rank_group_barrier(self, beside->group);
    }
    return NULL;
}

RANKS_TEST(k6_b6_a_thread_in_each_of_overlapping_subgroups, 4, NULL)
{
    struct cox_group *group = rank_group_join(self);
    const struct cox_rank_set low = {{0x7}}, high = {{0xe}};
    struct beside besides[3] = {{self, group, 300, 0}};
    uint32_t count = 1;
    if (self->rank < 3)
        besides[count++] = (struct beside){self, subgroup_of(self, group, "low", low), 200, 0};
    if (self->rank > 0)
        besides[count++] = (struct beside){self, subgroup_of(self, group, "high", high), 250, 0};
    for (uint32_t i = 0; i < count; i++)
        FORK_CHECK(pthread_create(&besides[i].thread, NULL, beside_main, &besides[i]) == 0,
                   "thread");
    for (uint32_t i = 0; i < count; i++)
        pthread_join(besides[i].thread, NULL);
    rank_group_leave(self, group);
}

/* ---- at random ---- */

/* All go through the same operations; now and then one aborts, or is late on purpose, and all align
 * to the next epoch. The result of a gather is right, whatever happened before. */
static void random_main(const struct forks_self *self)
{
    _Atomic uint64_t *epochs = self->context; /* the next one to align to */
    struct cox_group *group = rank_group_join(self);
    struct cox_rank_set even = {
        {UINT64_C(0x5555555555555555) & ((UINT64_C(1) << self->rank_count) - 1)}};
    struct cox_group *evens = self->rank % 2 == 0 ? subgroup_of(self, group, "even", even) : NULL;
    uint64_t seed = mix(self->rank + 77), epoch = 0, good = 0;
    uint8_t values[8 * 512], value[512];
    while (epoch < 300) {
        int r = 0;
        for (uint64_t i = 0; i < 10 && r == 0; i++) {
            uint64_t plan = mix(epoch << 20 | i); /* the same on all */
            size_t size = 1 + plan % sizeof value;
            struct cox_group *g = plan >> 20 & 1 ? evens : group;
            seed = mix(seed + 1);
            if (seed % 64 == 0)
                cox_group_abort(group);
            if (!g)
                continue;
            memset(value, (int)(plan >> 32 ^ cox_group_get_info(g).rank), size);
            uint64_t deadline_ns =
                seed % 61 == 1 ? cox_now_ns() : cox_deadline_after_ms(TEST_PATIENCE_MS);
            r = plan >> 21 & 1 ? cox_group_gather(g, value, size, values, deadline_ns, NULL)
                               : cox_group_barrier(g, deadline_ns, NULL);
            FORK_CHECK(r == 0 || r == COX_ABORTED || r == COX_TIMEOUT, "%d", r);
            for (uint32_t rank = 0;
                 r == 0 && plan >> 21 & 1 && rank < cox_group_get_info(g).rank_count; rank++)
                for (size_t k = 0; k < size; k++)
                    FORK_CHECK(values[rank * size + k] == (uint8_t)(plan >> 32 ^ rank),
                               "epoch %" PRIu64 " operation %" PRIu64 ": value of %" PRIu32, epoch,
                               i, rank);
            good += r == 0;
        }
        epoch++;
        FORK_CHECK(cox_group_align(group, epoch) == 0, "align");
        atomic_fetch_add(epochs, 1);
    }
    FORK_CHECK(good > 300, "hardly anything succeeded: %" PRIu64, good);
    rank_group_barrier(self, group);
    rank_group_leave(self, group);
}

TEST(k7_b2_aborts_timeouts_and_aligns_at_random)
{
    /* A rank that copies a value while its owner continues in another epoch discards it: a race, on
     * purpose. */
    test_needs_processes();
    forks_run(2, random_main, forks_share(4096));
    forks_run(5, random_main, forks_share(4096));
    forks_run(8, random_main, forks_share(4096));
}

/* ---- several ---- */

TEST(b1_k23_several_groups_at_once)
{
    struct forks jobs[3];
    for (int i = 0; i < 3; i++)
        forks_start(&jobs[i], 4, gathers_main, NULL);
    for (int i = 0; i < 3; i++)
        forks_wait(&jobs[i]);
}

RANKS_TEST(k22_two_groups_in_one_process, 4, NULL)
{
    struct forks_self second = *self;
    char name[80];
    snprintf(name, sizeof name, "%s_b", self->name);
    second.name = name;
    struct cox_group *a = rank_group_join(self), *b = rank_group_join(&second);
    for (uint64_t i = 0; i < 100; i++) {
        gather_once(self, a, 64, i);
        gather_once(self, b, 64, i + 1000);
    }
    rank_group_barrier(self, b);
    rank_group_barrier(self, a);
    cox_group_leave(a);
    cox_group_leave(b);
}

static void child_main(const struct forks_self *self)
{
    struct cox_group *group = rank_group_join(self);
    FORK_CHECK(cox_group_leave(NULL) == NULL, "nothing to leave");
    rank_group_barrier(self, group);
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
        cox_group_leave(group);
        _exit(0);
    }
    FORK_CHECK(waitpid(pid, &status, 0) == pid && status == 0, "child");
    rank_group_barrier(self, group); /* no rank has left */
    rank_group_barrier(self, group);
    FORK_CHECK(cox_group_leave(group) == NULL, "left");
}

TEST(k20_k21_the_child_of_a_fork_does_not_leave_the_group)
{
    test_needs_processes();
    forks_run(3, child_main, NULL);
}
