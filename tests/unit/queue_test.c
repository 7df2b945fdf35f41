/* A queue within one process: what is copied, which subscriber gets what, and when blocks are
 * unpinned. */
#include "pool_fixture.h"
#include "queue_fixture.h"

#include "memory/domain/domain_table.h"
#include "memory/pool/pool_layout.h"
#include "memory/queue/queue_internal.h"
#include "channel/base/peer.h"
#include "tests/lib/test.h"

static struct cox_domains *domains;
static struct cox_pool *host, *bounce;
static struct cox_queue *queue;
static struct cox_publisher *publisher;

static int setup(void **state)
{
    (void)state;
    assert_int_equal(cox_domains_new(&domains), 0);
    host = fixture_pool(domains, COX_DOMAIN_HOST, 32);
    bounce = fixture_pool(domains, COX_DOMAIN_BOUNCE, 32);
    queue = fixture_queue(8);
    publisher = fixture_publisher(queue, host, domains, NULL);
    return 0;
}

/* Nothing is pinned once the last endpoint is freed, whatever the test did. */
static int teardown(void **state)
{
    (void)state;
    publisher = cox_publisher_free(publisher);
    queue = cox_queue_free(queue);
    const uint32_t in_host = fixture_used(host), in_bounce = fixture_used(bounce);
    host = cox_pool_free(host);
    bounce = cox_pool_free(bounce);
    domains = cox_domains_free(domains);
    return in_host == 0 && in_bounce == 0 ? 0 : -1;
}

#define TEST(name) TEST_WITH(name, setup, teardown)

TEST_OWNED(cox_pool_free)
TEST_OWNED(cox_queue_free)
TEST_OWNED(cox_publisher_free)
TEST_OWNED(cox_subscriber_free)

static struct cox_pool *pool_new(uint32_t kind, uint32_t block_count)
{
    return test_own(fixture_pool(domains, kind, block_count), cox_pool_free_owned);
}

static struct cox_publisher *publisher_new(struct cox_queue *of, struct cox_pool *pool)
{
    return test_own(fixture_publisher(of, pool, domains, NULL), cox_publisher_free_owned);
}

static struct cox_queue *queue_new(const struct cox_queue_options *options)
{
    struct cox_queue *made = NULL;
    assert_ok(cox_queue_create(options, &made, test_err()));
    return test_own(made, cox_queue_free_owned);
}

static struct cox_queue *queue_again(struct cox_queue *of)
{
    struct cox_queue *attached = NULL;
    assert_ok(cox_queue_attach(cox_queue_fd(of), NULL, &attached, test_err()));
    return test_own(attached, cox_queue_free_owned);
}

/* It copies into the pool, which may be NULL. */
static struct cox_subscriber *subscriber_of(struct cox_queue *of, struct cox_pool *pool)
{
    return test_own(fixture_subscriber(of, pool, &host, 1, domains, NULL),
                    cox_subscriber_free_owned);
}

static struct cox_subscriber *subscriber_new(struct cox_pool *pool)
{
    return subscriber_of(queue, pool);
}

static struct cox_subscriber *host_subscriber(void)
{
    return subscriber_new(NULL);
}

static struct cox_subscriber *bounce_subscriber(void)
{
    return subscriber_new(bounce);
}

/* It can reach no pool. */
static struct cox_subscriber *strange_subscriber(void)
{
    return test_own(fixture_subscriber(queue, NULL, NULL, 0, domains, NULL),
                    cox_subscriber_free_owned);
}

static void publish(uint64_t user_data)
{
    uint64_t number = 0;
    assert_int_equal(fixture_publish(publisher, host, 100, user_data, &number), 0);
    assert_true(number > 0);
}

static struct cox_message take(struct cox_subscriber *subscriber, uint64_t user_data)
{
    struct cox_message message = {0};
    assert_ok(cox_subscriber_take(subscriber, &message, test_err()));
    assert_int_equal(message.user_data, user_data);
    assert_int_equal(message.length, 100);
    assert_true(fixture_is_sound(&message));
    return message;
}

static void take_and_let_go(struct cox_subscriber *subscriber, uint64_t user_data)
{
    const struct cox_message message = take(subscriber, user_data);
    fixture_let_go(&message);
}

static void take_nothing(struct cox_subscriber *subscriber)
{
    struct cox_message message;
    assert_int_equal(cox_subscriber_pending(subscriber), 0);
    assert_int_equal(cox_subscriber_take(subscriber, &message, NULL), COX_EMPTY);
}

/* ---- copies ---- */

TEST(h4_h5_h13_the_same_domain_takes_the_very_block)
{
    struct cox_subscriber *a = host_subscriber(), *b = host_subscriber();
    struct cox_block_ref ref;
    uint64_t number;
    assert_int_equal(cox_pool_allocate(host, 200, &ref, NULL), 0);
    unsigned char *bytes = cox_pool_pointer(host, &ref);
    fixture_fill(bytes, 100, 7);
    assert_int_equal(cox_publisher_publish(publisher, &ref, 100, 7, &number, NULL), 0);
    assert_int_equal(number, 1);
    struct cox_message of_a = take(a, 7), of_b = take(b, 7);
    assert_memory_equal(&of_a.ref, &ref, sizeof ref);
    assert_memory_equal(&of_b.ref, &ref, sizeof ref);
    assert_ptr_equal(of_a.bytes, bytes);
    assert_ptr_equal(of_a.pool, host);
    assert_false(of_a.copied);
    assert_int_equal(fixture_used(host), 1);
    fixture_let_go(&of_a);
    fixture_let_go(&of_b);
    assert_int_equal(fixture_used(host), 1); /* the publisher's reference */
    assert_int_equal(cox_pool_unref(host, &ref, NULL), 0);
    assert_int_equal(fixture_used(host), 0);
}

