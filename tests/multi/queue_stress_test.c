/*
 * Several queues at once, each message with bytes that tell what it is: processes that wait on all
 * of them and sleep through nothing, and processes that are killed at any moment.
 */
#include "channel/base/tsan.h"
#include "memory/pool/pool_internal.h"
#include "memory/queue/queue_internal.h"
#include "tests/unit/queue_fixture.h"
#include "forks.h"
#include "testing.h"

#define QUEUES 3
#define DEPTH 8
#define BLOCKS 64
#define SUBSCRIBERS 5 /* host, host, bounce, bounce, bounce with a pool of its own */
#define RANKS_MAX 8
#define LAST_USER_DATA UINT64_MAX

#ifdef COX_TSAN
#define MESSAGES 200
#else
#define MESSAGES 3000
#endif
#define KILLS 60

struct shared {
    int queue_fds[QUEUES];
    /* host, bounce */
    int pool_fds[2][2];
    bool for_ever;
    _Atomic uint32_t joined;
    _Atomic bool stops;
    /* number of the last message taken */
    _Atomic uint64_t acknowledged[RANKS_MAX][QUEUES];
    _Atomic uint64_t progress[RANKS_MAX];
    _Atomic uint64_t taken, skipped, copied, gone;
};

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Private state of a process. */
struct own {
    struct cox_domains *domains;
    struct cox_exporter *exporter;
    struct cox_pool *host, *bounce;
    struct cox_queue *queues[QUEUES];
};

static struct own own_open(const struct forks_self *self)
{
    const struct shared *shared = self->context;
    const struct cox_exporter_options exporting = {.size = sizeof(struct cox_exporter_options),
                                                   .ptrace_policy = COX_PTRACE_ANY};
    struct own own = {0};
    FORK_CHECK(cox_domains_new(&own.domains) == 0, "domains");
    FORK_CHECK(cox_exporter_new(&exporting, &own.exporter, NULL) == 0, "exporter");
    const struct cox_pool_attach_options options = {.size = sizeof(struct cox_pool_attach_options),
                                                    .domains = own.domains};
    FORK_CHECK(cox_pool_attach(shared->pool_fds[0], &options, &own.host, NULL) == 0, "pool");
    FORK_CHECK(cox_pool_attach(shared->pool_fds[1], &options, &own.bounce, NULL) == 0, "pool");
    for (int i = 0; i < QUEUES; i++)
        FORK_CHECK(cox_queue_attach(shared->queue_fds[i], NULL, &own.queues[i], NULL) == 0,
                   "queue");
    return own;
}

static void own_close(struct own *own)
{
    for (int i = 0; i < QUEUES; i++)
        cox_queue_free(own->queues[i]);
    cox_pool_free(own->host);
    cox_pool_free(own->bounce);
    cox_exporter_free(own->exporter);
    cox_domains_free(own->domains);
}

/* ---- subscribers ---- */

/* Per queue: each message follows the last one, or those between were skipped or inaccessible. */
struct taker {
    struct cox_subscriber *subscriber;
    uint64_t number, gone;
    bool is_over;
};

static void take_one(const struct forks_self *self, struct taker *taker, uint32_t queue,
                     bool may_copy)
{
    struct shared *shared = self->context;
    struct cox_message message;
    int r = cox_subscriber_take(taker->subscriber, &message, test_err());
    /* Its pool was freed with its process, before this one had it. */
    if (r == COX_PEER_DEAD && shared->for_ever) {
        taker->gone++;
        atomic_fetch_add(&shared->gone, 1);
        return;
    }
    if (r == COX_EMPTY || r == COX_FULL) {
        sched_yield();
        return;
    }
    FORK_CHECK(r == 0, "take: %s: %s", cox_status_text(r), test_error.text);
    FORK_CHECK(fixture_is_sound(&message), "message %" PRIu64, message.number);
    FORK_CHECK(taker->number == 0 ||
                   message.number == taker->number + 1 + message.skipped + taker->gone,
               "message %" PRIu64 " behind %" PRIu64 ", %" PRIu64 " skipped, %" PRIu64 " gone",
               message.number, taker->number, message.skipped, taker->gone);
    FORK_CHECK(may_copy || !message.copied, "copied");
    atomic_fetch_add_explicit(&shared->taken, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&shared->skipped, message.skipped, memory_order_relaxed);
    atomic_fetch_add_explicit(&shared->copied, message.copied, memory_order_relaxed);
    taker->number = message.number;
    taker->gone = 0;
    taker->is_over = message.user_data == LAST_USER_DATA;
    fixture_let_go(&message);
    atomic_store(&shared->acknowledged[self->rank][queue], taker->number);
}

