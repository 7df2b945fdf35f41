/* A by-value handle of any bytes: refused, or the very object that the process exports. The first
 * byte says whether magic, version, system and checksum are made right, so that the rest is looked
 * at. */
#include "fuzz.h"

#include "channel/handle/handle_internal.h"

#define OBJECT_SIZE 10000

enum { MAKE_RIGHT = 1, MAKE_OWN = 2, MAKE_SAME_OBJECT = 4 };

static struct cox_handle_info exported; /* by this process */
static struct stat exported_stat;

static void setup(void)
{
    static struct cox_exporter *exporter; /* for as long as the process lives */
    struct cox_handle handle;
    int fd = memfd_create("handle", MFD_CLOEXEC);
    FUZZ_CHECK(fd >= 0 && ftruncate(fd, OBJECT_SIZE) == 0 && fstat(fd, &exported_stat) == 0);
    FUZZ_CHECK(cox_exporter_new(NULL, &exporter, NULL) == 0);
    FUZZ_CHECK(cox_exporter_export(exporter, fd, 0, 0, &handle, NULL) == 0);
    FUZZ_CHECK(cox_handle_parse(&handle, &exported, NULL) == 0);
}

static void put_number(struct cox_handle *handle, size_t offset, size_t size, uint64_t value)
{
    memcpy(handle->bytes + offset, &value, size); /* little-endian here as there */
}

static void make_right(struct cox_handle *handle, uint8_t how)
{
    put_number(handle, 0, 2, 0x4843);
    put_number(handle, 2, 1, 1);
    put_number(handle, 16, 8, exported.system);
    if (how & (MAKE_OWN | MAKE_SAME_OBJECT)) {
        put_number(handle, 4, 4, exported.pid);
        put_number(handle, 8, 8, exported.start);
    }
    if (how & MAKE_SAME_OBJECT) {
        put_number(handle, 3, 1, COX_HANDLE_MEMORY);
        put_number(handle, 24, 4, exported.fd);
        put_number(handle, 28, 4, exported.dev);
        put_number(handle, 32, 8, exported.ino);
    }
    put_number(handle, 60, 4, cox_handle_crc(handle->bytes, 60));
}

static void opened_check(const struct cox_handle_info *info, int fd)
{
    struct stat st;
    FUZZ_CHECK(fd >= 3 && fstat(fd, &st) == 0);
    FUZZ_CHECK((uint32_t)st.st_dev == info->dev && st.st_ino == info->ino);
    FUZZ_CHECK(info->kind == cox_handle_kind_of(&st));
    FUZZ_CHECK(info->kind != COX_HANDLE_MEMORY ||
               (uint64_t)st.st_size >= info->offset + info->size);
    if (info->kind == COX_HANDLE_MEMORY && st.st_ino == exported_stat.st_ino)
        FUZZ_CHECK(info->offset < OBJECT_SIZE && info->size <= OBJECT_SIZE - info->offset);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    struct cox_handle handle;
    struct cox_handle_info info, before;
    struct cox_error err = {0}, open_err = {0};
    if (exported.pid == 0)
        setup();
    uint8_t how = fuzz_eat_byte(&input);
    fuzz_eat(&input, handle.bytes, sizeof handle.bytes);
    if (how & MAKE_RIGHT)
        make_right(&handle, how);
    memset(&info, 0x5a, sizeof info);
    before = info;
    int fd = -77;
    int r = cox_handle_parse(&handle, &info, &err);
    int opened = cox_handle_open(&handle, NULL, 0, &fd, &open_err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_VERSION);
        FUZZ_CHECK(memcmp(&info, &before, sizeof info) == 0 && opened == r);
    } else {
        struct cox_handle again;
        cox_handle_format(&info, &again);
        FUZZ_CHECK(memcmp(&handle, &again, sizeof again) == 0);
    }
    if (opened) {
        fuzz_check_error(opened, &open_err);
        FUZZ_CHECK(fd == -77);
        return 0;
    }
    opened_check(&info, fd);
    close(fd);
    return 0;
}