TEST(h6_the_first_taker_of_another_domain_copies_for_all)
{
    struct cox_subscriber *takers[3];
    struct cox_message messages[3];
    for (int i = 0; i < 3; i++)
        takers[i] = bounce_subscriber();
    publish(9);
    for (int i = 0; i < 3; i++)
        messages[i] = take(takers[i], 9);
    assert_true(messages[0].copied);
    assert_false(messages[1].copied);
    assert_false(messages[2].copied);
    assert_null(messages[0].bytes);
    assert_ptr_equal(messages[1].pool, bounce);
    assert_memory_equal(&messages[1].ref, &messages[0].ref, sizeof messages[0].ref);
    assert_memory_equal(&messages[2].ref, &messages[0].ref, sizeof messages[0].ref);
    assert_int_equal(fixture_used(bounce), 1);
    assert_int_equal(fixture_used(host), 0); /* taken by all subscribers: over */
    for (int i = 0; i < 3; i++) {
        fixture_let_go(&messages[i]);
    }
    assert_int_equal(fixture_used(bounce), 0);
}

/* Another pool of the domain, which this subscriber cannot open. */
TEST(h6_a_copy_in_a_pool_that_cannot_be_opened_is_made_again)
{
    struct cox_pool *other = pool_new(COX_DOMAIN_BOUNCE, 4);
    struct cox_subscriber *first = bounce_subscriber();
    struct cox_subscriber *second = subscriber_new(other);
    publish(3);
    struct cox_message of_first = take(first, 3), of_second = take(second, 3);
    assert_true(of_first.copied);
    assert_true(of_second.copied);
    assert_ptr_equal(of_second.pool, other);
    fixture_let_go(&of_first);
    fixture_let_go(&of_second);
    test_release(second);
    test_release(first);
    assert_int_equal(fixture_used(other), 0);
}

TEST(h6_no_room_for_the_copy_leaves_the_message)
{
    struct cox_pool *small = pool_new(COX_DOMAIN_BOUNCE, 1);
    struct cox_subscriber *taker = subscriber_new(small);
    struct cox_message message;
    struct cox_block_ref ref;
    publish(1);
    assert_int_equal(cox_pool_allocate(small, 10, &ref, NULL), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(cox_subscriber_take(taker, &message, NULL), COX_FULL);
    assert_int_equal(cox_subscriber_pending(taker), 1);
    assert_int_equal(cox_pool_unref(small, &ref, NULL), 0);
    message = take(taker, 1);
    assert_true(message.copied);
    fixture_let_go(&message);
    test_release(taker);
    assert_int_equal(fixture_used(small), 0);
}

TEST(h6_without_a_pool_other_domains_are_refused_with_words)
{
    struct cox_publisher *remote = publisher_new(queue, bounce);
    struct cox_subscriber *taker = strange_subscriber();
    struct cox_message message;
    assert_int_equal(fixture_publish(remote, bounce, 100, 5, NULL), 0);
    assert_refused(cox_subscriber_take(taker, &message, test_err()), COX_UNSUPPORTED, "no pool");
    take_nothing(taker); /* it counts as taken */
    assert_int_equal(fixture_used(bounce), 0);
}

/* ---- as many domains as there may be ---- */

#define OWN_KIND 64
#define OWN_COUNT (COX_DOMAIN_COUNT_MAX - 2) /* without host and bounce */

static struct cox_pool *pool_on(const struct cox_domains *table, struct cox_domain_id id,
                                bool on_demand)
{
    const struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                             .domains = table,
                                             .domain = id,
                                             .block_size = FIXTURE_BLOCK_SIZE,
                                             .block_count = 4,
                                             .on_demand = on_demand};
    struct cox_pool *pool = NULL;
    assert_ok(cox_pool_create(&options, &pool, test_err()));
    return test_own(pool, cox_pool_free_owned);
}

/* Each domain has its own bit of the mask, also the last one. */
TEST(h6_h12_a_message_has_a_copy_in_each_of_32_domains)
{
    const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                              .domain_count_max = COX_DOMAIN_COUNT_MAX,
                                              .subscriber_count_max = 80,
                                              .pool_count_max = 40};
    struct cox_pool *pools[COX_DOMAIN_COUNT_MAX];
    struct cox_subscriber *takers[2][COX_DOMAIN_COUNT_MAX], *none = NULL;
    struct cox_message messages[2][COX_DOMAIN_COUNT_MAX];
    struct cox_domains *others;
    assert_int_equal(
        cox_domains_add(domains, OWN_KIND, OWN_COUNT, &cox_domain_bounce_functions, NULL, NULL), 0);
    struct cox_queue *wide = queue_new(&options);
    struct cox_publisher *from = publisher_new(wide, host);
    pools[0] = pool_new(COX_DOMAIN_HOST, 2);
    pools[1] = pool_new(COX_DOMAIN_BOUNCE, 2);
    for (uint32_t i = 0; i < OWN_COUNT; i++)
        pools[2 + i] = pool_on(domains, (struct cox_domain_id){OWN_KIND, i}, false);
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < COX_DOMAIN_COUNT_MAX; i++)
            takers[round][i] = subscriber_of(wide, pools[i]);
    assert_int_equal(fixture_publish(from, host, 100, 9, NULL), 0);
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < COX_DOMAIN_COUNT_MAX; i++) {
            messages[round][i] = take(takers[round][i], 9);
            if (messages[round][i].copied != (round == 0 && i > 0))
                fail_msg("domain %" PRIu32 ", taker %d", i, round);
        }
    /* One more domain, of another process with other domains. */
    assert_int_equal(cox_domains_new(&others), 0);
    assert_int_equal(
        cox_domains_add(others, OWN_KIND + 1, 1, &cox_domain_bounce_functions, NULL, NULL), 0);
    struct cox_pool *strange = pool_on(others, (struct cox_domain_id){OWN_KIND + 1, 0}, false);
    const struct cox_subscriber_options late = {
        .size = sizeof(struct cox_subscriber_options), .pool = strange, .domains = others};
    assert_refused(cox_subscriber_new(wide, &late, &none, test_err()), COX_FULL, "32 domains");
    test_release(strange);
    cox_domains_free(others);
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < COX_DOMAIN_COUNT_MAX; i++)
            fixture_let_go(&messages[round][i]);
    /* Taken by all subscribers: all 32 copies are unpinned while all endpoints exist. */
    assert_int_equal(fixture_used(host), 0);
    for (uint32_t i = 0; i < COX_DOMAIN_COUNT_MAX; i++)
        assert_int_equal(fixture_used(pools[i]), 0);
}