static bool all_over(const struct taker takers[QUEUES])
{
    bool over = true;
    for (int i = 0; i < QUEUES; i++)
        over = over && takers[i].is_over;
    return over;
}

static void subscriber_main(const struct forks_self *self, uint32_t which)
{
    struct shared *shared = self->context;
    struct own own = own_open(self);
    struct cox_pool *pool = which < 2 ? NULL : own.bounce, *mine = NULL;
    struct taker takers[QUEUES] = {0};
    struct cox_queue_set *set = NULL;
    if (which == 4)
        pool = mine = fixture_pool(own.domains, COX_DOMAIN_BOUNCE, 4);
    FORK_CHECK(cox_queue_set_new(&set) == 0, "set");
    for (uint32_t i = 0; i < QUEUES; i++) {
        takers[i].subscriber =
            fixture_subscriber(own.queues[i], pool, &own.host, 1, own.domains, own.exporter);
        FORK_CHECK(cox_queue_set_add(set, takers[i].subscriber, NULL) == 0, "set");
    }
    atomic_fetch_add(&shared->joined, 1);
    while (!all_over(takers)) {
        struct cox_subscriber *ready = NULL;
        uint32_t i = 0;
        int r = cox_queue_set_wait(set, cox_deadline_after_ms(TEST_PATIENCE_MS), &ready);
        FORK_CHECK(r == 0, "rank %" PRIu32 " waits: %s", self->rank, cox_status_text(r));
        while (takers[i].subscriber != ready)
            i++;
        take_one(self, &takers[i], i, which >= 2);
        atomic_fetch_add(&shared->progress[self->rank], 1);
    }
    cox_queue_set_free(set);
    for (int i = 0; i < QUEUES; i++)
        cox_subscriber_free(takers[i].subscriber);
    cox_pool_free(mine);
    own_close(&own);
}

/* ---- no subscriber misses a wakeup ---- */

static void await_taken(const struct forks_self *self, struct shared *shared, uint32_t queue,
                        uint64_t number)
{
    const uint64_t end_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    for (uint32_t rank = 1; rank <= SUBSCRIBERS; rank++)
        while (atomic_load(&shared->acknowledged[rank][queue]) < number) {
            FORK_CHECK(cox_now_ns() < end_ns,
                       "rank %" PRIu32 " sleeps through message %" PRIu64 " of queue %" PRIu32,
                       rank, number, queue);
            sched_yield();
        }
}

/* The next message is published when all have this one, so nothing else wakes a subscriber that
 * missed it. */
static void one_by_one_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    if (self->rank > 0) {
        subscriber_main(self, self->rank - 1);
        return;
    }
    struct own own = own_open(self);
    struct cox_publisher *publishers[QUEUES];
    uint64_t random = 77, number = 0;
    for (int i = 0; i < QUEUES; i++)
        publishers[i] = fixture_publisher(own.queues[i], own.host, own.domains, NULL);
    AWAIT(atomic_load(&shared->joined) >= SUBSCRIBERS);
    for (uint64_t user_data = 1; user_data <= MESSAGES + QUEUES; user_data++) {
        const bool is_last = user_data > MESSAGES;
        const uint32_t at = is_last ? (uint32_t)(user_data - MESSAGES - 1)
                                    : (uint32_t)(random_next(&random) % QUEUES);
        FORK_CHECK(fixture_publish(publishers[at], own.host, 1 + user_data % 4096,
                                   is_last ? LAST_USER_DATA : user_data, &number) == 0,
                   "publish");
        await_taken(self, shared, at, number);
    }
    for (int i = 0; i < QUEUES; i++)
        cox_publisher_free(publishers[i]);
    own_close(&own);
}

struct made {
    struct shared *shared;
    struct cox_domains *domains;
    struct cox_pool *pools[2];
    struct cox_queue *queues[QUEUES];
    /* In each queue, for each pool: leftover pins stay until these processes leave. */
    struct cox_publisher *publishers[QUEUES][2];
};

