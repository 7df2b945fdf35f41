/* By-value handles in one process: the bytes, the exporter, the importer. */
#include "proto/executor.pb-c.h"
#include "tests/lib/rights.h"
#include "handle_fixture.h"

#include <linux/memfd.h>

#define SIZE 20000

/* Byte by byte as in handle.h. */
enum { KIND = 3, PID = 4, START = 8, SYSTEM = 16, FD = 24, DEV = 28, INO = 32, BYTES = 40 };
enum { OFFSET = 48, SERIAL = 56, CRC = 60 };

static struct cox_exporter *exporter;
static struct cox_importer *importer;

static int setup(void **state)
{
    leak_setup(state);
    return cox_exporter_new(NULL, &exporter, NULL) || cox_importer_new(NULL, &importer, NULL);
}

static int teardown(void **state)
{
    importer = cox_importer_free(importer);
    exporter = cox_exporter_free(exporter);
    return leak_teardown(state);
}

#define HANDLE_TEST(name) TEST_WITH(name, setup, teardown)

static struct cox_handle export_object(int fd, uint64_t offset, uint64_t size)
{
    struct cox_handle handle;
    assert_ok(cox_exporter_export(exporter, fd, offset, size, &handle, test_err()));
    return handle;
}

static int object(unsigned seed)
{
    return test_own_fd(object_new(SIZE, seed));
}

/* A whole object, whose fd is closed. */
static struct cox_handle exported(unsigned seed)
{
    const int fd = object_new(SIZE, seed);
    const struct cox_handle handle = export_object(fd, 0, 0);
    close(fd);
    return handle;
}

static const struct cox_import *import_of(const struct cox_handle *handle,
                                          enum cox_import_flags flags)
{
    const struct cox_import *import = NULL;
    assert_ok(cox_importer_open(importer, handle, flags, &import, test_err()));
    return import;
}

/* ---- bytes ---- */

