/*
 * cuda_driver: the few functions of the CUDA driver API that domain_cuda needs, looked up at run
 * time.
 *
 * Types and numbers are those of the API (since version 11.4), declared here so that building needs
 * no CUDA headers.
 *
 * Threads: open and close from one thread; the driver's functions from any.
 * Ownership: the caller owns struct cox_cuda_driver. Close does not unload the driver, whose
 *   threads keep running.
 * Blocks: as the driver does.
 * If the process dies: the driver cleans up.
 */
#ifndef COX_MEMORY_CUDA_DRIVER_H
#define COX_MEMORY_CUDA_DRIVER_H

#include <coxswain/base.h>

enum {
    COX_CUDA_SUCCESS = 0,
    COX_CUDA_OUT_OF_MEMORY = 2,
    COX_CUDA_NOT_PERMITTED = 800,
    COX_CUDA_NOT_SUPPORTED = 801,

    COX_CUDA_ATTRIBUTE_VIRTUAL_MEMORY = 102,
    COX_CUDA_ATTRIBUTE_FD_HANDLES = 103,

    COX_CUDA_ALLOCATION_PINNED = 1,
    COX_CUDA_HANDLE_FD = 1,
    COX_CUDA_LOCATION_DEVICE = 1,
    COX_CUDA_GRANULARITY_MINIMUM = 0,
    COX_CUDA_ACCESS_READ = 1,
    COX_CUDA_ACCESS_READ_WRITE = 3,
};

typedef int cox_cuda_result;
typedef int cox_cuda_device;
typedef struct cox_cuda_context_opaque *cox_cuda_context;
typedef struct cox_cuda_stream_opaque *cox_cuda_stream;
typedef unsigned long long cox_cuda_pointer;
typedef unsigned long long cox_cuda_allocation;

struct cox_cuda_location {
    int type;
    int id;
};

struct cox_cuda_properties {
    int type;
    int handle_types;
    struct cox_cuda_location location;
    void *win32;
    struct {
        unsigned char compression;
        unsigned char rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct cox_cuda_uuid {
    unsigned char bytes[16];
};

struct cox_cuda_access {
    struct cox_cuda_location location;
    int flags;
};

/* X(field, symbol, parameters) */
#define COX_CUDA_FUNCTIONS(X)                                                                      \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(error_name, "cuGetErrorName", (cox_cuda_result result, const char **ret_text))               \
    X(error_string, "cuGetErrorString", (cox_cuda_result result, const char **ret_text))           \
    X(device_count, "cuDeviceGetCount", (int *ret_count))                                          \
    X(device_get, "cuDeviceGet", (cox_cuda_device * ret_device, int number))                       \
    X(device_attribute, "cuDeviceGetAttribute",                                                    \
      (int *ret_value, int attribute, cox_cuda_device device))                                     \
    X(device_uuid, "cuDeviceGetUuid_v2",                                                           \
      (struct cox_cuda_uuid * ret_uuid, cox_cuda_device device))                                   \
    X(context_retain, "cuDevicePrimaryCtxRetain",                                                  \
      (cox_cuda_context * ret_context, cox_cuda_device device))                                    \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (cox_cuda_device device))                   \
    X(context_push, "cuCtxPushCurrent_v2", (cox_cuda_context context))                             \
    X(context_pop, "cuCtxPopCurrent_v2", (cox_cuda_context * ret_context))                         \
    X(context_wait, "cuCtxSynchronize", (void))                                                    \
    X(stream_wait, "cuStreamSynchronize", (cox_cuda_stream stream))                                \
    X(memory_info, "cuMemGetInfo_v2", (size_t * ret_free, size_t * ret_total))                     \
    X(granularity, "cuMemGetAllocationGranularity",                                                \
      (size_t * ret_granularity, const struct cox_cuda_properties *properties, int option))        \
    X(create, "cuMemCreate",                                                                       \
      (cox_cuda_allocation * ret_allocation, size_t size,                                          \
       const struct cox_cuda_properties *properties, unsigned long long flags))                    \
    X(release, "cuMemRelease", (cox_cuda_allocation allocation))                                   \
    X(export_fd, "cuMemExportToShareableHandle",                                                   \
      (void *ret_handle, cox_cuda_allocation allocation, int handle_type,                          \
       unsigned long long flags))                                                                  \
    X(import_fd, "cuMemImportFromShareableHandle",                                                 \
      (cox_cuda_allocation * ret_allocation, void *handle, int handle_type))                       \
    X(reserve, "cuMemAddressReserve",                                                              \
      (cox_cuda_pointer * ret_pointer, size_t size, size_t alignment, cox_cuda_pointer address,    \
       unsigned long long flags))                                                                  \
    X(unreserve, "cuMemAddressFree", (cox_cuda_pointer pointer, size_t size))                      \
    X(map, "cuMemMap",                                                                             \
      (cox_cuda_pointer pointer, size_t size, size_t offset, cox_cuda_allocation allocation,       \
       unsigned long long flags))                                                                  \
    X(unmap, "cuMemUnmap", (cox_cuda_pointer pointer, size_t size))                                \
    X(set_access, "cuMemSetAccess",                                                                \
      (cox_cuda_pointer pointer, size_t size, const struct cox_cuda_access *access, size_t count)) \
    X(set_bytes, "cuMemsetD8_v2", (cox_cuda_pointer pointer, unsigned char value, size_t size))    \
    X(copy_to_device, "cuMemcpyHtoD_v2", (cox_cuda_pointer to, const void *from, size_t size))     \
    X(copy_to_host, "cuMemcpyDtoH_v2", (void *to, cox_cuda_pointer from, size_t size))             \
    X(copy_in_device, "cuMemcpyDtoD_v2", (cox_cuda_pointer to, cox_cuda_pointer from, size_t size))

struct cox_cuda_driver {
    /* NULL: closed */
    void *library;
#define COX_CUDA_FIELD(field, symbol, parameters) cox_cuda_result(*field) parameters;
    COX_CUDA_FUNCTIONS(COX_CUDA_FIELD)
#undef COX_CUDA_FIELD
};

/* Opens and initializes the driver. Returns 0; COX_UNSUPPORTED: err has the reason; COX_NO_SPACE,
 * COX_DENIED: it does not start. */
int cox_cuda_driver_open(struct cox_cuda_driver *driver, const char *library,
                         struct cox_error *err);
void cox_cuda_driver_close(struct cox_cuda_driver *driver); /* idempotent */

/* Fills err with the attempted step and the result. Returns COX_NO_SPACE or COX_DENIED if the
 * result means that, COX_UNSUPPORTED if it means that and code is -EIO, else code. */
int cox_cuda_fail(const struct cox_cuda_driver *driver, cox_cuda_result result, int code,
                  const char *what, struct cox_error *err);

#endif
