/* A control region of any bytes: attach refuses it, or what it gives can be trusted. */
#include "fuzz.h"

#include "channel/attach/named/names.h"
#include "channel/shm/control.h"

#define FILE_SIZE_MAX (UINT32_C(128) << 10)

static char name[64];
static int fd = -1;

static void file_remove(void)
{
    char object[COX_OBJECT_NAME_SIZE];
    shm_unlink(cox_name_control(object, name));
}

static void file_create(void)
{
    char object[COX_OBJECT_NAME_SIZE];
    snprintf(name, sizeof name, "cox_fuzz_%d", (int)getpid());
    cox_name_control(object, name);
    shm_unlink(object);
    fd = shm_open(object, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    FUZZ_CHECK(fd >= 0);
    FUZZ_CHECK(fchmod(fd, 0600) == 0);
    atexit(file_remove);
}

static void geometry_trusted(const struct cox_control *control)
{
    const struct cox_geometry *geometry = &control->geometry;
    FUZZ_CHECK(geometry->rank_count >= 1 && geometry->rank_count <= COX_RANK_COUNT_MAX);
    FUZZ_CHECK(geometry->depth >= 1 && geometry->depth <= COX_DEPTH_MAX);
    FUZZ_CHECK(cox_layout_control_size(geometry->rank_count) <= control->region.size);
    fuzz_touch(control->layout, cox_layout_control_size(geometry->rank_count));
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        if (channel == COX_CHANNEL_ERROR) {
            FUZZ_CHECK(sizes->request_size == 0);
            FUZZ_CHECK(sizes->response_size > COX_PREFIX_SIZE);
            continue;
        }
        FUZZ_CHECK(sizes->frame_size > COX_PREFIX_SIZE && sizes->frame_size % 64 == 0);
        FUZZ_CHECK(sizes->slot_stride % 64 == 0);
        FUZZ_CHECK(sizes->frame_size <= sizes->request_size / geometry->depth);
        bool whole = geometry->mode->limits.whole_replies && channel == COX_CHANNEL_LINK;
        for (uint32_t rank = 0; rank < (whole ? 1 : geometry->rank_count); rank++)
            for (uint64_t sequence = 0; sequence < geometry->depth; sequence++) {
                uint64_t from = cox_geometry_slot_offset(geometry, channel, rank, sequence);
                uint64_t room = cox_geometry_slot_capacity(geometry, channel, whole);
                FUZZ_CHECK(from <= sizes->response_size &&
                           COX_PREFIX_SIZE + room <= sizes->response_size - from);
            }
    }
}

/* The first four bytes are the size of the file; what the input does not fill is zero. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    uint32_t file_size;
    if (fd < 0)
        file_create();
    fuzz_eat(&input, &file_size, sizeof file_size);
    file_size %= FILE_SIZE_MAX;
    FUZZ_CHECK(ftruncate(fd, 0) == 0 && ftruncate(fd, file_size) == 0);
    size_t count = input.size < file_size ? input.size : file_size;
    if (count)
        FUZZ_CHECK(pwrite(fd, input.bytes, count, 0) == (ssize_t)count);
    struct cox_control control = COX_CONTROL_NONE;
    struct cox_error err = {0};
    int r = cox_control_attach(&control, name, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_VERSION);
        FUZZ_CHECK(!control.region.base && !control.layout);
        return 0;
    }
    geometry_trusted(&control);
    cox_control_close(&control);
    return 0;
}
