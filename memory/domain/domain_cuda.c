#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "cuda_driver.h"
#include "domain_table.h"

#include <coxswain/memory/domain_cuda.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DRIVER "libcuda.so.1"

/* Context of the domain: the driver, in the process that started it. */
struct cuda {
    struct cox_cuda_driver driver;
    pid_t pid;
    uint32_t device_count;
    cox_cuda_device devices[COX_DOMAIN_COUNT_MAX];
};

struct cuda_memory {
    struct cox_domain_memory memory;
    const struct cuda *cuda;
    /* number in cuda->devices */
    uint32_t device;
    /* retained; NULL: not yet */
    cox_cuda_context context;
    /* size rounded up to the device's granularity */
    size_t rounded;
    /* reserved addresses; 0: none */
    cox_cuda_pointer base;
    bool mapped;
    int fd;
};

static const struct cox_domain_functions cuda_functions;

static struct cuda_memory *cuda_of(struct cox_domain_memory *memory)
{
    return (struct cuda_memory *)memory;
}

/* code: returned unless the result has a better one. COX_CORRUPT also where the driver calls the
 * import "not supported", as some do a size too large: find_devices has checked that imports are. */
static int fail_as(const struct cuda_memory *memory, cox_cuda_result result, int code,
                   const char *what, struct cox_error *err)
{
    char text[256];
    snprintf(text, sizeof text, "CUDA device %" PRIu32 ": %s", memory->device, what);
    return cox_cuda_fail(&memory->cuda->driver, result, code, text, err);
}

static int fail(const struct cuda_memory *memory, cox_cuda_result result, const char *what,
                struct cox_error *err)
{
    return fail_as(memory, result, -EIO, what, err);
}

/* ---- the context ---- */

static int enter(const struct cuda_memory *memory, struct cox_error *err)
{
    if (memory->cuda->pid != getpid())
        return cox_fail(err, COX_STATE, "CUDA memory of process %d: a fork's child cannot use it",
                        (int)memory->cuda->pid);
    cox_cuda_result result = memory->cuda->driver.context_push(memory->context);
    return result ? fail(memory, result, "making its context the current one", err) : 0;
}

/* Restores the thread's previous context. */
static void leave(const struct cuda_memory *memory)
{
    cox_cuda_context context;
    memory->cuda->driver.context_pop(&context);
}

/* ---- create, attach, destroy ---- */

static void cuda_destroy(struct cox_domain_memory *base)
{
    struct cuda_memory *memory = cuda_of(base);
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    if (memory->context && memory->cuda->pid == getpid()) {
        /* Continues on failure: the calls below may not need a current context. */
        bool entered = enter(memory, NULL) == 0;
        if (memory->mapped)
            driver->unmap(memory->base, memory->rounded);
        if (memory->base)
            driver->unreserve(memory->base, memory->rounded);
        if (entered)
            leave(memory);
        driver->context_release(memory->cuda->devices[memory->device]);
    }
    cox_close_fd(&memory->fd);
    free(memory);
}

static void cuda_drop(struct cuda_memory **memory)
{
    if (*memory)
        cuda_destroy(&(*memory)->memory);
}

static struct cox_cuda_properties properties_of(const struct cuda_memory *memory)
{
    return (struct cox_cuda_properties){
        .type = COX_CUDA_ALLOCATION_PINNED,
        .handle_types = COX_CUDA_HANDLE_FD,
        .location = {COX_CUDA_LOCATION_DEVICE, memory->cuda->devices[memory->device]}};
}

/* Common to create and attach, which must agree on the mapped size: a memory object with its
 * context. */
static int cuda_begin(const struct cuda *cuda, uint32_t device, uint64_t size,
                      struct cuda_memory **ret_memory, struct cox_error *err)
{
    if (size == 0)
        return cox_fail(err, COX_INVALID, "CUDA memory of 0 bytes");
    if (cuda->pid != getpid())
        return cox_fail(err, COX_STATE, "CUDA was started in process %d: not for a fork's child",
                        (int)cuda->pid);
    _cox_cleanup_(cuda_drop) struct cuda_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return cox_fail(err, -ENOMEM, "CUDA memory: %s", cox_status_text(-ENOMEM));
    memory->cuda = cuda;
    memory->device = device;
    memory->fd = -1;
    cox_cuda_context context;
    cox_cuda_result result = cuda->driver.context_retain(&context, cuda->devices[device]);
    if (result)
        return fail(memory, result, "its primary context", err);
    memory->context = context;
    struct cox_cuda_properties properties = properties_of(memory);
    size_t unit = 0;
    result = cuda->driver.granularity(&unit, &properties, COX_CUDA_GRANULARITY_MINIMUM);
    if (result)
        return fail(memory, result, "unit of allocation", err);
    if (unit == 0 || size > SIZE_MAX - (unit - 1))
        return cox_fail(err, COX_NO_SPACE,
                        "CUDA memory of %" PRIu64 " bytes in units of %zu: too large", size, unit);
    memory->rounded = ((size_t)size + unit - 1) / unit * unit;
    *ret_memory = cox_steal_ptr(&memory);
    return 0;
}

