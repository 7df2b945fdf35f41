/* domain_host: a sealed memfd that every process maps. */
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include "channel/shm/region.h"
#include "domain_table.h"

#ifndef F_SEAL_FUTURE_WRITE /* Linux 5.1 */
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
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

/* ---- checks, for bounce memory too ---- */

/* The value of a line of /proc/meminfo, in bytes. */
static uint64_t meminfo_value(const char *text, const char *name)
{
    const char *line = strstr(text, name);
    return line ? strtoull(line + strlen(name), NULL, 10) * 1024 : 0;
}

/* Memory that can be allocated without the OOM killer, by the kernel's estimate; UINT64_MAX:
 * unknown. */
static int available(uint64_t *ret_size, struct cox_error *err)
{
    char text[4096];
    _cox_cleanup_(cox_close_fd) int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == EACCES)) {
        *ret_size = UINT64_MAX;
        return 0;
    }
    ssize_t n = -1;
    while (fd >= 0 && (n = read(fd, text, sizeof text - 1)) < 0 && errno == EINTR)
        ;
    if (n < 0)
        return cox_fail(err, -errno, "/proc/meminfo: %s", cox_status_text(-errno));
    text[n] = '\0';
    uint64_t size = meminfo_value(text, "MemAvailable:");
    *ret_size = size ? size + meminfo_value(text, "SwapFree:") : UINT64_MAX;
    return 0;
}

int cox_domain_check_host_free(uint64_t size, struct cox_error *err)
{
    struct sysinfo info;
    uint64_t present;
    /* Fast path: /proc/meminfo is slow to read. */
    if (sysinfo(&info) == 0 && size < (uint64_t)info.freeram * info.mem_unit / 2)
        return 0;
    int r = available(&present, err);
    if (r == 0 && size > present)
        r = cox_fail(err, COX_NO_SPACE,
                     "%" PRIu64 " bytes of memory are needed, %" PRIu64 " are available", size,
                     present);
    return r;
}

int cox_domain_check_host_size(uint64_t size, bool on_demand, struct cox_error *err)
{
    struct rlimit limit;
    struct sysinfo info;
    if (size == 0)
        return cox_fail(err, COX_INVALID, "memory of 0 bytes");
    if (size > INT64_MAX)
        return cox_fail(err, COX_NO_SPACE, "%" PRIu64 " bytes of memory are needed", size);
    if (sysinfo(&info) == 0) {
        uint64_t present = ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
        if (size > present)
            return cox_fail(err, COX_NO_SPACE,
                            "%" PRIu64 " bytes of memory are needed, this machine has %" PRIu64,
                            size, present);
    }
    /* Checked in advance: SIGXFSZ would kill the process. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        size > limit.rlim_cur)
        return cox_fail(err, COX_NO_SPACE,
                        "%" PRIu64 " bytes of memory are needed, a file may have %ju (ulimit -f)",
                        size, (uintmax_t)limit.rlim_cur);
    return on_demand ? 0 : cox_domain_check_host_free(size, err);
}

int cox_domain_check_host_fd(int fd, uint64_t size, bool writable, struct cox_error *err)
{
    struct stat st;
    struct statfs fs;
    if (size == 0)
        return cox_fail(err, COX_INVALID, "memory of 0 bytes");
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "fd %d: %s", fd, cox_status_text(-errno));
    if (!S_ISREG(st.st_mode))
        return cox_fail(err, COX_DENIED, "fd %d is no memory", fd);
    if (st.st_uid != geteuid())
        return cox_fail(err, COX_DENIED, "memory of user %u, expected %u", st.st_uid, geteuid());
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return cox_fail(err, errno == EINVAL ? COX_DENIED : -errno,
                        "memory that cannot be sealed: %s", cox_status_text(-errno));
    /* Access beyond the end of a truncated file raises SIGBUS. */
    if (((unsigned)seals & SEALS) != SEALS)
        return cox_fail(err, COX_DENIED, "memory has the seals %#x, expected %#x among them",
                        (unsigned)seals, SEALS);
    /* A hole in huge pages also raises SIGBUS if no huge page is left to fill it. */
    if (fstatfs(fd, &fs) == 0 && fs.f_type != TMPFS_MAGIC)
        return cox_fail(err, COX_DENIED, "memory on pages of %ju bytes, expected the usual ones",
                        (uintmax_t)fs.f_bsize);
    /* After the seals: before them the file could still be truncated. */
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "fd %d: %s", fd, cox_status_text(-errno));
    if (st.st_size < 0 || (uint64_t)st.st_size < size)
        return cox_fail(err, COX_CORRUPT, "memory of %jd bytes, expected %" PRIu64,
                        (intmax_t)st.st_size, size);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return cox_fail(err, -errno, "fd %d: %s", fd, cox_status_text(-errno));
    if (writable &&
        ((flags & O_ACCMODE) != O_RDWR || (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))))
        return cox_fail(err, COX_DENIED, "memory is to be written and may be read only");
    return 0;
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
    int r = cox_domain_check_host_size(size, on_demand, err);
    if (r)
        return r;
    _cox_cleanup_(host_drop) struct host_memory *host = host_alloc(err);
    if (!host)
        return -ENOMEM;
    /* Not on huge pages: see cox_domain_check_host_fd. */
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
    int r = cox_domain_check_host_fd(fd, size, writable, err);
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
    int r = cox_domain_check_host_free(size, err), e;
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
