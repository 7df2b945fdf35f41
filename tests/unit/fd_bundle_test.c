#include "channel/shm/fd_bundle.h"

#include "channel_fixture.h"

#define FIRST 300

/* Files of one page from fd FIRST on, but for one that is odd. */
static void fds_make(int odd, int odd_fd)
{
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++) {
        int fd = memfd_create("test", 0);
        assert_true(fd >= 0);
        assert_int_equal(ftruncate(fd, 4096), 0);
        if (i == odd && odd_fd < 0)
            close(fd); /* nothing is there */
        else
            assert_int_equal(dup2(i == odd ? odd_fd : fd, FIRST + i), FIRST + i);
        if (i != odd || odd_fd >= 0)
            close(fd);
    }
}

static void fds_close(void)
{
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
        close(FIRST + i);
}

LEAK_TEST(what_is_handed_down_is_taken)
{
    struct cox_fd_bundle bundle;
    fds_make(-1, -1);
    assert_ok(cox_fd_bundle_take(&bundle, FIRST, COX_FD_BUNDLE_COUNT, test_err()));
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++) {
        assert_int_equal(bundle.fds[i], FIRST + i);
        assert_int_equal(fcntl(FIRST + i, F_GETFD), FD_CLOEXEC);
    }
    cox_fd_bundle_close(&bundle);
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
        assert_int_equal(fcntl(FIRST + i, F_GETFD), -1);
}

static void refused(int first, uint32_t count, int expected, const char *text)
{
    struct cox_fd_bundle bundle;
    assert_refused(cox_fd_bundle_take(&bundle, first, count, test_err()), expected, text);
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
        assert_int_equal(bundle.fds[i], -1);
    cox_fd_bundle_close(&bundle);
}

/* Whichever is wrong: none is closed, none is changed. */
LEAK_TEST(b8_what_is_none_of_ours_stays_open)
{
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    int empty = memfd_create("empty", MFD_CLOEXEC);
    const struct {
        int fd, expected;
        const char *text;
    } odds[] = {
        {-1, COX_INVALID, "is not open"},
        {ends[0], COX_DENIED, "is no memory of a group"},
        {empty, COX_DENIED, "is no memory of a group"},
    };
    for (size_t o = 0; o < sizeof odds / sizeof odds[0]; o++)
        for (int odd = 0; odd < COX_FD_BUNDLE_COUNT; odd += 9) {
            char named[32];
            fds_make(odd, odds[o].fd);
            refused(FIRST, COX_FD_BUNDLE_COUNT, odds[o].expected, odds[o].text);
            snprintf(named, sizeof named, "fd %d, ", FIRST + odd);
            refused(FIRST, COX_FD_BUNDLE_COUNT, odds[o].expected, named);
            for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
                assert_int_equal(fcntl(FIRST + i, F_GETFD), i == odd && odds[o].fd < 0 ? -1 : 0);
            fds_close();
        }
    close(ends[0]);
    close(ends[1]);
    close(empty);
}

LEAK_TEST(numbers_that_cannot_be_are_refused)
{
    refused(FIRST, COX_FD_BUNDLE_COUNT - 1, COX_INVALID, "28 fds are handed down, expected 29");
    refused(FIRST, UINT32_MAX, COX_INVALID, "different versions");
    refused(-1, COX_FD_BUNDLE_COUNT, COX_INVALID, "from -1 on");
    refused(INT_MAX, COX_FD_BUNDLE_COUNT, COX_INVALID, "from 2147483647 on");
    refused(INT_MAX - COX_FD_BUNDLE_COUNT, COX_FD_BUNDLE_COUNT, COX_INVALID, "is not open");
}

LEAK_TEST(p4_an_eventfd_is_taken_and_nothing_else)
{
    struct cox_fd_bundle bundle;
    struct cox_error err = {0};
    const int number = eventfd(0, 0), file = memfd_create("file", MFD_CLOEXEC);
    cox_fd_bundle_init(&bundle);
    assert_refused(cox_fd_bundle_take_notify(&bundle, file, test_err()), COX_DENIED,
                   "expected an eventfd");
    close(file);
    cox_error_clear(&err);
    assert_refused(cox_fd_bundle_take_notify(&bundle, file, test_err()), COX_INVALID,
                   "is not open");
    assert_int_equal(bundle.notify_fd, -1);
    assert_int_equal(cox_fd_bundle_take_notify(&bundle, number, &err), 0);
    assert_int_equal(bundle.notify_fd, number);
    assert_int_equal(fcntl(number, F_GETFD), FD_CLOEXEC);
    cox_fd_bundle_close(&bundle);
    assert_int_equal(fcntl(number, F_GETFD), -1);
}
