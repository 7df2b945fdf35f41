/* What control sockets reply, and what is asked of their fd stores, of any bytes. The first byte
 * says which.
 */
#include "channel/base/idioms.h"
#include "channel/socket/fd_entries.h"
#include "channel/socket/hello.h"
#include "fuzz.h"

static void hello_reply(struct fuzz_input *input)
{
    uint8_t bytes[COX_HELLO_REPLY_SIZE], again[COX_HELLO_REPLY_SIZE];
    struct cox_hello_reply read;
    struct cox_error err = {0};
    uint32_t fd_count = fuzz_eat_byte(input);
    struct cox_hello hello = {.role = (enum cox_hello_role)(1 + fuzz_eat_byte(input) % 3),
                              .fd_count_max = 1 + fuzz_eat_byte(input) % 32u};
    uint8_t rank = fuzz_eat_byte(input);
    hello.rank = rank < 128 ? rank : COX_HELLO_RANK_ANY;
    fuzz_eat(input, bytes, sizeof bytes);
    bytes[0] = COX_REPLY_HELLO;
    int r = cox_hello_reply_parse(bytes, &hello, fd_count, &read, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT);
        return;
    }
    FUZZ_CHECK(fd_count <= hello.fd_count_max);
    if (hello.role == COX_HELLO_WORKER) {
        FUZZ_CHECK(read.rank < read.rank_count && read.rank_count <= COX_RANK_COUNT_MAX);
        FUZZ_CHECK(hello.rank == COX_HELLO_RANK_ANY || read.rank == hello.rank);
    } else {
        FUZZ_CHECK(fd_count == 0);
    }
    cox_hello_reply_format(&read, fd_count, again);
    FUZZ_CHECK(memcmp(again, bytes, sizeof bytes) == 0);
}

static void refusal(struct fuzz_input *input)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    struct cox_error err = {0};
    fuzz_eat(input, bytes, sizeof bytes);
    int r = cox_refusal_parse(bytes, &err);
    fuzz_check_error(r, &err);
    FUZZ_CHECK(r > 0 && r < COX_STATUS_COUNT);
    for (const char *c = err.text; *c; c++)
        FUZZ_CHECK((unsigned char)*c >= ' ' && *c != 0x7f);
}

/* Requests of two fd owners, one after the other: what is asked and how it is changed. */
static void fd_store(struct fuzz_input *input)
{
    static int file = -1;
    static struct stat st;
    struct cox_fd_entries fd_entries;
    struct cox_fd_owner both[2] = {{.pid = 1}, {.pid = 0}};
    if (file < 0) {
        file = open("/dev/null", O_RDONLY | O_CLOEXEC);
        FUZZ_CHECK(file >= 0 && fstat(file, &st) == 0);
    }
    struct cox_closer *closer = NULL;
    FUZZ_CHECK(cox_closer_new(&closer) == 0);
    cox_fd_entries_init(&fd_entries, 1 + fuzz_eat_byte(input) % 16u, closer);
    while (input->size > 0) {
        uint8_t bytes[COX_FD_STORE_REQUEST_SIZE], how = fuzz_eat_byte(input);
        struct cox_handle handle = {{0, 0, 0, COX_HANDLE_OTHER, 1}};
        uint64_t number;
        int lent = -2, fd = how & 4 ? dup(file) : -1;
        uint32_t count = fd_entries.count;
        for (int i = 0; i < 8; i++) {
            handle.bytes[28 + i] = (uint8_t)(i < 4 ? (uint32_t)st.st_dev >> (8 * i) : 0);
            handle.bytes[32 + i] = (uint8_t)((uint64_t)st.st_ino >> (8 * i));
        }
        handle.bytes[56] = fuzz_eat_byte(input) % 32;
        cox_fd_store_request_format((enum cox_fd_store_op)(1 + (how & 3)), how, &handle, bytes);
        if (how & 8)
            bytes[fuzz_eat_byte(input) % sizeof bytes] ^= fuzz_eat_byte(input);
        int r = cox_fd_entries_serve(&fd_entries, &both[how >> 4 & 1], bytes, &fd, &lent, &number);
        FUZZ_CHECK(r >= 0 && r < COX_STATUS_COUNT);
        FUZZ_CHECK(r != 0 || lent < 0 || fcntl(lent, F_GETFD) >= 0);
        FUZZ_CHECK(r == 0 || (lent == -1 && fd_entries.count == count));
        FUZZ_CHECK(fd_entries.count == both[0].count + both[1].count);
        FUZZ_CHECK(fd_entries.count <= fd_entries.max);
        cox_close_fd(&fd);
        if (how >> 5 == 7)
            cox_fd_entries_forget(&fd_entries, &both[how >> 4 & 1]);
    }
    cox_fd_entries_forget(&fd_entries, &both[0]);
    FUZZ_CHECK(fd_entries.count == both[1].count);
    cox_fd_entries_deinit(&fd_entries);
    cox_closer_free(closer);
}

static void fd_store_reply(struct fuzz_input *input)
{
    uint8_t bytes[COX_FD_STORE_REPLY_SIZE], again[COX_FD_STORE_REPLY_SIZE];
    uint64_t number;
    int status;
    fuzz_eat(input, bytes, sizeof bytes);
    if (cox_fd_store_reply_parse(bytes, &status, &number))
        return;
    FUZZ_CHECK(status >= 0 && status < COX_STATUS_COUNT);
    cox_fd_store_reply_format(status, number, again);
    FUZZ_CHECK(memcmp(again, bytes, sizeof bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    switch (fuzz_eat_byte(&input) % 4) {
    case 0:
        hello_reply(&input);
        break;
    case 1:
        refusal(&input);
        break;
    case 2:
        fd_store(&input);
        break;
    default:
        fd_store_reply(&input);
    }
    return 0;
}
