/* A queue: one process writes blocks of a pool and publishes them; another process takes and reads
 * them in place, without a copy.
 * Build: cc queue.c $(pkg-config --cflags --libs coxswain-memory); run: ./queue */
#include <coxswain/memory.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MESSAGE_COUNT 3

/* The subscriber: attaches to the queue and the pool by their fds, in a process of its own. */
static int take(int queue_fd, const int pool_fds[2], int ready_fd, struct cox_error *err)
{
    struct cox_queue *queue = NULL;
    struct cox_pool *pool = NULL;
    struct cox_subscriber *subscriber = NULL;
    struct cox_queue_set *set = NULL;
    const struct cox_pool_attach_options attach = {.size = sizeof(struct cox_pool_attach_options),
                                                   .read_only = true};
    int r = cox_queue_attach(queue_fd, NULL, &queue, err);
    if (r == 0)
        r = cox_pool_attach(pool_fds, &attach, &pool, err);
    const struct cox_subscriber_options options = {
        .size = sizeof(struct cox_subscriber_options), .pools = &pool, .pool_count = 1};
    if (r == 0)
        r = cox_subscriber_new(queue, &options, &subscriber, err);
    if (r == 0)
        r = cox_queue_set_new(&set);
    if (r == 0)
        r = cox_queue_set_add(set, subscriber, err);
    if (r == 0 && write(ready_fd, "", 1) != 1) /* from now on it gets every message */
        r = -1;
    for (int i = 0; r == 0 && i < MESSAGE_COUNT; i++) {
        struct cox_subscriber *which;
        struct cox_message message;
        r = cox_queue_set_wait(set, cox_deadline_after_ms(5000), &which);
        if (r == 0)
            r = cox_subscriber_take(which, &message, err);
        if (r == 0) {
            printf("message %" PRIu64 ": %.*s\n", message.number, (int)message.length,
                   (const char *)message.bytes);
            cox_pool_unref(message.pool, &message.ref, NULL); /* the last unref frees it */
        }
    }
    cox_queue_set_free(set);
    cox_subscriber_free(subscriber);
    cox_pool_free(pool);
    cox_queue_free(queue);
    return r;
}

static int publish(struct cox_publisher *publisher, struct cox_pool *pool, int i,
                   struct cox_error *err)
{
    struct cox_block_ref ref;
    uint64_t number;
    int r = cox_pool_allocate(pool, 64, &ref, err); /* COX_FULL: no block is free */
    if (r)
        return r;
    int length =
        snprintf(cox_pool_pointer(pool, &ref), 64, "block %" PRIu32 " says %d", ref.block, i * i);
    r = cox_publisher_publish(publisher, &ref, (uint64_t)length, 0, &number, err);
    cox_pool_unref(pool, &ref, NULL); /* the message keeps the block until all have taken it */
    return r;
}

int main(void)
{
    const struct cox_pool_options blocks = {
        .size = sizeof(struct cox_pool_options), .block_size = 64, .block_count = 16};
    struct cox_pool *pool = NULL;
    struct cox_queue *queue = NULL;
    struct cox_publisher *publisher = NULL;
    struct cox_error err = {0};
    int ready[2], pool_fds[2], status = 0;
    char byte;
    if (pipe(ready) < 0)
        return 1;
    int r = cox_pool_create(&blocks, &pool, &err);
    if (r == 0)
        r = cox_queue_create(NULL, &queue, &err);
    if (r == 0) {
        cox_pool_fds(pool, pool_fds);
        int queue_fd = cox_queue_fd(queue);
        pid_t child =
            fork(); /* fds may also be sent by a socket or as handles (coxswain/handle.h) */
        if (child == 0) {
            close(ready[0]);
            r = take(queue_fd, pool_fds, ready[1], &err);
            if (r)
                fprintf(stderr, "subscriber: %s %s\n", cox_status_text(r), err.text);
            fflush(stdout);
            _exit(r != 0);
        }
        close(ready[1]);
        const struct cox_publisher_options options = {.size = sizeof(struct cox_publisher_options),
                                                      .pool = pool};
        r = child < 0 ? -1 : cox_publisher_new(queue, &options, &publisher, &err);
        if (r == 0 && read(ready[0], &byte, 1) != 1)
            r = -1; /* the subscriber has printed the reason */
        for (int i = 1; r == 0 && i <= MESSAGE_COUNT; i++)
            r = publish(publisher, pool, i, &err);
        close(ready[0]);
        if (child > 0)
            waitpid(child, &status, 0);
    }
    if (r)
        fprintf(stderr, "publisher: %s %s\n", cox_status_text(r), err.text);
    cox_publisher_free(publisher);
    cox_queue_free(queue);
    cox_pool_free(pool);
    return r || status ? 1 : 0;
}
