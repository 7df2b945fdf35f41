#include "queue_fixture.h"

#include "channel/base/idioms.h"

#include <stdio.h>

static void check(int r, const struct cox_error *err)
{
    if (r)
        fprintf(stderr, "%s: %s\n", cox_status_text(r), err->text);
    COX_ASSERT(r == 0);
}

struct cox_pool *fixture_pool(const struct cox_domains *domains, uint32_t kind,
                              uint32_t block_count)
{
    const struct cox_pool_options options = {
        .size = sizeof(struct cox_pool_options),
        .domains = domains,
        .domain = {kind, 0},
        .block_size = FIXTURE_BLOCK_SIZE,
        .block_count = block_count,
    };
    struct cox_error err = {0};
    struct cox_pool *pool = NULL;
    check(cox_pool_create(&options, &pool, &err), &err);
    return pool;
}

struct cox_queue *fixture_queue(uint32_t depth)
{
    const struct cox_queue_options options = {.size = sizeof(struct cox_queue_options),
                                              .depth = depth};
    struct cox_error err = {0};
    struct cox_queue *queue = NULL;
    check(cox_queue_create(&options, &queue, &err), &err);
    return queue;
}

struct cox_publisher *fixture_publisher(struct cox_queue *queue, struct cox_pool *pool,
                                        const struct cox_domains *domains,
                                        struct cox_exporter *exporter)
{
    const struct cox_publisher_options options = {.size = sizeof(struct cox_publisher_options),
                                                  .pool = pool,
                                                  .exporter = exporter,
                                                  .domains = domains};
    struct cox_error err = {0};
    struct cox_publisher *publisher = NULL;
    check(cox_publisher_new(queue, &options, &publisher, &err), &err);
    return publisher;
}

struct cox_subscriber *fixture_subscriber(struct cox_queue *queue, struct cox_pool *pool,
                                          struct cox_pool *const *pools, uint32_t pool_count,
                                          const struct cox_domains *domains,
                                          struct cox_exporter *exporter)
{
    const struct cox_subscriber_options options = {.size = sizeof(struct cox_subscriber_options),
                                                   .pool = pool,
                                                   .pools = pools,
                                                   .pool_count = pool_count,
                                                   .domains = domains,
                                                   .exporter = exporter};
    struct cox_error err = {0};
    struct cox_subscriber *subscriber = NULL;
    check(cox_subscriber_new(queue, &options, &subscriber, &err), &err);
    return subscriber;
}

static uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

void fixture_fill(void *bytes, uint64_t length, uint64_t user_data)
{
    for (uint64_t i = 0; i < length; i++)
        ((unsigned char *)bytes)[i] = (unsigned char)(mixed(user_data + i / 8) >> i % 8 * 8);
}

bool fixture_is_filled(const void *bytes, uint64_t length, uint64_t user_data)
{
    for (uint64_t i = 0; i < length; i++)
        if (((const unsigned char *)bytes)[i] !=
            (unsigned char)(mixed(user_data + i / 8) >> i % 8 * 8))
            return false;
    return true;
}

int fixture_publish(struct cox_publisher *publisher, struct cox_pool *pool, uint64_t length,
                    uint64_t user_data, uint64_t *ret_number)
{
    unsigned char bytes[FIXTURE_BLOCK_SIZE];
    struct cox_block_ref ref;
    struct cox_error err = {0};
    uint64_t number = 0;
    int r = cox_pool_allocate(pool, FIXTURE_BLOCK_SIZE, &ref, &err);
    if (r)
        return r;
    fixture_fill(bytes, length, user_data);
    check(cox_pool_copy_to(pool, &ref, 0, bytes, length, &err), &err);
    r = cox_publisher_publish(publisher, &ref, length, user_data, &number, &err);
    check(cox_pool_unref(pool, &ref, &err), &err);
    if (r == 0 && ret_number)
        *ret_number = number;
    return r;
}

bool fixture_is_sound(const struct cox_message *message)
{
    unsigned char bytes[FIXTURE_BLOCK_SIZE];
    struct cox_error err = {0};
    if (message->bytes)
        return fixture_is_filled(message->bytes, message->length, message->user_data);
    if (message->length > sizeof bytes ||
        cox_pool_copy_from(message->pool, &message->ref, 0, bytes, message->length, &err))
        return false;
    return fixture_is_filled(bytes, message->length, message->user_data);
}

void fixture_let_go(const struct cox_message *message)
{
    struct cox_error err = {0};
    check(cox_pool_unref(message->pool, &message->ref, &err), &err);
}

uint32_t fixture_used(const struct cox_pool *pool)
{
    struct cox_pool_stats stats;
    cox_pool_read_stats(pool, &stats);
    return stats.block_count - stats.free_count;
}
