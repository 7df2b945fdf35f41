/* Images of the model's weights (channel/shm/region.h), which no process can change, and how a rank
 * takes one after the other. */
#include "engine/rank/weights_subscriber.h"
#include "proto/executor.pb-c.h"
#include "worker/sequences/weights_candidate.h"
#include "channel_fixture.h"

#include <coxswain/handle.h>

#define LABEL "cox_weights"
#define SIZE 20000u /* no multiple of a page */
#define ALL_SEALS (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define PATIENCE_MS 30000

static struct cox_error error;

/* An image of bytes that are all `value`; its fd, the test's own. */
static int image_of(uint8_t value)
{
    struct cox_region region = {0};
    int fd = -1;
    assert_ok(cox_region_create_image(&region, LABEL, SIZE, &fd, test_err()));
    memset(region.base, value, SIZE);
    assert_ok(cox_region_seal_image(&region, LABEL, &fd, test_err()));
    assert_null(region.base);
    return test_own_fd(fd);
}

static void expect_unchangeable(int fd)
{
    static const uint8_t bytes[16] = {1};
    assert_int_equal(pwrite(fd, bytes, sizeof bytes, 0), -1);
    assert_ptr_equal(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, 2 * SIZE), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
}

static int attach_sealed(struct cox_region *region, int fd, uint64_t size, struct cox_error *err)
{
    return cox_region_attach_fd(region, fd, LABEL, size, COX_REGION_SEALED, err);
}

