/*
 * queue_test: a queue between processes that have nothing but its handle: every byte that is taken
 * is the one that was published, and in the end nothing is held.
 */
#include "tests/unit/queue_fixture.h"
#include "forks.h"
#include "ranks.h"
#include "testing.h"

#define PUBLISHERS 2
#define SUBSCRIBERS 5 /* host, host, bounce, bounce, bounce with a pool of its own */
#define MESSAGES 1500

struct shared {
    struct cox_handle queue;
    /* host, bounce */
    int pool_fds[2][2];
    _Atomic uint32_t joined;
    _Atomic uint64_t taken, skipped, copied;
    _Atomic uint32_t done;
};

static struct cox_pool *attach_pool(const struct cox_domains *domains, const int fds[2])
{
    const struct cox_pool_attach_options options = {.size = sizeof(struct cox_pool_attach_options),
                                                    .domains = domains};
    struct cox_pool *pool = NULL;
    int r = cox_pool_attach(fds, &options, &pool, test_err());
    if (r)
        print_error("%s\n", test_error.text);
    COX_ASSERT(r == 0);
    return pool;
}

static struct cox_exporter *open_exporter(void)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .ptrace_policy = COX_PTRACE_ANY};
    struct cox_exporter *exporter = NULL;
    COX_ASSERT(cox_exporter_new(&options, &exporter, NULL) == 0);
    return exporter;
}

static struct cox_queue *open_queue(const struct forks_self *self, const struct cox_handle *handle)
{
    struct cox_queue *queue = NULL;
    int r = cox_queue_open(handle, NULL, cox_deadline_after_ms(TEST_PATIENCE_MS), NULL, &queue,
                           test_err());
    FORK_CHECK(r == 0, "%s", test_error.text);
    return queue;
}

static void publish_all(const struct forks_self *self, struct shared *shared,
                        const struct cox_domains *domains, struct cox_queue *queue)
{
    struct cox_pool *pool = attach_pool(domains, shared->pool_fds[0]);
    struct cox_exporter *exporter = open_exporter();
    struct cox_publisher *publisher = fixture_publisher(queue, pool, domains, exporter);
    const uint64_t end_ns = cox_deadline_after_ms(TEST_PATIENCE_MS * 3);
    AWAIT(atomic_load(&shared->joined) >= SUBSCRIBERS);
    for (uint64_t i = 1; i <= MESSAGES;) {
        uint64_t user_data = (uint64_t)self->rank << 32 | i;
        int r =
            fixture_publish(publisher, pool, 1 + user_data % FIXTURE_BLOCK_SIZE, user_data, NULL);
        FORK_CHECK(r == 0 || r == COX_FULL, "%s", cox_status_text(r));
        FORK_CHECK(cox_now_ns() < end_ns, "no room");
        i += r == 0;
        /* Neither all messages shall be skipped, nor none. */
        if (r || i % 64 < 32)
            sched_yield();
    }
    /* Its pool can be opened until all have its messages. */
    while (atomic_load(&shared->done) < SUBSCRIBERS) {
        FORK_CHECK(cox_now_ns() < end_ns, "no message was taken in time");
        sched_yield();
    }
    cox_publisher_free(publisher);
    cox_exporter_free(exporter);
    cox_pool_free(pool);
}

static void check_message(const struct forks_self *self, const struct cox_message *message,
                          uint64_t last[PUBLISHERS])
{
    const uint64_t from = message->user_data >> 32, i = message->user_data & UINT32_MAX;
    FORK_CHECK(from < PUBLISHERS, "user data %016" PRIx64, message->user_data);
    FORK_CHECK(i > last[from], "message %" PRIu64 " behind %" PRIu64, i, last[from]);
    FORK_CHECK(fixture_is_sound(message), "message %" PRIu64, message->number);
    last[from] = i;
}

