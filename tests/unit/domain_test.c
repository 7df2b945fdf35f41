/* Domains: the table, memory of host, bounce and a user-defined domain, and copies between them. */
#include "memory/domain/domain_table.h"
#include "tests/lib/inverted_domain.h"
#include "channel_fixture.h"

#include <sys/sysinfo.h>

#define PAGE UINT64_C(4096)
/* Neither a multiple of pages, nor of the pieces that are copied through the host. */
#define SIZE (UINT64_C(700) * 1024 + 13)

static struct cox_domains *domains;
static struct inverted_context inverted;
static uint8_t pattern[SIZE], seen[SIZE];

static const struct cox_domain_id host_id = {COX_DOMAIN_HOST, 0};
static const struct cox_domain_id bounce_id = {COX_DOMAIN_BOUNCE, 0};
static const struct cox_domain_id inverted_id = {INVERTED_KIND, 1};
static const struct cox_domain_id *const ids[] = {&host_id, &bounce_id, &inverted_id};
#define ID_COUNT (sizeof ids / sizeof ids[0])

static int setup(void **state)
{
    if (leak_setup(state))
        return -1;
    memset(&inverted, 0, sizeof inverted);
    uint64_t random = 42;
    for (size_t i = 0; i < SIZE; i++)
        pattern[i] = (uint8_t)(random_next(&random) >> 32);
    return cox_domains_new(&domains) ||
           cox_domains_add(domains, INVERTED_KIND, 2, &inverted_domain_functions, &inverted, NULL);
}

static int teardown(void **state)
{
    domains = cox_domains_free(domains);
    return inverted.size || leak_teardown(state) ? -1 : 0;
}

#define DOMAIN_TEST(name) TEST_WITH(name, setup, teardown)
static int create(struct cox_domain_id id, uint64_t size, bool on_demand,
                  struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    assert_int_equal(cox_domains_find(domains, id, &functions, &context, NULL), 0);
    return functions->create(context, id.device, size, on_demand, ret_memory, err);
}

static void destroy(struct cox_domain_memory *memory)
{
    memory->functions->destroy(memory);
}
TEST_OWNED(destroy)

/* The test's own. */
static struct cox_domain_memory *created(struct cox_domain_id id, uint64_t size)
{
    struct cox_domain_memory *memory;
    assert_ok(create(id, size, false, &memory, test_err()));
    assert_int_equal(memory->size, size);
    assert_true(memory->writable);
    return test_own(memory, destroy_owned);
}

/* If more than the free memory were really allocated, the kernel would kill other programs. */
#define RESERVED_MAX (UINT64_C(1) << 30)
int __real_posix_fallocate(int fd, off_t offset, off_t size);
int __wrap_posix_fallocate(int fd, off_t offset, off_t size);
int __wrap_posix_fallocate(int fd, off_t offset, off_t size)
{
    if ((uint64_t)size > RESERVED_MAX)
        return ENOTRECOVERABLE;
    return __real_posix_fallocate(fd, offset, size);
}

/* Truncated and then sealed by its untrusted creator, between two checks of the attaching
 * process. */
static bool cuts;
int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (command == F_GET_SEALS && cuts) {
        cuts = false;
        assert_int_equal(ftruncate(fd, 1), 0);
        assert_int_equal(__real_fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    }
    return __real_fcntl(fd, command, argument);
}

/* ---- the table ---- */

