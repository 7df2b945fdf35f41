/* A hello frame of any bytes: refused in words, or every byte of it has the meaning that was taken.
 */
#include "fuzz.h"

#include "channel/socket/hello.h"

static void hello_trusted(const struct cox_hello *hello, const uint8_t *frame)
{
    uint8_t again[COX_HELLO_SIZE];
    bool worker = hello->role == COX_HELLO_WORKER;
    FUZZ_CHECK(worker || hello->role == COX_HELLO_COMMAND || hello->role == COX_HELLO_FD_STORE);
    FUZZ_CHECK(hello->version == COX_HELLO_VERSION && hello->flags == 0);
    FUZZ_CHECK(hello->rank_count <= COX_RANK_COUNT_MAX);
    FUZZ_CHECK(hello->rank == COX_HELLO_RANK_ANY || hello->rank < COX_RANK_COUNT_MAX);
    FUZZ_CHECK(hello->fd_count_max >= 1 && hello->fd_count_max <= 128);
    FUZZ_CHECK(hello->request_size_min <= SIZE_MAX / 2 && hello->response_size_min <= SIZE_MAX / 2);
    FUZZ_CHECK(worker || (hello->rank == 0 && hello->rank_count == 0 && hello->incarnation == 0));
    cox_hello_format(hello, again);
    /* Where 0 stands for a number, that number is what is written. */
    if (frame[28] == 0 && frame[29] == 0 && frame[30] == 0 && frame[31] == 0)
        memset(again + 28, 0, 4);
    FUZZ_CHECK(memcmp(again, frame, sizeof again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    uint8_t frame[COX_HELLO_SIZE];
    struct cox_hello hello;
    struct cox_error err = {0};
    fuzz_eat(&input, frame, sizeof frame);
    memset(&hello, 0x5a, sizeof hello);
    int r = cox_hello_parse(frame, &hello, &err);
    if (r == 0) {
        hello_trusted(&hello, frame);
        return 0;
    }
    fuzz_check_error(r, &err);
    FUZZ_CHECK(r == COX_VERSION || r == COX_INVALID);
    FUZZ_CHECK(hello.start == UINT64_C(0x5a5a5a5a5a5a5a5a));
    /* The refusal that the client gets. */
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    struct cox_error told = {0};
    FUZZ_CHECK(cox_refusal_format(r, err.text, bytes) <= sizeof bytes);
    FUZZ_CHECK(cox_refusal_parse(bytes, &told) == r);
    fuzz_check_error(r, &told);
    return 0;
}
