#include "image.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <coxswain/handle.h>

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define LABEL "cox_weights"

void cox_image_close(struct cox_image *image)
{
    if (image->exporter)
        cox_exporter_put(image->exporter, &image->local);
    image->exporter = cox_exporter_free(image->exporter);
    cox_close_fd(&image->fd);
}

void cox_image_pack_head(const struct cox_image *image, uint8_t head[COX_IMAGE_HEAD_SIZE])
{
    memcpy(head, image->handle.bytes, sizeof image->handle.bytes);
    cox_le64_put(head + 64, image->digest);
    cox_le64_put(head + 72, image->size);
}

/* Copies bytes into memory that nobody can write any more. */
static int image_fill(struct cox_image *image, const uint8_t *bytes, struct cox_error *err)
{
    struct cox_region region = {0};
    int r = cox_region_create_image(&region, LABEL, image->size, &image->fd, err);
    if (r)
        return r;
    memcpy(region.base, bytes, image->size);
    return cox_region_seal_image(&region, LABEL, &image->fd, err);
}

int cox_image_export(struct cox_image *image, const char *control_socket, struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = control_socket};
    int r = cox_exporter_new(&options, &image->exporter, err);
    return r ? r : cox_exporter_export(image->exporter, image->fd, 0, 0, &image->local, err);
}

static void images_remove(struct cox_images *images, uint32_t index)
{
    cox_image_close(&images->images[index]);
    images->images[index] = images->images[--images->count];
}

int cox_image_read(struct cox_image *ret_image, const uint8_t *bytes, size_t size,
                   struct cox_error *err)
{
    struct cox_image image = {.fd = -1};
    if (size < COX_IMAGE_HEAD_SIZE)
        return cox_fail(err, COX_CORRUPT, "an image of %zu bytes", size);
    memcpy(image.handle.bytes, bytes, sizeof image.handle.bytes);
    image.digest = cox_le64_get(bytes + 64);
    image.size = cox_le64_get(bytes + 72);
    bytes += COX_IMAGE_HEAD_SIZE;
    size -= COX_IMAGE_HEAD_SIZE;
    if (size && size != image.size)
        return cox_fail(err, COX_CORRUPT, "an image of %" PRIu64 " bytes comes with %zu",
                        image.size, size);
    int r = size ? image_fill(&image, bytes, err) : 0;
    if (r)
        cox_image_close(&image);
    else
        *ret_image = image;
    return r;
}

int cox_images_find(const struct cox_images *images, uint64_t digest, uint64_t size)
{
    for (uint32_t i = 0; i < images->count; i++)
        if (images->images[i].digest == digest && images->images[i].size == size)
            return fcntl(images->images[i].fd, F_DUPFD_CLOEXEC, 3);
    return -1;
}

void cox_images_add(struct cox_images *images, const struct cox_image *image)
{
    /* Those that no request names any more make room for it. */
    for (uint32_t i = images->count; i-- > 0;)
        if (!images->images[i].exporter)
            images_remove(images, i);
    if (images->count == COX_IMAGE_COUNT_MAX)
        images_remove(images, 0);
    images->images[images->count++] = *image;
}

void cox_images_drop(struct cox_images *images, const void *handle)
{
    for (uint32_t i = 0; i < images->count; i++) {
        struct cox_image *image = &images->images[i];
        if (!image->exporter || memcmp(&image->handle, handle, sizeof image->handle) != 0)
            continue;
        cox_exporter_put(image->exporter, &image->local);
        image->exporter = cox_exporter_free(image->exporter);
    }
}

void cox_images_clear(struct cox_images *images)
{
    while (images->count)
        images_remove(images, images->count - 1);
}

static uint8_t *find(uint8_t *bytes, size_t size, const struct cox_handle *handle)
{
    return size < sizeof *handle ? NULL : memmem(bytes, size, handle, sizeof *handle);
}

void cox_images_translate(const struct cox_images *images, uint8_t *bytes, size_t size)
{
    for (uint32_t i = 0; i < images->count; i++) {
        const struct cox_image *image = &images->images[i];
        uint8_t *at = image->exporter ? find(bytes, size, &image->handle) : NULL;
        if (at)
            memcpy(at, image->local.bytes, sizeof image->local.bytes);
    }
}

bool cox_images_named(const struct cox_images *images, const uint8_t *bytes, size_t size)
{
    for (uint32_t i = 0; i < images->count; i++)
        if (find((uint8_t *)(uintptr_t)bytes, size, &images->images[i].handle))
            return true;
    return false;
}
