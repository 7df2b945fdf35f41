/* Memory of host, bounce and a user-defined domain in several processes: which may attach to what,
 * and what is left when one is killed. */
#include "channel/base/fault.h"
#include "memory/domain/domain_table.h"
#include "tests/lib/inverted_domain.h"
#include "tests/lib/rights.h"
#include "tests/unit/channel_fixture.h"

#include <coxswain/memory/domain.h>

#define PAGE UINT64_C(4096)
#define SIZE (70 * PAGE + 5)
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

static uint8_t pattern[SIZE], seen[SIZE];
static struct cox_domains *domains;
static struct inverted_context inverted;

static const struct cox_domain_id ids[] = {
    {COX_DOMAIN_HOST, 0}, {COX_DOMAIN_BOUNCE, 0}, {INVERTED_KIND, 0}};
#define ID_COUNT (sizeof ids / sizeof ids[0])

static int setup(void **state)
{
    uint64_t random = 7;
    if (leak_setup(state))
        return -1;
    for (size_t i = 0; i < SIZE; i++)
        pattern[i] = (uint8_t)(random_next(&random) >> 32);
    memset(&inverted, 0, sizeof inverted);
    return cox_domains_new(&domains) ||
           cox_domains_add(domains, INVERTED_KIND, 1, &inverted_domain_functions, &inverted, NULL);
}

static int teardown(void **state)
{
    domains = cox_domains_free(domains);
    return leak_teardown(state);
}

#define DOMAIN_TEST(name) TEST_WITH(name, setup, teardown)
static struct cox_domain_memory *created(struct cox_domain_id id, uint64_t size, bool on_demand)
{
    const struct cox_domain_functions *functions;
    struct cox_domain_memory *memory;
    void *context;
    assert_int_equal(cox_domains_find(domains, id, &functions, &context, NULL), 0);
    assert_ok(functions->create(context, id.device, size, on_demand, &memory, test_err()));
    return memory;
}

/* With the caller's table. */
static int attach(const struct cox_domains *own, struct cox_domain_id id, int fd, uint64_t size,
                  bool writable, struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    int r = cox_domains_find(own, id, &functions, &context, err);
    return r ? r : functions->attach(context, id.device, fd, size, writable, ret_memory, err);
}

static void destroy(struct cox_domain_memory *memory)
{
    memory->functions->destroy(memory);
}