/* ---- a domain that fails ---- */

static struct cox_pool *failing_pool(void)
{
    failing = (struct failing){0};
    assert_int_equal(cox_domains_add(domains, OWN_KIND, 1, &failing_functions, NULL, NULL), 0);
    return pool_on(domains, (struct cox_domain_id){OWN_KIND, 0}, true);
}

TEST(h6_h28_a_domain_without_memory_leaves_the_message)
{
    struct cox_pool *pool = failing_pool();
    struct cox_subscriber *first = subscriber_new(pool);
    struct cox_subscriber *second = subscriber_new(pool);
    struct cox_message message;
    publish(1);
    failing.commit = COX_NO_SPACE;
    for (int i = 0; i < 3; i++) {
        assert_refused(cox_subscriber_take(first, &message, test_err()), COX_NO_SPACE, "today");
        assert_int_equal(cox_subscriber_take(second, &message, NULL), COX_NO_SPACE);
    }
    assert_int_equal(cox_subscriber_pending(first), 1);
    assert_int_equal(fixture_used(pool), 0);
    failing.commit = 0;
    message = take(second, 1);
    assert_true(message.copied);
    fixture_let_go(&message);
    message = take(first, 1);
    assert_false(message.copied);
    fixture_let_go(&message);
    assert_int_equal(fixture_used(host), 0);
    assert_int_equal(fixture_used(pool), 0);
}

/* The message counts as taken where the copy failed; the next subscriber makes the copy, for all
 * after it. */
TEST(h6_h26_a_copy_that_fails_is_reported_and_the_next_taker_makes_it)
{
    struct cox_pool *pool = failing_pool();
    struct cox_subscriber *takers[3];
    struct cox_message message;
    for (int i = 0; i < 3; i++)
        takers[i] = subscriber_new(pool);
    publish(1);
    failing.copy_to = -EIO;
    assert_refused(cox_subscriber_take(takers[0], &message, test_err()), -EIO, "today");
    assert_int_equal(fixture_used(pool), 0);
    assert_int_equal(fixture_used(host), 1);
    take_nothing(takers[0]);
    failing.copy_to = 0;
    struct cox_message of_second = take(takers[1], 1), of_third = take(takers[2], 1);
    assert_true(of_second.copied);
    assert_false(of_third.copied);
    fixture_let_go(&of_second);
    fixture_let_go(&of_third);
    assert_int_equal(fixture_used(pool), 0);
    assert_int_equal(fixture_used(host), 0);
}

/* A pool that this subscriber neither has nor can open. */
TEST(h5_what_cannot_be_reached_is_reported_once)
{
    struct cox_subscriber *stranger = strange_subscriber();
    struct cox_message message;
    publish(1);
    publish(2);
    assert_int_equal(cox_subscriber_take(stranger, &message, NULL), COX_PEER_DEAD);
    assert_int_equal(cox_subscriber_take(stranger, &message, NULL), COX_PEER_DEAD);
    take_nothing(stranger);
    assert_int_equal(fixture_used(host), 0);
}

static int fds_open(void)
{
    return test_entry_count("/proc/self/fd", "", "");
}

/* Short-lived publishers, each with a pool of its own. */
TEST(h13_b15_pools_that_are_over_do_not_pile_up)
{
    struct cox_subscriber *stays = strange_subscriber();
    struct cox_message kept = {0};
    int open = 0;
    for (uint64_t turn = 1; turn <= 100; turn++) {
        struct cox_exporter *exporter = NULL;
        assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
        struct cox_pool *pool = pool_new(COX_DOMAIN_HOST, 4);
        struct cox_publisher *comes = fixture_publisher(queue, pool, domains, exporter);
        struct cox_message message;
        assert_int_equal(fixture_publish(comes, pool, 64, turn, NULL), 0);
        assert_int_equal(cox_subscriber_take(stays, &message, NULL), 0);
        assert_int_equal(message.user_data, turn);
        /* A reference to the tenth is kept: its bytes stay. */
        if (turn == 10)
            kept = message;
        else
            fixture_let_go(&message);
        cox_publisher_free(comes);
        test_release(pool);
        cox_exporter_free(exporter);
        if (turn == 40)
            open = fds_open();
    }
    assert_true(fds_open() <= open);
    assert_true(fixture_is_sound(&kept));
    fixture_let_go(&kept);
}

/* ---- which messages a subscriber gets ---- */

