#include "channel/socket/closer.h"
#include "channel/socket/runtime_dir.h"
#include "channel/socket/socket.h"
#include "tests/lib/rights.h"
#include "channel_fixture.h"

#include <sys/time.h>

#define PATIENCE cox_deadline_after_ms(60000)
#define LARGE_SIZE (UINT32_C(4) << 20)

/* Each test has a pair, and perhaps a folder for names. */
static int ends[2];
static char folder[64], path[512];

/* Another pair. */
static void ends_make(void)
{
    cox_close_fd(&ends[0]);
    cox_close_fd(&ends[1]);
    assert_int_equal(cox_socket_pair(ends), 0);
}

static void folder_make(const char *file)
{
    strcpy(folder, "/tmp/cox_socket_XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/%s", folder, file);
}

static int setup(void **state)
{
    folder[0] = '\0';
    return leak_setup(state) || cox_socket_pair(ends);
}

static int teardown(void **state)
{
    cox_close_fd(&ends[0]);
    cox_close_fd(&ends[1]);
    if (folder[0] && rmdir(folder)) /* nothing is left in it */
        return -1;
    return leak_teardown(state);
}

#define SOCKET_TEST(name) TEST_WITH(name, setup, teardown)

static ino_t inode(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* The test's own. */
static int file_new(void)
{
    return test_own_fd(memfd_create("test", MFD_CLOEXEC));
}

static void fds_make(int *fds, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        fds[i] = file_new();
}

static void fds_close(int *fds, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_close_fd(&fds[i]);
}

SOCKET_TEST(k28_bytes_and_fds_arrive_as_they_were_sent)
{
    for (uint32_t count = 0; count <= COX_SOCKET_FD_COUNT_MAX; count = count ? count * 2 : 1) {
        int sent[COX_SOCKET_FD_COUNT_MAX], came[COX_SOCKET_FD_COUNT_MAX];
        uint32_t came_count = 999;
        char text[6];
        ends_make();
        fds_make(sent, count);
        assert_int_equal(cox_socket_send(ends[0], "hello", 6, sent, count, PATIENCE), 0);
        assert_int_equal(cox_socket_receive(ends[1], text, 6, came, count, &came_count, PATIENCE),
                         0);
        assert_string_equal(text, "hello");
        assert_int_equal(came_count, count);
        for (uint32_t i = 0; i < count; i++) {
            assert_int_equal(inode(came[i]), inode(sent[i])); /* in order */
            assert_true(came[i] > STDERR_FILENO);
        }
        fds_close(came, count);
    }
}

SOCKET_TEST(k16_what_arrives_closes_over_exec)
{
    int open_fd = test_own_fd(memfd_create("test", 0)), came;
    uint32_t count;
    char byte;
    assert_int_equal(fcntl(ends[0], F_GETFD), FD_CLOEXEC);
    assert_int_equal(fcntl(ends[1], F_GETFD), FD_CLOEXEC);
    assert_int_equal(cox_socket_send(ends[0], "x", 1, &open_fd, 1, PATIENCE), 0);
    assert_int_equal(cox_socket_receive(ends[1], &byte, 1, &came, 1, &count, PATIENCE), 0);
    assert_int_equal(fcntl(came, F_GETFD), FD_CLOEXEC);
    close(came);
}

static void without_standard_fds(void *context)
{
    (void)context;
    int pair[2], came[2], one, sent[2] = {file_new(), file_new()};
    uint32_t count;
    size_t size;
    char byte;
    CHECK(cox_socket_pair(ends) == 0);
    close(0);
    close(1);
    CHECK(cox_socket_pair(pair) == 0);
    CHECK(pair[0] > STDERR_FILENO && pair[1] > STDERR_FILENO);
    CHECK(cox_socket_send(ends[0], "x", 1, sent, 2, PATIENCE) == 0);
    CHECK(cox_socket_receive(ends[1], &byte, 1, came, 2, &count, PATIENCE) == 0);
    CHECK(count == 2 && came[0] > STDERR_FILENO && came[1] > STDERR_FILENO);
    CHECK(fcntl(came[0], F_GETFD) == FD_CLOEXEC && inode(came[1]) == inode(sent[1]));
    CHECK(cox_socket_send(ends[0], "x", 1, sent, 1, PATIENCE) == 0);
    CHECK(cox_closer_receive(ends[1], &byte, 1, &size, &one) == 0);
    CHECK(one > STDERR_FILENO && inode(one) == inode(sent[0]));
    CHECK(fcntl(0, F_GETFD) < 0 && fcntl(1, F_GETFD) < 0);
}

SOCKET_TEST(b15_the_numbers_of_standard_fds_are_never_used)
{
    child_run(without_standard_fds, NULL);
}

/* One number is free that is not a standard fd's, for one end or for none. */
static void room_for_one_end(void *context)
{
    const int spare = dup(ends[0]);
    const struct rlimit limit = {(rlim_t)spare + 1, (rlim_t)spare + 1};
    int pair[2];
    (void)context;
    CHECK(spare > STDERR_FILENO && setrlimit(RLIMIT_NOFILE, &limit) == 0);
    close(spare);
    for (int fd = STDIN_FILENO; fd <= STDOUT_FILENO; fd++) {
        close(fd);
        CHECK(cox_socket_pair(pair) == -EMFILE);
        CHECK(fcntl(STDIN_FILENO, F_GETFD) < 0 && fcntl(fd, F_GETFD) < 0 &&
              fcntl(spare, F_GETFD) < 0);
    }
}

SOCKET_TEST(b19_a_pair_is_both_ends_or_none)
{
    child_run(room_for_one_end, NULL);
}

/* Each refusal: COX_CORRUPT, and no fd stays. */
SOCKET_TEST(k18_b17_more_fds_than_expected_are_refused_and_closed)
{
    for (uint32_t max = 0; max <= 4; max++) {
        int sent[COX_SOCKET_FD_COUNT_MAX], came[COX_SOCKET_FD_COUNT_MAX];
        uint32_t count = 77;
        char byte;
        memset(came, 0x5a, sizeof came);
        ends_make();
        fds_make(sent, COX_SOCKET_FD_COUNT_MAX);
        int before = fd_count();
        assert_int_equal(cox_socket_send(ends[0], "x", 1, sent, max == 4 ? 128 : max + 1, PATIENCE),
                         0);
        assert_int_equal(cox_socket_receive(ends[1], &byte, 1, came, max, &count, PATIENCE),
                         COX_CORRUPT);
        assert_int_equal(fd_count(), before);
        assert_int_equal(count, 77);
        assert_int_equal(came[0], 0x5a5a5a5a);
    }
}

/* As many as the kernel allows in one message, which our own side never sends. */
SOCKET_TEST(k18_the_longest_list_is_refused_and_closed)
{
    int sent[253], came[COX_SOCKET_FD_COUNT_MAX];
    char byte = 'x', control[CMSG_SPACE(sizeof sent)] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    uint32_t count;
    for (size_t i = 0; i < 253; i++)
        sent[i] = ends[0];
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof sent);
    memcpy(CMSG_DATA(c), sent, sizeof sent);
    int before = fd_count();
    assert_int_equal(sendmsg(ends[0], &message, 0), 1);
    assert_int_equal(
        cox_socket_receive(ends[1], &byte, 1, came, COX_SOCKET_FD_COUNT_MAX, &count, PATIENCE),
        COX_CORRUPT);
    assert_int_equal(fd_count(), before);
}