HANDLE_TEST(l2_the_checksum_is_crc32c)
{
    uint8_t bytes[32];
    assert_true(cox_handle_crc("123456789", 9) == 0xe3069283u);
    assert_true(cox_handle_crc("", 0) == 0);
    /* RFC 3720, B.4 */
    memset(bytes, 0, sizeof bytes);
    assert_true(cox_handle_crc(bytes, 32) == 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    assert_true(cox_handle_crc(bytes, 32) == 0x62a8ab43u);
    for (unsigned i = 0; i < 32; i++)
        bytes[i] = (uint8_t)i;
    assert_true(cox_handle_crc(bytes, 32) == 0x46dd794eu);
}

static uint64_t number(const struct cox_handle *handle, size_t offset, size_t size)
{
    uint64_t value = 0;
    memcpy(&value, handle->bytes + offset, size); /* little-endian here as there */
    return value;
}

HANDLE_TEST(l1_l2_a_handle_has_these_64_bytes)
{
    struct stat st;
    struct cox_peer self = COX_PEER_NONE;
    struct cox_handle_info info;
    int fd = object(1);
    struct cox_handle handle = export_object(fd, 5000, 300);
    assert_int_equal(sizeof handle, 64);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(cox_peer_open(getpid(), 0, &self), 0);
    assert_int_equal(memcmp(handle.bytes, "CH", 2) && memcmp(handle.bytes, "HC", 2), 0);
    assert_int_equal(number(&handle, 0, 2), 0x4843);
    assert_int_equal(handle.bytes[2], 1);
    assert_int_equal(handle.bytes[KIND], COX_HANDLE_MEMORY);
    assert_int_equal(number(&handle, PID, 4), getpid());
    assert_true(number(&handle, START, 8) == self.start);
    assert_true(number(&handle, DEV, 4) == (uint32_t)st.st_dev);
    assert_true(number(&handle, INO, 8) == st.st_ino);
    assert_int_equal(number(&handle, BYTES, 8), 300);
    assert_int_equal(number(&handle, OFFSET, 8), 5000);
    assert_true(number(&handle, CRC, 4) == cox_handle_crc(handle.bytes, 60));
    assert_int_equal(fcntl((int)number(&handle, FD, 4), F_GETFD), FD_CLOEXEC);
    assert_int_equal(cox_handle_parse(&handle, &info, NULL), 0);
    assert_int_equal(info.kind, COX_HANDLE_MEMORY);
    assert_true(info.pid == (uint32_t)getpid() && info.start == self.start);
    assert_true(info.system == number(&handle, SYSTEM, 8) && info.fd == number(&handle, FD, 4));
    assert_true(info.dev == (uint32_t)st.st_dev && info.ino == st.st_ino);
    assert_true(info.size == 300 && info.offset == 5000);
    assert_true(info.serial == number(&handle, SERIAL, 4));
    cox_peer_close(&self);
}

HANDLE_TEST(l1_it_survives_memcpy_a_file_a_protobuf_field_and_shared_memory)
{
    const struct cox_handle handle = exported(2);
    unsigned char odd[COX_HANDLE_SIZE + 1];
    struct cox_handle copy;
    memcpy(odd + 1, &handle, sizeof handle);
    memcpy(&copy, odd + 1, sizeof copy);
    handle_opens(&copy, 2);

    FILE *file = tmpfile();
    assert_non_null(file);
    assert_int_equal(fwrite(handle.bytes, 1, sizeof handle.bytes, file), 64);
    rewind(file);
    memset(&copy, 0, sizeof copy);
    assert_int_equal(fread(copy.bytes, 1, sizeof copy.bytes, file), 64);
    fclose(file);
    handle_opens(&copy, 2);

    Coxswain__SequenceGroupMetadata message = COXSWAIN__SEQUENCE_GROUP_METADATA__INIT;
    uint8_t packed[256], bytes[COX_HANDLE_SIZE];
    memcpy(bytes, handle.bytes, sizeof bytes);
    message.has_prompt_token_ids = 1;
    message.prompt_token_ids = (ProtobufCBinaryData){.len = sizeof bytes, .data = bytes};
    size_t size = coxswain__sequence_group_metadata__pack(&message, packed);
    assert_true(size > 64 && size <= sizeof packed);
    Coxswain__SequenceGroupMetadata *unpacked =
        coxswain__sequence_group_metadata__unpack(NULL, size, packed);
    assert_non_null(unpacked);
    assert_int_equal(unpacked->prompt_token_ids.len, COX_HANDLE_SIZE);
    memcpy(&copy, unpacked->prompt_token_ids.data, sizeof copy);
    coxswain__sequence_group_metadata__free_unpacked(unpacked, NULL);
    handle_opens(&copy, 2);

    struct cox_handle *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    *shared = handle;
    handle_opens(shared, 2);
    munmap(shared, sizeof *shared);
}

HANDLE_TEST(l19_every_flipped_bit_is_refused)
{
    int fd = object(3);
    const struct cox_handle handle = export_object(fd, 100, 1000);
    test_close(fd);
    handle_opens(&handle, 3);
    for (unsigned bit = 0; bit < 8 * COX_HANDLE_SIZE; bit++) {
        struct cox_handle copy = handle;
        struct cox_handle_info info, before;
        struct cox_error err = {0};
        copy.bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        memset(&info, 0x5a, sizeof info);
        before = info;
        int r = cox_handle_parse(&copy, &info, &err);
        assert_int_equal(r, bit / 8 == 2 ? COX_VERSION : COX_CORRUPT);
        assert_int_equal(err.code, r);
        assert_memory_equal(&info, &before, sizeof info);
        handle_refused(&copy, r, bit / 8 == 2 ? "version" : "");
        for (unsigned other = 0; other < bit; other += 7) {
            struct cox_handle two = copy;
            two.bytes[other / 8] ^= (uint8_t)(1u << other % 8);
            assert_int_not_equal(cox_handle_parse(&two, &info, NULL), 0);
        }
    }
}

HANDLE_TEST(l19_garbage_and_truncated_bytes_are_refused)
{
    uint64_t random = 88172645463325252u;
    const struct cox_handle handle = exported(4);
    for (unsigned length = 0; length < COX_HANDLE_SIZE; length++)
        for (unsigned filler = 0; filler < 256; filler += 255) {
            struct cox_handle copy = handle;
            memset(copy.bytes + length, (int)filler, COX_HANDLE_SIZE - length);
            if (memcmp(&copy, &handle, sizeof copy) != 0)
                handle_refused(&copy, length == 2 ? COX_VERSION : COX_CORRUPT, "");
        }
    for (int i = 0; i < 20000; i++) {
        struct cox_handle garbage;
        struct cox_handle_info info;
        for (size_t at = 0; at < sizeof garbage.bytes; at++)
            garbage.bytes[at] = (uint8_t)(random_next(&random) >> 24);
        if (i % 2)
            memcpy(garbage.bytes, handle.bytes, 4);
        assert_int_equal(cox_handle_parse(&garbage, &info, NULL),
                         COX_CORRUPT); /* 2^-32 that one has a right crc; the seed is fixed */
    }
}

HANDLE_TEST(l19_b25_no_field_leads_to_another_object_though_the_crc_is_right)
{
    int fd = object(5), other = object(6), pair[2];
    test_socketpair(pair);
    const struct cox_handle handle = export_object(fd, 100, 1000);
    const struct cox_handle another = export_object(other, 0, 0);
    const struct cox_handle socket = export_object(pair[0], 0, 0);
    const struct {
        size_t offset, size;
        uint64_t value;
        int code;
        const char *word;
    } forged[] = {
        {KIND, 1, 0, COX_CORRUPT, "kind 0"},
        {KIND, 1, COX_HANDLE_OTHER, COX_CORRUPT, "1000 bytes"},
        {KIND, 1, 3, COX_CORRUPT, "kind 3"},
        {KIND, 1, 255, COX_CORRUPT, "kind 255"},
        {PID, 4, 0, COX_CORRUPT, "process 0"},
        {PID, 4, UINT32_MAX, COX_CORRUPT, "process 4294967295"},
        {PID, 4, (uint64_t)INT32_MAX + 1, COX_CORRUPT, "process"},
        {PID, 4, INT32_MAX, COX_PEER_DEAD, "is gone"},
        {PID, 4, 1, COX_PEER_DEAD, "is gone"},
        {START, 8, 0, COX_PEER_DEAD, "is gone"},
        {START, 8, number(&handle, START, 8) + 1, COX_PEER_DEAD, "is gone"},
        {START, 8, number(&handle, START, 8) - 1, COX_PEER_DEAD, "is gone"},
        {START, 8, UINT64_MAX, COX_PEER_DEAD, "is gone"},
        {SYSTEM, 8, 0, COX_NOT_FOUND, "unreachable"},
        {SYSTEM, 8, number(&handle, SYSTEM, 8) ^ 1, COX_NOT_FOUND, "unreachable"},
        {FD, 4, 999999, COX_NOT_FOUND, "has no fd 999999"},
        {FD, 4, INT32_MAX, COX_NOT_FOUND, "has no fd"},
        {FD, 4, UINT32_MAX, COX_CORRUPT, "fd 4294967295"},
        {FD, 4, number(&another, FD, 4), COX_NOT_FOUND, "another object"},
        {FD, 4, number(&socket, FD, 4), COX_NOT_FOUND, "another object"},
        {FD, 4, 0, COX_NOT_FOUND, ""},
        {DEV, 4, number(&handle, DEV, 4) + 1, COX_NOT_FOUND, "another object"},
        {INO, 8, number(&handle, INO, 8) + 1, COX_NOT_FOUND, "another object"},
        {INO, 8, number(&handle, INO, 8) + (UINT64_C(1) << 32), COX_NOT_FOUND, "another object"},
        {BYTES, 8, 0, COX_CORRUPT, "0 bytes"},
        {BYTES, 8, SIZE - 100 + 1, COX_NOT_FOUND, "truncated"},
        {BYTES, 8, UINT64_MAX, COX_CORRUPT, "cannot be"},
        {BYTES, 8, INT64_MAX, COX_CORRUPT, "cannot be"},
        {BYTES, 8, INT64_MAX - 100, COX_NOT_FOUND, "truncated"},
        {OFFSET, 8, SIZE, COX_NOT_FOUND, "truncated"},
        {OFFSET, 8, SIZE - 1000 + 1, COX_NOT_FOUND, "truncated"},
        {OFFSET, 8, UINT64_MAX, COX_CORRUPT, "cannot be"},
        {OFFSET, 8, UINT64_MAX - 999, COX_CORRUPT, "cannot be"},
        {OFFSET, 8, INT64_MAX, COX_CORRUPT, "cannot be"},
    };
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        struct cox_handle copy = handle;
        handle_forge(&copy, forged[i].offset, forged[i].size, forged[i].value);
        handle_refused(&copy, forged[i].code, forged[i].word);
    }
    struct cox_handle copy = socket;
    handle_forge(&copy, KIND, 1, COX_HANDLE_MEMORY);
    handle_refused(&copy, COX_CORRUPT, "0 bytes");
    handle_forge(&copy, BYTES, 8, 1); /* memory by its word, a socket by its inode */
    handle_refused(&copy, COX_NOT_FOUND, "another object");
    copy = handle; /* the range may lie, inside the object that is meant */
    handle_forge(&copy, OFFSET, 8, SIZE - 1000);
    handle_opens(&copy, 5);
    handle_opens(&handle, 5);
}