LEAK_TEST(g1c_an_image_cannot_be_changed)
{
    struct cox_region region = {0};
    int fd = image_of(7), again = test_own_fd(test_reopen(fd, O_RDWR));
    assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    assert_int_equal(fcntl(fd, F_GET_SEALS) & ALL_SEALS, ALL_SEALS);
    expect_unchangeable(fd);
    expect_unchangeable(again);
    assert_int_equal(attach_sealed(&region, fd, SIZE, &error), 0);
    assert_int_equal(region.size, SIZE);
    assert_int_equal(mprotect(region.base, SIZE, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(madvise(region.base, SIZE, MADV_REMOVE), -1);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(((const uint8_t *)region.base)[i], 7);
    cox_region_detach(&region);
}

/* While it is filled there is one mapping that can write it, and no other way. */
LEAK_TEST(g1c_an_image_is_written_by_its_creator_alone)
{
    static const uint8_t bytes[16] = {1};
    struct cox_region region = {0};
    int fd = -1;
    assert_int_equal(cox_region_create_image(&region, LABEL, SIZE, &fd, &error), 0);
    int again = test_own_fd(test_reopen(fd, O_RDWR));
    assert_int_equal(pwrite(again, bytes, sizeof bytes, 0), -1);
    assert_ptr_equal(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
    /* One more, which this process makes of its own. */
    void *other = mremap(region.base, 0, SIZE, MREMAP_MAYMOVE);
    assert_ptr_not_equal(other, MAP_FAILED);
    assert_refused(cox_region_seal_image(&region, LABEL, &fd, test_err()), COX_BUSY,
                   "mapped for writing");
    assert_null(region.base);
    munmap(other, SIZE);
    assert_int_equal(cox_region_seal_image(&region, LABEL, &fd, &error), 0);
    close(fd);
}

LEAK_TEST(an_image_that_memory_cannot_hold_is_refused)
{
    struct cox_region region = {0};
    int fd = -1;
    assert_int_equal(cox_region_create_image(&region, LABEL, 0, &fd, &error), COX_INVALID);
    assert_refused(cox_region_create_image(&region, LABEL, UINT64_C(1) << 52, &fd, test_err()),
                   COX_NO_SPACE, "this machine has");
    assert_null(region.base);
    assert_int_equal(fd, -1);
}

struct mapping {
    void *base;
};

static void *unmap_soon(void *context)
{
    const struct mapping *mapping = context;
    usleep(200000);
    munmap(mapping->base, SIZE);
    return NULL;
}

/* As the kernel's own use of a page is, which lasts while a busy machine lets it. */
LEAK_TEST(an_image_that_is_in_use_for_a_moment_is_sealed_afterwards)
{
    struct cox_region region = {0};
    int fd = -1;
    assert_int_equal(cox_region_create_image(&region, LABEL, SIZE, &fd, &error), 0);
    struct mapping other = {mremap(region.base, 0, SIZE, MREMAP_MAYMOVE)};
    assert_ptr_not_equal(other.base, MAP_FAILED);
    pthread_t thread = test_thread(unmap_soon, &other);
    assert_int_equal(cox_region_seal_image(&region, LABEL, &fd, &error), 0);
    pthread_join(thread, NULL);
    close(fd);
}

/* As a rank is that is started again while other weights are loaded. */
LEAK_TEST(an_image_can_be_sealed_beside_the_child_of_a_fork)
{
    struct cox_region region = {0};
    int fd = -1;
    assert_int_equal(cox_region_create_image(&region, LABEL, SIZE, &fd, &error), 0);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    assert_true(child > 0);
    assert_int_equal(cox_region_seal_image(&region, LABEL, &fd, &error), 0);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(fd);
}

LEAK_TEST(what_is_no_image_is_refused)
{
    static const int seals[] = {F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL};
    struct cox_region region = {0};
    for (size_t i = 0; i < sizeof seals / sizeof seals[0]; i++) {
        int fd = test_own_fd(memfd_create("one seal is wanting", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        assert_int_equal(ftruncate(fd, SIZE), 0);
        assert_int_equal(fchmod(fd, 0600), 0);
        assert_int_equal(fcntl(fd, F_ADD_SEALS, ALL_SEALS & ~seals[i]), 0);
        assert_refused(attach_sealed(&region, fd, SIZE, test_err()), COX_DENIED,
                       "another process could change it");
    }
    int null = test_own_fd(open("/dev/null", O_RDWR | O_CLOEXEC));
    assert_int_equal(attach_sealed(&region, null, SIZE, NULL), COX_DENIED);
    int file = test_own_fd(open(SHM, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    assert_int_equal(ftruncate(file, SIZE), 0);
    assert_int_equal(attach_sealed(&region, file, SIZE, NULL), COX_DENIED);
    int fd = image_of(1);
    assert_refused(attach_sealed(&region, fd, SIZE + 1, test_err()), COX_CORRUPT,
                   "20000 bytes, expected at least 20001");
    assert_null(region.base);
}

/* ---- a rank ---- */

static struct cox_exporter *exporter;
static struct cox_weights_subscriber *weights;

static struct cox_weights_candidate candidate_of(uint64_t version, uint8_t value)
{
    struct cox_weights_candidate candidate = {.version = version, .size = SIZE};
    int fd = image_of(value);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &candidate.handle, &error), 0);
    test_close(fd);
    return candidate;
}

static int take(uint64_t version, const struct cox_weights_candidate *candidate, uint8_t *ret_value)
{
    const void *bytes = NULL;
    uint64_t size = 0;
    error = (struct cox_error){0};
    int r = cox_weights_subscriber_take(weights, version, candidate,
                                        cox_deadline_after_ms(PATIENCE_MS), &bytes, &size, &error);
    if (r == 0) {
        assert_int_equal(size, SIZE);
        *ret_value = *(const uint8_t *)bytes;
    }
    return r;
}

LEAK_TEST(a_rank_goes_from_version_to_version)
{
    uint8_t value = 0;
    assert_int_equal(cox_exporter_new(NULL, &exporter, &error), 0);
    assert_int_equal(cox_weights_subscriber_new(NULL, &weights), 0);
    struct cox_weights_candidate first = candidate_of(1, 11), second = candidate_of(2, 22);
    const int fds = fd_count();

    assert_int_equal(take(1, &first, &value), 0);
    assert_int_equal(value, 11);
    assert_int_equal(cox_weights_subscriber_version(weights), 0);
    cox_weights_subscriber_commit(weights);
    assert_int_equal(cox_weights_subscriber_version(weights), 1);
    assert_int_equal(take(1, NULL, &value), 0); /* which it has */

    assert_int_equal(take(2, NULL, &value), COX_NOT_FOUND);
    assert_contains(error.text, "version 2");
    assert_contains(error.text, "has version 1");
    assert_int_equal(take(3, &second, &value), COX_NOT_FOUND); /* the candidate is another one */

    assert_int_equal(take(2, &second, &value), 0);
    assert_int_equal(value, 22);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 2);
    assert_int_equal(take(2, NULL, &value), 0); /* the step is repeated */
    assert_int_equal(cox_weights_subscriber_version(weights), 1);

    /* Withdrawn: what is present is so under a later number, and what was next is gone. */
    first.version = 3;
    assert_int_equal(take(3, &first, &value), 0);
    assert_int_equal(value, 11);
    assert_int_equal(cox_weights_subscriber_version(weights), 3);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 1);
    cox_weights_subscriber_commit(weights);
    assert_int_equal(cox_weights_subscriber_version(weights), 3);

    assert_int_equal(take(2, &second, &value), COX_STALE);
    second.version = 4;
    assert_int_equal(take(4, &second, &value), 0);
    cox_weights_subscriber_commit(weights);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 1);
    /* And withdrawn after this rank has switched. */
    first.version = 5;
    assert_int_equal(take(5, &first, &value), 0);
    cox_weights_subscriber_commit(weights);
    assert_int_equal(value, 11);
    assert_int_equal(cox_weights_subscriber_version(weights), 5);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 1);
    assert_int_equal(fd_count(), fds);

    /* What the coordinator has let go is not to be had, and what the rank has stays. */
    assert_int_equal(cox_exporter_put(exporter, &second.handle), 0);
    second.version = 6;
    assert_int_equal(take(6, &second, &value), COX_NOT_FOUND);
    assert_int_equal(cox_exporter_put(exporter, &first.handle), 0);
    assert_int_equal(take(5, NULL, &value), 0);
    assert_int_equal(value, 11);
    weights = cox_weights_subscriber_free(weights);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 0);
    exporter = cox_exporter_free(exporter);
}

