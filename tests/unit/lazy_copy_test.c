/* Copies whose pages are copied when they are written, and what the file's writer changes later. */
#include "tests/lib/test.h"

#include "channel/memory/lazy_copy.h"

#include <coxswain/coxswain.h>

#define PAGE ((size_t)4096)
#define PAGES ((size_t)64)
#define SIZE (PAGES * PAGE - 100)
#define TEST(name) TEST_WITH(name, begin, end)

int __real_madvise(void *address, size_t size, int advice);
int __wrap_madvise(void *address, size_t size, int advice);

/* what populating fails with; 0: it does not */
static int populate_errno;

int __wrap_madvise(void *address, size_t size, int advice)
{
    if (populate_errno == 0 || advice < 22 || advice > 23)
        return __real_madvise(address, size, advice);
    errno = populate_errno;
    return -1;
}

static uint8_t *file;
static int file_fd;

static void fill(uint8_t byte)
{
    memset(file, byte, PAGES * PAGE);
}

static int begin(void **state)
{
    (void)state;
    populate_errno = 0;
    file_fd = memfd_create("lazy_copy_test", MFD_CLOEXEC);
    if (file_fd < 0 || ftruncate(file_fd, (off_t)(PAGES * PAGE)) < 0)
        return -1;
    file = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file_fd, 0);
    if (file == MAP_FAILED)
        return -1;
    fill(1);
    return 0;
}

static int end(void **state)
{
    (void)state;
    munmap(file, PAGES * PAGE);
    return close(file_fd);
}

static uint8_t *copy_for(const void *owner)
{
    void *bytes = NULL;
    assert_int_equal(cox_lazy_copy_new(file_fd, PAGES * PAGE, SIZE, owner, &bytes), 0);
    return bytes;
}

static uint8_t *copy_of_file(void)
{
    return copy_for(NULL);
}

/* Of the mapping that has this address, how many kB are private pages; -1: there is none. */
static long copied_kb(const void *bytes)
{
    char line[512];
    long found = -1, kb;
    uintptr_t first, last;
    bool inside = false;
    FILE *maps = fopen("/proc/self/smaps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &first, &last) == 2)
            inside = first <= (uintptr_t)bytes && (uintptr_t)bytes < last;
        else if (inside && sscanf(line, "Anonymous: %ld kB", &kb) == 1)
            found = kb;
    }
    fclose(maps);
    return found;
}

static void check_all(const uint8_t *bytes, uint8_t expected)
{
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(bytes[i], expected);
}

TEST(a_copy_costs_no_page_until_it_is_written)
{
    uint8_t *copy = copy_of_file();
    check_all(copy, 1);
    assert_int_equal(copied_kb(copy), 0);
    copy[5 * PAGE] = 7;
    assert_int_equal(copied_kb(copy), 4);
    assert_int_equal(file[5 * PAGE], 1); /* nobody else sees it */
    uint8_t *other = copy_of_file();
    check_all(other, 1);
    cox_lazy_copy_free(other);
    cox_lazy_copy_free(copy);
    cox_lazy_copy_free(copy); /* is none any more */
    cox_lazy_copy_free(NULL);
}

static void complete_and_compare(void)
{
    uint8_t *copy = copy_of_file();
    copy[5 * PAGE] = 7;
    assert_int_equal(cox_lazy_copy_complete(copy), 0);
    assert_int_equal(copied_kb(copy), 4 * PAGES);
    fill(2);
    assert_int_equal(copy[5 * PAGE], 7);
    copy[5 * PAGE] = 1;
    check_all(copy, 1);
    assert_int_equal(cox_lazy_copy_complete(copy), 0);
    check_all(copy, 1);
    cox_lazy_copy_free(copy);
}

TEST(a_complete_copy_does_not_change)
{
    complete_and_compare();
}

TEST(a_copy_is_completed_without_the_kernels_help)
{
    const int errors[] = {EINVAL, EPERM, ENOSYS};
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        populate_errno = errors[i];
        fill(1);
        complete_and_compare();
    }
}