HANDLE_TEST(l20_b30_legacy_bytes_are_no_handle)
{
    struct cox_handle legacy;
    /* An opaque device handle of 64 bytes, as others put into the same kind of field; and zeros, as
     * of a field that announces an fd in the message. */
    for (size_t i = 0; i < sizeof legacy.bytes; i++)
        legacy.bytes[i] = (uint8_t)(0x80 + i);
    handle_refused(&legacy, COX_CORRUPT, "no handle");
    memset(&legacy, 0, sizeof legacy);
    handle_refused(&legacy, COX_CORRUPT, "no handle: it begins with 0x0000, expected 0x4843");
    handle_forge(&legacy, 4, 4, (uint64_t)getpid()); /* a right checksum is not enough */
    handle_refused(&legacy, COX_CORRUPT, "no handle");
}

/* ---- opening in the same process ---- */

HANDLE_TEST(l4_b15_it_opens_in_the_same_process)
{
    int fd = object(7), opened = -1;
    struct cox_handle handle = export_object(fd, 0, 0);
    struct stat one, two;
    assert_int_equal(handle_open_plain(&handle, &opened, NULL), 0);
    test_own_fd(opened);
    assert_true(opened >= 3 && opened != fd);
    assert_int_equal(fcntl(opened, F_GETFD), FD_CLOEXEC);
    assert_int_equal(fstat(fd, &one) | fstat(opened, &two), 0);
    assert_true(one.st_ino == two.st_ino && one.st_dev == two.st_dev);
    test_close(fd); /* the exporter has its own */
    handle_opens(&handle, 7);
}

static void without_standard_fds(void *context)
{
    const struct cox_handle *handle = context;
    const struct cox_import *import;
    int fd = -1;
    close(0);
    close(1);
    CHECK(handle_open_plain(handle, &fd, NULL) == 0 && fd >= 3);
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    CHECK(cox_importer_open(importer, handle, COX_IMPORT_FD, &import, NULL) == 0);
    CHECK(import->fd >= 3 && fcntl(import->fd, F_GETFD) == FD_CLOEXEC);
    cox_importer_close(importer, import);
    CHECK(fcntl(0, F_GETFD) == -1 && fcntl(1, F_GETFD) == -1); /* no pidfd is kept there */
    cox_importer_free(importer);
}

HANDLE_TEST(b15_opened_fds_keep_off_the_standard_ones)
{
    if (!test_can_take_fds())
        skip();
    struct cox_handle handle = exported(7);
    child_run(without_standard_fds, &handle); /* from another process */
}