static int set_access(const struct cuda_memory *memory, bool writable)
{
    struct cox_cuda_access access = {
        .location = {COX_CUDA_LOCATION_DEVICE, memory->cuda->devices[memory->device]},
        .flags = writable ? COX_CUDA_ACCESS_READ_WRITE : COX_CUDA_ACCESS_READ};
    return memory->cuda->driver.set_access(memory->base, memory->rounded, &access, 1);
}

/* With the context current. The mapping keeps the allocation alive; on failure destroy undoes what
 * was done. */
static int cuda_map(struct cuda_memory *memory, cox_cuda_allocation allocation, bool writable,
                    struct cox_error *err)
{
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    cox_cuda_pointer base;
    cox_cuda_result result = driver->reserve(&base, memory->rounded, 0, 0, 0);
    if (result)
        return fail(memory, result, "reserving addresses", err);
    memory->base = base;
    result = driver->map(base, memory->rounded, 0, allocation, 0);
    if (result)
        return fail_as(memory, result, COX_CORRUPT,
                       "mapping memory, perhaps smaller than it is said to be", err);
    memory->mapped = true;
    result = set_access(memory, writable);
    /* Some devices have no read-only mappings; the copy functions then refuse to write. */
    if (result == COX_CUDA_NOT_SUPPORTED && !writable)
        result = set_access(memory, true);
    return result ? fail(memory, result, "access to mapped memory", err) : 0;
}

/* Gives the object to the caller. */
static struct cox_domain_memory *cuda_give(struct cuda_memory **owned, uint64_t size, bool writable)
{
    struct cuda_memory *memory = cox_steal_ptr(owned);
    memory->memory = (struct cox_domain_memory){.functions = &cuda_functions,
                                                .size = size,
                                                .fd = memory->fd,
                                                .device_address = memory->base,
                                                .writable = writable};
    return &memory->memory;
}

static int cuda_export(struct cuda_memory *memory, cox_cuda_allocation allocation,
                       struct cox_error *err)
{
    int fd = -1;
    cox_cuda_result result = memory->cuda->driver.export_fd(&fd, allocation, COX_CUDA_HANDLE_FD, 0);
    if (result)
        return fail(memory, result, "exporting memory as an fd", err);
    memory->fd = fd;
    int r = cox_fd_raise(&memory->fd);
    if (r == 0 && fcntl(memory->fd, F_SETFD, FD_CLOEXEC) < 0)
        r = -errno;
    return r ? cox_fail(err, r, "fd of CUDA memory: %s", cox_status_text(r)) : 0;
}

static int cuda_zero(const struct cuda_memory *memory, struct cox_error *err)
{
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    cox_cuda_result result = driver->set_bytes(memory->base, 0, memory->rounded);
    if (result == COX_CUDA_SUCCESS)
        result = driver->stream_wait(NULL);
    return result ? fail(memory, result, "filling memory with zeros", err) : 0;
}

static int cuda_fail_create(const struct cuda_memory *memory, cox_cuda_result result,
                            struct cox_error *err)
{
    char text[128];
    size_t free_size = 0, total = 0;
    memory->cuda->driver.memory_info(&free_size, &total);
    snprintf(text, sizeof text, "%zu bytes of memory are needed, %zu are free of %zu",
             memory->rounded, free_size, total);
    return fail(memory, result, text, err);
}

/* Ignores on_demand: all is allocated now. */
static int cuda_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                       struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)on_demand;
    _cox_cleanup_(cuda_drop) struct cuda_memory *memory = NULL;
    int r = cuda_begin(context, device, size, &memory, err);
    if (r == 0)
        r = enter(memory, err);
    if (r)
        return r;
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    struct cox_cuda_properties properties = properties_of(memory);
    cox_cuda_allocation allocation;
    cox_cuda_result result = driver->create(&allocation, memory->rounded, &properties, 0);
    if (result) {
        r = cuda_fail_create(memory, result, err);
    } else {
        r = cuda_export(memory, allocation, err);
        if (r == 0)
            r = cuda_map(memory, allocation, true, err);
        if (r == 0)
            r = cuda_zero(memory, err);
        driver->release(allocation);
    }
    leave(memory);
    if (r == 0)
        *ret_memory = cuda_give(&memory, size, true);
    return r;
}

