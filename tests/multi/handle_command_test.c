/* coxswain handle, as a user runs it: a program that has nothing to do with the exporter. */
#include "handle_peer.h"

#include "channel/socket/control_socket.h"
#include "program/cli/command.h"
#include "tests/lib/rights.h"

#define COXSWAIN COX_TEST_BIN_DIR "/coxswain handle "
#define WITHOUT COX_TEST_BIN_DIR "/without "

static char runtime_dir[64];
static char file[128]; /* in it: the handle */
static char output[65536];

static int setup(void **state)
{
    leak_setup(state);
    snprintf(runtime_dir, sizeof runtime_dir, "/tmp/cox_handle_XXXXXX");
    assert_non_null(mkdtemp(runtime_dir));
    snprintf(file, sizeof file, "%s/handle", runtime_dir);
    return 0;
}

static int teardown(void **state)
{
    unlink(file);
    assert_int_equal(rmdir(runtime_dir), 0);
    return leak_teardown(state);
}

#define HANDLE_TEST(name) TEST_WITH(name, setup, teardown)

static void save(const void *bytes, size_t size)
{
    FILE *to = fopen(file, "we");
    assert_non_null(to);
    assert_int_equal(fwrite(bytes, 1, size, to), size);
    fclose(to);
}

/* Runs it by a shell; both outputs are in `output`. Returns the exit status. */
static int run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int run(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    strncat(command, " 2>&1", sizeof command - strlen(command) - 1);
    FILE *from = popen(command, "re");
    assert_non_null(from);
    size_t size = fread(output, 1, sizeof output - 1, from);
    output[size] = '\0';
    int status = pclose(from);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void says(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void says(const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    assert_contains(output, text);
}

static void expect_status(int got, int expected)
{
    if (got != expected)
        fail_msg("status %d, expected %d:\n%s", got, expected, output);
}

HANDLE_TEST(l2_l5_it_prints_what_is_in_a_handle_and_opens_it)
{
    struct cox_handle_info info;
    if (!test_can_take_fds())
        skip();
    _cox_cleanup_(peer_end) struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT_AT, 3);
    assert_int_equal(cox_handle_parse(&handle, &info, NULL), 0);
    save(handle.bytes, sizeof handle.bytes);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_OK);
    says("kind        memory\n");
    says("exporter    process %d, alive\n", (int)peer.pid);
    says("start       %llu,", (unsigned long long)info.start);
    says(", this one\n");
    says("fd          %u there\n", info.fd);
    says("inode %llu\n", (unsigned long long)info.ino);
    says("size        %d bytes\n", PEER_OBJECT_SIZE - 5001);
    says("offset      5001\n");
    says("generation  %u\n", info.generation);
    says("opened by   pidfd_getfd\n");
    char row[128] = "00000010  ";
    for (unsigned i = 16; i < 24; i++)
        snprintf(row + strlen(row), sizeof row - strlen(row), "%02x ", object_byte(3, 5001 + i));
    says("%s", row);
    says("00000030  ");
    assert_null(strstr(output, "00000040  "));
    expect_status(run(COXSWAIN "--bytes 20 - < %s", file), COX_EXIT_OK);
    says("00000010  %02x", object_byte(3, 5017));
    assert_null(strstr(output, "00000020  "));
    expect_status(run(COXSWAIN "--bytes=0 %s", file), COX_EXIT_OK);
    assert_null(strstr(output, "00000000  "));
    expect_status(run("od -An -v -tx1 %s | " COXSWAIN "--hex -", file), COX_EXIT_OK);
    says("opened by   pidfd_getfd\n");
    handle = peer_export(&peer, PEER_EXPORT_SOCKET, 0);
    save(handle.bytes, sizeof handle.bytes);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_OK);
    says("kind        other");
    says("nothing to map");
    says("opened by   pidfd_getfd\n");
}

HANDLE_TEST(l8_l9_l10_l7_what_does_not_open_is_named)
{
    if (!test_can_take_fds())
        skip();
    struct peer peer = peer_start(NULL);
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 4), forged = handle;
    handle_forge(&forged, 16, 8, 77);
    save(forged.bytes, sizeof forged.bytes);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_USAGE);
    says("000000000000004d, not this one");
    says("coxswain: unreachable");
    forged = handle;
    handle_forge(&forged, 8, 8, 78);
    save(forged.bytes, sizeof forged.bytes);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_WORKER);
    says("the pid is another process's by now");
    save(handle.bytes, sizeof handle.bytes);
    assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &handle).result, 0);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_USAGE);
    says("alive\n");
    says("the handle was put");
    peer_end(&peer);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_WORKER);
    says("exporter    process %d, gone\n", (int)peer.pid);
    says("is gone\n");
}