/* A handle of the fd, and the fd that it opens. */
static int through_a_handle(int fd, uint64_t offset, unsigned kind)
{
    const struct cox_handle handle = export_object(fd, offset, 0);
    int opened = -1;
    assert_int_equal(handle.bytes[KIND], kind);
    assert_int_equal(handle_open_plain(&handle, &opened, NULL), 0);
    return test_own_fd(opened);
}

HANDLE_TEST(l1_l18_every_kind_of_fd_becomes_a_handle_and_back)
{
    char path[] = "/tmp/cox_handle_XXXXXX", byte = 'x';
    int pair[2], ends[2];
    uint64_t count = 0;
    test_socketpair(pair);
    test_pipe(ends);
    const int event = test_own_fd(eventfd(0, EFD_CLOEXEC));
    const int file = test_own_fd(mkostemp(path, O_CLOEXEC));
    const int shm = test_own_fd(shm_open(test_object("kinds"), O_RDWR | O_CREAT | O_EXCL, 0600));
    unlink(path);
    shm_unlink(test_object("kinds"));
    assert_int_equal(ftruncate(shm, 4096), 0);
    assert_int_equal(pwrite(file, "in a file", 9, 0), 9);

    assert_int_equal(write(through_a_handle(pair[0], 0, COX_HANDLE_OTHER), "s", 1), 1);
    assert_int_equal(read(pair[1], &byte, 1), 1);
    assert_int_equal(byte, 's');
    int fd = through_a_handle(ends[0], 0, COX_HANDLE_OTHER);
    assert_int_equal(write(ends[1], "p", 1), 1);
    assert_int_equal(read(fd, &byte, 1), 1);
    assert_int_equal(byte, 'p');
    fd = through_a_handle(event, 0, COX_HANDLE_OTHER);
    assert_int_equal(eventfd_write(fd, 7) | eventfd_read(event, &count), 0);
    assert_int_equal(count, 7);
    fd = through_a_handle(file, 3, COX_HANDLE_MEMORY);
    assert_int_equal(pread(fd, &byte, 1, 3), 1);
    assert_int_equal(byte, 'a');
    const struct cox_handle handle = export_object(file, 3, 0);
    assert_int_equal(number(&handle, BYTES, 8), 6);
    through_a_handle(shm, 0, COX_HANDLE_MEMORY);
}

HANDLE_TEST(l10_b25_a_number_that_means_another_object_by_now_is_refused)
{
    int fd = object(8), other = object(9);
    struct cox_handle handle = export_object(fd, 0, 0);
    int number_of = (int)number(&handle, FD, 4);
    assert_int_equal(dup3(other, number_of, O_CLOEXEC), number_of);
    handle_refused(&handle, COX_NOT_FOUND, "another object");
    assert_int_equal(dup3(fd, number_of, O_CLOEXEC), number_of);
    handle_opens(&handle, 8);
    assert_int_equal(ftruncate(fd, SIZE - 1), 0);
    handle_refused(&handle, COX_NOT_FOUND, "truncated");
}

HANDLE_TEST(l10_numbers_of_what_was_put_are_not_given_again_soon)
{
    struct cox_handle last = {{0}};
    int event = test_own_fd(eventfd(0, EFD_CLOEXEC));
    for (int i = 0; i < 500; i++) {
        struct cox_handle handle = export_object(event, 0, 0);
        assert_true(number(&handle, FD, 4) != number(&last, FD, 4));
        assert_true(number(&handle, FD, 4) < 1024);
        assert_int_equal(cox_exporter_put(exporter, &handle), 0);
        if (i == 0)
            last = handle; /* an inode that all eventfds have */
        handle_refused(&last, COX_NOT_FOUND, "has no fd");
    }
}

/* ---- the exporter ---- */

HANDLE_TEST(l15_it_is_open_until_the_last_put)
{
    int fd = object(10), kept = -1;
    struct cox_handle handle = export_object(fd, 0, 0), stranger = handle;
    test_close(fd);
    assert_int_equal(cox_exporter_share(exporter, &handle), 0);
    assert_int_equal(cox_exporter_share(exporter, &handle), 0);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(handle_open_plain(&handle, &kept, NULL), 0);
    test_own_fd(kept);
    handle_forge(&stranger, SERIAL, 4, number(&handle, SERIAL, 4) + 1);
    assert_int_equal(cox_exporter_put(exporter, &stranger), COX_NOT_FOUND);
    assert_int_equal(cox_exporter_share(exporter, &stranger), COX_NOT_FOUND);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(cox_exporter_put(exporter, &handle), COX_NOT_FOUND);
    assert_int_equal(cox_exporter_share(exporter, &handle), COX_NOT_FOUND);
    handle_refused(&handle, COX_NOT_FOUND, "has no fd");
    assert_true(object_is(kept, 0, SIZE, 10)); /* L16 in one process */
    memset(&stranger, 0, sizeof stranger);
    assert_int_equal(cox_exporter_put(exporter, &stranger), COX_NOT_FOUND);
}