TEST(h7_nothing_there_is_an_reply_of_its_own)
{
    struct cox_subscriber *taker = host_subscriber();
    take_nothing(taker);
    publish(1);
    assert_int_equal(cox_subscriber_pending(taker), 1);
    take_and_let_go(taker, 1);
    take_nothing(taker);
}

TEST(h8_b32_a_slow_subscriber_skips_to_what_is_kept)
{
    struct cox_subscriber *slow = host_subscriber(), *fast = host_subscriber();
    for (uint64_t user_data = 1; user_data <= 20; user_data++) {
        publish(user_data);
        struct cox_message message = take(fast, user_data);
        assert_int_equal(message.number, user_data);
        assert_int_equal(message.skipped, 0);
        fixture_let_go(&message);
    }
    /* Evicted messages are unpinned. */
    assert_int_equal(fixture_used(host), 8);
    assert_int_equal(cox_subscriber_pending(slow), 8);
    for (uint64_t user_data = 13; user_data <= 20; user_data++) {
        struct cox_message message = take(slow, user_data);
        assert_int_equal(message.skipped, user_data == 13 ? 12 : 0);
        assert_int_equal(message.number, user_data);
        fixture_let_go(&message);
        assert_int_equal(fixture_used(host), 20 - user_data);
    }
    take_nothing(slow);
}

TEST(h9_the_last_taker_frees_all_copies_at_once)
{
    struct cox_subscriber *near = host_subscriber(), *far = bounce_subscriber();
    publish(4);
    assert_int_equal(fixture_used(host), 1);
    struct cox_message of_far = take(far, 4);
    fixture_let_go(&of_far);
    assert_int_equal(fixture_used(host), 1);
    assert_int_equal(fixture_used(bounce), 1);
    struct cox_message of_near = take(near, 4);
    assert_int_equal(fixture_used(host), 1); /* the subscriber's reference */
    assert_int_equal(fixture_used(bounce), 0);
    fixture_let_go(&of_near);
    assert_int_equal(fixture_used(host), 0);
}

TEST(h9_leaving_counts_as_having_skipped_everything)
{
    struct cox_subscriber *stays = host_subscriber(), *leaves = host_subscriber();
    for (uint64_t user_data = 1; user_data <= 5; user_data++)
        publish(user_data);
    for (uint64_t user_data = 1; user_data <= 3; user_data++) {
        take_and_let_go(stays, user_data);
    }
    assert_int_equal(fixture_used(host), 5);
    test_release(leaves);
    assert_int_equal(fixture_used(host), 2);
    test_release(stays);
    assert_int_equal(fixture_used(host), 0);
}

/* Two attachments to one queue in one process, with one pool, are independent. */
TEST(h9_b37_of_two_in_one_process_the_first_to_leave_ends_nothing)
{
    struct cox_pool *pool = pool_new(COX_DOMAIN_HOST, 8);
    struct cox_queue *two = queue_again(queue);
    struct cox_message message;
    struct cox_publisher *first = publisher_new(queue, pool), *second = publisher_new(two, pool);
    struct cox_subscriber *subscriber =
        test_own(fixture_subscriber(two, NULL, &pool, 1, domains, NULL), cox_subscriber_free_owned);
    assert_int_equal(fixture_publish(second, pool, 100, 7, NULL), 0);
    test_release(first);
    publisher = cox_publisher_free(publisher);
    queue = cox_queue_free(queue);
    assert_int_equal(fixture_used(pool), 1);
    assert_int_equal(cox_subscriber_take(subscriber, &message, NULL), 0);
    assert_true(fixture_is_sound(&message));
    fixture_let_go(&message);
    assert_int_equal(fixture_publish(second, pool, 100, 8, NULL), 0);
    /* The last one ends it. */
    test_release(second);
    assert_int_equal(fixture_used(pool), 1);
    test_release(subscriber);
    assert_int_equal(fixture_used(pool), 0);
}

static void *thread_join_stuck(void *argument)
{
    struct cox_pool *pool = argument;
    const struct cox_publisher_options options = {
        .size = sizeof(struct cox_publisher_options), .pool = pool, .domains = domains};
    struct cox_publisher *none = NULL;
    int r = cox_publisher_new(queue, &options, &none, NULL);
    cox_publisher_free(none);
    return (void *)(intptr_t)r;
}

/* A process is stopped while it changes the queues of a pool: a join of that pool waits for it,
 * other users of the queue do not. */
