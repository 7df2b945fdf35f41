/*
 * CUDA memory, in one process and between two: domain_cuda_test LIBRARY [stand-in].
 *
 * With the driver that is there (libcuda.so.1) it skips, and says why, where there is none or no
 * device. With the stand-in (tests/lib/fake_cuda.h) it shows what our side does with a driver, and
 * no more. Another process is always another program: a driver does not survive a fork.
 */
#include "memory/domain/domain_table.h"
#include "tests/lib/fake_cuda.h"
#include "tests/lib/inverted_domain.h"
#include "tests/unit/channel_fixture.h"

#include <coxswain/memory/domain_cuda.h>
#include <coxswain/memory/queue.h>

#include <dlfcn.h>

/* No whole number of units, of any driver. */
#define SIZE (UINT64_C(300) * 1024 + 13)
#define IMPORT_FD 40
#define READY_FD 41 /* written once it has joined */
#define GO_FD 42    /* read before it takes */

extern char **environ;

static const char *library;
static struct fake_cuda *fake; /* NULL: a real driver */
static int fds_before;
static struct cox_domains *domains;
static uint8_t pattern[SIZE], seen[SIZE];
static struct inverted_context inverted;

static const struct cox_domain_id cuda_id = {COX_DOMAIN_CUDA, 0};
static const struct cox_domain_id other_id = {COX_DOMAIN_CUDA, 1};

static void fill(void)
{
    uint64_t random = 99;
    for (size_t i = 0; i < SIZE; i++)
        pattern[i] = (uint8_t)(random_next(&random) >> 32);
}

static void expect_nothing_left(void)
{
    if (fake) {
        assert_int_equal(fake->contexts, 0);
        assert_int_equal(fake->depth, 0);
        assert_int_equal(fake->allocations, 0);
        assert_int_equal(fake->reservations, 0);
        assert_int_equal(fake->mappings, 0);
        assert_int_equal(fd_count(), fds_before);
    }
}

static int setup(void **state)
{
    (void)state;
    if (fake)
        *fake = (struct fake_cuda){.device_count = 2, .virtual_memory = 1, .fd_handles = 1};
    fds_before = fd_count();
    memset(&inverted, 0, sizeof inverted);
    if (cox_domains_new(&domains) ||
        cox_domains_add(domains, INVERTED_KIND, 1, &inverted_domain_functions, &inverted, NULL))
        return -1;
    assert_ok(cox_domains_add_cuda_library(domains, library, test_err()));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    domains = cox_domains_free(domains);
    expect_nothing_left();
    return 0;
}

#define DOMAIN_TEST(name) TEST_WITH(name, setup, teardown)
static int create(struct cox_domain_id id, uint64_t size, struct cox_domain_memory **ret_memory,
                  struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    assert_int_equal(cox_domains_find(domains, id, &functions, &context, NULL), 0);
    return functions->create(context, id.device, size, false, ret_memory, err);
}

static int attach(struct cox_domain_id id, int fd, uint64_t size, bool writable,
                  struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    assert_int_equal(cox_domains_find(domains, id, &functions, &context, NULL), 0);
    return functions->attach(context, id.device, fd, size, writable, ret_memory, err);
}

static struct cox_domain_memory *created(struct cox_domain_id id, uint64_t size)
{
    struct cox_domain_memory *memory;
    assert_ok(create(id, size, &memory, test_err()));
    return memory;
}

static struct cox_domain_memory *attached(int fd, bool writable)
{
    struct cox_domain_memory *memory;
    assert_ok(attach(cuda_id, fd, SIZE, writable, &memory, test_err()));
    return memory;
}

/* Of the stand-in: call number `call`, of this name (NULL: any), fails so; 0: none does. */
static void fake_fail(const char *name, int call, int result)
{
    fake->calls = 0;
    fake->failed = NULL;
    fake->fail_name = name;
    fake->fail_call = call;
    fake->fail_result = result;
}

static void destroy(struct cox_domain_memory *memory)
{
    memory->functions->destroy(memory);
}

