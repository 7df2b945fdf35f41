#include "channel/socket/fd_entries.h"
#include "channel_fixture.h"

static struct cox_fd_entries fd_entries;
static struct cox_fd_owner one, other;
static struct cox_closer *closer;
static int file = -1;

/* Other entries, so many. */
static void entries_new(uint32_t max)
{
    cox_fd_entries_deinit(&fd_entries);
    cox_fd_entries_init(&fd_entries, max, closer);
}

static int setup(void **state)
{
    leak_setup(state);
    file = memfd_create("test", MFD_CLOEXEC);
    one = (struct cox_fd_owner){.pid = 1234};
    other = (struct cox_fd_owner){.pid = 99};
    if (file < 0 || cox_closer_new(&closer))
        return -1;
    cox_fd_entries_init(&fd_entries, 8, closer);
    return 0;
}

static int teardown(void **state)
{
    cox_fd_entries_deinit(&fd_entries);
    cox_fd_entries_deinit(&fd_entries);
    closer = cox_closer_free(closer);
    cox_close_fd(&file);
    return leak_teardown(state);
}

#define ENTRIES_TEST(name) TEST_WITH(name, setup, teardown)

static void set(uint8_t *bytes, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

/* As handle.h lays it out. */
static struct cox_handle handle_of(int fd, pid_t pid, uint32_t number)
{
    struct cox_handle handle = {{0}};
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    handle.bytes[3] = S_ISREG(st.st_mode) ? COX_HANDLE_MEMORY : COX_HANDLE_OTHER;
    set(handle.bytes + 4, 4, (uint64_t)pid);
    set(handle.bytes + 28, 4, st.st_dev);
    set(handle.bytes + 32, 8, st.st_ino);
    set(handle.bytes + 56, 4, number);
    return handle;
}

static int ask(struct cox_fd_owner *fd_owner, enum cox_fd_store_op op,
               const struct cox_handle *handle, int fd, int *ret_fd)
{
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE];
    uint64_t number = 0;
    int lent = -2, brought = fd >= 0 ? dup(fd) : -1;
    cox_fd_store_request_format(op, 0x1122334455667788, handle, bytes);
    int r = cox_fd_entries_serve(&fd_entries, fd_owner, bytes, &brought, &lent, &number);
    assert_int_equal(number, 0x1122334455667788);
    assert_true(r == 0 || lent == -1);
    assert_true((op == COX_FD_STORE_PUT && r == 0) == (fd >= 0 && brought < 0));
    cox_close_fd(&brought);
    if (ret_fd)
        *ret_fd = lent;
    return r;
}

ENTRIES_TEST(what_is_put_is_fetched_until_it_is_withdrawn)
{
    struct cox_handle handle = handle_of(file, one.pid, 1), similar = handle;
    struct stat st, own;
    int fd;
    similar.bytes[63] ^= 1;
    assert_int_equal(ask(&other, COX_FD_STORE_GET, &handle, -1, &fd), COX_NOT_FOUND);
    assert_int_equal(ask(&one, COX_FD_STORE_REMOVE, &handle, -1, NULL), COX_NOT_FOUND);
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), 0);
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), COX_TAKEN);
    assert_int_equal(ask(&other, COX_FD_STORE_GET, &similar, -1, &fd), COX_NOT_FOUND);
    assert_int_equal(ask(&other, COX_FD_STORE_GET, &handle, -1, &fd), 0);
    assert_int_equal(fstat(fd, &st) | fstat(file, &own), 0);
    assert_int_equal(st.st_ino, own.st_ino);
    assert_int_equal(ask(&other, COX_FD_STORE_REMOVE, &handle, -1, NULL), COX_NOT_FOUND);
    assert_int_equal(ask(&one, COX_FD_STORE_REMOVE, &handle, -1, NULL), 0);
    assert_int_equal(ask(&other, COX_FD_STORE_GET, &handle, -1, &fd), COX_NOT_FOUND);
    assert_int_equal(fd_entries.count | one.count, 0);
}

ENTRIES_TEST(a_handle_of_another_user_or_object_is_denied)
{
    int pair[2];
    test_pipe(pair);
    struct cox_handle handle = handle_of(file, one.pid + 1, 1);
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), COX_DENIED);
    const size_t fields[] = {3, 4, 7, 28, 31, 32, 39}; /* kind, pid, dev, ino */
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        handle = handle_of(file, one.pid, 1);
        handle.bytes[fields[i]] ^= 0x80;
        assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), COX_DENIED);
    }
    handle = handle_of(pair[0], one.pid, 1);
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), COX_DENIED);
    handle.bytes[3] = COX_HANDLE_MEMORY; /* a pipe is none */
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, pair[0], NULL), COX_DENIED);
    handle.bytes[3] = COX_HANDLE_OTHER;
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, pair[0], NULL), 0);
    one.pid = 0; /* another pid namespace: its pids mean nothing here */
    handle = handle_of(file, 4711, 1);
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), 0);
    assert_int_equal(fd_entries.count, 2);
}

