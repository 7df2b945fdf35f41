#include "channel/base/idioms.h"
#include "channel/memory/host_memory.h"
#include "channel/shm/region.h"

#include <coxswain/handle.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#define SEAL_NS_MAX UINT64_C(2000000000)
#define SEAL_RETRY_NS 10000000L
#define IMAGE_SIZE_SEALS ((unsigned)(F_SEAL_SHRINK | F_SEAL_GROW))

/* Another process that has the fd cannot map it for writing. A process forked meanwhile would have
 * the mapping until its exec; also where a filter denies MADV_DONTFORK. */
static int image_close(const struct cox_region *region, int fd)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) < 0)
        return -errno;
    if (madvise(region->base, region->size, MADV_DONTFORK) < 0 && errno != EPERM && errno != ENOSYS)
        return -errno;
    return 0;
}

int cox_region_create_image(struct cox_region *region, const char *label, uint64_t size,
                            int *ret_fd, struct cox_error *err)
{
    struct cox_region made = {0};
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_host_memory_check_size(size, false, err);
    if (r == 0)
        r = cox_region_create_unnamed_unmapped(label, size, IMAGE_SIZE_SEALS, &fd, err);
    if (r == 0)
        r = cox_region_map(&made, fd, size, COX_REGION_WRITE, label, err);
    if (r)
        return r;
    r = image_close(&made, fd);
    if (r) {
        cox_region_detach(&made);
        return cox_fail(err, r, "memory '%s': %s", label, cox_status_text(r));
    }
    *region = made;
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

/* The kernel refuses the seal while anything else refers to a page: it may itself, for a moment,
 * when it moves or reclaims pages, and a processor that is busy makes the moment long. */
static int image_add_seals(int fd)
{
    const uint64_t deadline_ns = cox_now_ns() + SEAL_NS_MAX;
    while (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) < 0) {
        if (errno != EBUSY)
            return -errno;
        if (cox_now_ns() >= deadline_ns)
            return COX_BUSY;
        nanosleep(&(struct timespec){.tv_nsec = SEAL_RETRY_NS}, NULL);
    }
    return 0;
}

int cox_region_seal_image(struct cox_region *region, const char *label, int *fd,
                          struct cox_error *err)
{
    int reader = -1;
    cox_region_detach(region);
    int r = image_add_seals(*fd);
    if (r)
        return cox_fail(err, r, "memory '%s' cannot be sealed: %s%s", label, cox_status_text(r),
                        r == COX_BUSY ? ": something has it mapped for writing, or uses its pages"
                                      : "");
    r = cox_region_open_reader(*fd, label, &reader, err);
    if (r)
        return r;
    cox_close_fd(fd);
    *fd = reader;
    return 0;
}