HANDLE_TEST(l15_one_fd_exported_twice_is_two_handles)
{
    int fd = object(11);
    struct cox_handle one = export_object(fd, 0, 0), two = export_object(fd, 0, 0);
    test_close(fd);
    assert_true(memcmp(&one, &two, sizeof one) != 0);
    assert_int_equal(cox_exporter_put(exporter, &one), 0);
    handle_refused(&one, COX_NOT_FOUND, "");
    handle_opens(&two, 11);
}

HANDLE_TEST(l1_what_cannot_be_exported_is_refused)
{
    struct cox_handle handle, before;
    int pair[2];
    memset(&handle, 0x5a, sizeof handle);
    before = handle;
    test_socketpair(pair);
    int fd = object(12), empty = test_own_fd(memfd_create("empty", MFD_CLOEXEC));
    const struct {
        int fd;
        uint64_t offset, size;
        const char *word;
    } refusals[] = {
        {-1, 0, 0, "fd -1"},
        {99999, 0, 0, "fd 99999"},
        {fd, SIZE, 0, "20000 bytes"},
        {fd, SIZE + 1, 0, "20000 bytes"},
        {fd, 0, SIZE + 1, "20000 bytes"},
        {fd, 1, SIZE, "20000 bytes"},
        {fd, UINT64_MAX, 1, "20000 bytes"},
        {fd, 1, UINT64_MAX, "20000 bytes"},
        {empty, 0, 0, "0 bytes"},
        {pair[0], 1, 0, "no memory"},
        {pair[0], 0, 1, "no memory"},
    };
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        int fds = fd_count();
        assert_refused(cox_exporter_export(exporter, refusals[i].fd, refusals[i].offset,
                                           refusals[i].size, &handle, test_err()),
                       COX_INVALID, refusals[i].word);
        assert_memory_equal(&handle, &before, sizeof handle);
        assert_int_equal(fd_count(), fds);
    }
}

static void free_in_child(void *context)
{
    const struct cox_handle *handle = context;
    struct cox_handle more;
    int fd = -1;
    CHECK(cox_exporter_export(exporter, 0, 0, 0, &more, NULL) == COX_STATE);
    CHECK(cox_exporter_put(exporter, handle) == COX_STATE);
    CHECK(cox_exporter_share(exporter, handle) == COX_STATE);
    int before = fd_count();
    CHECK(cox_exporter_free(exporter) == NULL);
    CHECK(fd_count() == before - 1);
    if (test_can_take_fds())
        CHECK(handle_open_plain(handle, &fd, NULL) == 0); /* of its parent */
}

HANDLE_TEST(l15_the_child_of_a_fork_does_not_put)
{
    int fd = object(13);
    struct cox_handle handle = export_object(fd, 0, 0);
    child_run(free_in_child, &handle);
    handle_opens(&handle, 13);
    test_close(fd);
    assert_null(cox_exporter_free(NULL));
    assert_null(cox_importer_free(NULL));
}

/* ---- the importer ---- */

HANDLE_TEST(l17_the_same_bytes_and_flags_are_open_once)
{
    const struct cox_import *one, *two, *three, *none = NULL;
    int fd = object(14);
    struct cox_handle handle = export_object(fd, 0, 0);
    int fds = fd_count();
    one = import_of(&handle, COX_IMPORT_READ);
    two = import_of(&handle, COX_IMPORT_READ);
    assert_ptr_equal(one, two);
    assert_int_equal(fd_count(), fds + 1);
    three = import_of(&handle, COX_IMPORT_FD);
    assert_ptr_not_equal(one, three);
    assert_null(three->base);
    assert_true(three->size == SIZE && one->size == SIZE && one->base && !one->writable);
    assert_true(object_is(three->fd, 0, SIZE, 14));
    assert_int_equal(((const uint8_t *)one->base)[999], object_byte(14, 999));
    cox_importer_close(importer, one);
    assert_int_equal(((const uint8_t *)two->base)[1999], object_byte(14, 1999));
    cox_importer_close(importer, two);
    cox_importer_close(importer, three);
    assert_int_equal(fd_count(), fds); /* B29: nothing stays open for unused handles */
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(cox_importer_open(importer, &handle, COX_IMPORT_READ, &none, NULL),
                     COX_NOT_FOUND);
    assert_null(none);
}

HANDLE_TEST(l17_b29_a_handle_that_differs_in_a_byte_is_never_served_from_the_cache)
{
    const struct cox_import *import, *other = NULL;
    int fd = object(15);
    const struct cox_handle handle = export_object(fd, 0, 1000);
    import = import_of(&handle, COX_IMPORT_READ);
    for (size_t at = 0; at < COX_HANDLE_SIZE; at++) {
        struct cox_handle copy = handle;
        copy.bytes[at] ^= 0x10;
        int r = cox_importer_open(importer, &copy, COX_IMPORT_READ, &other, NULL);
        assert_true(r == COX_CORRUPT || r == COX_VERSION);
        if (at < 3 || at >= CRC)
            continue;
        copy = handle;
        handle_forge(&copy, at, 1, handle.bytes[at] ^ 1u);
        r = cox_importer_open(importer, &copy, COX_IMPORT_READ, &other, NULL);
        if (r == 0) { /* a serial or a range of its own, of the same object */
            assert_true(at >= BYTES);
            assert_ptr_not_equal(other, import);
            cox_importer_close(importer, other);
        } else {
            /* The pid may be that of a neighbour, started in the same tick, perhaps by another
             * user. */
            bool pid = at >= PID && at < START;
            if (r != COX_CORRUPT && r != COX_NOT_FOUND && r != COX_PEER_DEAD &&
                !(pid && r == COX_DENIED))
                fail_msg("byte %zu: %d", at, r);
        }
    }
    /* Another serial whose crc ends in the same byte: a neighbour, if there is any order in it.
     */
    struct cox_handle neighbour = handle;
    for (uint64_t i = 0; memcmp(&neighbour, &handle, sizeof handle) == 0 ||
                         neighbour.bytes[CRC + 3] != handle.bytes[CRC + 3];
         i++)
        handle_forge(&neighbour, SERIAL, 4, i);
    other = import_of(&neighbour, COX_IMPORT_READ);
    assert_ptr_not_equal(other, import);
    cox_importer_close(importer, other);
    cox_importer_close(importer, import);
}

