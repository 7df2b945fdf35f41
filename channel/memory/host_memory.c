#include "host_memory.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

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

#define SEALS ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))

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
    const int r = (int)cox_small_file_read("/proc/meminfo", text, sizeof text);
    if (r == -ENOENT || r == -EACCES) {
        *ret_size = UINT64_MAX;
        return 0;
    }
    if (r < 0)
        return cox_fail(err, r, "/proc/meminfo: %s", cox_status_text(r));
    uint64_t size = meminfo_value(text, "MemAvailable:");
    *ret_size = size ? size + meminfo_value(text, "SwapFree:") : UINT64_MAX;
    return 0;
}

int cox_host_memory_check_free(uint64_t size, struct cox_error *err)
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

int cox_host_memory_check_size(uint64_t size, bool on_demand, struct cox_error *err)
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
    return on_demand ? 0 : cox_host_memory_check_free(size, err);
}

int cox_host_memory_check_fd(int fd, uint64_t size, bool writable, struct cox_error *err)
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
