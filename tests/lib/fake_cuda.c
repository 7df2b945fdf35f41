#include "fake_cuda.h"

#include "memory/domain/cuda_driver.h"
#include "tests/lib/posix.h"

#define EXPORT __attribute__((visibility("default")))
#define DEVICE_COUNT 4
#define PLACES 64
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

enum {
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
};

/* Addresses that were reserved. */
struct place {
    /* NULL: free */
    uint8_t *base;
    size_t size;
    bool mapped;
    bool readable, writable;
    /* that may */
    int device;
};

/* A copy that has returned and is not done. */
struct pending {
    struct pending *next;
    uint8_t *to;
    size_t size;
    uint8_t bytes[];
};

static struct fake_cuda state = {.device_count = 2, .virtual_memory = 1, .fd_handles = 1};
static struct place places[PLACES];
static struct pending *pending;
static bool started;
static _Thread_local int stack[16];

EXPORT struct fake_cuda *fake_cuda(void);
EXPORT struct fake_cuda *fake_cuda(void)
{
    return &state;
}

static bool fails(const char *name)
{
    if (state.fail_name && strcmp(state.fail_name, name) != 0)
        return false;
    state.calls++;
    if (state.fail_call == 0 || state.calls != state.fail_call)
        return false;
    state.failed = name;
    return true;
}
#define MAY_FAIL()                                                                                 \
    do {                                                                                           \
        if (fails(__func__))                                                                       \
            return state.fail_result;                                                              \
    } while (0)
#define NEEDS_CONTEXT()                                                                            \
    do {                                                                                           \
        if (state.depth == 0)                                                                      \
            return INVALID_CONTEXT;                                                                \
    } while (0)

#define FAKE(name, ...)                                                                            \
    EXPORT cox_cuda_result name(__VA_ARGS__);                                                      \
    EXPORT cox_cuda_result name(__VA_ARGS__)

/* ---- the driver ---- */

FAKE(cuInit, unsigned flags)
{
    MAY_FAIL();
    started = true;
    return flags ? INVALID_VALUE : 0;
}

FAKE(cuGetErrorName, cox_cuda_result result, const char **ret_text)
{
    *ret_text = result == COX_CUDA_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return 0;
}

/* Some errors have no text. */
FAKE(cuGetErrorString, cox_cuda_result result, const char **ret_text)
{
    *ret_text = result == COX_CUDA_OUT_OF_MEMORY ? "out of memory" : NULL;
    return *ret_text ? 0 : INVALID_VALUE;
}

FAKE(cuDeviceGetCount, int *ret_count)
{
    MAY_FAIL();
    *ret_count = state.device_count;
    return started ? 0 : NOT_INITIALIZED;
}

/* Devices have other numbers than their place. */
FAKE(cuDeviceGet, cox_cuda_device *ret_device, int number)
{
    MAY_FAIL();
    *ret_device = number + 10;
    return number < state.device_count ? 0 : NO_DEVICE;
}

FAKE(cuDeviceGetAttribute, int *ret_value, int attribute, cox_cuda_device device)
{
    MAY_FAIL();
    *ret_value = attribute == 102 ? state.virtual_memory : attribute == 103 ? state.fd_handles : 0;
    return device >= 10 ? 0 : NO_DEVICE;
}

FAKE(cuDeviceGetUuid_v2, struct cox_cuda_uuid *ret_uuid, cox_cuda_device device)
{
    MAY_FAIL();
    memset(ret_uuid->bytes, device, sizeof ret_uuid->bytes);
    return device >= 10 ? 0 : NO_DEVICE;
}

/* ---- contexts ---- */

FAKE(cuDevicePrimaryCtxRetain, cox_cuda_context *ret_context, cox_cuda_device device)
{
    MAY_FAIL();
    state.contexts++;
    *ret_context = (cox_cuda_context)(intptr_t)(device + 1000);
    return 0;
}

FAKE(cuDevicePrimaryCtxRelease_v2, cox_cuda_device device)
{
    (void)device;
    state.contexts--;
    return 0;
}

FAKE(cuCtxPushCurrent_v2, cox_cuda_context context)
{
    MAY_FAIL();
    if (!context || state.depth == 16)
        return INVALID_CONTEXT;
    stack[state.depth++] = (int)(intptr_t)context;
    return 0;
}

