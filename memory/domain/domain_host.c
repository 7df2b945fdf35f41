/* domain_host: a sealed memfd that every process maps. */
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/memory/host_memory.h"
#include "channel/shm/region.h"
#include "domain_table.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SEALS ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))
#define LABEL "cox_blocks"

struct host_memory {
    struct cox_domain_memory memory;
    struct cox_region region;
    int fd;
};

static struct host_memory *host_of(struct cox_domain_memory *memory)
{
    return (struct host_memory *)memory;
}

/* ---- create, attach, destroy ---- */

static void host_destroy(struct cox_domain_memory *memory)
{
    struct host_memory *host = host_of(memory);
    cox_region_detach(&host->region);
    cox_close_fd(&host->fd);
    free(host);
}

static void host_drop(struct host_memory **host)
{
    if (*host)
        host_destroy(&(*host)->memory);
}

static struct host_memory *host_alloc(struct cox_error *err)
{
    struct host_memory *host = calloc(1, sizeof *host);
    if (host)
        host->fd = -1;
    else
        cox_fail(err, -ENOMEM, "host memory: %s", cox_status_text(-ENOMEM));
    return host;
}

/* Gives the object to the caller. */
static struct cox_domain_memory *host_give(struct host_memory **owned, uint64_t size, bool writable)
{
    struct host_memory *host = cox_steal_ptr(owned);
    host->memory = (struct cox_domain_memory){.functions = &cox_domain_host_functions,
                                              .size = size,
                                              .fd = host->fd,
                                              .address = host->region.base,
                                              .writable = writable};
    return &host->memory;
}

static int host_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                       struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)context;
    (void)device;
    int r = cox_host_memory_check_size(size, on_demand, err);
    if (r)
        return r;
    _cox_cleanup_(host_drop) struct host_memory *host = host_alloc(err);
    if (!host)
        return -ENOMEM;
    /* Not on huge pages: see cox_host_memory_check_fd. */
    if (!on_demand)
        r = cox_region_create_unnamed(&host->region, LABEL, size, SEALS, false, &host->fd, err);
    else if ((r = cox_region_create_unnamed_sparse(LABEL, size, SEALS | F_SEAL_SEAL, &host->fd,
                                                   err)) == 0)
        r = cox_region_map(&host->region, host->fd, size, COX_REGION_WRITE, LABEL, err);
    if (r == 0)
        *ret_memory = host_give(&host, size, true);
    return r;
}

static int host_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                       struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)context;
    (void)device;
    int r = cox_host_memory_check_fd(fd, size, writable, err);
    if (r)
        return r;
    _cox_cleanup_(host_drop) struct host_memory *host = host_alloc(err);
    if (!host)
        return -ENOMEM;
    host->fd = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (host->fd < 0)
        return cox_fail(err, -errno, "host memory: dup: %s", cox_status_text(-errno));
    r = cox_region_map(&host->region, host->fd, size, writable ? COX_REGION_WRITE : COX_REGION_READ,
                       LABEL, err);
    if (r == 0)
        *ret_memory = host_give(&host, size, writable);
    return r;
}

/* ---- bytes ---- */

static int host_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                        size_t size, struct cox_error *err)
{
    (void)err;
    memcpy((uint8_t *)memory->address + offset, host, size);
    return 0;
}

static int host_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                          size_t size, struct cox_error *err)
{
    (void)err;
    memcpy(host, (const uint8_t *)memory->address + offset, size);
    return 0;
}

int cox_domain_host_commit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                           struct cox_error *err)
{
    int r = cox_host_memory_check_free(size, err), e;
    if (r)
        return r;
    do
        e = posix_fallocate(memory->fd, (off_t)offset, (off_t)size);
    while (e == EINTR);
    cox_fault_point(COX_FAULT_DOMAIN_COMMITTED);
    if (e == 0)
        return 0;
    return cox_fail(err, e == ENOSPC || e == ENOMEM ? COX_NO_SPACE : -e,
                    "reserving %" PRIu64 " bytes of %s memory: %s", size, memory->functions->name,
                    cox_status_text(-e));
}

/* A failure is harmless: destroy releases the pages. */
void cox_domain_host_decommit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size)
{
    int r;
    do
        r = fallocate(memory->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                      (off_t)size);
    while (r < 0 && errno == EINTR);
    cox_fault_point(COX_FAULT_DOMAIN_RETURNED);
}

const struct cox_domain_functions cox_domain_host_functions = {
    .name = "host",
    .create = host_create,
    .attach = host_attach,
    .destroy = host_destroy,
    .copy_to = host_copy_to,
    .copy_from = host_copy_from,
    .commit = cox_domain_host_commit,
    .decommit = cox_domain_host_decommit,
};