static int reopened(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* ---- attach ---- */

struct peer {
    struct cox_domain_id id;
    int fd;
};

/* Memory with the pattern in it, after fn has run on it in a child. */
static struct cox_domain_memory *shared_with(struct cox_domain_id id, void (*fn)(void *argument))
{
    struct cox_domain_memory *memory = created(id, SIZE, false);
    struct peer peer = {id, memory->fd};
    assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
    child_run(fn, &peer);
    return memory;
}

/* A table of its own; only the fd comes from the parent. */
static struct cox_domains *own_domains(void)
{
    static struct inverted_context context;
    struct cox_domains *own;
    CHECK(cox_domains_new(&own) == 0);
    CHECK(cox_domains_add(own, INVERTED_KIND, 1, &inverted_domain_functions, &context, NULL) == 0);
    return own;
}

static void read_and_write(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domains *own = own_domains();
    struct cox_domain_memory *memory = NULL;
    int r = attach(own, peer->id, peer->fd, SIZE, true, &memory, test_err());
    if (r)
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(r == 0 && memory->size == SIZE && memory->writable);
    CHECK(memory->fd != peer->fd && memory->fd > STDERR_FILENO);
    CHECK((memory->address != NULL) == (peer->id.kind == COX_DOMAIN_HOST));
    CHECK(cox_domain_copy_from(memory, 0, seen, SIZE, NULL) == 0);
    CHECK(memcmp(seen, pattern, SIZE) == 0);
    CHECK(cox_domain_copy_to(memory, 3, pattern + 100, 50000, NULL) == 0);
    destroy(memory);
    cox_domains_free(own);
}

DOMAIN_TEST(h19_h28_another_process_attaches_and_each_sees_the_others_bytes)
{
    for (size_t i = 0; i < ID_COUNT; i++) {
        struct cox_domain_memory *memory = shared_with(ids[i], read_and_write);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        assert_memory_equal(seen, pattern, 3);
        assert_memory_equal(seen + 3, pattern + 100, 50000);
        assert_memory_equal(seen + 50003, pattern + 50003, SIZE - 50003);
        destroy(memory);
    }
}

static void know_nothing_of_it(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domains *own;
    struct cox_domain_memory *memory = NULL;
    CHECK(cox_domains_new(&own) == 0);
    CHECK(attach(own, peer->id, peer->fd, SIZE, true, &memory, test_err()) == COX_INVALID);
    CHECK(strstr(test_error.text, "no domains of kind 77") && !memory);
    cox_domains_free(own);
}

DOMAIN_TEST(h27_a_process_that_does_not_know_a_domain_gets_an_error)
{
    destroy(shared_with(ids[2], know_nothing_of_it));
}

static void only_read(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domains *own = own_domains();
    struct cox_domain_memory *memory = NULL;
    int reader = reopened(peer->fd);
    const int fds[] = {reader, peer->fd};
    CHECK(reader >= 0);
    CHECK(attach(own, peer->id, reader, SIZE, true, &memory, test_err()) == COX_DENIED && !memory);
    CHECK(strstr(test_error.text, "read only"));
    for (size_t i = 0; i < 2; i++) {
        struct cox_error denied = {0};
        CHECK(attach(own, peer->id, fds[i], SIZE, false, &memory, NULL) == 0 && !memory->writable);
        CHECK(cox_domain_copy_from(memory, 0, seen, SIZE, NULL) == 0);
        CHECK(memcmp(seen, pattern, SIZE) == 0);
        CHECK(cox_domain_copy_to(memory, 0, seen, 1, &denied) == COX_DENIED);
        CHECK(cox_domain_copy(memory, 100, memory, 0, 1, NULL) == COX_DENIED);
        /* For a hostile process only the fd decides. */
        if (memory->address)
            CHECK((mprotect(memory->address, PAGE, PROT_READ | PROT_WRITE) == 0) == (i == 1));
        destroy(memory);
    }
    cox_domains_free(own);
    close(reader);
}

DOMAIN_TEST(h28_a_process_that_attaches_for_reading_writes_nothing)
{
    for (size_t i = 0; i < 2; i++)
        destroy(shared_with(ids[i], only_read));
}

static void touch_what_is_for_reading(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domains *own = own_domains();
    struct cox_domain_memory *memory;
    CHECK(attach(own, peer->id, peer->fd, SIZE, false, &memory, NULL) == 0);
    signal(SIGSEGV, SIG_DFL);
    *(volatile uint8_t *)memory->address = 1;
}

DOMAIN_TEST(h28_a_view_for_reading_is_mapped_so)
{
    struct cox_domain_memory *memory = created(ids[0], SIZE, false);
    struct peer peer = {ids[0], memory->fd};
    int status = child_status(child_start(touch_what_is_for_reading, &peer));
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    assert_int_not_equal(status, 0); /* its handler reports the signal and exits */
#else
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
#endif
    destroy(memory);
}

/* ---- errors ---- */

static int memfd(uint64_t size, int seals, unsigned flags)
{
    int fd = memfd_create("impostor", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd < 0)
        return -1;
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

/* Takes ownership of fd. */
static void refused(int fd, bool writable, int code, const char *word)
{
    assert_true(fd >= 0);
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = NULL;
        int r = attach(domains, ids[i], fd, SIZE, writable, &memory, test_err());
        if (r != code || test_error.code != code || !strstr(test_error.text, word) || memory)
            fail_msg("expected %d with '%s', got %d '%s'", code, word, r, test_error.text);
    }
    close(fd);
}

DOMAIN_TEST(h28_memory_that_could_change_its_size_or_is_none_is_refused)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    refused(memfd(SIZE, 0, 0), true, COX_DENIED, "seals");
    refused(memfd(SIZE, F_SEAL_SHRINK, 0), true, COX_DENIED, "seals");
    refused(memfd(SIZE, F_SEAL_GROW, 0), true, COX_DENIED, "seals");
    refused(memfd(SIZE - 1, SIZE_SEALS, 0), true, COX_CORRUPT, "expected 286725");
    refused(memfd(0, SIZE_SEALS, 0), true, COX_CORRUPT, "of 0 bytes");
    refused(memfd(SIZE, SIZE_SEALS | F_SEAL_WRITE, 0), true, COX_DENIED, "read only");
    refused(pair[0], true, COX_DENIED, "no memory");
    refused(pair[1], false, COX_DENIED, "no memory");
    refused(open("/dev/null", O_RDWR | O_CLOEXEC), true, COX_DENIED, "no memory");
    refused(open("/", O_RDONLY | O_CLOEXEC), false, COX_DENIED, "no memory");
    refused(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), false, COX_DENIED, "memory");
    const char *name = test_object("file");
    int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    shm_unlink(name);
    assert_int_equal(ftruncate(file, SIZE), 0);
    refused(file, true, COX_DENIED, "seals");
    /* Such memory exists also on a machine without free huge pages. */
    int huge = memfd(UINT64_C(2) << 20, SIZE_SEALS, MFD_HUGETLB);
    if (huge >= 0)
        refused(huge, true, COX_DENIED, "pages of 2097152");
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = NULL;
        assert_int_equal(attach(domains, ids[i], -1, SIZE, true, &memory, NULL), -EBADF);
        int fd = memfd(SIZE, SIZE_SEALS, 0);
        assert_int_equal(attach(domains, ids[i], fd, 0, true, &memory, NULL), COX_INVALID);
        assert_int_equal(attach(domains, ids[i], fd, UINT64_MAX, true, &memory, NULL), COX_CORRUPT);
        assert_null(memory);
        /* This one is valid, and so is a smaller size. */
        assert_int_equal(attach(domains, ids[i], fd, SIZE, true, &memory, NULL), 0);
        destroy(memory);
        assert_int_equal(attach(domains, ids[i], fd, PAGE, true, &memory, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, PAGE + 1, NULL), COX_INVALID);
        destroy(memory);
        close(fd);
    }
}

