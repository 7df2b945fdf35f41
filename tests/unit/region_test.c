#include "channel/shm/region.h"

#include "channel_fixture.h"

static const char *object_path(void)
{
    static char path[600];
    snprintf(path, sizeof path, SHM "%s", test_object("a"));
    return path;
}

static struct cox_region created(uint64_t size)
{
    struct cox_region region = {0};
    assert_ok(cox_region_create(&region, test_object("a"), size, test_err()));
    return region;
}

static void gone(struct cox_region *region)
{
    cox_region_detach(region);
    assert_null(region->base);
    assert_int_equal(region->size, 0);
    cox_region_detach(region);
    assert_int_equal(cox_region_unlink(test_object("a")), 0);
    assert_int_equal(cox_region_unlink(test_object("a")), 0); /* already gone */
}

LEAK_TEST(what_one_side_writes_the_other_reads)
{
    static const uint64_t sizes[] = {1, 4095, 4096, 4097, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct cox_region own = created(sizes[i]), reader = {0}, writer = {0};
        uint8_t *bytes = own.base;
        int fds = fd_count();
        assert_true(own.size == sizes[i] && (uintptr_t)own.base % 4096 == 0);
        for (uint64_t b = 0; b < own.size; b++)
            assert_int_equal(bytes[b], 0);
        assert_int_equal(
            cox_region_attach(&reader, test_object("a"), sizes[i], COX_REGION_READ, NULL), 0);
        assert_int_equal(cox_region_attach(&writer, test_object("a"), 1, COX_REGION_WRITE, NULL),
                         0);
        assert_true(reader.size == sizes[i] && writer.size == sizes[i]); /* the whole object */
        assert_int_equal(fd_count(), fds);
        memset(writer.base, 0x5a, writer.size);
        assert_memory_equal(reader.base, own.base, own.size);
        assert_int_equal(bytes[own.size - 1], 0x5a);
        cox_region_detach(&reader);
        cox_region_detach(&writer);
        gone(&own);
    }
}

LEAK_TEST(mappings_outlive_the_name)
{
    struct cox_region own = created(4096), other = {0};
    assert_int_equal(cox_region_attach(&other, test_object("a"), 4096, COX_REGION_READ, NULL), 0);
    assert_int_equal(cox_region_unlink(test_object("a")), 0);
    memset(own.base, 1, own.size);
    assert_memory_equal(own.base, other.base, 4096);
    cox_region_detach(&other);
    assert_refused(cox_region_attach(&other, test_object("a"), 1, COX_REGION_READ, test_err()),
                   COX_NOT_FOUND, test_object("a"));
    gone(&own);
}

static void write_to_it(void *context)
{
    struct cox_region *region = context;
    signal(SIGSEGV, SIG_DFL);
    *(volatile uint8_t *)region->base = 1;
}

LEAK_TEST(a_read_only_attach_cannot_write)
{
    struct cox_region own = created(4096), reader = {0}, writer = {0};
    assert_int_equal(cox_region_attach(&reader, test_object("a"), 1, COX_REGION_READ, NULL), 0);
    assert_int_equal(cox_region_attach(&writer, test_object("a"), 1, COX_REGION_WRITE, NULL), 0);
    int status = child_status(child_start(write_to_it, &reader));
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);
    assert_int_equal(*(uint8_t *)own.base, 0);
    /* Nor can it be made writable later: the file was opened for reading. */
    assert_int_equal(mprotect(reader.base, 4096, PROT_READ | PROT_WRITE), -1);
    child_run(write_to_it, &writer);
    assert_int_equal(*(uint8_t *)own.base, 1);
    cox_region_detach(&reader);
    cox_region_detach(&writer);
    gone(&own);
}

static void make_good(void)
{
    struct cox_region region = created(4096);
    cox_region_detach(&region);
}

LEAK_TEST(an_object_that_is_too_small_is_corrupt)
{
    static const off_t sizes[] = {0, 1, 4095, 8191};
    make_good();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct cox_region region = {0};
        char expected[80];
        assert_int_equal(truncate(object_path(), sizes[i]), 0);
        int fds = fd_count();
        snprintf(expected, sizeof expected, "%jd bytes, expected at least 8192",
                 (intmax_t)sizes[i]);
        assert_refused(
            cox_region_attach(&region, test_object("a"), 8192, COX_REGION_READ, test_err()),
            COX_CORRUPT, expected);
        assert_null(region.base);
        assert_int_equal(fd_count(), fds);
    }
    struct cox_region region = {0};
    assert_int_equal(truncate(object_path(), 0), 0); /* nothing to map, even without access */
    assert_int_equal(cox_region_attach(&region, test_object("a"), 0, COX_REGION_READ, NULL),
                     COX_CORRUPT);
    assert_int_equal(truncate(object_path(), 8192), 0);
    assert_int_equal(cox_region_attach(&region, test_object("a"), 8192, COX_REGION_READ, NULL), 0);
    assert_int_equal(
        cox_region_attach(&region, test_object("a"), UINT64_MAX, COX_REGION_READ, NULL),
        COX_CORRUPT);
    gone(&region);
}

