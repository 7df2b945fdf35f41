/*
 * image: memory of the lead that requests name by its handle (cox_executor_share), copied to each node.
 *
 * The lead sends an image by the direct connection, before the first request that names it, on the same
 * connection, so that it is there first. The agent puts the handle of its copy in the place of the
 * lead's in each request: both are 64 bytes. An image that a node has, by its digest, is not sent again.
 *
 * A direct message of kind COX_DIRECT_IMAGE is the 64 bytes of the handle, u64 digest and u64 size,
 * little-endian, and the bytes of the image, or none: the node has them. COX_DIRECT_DROP_IMAGE is the
 * handle.
 *
 * Threads: a store under the caller's lock.
 * Ownership: a store owns its images.
 */
#ifndef COX_NODES_IMAGE_H
#define COX_NODES_IMAGE_H

#include <coxswain/handle.h>
#include "nodes/link/nodes_common.h"

#define COX_DIRECT_IMAGE 3u
#define COX_DIRECT_DROP_IMAGE 4u
#define COX_IMAGE_HEAD_SIZE 80
/* One that is used, one that replaces it, and one that is withdrawn. */
#define COX_IMAGE_COUNT_MAX 8

struct cox_image {
    /* the lead's */
    struct cox_handle handle;
    /* the node's: of its copy */
    struct cox_handle local;
    struct cox_exporter *exporter;
    int fd;
    uint64_t size;
    uint64_t digest;
};

struct cox_images {
    struct cox_image images[COX_IMAGE_COUNT_MAX];
    uint32_t count;
};

void cox_image_pack_head(const struct cox_image *image, uint8_t head[COX_IMAGE_HEAD_SIZE]);
/* The agent, when an image has arrived: reads the head, and copies the bytes, if there are any; without
 * a lock, since both may take a while. Otherwise fd is -1. Returns 0; COX_CORRUPT; COX_NO_SPACE; -errno. */
int cox_image_read(struct cox_image *ret_image, const uint8_t *bytes, size_t size,
                   struct cox_error *err);
/* Gives it a handle. control_socket: of the ranks here; NULL: none. Without a lock: it connects there. */
int cox_image_export(struct cox_image *image, const char *control_socket, struct cox_error *err);
void cox_image_close(struct cox_image *image); /* idempotent */

/* An fd of the bytes with this digest, which becomes the caller's; -1: they are not here. */
int cox_images_find(const struct cox_images *images, uint64_t digest, uint64_t size);
/* Takes ownership. */
void cox_images_add(struct cox_images *images, const struct cox_image *image);
/* Requests name it no more; its bytes stay for one that has the same digest, until the next is taken. */
void cox_images_drop(struct cox_images *images, const void *handle);
void cox_images_clear(struct cox_images *images);
/* Puts handles of copies in the place of the lead's. */
void cox_images_translate(const struct cox_images *images, uint8_t *bytes, size_t size);
/* True if bytes contain the handle of an image. */
bool cox_images_named(const struct cox_images *images, const uint8_t *bytes, size_t size);

#endif
