#include "outbox.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "nodes/link/frame.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A message must be handed over by then, and by what cox_frame_transfer_ns adds for its size. */
#define SEND_MS 10000
#define ADDRESS_SIZE 128
/* More than that waits only of messages up to SMALL_SIZE; and of large requests, which all outboxes
 * share, more than LARGE_SIZE_MAX not. */
#define WAITING_SIZE_MAX ((size_t)256 << 20)
#define LARGE_SIZE_MAX ((size_t)1 << 30)
#define SMALL_SIZE 65536

struct message {
    struct message *next;
    char address[ADDRESS_SIZE];
    uint32_t kind;
    uint8_t *bytes;
    size_t size;
    /* of memory that follows bytes; -1: nothing follows */
    int fd;
    uint64_t fd_size;
    /* follows bytes; NULL: nothing does */
    struct cox_large_request *large;
};

struct cox_outbox {
    struct cox_outbox_options options;
    char peer[COX_DIRECT_NAME_MAX + 1];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    struct message *first, **end;
    /* bytes of messages, and of large requests behind them */
    size_t waiting, large_waiting;
    bool threaded, ending;
    pthread_t thread;
};

int cox_outbox_new(const struct cox_outbox_options *options, struct cox_outbox **ret_outbox)
{
    struct cox_outbox *outbox = calloc(1, sizeof *outbox);
    if (!outbox)
        return -ENOMEM;
    outbox->options = *options;
    snprintf(outbox->peer, sizeof outbox->peer, "%s", options->peer);
    outbox->end = &outbox->first;
    pthread_mutex_init(&outbox->lock, NULL);
    cox_condition_init(&outbox->changed);
    *ret_outbox = outbox;
    return 0;
}

static void message_free(struct message *message)
{
    free(message->bytes);
    cox_close_fd(&message->fd);
    cox_large_request_unref(message->large);
    free(message);
}

/* With the lock. */
static void messages_free(struct cox_outbox *outbox)
{
    while (outbox->first) {
        struct message *message = outbox->first;
        outbox->first = message->next;
        message_free(message);
    }
    outbox->end = &outbox->first;
    outbox->waiting = outbox->large_waiting = 0;
}

struct cox_outbox *cox_outbox_free(struct cox_outbox *outbox)
{
    if (!outbox)
        return NULL;
    pthread_mutex_lock(&outbox->lock);
    outbox->ending = true;
    pthread_cond_broadcast(&outbox->changed);
    pthread_mutex_unlock(&outbox->lock);
    if (outbox->threaded)
        pthread_join(outbox->thread, NULL);
    messages_free(outbox);
    pthread_cond_destroy(&outbox->changed);
    pthread_mutex_destroy(&outbox->lock);
    free(outbox);
    return NULL;
}

void cox_outbox_clear(struct cox_outbox *outbox)
{
    pthread_mutex_lock(&outbox->lock);
    messages_free(outbox);
    pthread_mutex_unlock(&outbox->lock);
}

void cox_outbox_drop(struct cox_outbox *outbox)
{
    cox_outbox_clear(outbox);
    cox_direct_drop(outbox->options.direct, outbox->peer);
}

static size_t large_size(const struct message *message)
{
    return message->large ? cox_large_request_size(message->large) : 0;
}

static uint64_t message_size(const struct message *message)
{
    return message->size + message->fd_size + large_size(message);
}