TEST(b33_b36_a_process_that_waits_to_join_a_pool_delays_no_other)
{
    struct cox_pool *pool = pool_new(COX_DOMAIN_HOST, 8);
    uint64_t start, slowest_ns = UINT64_MAX;
    pthread_t thread;
    void *reply = NULL;
    int fds[2];
    cox_pool_fds(pool, fds);
    assert_int_equal(cox_peer_start_time(getppid(), &start), 0);
    struct cox_pool_layout_header *header =
        mmap(NULL, COX_POOL_PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    assert_ptr_not_equal(header, MAP_FAILED);
    atomic_store(&header->queues_lock, cox_pool_identity(COX_POOL_OWNER_LIVE, getppid(), start));
    /* Less than the second that the other one waits. A loaded machine may delay one try. */
    const uint64_t bound_ns = 500 * COX_NSEC_PER_MSEC;
    for (int tries = 0; tries < 3 && slowest_ns >= bound_ns; tries++) {
        assert_int_equal(pthread_create(&thread, NULL, thread_join_stuck, pool), 0);
        slowest_ns = 0;
        do {
            const uint64_t begin_ns = cox_now_ns();
            publish(1);
            assert_int_equal(cox_queue_sweep(queue), 0);
            const uint64_t took_ns = cox_now_ns() - begin_ns;
            slowest_ns = took_ns > slowest_ns ? took_ns : slowest_ns;
        } while (pthread_tryjoin_np(thread, &reply) != 0);
        assert_int_equal((intptr_t)reply, COX_BUSY);
    }
    assert_true(slowest_ns < bound_ns);
    atomic_store(&header->queues_lock, 0);
    munmap(header, COX_POOL_PAGE_SIZE);
}

/* Reading a hole in huge pages raises SIGBUS if no huge page is free. */
TEST(b14_memory_of_huge_pages_is_refused)
{
    struct cox_queue *none = NULL;
    int fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd < 0)
        skip();
    test_own_fd(fd);
    if (fchmod(fd, 0600) < 0 || ftruncate(fd, 64 << 20) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        skip();
    assert_int_equal(cox_queue_attach(fd, NULL, &none, NULL), COX_DENIED);
}

TEST(h9_without_subscribers_nothing_is_kept)
{
    publish(1);
    assert_int_equal(fixture_used(host), 0);
    struct cox_subscriber *taker = host_subscriber();
    publish(2);
    struct cox_message message = take(taker, 2);
    assert_int_equal(message.number, 2);
    assert_int_equal(message.skipped, 0);
    fixture_let_go(&message);
}

TEST(h10_a_late_subscriber_sees_only_what_is_new)
{
    struct cox_subscriber *early = host_subscriber();
    publish(1);
    publish(2);
    struct cox_subscriber *late = host_subscriber();
    take_nothing(late);
    publish(3);
    struct cox_message message = take(late, 3);
    assert_int_equal(message.skipped, 0);
    fixture_let_go(&message);
    assert_int_equal(cox_subscriber_pending(early), 3);
}

TEST(h1_h4_several_publishers_share_one_order)
{
    struct cox_publisher *remote = publisher_new(queue, bounce);
    struct cox_pool *both[] = {host, bounce};
    struct cox_pool *own = pool_new(COX_DOMAIN_HOST, 4);
    struct cox_subscriber *taker =
        test_own(fixture_subscriber(queue, own, both, 2, domains, NULL), cox_subscriber_free_owned);
    uint64_t number;
    assert_int_equal(fixture_publish(publisher, host, 100, 1, &number), 0);
    assert_int_equal(number, 1);
    assert_int_equal(fixture_publish(remote, bounce, 100, 2, &number), 0);
    assert_int_equal(number, 2);
    assert_int_equal(fixture_publish(publisher, host, 100, 3, &number), 0);
    for (uint64_t user_data = 1; user_data <= 3; user_data++) {
        struct cox_message message = take(taker, user_data);
        assert_int_equal(message.number, user_data);
        assert_int_equal(message.copied, user_data == 2);
        assert_ptr_equal(message.pool, user_data == 2 ? own : host);
        fixture_let_go(&message);
    }
    test_release(taker);
    test_release(remote);
    assert_int_equal(fixture_used(own), 0);
}

/* ---- batches ---- */

static struct cox_publication publication(uint64_t user_data)
{
    struct cox_publication made = {.length = 100, .user_data = user_data};
    assert_int_equal(cox_pool_allocate(host, 100, &made.ref, NULL), 0);
    fixture_fill(cox_pool_pointer(host, &made.ref), 100, user_data);
    return made;
}

static void let_go(const struct cox_publication *publications, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(cox_pool_unref(host, &publications[i].ref, NULL), 0);
}

TEST(a29_h4_h5_a_batch_is_published_and_taken_in_its_order)
{
    struct cox_subscriber *near = host_subscriber(), *far = bounce_subscriber();
    struct cox_publication batch[9];
    struct cox_message messages[9];
    uint32_t count = 77;
    assert_int_equal(cox_subscriber_take_batch(near, messages, 9, &count, NULL), COX_EMPTY);
    assert_int_equal(count, 0);
    for (uint64_t turn = 0; turn < 3; turn++) { /* each evicts messages that far has not taken */
        for (uint64_t i = 0; i < 8; i++)
            batch[i] = publication(10 * turn + i);
        assert_int_equal(cox_publisher_publish_batch(publisher, batch, 8, &count, NULL), 0);
        assert_int_equal(count, 8);
        let_go(batch, 8);
        for (uint64_t i = 0; i < 8; i++)
            assert_int_equal(batch[i].number, 8 * turn + i + 1);
        assert_int_equal(cox_subscriber_take_batch(near, messages, 3, &count, NULL), 0);
        assert_int_equal(count, 3);
        assert_int_equal(cox_subscriber_take_batch(near, messages + 3, 6, &count, NULL), 0);
        assert_int_equal(count, 5);
        for (uint64_t i = 0; i < 8; i++) {
            assert_int_equal(messages[i].number, batch[i].number);
            assert_int_equal(messages[i].user_data, batch[i].user_data);
            assert_true(fixture_is_sound(&messages[i]));
            fixture_let_go(&messages[i]);
        }
    }
    assert_int_equal(cox_subscriber_take_batch(far, messages, 9, &count, NULL), 0);
    assert_int_equal(count, 8);
    assert_int_equal(messages[0].skipped, 16);
    for (uint64_t i = 0; i < 8; i++) {
        assert_int_equal(messages[i].user_data, 20 + i);
        assert_true(fixture_is_sound(&messages[i]));
        fixture_let_go(&messages[i]);
    }
    assert_int_equal(fixture_used(host), 0);
    assert_int_equal(fixture_used(bounce), 0);
}

TEST(a29_h4_b33_a_batch_that_fails_returns_how_far_it_came)
{
    struct cox_subscriber *taker = host_subscriber();
    struct cox_publication batch[9];
    struct cox_message messages[9];
    uint32_t count = 77;
    for (uint64_t i = 0; i < 9; i++)
        batch[i] = publication(i);
    assert_refused(cox_publisher_publish_batch(publisher, batch, 9, &count, test_err()),
                   COX_INVALID, "depth 8");
    assert_int_equal(count, 0);
    assert_int_equal(cox_publisher_publish_batch(publisher, batch, 0, &count, NULL), 0);
    /* Errors that can be found early are found first. */
    batch[2].length = UINT64_MAX;
    assert_int_equal(cox_publisher_publish_batch(publisher, batch, 3, &count, NULL), COX_INVALID);
    batch[2].length = 100;
    batch[2].ref.pool++;
    assert_int_equal(cox_publisher_publish_batch(publisher, batch, 3, &count, NULL), COX_NOT_FOUND);
    batch[2].ref.pool--;
    assert_int_equal(count, 0);
    take_nothing(taker);
    /* Other errors are found at their message. */
    batch[2].ref.epoch++;
    assert_int_equal(cox_publisher_publish_batch(publisher, batch, 5, &count, NULL), COX_STALE);
    batch[2].ref.epoch--;
    assert_int_equal(count, 2);
    assert_int_equal(atomic_load(&queue->layout->lock.lock_owner), 0);
    assert_int_equal(cox_subscriber_take_batch(taker, messages, 9, &count, NULL), 0);
    assert_int_equal(count, 2);
    for (uint64_t i = 0; i < 2; i++) {
        assert_int_equal(messages[i].user_data, i);
        fixture_let_go(&messages[i]);
    }
    let_go(batch, 9);
    /* Each inaccessible message is reported, and the caller owns those before it. */
    struct cox_publisher *remote = publisher_new(queue, bounce);
    publish(1);
    assert_int_equal(fixture_publish(remote, bounce, 100, 2, NULL), 0);
    publish(3);
    assert_int_equal(cox_subscriber_take_batch(taker, messages, 9, &count, NULL), COX_UNSUPPORTED);
    assert_int_equal(count, 1);
    fixture_let_go(&messages[0]);
    assert_int_equal(cox_subscriber_take_batch(taker, messages, 9, &count, NULL), 0);
    assert_int_equal(count, 1);
    assert_int_equal(messages[0].user_data, 3);
    fixture_let_go(&messages[0]);
}

/* ---- errors ---- */

TEST(h4_publish_refuses_what_is_no_block_of_its_pool)
{
    struct cox_subscriber *taker = host_subscriber();
    struct cox_block_ref ref, foreign;
    uint64_t number = 77;
    assert_int_equal(cox_pool_allocate(host, 100, &ref, NULL), 0);
    assert_int_equal(cox_pool_allocate(bounce, 100, &foreign, NULL), 0);
    assert_int_equal(cox_publisher_publish(publisher, &ref, 101, 0, &number, NULL), COX_INVALID);
    assert_int_equal(cox_publisher_publish(publisher, &foreign, 1, 0, &number, NULL),
                     COX_NOT_FOUND);
    struct cox_block_ref wrong = ref;
    wrong.block = 1000;
    assert_int_equal(cox_publisher_publish(publisher, &wrong, 1, 0, &number, NULL), COX_INVALID);
    wrong = ref;
    wrong.epoch++;
    assert_int_equal(cox_publisher_publish(publisher, &wrong, 1, 0, &number, NULL), COX_STALE);
    assert_int_equal(number, 77);
    take_nothing(taker);
    /* None of them kept the lock (B33), or a pin. */
    assert_int_equal(atomic_load(&queue->layout->lock.lock_owner), 0);
    assert_int_equal(cox_pool_unref(host, &ref, NULL), 0);
    assert_int_equal(cox_pool_unref(bounce, &foreign, NULL), 0);
    assert_int_equal(fixture_used(host), 0);
}

/* A block with too many pins already: publish fails, and evicts nothing. */
TEST(h4_b33_a_publish_that_fails_changes_nothing)
{
    struct cox_subscriber *taker = host_subscriber();
    struct cox_block_ref ref;
    uint64_t number;
    for (uint64_t user_data = 1; user_data <= 4; user_data++)
        publish(user_data);
    assert_int_equal(cox_pool_allocate(host, 100, &ref, NULL), 0);
    fixture_fill(cox_pool_pointer(host, &ref), 100, 5);
    for (int i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
        assert_int_equal(cox_publisher_publish(publisher, &ref, 100, 5, &number, NULL), 0);
    assert_int_equal(cox_publisher_publish(publisher, &ref, 100, 5, &number, NULL), COX_FULL);
    assert_int_equal(atomic_load(&queue->layout->lock.lock_owner), 0);
    for (uint64_t user_data = 1; user_data <= 8; user_data++) {
        struct cox_message message = take(taker, user_data <= 4 ? user_data : 5);
        assert_int_equal(message.skipped, 0);
        fixture_let_go(&message);
    }
    assert_int_equal(cox_pool_unref(host, &ref, NULL), 0);
}

TEST(h12_a29_limits_are_refused_with_their_numbers)
{
    const struct {
        struct cox_queue_options options;
        const char *limit;
    } wrong[] = {
        {{.depth = 3}, "power of two"},
        {{.depth = 2 * COX_QUEUE_DEPTH_MAX}, "65536"},
        {{.domain_count_max = 33}, "32"},
        {{.publisher_count_max = 65536}, "65535"},
        {{.subscriber_count_max = 65536}, "65535"},
        {{.pool_count_max = 1025}, "1024"},
    };
    struct cox_queue *none = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct cox_queue_options options = wrong[i].options;
        options.size = sizeof options;
        assert_refused(cox_queue_create(&options, &none, test_err()), COX_INVALID, wrong[i].limit);
        assert_null(none);
    }
    const struct cox_queue_options largest = {.size = sizeof(struct cox_queue_options),
                                              .depth = 2,
                                              .domain_count_max = 32,
                                              .publisher_count_max = 65535,
                                              .subscriber_count_max = 65535};
    queue_new(&largest);
}

TEST(h12_one_endpoint_too_many_gets_the_limit)
{
    const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                              .depth = 2,
                                              .domain_count_max = 1,
                                              .publisher_count_max = 1,
                                              .subscriber_count_max = 2};
    const struct cox_subscriber_options near = {
        .size = sizeof(struct cox_subscriber_options), .pools = &host, .pool_count = 1};
    const struct cox_subscriber_options far = {
        .size = sizeof(struct cox_subscriber_options), .pool = bounce, .domains = domains};
    const struct cox_publisher_options publishing = {.size = sizeof(struct cox_publisher_options),
                                                     .pool = host};
    struct cox_publisher *first, *none = NULL;
    struct cox_subscriber *a, *b, *c = NULL;
    struct cox_queue *small = queue_new(&options);
    assert_int_equal(cox_publisher_new(small, &publishing, &first, NULL), 0);
    assert_refused(cox_publisher_new(small, &publishing, &none, test_err()), COX_FULL,
                   "1 publishers");
    assert_int_equal(cox_subscriber_new(small, &near, &a, NULL), 0);
    assert_refused(cox_subscriber_new(small, &far, &c, test_err()), COX_FULL, "1 domains");
    assert_int_equal(cox_subscriber_new(small, &near, &b, NULL), 0);
    assert_refused(cox_subscriber_new(small, &near, &c, test_err()), COX_FULL, "2 subscribers");
    assert_null(c);
    /* A slot that was left is reused, and so is a domain. */
    cox_subscriber_free(b);
    assert_int_equal(cox_subscriber_new(small, &near, &b, NULL), 0);
    cox_subscriber_free(a);
    cox_subscriber_free(b);
    cox_publisher_free(first);
    assert_int_equal(cox_subscriber_new(small, &far, &c, NULL), 0);
    cox_subscriber_free(c);
}

