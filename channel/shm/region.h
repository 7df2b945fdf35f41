/*
 * region: one shared memory object, named or not, mapped.
 *
 * Threads: one at a time per struct. Access to the mapped bytes follows the rules of their layout.
 * Ownership: the caller owns struct cox_region; detach unmaps and closes. unlink removes the name,
 *   mappings stay.
 * Blocks: nothing.
 * If the process dies: an object that was created keeps its name until it is unlinked.
 *
 * Usable alone: nothing here knows of groups.
 */
#ifndef COX_CHANNEL_REGION_H
#define COX_CHANNEL_REGION_H

#include "../base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_region {
    /* page aligned; NULL: detached */
    void *base;
    uint64_t size;
};

enum cox_region_access {
    COX_REGION_READ,
    COX_REGION_WRITE,
};

/* Creates the object exclusively, with mode 0600 whatever the umask, every byte reserved and zero:
 * a full tmpfs is an error now instead of a SIGBUS later. On failure nothing is left.
 * Returns
 *   0
 *   COX_TAKEN: exists
 *   COX_NO_SPACE: err says what was needed and what was free
 *   COX_INVALID: the name
 *   -errno
 */
COX_PUBLIC int cox_region_create(struct cox_region *region, const char *name, uint64_t size,
                                 struct cox_error *err);
/* Maps a whole existing object, which must have at least size_min bytes.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_DENIED: another owner, mode or type, a symlink, or a second hard link; err says which
 *   COX_CORRUPT: too small
 *   -errno
 */
COX_PUBLIC int cox_region_attach(struct cox_region *region, const char *name, uint64_t size_min,
                                 enum cox_region_access access, struct cox_error *err);
#ifdef COX_INTERNAL
/* Opens without mapping, after the same checks. Same codes. */
int cox_region_open(const char *name, enum cox_region_access access, int *ret_fd,
                    struct cox_error *err);
#endif
/* The same for an fd, which stays the caller's. name is for err; the object need not have one.
 * Returns as cox_region_attach. */
COX_PUBLIC int cox_region_attach_fd(struct cox_region *region, int fd, const char *name,
                                    uint64_t size_min, enum cox_region_access access,
                                    struct cox_error *err);
COX_PUBLIC void cox_region_detach(struct cox_region *region); /* idempotent */
/* Returns 0, also when the name is already gone, or -errno. */
COX_PUBLIC int cox_region_unlink(const char *name);

#ifdef COX_INTERNAL
/* The checks of attach, for fds that come another way. */
int cox_region_check_fd(int fd, const char *name, struct cox_error *err);
/* Maps the object behind fd, which stays the caller's. */
int cox_region_map(struct cox_region *region, int fd, uint64_t size, enum cox_region_access access,
                   const char *name, struct cox_error *err);
/* The same for a part of it, from offset on, which is a multiple of the page size. */
int cox_region_map_part(struct cox_region *region, int fd, uint64_t offset, uint64_t size,
                        enum cox_region_access access, const char *name, struct cox_error *err);
/* Reserves size bytes for fd.
 * Returns
 *   0
 *   COX_NO_SPACE: err has both numbers
 *   -errno
 */
int cox_region_reserve(int fd, uint64_t size, const char *name, struct cox_error *err);
/* The same for a part of what is as large as that already. */
int cox_region_reserve_part(int fd, uint64_t offset, uint64_t size, const char *name,
                            struct cox_error *err);
#endif

/* An object without a name: a memfd, mode 0600, every byte reserved and zero, mapped for writing.
 * seals: F_SEAL_ bits that are added once it is mapped. huge: on huge pages if any are free; the
 * size is then rounded up. label is for err. *ret_fd is open for reading and writing, and the
 * caller's.
 * Returns
 *   0
 *   COX_NO_SPACE
 *   -errno
 */
COX_PUBLIC int cox_region_create_unnamed(struct cox_region *region, const char *label,
                                         uint64_t size, unsigned seals, bool huge, int *ret_fd,
                                         struct cox_error *err);
/* An image: memory without a name that its creator fills and that no process can change afterwards,
 * the creator included. The kernel frees it with its last fd and mapping.
 * create: as create_unnamed. The mapping is the only way to write it, and a fork's child does not
 * have it.
 * seal: unmaps, also on failure; *fd becomes one that is open for reading only.
 * attach: maps for reading an image of exactly this size.
 * Returns
 *   0
 *   COX_BUSY: seal: another process mapped it for writing
 *   COX_DENIED: attach: not memory, another user's, or not sealed
 *   COX_CORRUPT: attach: another size
 *   -errno
 */
COX_PUBLIC int cox_region_create_image(struct cox_region *region, const char *label, uint64_t size,
                                       int *ret_fd, struct cox_error *err);
COX_PUBLIC int cox_region_seal_image(struct cox_region *region, const char *label, int *fd,
                                     struct cox_error *err);
COX_PUBLIC int cox_region_attach_image(struct cox_region *region, int fd, const char *label,
                                       uint64_t size, struct cox_error *err);
#ifdef COX_INTERNAL
/* The same object, open for reading only: what has no right to write cannot be mapped for it. label
 * is for err. */
int cox_region_open_reader(int fd, const char *label, int *ret_fd, struct cox_error *err);
/* Of that size and with nothing in it, not mapped: what is touched takes memory then, unless it was
 * reserved before. The first has a name, the second is a memfd with these seals. *ret_fd is open
 * for reading and writing, the caller's. Returns as the functions above. */
int cox_region_create_sparse(const char *name, uint64_t size, int *ret_fd, struct cox_error *err);
int cox_region_create_unnamed_sparse(const char *label, uint64_t size, unsigned seals, int *ret_fd,
                                     struct cox_error *err);
/* A memfd as cox_region_create_unnamed makes, reserved and not mapped, to which more seals can be
 * added. */
int cox_region_create_unnamed_unmapped(const char *label, uint64_t size, unsigned seals,
                                       int *ret_fd, struct cox_error *err);
/* The object behind fd takes the place of the mapped one, at the same address, in one step; same
 * size.
 * Returns
 *   0
 *   -errno: nothing has changed
 */
int cox_region_replace(struct cox_region *region, int fd);
/* Creator: another object, all zero, takes the place of the mapped one and gets its name, whether
 * or not that still stands.
 * Returns
 *   what create returns
 *   -errno: the old one is mapped, emptied, and there is no name; try again
 */
int cox_region_renew(struct cox_region *region, const char *name, struct cox_error *err);
#endif

/* Free space where named regions live; UINT64_MAX: no limit. */
struct cox_region_space {
    uint64_t bytes;
    uint64_t files;
    /* largest region (ulimit -f); one byte more, and SIGXFSZ ends the process */
    uint64_t region;
};
#ifdef COX_INTERNAL
/* Returns
 *   0
 *   -errno
 *   region is filled also where there is no /dev/shm, since memory without names has that limit,
 *     too
 */
int cox_region_space(struct cox_region_space *ret_space);
#endif

#if COX_TESTING
#ifdef COX_INTERNAL
/* From now on an object that this process has mapped already is not mapped again: an attach returns
 * that mapping, after all the checks, and the last detach unmaps it. For tests whose ranks are
 * threads: ThreadSanitizer knows memory by its address and sees no race between two mappings of one
 * file. Write access stays possible where only READ was asked for. */
void cox_region_share_mappings(bool share);
#endif
#endif

#ifdef __cplusplus
}
#endif

#endif
