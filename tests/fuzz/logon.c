/* A logon frame of any bytes: refused in words, or every byte of it has the meaning that was taken.
 */
#include "fuzz.h"

#include "channel/socket/logon.h"

static void logon_trusted(const struct cox_logon *logon, const uint8_t *frame)
{
    uint8_t again[COX_LOGON_SIZE];
    bool worker = logon->role == COX_HELLO_WORKER;
    FUZZ_CHECK(worker || logon->role == COX_HELLO_COMMAND || logon->role == COX_HELLO_FD_STORE);
    FUZZ_CHECK(logon->version == COX_HELLO_VERSION && logon->flags == 0);
    FUZZ_CHECK(logon->rank_count <= COX_RANK_COUNT_MAX);
    FUZZ_CHECK(logon->rank == COX_HELLO_RANK_ANY || logon->rank < COX_RANK_COUNT_MAX);
    FUZZ_CHECK(logon->fd_count_max >= 1 && logon->fd_count_max <= 128);
    FUZZ_CHECK(logon->request_size_min <= SIZE_MAX / 2 && logon->response_size_min <= SIZE_MAX / 2);
    FUZZ_CHECK(worker || (logon->rank == 0 && logon->rank_count == 0 && logon->generation == 0));
    cox_logon_format(logon, again);
    /* Where 0 stands for a number, that number is what is written. */
    if (frame[28] == 0 && frame[29] == 0 && frame[30] == 0 && frame[31] == 0)
        memset(again + 28, 0, 4);
    FUZZ_CHECK(memcmp(again, frame, sizeof again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    uint8_t frame[COX_LOGON_SIZE];
    struct cox_logon logon;
    struct cox_error err = {0};
    fuzz_eat(&input, frame, sizeof frame);
    memset(&logon, 0x5a, sizeof logon);
    int r = cox_logon_parse(frame, &logon, &err);
    if (r == 0) {
        logon_trusted(&logon, frame);
        return 0;
    }
    fuzz_check_error(r, &err);
    FUZZ_CHECK(r == COX_VERSION || r == COX_INVALID);
    FUZZ_CHECK(logon.start == UINT64_C(0x5a5a5a5a5a5a5a5a));
    /* What the client is told of it. */
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    struct cox_error told = {0};
    FUZZ_CHECK(cox_refusal_format(r, err.text, bytes) <= sizeof bytes);
    FUZZ_CHECK(cox_refusal_parse(bytes, &told) == r);
    fuzz_check_error(r, &told);
    return 0;
}