HANDLE_TEST(l21_an_offset_survives)
{
    static const uint64_t offsets[] = {1, 4095, 4096, 4097, 12345, SIZE - 1};
    int fd = object(16);
    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        uint64_t size = i % 2 ? 0 : 1;
        struct cox_handle handle = export_object(fd, offsets[i], size);
        const struct cox_import *import = import_of(&handle, COX_IMPORT_READ);
        assert_true(import->size == (size ? size : SIZE - offsets[i]));
        for (uint64_t at = 0; at < import->size; at++)
            assert_int_equal(((const uint8_t *)import->base)[at], object_byte(16, offsets[i] + at));
        cox_importer_close(importer, import);
    }
}

HANDLE_TEST(l3_a_mapping_is_for_what_was_asked_and_allowed)
{
    const struct cox_import *import = NULL;
    int pair[2];
    int fd = object(17);
    int read_only = test_own_fd(test_reopen(fd, O_RDONLY));
    test_socketpair(pair);
    struct cox_handle handle = export_object(fd, 4000, 200);
    import = import_of(&handle, COX_IMPORT_WRITE);
    assert_true(import->writable);
    ((uint8_t *)(uintptr_t)import->base)[7] = 99;
    uint8_t byte = 0;
    assert_int_equal(pread(fd, &byte, 1, 4007), 1);
    assert_int_equal(byte, 99);
    cox_importer_close(importer, import);
    int fds = fd_count();
    handle = export_object(read_only, 0, 0);
    assert_refused(cox_importer_open(importer, &handle, COX_IMPORT_WRITE, &import, test_err()),
                   COX_DENIED, "writing");
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
    handle = export_object(fd, 0, 0);
    assert_int_equal(cox_importer_open(importer, &handle, COX_IMPORT_WRITE, &import, NULL),
                     COX_DENIED);
    import = import_of(&handle, COX_IMPORT_READ);
    cox_importer_close(importer, import);
    assert_int_equal(cox_importer_open(importer, &handle, (enum cox_import_flags)4, &import, NULL),
                     COX_INVALID);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    handle = export_object(pair[0], 0, 0);
    assert_int_equal(cox_importer_open(importer, &handle, COX_IMPORT_READ, &import, NULL),
                     COX_INVALID);
    import = import_of(&handle, COX_IMPORT_FD);
    assert_true(import->size == 0 && !import->base);
    cox_importer_close(importer, import);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
    assert_int_equal(fd_count(), fds);
}

/* A part of a huge page that begins anywhere; munmap would refuse to take it away alone. */
HANDLE_TEST(l21_b29_parts_of_huge_pages_are_mapped_and_unmapped)
{
    const size_t huge = 2 << 20;
    const struct cox_import *import;
    int fd = memfd_create("of_huge_pages", MFD_CLOEXEC | MFD_HUGETLB | MFD_HUGE_2MB);
    void *map = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, (off_t)(2 * huge)) == 0)
        map = mmap(NULL, 2 * huge, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) { /* there are none */
        cox_close_fd(&fd);
        skip();
    }
    ((char *)map)[huge + 8200] = 'h';
    munmap(map, 2 * huge);
    struct cox_handle handle = export_object(fd, huge + 8200, 100);
    import = import_of(&handle, COX_IMPORT_READ);
    assert_int_equal(*(const char *)import->base, 'h');
    assert_int_equal(test_mapping_count("of_huge_pages"), 1);
    cox_importer_close(importer, import);
    assert_int_equal(test_mapping_count("of_huge_pages"), 0);
    cox_importer_free(importer);
    assert_int_equal(cox_exporter_put(exporter, &handle), 0);
}

HANDLE_TEST(l15_free_closes_what_is_still_open)
{
    const struct cox_handle handle = exported(18);
    import_of(&handle, COX_IMPORT_READ);
    importer = cox_importer_free(importer); /* leak_teardown looks */
}

#define THREAD_COUNT 4
#define ROUND_COUNT 500

static struct cox_handle shared_handle;
static int shared_fd;