static void attach_as_nobody(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domain_memory *memory = NULL;
    CHECK(setuid(65534) == 0);
    CHECK(attach(domains, peer->id, peer->fd, SIZE, true, &memory, test_err()) == COX_DENIED &&
          !memory);
    CHECK(strstr(test_error.text, "of user"));
}

DOMAIN_TEST(h28_memory_of_another_user_is_refused)
{
    test_needs(test_can_switch_user());
    for (size_t i = 0; i < 2; i++)
        destroy(shared_with(ids[i], attach_as_nobody));
}

/* ---- what another process does ---- */

static void punch(void *argument)
{
    const struct peer *peer = argument;
    CHECK(fallocate(peer->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SIZE) == 0);
    CHECK(ftruncate(peer->fd, 0) < 0 && ftruncate(peer->fd, 2 * SIZE) < 0);
}

DOMAIN_TEST(h28_holes_made_by_another_process_are_zeros_and_no_signal)
{
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = shared_with(ids[i], punch);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        for (size_t k = 0; k < SIZE; k++)
            assert_int_equal(seen[k], 0);
        assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        assert_memory_equal(seen, pattern, SIZE);
        destroy(memory);
    }
}

#if COX_TESTING

/* Killed after the step that the plan names. */
static void commit_and_return(void *argument)
{
    const struct peer *peer = argument;
    struct cox_domains *own = own_domains();
    struct cox_domain_memory *memory;
    CHECK(attach(own, peer->id, peer->fd, SIZE, true, &memory, NULL) == 0);
    CHECK(memory->functions->commit(memory, 0, 8 * PAGE, NULL) == 0);
    CHECK(cox_domain_copy_to(memory, 0, pattern, 8 * PAGE, NULL) == 0);
    memory->functions->decommit(memory, 0, 4 * PAGE);
}

static uint64_t pages(const struct cox_domain_memory *memory)
{
    struct stat st;
    assert_int_equal(fstat(memory->fd, &st), 0);
    return (uint64_t)st.st_blocks * 512 / PAGE;
}

DOMAIN_TEST(h28_a_process_killed_between_leaves_memory_that_others_go_on_with)
{
    static const struct {
        const char *plan;
        uint64_t pages;
    } deaths[] = {{"domain.committed:kill", 8}, {"domain.returned:kill", 4}};
    for (size_t i = 0; i < 2; i++)
        for (size_t d = 0; d < 2; d++) {
            struct cox_domain_memory *memory = created(ids[i], SIZE, true);
            struct peer peer = {ids[i], memory->fd};
            cox_fault_arm(deaths[d].plan);
            pid_t pid = child_start(commit_and_return, &peer);
            cox_fault_arm(NULL);
            int status = child_status(pid);
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            assert_int_equal(pages(memory), deaths[d].pages);
            assert_int_equal(memory->functions->commit(memory, 0, SIZE, NULL), 0);
            assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
            assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
            assert_memory_equal(seen, pattern, SIZE);
            memory->functions->decommit(memory, 0, SIZE);
            assert_int_equal(pages(memory), 1); /* the page that is partly in the range */
            destroy(memory);
        }
}

#endif
