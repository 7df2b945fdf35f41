/* How an operation of the rank group ends that cannot be completed: each of them, in the group and
 * in a subgroup, fds by handles and by sockets; at a deadline, aborted, and when a rank leaves. And
 * what does not end one: signals, and wakes for no reason. Every rank a process. */
#include "worker/group/group_layout.h"
#include "rank_group.h"

#include <linux/futex.h>

#define RANK_COUNT 3
/* The rank that does not come. */
#define MISSING 2

enum operation {
    BARRIER,
    GATHER,
    GATHER_LARGE,
    GATHER_FDS,
    BROADCAST,
    BROADCAST_TO,
    OPERATION_COUNT
};

enum end {
    DEADLINE,        /* in a moment */
    DEADLINE_PASSED, /* when it began */
    ABORT_OWN,       /* by another thread of rank 0, which sleeps in it */
    ABORT_OTHER,     /* by the missing rank */
    ABORT_ASKED,     /* rank 0's callback says so */
    END_COUNT
};

struct session {
    int memory_fd;
    bool by_sockets, in_subgroup;
    /* the last test of it */
    enum operation leaves_at;
    _Atomic uint64_t met;
    /* ranks that got that end themselves */
    _Atomic uint32_t ended[END_COUNT][OPERATION_COUNT];
    _Atomic pid_t pids[RANK_COUNT];
    _Atomic uint32_t done;
};

/* Not by the group: it is what is out of step. */
static void meet(struct session *session, uint64_t *meeting)
{
    *meeting += RANK_COUNT;
    atomic_fetch_add(&session->met, 1);
    AWAIT(atomic_load(&session->met) >= *meeting);
}

static struct cox_group_layout *layout_map(const struct session *session)
{
    void *map = mmap(NULL, cox_group_memory_size(RANK_COUNT, 8192), PROT_READ | PROT_WRITE,
                     MAP_SHARED, session->memory_fd, 0);
    COX_ASSERT(map != MAP_FAILED);
    return map;
}

static int memory_new(void)
{
    int fd = memfd_create("group", MFD_CLOEXEC);
    COX_ASSERT(fd >= 0 && ftruncate(fd, (off_t)cox_group_memory_size(RANK_COUNT, 8192)) == 0);
    return fd;
}

struct rank {
    struct session *session;
    /* what it operates in: the group or the subgroup */
    struct cox_group *group, *part;
    struct cox_group_layout *layout;
    bool asked;
    pthread_t thread;
};

static bool asked(void *context)
{
    return ((const struct rank *)context)->asked;
}

static void rank_init(struct rank *rank, const struct forks_self *self)
{
    const struct cox_rank_set all = cox_rank_set_first(RANK_COUNT);
    struct session *session = self->context;
    *rank = (struct rank){.session = session, .layout = layout_map(session)};
    if (session->by_sockets)
        rank_group_deny(self, SYS_pidfd_getfd, SECCOMP_RET_ERRNO | EPERM);
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .fd = session->memory_fd,
                                              .rank = self->rank,
                                              .rank_count = RANK_COUNT,
                                              .value_size = 8192,
                                              .deadline_ns = rank_group_patience(),
                                              .cancelled = asked,
                                              .context = rank};
    FORK_OK(cox_group_join(&options, &rank->group, test_err()));
    rank->part = rank->group;
    if (session->in_subgroup)
        FORK_CHECK(cox_group_subgroup(rank->group, "all", &all, &rank->part, test_err()) == 0, "%s",
                   test_error.text);
}

static void rank_deinit(struct rank *rank)
{
    cox_group_leave(rank->group);
    munmap(rank->layout, cox_group_memory_size(RANK_COUNT, 8192));
}

/* The operation, and that it leaves nothing behind unless it succeeds, and what it should if it
 * does. */