DOMAIN_TEST(h27_a_domain_is_found_by_numbers_that_are_checked)
{
    const struct cox_domain_functions *functions = NULL;
    void *context = NULL;
    assert_int_equal(cox_domains_find(domains, inverted_id, &functions, &context, NULL), 0);
    assert_ptr_equal(functions, &inverted_domain_functions);
    assert_ptr_equal(context, &inverted);
    assert_int_equal(cox_domains_find(domains, host_id, &functions, &context, NULL), 0);
    assert_string_equal(functions->name, "host");
    assert_int_equal(cox_domains_find(domains, bounce_id, &functions, &context, NULL), 0);
    assert_string_equal(functions->name, "bounce");

    const struct cox_domain_id wrong[] = {
        {0, 0},   {COX_DOMAIN_CUDA, 0}, {4, 0},         {63, 0}, {76, 0},
        {128, 0}, {UINT32_MAX, 0},      {0, UINT32_MAX}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_refused(cox_domains_find(domains, wrong[i], &functions, &context, test_err()),
                       COX_INVALID, "no domains of kind");
    const struct cox_domain_id beyond[] = {
        {COX_DOMAIN_HOST, 1}, {COX_DOMAIN_BOUNCE, UINT32_MAX}, {INVERTED_KIND, 2}};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++)
        assert_refused(cox_domains_find(domains, beyond[i], &functions, &context, test_err()),
                       COX_INVALID, "of them");
    assert_string_equal(functions->name, "bounce"); /* untouched */
}

static int add(uint32_t kind, uint32_t device_count, const struct cox_domain_functions *functions,
               struct cox_error *err)
{
    return cox_domains_add(domains, kind, device_count, functions, NULL, err);
}

DOMAIN_TEST(h27_only_whole_domains_of_the_users_kinds_are_added_once)
{
    const struct cox_domain_functions *good = &inverted_domain_functions;
    const uint32_t kinds[] = {0,   COX_DOMAIN_HOST, COX_DOMAIN_BOUNCE, COX_DOMAIN_CUDA, 63,
                              128, UINT32_MAX};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        assert_refused(add(kinds[i], 1, good, test_err()), COX_INVALID, "64 to 127");
    assert_refused(add(INVERTED_KIND, 1, good, test_err()), COX_BUSY, "'inverted'");
    assert_refused(add(64, 0, good, test_err()), COX_INVALID, "without a device");
    assert_refused(add(64, 1, NULL, test_err()), COX_INVALID, "without any function");

    static const char *const missing[] = {"name",    "create",  "attach",
                                          "destroy", "copy_to", "copy_from"};
    for (size_t i = 0; i < sizeof missing / sizeof missing[0]; i++) {
        struct cox_domain_functions part = *good;
        if (i == 0)
            part.name = NULL;
        else if (i == 1)
            part.create = NULL;
        else if (i == 2)
            part.attach = NULL;
        else if (i == 3)
            part.destroy = NULL;
        else if (i == 4)
            part.copy_to = NULL;
        else
            part.copy_from = NULL;
        assert_refused(add(64, 1, &part, test_err()), COX_INVALID, missing[i]);
    }
    const struct cox_domain_functions *host;
    void *context;
    assert_int_equal(cox_domains_find(domains, host_id, &host, &context, NULL), 0);
    struct cox_domain_functions half = *good;
    half.commit = host->commit;
    assert_refused(add(64, 1, &half, test_err()), COX_INVALID, "without decommit");
    half.commit = NULL;
    half.decommit = host->decommit;
    assert_refused(add(64, 1, &half, test_err()), COX_INVALID, "without commit");

    assert_int_equal(add(64, 1, good, NULL), 0);
    assert_int_equal(add(127, 1, good, NULL), 0);
}

/* host, bounce and two inverted ones leave 28 of 32 */
DOMAIN_TEST(h12_h27_a_full_table_says_so)
{
    const struct cox_domain_functions *good = &inverted_domain_functions;
    const struct cox_domain_functions *functions;
    void *context;
    assert_refused(add(64, 29, good, test_err()), COX_FULL, "at most 32");
    assert_refused(add(64, UINT32_MAX, good, test_err()), COX_FULL, "at most 32");
    assert_int_equal(add(64, 27, good, NULL), 0);
    assert_refused(add(65, 2, good, test_err()), COX_FULL, "at most 32");
    assert_int_equal(add(65, 1, good, NULL), 0);
    assert_refused(add(66, 1, good, test_err()), COX_FULL, "at most 32");
    assert_int_equal(
        cox_domains_find(domains, (struct cox_domain_id){64, 26}, &functions, &context, NULL), 0);
    assert_int_equal(
        cox_domains_find(domains, (struct cox_domain_id){66, 0}, &functions, &context, NULL),
        COX_INVALID);
}