/* 65,535 of each, all but two written into the memory directly, and each counts. */
TEST(h12_the_65536th_endpoint_is_refused)
{
    const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                              .depth = 2,
                                              .publisher_count_max = 65535,
                                              .subscriber_count_max = 65535};
    const struct cox_subscriber_options near = {
        .size = sizeof(struct cox_subscriber_options), .pools = &host, .pool_count = 1};
    const struct cox_publisher_options publishing = {.size = sizeof(struct cox_publisher_options),
                                                     .pool = host};
    struct cox_publisher *last, *none = NULL;
    struct cox_subscriber *taker, *no_taker = NULL;
    struct cox_message message;
    uint64_t number;
    struct cox_queue *large = queue_new(&options);
    for (uint32_t i = 0; i + 1 < COX_QUEUE_ENDPOINT_COUNT_MAX; i++) {
        atomic_store(&cox_queue_publisher_at(large, i)->publisher_process, large->identity);
        atomic_store(&cox_queue_subscriber_at(large, i)->subscriber_next, 1);
        atomic_store(&cox_queue_subscriber_at(large, i)->subscriber_process, large->identity);
    }
    assert_int_equal(cox_publisher_new(large, &publishing, &last, NULL), 0);
    assert_refused(cox_publisher_new(large, &publishing, &none, test_err()), COX_FULL,
                   "65535 publishers");
    assert_int_equal(cox_subscriber_new(large, &near, &taker, NULL), 0);
    assert_refused(cox_subscriber_new(large, &near, &no_taker, test_err()), COX_FULL,
                   "65535 subscribers");
    assert_int_equal(fixture_publish(last, host, 100, 3, &number), 0);
    assert_int_equal(COX_QUEUE_LOAD(cox_queue_row_at(large, number)->row_interest), 65535);
    message = take(taker, 3);
    fixture_let_go(&message);
    assert_int_equal(COX_QUEUE_LOAD(cox_queue_row_at(large, number)->row_interest), 65534);
    assert_int_equal(fixture_used(host), 1);
    for (uint32_t i = 0; i + 1 < COX_QUEUE_ENDPOINT_COUNT_MAX; i++) {
        atomic_store(&cox_queue_publisher_at(large, i)->publisher_process, 0);
        atomic_store(&cox_queue_subscriber_at(large, i)->subscriber_process, 0);
    }
    cox_subscriber_free(taker);
    assert_int_equal(fixture_used(host), 0);
    cox_publisher_free(last);
}

