/* Queues and their endpoints, with each of the calls that make them failing in turn. */
#include "tests/unit/queue_fixture.h"
#include "countdown.h"
#include "testing.h"

static struct cox_domains *domains;
static struct cox_pool *host, *bounce;
static struct cox_exporter *exporter;
static struct cox_queue *queue;
static struct cox_handle handle;

static const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                                 .depth = 4};

CONSTRUCT(queue_create, cox_queue_create(&options, object, err))
DESTROY(queue_free, cox_queue_free(*(struct cox_queue **)object))
CONSTRUCT(queue_attach, cox_queue_attach(cox_queue_fd(queue), &options, object, err))
CONSTRUCT(queue_open, cox_queue_open(&handle, NULL, 0, NULL, object, err))

static int publisher_new(void *object, struct cox_error *err)
{
    const struct cox_publisher_options with = {.size = sizeof(struct cox_publisher_options),
                                               .pool = host,
                                               .exporter = exporter,
                                               .domains = domains,
                                               .socket_path = "/nonexistent"};
    return cox_publisher_new(queue, &with, object, err);
}

DESTROY(publisher_free, cox_publisher_free(*(struct cox_publisher **)object))

static int subscriber_new(void *object, struct cox_error *err)
{
    const struct cox_subscriber_options with = {.size = sizeof(struct cox_subscriber_options),
                                                .pool = bounce,
                                                .pools = &host,
                                                .pool_count = 1,
                                                .exporter = exporter,
                                                .domains = domains,
                                                .socket_path = "/nonexistent"};
    return cox_subscriber_new(queue, &with, object, err);
}

DESTROY(subscriber_free, cox_subscriber_free(*(struct cox_subscriber **)object))
CONSTRUCT(set_new, cox_queue_set_new(object))
DESTROY(set_free, cox_queue_set_free(*(struct cox_queue_set **)object))

PLAIN_TEST(h15_b15_b19_b47_nothing_stays_of_a_queue_when_any_call_fails)
{
    COUNTDOWN(
        EACH_MODE, SUBJECT(queue_create, MAKES(struct cox_queue *, queue_free), .lenient = true),
        SUBJECT(queue_attach, MAKES(struct cox_queue *, queue_free)),
        SUBJECT(queue_open, MAKES(struct cox_queue *, queue_free)),
        /* The number that is its turn may be too high. */
        SUBJECT(publisher_new, MAKES(struct cox_publisher *, publisher_free), .lenient = true),
        SUBJECT(subscriber_new, MAKES(struct cox_subscriber *, subscriber_free), .lenient = true),
        SUBJECT(set_new, MAKES(struct cox_queue_set *, set_free), .wordless = true));
    assert_int_equal(fixture_used(host), 0);
}

/* ---- take: it succeeds, or the message stays, or the error is reported; nothing is lost ---- */

static struct cox_publisher *publisher;
static struct cox_subscriber *taker;

static void take_prepare(void)
{
    publisher = fixture_publisher(queue, host, domains, exporter);
    taker = fixture_subscriber(queue, bounce, NULL, 0, domains, exporter);
    assert_int_equal(fixture_publish(publisher, host, 100, 5, NULL), 0);
}

static void take_restore(void)
{
    taker = cox_subscriber_free(taker);
    publisher = cox_publisher_free(publisher);
    assert_int_equal(fixture_used(host), 0);
    assert_int_equal(fixture_used(bounce), 0);
}

CONSTRUCT(take, cox_subscriber_take(taker, object, err))

static void let_go(void *object)
{
    assert_true(fixture_is_sound(object));
    fixture_let_go(object);
}

PLAIN_TEST(h5_b15_a_take_leaves_nothing_behind_when_any_call_fails)
{
    static const int codes[] = {COX_PEER_DEAD, COX_EMPTY, COX_FULL, 0};
    COUNTDOWN(FAIL_ONE,
              SUBJECT(take, MAKES(struct cox_message, let_go), AROUND(take_prepare, take_restore),
                      .lenient = true, .codes = codes));
}

int main(void)
{
    COX_ASSERT(cox_domains_new(&domains) == 0);
    COX_ASSERT(cox_exporter_new(NULL, &exporter, NULL) == 0);
    host = fixture_pool(domains, COX_DOMAIN_HOST, 8);
    bounce = fixture_pool(domains, COX_DOMAIN_BOUNCE, 8);
    COX_ASSERT(cox_queue_create(&options, &queue, NULL) == 0);
    COX_ASSERT(cox_queue_export(queue, exporter, &handle, NULL) == 0);
    int failed = test_run(NULL, NULL);
    cox_queue_free(queue);
    cox_pool_free(host);
    cox_pool_free(bounce);
    cox_exporter_free(exporter);
    cox_domains_free(domains);
    return failed;
}
