/* Memory of CUDA devices, by the CUDA domain of memory/domain. */
#include "native.h"

#include "memory/domain/domain_table.h"

#include <coxswain/memory/domain_cuda.h>

static struct cox_domain_id cuda(uint32_t device)
{
    return (struct cox_domain_id){COX_DOMAIN_CUDA, device};
}

int coxpy_devices_new(const char *library, struct cox_domains **ret_devices, struct cox_error *err)
{
    struct cox_domains *devices;
    int r = cox_domains_new(&devices);
    if (r)
        return r;
    r = library ? cox_domains_add_cuda_library(devices, library, err)
                : cox_domains_add_cuda(devices, err);
    if (r)
        cox_domains_free(devices);
    else
        *ret_devices = devices;
    return r;
}

int coxpy_device_memory_create(const struct cox_domains *devices, uint32_t device, uint64_t size,
                               struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    int r = cox_domains_find(devices, cuda(device), &functions, &context, err);
    return r ? r : functions->create(context, device, size, false, ret_memory, err);
}

int coxpy_device_memory_attach(const struct cox_domains *devices, uint32_t device, int fd,
                               uint64_t size, struct cox_domain_memory **ret_memory,
                               struct cox_error *err)
{
    const struct cox_domain_functions *functions;
    void *context;
    int r = cox_domains_find(devices, cuda(device), &functions, &context, err);
    return r ? r : functions->attach(context, device, fd, size, false, ret_memory, err);
}

void coxpy_device_memory_free(struct cox_domain_memory *memory)
{
    memory->functions->destroy(memory);
}