DOMAIN_TEST(h27_freeing_no_table_is_nothing)
{
    assert_null(cox_domains_free(NULL));
}

/* ---- copies ---- */

DOMAIN_TEST(h24_h25_what_is_copied_in_comes_out)
{
    for (size_t i = 0; i < ID_COUNT; i++) {
        struct cox_domain_memory *memory = created(*ids[i], SIZE);
        memset(seen, 0x5a, SIZE);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        for (size_t k = 0; k < SIZE; k++)
            assert_int_equal(seen[k], 0); /* as created */
        assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        assert_memory_equal(seen, pattern, SIZE);
        /* A part at odd offsets; the bytes beside it stay. */
        assert_int_equal(cox_domain_copy_to(memory, 4093, pattern, 10, NULL), 0);
        memset(seen, 0x5a, SIZE);
        assert_int_equal(cox_domain_copy_from(memory, 4092, seen, 12, NULL), 0);
        assert_int_equal(seen[0], pattern[4092]);
        assert_memory_equal(seen + 1, pattern, 10);
        assert_int_equal(seen[11], pattern[4103]);
        assert_int_equal(seen[12], 0x5a);
    }
}

DOMAIN_TEST(h24_h25_ranges_are_checked_also_where_their_end_is_beyond_64_bits)
{
    const struct {
        uint64_t offset, size;
    } wrong[] = {{0, SIZE + 1},       {SIZE, 1},
                 {SIZE + 1, 0},       {1, SIZE},
                 {UINT64_MAX, 1},     {UINT64_MAX, 0},
                 {1, UINT64_MAX},     {0, UINT64_MAX},
                 {8, UINT64_MAX - 7}, {UINT64_MAX - SIZE + 1, SIZE}};
    for (size_t i = 0; i < ID_COUNT; i++) {
        struct cox_domain_memory *memory = created(*ids[i], SIZE), *other = created(host_id, SIZE);
        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
            const uint64_t offset = wrong[k].offset, size = wrong[k].size;
            assert_refused(cox_domain_copy_to(memory, offset, pattern, size, test_err()),
                           COX_INVALID, "bytes from offset");
            assert_refused(cox_domain_copy_from(memory, offset, seen, size, test_err()),
                           COX_INVALID, "bytes from offset");
            assert_refused(cox_domain_copy(memory, offset, other, 0, size, test_err()), COX_INVALID,
                           "bytes from offset");
            assert_refused(cox_domain_copy(other, 0, memory, offset, size, test_err()), COX_INVALID,
                           "bytes from offset");
        }
        /* 0 bytes at the very end are a valid range. */
        assert_int_equal(cox_domain_copy_to(memory, SIZE, pattern, 0, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, SIZE, seen, 0, NULL), 0);
        assert_int_equal(cox_domain_copy(memory, SIZE, other, SIZE, 0, NULL), 0);
    }
}

DOMAIN_TEST(h26_any_two_domains_copy_to_each_other)
{
    for (size_t t = 0; t < ID_COUNT; t++)
        for (size_t f = 0; f < ID_COUNT; f++) {
            struct cox_domain_memory *to = created(*ids[t], SIZE), *from = created(*ids[f], SIZE);
            assert_int_equal(cox_domain_copy_to(from, 0, pattern, SIZE, NULL), 0);
            assert_int_equal(cox_domain_copy(to, 0, from, 0, SIZE, NULL), 0);
            assert_int_equal(cox_domain_copy_from(to, 0, seen, SIZE, NULL), 0);
            assert_memory_equal(seen, pattern, SIZE);
            /* Other offsets; the bytes beside them stay. */
            assert_int_equal(cox_domain_copy(to, 100001, from, 3, 300000, NULL), 0);
            assert_int_equal(cox_domain_copy_from(to, 0, seen, SIZE, NULL), 0);
            assert_memory_equal(seen, pattern, 100001);
            assert_memory_equal(seen + 100001, pattern + 3, 300000);
            assert_memory_equal(seen + 400001, pattern + 400001, SIZE - 400001);
        }
}

