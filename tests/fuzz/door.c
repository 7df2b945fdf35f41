/* What doors answer, and what is asked of their depots, of any bytes. The first byte says which. */
#include "fuzz.h"

#include "channel/socket/deposits.h"
#include "channel/socket/logon.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void welcome(struct fuzz_input *input)
{
    uint8_t bytes[COX_WELCOME_SIZE], again[COX_WELCOME_SIZE];
    struct cox_welcome read;
    struct cox_error err = {0};
    uint32_t fd_count = fuzz_eat_byte(input);
    struct cox_logon logon = {.role = (enum cox_door_role)(1 + fuzz_eat_byte(input) % 3),
                              .fd_count_max = 1 + fuzz_eat_byte(input) % 32u};
    uint8_t rank = fuzz_eat_byte(input);
    logon.rank = rank < 128 ? rank : COX_DOOR_RANK_ANY;
    fuzz_eat(input, bytes, sizeof bytes);
    bytes[0] = COX_ANSWER_WELCOME;
    int r = cox_welcome_parse(bytes, &logon, fd_count, &read, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT);
        return;
    }
    FUZZ_CHECK(fd_count <= logon.fd_count_max);
    if (logon.role == COX_DOOR_WORKER) {
        FUZZ_CHECK(read.rank < read.rank_count && read.rank_count <= COX_RANK_COUNT_MAX);
        FUZZ_CHECK(logon.rank == COX_DOOR_RANK_ANY || read.rank == logon.rank);
    } else {
        FUZZ_CHECK(fd_count == 0);
    }
    cox_welcome_format(&read, fd_count, again);
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

/* Requests of two depositors, one after the other: what is asked and how it is changed. */
static void depot(struct fuzz_input *input)
{
    static int file = -1;
    static struct stat st;
    struct cox_deposits deposits;
    struct cox_depositor both[2] = {{.pid = 1}, {.pid = 0}};
    if (file < 0) {
        file = open("/dev/null", O_RDONLY | O_CLOEXEC);
        FUZZ_CHECK(file >= 0 && fstat(file, &st) == 0);
    }
    struct cox_closer *closer = NULL;
    FUZZ_CHECK(cox_closer_new(&closer) == 0);
    cox_deposits_init(&deposits, 1 + fuzz_eat_byte(input) % 16u, closer);
    while (input->size > 0) {
        uint8_t bytes[COX_DEPOT_REQUEST_SIZE], how = fuzz_eat_byte(input);
        struct cox_handle handle = {{0, 0, 0, COX_HANDLE_OTHER, 1}};
        uint64_t number;
        int lent = -2, fd = how & 4 ? dup(file) : -1;
        uint32_t count = deposits.count;
        for (int i = 0; i < 8; i++) {
            handle.bytes[28 + i] = i < 4 ? (uint8_t)((uint32_t)st.st_dev >> (8 * i)) : 0;
            handle.bytes[32 + i] = (uint8_t)((uint64_t)st.st_ino >> (8 * i));
        }
        handle.bytes[56] = fuzz_eat_byte(input) % 32;
        cox_depot_request_format((enum cox_depot_op)(1 + (how & 3)), how, &handle, bytes);
        if (how & 8)
            bytes[fuzz_eat_byte(input) % sizeof bytes] ^= fuzz_eat_byte(input);
        int r = cox_deposits_serve(&deposits, &both[how >> 4 & 1], bytes, &fd, &lent, &number);
        FUZZ_CHECK(r >= 0 && r < COX_STATUS_COUNT);
        FUZZ_CHECK(r != 0 || lent < 0 || fcntl(lent, F_GETFD) >= 0);
        FUZZ_CHECK(r == 0 || (lent == -1 && deposits.count == count));
        FUZZ_CHECK(deposits.count == both[0].count + both[1].count);
        FUZZ_CHECK(deposits.count <= deposits.max);
        cox_close_fd(&fd);
        if (how >> 5 == 7)
            cox_deposits_forget(&deposits, &both[how >> 4 & 1]);
    }
    cox_deposits_forget(&deposits, &both[0]);
    FUZZ_CHECK(deposits.count == both[1].count);
    cox_deposits_deinit(&deposits);
    cox_closer_free(closer);
}

static void depot_answer(struct fuzz_input *input)
{
    uint8_t bytes[COX_DEPOT_ANSWER_SIZE], again[COX_DEPOT_ANSWER_SIZE];
    uint64_t number;
    int status;
    fuzz_eat(input, bytes, sizeof bytes);
    if (cox_depot_answer_parse(bytes, &status, &number))
        return;
    FUZZ_CHECK(status >= 0 && status < COX_STATUS_COUNT);
    cox_depot_answer_format(status, number, again);
    FUZZ_CHECK(memcmp(again, bytes, sizeof bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    switch (fuzz_eat_byte(&input) % 4) {
    case 0:
        welcome(&input);
        break;
    case 1:
        refusal(&input);
        break;
    case 2:
        depot(&input);
        break;
    default:
        depot_answer(&input);
    }
    return 0;
}
