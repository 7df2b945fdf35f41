/*
 * rank_group_stop_test: one rank of a group is stopped at each of its steps, in each operation. The
 * others, which cannot tell that from slowness, fail at their deadline and name it; when it is
 * continued, all align, and all works as before. A rank that is stopped while it joins is no rank
 * of another incarnation.
 */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "rank_group.h"

#if COX_TESTING

#define VICTIM 1
#define RANK_COUNT 4
#define DEADLINE_MS 250

struct step {
    const char *point;
    /* ends with 0 */
    uint32_t passages[16];
    bool by_sockets;
};

struct session {
    const struct step *step;
    uint32_t passage;
    _Atomic uint32_t ended, timeouts, aligned;
};

/* "rank 1 did not", and "ranks 0, 2-3 did not". */
static bool is_singular_or_plural(const char *text)
{
    const char *did = strstr(text, " did not arrive");
    const bool several = did && text + strcspn(text, ",-") < did;
    return !did || strncmp(text, several ? "ranks " : "rank ", several ? 6 : 5) == 0;
}

/* Is this one of them? */
static bool names(const char *text, uint32_t rank)
{
    while (*text && (*text < '0' || *text > '9'))
        text++;
    for (;;) {
        char *end;
        uint32_t first = (uint32_t)strtoul(text, &end, 10), last = first;
        if (*end == '-')
            last = (uint32_t)strtoul(end + 1, &end, 10);
        if (rank >= first && rank <= last)
            return true;
        if (*end != ',')
            return false;
        text = end + 2;
    }
}

static void await(_Atomic uint32_t *word, uint32_t value)
{
    AWAIT(atomic_load(word) >= value);
}

static void stopped_main(const struct forks_self *self)
{
    struct session *session = self->context;
    struct cox_group *all = NULL;
    struct cox_rank_set members = cox_rank_set_first(RANK_COUNT);
    char text[64];
    if (session->step->by_sockets)
        rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | EPERM);
    struct cox_group *group = rank_group_join(self);
    size_t before = test_count_fds();
    snprintf(text, sizeof text, "%s:stop:%d:%" PRIu32, session->step->point, VICTIM,
             session->passage);
    cox_fault_arm(text);
    FORK_CHECK(cox_group_subgroup(group, "all", &members, &all, NULL) == 0, "subgroup");
    int r = 0;
    for (int i = 0; r == 0 && i < 2; i++)
        r = rank_group_operations(self, group, all,
                                  self->rank == VICTIM ? TEST_PATIENCE_MS : DEADLINE_MS);
    FORK_CHECK(r == COX_ABORTED || (r == COX_TIMEOUT && self->rank != VICTIM), "%d %s", r,
               test_error.text);
    FORK_CHECK(r != COX_TIMEOUT || is_singular_or_plural(test_error.text), "%s", test_error.text);
    if (r == COX_TIMEOUT && names(test_error.text, VICTIM))
        atomic_fetch_add(&session->timeouts, 1);
    cox_fault_arm(NULL); /* if it was late, no process would continue it from now on */
    FORK_CHECK(cox_group_align(group, 10) == 0, "align");
    atomic_fetch_add(&session->ended, 1);
    await(&session->ended, RANK_COUNT);
    r = rank_group_operations(self, group, all, TEST_PATIENCE_MS);
    FORK_CHECK(r == 0, "when it goes on: %d %s", r, test_error.text);
    FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    rank_group_barrier(self, group);
    cox_group_leave(group);
}

/* On a busy machine a rank may be late before the victim comes to its step: then once more. */
static bool stop_once(struct session *session)
{
    struct forks forks;
    forks_start(&forks, RANK_COUNT, stopped_main, session);
    bool stopped = false;
    while (!stopped && atomic_load(&session->ended) < RANK_COUNT) {
        stopped = cox_peer_stopped(forks.pids[VICTIM]);
        sched_yield();
    }
    if (stopped) {
        await(&session->ended, RANK_COUNT - 1);
        assert_true(cox_peer_stopped(forks.pids[VICTIM]));
        kill(forks.pids[VICTIM], SIGCONT);
    }
    forks_wait(&forks);
    return stopped && atomic_load(&session->timeouts) > 0;
}

