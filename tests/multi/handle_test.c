/* By-value handles between processes, opened with pidfd_getfd. */
#include "channel/base/peer.h"
#include "tests/lib/rights.h"
#include "handle_peer.h"

#include <sys/mount.h>

enum { PID = 4, START = 8, FD = 24, INO = 32 };

static uint64_t number(const struct cox_handle *handle, size_t offset, size_t size)
{
    uint64_t value = 0;
    memcpy(&value, handle->bytes + offset, size);
    return value;
}

/* In children. */
static void expect_refused(const struct cox_handle *handle, int code, const char *word)
{
    int fd = -77, r = handle_open_plain(handle, &fd, test_err());
    if (r != code || !strstr(test_error.text, word))
        fprintf(stderr, "expected %d with '%s', got %d '%s'\n", code, word, r, test_error.text);
    CHECK(r == code && strstr(test_error.text, word) && fd == -77);
}

/* ---- permission to open ---- */

LEAK_TEST(l3_l5_siblings_and_strangers_open_it)
{
    for (int as_nobody = 0; as_nobody <= test_can_switch_user(); as_nobody++) {
        const struct peer_options child = {.uid = as_nobody ? NOBODY : 0};
        const struct peer_options stranger = {.uid = child.uid, .unrelated = true};
        struct peer peers[] = {peer_start(&child), peer_start(&child), peer_start(&stranger)};
        for (unsigned from = 0; from < 3; from++) {
            struct cox_handle handle = peer_export(&peers[from], PEER_EXPORT_AT, from);
            for (unsigned to = 0; to < 3; to++) {
                struct peer_reply reply = peer_ask(&peers[to], PEER_OPEN, 0, &handle);
                if (reply.result)
                    fail_msg("%u of %u: %s", to, from, reply.err.text);
                assert_int_equal(reply.number, object_byte(from, 5001));
            }
        }
        for (unsigned i = 0; i < 3; i++)
            peer_end(&peers[i]);
    }
}

static void open_as_nobody(void *context)
{
    user_change(NOBODY);
    expect_refused(context, COX_DENIED, "belongs to user 0, this process to user 65534");
    struct cox_importer *importer;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    for (int again = 0; again < 2; again++)
        CHECK(import_try(importer, context) == COX_DENIED);
    cox_importer_free(importer);
}

LEAK_TEST(l6_another_user_is_denied)
{
    test_needs(test_can_switch_user());
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 2);
    handle_opens(&handle, 2);
    child_run(open_as_nobody, &handle);
}

static void open_not_dumpable(void *context)
{
    user_change(NOBODY);
    expect_refused(context, COX_DENIED, "not dumpable");
}

LEAK_TEST(l12_an_exporter_that_is_not_dumpable_is_closed_to_others)
{
    test_needs(test_can_switch_user());
    _cox_cleanup_(peer_end) struct peer peer = peer_start(&(struct peer_options){.uid = NOBODY});
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 3);
    assert_int_equal(peer_ask(&peer, PEER_SET_DUMPABLE, 0, NULL).result, 0);
    child_run(open_not_dumpable, &handle);
}

static void open_hidden(void *context)
{
    const struct cox_handle *handles = context;
    if (!proc_hide())
        _exit(77);
    user_change(NOBODY);
    expect_refused(&handles[0], COX_DENIED, "another user, and /proc is mounted with hidepid");
    expect_refused(&handles[1], COX_PEER_DEAD, "is gone");
    expect_refused(&handles[2], COX_PEER_DEAD, "is gone");
}

/* There is nothing of it in /proc: that does not make it dead. */
LEAK_TEST(l6_l8_another_user_is_denied_where_proc_hides_it_too)
{
    struct peer peers[3];
    struct cox_handle handles[3];
    test_needs(test_can_switch_user());
    for (unsigned i = 0; i < 3; i++) {
        peers[i] = peer_start(NULL);
        handles[i] = peer_export(&peers[i], PEER_EXPORT, i);
    }
    peer_kill(&peers[1]);
    peer_kill(&peers[2]);
    peer_end(&peers[2]);
    int status = child_status(child_start(open_hidden, handles));
    peer_end(&peers[0]);
    peer_end(&peers[1]);
    child_expect(status);
}

/* ---- where ---- */

struct elsewhere {
    /* of outside, for inside */
    struct cox_handle handle;
    bool done;
    /* of inside, for outside */
    struct cox_handle back;
    /* the inner process lives until its other end is closed */
    int gate;
    int ready;
};