FAKE(cuCtxPopCurrent_v2, cox_cuda_context *ret_context)
{
    NEEDS_CONTEXT();
    *ret_context = (cox_cuda_context)(intptr_t)stack[--state.depth];
    return 0;
}

FAKE(cuCtxGetCurrent, cox_cuda_context *ret_context)
{
    *ret_context = state.depth ? (cox_cuda_context)(intptr_t)stack[state.depth - 1] : NULL;
    return 0;
}

static int current_device(void)
{
    return stack[state.depth - 1] - 1000;
}

/* ---- memory ---- */

FAKE(cuMemGetInfo_v2, size_t *ret_free, size_t *ret_total)
{
    NEEDS_CONTEXT();
    *ret_free = *ret_total = FAKE_CUDA_DEVICE_SIZE;
    return 0;
}

FAKE(cuMemGetAllocationGranularity, size_t *ret_size, const struct cox_cuda_properties *properties,
     int option)
{
    MAY_FAIL();
    *ret_size = FAKE_CUDA_UNIT;
    return properties->type == 1 && properties->location.type == 1 && option == 0 ? 0
                                                                                  : INVALID_VALUE;
}

/* A handle is the number of an fd. */
FAKE(cuMemCreate, cox_cuda_allocation *ret_allocation, size_t size,
     const struct cox_cuda_properties *properties, unsigned long long flags)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    if (size % FAKE_CUDA_UNIT || size == 0 || flags || properties->handle_types != 1 ||
        properties->location.id != current_device())
        return INVALID_VALUE;
    if (size > FAKE_CUDA_DEVICE_SIZE)
        return COX_CUDA_OUT_OF_MEMORY;
    int fd = memfd_create("fake_cuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    /* What is there at first is not zeros. */
    uint8_t *bytes = fd < 0 || ftruncate(fd, (off_t)size) < 0
                         ? MAP_FAILED
                         : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED)
        return COX_CUDA_OUT_OF_MEMORY;
    memset(bytes, 0xcd, size);
    munmap(bytes, size);
    if (fcntl(fd, F_ADD_SEALS, SEALS) < 0)
        return COX_CUDA_OUT_OF_MEMORY;
    state.allocations++;
    *ret_allocation = (cox_cuda_allocation)fd;
    return 0;
}

FAKE(cuMemRelease, cox_cuda_allocation allocation)
{
    state.allocations--;
    close((int)allocation);
    return 0;
}

/* At a low number, and kept by exec: what the driver gives is for us to put right. */
FAKE(cuMemExportToShareableHandle, void *ret_handle, cox_cuda_allocation allocation, int type,
     unsigned long long flags)
{
    MAY_FAIL();
    int fd = fcntl((int)allocation, F_DUPFD, 0);
    memcpy(ret_handle, &fd, sizeof fd);
    return fd < 0 || type != 1 || flags ? INVALID_VALUE : 0;
}

FAKE(cuMemImportFromShareableHandle, cox_cuda_allocation *ret_allocation, void *handle, int type)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    int fd = (int)(intptr_t)handle;
    if (type != 1 || fcntl(fd, F_GET_SEALS) != SEALS)
        return INVALID_HANDLE;
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        return INVALID_HANDLE;
    state.allocations++;
    *ret_allocation = (cox_cuda_allocation)fd;
    return 0;
}

static struct place *place_of(cox_cuda_pointer pointer, size_t size)
{
    uint8_t *base = (uint8_t *)(uintptr_t)pointer;
    for (size_t i = 0; i < PLACES; i++)
        if (places[i].base && base >= places[i].base &&
            base + size <= places[i].base + places[i].size)
            return &places[i];
    return NULL;
}

FAKE(cuMemAddressReserve, cox_cuda_pointer *ret_pointer, size_t size, size_t alignment,
     cox_cuda_pointer address, unsigned long long flags)
{
    MAY_FAIL();
    size_t i = 0;
    while (i < PLACES && places[i].base)
        i++;
    if (size % FAKE_CUDA_UNIT || alignment || address || flags || i == PLACES)
        return INVALID_VALUE;
    void *base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return COX_CUDA_OUT_OF_MEMORY;
    places[i] = (struct place){.base = base, .size = size};
    state.reservations++;
    *ret_pointer = (cox_cuda_pointer)(uintptr_t)base;
    return 0;
}

