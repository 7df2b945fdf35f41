/*
 * domain_bounce: host memory that is never mapped, accessed by copies alone.
 *
 * The template for a domain of your own. Required: an object that starts with struct
 * cox_domain_memory; create and attach, which fill it in; destroy; copy_to and copy_from. Optional:
 * without copy, copies within the domain go through the host; without commit and decommit, create
 * allocates everything and may ignore on_demand.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/memory/host_memory.h"
#include "domain_table.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 0x0008u
#endif

/* No address, so that no caller accesses the bytes without the copy functions. */
static int bounce_new(int *fd, uint64_t size, bool writable, struct cox_domain_memory **ret_memory,
                      struct cox_error *err)
{
    struct cox_domain_memory *memory = calloc(1, sizeof *memory);
    if (!memory)
        return cox_fail(err, -ENOMEM, "bounce memory: %s", cox_status_text(-ENOMEM));
    *memory = (struct cox_domain_memory){.functions = &cox_domain_bounce_functions,
                                         .size = size,
                                         .fd = cox_steal_fd(fd),
                                         .writable = writable};
    *ret_memory = memory;
    return 0;
}

static void bounce_destroy(struct cox_domain_memory *memory)
{
    cox_close_fd(&memory->fd);
    free(memory);
}

/* Sets the size; allocates the pages, unless commit will. */
static int bounce_allocate(int fd, uint64_t size, bool on_demand)
{
    int e;
    do
        e = !on_demand                       ? posix_fallocate(fd, 0, (off_t)size)
            : ftruncate(fd, (off_t)size) < 0 ? errno
                                             : 0;
    while (e == EINTR);
    cox_fault_point(COX_FAULT_MEMORY_CREATED);
    return -e;
}

static int bounce_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                         struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)context;
    (void)device;
    int r = cox_host_memory_check_size(size, on_demand, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int fd =
        memfd_create("cox_bounce", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create("cox_bounce", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r == 0)
        r = bounce_allocate(fd, size, on_demand);
    if (r == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        r = -errno;
    if (r)
        return cox_fail(err, r == -ENOSPC || r == -ENOMEM ? COX_NO_SPACE : r,
                        "bounce memory of %" PRIu64 " bytes: %s", size, cox_status_text(r));
    return bounce_new(&fd, size, true, ret_memory, err);
}

static int bounce_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                         struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    (void)context;
    (void)device;
    int r = cox_host_memory_check_fd(fd, size, writable, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int own = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (own < 0)
        return cox_fail(err, -errno, "bounce memory: dup: %s", cox_status_text(-errno));
    return bounce_new(&own, size, writable, ret_memory, err);
}

static int bounce_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                          size_t size, struct cox_error *err)
{
    /* Beyond RLIMIT_FSIZE pwrite raises SIGXFSZ; the limit may be lower here than in the
     * creator. */
    int r = cox_host_memory_check_size(offset + size, true, err);
    for (size_t done = 0; r == 0 && done < size;) {
        ssize_t n =
            pwrite(memory->fd, (const uint8_t *)host + done, size - done, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            r = cox_fail(err, n == 0 || errno == ENOSPC ? COX_NO_SPACE : -errno,
                         "writing bounce memory: %s", n == 0 ? "nothing" : cox_status_text(-errno));
    }
    return r;
}

static int bounce_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                            size_t size, struct cox_error *err)
{
    int r = 0;
    for (size_t done = 0; r == 0 && done < size;) {
        ssize_t n = pread(memory->fd, (uint8_t *)host + done, size - done, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            r = cox_fail(err, n == 0 ? COX_CORRUPT : -errno, "reading bounce memory: %s",
                         n == 0 ? "it has ended" : cox_status_text(-errno));
    }
    return r;
}

const struct cox_domain_functions cox_domain_bounce_functions = {
    .name = "bounce",
    .create = bounce_create,
    .attach = bounce_attach,
    .destroy = bounce_destroy,
    .copy_to = bounce_copy_to,
    .copy_from = bounce_copy_from,
    .commit = cox_domain_host_commit,
    .decommit = cox_domain_host_decommit,
};
