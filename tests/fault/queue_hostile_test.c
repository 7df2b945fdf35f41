/*
 * queue_hostile_test: a process overwrites the memory of a queue while others use it. Whatever it
 * writes: no process crashes, every call returns in bounded time, and a message is either refused
 * or lies within a block.
 */

#include "tests/unit/queue_fixture.h"
#include "memory/queue/queue_internal.h"
#include "tests/lib/test.h"

/* Limit per call: the patience for the lock, that for a copy, and a slow machine. */
#define CALL_MS 25000
#define SCRIBBLE_MS 4000

static struct cox_domains *domains;
static struct cox_pool *host, *bounce;
static uint64_t slowest_ns;
static size_t where; /* offset that was overwritten */

struct world {
    struct cox_queue *queue, *again;
    struct cox_publisher *of_host, *of_bounce;
    struct cox_subscriber *near, *far;
    struct cox_queue_set *set;
};

static const struct cox_queue_options small = {.size = sizeof(struct cox_queue_options),
                                               .depth = 2,
                                               .domain_count_max = 3,
                                               .publisher_count_max = 3,
                                               .subscriber_count_max = 3,
                                               .pool_count_max = 3};

/* Measures a call, and asserts that none exceeds the limit. */
#define TIMED(call)                                                                                \
    do {                                                                                           \
        const uint64_t begin_ns = cox_now_ns();                                                    \
        call;                                                                                      \
        const uint64_t took_ns = cox_now_ns() - begin_ns;                                          \
        slowest_ns = took_ns > slowest_ns ? took_ns : slowest_ns;                                  \
        if (took_ns > 1000 * COX_NSEC_PER_MSEC)                                                    \
            print_message("%zu: %s took %" PRIu64 " ms\n", where, #call,                           \
                          took_ns / COX_NSEC_PER_MSEC);                                            \
        if (took_ns > CALL_MS * COX_NSEC_PER_MSEC)                                                 \
            fail_msg("%s took %" PRIu64 " ms", #call, took_ns / COX_NSEC_PER_MSEC);                \
    } while (0)

static struct world world_make(void)
{
    struct world world = {0};
    assert_int_equal(cox_queue_create(&small, &world.queue, NULL), 0);
    assert_int_equal(cox_queue_attach(cox_queue_fd(world.queue), NULL, &world.again, NULL), 0);
    world.of_host = fixture_publisher(world.queue, host, domains, NULL);
    world.of_bounce = fixture_publisher(world.again, bounce, domains, NULL);
    world.near = fixture_subscriber(world.again, NULL, &host, 1, domains, NULL);
    world.far = fixture_subscriber(world.queue, bounce, &host, 1, domains, NULL);
    assert_int_equal(cox_queue_set_new(&world.set), 0);
    assert_int_equal(cox_queue_set_add(world.set, world.near, NULL), 0);
    assert_int_equal(cox_queue_set_add(world.set, world.far, NULL), 0);
    assert_int_equal(fixture_publish(world.of_host, host, 100, 1, NULL), 0);
    assert_int_equal(fixture_publish(world.of_host, host, 100, 2, NULL), 0);
    return world;
}

static void take_some(struct cox_subscriber *subscriber)
{
    for (int i = 0; i < 4; i++) {
        struct cox_message message;
        int r;
        TIMED(r = cox_subscriber_take(subscriber, &message, NULL));
        if (r)
            continue;
        assert_true(message.length <= message.ref.size);
        assert_true(message.ref.size <= FIXTURE_BLOCK_SIZE);
        fixture_is_sound(&message); /* reads all bytes, which may be wrong */
        fixture_let_go(&message);
    }
}

static void drop_line(void *context, const char *text)
{
    *(size_t *)context += strlen(text);
}

static void call_everything(struct world *world)
{
    struct cox_subscriber *ready;
    struct cox_queue *third = NULL;
    size_t length = 0;
    const struct cox_subscriber_options options = {
        .size = sizeof(struct cox_subscriber_options), .pool = bounce, .domains = domains};
    struct cox_subscriber *late = NULL;
    int r;
    TIMED(r = cox_queue_set_wait(world->set, cox_deadline_after_ms(1), &ready));
    take_some(world->far);
    TIMED(fixture_publish(world->of_bounce, bounce, 100, 3, NULL));
    take_some(world->near);
    TIMED(r = cox_subscriber_new(world->again, &options, &late, NULL));
    for (uint64_t user_data = 4; user_data < 8; user_data++)
        TIMED(fixture_publish(world->of_host, host, 100, user_data, NULL));
    take_some(world->far);
    take_some(world->near);
    if (r == 0)
        take_some(late);
    TIMED(cox_queue_set_wait(world->set, cox_deadline_after_ms(1), &ready));
    TIMED(cox_queue_sweep(world->queue));
    TIMED(cox_queue_dump(world->again, drop_line, &length));
    TIMED(r = cox_queue_attach(cox_queue_fd(world->queue), NULL, &third, NULL));
    cox_queue_free(third);
    TIMED(cox_subscriber_free(late));
}

static void world_free(struct world *world)
{
    TIMED(cox_queue_set_free(world->set));
    TIMED(cox_subscriber_free(world->near));
    TIMED(cox_subscriber_free(world->far));
    TIMED(cox_publisher_free(world->of_host));
    TIMED(cox_publisher_free(world->of_bounce));
    TIMED(cox_queue_free(world->again));
    TIMED(cox_queue_free(world->queue));
    /* Pools are not corrupt; pins that corruption left end with the last process that joined. */
    cox_pool_sweep(host);
    cox_pool_sweep(bounce);
    assert_int_equal(fixture_used(host), 0);
    assert_int_equal(fixture_used(bounce), 0);
}

static int setup(void **state)
{
    (void)state;
    assert_int_equal(cox_domains_new(&domains), 0);
    host = fixture_pool(domains, COX_DOMAIN_HOST, 16);
    bounce = fixture_pool(domains, COX_DOMAIN_BOUNCE, 16);
    slowest_ns = 0;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    print_message("slowest call: %" PRIu64 " us\n", slowest_ns / 1000);
    cox_pool_free(host);
    cox_pool_free(bounce);
    cox_domains_free(domains);
    return 0;
}

#define TEST(name) TEST_WITH(name, setup, teardown)

/* All of its bits, and the lowest. */
TEST(b14_b32_b38_any_byte_of_a_queue_may_be_flipped)
{
    struct world world = world_make();
    const size_t size = world.queue->region.size;
    world_free(&world);
    for (size_t i = 0; i < 2 * size; i++) {
        where = i % size;
        world = world_make();
        ((unsigned char *)world.queue->region.base)[where] ^= i < size ? 0xff : 0x01;
        call_everything(&world);
        world_free(&world);
    }
}

/* Plausible numbers in wrong places. */
TEST(b14_any_word_of_a_queue_may_be_any_other)
{
    struct world world = world_make();
    const size_t words = world.queue->region.size / 4;
    world_free(&world);
    const uint32_t values[] = {0, 1, 2, 3, 5, 0x7fffffff, UINT32_MAX};
    for (size_t i = 0; i < words; i++)
        for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
            where = 4 * i;
            world = world_make();
            ((_Atomic uint32_t *)world.queue->region.base)[i] = values[k];
            call_everything(&world);
            world_free(&world);
        }
}

static _Noreturn void scribble(struct cox_queue *queue, unsigned seed)
{
    _Atomic uint32_t *words = queue->region.base;
    const uint32_t count = (uint32_t)(queue->region.size / 4);
    uint32_t x = seed * 2654435761u + 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        x = x * 1664525u + 1013904223u;
        uint32_t at = x >> 8;
        x = x * 1664525u + 1013904223u;
        words[at % count] = x & 1 ? x : (x >> 8) % 8;
        if (x % 64 == 0)
            sched_yield();
    }
}

TEST(b14_b36_a_process_writes_all_the_time)
{
    const uint64_t end_ns = cox_deadline_after_ms(SCRIBBLE_MS);
    for (unsigned seed = 1; cox_now_ns() < end_ns; seed++) {
        struct world world = world_make();
        pid_t pid = fork();
        if (pid == 0)
            scribble(world.queue, seed);
        for (int i = 0; i < 3; i++)
            call_everything(&world);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, NULL, 0), pid);
        world_free(&world);
    }
}