FAKE(cuMemAddressFree, cox_cuda_pointer pointer, size_t size)
{
    struct place *place = place_of(pointer, size);
    if (!place || place->size != size || place->mapped)
        return INVALID_VALUE;
    munmap(place->base, size);
    *place = (struct place){0};
    state.reservations--;
    return 0;
}

FAKE(cuMemMap, cox_cuda_pointer pointer, size_t size, size_t offset, cox_cuda_allocation allocation,
     unsigned long long flags)
{
    MAY_FAIL();
    struct place *place = place_of(pointer, size);
    struct stat st;
    if (!place || place->size != size || place->mapped || offset || flags ||
        fstat((int)allocation, &st) < 0)
        return INVALID_VALUE;
    if ((uint64_t)st.st_size < size)
        return COX_CUDA_NOT_SUPPORTED; /* as a driver on an H200 was seen to call it */
    if (mmap(place->base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation, 0) ==
        MAP_FAILED)
        return COX_CUDA_OUT_OF_MEMORY;
    place->mapped = true;
    state.mappings++;
    return 0;
}

FAKE(cuMemUnmap, cox_cuda_pointer pointer, size_t size)
{
    struct place *place = place_of(pointer, size);
    if (!place || !place->mapped)
        return INVALID_VALUE;
    mmap(place->base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    place->mapped = place->readable = place->writable = false;
    state.mappings--;
    return 0;
}

FAKE(cuMemSetAccess, cox_cuda_pointer pointer, size_t size, const struct cox_cuda_access *access,
     size_t count)
{
    MAY_FAIL();
    struct place *place = place_of(pointer, size);
    if (!place || !place->mapped || count != 1 || access->location.id != current_device() ||
        (access->flags != 1 && access->flags != 3))
        return INVALID_VALUE;
    place->readable = true;
    place->device = current_device();
    place->writable = access->flags == 3;
    mprotect(place->base, size, PROT_READ | (place->writable ? PROT_WRITE : 0));
    return 0;
}

/* ---- bytes ---- */

static cox_cuda_result later(cox_cuda_pointer to, const void *from, int value, size_t size)
{
    const struct place *place = place_of(to, size);
    struct pending *made = malloc(sizeof *made + size), **last = &pending;
    if (!made || !place || !place->writable || place->device != current_device()) {
        free(made);
        return INVALID_VALUE;
    }
    while (*last)
        last = &(*last)->next;
    made->next = NULL;
    made->to = (uint8_t *)(uintptr_t)to;
    made->size = size;
    if (from)
        memcpy(made->bytes, from, size);
    else
        memset(made->bytes, value, size);
    *last = made;
    return 0;
}

static void settle(void)
{
    while (pending) {
        struct pending *first = pending;
        memcpy(first->to, first->bytes, first->size);
        pending = first->next;
        free(first);
    }
}

FAKE(cuStreamSynchronize, cox_cuda_stream stream)
{
    state.waits++;
    settle();
    MAY_FAIL();
    NEEDS_CONTEXT();
    return stream ? INVALID_HANDLE : 0;
}

FAKE(cuCtxSynchronize, void)
{
    state.waits++;
    settle();
    MAY_FAIL();
    NEEDS_CONTEXT();
    return 0;
}

FAKE(cuMemsetD8_v2, cox_cuda_pointer pointer, unsigned char value, size_t size)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    return later(pointer, NULL, value, size);
}

FAKE(cuMemcpyHtoD_v2, cox_cuda_pointer to, const void *from, size_t size)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    return later(to, from, 0, size);
}

FAKE(cuMemcpyDtoH_v2, void *to, cox_cuda_pointer from, size_t size)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    const struct place *place = place_of(from, size);
    if (!place || !place->readable || place->device != current_device())
        return INVALID_VALUE;
    settle();
    memcpy(to, (const void *)(uintptr_t)from, size);
    return 0;
}

FAKE(cuMemcpyDtoD_v2, cox_cuda_pointer to, cox_cuda_pointer from, size_t size)
{
    MAY_FAIL();
    NEEDS_CONTEXT();
    const struct place *place = place_of(from, size);
    if (!place || !place->readable || place->device != current_device())
        return INVALID_VALUE;
    settle();
    return later(to, (const void *)(uintptr_t)from, 0, size);
}