HANDLE_TEST(l12_it_asks_the_socket_where_it_must)
{
    char path[COX_SOCKET_PATH_SIZE], runtime[80];
    struct cox_control_socket *control_socket = NULL;
    if (!filters_possible())
        skip();
    snprintf(runtime, sizeof runtime, "%s/coxswain", runtime_dir);
    assert_int_equal(mkdir(runtime, 0700), 0);
    const struct cox_control_socket_options options = {.name = "handles", .runtime_dir = runtime};
    static const struct cox_control_socket_hooks none;
    assert_int_equal(cox_control_socket_open(&options, &none, &control_socket, NULL), 0);
    snprintf(path, sizeof path, "%s", cox_control_socket_path(control_socket));
    struct peer peer = peer_start(&(struct peer_options){.socket_path = path});
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 5);
    save(handle.bytes, sizeof handle.bytes);
    expect_status(run(WITHOUT "pidfd_getfd=EPERM " COXSWAIN "%s", file), COX_EXIT_OK);
    says("opened by   /proc\n");
    says("00000000  %02x", object_byte(5, 0));
    expect_status(run(WITHOUT "pidfd_getfd=EPERM " COXSWAIN "--socket %.100s %s", path, file),
                  COX_EXIT_OK);
    says("opened by   the control socket\n");
    says("00000000  %02x", object_byte(5, 0));
    expect_status(run("XDG_RUNTIME_DIR=%s " WITHOUT "pidfd_getfd=ENOSYS " COXSWAIN
                      "%s --name handles",
                      runtime_dir, file),
                  COX_EXIT_OK);
    says("opened by   the control socket\n");
    handle = peer_export(&peer, PEER_EXPORT_SOCKET, 0);
    save(handle.bytes, sizeof handle.bytes);
    expect_status(run(WITHOUT "pidfd_getfd=EPERM " COXSWAIN "%s", file), COX_EXIT_FAILED);
    says("seccomp");
    peer_end(&peer);
    cox_control_socket_close(control_socket);
    assert_int_equal(rmdir(runtime), 0);
}

HANDLE_TEST(l19_files_that_hold_no_handle_are_refused)
{
    char text[2048];
    memset(text, 'f', sizeof text);
    const struct {
        size_t size;
        const char *arguments, *word;
    } refusals[] = {
        {0, "", "0 bytes, a handle has 64"},
        {63, "", "63 bytes, a handle has 64"},
        {65, "", "65 bytes, a handle has 64"},
        {2000, "", "1024 or more bytes"},
        {64, "", "no handle"},
        {127, "--hex", "127 digits, expected 128"},
        {126, "--hex", "63 bytes"},
        {128, "--hex", "no handle"},
        {64, "--bytes x", "--bytes 'x'"},
        {64, "--bytes -1", "--bytes '-1'"},
        {64, "--bytes 99999999", "99999999"},
        {64, "--bogus", "--bogus"},
        {64, "--socket a --name b", "use one"},
        {64, "--name /", "name"},
        {64, "--socket", "needs a value"},
        {64, "more", "2 files named"},
    };
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        save(text, refusals[i].size);
        expect_status(run(COXSWAIN "%s %s", file, refusals[i].arguments), COX_EXIT_USAGE);
        says("%s", refusals[i].word);
    }
    text[70] = 'g';
    save(text, 128);
    expect_status(run(COXSWAIN "--hex %s", file), COX_EXIT_USAGE);
    says("byte 70 is no hexadecimal digit");
    text[70] = 'f';
    save(text, 128);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_USAGE);
    says("128 bytes, a handle has 64; these are hexadecimal digits: read them with --hex");
    save(text, 64);
    expect_status(run(COXSWAIN "%s", file), COX_EXIT_USAGE);
    says("%s: no handle: it begins with 0x6666", file);
    expect_status(run(COXSWAIN "%s/nothing", runtime_dir), COX_EXIT_USAGE);
    says("No such file");
    expect_status(run(COXSWAIN "%s", runtime_dir), COX_EXIT_USAGE);
    says("directory");
    expect_status(run(COXSWAIN), COX_EXIT_USAGE);
    says("0 files named");
    expect_status(run(COXSWAIN "--help"), COX_EXIT_OK);
    says("Usage: coxswain handle");
    says("Exit status");
}