LEAK_TEST(an_offer_that_is_none_changes_nothing)
{
    uint8_t value = 0;
    assert_int_equal(cox_exporter_new(NULL, &exporter, &error), 0);
    assert_int_equal(cox_weights_subscriber_new(NULL, &weights), 0);
    struct cox_weights_candidate first = candidate_of(1, 11), bad = first;
    assert_int_equal(take(1, &first, &value), 0);
    cox_weights_subscriber_commit(weights);

    bad.version = 2;
    bad.handle.bytes[3] ^= 1;
    assert_int_equal(take(2, &bad, &value), COX_CORRUPT);
    assert_contains(error.text, "version 2 of the model's weights");
    bad = candidate_of(2, 22);
    bad.size = SIZE + 1;
    assert_int_equal(take(2, &bad, &value), COX_CORRUPT);
    bad.size = SIZE - 1;
    assert_int_equal(take(2, &bad, &value), COX_CORRUPT);
    assert_contains(error.text, "has 20000 bytes, expected 19999");
    int fd = test_own_fd(memfd_create("none", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    assert_int_equal(ftruncate(fd, SIZE), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &bad.handle, &error), 0);
    bad.size = SIZE;
    assert_int_equal(take(2, &bad, &value), COX_DENIED);
    assert_int_equal(cox_weights_subscriber_version(weights), 1);
    assert_int_equal(test_mapping_count("memfd:" LABEL), 1);
    weights = cox_weights_subscriber_free(weights);
    exporter = cox_exporter_free(exporter);
}

LEAK_TEST(candidates_in_messages_are_checked)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    Coxswain__WeightsCandidate message = COXSWAIN__WEIGHTS_CANDIDATE__INIT;
    struct cox_weights_candidate candidate;
    uint8_t bytes[COX_HANDLE_SIZE + 1] = {5};
    request.weights_version = 3;
    assert_int_equal(cox_weights_candidate_read(&request, &candidate, NULL), COX_EMPTY);
    request.weights = &message;
    message.size = SIZE;
    message.handle.data = bytes;
    for (size_t length = 0; length <= sizeof bytes; length++) {
        message.handle.len = length;
        assert_int_equal(cox_weights_candidate_read(&request, &candidate, &error),
                         length == COX_HANDLE_SIZE ? 0 : COX_CORRUPT);
    }
    assert_true(candidate.deadline_ns == COX_DEADLINE_NEVER);
    message.handle.len = COX_HANDLE_SIZE;
    request.deadline_ns = 9;
    assert_int_equal(cox_weights_candidate_read(&request, &candidate, NULL), 0);
    assert_int_equal(candidate.version, 3);
    assert_int_equal(candidate.size, SIZE);
    assert_int_equal(candidate.deadline_ns, 9);
    assert_memory_equal(candidate.handle.bytes, bytes, COX_HANDLE_SIZE);
    message.size = 0;
    assert_int_equal(cox_weights_candidate_read(&request, &candidate, NULL), COX_CORRUPT);
    message.size = SIZE;
    request.weights_version = 0;
    assert_int_equal(cox_weights_candidate_read(&request, &candidate, NULL), COX_CORRUPT);
}
