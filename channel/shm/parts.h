/*
 * parts: bytes that lie in several places. Header only.
 *
 * Threads: any. Blocks: nothing. If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_PARTS_H
#define COX_CHANNEL_PARTS_H

#include "channel/base/copy.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Copies parts of `size` bytes together to `to`, one after the other. A part may overlap its place.
 */
static inline void cox_parts_join(uint8_t *to, const struct iovec *parts, size_t size)
{
    for (const uint8_t *end = to + size; to < end; to += parts++->iov_len)
        if (parts->iov_len > 0 && parts->iov_base != to)
            cox_copy(to, parts->iov_base, parts->iov_len);
}

#endif