ENTRIES_TEST(nonsense_is_invalid)
{
    struct cox_handle handle = handle_of(file, one.pid, 1);
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE];
    uint64_t number;
    int fd = -1, lent;
    assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, -1, NULL), COX_INVALID);
    assert_int_equal(ask(&one, COX_FD_STORE_GET, &handle, file, NULL), COX_INVALID);
    assert_int_equal(ask(&one, COX_FD_STORE_REMOVE, &handle, file, NULL), COX_INVALID);
    assert_int_equal(ask(&one, (enum cox_fd_store_op)0, &handle, -1, NULL), COX_INVALID);
    assert_int_equal(ask(&one, (enum cox_fd_store_op)4, &handle, -1, NULL), COX_INVALID);
    for (size_t at = 4; at < 64; at++) {
        cox_fd_store_request_format(COX_FD_STORE_GET, 0, &handle, bytes);
        bytes[at] = 1;
        assert_int_equal(cox_fd_entries_serve(&fd_entries, &one, bytes, &fd, &lent, &number),
                         at >= 8 && at < 16 ? COX_NOT_FOUND : COX_INVALID);
    }
    assert_int_equal(fd_entries.count, 0);
}

ENTRIES_TEST(no_more_are_kept_than_the_limit)
{
    entries_new(16);
    for (uint32_t i = 0; i < 16; i++) {
        struct cox_handle handle = handle_of(file, one.pid, i);
        assert_int_equal(ask(&one, COX_FD_STORE_PUT, &handle, file, NULL), i < 14 ? 0 : COX_FULL);
    }
    for (uint32_t i = 0; i < 3; i++) { /* what one may not have, another one may */
        struct cox_handle handle = handle_of(file, other.pid, i);
        assert_int_equal(ask(&other, COX_FD_STORE_PUT, &handle, file, NULL), i < 2 ? 0 : COX_FULL);
    }
    struct cox_handle first = handle_of(file, one.pid, 0), more = handle_of(file, other.pid, 77);
    assert_int_equal(ask(&one, COX_FD_STORE_REMOVE, &first, -1, NULL), 0);
    assert_int_equal(ask(&other, COX_FD_STORE_PUT, &more, file, NULL), 0);
}

/* Many, in any order: what one left and did not withdraw goes with it, and nothing else. */
ENTRIES_TEST(b15_what_an_fd_owner_stored_goes_with_it)
{
    enum { COUNT = 300 };
    bool there[2][COUNT] = {{false}};
    struct cox_fd_owner *both[2] = {&one, &other};
    uint64_t seed = 42;
    entries_new(100000);
    int before = fd_count();
    for (int step = 0; step < 20000; step++) {
        uint32_t who = random_next(&seed) % 2, which = (uint32_t)(random_next(&seed) % COUNT);
        bool *is = &there[who][which];
        struct cox_handle handle = handle_of(file, both[who]->pid, which);
        switch (random_next(&seed) % 3) {
        case 0:
            assert_int_equal(ask(both[who], COX_FD_STORE_PUT, &handle, file, NULL),
                             *is ? COX_TAKEN : 0);
            *is = true;
            break;
        case 1:
            assert_int_equal(ask(both[who], COX_FD_STORE_REMOVE, &handle, -1, NULL),
                             *is ? 0 : COX_NOT_FOUND);
            *is = false;
            break;
        default:
            assert_int_equal(ask(both[!who], COX_FD_STORE_GET, &handle, -1, NULL),
                             *is ? 0 : COX_NOT_FOUND);
        }
        if (step == 15000) {
            cox_fd_entries_forget(&fd_entries, &one);
            memset(there[0], 0, sizeof there[0]);
        }
    }
    uint32_t left[2] = {0};
    for (int i = 0; i < 2 * COUNT; i++)
        left[i / COUNT] += there[i / COUNT][i % COUNT];
    assert_int_equal(one.count, left[0]);
    assert_int_equal(other.count, left[1]);
    AWAIT(fd_count() == before + (int)(left[0] + left[1])); /* the closer's thread is at it */
    cox_fd_entries_forget(&fd_entries, &one);
    AWAIT(fd_count() == before + (int)left[1]); /* the closer's thread is at it */
    cox_fd_entries_forget(&fd_entries, &other);
    assert_int_equal(fd_entries.count, 0);
    AWAIT(fd_count() == before); /* the closer's thread is at it */
}

ENTRIES_TEST(b14_an_reply_of_any_bytes)
{
    uint8_t good[COX_FD_STORE_REPLY_SIZE], bytes[COX_FD_STORE_REPLY_SIZE];
    uint64_t number;
    int status;
    cox_fd_store_reply_format(COX_FULL, 0x0102030405060708, good);
    assert_int_equal(cox_fd_store_reply_parse(good, &status, &number), 0);
    assert_int_equal(status, COX_FULL);
    assert_true(number == 0x0102030405060708);
    for (size_t bit = 0; bit < sizeof good * 8; bit++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        int r = cox_fd_store_reply_parse(bytes, &status, &number);
        assert_int_equal(r, bit >= 64 || bytes[0] < COX_STATUS_COUNT
                                ? (bit >= 8 && bit < 64 ? COX_CORRUPT : 0)
                                : COX_CORRUPT);
    }
}