static int cuda_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                       struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    _cox_cleanup_(cuda_drop) struct cuda_memory *memory = NULL;
    int r = cuda_begin(context, device, size, &memory, err);
    if (r)
        return r;
    memory->fd = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (memory->fd < 0)
        return cox_fail(err, -errno, "CUDA memory: dup: %s", cox_status_text(-errno));
    r = enter(memory, err);
    if (r)
        return r;
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    cox_cuda_allocation allocation;
    cox_cuda_result result =
        driver->import_fd(&allocation, (void *)(intptr_t)memory->fd, COX_CUDA_HANDLE_FD);
    if (result) {
        r = fail_as(memory, result, COX_CORRUPT, "importing memory from an fd", err);
    } else {
        r = cuda_map(memory, allocation, writable, err);
        driver->release(allocation);
    }
    leave(memory);
    if (r == 0)
        *ret_memory = cuda_give(&memory, size, writable);
    return r;
}

/* ---- bytes ---- */

/* Copies to and within a device are asynchronous: waits until the bytes are there. */
static int copy_finish(const struct cuda_memory *memory, cox_cuda_result result, const char *what,
                       struct cox_error *err)
{
    if (result == COX_CUDA_SUCCESS)
        result = memory->cuda->driver.stream_wait(NULL);
    leave(memory);
    return result ? fail(memory, result, what, err) : 0;
}

static int cuda_copy_to(struct cox_domain_memory *base, uint64_t offset, const void *host,
                        size_t size, struct cox_error *err)
{
    const struct cuda_memory *memory = cuda_of(base);
    int r = enter(memory, err);
    return r ? r
             : copy_finish(memory,
                           memory->cuda->driver.copy_to_device(memory->base + offset, host, size),
                           "copying to the device", err);
}

static int cuda_copy_from(struct cox_domain_memory *base, uint64_t offset, void *host, size_t size,
                          struct cox_error *err)
{
    const struct cuda_memory *memory = cuda_of(base);
    int r = enter(memory, err);
    return r ? r
             : copy_finish(memory,
                           memory->cuda->driver.copy_to_host(host, memory->base + offset, size),
                           "copying from the device", err);
}

static int cuda_copy(struct cox_domain_memory *to_base, uint64_t to_offset,
                     struct cox_domain_memory *from_base, uint64_t from_offset, size_t size,
                     struct cox_error *err)
{
    const struct cuda_memory *to = cuda_of(to_base), *from = cuda_of(from_base);
    /* A memory is mapped on its own device only. */
    if (to->cuda != from->cuda || to->device != from->device)
        return COX_UNSUPPORTED;
    int r = enter(to, err);
    return r ? r
             : copy_finish(to,
                           to->cuda->driver.copy_in_device(to->base + to_offset,
                                                           from->base + from_offset, size),
                           "copying within the device", err);
}

/* ---- a copy of this process's own ---- */

/* With the context current, and all work on the device done. */
static int cuda_replace(struct cuda_memory *memory, cox_cuda_allocation allocation,
                        struct cox_error *err)
{
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    cox_cuda_result result = driver->unmap(memory->base, memory->rounded);
    if (result)
        return fail(memory, result, "unmapping shared memory", err);
    memory->mapped = false;
    result = driver->map(memory->base, memory->rounded, 0, allocation, 0);
    if (result)
        return fail(memory, result, "mapping a copy of shared memory", err);
    memory->mapped = true;
    result = set_access(memory, true);
    return result ? fail(memory, result, "access to a copy of shared memory", err) : 0;
}

/* With the context current. copy: memory without a mapping, of the same size and device; its
 * mapping serves to fill the allocation. */
static int cuda_copy_all(struct cuda_memory *memory, struct cuda_memory *copy,
                         struct cox_error *err)
{
    const struct cox_cuda_driver *driver = &memory->cuda->driver;
    const struct cox_cuda_properties properties = properties_of(memory);
    cox_cuda_allocation allocation;
    cox_cuda_result result = driver->create(&allocation, memory->rounded, &properties, 0);
    if (result)
        return cuda_fail_create(memory, result, err);
    int r = cuda_map(copy, allocation, true, err);
    if (r == 0) {
        result = driver->copy_in_device(copy->base, memory->base, memory->rounded);
        if (result == COX_CUDA_SUCCESS)
            result = driver->context_wait();
        r = result ? fail(memory, result, "copying shared memory", err)
                   : cuda_replace(memory, allocation, err);
    }
    driver->release(allocation);
    return r;
}