static void inside_namespace(struct elsewhere *elsewhere)
{
    struct cox_exporter *exporter;
    expect_refused(&elsewhere->handle, COX_NOT_FOUND, "unreachable");
    struct cox_importer *importer;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    CHECK(import_try(importer, &elsewhere->handle) == COX_NOT_FOUND);
    cox_importer_free(importer);
    /* /proc is still that of outside: the start times there are not ours. */
    CHECK(cox_exporter_new(NULL, &exporter, NULL) == COX_UNSUPPORTED);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
        mount("proc", "/proc", "proc", 0, NULL) == 0) {
        int fd = object_new(PEER_OBJECT_SIZE, 4);
        expect_refused(&elsewhere->handle, COX_NOT_FOUND, "unreachable");
        CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
        CHECK(cox_exporter_export(exporter, fd, 0, 0, &elsewhere->back, NULL) == 0);
        CHECK(handle_open_plain(&elsewhere->back, &fd, NULL) == 0);
        elsewhere->done = true;
    }
    tell(elsewhere->ready);
    heard(elsewhere->gate);
    _exit(0);
}

static void namespace_parent(void *context)
{
    if (unshare(CLONE_NEWPID | CLONE_NEWNS) < 0)
        _exit(77);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        inside_namespace(context);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 98);
}

LEAK_TEST(l7_another_pid_namespace_is_unreachable)
{
    int gate[2], ready[2];
    struct elsewhere *elsewhere =
        mmap(NULL, sizeof *elsewhere, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(elsewhere != MAP_FAILED);
    struct peer peer = peer_start(NULL);
    elsewhere->handle = peer_export(&peer, PEER_EXPORT, 4);
    test_pipe(gate);
    test_pipe(ready);
    elsewhere->gate = gate[0];
    elsewhere->ready = ready[1];
    pid_t pid = child_start(namespace_parent, elsewhere);
    test_close(ready[1]);
    bool there = heard(ready[0]);
    if (there && elsewhere->done)
        handle_refused(&elsewhere->back, COX_NOT_FOUND, "unreachable");
    tell(gate[1]);
    int status = child_status(pid);
    munmap(elsewhere, sizeof *elsewhere);
    peer_end(&peer);
    child_expect(status);
}

static void inside_time_namespace(void *context)
{
    const char offset[] = "boottime 100000 0";
    if (unshare(CLONE_NEWTIME) < 0)
        _exit(77);
    int fd = open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, offset, sizeof offset - 1) != (ssize_t)(sizeof offset - 1))
        _exit(77);
    close(fd);
    pid_t pid = fork(); /* the process that makes the namespace stays outside */
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        expect_refused(context, COX_NOT_FOUND, "unreachable");
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 98);
}

/* There its start time is another one, so that it would be taken for dead. */
LEAK_TEST(l7_another_time_namespace_is_unreachable)
{
    struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 4);
    int status = child_status(child_start(inside_time_namespace, &handle));
    peer_end(&peer);
    child_expect(status);
}

/* ---- when ---- */

LEAK_TEST(l8_a_dead_exporter_is_named)
{
    for (int unrelated = 0; unrelated < 2; unrelated++) {
        struct peer peer = peer_start(&(struct peer_options){.unrelated = unrelated});
        struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 5);
        handle_opens(&handle, 5);
        peer_kill(&peer);
        handle_refused(&handle, COX_PEER_DEAD, "is gone"); /* a zombie, or reaped by now */
        peer_end(&peer);
        handle_refused(&handle, COX_PEER_DEAD, "is gone");
    }
}

LEAK_TEST(l9_b25_the_pid_of_another_process_is_not_taken_for_the_exporter)
{
    struct peer dead = peer_start(NULL), alive = peer_start(NULL);
    struct cox_handle handle = peer_export(&dead, PEER_EXPORT, 6), forged = handle;
    struct cox_handle other = peer_export(&alive, PEER_EXPORT, 7);
    peer_kill(&dead);
    /* As if the pid had been given to `alive`, even with the very object under the very number. */
    handle_forge(&forged, PID, 4, (uint64_t)alive.pid);
    handle_refused(
        &forged,
        number(&forged, START, 8) == number(&other, START, 8) ? COX_NOT_FOUND : COX_PEER_DEAD, "");
    forged = other;
    handle_forge(&forged, START, 8, number(&other, START, 8) - 1);
    handle_refused(&forged, COX_PEER_DEAD, "is gone");
    handle_forge(&forged, START, 8, 0);
    handle_refused(&forged, COX_PEER_DEAD, "is gone");
    handle_forge(&forged, START, 8, number(&other, START, 8));
    handle_opens(&forged, 7);
    peer_end(&dead);
    peer_end(&alive);
}