static void expect(struct cox_domain_memory *memory, const uint8_t *bytes)
{
    memset(seen, 0x5a, SIZE);
    assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
    assert_memory_equal(seen, bytes, SIZE);
}

/* ---- one process ---- */

DOMAIN_TEST(h24_h25_h28_device_memory_is_zeros_and_then_what_was_copied)
{
    static const uint8_t zeros[SIZE];
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    assert_int_equal(memory->size, SIZE);
    assert_null(memory->address);
    assert_int_not_equal(memory->device_address, 0);
    assert_true(memory->fd > STDERR_FILENO && (fcntl(memory->fd, F_GETFD) & FD_CLOEXEC));
    expect(memory, zeros);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    expect(memory, pattern);
    assert_int_equal(cox_domain_copy_to(memory, 4093, pattern, 10, NULL), 0);
    assert_int_equal(cox_domain_copy_from(memory, 4092, seen, 12, NULL), 0);
    assert_int_equal(seen[0], pattern[4092]);
    assert_memory_equal(seen + 1, pattern, 10);
    assert_int_equal(seen[11], pattern[4103]);
    assert_int_equal(cox_domain_copy_to(memory, SIZE - 1, pattern, 2, NULL), COX_INVALID);
    destroy(memory);
}

DOMAIN_TEST(h26_h28_every_domain_copies_to_the_device_and_back)
{
    const struct cox_domain_id others[] = {{COX_DOMAIN_HOST, 0},
                                           {COX_DOMAIN_BOUNCE, 0},
                                           {INVERTED_KIND, 0},
                                           {COX_DOMAIN_CUDA, 0},
                                           {COX_DOMAIN_CUDA, 1}};
    const struct cox_domain_functions *functions;
    void *context;
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        if (cox_domains_find(domains, others[i], &functions, &context, NULL))
            continue; /* the machine has one device */
        struct cox_domain_memory *from = created(others[i], SIZE), *to = created(others[i], SIZE);
        static const uint8_t zeros[SIZE];
        assert_int_equal(cox_domain_copy_to(memory, 0, zeros, SIZE, NULL), 0);
        assert_int_equal(cox_domain_copy_to(from, 0, pattern, SIZE, NULL), 0);
        assert_int_equal(cox_domain_copy(memory, 0, from, 0, SIZE, NULL), 0);
        expect(memory, pattern);
        assert_int_equal(cox_domain_copy(to, 0, memory, 0, SIZE, NULL), 0);
        expect(to, pattern);
        destroy(to);
        destroy(from);
    }
    destroy(memory);
}

DOMAIN_TEST(h28_what_one_process_exports_it_may_import)
{
    struct cox_domain_memory *memory = created(cuda_id, SIZE), *view = attached(memory->fd, true);
    assert_int_not_equal(view->fd, memory->fd);
    assert_int_not_equal(view->device_address, memory->device_address);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    expect(view, pattern);
    /* It is there while one of them is. */
    destroy(memory);
    expect(view, pattern);
    struct cox_domain_memory *reader = attached(view->fd, false);
    destroy(view);
    expect(reader, pattern);
    assert_int_equal(cox_domain_copy_to(reader, 0, pattern, 1, NULL), COX_DENIED);
    destroy(reader);
}

static void make_private(struct cox_domain_memory *memory)
{
    assert_ok(cox_domain_cuda_make_private(memory, test_err()));
}

DOMAIN_TEST(h28_a_view_becomes_a_copy_at_the_same_address)
{
    static const uint8_t zeros[SIZE];
    struct cox_domain_memory *memory = created(cuda_id, SIZE), *view = attached(memory->fd, false);
    const uint64_t address = view->device_address;
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    assert_int_equal(cox_domain_copy_to(view, 0, zeros, SIZE, NULL), COX_DENIED);
    make_private(view);
    assert_true(view->device_address == address && view->writable && view->fd == -1);
    expect(view, pattern);
    assert_int_equal(cox_domain_copy_to(view, 0, zeros, SIZE, NULL), 0);
    expect(memory, pattern);
    destroy(memory);
    expect(view, zeros);
    make_private(view); /* once more: it is one already */
    expect(view, zeros);
    destroy(view);
}