int cox_domain_cuda_make_private(struct cox_domain_memory *base, struct cox_error *err)
{
    struct cuda_memory *memory = cuda_of(base);
    _cox_cleanup_(cuda_drop) struct cuda_memory *copy = NULL;
    COX_ASSERT(base->functions == &cuda_functions);
    int r = cuda_begin(memory->cuda, memory->device, base->size, &copy, err);
    if (r == 0)
        r = enter(memory, err);
    if (r)
        return r;
    r = cuda_copy_all(memory, copy, err);
    leave(memory);
    if (r == 0) {
        base->writable = true;
        base->fd = -1;
        cox_close_fd(&memory->fd);
    }
    return r;
}

static const struct cox_domain_functions cuda_functions = {
    .name = "CUDA",
    .create = cuda_create,
    .attach = cuda_attach,
    .destroy = cuda_destroy,
    .copy_to = cuda_copy_to,
    .copy_from = cuda_copy_from,
    .copy = cuda_copy,
};

/* ---- the driver ---- */

static void cuda_free(void *context)
{
    struct cuda *cuda = context;
    cox_cuda_driver_close(&cuda->driver);
    free(cuda);
}

static void cuda_freep(struct cuda **cuda)
{
    if (*cuda)
        cuda_free(*cuda);
}

static int check_device(const struct cuda *cuda, uint32_t number, int attribute, const char *what,
                        struct cox_error *err)
{
    int value = 0;
    cox_cuda_result result =
        cuda->driver.device_attribute(&value, attribute, cuda->devices[number]);
    if (result == COX_CUDA_SUCCESS && value)
        return 0;
    return cox_fail(err, COX_UNSUPPORTED, "CUDA device %" PRIu32 " has no %s", number, what);
}

static int find_devices(struct cuda *cuda, struct cox_error *err)
{
    int count = 0;
    cox_cuda_result result = cuda->driver.device_count(&count);
    if (result || count <= 0)
        return cox_fail(err, COX_UNSUPPORTED, "the CUDA driver has no device (%d)", result);
    if (count > COX_DOMAIN_COUNT_MAX)
        return cox_fail(err, COX_FULL, "%d CUDA devices: at most %d domains", count,
                        COX_DOMAIN_COUNT_MAX);
    cuda->device_count = (uint32_t)count;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < cuda->device_count; i++) {
        result = cuda->driver.device_get(&cuda->devices[i], (int)i);
        if (result)
            return cox_fail(err, COX_UNSUPPORTED, "CUDA device %" PRIu32 " does not reply (%d)", i,
                            result);
        r = check_device(cuda, i, COX_CUDA_ATTRIBUTE_VIRTUAL_MEMORY, "virtual memory management",
                         err);
        if (r == 0)
            r = check_device(cuda, i, COX_CUDA_ATTRIBUTE_FD_HANDLES,
                             "memory that is exported as an fd", err);
    }
    return r;
}

int cox_domain_cuda_uuid(const struct cox_domains *domains, uint32_t device, uint8_t ret_uuid[16],
                         struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    struct cox_cuda_uuid uuid;
    void *context;
    int r = cox_domains_find(domains, (struct cox_domain_id){COX_DOMAIN_CUDA, device}, &functions,
                             &context, err);
    if (r)
        return r;
    const struct cuda *cuda = context;
    cox_cuda_result result = cuda->driver.device_uuid(&uuid, cuda->devices[device]);
    if (result)
        return cox_cuda_fail(&cuda->driver, result, -EIO, "the name of a CUDA device", err);
    memcpy(ret_uuid, uuid.bytes, sizeof uuid.bytes);
    return 0;
}

int cox_domains_add_cuda_library(struct cox_domains *domains, const char *library,
                                 struct cox_error *err)
{
    _cox_cleanup_(cuda_freep) struct cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return cox_fail(err, -ENOMEM, "CUDA: %s", cox_status_text(-ENOMEM));
    cuda->pid = getpid();
    int r = cox_cuda_driver_open(&cuda->driver, library, err);
    if (r == 0)
        r = find_devices(cuda, err);
    if (r == 0)
        r = cox_domains_add_builtin(domains, COX_DOMAIN_CUDA, cuda->device_count, &cuda_functions,
                                    cuda, cuda_free, err);
    if (r == 0)
        cuda = NULL; /* owned by the table */
    return r;
}

int cox_domains_add_cuda(struct cox_domains *domains, struct cox_error *err)
{
    return cox_domains_add_cuda_library(domains, DRIVER, err);
}
