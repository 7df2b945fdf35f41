#include "checked_worker.h"

#include "channel/base/hash.h"
#include "tests/lib/token_hash.h"
#include "testing.h"

#include <coxswain/worker.h>

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

/* ---- callbacks ---- */

static int on_opaque(void *context, const uint8_t *bytes, size_t size, uint8_t *reply,
                     size_t capacity, size_t *ret_size, struct cox_error *err)
{
    const struct cox_worker_options *options = context;
    struct checked_request request; /* a copy: the bytes change while they are looked at */
    if (size != sizeof request || capacity < sizeof(struct checked_reply))
        return cox_fail(err, COX_CORRUPT, "a request of %zu bytes", size);
    memcpy(&request, bytes, sizeof request);
    if (request.checksum != checked_sum(&request, offsetof(struct checked_request, checksum)))
        return cox_fail(err, COX_CORRUPT, "the request was written over");
    struct checked_reply answer = {.number = request.number, .rank = options->rank};
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
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    watch_crashes();
    return test_worker_main(argc, argv, &options, &callbacks, &options, NULL);
}