/* Entries are reused, but not those of a message. */
TEST(h12_pools_come_and_go)
{
    const struct cox_queue_options options = {
        .size = sizeof(struct cox_queue_options), .depth = 4, .pool_count_max = 2};
    struct cox_queue *small = queue_new(&options);
    struct cox_publisher *of_host = publisher_new(small, host), *none = NULL;
    struct cox_subscriber *taker = subscriber_of(small, NULL);
    uint64_t number;
    assert_int_equal(fixture_publish(of_host, host, 100, 1, &number), 0);
    test_release(of_host);
    for (int i = 0; i < 8; i++) {
        struct cox_pool *passing = pool_new(COX_DOMAIN_HOST, 1);
        test_release(publisher_new(small, passing));
        test_release(passing);
    }
    publisher_new(small, pool_new(COX_DOMAIN_HOST, 1));
    const struct cox_publisher_options publishing = {
        .size = sizeof(struct cox_publisher_options), .pool = bounce, .domains = domains};
    assert_refused(cox_publisher_new(small, &publishing, &none, test_err()), COX_FULL, "2 pools");
    take_and_let_go(taker, 1);
}

TEST(h11_b35_a_queue_does_not_grow_under_others)
{
    struct cox_queue *again = NULL;
    const struct cox_queue_options deeper = {.size = sizeof(struct cox_queue_options), .depth = 16};
    assert_refused(cox_queue_attach(cox_queue_fd(queue), &deeper, &again, test_err()),
                   COX_UNSUPPORTED, "8 messages, expected 16");
    const struct cox_queue_options wider = {
        .size = sizeof(struct cox_queue_options), .depth = 8, .domain_count_max = 5};
    assert_refused(cox_queue_attach(cox_queue_fd(queue), &wider, &again, test_err()),
                   COX_UNSUPPORTED, "4 domains, expected 5");
    assert_null(again);
    const struct cox_queue_options less = {
        .size = sizeof(struct cox_queue_options), .depth = 4, .domain_count_max = 1};
    assert_int_equal(cox_queue_attach(cox_queue_fd(queue), &less, &again, NULL), 0);
    assert_int_equal(again->id, queue->id);
    cox_queue_free(again);
}