static struct made make(void)
{
    struct made made = {.shared = forks_share(sizeof *made.shared)};
    static const uint32_t kinds[2] = {COX_DOMAIN_HOST, COX_DOMAIN_BOUNCE};
    assert_int_equal(cox_domains_new(&made.domains), 0);
    for (int i = 0; i < 2; i++) {
        const struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                                 .domains = made.domains,
                                                 .domain = {kinds[i], 0},
                                                 .block_size = FIXTURE_BLOCK_SIZE,
                                                 .block_count = BLOCKS,
                                                 .owner_count_max = 32};
        assert_int_equal(cox_pool_create(&options, &made.pools[i], NULL), 0);
        cox_pool_fds(made.pools[i], made.shared->pool_fds[i]);
    }
    for (int i = 0; i < QUEUES; i++) {
        made.queues[i] = fixture_queue(DEPTH);
        made.shared->queue_fds[i] = cox_queue_fd(made.queues[i]);
        for (int k = 0; k < 2; k++)
            made.publishers[i][k] =
                fixture_publisher(made.queues[i], made.pools[k], made.domains, NULL);
    }
    return made;
}

static void show(void *context, const char *text)
{
    (void)context;
    print_message("  %s\n", text);
}

/* Asserts that nothing is pinned or referenced, and that every block can be allocated. */
static void unmake(struct made *made)
{
    print_message("%" PRIu64 " taken, %" PRIu64 " skipped, %" PRIu64 " copied, %" PRIu64 " gone\n",
                  atomic_load(&made->shared->taken), atomic_load(&made->shared->skipped),
                  atomic_load(&made->shared->copied), atomic_load(&made->shared->gone));
    assert_true(atomic_load(&made->shared->copied) > 0);
    for (int i = 0; i < QUEUES; i++)
        cox_queue_sweep(made->queues[i]);
    for (int k = 0; k < 2; k++)
        if (fixture_used(made->pools[k])) {
            for (int i = 0; i < QUEUES; i++)
                cox_queue_dump(made->queues[i], show, NULL);
            cox_pool_dump(made->pools[k], show, NULL);
            fail_msg("%" PRIu32 " blocks are pinned or referenced at the end",
                     fixture_used(made->pools[k]));
        }
    for (int i = 0; i < QUEUES; i++) {
        for (int k = 0; k < 2; k++)
            cox_publisher_free(made->publishers[i][k]);
        cox_queue_free(made->queues[i]);
    }
    for (int i = 0; i < 2; i++) {
        struct cox_block_ref refs[BLOCKS];
        for (int k = 0; k < BLOCKS; k++)
            assert_int_equal(cox_pool_allocate(made->pools[i], 1, &refs[k], NULL), 0);
        for (int k = 0; k < BLOCKS; k++)
            assert_int_equal(cox_pool_unref(made->pools[i], &refs[k], NULL), 0);
        cox_pool_free(made->pools[i]);
    }
    cox_domains_free(made->domains);
}

TEST(h6_h14_b36_a_waiter_on_several_queues_sleeps_through_nothing)
{
    struct made made = make();
    forks_run(1 + SUBSCRIBERS, one_by_one_main, made.shared);
    assert_int_equal(atomic_load(&made.shared->skipped), 0);
    assert_int_equal(atomic_load(&made.shared->taken), (MESSAGES + QUEUES) * SUBSCRIBERS);
    /* Three subscribers of another domain: one copies, two share its copy. */
    assert_int_equal(atomic_load(&made.shared->copied), MESSAGES + QUEUES);
    unmake(&made);
}

/* ---- kills at random moments ---- */

#define PUBLISHERS 3 /* two in the common pool, one in its own exported pool */

#define BATCH 3

/* No other message comes between. */
static int publish_batch(const struct forks_self *self, struct cox_publisher *publisher,
                         struct cox_pool *pool, uint64_t user_data)
{
    struct cox_publication batch[BATCH];
    uint32_t made = 0, count;
    int r = 0;
    for (; r == 0 && made < BATCH; made += r == 0) {
        batch[made] =
            (struct cox_publication){.length = 1 + user_data % 4096, .user_data = user_data + made};
        r = cox_pool_allocate(pool, FIXTURE_BLOCK_SIZE, &batch[made].ref, NULL);
        if (r == 0)
            fixture_fill(cox_pool_pointer(pool, &batch[made].ref), batch[made].length,
                         batch[made].user_data);
    }
    if (r == 0)
        r = cox_publisher_publish_batch(publisher, batch, BATCH, &count, NULL);
    for (uint32_t i = 0; r == 0 && i < BATCH; i++)
        FORK_CHECK(count == BATCH && batch[i].number == batch[0].number + i,
                   "message %" PRIu64 " behind %" PRIu64, batch[i].number, batch[0].number);
    for (uint32_t i = 0; i < made; i++)
        FORK_CHECK(cox_pool_unref(pool, &batch[i].ref, NULL) == 0, "unref");
    return r;
}