static int operate(const struct forks_self *self, struct rank *rank, enum operation operation,
                   uint64_t deadline_ns, struct cox_error *err)
{
    static const int none[RANK_COUNT] = {-7, -7, -7};
    static uint8_t value[8192], values[RANK_COUNT * 8192];
    struct cox_group *part = rank->part;
    int fds[RANK_COUNT] = {-7, -7, -7}, r = 0;
    size_t before = test_count_fds(), size = operation == GATHER_LARGE ? sizeof value : 8;
    uint32_t source = operation == BROADCAST ? 0 : 1;
    int fd = memfd_create("own", MFD_CLOEXEC);
    bool gives = operation == GATHER_FDS || self->rank == source;
    switch (operation) {
    case BARRIER:
        r = cox_group_barrier(part, deadline_ns, err);
        break;
    case GATHER:
    case GATHER_LARGE:
        memset(value, (int)self->rank + 1, size);
        r = cox_group_gather(part, value, size, values, deadline_ns, err);
        for (uint32_t i = 0; r == 0 && i < RANK_COUNT; i++)
            FORK_CHECK(values[i * size] == i + 1 && values[i * size + size - 1] == i + 1, "value");
        break;
    case GATHER_FDS:
        r = cox_group_gather_fds(part, fd, COX_GROUP_FD_CONSUME, fds, deadline_ns, err);
        break;
    case BROADCAST:
    case BROADCAST_TO:
    case OPERATION_COUNT:
        r = cox_group_broadcast_fd(part, source, gives ? fd : -1, COX_GROUP_FD_CONSUME, fds,
                                   deadline_ns, err);
        break;
    }
    bool consumed = r == 0 && gives && operation >= GATHER_FDS;
    FORK_CHECK((fcntl(fd, F_GETFD) < 0) == consumed, "the fd after %d", r);
    if (!consumed)
        close(fd);
    FORK_CHECK(r == 0 || memcmp(fds, none, sizeof none) == 0, "what it gives after %d", r);
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        if (fds[i] >= 0)
            cox_close_fd(&fds[i]);
    FORK_CHECK(test_count_fds() == before, "%zu fds, now %zu", before, test_count_fds());
    FORK_CHECK(r == 0 || err->code == r, "a text of %d, not of %d", err->code, r);
    return r;
}

/* The first subgroup that rank 0 has formed. */
static struct cox_group_layout_wakeup *wakeup_of_subgroup(struct cox_group_layout *layout)
{
    uint8_t *bytes = (uint8_t *)layout + cox_group_wakeups_offset(RANK_COUNT);
    return (struct cox_group_layout_wakeup *)(void *)bytes;
}

/* A rank sleeps at the wakeup of the operation. */
static void await_sleeper(const struct rank *rank)
{
    const struct cox_group_layout_wakeup *wakeup =
        rank->session->in_subgroup ? wakeup_of_subgroup(rank->layout) : &rank->layout->wakeup;
    AWAIT((atomic_load(&wakeup->word) & COX_GROUP_WAKEUP_SLEEPS));
}

static void *abort_main(void *context)
{
    struct rank *rank = context;
    await_sleeper(rank);
    cox_group_abort(rank->group);
    return NULL;
}

static void end_once(const struct forks_self *self, struct rank *rank, enum operation operation,
                     enum end end, uint64_t epoch, uint64_t *meeting)
{
    bool threaded = end == ABORT_OWN && self->rank == 0;
    meet(rank->session, meeting);
    if (self->rank == MISSING) {
        if (end == ABORT_OTHER)
            abort_main(rank);
    } else {
        rank->asked = end == ABORT_ASKED && self->rank == 0;
        if (threaded)
            FORK_CHECK(pthread_create(&rank->thread, NULL, abort_main, rank) == 0, "thread");
        uint64_t deadline_ns = end == DEADLINE          ? cox_deadline_after_ms(20)
                               : end == DEADLINE_PASSED ? 1 /* long ago */
                                                        : rank_group_patience();
        int r = operate(self, rank, operation, deadline_ns, test_err());
        if (threaded)
            pthread_join(rank->thread, NULL);
        rank->asked = false;
        /* The second rank may find that the first one has aborted already. */
        int expected = end == DEADLINE || end == DEADLINE_PASSED ? COX_TIMEOUT : COX_ABORTED;
        FORK_CHECK(r == expected || r == COX_ABORTED, "operation %d, end %d: %d %s", operation, end,
                   r, test_error.text);
        FORK_CHECK(r == COX_ABORTED || strstr(test_error.text, "2 did not "), "%s",
                   test_error.text);
        atomic_fetch_add(&rank->session->ended[end][operation], r == expected);
        r = operate(self, rank, operation, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_ABORTED, "until it aligns: %d %s", r, test_error.text);
    }
    meet(rank->session, meeting);
    FORK_CHECK(atomic_load(&rank->session->ended[end][operation]) > 0, "operation %d, end %d",
               operation, end);
    FORK_CHECK(cox_group_align(rank->group, epoch) == 0, "align");
    int r = operate(self, rank, operation, rank_group_patience(), test_err());
    FORK_CHECK(r == 0, "operation %d, after end %d: %d %s", operation, end, r, test_error.text);
}

static void ends_main(const struct forks_self *self)
{
    struct rank rank;
    uint64_t meeting = 0, epoch = 0;
    rank_init(&rank, self);
    for (enum operation operation = BARRIER; operation < OPERATION_COUNT; operation++)
        for (enum end end = DEADLINE; end < END_COUNT; end++)
            end_once(self, &rank, operation, end, ++epoch, &meeting);
    meet(rank.session, &meeting);
    if (self->rank != MISSING) {
        int r = operate(self, &rank, rank.session->leaves_at, rank_group_patience(), test_err());
        FORK_CHECK(r == COX_PEER_DEAD && strstr(test_error.text, "rank 2 ") &&
                       strstr(test_error.text, "left"),
                   "%d %s", r, test_error.text);
        /* No other rank leaves before both know: it would be named. */
        for (atomic_fetch_add(&rank.session->done, 1); atomic_load(&rank.session->done) < 2;)
            sched_yield();
    } else {
        await_sleeper(&rank);
    }
    rank_deinit(&rank);
}

