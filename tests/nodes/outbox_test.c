/* Outboxes (nodes/outbox.h), between processes that are addresses of the loopback here. */
#include "nodes/outbox.h"

#include "channel/base/thread.h"
#include "tests/lib/test.h"

#define PATIENCE_MS 30000
/* More than the buffers of a connection hold. */
#define LARGE_SIZE ((size_t)64 << 20)

struct process {
    struct cox_direct *direct;
    char address[32];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    bool stuck;
    uint32_t arrived, stuck_count;
    /* of the last message */
    uint64_t sum;
};

static struct world {
    struct process lead, a, b;
    struct cox_outbox *to_a, *to_b;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* messages that were lost, of each; under the lock */
    uint32_t lost[2];
} world;

static void on_message(void *context, const char *peer, const char *group, uint32_t kind,
                       uint8_t *bytes, size_t size)
{
    struct process *process = context;
    (void)peer, (void)group;
    pthread_mutex_lock(&process->lock);
    process->stuck_count++;
    pthread_cond_broadcast(&process->changed);
    while (process->stuck)
        pthread_cond_wait(&process->changed, &process->lock);
    assert_int_equal(kind, process->arrived); /* in order */
    process->sum = 0;
    for (size_t i = 0; i < size; i++)
        process->sum += bytes[i];
    process->arrived++;
    pthread_cond_broadcast(&process->changed);
    pthread_mutex_unlock(&process->lock);
    free(bytes);
}

static void process_open(struct process *process, const char *name, const char *host)
{
    char listen[32];
    struct cox_error err = {0};
    snprintf(listen, sizeof listen, "%s:0", host);
    const struct cox_direct_options options = {.name = name,
                                               .group = "big",
                                               .insecure_loopback = true,
                                               .listen = listen,
                                               .context = process,
                                               .on_message = on_message};
    *process = (struct process){.stuck = false};
    pthread_mutex_init(&process->lock, NULL);
    cox_condition_init(&process->changed);
    if (cox_direct_open(&options, &process->direct, &err))
        fail_msg("%s: %s", name, err.text);
    snprintf(process->address, sizeof process->address, "%s:%u", host,
             cox_direct_port(process->direct));
}

static void set_stuck(struct process *process, bool stuck)
{
    pthread_mutex_lock(&process->lock);
    process->stuck = stuck;
    pthread_cond_broadcast(&process->changed);
    pthread_mutex_unlock(&process->lock);
}

static void await_count(pthread_mutex_t *lock, pthread_cond_t *changed, const uint32_t *count,
                        uint32_t enough)
{
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(PATIENCE_MS));
    int r = 0;
    pthread_mutex_lock(lock);
    while (*count < enough && r == 0)
        r = pthread_cond_timedwait(changed, lock, &until);
    assert_int_equal(*count, enough);
    pthread_mutex_unlock(lock);
}

/* count of process has come. */
static void await(struct process *process, const uint32_t *count, uint32_t enough)
{
    await_count(&process->lock, &process->changed, count, enough);
}

static void on_lost(void *context, uint32_t number)
{
    (void)context;
    pthread_mutex_lock(&world.lock);
    world.lost[number]++;
    pthread_cond_broadcast(&world.changed);
    pthread_mutex_unlock(&world.lock);
}

static uint32_t lost_count(uint32_t number)
{
    pthread_mutex_lock(&world.lock);
    const uint32_t count = world.lost[number];
    pthread_mutex_unlock(&world.lock);
    return count;
}

static struct cox_outbox *outbox_of(const char *peer, uint32_t number)
{
    const struct cox_outbox_options options = {
        .direct = world.lead.direct, .peer = peer, .number = number, .lost = on_lost};
    struct cox_outbox *outbox;
    assert_int_equal(cox_outbox_new(&options, &outbox), 0);
    return outbox;
}