static void take_all(const struct forks_self *self, struct shared *shared,
                     const struct cox_domains *domains, struct cox_queue *queue)
{
    const uint32_t which = self->rank - PUBLISHERS;
    struct cox_exporter *exporter = open_exporter();
    struct cox_pool *pool = NULL;
    if (which == 2 || which == 3)
        pool = attach_pool(domains, shared->pool_fds[1]);
    else if (which == 4)
        pool = fixture_pool(domains, COX_DOMAIN_BOUNCE, 4);
    struct cox_subscriber *subscriber = fixture_subscriber(queue, pool, NULL, 0, domains, exporter),
                          *ready;
    struct cox_queue_set *set;
    uint64_t last[PUBLISHERS] = {0}, taken = 0, skipped = 0, copied = 0, number = 0;
    FORK_CHECK(cox_queue_set_new(&set) == 0, "set");
    FORK_CHECK(cox_queue_set_add(set, subscriber, NULL) == 0, "set");
    atomic_fetch_add(&shared->joined, 1);
    const uint64_t end_ns = cox_deadline_after_ms(TEST_PATIENCE_MS * 3);
    /* The last message is never evicted. */
    while (number < PUBLISHERS * MESSAGES) {
        struct cox_message message;
        int r = cox_queue_set_wait(set, end_ns, &ready);
        FORK_CHECK(r == 0, "wait: %s; %" PRIu64 " taken, %" PRIu64 " skipped", cox_status_text(r),
                   taken, skipped);
        r = cox_subscriber_take(ready, &message, test_err());
        if (r == COX_EMPTY || r == COX_FULL)
            continue;
        FORK_CHECK(r == 0, "take: %s: %s", cox_status_text(r), test_error.text);
        check_message(self, &message, last);
        FORK_CHECK(message.number == number + 1 + message.skipped,
                   "message %" PRIu64 " behind %" PRIu64 ", %" PRIu64 " skipped", message.number,
                   number, message.skipped);
        number = message.number;
        taken++;
        skipped += message.skipped;
        copied += message.copied;
        fixture_let_go(&message);
    }
    FORK_CHECK(taken + skipped == PUBLISHERS * MESSAGES, "%" PRIu64 " taken, %" PRIu64 " skipped",
               taken, skipped);
    FORK_CHECK(which >= 2 || copied == 0, "a host subscriber copied");
    atomic_fetch_add(&shared->taken, taken);
    atomic_fetch_add(&shared->skipped, skipped);
    atomic_fetch_add(&shared->copied, copied);
    atomic_fetch_add(&shared->done, 1);
    cox_queue_set_free(set);
    cox_subscriber_free(subscriber);
    if (which == 4) /* its own pool: only its copies were in it, and those that others still read */
        cox_pool_sweep(pool);
    cox_pool_free(pool);
    cox_exporter_free(exporter);
}

static void stress_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    struct cox_domains *domains;
    FORK_CHECK(cox_domains_new(&domains) == 0, "domains");
    struct cox_queue *queue = open_queue(self, &shared->queue);
    if (self->rank < PUBLISHERS)
        publish_all(self, shared, domains, queue);
    else
        take_all(self, shared, domains, queue);
    cox_queue_free(queue);
    cox_domains_free(domains);
}