static uint64_t start_of(const struct peer *peer)
{
    uint64_t start = 0;
    assert_int_equal(cox_peer_start_time(peer->pid, &start), 0);
    return start;
}

/* The next process gets this pid, unless another process is faster. False: a pid cannot be demanded
 * here. */
static bool pid_demand(pid_t pid)
{
    char text[32];
    int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    int length = snprintf(text, sizeof text, "%d", (int)pid - 1);
    bool asked = fd >= 0 && write(fd, text, (size_t)length) == length;
    cox_close_fd(&fd);
    return asked;
}

/* The exporter ends, and another one has its pid: what the dead one exported is not asked of it,
 * under no number. */
LEAK_TEST(l9_l17_b25_the_next_process_with_the_pid_is_not_the_exporter)
{
    struct cox_importer *importer;
    const struct cox_import *held;
    struct peer next = {.socket = -1};
    struct peer peer = peer_start(NULL);
    const pid_t pid = peer.pid;
    const uint64_t start = start_of(&peer);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 6);
    struct cox_handle unopened = peer_export(&peer, PEER_EXPORT, 6);
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
    held = import_open(importer, &handle);
    for (uint64_t now = start; now <= start;) { /* start times count in ticks */
        _cox_cleanup_(peer_end) struct peer other = peer_start(NULL);
        now = start_of(&other);
    }
    peer_end(&peer);
    bool asked = true;
    for (int i = 0; i < 100 && asked && next.pid != pid; i++) {
        if (next.socket >= 0)
            peer_end(&next);
        next.socket = -1;
        asked = pid_demand(pid);
        if (asked)
            next = peer_start(NULL);
    }
    bool reused = asked && next.pid == pid;
    if (reused) {
        struct cox_handle fresh = peer_export(&next, PEER_EXPORT, 7);
        assert_int_equal(number(&fresh, FD, 4), number(&handle, FD, 4));
        handle_refused(&handle, COX_PEER_DEAD, "is gone");
        assert_int_equal(import_try(importer, &handle), COX_PEER_DEAD);
        const struct cox_import *import = import_open(importer, &fresh);
        assert_int_equal(import_byte(import, 8), object_byte(7, 8));
        assert_int_equal(import_byte(held, 8), object_byte(6, 8));
        cox_importer_close(importer, import);
        assert_int_equal(import_try(importer, &unopened), COX_PEER_DEAD);
    }
    if (next.socket >= 0)
        peer_end(&next);
    cox_importer_close(importer, held);
    cox_importer_free(importer);
    test_needs(reused);
}

LEAK_TEST(l10_b25_the_fd_is_another_object_by_now)
{
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 8), forged = handle;
    struct cox_handle socket = peer_export(&peer, PEER_EXPORT_SOCKET, 0);
    handle_forge(&forged, FD, 4, number(&socket, FD, 4));
    handle_refused(&forged, COX_NOT_FOUND, "another object");
    handle_forge(&forged, FD, 4, 12345);
    handle_refused(&forged, COX_NOT_FOUND, "has no fd 12345");
    peer_ask(&peer, PEER_REPLACE, (int64_t)number(&handle, FD, 4), NULL);
    handle_refused(&handle, COX_NOT_FOUND, "another object");
    handle = peer_export(&peer, PEER_EXPORT, 9);
    assert_int_equal(peer_ask(&peer, PEER_TRUNCATE, PEER_OBJECT_SIZE - 1, NULL).result, 0);
    handle_refused(&handle, COX_NOT_FOUND, "truncated");
}