DOMAIN_TEST(h26_within_one_memory_what_overlaps_is_refused)
{
    for (size_t i = 0; i < ID_COUNT; i++) {
        struct cox_domain_memory *memory = created(*ids[i], SIZE);
        assert_int_equal(cox_domain_copy_to(memory, 0, pattern, SIZE, NULL), 0);
        assert_refused(cox_domain_copy(memory, 0, memory, 99, 100, test_err()), COX_INVALID,
                       "overlap");
        assert_refused(cox_domain_copy(memory, 99, memory, 0, 100, test_err()), COX_INVALID,
                       "overlap");
        assert_int_equal(cox_domain_copy(memory, 7, memory, 7, 100, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, SIZE, NULL), 0);
        assert_memory_equal(seen, pattern, SIZE);
        assert_int_equal(cox_domain_copy(memory, 0, memory, 100, 100, NULL), 0);
        assert_int_equal(cox_domain_copy_from(memory, 0, seen, 200, NULL), 0);
        assert_memory_equal(seen, pattern + 100, 100);
        assert_memory_equal(seen + 100, pattern + 100, 100);
    }
}

/* ---- each domain ---- */

DOMAIN_TEST(h28_host_memory_has_an_address_and_bounce_memory_none)
{
    struct cox_domain_memory *host = created(host_id, SIZE), *bounce = created(bounce_id, SIZE);
    assert_non_null(host->address);
    assert_null(bounce->address);
    assert_int_equal(bounce->device_address, 0);
    memcpy((uint8_t *)host->address + 5, pattern, 1000);
    assert_int_equal(cox_domain_copy_from(host, 5, seen, 1000, NULL), 0);
    assert_memory_equal(seen, pattern, 1000);
    /* The kernel has no mapping either. */
    assert_int_equal(test_mapping_count("cox_bounce"), 0);
}