static void stop_all(const struct step *steps, size_t count)
{
    struct session *session = forks_share(sizeof *session);
    for (size_t i = 0; i < count; i++)
        for (const uint32_t *passage = steps[i].passages; *passage; passage++) {
            bool done = false;
            print_message("%s, passage %" PRIu32 "\n", steps[i].point, *passage);
            for (int attempt = 0; !done && attempt < 20; attempt++) {
                *session = (struct session){.step = &steps[i], .passage = *passage};
                done = stop_once(session);
            }
            assert_true(done);
        }
    munmap(session, sizeof *session);
}

TEST(b2_b18_k26_stopped_in_an_operation)
{
    static const struct step steps[] = {
        {"group.formed", {1}, false},
        {"group.value", {1, 2, 3, 4, 6, 8, 9}, false},
        {"group.arrived", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, false},
        {"group.counted", {1, 3, 5}, false},
        {"group.wakes", {1}, false},
        {"group.woken", {1}, false},
        {"group.done", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, false},
    };
    stop_all(steps, sizeof steps / sizeof steps[0]);
}

TEST(b2_b18_stopped_with_fds_on_their_way)
{
    static const struct step steps[] = {
        {"group.bound", {1, 2, 3}, true},       {"group.offered", {1, 3, 4, 6}, true},
        {"group.accepted", {1, 2, 3, 4}, true}, {"group.arrived", {6, 7, 10, 11, 14, 15}, true},
        {"group.done", {6, 7, 11}, true},
    };
    stop_all(steps, sizeof steps / sizeof steps[0]);
}

/* ---- incarnations ---- */

struct incarnation {
    uint32_t rank;
    uint64_t incarnation, deadline_ms;
    bool stops;
    int expected;
};

static void incarnation_main(const struct forks_self *self)
{
    const struct incarnation *own = (const struct incarnation *)self->context + self->rank;
    struct cox_group *group = NULL;
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .name = self->name,
                                              .rank = own->rank,
                                              .rank_count = 2,
                                              .incarnation = own->incarnation,
                                              .deadline_ns =
                                                  cox_deadline_after_ms(own->deadline_ms)};
    if (own->stops) {
        char text[64];
        snprintf(text, sizeof text, "group.claimed:stop:%" PRIu32 ":1", self->rank);
        cox_fault_arm(text);
    }
    int r = cox_group_join(&options, &group, test_err());
    FORK_CHECK(r == own->expected, "rank %" PRIu32 " of incarnation %" PRIu64 ": %d %s", own->rank,
               own->incarnation, r, test_error.text);
    if (r == 0) {
        rank_group_barrier(self, group);
        rank_group_barrier(self, group);
    }
    cox_group_leave(group);
}

/* Rank 0 has made the file and said nothing yet. Ranks of the next incarnation are none of its, and
 * keep it no longer than their deadline; its own other rank comes later. */
TEST(b1_k3_an_incarnation_without_a_word_yet)
{
    static struct incarnation incarnations[] = {{0, 1, TEST_PATIENCE_MS, true, 0},
                                                {0, 2, 100, false, COX_TIMEOUT},
                                                {1, 2, 100, false, COX_TIMEOUT},
                                                {1, 1, TEST_PATIENCE_MS, false, 0}};
    struct forks forks = {.count = 0};
    test_unique_name(forks.name);
    forks_add(&forks, 0, 2, incarnation_main, incarnations);
    AWAIT(cox_peer_stopped(forks.pids[0]));
    for (uint32_t i = 1; i < 3; i++)
        forks_add(&forks, i, 2, incarnation_main, incarnations);
    for (uint32_t i = 1; i < 3; i++)
        assert_int_equal(forks_end(&forks, i), 0);
    kill(forks.pids[0], SIGCONT);
    forks_add(&forks, 3, 2, incarnation_main, incarnations);
    forks_wait(&forks);
}

#endif
