/*
 * image: memory without a name that its creator fills and then seals. Afterwards no process can
 * change it, not even the creator.
 *
 * Usable without a group.
 *
 * Threads: one at a time per struct.
 * Ownership: the caller owns struct cox_region and the fd; cox_region_detach unmaps it.
 * Blocks: nothing.
 * If the process dies: the kernel frees an image with its last fd and mapping.
 */
#ifndef COX_CHANNEL_IMAGE_H
#define COX_CHANNEL_IMAGE_H

#include "../shm/region.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Creates an image. Every byte is zero, and its memory is reserved. Only this mapping can write it;
 * the child of a fork does not get it.
 * Returns
 *   0
 *   COX_INVALID: 0 bytes
 *   COX_NO_SPACE: err has the needed and the free size
 *   -errno
 */
COX_PUBLIC int cox_region_create_image(struct cox_region *region, const char *label, uint64_t size,
                                       int *ret_fd, struct cox_error *err);
/* Unmaps it, also on failure; replaces *fd by an fd that is open for reading only.
 * Returns
 *   0
 *   COX_BUSY: another process has mapped it for writing
 *   -errno
 */
COX_PUBLIC int cox_region_seal_image(struct cox_region *region, const char *label, int *fd,
                                     struct cox_error *err);
/* Maps an image of exactly this size for reading.
 * Returns
 *   0
 *   COX_DENIED: the object is not memory, is another user's, or is not sealed
 *   COX_CORRUPT: the object has another size
 *   -errno
 */
COX_PUBLIC int cox_region_attach_image(struct cox_region *region, int fd, const char *label,
                                       uint64_t size, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
