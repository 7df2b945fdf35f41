/* region: what the library has beyond the part of handle.h on regions. Its contract is the same,
 * and regions may have names: an object that was created keeps its name until it is unlinked, also
 * if the process dies. Mappings outlive the name. */
#ifndef COX_CHANNEL_REGION_H
#define COX_CHANNEL_REGION_H

#include <coxswain/handle.h>
#include <sys/uio.h>

/* Creates the object exclusively, with mode 0600 whatever the umask. Every byte is zero, and its
 * memory is reserved: so a full tmpfs is an error now instead of a SIGBUS later. On failure nothing
 * is left.
 * Returns
 *   0
 *   COX_TAKEN: the name exists
 *   COX_NO_SPACE: err has the needed and the free size
 *   COX_INVALID: the name
 *   -errno
 */
int cox_region_create(struct cox_region *region, const char *name, uint64_t size,
                      struct cox_error *err);
/* Maps a whole existing object, which must have at least size_min bytes.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_DENIED: another owner, mode or type, a symlink, or a second hard link; err says which
 *   COX_CORRUPT: too small
 *   -errno
 */
int cox_region_attach(struct cox_region *region, const char *name, uint64_t size_min,
                      enum cox_region_access access, struct cox_error *err);
/* Opens the object without mapping it, after the same checks. Returns as cox_region_attach. */
int cox_region_open(const char *name, enum cox_region_access access, int *ret_fd,
                    struct cox_error *err);

/* Returns 0, also when the name is already gone, or -errno. */
int cox_region_unlink(const char *name);

/* The checks of attach, for fds that were received in another way. */
int cox_region_check_fd(int fd, const char *name, struct cox_error *err);
/* Maps the object behind fd, which stays the caller's. */
int cox_region_map(struct cox_region *region, int fd, uint64_t size, enum cox_region_access access,
                   const char *name, struct cox_error *err);
/* From now on this process only reads through its mapping. Returns 0 or -errno. */
int cox_region_protect(const struct cox_region *region);
/* Maps size bytes from offset on, a multiple of the page size. */
int cox_region_map_part(struct cox_region *region, int fd, uint64_t offset, uint64_t size,
                        enum cox_region_access access, const char *name, struct cox_error *err);
/* Reserves size bytes for fd.
 * Returns
 *   0
 *   COX_NO_SPACE: err has the needed and the free size
 *   -errno
 */
int cox_region_reserve(int fd, uint64_t size, const char *name, struct cox_error *err);
/* The same for a part of an object that already has that size. */
int cox_region_reserve_part(int fd, uint64_t offset, uint64_t size, const char *name,
                            struct cox_error *err);

/* Opens the object behind fd again, for reading only: *ret_fd does not allow writable mappings.
 * label is used in err only. */
int cox_region_open_reader(int fd, const char *label, int *ret_fd, struct cox_error *err);
/* Create an object of that size without reserving or mapping it: the kernel allocates each page
 * when it is touched, unless it was reserved before. The first function makes a named object, the
 * second a memfd with these seals, to which more can be added unless F_SEAL_SEAL is one. The caller
 * owns *ret_fd, which is open for reading and writing.
 * Returns as cox_region_create and cox_region_create_unnamed. */
int cox_region_create_sparse(const char *name, uint64_t size, int *ret_fd, struct cox_error *err);
int cox_region_create_unnamed_sparse(const char *label, uint64_t size, unsigned seals, int *ret_fd,
                                     struct cox_error *err);
/* Creates a memfd of `size` bytes with these parts, one after the other, which no process can
 * change: written by calls, without the faults and the cleared pages of a mapping. Not mapped; the
 * caller owns *ret_fd, which is open for reading only: before Linux 6.7 no other fd of it can be
 * mapped.
 * Returns as cox_region_create_unnamed. */
int cox_region_create_unnamed_filled(const char *label, const struct iovec *parts, uint64_t size,
                                     int *ret_fd, struct cox_error *err);
/* Writes to a memfd of cox_region_create_unnamed_sparse, in calls that neither clear nor fault
 * pages. Returns
 *   0
 *   COX_NO_SPACE
 *   -errno
 */
int cox_region_fill(int fd, uint64_t offset, const void *bytes, uint64_t size, const char *label,
                    struct cox_error *err);
/* Creates a memfd as cox_region_create_unnamed does, reserved but not mapped. More seals can be
 * added to it. */
int cox_region_create_unnamed_unmapped(const char *label, uint64_t size, unsigned seals,
                                       int *ret_fd, struct cox_error *err);
/* Maps the object behind fd in place of the present one, at the same address, in one step. Both
 * have the same size.
 * Returns
 *   0
 *   -errno: nothing has changed
 */
int cox_region_replace(struct cox_region *region, int fd);
/* For the creator: replaces the mapped object by a new one, all zero, which gets the same name,
 * whether or not the name still exists.
 * Returns
 *   as cox_region_create
 *   -errno: the old object is still mapped, emptied, and the name does not exist; try again
 */
int cox_region_renew(struct cox_region *region, const char *name, struct cox_error *err);

/* Free space for named regions (/dev/shm); UINT64_MAX: no limit. */
struct cox_region_space {
    uint64_t bytes;
    uint64_t files;
    /* largest region (ulimit -f); a larger one ends the process with SIGXFSZ */
    uint64_t region;
};
/* region is filled also if there is no /dev/shm, because the limit applies to unnamed memory too.
 * Returns
 *   0
 *   -errno
 */
int cox_region_space(struct cox_region_space *ret_space);

/* From now on this process maps each object only once: an attach returns the existing mapping,
 * after all checks, and the last detach unmaps it. For tests whose ranks are threads:
 * ThreadSanitizer identifies memory by its address, and misses races between two mappings of one
 * file. A mapping that was attached with READ may then be writable. */
void cox_region_share_mappings(bool share);

#endif