LEAK_TEST(l16_what_is_open_stays_valid_after_put_and_death)
{
    struct cox_importer *importer;
    const struct cox_import *put, *dead;
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle one = peer_export(&peer, PEER_EXPORT, 10);
    struct cox_handle two = peer_export(&peer, PEER_EXPORT_AT, 11);
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
    put = import_open(importer, &one);
    assert_int_equal(cox_importer_open(importer, &two, COX_IMPORT_WRITE, &dead, NULL), 0);
    assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &one).result, 0);
    handle_refused(&one, COX_NOT_FOUND, "has no fd");
    assert_int_equal(import_byte(put, 100), object_byte(10, 100));
    peer_kill(&peer);
    assert_int_equal(import_byte(put, 19999), object_byte(10, 19999));
    assert_int_equal(import_byte(dead, 100), object_byte(11, 5101));
    assert_true(object_is(dead->fd, 5001, 1000, 11));
    assert_int_equal(import_try(importer, &two), COX_PEER_DEAD);
    cox_importer_close(importer, put);
    cox_importer_close(importer, dead);
    cox_importer_free(importer);
}

/* ---- the importer's cache ---- */

LEAK_TEST(l17_a_dead_exporter_is_dead_in_the_cache_too)
{
    struct cox_importer *importer;
    struct peer peer = peer_start(NULL), other = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 12);
    struct cox_handle fresh = peer_export(&peer, PEER_EXPORT, 13);
    struct cox_handle living = peer_export(&other, PEER_EXPORT, 14);
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
    int fds = fd_count();
    const struct cox_import *import = import_open(importer, &handle);
    assert_int_equal(fd_count(), fds + 2); /* with the exporter's pidfd */
    assert_ptr_equal(import, import_open(importer, &handle));
    peer_kill(&peer);
    assert_refused(import_try(importer, &handle), COX_PEER_DEAD, "is gone");
    assert_int_equal(import_try(importer, &fresh), COX_PEER_DEAD);
    assert_int_equal(import_byte(import, 5), object_byte(12, 5));
    cox_importer_close(importer, import);
    cox_importer_close(importer, import);
    assert_int_equal(fd_count(), fds); /* its pidfd is not kept either */
    cox_importer_close(importer, import_open(importer, &living));
    cox_importer_free(importer);
    peer_end(&peer);
    peer_end(&other);
}

LEAK_TEST(l17_b29_a_handle_that_was_put_is_not_found)
{
    struct cox_importer *importer;
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
    for (unsigned seed = 0; seed < 20; seed++) {
        struct cox_handle handle = peer_export(&peer, PEER_EXPORT, seed);
        const struct cox_import *import = import_open(importer, &handle);
        assert_int_equal(import_byte(import, seed), object_byte(seed, seed));
        cox_importer_close(importer, import);
        assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &handle).result, 0);
        if (seed % 2) /* and its number is another object's */
            peer_ask(&peer, PEER_REPLACE, (int64_t)number(&handle, FD, 4), NULL);
        assert_int_equal(import_try(importer, &handle), COX_NOT_FOUND);
    }
    cox_importer_free(importer);
}

LEAK_TEST(l17_only_so_many_exporters_are_kept)
{
    struct cox_importer *importer;
    const struct cox_import *held;
    struct peer peers[5];
    struct cox_handle handles[5];
    const struct cox_importer_options options = {.size = sizeof(struct cox_importer_options),
                                                 .cache_max = 2};
    assert_int_equal(cox_importer_new(&options, &importer, NULL), 0);
    for (unsigned i = 0; i < 5; i++) {
        peers[i] = peer_start(NULL);
        handles[i] = peer_export(&peers[i], PEER_EXPORT, i);
    }
    int fds = fd_count();
    held = import_open(importer, &handles[0]);
    for (unsigned round = 0; round < 3; round++)
        for (unsigned i = 0; i < 5; i++) {
            const struct cox_import *import = import_open(importer, &handles[i]);
            assert_int_equal(import_byte(import, 7), object_byte(i, 7));
            cox_importer_close(importer, import);
            assert_true(fd_count() <= fds + 1 + 2);
        }
    peer_kill(&peers[0]); /* whose pidfd had to give way: what is open is refused all the same */
    assert_int_equal(import_try(importer, &handles[0]), COX_PEER_DEAD);
    cox_importer_close(importer, held);
    cox_importer_free(importer);
    for (unsigned i = 0; i < 5; i++)
        peer_end(&peers[i]);
}

struct pidfd_less {
    struct cox_handle handle;
    struct peer peer;
};

static void open_the_last_two(void *context)
{
    const struct cox_handle *handles = context;
    const struct cox_importer_options options = {.size = sizeof(struct cox_importer_options),
                                                 .cache_max = 2};
    struct cox_importer *importer;
    CHECK(cox_importer_new(&options, &importer, NULL) == 0);
    for (unsigned i = 0; i < 6; i++) {
        if (i == 4)
            call_deny(SYS_pidfd_open, ANY_ARGUMENT, 0);
        cox_importer_close(importer, import_open(importer, &handles[i < 4 ? i : i - 2]));
    }
    cox_importer_free(importer);
}