/* beside (may be NULL) runs in one more process. */
static void session_run(struct session made, forks_fn fn, forks_fn beside)
{
    struct forks forks;
    struct session *session = forks_share(sizeof *session);
    made.memory_fd = memory_new();
    *session = made;
    forks_start(&forks, RANK_COUNT, fn, session);
    if (beside)
        forks_add(&forks, RANK_COUNT, RANK_COUNT + 1, beside, session);
    forks_wait(&forks);
    close(session->memory_fd);
    munmap(session, sizeof *session);
}

static void ends_run(bool by_sockets, bool in_subgroup)
{
    for (enum operation operation = BARRIER; operation < OPERATION_COUNT; operation++)
        session_run((struct session){.by_sockets = by_sockets,
                                     .in_subgroup = in_subgroup,
                                     .leaves_at = operation},
                    ends_main, NULL);
}

TEST(b2_b3_b8_k26_every_operation_ends)
{
    test_needs_processes();
    ends_run(false, false);
}

TEST(b2_b3_b8_k26_every_operation_ends_by_sockets)
{
    test_needs_processes();
    ends_run(true, false);
}

TEST(b2_b3_b8_k6_every_operation_of_a_subgroup_ends)
{
    test_needs_processes();
    ends_run(false, true);
    ends_run(true, true);
}

/* ---- what ends none ---- */

static void on_signal(int number)
{
    (void)number;
}

static void stormed_main(const struct forks_self *self)
{
    struct rank rank;
    const struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART */
    FORK_CHECK(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    atomic_store(&((struct session *)self->context)->pids[self->rank], getpid());
    rank_init(&rank, self);
    for (uint32_t i = 0; i < 40; i++)
        for (enum operation operation = BARRIER; operation < OPERATION_COUNT; operation++) {
            /* One after the other is late, so that the others sleep. */
            if (i % 4 == self->rank)
                await_sleeper(&rank);
            int r = operate(self, &rank, operation, rank_group_patience(), test_err());
            FORK_CHECK(r == 0, "round %" PRIu32 ", operation %d: %d %s", i, operation, r,
                       test_error.text);
        }
    atomic_fetch_add(&rank.session->done, 1);
    AWAIT(atomic_load(&rank.session->done) >= RANK_COUNT);
    rank_deinit(&rank);
}

static void storm_main(const struct forks_self *self)
{
    struct session *session = self->context;
    struct cox_group_layout *layout = layout_map(session);
    _Atomic uint32_t *words[] = {&layout->wakeup.word, &wakeup_of_subgroup(layout)->word};
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        AWAIT(atomic_load(&session->pids[rank]));
    while (atomic_load(&session->done) < RANK_COUNT) {
        for (int i = 0; i < 2; i++)
            syscall(SYS_futex, words[i], FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
            kill(atomic_load(&session->pids[rank]), SIGUSR1);
        usleep(100);
    }
}

TEST(k17_b47_signals_and_wakes_for_no_reason_end_no_operation)
{
    test_needs_processes();
    for (int i = 0; i < 4; i++)
        session_run((struct session){.by_sockets = i % 2, .in_subgroup = i / 2}, stormed_main,
                    storm_main);
}

/* A thread that sleeps for a time, or yields, to poll, is killed. */
static void no_polling_main(const struct forks_self *self)
{
    struct rank rank;
    rank_init(&rank, self);
    rank_group_deny(self, SYS_nanosleep, SECCOMP_RET_KILL_PROCESS);
    rank_group_deny(self, SYS_clock_nanosleep, SECCOMP_RET_KILL_PROCESS);
    rank_group_deny(self, SYS_sched_yield, SECCOMP_RET_KILL_PROCESS);
    for (uint32_t i = 0; i < 200; i++)
        for (enum operation operation = BARRIER; operation < OPERATION_COUNT; operation++)
            FORK_OK(operate(self, &rank, operation, rank_group_patience(), test_err()));
    FORK_CHECK(cox_group_barrier(rank.group, rank_group_patience(), NULL) == 0, "last");
    rank_deinit(&rank);
}

TEST(b5_no_rank_polls)
{
    test_needs_processes();
    for (int i = 0; i < 2; i++)
        session_run((struct session){.in_subgroup = i}, no_polling_main, NULL);
}