DOMAIN_TEST(h28_devices_have_names)
{
    static const uint8_t zeros[16];
    uint8_t first[16] = {0}, again[16], other[16] = {0};
    assert_int_equal(cox_domain_cuda_uuid(domains, 0, first, NULL), 0);
    assert_int_equal(cox_domain_cuda_uuid(domains, 0, again, NULL), 0);
    assert_memory_equal(first, again, 16);
    assert_memory_not_equal(first, zeros, 16);
    assert_int_equal(cox_domain_cuda_uuid(domains, 31, other, NULL), COX_INVALID);
    if (cox_domain_cuda_uuid(domains, 1, other, NULL) == 0) /* the machine may have one device */
        assert_memory_not_equal(first, other, 16);
}

DOMAIN_TEST(h28_the_hosts_current_context_stays)
{
    void *driver = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(driver);
    int (*current)(void **ret), (*push)(void *), (*pop)(void **), (*retain)(void **, int),
        (*release)(int);
    *(void **)&current = dlsym(driver, "cuCtxGetCurrent");
    *(void **)&push = dlsym(driver, "cuCtxPushCurrent_v2");
    *(void **)&pop = dlsym(driver, "cuCtxPopCurrent_v2");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&release = dlsym(driver, "cuDevicePrimaryCtxRelease_v2");
    assert_true(current && push && pop && retain && release);
    const int device = fake ? 11 : 0;
    void *own = NULL, *seen_context = NULL;
    assert_int_equal(retain(&own, device), 0);
    for (int has_own = 0; has_own < 2; has_own++) {
        void *expected = has_own ? own : NULL;
        if (has_own)
            assert_int_equal(push(own), 0);
        struct cox_domain_memory *memory = created(cuda_id, SIZE);
        struct cox_domain_memory *view = attached(memory->fd, true), *none = NULL;
        assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
        assert_int_equal(cox_domain_copy(view, 0, memory, 1, 100000, NULL), 0);
        expect(view, seen);
        assert_int_not_equal(attach(cuda_id, STDOUT_FILENO, SIZE, true, &none, NULL), 0);
        destroy(view);
        destroy(memory);
        assert_int_equal(current(&seen_context), 0);
        assert_ptr_equal(seen_context, expected);
    }
    assert_int_equal(pop(&seen_context), 0);
    assert_int_equal(release(device), 0);
    dlclose(driver);
}

