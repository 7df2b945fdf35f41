/* large_payload_bytes: what large_payload_test.c and its worker both know: a quick digest, and
 * bytes that tell where they are from. */
#ifndef COX_TESTS_MULTI_LARGE_PAYLOAD_BYTES_H
#define COX_TESTS_MULTI_LARGE_PAYLOAD_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "channel/base/hash.h"

/* Any byte that is another one, or elsewhere, gives another digest. */
static inline uint64_t payload_digest(const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    uint64_t hash = COX_HASH_START ^ size;
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return cox_hash_bytes(hash, at, size);
}

/* Never 0, and no '\n'. */
static inline uint8_t payload_byte(uint64_t i, uint32_t salt)
{
    return (uint8_t)(33 + (i * 7 + (i >> 12) + (i >> 21) + 13 * salt) % 90);
}

static inline void payload_fill(uint8_t *bytes, size_t size, uint32_t salt)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = payload_byte(i, salt);
}

#endif
