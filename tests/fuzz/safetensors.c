/* A .safetensors file of any bytes: refused, or every tensor of a known name can be asked for. */
#include "fuzz.h"

#include "engine/model/safetensors.h"

#define ELEMENT_COUNT_MAX 64

static void read_all(const struct cox_safetensors *file)
{
    static const char *const names[] = {"a", "b", "w", "model.norm.weight", ""};
    static const uint64_t shapes[][2] = {{1, 1}, {2, 2}, {4, 1}, {2, 3}, {8, 8}, {0, 1}};
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (size_t dimensions = 1; dimensions <= 2; dimensions++) {
                uint64_t count = 1;
                for (size_t d = 0; d < dimensions; d++)
                    count *= shapes[s][d];
                float *buffer = malloc(count ? count * sizeof *buffer : 1);
                FUZZ_CHECK(buffer && count <= ELEMENT_COUNT_MAX);
                struct cox_error err = {0};
                int r = cox_safetensors_read(file, names[n], shapes[s], dimensions, buffer, &err);
                if (r) {
                    fuzz_check_error(r, &err);
                    FUZZ_CHECK(r == COX_INVALID || r == COX_NOT_FOUND);
                    FUZZ_CHECK((r == COX_NOT_FOUND) == !cox_safetensors_has(file, names[n]));
                } else {
                    FUZZ_CHECK(cox_safetensors_has(file, names[n]));
                    fuzz_touch(buffer, count * sizeof *buffer);
                }
                free(buffer);
            }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("safetensors", MFD_CLOEXEC);
        FUZZ_CHECK(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    FUZZ_CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    struct cox_safetensors *file = NULL;
    struct cox_error err = {0};
    int r = cox_safetensors_new(path, &file, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_TOO_LARGE);
        FUZZ_CHECK(!file);
        return 0;
    }
    FUZZ_CHECK(cox_safetensors_count(file) <= size);
    read_all(file);
    cox_safetensors_free(file);
    return 0;
}