/* ---- attach ---- */

static int memory_of(const void *bytes, size_t size, int seals)
{
    int fd = memfd_create("queue_test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    test_own_fd(fd);
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(write(fd, bytes, size), (ssize_t)size);
    if (seals)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void attach_memory(const void *bytes, size_t size, int seals, int expected)
{
    struct cox_queue *none = NULL;
    struct cox_error err = {0};
    int fd = memory_of(bytes, size, seals);
    int r = cox_queue_attach(fd, NULL, &none, &err);
    if (r != expected)
        fail_msg("%s (%s), expected %s", cox_status_text(r), err.text, cox_status_text(expected));
    if (r)
        assert_true(err.text[0] != '\0');
    cox_queue_free(none);
    test_close(fd);
}

#define BOTH_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

TEST(h2_a29_b16_attach_trusts_nothing_before_it_is_checked)
{
    const size_t size = queue->region.size;
    struct cox_queue_layout *copy = test_own(malloc(size), free);
    memcpy(copy, queue->layout, size);
    attach_memory(copy, size, BOTH_SEALS, 0);
    attach_memory(copy, size, 0, COX_DENIED);
    attach_memory(copy, size, F_SEAL_GROW, COX_DENIED);
    attach_memory(copy, sizeof *copy - 1, BOTH_SEALS, COX_CORRUPT);
    attach_memory(copy, size - 1, BOTH_SEALS, COX_CORRUPT);
    struct cox_queue_layout_header *header = &copy->header, good = copy->header;
    atomic_store(&header->queue_magic, 0);
    attach_memory(copy, size, BOTH_SEALS, COX_CORRUPT);
    *header = good;
    header->version++;
    attach_memory(copy, size, BOTH_SEALS, COX_VERSION);
    *header = good;
    header->abi = 0x04030201;
    attach_memory(copy, size, BOTH_SEALS, COX_VERSION);
    *header = good;
    header->system++;
    attach_memory(copy, size, BOTH_SEALS, COX_DENIED);
    uint32_t *const numbers[] = {&header->depth,
                                 &header->domain_count_max,
                                 &header->publisher_count_max,
                                 &header->subscriber_count_max,
                                 &header->pool_count_max,
                                 &header->pending_free_count_max};
    const uint32_t values[] = {0, 1, 3, 64, 65535, 1 << 20, UINT32_MAX};
    *header = good;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
            const uint32_t kept = *numbers[i];
            if (values[k] != kept) {
                *numbers[i] = values[k];
                attach_memory(copy, size, BOTH_SEALS, COX_CORRUPT);
            }
            *numbers[i] = kept;
        }
    header->size++;
    attach_memory(copy, size, BOTH_SEALS, COX_CORRUPT);
    *header = good;
    header->id = 0;
    attach_memory(copy, size, BOTH_SEALS, COX_CORRUPT);
    struct cox_queue *none = NULL;
    assert_int_equal(cox_queue_attach(STDERR_FILENO, NULL, &none, NULL), COX_DENIED);
    assert_int_equal(cox_queue_attach(-1, NULL, &none, NULL), -EBADF);
}

TEST(h3_h17_h20_nothing_has_a_name_and_the_last_one_out_leaves_nothing)
{
    struct cox_subscriber *taker = subscriber_of(queue_again(queue), NULL);
    publish(6);
    take_and_let_go(taker, 6);
    char path[64], target[128] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", cox_queue_fd(queue));
    assert_true(readlink(path, target, sizeof target - 1) > 0);
    assert_contains(target, "memfd:cox_queue (deleted)");
}

/* ---- display ---- */

static void dump_append(void *context, const char *text)
{
    strcat(strcat(context, text), "\n");
}

TEST(h16_b39_dump_prints_what_is_there)
{
    static char text[65536];
    host_subscriber();
    struct cox_subscriber *far = bounce_subscriber();
    text[0] = '\0';
    publish(UINT64_C(0x2525256e25732500)); /* %%%n%s% */
    struct cox_message message = take(far, UINT64_C(0x2525256e25732500));
    fixture_let_go(&message);
    cox_queue_dump(queue, dump_append, text);
    const char *const expected[] = {
        "depth 8, last message 1",
        "publisher 0: process",
        "subscriber 0: process",
        "subscriber 1: process",
        "message 1: 100 bytes, user data 2525256e25732500, 1 subscribers",
        "domain 0: pool 0",
        "domain 1: pool 1"};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        assert_contains(text, expected[i]);
}
