/* A queue as text. Without the lock, so that it works when the lock cannot be taken. */
#include "queue_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "queue_lock.h"

struct dump {
    void (*line)(void *context, const char *text);
    void *context;
};

__attribute__((format(printf, 2, 3))) static void dump_line(const struct dump *dump,
                                                            const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dump->line(dump->context, text);
}

static const char *liveness(uint64_t identity)
{
    return cox_queue_identity_alive(identity) ? "" : " (dead)";
}

static void dump_pools(struct cox_queue *queue, const struct dump *dump)
{
    for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++) {
        struct cox_queue_entry entry;
        if (!cox_queue_entry_read(queue, i, &entry))
            continue;
        const uint64_t domain = COX_QUEUE_LOAD(queue->layout->queue_domains[entry.domain]);
        dump_line(dump, "pool %" PRIu32 ": %016" PRIx64 " in domain %" PRIu32 " (%u:%u)%s%s", i,
                  entry.id, entry.domain, (unsigned)(domain >> 32), (unsigned)domain,
                  entry.flags & COX_QUEUE_POOL_HANDLE ? ", by handle" : "",
                  entry.flags & COX_QUEUE_POOL_READ_ONLY ? ", read-only" : "");
    }
}

static void dump_endpoints(struct cox_queue *queue, const struct dump *dump)
{
    for (uint32_t i = 0; i < queue->geometry.publisher_count_max; i++) {
        struct cox_queue_layout_publisher *publisher = cox_queue_publisher_at(queue, i);
        uint64_t process = COX_QUEUE_LOAD(publisher->publisher_process);
        if (process)
            dump_line(dump,
                      "publisher %" PRIu32 ": process %" PRIu32 "%s, pool %" PRIu32 ", %" PRIu64
                      " messages",
                      i, cox_queue_identity_pid(process), liveness(process),
                      COX_QUEUE_LOAD(publisher->publisher_pool),
                      COX_QUEUE_LOAD(publisher->publisher_count));
    }
    for (uint32_t i = 0; i < queue->geometry.subscriber_count_max; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        uint64_t process = COX_QUEUE_LOAD(subscriber->subscriber_process);
        if (process)
            dump_line(dump,
                      "subscriber %" PRIu32 ": process %" PRIu32 "%s, domain %" PRIu32
                      ", next message %" PRIu64 "%s",
                      i, cox_queue_identity_pid(process), liveness(process),
                      COX_QUEUE_LOAD(subscriber->subscriber_domain),
                      COX_QUEUE_LOAD(subscriber->subscriber_next),
                      COX_QUEUE_LOAD(subscriber->subscriber_sleeping) ? ", asleep" : "");
    }
}

static void dump_rows(struct cox_queue *queue, const struct dump *dump)
{
    for (uint32_t i = 0; i < queue->geometry.depth; i++) {
        struct cox_queue_message message;
        cox_queue_row_read(queue, i, &message);
        if (message.number == 0)
            continue;
        dump_line(dump,
                  "message %" PRIu64 ": %" PRIu64 " bytes, user data %016" PRIx64 ", %" PRIu32
                  " subscribers have not taken it%s",
                  message.number & ~COX_QUEUE_ROW_ENDING, message.length, message.user_data,
                  message.interest, message.number & COX_QUEUE_ROW_ENDING ? ", ending" : "");
        for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++) {
            const struct cox_queue_copy *copy = &message.copies[d];
            if (message.mask >> d & 1)
                dump_line(dump,
                          "  domain %" PRIu32 ": pool %" PRIu32 ", block %" PRIu32
                          ", epoch %" PRIu64 ", %" PRIu64 " bytes",
                          d, copy->pool, copy->block, copy->epoch, copy->size);
            else if (copy->copier)
                dump_line(dump, "  domain %" PRIu32 ": process %" PRIu32 "%s copies", d,
                          cox_queue_identity_pid(copy->copier), liveness(copy->copier));
        }
    }
}

static void dump_pending_frees(struct cox_queue *queue, const struct dump *dump)
{
    for (uint32_t i = 0; i < queue->geometry.pending_free_count_max; i++) {
        struct cox_queue_layout_pending_free *pending_free = cox_queue_pending_free_at(queue, i);
        if (COX_QUEUE_LOAD(pending_free->pending_free_tag))
            dump_line(dump, "pending free: pool %" PRIu32 ", block %" PRIu32 ", epoch %" PRIu64,
                      COX_QUEUE_LOAD(pending_free->pending_free_pool),
                      COX_QUEUE_LOAD(pending_free->pending_free_block),
                      COX_QUEUE_LOAD(pending_free->pending_free_epoch));
    }
}

void cox_queue_dump(struct cox_queue *queue, void (*line)(void *context, const char *text),
                    void *context)
{
    const struct dump dump = {line, context};
    const struct cox_queue_layout_state *state = &queue->layout->state;
    const uint64_t owner = COX_QUEUE_LOAD(queue->layout->lock.lock_owner);
    dump_line(&dump, "queue %016" PRIx64 ": depth %" PRIu32 ", last message %" PRIu64, queue->id,
              queue->geometry.depth, COX_QUEUE_LOAD(state->queue_head));
    if (owner)
        dump_line(&dump, "lock: process %" PRIu32 "%s", cox_queue_identity_pid(owner),
                  liveness(owner));
    if (COX_QUEUE_LOAD(state->pending_free_lost))
        dump_line(&dump, "%" PRIu32 " blocks stay pinned: the table of pending frees was full",
                  COX_QUEUE_LOAD(state->pending_free_lost));
    dump_pools(queue, &dump);
    dump_endpoints(queue, &dump);
    dump_rows(queue, &dump);
    dump_pending_frees(queue, &dump);
}
