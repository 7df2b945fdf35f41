#include "checked_worker.h"

#include "channel/attach/named/names.h"
#include "channel/base/hash.h"
#include "channel/shm/state.h"
#include "meddler.h"
#include "tests/lib/token_hash.h"
#include "tests/lib/posix.h"
#include <coxswain/worker.h>

struct checked {
    struct cox_worker_options options;
    struct meddler meddler;
    bool meddles;
};

uint64_t checked_sum(const void *bytes, size_t size)
{
    return cox_hash_bytes(COX_HASH_START, bytes, size);
}

/* ---- crashes ---- */

static void tell_crash(void)
{
    static const char text[] = "\n" CHECKED_CRASH "\n";
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
}

static void on_signal(int number)
{
    tell_crash();
    signal(number, SIG_DFL);
    raise(number);
}

/* The sanitizers end a program without a signal. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void watch_crashes(void)
{
    static const int numbers[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(tell_crash);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i] == SIGABRT || !__sanitizer_set_death_callback)
            signal(numbers[i], on_signal);
}

/* ---- orders ---- */

static void *meddle(void *argument)
{
    meddler_run(argument, -1, NULL);
    return NULL;
}

static int start_meddling(struct checked *checked, uint64_t seed, struct cox_error *err)
{
    pthread_t thread;
    if (checked->meddles)
        return 0;
    int r = meddler_attach(&checked->meddler, checked->options.prefix + 1, seed, err);
    if (r == 0)
        r = -pthread_create(&thread, NULL, meddle, &checked->meddler);
    if (r)
        return r;
    pthread_detach(thread);
    checked->meddles = true;
    return 0;
}

static int overcount(const struct checked *checked, struct cox_error *err)
{
    struct cox_control control = COX_CONTROL_NONE;
    int r = cox_control_attach(&control, checked->options.prefix + 1, err);
    if (r)
        return r;
    /* relaxed: a meddler's word has no partner. */
    atomic_store_explicit(&cox_state_channel(&control, COX_CHANNEL_EXECUTE)->published, UINT64_MAX,
                          memory_order_relaxed);
    cox_control_close(&control);
    return 0;
}

/* ---- callbacks ---- */

static int on_opaque(void *context, const uint8_t *bytes, size_t size, uint8_t *reply,
                     size_t capacity, size_t *ret_size, struct cox_error *err)
{
    struct checked *checked = context;
    struct checked_request request; /* a copy: the bytes change while they are looked at */
    if (size != sizeof request || capacity < sizeof(struct checked_reply))
        return cox_fail(err, COX_CORRUPT, "a request of %zu bytes", size);
    memcpy(&request, bytes, sizeof request);
    if (request.checksum != checked_sum(&request, offsetof(struct checked_request, checksum)))
        return cox_fail(err, COX_CORRUPT, "the request was written over");
    int r = 0;
    if (request.order == CHECKED_MEDDLE && request.rank == checked->options.rank)
        r = start_meddling(checked, request.seed, err);
    if (request.order == CHECKED_OVERCOUNT && request.rank == checked->options.rank)
        r = overcount(checked, err);
    if (r)
        return r;
    struct checked_reply answer = {.number = request.number, .rank = checked->options.rank};
    memcpy(answer.fill, request.fill, sizeof answer.fill);
    answer.checksum = checked_sum(&answer, offsetof(struct checked_reply, checksum));
    memcpy(reply, &answer, sizeof answer);
    *ret_size = sizeof answer;
    return 0;
}

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    (void)context, (void)err;
    result->npu_block_count = 100;
    result->early_stopping_ids = cox_init_request_get(request, "early");
    return 0;
}

static int on_execute(void *context, const struct cox_batch *batch,
                      struct cox_batch_output *outputs, struct cox_error *err)
{
    (void)context, (void)err;
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].emit)
            outputs[i].token =
                (int32_t)(test_token_hash(batch->rows[i].tokens,
                                          batch->rows[i].position + batch->rows[i].token_count) %
                          1000);
    return 0;
}

static int on_command(void *context, struct cox_error *err)
{
    (void)context, (void)err;
    return 0;
}

int checked_worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .init = on_init,
                                                          .execute = on_execute,
                                                          .opaque = on_opaque,
                                                          .pause = on_command};
    static struct checked checked = {
        .options =
            COX_WORKER_OPTIONS_INIT}; /* the meddling thread uses it until the process ends */
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    watch_crashes();
    int r = cox_worker_options_parse(&checked.options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&checked.options, &callbacks, &checked, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "worker: %s\n", err.text);
    cox_worker_free(worker);
    return r != 0;
}