static void *churn(void *context)
{
    unsigned *failures = context;
    for (int i = 0; i < ROUND_COUNT; i++) {
        struct cox_handle own;
        const struct cox_import *one, *two;
        if (cox_exporter_export(exporter, shared_fd, 0, 0, &own, NULL)) {
            ++*failures;
            continue;
        }
        int r = cox_importer_open(importer, &shared_handle, COX_IMPORT_READ, &one, NULL);
        if (r == 0 && ((const uint8_t *)one->base)[i] != object_byte(19, (uint64_t)i))
            r = 1;
        *failures += r != 0;
        r = cox_importer_open(importer, &own, COX_IMPORT_READ, &two, NULL);
        if (r == 0 && ((const uint8_t *)two->base)[i] != object_byte(19, (uint64_t)i))
            r = 1;
        *failures += r != 0;
        cox_importer_close(importer, one);
        cox_importer_close(importer, two);
        *failures += cox_exporter_share(exporter, &shared_handle) != 0;
        *failures += cox_exporter_put(exporter, &shared_handle) != 0;
        *failures += cox_exporter_put(exporter, &own) != 0;
        *failures += cox_exporter_put(exporter, &own) != COX_NOT_FOUND;
    }
    return NULL;
}

HANDLE_TEST(l15_any_threads_may_use_them_at_once)
{
    pthread_t threads[THREAD_COUNT];
    unsigned failures[THREAD_COUNT] = {0};
    shared_fd = object(19);
    shared_handle = export_object(shared_fd, 0, 0);
    int fds = fd_count();
    for (size_t i = 0; i < THREAD_COUNT; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, churn, &failures[i]), 0);
    for (size_t i = 0; i < THREAD_COUNT; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(failures[i], 0);
    }
    assert_int_equal(fd_count(), fds);
    handle_opens(&shared_handle, 19);
}

static void many_pairs(void *context)
{
    (void)context;
    const struct rlimit limit = {1024, 1024};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    int fd = object_new(4096, 20);
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    int fds = fd_count();
    for (int i = 0; i < 100000; i++) {
        struct cox_handle handle;
        const struct cox_import *import;
        CHECK(cox_exporter_export(exporter, fd, 0, 0, &handle, NULL) == 0);
        CHECK(cox_importer_open(importer, &handle, i % 2 ? COX_IMPORT_FD : COX_IMPORT_READ, &import,
                                NULL) == 0);
        cox_importer_close(importer, import);
        CHECK(cox_exporter_put(exporter, &handle) == 0);
    }
    CHECK(fd_count() == fds);
}

static void own_exporter(void *context)
{
    if (context)
        user_change(NOBODY);
    CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
    many_pairs(NULL);
}

HANDLE_TEST(l15_b29_no_fd_more_after_100000_pairs_in_one_process)
{
    child_run(own_exporter, NULL);
    if (test_can_switch_user())
        child_run(own_exporter, exporter);
}

static void limit_is_met(void *context)
{
    struct cox_handle handles[64];
    const struct rlimit limit = {40, 40};
    (void)context;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
    int fd = object_new(4096, 21), count = 0, opened = -1;
    struct cox_error err = {0};
    int fds = fd_count();
    while (cox_exporter_export(exporter, fd, 0, 0, &handles[count], &err) == 0)
        CHECK(++count < 64);
    CHECK(err.code == -EMFILE && count > 10);
    CHECK(fcntl(39, F_GETFD) == FD_CLOEXEC); /* the last number there is */
    CHECK(handle_open_plain(&handles[0], &opened, NULL) == -EMFILE);
    while (count > 0)
        CHECK(cox_exporter_put(exporter, &handles[--count]) == 0);
    CHECK(fd_count() == fds);
}

HANDLE_TEST(l15_a_low_limit_of_fds_is_used_to_its_end)
{
    child_run(limit_is_met, NULL);
}

/* ---- probe and ptrace policy ---- */

struct unreachable {
    const struct cox_handle *handle;
    const int *told;
};

static void asks_nobody(void *context)
{
    const struct unreachable *test = context;
    struct cox_handle copy = *test->handle;
    int fd = -1;
    call_deny(SYS_pidfd_open, ANY_ARGUMENT, 0);
    call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, 0);
    handle_forge(&copy, SYSTEM, 8, 1);
    CHECK(handle_open_plain(&copy, &fd, NULL) == COX_NOT_FOUND);
    const struct cox_import *import;
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    CHECK(cox_importer_open(importer, &copy, COX_IMPORT_FD, &import, NULL) == COX_NOT_FOUND);
    /* Where it is the importer knows by now: from here on it looks into no file of /proc, nor for
     * any process. */
    call_deny(SYS_openat, ANY_ARGUMENT, 0);
    call_deny(SYS_readlinkat, ANY_ARGUMENT, 0);
    call_deny(SYS_newfstatat, ANY_ARGUMENT, 0);
    call_deny(SYS_kill, ANY_ARGUMENT, 0);
    call_deny(SYS_socket, ANY_ARGUMENT, 0);
    CHECK(cox_importer_open(importer, &copy, COX_IMPORT_FD, &import, NULL) == COX_NOT_FOUND);
    CHECK(write(*test->told, "", 1) == 1);
    /* Its parent's: now it does ask, and dies of it. */
    cox_importer_open(importer, test->handle, COX_IMPORT_FD, &import, NULL);
}

HANDLE_TEST(l7_an_unreachable_handle_is_refused_before_any_call_on_the_pid)
{
    if (!filters_possible())
        skip();
    struct cox_handle handle = exported(22);
    int told[2];
    test_pipe(told);
    struct unreachable test = {&handle, &told[1]};
    int status = child_status(child_start(asks_nobody, &test));
    test_close(told[1]);
    assert_true(heard(told[0])); /* it came past all refusals */
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSYS);
}