static void publish_for_ever(const struct forks_self *self)
{
    struct shared *shared = self->context;
    struct own own = own_open(self);
    static const struct cox_pool_options slabs = {.size = sizeof(struct cox_pool_options),
                                                  .strategy = COX_POOL_SLAB,
                                                  .block_size = 1024,
                                                  .slab_size = 16384,
                                                  .slabs_size = 32 * 4096,
                                                  .owner_count_max = 64,
                                                  .on_demand = true};
    struct cox_pool *mine = NULL;
    if (self->rank == 2)
        FORK_CHECK(cox_pool_create(&slabs, &mine, NULL) == 0, "pool");
    struct cox_pool *pool = mine ? mine : own.host;
    struct cox_publisher *publishers[QUEUES];
    uint64_t random = cox_now_ns() | 1;
    for (int i = 0; i < QUEUES; i++)
        publishers[i] = fixture_publisher(own.queues[i], pool, own.domains, own.exporter);
    while (!atomic_load(&shared->stops)) {
        const uint64_t user_data = random_next(&random) >> 1;
        const int r = self->rank == 1
                          ? publish_batch(self, publishers[user_data % QUEUES], pool, user_data)
                          : fixture_publish(publishers[user_data % QUEUES], pool,
                                            1 + user_data % 4096, user_data, NULL);
        FORK_CHECK(r == 0 || r == COX_FULL, "%s", cox_status_text(r));
        atomic_fetch_add(&shared->progress[self->rank], 1);
        if (r || user_data % 8 == 0)
            sched_yield();
    }
    for (int i = 0; i < QUEUES; i++)
        cox_publisher_free(publishers[i]);
    cox_pool_free(mine);
    own_close(&own);
}

static void doomed_main(const struct forks_self *self)
{
    if (self->rank < PUBLISHERS)
        publish_for_ever(self);
    else
        subscriber_main(self, self->rank - PUBLISHERS);
}

/* All live processes make progress, up to here. */
static void await_progress(struct shared *shared, uint32_t rank, uint64_t steps)
{
    const uint64_t end_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    const uint64_t until = atomic_load(&shared->progress[rank]) + steps;
    while (atomic_load(&shared->progress[rank]) < until) {
        if (cox_now_ns() >= end_ns)
            fail_msg("rank %" PRIu32 " does not go on", rank);
        sched_yield();
    }
}

TEST(b37_h8_h9_h20_many_at_once_and_killed)
{
    test_needs_processes();
    struct made made = make();
    struct forks forks;
    uint32_t places[PUBLISHERS + SUBSCRIBERS];
    uint64_t random = 4711;
    made.shared->for_ever = true;
    forks_start(&forks, PUBLISHERS + SUBSCRIBERS, doomed_main, made.shared);
    for (uint32_t rank = 0; rank < PUBLISHERS + SUBSCRIBERS; rank++)
        places[rank] = rank;
    for (int kills = 0; kills < KILLS; kills++) {
        const uint32_t rank = (uint32_t)(random_next(&random) % (PUBLISHERS + SUBSCRIBERS));
        await_progress(made.shared, rank, 1 + random_next(&random) % 100);
        kill(forks.pids[places[rank]], SIGKILL);
        assert_int_equal(forks_end(&forks, places[rank]), 128 + SIGKILL);
        places[rank] = forks.count;
        forks_add(&forks, rank, PUBLISHERS + SUBSCRIBERS, doomed_main, made.shared);
    }
    for (uint32_t rank = 0; rank < PUBLISHERS + SUBSCRIBERS; rank++)
        await_progress(made.shared, rank, 10);
    atomic_store(&made.shared->stops, true);
    for (uint32_t rank = 0; rank < PUBLISHERS; rank++)
        assert_int_equal(forks_end(&forks, places[rank]), 0);
    for (int i = 0; i < QUEUES; i++) {
        cox_pool_sweep(made.pools[0]);
        assert_ok(fixture_publish(made.publishers[i][0], made.pools[0], 100, LAST_USER_DATA, NULL));
    }
    for (uint32_t rank = PUBLISHERS; rank < PUBLISHERS + SUBSCRIBERS; rank++)
        assert_int_equal(forks_end(&forks, places[rank]), 0);
    unmake(&made);
}