static int message_send(struct cox_outbox *outbox, const struct message *message,
                        struct cox_error *err)
{
    struct iovec parts[2] = {{.iov_base = message->bytes, .iov_len = message->size}};
    struct cox_direct_message sent = {.kind = message->kind, .parts = parts, .count = 1};
    void *base = MAP_FAILED;
    if (message->fd >= 0) {
        base = mmap(NULL, message->fd_size, PROT_READ, MAP_SHARED, message->fd, 0);
        if (base == MAP_FAILED)
            return cox_fail(err, -errno, "mapping what is to be sent: %s", cox_status_text(-errno));
        parts[sent.count++] = (struct iovec){.iov_base = base, .iov_len = message->fd_size};
    }
    if (message->large) {
        parts[sent.count++] =
            (struct iovec){.iov_base = (void *)(uintptr_t)cox_large_request_bytes(message->large),
                           .iov_len = cox_large_request_size(message->large)};
        sent.await = cox_large_request_await;
        sent.await_context = message->large;
    }
    int r = cox_direct_send_message(
        outbox->options.direct, outbox->peer, message->address, &sent,
        cox_deadline_after_ms(SEND_MS) + cox_frame_transfer_ns(message_size(message)), err);
    if (base != MAP_FAILED)
        munmap(base, message->fd_size);
    return r;
}

/* Without the lock. */
static void message_handle(struct cox_outbox *outbox, const struct message *message)
{
    const struct cox_outbox_options *options = &outbox->options;
    struct cox_error why = {0};
    int r = message->address[0] ? message_send(outbox, message, &why) : 0;
    if (r == 0)
        return;
    cox_log_write(&options->log, 4, "%" PRIu64 " bytes for %s at %s: %s", message_size(message),
                  outbox->peer, message->address, why.text);
    options->lost(options->context, options->number);
}

static void *outbox_main(void *context)
{
    struct cox_outbox *outbox = context;
    pthread_setname_np(pthread_self(), "cox-outbox");
    pthread_mutex_lock(&outbox->lock);
    while (!outbox->ending) {
        struct message *message = outbox->first;
        if (!message) {
            pthread_cond_wait(&outbox->changed, &outbox->lock);
            continue;
        }
        outbox->first = message->next;
        if (!outbox->first)
            outbox->end = &outbox->first;
        outbox->waiting -= message->size;
        outbox->large_waiting -= large_size(message);
        pthread_mutex_unlock(&outbox->lock);
        message_handle(outbox, message);
        message_free(message);
        pthread_mutex_lock(&outbox->lock);
    }
    pthread_mutex_unlock(&outbox->lock);
    return NULL;
}

/* Takes what is in the message. */
static void message_put(struct cox_outbox *outbox, const char *address, struct message *from)
{
    struct message *message = malloc(sizeof *message);
    const size_t size = from->size;
    if (!message) {
        free(from->bytes);
        cox_close_fd(&from->fd);
        cox_large_request_unref(from->large);
        return;
    }
    *message = *from;
    snprintf(message->address, sizeof message->address, "%s", address);
    pthread_mutex_lock(&outbox->lock);
    if (!outbox->threaded && !outbox->ending)
        outbox->threaded = cox_thread_start(&outbox->thread, outbox_main, outbox) == 0;
    const bool sent = outbox->threaded && !outbox->ending &&
                      (size <= SMALL_SIZE || outbox->waiting <= WAITING_SIZE_MAX) &&
                      (!message->large || outbox->large_waiting <= LARGE_SIZE_MAX);
    if (sent) {
        outbox->waiting += size;
        outbox->large_waiting += large_size(message);
        *outbox->end = message;
        outbox->end = &message->next;
        pthread_cond_broadcast(&outbox->changed);
    }
    pthread_mutex_unlock(&outbox->lock);
    if (!sent)
        message_free(message);
}

void cox_outbox_put(struct cox_outbox *outbox, const char *address, uint32_t kind, uint8_t *bytes,
                    size_t size, int fd, uint64_t fd_size)
{
    struct message message = {
        .kind = kind, .bytes = bytes, .size = size, .fd = fd, .fd_size = fd >= 0 ? fd_size : 0};
    message_put(outbox, address, &message);
}

void cox_outbox_put_large(struct cox_outbox *outbox, const char *address, uint32_t kind,
                          uint8_t *bytes, size_t size, struct cox_large_request *large)
{
    struct message message = {.kind = kind, .bytes = bytes, .size = size, .fd = -1, .large = large};
    message_put(outbox, address, &message);
}