LEAK_TEST(l17_the_exporters_used_last_are_kept)
{
    struct peer peers[4];
    struct cox_handle handles[4];
    test_needs(filters_possible());
    for (unsigned i = 0; i < 4; i++) {
        peers[i] = peer_start(NULL);
        handles[i] = peer_export(&peers[i], PEER_EXPORT, i);
    }
    child_run(open_the_last_two, handles);
    for (unsigned i = 0; i < 4; i++)
        peer_end(&peers[i]);
}

/* With the exporter's pidfd kept, opening asks neither for a new one nor in /proc. */
static void open_with_kept_pidfd(void *context)
{
    struct pidfd_less *test = context;
    struct cox_importer *importer;
    const struct cox_import *import;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    cox_importer_close(importer, import_open(importer, &test->handle));
    call_deny(SYS_pidfd_open, ANY_ARGUMENT, 0);
    call_deny(SYS_openat, ANY_ARGUMENT, 0);
    call_deny(SYS_poll, ANY_ARGUMENT, 0);
    for (int i = 0; i < 100; i++) {
        CHECK(cox_importer_open(importer, &test->handle, COX_IMPORT_FD, &import, NULL) == 0);
        cox_importer_close(importer, import);
    }
    cox_importer_free(importer);
}

LEAK_TEST(l17_opening_again_is_three_calls)
{
    test_needs(filters_possible());
    struct pidfd_less test = {.peer = peer_start(NULL)};
    test.handle = peer_export(&test.peer, PEER_EXPORT, 15);
    child_run(open_with_kept_pidfd, &test);
    peer_end(&test.peer);
}

/* ---- kernels and profiles that do not have it ---- */

struct denial {
    struct cox_handle handle;
    uint32_t call;
    int error;
    int code;
    const char *word;
};

static void open_denied(void *context)
{
    const struct denial *denial = context;
    struct cox_importer *importer;
    const struct cox_import *import;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    const struct cox_import *open = import_open(importer, &denial->handle);
    struct cox_handle other = denial->handle; /* of the same object, not open yet */
    handle_forge(&other, 56, 4, 1);
    int fds = fd_count();
    call_deny(denial->call, ANY_ARGUMENT, denial->error); /* B27: after a first success */
    expect_refused(&denial->handle, denial->code, denial->word);
    int r = cox_importer_open(importer, &other, COX_IMPORT_FD, &import, test_err());
    /* A pidfd that is kept needs no pidfd_open. */
    CHECK(denial->call == SYS_pidfd_open ? r == 0 : r == denial->code);
    if (r == 0)
        cox_importer_close(importer, import);
    CHECK(r == 0 || strstr(test_error.text, denial->word));
    cox_importer_close(importer, import_open(importer, &denial->handle));
    CHECK(fd_count() == fds);
    cox_importer_close(importer, open);
    cox_importer_free(importer);
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0); /* nothing is kept */
    CHECK(cox_importer_open(importer, &other, COX_IMPORT_FD, &import, NULL) == denial->code);
    cox_importer_free(importer);
}

LEAK_TEST(l11_b27_without_the_calls_and_without_a_socket_it_says_so)
{
    test_needs(filters_possible());
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    /* No memory: that would be opened by /proc. */
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT_SOCKET, 0);
    struct denial denials[] = {
        {handle, SYS_pidfd_getfd, ENOSYS, COX_UNSUPPORTED, "no pidfd_getfd (Linux 5.6 has it)"},
        {handle, SYS_pidfd_getfd, EPERM, COX_DENIED, "a seccomp filter is on this process"},
        {handle, SYS_pidfd_getfd, EPERM, COX_DENIED, "no control socket was named"},
        {handle, SYS_pidfd_getfd, EPERM, COX_DENIED, "Yama"},
        {handle, SYS_pidfd_getfd, EACCES, COX_DENIED, "name a control socket"},
        {handle, SYS_pidfd_open, ENOSYS, COX_UNSUPPORTED, "no pidfd_getfd"},
        {handle, SYS_pidfd_open, EPERM, COX_DENIED, "seccomp"},
    };
    for (size_t i = 0; i < sizeof denials / sizeof denials[0]; i++)
        child_run(open_denied, &denials[i]);
}

