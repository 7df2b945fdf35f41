#include "test.h"

#include <ftw.h>
#include <netinet/in.h>

static struct test_entry *entries;
static pid_t runner; /* the thread that runs the tests */

/* Constructors run in no promised order; tests are read, and run, from the top of a file. */
void test_register(struct test_entry *entry)
{
    struct test_entry **at = &entries;
    while (*at && (strcmp((*at)->file, entry->file) != 0 || (*at)->line < entry->line))
        at = &(*at)->next;
    entry->next = *at;
    *at = entry;
}

/* ---- what a test owns ---- */

struct owned {
    void *object;
    void (*release)(void *object);
};
#define OWNED_COUNT_MAX 4096
static struct owned owned[OWNED_COUNT_MAX];
static size_t owned_count;
/* The entry of the test that runs, and whether its function has returned, or it is skipped. */
static struct test_entry *running;
static bool may_release;

void *test_own(void *object, void (*release)(void *object))
{
    if (owned_count == OWNED_COUNT_MAX)
        fail_msg("a test owns at most %d objects", OWNED_COUNT_MAX);
    owned[owned_count++] = (struct owned){object, release};
    return object;
}

void test_release(void *object)
{
    size_t i = owned_count;
    while (i > 0 && owned[i - 1].object != object)
        i--;
    if (i == 0)
        fail_msg("%p is not owned", object);
    const struct owned found = owned[i - 1];
    owned_count--;
    memmove(&owned[i - 1], &owned[i], (owned_count - (i - 1)) * sizeof owned[0]);
    found.release(found.object);
}

static void fd_release(void *object)
{
    close((int)(intptr_t)object);
}

int test_own_fd(int fd)
{
    if (fd < 0)
        fail_msg("fd %d: %s", fd, strerror(errno));
    test_own((void *)(intptr_t)fd, fd_release);
    return fd;
}

void test_close(int fd)
{
    test_release((void *)(intptr_t)fd);
}

void test_pipe(int ends[2])
{
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    test_own_fd(ends[0]);
    test_own_fd(ends[1]);
}

void test_socketpair(int ends[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    test_own_fd(ends[0]);
    test_own_fd(ends[1]);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

static void folder_release(void *object)
{
    nftw(object, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(object);
}

const char *test_folder(void)
{
    char *path = strdup("/tmp/cox_test_XXXXXX");
    assert_true(path && mkdtemp(path));
    return test_own(path, folder_release);
}

pthread_t test_thread(void *(*thread_main)(void *context), void *context)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, thread_main, context), 0);
    return thread;
}

/* cmocka gives each test its entry as the initial state. */
static int entry_setup(void **state)
{
    running = *state;
    *state = NULL;
    may_release = false;
    owned_count = 0;
    return running->test.setup_func ? running->test.setup_func(state) : 0;
}

static void entry_run(void **state)
{
    running->test.test_func(state);
    may_release = true;
}

static int entry_teardown(void **state)
{
    while (may_release && owned_count > 0)
        test_release(owned[owned_count - 1].object);
    return running->test.teardown_func ? running->test.teardown_func(state) : 0;
}

int test_run(CMFixtureFunction setup, CMFixtureFunction teardown)
{
    size_t count = 0;
    for (const struct test_entry *entry = entries; entry; entry = entry->next)
        count++;
    if (count == 0) {
        printf("no tests in this build: they need its fault points (COX_TESTING)\n");
        return 77;
    }
    struct CMUnitTest *tests = calloc(count, sizeof *tests);
    if (!tests)
        return -1;
    runner = gettid();
    count = 0;
    for (struct test_entry *entry = entries; entry; entry = entry->next)
        tests[count++] =
            (struct CMUnitTest){entry->test.name, entry_run, entry_setup, entry_teardown, entry};
    int failed =
        _cmocka_run_group_tests(program_invocation_short_name, tests, count, setup, teardown);
    free(tests);
    return failed;
}

void test_needs(bool condition)
{
    if (condition)
        return;
    may_release = true;
    skip();
}

void assert_contains(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("'%s' is not in: %s", part, text);
}

/* ---- calls that return a code and an error ---- */

_Thread_local struct cox_error test_error;

struct cox_error *test_err(void)
{
    cox_error_clear(&test_error);
    return &test_error;
}

void test_check_ok(int r, const char *call, const char *file, int line)
{
    if (r) {
        print_error("%s: %d\n%s\n", call, r, test_error.text);
        _fail(file, line);
    }
    cox_error_clear(&test_error); /* it is not the next call's */
}

void test_check_refused(int r, int code, const char *part, const char *call, const char *file,
                        int line)
{
    if (r == code && test_error.code == code && strstr(test_error.text, part))
        return;
    print_error("%s: %d, expected %d and '%s'\n%s\n", call, r, code, part, test_error.text);
    _fail(file, line);
}

/* ---- what the kernel has of this process ---- */

int test_entry_count(const char *folder, const char *part, const char *other)
{
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    int count = 0;
    for (struct dirent *e; (e = readdir(dir));)
        count += e->d_name[0] != '.' && strstr(e->d_name, part) && strstr(e->d_name, other);
    closedir(dir);
    return count;
}

size_t test_mapping_count(const char *part)
{
    char line[512];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, part) != NULL;
    fclose(maps);
    return count;
}

int test_reopen(int fd, int flags)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, flags | O_CLOEXEC);
}

int test_lingering_socket(int *ret_peer)
{
    static const char bytes[65536];
    const struct linger on = {1, 3600};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    const int small = 4096;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    COX_ASSERT(bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    COX_ASSERT(listen(listener, 16) == 0);
    COX_ASSERT(getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    COX_ASSERT(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    *ret_peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    COX_ASSERT(*ret_peer >= 0);
    close(listener);
    while (send(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        continue;
    COX_ASSERT(errno == EAGAIN);
    COX_ASSERT(setsockopt(fd, SOL_SOCKET, SO_LINGER, &on, sizeof on) == 0);
    return fd;
}

/* ---- waiting ---- */

struct timespec test_await_since(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now;
}

void test_await_more(const struct timespec *since, const char *condition, const char *file,
                     int line)
{
    sched_yield();
    if (test_await_since().tv_sec - since->tv_sec < AWAIT_S)
        return;
    print_error("not in %d s: %s\n", AWAIT_S, condition);
    if (gettid() == runner)
        _fail(file, line);
    fprintf(stderr, "%s:%d\n", file, line);
    _exit(1);
}

void test_await_stopped(pid_t child)
{
    int status = 0;
    while (waitpid(child, &status, WUNTRACED) < 0)
        assert_int_equal(errno, EINTR);
    if (!WIFSTOPPED(status))
        fail_msg("the child ended with %#x", (unsigned)status);
}

void test_kill_child(pid_t child)
{
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}