/* With a list that came before: those are closed too. */
SOCKET_TEST(k18_fds_in_several_parts_are_counted_together)
{
    int fd = file_new(), came[8];
    uint32_t count;
    char text[3];
    for (uint32_t max = 2; max <= 3; max++) {
        ends_make();
        int before = fd_count();
        for (int i = 0; i < 3; i++)
            assert_int_equal(cox_socket_send(ends[0], "x", 1, &fd, 1, PATIENCE), 0);
        int r = cox_socket_receive(ends[1], text, 3, came, max, &count, PATIENCE);
        assert_int_equal(r, max == 3 ? 0 : COX_CORRUPT);
        if (r == 0) {
            assert_int_equal(count, 3);
            fds_close(came, 3);
        }
        assert_int_equal(fd_count(), before);
    }
}

SOCKET_TEST(k18_another_control_message_is_refused)
{
    int fd = file_new(), came, on = 1;
    uint32_t count;
    char byte;
    int before = fd_count();
    assert_int_equal(setsockopt(ends[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on), 0);
    assert_int_equal(cox_socket_send(ends[0], "x", 1, &fd, 1, PATIENCE), 0);
    assert_int_equal(cox_socket_receive(ends[1], &byte, 1, &came, 1, &count, PATIENCE),
                     COX_CORRUPT);
    assert_int_equal(fd_count(), before);
}

static void few_fds(void *context)
{
    int sent[8], came[8], before;
    uint32_t count;
    char byte;
    (void)context;
    ends_make();
    fds_make(sent, 8);
    before = fd_count();
    CHECK(cox_socket_send(ends[0], "x", 1, sent, 8, PATIENCE) == 0);
    CHECK(cox_socket_send(ends[0], "y", 1, sent, 8, PATIENCE) == 0);
    struct rlimit limit = {(rlim_t)sent[7] + 4, (rlim_t)sent[7] + 4};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(cox_socket_receive(ends[1], &byte, 1, came, 8, &count, PATIENCE) == -EMFILE);
    CHECK(fd_count() == before);
    /* What was lost is lost, the connection works on. */
    fds_close(sent, 5);
    CHECK(cox_socket_receive(ends[1], &byte, 1, came, 8, &count, PATIENCE) == 0);
    CHECK(byte == 'y' && count == 8);
}

SOCKET_TEST(b17_b19_a_list_cut_for_want_of_fds_says_so)
{
    child_run(few_fds, NULL);
}

SOCKET_TEST(a16_the_end_of_the_other_side_is_reported)
{
    char text[4] = "";
    int fd = file_new(), came;
    uint32_t count;
    int before = fd_count();
    cox_close_fd(&ends[0]);
    assert_int_equal(cox_socket_receive(ends[1], text, 4, NULL, 0, NULL, PATIENCE), COX_CLOSED);
    assert_int_equal(cox_socket_send(ends[1], "x", 1, NULL, 0, PATIENCE), COX_CLOSED);
    assert_int_equal(cox_socket_send(ends[1], "x", 1, &fd, 1, PATIENCE), COX_CLOSED);
    ends_make();
    assert_int_equal(cox_socket_send(ends[0], "xyz", 3, &fd, 1, PATIENCE), 0);
    cox_close_fd(&ends[0]);
    assert_int_equal(cox_socket_receive(ends[1], text, 4, &came, 1, &count, PATIENCE), COX_CORRUPT);
    assert_int_equal(fd_count(), before - 1);
    /* It never read what it was sent: the kernel says "reset". */
    ends_make();
    assert_int_equal(cox_socket_send(ends[1], "x", 1, NULL, 0, PATIENCE), 0);
    cox_close_fd(&ends[0]);
    assert_int_equal(cox_socket_receive(ends[1], text, 4, NULL, 0, NULL, PATIENCE), COX_CLOSED);
}

SOCKET_TEST(a2_b18_a_deadline_is_a_timeout)
{
    int fd = file_new(), came;
    uint32_t count;
    char text[4];
    static char large[LARGE_SIZE];
    int before = fd_count();
    for (int i = 0; i < 2; i++) { /* blocking or not */
        uint64_t soon = i ? cox_deadline_after_ms(5) : 0;
        assert_int_equal(cox_socket_receive(ends[1], text, 4, NULL, 0, NULL, soon), COX_TIMEOUT);
        assert_int_equal(cox_socket_send(ends[0], "abc", 3, &fd, 1, soon), 0);
        assert_int_equal(cox_socket_receive(ends[1], text, 4, &came, 1, &count, soon), COX_TIMEOUT);
        assert_int_equal(fd_count(), before);
        assert_int_equal(cox_socket_send(ends[0], large, sizeof large, NULL, 0, soon), COX_TIMEOUT);
        ends_make();
        assert_int_equal(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
        assert_int_equal(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
    }
}

static volatile sig_atomic_t alarms;

static void alarmed(int signal_number)
{
    (void)signal_number;
    alarms = alarms + 1;
}

static void large_sender(void *context)
{
    uint8_t *bytes = context;
    int fd = file_new();
    close(ends[1]);
    for (uint32_t i = 0; i < LARGE_SIZE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 4099);
    CHECK(cox_socket_send(ends[0], bytes, LARGE_SIZE, &fd, 1, PATIENCE) == 0);
}

/* Far more than the socket holds, between two processes that are interrupted all the time. */
SOCKET_TEST(k17_interruptions_change_nothing)
{
    uint8_t *bytes = test_own(malloc(LARGE_SIZE), free);
    struct sigaction action = {.sa_handler = alarmed}, old; /* no SA_RESTART */
    struct itimerval often = {{0, 200}, {0, 200}}, off = {{0, 0}, {0, 0}};
    int came;
    uint32_t count;
    assert_non_null(bytes);
    assert_int_equal(sigaction(SIGALRM, &action, &old), 0);
    pid_t child = child_start(large_sender, bytes);
    cox_close_fd(&ends[0]);
    setitimer(ITIMER_REAL, &often, NULL);
    /* Nothing comes after the end: waits until enough of them were interrupted. */
    int r = cox_socket_receive(ends[1], bytes, LARGE_SIZE, &came, 1, &count, PATIENCE);
    int idle[2];
    test_socketpair(idle);
    int waited =
        cox_socket_receive(idle[0], &(char){0}, 1, NULL, 0, NULL, cox_deadline_after_ms(50));
    setitimer(ITIMER_REAL, &off, NULL);
    assert_int_equal(r, 0);
    assert_int_equal(waited, COX_TIMEOUT);
    assert_true(alarms > 0);
    assert_int_equal(count, 1);
    for (uint32_t i = 0; i < LARGE_SIZE; i++)
        if (bytes[i] != (uint8_t)(i * 7 + i / 4099))
            fail_msg("byte %u is another", i);
    child_join(child);
    sigaction(SIGALRM, &old, NULL);
    close(came);
}

static void flood(void *context)
{
    (void)context;
    int fd = file_new();
    struct rlimit limit = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(!test_can_switch_user() || setuid(65534) == 0);
    int r = 0;
    for (int i = 0; r == 0 && i < 1000; i++)
        r = cox_socket_send(ends[0], "x", 1, &fd, 1, 0);
    CHECK(r == COX_FULL);
}

/* For root the kernel has no such limit. */
SOCKET_TEST(fds_that_are_never_received_are_full_in_the_end)
{
    child_run(flood, NULL);
}

SOCKET_TEST(what_is_there_is_taken_without_waiting)
{
    char text[8] = "";
    size_t size = 99;
    int fd = file_new(), came;
    uint32_t count;
    assert_int_equal(cox_socket_receive_some(ends[1], text, 8, &size, &came, 1, &count), COX_EMPTY);
    assert_int_equal(size, 99);
    assert_int_equal(cox_socket_send(ends[0], "abc", 3, &fd, 1, PATIENCE), 0);
    assert_int_equal(cox_socket_receive_some(ends[1], text, 8, &size, &came, 1, &count), 0);
    assert_int_equal(size, 3);
    assert_int_equal(count, 1);
    assert_string_equal(text, "abc");
    cox_close_fd(&ends[0]);
    assert_int_equal(cox_socket_receive_some(ends[1], text, 8, &size, &came, 0, &count), 0);
    assert_int_equal(size, 0);
    assert_int_equal(count, 0);
    close(came);
}

SOCKET_TEST(b9_the_other_side_is_known_to_the_kernel)
{
    struct cox_socket_peer peer;
    int file = file_new();
    assert_int_equal(cox_socket_read_peer(ends[0], &peer), 0);
    assert_int_equal(peer.pid, getpid());
    assert_int_equal(peer.uid, geteuid());
    assert_int_equal(peer.gid, getegid());
    assert_int_equal(cox_socket_read_peer(file, &peer), -ENOTSOCK);
}

SOCKET_TEST(b19_errors_of_the_system_are_forwarded)
{
    char byte;
    int bad = 9999;
    assert_int_equal(cox_socket_send(ends[0], "x", 1, &bad, 1, PATIENCE), -EBADF);
    assert_int_equal(cox_socket_send(bad, "x", 1, NULL, 0, PATIENCE), -EBADF);
    assert_int_equal(cox_socket_receive(bad, &byte, 1, NULL, 0, NULL, PATIENCE), -EBADF);
    assert_int_equal(cox_socket_wait(bad, POLLIN, PATIENCE), -EBADF);
}

/* ---- names ---- */

/* Listens at the path until the fd, the test's own, is closed. */
static int listen_there(void)
{
    int fd = -1;
    assert_ok(cox_socket_listen(path, &fd, test_err()));
    return test_own_fd(fd);
}

/* Another process, which knows the path alone. */
static void connects_and_gives(void *context)
{
    struct cox_error err = {0};
    int fd = -1, sent = file_new();
    (void)context;
    CHECK(cox_socket_connect(path, PATIENCE, &fd, &err) == 0);
    CHECK(fd > STDERR_FILENO && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(ftruncate(sent, 4242) == 0);
    CHECK(cox_socket_send(fd, "x", 1, &sent, 1, PATIENCE) == 0);
    close(fd);
    close(sent);
}

SOCKET_TEST(k28_processes_find_each_other_by_a_name)
{
    struct cox_socket_peer peer;
    struct stat st;
    uint32_t count;
    int fd, came;
    char byte;
    folder_make("meeting");
    int listening = listen_there();
    assert_true(listening > STDERR_FILENO && fcntl(listening, F_GETFD) == FD_CLOEXEC);
    pid_t pid = child_start(connects_and_gives, NULL);
    assert_int_equal(cox_socket_accept(listening, PATIENCE, &fd), 0);
    assert_true(fd > STDERR_FILENO && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    assert_int_equal(cox_socket_read_peer(fd, &peer), 0);
    assert_int_equal(peer.pid, pid);
    assert_int_equal(cox_socket_receive(fd, &byte, 1, &came, 1, &count, PATIENCE), 0);
    assert_int_equal(fstat(came, &st), 0);
    assert_int_equal(st.st_size, 4242);
    child_join(pid);
    close(came);
    /* Without its name existing connections stay; new ones are impossible. */
    assert_int_equal(cox_socket_unlink(path, NULL), 0);
    assert_int_equal(cox_socket_unlink(path, NULL), 0);
    assert_int_equal(cox_socket_receive(fd, &byte, 1, NULL, 0, NULL, PATIENCE), COX_CLOSED);
    close(fd);
    assert_int_equal(cox_socket_connect(path, PATIENCE, &fd, NULL), COX_NOT_FOUND);
}

SOCKET_TEST(k28_b4_a_name_of_the_dead_is_reported_and_can_be_removed)
{
    int again = -1, fd = -1;
    folder_make("dead");
    int listening = listen_there();
    assert_refused(cox_socket_listen(path, &again, test_err()), COX_TAKEN, path);
    test_close(listening);
    assert_refused(cox_socket_connect(path, PATIENCE, &fd, test_err()), COX_CLOSED,
                   "no process listens");
    assert_int_equal(cox_socket_listen(path, &again, NULL), COX_TAKEN); /* the remover reports it */
    assert_true(again == -1 && fd == -1);
    assert_int_equal(cox_socket_unlink(path, NULL), 0);
    listen_there();
    assert_int_equal(cox_socket_unlink(path, NULL), 0);
}

SOCKET_TEST(k28_b9_b10_what_is_no_socket_is_left_alone)
{
    struct stat st;
    int fd = -1;
    folder_make("file");
    int file = test_own_fd(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    assert_int_equal(write(file, "mine", 4), 4);
    assert_refused(cox_socket_listen(path, &fd, test_err()), COX_TAKEN, "is there already");
    assert_refused(cox_socket_connect(path, PATIENCE, &fd, test_err()), COX_DENIED, "no socket");
    assert_int_equal(cox_socket_unlink(path, NULL), COX_DENIED);
    assert_int_equal(fd, -1);
    assert_int_equal(fstat(file, &st), 0);
    assert_true(st.st_size == 4 && st.st_nlink == 1);
    unlink(path);
}

SOCKET_TEST(k28_b45_only_its_user_may_connect)
{
    static const mode_t masks[] = {0, 022, 0777};
    struct cox_error err = {0};
    struct stat st;
    folder_make("mode");
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        mode_t before = umask(masks[i]);
        int listening, r = cox_socket_listen(path, &listening, &err);
        umask(before);
        assert_int_equal(r, 0);
        assert_int_equal(lstat(path, &st), 0);
        assert_int_equal(st.st_mode & 07777, 0600);
        assert_true(S_ISSOCK(st.st_mode));
        close(listening);
        assert_int_equal(cox_socket_unlink(path, NULL), 0);
    }
}

SOCKET_TEST(k28_k19_long_paths_work_and_impossible_ones_are_refused)
{
    static const char *const wrong[] = {"", "/", "/tmp/"};
    char name[90], deep[400];
    int fd = -1, listening;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(cox_socket_listen(wrong[i], &fd, NULL), COX_INVALID);
        assert_int_equal(cox_socket_connect(wrong[i], PATIENCE, &fd, NULL), COX_INVALID);
        assert_int_equal(cox_socket_unlink(wrong[i], NULL), COX_INVALID);
    }
    assert_int_equal(cox_socket_listen("/nowhere/x", &fd, NULL), COX_NOT_FOUND);
    assert_int_equal(cox_socket_listen("/dev/null/x", &fd, NULL), COX_DENIED);
    folder_make("");
    memset(name, 'd', sizeof name);
    name[80] = '\0';
    snprintf(deep, sizeof deep, "%s/%s", folder, name);
    assert_int_equal(mkdir(deep, 0700), 0);
    for (size_t length = 82; length <= 83;
         length++) { /* in a folder that is too long for an address */
        memset(name, 'f', sizeof name);
        name[length] = '\0';
        snprintf(path, sizeof path, "%s/%s", deep, name);
        assert_int_equal(cox_socket_listen(path, &listening, NULL), length == 82 ? 0 : COX_INVALID);
        if (length > 82)
            break;
        child_run(connects_and_gives, NULL);
        assert_int_equal(cox_socket_unlink(path, NULL), 0);
        close(listening);
    }
    assert_int_equal(fd, -1);
    rmdir(deep);
}

SOCKET_TEST(k28_b2_each_wait_ends_at_its_deadline)
{
    static int fds[1000];
    struct cox_error err = {0};
    int fd = -1, r = 0, count = 0;
    folder_make("full");
    int listening = listen_there();
    assert_int_equal(cox_socket_accept(listening, 0, &fd), COX_TIMEOUT);
    while (r == 0 && count < 1000)
        if ((r = cox_socket_connect(path, cox_deadline_after_ms(10), &fds[count], &err)) == 0)
            count++;
    assert_int_equal(r, COX_TIMEOUT); /* they are not received */
    assert_int_equal(cox_socket_accept(listening, PATIENCE, &fd), 0);
    close(fd);
    assert_int_equal(cox_socket_connect(path, PATIENCE, &fd, NULL), 0);
    close(fd);
    fds_close(fds, (uint32_t)count);
    assert_int_equal(cox_socket_unlink(path, NULL), 0);
}

static void listens_as_nobody(void *context)
{
    const int *pipes = context; /* {to it, from it} */
    struct cox_error err = {0};
    int listening;
    CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    CHECK(cox_socket_listen(path, &listening, &err) == 0);
    CHECK(chmod(path, 0666) == 0);
    tell(pipes[3]);
    CHECK(heard(pipes[0]));
    CHECK(cox_socket_unlink(path, &err) == 0);
}

SOCKET_TEST(k28_b9_b28_a_squatted_name_is_not_connected_to)
{
    int pipes[4], fd = -1;
    if (!test_can_switch_user())
        skip();
    folder_make("squatted");
    assert_int_equal(chmod(folder, 0777), 0);
    test_pipe(pipes);
    test_pipe(pipes + 2);
    pid_t pid = child_start(listens_as_nobody, pipes);
    assert_true(heard(pipes[2]));
    assert_refused(cox_socket_connect(path, PATIENCE, &fd, test_err()), COX_DENIED,
                   "of user 65534 listens at ");
    assert_int_equal(fd, -1);
    tell(pipes[1]);
    child_join(pid);
}

SOCKET_TEST(a_runtime_directory_that_cannot_be_made_is_an_error)
{
    int fd = -7;
    assert_refused(cox_runtime_dir_open("/dev/null/run", true, &fd, test_err()), -ENOTDIR,
                   "/dev/null/run cannot be made");
    assert_int_equal(fd, -7);
}