static void lets_nobody_trace(void *context)
{
    const struct cox_import *import;
    struct cox_handle handle;
    struct cox_handle_probe ways;
    call_deny(SYS_prctl, PR_SET_PTRACER, 0);
    CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
    CHECK(cox_importer_new(NULL, &importer, NULL) == 0);
    int fd = object_new(SIZE, 23);
    CHECK(cox_exporter_export(exporter, fd, 0, 0, &handle, NULL) == 0);
    CHECK(cox_importer_open(importer, &handle, COX_IMPORT_READ, &import, NULL) == 0);
    CHECK(cox_handle_query(NULL, 0, &ways) == 0);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_NONE, 1) == 0);
    cox_importer_free(importer);
    cox_exporter_free(exporter);
    if (context)
        cox_ptrace_policy_set(COX_PTRACE_ANY, 0); /* dies of it */
}

HANDLE_TEST(l14_b26_no_process_may_trace_unless_asked)
{
    if (!filters_possible())
        skip();
    child_run(lets_nobody_trace, NULL);
    int status = child_status(child_start(lets_nobody_trace, exporter));
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSYS);
}

/* The kernel's reply is the filter's, which shows the target: EDOM, to process 4711; ERANGE, to
 * all. */
static void sets_policy_as_asked(void *context)
{
    struct cox_exporter *own = NULL;
    struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                           .ptrace_policy = COX_PTRACE_PROCESS,
                                           .ptrace_pid = 4711};
    struct cox_error err = {0};
    (void)context;
    argument_deny(SYS_prctl, 1, 4711, EDOM);
    argument_deny(SYS_prctl, 1, (uint32_t)PR_SET_PTRACER_ANY, ERANGE);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_PROCESS, 4711) == -EDOM);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_ANY, 0) == -ERANGE);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_ANY, 4711) == -ERANGE);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_PROCESS, 0) == COX_INVALID);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_PROCESS, -1) ==
          COX_INVALID); /* would be all processes */
    CHECK(cox_ptrace_policy_set((enum cox_ptrace_policy)3, 1) == COX_INVALID);
    CHECK(cox_exporter_new(&options, &own, &err) == -EDOM && !own);
    CHECK(strstr(err.text, "PR_SET_PTRACER"));
    options.ptrace_policy = COX_PTRACE_ANY;
    CHECK(cox_exporter_new(&options, &own, NULL) == -ERANGE && !own);
    CHECK(cox_ptrace_policy_set(COX_PTRACE_NONE, 4711) == 0);
}

HANDLE_TEST(l14_the_ptrace_policy_is_set_as_asked)
{
    if (!filters_possible())
        skip();
    child_run(sets_policy_as_asked, NULL);
}

static void sets_policy_here(void *context)
{
    (void)context;
    bool yama = access("/proc/sys/kernel/yama/ptrace_scope", F_OK) == 0;
    struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                           .ptrace_policy = COX_PTRACE_PROCESS,
                                           .ptrace_pid = getppid()};
    CHECK(cox_ptrace_policy_set(COX_PTRACE_PROCESS, getppid()) == (yama ? 0 : COX_UNSUPPORTED));
    CHECK(cox_ptrace_policy_set(COX_PTRACE_ANY, 0) == (yama ? 0 : COX_UNSUPPORTED));
    struct cox_exporter *own;
    CHECK(cox_exporter_new(&options, &own, NULL) == 0);
    cox_exporter_free(own);
}

HANDLE_TEST(l14_without_yama_no_ptrace_policy_is_needed)
{
    child_run(sets_policy_here, NULL);
}

static void query_denied(void *context)
{
    struct cox_handle_probe ways;
    int error = *(int *)context;
    call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, error);
    CHECK(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0);
    CHECK(cox_handle_query("/nonexistent/cox.sock", cox_deadline_after_ms(1000), &ways) == 0);
    CHECK(!ways.pidfd_getfd && ways.pidfd_error == -error);
    CHECK(!ways.control_socket && ways.socket_error != 0 && !ways.dumpable);
}

HANDLE_TEST(l13_query_returns_the_ways_that_work_here)
{
    struct cox_handle_probe ways = {.control_socket = true};
    assert_int_equal(cox_handle_query(NULL, 0, &ways), 0);
    assert_true(ways.pidfd_getfd == (ways.pidfd_error == 0));
    assert_true(ways.pidfd_getfd || ways.pidfd_error == -EPERM || ways.pidfd_error == -ENOSYS);
    assert_true(ways.dumpable && !ways.control_socket && ways.socket_error == 0);
    bool yama = access("/proc/sys/kernel/yama/ptrace_scope", F_OK) == 0;
    assert_true(yama ? ways.yama >= 0 && ways.yama <= 3 : ways.yama == -1);
    int errors[] = {EPERM, ENOSYS};
    child_run(query_denied, &errors[0]);
    child_run(query_denied, &errors[1]);
}

static void on_child(int signal_number)
{
    (void)signal_number;
    _exit(98);
}

static void query_quietly(void *context)
{
    struct cox_handle_probe ways;
    (void)context;
    signal(SIGCHLD, on_child);
    CHECK(cox_handle_query(NULL, 0, &ways) == 0);
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

HANDLE_TEST(l13_the_host_hears_nothing_of_the_child_that_query_makes)
{
    child_run(query_quietly, NULL);
}