TEST(h1_h2_h5_h6_h19_b31_every_byte_arrives_or_is_skipped)
{
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_domains *domains;
    struct cox_queue *queue;
    struct cox_exporter *exporter = open_exporter();
    const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                              .depth = 64};
    const struct cox_pool_options pools[2] = {
        {.size = sizeof(struct cox_pool_options),
         .domain = {COX_DOMAIN_HOST, 0},
         .block_size = FIXTURE_BLOCK_SIZE,
         .block_count = 128,
         .owner_count_max = 64},
        {.size = sizeof(struct cox_pool_options),
         .domain = {COX_DOMAIN_BOUNCE, 0},
         .block_size = FIXTURE_BLOCK_SIZE,
         .block_count = 128,
         .owner_count_max = 64},
    };
    struct cox_pool *made[2];
    assert_int_equal(cox_domains_new(&domains), 0);
    for (int i = 0; i < 2; i++) {
        struct cox_pool_options with = pools[i];
        with.domains = domains;
        assert_int_equal(cox_pool_create(&with, &made[i], NULL), 0);
        cox_pool_fds(made[i], shared->pool_fds[i]);
    }
    assert_int_equal(cox_queue_create(&options, &queue, NULL), 0);
    assert_int_equal(cox_queue_export(queue, exporter, &shared->queue, NULL), 0);
    forks_run(PUBLISHERS + SUBSCRIBERS, stress_main, shared);
    print_message("%" PRIu64 " taken, %" PRIu64 " skipped, %" PRIu64 " copied\n",
                  atomic_load(&shared->taken), atomic_load(&shared->skipped),
                  atomic_load(&shared->copied));
    assert_true(atomic_load(&shared->taken) > SUBSCRIBERS);
    /* No endpoint is left, and nothing is pinned: any process may be the last. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(cox_queue_sweep(queue), 0);
        assert_int_equal(fixture_used(made[i]), 0);
        cox_pool_free(made[i]);
    }
    cox_queue_free(queue);
    cox_exporter_free(exporter);
    cox_domains_free(domains);
}

/* ---- after the creator has left ---- */

struct heir {
    struct cox_handle queue;
    int queue_fd, fds[2];
    _Atomic uint32_t step;
};

static void heir_main(const struct forks_self *self)
{
    struct heir *heir = self->context;
    struct cox_queue *queue = NULL;
    FORK_CHECK(cox_queue_attach(heir->queue_fd, NULL, &queue, NULL) == 0, "attach");
    struct cox_pool *pool = attach_pool(NULL, heir->fds);
    if (self->rank == 0) {
        struct cox_publisher *publisher = fixture_publisher(queue, pool, NULL, NULL);
        AWAIT(atomic_load(&heir->step) >= 1);
        FORK_CHECK(fixture_publish(publisher, pool, 100, 5, NULL) == 0, "publish");
        FORK_CHECK(fixture_publish(publisher, pool, 100, 6, NULL) == 0, "publish");
        atomic_store(&heir->step, 2);
        _exit(0); /* without leaving the queue */
    }
    struct cox_subscriber *subscriber = fixture_subscriber(queue, NULL, &pool, 1, NULL, NULL);
    atomic_store(&heir->step, 1);
    AWAIT(atomic_load(&heir->step) >= 3);
    for (uint64_t user_data = 5; user_data <= 6; user_data++) {
        struct cox_message message;
        cox_queue_sweep(queue);
        FORK_CHECK(cox_subscriber_take(subscriber, &message, NULL) == 0, "take");
        FORK_CHECK(message.user_data == user_data && fixture_is_sound(&message), "bytes");
        fixture_let_go(&message);
    }
    FORK_CHECK(fixture_used(pool) == 0, "held");
    cox_subscriber_free(subscriber);
    cox_queue_free(queue);
    cox_pool_free(pool);
}

TEST(h3_h17_h20_messages_outlive_their_publisher_and_their_maker)
{
    test_needs_processes();
    struct heir *heir = forks_share(sizeof *heir);
    struct cox_pool *pool = fixture_pool(NULL, COX_DOMAIN_HOST, 4);
    struct cox_queue *queue = fixture_queue(4);
    struct forks forks;
    cox_pool_fds(pool, heir->fds);
    heir->queue_fd = cox_queue_fd(queue);
    forks_start(&forks, 2, heir_main, heir);
    /* The creators of queue and pool are gone before the first take. */
    cox_queue_free(queue);
    cox_pool_free(pool);
    assert_int_equal(forks_end(&forks, 0), 0);
    atomic_store(&heir->step, 3);
    forks_wait(&forks);
}