DOMAIN_TEST(h28_what_is_no_device_memory_is_refused)
{
    struct cox_domain_memory *memory = NULL;
    int fd = memfd_create("no device memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, SIZE), 0);
    assert_refused(attach(cuda_id, fd, SIZE, true, &memory, test_err()), COX_CORRUPT, "importing");
    close(fd);
    assert_int_equal(attach(cuda_id, -1, SIZE, true, &memory, NULL), -EBADF);
    assert_int_equal(create(cuda_id, 0, &memory, NULL), COX_INVALID);
    assert_int_equal(create(cuda_id, UINT64_MAX, &memory, NULL), COX_NO_SPACE);
    assert_refused(create(cuda_id, UINT64_C(1) << 50, &memory, test_err()), COX_NO_SPACE,
                   "1125899906842624 bytes of memory are needed");
    struct cox_domain_memory *small = created(cuda_id, 1);
    assert_refused(attach(cuda_id, small->fd, UINT64_C(64) << 20, true, &memory, test_err()),
                   COX_CORRUPT, "smaller");
    assert_null(memory);
    destroy(small);
}

static void in_a_child_of_fork(void *context)
{
    struct cox_domain_memory *memory = context, *none = NULL;
    const struct cox_domain_functions *functions = memory->functions;
    void *cuda;
    const int fds = fd_count(), contexts = fake ? fake->contexts : 0;
    const int mappings = fake ? fake->mappings : 0;
    CHECK(cox_domain_copy_from(memory, 0, seen, 1, test_err()) == COX_STATE);
    CHECK(strstr(test_error.text, "fork"));
    CHECK(cox_domain_copy_to(memory, 0, seen, 1, NULL) == COX_STATE);
    CHECK(cox_domain_cuda_make_private(memory, NULL) == COX_STATE);
    CHECK(cox_domains_find(domains, cuda_id, &functions, &cuda, NULL) == 0);
    CHECK(functions->create(cuda, 0, SIZE, false, &none, NULL) == COX_STATE);
    CHECK(functions->attach(cuda, 0, memory->fd, SIZE, true, &none, NULL) == COX_STATE);
    destroy(memory);
    CHECK(fd_count() == fds - 1);
    CHECK(!fake || (fake->contexts == contexts && fake->mappings == mappings));
    _exit(0); /* not through a driver's handlers */
}

DOMAIN_TEST(h28_a_child_of_fork_gets_an_error_and_unmaps)
{
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    child_run(in_a_child_of_fork, memory);
    expect(memory, pattern);
    destroy(memory);
}

DOMAIN_TEST(h27_cuda_is_added_once)
{
    assert_refused(cox_domains_add_cuda_library(domains, library, test_err()), COX_BUSY, "'CUDA'");
    if (!fake)
        return;
    struct cox_domains *other;
    assert_int_equal(cox_domains_new(&other), 0);
    assert_ok(cox_domains_add(other, 64, 29, &inverted_domain_functions, &inverted, NULL));
    assert_int_equal(cox_domains_add_cuda_library(other, library, NULL), COX_FULL);
    cox_domains_free(other);
}

/* ---- two processes ---- */

/* Memory (a queue) under IMPORT_FD in another program, which does what `order` says. ready_fd,
 * go_fd: -1: none. */
static pid_t program_start(int fd, int ready_fd, int go_fd, const char *order)
{
    posix_spawn_file_actions_t actions;
    const char *const arguments[] = {"/proc/self/exe", library, fake ? "stand-in" : "driver", order,
                                     NULL};
    pid_t pid;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, IMPORT_FD);
    if (ready_fd >= 0)
        posix_spawn_file_actions_adddup2(&actions, ready_fd, READY_FD);
    if (go_fd >= 0)
        posix_spawn_file_actions_adddup2(&actions, go_fd, GO_FD);
    assert_int_equal(posix_spawn(&pid, arguments[0], &actions, NULL,
                                 (char *const *)(uintptr_t)arguments, environ),
                     0);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

static pid_t import_start(int fd, const char *order)
{
    return program_start(fd, -1, -1, order);
}

static struct cox_pool *device_pool(void)
{
    const struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                             .domains = domains,
                                             .domain = cuda_id,
                                             .block_size = UINT64_C(320) << 10,
                                             .block_count = 3};
    struct cox_pool *pool = NULL;
    if (cox_pool_create(&options, &pool, test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    COX_ASSERT(pool);
    return pool;
}

static struct cox_exporter *exporter_of_all(void)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .ptrace_policy = COX_PTRACE_ANY};
    struct cox_exporter *exporter = NULL;
    COX_ASSERT(cox_exporter_new(&options, &exporter, NULL) == 0);
    return exporter;
}

static bool message_is_pattern(const struct cox_message *message)
{
    memset(seen, 0, SIZE);
    return !message->bytes && message->length == SIZE &&
           cox_pool_copy_from(message->pool, &message->ref, 0, seen, SIZE, NULL) == 0 &&
           memcmp(seen, pattern, SIZE) == 0;
}