static int set_up(void **state)
{
    (void)state;
    memset(&world, 0, sizeof world);
    pthread_mutex_init(&world.lock, NULL);
    cox_condition_init(&world.changed);
    process_open(&world.lead, "lead", "127.0.0.1");
    process_open(&world.a, "node-a", "127.0.0.2");
    process_open(&world.b, "node-b", "127.0.0.3");
    world.to_a = outbox_of("node-a", 0);
    world.to_b = outbox_of("node-b", 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    set_stuck(&world.a, false);
    cox_direct_end(world.lead.direct);
    cox_outbox_free(world.to_a);
    cox_outbox_free(world.to_b);
    cox_direct_close(world.lead.direct);
    cox_direct_close(world.a.direct);
    cox_direct_close(world.b.direct);
    return 0;
}

static void put(struct cox_outbox *outbox, const struct process *to, uint32_t kind, size_t size)
{
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    memset(bytes, 1, size);
    cox_outbox_put(outbox, to->address, kind, bytes, size, -1, 0);
}

#define OUTBOX_TEST(name) TEST_WITH(name, set_up, tear_down)

OUTBOX_TEST(messages_arrive_in_order)
{
    for (uint32_t i = 0; i < 100; i++)
        put(world.to_a, &world.a, i, i % 2 ? 10 : 100000);
    await(&world.a, &world.a.arrived, 100);
    assert_int_equal(lost_count(0), 0);
}

OUTBOX_TEST(memory_follows_the_bytes)
{
    int fd = memfd_create("image", MFD_CLOEXEC);
    uint8_t *bytes = malloc(2);
    assert_int_equal(write(fd, "\3\4\5", 3), 3);
    memcpy(bytes, "\1\2", 2);
    cox_outbox_put(world.to_a, world.a.address, 0, bytes, 2, fd, 3);
    await(&world.a, &world.a.arrived, 1);
    assert_int_equal(world.a.sum, 1 + 2 + 3 + 4 + 5);
    bytes = calloc(1, 1);
    cox_outbox_put(world.to_a, "", 9, bytes, 1, -1, 0); /* to nobody */
    put(world.to_a, &world.a, 1, 7);
    await(&world.a, &world.a.arrived, 2);
}

static void *fill_main(void *argument)
{
    uint8_t *bytes = malloc(LARGE_SIZE);
    assert_non_null(bytes);
    for (size_t i = 0; i < LARGE_SIZE; i++)
        bytes[i] = (uint8_t)(i >> 12);
    cox_large_request_fill(argument, bytes);
    free(bytes);
    return NULL;
}

/* Two connections wait for bytes that are not there yet, and one comes when they are. */
OUTBOX_TEST(a_large_request_is_sent_while_it_is_copied)
{
    struct cox_large_request *large = cox_large_request_new(LARGE_SIZE);
    pthread_t thread;
    assert_non_null(large);
    cox_outbox_put_large(world.to_a, world.a.address, 0, calloc(1, 100), 100,
                         cox_large_request_ref(large));
    cox_outbox_put_large(world.to_b, world.b.address, 0, calloc(1, 100), 100,
                         cox_large_request_ref(large));
    assert_int_equal(pthread_create(&thread, NULL, fill_main, large), 0);
    await(&world.a, &world.a.arrived, 1);
    pthread_join(thread, NULL);
    await(&world.b, &world.b.arrived, 1);
    cox_outbox_put_large(world.to_b, world.b.address, 1, calloc(1, 1), 1, large);
    await(&world.b, &world.b.arrived, 2);
    uint64_t sum = 0;
    for (size_t i = 0; i < LARGE_SIZE; i++)
        sum += (uint8_t)(i >> 12);
    assert_int_equal(world.a.sum, sum);
    assert_int_equal(world.b.sum, sum);
    assert_int_equal(lost_count(0), 0);
}

/* Whether the kernel has bytes for a process that it has not read: of /proc/net/tcp. */
static bool has_unread(const struct process *process)
{
    char line[512];
    bool found = false;
    FILE *file = fopen("/proc/net/tcp", "r");
    assert_non_null(file);
    while (!found && fgets(line, sizeof line, file)) {
        unsigned port, state, sending, unread;
        found =
            sscanf(line, " %*u: %*x:%x %*x:%*x %x %x:%x", &port, &state, &sending, &unread) == 4 &&
            port == cox_direct_port(process->direct) && state == 1 && unread > 0;
    }
    fclose(file);
    return found;
}

/* Node a reads nothing, and what goes to it fills all buffers: the first large message is being
 * sent, and two wait. */
static void stick(void)
{
    set_stuck(&world.a, true);
    put(world.to_a, &world.a, 0, 1);
    await(&world.a, &world.a.stuck_count, 1);
    for (uint32_t i = 1; i < 4; i++)
        put(world.to_a, &world.a, i, LARGE_SIZE);
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    while (!has_unread(&world.a) && cox_now_ns() < deadline_ns)
        sched_yield();
    assert_true(has_unread(&world.a));
}

OUTBOX_TEST(a_process_that_does_not_read_delays_no_other)
{
    stick();
    for (uint32_t i = 0; i < 10; i++)
        put(world.to_b, &world.b, i, 100000);
    await(&world.b, &world.b.arrived, 10);
    set_stuck(&world.a, false);
    await(&world.a, &world.a.arrived, 4);
}

OUTBOX_TEST(what_waits_for_a_dead_process_is_dropped)
{
    stick();
    cox_outbox_drop(world.to_a);
    set_stuck(&world.a, false);
    await(&world.a, &world.a.arrived, 1);
    /* What comes now is for the next process of this name. */
    put(world.to_a, &world.a, 1, 7);
    await(&world.a, &world.a.arrived, 2);
    assert_int_equal(world.a.sum, 7);
}

/* For a new lead: what is being sent arrives, and what waited does not. */
OUTBOX_TEST(what_waits_can_be_cleared)
{
    stick();
    cox_outbox_clear(world.to_a);
    set_stuck(&world.a, false);
    put(world.to_a, &world.a, 2, 7);
    await(&world.a, &world.a.arrived, 3);
    assert_int_equal(world.a.sum, 7);
    assert_int_equal(lost_count(0), 0);
}

OUTBOX_TEST(only_so_much_waits_and_small_messages_always)
{
    stick();
    for (uint32_t i = 4; i < 7; i++) /* with them 320 MiB wait */
        put(world.to_a, &world.a, i, LARGE_SIZE);
    put(world.to_a, &world.a, 99, LARGE_SIZE);
    put(world.to_a, &world.a, 99, 65537);
    put(world.to_a, &world.a, 7, 65536);
    set_stuck(&world.a, false);
    await(&world.a, &world.a.arrived, 8);
    assert_int_equal(world.a.sum, 65536);
}

/* What a process that does not read is sent is not kept without end. */
OUTBOX_TEST(only_so_much_of_large_requests_waits)
{
    struct cox_large_request *large = cox_large_request_new((size_t)768 << 20);
    assert_non_null(large); /* which nobody fills: its pages are not there */
    stick();
    cox_outbox_clear(world.to_a);
    for (uint32_t i = 0; i < 3; i++) /* two wait */
        cox_outbox_put_large(world.to_a, world.a.address, 2, calloc(1, 100), 100,
                             cox_large_request_ref(large));
    assert_int_equal(cox_large_request_references(large), 3);
    cox_outbox_clear(world.to_a);
    assert_int_equal(cox_large_request_references(large), 1);
    cox_large_request_unref(large);
    set_stuck(&world.a, false);
    put(world.to_a, &world.a, 2, 7);
    await(&world.a, &world.a.arrived, 3);
}

OUTBOX_TEST(the_end_waits_for_no_reader)
{
    const uint64_t start_ns = cox_now_ns();
    stick();
    cox_direct_end(world.lead.direct);
    world.to_a = cox_outbox_free(world.to_a);
    assert_true(cox_now_ns() - start_ns < 9000 * COX_NSEC_PER_MSEC);
}

OUTBOX_TEST(a_message_that_is_refused_is_lost)
{
    put(world.to_b, &world.a, 0, 10); /* node a is not node b */
    await_count(&world.lock, &world.changed, &world.lost[1], 1);
    put(world.to_b, &world.b, 0, 10);
    await(&world.b, &world.b.arrived, 1);
    assert_int_equal(lost_count(1), 1);
    assert_int_equal(lost_count(0), 0);
}