DOMAIN_TEST(h28_memory_can_neither_shrink_nor_grow_nor_be_kept_by_exec)
{
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = created(*ids[i], SIZE);
        assert_true(memory->fd > STDERR_FILENO);
        assert_int_equal(ftruncate(memory->fd, SIZE - 1), -1);
        assert_int_equal(ftruncate(memory->fd, SIZE + 1), -1);
        assert_int_equal(fcntl(memory->fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
        assert_true(fcntl(memory->fd, F_GETFD) & FD_CLOEXEC);
    }
}

DOMAIN_TEST(b14_h28_memory_that_is_cut_short_while_it_is_looked_at_is_refused)
{
    for (size_t i = 0; i < 2; i++) {
        const struct cox_domain_functions *functions;
        struct cox_domain_memory *none = NULL;
        void *context;
        int fd = memfd_create("cut", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(fd >= 0);
        assert_int_equal(ftruncate(fd, SIZE), 0);
        assert_int_equal(cox_domains_find(domains, *ids[i], &functions, &context, NULL), 0);
        cuts = true;
        assert_int_equal(functions->attach(context, 0, fd, SIZE, true, &none, NULL), COX_CORRUPT);
        assert_false(cuts);
        close(fd);
    }
}

static uint64_t reserved(const struct cox_domain_memory *memory)
{
    struct stat st;
    assert_int_equal(fstat(memory->fd, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

DOMAIN_TEST(h28_all_pages_are_there_unless_they_are_to_come_on_demand)
{
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = created(*ids[i], 64 * PAGE), *sparse;
        assert_int_equal(reserved(memory), 64 * PAGE);

        assert_int_equal(create(*ids[i], 64 * PAGE, true, &sparse, NULL), 0);
        const struct cox_domain_functions *functions = sparse->functions;
        assert_int_equal(reserved(sparse), 0);
        assert_int_equal(functions->commit(sparse, 8 * PAGE, 4 * PAGE, NULL), 0);
        assert_int_equal(reserved(sparse), 4 * PAGE);
        assert_int_equal(functions->commit(sparse, 10 * PAGE, 4 * PAGE, NULL), 0);
        assert_int_equal(reserved(sparse), 6 * PAGE);
        assert_int_equal(cox_domain_copy_to(sparse, 8 * PAGE, pattern, 6 * PAGE, NULL), 0);
        functions->decommit(sparse, 9 * PAGE, PAGE);
        assert_int_equal(reserved(sparse), 5 * PAGE);
        assert_int_equal(cox_domain_copy_from(sparse, 8 * PAGE, seen, 6 * PAGE, NULL), 0);
        assert_memory_equal(seen, pattern, PAGE);
        for (size_t k = 0; k < PAGE; k++)
            assert_int_equal(seen[PAGE + k], 0);
        assert_memory_equal(seen + 2 * PAGE, pattern + 2 * PAGE, 4 * PAGE);
        functions->decommit(sparse, 0, 64 * PAGE);
        assert_int_equal(reserved(sparse), 0);
        struct stat st;
        assert_int_equal(fstat(sparse->fd, &st), 0);
        assert_int_equal(st.st_size, 64 * PAGE);
        destroy(sparse);
    }
}

DOMAIN_TEST(h28_missing_memory_is_reported_with_what_was_needed)
{
    const uint64_t sizes[] = {UINT64_C(1) << 50, UINT64_C(1) << 63, UINT64_MAX};
    for (size_t i = 0; i < 2; i++)
        for (int on_demand = 0; on_demand < 2; on_demand++) {
            struct cox_domain_memory *memory = NULL;
            for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
                char number[32];
                snprintf(number, sizeof number, "%ju", (uintmax_t)sizes[k]);
                assert_refused(create(*ids[i], sizes[k], on_demand, &memory, test_err()),
                               COX_NO_SPACE, number);
            }
            assert_refused(create(*ids[i], 0, on_demand, &memory, test_err()), COX_INVALID,
                           "0 bytes");
            assert_null(memory);
        }
}

/* Pages in use elsewhere cannot be allocated. */
DOMAIN_TEST(h28_memory_that_others_use_is_no_memory_to_reserve)
{
    struct sysinfo info;
    assert_int_equal(sysinfo(&info), 0);
    const uint64_t all = ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
    for (size_t i = 0; i < 2; i++) {
        struct cox_domain_memory *memory = NULL;
        assert_refused(create(*ids[i], all, false, &memory, test_err()), COX_NO_SPACE,
                       "are available");
        assert_int_equal(create(*ids[i], all, true, &memory, NULL), 0);
        assert_refused(memory->functions->commit(memory, 0, memory->size, test_err()), COX_NO_SPACE,
                       "are available");
        assert_int_equal(reserved(memory), 0);
        assert_int_equal(memory->functions->commit(memory, memory->size - 1, 1, NULL), 0);
        assert_int_equal(reserved(memory), PAGE);
        destroy(memory);
    }
}

/* One byte beyond the limit, and SIGXFSZ would kill the process. */
static void beyond_the_limit(void *context)
{
    struct rlimit limit = {65536, 65536};
    struct cox_domain_memory *memory = NULL, *bounce = context;
    struct cox_error err = {0};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (size_t i = 0; i < 2; i++) {
        const struct cox_domain_functions *functions;
        void *own;
        CHECK(cox_domains_find(domains, *ids[i], &functions, &own, NULL) == 0);
        CHECK(functions->create(own, 0, 65537, false, &memory, &err) == COX_NO_SPACE);
        CHECK(strstr(err.text, "ulimit -f"));
        CHECK(functions->create(own, 0, 65536, false, &memory, NULL) == 0);
        CHECK(cox_domain_copy_to(memory, 0, pattern, 65536, NULL) == 0);
    }
    /* Created where there was no limit. */
    CHECK(cox_domain_copy_to(bounce, 0, pattern, 65536, NULL) == 0);
    CHECK(cox_domain_copy_to(bounce, 1, pattern, 65536, NULL) == COX_NO_SPACE);
}

DOMAIN_TEST(h28_a_limit_of_file_sizes_is_an_error_and_no_signal)
{
    struct cox_domain_memory *bounce = created(bounce_id, SIZE);
    child_run(beyond_the_limit, bounce);
}

/* ---- a user-defined domain ---- */

DOMAIN_TEST(h27_a_domain_from_outside_is_asked_for_every_byte)
{
    struct cox_domain_memory *from = created(inverted_id, SIZE), *to = created(inverted_id, SIZE);
    struct cox_domain_memory *host = created(host_id, SIZE);
    assert_int_equal(inverted.created, 2);
    assert_int_equal(cox_domain_copy_to(from, 0, pattern, SIZE, NULL), 0);
    /* The domain stores other bytes than were copied. */
    assert_int_equal(pread(from->fd, seen, SIZE, 0), (ssize_t)SIZE);
    for (size_t k = 0; k < SIZE; k++)
        assert_int_equal((uint8_t)~seen[k], pattern[k]);
    /* From host memory in one copy, without a bounce buffer. */
    inverted.copied_to = 0;
    memcpy(host->address, pattern, SIZE);
    assert_int_equal(cox_domain_copy(to, 0, host, 0, SIZE, NULL), 0);
    assert_int_equal(inverted.copied_to, 1);
    /* Within the domain through the host, in pieces. */
    inverted.copied_to = inverted.copied_from = 0;
    assert_int_equal(cox_domain_copy(to, 0, from, 0, SIZE, NULL), 0);
    assert_true(inverted.copied_to > 1);
    assert_int_equal(inverted.copied_to, inverted.copied_from);
    assert_int_equal(pread(to->fd, seen, SIZE, 0), (ssize_t)SIZE);
    for (size_t k = 0; k < SIZE; k++)
        assert_int_equal((uint8_t)~seen[k], pattern[k]);
}

DOMAIN_TEST(h27_a_domain_that_fails_to_allocate_says_so)
{
    struct cox_domain_memory *memory = NULL, *first;
    inverted.size_max = 3 * PAGE;
    assert_int_equal(create(inverted_id, 2 * PAGE, false, &first, NULL), 0);
    assert_refused(create(inverted_id, 2 * PAGE, false, &memory, test_err()), COX_NO_SPACE,
                   "4096 left");
    assert_null(memory);
    destroy(first);
    assert_int_equal(create(inverted_id, 2 * PAGE, false, &memory, NULL), 0);
    destroy(memory);
}

/* ---- copies that fail ---- */

static int copies_left;

static int failing_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                           size_t size, struct cox_error *err)
{
    return copies_left-- > 0 ? inverted_domain_functions.copy_to(memory, offset, host, size, err)
                             : cox_fail(err, -EIO, "the device is gone");
}

static int unable_copy(struct cox_domain_memory *to, uint64_t to_offset,
                       struct cox_domain_memory *from, uint64_t from_offset, size_t size,
                       struct cox_error *err)
{
    (void)to, (void)to_offset, (void)from, (void)from_offset, (void)size, (void)err;
    return COX_UNSUPPORTED;
}

DOMAIN_TEST(h26_a_copy_that_fails_ends_there_with_its_reason)
{
    static struct cox_domain_functions failing; /* the memory is destroyed after the test */
    struct cox_domain_memory *from = created(bounce_id, SIZE), *to = created(inverted_id, SIZE);
    failing = inverted_domain_functions;
    failing.copy_to = failing_copy_to;
    to->functions = &failing;
    copies_left = 1;
    assert_refused(cox_domain_copy(to, 0, from, 0, SIZE, test_err()), -EIO, "the device is gone");
    assert_int_equal(copies_left, -1);
}

DOMAIN_TEST(h26_what_a_domain_cannot_copy_itself_goes_through_the_host)
{
    static struct cox_domain_functions unable; /* the memory is destroyed after the test */
    struct cox_domain_memory *from = created(inverted_id, SIZE), *to = created(inverted_id, SIZE);
    unable = inverted_domain_functions;
    unable.copy = unable_copy;
    to->functions = from->functions = &unable;
    assert_int_equal(cox_domain_copy_to(from, 0, pattern, SIZE, NULL), 0);
    assert_int_equal(cox_domain_copy(to, 0, from, 0, SIZE, NULL), 0);
    assert_int_equal(cox_domain_copy_from(to, 0, seen, SIZE, NULL), 0);
    assert_memory_equal(seen, pattern, SIZE);
}