/* The other program takes a message whose copy in device memory this one has made. */
static int take_main(bool dies)
{
    struct cox_queue *queue = NULL;
    struct cox_subscriber *subscriber = NULL;
    struct cox_message message;
    char byte = 0;
    CHECK(cox_domains_new(&domains) == 0);
    CHECK(cox_domains_add_cuda_library(domains, library, NULL) == 0);
    CHECK(cox_queue_attach(IMPORT_FD, NULL, &queue, NULL) == 0);
    close(IMPORT_FD);
    struct cox_pool *own = device_pool();
    struct cox_exporter *exporter = exporter_of_all();
    const struct cox_subscriber_options options = {.size = sizeof(struct cox_subscriber_options),
                                                   .pool = own,
                                                   .domains = domains,
                                                   .exporter = exporter};
    CHECK(cox_subscriber_new(queue, &options, &subscriber, NULL) == 0);
    CHECK(write(READY_FD, &byte, 1) == 1);
    CHECK(read(GO_FD, &byte, 1) == 1);
    if (cox_subscriber_take(subscriber, &message, test_err())) {
        fprintf(stderr, "%s\n", test_error.text);
        return 1;
    }
    /* The copy is the other process's, imported here: there is one for the domain. */
    CHECK(!message.copied && message.pool != own);
    CHECK(message_is_pattern(&message));
    if (dies)
        kill(getpid(), SIGKILL);
    CHECK(cox_pool_unref(message.pool, &message.ref, NULL) == 0);
    cox_subscriber_free(subscriber);
    cox_queue_free(queue);
    cox_exporter_free(exporter);
    cox_pool_free(own);
    cox_domains_free(domains);
    return 0;
}

/* The other program. Exit status 0: all was as it should be. */
static int import_main(const char *order)
{
    if (strcmp(order, "take") == 0 || strcmp(order, "take and die") == 0)
        return take_main(order[4] != '\0');
    struct cox_domain_memory *memory = NULL;
    CHECK(cox_domains_new(&domains) == 0);
    if (cox_domains_add_cuda_library(domains, library, test_err()) ||
        attach(cuda_id, IMPORT_FD, SIZE, true, &memory, test_err())) {
        fprintf(stderr, "%s\n", test_error.text);
        return 1;
    }
    close(IMPORT_FD);
    CHECK(cox_domain_copy_from(memory, 0, seen, SIZE, NULL) == 0);
    CHECK(memcmp(seen, pattern, SIZE) == 0);
    CHECK(cox_domain_copy_to(memory, 7, pattern + 1000, 100000, NULL) == 0);
    if (strcmp(order, "die") == 0)
        kill(getpid(), SIGKILL);
    destroy(memory);
    cox_domains_free(domains);
    return 0;
}

DOMAIN_TEST(h19_h28_another_process_imports_device_memory)
{
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    child_join(import_start(memory->fd, "leave"));
    assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
    assert_memory_equal(seen, pattern, 7);
    assert_memory_equal(seen + 7, pattern + 1000, 100000);
    assert_memory_equal(seen + 100007, pattern + 100007, SIZE - 100007);
    destroy(memory);
}

DOMAIN_TEST(h20_h28_an_importer_that_is_killed_takes_nothing_along)
{
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    int status = child_status(import_start(memory->fd, "die"));
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
    assert_memory_equal(seen + 7, pattern + 1000, 100000);
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    expect(memory, pattern);
    destroy(memory);
}

static uint32_t used_blocks(const struct cox_pool *pool)
{
    struct cox_pool_stats stats;
    cox_pool_read_stats(pool, &stats);
    return stats.block_count - stats.free_count;
}