LEAK_TEST(b51_every_byte_is_reserved)
{
    struct cox_region own = created(3 << 20);
    struct stat st;
    assert_int_equal(stat(object_path(), &st), 0);
    assert_int_equal(st.st_size, 3 << 20);
    assert_true((uint64_t)st.st_blocks * 512 >= own.size); /* before the first touch */
    gone(&own);
}

static void create_in_a_small_tmpfs(void *context)
{
    struct cox_region region = {0}, second = {0};
    struct cox_error err = {0};
    struct cox_region_space before, after;
    char number[32];
    (void)context;
    CHECK(private_shm("1m"));
    CHECK(cox_region_space(&before) == 0 && before.bytes == 1 << 20);
    int fds = fd_count();
    for (uint64_t size = (1 << 20) + 1; size < UINT64_C(1) << 45; size *= 16) {
        err = (struct cox_error){0};
        CHECK(cox_region_create(&region, "/a", size, &err) == COX_NO_SPACE);
        snprintf(number, sizeof number, " %" PRIu64 " ", size);
        CHECK(strstr(err.text, number));
        snprintf(number, sizeof number, " %" PRIu64 " ", before.bytes);
        CHECK(strstr(err.text, number));
        CHECK(strstr(err.text, "/a"));
        CHECK(region.base == NULL && shm_count(NULL) == 0 && fd_count() == fds);
        CHECK(cox_region_space(&after) == 0 && after.bytes == before.bytes);
    }
    /* Half of it goes, and then what is left is named, not what there once was. */
    CHECK(cox_region_create(&region, "/a", 512 << 10, NULL) == 0);
    memset(region.base, 1, region.size);
    err = (struct cox_error){0};
    CHECK(cox_region_create(&second, "/b", (512 << 10) + 1, &err) == COX_NO_SPACE);
    CHECK(strstr(err.text, " 524289 ") && strstr(err.text, " 524288 "));
    CHECK(shm_count(NULL) == 1);
    CHECK(cox_region_create(&second, "/b", 512 << 10, NULL) == 0);
    memset(second.base, 1, second.size); /* no SIGBUS */
}

LEAK_TEST(b51_a_full_tmpfs_is_no_space_with_both_numbers)
{
    if (!private_shm_possible())
        skip();
    child_run(create_in_a_small_tmpfs, NULL);
}

LEAK_TEST(a_size_no_file_can_have_leaves_nothing)
{
    struct cox_region region = {0};
    struct cox_error err = {0};
    assert_int_not_equal(cox_region_create(&region, test_object("a"), UINT64_MAX, &err), 0);
    assert_int_not_equal(err.code, 0);
    assert_int_not_equal(cox_region_create(&region, test_object("a"), INT64_MAX, NULL), 0);
    assert_null(region.base);
}

static void create_nothing(void *context)
{
    struct cox_region region = {0};
    (void)context;
    cox_region_create(&region, test_object("a"), 0, NULL);
}

LEAK_TEST(a_region_of_nothing_is_a_programmer_error)
{
    child_aborts(create_nothing, NULL);
}

LEAK_TEST(an_fd_without_a_name_is_checked_too)
{
    struct cox_region region = {0};
    int fd = open(SHM, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(cox_region_check_fd(fd, "the control socket", NULL),
                     0); /* no link at all is fine */
    assert_int_equal(cox_region_reserve(fd, 4096, "the control socket", NULL), 0);
    assert_int_equal(
        cox_region_map(&region, fd, 4096, COX_REGION_WRITE, "the control socket", NULL), 0);
    memset(region.base, 1, 4096);
    cox_region_detach(&region);
    assert_int_equal(fchmod(fd, 0640), 0);
    assert_refused(cox_region_check_fd(fd, "the control socket", test_err()), COX_DENIED,
                   "the control socket");
    close(fd);
    assert_int_equal(cox_region_check_fd(fd, "the control socket", NULL), -EBADF);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert_int_equal(cox_region_check_fd(null, "the control socket", NULL), COX_DENIED);
    close(null);
}
