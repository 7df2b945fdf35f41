/* bench-zmq: ZeroMQ over ipc, requests by PUB/SUB, replies by PUSH/PULL.
 *
 * Nothing may be lost: no high-water marks, and a subscription is known to be there by a greeting
 * that came back. The request is published from where it is (zmq_msg_init_data), once for all
 * subscribers; requests and replies are read where ZeroMQ received them. Endpoints are abstract, so
 * nothing has a name in the file system. */
#include "channel/base/base_internal.h"
#include "tests/bench/load.h"
#include "tests/bench/subject.h"
#include "answers.h"
#include "workers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

/* A greeting is smaller than every request and reply. */
#define GREETING_SIZE sizeof(uint32_t)
#define GREETING_PERIOD_MS 10
#define GREETING_PATIENCE_NS (60 * COX_NSEC_PER_SEC)

struct broker {
    struct subject_options options;
    struct workers workers;
    char requests[64];
    char replies[64];
    /* owned, as the sockets */
    void *context;
    void *publisher;
    void *puller;
};

static void *open_socket(void *context, int type)
{
    void *opened = zmq_socket(context, type);
    const int none = 0;
    if (opened) {
        zmq_setsockopt(opened, ZMQ_SNDHWM, &none, sizeof none);
        zmq_setsockopt(opened, ZMQ_RCVHWM, &none, sizeof none);
        zmq_setsockopt(opened, ZMQ_LINGER, &none, sizeof none);
    }
    return opened;
}

static int send_small(void *to, const void *bytes, size_t size)
{
    return zmq_send(to, bytes, size, 0) < 0 ? -errno : 0;
}

static int answer(void *to, struct load *load, const uint8_t *request, uint32_t rank)
{
    zmq_msg_t reply;
    if (zmq_msg_init_size(&reply, load->reply_size) < 0)
        return -errno;
    load_answer(load, request, rank, zmq_msg_data(&reply));
    if (zmq_msg_send(&reply, to, 0) < 0) {
        int r = -errno;
        zmq_msg_close(&reply);
        return r;
    }
    return 0;
}

static const char *worker_main(const void *context, uint32_t rank)
{
    const struct broker *broker = context;
    void *zmq = zmq_ctx_new();
    void *subscriber = zmq ? open_socket(zmq, ZMQ_SUB) : NULL;
    void *pusher = zmq ? open_socket(zmq, ZMQ_PUSH) : NULL;
    struct load load;
    if (!subscriber || !pusher ||
        load_init(&load, broker->options.request_size, broker->options.reply_size) ||
        zmq_setsockopt(subscriber, ZMQ_SUBSCRIBE, "", 0) < 0 ||
        zmq_connect(subscriber, broker->requests) < 0 || zmq_connect(pusher, broker->replies) < 0)
        return zmq_strerror(errno);
    zmq_msg_t message;
    zmq_msg_init(&message);
    for (bool greeted = false;;) {
        if (zmq_msg_recv(&message, subscriber, 0) < 0) {
            if (errno == EINTR)
                continue;
            return zmq_strerror(errno);
        }
        int r = 0;
        if (zmq_msg_size(&message) == load.request_size)
            r = answer(pusher, &load, zmq_msg_data(&message), rank);
        else if (!greeted)
            r = send_small(pusher, &rank, sizeof rank);
        greeted = true;
        if (r)
            return zmq_strerror(-r);
    }
}

static void broker_stop(void *subject)
{
    struct broker *broker = subject;
    if (broker->publisher)
        zmq_close(broker->publisher);
    if (broker->puller)
        zmq_close(broker->puller);
    if (broker->context)
        zmq_ctx_term(broker->context);
    workers_stop(&broker->workers);
    free(broker);
}

/* A subscription is under way for a while after the worker asked for it: what is published before
 * is not for it. */