TEST(a_copy_for_which_there_is_no_memory_fails)
{
    uint8_t *copy = copy_of_file();
    populate_errno = ENOMEM;
    assert_int_equal(cox_lazy_copy_complete(copy), COX_NO_SPACE);
    populate_errno = 0;
    check_all(copy, 1);
    cox_lazy_copy_free(copy);
    void *bytes = NULL;
    assert_int_equal(cox_lazy_copy_new(-1, SIZE, SIZE, NULL, &bytes), -EBADF);
    assert_null(bytes);
}

TEST(a_fork_completes_all_copies)
{
    uint8_t *copy = copy_of_file();
    copy[5 * PAGE] = 1;
    int go[2];
    assert_int_equal(pipe(go), 0);
    const pid_t child = fork();
    if (child == 0) {
        char byte;
        close(go[1]);
        const ssize_t got = read(go[0], &byte, 1); /* the file has changed */
        (void)got;
        _exit(copy[0] == 1 && copy[SIZE - 1] == 1 && memcmp(copy, copy + 1, SIZE - 1) == 0 ? 0 : 1);
    }
    fill(2);
    memset(copy, 3, SIZE);
    close(go[0]);
    close(go[1]);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    cox_lazy_copy_free(copy);
}

TEST(a_freed_copy_is_used_again_with_what_the_file_has_now)
{
    const int owner = 0, other = 0;
    assert_null(cox_lazy_copy_again(SIZE, &owner));
    uint8_t *copy = copy_for(&owner);
    assert_null(cox_lazy_copy_again(SIZE, &owner)); /* it is in use */
    for (uint8_t round = 2; round < 6; round++) {
        copy[5 * PAGE] = copy[SIZE - 1] = 200;
        cox_lazy_copy_free(copy);
        fill(round);
        assert_null(cox_lazy_copy_again(SIZE, &other));
        assert_ptr_equal(cox_lazy_copy_again(SIZE, &owner), copy);
        check_all(copy, round);
        assert_int_equal(copied_kb(copy), 0);
    }
    /* One that is complete is not. */
    assert_int_equal(cox_lazy_copy_complete(copy), 0);
    cox_lazy_copy_free(copy);
    assert_null(cox_lazy_copy_again(SIZE, &owner));
    assert_int_equal(copied_kb(copy), -1);
}

TEST(what_was_forgotten_is_unmapped_when_it_is_freed)
{
    const int owner = 0, other = 0;
    uint8_t *used = copy_for(&owner), *unused = copy_for(&owner), *others = copy_for(&other);
    cox_lazy_copy_free(unused);
    cox_lazy_copy_free(others);
    cox_lazy_copy_forget(&owner);
    assert_null(cox_lazy_copy_again(SIZE, &owner));
    assert_int_equal(copied_kb(unused), -1);
    check_all(used, 1);
    cox_lazy_copy_free(used);
    assert_int_equal(copied_kb(used), -1);
    assert_null(cox_lazy_copy_again(SIZE, &owner));
    assert_ptr_equal(cox_lazy_copy_again(SIZE, &other), others);
    cox_lazy_copy_free(others);
    cox_lazy_copy_forget(&other);
    assert_int_equal(copied_kb(others), -1);
}

struct writer {
    uint8_t *bytes;
    pthread_barrier_t *begin;
};

static void *write_main(void *argument)
{
    const struct writer *writer = argument;
    pthread_barrier_wait(writer->begin);
    for (size_t i = 0; i < SIZE; i++)
        __atomic_store_n(&writer->bytes[i], (uint8_t)i, __ATOMIC_RELAXED);
    return NULL;
}

/* What another thread writes while the copy is completed is not lost, without populate, too. */
TEST(a_copy_may_be_written_while_it_is_completed)
{
    for (int round = 0; round < 20; round++) {
        populate_errno = round % 2 ? EINVAL : 0;
        pthread_barrier_t begin_both;
        pthread_barrier_init(&begin_both, NULL, 2);
        struct writer writer = {copy_of_file(), &begin_both};
        pthread_t thread = test_thread(write_main, &writer);
        pthread_barrier_wait(&begin_both);
        assert_int_equal(cox_lazy_copy_complete(writer.bytes), 0);
        pthread_join(thread, NULL);
        for (size_t i = 0; i < SIZE; i++)
            assert_int_equal(writer.bytes[i], (uint8_t)i);
        pthread_barrier_destroy(&begin_both);
        cox_lazy_copy_free(writer.bytes);
    }
}