static void publish_pattern(struct cox_publisher *publisher, struct cox_pool *pool)
{
    struct cox_block_ref ref;
    uint64_t number;
    assert_int_equal(cox_pool_allocate(pool, SIZE, &ref, NULL), 0);
    assert_int_equal(cox_pool_copy_to(pool, &ref, 0, pattern, SIZE, NULL), 0);
    assert_int_equal(cox_publisher_publish(publisher, &ref, SIZE, 1, &number, NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
}

/* From host memory to the device once, for two processes; or from another pool of the device, and
 * not at all. */
static void take_on_the_device(const char *order, bool from_host)
{
    const struct cox_queue_options depth = {.size = sizeof(struct cox_queue_options), .depth = 2};
    const struct cox_pool_options host_options = {.size = sizeof(struct cox_pool_options),
                                                  .block_size = UINT64_C(320) << 10,
                                                  .block_count = 2};
    struct cox_queue *queue = NULL;
    struct cox_pool *of_publisher = NULL, *device = device_pool();
    struct cox_exporter *exporter = exporter_of_all();
    struct cox_publisher *publisher = NULL;
    struct cox_subscriber *subscriber = NULL;
    struct cox_message message;
    int ready[2], go[2];
    char byte = 0;
    test_pipe(ready);
    test_pipe(go);
    if (from_host)
        assert_int_equal(cox_pool_create(&host_options, &of_publisher, NULL), 0);
    else
        of_publisher = device_pool();
    assert_int_equal(cox_queue_create(&depth, &queue, NULL), 0);
    const struct cox_publisher_options publishing = {.size = sizeof(struct cox_publisher_options),
                                                     .pool = of_publisher,
                                                     .domains = domains,
                                                     .exporter = exporter};
    assert_int_equal(cox_publisher_new(queue, &publishing, &publisher, NULL), 0);
    const struct cox_subscriber_options taking = {.size = sizeof(struct cox_subscriber_options),
                                                  .pool = device,
                                                  .domains = domains,
                                                  .exporter = exporter};
    assert_int_equal(cox_subscriber_new(queue, &taking, &subscriber, NULL), 0);
    pid_t pid = program_start(cox_queue_fd(queue), ready[1], go[0], order);
    test_close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    publish_pattern(publisher, of_publisher);
    assert_int_equal(cox_subscriber_take(subscriber, &message, NULL), 0);
    assert_int_equal(message.copied, from_host);
    assert_true(message_is_pattern(&message));
    assert_int_equal(write(go[1], &byte, 1), 1);
    int status = child_status(pid);
    if (strcmp(order, "take") == 0)
        assert_int_equal(status, 0);
    else
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_true(message_is_pattern(&message));
    assert_int_equal(cox_pool_unref(message.pool, &message.ref, NULL), 0);
    cox_queue_sweep(queue);
    assert_int_equal(used_blocks(device), 0);
    assert_int_equal(used_blocks(of_publisher), 0);
    cox_subscriber_free(subscriber);
    cox_publisher_free(publisher);
    cox_queue_free(queue);
    cox_exporter_free(exporter);
    cox_pool_free(of_publisher);
    cox_pool_free(device);
}

DOMAIN_TEST(h6_h19_h28_a_message_is_copied_to_the_device_once_for_two_processes)
{
    take_on_the_device("take", true);
}

DOMAIN_TEST(h5_h28_a_message_in_device_memory_is_taken_there_by_another_process)
{
    take_on_the_device("take", false);
}

DOMAIN_TEST(h20_b37_h28_a_taker_that_is_killed_keeps_no_device_memory)
{
    take_on_the_device("take and die", true);
    take_on_the_device("take and die", false);
}

DOMAIN_TEST(h18_h28_a_device_that_is_full_makes_no_pool)
{
    struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                       .domains = domains,
                                       .domain = cuda_id,
                                       .block_size = UINT64_C(1) << 40,
                                       .block_count = 1000};
    struct cox_pool *none = NULL;
    assert_refused(cox_pool_create(&options, &none, test_err()), COX_NO_SPACE,
                   "bytes of memory are needed");
    options.domain.device = 31;
    assert_int_equal(cox_pool_create(&options, &none, NULL), COX_INVALID);
    assert_null(none);
}

/* ---- the stand-in alone ---- */

DOMAIN_TEST(h28_stand_in_bytes_are_there_when_a_copy_returns)
{
    struct cox_domain_memory *from = created(cuda_id, SIZE), *to = created(cuda_id, SIZE);
    assert_int_equal(pread(from->fd, seen, SIZE, 0), (ssize_t)SIZE);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(seen[i], 0);
    assert_int_equal(cox_domain_copy_to(from, 0, pattern, SIZE, NULL), 0);
    assert_int_equal(pread(from->fd, seen, SIZE, 0), (ssize_t)SIZE);
    assert_memory_equal(seen, pattern, SIZE);
    assert_int_equal(cox_domain_copy(to, 0, from, 0, SIZE, NULL), 0);
    assert_int_equal(pread(to->fd, seen, SIZE, 0), (ssize_t)SIZE);
    assert_memory_equal(seen, pattern, SIZE);
    destroy(to);
    destroy(from);
}

/* What is done, with each call of the driver failing in turn. */
struct job {
    const char *name;
    int (*run)(struct cox_domain_memory *memory, struct cox_error *err);
};

static int job_add(struct cox_domain_memory *memory, struct cox_error *err)
{
    (void)memory;
    struct cox_domains *other;
    assert_int_equal(cox_domains_new(&other), 0);
    int r = cox_domains_add_cuda_library(other, library, err);
    cox_domains_free(other);
    return r;
}

/* What was made is destroyed, if that was the result. */
static int job_end(int r, struct cox_domain_memory *made)
{
    assert_true((r == 0) == (made != NULL));
    fake->fail_call = 0;
    if (made)
        destroy(made);
    return r;
}

static int job_create(struct cox_domain_memory *memory, struct cox_error *err)
{
    struct cox_domain_memory *made = NULL;
    (void)memory;
    int r = create(other_id, SIZE, &made, err);
    return job_end(r, made);
}

static int job_attach(struct cox_domain_memory *memory, struct cox_error *err)
{
    struct cox_domain_memory *made = NULL;
    int r = attach(cuda_id, memory->fd, SIZE, true, &made, err);
    return job_end(r, made);
}

static int job_copy_to(struct cox_domain_memory *memory, struct cox_error *err)
{
    return cox_domain_copy_to(memory, 0, pattern, SIZE, err);
}

static int job_copy_from(struct cox_domain_memory *memory, struct cox_error *err)
{
    return cox_domain_copy_from(memory, 0, seen, SIZE, err);
}

static int job_copy(struct cox_domain_memory *memory, struct cox_error *err)
{
    return cox_domain_copy(memory, 0, memory, 200000, 100000, err);
}

static int job_make_private(struct cox_domain_memory *memory, struct cox_error *err)
{
    struct cox_domain_memory *view = NULL;
    int r = attach(cuda_id, memory->fd, SIZE, false, &view, err);
    if (r)
        return r;
    r = cox_domain_cuda_make_private(view, err);
    assert_true((r == 0) == view->writable);
    fake->fail_call = 0;
    destroy(view);
    /* The last call is one of those that undo, and its failure fails nothing. */
    return r == 0 && fake->failed ? cox_fail(err, -EIO, "%s", fake->failed) : r;
}

static const struct job jobs[] = {{"add", job_add},
                                  {"create", job_create},
                                  {"attach", job_attach},
                                  {"copy to", job_copy_to},
                                  {"copy from", job_copy_from},
                                  {"copy", job_copy},
                                  {"make private", job_make_private}};

DOMAIN_TEST(b15_h28_stand_in_whatever_fails_in_the_driver_is_reported_and_undone)
{
    struct cox_domain_memory *memory = created(cuda_id, SIZE);
    const struct fake_cuda before = *fake;
    const int fds = fd_count();
    for (size_t j = 0; j < sizeof jobs / sizeof jobs[0]; j++) {
        int k = 0;
        do {
            fake_fail(NULL, ++k, 999);
            int r = jobs[j].run(memory, test_err());
            fake->fail_call = 0;
            if (fake->failed && (r == 0 || test_error.code != r || !test_error.text[0]))
                fail_msg("%s, call %d (%s): %d '%s'", jobs[j].name, k, fake->failed, r,
                         test_error.text);
            if (!fake->failed)
                assert_int_equal(r, 0);
            if (fake->contexts != before.contexts || fake->depth != before.depth ||
                fake->allocations != before.allocations || fake->mappings != before.mappings ||
                fake->reservations != before.reservations || fd_count() != fds)
                fail_msg("%s, call %d (%s): something is left", jobs[j].name, k, fake->failed);
        } while (fake->failed);
        assert_true(k > 2); /* some call was there to fail */
    }
    /* The context, which destroy makes the current one; the rest is undone all the same. */
    fake_fail(NULL, 1, 999);
    destroy(memory);
    assert_string_equal(fake->failed, "cuCtxPushCurrent_v2");
}

static int failing(const char *name, int result, struct cox_error *err)
{
    struct cox_domain_memory *memory = NULL;
    fake_fail(name, 1, result);
    int r = create(cuda_id, SIZE, &memory, err);
    fake_fail(NULL, 0, 0);
    assert_null(memory);
    return r;
}

DOMAIN_TEST(h28_stand_in_results_become_codes_of_ours)
{
    assert_refused(failing("cuMemCreate", 2, test_err()), COX_NO_SPACE, "327680 bytes");
    assert_contains(test_error.text, "out of memory");
    assert_int_equal(failing("cuMemMap", 2, NULL), COX_NO_SPACE);
    assert_int_equal(failing("cuMemExportToShareableHandle", 800, NULL), COX_DENIED);
    assert_int_equal(failing("cuMemCreate", 801, NULL), COX_UNSUPPORTED);
    assert_refused(failing("cuMemCreate", 719, test_err()), -EIO, "719");
    assert_contains(test_error.text, "device 0");
    struct cox_domain_memory *memory = created(cuda_id, SIZE), *reader;
    /* The device can do both: what is not supported is what the other process has sent. */
    static const char *const imports[] = {"cuMemImportFromShareableHandle", "cuMemMap"};
    for (size_t i = 0; i < sizeof imports / sizeof imports[0]; i++) {
        fake_fail(imports[i], 1, 801);
        assert_refused(attach(cuda_id, memory->fd, SIZE, true, &reader, test_err()), COX_CORRUPT,
                       "801");
    }
    /* A device without memory for reading alone. */
    fake_fail("cuMemSetAccess", 1, 801);
    assert_int_equal(attach(cuda_id, memory->fd, SIZE, false, &reader, NULL), 0);
    fake_fail(NULL, 0, 0);
    assert_int_equal(cox_domain_copy_to(reader, 0, pattern, 1, NULL), COX_DENIED);
    destroy(reader);
    fake_fail("cuMemSetAccess", 1, 801);
    assert_int_equal(attach(cuda_id, memory->fd, SIZE, true, &reader, NULL), COX_UNSUPPORTED);
    fake_fail(NULL, 0, 0);
    destroy(memory);
}

static void unsupported(const char *path, const char *word)
{
    struct cox_domains *other;
    const struct cox_domain_functions *functions;
    void *context;
    assert_int_equal(cox_domains_new(&other), 0);
    int r = cox_domains_add_cuda_library(other, path, test_err());
    if (r != COX_UNSUPPORTED || test_error.code != r || !strstr(test_error.text, word))
        fail_msg("expected '%s', got %d '%s'", word, r, test_error.text);
    assert_int_equal(cox_domains_find(other, cuda_id, &functions, &context, NULL), COX_INVALID);
    cox_domains_free(other);
}

DOMAIN_TEST(h28_stand_in_what_is_missing_is_named)
{
    unsupported("/nonexistent/libcuda.so.1", "/nonexistent");
    unsupported("libc.so.6", "cuInit");
    fake->device_count = 0;
    unsupported(library, "no device");
    fake->device_count = 1;
    fake->virtual_memory = 0;
    unsupported(library, "virtual memory management");
    fake->virtual_memory = 1;
    fake->fd_handles = 0;
    unsupported(library, "exported as an fd");
    fake->fd_handles = 1;
    fake_fail("cuInit", 1, 100);
    unsupported(library, "(100)");
    fake_fail(NULL, 0, 0);
}

int main(int argc, char **argv)
{
    COX_ASSERT(argc >= 2);
    library = argv[1];
    fill();
    if (argc > 2 && strcmp(argv[2], "stand-in") == 0) {
        void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        fake_cuda_fn *get = NULL;
        COX_ASSERT(opened);
        *(void **)&get = dlsym(opened, "fake_cuda");
        COX_ASSERT(get);
        fake = get();
    }
    if (argc > 3)
        return import_main(argv[3]);
    if (!fake) {
        COX_ASSERT(cox_domains_new(&domains) == 0);
        int r = cox_domains_add_cuda_library(domains, library, test_err());
        domains = cox_domains_free(domains);
        if (r == COX_UNSUPPORTED) {
            printf("skipped: %s\n", test_error.text);
            return 77;
        }
    }
    if (!fake)
        cmocka_set_skip_filter("*stand_in*");
    return test_run(NULL, NULL);
}