static void dead_without_pidfds(void *context)
{
    struct pidfd_less *test = context;
    struct cox_importer *importer;
    call_deny(SYS_pidfd_open, ANY_ARGUMENT, ENOSYS);
    expect_refused(&test->handle, COX_PEER_DEAD, "is gone");
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    CHECK(import_try(importer, &test->handle) == COX_PEER_DEAD);
    cox_importer_free(importer);
}

LEAK_TEST(l8_l11_without_pidfds_a_dead_exporter_is_named_too)
{
    test_needs(filters_possible());
    struct pidfd_less test = {.peer = peer_start(NULL)};
    test.handle = peer_export(&test.peer, PEER_EXPORT, 17);
    peer_kill(&test.peer);
    child_run(dead_without_pidfds, &test);
    peer_end(&test.peer);
    child_run(dead_without_pidfds, &test);
}

/* ---- no fd more ---- */

static void import_batches(const struct peer *peer, int rounds)
{
    struct cox_importer *importer;
    const struct cox_import *import;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    int before = fd_count(), there = 0;
    peer_export(peer, PEER_EXPORT, 18);
    for (int round = 0; round < rounds; round++) {
        struct peer_reply reply = peer_ask(peer, PEER_EXPORT_BATCH, 0, NULL);
        CHECK(reply.result == 0);
        for (size_t i = 0; i < PEER_BATCH; i++) {
            CHECK(cox_importer_open(importer, &reply.handles[i],
                                    i % 8 ? COX_IMPORT_FD : COX_IMPORT_READ, &import, NULL) == 0);
            cox_importer_close(importer, import);
        }
        CHECK(peer_ask(peer, PEER_PUT_BATCH, 0, NULL).result == 0);
        CHECK(fd_count() == before + 1); /* the pidfd */
        int now = peer_ask(peer, PEER_COUNT_FDS, 0, NULL).number;
        there = there ? there : now;
        CHECK(now == there);
    }
    cox_importer_free(importer);
    CHECK(fd_count() == before);
}

static void import_many(void *context)
{
    const struct peer_options *options = context;
    const struct rlimit limit = {options->fd_limit, options->fd_limit};
    _cox_cleanup_(peer_end) struct peer peer = peer_start(options);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (options->uid)
        user_change(options->uid);
    import_batches(&peer, 100000 / PEER_BATCH + 1);
}

LEAK_TEST(l15_b29_no_fd_more_after_100000_pairs_in_two_processes)
{
    struct peer_options options = {.uid = test_can_switch_user() ? NOBODY : 0, .fd_limit = 1024};
    child_run(import_many, &options);
}

LEAK_TEST(l3_l18_a_socket_opens_elsewhere_too)
{
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT_SOCKET, 0);
    int fd = -1;
    assert_int_equal(handle_open_plain(&handle, &fd, NULL), 0);
    assert_int_equal(write(fd, "k", 1), 1);
    assert_int_equal(peer_ask(&peer, PEER_RECEIVE_EVENT, 0, NULL).number, 'k');
    close(fd);
}

static void import_in_child(void *context)
{
    void **all = context;
    struct cox_importer *importer = all[0];
    const struct cox_import *import = import_open(importer, all[1]);
    CHECK(import_byte(import, 1) == object_byte(20, 1));
    /* The parent's own handle is another process's here, whatever this one has under its number. */
    close((int)number(all[2], FD, 4));
    const struct cox_import *own = import_open(importer, all[2]);
    CHECK(import_byte(own, 1) == object_byte(21, 1));
    cox_importer_close(importer, own);
    cox_importer_close(importer, import);
    cox_importer_free(importer);
}

LEAK_TEST(l5_the_importer_of_a_parent_works_in_its_child)
{
    struct cox_importer *importer;
    struct cox_exporter *exporter;
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 20), own;
    int fd = object_new(PEER_OBJECT_SIZE, 21);
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &own, NULL), 0);
    cox_importer_close(importer, import_open(importer, &own));
    void *all[] = {importer, &handle, &own};
    child_run(import_in_child, all);
    close(fd);
    cox_importer_free(importer);
    cox_exporter_free(exporter);
}

int main(void)
{
    test_begin();
    if (!test_can_take_fds()) /* handle_socket_test is about handles then */
        return 77;
    return test_run(NULL, NULL);
}