static int greet(struct broker *broker, struct cox_error *err)
{
    static const uint32_t greeting = 0;
    const uint64_t deadline_ns = cox_deadline_after_ns(GREETING_PATIENCE_NS);
    uint32_t answered = 0;
    while (answered < broker->options.rank_count) {
        if (cox_now_ns() > deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "%u of %u workers subscribed", answered,
                            broker->options.rank_count);
        int r = send_small(broker->publisher, &greeting, GREETING_SIZE);
        if (r)
            return cox_fail(err, r, "publishing a greeting: %s", zmq_strerror(-r));
        zmq_pollitem_t item = {.socket = broker->puller, .events = ZMQ_POLLIN};
        while (answered < broker->options.rank_count &&
               zmq_poll(&item, 1, GREETING_PERIOD_MS) > 0) {
            uint32_t rank;
            if (zmq_recv(broker->puller, &rank, sizeof rank, 0) < 0)
                return cox_fail(err, -errno, "a greeting: %s", zmq_strerror(errno));
            answered++;
        }
    }
    return 0;
}

static int broker_start(const struct subject_options *options, void **ret_subject,
                        struct cox_error *err)
{
    struct broker *broker = calloc(1, sizeof *broker);
    if (!broker)
        return cox_fail(err, -ENOMEM, "no memory");
    broker->options = *options;
    snprintf(broker->requests, sizeof broker->requests, "ipc://@coxswain-bench-%d-requests",
             getpid());
    snprintf(broker->replies, sizeof broker->replies, "ipc://@coxswain-bench-%d-replies", getpid());
    int r = workers_start(&broker->workers, options->rank_count, worker_main, broker, err);
    if (r == 0) {
        broker->context = zmq_ctx_new();
        broker->publisher = broker->context ? open_socket(broker->context, ZMQ_PUB) : NULL;
        broker->puller = broker->context ? open_socket(broker->context, ZMQ_PULL) : NULL;
        if (!broker->publisher || !broker->puller ||
            zmq_bind(broker->publisher, broker->requests) < 0 ||
            zmq_bind(broker->puller, broker->replies) < 0)
            r = cox_fail(err, -errno, "binding: %s", zmq_strerror(errno));
    }
    workers_go(&broker->workers);
    if (r == 0)
        r = greet(broker, err);
    if (r) {
        broker_stop(broker);
        return r;
    }
    *ret_subject = broker;
    return 0;
}

/* The request stays where it is until every answer is there, which is after it has been sent. */
static void keep_bytes(void *bytes, void *hint)
{
    (void)bytes;
    (void)hint;
}

static int publish(struct broker *broker, uint8_t *request)
{
    zmq_msg_t message;
    if (zmq_msg_init_data(&message, request, broker->options.request_size, keep_bytes, NULL) < 0)
        return -errno;
    if (zmq_msg_send(&message, broker->publisher, 0) < 0) {
        int r = -errno;
        zmq_msg_close(&message);
        return r;
    }
    return 0;
}

static int receive(struct broker *broker, uint64_t round, struct cox_error *err)
{
    struct answers answers;
    answers_init(&answers, &broker->options, round);
    zmq_msg_t message;
    zmq_msg_init(&message);
    int r = 0;
    while (r == 0 && answers.left > 0) {
        if (zmq_msg_recv(&message, broker->puller, 0) >= 0)
            r = answers_take(&answers, zmq_msg_data(&message), zmq_msg_size(&message), err);
        else if (errno != EINTR)
            r = cox_fail(err, -errno, "recv: %s", zmq_strerror(errno));
    }
    zmq_msg_close(&message);
    return r;
}

static int broker_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct broker *broker = subject;
    int r = publish(broker, request);
    if (r)
        return cox_fail(err, r, "publishing: %s", zmq_strerror(-r));
    return receive(broker, round, err);
}

int main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = broker_start, .round = broker_round, .stop = broker_stop};
    return subject_main(argc, argv, &ops);
}
